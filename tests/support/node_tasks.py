"""What ranks do on the two nodes of the tests. dure and torch are imported only where they are needed."""

import os
import signal
import socket
import time
from pathlib import Path


def rank():
    return int(os.environ["RANK"])


def look_around():
    """What a rank sees of its node, and what its node's other ranks left in /dev/shm."""
    import torch
    import torch.distributed as dist

    import dure

    with dure.start() as team:
        if team.topology.is_node_leader:
            Path("/dev/shm/mine").write_text(socket.gethostname())
        total = torch.tensor([float(team.rank)])
        dist.all_reduce(total)
        return {
            "world": team.topology,
            "sum": total.item(),
            "host": socket.gethostname(),
            "resolved": [socket.gethostbyname(name) for name in ("node0", "node1")],
            "shm": {path.name: path.read_text() for path in Path("/dev/shm").iterdir()},
            "interface": os.environ["GLOO_SOCKET_IFNAME"],
            "threads": torch.get_num_threads(),
        }


def raise_on(failing, folder):
    note(folder)
    if rank() == failing:
        raise ValueError("the cause")
    time.sleep(600)


def kill_self_on(failing, folder):
    note(folder)
    if rank() == failing:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def wait_for_ever(folder):
    note(folder)
    time.sleep(600)


def send_one_way(nbytes):
    """Node 0 sends, node 1 receives; the receiver's seconds."""
    address = (os.environ["MASTER_ADDR"], 30000)
    if rank() == 0:
        with socket.create_server(address) as listener:
            listener.settimeout(240)
            connection = listener.accept()[0]
        with connection:
            connection.settimeout(240)
            assert connection.recv(1)
            connection.sendall(bytes(nbytes))
        return None
    with connect(address) as connection:
        # The other one sends when it is told to: what came before the clock ran would seem to come too fast.
        began = time.perf_counter()
        connection.sendall(b"!")
        left = nbytes
        buffer = bytearray(1 << 20)
        while left:
            left -= connection.recv_into(buffer)
        return time.perf_counter() - began


def connect(address):
    deadline = time.monotonic() + 240
    while True:
        try:
            return socket.create_connection(address, 240)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def note(folder):
    """Say which process is which rank."""
    hidden = Path(folder) / f".{rank()}"
    hidden.write_text(str(os.getpid()))
    hidden.rename(Path(folder) / f"pid-{rank()}")

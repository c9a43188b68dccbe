"""What a rank does in these tests: say who it is, and meet the others where the world says."""

import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Callable

from dure.base.errors import UsageError
from dure.comm.topology import Topology, read_topology

DEADLINE_SECONDS = 200.0


def retry(action: Callable[[], socket.socket]) -> socket.socket:
    """Rank 0 may be the last to start: try until the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            return action()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def meet(topology: Topology) -> list[int]:
    """Rank 0 learns who came; the others learn that it heard them."""
    address = (topology.leader_host, topology.leader_port)
    if not topology.is_leader:
        with retry(lambda: socket.create_connection(address, timeout=DEADLINE_SECONDS)) as line:
            line.sendall(bytes([topology.rank]))
            return [line.recv(1)[0]]
    heard = []
    with socket.create_server(address) as server:
        server.settimeout(DEADLINE_SECONDS)
        for _ in range(topology.size - 1):
            line, _ = server.accept()
            with line:
                line.settimeout(DEADLINE_SECONDS)
                heard.append(line.recv(1)[0])
                line.sendall(bytes([topology.rank]))
    return sorted(heard)


def main() -> None:
    try:
        topology = read_topology(os.environ)
    except UsageError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    met = meet(topology) if "meet" in sys.argv else []
    answer = dataclasses.asdict(topology) | {
        "met": met,
        "host": socket.gethostname(),
        "torch": "torch" in sys.modules,
    }
    # One write, or the lines of several tasks could mix.
    os.write(1, f"{json.dumps(answer)}\n".encode())


if __name__ == "__main__":
    main()

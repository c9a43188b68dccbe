"""What a rank does in these tests: say who it is, and meet the others where the world says."""

import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Callable

from dure.base.errors import UsageError
from dure.comm.topology import World, read_world

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


def meet(world: World) -> list[int]:
    """Rank 0 learns who came; the others learn that it heard them."""
    address = (world.leader_host, world.leader_port)
    if not world.is_leader:
        with retry(lambda: socket.create_connection(address, timeout=DEADLINE_SECONDS)) as line:
            line.sendall(bytes([world.rank]))
            return [line.recv(1)[0]]
    heard = []
    with socket.create_server(address) as server:
        server.settimeout(DEADLINE_SECONDS)
        for _ in range(world.size - 1):
            line, _ = server.accept()
            with line:
                line.settimeout(DEADLINE_SECONDS)
                heard.append(line.recv(1)[0])
                line.sendall(bytes([world.rank]))
    return sorted(heard)


def main() -> None:
    try:
        world = read_world(os.environ)
    except UsageError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    met = meet(world) if "meet" in sys.argv else []
    answer = dataclasses.asdict(world) | {
        "met": met,
        "host": socket.gethostname(),
        "torch": "torch" in sys.modules,
    }
    # One write, or the lines of several tasks could mix.
    os.write(1, f"{json.dumps(answer)}\n".encode())


if __name__ == "__main__":
    main()

"""One rank of the OpenMPI contender. Runs under mpirun, with whatever Python has mpi4py: no torch, no numpy.

Between questions it sleeps in a socket: an MPI rank that waited in MPI would spin and take the cores that
the other contenders are measured on.
"""

import ctypes
import json
import signal
import socket
import sys
import time

from mpi4py import MPI

PR_SET_PDEATHSIG = 1
CONNECT_SECONDS = 60.0


def main(address: str) -> None:
    """Answer questions of the form `[numel, repeats]` with the seconds of one all-reduce, until asked no more."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a killed mpirun would leave it here
    topology = MPI.COMM_WORLD
    with connect(address) as line, line.makefile("rw") as words:
        words.write(json.dumps(topology.Get_rank()) + "\n")
        words.flush()
        for question in words:
            numel, repeats = json.loads(question)
            words.write(json.dumps(time_all_reduce(topology, numel, repeats)) + "\n")
            words.flush()


def connect(address: str) -> socket.socket:
    """Reach the rank that asks; it may not listen yet."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        line = socket.socket(socket.AF_UNIX)
        try:
            line.connect(address)
            return line
        except OSError:
            line.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def time_all_reduce(topology: "MPI.Intracomm", numel: int, repeats: int) -> float:
    """Seconds of one all-reduce, of the slowest rank."""
    data = [bytearray(4 * numel), numel, MPI.FLOAT]
    topology.Allreduce(MPI.IN_PLACE, data)
    topology.Barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        topology.Allreduce(MPI.IN_PLACE, data)
    seconds: float = topology.allreduce((time.perf_counter() - began) / repeats, MPI.MAX)
    return seconds


if __name__ == "__main__":
    main(sys.argv[1])

"""One rank of the OpenMPI contender. Runs under mpirun, with whatever Python has mpi4py; imports no torch.

Between questions it sleeps in a pipe: an MPI rank that waited in MPI would spin and take the cores that
the other contenders are measured on.
"""

import json
import sys
import time

from mpi4py import MPI


def main(folder: str) -> None:
    """Answer questions of the form `numel repeats` with the seconds of one all-reduce, until `end`."""
    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    while True:
        with open(f"{folder}/ask-{rank}") as line:
            asked = line.readline().split()
        if asked == ["end"]:
            return
        numel, repeats = map(int, asked)
        data = [bytearray(4 * numel), numel, MPI.FLOAT]
        world.Allreduce(MPI.IN_PLACE, data)
        world.Barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            world.Allreduce(MPI.IN_PLACE, data)
        seconds = world.allreduce((time.perf_counter() - began) / repeats, MPI.MAX)
        if rank == 0:
            with open(f"{folder}/answer", "w") as line:
                line.write(json.dumps(seconds) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])

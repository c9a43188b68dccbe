"""Ranks whose processes are killed while a piece of shared memory has a name."""

import contextlib
import os
import resource
import signal
import time
from pathlib import Path

from support.entries import note, rank

SHM = Path("/dev/shm")


def left_by(pid):
    return sorted(path.name for path in SHM.glob(f"torch_{pid}_*"))


def die_sharing_a_tensor():
    """torch makes the file and gives it a length, of which this process is killed, and then takes its name away."""
    import torch

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    torch.ones(1000).share_memory_()


class Deadly:
    """The worker that reads sample 1 dies of sending it."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index == 1:
            time.sleep(4)  # long enough to be seen
            die_sharing_a_tensor()
        return index


def litter(folder, who, lives):
    """Leave a file behind `lives` times, then return what is left of those that the ranks before this one left."""
    from torch.utils.data import DataLoader

    before = [name for path in folder.glob("left-*") for name in left_by(path.read_text())]
    if rank() == 1 and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < lives:
        if who == "rank":
            note(folder, "left-rank")
            die_sharing_a_tensor()
        with contextlib.suppress(RuntimeError):  # torch's word that a worker has died
            for _ in DataLoader(Deadly(), num_workers=1):
                (worker,) = children()
        assert len(left_by(worker)) == 1
        (folder / "left-worker").write_text(str(worker))
        os.kill(os.getpid(), signal.SIGKILL)
    if rank() == 0 and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < lives:
        time.sleep(600)
    return before


def children():
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]

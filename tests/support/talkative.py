"""Data that prints, and that takes its time."""

import sys
import time

from broken import Numbers


class Talks(Numbers):
    """Prints so many bytes with every tenth sample, and waits when the last one comes by."""

    def __init__(self, bytes=0, seconds=0.0):
        super().__init__()
        self.bytes, self.seconds = bytes, seconds

    def __getitem__(self, index):
        if index % 10 == 0:
            print("x" * self.bytes, flush=True)
            print("y" * self.bytes, file=sys.stderr)
        if index == len(self) - 1:
            time.sleep(self.seconds)
        return super().__getitem__(index)

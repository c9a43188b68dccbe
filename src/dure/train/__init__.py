"""One rank's part of `dure train`."""

from dure.train.rank import Run, run_rank

__all__ = ["Run", "run_rank"]

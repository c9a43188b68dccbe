"""Losses and metrics, for other people's tools: one run in each of them, written by rank 0, off the step path.

backend.py      what every logger offers, and the error when its package is missing
files.py        csv, jsonl
tensorboard.py  mlflow.py  wandb.py  trackio.py   one package each
identity.py     the run's id, and the last step that was logged, kept in the run's folder
writer.py       the queue and the thread
"""

from dure.observe.loggers.backend import NAMES, Backend, Row, Run, refuse_missing
from dure.observe.loggers.writer import LogWriter, open_writer

__all__ = ["NAMES", "Backend", "LogWriter", "Row", "Run", "open_writer", "refuse_missing"]

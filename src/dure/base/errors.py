"""The exceptions of `dure`, each with the exit code its command ends with.

DureError                 1   training failed
├── UsageError            2   the command line is wrong
│   └── JobError          2   the job file, or a thing it names, is wrong
│       └── WeightsError  2   a file of weights is damaged, or does not fit the model
├── ModelRefused          2   the model does something that cannot be exact
├── StorageError          1   shared storage refused, is not there, or gave less than it should
├── CheckpointError       1   a checkpoint is damaged, of another job, or of a newer format
├── RankFailed            1   a rank raised, was killed or hung; names the first cause
├── PeerLost              1   this rank waited for others that never came (aftermath, not the cause)
├── NotFinite             1   a loss is NaN or infinite; names step, rank and shard
├── ReplicasDiffer        3   fingerprints that must agree do not
├── ComputedWrongly       3   a rank's gradients are not what others compute from the same; names rank, step, tensor
├── ReceiptWrong          3   a receipt, or what it is compared with, is not what was recorded; names the first place
├── PreflightFailed       4   a node would fail the run; names the nodes and what is wrong with them
├── Resumable            75   stopped early, at a step, and saved: the same command goes on
└── StoppedAtOnce       130   Ctrl-C (130) or SIGTERM (143)
"""

from __future__ import annotations

from dataclasses import dataclass


class DureError(Exception):
    """A failure with a message for people; the command prints it in one line and exits with `exit_code`."""

    exit_code: int = 1


class UsageError(DureError):
    """The command line asks for something that cannot be."""

    exit_code = 2


class JobError(UsageError):
    """The job file is wrong, or a thing that it names is."""


class WeightsError(JobError):
    """A file of weights is damaged, or does not fit the model."""


class ModelRefused(DureError):
    """The model, data or optimizer does something that cannot be the same bits on every number of ranks."""

    exit_code = 2


class StorageError(DureError):
    """Shared storage refused, is not there, or holds less than it should; names the storage and the file."""


class CheckpointError(DureError):
    """A checkpoint cannot be saved or used; says why."""


class PeerLost(DureError):
    """This rank waited for peers that never came; usually the aftermath of another rank's failure."""


class NotFinite(DureError):
    """A loss is NaN or infinite."""


class ReplicasDiffer(DureError):
    """Replicas that must be the same bits are not."""

    exit_code = 3


class ComputedWrongly(DureError):
    """A rank computed other gradients of a shard than other ranks do, from the same samples and weights."""

    exit_code = 3

    def __init__(self, message: str, rank: int = -1, host: str = "", *, excludes: bool = False) -> None:
        """`rank` of `host` is wrong, where that is known; `excludes`: the run may go on without it."""
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.excludes = excludes


class ReceiptWrong(DureError):
    """A receipt's chain is broken, or a checkpoint, weights or a replay are not what it says."""

    exit_code = 3


class PreflightFailed(DureError):
    """Something that is wrong on a node would make the run fail; names the nodes, and says what to do."""

    exit_code = 4


class Resumable(DureError):
    """The run was asked to stop, finished its step and saved; the same command goes on from there."""

    exit_code = 75


class StoppedAtOnce(DureError):
    """A signal ended the run at once."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Failure:
    """Why a rank failed: ranks report it, agents send it, the leader decides on it, and the command exits with it."""

    message: str
    """One or two sentences for people."""
    rank: int = -1
    """-1: no rank in particular."""
    host: str = ""
    details: str = ""
    """The rank's own traceback, the end of its log, or its stacks when it hung; "" where the message says it all."""
    exit_code: int = 1
    """What the command ends with."""
    may_pass: bool = False
    """Whether trying again may help: the machine failed, not the job."""
    aftermath: bool = False
    """Whether this is only another rank's failure, seen from here."""
    killed: bool = False
    """Whether a signal ended the process: exceptions of other ranks are explained by that, even earlier ones."""
    at_ns: int = 0
    """When it happened: CLOCK_MONOTONIC of its host, never compared with another host's."""
    excludes: bool = False
    """Whether the run may go on without this rank: it computes wrongly."""


class RankFailed(DureError):
    """A run ended by the failure of a rank: the first cause, without the other ranks' aftermath."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.exit_code = failure.exit_code

    @property
    def rank(self) -> int:
        """Of the failure."""
        return self.failure.rank

    @property
    def host(self) -> str:
        """Of the failure."""
        return self.failure.host

    @property
    def details(self) -> str:
        """Of the failure."""
        return self.failure.details

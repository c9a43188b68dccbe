"""The job file: what to train, and where. `load_job` reads one."""

from __future__ import annotations

from dure.config.cluster import Cluster, Mount, Slurm
from dure.config.read import LONGEST_JOB, LoadedJob, all_values, load_job, parse_settings
from dure.config.sections import Checkpoint, Job, ParamGroup, TeamSection, Train

__all__ = [
    "LONGEST_JOB",
    "Checkpoint",
    "Cluster",
    "Job",
    "LoadedJob",
    "Mount",
    "ParamGroup",
    "Slurm",
    "TeamSection",
    "Train",
    "all_values",
    "load_job",
    "parse_settings",
]

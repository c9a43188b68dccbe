"""The job file: what to train, and where. `load_job` reads one."""

from __future__ import annotations

from dure.config.cluster import Cluster, Kubernetes, Mount, Ray, Slurm, Toleration, Volume
from dure.config.read import LONGEST_JOB, LoadedJob, all_values, load_job, parse_settings
from dure.config.sections import Checkpoint, Job, ParamGroup, TeamSection, Train

__all__ = [
    "LONGEST_JOB",
    "Checkpoint",
    "Cluster",
    "Job",
    "Kubernetes",
    "LoadedJob",
    "Mount",
    "ParamGroup",
    "Ray",
    "Slurm",
    "TeamSection",
    "Toleration",
    "Train",
    "Volume",
    "all_values",
    "load_job",
    "parse_settings",
]

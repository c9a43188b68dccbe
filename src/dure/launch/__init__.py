"""Start ranks and watch them. Importing this does not import torch."""

from dure.launch.script import run_script
from dure.launch.team import run_team

__all__ = ["run_script", "run_team"]

"""Start ranks and watch them. Importing this does not import torch."""

from dure.launch.script import run_script
from dure.launch.spec import LaunchSpec
from dure.launch.team import run_team

__all__ = ["LaunchSpec", "run_script", "run_team"]

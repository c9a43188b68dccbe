"""The functions that ranks run are those of the rank tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))

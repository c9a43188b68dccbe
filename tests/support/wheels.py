"""The wheel that users install, built from the project's sources."""

import shutil
import subprocess
import sys
from pathlib import Path

from support.commands import ROOT

_SOURCES = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "src"]
_MADE = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")  # by an editable installation


def build_wheel(folder: Path) -> Path:
    """Build the wheel in `folder`, from a copy: a build writes beside its sources, and takes what is left there."""
    copied = folder / "source"
    copied.mkdir(parents=True)
    for name in _SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copied / name, ignore=_MADE)
        else:
            shutil.copy(source, copied / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(copied)], check=True, timeout=300)
    [wheel] = folder.glob("*.whl")
    return wheel

"""Which test files belong together, and in which order groups are begun, when several workers share the tests."""

import re
from pathlib import PurePosixPath

GROUPS = (
    ("slurm", r"cluster/test_\w*(slurm|srun|s3)\w*\.py"),  # one Slurm, one S3 server
    ("image", r"cluster/test_(image|doctor)\.py"),  # one image
    ("demo", r"ranks/test_(same_bits|one_script_many_launchers|without_sync)\.py"),  # the demo's photos
)
LONGEST_FIRST = (
    "cluster/test_nodes.py", "slurm", "image", "cluster/test_strangers.py", "cluster/", "faults/test_script_end.py",
    "ranks/test_found.py", "faults/test_recovery.py", "ranks/test_loading.py", "ranks/test_resume.py",
    "ranks/test_bench_reduce.py", "faults/", "demo", "ranks/",
)  # fmt: skip
"""Groups, files or folders; whatever is not named here is short."""


def group_of(nodeid):
    """The group of a test; by itself, a file is one."""
    path = PurePosixPath(nodeid.partition("::")[0])
    name = "/".join(path.parts[-2:])
    return next((group for group, files in GROUPS if re.fullmatch(files, name)), name)


def rank_of_group(nodeid):
    """When the group of a test is begun: 0 first."""
    group = group_of(nodeid)
    places = [at for at, name in enumerate(LONGEST_FIRST) if group.startswith(name)]
    return min(places, default=len(LONGEST_FIRST))

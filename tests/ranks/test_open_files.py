"""Files and connections of a run: as many as were computed, and more than a shell's soft limit allows."""

import os
import resource
import shutil
import subprocess
import sys

from support import FOLDER

from dure.base.open_files import _SPARE, needed

JOB = """
name = "counting"
storage = "."

[model]
factory = "counting.py:model"

[data]
factory = "counting.py:samples"
args = { folder = "{storage}/counts" }
global_batch = 16

[train]
optimizer = "SGD"
lr = 0.05
steps = 8

[team]
ranks = 4
shards = 8

[checkpoint]
every_steps = 2
memory_every = 1
"""
SOFT = 32


def test_a_run_raises_the_limit_that_is_too_low_and_opens_no_more_than_was_computed(tmp_path):
    shutil.copy(FOLDER / "counting.py", tmp_path)
    (tmp_path / "counts").mkdir()
    (tmp_path / "job.toml").write_text(JOB)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ran = subprocess.run(
        [sys.executable, "-m", "dure", "train", "job.toml", "--run-dir", "run", "--json"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, hard)),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    counts = [int((tmp_path / "counts" / str(rank)).read_text()) for rank in range(4)]
    assert max(counts) > SOFT, "or the limit has shown nothing"
    assert max(counts) <= needed(4, 4, 1) - _SPARE

"""The same ddp.py under a real srun: the bits of one rank."""

import re
import sys

import pytest
from commands import EXAMPLES, dure


@pytest.mark.timeout(300)
def test_ddp_py_under_srun_on_two_nodes_has_the_bits_of_one_rank(slurm, storage, tmp_path):
    alone = dure("run", EXAMPLES / "ddp.py", "--ranks", 1, "--run-dir", tmp_path / "run", "--", "--data",
                 storage / "training_data" / "train")  # fmt: skip
    (expected,) = re.findall(r"rank 0 of 1: (\w{16})", alone.out)
    ran = slurm.srun([sys.executable, str(storage / "ddp.py")], ntasks=4, nodes=2, deadline_seconds=200)
    assert ran.returncode == 0, ran.stderr
    found = dict(re.findall(r"rank (\d) of 4: (\w{16})", ran.stdout))
    assert found == dict.fromkeys("0123", expected)

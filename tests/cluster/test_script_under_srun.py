"""The same ddp.py under a real srun: the bits of one rank."""

import re
import sys


def test_ddp_py_under_srun_on_two_nodes_has_the_bits_of_one_rank(slurm, storage, script_alone):
    ran = slurm.srun([sys.executable, str(storage / "ddp.py")], ntasks=4, nodes=2, deadline_seconds=500)
    assert ran.returncode == 0, ran.stderr
    found = dict(re.findall(r"rank (\d) of 4: (\w{16})", ran.stdout))
    assert found == dict.fromkeys("0123", script_alone)

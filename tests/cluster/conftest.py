from collections.abc import Iterator

import pytest
from slurm import SlurmCluster, why_not_here


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A real Slurm with two nodes, the same for all tests of the session."""
    reason = why_not_here()
    if reason is not None:
        pytest.skip(f"Slurm: {reason}")
    with SlurmCluster() as cluster:
        yield cluster

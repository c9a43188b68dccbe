import os
from collections.abc import Iterator

import pytest
from slurm import SlurmCluster, why_not_here

from dure.bench import s3_server


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A real Slurm with two nodes, the same for all tests of the session."""
    reason = why_not_here()
    if reason is not None:
        pytest.skip(f"Slurm: {reason}")
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def s3_running() -> Iterator[s3_server.S3Server]:
    """A real S3 server on loopback, the same for all tests of the session."""
    reason = s3_server.why_not_here()
    if reason is not None:
        pytest.skip(f"S3: {reason}")
    with s3_server.S3Server() as server:
        yield server


@pytest.fixture
def s3(s3_running: s3_server.S3Server, monkeypatch: pytest.MonkeyPatch) -> s3_server.S3Server:
    """The S3 server, running and named by the environment."""
    if not s3_running.is_running():
        s3_running.start()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_running.environment().items():
        monkeypatch.setenv(name, value)
    return s3_running

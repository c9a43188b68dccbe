import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.images import why_no_image_here
from support.slurm import SlurmCluster, why_not_here

from dure.image.build import build
from dure.tools.bench import s3_server


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


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of dure and what it requires, built once for all tests of the session."""
    reason = why_no_image_here()
    if reason is not None:
        pytest.skip(f"image: {reason}")
    out = tmp_path_factory.mktemp("image") / "pytorch_squash.sqsh"
    build(out, packages=["dure"], level=1)
    return out

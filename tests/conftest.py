"""What all tests share."""

import pytest


@pytest.fixture(scope="session")
def storage(tmp_path_factory):
    """The demo's shared storage, drawn once for all tests."""
    from dure.demo import prepare

    folder = tmp_path_factory.mktemp("shared")
    prepare(folder, 4)
    return folder

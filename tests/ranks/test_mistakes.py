"""Silent mistakes of stock DDP scripts are named with their place; scripts without them hear nothing."""

import pytest
from support import mistakes

from dure.base.run_folder import RunFolder
from dure.launch import run_team


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mistakes")


@pytest.fixture(scope="module")
def troubles(folder):
    run = RunFolder(folder / "run")
    return run_team("support.mistakes:cases", (folder,), ranks=3, folder=run, hang_seconds=300)


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind, cases in mistakes.MISTAKES.items() for case in cases]
)
def test_a_mistake_is_named_with_its_place(kind, case, troubles, folder):
    assert [rank[case.__name__] for rank in troubles] == [""] * 3
    told = mistakes.said(folder / case.__name__)
    assert [one["kind"] for one in told] == [kind]
    assert told[0]["place"].rpartition(":")[0].endswith("support/mistakes.py")


@pytest.mark.parametrize("case", mistakes.RIGHT)
def test_a_correct_loop_hears_nothing_and_is_watched_to_its_end(case, troubles, folder):
    assert [rank[case.__name__] for rank in troubles] == [""] * 3
    assert mistakes.said(folder / case.__name__) == []

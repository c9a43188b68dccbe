"""The arithmetic fingerprint: measured, kept in a folder of one's own, and believed from nowhere else."""

import json

import pytest
import torch

from dure.base.errors import UsageError
from dure.checkpoint.find import refuse_other_recipe
from dure.proof.arithmetic import arithmetic_fingerprint, differing

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dure" / "arithmetic"


def measured():
    return arithmetic_fingerprint(CPU, [torch.float32])


def test_it_is_measured_once_and_leaves_random_numbers_alone(cache):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = measured()
    assert torch.equal(torch.rand(4), expected)
    (kept,) = cache.iterdir()
    assert cache.stat().st_mode & 0o777 == 0o700
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.unlink()
    assert measured() == first  # computed again: the same bits
    assert "not supported" not in first.values()


def test_a_kept_one_is_used_and_one_that_others_can_write_is_not(cache):
    first = measured()
    (kept,) = cache.iterdir()
    kept.write_text(json.dumps({**first, "mv": "planted"}))
    assert differing(first, measured()) == ["mv"]
    kept.chmod(0o666)
    assert measured() == first
    kept.write_text("{")
    kept.chmod(0o600)
    assert measured() == first
    cache.chmod(0o777)
    kept.write_text(json.dumps({**first, "mv": "planted"}))
    assert measured() == first


def test_other_threads_variables_and_types_are_measured_anew(cache, monkeypatch):
    measured()
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    measured()
    assert len(list(cache.iterdir())) == 2
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        measured()
    finally:
        torch.set_num_threads(threads)
    assert len(list(cache.iterdir())) == 3
    low = arithmetic_fingerprint(CPU, [torch.bfloat16])
    assert all(name.startswith("bfloat16 ") for name in low)


def test_a_state_of_another_arithmetic_is_refused_by_operation():
    before = {"seed": 1, "arithmetic": {"mv": "a", "sum": "b", "exp": "c"}}
    now = {"seed": 1, "arithmetic": {"mv": "x", "sum": "b", "exp": "y"}}
    with pytest.raises(UsageError, match=r'other bits in 2 of 3 operations \(mv, exp\).*"portable"'):
        refuse_other_recipe({"recipe_words": before}, now, "here")
    refuse_other_recipe({"recipe_words": before}, before, "here")
    refuse_other_recipe({"recipe_words": {"seed": 1}}, now, "here")  # of a version that did not measure

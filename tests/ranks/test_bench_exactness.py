"""The bench of exactness measures contenders that train the same, and says where the bar is missed."""

import json

import pytest
import torch

from dure.base.errors import DureError, UsageError
from dure.tools.bench import exactness, exactness_ranks


def test_dure_is_set_against_as_many_plain_passes_in_one_run():
    figures = exactness.bench_exactness(sizes=[1, 2], models=["tiny"], size=exactness.QUICK)
    assert json.loads(json.dumps(figures)) == figures
    alone, both = figures["results"]
    assert (alone["model"], alone["ranks"], both["ranks"], alone["parameters"]) == ("tiny", 1, 2, 808)
    assert set(alone["cpu_ms"]) == {"passes", "whole", "dure"}
    assert set(both["cpu_ms"]) == {"passes", "whole", "dure", "ddp"}
    for one in figures["results"]:
        assert all(milliseconds > 0 for milliseconds in one["cpu_ms"].values())
        assert one["within_bar"] == (one["of_passes"] <= figures["bar"])
    words = exactness.in_words(figures)
    assert "Bar: dure at most 1.10 × passes" in words
    assert words.count("MISSED") == sum(not one["within_bar"] for one in figures["results"])


def test_a_contender_that_trains_something_else_is_not_measured():
    torch.manual_seed(1)
    modules = {name: torch.nn.Linear(2, 2) for name in ("dure", "passes", "whole")}
    for module in modules.values():
        module.load_state_dict(modules["dure"].state_dict())

    def step(name, amount):
        with torch.no_grad():
            modules[name].weight.add_(amount)

    steps = {
        "dure": lambda _: step("dure", 0.1),
        "passes": lambda _: step("passes", 0.2),
        "whole": lambda _: step("whole", 0.1),
    }
    with pytest.raises(DureError, match=r"passes is 1\.0e-01 from dure"):
        exactness_ranks._check_first_step(modules, steps, 1)
    steps["passes"] = lambda _: None
    with pytest.raises(DureError, match="passes has trained nothing"):
        exactness_ranks._check_first_step(modules, steps, 1)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(UsageError, match="no model 'bert'"):
        exactness.bench_exactness(models=["bert"])
    with pytest.raises(UsageError, match="3 ranks cannot be compared"):
        exactness.bench_exactness(sizes=[3])

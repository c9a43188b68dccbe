"""`dure bench backend` measures what it says, with the bars beside the figures."""

import json
import subprocess
import sys

from dure.tools.bench import backend


def test_every_contender_and_size_is_measured_and_the_bars_are_shown(tmp_path):
    command = [sys.executable, "-m", "dure", "bench", "backend", "--ranks=2", "--quick", "--json"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=True)
    figures = json.loads(ran.stdout)
    assert set(figures["contenders"]) == set(backend.CONTENDERS)
    assert all(one["step_ms"] > 0 and one["cpu_s"] > 0 for one in figures["contenders"].values())
    assert [row["mib"] for row in figures["all_reduce"]] == [0.0625, 1.0]
    assert all(row["dure_ms"] > 0 and row["times_gloo"] > 0 for row in figures["all_reduce"])
    words = backend.in_words(figures)
    assert "≤ 0.50" in words
    assert "≤ 0.33" in words
    assert "≥ 10" in words

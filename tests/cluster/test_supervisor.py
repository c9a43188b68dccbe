"""A supervisor of agents on this machine, for which no ssh is needed."""

from support.leftovers import wait_until
from support.nodes_stories import Started, furthest_step, put_job
from support.rays import Here


def test_a_run_that_a_file_asks_to_stop_is_not_started_again(tmp_path):
    job, run = put_job(tmp_path, 5000, 0.01), tmp_path / "run"
    words = ["train", job, "--hosts", "127.0.0.1", "--run-dir", run, "--json"]
    started = Started(Here(), "here", words, tmp_path)
    try:
        wait_until(lambda: run.exists() and furthest_step(run) >= 3, "the first steps", 240)
        (run / "stop").touch()
        assert started.process.wait(240) == 75, started.said
        assert "starts again" not in started.said
        assert "stopped and saved" in started.said
    finally:
        started.end()

"""`dure page`, `dure report` and `--page` as commands."""

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
from support.commands import dure
from support.leftovers import all_gone, wait_until
from support.straggling import JOB

from dure.tools.bench.page import synthetic_run
from page.conftest import serving


def test_the_page_and_the_report_start_without_torch(tmp_path):
    synthetic_run(tmp_path / "run", 50, 2)
    code = (
        "import sys; sys.argv[1:] = ['report', {run!r}, '-o', {out!r}]\n"
        "import dure.page.server\n"
        "from dure.cli import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    ).format(run=str(tmp_path / "run"), out=str(tmp_path / "report.html"))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "False"
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_the_page_takes_the_processor_only_where_ranks_leave_some(tmp_path):
    synthetic_run(tmp_path / "run", 50, 1)
    with serving(tmp_path / "run") as told:
        urllib.request.urlopen(told["url"], timeout=60).close()  # it is up, and ends as it should
        assert os.getpriority(os.PRIO_PROCESS, told["pid"]) >= os.getpriority(os.PRIO_PROCESS, 0) + 9
        assert os.sched_getscheduler(told["pid"]) == os.SCHED_BATCH


def test_what_is_no_run_is_refused_in_one_line(tmp_path):
    for arguments in (("page", tmp_path / "nothing"), ("report", tmp_path / "nothing"), ("page", tmp_path)):
        ended = dure(*arguments, cwd=tmp_path)
        assert ended.code == 2
        assert len(ended.err.splitlines()) == 1, ended.err
    synthetic_run(tmp_path / "run", 5, 1)
    ended = dure("report", tmp_path / "run", "-o", tmp_path / "no" / "folder.html")
    assert (ended.code, "give another file: -o FILE" in ended.err) == (2, True)
    ended = dure("page", tmp_path / "run", "--port", 99999)
    assert (ended.code, "choose another --host or --port" in ended.err) == (2, True)


def test_a_report_of_many_steps_holds_bins_and_stays_small(tmp_path):
    synthetic_run(tmp_path / "run", 150_000, 1)
    assert dure("report", tmp_path / "run", "-o", tmp_path / "report.html").code == 0
    assert (tmp_path / "report.html").stat().st_size < 10_000_000


def test_the_page_of_a_run_ends_with_it_and_can_die_before(tmp_path):
    """`dure train --page`: the run ends as ever, and leaves no process."""
    (tmp_path / "pace").write_text("0")
    (tmp_path / "late.toml").write_text(JOB.format(pace=tmp_path / "pace"))
    command = [sys.executable, "-m", "dure", "train", tmp_path / "late.toml", "--page", "--ranks=1", "--json"]
    with subprocess.Popen(
        [*map(str, command), f"--run-dir={tmp_path / 'run'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    ) as run:

        def page():
            for child in psutil.Process(run.pid).children():
                if "page" in child.cmdline():
                    return child
            return None

        found = wait_until(page, "the page's process", 200)
        os.kill(found.pid, signal.SIGKILL)  # nobody waits for it, and nobody misses it
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
        assert '"weights_sha256"' in out
    all_gone([found])


def test_a_page_that_is_left_alone_ends_with_whoever_started_it(tmp_path):
    synthetic_run(tmp_path / "run", 5, 1)
    code = (
        "import time\nfrom pathlib import Path\nfrom dure.page.child import PageProcess\n"
        f"page = PageProcess(Path({str(tmp_path / 'run')!r}))\nprint(page._process.pid, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        page = psutil.Process(int(parent.stdout.readline()))
        told = parent.stderr.readline()
        assert told.startswith("dure: the page: http://127.0.0.1:"), told
        parent.kill()
    all_gone([page])

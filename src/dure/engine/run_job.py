"""One run of a job on this node: preflight, ranks, display, summary."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.base.files import open_own, write_whole
from dure.base.language import Language, chosen_language
from dure.base.portable import launch_environment
from dure.base.run_folder import RunFolder
from dure.base.say import redacted, say, stdout_trouble
from dure.base.team_key import TeamKey
from dure.config import LoadedJob
from dure.doctor.quick import quick_checks, refuse_bad
from dure.doctor.words import in_one_line
from dure.engine.new_run import default_folder, new_run, write_job
from dure.launch import LaunchSpec, run_team
from dure.launch.lease import Lease
from dure.launch.nodes.join import Joined, Nodes, join
from dure.launch.restart_policy import Restart
from dure.launch.stop import StopSignals
from dure.launch.team import forget_last_run, record_restart
from dure.observe.display import Display
from dure.observe.results import RankResult
from dure.observe.summary import in_words, summarize
from dure.page.child import PageProcess
from dure.page.serve import refuse_without_extra

if TYPE_CHECKING:
    from dure.launch.nodes.messages import Team


@dataclass(frozen=True)
class Start:
    """How a run begins."""

    run_dir: Path | None = None
    fresh: bool = False
    """Whether an earlier run in the folder is moved aside."""
    port: int = 0
    """Of the team on this machine; 0: a free one."""
    page: bool = False
    """Whether a page is served while it runs, by a process of its own."""


@dataclass(frozen=True)
class Admission:
    """What lets a node into a run of several."""

    key: TeamKey
    lease: Lease = field(default_factory=Lease)
    """Ended by a supervisor, where there is one."""
    lock_seconds: float = 0.0
    """How long the leader waits for another launch to let go of the run's folder."""


def run_job(
    loaded: LoadedJob,
    start: Start,
    nodes: Nodes | None,
    admission: Admission | None = None,
    *,
    as_json: bool,
    lang: str | None,
) -> None:
    """Launch a job's ranks, show them, and print what came of it; with `nodes`, this node's part of that."""
    began = time.perf_counter()
    language = chosen_language(lang)
    if start.page:
        refuse_without_extra()
    _preflight(loaded, start, nodes, language)
    page: PageProcess | None = None

    with contextlib.ExitStack() as held:

        def choose_run() -> Path:
            folder = held.enter_context(
                new_run(
                    start.run_dir or default_folder(loaded, several_nodes=nodes is not None),
                    loaded.job.name,
                    goes_on=loaded.job.resumable,
                    fresh=start.fresh,
                    lock_seconds=admission.lock_seconds if admission is not None else 0.0,
                )
            )
            if nodes is not None:  # before any node starts a rank
                forget_last_run(folder, nodes.count * nodes.ranks)
            write_job(folder, loaded)
            if start.page:
                nonlocal page
                page = PageProcess(folder.path)
                held.callback(page.end)
            return folder.path

        if nodes is None:
            folder = RunFolder(choose_run())
            results = _launch(loaded, folder, language, start.port, None)
        else:
            assert admission is not None  # whoever knows of nodes has asked for the key
            stop = held.enter_context(StopSignals(lease=admission.lease))
            joined = held.enter_context(
                join(nodes, admission.key, admission.lease, choose_run, say, stop.check)
            )
            folder = RunFolder(joined.run)
            results = _launch(loaded, folder, language, start.port, joined)
            if not nodes.leads:
                say(
                    f"node {nodes.node} is done; the leader, {nodes.leader}, has the summary: {folder.summary}"
                )
                return
            results = [RankResult.from_json(value) for value in joined.values()]
        _summarize(loaded, folder, results, language, began, as_json=as_json)
        if page is not None and sys.stdin.isatty() and sys.stderr.isatty():
            say("the page stays until Ctrl-C")
            page.wait()


def _summarize(
    loaded: LoadedJob,
    folder: RunFolder,
    results: list[RankResult],
    language: Language,
    began: float,
    *,
    as_json: bool,
) -> None:
    inside = sum(results[0].seconds.values())
    summary = summarize(folder, loaded.job, results, {"launch": time.perf_counter() - began - inside})
    text = json.dumps(summary.as_json())
    try:
        write_whole(folder.summary, text)
    except OSError as error:
        say(f"cannot write {folder.summary}: {error.strerror}")
    print(redacted(text if as_json else in_words(summary, language)))
    if (trouble := stdout_trouble()) is not None and trouble.errno != errno.EPIPE:
        say(f"cannot print the summary: {trouble.strerror}; it is in {folder.summary}")


def _preflight(loaded: LoadedJob, start: Start, nodes: Nodes | None, language: Language) -> None:
    """The quick part of `dure doctor`. Several nodes are refused what one machine is only warned of: there, somebody
    sees it fail, and a team of one node fails alone."""
    findings = quick_checks(
        loaded,
        leader=None if nodes is None else nodes.leader,
        run_folder=start.run_dir or default_folder(loaded, several_nodes=nodes is not None),
    )
    if nodes is not None:
        refuse_bad(findings, language)
    for finding in findings:
        if finding.level == "bad":
            say(in_one_line(finding, language))


def _launch(
    loaded: LoadedJob, folder: RunFolder, language: Language, port: int, joined: Joined | None
) -> list[RankResult]:
    team = loaded.job.team

    def ask_to_stop(signal_name: str) -> None:
        say(f"{signal_name}: stops after this step and saves; once more stops at once")
        os.close(open_own(folder.stop, os.O_WRONLY | os.O_CREAT))

    leads = joined is None or joined.leader is not None
    display = Display(folder, team.ranks * loaded.job.cluster.nodes, language) if leads else None

    def restarted(again: Restart) -> None:
        if display is not None:
            ranks = again.ranks or team.ranks * loaded.job.cluster.nodes
            display.restarted(again.cause, again.without_progress, again.max_restarts, ranks)

    def tick() -> None:
        if display is not None:
            display.tick()
        for news in _drain(joined):
            if isinstance(news, Restart):
                record_restart(folder, news)
                restarted(news)
            elif display is not None:
                display.tell(news)

    def tell_team(formed: Team) -> None:
        if display is not None:
            display.tell(formed.where)

    try:
        spec = LaunchSpec(
            ranks=team.ranks,
            folder=folder,
            environment=launch_environment(team.arithmetic),
            hang_seconds=team.hang_seconds,
            port=port,
            on_tick=tick,
            grace_seconds=0.0,  # a rank has nothing to do after its last word, and takes SIGTERM as a request to save
            max_restarts=team.max_restarts,
            min_ranks=team.min_ranks,
            on_restart=restarted,
            ask_to_stop=ask_to_stop if loaded.job.resumable else None,
            stop_seconds=team.stop_seconds,
            joined=joined,
            on_team=tell_team,
            to_json=_as_json,
            on_said=say if display is None else display.tell,
        )
        arguments = (loaded.to_json(), str(folder.path))
        results: list[Any] = run_team("dure.train:run_rank", arguments, spec, threads=team.threads)
    finally:
        tick()
        if display is not None:
            display.close()
        if leads:
            with contextlib.suppress(OSError):
                folder.stop.unlink(missing_ok=True)
    return results


def launch_ranks(loaded: LoadedJob, folder: RunFolder, language: Language) -> list[RankResult]:
    """Train a job in this folder, on this machine alone, without a summary."""
    folder.create()
    return _launch(loaded, folder, language, 0, None)


def _drain(joined: Joined | None) -> list[str | Restart]:
    news: list[str | Restart] = []
    while joined is not None and not joined.news.empty():
        news.append(joined.news.get_nowait())
    return news


def _as_json(value: object) -> Any:
    assert isinstance(value, RankResult)
    return value.as_json()

"""One run of a job as a command: its folder, its nodes, its ranks, what is shown and what is printed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dure.base.errors import UsageError
from dure.base.files import open_own, read_at_most, write_whole
from dure.base.in_image import digest_inside
from dure.base.language import Language, chosen_language
from dure.base.run_folder import RunFolder
from dure.base.say import redacted, say, stdout_trouble
from dure.base.team_key import TeamKey
from dure.config import Cluster, LoadedJob
from dure.doctor.quick import quick_checks, refuse_bad
from dure.doctor.words import in_one_line
from dure.image.enter import enter
from dure.launch import LaunchSpec, run_script, run_team
from dure.launch.lease import Lease
from dure.launch.nodes.address import split_leader
from dure.launch.nodes.join import Joined, Nodes, join
from dure.launch.nodes.key_by_hand import wait_for_key_file
from dure.launch.restart_policy import Restart
from dure.launch.run_lock import RunLock
from dure.launch.script import say_restart
from dure.launch.stop import StopSignals
from dure.launch.team import forget_last_run, record_restart
from dure.observe.display import Display
from dure.observe.results import RankResult
from dure.observe.summary import in_words, summarize

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
    _preflight(loaded, start, nodes, language)

    with contextlib.ExitStack() as held:

        def choose_run() -> Path:
            folder = held.enter_context(
                new_run(
                    start.run_dir or _default_folder(loaded, nodes),
                    loaded.job.name,
                    goes_on=_resumable(loaded),
                    fresh=start.fresh,
                    lock_seconds=admission.lock_seconds if admission is not None else 0.0,
                )
            )
            if nodes is not None:  # before any node starts a rank
                forget_last_run(folder, nodes.count * nodes.ranks)
            _write_job(folder, loaded)
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


def _write_job(folder: RunFolder, loaded: LoadedJob) -> None:
    """Keep the job as it runs; a run that goes on may find it there already, on a disk that is full by now."""
    text = loaded.to_json().encode()
    with contextlib.suppress(OSError):
        if read_at_most(folder.job, len(text)) == text:
            return
    try:
        write_whole(folder.job, text)
    except OSError as error:
        raise UsageError(
            f"cannot write {folder.job}: {error.strerror}; make room, or give another --run-dir"
        ) from None


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


def train_inside(
    loaded: LoadedJob,
    job: Path,
    options: Sequence[str],
    start: Start,
    nodes: Nodes | None,
    team_key: Path | None = None,
) -> NoReturn:
    """Become the same command inside the job's image. What is mounted there cannot be moved: that is done before.

    `team_key` is the file with the team's key, which has to be there too.
    """
    leads = nodes is None or nodes.leads
    if nodes is not None and team_key is not None:
        wait_for_key_file(team_key, leads=leads, seconds=nodes.join_seconds, say=say)
        options = [*options, f"--team-key={team_key}"]
    run = start.run_dir or _default_folder(loaded, nodes)
    if run is None:
        run = named_by_time(loaded.job.name)
    elif start.run_dir is None and not leads:
        run = run.parent  # the leader will say which folder it is
    run = run.absolute()
    if start.fresh and leads and RunFolder(run).job.exists():
        _set_aside(RunFolder(run))
    named = [f"--run-dir={run}"] if leads or start.run_dir is not None else []
    command = ["train", str(job.absolute()), *options, *named]
    extra = () if team_key is None else (team_key,)
    enter(loaded, run, command, job_file=job.absolute(), of_any_run=not named, extra=extra)


def nodes_of(loaded: LoadedJob, node_rank: int | None, leader: str | None) -> Nodes | None:
    """What the command line and the job say of the nodes; None for a run on this machine alone."""
    cluster, team = loaded.job.cluster, loaded.job.team
    if node_rank is None and leader is None:
        if cluster.nodes > 1:
            raise UsageError(
                f"the job wants {cluster.nodes} nodes: start it on each with --node-rank 0 (1, …) and --leader "
                "ADDRESS:PORT of node 0, or with --hosts, or with `dure submit`; --nodes 1 trains on this machine alone"
            )
        return None
    node, host, port = _place(cluster.nodes, node_rank, leader)
    return Nodes(
        count=cluster.nodes,
        fewest=cluster.min_nodes or cluster.nodes,
        node=node,
        leader=host,
        port=port,
        ranks=team.ranks,
        interface=cluster.interface,
        join_seconds=cluster.join_seconds,
        lost_seconds=cluster.lost_seconds,
        max_restarts=team.max_restarts,
        facts=_facts(loaded),
    )


def run_script_on_nodes(
    target: str,
    argv: list[str],
    folder: RunFolder,
    nodes: Nodes,
    key: TeamKey,
    *,
    module: bool,
    cold: bool,
    spec: LaunchSpec,
) -> int:
    """This node's ranks of a script that runs on several; every node keeps its own logs. `spec` is what it has in
    common with a script on one."""
    lease = Lease()
    nodes = replace(nodes, max_restarts=spec.max_restarts, script=spec.script)
    with StopSignals() as stop, join(nodes, key, lease, lambda: folder.path, say, stop.check) as joined:

        def tell(formed: Team) -> None:
            if nodes.leads:
                say(formed.where)

        def tick() -> None:
            for news in _drain(joined):
                if isinstance(news, Restart):
                    record_restart(folder, news)
                    say_restart(news)
                else:
                    say(news)

        try:
            spec = replace(spec, joined=joined, on_team=tell, on_tick=tick)
            return run_script(target, argv, spec, module=module, cold=cold)
        finally:
            tick()


def nodes_of_script(target: str, count: int, node_rank: int | None, leader: str | None, ranks: int) -> Nodes:
    """What the command line says of the nodes that a script runs on."""
    node, host, port = _place(count, node_rank, leader)
    path = Path(target)
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else target
    cluster = Cluster()
    return Nodes(
        count=count,
        fewest=count,
        node=node,
        leader=host,
        port=port,
        ranks=ranks,
        interface=None,
        join_seconds=cluster.join_seconds,
        lost_seconds=cluster.lost_seconds,
        max_restarts=0,
        facts={"script (sha256)": digest, **_versions()},
        is_job=False,
    )


def _place(count: int, node_rank: int | None, leader: str | None) -> tuple[int, str, int]:
    """(this node, the leader's host, its port), or what is missing."""
    if node_rank is None or leader is None:
        given, missing = ("--leader", "--node-rank") if node_rank is None else ("--node-rank", "--leader")
        raise UsageError(f"{given} is given, but not {missing}; a run on several nodes needs both")
    if not 0 <= node_rank < count:
        raise UsageError(
            f"--node-rank is {node_rank}, but there are {count} nodes (--nodes): use 0 to {count - 1}"
        )
    return node_rank, *split_leader(leader)


def _preflight(loaded: LoadedJob, start: Start, nodes: Nodes | None, language: Language) -> None:
    """The quick part of `dure doctor`. Several nodes are refused what one machine is only warned of: there, somebody
    sees it fail, and a team of one node fails alone."""
    findings = quick_checks(
        loaded,
        leader=None if nodes is None else nodes.leader,
        run_folder=start.run_dir or _default_folder(loaded, nodes),
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
            hang_seconds=team.hang_seconds,
            port=port,
            on_tick=tick,
            grace_seconds=0.0,  # a rank has nothing to do after its last word, and takes SIGTERM as a request to save
            max_restarts=team.max_restarts,
            min_ranks=team.min_ranks,
            on_restart=restarted,
            ask_to_stop=ask_to_stop if _resumable(loaded) else None,
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


def _drain(joined: Joined | None) -> list[str | Restart]:
    news: list[str | Restart] = []
    while joined is not None and not joined.news.empty():
        news.append(joined.news.get_nowait())
    return news


def _as_json(value: object) -> Any:
    assert isinstance(value, RankResult)
    return value.as_json()


def _resumable(loaded: LoadedJob) -> bool:
    return loaded.job.checkpoint.wanted and loaded.job.team.sync


def _facts(loaded: LoadedJob) -> dict[str, str]:
    """What all nodes must have alike. The recipe, which the ranks compare, has the rest."""
    job = loaded.job.model_dump_json(exclude={"cluster", "slurm"})
    return {"job (sha256)": hashlib.sha256(job.encode()).hexdigest(), **_versions()}


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "dure": importlib.metadata.version("dure"),
        "image (sha256)": digest_inside() or "none",
    }


def _default_folder(loaded: LoadedJob, nodes: Nodes | None) -> Path | None:
    """On several nodes, a place that all of them see."""
    if nodes is None or "://" in loaded.storage:
        return None
    return loaded.run_in_storage(time.strftime("%Y%m%d-%H%M%S"))


def named_by_time(name: str) -> Path:
    """The folder of a run that was given none."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _set_aside(folder: RunFolder) -> None:
    """Move an earlier run out of the way; nothing is deleted."""
    path = folder.path
    aside = next(
        place for n in itertools.count(1) if not (place := path.with_name(f"{path.name}.{n}")).exists()
    )
    with RunLock(folder):  # nobody trains there
        try:
            path.rename(aside)
        except OSError as error:
            raise UsageError(f"cannot move the earlier run {path} to {aside}: {error.strerror}") from None
    say(f"the earlier run is in {aside} now")


@contextlib.contextmanager
def new_run(
    run_dir: Path | None,
    name: str,
    *,
    goes_on: bool = False,
    fresh: bool = False,
    lock_seconds: float = 0.0,
) -> Iterator[RunFolder]:
    """The run's folder, for this launch alone: one that holds no run yet, unless this is a run that `goes_on`.

    Another launch that has it is given `lock_seconds` to let go. When the command is refused within (UsageError), a
    folder that was made for it is taken away again.
    """
    path = run_dir or named_by_time(name)
    folder = RunFolder(path.absolute())
    if fresh and (folder.job.exists() or folder.script.exists()):
        _set_aside(folder)
    elif folder.job.exists() and not goes_on:
        raise UsageError(
            f"{path} holds a run already, and this one has no checkpoints to go on from; give another --run-dir"
        )
    made = [place for place in (folder.path, *folder.path.parents) if not place.exists()]
    try:
        folder.create()
    except (OSError, ValueError) as error:  # ValueError: a NUL character in its path
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot make the run folder {path}: {reason}; give another --run-dir") from None
    try:
        with RunLock(folder, lock_seconds):
            yield folder
    except UsageError:
        if folder.path in made:
            folder.empty()
            with contextlib.suppress(OSError):  # somebody else uses it, or there is something in it
                for place in made:
                    place.rmdir()
        raise

"""`dure train`: parse, load the job, and start it here or over ssh; `dure agent`: go on with what was handed on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dure.base.errors import UsageError
from dure.cli.options import (
    Json,
    Lang,
    Leader,
    NodeRank,
    Page,
    Port,
    Ranks,
    RunDir,
    Settings,
    TeamKeyFile,
    ray_setting,
)
from dure.engine.engines import Engine

if TYPE_CHECKING:
    from dure.config import LoadedJob

EPILOG = (
    "Exit codes: 0 done, 1 training failed, 2 usage, 3 replicas differ, 4 preflight failed, 75 stopped and "
    "resumable, 130/143 stopped at once."
)


def train(
    job: Annotated[
        Path, typer.Argument(help="What to train: a TOML file; examples/cats.toml is one to start from.")
    ],
    ranks: Ranks = None,
    settings: Settings = None,
    run_dir: RunDir = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Start anew; an earlier run in --run-dir is moved aside, not deleted."),
    ] = False,
    nodes: Annotated[
        str | None,
        typer.Option(help="Machines that train together, or MIN:MAX of them.", show_default="the job's"),
    ] = None,
    node_rank: NodeRank = None,
    leader: Leader = None,
    team_key: TeamKeyFile = None,
    hosts: Annotated[
        str | None,
        typer.Option(help="Start it on these hosts by ssh: a,b; the first leads.", show_default="the job's"),
    ] = None,
    engine: Annotated[
        Engine | None,
        typer.Option(
            help="Whose machines: local (this one, and nodes started by hand), ssh (--hosts), or ray.",
            show_default="ssh where there are hosts, else local",
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where Ray is.", show_default="the job's, else RAY_ADDRESS"),
    ] = None,
    port: Port = 0,
    rescue_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Where the last state goes when it cannot be saved where it belongs, and where a run goes on from.",
            show_default="a private folder in $TMPDIR",
        ),
    ] = None,
    page: Page = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show every setting with its source, and stop.")
    ] = False,
    as_json: Json = False,
    lang: Lang = None,
) -> None:
    """Train a job: N ranks in step, the same bits whatever N is.

    Each rank logs to RUN/logs, records to RUN/events; RUN/summary.json is what --json prints. A --run-dir that holds a
    run goes on from its newest checkpoint. Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 finish the step, save, and end with 75.
    """
    from dure.config import load_job, parse_settings
    from dure.engine.node_start import NodeStart, start_node

    settings = [*(settings or []), *_rescue_setting(rescue_dir), *ray_setting(ray_address)]
    loaded = load_job(job, parse_settings(settings), ranks, nodes, hosts)
    if print_config:
        _print_config(loaded)
        return
    chosen = _engine_of(loaded, engine, by_hand=node_rank is not None or leader is not None)
    if page and (chosen is not Engine.LOCAL or loaded.job.cluster.hosts or loaded.job.cluster.image):
        raise UsageError(
            "--page is for runs on this machine and without an image; beside others, open it yourself: dure page RUN"
        )
    start = NodeStart(
        loaded, job, run_dir, fresh, port, node_rank, leader, team_key, as_json=as_json, lang=lang, page=page
    )
    if chosen is Engine.SSH:
        from dure.engine.ssh.hosts import train_on_hosts

        train_on_hosts(start)
    elif chosen is Engine.RAY:
        from dure.engine.ray.result import refuse_without_ray

        refuse_without_ray()
        from dure.engine.ray.machines import command_on_ray

        command_on_ray(start)
    else:
        start_node(start)


def agent(source: Annotated[str, typer.Argument(metavar="FILE|-")]) -> None:
    """One node's part of a run, as another dure has written it down: for other hosts, and the inside of an image."""
    from dure.engine.node_start import read_start, start_node

    start_node(read_start(source))


def _engine_of(loaded: LoadedJob, asked: Engine | None, *, by_hand: bool) -> Engine:
    """Whose machines a run is for."""
    hosts = loaded.job.cluster.hosts
    if asked is None:
        return Engine.SSH if hosts and not by_hand else Engine.LOCAL
    if by_hand and asked is not Engine.LOCAL:
        raise UsageError(
            f"--engine {asked} starts the nodes itself; leave out --node-rank and --leader, or --engine"
        )
    if asked is Engine.SSH and not hosts:
        raise UsageError("--engine ssh needs to know the hosts; give --hosts, or cluster.hosts in the job")
    return asked


def _rescue_setting(rescue_dir: str | None) -> list[str]:
    """What --rescue-dir says, as the setting that it is: other nodes and the inside of an image are told so too."""
    if rescue_dir is None:
        return []
    path = rescue_dir if "://" in rescue_dir else os.path.abspath(rescue_dir)
    return [f"checkpoint.rescue={json.dumps(path, ensure_ascii=False)}"]


def _print_config(loaded: LoadedJob) -> None:
    from dure.config import all_values

    rows = [(key, json.dumps(value), source) for key, value, source in all_values(loaded)]
    key_width, value_width = (max(len(row[column]) for row in rows) for column in range(2))
    for key, value, source in rows:
        print(f"{key:<{key_width}}  {value:<{value_width}}  {source}")

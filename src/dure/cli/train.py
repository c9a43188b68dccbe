"""`dure train`: parse, load the job, and start it here, over ssh, or inside its image."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dure.base.say import say
from dure.cli.options import Json, Lang, Leader, NodeRank, Page, Port, Ranks, RunDir, Settings, TeamKeyFile

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
    attached: Annotated[bool, typer.Option("--attached", hidden=True)] = False,
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
    from dure.base.in_image import digest_inside
    from dure.config import load_job, parse_settings
    from dure.engine.run_job import Admission, Start, nodes_of, run_job, train_inside
    from dure.launch.nodes.key_by_hand import key_by_hand, key_file

    settings = [*(settings or []), *_rescue_setting(rescue_dir)]
    loaded = load_job(job, parse_settings(settings), ranks, nodes, hosts)
    if print_config:
        _print_config(loaded)
        return
    options = [f"--set={setting}" for setting in settings]
    options += [f"--ranks={ranks}"] if ranks is not None else []
    options += ["--json"] if as_json else []
    options += [f"--lang={lang}"] if lang is not None else []
    if loaded.job.cluster.hosts and node_rank is None and leader is None:
        from dure.engine.ssh.start import train_on_hosts

        train_on_hosts(loaded, job, options, run_dir, fresh=fresh)
        return
    start, here = Start(run_dir, fresh=fresh, port=port, page=page), nodes_of(loaded, node_rank, leader)
    if loaded.job.cluster.image is not None and digest_inside() is None:
        own = [f"--nodes={nodes}"] if nodes is not None else []
        own += [f"--node-rank={node_rank}", f"--leader={leader}"] if here is not None else []
        own += [f"--port={port}", *(["--attached"] if attached else [])]
        train_inside(loaded, job, [*options, *own], start, here, None if attached else key_file(team_key))
    admission = None
    if here is not None and attached:
        from dure.engine.ssh.attached import obey_input

        # The leader before this one ends by itself when its lease is over.
        admission = Admission(*obey_input(here.lost_seconds, leads=here.leads), 2 * here.lost_seconds + 10)
    elif here is not None:
        file = key_file(team_key)
        admission = Admission(
            key_by_hand(file, leads=here.leads, nodes=here.count, seconds=here.join_seconds, say=say)
        )
    run_job(loaded, start, here, admission, as_json=as_json, lang=lang)


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

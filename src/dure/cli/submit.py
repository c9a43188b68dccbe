"""`dure submit`, `status`, `cancel` and `logs`, of Slurm, Kubernetes and Ray; and what runs in Kubernetes' pods."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dure.base.errors import UsageError
from dure.cli.options import Json, Settings
from dure.engine.engines import Queue, scheduler
from dure.engine.interface import Asked

TARGET = "A job as `dure submit` named it; of Slurm, its run's folder too."
Which = Annotated[Queue, typer.Option("--engine", help="Whose queue.")]
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="HOST:8265", help="Ray's dashboard.", show_default="http://127.0.0.1:8265"),
]


def submit(
    job: Annotated[
        Path,
        typer.Argument(
            help="What to train: a TOML file; [cluster], and [slurm], [kubernetes] or [ray] say where."
        ),
    ],
    ranks: Annotated[int | None, typer.Option(help="Ranks on each node.", show_default="the job's")] = None,
    nodes: Annotated[
        str | None, typer.Option(help="Nodes, or MIN:MAX of them.", show_default="the job's")
    ] = None,
    settings: Settings = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where the run keeps its files, seen by all nodes; a run that is there already goes on.",
            show_default="{storage}/checkpoints/NAME-JOBID; in NAME-TIME on Kubernetes and Ray",
        ),
    ] = None,
    engine: Which = Queue.SLURM,
    ray_address: RayAddress = None,
    jobset: Annotated[
        bool, typer.Option("--jobset", help="Kubernetes: a JobSet in place of a Job and a Service.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the batch script or manifest, and do nothing; needs no cluster."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Submit a job to Slurm, Kubernetes or Ray: one agent per node; it goes on when its time or a node is lost.

    It is started again at most slurm.requeues or kubernetes.retries times, goes on with the same run, and comes to the
    same bits.
    """
    from dure.config import load_job, parse_settings

    given = [*(settings or []), *(["kubernetes.jobset=true"] if jobset else [])]
    if jobset and engine is not Queue.KUBERNETES:
        raise UsageError("--jobset is for --engine kubernetes; leave one of them out")
    loaded = load_job(job, parse_settings(given), ranks, nodes)
    asked = Asked(loaded, job, tuple(settings or ()), ranks, nodes, run_dir)
    chosen = scheduler(engine, ray_address)
    if dry_run:
        text = chosen.draft(asked)
        print(json.dumps({"script": text})) if as_json else sys.stdout.write(text)
        return
    done = chosen.submit(asked)
    print(json.dumps(done.as_json()) if as_json else done.in_words())


def status(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[RUN|JOB]", help=TARGET, show_default="all jobs of yours in the queue"),
    ] = None,
    engine: Which = Queue.SLURM,
    ray_address: RayAddress = None,
    as_json: Json = False,
) -> None:
    """How submitted jobs are: their place in the queue, and how far the run itself is."""
    found = scheduler(engine, ray_address).status(target)
    print(json.dumps(found.as_json()) if as_json else found.in_words())


def cancel(
    target: Annotated[str, typer.Argument(metavar="RUN|JOB", help=TARGET)],
    now: Annotated[bool, typer.Option("--now", help="At once, without saving.")] = False,
    engine: Which = Queue.SLURM,
    ray_address: RayAddress = None,
    as_json: Json = False,
) -> None:
    """End a submitted job: it saves after its step, and is not started again; dure submit --run-dir goes on."""
    done = scheduler(engine, ray_address).cancel(target, now=now)
    print(json.dumps(done.as_json()) if as_json else done.in_words())


def logs(
    target: Annotated[str, typer.Argument(metavar="RUN|JOB", help=TARGET)],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    engine: Which = Queue.SLURM,
    ray_address: RayAddress = None,
) -> None:
    """What a submitted job has printed, on all its nodes."""
    for line in scheduler(engine, ray_address).logs(target, follow=follow):
        print(line, flush=follow)


def pod(
    job: Path,
    ranks: int | None = None,
    nodes: str | None = None,
    settings: Settings = None,
    run_dir: Path | None = None,
    leader: str | None = None,
    team_key: Path | None = None,
) -> None:
    """What runs in a pod of Kubernetes: one node's part of a run. `dure submit` writes it into the manifest."""
    from dure.config import load_job, parse_settings
    from dure.engine.kubernetes.pod import start_in_pod
    from dure.engine.node_start import NodeStart

    if leader is None or team_key is None:
        raise UsageError(
            "this command is for pods of `dure submit --engine kubernetes`; it needs --leader and --team-key"
        )
    loaded = load_job(job, parse_settings([*(settings or []), "cluster.hosts=[]"]), ranks, nodes)
    start_in_pod(NodeStart(loaded, job, run_dir, leader=leader), team_key)


def pod_stop(run: Path) -> None:
    """Before a pod is ended: ask the run to save, and wait for that."""
    from dure.engine.kubernetes.pod import save_and_wait

    save_and_wait(run)


def add_to(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (submit, status, cancel, logs):
        app.command()(command)
    app.command("pod", hidden=True)(pod)
    app.command("pod-stop", hidden=True)(pod_stop)

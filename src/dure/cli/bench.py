"""`dure bench …`: parse, measure, print. Imports nothing heavy until a bench is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Annotated, cast

import typer

from dure.base.errors import UsageError
from dure.cli.options import Json

bench = typer.Typer(
    no_args_is_help=True, help="Measure, side by side with named peers.", rich_markup_mode=None
)


@bench.command("start")
def bench_start(
    ranks: Annotated[int, typer.Option(help="Processes to start.")] = 8,
    rounds: Annotated[int, typer.Option(help="Interleaved repeats; medians are printed.")] = 3,
    as_json: Json = False,
) -> None:
    """How long until N ranks pass a first barrier: dure run against torchrun, in the same run.

    Beside it, a job of one step on 4 ranks (dure train) against `import torch` alone.
    """
    from dure.tools.bench import start

    print_figures(start, start.bench_start(ranks=ranks, rounds=rounds), as_json)


@bench.command("step")
def bench_step(
    ranks: Annotated[
        str, typer.Option(help="Team sizes, with commas; a team of 1 is always measured too.")
    ] = "2,4",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of each; medians are printed.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps in a round.")] = 5,
    as_json: Json = False,
) -> None:
    """Step time of a 9 M-parameter transformer: no exchange, dure, DDP, Accelerate, Fabric side by side."""
    from dure.tools.bench import step

    print_figures(step, step.bench_step(sizes=_team_sizes(ranks), rounds=rounds, steps=steps), as_json)


@bench.command("exactness")
def bench_exactness(
    ranks: Annotated[str, typer.Option(help="Team sizes, with commas; divisors of 8.")] = "1,2,4",
    models: Annotated[str, typer.Option(help="With commas.")] = "cnn,transformer,mlp,gru,tiny",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; medians are printed.")] = 9,
    quick: Annotated[
        bool, typer.Option("--quick", help="One short round: whether it works, not figures.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What 8 shards cost in CPU seconds, against as many plain passes of their size: five models."""
    from dure.tools.bench import exactness

    size = exactness.QUICK if quick else exactness.Size(rounds=rounds)
    figures = exactness.bench_exactness(sizes=_team_sizes(ranks), models=models.split(","), size=size)
    print_figures(exactness, figures, as_json)


@bench.command("recover")
def bench_recover(
    ranks: Annotated[int, typer.Option(help="Processes that train together.")] = 4,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; medians are printed.")] = 3,
    as_json: Json = False,
) -> None:
    """What kill -9 of one rank costs: dure train against torchrun with a checkpoint per epoch."""
    from dure.tools.bench import recover

    print_figures(recover, recover.bench_recover(ranks=ranks, rounds=rounds), as_json)


@bench.command("checkpoint")
def bench_checkpoint(
    ranks: Annotated[int, typer.Option(help="Processes that train together.")] = 4,
    rounds: Annotated[
        int, typer.Option(help="Interleaved whole runs of each kind; medians are printed.")
    ] = 2,
    only: Annotated[str, typer.Option(help="Parts, with commas.")] = "runs,stalls,saves,memory",
    folder: Annotated[
        Path | None, typer.Option(help="On the disk to measure.", show_default="for temporary files")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small model and short runs: whether it works, not figures.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What checkpoints cost a run of 100 M parameters, beside torch.save and torch's own checkpoints."""
    from dure.tools.bench import checkpoint

    size = checkpoint.QUICK if quick else checkpoint.Size(rounds=rounds)
    figures = checkpoint.bench_checkpoint(ranks=ranks, size=size, only=only.split(","), folder=folder)
    print_figures(checkpoint, figures, as_json)


@bench.command("reduce")
def bench_reduce(
    ranks: Annotated[int, typer.Option(help="Processes on each node.")] = 4,
    nodes: Annotated[int, typer.Option(help="1, or 2: network namespaces on this machine (takes root).")] = 1,
    rate: Annotated[
        str | None,
        typer.Option(help="Shape the link between 2 nodes: 10gbit, 1gbit.", show_default="unshaped"),
    ] = None,
    mib: Annotated[
        str, typer.Option(help="Sizes of the bucket in MiB, with commas.", show_default="1 KiB to 100 MiB")
    ] = "",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; medians are printed.")] = 7,
    wire: Annotated[str, typer.Option(help="What numbers are sent as between nodes: fp32 or bf16.")] = "fp32",
    as_json: Json = False,
) -> None:
    """Time of one all-reduce: dure, Gloo, OpenMPI, one plain copy and the plain wire side by side."""
    from dure.tools.bench import reduce

    figures = reduce.bench_reduce(
        ranks=ranks,
        nodes=nodes,
        rate=rate,
        mib=_sizes(mib) if mib else reduce.SIZES,
        rounds=rounds,
        wire=wire,
    )
    print_figures(reduce, figures, as_json)


@bench.command("backend")
def bench_backend(
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 4,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; medians are printed.")] = 7,
    steps: Annotated[int, typer.Option(help="Steps in a round.")] = 5,
    mib: Annotated[str, typer.Option(help="Sizes of all-reduces in MiB, with commas.")] = "0.0625,1,25,100",
    quick: Annotated[
        bool, typer.Option("--quick", help="A small model and few rounds: whether it works, not figures.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Stock DDP on gloo, on the backend dure and with dure.attach, and a team; and all-reduces alone."""
    from dure.tools.bench import backend

    size = backend.QUICK if quick else backend.Size(rounds, steps, _sizes(mib))
    print_figures(backend, backend.bench_backend(ranks=ranks, size=size), as_json)


@bench.command("load")
def bench_load(
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 4,
    mb: Annotated[float, typer.Option(help="Size of the weights' file.")] = 500.0,
    storage: Annotated[str, typer.Option(help="folder, or s3: a real S3 server on this machine.")] = "folder",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; medians are printed.")] = 5,
    throttle: Annotated[
        float | None, typer.Option(help="MB/s of the storage, for all ranks together.", show_default="none")
    ] = None,
    as_json: Json = False,
) -> None:
    """Weights into every rank: three ways of dure, transformers, safetensors + DDP, and the floor."""
    from dure.tools.bench import load

    figures = load.bench_load(
        ranks=ranks, mb=mb, storage=cast(load.Storage, storage), rounds=rounds, throttle=throttle
    )
    print_figures(load, figures, as_json)


@bench.command("arithmetic")
def bench_arithmetic(
    jobs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[JOB]...", help="Job files.", show_default="four of examples/"),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Processes that train together.")] = 2,
    rounds: Annotated[int, typer.Option(help="Interleaved runs of each kind; medians are printed.")] = 3,
    as_json: Json = False,
) -> None:
    """What team.arithmetic = "portable" costs: each job trained natively and portably in turn."""
    from dure.tools.bench import arithmetic

    print_figures(arithmetic, arithmetic.bench_arithmetic(jobs or [], ranks=ranks, rounds=rounds), as_json)


@bench.command("receipt")
def bench_receipt(
    ranks: Annotated[int, typer.Option(help="Processes that train together.")] = 2,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of each kind; medians are printed.")] = 15,
    steps: Annotated[int, typer.Option(help="Steps in a round.")] = 3,
    as_json: Json = False,
) -> None:
    """What a run's receipt costs a step, in CPU-seconds: with and without one, in the same ranks; and counted alone."""
    from dure.tools.bench import receipt

    print_figures(receipt, receipt.bench_receipt(ranks=ranks, rounds=rounds, steps=steps), as_json)


@bench.command("audit")
def bench_audit(
    ranks: Annotated[int, typer.Option(help="Processes that train together.")] = 3,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of each kind; medians are printed.")] = 15,
    steps: Annotated[int, typer.Option(help="Steps in a round.")] = 3,
    as_json: Json = False,
) -> None:
    """What it costs that another rank computes a shard again, in CPU-seconds: each step, and at train.audit = 0.01."""
    from dure.tools.bench import audit

    print_figures(audit, audit.bench_audit(ranks=ranks, rounds=rounds, steps=steps), as_json)


@bench.command("page")
def bench_page(
    steps: Annotated[int, typer.Option(help="Steps of the long run.")] = 1_000_000,
    ranks: Annotated[int, typer.Option(help="Ranks of the long run.")] = 8,
    rounds: Annotated[int, typer.Option(help="Runs with and without the page, in turns; medians.")] = 5,
    only: Annotated[str, typer.Option(help="Parts, with commas.")] = "cost,scale",
    quick: Annotated[
        bool, typer.Option("--quick", help="Short runs: whether it works, not figures.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What the page costs a run (CPU seconds), and how quick it is with a long one, in a real browser."""
    from dure.tools.bench import page

    size = page.QUICK if quick else page.Size(steps=steps, ranks=ranks, rounds=rounds)
    print_figures(page, page.bench_page(size, only.split(",")), as_json)


def _team_sizes(ranks: str) -> list[int]:
    try:
        return [int(size) for size in ranks.split(",")]
    except ValueError:
        raise UsageError(
            f"--ranks {ranks}: write team sizes with commas between them, such as --ranks 2,4"
        ) from None


@bench.command("plan")
def bench_plan(
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help="Also: the step bench's model on 1, 2 and 4 ranks of this machine, predicted and measured.",
        ),
    ] = False,
    rounds: Annotated[int, typer.Option(help="Of the step bench, with --here.")] = 5,
    as_json: Json = False,
) -> None:
    """The planner against published tables, an error per row; with --here against `dure bench step` too."""
    from dure.tools.bench import plan

    print_figures(plan, plan.bench_plan(here=here, rounds=rounds), as_json)


@bench.command("scale")
def bench_scale(
    nodes: Annotated[str, typer.Option(help="Simulated nodes, with commas.")] = "64,256,1024",
    agents: Annotated[int, typer.Option(help="Thin agents over loopback.")] = 256,
    trained: Annotated[
        str, typer.Option(help="Nodes of this machine that train (takes root), with commas.")
    ] = "3,4,8",
    only: Annotated[str, typer.Option(help="Parts, with commas.")] = "membership,sockets,nodes",
    as_json: Json = False,
) -> None:
    """What N nodes cost: time, messages and bytes to join, lose one, start again and end; bytes on each wire."""
    from dure.tools.bench import scale

    figures = scale.bench_scale(
        nodes=_counts("--nodes", nodes),
        agents=agents,
        trained=_counts("--trained", trained),
        only=only.split(","),
    )
    print_figures(scale, figures, as_json)


def _counts(option: str, text: str) -> list[int]:
    try:
        return [int(count) for count in text.split(",")]
    except ValueError:
        raise UsageError(
            f"{option} {text}: write numbers with commas between them, such as {option} 3,4,8"
        ) from None


def _sizes(mib: str) -> list[float]:
    try:
        return [float(size) for size in mib.split(",")]
    except ValueError:
        raise UsageError(f"--mib {mib}: write sizes with commas between them, such as --mib 1,25") from None


def print_figures(room: ModuleType, figures: dict[str, object], as_json: bool) -> None:
    """Print a bench's figures: in its own words where it has some, else as JSON that can be read."""
    if as_json:
        print(json.dumps(figures))
    elif hasattr(room, "in_words"):
        print(room.in_words(figures))
    else:
        print(json.dumps(figures, indent=1))

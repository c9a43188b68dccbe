"""`dure plan`: what a job would take on more nodes, or on other machines. Starts without torch; measuring needs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dure.base.errors import UsageError
from dure.cli.options import Json, Lang, Ranks, Settings

if TYPE_CHECKING:
    from dure.config import LoadedJob
    from dure.plan.measurement import Measurement

PLAN_EPILOG = (
    "Examples: dure plan job.toml; dure plan job.toml --nodes 1,2,4,8 --like p5.48xlarge; dure plan job.toml "
    "--like my_machine.toml --price 2.5. The first call measures (some ten seconds), later ones read the file."
)


def plan(
    job: Annotated[Path, typer.Argument(help="The job's TOML file.")],
    nodes: Annotated[str, typer.Option(help="Numbers of nodes, with commas.")] = "1,2,4,8",
    like: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE|FILE",
            help="A described machine: c6i.16xlarge, p4d.24xlarge, p5.48xlarge, or a file of your own.",
            show_default="this machine",
        ),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The measurement.", show_default="runs/NAME-measured.json"),
    ] = None,
    again: Annotated[
        bool, typer.Option("--measure", help="Measure, even if there is a measurement.")
    ] = False,
    price: Annotated[
        float | None,
        typer.Option(metavar="USD", help="Of a node, for an hour.", show_default="the machine's"),
    ] = None,
    mtbf: Annotated[
        float | None,
        typer.Option(metavar="HOURS", help="Between two failures of one node.", show_default="the machine's"),
    ] = None,
    network: Annotated[
        float | None,
        typer.Option(metavar="GBIT", help="Line rate of a node.", show_default="the machine's; here 10"),
    ] = None,
    ranks: Ranks = None,
    settings: Settings = None,
    as_json: Json = False,
    lang: Lang = None,
) -> None:
    """What more nodes would bring: step time by phase, speed-up, memory, checkpoints, hours and price, with ranges.

    Measures the job on this machine first (short runs of it, nothing of its folders is touched), or reads what was
    measured. Says what limits the team on each number of nodes, and the one change that helps most.
    """
    from dure.base.language import chosen_language
    from dure.config import load_job, parse_settings
    from dure.plan import outlook, words
    from dure.plan.machine import load_machine

    counts = _counts(nodes)
    for option, value in (("--price", price), ("--mtbf", mtbf), ("--network", network)):
        if value is not None and not (0 if option == "--price" else 1e-6) <= value < 1e12:
            raise UsageError(f"{option} {value}: write a number that is more than 0")
    loaded = load_job(job, parse_settings(settings or []), ranks)
    machine = None if like is None else load_machine(like)
    path = measured or Path("runs") / f"{loaded.job.name}-measured.json"
    found = _measured(loaded, path, again=again)
    assumed = outlook.assume(loaded.job, found, machine, outlook.Told(price, mtbf, network))
    seen = [outlook.outlook(assumed, count) for count in counts]
    if as_json:
        where = {"machine": None if machine is None else machine.name, "measured": str(path)}
        print(json.dumps({"job": loaded.job.name, **where, "outlooks": outlook.as_json(seen)}))
        return
    language = chosen_language(lang)
    name = None if machine is None else machine.name
    print(words.in_words(seen, language, host=found.host, cores=found.cores, machine=name))


def _measured(loaded: LoadedJob, path: Path, *, again: bool) -> Measurement:
    from dure.plan.measurement import read_measurement, settings_hash, write_measurement

    if path.is_file() and not again:
        found = read_measurement(path)
        if found.settings == settings_hash(loaded):
            return found
        raise UsageError(
            f"{path} was measured with other settings of {loaded.job.name}; measure again: --measure, or give another "
            "file: --measured FILE"
        )
    from dure.engine.measure import measure

    found = measure(loaded)
    write_measurement(path, found)
    return found


def _counts(nodes: str) -> list[int]:
    try:
        counts = sorted({int(count) for count in nodes.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1 or counts[-1] > 16384:
        raise UsageError(
            f"--nodes {nodes}: write numbers of nodes with commas between them, such as --nodes 1,2,4,8"
        )
    return counts

"""The command line: parse, call one room, map errors to exit codes. Imports nothing heavy."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dure.base.errors import DureError, RankFailed
from dure.base.say import keep_output_harmless, redacted, say, stdout_trouble
from dure.cli.bench import Json, bench, print_figures
from dure.cli.doctor import doctor
from dure.cli.image import image
from dure.cli.lab import lab
from dure.cli.options import Leader, NodeRank, Port, RunDir, TeamKeyFile
from dure.cli.run import ScriptCommand, run
from dure.cli.slurm import add_to as add_slurm_to

if TYPE_CHECKING:
    from dure.config import LoadedJob

app = typer.Typer(
    name="dure",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Train one PyTorch model on many processes, every replica the same bit for bit, and provably so.

    \b
    dure demo                          draw 400 photos, train on 4 ranks, show what happened
    dure train job.toml --ranks 4      train a job; the bits never depend on the number of ranks
    dure checkpoints RUN               what a run has saved; export RUN out.safetensors: its weights
    dure submit job.toml               hand a job to Slurm; status, cancel: how it is, end it
    dure run --ranks 4 ddp.py …        run a script of your own, as torchrun would, only sooner
    """,
)


def _version(wanted: bool) -> None:
    if wanted:
        from dure import __version__

        print(f"dure {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app.add_typer(bench, name="bench")
app.add_typer(doctor)
app.add_typer(image, name="image")
app.add_typer(lab, name="lab")
add_slurm_to(app)

Ranks = Annotated[
    str | None,
    typer.Option(
        help="Processes that train together: 8, or 2:8 to go on with fewer, down to 2, when some cannot be kept alive.",
        show_default="the job's",
    ),
]
Lang = Annotated[str | None, typer.Option(help="en or ko.", show_default="by the locale")]


@app.command(
    epilog="Exit codes: 0 done, 1 training failed, 2 usage, 3 replicas differ, 4 preflight failed, 75 stopped and "
    "resumable, 130/143 stopped at once."
)
def train(
    job: Annotated[
        Path, typer.Argument(help="What to train: a TOML file; examples/cats.toml is one to start from.")
    ],
    ranks: Ranks = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; beats the job file. Repeat it.")
    ] = None,
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
    start, here = Start(run_dir, fresh=fresh, port=port), nodes_of(loaded, node_rank, leader)
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


app.command(epilog="Example: dure run --ranks 4 ddp.py --epochs 2", cls=ScriptCommand)(run)


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="Processes that train together.")] = 4,
    storage: Annotated[Path, typer.Option(help="The shared-storage folder to draw the photos into.")] = Path(
        "shared"
    ),
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Only lay out the storage, with the same job for two nodes.")
    ] = False,
    run_dir: RunDir = None,
    as_json: Json = False,
    lang: Lang = None,
) -> None:
    """Draw 400 photos of cats and of things that are not, train a small CNN on 4 ranks, show what happened."""
    from dure.engine.run_job import Start, run_job
    from dure.tools.demo import prepare, prepare_cluster

    if cluster:
        print(prepare_cluster(storage))
        return
    run_job(prepare(storage, ranks), Start(run_dir), None, as_json=as_json, lang=lang)


@app.command()
def checkpoints(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    verify: Annotated[bool, typer.Option(help="Read every byte and compare hashes.")] = True,
    as_json: Json = False,
) -> None:
    """List a run's checkpoints, newest first: step, time, size, verified or why not."""
    from dure.base.run_folder import RunFolder
    from dure.checkpoint.export import as_rows, in_words

    rows = as_rows(RunFolder(run.absolute()), verify=verify)
    print(json.dumps({"checkpoints": rows}) if as_json else in_words(rows))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    out: Annotated[Path, typer.Argument(help="The file to write, such as model.safetensors.")],
    step: Annotated[int | None, typer.Option(help="Of which step.", show_default="the newest")] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint's weights alone, as plain safetensors with the model's own names."""
    from dure.base.run_folder import RunFolder
    from dure.checkpoint.export import export_weights

    made = export_weights(RunFolder(run.absolute()), out, step)
    print(json.dumps(made) if as_json else f"{out}: {made['tensors']} tensors of step {made['step']}")


@app.command(epilog="Exit codes: 0 all the same bits, 1 a run could not be started, 2 usage, 3 other bits.")
def drill(
    job: Annotated[Path, typer.Argument(help="What to train: a TOML file.")],
    faults: Annotated[
        str, typer.Option(help="What is to go wrong, with commas.")
    ] = "kill-rank,kill-all,kill-agent,stop-rank,segfault,corrupt-latest,truncate-latest,disk-full,slow-rank",
    seed: Annotated[int, typer.Option(help="Chooses the steps and the ranks that are disturbed.")] = 0,
    ranks: Ranks = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; beats the job file. Repeat it.")
    ] = None,
    run_dir: RunDir = None,
    as_json: Json = False,
) -> None:
    """Train a job undisturbed, then once for every fault, and compare the bits of the weights.

    Each fault strikes at a random step of the second half. The runs are kept in the run folder.
    """
    from dure.config import load_job, parse_settings
    from dure.tools.drill import drill as room

    loaded = load_job(job, parse_settings(settings or []), ranks)
    folder = (
        run_dir or Path("runs") / f"drill-{loaded.job.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    )
    figures = room.drill(
        job,
        faults,
        folder=folder,
        ranks=loaded.job.team.ranks,
        seed=seed,
        settings=settings or [],
        say=lambda text: say(f"drill: {text}"),
    )
    print_figures(room, figures, as_json)
    if any(fault["same_bits"] is False for fault in figures["faults"]):
        raise typer.Exit(3)


def _rescue_setting(rescue_dir: str | None) -> list[str]:
    """What --rescue-dir says, as the setting that it is: other nodes and the inside of an image are told so too."""
    if rescue_dir is None:
        return []
    path = rescue_dir if "://" in rescue_dir else os.path.abspath(rescue_dir)
    return [f"checkpoint.rescue={json.dumps(path, ensure_ascii=False)}"]


def main() -> None:
    """Run the command line; a failure is one line on stderr and the exit code that belongs to it."""
    keep_output_harmless()
    sys.exit(_exit_code())


def _exit_code() -> int:
    try:
        app()
    except SystemExit as ended:  # as the command ends when all went well, too
        if ended.code in (None, 0):
            return _unprinted()
        return ended.code if isinstance(ended.code, int) else 1
    except RankFailed as failed:
        if failed.details:
            print(redacted(failed.details.rstrip()), file=sys.stderr)
        return _failed(failed)
    except DureError as error:
        return _failed(error)
    except OSError as error:  # the system's own words, for what no room has better ones for
        what = f"{error.filename}: " if error.filename is not None else ""
        say(f"{what}{error.strerror or error}")
        return 1
    return _unprinted()


def _failed(error: DureError) -> int:
    say(str(error))
    return error.exit_code


def _unprinted() -> int:
    """The exit code of a command that did all it should, but whose result may not have been written."""
    trouble = stdout_trouble()
    if trouble is None or trouble.errno == errno.EPIPE:  # `| head` has seen enough
        return 0
    say(f"cannot write the result to standard output: {trouble.strerror}")
    return 1


def _print_config(loaded: LoadedJob) -> None:
    from dure.config import all_values

    rows = [(key, json.dumps(value), source) for key, value, source in all_values(loaded)]
    key_width, value_width = (max(len(row[column]) for row in rows) for column in range(2))
    for key, value, source in rows:
        print(f"{key:<{key_width}}  {value:<{value_width}}  {source}")

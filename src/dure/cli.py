"""The command line: parse, call one room, map errors to exit codes. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dure.bench.commands import Json, bench, print_figures
from dure.errors import DureError, RankFailed, UsageError

if TYPE_CHECKING:
    from dure.job import LoadedJob
    from dure.run_folder import RunFolder

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
    dure run ddp.py --ranks 4 -- …     run a script of your own, as torchrun would, only sooner
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

Ranks = Annotated[
    str | None,
    typer.Option(
        help="Processes that train together: 8, or 2:8 to go on with fewer, down to 2, when some cannot be kept alive.",
        show_default="the job's",
    ),
]
RunDir = Annotated[
    Path | None, typer.Option(help="Where the run keeps its files.", show_default="runs/NAME-TIME")
]
Lang = Annotated[str | None, typer.Option(help="en or ko.", show_default="by the locale")]
Port = Annotated[int, typer.Option(help="Port of the team on this machine; 0: a free one.")]


@app.command(
    epilog="Exit codes: 0 done, 1 training failed, 2 usage, 3 replicas differ, 75 stopped and resumable, "
    "130/143 stopped at once."
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
    port: Port = 0,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show every setting with its source, and stop.")
    ] = False,
    as_json: Json = False,
    lang: Lang = None,
) -> None:
    """Train a job: N ranks in step, the same bits whatever N is.

    Each rank logs to RUN/logs, records to RUN/events; RUN/summary.json is what --json prints. A --run-dir that holds a
    run goes on from its newest checkpoint. Ctrl-C, SIGTERM or SIGUSR1 finish the step, save, and end with 75.
    """
    from dure.job import load_job

    loaded = load_job(job, _settings(settings or []), ranks)
    if print_config:
        _print_config(loaded)
        return
    run_job(loaded, run_dir, port=port, as_json=as_json, lang=lang, fresh=fresh)


@app.command(epilog="Example: dure run ddp.py --ranks 4 -- --epochs 2")
def run(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="A script, or with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="What follows -- is the script's own.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Processes to start.")] = 2,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="New interpreters, for scripts that set things up before torch.")
    ] = False,
    run_dir: RunDir = None,
    port: Port = 0,
) -> None:
    """Run a script on N ranks, as torchrun --nproc_per_node=N does; torch is imported only once."""
    from dure.launch import run_script

    with _new_run(run_dir, Path(target).stem) as folder:
        code = run_script(
            target, arguments or [], module=module, ranks=ranks, folder=folder, cold=cold, port=port
        )
    raise typer.Exit(code)


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="Processes that train together.")] = 4,
    storage: Annotated[Path, typer.Option(help="The shared-storage folder to draw the photos into.")] = Path(
        "shared"
    ),
    run_dir: RunDir = None,
    as_json: Json = False,
    lang: Lang = None,
) -> None:
    """Draw 400 photos of cats and of things that are not, train a small CNN on 4 ranks, show what happened."""
    from dure.demo import prepare

    loaded = prepare(storage, ranks)
    run_job(loaded, run_dir, port=0, as_json=as_json, lang=lang)


@app.command()
def checkpoints(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    verify: Annotated[bool, typer.Option(help="Read every byte and compare hashes.")] = True,
    as_json: Json = False,
) -> None:
    """List a run's checkpoints, newest first: step, time, size, verified or why not."""
    from dure.checkpoint.listing import as_rows, in_words
    from dure.run_folder import RunFolder

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
    from dure.checkpoint.export import export_weights
    from dure.run_folder import RunFolder

    made = export_weights(RunFolder(run.absolute()), out, step)
    print(json.dumps(made) if as_json else f"{out}: {made['tensors']} tensors of step {made['step']}")


def run_job(
    loaded: LoadedJob,
    run_dir: Path | None,
    *,
    port: int,
    as_json: bool,
    lang: str | None,
    fresh: bool = False,
) -> None:
    """Launch a job's ranks, show them, and print what came of it."""
    resumable = loaded.job.checkpoint.wanted and loaded.job.team.sync
    with _new_run(run_dir, loaded.job.name, goes_on=resumable, fresh=fresh) as folder:
        _run_job_in(folder, loaded, resumable=resumable, port=port, as_json=as_json, lang=lang)


def _run_job_in(
    folder: RunFolder, loaded: LoadedJob, *, resumable: bool, port: int, as_json: bool, lang: str | None
) -> None:
    from dure.display import Display
    from dure.files import write_whole
    from dure.language import chosen_language
    from dure.launch import run_team
    from dure.report import in_words, summarize

    began = time.perf_counter()
    language = chosen_language(lang)
    team = loaded.job.team
    write_whole(folder.job, loaded.to_json())

    def ask_to_stop(signal_name: str) -> None:
        folder.stop.touch()
        print(
            f"dure: {signal_name}: stops after this step and saves; once more stops at once", file=sys.stderr
        )

    display = Display(folder, team.ranks, language)
    try:
        results: list[Any] = run_team(
            "dure.train:run_rank",
            (loaded.to_json(), str(folder.path)),
            ranks=team.ranks,
            folder=folder,
            threads=team.threads,
            hang_seconds=team.hang_seconds,
            port=port,
            on_tick=display.tick,
            max_restarts=team.max_restarts,
            min_ranks=team.min_ranks,
            on_restart=lambda again: display.restarted(
                again.cause, again.without_progress, again.max_restarts, again.ranks
            ),
            ask_to_stop=ask_to_stop if resumable else None,
        )
    finally:
        display.close()
        folder.stop.unlink(missing_ok=True)
    inside = sum(results[0].seconds.values())
    summary = summarize(folder, loaded.job, results, {"launch": time.perf_counter() - began - inside})
    text = json.dumps(summary.as_json())
    try:
        write_whole(folder.summary, text)
    except OSError as error:
        print(f"dure: cannot write {folder.summary}: {error}", file=sys.stderr)
    print(text if as_json else in_words(summary, language))


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
    from dure.drill import drill as room
    from dure.job import load_job

    loaded = load_job(job, _settings(settings or []), ranks)
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
        say=lambda text: print(f"dure: drill: {text}", file=sys.stderr, flush=True),
    )
    print_figures(room, figures, as_json)
    if any(fault["same_bits"] is False for fault in figures["faults"]):
        raise typer.Exit(3)


def main() -> None:
    """Run the command line; a failure is one line on stderr and the exit code that belongs to it."""
    try:
        app()
    except RankFailed as failed:
        if failed.details:
            print(failed.details.rstrip(), file=sys.stderr)
        _fail(failed)
    except DureError as error:
        _fail(error)


def _fail(error: DureError) -> NoReturn:
    print(f"dure: {error}", file=sys.stderr)
    sys.exit(error.exit_code)


def _settings(options: list[str]) -> dict[str, str]:
    settings = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {option}: write it as section.key=value, such as --set train.lr=0.01")
        settings[key.strip()] = value.strip()
    return settings


def _print_config(loaded: LoadedJob) -> None:
    from dure.job import all_values

    rows = [(key, json.dumps(value), source) for key, value, source in all_values(loaded)]
    key_width, value_width = (max(len(row[column]) for row in rows) for column in range(2))
    for key, value, source in rows:
        print(f"{key:<{key_width}}  {value:<{value_width}}  {source}")


@contextlib.contextmanager
def _new_run(
    run_dir: Path | None, name: str, *, goes_on: bool = False, fresh: bool = False
) -> Iterator[RunFolder]:
    """The run's folder, for this launch alone: one that holds no run yet, unless this is a run that `goes_on`."""
    from dure.launch.claim import Claim
    from dure.run_folder import RunFolder

    path = run_dir or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = RunFolder(path.absolute())
    if folder.job.exists() and fresh:
        aside = next(
            place
            for n in itertools.count(1)
            if not (place := folder.path.with_name(f"{path.name}.{n}")).exists()
        )
        with Claim(folder):  # nobody trains there
            try:
                folder.path.rename(aside)
            except OSError as error:
                raise UsageError(f"cannot move the earlier run {path} to {aside}: {error.strerror}") from None
        print(f"dure: the earlier run is in {aside} now", file=sys.stderr)
    elif folder.job.exists() and not goes_on:
        raise UsageError(
            f"{path} holds a run already, and this one has no checkpoints to go on from; give another --run-dir"
        )
    try:
        folder.create()
    except OSError as error:
        raise UsageError(
            f"cannot make the run folder {path}: {error.strerror}; give another --run-dir"
        ) from None
    with Claim(folder):
        yield folder

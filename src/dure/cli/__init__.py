"""The command line: one file per command; here they are joined, and errors become exit codes. Imports nothing heavy."""

from __future__ import annotations

import errno
import sys
from typing import Annotated

import typer

from dure.base.errors import DureError, RankFailed
from dure.base.language import chosen_language, speak
from dure.base.say import keep_output_harmless, redacted, say, stdout_trouble
from dure.cli import drill, train
from dure.cli.bench import bench
from dure.cli.checkpoints import checkpoints, export
from dure.cli.demo import demo
from dure.cli.doctor import doctor
from dure.cli.image import image
from dure.cli.lab import lab
from dure.cli.lesson import lesson
from dure.cli.new import new
from dure.cli.options import Lang
from dure.cli.page import PAGE_EPILOG, page, report
from dure.cli.plan import PLAN_EPILOG, plan
from dure.cli.receipt import VERIFY_EPILOG, receipt, verify
from dure.cli.replay import REPLAY_EPILOG, diff, replay
from dure.cli.run import ScriptCommand, run
from dure.cli.selftest import EPILOG as SELFTEST_EPILOG
from dure.cli.selftest import selftest
from dure.cli.submit import add_to as add_submit_to

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
    dure lesson                        how it works, in eleven chapters with real runs (Korean, English)
    dure new my_project                write a project that trains at once: job, model and data, script
    dure train job.toml --ranks 4      train a job; the bits never depend on the number of ranks
    dure page RUN                      see it in the browser, live or after; report RUN: one file to send
    dure plan job.toml --nodes 1,2,4,8 what more nodes, or other machines, would bring, before you have them
    dure checkpoints RUN               what a run has saved; export RUN out.safetensors: its weights
    dure verify RUN                    check what a run recorded of itself, offline; receipt RUN: show or sign it
    dure replay RUN --steps 40:60      compute steps of a run again, and compare; diff RUN1 RUN2: where they part
    dure submit job.toml               hand a job to Slurm, Kubernetes or Ray; status, logs, cancel
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
    lang: Lang = None,
) -> None:
    pass


app.command(epilog=train.EPILOG)(train.train)
app.command(hidden=True)(train.agent)
app.command(epilog="Example: dure run --ranks 4 ddp.py --epochs 2", cls=ScriptCommand)(run)
app.command()(demo)
app.command(epilog="Example: dure new spirals && cd spirals && dure train job.toml")(new)
app.command(epilog=PAGE_EPILOG)(page)
app.command()(report)
app.command(epilog=PLAN_EPILOG)(plan)
app.command(epilog="Example: dure lesson --lang ko; dure lesson -o lesson.html writes it as one file")(lesson)
app.command()(checkpoints)
app.command(epilog=SELFTEST_EPILOG)(selftest)
app.command()(export)
app.command()(receipt)
app.command(epilog=VERIFY_EPILOG)(verify)
app.command(epilog=REPLAY_EPILOG)(replay)
app.command()(diff)
app.command(epilog=drill.EPILOG)(drill.drill)
add_submit_to(app)
app.add_typer(bench, name="bench")
app.add_typer(doctor)
app.add_typer(image, name="image")
app.add_typer(lab, name="lab")


def main() -> None:
    """Run the command line; a failure is one line on stderr and the exit code that belongs to it."""
    keep_output_harmless()
    sys.exit(_exit_code())


def _exit_code() -> int:
    try:
        speak(chosen_language(None))
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

"""`dure image …`: parse, call, print. Imports nothing heavy until asked to."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dure.base.errors import UsageError
from dure.base.say import printable, say
from dure.cli.options import Json

if TYPE_CHECKING:
    from dure.image.build import Built
    from dure.image.squash import Progress

_LINE_SECONDS = 5.0

image = typer.Typer(
    no_args_is_help=True,
    help="Build the squashfs image that ranks run in, look at it, run in it.",
    rich_markup_mode=None,
)
Image = Annotated[Path, typer.Argument(metavar="IMAGE", help="Such as pytorch_squash.sqsh.")]


@image.command("build", epilog="Example: dure image build -o /mnt/shared/pytorch_squash.sqsh --packages dure")
def build(
    out: Annotated[
        Path, typer.Option("-o", "--output", help="The image to write; its sha256 is put beside it.")
    ] = Path("pytorch_squash.sqsh"),
    packages: Annotated[
        str,
        typer.Option(
            help="Only these distributions, with commas, and what they require.", show_default="all"
        ),
    ] = "",
    project: Annotated[
        Path | None, typer.Option(help="A folder of your own to pack too; it is /project inside.")
    ] = None,
    compression: Annotated[str, typer.Option(help="zstd, or gzip for old kernels and tools.")] = "zstd",
    level: Annotated[
        int | None, typer.Option(help="Of the compression.", show_default="zstd 3, gzip 6")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", help="docker://IMAGE: convert that with enroot or apptainer instead."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --from: print the command line, and stop.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Pack the interpreter, its packages and what they need of the system into one image.

    Neither root nor Docker is needed. The same inputs give the same bytes. Tests, headers and static libraries are
    left out. The image runs on a host that has none of what is in it.
    """
    if source is not None:
        _convert(source, out, dry_run)
        return
    from dure.image.build import build as build_image

    with _shown() as progress:
        built = build_image(
            out,
            packages=[name for name in packages.split(",") if name.strip()],
            project=project,
            compression=compression,
            level=level,
            progress=progress,
        )
    print(json.dumps(built.as_json()) if as_json else _in_words(built))


@image.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    path: Image,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND…", help="What to run, and its arguments.")],
    mount: Annotated[
        list[str] | None,
        typer.Option("--mount", help="SRC[:DST][:rw]: what is there inside; read-only without rw."),
    ] = None,
    workdir: Annotated[str, typer.Option(help="Where the command starts, inside.")] = "/",
    digest: Annotated[str | None, typer.Option(help="Refuse the image if its sha256 is another.")] = None,
    way: Annotated[
        str,
        typer.Option(
            help="How to get at its files: loop, squashfuse, unpack, or auto: the first that works."
        ),
    ] = "auto",
) -> None:
    """Run a command inside an image, with its exit code; SIGINT, SIGTERM and SIGUSR1 reach it.

    Everything but the mounts with `rw` refuses writes. Of the environment, only what says who a rank is and how it
    talks goes in.
    """
    from dure.image.digest import verified
    from dure.image.environment import passed
    from dure.image.inside import run_inside
    from dure.image.mounts import check_there, in_order, parse_mount
    from dure.image.tree import WAYS

    if way != "auto" and way not in WAYS:
        raise UsageError(f"--way {way}: choose one of {', '.join(WAYS)}, or auto")
    if command[0] == "--":  # `run IMAGE -- COMMAND` reads well too
        command = command[1:]
    if not command:
        raise UsageError("say what to run, such as: dure image run IMAGE -- python --version")
    mounts = in_order(parse_mount(text) for text in mount or ())
    check_there(mounts)
    now = verified(path)
    if digest is not None and digest != now:
        raise UsageError(f"the image {path} has the sha256 {now[:16]}…, but {digest[:16]}… is asked for")
    raise typer.Exit(
        run_inside(
            path,
            now,
            mounts,
            command,
            environment=passed(os.environ, now),
            workdir=workdir,
            ways=WAYS if way == "auto" else (way,),
        )
    )


@image.command("inspect")
def inspect(path: Image, as_json: Json = False) -> None:
    """Say what is in an image: versions of Python, torch and dure, and every package."""
    from dure.image.digest import verified
    from dure.image.inspect import manifest_of

    shown = {"image": str(path), "digest": verified(path), "bytes": path.stat().st_size, **manifest_of(path)}
    if as_json:
        print(json.dumps(shown))
        return
    packages = shown.pop("packages")
    for key, value in shown.items():
        print(f"{printable(key):<9} {printable(str(value))}")
    print("packages ", " ".join(printable(f"{name}=={version}") for name, version in packages.items()))


@image.command("digest")
def digest(
    path: Image,
    record: Annotated[
        bool, typer.Option("--record", help="Write it beside the image, as the one to expect.")
    ] = False,
) -> None:
    """Print an image's sha256, after holding it against the one recorded beside it."""
    from dure.image import digest as room

    if record:
        now = room.digest_of(path)
        room.record(path, now)
    else:
        now = room.verified(path)
    print(f"{now}  {path}")


def _convert(source: str, out: Path, dry_run: bool) -> None:
    import shlex
    import shutil
    import subprocess

    from dure.image import digest as room
    from dure.image.runner import import_command

    if not source.startswith("docker://"):
        raise UsageError(f"--from {source}: write it as docker://IMAGE[:TAG]")
    tool = next((name for name in ("enroot", "apptainer") if shutil.which(name)), None)
    if tool is None and not dry_run:
        raise UsageError("--from needs enroot or apptainer, and neither is installed; build without --from")
    line = import_command(tool or "enroot", source, str(out.absolute()))
    print(shlex.join(line), flush=True)
    if dry_run:
        return
    code = subprocess.run(line, check=False).returncode
    if code != 0:
        raise UsageError(f"{tool} ended with {code}; it says why above")
    room.record(out, room.digest_of(out))


def _in_words(built: Built) -> str:
    return (
        f"{built.image}: {built.bytes / 1e6:.0f} MB ({built.unpacked_bytes / 1e6:.0f} MB unpacked, {built.files} "
        f"files, {built.packages} packages) in {built.seconds:.1f} s\n"
        f"  python {built.python} · torch {built.torch or 'none'} · dure {built.dure}\n"
        f"  sha256 {built.digest}"
    )


@contextlib.contextmanager
def _shown() -> Iterator[Progress]:
    """Progress on stderr: a bar on a terminal, elsewhere a line every few seconds."""
    last = time.monotonic()

    def line(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > _LINE_SECONDS:
            last = time.monotonic()
            of = f" of {total / 1e6:.0f}" if total else ""
            say(f"image: {what}: {done / 1e6:.0f}{of} MB")

    if not sys.stderr.isatty():
        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("listing files", total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total or None
        )

"""The packages of this environment: which files belong to which, also for those installed editable."""

from __future__ import annotations

import json
import re
import site
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path, PurePosixPath

import dure
from dure.base.errors import UsageError
from dure.image.contents import HOME, Entry, file_entry, folder_entries, wanted_of_package

_NEVER = {"pip"}
"""Distributions that are of no use in an image that nothing can be installed into."""
_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")


def normal_name(name: str) -> str:
    """A distribution's name as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def site_folders() -> list[Path]:
    """The folders of installed packages that this interpreter imports from."""
    known = {*site.getsitepackages(), site.getusersitepackages()}
    return [Path(path) for path in dict.fromkeys(sys.path) if path in known and Path(path).is_dir()]


def chosen(wanted: Sequence[str]) -> list[metadata.Distribution]:
    """The distributions of these names (with extras, as `dure[s3]`) and all they require; of none: every one."""
    installed = {
        normal_name(found.metadata["Name"]): found
        for found in metadata.distributions(path=[str(folder) for folder in reversed(site_folders())])
    }
    if not wanted:
        return [installed[name] for name in sorted(installed) if name not in _NEVER]
    taken: dict[tuple[str, frozenset[str]], metadata.Distribution] = {}
    waiting = [_parsed(text) for text in wanted]
    missing = sorted(name for name, _ in waiting if name not in installed)
    if missing:
        raise UsageError(
            f"--packages names {', '.join(missing)}, not installed in {sys.prefix}; install it there, or leave it out"
        )
    while waiting:
        name, extras = waiting.pop()
        if name not in installed or (name, extras) in taken:
            continue
        taken[name, extras] = installed[name]
        for requirement in installed[name].requires or []:
            only_for = _EXTRA.search(requirement)
            if only_for is None or only_for[1] in extras:
                waiting.append(_parsed(requirement))
    return [found for _, found in sorted({name: found for (name, _), found in taken.items()}.items())]


def _parsed(text: str) -> tuple[str, frozenset[str]]:
    found = _REQUIREMENT.match(text)
    if found is None:
        raise UsageError(f"--packages {text}: write the name of a distribution, such as dure[s3]")
    return normal_name(found[1]), frozenset(
        extra.strip() for extra in (found[2] or "").split(",") if extra.strip()
    )


def package_entries(wanted: Sequence[str], version: str) -> Iterator[Entry]:
    """Every file of the chosen packages, `dure` itself first: from wherever it is imported now."""
    target = f"{HOME}/lib/python{version}/site-packages"
    (own,) = dure.__path__
    yield from folder_entries(Path(own), f"{target}/dure", wanted_of_package)
    yield _script("dure", "dure.cli", "main")
    distributions = chosen(wanted)
    if wanted:
        for distribution in distributions:
            yield from distribution_entries(distribution, target)
    else:
        for folder in site_folders():
            yield from (
                entry
                for entry in folder_entries(folder, target, wanted_of_package)
                if not PurePosixPath(entry.path).name.startswith("__editable__")
                and not _of_never(entry.path[len(target) + 1 :])
            )
    for distribution in distributions:
        yield from editable_entries(distribution, target)
        yield from script_entries(distribution)


def _of_never(path: str) -> bool:
    first = path.partition("/")[0]
    return any(first == name or re.fullmatch(rf"{name}-[^/]*\.dist-info", first) for name in _NEVER)


def distribution_entries(distribution: metadata.Distribution, target: str) -> Iterator[Entry]:
    """The files that a distribution's installation recorded."""
    for recorded in distribution.files or ():
        path = str(recorded)
        # Scripts stand outside (`../../../bin/dure`); they are made anew, because they name their interpreter.
        if path.startswith("..") or path.startswith("__editable__") or not wanted_of_package(path):
            continue
        source = Path(str(distribution.locate_file(recorded)))
        if source.is_file():
            yield file_entry(source, f"{target}/{path}")


def editable_entries(distribution: metadata.Distribution, target: str) -> Iterator[Entry]:
    """The source of a distribution that is installed by a path to it, as if it were installed."""
    said = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not said.get("dir_info", {}).get("editable") or normal_name(distribution.metadata["Name"]) == "dure":
        return
    paths = [
        Path(str(distribution.locate_file(file)))
        for file in distribution.files or ()
        if file.suffix == ".pth"
    ]
    folders = [Path(line) for path in paths for line in path.read_text().splitlines() if Path(line).is_dir()]
    if not folders:
        raise UsageError(
            f"{distribution.metadata['Name']} is installed editable in a way that names no folder; install it plainly "
            "(pip install .), or leave it out with --packages"
        )
    for folder in folders:
        for found in sorted(folder.iterdir()):
            if (found / "__init__.py").is_file():
                yield from folder_entries(found, f"{target}/{found.name}", wanted_of_package)
            elif found.suffix in {".py", ".so"}:
                yield file_entry(found, f"{target}/{found.name}")


def script_entries(distribution: metadata.Distribution) -> Iterator[Entry]:
    """Its commands, for the image's interpreter."""
    for point in distribution.entry_points:
        if point.group == "console_scripts" and re.fullmatch(r"[\w.-]+", point.name):
            yield _script(point.name, point.module, point.attr)


def _script(name: str, module: str, attribute: str) -> Entry:
    text = (
        f"#!{HOME}/bin/python\nimport sys\nfrom {module} import {attribute.partition('.')[0]}\n"
        f"sys.exit({attribute}())\n"
    )
    return Entry(f"{HOME}/bin/{name}", data=text.encode(), executable=True)

"""MkDocs hooks: the pages that are generated from the source, and links that lead out of docs/.

Pages are read on a code host too, as plain Markdown, so they link to source files and to the other language. A site of
its own has neither: it has a language switch, and shows a source file by its path.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mkdocs.plugins import event_priority

if TYPE_CHECKING:
    import click
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_LANGUAGE_LINK = re.compile(r"^\*\[(?:한국어|English)\]\([\w.-]+\.md\)\*\n\n?", flags=re.MULTILINE)
_LINK_OUT = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")


@event_priority(100)
def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is generated, and replace the links that only a code host can follow."""
    for name, generate in _GENERATED.items():
        marker = f"<!-- generated: {name} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, generate())
    return _LINK_OUT.sub(_path_of_source, _LANGUAGE_LINK.sub("", markdown))


def _path_of_source(link: re.Match[str]) -> str:
    text, path = link[1].strip("`"), link[2]
    return f"`{path}`" if path.endswith(text) else f"{link[1]} (`{path}`)"


def command_line() -> str:
    """Every command of `dure` with its arguments and options, from the parser itself."""
    import typer

    from dure.cli import app

    root: Any = typer.main.get_command(app)
    parts: list[str] = []
    for name, command in root.commands.items():
        if not command.hidden:
            parts += _command(f"dure {name}", command, level=2)
    return "\n".join(parts)


def _command(name: str, command: click.Command, level: int) -> list[str]:
    import click

    parts = [f"{'#' * level} `{name}`\n", _text(command.help or ""), ""]
    subcommands = getattr(command, "commands", {})
    if not subcommands:
        context = click.Context(command, info_name=name)
        usage = " ".join(command.collect_usage_pieces(context))
        parts += [f"```\n{name} {usage}\n```\n"]
        rows = [record for parameter in command.params if (record := _row(parameter, context))]
        if rows:
            parts += ["| | |", "|---|---|", *rows, ""]
    for subname, subcommand in subcommands.items():
        parts += _command(f"{name} {subname}", subcommand, level + 1)
    return parts


def _row(parameter: click.Parameter, context: click.Context) -> str | None:
    record = parameter.get_help_record(context)
    if record is None:
        return None
    names, words = (re.sub(r"\s+", " ", part) for part in record)
    return f"| `{names}` | {_escaped(words)} |"


def _text(help_text: str) -> str:
    """A help text as Markdown: what follows a line with \\b is kept as it is, as click would."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", help_text.replace("\f", "").strip()):
        if paragraph.lstrip().startswith("\b"):
            lines = [line.strip() for line in paragraph.replace("\b", "").strip("\n").splitlines()]
            parts.append("```\n" + "\n".join(lines).strip() + "\n```")
        else:
            parts.append(_escaped(re.sub(r"\s+", " ", paragraph)))
    return "\n\n".join(parts) + "\n"


def _escaped(words: str) -> str:
    """Text in which Markdown finds no links, tags or emphasis, but for `code`."""
    pieces = words.split("`")
    pieces[::2] = [re.sub(r"([\[\]<>*_|])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


def api() -> str:
    """The public names of the library; mkdocstrings writes their signatures and docstrings."""
    import dure
    from dure.team.team import PUBLIC

    homes = dure._HOMES
    first = ["start", "Team"]
    names = [*first, *sorted(set(homes) - set(first))]
    members = f"    options:\n      members: [{', '.join(PUBLIC)}]\n      inherited_members: true\n"
    return "\n".join(f"::: {homes[name]}.{name}\n{members if name == 'Team' else ''}" for name in names)


_GENERATED = {"command line": command_line, "api": api}
"""What stands in the pages as `<!-- generated: NAME -->`."""

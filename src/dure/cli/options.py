"""Options that several commands have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dure.base.language import chosen_language, speak


def _speak(wanted: str | None) -> str | None:
    if wanted is not None:
        speak(chosen_language(wanted))
    return wanted


RunDir = Annotated[
    Path | None,
    typer.Option(
        help="Where the run keeps its files.",
        show_default="runs/NAME-TIME; on several nodes in the storage's checkpoints/",
    ),
]
NodeRank = Annotated[
    int | None,
    typer.Option(
        "--node-rank",
        "--node_rank",
        help="Which of the nodes this is, from 0, the leader.",
        show_default="none",
    ),
]
Leader = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS:PORT", help="Where node 0 is reached by the others.", show_default="none"),
]
TeamKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--team-key",
        metavar="FILE",
        help="The secret by which nodes that are started by hand know each other: the same file on all, mode 600; "
        "the leader makes it if it is not there.",
        show_default="DURE_TEAM_KEY_FILE, else the leader prints a key to type",
    ),
]
Port = Annotated[int, typer.Option(help="Port of the team on this machine; 0: a free one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Lang = Annotated[
    str | None,
    typer.Option(
        callback=_speak,
        help="en or ko: for all that is shown; logs and files stay English.",
        show_default="DURE_LANG, else by the locale",
    ),
]
Page = Annotated[
    bool,
    typer.Option("--page", help="Show it in the browser while it runs: a process of its own, `dure page`."),
]
Ranks = Annotated[
    str | None,
    typer.Option(
        help="Processes that train together: 8, or 2:8 to go on with fewer, down to 2, when some cannot be kept alive.",
        show_default="the job's",
    ),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value; beats the job file. Repeat it.")
]


def ray_setting(address: str | None) -> list[str]:
    """What --ray-address says, as the setting that it is."""
    return [] if address is None else [f"ray.address={json.dumps(address, ensure_ascii=False)}"]

"""How one node of a run starts, as a value: it goes to other hosts, and into the job's image, as JSON.

`dure train` makes it from its command line, once. Whoever starts the same node elsewhere hands the value on, to
`dure agent`: over ssh as the first message of standard input, into an image as a file. So a host, or the inside of an
image, trains the very job that was read, and no command line is put together from another.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from dure.base.errors import UsageError
from dure.base.files import read_at_most, write_whole
from dure.base.in_image import digest_inside
from dure.base.lines import LineError, Lines, decode, encode
from dure.base.run_folder import RunFolder
from dure.base.say import say
from dure.base.team_key import TeamKey
from dure.config import LoadedJob
from dure.engine.attached import obey_input
from dure.engine.new_run import default_folder, named_by_time, set_aside
from dure.engine.nodes import nodes_of
from dure.engine.run_job import Admission, Start, run_job
from dure.image.enter import command_inside
from dure.launch.nodes.join import Nodes
from dure.launch.nodes.key_by_hand import key_by_hand, key_file, wait_for_key_file

STANDARD_INPUT = "-"
_MESSAGE = "Start"
_MESSAGE_SECONDS = 60.0
_LONGEST = 16 << 20


@dataclass(frozen=True)
class NodeStart:
    """All that the command line says of one node's part in a run."""

    loaded: LoadedJob
    job_file: Path
    run_dir: Path | None = None
    fresh: bool = False
    port: int = 0
    node_rank: int | None = None
    leader: str | None = None
    team_key: Path | None = None
    """The file with the team's key."""
    attached: bool = False
    """Whether a supervisor sends the key, and what to do, over standard input."""
    as_json: bool = False
    lang: str | None = None
    page: bool = False
    """Whether a page is served beside the run."""

    def to_json(self) -> dict[str, Any]:
        """As plain values; paths are absolute."""
        plain = {**asdict(replace(self, loaded=None)), "loaded": self.loaded.to_json()}  # type: ignore[arg-type]
        return {
            key: str(value.absolute()) if isinstance(value, Path) else value for key, value in plain.items()
        }

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> NodeStart:
        """The inverse of `to_json`; raises UsageError."""
        try:
            paths = {
                key: None if plain[key] is None else Path(plain[key])
                for key in ("job_file", "run_dir", "team_key")
            }
            return cls(**{**plain, **paths, "loaded": LoadedJob.from_json(plain["loaded"])})
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"this is no node's start that this version of dure writes ({error}); all hosts, and the image, must "
                "have the same version"
            ) from None

    def to_line(self) -> bytes:
        """As the first message to an agent."""
        return encode(_MESSAGE, self.to_json())


def read_start(source: str) -> NodeStart:
    """What another `dure` has handed on: in a file, which is removed, or over standard input."""
    if source == STANDARD_INPUT:
        try:
            # What follows is for whoever obeys the supervisor, maybe inside an image.
            name, plain = decode(Lines(0, None, byte_by_byte=True).next(_MESSAGE_SECONDS))
        except LineError as error:
            raise UsageError(
                f"nothing has come over standard input: {error}; `dure train` starts agents"
            ) from None
        return NodeStart.from_json(plain if name == _MESSAGE else {})
    path = Path(source)
    try:
        plain = json.loads(read_at_most(path, _LONGEST))
        path.unlink()
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"cannot read {path}: {error}; `dure train` writes it, for the inside of an image"
        ) from None
    return NodeStart.from_json(plain)


def start_node(start: NodeStart, key: TeamKey | None = None) -> None:
    """Do this node's part of a run, here or inside the job's image; `key`: the team's, where it is known already."""
    nodes = nodes_of(start.loaded, start.node_rank, start.leader)
    if start.loaded.job.cluster.image is not None and digest_inside() is None:
        _enter_image(start, nodes)
    run_job(
        start.loaded,
        Start(start.run_dir, fresh=start.fresh, port=start.port, page=start.page),
        nodes,
        None if nodes is None else _admission(start, nodes) if key is None else Admission(key),
        as_json=start.as_json,
        lang=start.lang,
    )


def _admission(start: NodeStart, nodes: Nodes) -> Admission:
    if start.attached:
        # The leader before this one ends by itself when its lease is over.
        return Admission(*obey_input(nodes.lost_seconds, leads=nodes.leads), 2 * nodes.lost_seconds + 10)
    return Admission(
        key_by_hand(
            key_file(start.team_key),
            leads=nodes.leads,
            nodes=nodes.count,
            seconds=nodes.join_seconds,
            say=say,
        )
    )


def _enter_image(start: NodeStart, nodes: Nodes | None) -> NoReturn:
    """Become `dure agent` inside the job's image. What is mounted there cannot be moved: that is done before."""
    loaded, leads = start.loaded, nodes is None or nodes.leads
    team_key = None if start.attached or nodes is None else key_file(start.team_key)
    if nodes is not None and team_key is not None:
        wait_for_key_file(team_key, leads=leads, seconds=nodes.join_seconds, say=say)
    run = start.run_dir or default_folder(loaded, several_nodes=nodes is not None)
    if run is None:
        run = named_by_time(loaded.job.name)
    elif start.run_dir is None and not leads:
        run = run.parent  # the leader will say which folder it is
    run = run.absolute()
    if start.fresh and leads and RunFolder(run).job.exists():
        set_aside(RunFolder(run))
    is_known = leads or start.run_dir is not None
    inside = replace(start, run_dir=run if is_known else None, fresh=False, team_key=team_key)
    handed_on = run / f".start-{socket.gethostname()}-{os.getpid()}.json"  # a folder that the image has, too
    line = command_inside(
        loaded,
        run,
        ["agent", str(handed_on)],
        job_file=start.job_file.absolute(),
        of_any_run=not is_known,
        extra=() if team_key is None else (team_key,),
    )
    try:
        for left in run.glob(f".start-{socket.gethostname()}-*.json"):  # of containers that did not start
            if not os.path.exists(f"/proc/{left.stem.rpartition('-')[2]}"):
                left.unlink(missing_ok=True)
        write_whole(handed_on, json.dumps(inside.to_json()))
    except OSError as error:
        raise UsageError(
            f"cannot write to the run's folder {run}: {error.strerror}; give another --run-dir"
        ) from None
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(line[0], line)

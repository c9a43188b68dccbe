"""The doctor's command: find the nodes, examine them, show what was found, and fail when something is wrong."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from dure.base.errors import PreflightFailed, StoppedAtOnce, UsageError
from dure.base.language import chosen_language
from dure.config import Cluster, LoadedJob, load_job, parse_settings
from dure.doctor.checks.storage import MARK
from dure.doctor.examine import Examination, examine
from dure.doctor.finding import Finding, note
from dure.doctor.inside import Order
from dure.doctor.plan import PORT, JobNeeds, needs_of, needs_without_job
from dure.doctor.reach import Node
from dure.doctor.report import as_object, show
from dure.doctor.words import HEADINGS, TITLES
from dure.engine import preflight_nodes
from dure.engine.slurm import allocation
from dure.engine.slurm.allocation import Allocation
from dure.engine.slurm.prepare import pyxis_with, slurm_runs_the_image
from dure.engine.slurm.request import request_for
from dure.engine.slurm.script import port_of


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    job: Path | None = None
    hosts: str | None = None
    settings: tuple[str, ...] = ()
    run_dir: Path | None = None
    slurm: bool | None = None
    """Whether the nodes come from Slurm; None: as the job has it."""
    wait_seconds: int = 60
    """How long Slurm may take to give them."""
    port: int | None = None


def run_doctor(asked: Asked, *, as_json: bool, lang: str | None) -> None:
    """Examine the nodes of a job, print what was found, and raise PreflightFailed if anything is wrong."""
    language = chosen_language(lang)
    try:
        found = look(asked)
    except KeyboardInterrupt:
        raise StoppedAtOnce("Ctrl-C: stopped; nothing is left on the nodes", 130) from None
    if as_json:
        print(json.dumps(as_object(found, language)))
    else:
        show(found, language)
    if found.bad_nodes:
        bad = [finding for finding in found.findings if finding.level == "bad"]
        checks = ", ".join(dict.fromkeys(HEADINGS[language][finding.check] for finding in bad))
        raise PreflightFailed(
            TITLES[language]["failed"].format(nodes=", ".join(found.bad_nodes), checks=checks)
        )


def look(asked: Asked) -> Examination:
    """All that is found on the nodes that are asked for."""
    if asked.job is None:
        if asked.settings or asked.run_dir is not None:
            raise UsageError("--set and --run-dir are for a job; name the job file too")
        loaded, cluster = None, _cluster_of(asked.hosts)
    else:
        loaded = load_job(asked.job, parse_settings(asked.settings), hosts=asked.hosts)
        cluster = loaded.job.cluster
    if not _from_slurm(asked, loaded, cluster):
        shared = len(cluster.hosts) > 1
        order = _order(asked, loaded, shared=shared)
        plan = _plan(asked, loaded, cluster.hosts, asked.port or PORT, order, shared=shared)
        line = None if order is None else order.to_line()
        found = examine(
            plan, preflight_nodes.over_ssh(cluster, line) if cluster.hosts else preflight_nodes.here(line)
        )
        return _with_notes(found, cluster, slurm_wanted=asked.slurm is None and _is_for_slurm(loaded))
    with _allocation(asked, loaded) as held:
        order = _order(asked, loaded, shared=True)
        plan = _plan(asked, loaded, held.addresses, asked.port or port_of(held.job_id), order, shared=True)
        return _with_notes(examine(plan, _steps(held, loaded, order)), cluster)


def _from_slurm(asked: Asked, loaded: LoadedJob | None, cluster: Cluster) -> bool:
    """Whether the nodes come from Slurm: as the command line says, else where the job names no hosts and has a
    [slurm] section, or wants several nodes and is looked at inside of an allocation; if Slurm is here at all."""
    if asked.slurm and asked.hosts is not None:
        raise UsageError(
            f"--hosts {asked.hosts} names the nodes, and --slurm has Slurm give some; choose one of them"
        )
    if asked.slurm is not None:
        return asked.slurm
    if cluster.hosts or not allocation.is_here():
        return False
    return _is_for_slurm(loaded) or (cluster.nodes > 1 and allocation.is_inside())


def _is_for_slurm(loaded: LoadedJob | None) -> bool:
    return loaded is not None and any(key.startswith("slurm.") for key in loaded.sources)


@contextmanager
def _allocation(asked: Asked, loaded: LoadedJob | None) -> Iterator[Allocation]:
    """The nodes of the job of Slurm that we are in, or some for the time of the look."""
    if allocation.is_inside():
        yield allocation.held_already()
        return
    if loaded is None:
        raise UsageError(
            "--slurm needs a job file, which says how many nodes; or run it inside of an allocation"
        )
    request = request_for(loaded, (), run_dir=asked.run_dir, work=Path.cwd())
    with allocation.hold(request, asked.wait_seconds) as held:
        yield held


def _steps(held: Allocation, loaded: LoadedJob | None, order: Order | None) -> tuple[Node, ...]:
    if loaded is None:
        return preflight_nodes.on_slurm(held, None, None)
    cpus = loaded.job.team.ranks * (loaded.job.slurm.cpus_per_rank or loaded.job.team.threads)
    if order is None or not slurm_runs_the_image(loaded):
        return preflight_nodes.on_slurm(held, cpus, None if order is None else order.to_line())
    options = pyxis_with(loaded, order.job_file, order.run_folder, of_any_run=order.of_any_run)
    return preflight_nodes.on_slurm(held, cpus, None, options)


def _order(asked: Asked, loaded: LoadedJob | None, *, shared: bool) -> Order | None:
    """With which folder for runs the nodes' parts go into the image; None: they go into none.

    Where it is `shared`, on several nodes or on Slurm's, nothing is made: the folder has to be there. On this machine
    alone a run makes its own, so there is a stand-in for it.
    """
    if loaded is None or asked.job is None or loaded.job.cluster.image is None:
        return None
    run_dir = None if asked.run_dir is None else asked.run_dir.absolute()
    if not shared:
        run_folder = run_dir or Path("runs", f"{MARK}{uuid.uuid4().hex[:8]}").absolute()
    elif run_dir is None:
        run_folder = _runs_in_storage(loaded)
    else:
        run_folder = run_dir if run_dir.is_dir() else run_dir.parent
    return Order(loaded, asked.job.absolute(), run_folder, of_any_run=shared)


def _plan(
    asked: Asked,
    loaded: LoadedJob | None,
    hosts: tuple[str, ...],
    port: int,
    order: Order | None,
    *,
    shared: bool,
) -> JobNeeds:
    if loaded is None:
        return needs_without_job(hosts, port=port)
    run_folder = asked.run_dir if order is None or order.of_any_run else order.run_folder
    if shared and run_folder is None:
        _runs_in_storage(loaded)  # refused, where it is a bucket
    return needs_of(loaded, asked.job, hosts, port=port, run_folder=run_folder, shared=shared)


def _runs_in_storage(loaded: LoadedJob) -> Path:
    if "://" in loaded.storage:
        raise UsageError(
            f"the job's storage is {loaded.storage}, and its runs keep their files in a folder that all nodes see; "
            "give one with --run-dir"
        )
    return loaded.run_in_storage("any").parent


def _with_notes(found: Examination, cluster: Cluster, *, slurm_wanted: bool = False) -> Examination:
    """With a note of the nodes that were not looked at."""
    notes: tuple[Finding, ...] = ()
    if slurm_wanted and not cluster.hosts:
        notes = (note("reach", found.nodes[0], "reach.no_slurm"),)
    elif cluster.nodes > len(found.nodes):
        values = {"wanted": cluster.nodes, "looked": len(found.nodes)}
        notes = (note("reach", found.nodes[0], "reach.alone", **values),)
    return replace(found, findings=(*notes, *found.findings))


def _cluster_of(hosts: str | None) -> Cluster:
    """The nodes that the command line names, checked as a job's are."""
    names = [name.strip() for name in (hosts or "").split(",") if name.strip()]
    try:
        return Cluster(nodes=max(1, len(names)), hosts=tuple(names))
    except ValidationError as error:
        raise UsageError(f"--hosts {hosts}: {error.errors()[0]['ctx']['error']}") from None

"""What is asked of Kubernetes: all that the manifest says, as one value; what could not run is refused here."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dure.base.errors import UsageError
from dure.base.say import printable
from dure.config import Kubernetes, Volume
from dure.engine.interface import Asked

_IMAGE = re.compile(r"[a-z0-9][a-zA-Z0-9._:/-]*@sha256:[0-9a-f]{64}")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""RFC 1123."""
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([eE][0-9]+|[KMGTPE]i?|k|m)?")
_LONGEST_NAME = 52
"""The index, of up to five digits, and a dash come behind it, and pods' names have some more."""


@dataclass(frozen=True)
class Request:
    """One run on Kubernetes."""

    name: str
    """Of the Job and its Service: RFC 1035."""
    settings: Kubernetes
    run: Path
    train: tuple[str, ...]
    """The command of a pod up to what depends on the manifest's form."""
    nodes: int
    fewest: int
    cpus: int
    resumable: bool


def request_for(asked: Asked, now: float | None = None) -> Request:
    """What `dure submit JOB --engine kubernetes` asks for. Raises UsageError for what no cluster could run."""
    loaded, settings = asked.loaded, asked.loaded.job.kubernetes
    cluster, team = loaded.job.cluster, loaded.job.team
    _check(settings)
    if cluster.image is not None:
        raise UsageError(
            "cluster.image is an image that nodes mount, and pods have one of their own, kubernetes.image; take it "
            "away with --set cluster.image="
        )
    mark = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    if asked.run_dir is None and "://" in loaded.storage:
        raise UsageError(
            f"the job's storage is {loaded.storage}, and a run keeps its files in a folder that all pods see; give one "
            "on a volume with --run-dir"
        )
    run = Path(os.path.normpath((asked.run_dir or loaded.run_in_storage(mark)).absolute()))
    job = Path(os.path.normpath(asked.job.absolute()))
    _need_volume(settings.volumes, job, "the job", writable=False)
    _need_volume(settings.volumes, run, "the run's folder", writable=True)
    options = [f"--set={setting}" for setting in asked.settings]
    options += [] if asked.ranks is None else [f"--ranks={asked.ranks}"]
    fewest = cluster.min_nodes or cluster.nodes
    span = str(cluster.nodes) if fewest == cluster.nodes else f"{fewest}:{cluster.nodes}"
    return Request(
        name=_name(loaded.job.name, run),
        settings=settings,
        run=run,
        train=(
            settings.python,
            "-m",
            "dure",
            "pod",
            str(job),
            *options,
            f"--nodes={span}",
            f"--run-dir={run}",
        ),
        nodes=cluster.nodes,
        fewest=fewest,
        cpus=team.ranks * (settings.cpus_per_rank or team.threads),
        resumable=loaded.job.resumable,
    )


def _name(job: str, run: Path) -> str:
    """A name that Kubernetes takes, for a job of any name: its letters, and a hash that tells runs apart."""
    mark = hashlib.sha256(os.fsencode(run)).hexdigest()[:8]
    plain = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")
    return f"dure-{plain}"[: _LONGEST_NAME - 9].rstrip("-") + f"-{mark}"


def _check(settings: Kubernetes) -> None:
    if settings.image is None:
        raise UsageError(
            "kubernetes.image is missing: the container image with Python, torch and dure, by its digest, as in "
            "registry.example/dure@sha256:…"
        )
    if not _IMAGE.fullmatch(settings.image):
        raise UsageError(
            f"kubernetes.image is {printable(repr(settings.image), 200)}, which names no image by its digest; write "
            "it as registry/name@sha256:… (`docker buildx imagetools inspect` shows it), so that all pods run the "
            "same bytes"
        )
    if not settings.volumes:
        raise UsageError(
            "kubernetes.volumes is empty: pods need storage that all of them see; give the claim of one that many "
            'nodes can mount, as in [[kubernetes.volumes]] claim = "fsx", path = "/fsx", writable = true'
        )
    if not _LABEL.fullmatch(settings.namespace):
        raise UsageError(
            f"kubernetes.namespace is {printable(repr(settings.namespace), 100)}; use small letters, digits and -, at "
            "most 63"
        )
    for what, value in (("memory", settings.memory), ("shm", settings.shm), *settings.resources.items()):
        if value is not None and not _QUANTITY.fullmatch(value):
            raise UsageError(
                f"kubernetes.{printable(what, 100)} is {printable(repr(value), 100)}; write it as Kubernetes does: "
                "16Gi, 500M, 2"
            )
    places = [volume.path for volume in settings.volumes]
    for place in places:
        if not place.startswith("/") or ":" in place or os.path.normpath(place) in ("/", "/dev/shm"):
            raise UsageError(
                f"kubernetes.volumes has the path {printable(repr(place), 200)}; use an absolute one without a colon, "
                "not / and not /dev/shm"
            )
    if len(set(map(os.path.normpath, places))) != len(places):
        raise UsageError("kubernetes.volumes mounts two volumes at one path; give each its own")
    _check_names(settings)


def _check_names(settings: Kubernetes) -> None:
    """Names of other objects, which Kubernetes would refuse only later."""
    for volume in settings.volumes:
        if volume.claim is not None and not all(map(_LABEL.fullmatch, volume.claim.split("."))):
            raise UsageError(
                f"kubernetes.volumes has the claim {printable(repr(volume.claim), 100)}; use small letters, digits, - "
                "and ."
            )
        for what, path in (("host_path", volume.host_path), ("sub_path", volume.sub_path)):
            if path is not None and ".." in PurePosixPath(path).parts:
                raise UsageError(
                    f"kubernetes.volumes has the {what} {printable(repr(path), 200)}; leave out .."
                )
        if volume.sub_path is not None and volume.sub_path.startswith("/"):
            raise UsageError(
                f"kubernetes.volumes has the sub_path {printable(repr(volume.sub_path), 200)}; it is relative to the "
                "volume"
            )
    account = settings.service_account
    if account is not None and not all(map(_LABEL.fullmatch, account.split("."))):
        raise UsageError(
            f"kubernetes.service_account is {printable(repr(account), 100)}, which is no name of one"
        )
    for kind, wanted in (("resources", settings.resources), ("node_selector", settings.node_selector)):
        for key in wanted:
            if not re.fullmatch(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", key):
                raise UsageError(
                    f"kubernetes.{kind} has {printable(repr(key), 100)}, which is no name that Kubernetes takes"
                )
    for value in settings.node_selector.values():
        if not re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", value):
            raise UsageError(
                f"kubernetes.node_selector has {printable(repr(value), 100)}, which is no label's value"
            )


def _need_volume(volumes: tuple[Volume, ...], path: Path, what: str, *, writable: bool) -> None:
    """Refuse a path that is on no volume, as pods mount them: the innermost mount counts."""
    inside = [volume for volume in volumes if path.is_relative_to(os.path.normpath(volume.path))]
    innermost = max(inside, key=lambda volume: len(PurePosixPath(volume.path).parts), default=None)
    if innermost is None:
        raise UsageError(
            f"{what} is {path}, which is on none of kubernetes.volumes "
            f"({printable(', '.join(volume.path for volume in volumes), 300)}); pods would not see it: they have the "
            "same paths as this machine"
        )
    if writable and not innermost.writable:
        raise UsageError(
            f"{what} is {path}, and pods may only read {innermost.path}; set writable = true for that volume, or give "
            "another --run-dir"
        )


def as_annotation(run: Path) -> str:
    """A path as an annotation, which is any UTF-8."""
    try:
        os.fspath(run).encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{printable(json.dumps(str(run)), 200)} is not UTF-8; give another --run-dir"
        ) from None
    return str(run)

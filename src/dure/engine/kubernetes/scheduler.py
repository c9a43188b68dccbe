"""`dure submit|status|cancel|logs --engine kubernetes`, by kubectl with whatever cluster and rights that has."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dure.base.errors import DureError, UsageError
from dure.base.run_folder import RunFolder
from dure.base.say import printable
from dure.base.team_key import TeamKey
from dure.engine.interface import Asked
from dure.engine.kubernetes import manifest
from dure.engine.kubernetes.request import request_for
from dure.engine.kubernetes.yaml import documents
from dure.engine.progress import Progress, progress_of

_ANSWER_SECONDS = 60.0
_JOB_OF = "batch.kubernetes.io/job-name"
_LABELS = ",".join(f"{key}={value}" for key, value in manifest.MANAGED_BY.items())
_FIELDS = ("active", "succeeded", "failed")


@dataclass(frozen=True)
class Submitted:
    """A Job that Kubernetes has taken."""

    name: str
    namespace: str
    run: str

    def as_json(self) -> dict[str, object]:
        """As plain values."""
        return asdict(self)

    def in_words(self) -> str:
        """For a person, with what to do next."""
        target = f"{self.namespace}/{self.name} --engine kubernetes"
        return (
            f"{self.namespace}/{self.name} is submitted\n"
            f"  run       {self.run}\n"
            f"  log       dure logs {target} --follow\n"
            f"  progress  dure status {target}\n"
            f"  end       dure cancel {target}"
        )


@dataclass(frozen=True)
class Status:
    """A Job and its run."""

    name: str
    namespace: str
    state: str
    """`Complete`, `Failed`, …, as its newest condition says; else `Running` or `Pending`."""
    reason: str
    nodes: int
    active: int
    succeeded: int
    failed: int
    """Pods that have failed so far; those that stopped and saved (75) too."""
    run: str
    progress: Progress | None
    """None also where the run's folder is not seen from here."""
    owner: tuple[str, str]
    """(kind, name) of what all else belongs to: the Job itself, or its JobSet."""

    @classmethod
    def of(cls, job: dict[str, Any]) -> Status:
        """What a Job, as kubectl shows it, says of a run; ValueError for what is none of ours."""
        try:
            status, meta = job.get("status") or {}, job["metadata"]
            true = [one for one in status.get("conditions") or [] if one.get("status") == "True"]
            newest = true[-1] if true else {}
            running = "Running" if status.get("active") else "Pending"
            run = str(meta["annotations"][manifest.RUN_ANNOTATION])
            return cls(
                name=str(meta["name"]),
                namespace=str(meta["namespace"]),
                state=str(newest.get("type", running)),
                reason=str(newest.get("reason", "")),
                nodes=int(job["spec"]["completions"]),
                run=run,
                progress=progress_of(RunFolder(Path(run))),
                owner=next(
                    (
                        ("jobset", str(one["name"]))
                        for one in meta.get("ownerReferences") or []
                        if one["kind"] == "JobSet"
                    ),
                    ("job", str(meta["name"])),
                ),
                **{field: int(status.get(field) or 0) for field in _FIELDS},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no Job of a run ({type(error).__name__}: {error})") from None

    def in_words(self) -> str:
        """For a person."""
        reason = f" ({self.reason})" if self.reason else ""
        step = "not seen from here, or not started"
        if self.progress is not None:
            step = f"step {self.progress.step} of {self.progress.steps}"
            step += " · done" if self.progress.done else ""
        return (
            f"{self.namespace}/{self.name}\n"
            f"  state     {self.state}{reason}, {self.active} of {self.nodes} pods run, {self.succeeded} are done, "
            f"{self.failed} have failed\n"
            f"  progress  {step}\n"
            f"  run       {self.run}"
        )


@dataclass(frozen=True)
class Statuses:
    """How several are."""

    jobs: tuple[Status, ...]

    def as_json(self) -> dict[str, object]:
        """As plain values."""
        return {"jobs": [asdict(job) for job in self.jobs]}

    def in_words(self) -> str:
        """For a person."""
        return "\n\n".join(job.in_words() for job in self.jobs) or "there is no Job that dure submitted"


@dataclass(frozen=True)
class Cancelled:
    """What was done to a Job."""

    name: str
    namespace: str
    how: str
    """`saves`: its pods are asked to end; `killed`: at once."""

    def as_json(self) -> dict[str, object]:
        """As plain values."""
        return asdict(self)

    def in_words(self) -> str:
        """For a person, with what to do next."""
        how = "its pods save and end" if self.how == "saves" else "its pods are ended at once"
        return f"{self.namespace}/{self.name} is deleted; {how}. dure submit with --run-dir goes on"


class KubernetesScheduler:
    """Jobs of a cluster that kubectl reaches. A target is NAMESPACE/NAME, or NAME in kubectl's own namespace."""

    def draft(self, asked: Asked) -> str:
        """The manifest. The Secret is not in it: what is printed stays in terminals and logs."""
        request = request_for(asked)
        return (
            f"# {request.name}: written by `dure submit --engine kubernetes`, which makes the Secret with the team's "
            "key too.\n# By hand, before `kubectl apply`:\n"
            f"#   head -c 32 /dev/urandom | base64 | kubectl create secret generic {manifest.secret_name(request)} \\\n"
            f"#     --namespace={request.settings.namespace} --from-file={manifest.KEY_FILE}=/dev/stdin\n"
            + documents(manifest.objects(request))
        )

    def submit(self, asked: Asked) -> Submitted:
        """Create the Job, and then what belongs to it and goes with it; all, or nothing."""
        request = request_for(asked)
        namespace = request.settings.namespace
        first, *_ = manifest.objects(request)
        made = json.loads(_kubectl(["create", "--filename=-", "--output=json"], stdin=json.dumps(first)))
        owner = {key: made[key] for key in ("apiVersion", "kind")}
        owner |= {key: made["metadata"][key] for key in ("name", "uid")}
        others = [manifest.secret(request, TeamKey.random().hex(), owner)]
        if not request.settings.jobset:
            others.append(manifest.service(request, owner))
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": others})
        try:
            # Not apply, which would write all of it, the key too, into an annotation.
            _kubectl(["create", "--filename=-"], stdin=text)
        except DureError:
            kind = manifest.owner_kind(request)
            _kubectl(["delete", kind, request.name, f"--namespace={namespace}", "--wait=false"])
            raise
        return Submitted(request.name, namespace, str(request.run))

    def status(self, target: str | None) -> Statuses:
        """How a Job is, or all of them."""
        if target is None:
            words = ["get", "jobs", f"--selector={_LABELS}", "--all-namespaces", "--output=json"]
            return Statuses(tuple(Status.of(job) for job in json.loads(_kubectl(words))["items"]))
        return Statuses((self._one(target),))

    def cancel(self, target: str, *, now: bool) -> Cancelled:
        """Delete a Job and all that belongs to it. Its pods have their grace to save, but for `now`."""
        job = self._one(target)
        name, place = job.name, f"--namespace={job.namespace}"
        if now:
            _kubectl(
                ["delete", "pods", place, f"--selector={_JOB_OF}={name}", "--grace-period=1", "--wait=false"]
            )
        _kubectl(["delete", *job.owner, place, "--wait=false"])
        return Cancelled(job.name, job.namespace, "killed" if now else "saves")

    def logs(self, target: str, *, follow: bool) -> Iterator[str]:
        """What all pods of a Job have printed, each line with its pod's name."""
        job = self._one(target)
        words = ["kubectl", "logs", f"--namespace={job.namespace}", f"--selector={_JOB_OF}={job.name}"]
        words += ["--prefix", "--tail=-1", f"--max-log-requests={max(5, job.nodes)}"]
        _need_kubectl()
        with subprocess.Popen([*words, *(["--follow"] if follow else [])], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield line.decode(errors="replace").rstrip("\n")

    def _one(self, target: str) -> Status:
        namespace, _, name = target.rpartition("/")
        if not name or target.startswith(("-", "/")) or "/" in namespace:
            raise UsageError(
                f"{printable(target, 100)} names no Job; give NAMESPACE/NAME, as `dure submit` printed it"
            )
        place = [f"--namespace={namespace}"] if namespace else []
        # Of a JobSet, it is the Job that it has made.
        selector = f"{_LABELS},app.kubernetes.io/instance={name}"
        words = ["get", "jobs", f"--selector={selector}", *place, "--output=json"]
        found = json.loads(_kubectl(words))["items"]
        if not found:
            raise UsageError(
                f"there is no Job {printable(target, 100)} that dure submitted; it may be deleted already"
            )
        return Status.of(found[0])


def _need_kubectl() -> None:
    if shutil.which("kubectl") is None:
        raise UsageError(
            "there is no kubectl here; run this where it is, with the cluster's credentials. "
            "`dure submit --engine kubernetes --dry-run` prints the manifest anywhere"
        )


def _kubectl(words: Sequence[str], *, stdin: str = "") -> str:
    """What kubectl printed; DureError with its last words when it failed."""
    _need_kubectl()
    try:
        ran = subprocess.run(
            ["kubectl", *words],
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DureError(f"kubectl {words[0]} has not answered within {_ANSWER_SECONDS:.0f} s") from None
    if ran.returncode != 0:
        raise DureError(
            f"kubectl {words[0]} failed: {printable(ran.stderr.strip() or 'without a word', 500)}"
        )
    return ran.stdout

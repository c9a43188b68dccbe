"""The manifest, as values: a pure function of a request, so that what is shown is what is applied.

Commands are lists of words and never see a shell. Kubernetes fills in `$(NAME)` in them, so every `$` is doubled. The
team's key is not in it: `submit` makes the Secret by itself.
"""

from __future__ import annotations

from typing import Any

from dure.config import Kubernetes, Volume
from dure.engine.kubernetes.request import Request, as_annotation

KEY_FOLDER = "/var/run/dure"
KEY_FILE = "team.key"
MANAGED_BY = {"app.kubernetes.io/managed-by": "dure"}
RUN_ANNOTATION = "dure/run"
RESUMABLE = 75
_WOULD_HAPPEN_AGAIN = [1, 2, 3, 4]
"""Training failed, the command is wrong, replicas differ, a node would fail the run."""
_REPLICATED = "node"
"""The name of the only kind of job in a JobSet."""


def objects(request: Request) -> list[dict[str, Any]]:
    """The objects to create, the one that owns the others first."""
    return [_job_set(request)] if request.settings.jobset else [_job(request), service(request)]


def owner_kind(request: Request) -> str:
    """What the others belong to, and go with."""
    return "jobset" if request.settings.jobset else "job"


def leader_host(request: Request) -> str:
    """The DNS name of the pod with index 0."""
    first = f"{request.name}-{_REPLICATED}-0-0" if request.settings.jobset else f"{request.name}-0"
    return f"{first}.{request.name}"


def secret_name(request: Request) -> str:
    """Of the Secret with the team's key."""
    return f"{request.name}-key"


def secret(request: Request, key: str, owner: dict[str, Any] | None) -> dict[str, Any]:
    """The Secret. It goes when its owner goes."""
    meta = _metadata(request, secret_name(request))
    if owner is not None:
        meta["ownerReferences"] = [owner]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": meta,
        "type": "Opaque",
        "immutable": True,
        "stringData": {KEY_FILE: key},
    }


def service(request: Request, owner: dict[str, Any] | None = None) -> dict[str, Any]:
    """The headless Service that gives each pod a name, before it is ready, too."""
    meta = _metadata(request, request.name)
    if owner is not None:
        meta["ownerReferences"] = [owner]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": request.name},
            "ports": [{"name": "leader", "port": request.settings.port, "protocol": "TCP"}],
        },
    }


def _metadata(request: Request, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": request.settings.namespace,
        "labels": {
            "app.kubernetes.io/name": "dure",
            "app.kubernetes.io/instance": request.name,
            **MANAGED_BY,
        },
        "annotations": {RUN_ANNOTATION: as_annotation(request.run)},
    }


def _job(request: Request) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(request, request.name),
        # A run that starts again fails in each of its pods.
        "spec": _job_spec(request, request.settings.retries * request.nodes if request.resumable else 0),
    }


def _job_set(request: Request) -> dict[str, Any]:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(request, request.name),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": request.name},
            "failurePolicy": {
                "maxRestarts": request.settings.retries if request.resumable else 0,
                # What its Job says would happen again is not tried again here either.
                "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [
                {
                    "name": _REPLICATED,
                    "replicas": 1,
                    "template": {
                        "metadata": {
                            "labels": {"app.kubernetes.io/instance": request.name, **MANAGED_BY},
                            "annotations": {RUN_ANNOTATION: as_annotation(request.run)},
                        },
                        "spec": _job_spec(request, 0),
                    },
                }
            ],
        },
    }


def _job_spec(request: Request, tries: int) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "completions": request.nodes,
        "parallelism": request.nodes,
        "backoffLimit": tries,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": "agent",
                        "operator": "In",
                        "values": _WOULD_HAPPEN_AGAIN
                        if request.resumable
                        else [*_WOULD_HAPPEN_AGAIN, RESUMABLE],
                    },
                },
                # A node that is drained or taken away is no failure of the run's.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                *(
                    [
                        {
                            "action": "Count",
                            "onExitCodes": {
                                "containerName": "agent",
                                "operator": "In",
                                "values": [RESUMABLE],
                            },
                        }
                    ]
                    if request.resumable
                    else []
                ),
            ]
        },
        "template": {
            "metadata": {
                "labels": {
                    "app.kubernetes.io/name": "dure",
                    "app.kubernetes.io/instance": request.name,
                    **MANAGED_BY,
                }
            },
            "spec": _pod_spec(request),
        },
    }


def _pod_spec(request: Request) -> dict[str, Any]:
    settings = request.settings
    spec: dict[str, Any] = {
        "subdomain": request.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace_seconds,
        "automountServiceAccountToken": settings.service_account is not None,
        "enableServiceLinks": False,
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "topologyKey": "kubernetes.io/hostname",
                        "labelSelector": {"matchLabels": {"app.kubernetes.io/instance": request.name}},
                    }
                ]
            }
        },
        "containers": [_container(request)],
        "volumes": [
            *(_volume(at, volume) for at, volume in enumerate(settings.volumes)),
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm}},
            {"name": "key", "secret": {"secretName": secret_name(request), "defaultMode": 0o440}},
        ],
    }
    if settings.service_account is not None:
        spec["serviceAccountName"] = settings.service_account
    if settings.node_selector:
        spec["nodeSelector"] = dict(settings.node_selector)
    if settings.tolerations:
        spec["tolerations"] = [one.model_dump(exclude_none=True) for one in settings.tolerations]
    if settings.user is not None:
        spec["securityContext"] = {"runAsUser": settings.user, "fsGroup": settings.user}
        # On a large file system, changing the owner of all that is there would take hours.
        spec["securityContext"]["fsGroupChangePolicy"] = "OnRootMismatch"
    if request.settings.jobset:
        del spec["subdomain"]  # JobSet sets it, and makes the Service
    return spec


def _container(request: Request) -> dict[str, Any]:
    settings = request.settings
    command = [
        *request.train,
        f"--leader={leader_host(request)}:{settings.port}",
        f"--team-key={KEY_FOLDER}/{KEY_FILE}",
    ]
    container: dict[str, Any] = {
        "name": "agent",
        "image": settings.image,
        "command": [_literal(word) for word in command],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        "ports": [{"name": "leader", "containerPort": settings.port}],
        "resources": _resources(settings, request.cpus),
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [
            *(_mount(at, volume) for at, volume in enumerate(settings.volumes)),
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "key", "mountPath": KEY_FOLDER, "readOnly": True},
        ],
    }
    if request.resumable:
        # Kubernetes sends SIGTERM after this. It ends with the agent, when all have saved.
        words = [settings.python, "-m", "dure", "pod-stop", str(request.run)]
        container["lifecycle"] = {"preStop": {"exec": {"command": words}}}  # nothing is filled in here
    return container


def _literal(word: str) -> str:
    return word.replace("$", "$$")


def _resources(settings: Kubernetes, cpus: int) -> dict[str, Any]:
    limits: dict[str, str] = dict(settings.resources)
    if settings.gpus_per_node:
        limits["nvidia.com/gpu"] = str(settings.gpus_per_node)
    if settings.memory is not None:
        limits["memory"] = settings.memory
    # No limit of CPUs: it would hold up all ranks when a loader or the agent has something to do.
    return {"requests": {"cpu": str(cpus), **limits}, **({"limits": limits} if limits else {})}


def _volume(at: int, volume: Volume) -> dict[str, Any]:
    if volume.claim is not None:
        return {"name": f"volume{at}", "persistentVolumeClaim": {"claimName": volume.claim}}
    return {"name": f"volume{at}", "hostPath": {"path": volume.host_path, "type": "Directory"}}


def _mount(at: int, volume: Volume) -> dict[str, Any]:
    mount = {"name": f"volume{at}", "mountPath": volume.path, "readOnly": not volume.writable}
    return mount if volume.sub_path is None else {**mount, "subPath": volume.sub_path}

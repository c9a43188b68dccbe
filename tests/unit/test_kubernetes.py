"""What `dure submit --engine kubernetes` writes: valid by Kubernetes' own schemas, whatever the names are."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.commands import dure

from dure.base.errors import Resumable, UsageError
from dure.base.run_folder import RunFolder
from dure.base.team_key import TeamKey
from dure.config import Kubernetes, load_job
from dure.engine.interface import Asked
from dure.engine.kubernetes import manifest
from dure.engine.kubernetes.manifest import objects, secret
from dure.engine.kubernetes.pod import read_mounted_key, save_and_wait, start_in_pod, wait_for_name
from dure.engine.kubernetes.request import request_for
from dure.engine.kubernetes.scheduler import KubernetesScheduler, Status
from dure.engine.kubernetes.yaml import documents
from dure.engine.node_start import NodeStart

GOLDEN = Path(__file__).with_name("kubernetes_manifests")
IMAGE = f"registry.example/dure@sha256:{'0f' * 32}"
JOB = """
name = {name}
storage = "."
[model]
factory = "m.py:model"
[data]
factory = "m.py:data"
global_batch = 16
[train]
steps = 3
[team]
ranks = 4
shards = 64
[cluster]
nodes = 2
[kubernetes]
{kubernetes}
"""
PLAIN = f"""
image = "{IMAGE}"
[[kubernetes.volumes]]
claim = "fsx"
path = "/fsx/cats"
[[kubernetes.volumes]]
claim = "fsx"
path = "/fsx/cats/checkpoints"
sub_path = "cats/checkpoints"
writable = true
"""
EVERYTHING = f"""
image = "{IMAGE}"
python = "/opt/it's 100% $(HOME)/python"
namespace = "train"
cpus_per_rank = 2
memory = "16Gi"
shm = "8Gi"
gpus_per_node = 4
resources = {{ "vpc.amazonaws.com/efa" = "1" }}
node_selector = {{ "node.kubernetes.io/instance-type" = "c7i.8xlarge" }}
tolerations = [
  {{ key = "nvidia.com/gpu" }},
  {{ key = "team", operator = "Equal", value = "ours", effect = "NoExecute" }},
]
service_account = "trainer"
user = 1000
port = 30000
retries = 3
grace_seconds = 300
[[kubernetes.volumes]]
host_path = "/fsx"
path = "/fsx"
writable = true
"""


def loaded(folder, kubernetes=PLAIN, name="cats", **settings):
    """The job, as it would lie in this folder of a volume."""
    path = folder / "job.toml"
    path.write_text(JOB.format(name=json.dumps(name), kubernetes=kubernetes))
    values = {key.replace("__", "."): value for key, value in settings.items()}
    return replace(load_job(path, values), folder=Path("/fsx/cats"))


def asked(folder, kubernetes=PLAIN, *, job="/fsx/cats/job.toml", run="/fsx/cats/checkpoints/r", **settings):
    return Asked(loaded(folder, kubernetes, **settings), Path(job), run_dir=Path(run) if run else None)


CASES = {
    "plain": {},
    "elastic": {"cluster__min_nodes": "1"},
    "unsaved": {"checkpoint__every_seconds": "0"},
    "jobset": {"kubernetes__jobset": "true"},
    "everything": {
        "kubernetes": EVERYTHING,
        "run": '/fsx/cats/checkpoints/it\'s 100% $HOME/$(POD_IP) \n"새"',
    },
}


def checked(value, version="1.37"):
    kubernetes_validate.validate(value, version, strict=True)


def schema_valid(request, version="1.37"):
    """Check all objects against Kubernetes' own schemas; a JobSet, which is no part of it, by its Job."""
    for value in [*objects(request), secret(request, "k" * 64, None)]:
        if value["kind"] == "JobSet":
            (only,) = value["spec"]["replicatedJobs"]
            checked({"apiVersion": "batch/v1", "kind": "Job", **only["template"]}, version)
        else:
            checked(value, version)


@pytest.mark.parametrize("case", CASES)
def test_the_manifest_is_the_one_that_was_looked_at(case, tmp_path):
    text = KubernetesScheduler().draft(asked(tmp_path, **CASES[case]))
    golden = GOLDEN / f"{case}.yaml"
    assert text == golden.read_text(), f"look at it, and write it to {golden}"


@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize("case", CASES)
def test_the_manifest_is_valid_by_the_official_schemas(case, version, tmp_path):
    request = request_for(asked(tmp_path, **CASES[case]))
    schema_valid(request, version)
    assert list(yaml.safe_load_all(documents(objects(request)))) == objects(request)


def test_a_wrong_manifest_is_found_by_the_schemas(tmp_path):
    job, _ = objects(request_for(asked(tmp_path)))
    job["spec"]["completionMod"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        checked(job)


def filled_in(word, values):
    """What Kubernetes makes of a word of a command."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else values.get(m[1], m[0]), word)


HOSTILE = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40)


@given(folder=HOSTILE, name=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z"), python=HOSTILE)
def test_hostile_names_stay_words_and_make_names_that_kubernetes_takes(
    folder, name, python, tmp_path_factory
):
    base = tmp_path_factory.getbasetemp()
    inner = folder.replace("/", "_").strip(".") or "x"
    run = f"/fsx/cats/checkpoints/{inner}"
    wish = asked(base, run=run, name=name, kubernetes__python=json.dumps(python))
    request = request_for(wish)
    made = objects(request)
    schema_valid(request)
    assert list(yaml.safe_load_all(documents(made))) == made
    for value in made:
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", value["metadata"]["name"])
    assert len(f"{request.name}-16383") <= 63
    (container,) = made[0]["spec"]["template"]["spec"]["containers"]
    words = [filled_in(word, {"POD_IP": "!", "HOME": "!"}) for word in container["command"]]
    assert words[: len(request.train)] == list(request.train)
    assert f"--run-dir={run}" in words
    assert words[0] == wish.loaded.job.kubernetes.python
    assert container["lifecycle"]["preStop"]["exec"]["command"][-1] == run


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8), VALUES, min_size=1, max_size=4
    )
)
def test_all_values_come_back_from_yaml_as_they_were(value):
    assert list(yaml.safe_load_all(documents([value, value]))) == [value, value]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kubernetes": ""}, "kubernetes.image is missing"),
        ({"kubernetes__image": "'dure:latest'"}, "names no image by its digest"),
        ({"kubernetes": f'image = "{IMAGE}"'}, "kubernetes.volumes is empty"),
        (
            {"job": "/home/me/job.toml"},
            "the job is /home/me/job.toml, which is on none of kubernetes.volumes",
        ),
        ({"run": "/fsx/cats/elsewhere"}, "pods may only read /fsx/cats; set writable = true"),
        ({"run": "/fsx/cats/checkpoints/../../../etc"}, "the run's folder is /etc, which is on none"),
        ({"run": None, "storage": "s3://bucket/x"}, "give one on a volume with --run-dir"),
        ({"kubernetes__namespace": "'A b'"}, "kubernetes.namespace is 'A b'"),
        ({"kubernetes__memory": "'lots'"}, "kubernetes.memory is 'lots'"),
        ({"kubernetes__shm": "''"}, "kubernetes.shm is ''"),
        ({"kubernetes__resources": "{ 'a b' = '1' }"}, "kubernetes.resources has 'a b'"),
        ({"kubernetes__node_selector": "{ a = 'b c' }"}, "kubernetes.node_selector has 'b c'"),
        ({"kubernetes__service_account": "'a b'"}, "kubernetes.service_account is 'a b'"),
        ({"kubernetes__volumes": "[{ claim = 'A!', path = '/fsx', writable = true }]"}, "has the claim 'A!'"),
        ({"kubernetes__volumes": "[{ claim = 'a', path = 'fsx', writable = true }]"}, "has the path 'fsx'"),
        ({"kubernetes__volumes": "[{ claim = 'a', path = '/dev/shm' }]"}, "has the path '/dev/shm'"),
        (
            {"kubernetes__volumes": "[{ claim = 'a', path = '/a', sub_path = '../b' }]"},
            "has the sub_path '../b'",
        ),
        ({"cluster__image": "'a.sqsh'"}, "take it away with --set cluster.image="),
    ],
)
def test_what_no_cluster_could_run_is_refused_in_the_jobs_words(change, words, tmp_path):
    with pytest.raises(UsageError, match=re.escape(words)):
        request_for(asked(tmp_path, **change))


def test_a_volume_has_one_source(tmp_path):
    with pytest.raises(UsageError, match="both are given"):
        loaded(tmp_path, kubernetes__volumes="[{ claim = 'a', host_path = '/a', path = '/a' }]")


def test_the_command_prints_the_manifest_anywhere_and_the_key_is_not_in_it(tmp_path):
    path = tmp_path / "job.toml"
    volume = f'[[kubernetes.volumes]]\nclaim = "fsx"\npath = "{tmp_path}"\nwritable = true'
    path.write_text(JOB.format(name='"cats"', kubernetes=f'image = "{IMAGE}"\n{volume}'))
    ran = dure("submit", path, "--engine", "kubernetes", "--dry-run")
    assert ran.code == 0, ran.err
    kinds = [value["kind"] for value in yaml.safe_load_all(ran.out)]
    assert kinds == ["Job", "Service"]
    assert not re.search(r"[0-9a-f]{64}", ran.out.replace(IMAGE, ""))
    assert "kubectl create secret generic" in ran.out
    refused = dure("submit", path, "--engine", "slurm", "--jobset", "--dry-run")
    assert (refused.code, refused.err.count("\n")) == (2, 1)


def test_all_pods_that_stop_and_save_are_started_again_and_no_others(tmp_path):
    spec = objects(request_for(asked(tmp_path)))[0]["spec"]
    again, why = {}, spec["podFailurePolicy"]["rules"]
    for rule in why:
        for code in rule.get("onExitCodes", {}).get("values", []):
            again.setdefault(code, rule["action"])
    assert again == {1: "FailJob", 2: "FailJob", 3: "FailJob", 4: "FailJob", 75: "Count"}
    assert spec["backoffLimit"] == Kubernetes().retries * 2
    unsaved = objects(request_for(asked(tmp_path, checkpoint__every_seconds="0")))[0]["spec"]
    assert unsaved["backoffLimit"] == 0
    assert "lifecycle" not in unsaved["template"]["spec"]["containers"][0]


def test_what_kubernetes_says_of_a_job_is_told(tmp_path):
    job = objects(request_for(asked(tmp_path, run="/fsx/cats/checkpoints/none")))[0]
    assert Status.of(job).state == "Pending"
    job["status"] = {"active": 1, "failed": 2, "conditions": [{"type": "Suspended", "status": "False"}]}
    status = Status.of(job)
    assert (status.state, status.active, status.failed, status.nodes) == ("Running", 1, 2, 2)
    job["status"]["conditions"].append({"type": "Failed", "status": "True", "reason": "PodFailurePolicy"})
    job["metadata"]["ownerReferences"] = [{"kind": "JobSet", "name": "dure-x"}]
    status = Status.of(job)
    assert (status.state, status.reason, status.owner) == ("Failed", "PodFailurePolicy", ("jobset", "dure-x"))
    assert "1 of 2 pods run" in status.in_words()
    for wrong in ({}, {"metadata": {}}, {"metadata": {"name": "x", "annotations": None}}):
        with pytest.raises(ValueError, match="no Job of a run"):
            Status.of(wrong)


def test_a_name_that_dns_does_not_know_yet_is_waited_for_and_then_named():
    answers = iter([UsageError("no such name"), "10.1.2.3"])

    def look_up(host):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert wait_for_name("dure-x-0.dure-x", 60.0, look_up=look_up) == "10.1.2.3"

    def never(host):
        raise UsageError(f"{host} cannot be resolved")

    with pytest.raises(Resumable, match=r"waiting for the leader's name dure-x-0\.dure-x in DNS"):
        wait_for_name("dure-x-0.dure-x", 0.0, look_up=never)


def test_a_mounted_key_is_read_whoever_owns_it(tmp_path):
    path = tmp_path / "team.key"
    path.write_text("ab" * 32 + "\n")
    path.chmod(0o444)
    assert read_mounted_key(path) == TeamKey.from_text("ab" * 32)
    path.chmod(0o644)
    path.write_text("short")
    with pytest.raises(UsageError, match="has 5 characters"):
        read_mounted_key(path)
    with pytest.raises(UsageError, match="is the Secret mounted"):
        read_mounted_key(tmp_path / "none")


@pytest.mark.parametrize("environ", [{}, {"JOB_COMPLETION_INDEX": "x"}, {"JOB_COMPLETION_INDEX": "-1"}])
def test_outside_of_an_indexed_job_a_pods_command_is_refused(environ, tmp_path):
    start = NodeStart(loaded(tmp_path), tmp_path, leader="dure-x-0.dure-x:29400")
    with pytest.raises(UsageError, match="JOB_COMPLETION_INDEX"):
        start_in_pod(start, tmp_path / "key", environ)


def test_before_a_pod_ends_its_run_is_asked_to_save_and_its_end_is_waited_for(tmp_path):
    folder = RunFolder(tmp_path / "run")
    save_and_wait(folder.path)  # nothing has begun: SIGTERM may come
    folder.create()
    folder.job.write_text("{}")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        code = "import sys; from pathlib import Path; from dure.engine.kubernetes.pod import save_and_wait\n"
        code += "save_and_wait(Path(sys.argv[1]), int(sys.argv[2]))"
        hook = subprocess.Popen([sys.executable, "-c", code, folder.path, str(process.pid)])
        deadline = time.monotonic() + 60
        while not folder.stop.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert hook.poll() is None
        process.communicate(b"\n")
        assert hook.wait(60) == 0


def test_the_agents_container_has_no_word_of_the_key(tmp_path):
    request = request_for(asked(tmp_path))
    value = secret(request, "s3cret" * 8, {"kind": "Job", "apiVersion": "batch/v1", "name": "x", "uid": "1"})
    checked(value)
    assert value["immutable"] is True
    assert "s3cret" not in json.dumps(objects(request))
    assert manifest.secret_name(request) == value["metadata"]["name"]

"""The doctor's parts that need no nodes: what it asks of them, whom it blames, and its words."""

import contextlib
import re
import socket
import string
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.commands import EXAMPLES, dure

from dure.base.errors import PreflightFailed
from dure.base.open_files import needed
from dure.config import load_job
from dure.doctor import quick_checks, refuse_bad
from dure.doctor.checks import agreement, machine, versions
from dure.doctor.checks.network import Listener, call
from dure.doctor.finding import Finding, bad, good
from dure.doctor.node import NodePart
from dure.doctor.plan import JobNeeds, needs_of
from dure.doctor.reach import NodeChannel, Unreached
from dure.doctor.sentences import SENTENCES
from dure.doctor.words import HEADINGS, TITLES, fix_of, in_one_line, value_of
from dure.engine.preflight_nodes import Node, on_slurm
from dure.engine.slurm.allocation import Allocation
from dure.image.contents import PYTHON
from dure.tools.bench.ports import free_ports

JOB = """
storage = "store"
[model]
factory = "parts.py:model"
[data]
factory = "dure.tools.demo.cats:photos"
args = {{ folder = "{{storage}}/photos" }}
global_batch = 8
[train]
steps = 1
{more}
"""


def job(tmp_path, more="", **settings):
    (tmp_path / "job.toml").write_text(JOB.format(more=more))
    return load_job(tmp_path / "job.toml", {key.replace("__", "."): value for key, value in settings.items()})


def failing(findings):
    return {finding.node for finding in findings if finding.level == "bad"}


def pair(sender, receiver, ok):
    return {"from": sender, "to": receiver, "port": 1} | (
        {"seconds": 1e-4, "bytes_per_second": 1e9} if ok else {"reason": "timed out"}
    )


def mesh(nodes, broken):
    return [pair(a, b, not broken(a, b)) for a in nodes for b in nodes if a != b]


@pytest.mark.parametrize(
    ("nodes", "broken", "blamed"),
    [
        ("abcd", lambda a, b: False, set()),
        ("ab", lambda a, b: b == "b", {"b"}),  # b does not let a in
        ("ab", lambda a, b: b == "a", {"a"}),
        ("ab", lambda a, b: True, {"b"}),  # nobody can tell: the leader is believed
        ("abcd", lambda a, b: b == "c", {"c"}),
        ("abcd", lambda a, b: a == "c", {"c"}),  # c cannot get out
        ("abcd", lambda a, b: "a" in (a, b), {"a"}),
        ("abcd", lambda a, b: b in "bd", {"b", "d"}),
    ],
)
def test_pairs_that_do_not_connect_are_laid_on_the_node_they_have_in_common(nodes, broken, blamed):
    findings = agreement.connections(mesh(nodes, broken), list(nodes))
    assert failing(findings) == blamed
    assert {finding.node for finding in findings} >= blamed


@pytest.mark.parametrize(
    ("kinds", "odd"),
    [("xxx", set()), ("xxy", {"2"}), ("yxx", {"0"}), ("xy", {"1"}), ("xyyx", {"1", "2"})],
)
def test_the_node_with_another_version_is_the_odd_one_and_the_leader_settles_a_draw(kinds, odd):
    named = {str(number): {"torch": kind} for number, kind in enumerate(kinds)}
    assert failing(agreement.same_versions(named)) == odd
    assert failing(agreement.same_cpu(dict(enumerate(kinds)))) == {int(number) for number in odd}


def test_a_file_that_is_missing_or_other_is_named():
    digests = {
        "a": {"job": "1", "loss": "2"},
        "b": {"job": "1", "loss": "3"},
        "c": {"job": None, "loss": "2"},
    }
    findings = agreement.same_files(digests, {"job": "/j.toml", "loss": "/l.py"})
    assert [(found.node, found.words) for found in findings] == [
        ("a", "digests.same"),
        ("b", "digests.differ"),
        ("c", "digests.missing"),
    ]
    assert "/l.py" in findings[1].values["files"]
    assert "/j.toml" in findings[2].values["files"]


@pytest.mark.parametrize(
    ("seen", "blind"),
    [
        ({"a": "ab", "b": "ab"}, set()),
        ({"a": "a", "b": "b"}, {"b"}),  # two folders of one name
        ({"a": "a", "b": "ab"}, {"a"}),  # only a does not see the other
        ({"a": "ac", "b": "b", "c": "ac"}, {"b", "c"}),  # c does not see what b wrote either
    ],
)
def test_a_node_that_does_not_see_what_others_wrote_is_named(seen, blind):
    assert (
        failing(agreement.seen_both_ways({node: list(found) for node, found in seen.items()}, list(seen)))
        == blind
    )


def test_every_sentence_is_there_in_both_languages_with_the_same_values():
    assert SENTENCES["en"].keys() == SENTENCES["ko"].keys()
    assert list(HEADINGS["en"]) == list(HEADINGS["ko"])
    assert TITLES["en"].keys() == TITLES["ko"].keys()
    fields = lambda text: {name for _, name, _, _ in string.Formatter().parse(text) if name}  # noqa: E731
    for key, sentences in SENTENCES["en"].items():
        assert key.partition(".")[0] in HEADINGS["en"]
        for english, korean in zip(sentences, SENTENCES["ko"][key], strict=True):
            assert fields(english) == fields(korean), key
            assert bool(english) == bool(korean), key


def test_every_sentence_that_the_code_says_is_written_down():
    rooms = [Path(agreement.__file__).parents[1], Path(agreement.__file__).parents[2] / "engine"]
    key = re.compile(rf'"((?:{"|".join(HEADINGS["en"])})\.[a-z_]+)"')
    said = {
        match
        for room in rooms
        for path in room.rglob("*.py")
        if path.name != "sentences.py"
        for match in key.findall(path.read_text())
    }
    assert said == set(SENTENCES["en"])


def test_a_finding_is_put_into_words_where_it_is_read():
    found = bad("shm", "node1", "shm.small", free=64 << 20, need=1 << 30)
    assert Finding.from_json(found.to_json()) == found
    assert value_of(found, "en") == "64.0 MiB; 1.0 GiB may be needed"
    assert "--shm-size" in fix_of(found, "ko")
    assert in_one_line(good("network", "a", "network.joined", rate=1.25e9, seconds=5e-5), "en") == (
        "network: 10.00 Gbit/s at least, 50 µs at most"
    )


def test_a_plan_asks_for_the_documents_mounts_on_several_nodes_only(tmp_path):
    loaded = job(tmp_path)
    store = str(tmp_path / "store")
    alone = needs_of(loaded, tmp_path / "job.toml")
    several = needs_of(loaded, tmp_path / "job.toml", ("a", "b"))
    assert (alone.refuses, alone.writable) == ((), str(Path("runs").absolute()))
    assert several.writable == f"{store}/checkpoints"
    assert f"{store}/training_data" in several.refuses
    assert several.needs == (f"{store}/photos",)
    assert several.files == {
        "job file": str(tmp_path / "job.toml"),
        "model.factory": str(tmp_path / "parts.py"),
        "data.factory": "dure.tools.demo.cats",
    }
    assert JobNeeds.from_json(several.to_json()) == several


@pytest.mark.parametrize(
    ("folder", "written"),
    [
        ("{storage}/saved/{run}", "store/saved"),
        ("{storage}/saved/of-{run}", "store/saved"),
        ("/scratch/{run}/x", "/scratch"),
        ("s3://bucket/{run}", "store/checkpoints"),  # the run itself is in a folder all the same
    ],
)
def test_a_plan_knows_where_runs_and_checkpoints_go(tmp_path, folder, written):
    plan = needs_of(job(tmp_path, f'[checkpoint]\nfolder = "{folder}"'), hosts=("a", "b"))
    assert plan.writable == str(tmp_path / written)
    assert plan.saves == ("s3://bucket" if "://" in folder else None)


def test_a_plan_knows_what_is_read_and_written_in_a_bucket(tmp_path):
    settings = {"storage": '"s3://bucket/job"', "model__weights": '"models/w.safetensors"'}
    loaded = job(tmp_path, '[checkpoint]\nfolder = "{storage}/saved/of-{run}"', **settings)
    plan = needs_of(loaded, hosts=("a", "b"), run_folder=tmp_path / "run")
    assert (plan.storage, plan.bucket, plan.refuses) == (None, "s3://bucket/job", ())
    assert plan.needs == ("s3://bucket/job/photos", "s3://bucket/job/models/w.safetensors")
    assert (plan.saves, plan.writable) == ("s3://bucket/job/saved", str(tmp_path / "run"))
    quick = needs_of(loaded, hosts=("a", "b"), run_folder=tmp_path / "run", quick=True)
    assert (quick.bucket, quick.saves, quick.needs) == (None, None, ())


def test_pretrained_weights_say_how_much_room_is_needed(tmp_path):
    (tmp_path / "store").mkdir()
    with (tmp_path / "store" / "big.safetensors").open("wb") as file:
        file.truncate(1 << 30)
    plan = needs_of(job(tmp_path, model__weights='"big.safetensors"', team__ranks="4"))
    assert plan.shm_bytes == 4 << 30
    assert plan.free_bytes == (4 << 30) * 3
    assert plan.needs[-1] == str(tmp_path / "store" / "big.safetensors")


def test_torchs_version_is_what_importing_it_would_say():
    code = "import torch; print(torch.__version__)"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert versions.torch_version() == said.stdout.strip()


def test_a_modules_file_is_found_without_importing_it():
    assert (
        versions.module_file("dure.tools.demo.cats")
        == Path(agreement.__file__).parents[2] / "tools" / "demo" / "cats.py"
    )
    assert versions.module_file("dure.tools.demo").name == "__init__.py"
    assert versions.module_file("no_such_package.module") is None
    assert versions.module_file("dure.no_such") is None


def test_few_open_files_are_pointed_out(monkeypatch):
    need = needed(512, 8, 64)
    assert need > 1530  # three connections to each of 511 peers
    plan = JobNeeds(open_files=need)
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 1024))
    found = machine.open_files(plan, "node0")
    assert found.level == "bad"
    assert f"1024 at most; {need} may be needed" in value_of(found, "en")
    assert "ulimit -Hn" in fix_of(found, "en")
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 4096))
    found = machine.open_files(plan, "node0")
    assert found.level == "ok"
    assert f"256, which a run raises to {need}" in value_of(found, "en")
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
    assert machine.open_files(plan, "node0").level == "ok"


def test_the_doctor_computes_how_many_files_a_job_opens(tmp_path):
    settings = {"team.ranks": 8, "team.shards": 512}
    few, many = (
        needs_of(job(tmp_path, **settings, **{"cluster.nodes": nodes}), hosts=("a", "b")).open_files
        for nodes in (2, 64)
    )
    assert few < 1024 < many
    assert many == needed(512, 8, 64)


def test_nodes_measure_each_other_and_strangers_are_hung_up_on():
    (free,) = free_ports(1)
    listener = Listener("127.0.0.1", free, "token")
    try:
        (measured,) = call("127.0.0.1", "127.0.0.1", listener.ports, "token")
        assert measured["bytes_per_second"] > 0
        (refused,) = call("127.0.0.1", "127.0.0.1", listener.ports, "another")
        assert "another program listens there" in refused["reason"]
        with socket.create_connection(("127.0.0.1", listener.ports[-1])) as stranger:
            stranger.sendall(b"p" * 64)
            stranger.settimeout(60)
            assert len(stranger.recv(100)) in (0, 32)
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(100) == b""
    finally:
        listener.close()


def test_a_node_answers_what_it_cannot_do_with_the_reason():
    node = NodePart()
    assert "KeyError" in node.answer("dance", {})["error"]
    assert (
        node.answer("look", {"node": "a", "token": "t", "plan": JobNeeds().to_json()})["answer"]["ports"]
        == []
    )


def started(script):
    """A line to a part that is this piece of Python, in place of a node's."""
    return NodeChannel(Node("node1", (sys.executable, "-c", script), "try"))


def test_a_node_that_is_ended_takes_its_mark_away(tmp_path):
    plan = JobNeeds(writable=str(tmp_path)).to_json()
    line = NodeChannel(Node("node1", (sys.executable, "-m", "dure", "doctor", "--serve"), "try"))
    try:
        line.wait_until_ready(60, 60)
        assert line.ask("look", 60, node="node1", token="t", plan=plan)["wrote"] == [str(tmp_path)]
        assert [path.name for path in tmp_path.iterdir()] == [".dure-doctor-t-node1"]
        line._process.terminate()
        assert line._process.wait(60) == 143
        assert list(tmp_path.iterdir()) == []
    finally:
        line.close()


def test_what_a_node_says_in_place_of_an_answer_is_told():
    ready = "import sys; print('Welcome!'); print('Ready {}', flush=True); input(); "
    aftermath = "srun: error: node1: task 0: Exited with exit code 1"
    for script, told in (
        (f"{ready} print('lp0 on fire', flush=True); input()", "says 'lp0 on fire', which is no answer"),
        (f"{ready} sys.exit('no memory\\n{aftermath}')", "hung up: no memory"),
        (f"""{ready} print('Answer {{"error": "KeyError"}}', flush=True); input()""", "KeyError"),
    ):
        line = started(script)
        try:
            line.wait_until_ready(60, 60)
            with pytest.raises(Unreached, match=re.escape(told)):
                line.ask("look", 60)
        finally:
            line.close()


def test_the_quick_part_is_quick_and_passes_a_job_that_can_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = job(tmp_path)
    quick_checks(loaded)
    spent = []
    for _ in range(5):
        began = time.process_time()  # of this process alone, however busy the machine is
        findings = quick_checks(loaded)
        spent.append(time.process_time() - began)
    assert min(spent) < 0.2
    refuse_bad(findings)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "job.toml"]


def test_the_quick_part_needs_no_torch():
    code = (
        "import sys; from pathlib import Path; from dure.doctor import quick_checks; from dure.config import load_job;"
        f"quick_checks(load_job(Path({str(EXAMPLES / 'cats.toml')!r}))); print('torch' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert said.stdout.strip() == "False"


def test_the_quick_part_refuses_what_cannot_run(tmp_path):
    loaded = job(tmp_path, model__weights='"missing.safetensors"')
    with pytest.raises(PreflightFailed, match=r"storage: .*store is not there") as refused:
        refuse_bad(quick_checks(loaded, run_folder=tmp_path / "run"))
    assert refused.value.exit_code == 4
    on_nodes = job(tmp_path, cluster__interface='"eth77"')
    (tmp_path / "store").mkdir()
    with pytest.raises(PreflightFailed, match="there is no eth77 here"):
        refuse_bad(quick_checks(on_nodes, leader="10.0.1.10", run_folder=tmp_path / "run"))


def test_one_machine_is_looked_at_without_ssh_and_what_is_wrong_ends_it_with_4(tmp_path):
    job(tmp_path)
    ended = dure("doctor", tmp_path / "job.toml", "--json", cwd=tmp_path)
    assert ended.code == 4
    assert '"bad_nodes": ["localhost"]' in ended.out
    assert "preflight failed on localhost: same files, storage" in ended.err
    (tmp_path / "parts.py").touch()
    (tmp_path / "store" / "photos").mkdir(parents=True)
    ended = dure("doctor", tmp_path / "job.toml", "--set", "cluster.nodes=2", cwd=tmp_path)
    assert ended.code == 0, ended.out
    assert "1 of the job's 2 nodes" in ended.out


def test_a_job_for_slurm_is_looked_at_here_where_there_is_no_slurm_and_that_is_said(tmp_path):
    job(tmp_path, "[slurm]\npartition = 'train'")
    (tmp_path / "parts.py").touch()
    (tmp_path / "store" / "photos").mkdir(parents=True)
    no_slurm = {"cwd": tmp_path, "PATH": str(tmp_path)}
    ended = dure("doctor", tmp_path / "job.toml", "--json", **no_slurm)
    assert ended.code == 0, ended.err
    assert '"reach.no_slurm"' in ended.out
    ended = dure("doctor", tmp_path / "job.toml", "--json", "--no-slurm", **no_slurm)
    assert '"reach.no_slurm"' not in ended.out
    ended = dure("doctor", tmp_path / "job.toml", "--slurm", **no_slurm)
    assert (ended.code, "there is no salloc here" in ended.err) == (2, True), ended.err
    ended = dure("doctor", tmp_path / "job.toml", "--slurm", "--hosts", "a,b", **no_slurm)
    assert (ended.code, "choose one of them" in ended.err) == (2, True), ended.err


def test_an_image_that_slurm_runs_is_told_to_srun():
    held = Allocation(7, ("n0", "n1"), ("10.0.1.10", "10.0.1.11"))
    node = on_slurm(held, 4, None, ["--container-image=/i.sqsh"])[1]
    assert (node.name, node.order) == ("n1", None)
    assert node.command == (
        *(
            "srun",
            "--quiet",
            "--jobid=7",
            "--overlap",
            "--nodelist=n1",
            "--nodes=1",
            "--ntasks=1",
            "--chdir=/",
        ),
        *("--cpus-per-task=4", "--container-image=/i.sqsh", PYTHON, "-m", "dure", "doctor", "--serve"),
    )
    outside = on_slurm(held, None, "order")[0]
    assert outside.command[-5:] == (sys.executable, "-m", "dure", "doctor", "--serve-inside")
    assert outside.order == "order"


@pytest.mark.parametrize("hosts", ["a,a", "-oProxyCommand=reboot", "a b,c", "$(reboot)"])
def test_hosts_that_cannot_be_are_refused(hosts):
    ended = dure("doctor", f"--hosts={hosts}")
    assert ended.code == 2
    assert "host" in ended.err

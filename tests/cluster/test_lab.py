"""A cluster on one machine: hosts for whoever is on them, and nothing left when they are gone."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.commands import dure
from support.leftovers import all_gone, wait_until

from dure.base.errors import UsageError
from dure.tools.lab import Lab, remote, why_not_here
from dure.tools.lab.state import lab_folder, read_state

REASON = why_not_here()
needs_root = pytest.mark.skipif(REASON is not None, reason=f"lab: {REASON}")
NAME = f"test-{os.getpid()}"


def run(lab, place, *command, check=True, **options):
    """What a command printed in a place."""
    done = subprocess.run(
        lab.command(place, command), capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert not check or done.returncode == 0, done
    return done.stdout.strip() if check else done


def ssh(lab, place, target, command, **options):
    return run(lab, place, "ssh", "-F", str(lab.ssh_config), target, command, **options)


def connects(lab, place, address, seconds=60):
    code = f"import socket; print(socket.create_connection(('{address}', 22), {seconds}).getpeername()[0])"
    return run(lab, place, sys.executable, "-S", "-c", code, check=False)


def processes_of(lab):
    """Every process of the lab as the outside sees it, places first."""
    places = lab.state.places
    found = []
    for pid in [*(place.pid for place in places), *(pid for place in places for pid in place.pids())]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def counted(lab, count):
    """All processes of the lab, as soon as they are so many: a child of sshd or a shell may still be leaving."""
    wait_until(lambda: len(processes_of(lab)) == count, lambda: f"{count} processes, not {processes_of(lab)}")
    return processes_of(lab)


def outside():
    """What of a lab could be seen outside of it."""
    return (
        Path("/proc/self/mountinfo").read_text(),
        sorted(line.partition(":")[0] for line in Path("/proc/net/dev").read_text().splitlines()),
        sorted(Path("/run/netns").iterdir()) if Path("/run/netns").is_dir() else [],
        sorted(path for path in Path("/dev/shm").iterdir() if NAME in path.name),
        lab_folder(NAME).exists(),
    )


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = outside()
    yield
    Lab(NAME).down()
    # Others use this machine too: what they mount for a moment is gone again soon.
    wait_until(lambda: outside() == before, lambda: f"{outside()} to be {before}")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def lab(shared):
    """One lab for the tests that only look at it, or put back what they change."""
    if REASON is not None:
        pytest.skip(f"lab: {REASON}")
    with Lab(f"{NAME}-shared", rate="1gbit", storage=shared) as made:
        yield made


def test_places_have_the_documents_addresses_and_find_each_other_by_name(lab):
    places = {"login": "10.0.1.1", "node0": "10.0.1.10", "node1": "10.0.1.11"}
    assert lab.addresses == places
    for place in lab.state.places:
        assert remote._is_listened_to(place, 22)  # from the start: a lab that is up can be reached
        assert not remote._is_listened_to(place, 23)
    for place, address in places.items():
        assert run(lab, place, "hostname") == place
        link = "switch" if place == "login" else "eth0"
        shown = json.loads(run(lab, place, "ip", "-json", "address", "show", "dev", link))
        assert address in [one["local"] for one in shown[0]["addr_info"]]
        code = "import socket, sys; print([socket.gethostbyname(name) for name in sys.argv[1:]])"
        assert run(lab, place, sys.executable, "-S", "-c", code, *places) == str([*places.values()])
        for other, there in places.items():
            assert connects(lab, place, other).stdout.strip() == there


def test_nothing_of_a_lab_is_seen_outside(lab):
    assert "switch" not in Path("/proc/net/dev").read_text()
    assert "eth0@" not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    assert "/mnt/shared" not in Path("/proc/self/mountinfo").read_text()
    assert Path("/etc/hosts").read_text() != run(lab, "node0", "cat", "/etc/hosts")


def test_storage_is_read_only_on_nodes_but_for_checkpoints_and_what_one_writes_the_others_read(lab, shared):
    (shared / "ddp.py").write_text("print(1)\n")
    for node in ("node0", "node1"):
        assert run(lab, node, "cat", "/mnt/shared/ddp.py") == "print(1)"
        for change in ("touch /mnt/shared/new", "echo >>/mnt/shared/ddp.py", "rm /mnt/shared/ddp.py"):
            refused = run(lab, node, "sh", "-c", change, check=False)
            assert refused.returncode != 0
            assert "Read-only file system" in refused.stderr
        run(lab, node, "sh", "-c", f"echo {node} >/mnt/shared/checkpoints/{node}")
    assert run(lab, "node0", "cat", "/mnt/shared/checkpoints/node1") == "node1"
    assert run(lab, "node1", "cat", "/mnt/shared/checkpoints/node0") == "node0"
    assert (shared / "checkpoints" / "node1").read_text() == "node1\n"
    run(lab, "login", "sh", "-c", "echo 2 >/mnt/shared/from-login")
    assert (shared / "from-login").read_text() == "2\n"


def test_each_node_has_shared_memory_temporary_files_and_processes_of_its_own(lab):
    name = f"{NAME}-file"
    run(lab, "node0", "touch", f"/dev/shm/{name}", f"/tmp/{name}")
    for folder in ("/dev/shm", "/tmp"):
        assert name in run(lab, "node0", "ls", folder).split()
        assert name not in run(lab, "node1", "ls", folder).split()
        assert not Path(folder, name).exists()
    # Its own first process, its sshd, and this command: not the machine's.
    listed = "ls /proc | grep '^[0-9]'"
    assert "1" in run(lab, "node1", "sh", "-c", listed).split()
    wait_until(lambda: len(run(lab, "node1", "sh", "-c", listed).split()) < 10)


def test_cables_have_the_rate_that_was_asked_for_both_ways(lab):
    for place, link in (("node0", "eth0"), ("node1", "eth0"), ("login", "node0"), ("login", "node1")):
        shown = json.loads(run(lab, place, "tc", "-json", "qdisc", "show", "dev", link))
        assert [(one["kind"], one["options"]["rate"]) for one in shown] == [("tbf", 125_000_000)]


def test_a_node_that_is_cut_off_has_no_carrier_until_it_is_healed(lab):
    assert connects(lab, "node0", "node1").returncode == 0
    lab.cut("node1")
    try:
        assert [place.joined for place in lab.status()] == [True, True, False]
        show = ("ip", "-json", "link", "show", "dev", "eth0")
        # The kernel passes it on about once a second.
        wait_until(lambda: "NO-CARRIER" in json.loads(run(lab, "node1", *show))[0]["flags"])
        assert connects(lab, "node0", "node1", 1).returncode != 0
        assert connects(lab, "node1", "node0", 1).returncode != 0
        assert connects(lab, "node0", "login").returncode == 0
    finally:
        lab.heal()
    assert connects(lab, "node0", "node1").returncode == 0
    assert all(place.joined for place in lab.status())
    with pytest.raises(UsageError, match="login has no cable"):
        lab.cut("login")
    with pytest.raises(UsageError, match="it has login, node0, node1"):
        lab.cut("node7")


def test_ssh_goes_from_the_login_to_nodes_and_between_nodes_with_the_labs_own_keys(lab):
    assert ssh(lab, "login", "node0", "hostname; echo $DURE_LAB").split() == ["node0", lab.name]
    assert ssh(lab, "node1", "10.0.1.10", "hostname") == "node0"
    assert run(lab, "node0", "ssh", "node1", "hostname") == "node1"  # no -F: the lab's is the places' own
    assert ssh(lab, "login", "node1", "exit 7", check=False).returncode == 7
    assert str(Path(sys.executable).parent) in ssh(lab, "login", "node1", "echo $PATH").split(":")
    refused = run(lab, "login", "ssh", "-F", "/dev/null", "-o", "BatchMode=yes", "node0", "true", check=False)
    assert refused.returncode == 255


def test_a_command_keeps_its_folder_streams_and_environment_and_ends_as_it_would_outside(lab, monkeypatch):
    monkeypatch.setenv("OF_THE_TEST", "kept")
    words = "pwd; cat; echo $OF_THE_TEST $DURE_LAB; echo wrong >&2; exit 9"
    done = run(lab, "node0", "sh", "-c", words, check=False, input="in\n", cwd="/usr")
    assert (done.stdout, done.stderr, done.returncode) == (f"/usr\nin\nkept {lab.name}\n", "wrong\n", 9)
    killed = run(lab, "node0", "sh", "-c", "kill -USR1 $$", check=False)
    assert killed.returncode == -signal.SIGUSR1
    missing = run(lab, "node0", "no-such-command", check=False)
    assert (missing.returncode, missing.stderr) == (127, "dure: lab: there is no command no-such-command\n")


def test_a_folder_that_a_node_does_not_have_is_named(lab, tmp_path):
    away = run(lab, "node0", "true", check=False, cwd=tmp_path)
    assert away.returncode == 125
    assert f"{tmp_path} is not there" in away.stderr


@pytest.mark.parametrize("to_group", [False, True])
def test_signals_reach_the_command_once_each(lab, to_group):
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('term', flush=True))\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('usr1', flush=True))\n"
        "signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    command = lab.command("node1", [sys.executable, "-S", "-c", code])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "ready\n"
        for name, word in ((signal.SIGTERM, "term\n"), (signal.SIGUSR1, "usr1\n")):
            (os.killpg if to_group else os.kill)(process.pid, name)
            assert process.stdout.readline() == word
        process.send_signal(signal.SIGUSR2)
        rest, _ = process.communicate(timeout=300)
        assert (rest, process.returncode) == ("", 0)


def test_a_command_dies_with_the_one_that_brought_it_in(lab):
    command = lab.command("node1", ["sleep", "1000"])
    with subprocess.Popen(command) as process:
        (inside,) = wait_until(psutil.Process(process.pid).children)
        wait_until(lambda: inside.name() == "sleep")
        process.kill()
    all_gone([inside])


def test_a_second_lab_of_the_same_name_is_refused_and_another_name_is_not(lab, tmp_path):
    with pytest.raises(UsageError, match="is up already"):
        Lab(lab.name, storage=tmp_path).up()
    with Lab(NAME, nodes=1, storage=tmp_path, ssh=False) as other:
        assert run(other, "node0", "hostname") == "node0"
        assert connects(other, "node0", "10.0.1.11", 1).returncode != 0


@needs_root
def test_the_commands_make_use_and_end_a_lab(tmp_path):
    def command(*words):
        done = dure("lab", *words, "--name", NAME)
        assert done.code == 0, done.err
        return done.out

    options = ("--nodes", "2", "--rate", "10gbit", "--storage", tmp_path / "shared")
    assert "node1   10.0.1.11   joined" in command("up", *options)
    made = Lab.find(NAME)
    everyone = counted(made, 6)  # three first processes, three sshd
    ran = dure("lab", "exec", "--name", NAME, "node1", "--", "sh", "-c", "hostname; exit 3")
    assert (ran.code, ran.out) == (3, "node1\n")
    ran = dure("lab", "exec", "--name", NAME, "node0", "ls", "-d", "--", "/mnt/shared/checkpoints")
    assert (ran.code, ran.out) == (0, "/mnt/shared/checkpoints\n")
    assert dure("lab", "exec", "--name", NAME, "node0", "--").code == 2
    command("cut", "node0")
    shown = json.loads(command("status", "--json"))
    assert [place["joined"] for place in shown["places"]] == [True, False, True]
    assert (shown["rate"], shown["storage"]) == ("10gbit", str(tmp_path / "shared"))
    command("heal", "node0")
    assert "cut" not in command("status")
    command("down")
    all_gone(everyone, 0)
    assert command("down") == ""
    gone = dure("lab", "status", "--name", NAME)
    assert gone.code == 2
    assert "there is no lab" in gone.err


@needs_root
def test_killing_the_first_processes_ends_their_places_and_down_leaves_nothing(tmp_path):
    lab = Lab(NAME, storage=tmp_path)
    lab.up()
    subprocess.run(
        lab.command("node0", ["sh", "-c", "sleep 1000 & setsid sleep 1000 &"]), check=True, timeout=300
    )
    everyone = counted(lab, 8)
    os.kill(lab.state.nodes[0].pid, signal.SIGKILL)
    all_gone([process for process in everyone if process.pid == lab.state.nodes[0].pid])
    assert [place.alive for place in lab.status()] == [True, False, True]
    for place in lab.state.places:
        if place.alive:
            os.kill(place.pid, signal.SIGKILL)
    all_gone(everyone)
    lab.down()


@needs_root
def test_up_clears_away_what_is_left_of_a_lab_that_broke(tmp_path):
    lab = Lab(NAME, storage=tmp_path, ssh=False)
    lab.up()
    everyone = processes_of(lab)
    os.kill(lab.state.nodes[1].pid, signal.SIGKILL)
    all_gone([lab.state.nodes[1].pid])
    lab.up()
    all_gone(everyone)
    assert all(place.alive for place in lab.status())


@needs_root
def test_down_never_kills_a_stranger_who_has_a_first_processs_pid_by_now(tmp_path):
    lab = Lab(NAME, storage=tmp_path, ssh=False)
    lab.up()
    everyone = processes_of(lab)
    with subprocess.Popen(["sleep", "1000"]) as stranger:
        path = lab.folder / "lab.json"
        state = json.loads(path.read_text())
        mine = state["login"]["pid"]
        state["login"]["pid"] = stranger.pid  # the start time stays that of the first process
        path.write_text(json.dumps(state))
        lab.down()
        assert stranger.poll() is None
        stranger.kill()
    os.kill(mine, signal.SIGKILL)  # the first process whose pid the test took away
    all_gone(everyone)


@needs_root
@pytest.mark.parametrize("moment", ["making", "made"])
def test_a_lab_that_belongs_to_a_process_is_gone_with_it(tmp_path, moment):
    stop = "os.kill(os.getpid(), 9)"
    code = f"""
import os, sys, time
from dure.tools.lab import Lab
from dure.tools.lab import lab as room
if "{moment}" == "making":
    room.network.lay_cables = lambda *_: {stop}
with Lab("{NAME}", storage=sys.argv[1], ssh=False):
    {stop}
"""
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=300, check=False)
    assert ended.returncode == -signal.SIGKILL
    state = read_state(lab_folder(NAME))
    assert len(state.places) == 3
    wait_until(lambda: not any(place.alive for place in state.places))


@needs_root
def test_a_lab_that_cannot_be_finished_leaves_nothing(tmp_path, monkeypatch):
    started = []

    def fail(*_):
        started.extend(psutil.Process(place.pid) for place in read_state(lab_folder(NAME)).places)
        raise UsageError("of the test")

    monkeypatch.setattr("dure.tools.lab.network.lay_cables", fail)
    with pytest.raises(UsageError, match="of the test"):
        Lab(NAME, storage=tmp_path).up()
    assert len(started) == 3
    all_gone(started)
    assert not lab_folder(NAME).exists()


@needs_root
def test_a_storage_that_is_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot use .*file as the storage: Not a directory"):
        Lab(NAME, storage=tmp_path / "file").up()


@needs_root
def test_folders_of_tmp_can_be_shown_to_nodes(tmp_path):
    (tmp_path / "shown").mkdir()
    with Lab(NAME, nodes=1, storage=tmp_path / "storage", ssh=False, shown=[tmp_path / "shown"]) as lab:
        run(lab, "node0", "touch", "from-node", cwd=tmp_path / "shown")
        assert run(lab, "node0", "ls", str(tmp_path)) == "shown"
    assert (tmp_path / "shown" / "from-node").exists()


@pytest.mark.parametrize("name", ["", "../up", "a b", "-x", "x" * 40, "a\nb"])
def test_a_name_that_could_leave_its_folder_is_refused(name):
    with pytest.raises(UsageError, match="cannot be called"):
        Lab(name)


@pytest.mark.parametrize(
    ("options", "words"), [({"nodes": 0}, "0 nodes"), ({"rate": "fast"}, "such as 10gbit")]
)
def test_a_lab_that_cannot_be_is_refused(options, words):
    with pytest.raises(UsageError, match=words):
        Lab(NAME, **options)


def test_a_user_without_root_is_told_why_not(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="take root"):
        Lab(NAME).up()

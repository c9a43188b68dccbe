"""An image is built, and really run in: the same bits, nothing written but where it may be, nothing left behind."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from support.alone import train_alone
from support.commands import EXAMPLES, dure
from support.leftovers import all_gone, wait_until

from dure.base.errors import JobError
from dure.base.in_image import digest_inside
from dure.config import load_job
from dure.image.contents import Entry
from dure.image.enter import command_inside, container_of, image_of
from dure.image.runner import own_command
from dure.image.squash import pack, squash_command

NOBODY = 65534


def ended(line, **options):
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, **options)


def run_in(image, *arguments, options=(), **env):
    return dure("image", "run", *options, image, "--", *arguments, **env)


def loops_of(image):
    """Loop devices that hold the image."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            found += [backing] if backing.read_text().strip() == str(image) else []
        except OSError:
            continue
    return found


def family(pid):
    """All that descends from a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def names_of(processes):
    """The names of those that are still there."""
    names = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.add(process.name())
    return names


def mounts_of_images():
    """What is mounted that is an image; others may mount what else they like."""
    return {line for line in Path("/proc/mounts").read_text().splitlines() if "squash" in line}


@pytest.fixture
def shared(tmp_path, image):
    """Document 004's storage: image, script and data read-only, checkpoints read-write."""
    shared = tmp_path / "shared"
    (shared / "training_data").mkdir(parents=True)
    (shared / "checkpoints").mkdir()
    (shared / "training_data" / "photo").write_text("photo")
    (shared / "model.safetensors").write_text("weights")
    for name in ("cnn_batchnorm.py", "cnn_batchnorm.toml"):
        shutil.copy(EXAMPLES / name, shared)
    os.link(image, shared / "pytorch_squash.sqsh")
    os.link(f"{image}.sha256", shared / "pytorch_squash.sqsh.sha256")
    return shared


def job_in(shared, *settings):
    given = dict(setting.split("=", 1) for setting in settings)
    return load_job(
        shared / "cnn_batchnorm.toml",
        {
            "storage": str(shared),
            "cluster.image": "pytorch_squash.sqsh",
            "cluster.runner": "bubblewrap",
            **given,
        },
    )


def test_versions_inside_are_those_outside(image):
    import torch

    import dure as package

    code = "import json, os, sys, torch, dure; print(json.dumps([sys.version, torch.__version__, dure.__version__, "
    code += "dure.__file__, os.environ['DURE_IMAGE'], sorted(os.environ)]))"
    ran = run_in(image, "python", "-c", code, SECRET="s", GLOO_SOCKET_IFNAME="eth0")
    assert ran.code == 0, ran.err
    python, torch_version, version, file, digest, names = json.loads(ran.out)
    assert (python, torch_version, version) == (sys.version, torch.__version__, package.__version__)
    assert file.startswith("/opt/dure/lib/")
    assert dure("image", "digest", image).out.split() == [digest, str(image)]
    assert "SECRET" not in names
    assert {"GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"} <= set(names)
    shown = json.loads(dure("image", "inspect", image, "--json").out)
    assert (shown["torch"], shown["digest"]) == (torch.__version__, digest)
    assert shown["packages"]["numpy"]


def test_same_inputs_same_digest_and_another_byte_another(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(os.urandom(300_000))
    entries = [
        Entry("/a"), Entry("/a/b", source=source), Entry("/a/c", data=b"c", executable=True), Entry("/l", link="a/b"),
    ]  # fmt: skip

    def packed(name, entries):
        pack(tmp_path / name, entries, squash_command("zstd", None))
        return (tmp_path / name).read_bytes()

    first = packed("one.sqsh", entries)
    os.utime(source, (1, 1))
    source.chmod(0o600)
    time.sleep(1.1)  # a time that crept in would differ by a second
    assert packed("two.sqsh", entries) == first
    assert packed("three.sqsh", [*entries, Entry("/a/d", data=b"d")]) != first
    listed = [
        line.split()
        for line in ended(["unsquashfs", "-UTC", "-lln", tmp_path / "one.sqsh"]).stdout.splitlines()
    ]
    assert [[line[0], line[1], line[3], *line[5:]] for line in listed] == [
        ["drwxr-xr-x", "0/0", "1980-01-01", "squashfs-root"],
        ["drwxr-xr-x", "0/0", "1980-01-01", "squashfs-root/a"],
        ["-rw-r--r--", "0/0", "1980-01-01", "squashfs-root/a/b"],
        ["-rwxr-xr-x", "0/0", "1980-01-01", "squashfs-root/a/c"],
        ["lrwxrwxrwx", "0/0", "1980-01-01", "squashfs-root/l", "->", "a/b"],
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "one.sqsh",
        "source",
        "three.sqsh",
        "two.sqsh",
    ]


def test_training_inside_gives_the_bits_of_training_outside(shared, tmp_path):
    outside = train_alone(shared / "cnn_batchnorm.toml", tmp_path / "run")
    loaded, run = job_in(shared), shared / "checkpoints" / "run-1"
    arguments = ["train", str(shared / "cnn_batchnorm.toml"), "--ranks", "2", "--run-dir", str(run), "--json"]
    line = command_inside(loaded, run, arguments)
    ran = ended(line, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr
    inside = json.loads(ran.stdout.splitlines()[-1])
    assert inside["weights_sha256"] == outside.weights_sha256
    assert list((run / "checkpoints").iterdir())


def test_a_run_inside_saves_when_it_is_told_to_stop_and_ends_with_75(shared):
    loaded, run = job_in(shared), shared / "checkpoints" / "run-1"
    arguments = ["train", str(shared / "cnn_batchnorm.toml"), "--ranks", "2", "--run-dir", str(run)]
    line = command_inside(loaded, run, [*arguments, "--set", "train.epochs=10000"])
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: "step" in process.stderr.readline(), "the first step", 300)
            process.send_signal(signal.SIGUSR1)
            _, said = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 75, said
    assert "SIGUSR1: stops after this step and saves" in said
    (saved, *_) = json.loads(dure("checkpoints", run, "--json").out)["checkpoints"]
    assert saved["step"] > 0


def test_only_checkpoints_take_writes(shared):
    loaded, run = job_in(shared), shared / "checkpoints" / "run-1"
    command_inside(loaded, run, [])  # makes the run's folder
    place = container_of(loaded, image_of(loaded), run, digest="")
    refused = [
        shared / "pytorch_squash.sqsh", shared / "cnn_batchnorm.py", shared / "training_data" / "photo",
        shared / "training_data" / "new", shared / "model.safetensors", shared / "checkpoints" / "other",
        "/opt/dure/bin/python", "/opt/dure/new", "/usr/new", "/etc/hosts", "/etc/new", "/new", "/mnt/new",
    ]  # fmt: skip
    code = """if True:
        import errno, os, sys
        taken, *refused = sys.argv[1:]
        with open(taken, "w") as file:
            file.write("step 1")
            os.fsync(file.fileno())
        os.rename(taken, taken + ".done")
        for path in refused:
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
            except OSError as error:
                print(errno.errorcode[error.errno], path)
            else:
                print("TAKEN", path)
    """
    line = own_command(sys.executable, place, ["python", "-c", code, str(run / "state"), *map(str, refused)])
    ran = ended(line)
    assert ran.returncode == 0, ran.stderr
    answers = dict(reversed(answer.split(" ", 1)) for answer in ran.stdout.splitlines())
    assert set(answers) == {str(path) for path in refused}
    assert set(answers.values()) <= {"EROFS", "ENOENT"}, answers  # ENOENT: not even its folder is there
    assert answers[str(shared / "training_data" / "photo")] == "EROFS"
    assert (run / "state.done").read_text() == "step 1"


def test_checkpoints_outside_the_read_write_mounts_are_refused_before_anything_starts(shared):
    loaded = job_in(shared, 'cluster.mounts=[{ source = "{storage}" }]')
    with pytest.raises(JobError, match="which is read-only; choose another folder, or add a mount"):
        command_inside(loaded, shared / "checkpoints" / "run-1", ["train"])
    assert not (shared / "checkpoints" / "run-1").exists()


def test_a_flipped_byte_is_refused_by_name(image, tmp_path):
    copy = tmp_path / "copy.sqsh"
    shutil.copy(image, copy)
    shutil.copy(f"{image}.sha256", f"{copy}.sha256")
    with copy.open("r+b") as file:
        file.seek(copy.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    ran = run_in(copy, "true")
    assert ran.code == 2
    assert f"the image {copy} is damaged or another one" in ran.err
    (tmp_path / "text.sqsh").write_text("no image")
    assert "is not a squashfs image" in run_in(tmp_path / "text.sqsh", "true").err
    assert "is asked for" in run_in(image, "true", options=["--digest", "0" * 64]).err


CODE = """if True:
    import signal, sys, time
    got = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda number, frame: got.append(signal.Signals(number).name))
    print("ready", flush=True)
    deadline = time.monotonic() + 240
    while len(got) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    print(*got, flush=True)
    sys.exit(43)
"""


def test_signals_reach_the_command_once_and_its_exit_code_comes_back(image):
    line = [sys.executable, "-m", "dure", "image", "run", str(image), "python", "-c", CODE]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        os.kill(process.pid, signal.SIGUSR1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, _ = process.communicate(timeout=300)
    assert sorted(out.split()) == ["SIGINT", "SIGTERM", "SIGUSR1"]
    assert process.returncode == 43
    assert run_in(image, "sh", "-c", "kill -TERM $$").code == 128 + signal.SIGTERM
    missing = run_in(image, "no-such-program")
    assert (missing.code, missing.err.strip()) == (
        127,
        "dure: inside the image: no-such-program: No such file or directory",
    )


@pytest.mark.parametrize("way", ["loop", "squashfuse"])
def test_kill_9_leaves_no_process_and_no_mount(image, way):
    if os.geteuid() != 0:
        pytest.skip("mounting takes root")
    if way == "squashfuse" and (shutil.which("squashfuse") is None or not os.path.exists("/dev/fuse")):
        pytest.skip("squashfuse or /dev/fuse is not here")
    mounts = mounts_of_images()
    code = "sleep 600 & sleep 600 & echo ready; wait"
    line = [sys.executable, "-m", "dure", "image", "run", "--way", way, str(image), "sh", "-c", code]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            inside = {"bwrap", "sh", "sleep", *(["squashfuse"] if way == "squashfuse" else [])}
            wait_until(lambda: inside <= names_of(family(process.pid)))
            started = family(process.pid)
            assert bool(loops_of(image)) == (way == "loop")
            assert mounts_of_images() <= mounts, "the mount is seen outside"
        finally:
            process.kill()
    all_gone(started)
    wait_until(lambda: not loops_of(image))


@pytest.fixture(scope="module")
def for_all(image):
    """The image and its cache, unpacked, in a folder that every user may enter; the cache is another user's.

    pytest's own folders are closed again whenever another session starts.
    """
    if os.geteuid() != 0:
        pytest.skip("becoming another user takes root")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copy(image, folder)
        cache = folder / "cache"
        cache.mkdir()
        first = run_in(
            folder / image.name, "id", "-u", options=["--way", "unpack"], XDG_CACHE_HOME=str(cache)
        )
        assert (first.code, first.out) == (0, "0\n"), first.err
        ended(["chown", "-R", f"{NOBODY}:{NOBODY}", str(cache)])
        yield folder


@pytest.mark.parametrize("way", ["unpack", "squashfuse"])
def test_a_user_who_is_not_root_runs_it_too(image, for_all, tmp_path, way):
    """With an interpreter that the user may read: the image's own, unpacked."""
    if way == "squashfuse" and (shutil.which("squashfuse") is None or not os.path.exists("/dev/fuse")):
        pytest.skip("squashfuse or /dev/fuse is not here")
    image, cache, devices = for_all / image.name, for_all / "cache", tmp_path / "devices"
    devices.mkdir()
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    trees = [path for path in (cache / "dure" / "images").iterdir() if path.is_dir()]
    (tree,) = [path for path in trees if path.name != "mounted"]
    # A /dev/fuse that this user may open, as most distributions have it; seen by this command alone.
    enter = """
        mount -t tmpfs none "$1" && mknod "$1/fuse" c 10 229 && chmod 666 "$1/fuse" && mount --bind "$1/fuse" /dev/fuse
        shift
        exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"
    """
    own = [f"{tree}/opt/dure/bin/python", "-m", "dure", "image", "run", "--way", way]
    env["LD_LIBRARY_PATH"] = os.path.dirname(next(tree.rglob("libc.so.6")))
    command = [str(image), "sh", "-c", "id -u; touch /opt/dure/x"]
    outside = ["unshare", "--mount", "sh", "-c", enter, "sh", str(devices)]
    second = ended([*outside, *own, *command], env=env, cwd="/")
    assert second.stdout == f"{NOBODY}\n", second.stderr
    assert "Read-only file system" in second.stderr
    left = {path.name for path in (cache / "dure" / "images").iterdir()} - {"mounted"}
    assert left == {tree.name, f"{tree.name}.lock"}


def test_this_process_is_in_no_image():
    assert digest_inside({}) is None
    assert digest_inside({"DURE_IMAGE": "ab12"}) == "ab12"

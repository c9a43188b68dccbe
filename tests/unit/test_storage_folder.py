"""A folder as shared storage: exact reads, whole writes, plain words, and no way out of it."""

import os
import re
import shutil
import stat
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.base.errors import StorageError, UsageError
from dure.storage import Layout, open_store

CONTENT = bytes(range(256)) * 41


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "weights.bin").write_bytes(CONTENT)
    return tmp_path


@pytest.mark.parametrize(
    ("start", "length"), [(0, 0), (0, 1), (7, 1001), (len(CONTENT) - 3, 3), (0, len(CONTENT))]
)
def test_a_read_gives_exactly_the_bytes_that_were_asked_for(folder, start, length):
    store = open_store(folder)
    wanted = CONTENT[start : start + length]
    assert store.read("models/weights.bin", start, length) == wanted
    into = bytearray(length)
    store.read_into("models/weights.bin", start, memoryview(into))
    assert into == wanted


def test_a_read_fills_memory_of_any_element_type(folder):
    import numpy as np

    into = np.zeros((10, 8), np.float32)
    open_store(folder).read_into("models/weights.bin", 5, memoryview(into))
    assert into.tobytes() == CONTENT[5 : 5 + 320]


def test_short_reads_are_continued(folder, monkeypatch):
    """A network file system may give less than was asked for."""
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole(fd, [views[0][:1000]], at))
    store = open_store(folder)
    assert store.read("models/weights.bin", 3, 5500) == CONTENT[3:5503]
    assert store.access.read_requests == 6
    assert store.access.read_bytes == 5500


def test_what_is_read_and_written_is_counted(folder):
    store = open_store(folder)
    assert store.access.as_dict() == dict.fromkeys(store.access.as_dict(), 0)
    store.read("models/weights.bin", 0, 100)
    store.size("models/weights.bin")
    store.write_whole("checkpoints/a", [b"12345", memoryview(b"678")])
    store.remove("checkpoints/a")
    counts = store.access.as_dict()
    assert counts.pop("seconds") > 0
    assert counts == {"read_requests": 2, "read_bytes": 100, "write_requests": 3, "written_bytes": 8}


def test_counts_from_many_threads_add_up(folder):
    store = open_store(folder)

    def read_many():
        for start in range(500):
            store.read("models/weights.bin", start, 3)

    threads = [threading.Thread(target=read_many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.access.read_requests == 4000
    assert store.access.read_bytes == 12000


@pytest.mark.parametrize("path", ["", ".", "..", "a/../b", "../a", "/etc/passwd", "a\0b", "a/..", "x\ud800"])
def test_a_path_that_could_leave_the_storage_is_refused_by_every_call(folder, path):
    store = open_store(folder)
    calls = [
        lambda: store.size(path),
        lambda: store.read(path, 0, 1),
        lambda: store.read_into(path, 0, memoryview(bytearray(1))),
        lambda: store.exists(path),
        lambda: store.write_whole(path, [b"x"]),
        lambda: store.remove(path),
        lambda: store.remove_tree(path),
    ]
    for call in calls:
        with pytest.raises(StorageError, match=re.escape(f"{folder}: the path {path!r}")):
            call()
    assert [entry.name for entry in folder.iterdir()] == ["models"]


@given(st.text(alphabet="ab./\0~\\ ", max_size=12))
def test_no_path_leaves_the_storage(tmp_path_factory, path):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "inside").mkdir()
    store = open_store(outside / "inside")
    try:
        store.write_whole(path, [b"x"])
    except StorageError:
        assert os.listdir(outside / "inside") == []
    else:
        assert store.read(path, 0, 1) == b"x"
    assert os.listdir(outside) == ["inside"]
    shutil.rmtree(outside)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("models/none.bin", "there is no such file"),
        ("models", "is a folder"),
        ("models/weights.bin/x", "is a file, not a folder"),
        ("models/" + "x" * 300, "too long"),
        ("models/circle", "in a circle"),
        ("models/pipe", "a pipe"),
    ],
)
def test_what_cannot_be_read_is_said_in_plain_words(folder, path, words):
    (folder / "models" / "circle").symlink_to("circle")
    os.mkfifo(folder / "models" / "pipe")
    store = open_store(folder)
    for call in (
        lambda: store.size(path),
        lambda: store.read(path, 0, 1),
        lambda: store.read_into(path, 0, memoryview(bytearray(1))),
    ):
        with pytest.raises(StorageError, match=re.escape(str(folder))) as raised:
            call()
        assert words in str(raised.value)
        assert path in str(raised.value)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="/proc is not there")
def test_a_real_io_error_is_said_in_plain_words():
    """The kernel answers EIO for addresses of /proc/self/mem where nothing is. That file has no size, so the
    reading loop is called behind the check of the size."""
    from dure.storage.folder import FolderStore

    store = FolderStore("/proc/self")
    descriptor = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        with (
            pytest.raises(StorageError, match=r"cannot read mem: .*I/O error"),
            store._plainly("read", "mem"),
        ):
            store._fill(descriptor, "mem", 0, memoryview(bytearray(8)))
    finally:
        os.close(descriptor)


def test_a_truncated_file_is_named_with_its_size_before_anything_is_allocated(folder):
    store = open_store(folder)
    with pytest.raises(StorageError, match=r"models/weights.bin is 10,496 bytes long.*truncated"):
        store.read("models/weights.bin", 0, 1 << 60)
    with pytest.raises(StorageError, match="truncated"):
        store.read_into("models/weights.bin", len(CONTENT) - 1, memoryview(bytearray(2)))
    assert store.access.read_bytes == 0


def test_a_file_that_shrinks_while_it_is_read_is_an_error_not_a_signal(folder, monkeypatch):
    whole = os.preadv

    def shrink_then_read(fd, views, at):
        os.truncate(folder / "models" / "weights.bin", 2000)
        return whole(fd, views, at)

    monkeypatch.setattr(os, "preadv", shrink_then_read)
    with pytest.raises(StorageError, match="is 2,000 bytes long"):
        open_store(folder).read("models/weights.bin", 0, len(CONTENT))


def test_a_file_that_vanished_is_an_error(folder):
    store = open_store(folder)
    assert store.size("models/weights.bin") == len(CONTENT)
    (folder / "models" / "weights.bin").unlink()
    with pytest.raises(StorageError, match="no such file"):
        store.read("models/weights.bin", 0, 1)
    assert not store.exists("models/weights.bin")


def test_names_are_one_level_sorted_and_without_unfinished_files(folder):
    store = open_store(folder)
    store.write_whole("checkpoints/b/manifest.json", [b"{}"])
    store.write_whole("checkpoints/a.json", [b"{}"])
    (folder / "checkpoints" / ".0123.part").write_bytes(b"of a writer that was killed")
    assert store.names("checkpoints") == ["a.json", "b"]
    assert store.names("") == ["checkpoints", "models"]
    assert store.names("none") == []
    assert store.exists("checkpoints/a.json")
    assert not store.exists("checkpoints/b")
    assert not store.exists("checkpoints/a.json/x")
    with pytest.raises(StorageError, match="cannot list"):
        store.names("checkpoints/a.json")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(folder):
    store = open_store(folder)
    store.write_whole("checkpoints/x", [b"old"])

    def parts():
        yield b"new"
        raise RuntimeError("the model is gone")

    with pytest.raises(RuntimeError, match="gone"):
        store.write_whole("checkpoints/x", parts())
    assert os.listdir(folder / "checkpoints") == ["x"]
    assert store.read("checkpoints/x", 0, 3) == b"old"


def test_readers_never_see_half_a_file(folder):
    store, reader = open_store(folder), open_store(folder)
    store.write_whole("checkpoints/x", [b"0" * 100_000])
    seen = set()
    begun, done = threading.Event(), threading.Event()

    def read_on():
        while not done.is_set():
            seen.add(reader.read("checkpoints/x", 0, reader.size("checkpoints/x")))
            begun.set()

    thread = threading.Thread(target=read_on)
    thread.start()
    assert begun.wait(240)
    for number in range(1, 10):
        store.write_whole("checkpoints/x", [str(number).encode() * 10_000] * 10)
    done.set()
    thread.join()
    assert seen
    assert all(len(content) == 100_000 and len(set(content)) == 1 for content in seen)


def test_of_several_writers_of_a_new_file_one_wins(folder):
    winners, errors = [], []
    start = threading.Barrier(6)

    def write(number):
        store = open_store(folder)
        start.wait(240)
        try:
            store.write_whole("checkpoints/manifest", [b"%d" % number], only_if_absent=True)
            winners.append(number)
        except StorageError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = winners
    assert len(errors) == 5
    assert all("is there already" in error for error in errors)
    assert (folder / "checkpoints" / "manifest").read_bytes() == b"%d" % winner
    assert os.listdir(folder / "checkpoints") == ["manifest"]


def test_what_is_written_is_readable_for_whom_the_umask_allows(folder):
    before = os.umask(0o027)
    try:
        open_store(folder).write_whole("checkpoints/x", [b"x"])
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "checkpoints" / "x").stat().st_mode) == 0o640


def test_removing_what_is_gone_is_no_error(folder):
    store = open_store(folder)
    store.write_whole("checkpoints/a/b/c", [b"x"])
    store.remove("checkpoints/none")
    store.remove_tree("checkpoints/none")
    store.remove_tree("checkpoints/a")
    assert store.names("checkpoints") == []
    with pytest.raises(StorageError, match="cannot remove models: it is a folder"):
        store.remove("models")


@pytest.mark.parametrize(
    "path", ["ddp.py", "pytorch_squash.sqsh", "training_data/x", "models/weights.bin", "checkpoints", "other"]
)
def test_a_job_writes_in_checkpoints_only(folder, path):
    store = open_store(folder, layout=Layout())
    for change in (
        lambda: store.write_whole(path, [b"x"]),
        lambda: store.remove(path),
        lambda: store.remove_tree(path),
    ):
        with pytest.raises(StorageError, match=f"cannot write {path}: it is read-only; .* checkpoints/ only"):
            change()
    store.write_whole("checkpoints/step-1/weights", [b"x"])
    assert store.read("models/weights.bin", 0, 4) == CONTENT[:4]
    assert os.listdir(folder / "models") == ["weights.bin"]


def test_a_store_opened_to_read_only_writes_nothing(folder):
    store = open_store(folder, read_only=True, layout=Layout())
    with pytest.raises(StorageError, match="opened to read only"):
        store.write_whole("checkpoints/x", [b"x"])
    assert not (folder / "checkpoints").exists()


def test_links_are_followed_for_reading_but_never_out_of_the_writable_folder(folder):
    (folder / "training_data").mkdir()
    (folder / "models" / "link.bin").symlink_to("weights.bin")
    store = open_store(folder, layout=Layout())
    assert store.read("models/link.bin", 0, 4) == CONTENT[:4]
    store.write_whole("checkpoints/here", [b"x"])
    (folder / "checkpoints" / "out").symlink_to("../training_data")
    with pytest.raises(StorageError, match=r"a link leads to .*training_data"):
        store.write_whole("checkpoints/out/x", [b"x"])
    store.remove("checkpoints/out")  # the link, not what it leads to
    assert os.listdir(folder / "training_data") == []
    # A file that is a link is replaced, not written through.
    (folder / "checkpoints" / "w").symlink_to("../models/weights.bin")
    store.write_whole("checkpoints/w", [b"new"])
    assert (folder / "models" / "weights.bin").read_bytes() == CONTENT


def test_checkpoints_may_be_a_link_to_a_scratch_disk_but_not_into_the_read_only_part(
    folder, tmp_path_factory
):
    scratch = tmp_path_factory.mktemp("scratch")
    (folder / "checkpoints").symlink_to(scratch)
    store = open_store(folder, layout=Layout())
    store.write_whole("checkpoints/a/x", [b"x"])
    assert (scratch / "a" / "x").read_bytes() == b"x"
    (folder / "checkpoints").unlink()
    (folder / "checkpoints").symlink_to("models")
    with pytest.raises(StorageError, match=r"checkpoints is a link to .*models"):
        store.write_whole("checkpoints/x", [b"x"])


def test_a_full_disk_is_said_in_plain_words_and_leaves_nothing(folder):
    if os.geteuid() != 0:
        pytest.skip("a small file system takes root to mount")
    if subprocess.run(
        ["unshare", "--mount", "true"], capture_output=True, timeout=300, check=False
    ).returncode:
        pytest.skip("the kernel refuses mount namespaces")
    code = (
        "import sys, os\n"
        "from dure.storage import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "try:\n"
        "    store.write_whole('checkpoints/x', [bytes(1 << 20)] * 4)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error, os.listdir(sys.argv[1] + '/checkpoints'))\n"
    )
    script = 'mount -t tmpfs -o size=2m none "$1" && exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", folder, sys.executable, code],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (
        done.stdout.strip() == f"StorageError {folder}: cannot write checkpoints/x: the storage is full []"
    ), done


def test_storage_that_is_not_there_or_of_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(StorageError, match=r"cannot open it: there is no such file .*mounted on this node"):
        open_store(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="is a file"):
        open_store(tmp_path / "file")
    with pytest.raises(UsageError, match=r"gs://b: storage is a folder or s3://"):
        open_store("gs://b")


def test_storage_is_opened_without_torch_and_without_obstore():
    code = (
        "import sys, dure.storage; dure.storage.open_store('/'); "
        "print([name for name in ('torch', 'obstore', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "[]"

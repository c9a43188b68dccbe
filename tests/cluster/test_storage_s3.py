"""An S3 bucket as shared storage, against a real server: exact reads, whole writes, bounded patience."""

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
from support.cutting_proxy import CuttingProxy

from dure.base.errors import StorageError, UsageError
from dure.storage import Layout, open_store

CONTENT = random.Random(4).randbytes(21_000_003)  # three pieces, the last one odd
PATIENCE_SECONDS = 60.0
"""Generous: a store gives up within 10 s, and this machine may be busy."""
_buckets = itertools.count()


@pytest.fixture
def location(s3):
    """An own bucket and prefix for each test."""
    return s3.make_bucket(f"dure-test-{next(_buckets)}") + "/some/job"


@pytest.fixture
def weights(location):
    open_store(location).write_whole("models/weights.bin", [CONTENT])
    return location


def within(seconds, call):
    """The message of the StorageError that `call` must end in, in time."""
    began = time.monotonic()
    with pytest.raises(StorageError) as raised:
        call()
    assert time.monotonic() - began < seconds
    return str(raised.value)


@contextmanager
def meanwhile(call):
    """Runs `call` in a thread beside what is within `with`; its error is raised afterwards."""
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(call)
        yield running
        running.result()


def test_reads_of_odd_sizes_are_the_files_bytes(weights):
    store = open_store(weights)
    assert store.size("models/weights.bin") == len(CONTENT)
    spans = [
        (0, 1),
        (7, 1001),
        (len(CONTENT) - 3, 3),
        (12_345, 8 << 20),
        (3, (8 << 20) + 1),
        (0, len(CONTENT)),
    ]
    for start, length in spans:
        into = bytearray(length)
        store.read_into("models/weights.bin", start, memoryview(into))
        assert into == CONTENT[start : start + length]
        assert store.read("models/weights.bin", start, length) == into
    assert store.read("models/weights.bin", len(CONTENT), 0) == b""


def test_the_server_counts_the_same_bytes_and_requests_as_the_store(s3, weights):
    store = open_store(weights)
    bytes_before, requests_before = s3.served_bytes(), s3.served_requests()
    store.read_into("models/weights.bin", 0, memoryview(bytearray(len(CONTENT))))
    store.read("models/weights.bin", 5, 1001)
    store.size("models/weights.bin")
    store.write_whole("checkpoints/large", [CONTENT])
    store.write_whole("checkpoints/small", [b"x"])
    counts = store.access.as_dict()
    assert counts.pop("seconds") > 0
    assert counts == {
        "read_requests": 3 + 1 + 1, "read_bytes": len(CONTENT) + 1001,
        "write_requests": 1 + 3 + 1 + 1, "written_bytes": len(CONTENT) + 1,
    }  # fmt: skip
    assert s3.served_bytes() - bytes_before == len(CONTENT) + 1001
    assert s3.served_requests() - requests_before == 11


def test_large_files_are_written_in_parts_that_come_from_anywhere(location):
    store = open_store(location)
    parts = [CONTENT[:1], memoryview(CONTENT)[1:9_000_000], memoryview(CONTENT)[9_000_000:]]
    store.write_whole("checkpoints/a/weights", iter(parts))
    assert store.read("checkpoints/a/weights", 0, len(CONTENT)) == CONTENT
    store.write_whole("checkpoints/a/empty", [])
    assert store.size("checkpoints/a/empty") == 0


def test_a_write_that_fails_leaves_the_old_file(location):
    store = open_store(location)
    store.write_whole("checkpoints/x", [b"old"])

    def parts():
        yield CONTENT
        raise RuntimeError("the model is gone")

    with pytest.raises(RuntimeError, match="gone"):
        store.write_whole("checkpoints/x", parts())
    assert store.read("checkpoints/x", 0, 3) == b"old"
    assert store.names("checkpoints") == ["x"]


def test_names_are_one_level_and_removal_is_of_the_whole_tree(location):
    store = open_store(location)
    for path in ("a/b/c", "a/b/d", "a/e", "ab/f", "한글 + %2F", "top"):
        store.write_whole(path, [path.encode()])
    assert store.names("") == ["a", "ab", "top", "한글 + %2F"]
    assert store.names("a") == ["b", "e"]
    assert store.names("none") == []
    assert store.read("한글 + %2F", 0, 3) == "한".encode()
    assert store.exists("a/e")
    assert not store.exists("a/b")
    assert not store.exists("a/none")
    store.remove_tree("a")
    store.remove_tree("a")
    store.remove("top")
    store.remove("top")
    assert not any(map(store.exists, ("a/b/c", "a/b/d", "a/e")))
    assert store.exists("ab/f")
    assert store.names("a/b") == []
    # This server shows an empty folder for a while; Amazon's knows no folders.
    assert [name for name in store.names("") if name != "a"] == ["ab", "한글 + %2F"]


def test_of_two_writers_of_a_new_file_one_wins_and_the_other_is_told(location):
    start = threading.Barrier(2)

    def write(number):
        """What became of five new files: None, or the error."""
        store, outcomes = open_store(location), []
        for turn in range(5):
            start.wait(240)
            try:
                store.write_whole(f"checkpoints/{turn}", [b"%d" % number], only_if_absent=True)
                outcomes.append(None)
            except StorageError as error:
                outcomes.append(str(error))
        return outcomes

    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(write, range(2)))
    for turn, of_both in enumerate(zip(*outcomes, strict=True)):
        winner = of_both.index(None)
        assert f"checkpoints/{turn} is there already" in of_both[1 - winner]
        assert open_store(location).read(f"checkpoints/{turn}", 0, 1) == b"%d" % winner


def test_a_job_writes_in_checkpoints_only(location):
    store = open_store(location, layout=Layout())
    for path in ("ddp.py", "models/x", "checkpoints"):
        for change in (
            partial(store.write_whole, path, [b"x"]), partial(store.remove, path), partial(store.remove_tree, path),
        ):  # fmt: skip
            assert f"cannot write {path}: it is read-only" in within(PATIENCE_SECONDS, change)
    store.write_whole("checkpoints/x", [b"x"])
    assert store.names("") == ["checkpoints"]
    assert "read only" in within(
        PATIENCE_SECONDS, lambda: open_store(location, read_only=True).remove("checkpoints/x")
    )


@pytest.mark.parametrize("path", ["..", "a/../../b", "/a", "a\0b"])
def test_a_path_cannot_leave_the_prefix(location, path):
    store = open_store(location)
    assert "the path" in within(PATIENCE_SECONDS, lambda: store.read(path, 0, 1))
    assert "the path" in within(PATIENCE_SECONDS, lambda: store.write_whole(path, [b"x"]))
    with pytest.raises(StorageError, match="the path"):
        open_store(f"s3://dure-test/{path}")


def test_a_truncated_file_is_named_with_its_size_and_is_not_fetched(s3, weights):
    store = open_store(weights)
    before = s3.served_bytes()
    for start, length in ((0, 1 << 60), (len(CONTENT) - 1, 2), (1 << 40, 5), (len(CONTENT) + 1, 0)):
        words = within(
            PATIENCE_SECONDS,
            lambda start=start, length=length: store.read("models/weights.bin", start, length),
        )
        assert "models/weights.bin is 21,000,003 bytes long" in words
        assert "truncated" in words
    into = memoryview(bytearray(len(CONTENT)))
    assert "truncated" in within(PATIENCE_SECONDS, lambda: store.read_into("models/weights.bin", 1, into))
    assert s3.served_bytes() - before < 1.5 * len(CONTENT)
    assert store.access.read_bytes <= len(CONTENT)


def test_what_is_not_there_is_said_in_plain_words(s3, location):
    store = open_store(location)
    for call in (lambda: store.read("models/none", 0, 1), lambda: store.size("models/none")):
        assert re.search(
            r"s3://.*: cannot .* models/none: there is no such file", within(PATIENCE_SECONDS, call)
        )
    nowhere = open_store("s3://no-such-bucket/job")
    for call in (
        lambda: nowhere.read("x", 0, 1),
        lambda: nowhere.size("x"),
        lambda: nowhere.names(""),
        lambda: nowhere.write_whole("x", [b"1"]),
        lambda: nowhere.write_whole("x", [CONTENT]),
    ):
        assert f"{s3.endpoint} has no bucket no-such-bucket" in within(PATIENCE_SECONDS, call)


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_keys_are_refused_at_once_and_named(weights, monkeypatch, name):
    monkeypatch.setenv(name, "wrong")
    store = open_store(weights)
    for call in (
        lambda: store.read("models/weights.bin", 0, 1),
        lambda: store.exists("models/weights.bin"),
        lambda: store.write_whole("checkpoints/x", [b"1"]),
    ):
        words = within(PATIENCE_SECONDS, call)
        assert "refuses (403" in words
        assert "AWS_SECRET_ACCESS_KEY" in words


@pytest.mark.soak
def test_no_keys_at_all_are_said_in_bounded_time(weights, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    assert "no credentials; set AWS_ACCESS_KEY_ID" in within(
        PATIENCE_SECONDS, lambda: open_store(weights).size("x")
    )


def test_http_only_to_a_server_that_the_user_named(monkeypatch):
    from dure.storage import connection

    clients = []
    monkeypatch.setattr("obstore.store.S3Store", lambda *args, **kwargs: clients.append(kwargs))
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert connection.connect("s3://bucket").server == "Amazon S3"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://minio:9000")
    connection.connect("s3://bucket")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert connection.connect("s3://bucket").server == "http://minio:9000"
    assert [each["client_options"]["allow_http"] for each in clients] == [False] * 4 + [True] * 2


@pytest.mark.parametrize("location", ["s3://", "s3://UPPER", "s3:///x", "s3://a b/c", "s3://ab"])
def test_what_names_no_bucket_is_refused(location):
    with pytest.raises(UsageError, match="write s3://bucket/prefix"):
        open_store(location)


def test_without_obstore_the_way_to_it_is_said(tmp_path):
    code = (
        "import sys; sys.modules['obstore'] = None\n"
        "from dure.storage import open_store\n"
        "open_store('/')\n"
        "try: open_store('s3://bucket/x')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.startswith("UsageError s3://bucket: ")
    assert "pip install 'dure[s3]'" in done.stdout


def test_a_forked_process_is_refused_instead_of_waiting_for_ever(weights):
    """obstore's threads stay behind in the parent; in the child its calls never end."""
    code = (
        "import os, sys\n"
        "from dure.storage import open_store\n"
        "open_store(sys.argv[1]).size('models/weights.bin')\n"
        "if os.fork() == 0:\n"
        "    try: open_store(sys.argv[1]).size('models/weights.bin')\n"
        "    except Exception as error: print(type(error).__name__, error, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, weights], capture_output=True, text=True, timeout=300, check=True
    )
    assert re.match(r"StorageError s3://.* was forked from one that had used S3", done.stdout)


@pytest.fixture
def patient(monkeypatch):
    """Patience enough for a server that a busy machine takes its time to start."""
    monkeypatch.setattr("dure.storage.connection._RETRY", timedelta(seconds=120))


def test_a_server_that_is_away_for_a_moment_costs_only_time(s3, weights, patient):
    store = open_store(weights)
    s3.stop()
    with meanwhile(lambda: store.read("models/weights.bin", 0, 1001)) as reading:
        time.sleep(1)
        assert not reading.done()
        s3.start()
    assert reading.result() == CONTENT[:1001]
    s3.stop()
    with meanwhile(lambda: store.write_whole("checkpoints/x", [CONTENT])) as writing:
        time.sleep(1)
        assert not writing.done()
        s3.start()
    assert store.read("checkpoints/x", 0, len(CONTENT)) == CONTENT


def test_a_server_that_is_silent_for_a_moment_costs_only_time(s3, weights, patient):
    store = open_store(weights)
    os.kill(s3.pid, signal.SIGSTOP)
    with meanwhile(lambda: store.read("models/weights.bin", 0, 1001)) as reading:
        time.sleep(1)
        assert not reading.done()
        os.kill(s3.pid, signal.SIGCONT)
    assert reading.result() == CONTENT[:1001]


def all_within(seconds, calls):
    """The messages of the errors that all calls, made at once, must end in."""
    began = time.monotonic()
    with ThreadPoolExecutor(len(calls)) as threads:
        words = list(threads.map(partial(within, seconds), calls))
    print(f"gave up after {time.monotonic() - began:.1f} s")
    return words


def everything(store):
    return [
        lambda: store.read("models/weights.bin", 0, 1),
        lambda: store.read_into("models/weights.bin", 0, memoryview(bytearray(len(CONTENT)))),
        lambda: store.exists("checkpoints/x"),
        lambda: store.names(""),
        lambda: store.write_whole("checkpoints/x", [b"1"]),
        lambda: store.write_whole("checkpoints/x", [b"1"], only_if_absent=True),
        lambda: store.write_whole("checkpoints/x", [CONTENT]),
        lambda: store.remove("checkpoints/x"),
        lambda: store.remove_tree("checkpoints"),
    ]


@pytest.mark.soak
def test_a_server_that_stays_away_is_an_error_in_bounded_time(s3, weights):
    store = open_store(weights)
    s3.stop()
    for words in all_within(PATIENCE_SECONDS, everything(store)):
        assert f"no answer from {s3.endpoint} (tried " in words


@pytest.mark.soak
def test_a_server_that_stays_silent_is_an_error_in_bounded_time(s3, weights):
    store = open_store(weights)
    os.kill(s3.pid, signal.SIGSTOP)
    try:
        for words in all_within(PATIENCE_SECONDS, everything(store)):
            assert f"no answer from {s3.endpoint}" in words
    finally:
        os.kill(s3.pid, signal.SIGCONT)


@pytest.fixture
def cut(s3, monkeypatch):
    with CuttingProxy(int(s3.endpoint.rpartition(":")[2])) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def test_connections_that_break_are_resumed_where_they_broke(weights, cut):
    store = open_store(weights)
    cut.reset_after = 3_000_000
    into = bytearray(len(CONTENT))
    store.read_into("models/weights.bin", 0, memoryview(into))
    assert into == CONTENT
    assert cut.resets >= 5


@pytest.mark.soak
def test_a_busy_server_is_asked_again(weights, cut):
    store = open_store(weights)
    cut.busy_answers = 3
    assert store.read("models/weights.bin", 0, 10) == CONTENT[:10]
    assert cut.busy_answers == 0
    cut.busy_answers = 10_000
    anew = open_store(weights)  # the other one has a connection that works
    assert "answers 503 (tried" in within(PATIENCE_SECONDS, lambda: anew.size("models/weights.bin"))


def test_a_new_file_whose_answer_was_lost_is_not_taken_for_anothers(location, cut):
    """The server wrote it, the answer never came: a second try meets the first one's file."""
    store = open_store(location)
    cut.swallow_answers = 1
    store.write_whole("checkpoints/manifest", [b"mine"], only_if_absent=True)
    assert cut.resets == 1
    assert store.read("checkpoints/manifest", 0, 4) == b"mine"
    with pytest.raises(StorageError, match="is there already"):
        store.write_whole("checkpoints/manifest", [b"again"], only_if_absent=True)

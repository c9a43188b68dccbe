"""The connection between two nodes' ranks: everything arrives, in order, whole; who is gone is named."""

import contextlib
import socket
import threading
import time

import pytest

from dure.base.errors import PeerLost
from dure.comm import link
from dure.comm.link import Link, lay_link


class Bytes:
    """A parcel of bytes: what comes is the peer's parcel of the same number."""

    def __init__(self, *going, comes):
        self.going = [memoryview(part) for part in going]
        self.room = [bytearray(count) for count in comes]
        self.packed_at = self.unpacked_at = None

    def pack(self):
        self.packed_at = time.monotonic()
        return self.going

    def space(self):
        return [memoryview(part) for part in self.room]

    def unpack(self):
        assert self.packed_at is not None, "its own part comes first"
        self.unpacked_at = time.monotonic()


@pytest.fixture(autouse=True)
def hang_up(monkeypatch):
    """Close every link that a test made."""
    made = []

    class Kept(Link):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(link, "Link", Kept)
    yield
    for one in made:
        one.close()


def pair(deadline_seconds=120.0):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other = listener.accept()[0]
    return [link.Link(end, rank, 1 - rank, deadline_seconds) for rank, end in enumerate((one, other))]


def together(*calls):
    """Run calls at the same time; returns what each raised."""
    raised = [None] * len(calls)

    def run(at, call):
        try:
            call()
        except BaseException as error:
            raised[at] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    return raised


@pytest.mark.parametrize("sizes", [[], [(1,)], [(0,), (3, 5)], [(10_000_000,)] * 3, [(7, 1 << 20, 3)] * 20])
def test_both_get_all_the_other_sent_whole_and_in_order(sizes):
    one, other = pair()

    def parcels(mark):
        made = []
        for at, parts in enumerate(sizes):
            filled = [part for part in parts if part]
            made.append(Bytes(*(bytes([mark + at % 100]) * n for n in filled), comes=filled))
        return made

    ours, theirs = parcels(1), parcels(101)
    assert together(lambda: one.swap(ours, "a test"), lambda: other.swap(theirs, "a test")) == [None, None]
    for mine, its in ((ours, theirs), (theirs, ours)):
        for got, sent in zip(mine, its, strict=True):
            assert [bytes(part) for part in got.room] == [bytes(part) for part in sent.going]


def test_a_peer_that_hangs_up_is_named():
    one, other = pair()
    other.close()
    with pytest.raises(PeerLost, match="rank 0 lost rank 1 in a test"):
        one.swap([Bytes(b"x" * 10_000_000, comes=[10])], "a test")


def test_a_peer_that_never_answers_is_named_at_the_deadline():
    one, _other = pair(deadline_seconds=0.3)
    with pytest.raises(PeerLost, match="rank 0 lost rank 1 in a test: nothing moved for"):
        one.swap([Bytes(b"x", comes=[10])], "a test")


class Two:
    """A group of two threads."""

    def __init__(self, rank, said, barrier):
        self.rank, self.size, self._said, self._barrier = rank, 2, said, barrier

    def gather(self, value, what):
        self._said[self.rank] = value
        self._barrier.wait(240)
        found = list(self._said)
        self._barrier.wait(240)
        return found


def lay(secrets=(b"secret", b"secret")):
    said, barrier, found = ["", ""], threading.Barrier(2), [None, None]

    def of(rank):
        options = {"listens": rank == 1, "leader_host": "127.0.0.1", "deadline_seconds": 60.0}
        found[rank] = lay_link(Two(rank, said, barrier), 1 - rank, secret=secrets[rank], **options)

    assert together(lambda: of(0), lambda: of(1)) == [None, None]
    return found


def test_a_link_is_laid_on_the_way_to_the_leader_and_carries():
    one, other = lay()
    mine, its = Bytes(b"abc", comes=[3]), Bytes(b"xyz", comes=[3])
    assert together(lambda: one.swap([mine], "a test"), lambda: other.swap([its], "a test")) == [None, None]
    assert bytes(mine.room[0]) == b"xyz"
    assert one._connection.getpeername()[0] == "127.0.0.1"


def test_a_link_needs_no_secret_where_no_agent_gave_one():
    one, other = lay(secrets=(b"", b""))
    assert one is not None
    assert other is not None


def test_no_link_between_ranks_that_have_different_secrets(monkeypatch):
    monkeypatch.setattr(link, "LAY_SECONDS", 1.0)
    assert lay(secrets=(b"secret", b"other")) == [None, None]


def test_strangers_who_know_all_that_was_said_in_the_group_neither_get_in_nor_keep_the_peer_waiting(
    monkeypatch,
):
    before = socket.create_connection
    strangers = []

    def after_strangers(address, *args, **kwargs):
        for number in range(100):  # more than the listener keeps at once
            stranger = before(address, *args, **kwargs)
            if number % 2:
                stranger.sendall(b"?" * (number % 80))
            strangers.append(stranger)
        return before(address, *args, **kwargs)

    monkeypatch.setattr(socket, "create_connection", after_strangers)
    one, other = lay()
    assert one is not None
    assert other is not None
    for stranger in strangers:
        with stranger:
            stranger.settimeout(60)
            got = b""
            with contextlib.suppress(ConnectionError):
                while more := stranger.recv(100):
                    got += more
            assert len(got) in (0, 32), "a nonce at most"


@pytest.mark.parametrize(
    "said", ["", "[" * 5000, "{}", "[1, 2]", '["127.0.0.1", 1.5, "x"]', '["127.0.0.1", 99999, "x"]']
)
def test_a_peer_that_tells_no_address_makes_no_link(monkeypatch, said):
    told = Two.gather

    def gather(self, value, what):
        return [said if text.startswith("[") else text for text in told(self, value, what)]

    monkeypatch.setattr(Two, "gather", gather)
    assert lay() == [None, None]


def test_no_link_on_either_side_where_one_cannot_listen(monkeypatch):
    def cannot(*_, **__):
        raise OSError("no sockets today")

    monkeypatch.setattr(socket, "create_server", cannot)
    assert lay() == [None, None]

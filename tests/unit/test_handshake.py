"""Two processes that have the same key prove it to each other; whoever has not learns nothing and costs little."""

import contextlib
import selectors
import socket
import threading
import time

import pytest

from dure.comm import handshake
from dure.comm.handshake import Acceptor, Handshake, NotAuthenticated, prove

KEY, PURPOSE = b"k" * 32, "agent to leader 10.0.1.10:29400"


def carried(caller, listener):
    """Move bytes until both have proved."""
    going = caller.begin()
    for side in (listener, caller) * 2:
        going = side.take(going)
    return going


def test_both_sides_prove_that_they_have_the_key():
    caller, listener = Handshake(KEY, PURPOSE, calls=True), Handshake(KEY, PURPOSE, calls=False)
    assert carried(caller, listener) == b""
    assert (caller.wants, listener.wants) == (0, 0)


@pytest.mark.parametrize("change", [{"key": b"x" * 32}, {"purpose": "link of ranks [0, 2]"}])
def test_another_key_or_another_purpose_is_refused_by_the_listener_before_it_proves_anything(change):
    options = {"key": KEY, "purpose": PURPOSE, **change}
    caller, listener = Handshake(**options, calls=True), Handshake(KEY, PURPOSE, calls=False)
    proof = caller.take(listener.take(caller.begin()))
    with pytest.raises(NotAuthenticated):
        listener.take(proof)


def test_a_listener_that_has_not_the_key_is_refused_by_the_caller():
    caller, listener = Handshake(KEY, PURPOSE, calls=True), Handshake(b"x" * 32, PURPOSE, calls=False)
    caller.take(listener.take(caller.begin()))
    with pytest.raises(NotAuthenticated):
        caller.take(listener._proof(by_caller=False))


def test_a_proof_cannot_be_sent_back_as_the_answer_to_itself():
    caller = Handshake(KEY, PURPOSE, calls=True)
    proof = caller.take(caller.begin())  # a listener that sends back all that it gets
    with pytest.raises(NotAuthenticated):
        caller.take(proof)


def test_a_proof_that_was_recorded_does_not_open_another_connection():
    caller, listener = Handshake(KEY, PURPOSE, calls=True), Handshake(KEY, PURPOSE, calls=False)
    nonce = caller.begin()
    proof = caller.take(listener.take(nonce))
    later = Handshake(KEY, PURPOSE, calls=False)
    later.take(nonce)
    with pytest.raises(NotAuthenticated):
        later.take(proof)


def test_roles_purposes_and_nonces_cannot_run_into_each_other():
    proofs = {
        Handshake(KEY, purpose, calls=calls)._proof(by_caller=by_caller)
        for purpose in ("", "a", "ab", "caller", "listener")
        for calls in (True, False)
        for by_caller in (True, False)
    }
    assert len(proofs) == 20


class Served:
    """An acceptor in a thread of its own."""

    def __init__(self, **options):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = self.listener.getsockname()
        self.selector = selectors.DefaultSelector()
        self.acceptor = Acceptor(self.listener, self.selector, KEY, PURPOSE, **options)
        self.accepted, self.pending = [], []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def _serve(self):
        while not self._closing.is_set():
            for key, _ in self.selector.select(0.02):
                if (found := self.acceptor.ready(key.fileobj)) is not None:
                    self.accepted.append(found)
            self.acceptor.expire()
            self.pending.append(len(self.acceptor._pending))
        self.acceptor.close()
        self.selector.close()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._closing.set()
        self._thread.join(60)
        for connection in self.accepted:
            connection.close()
        assert not self._thread.is_alive()


def until_hung_up(connection):
    """All bytes that come before the other side hangs up."""
    connection.settimeout(60)
    got = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(100):
            got += more
    return got


@contextlib.contextmanager
def connected(served):
    with socket.create_connection(served.address) as connection:
        yield connection


def test_a_connection_that_proves_is_handed_over():
    with Served() as served, connected(served) as connection:
        prove(connection, KEY, PURPOSE)
        deadline = time.monotonic() + 60
        while not served.accepted and time.monotonic() < deadline:
            time.sleep(0.01)
        served.accepted[0].send(b"hello")
        assert connection.recv(5) == b"hello"


def test_a_caller_with_another_key_is_told_nothing_and_knows_why_it_was_hung_up_on():
    with Served() as served, connected(served) as connection:
        with pytest.raises(NotAuthenticated, match="same team key"):
            prove(connection, b"x" * 32, PURPOSE)
        assert served.accepted == []
    assert served.acceptor.turned_away == 1
    assert served.acceptor.last_source == "127.0.0.1"


@pytest.mark.parametrize(
    "said",
    [
        b"x" * 32 + b"y" * 32,
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        b"\x80\x04" * 5000,
        b'["Hello", {"node": 0}]\n' * 3,
    ],
)
def test_who_says_something_else_gets_random_bytes_and_is_hung_up_on(said):
    with Served() as served, connected(served) as connection:
        connection.sendall(said)
        assert len(until_hung_up(connection)) in (0, 32)
        assert served.accepted == []


def test_who_says_nothing_is_hung_up_on_after_a_while():
    with Served(seconds=0.2) as served, connected(served) as connection:
        assert until_hung_up(connection) == b""


def test_those_who_wait_half_open_do_not_keep_anybody_out():
    with Served(most=8) as served, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connected(served))
        connection = stack.enter_context(connected(served))
        prove(connection, KEY, PURPOSE, 60)
    assert max(served.pending) <= 8


def test_of_too_many_the_oldest_of_the_busiest_address_goes(monkeypatch):
    with (
        socket.create_server(("127.0.0.1", 0), backlog=512) as listener,
        selectors.DefaultSelector() as selector,
        contextlib.ExitStack() as stack,
    ):
        acceptor = Acceptor(listener, selector, KEY, PURPOSE, most=4)
        honest = stack.enter_context(socket.socket())
        honest.bind(("127.0.0.2", 0))
        honest.connect(listener.getsockname())
        acceptor.ready(listener)
        for _ in range(50):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        while selector.select(0) and acceptor.turned_away < 47:
            acceptor.ready(listener)
        sources = [pending.source for pending in acceptor._pending.values()]
        assert sources == ["127.0.0.2", "127.0.0.1", "127.0.0.1", "127.0.0.1"]
        acceptor.close()


def test_a_listener_that_is_no_leader_keeps_the_caller_no_longer_than_it_wants():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_connection(silent.getsockname()) as caller,
        pytest.raises(TimeoutError),
    ):
        prove(caller, KEY, PURPOSE, 0.2)
    assert handshake.SECONDS < 10

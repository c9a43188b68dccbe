"""The leader's connections: whatever comes over one of them costs at most that one."""

import contextlib
import json
import random
import socket
import threading
import time

import pytest

from dure.base.errors import Resumable, UsageError
from dure.base.team_key import TeamKey
from dure.comm.handshake import prove
from dure.launch.lease import Lease, LeaseOver
from dure.launch.nodes import connection as lines
from dure.launch.nodes.address import interfaces6
from dure.launch.nodes.connection import AgentConnection
from dure.launch.nodes.encrypt import encryption_of
from dure.launch.nodes.join import Nodes, join
from dure.launch.nodes.leader import Leader, agents_key, agents_purpose, listen_for_nodes
from dure.launch.nodes.member import Member, reach_leader
from dure.launch.nodes.membership import Membership, Terms
from dure.launch.nodes.messages import Done, Hello, Ready, Refused, decode, encode

KEY = TeamKey.random()
FACTS = {"torch": "2.13.0"}


class Run:
    """A leader with a real port, and nodes that have come to it."""

    def __init__(self, nodes=2, lost_seconds=60.0, encryption=None, host="127.0.0.1"):
        self.encryption = encryption
        self.said = []
        self.lease = Lease()
        terms = Terms(nodes, nodes, FACTS, "/run", 300.0, 3)
        self.membership = Membership(terms, time.monotonic(), self.said.append, self.said.append)
        self.listener = listen_for_nodes(host, 0)
        self.address = self.listener.getsockname()[:2]
        self.leader = Leader(
            self.listener, self.membership, lost_seconds, KEY, encryption, self.lease.lost_nodes
        )
        self.lost_seconds = lost_seconds
        self.stack = contextlib.ExitStack()

    def __enter__(self):
        self.stack.enter_context(contextlib.closing(self.listener))
        self.stack.enter_context(self.leader)
        return self

    def __exit__(self, *error):
        self.stack.__exit__(*error)

    def member(self, node):
        connection = reach_leader(*self.address, KEY, 60.0, print, lambda: None, self.encryption)
        hello = Hello(node, f"node{node}", self.address[0], 1, FACTS)
        member = self.stack.enter_context(Member(connection, hello, self.lost_seconds))
        assert member.welcome(lambda: None) == "/run"
        return member

    def team(self):
        """Two nodes in a running team."""
        members = [self.member(0), self.member(1)]
        parts = [None, None]

        def form(at):
            parts[at] = members[at].next_team(lambda: None)
            if at == 0:
                members[0].store_is_up(parts[0].number, 4321)

        threads = [threading.Thread(target=form, args=(at,)) for at in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert [part.number for part in parts] == [1, 1]
        return members

    def finish(self, members):
        """The team ends well: nothing that happened meanwhile has touched it."""
        for member in members:
            member.tell(Done(1, [None]))
        for member in members:
            deadline = time.monotonic() + 120
            while (end := member.order(1)) is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert end.error() is None

    def stranger(self):
        return socket.create_connection(self.address, timeout=60)

    def authenticated(self):
        """A connection that has the key."""
        connection = self.stranger()
        prove(connection, agents_key(KEY), agents_purpose(*self.address))
        return connection


def until_hung_up(connection):
    connection.settimeout(120)
    got = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(1 << 16):
            got += more
    return got


NODE_5 = Hello(5, "evil", "10.0.1.66", 1, FACTS)


def evil_lines():
    """What ended runs once, and more of the kind."""
    hello = json.dumps(vars(NODE_5))
    yield b'["Hello", ' + hello.encode() + b"]\n"
    yield b'Hello {"node": "a"}\n'
    yield b'Hello {"node": 0.5, "host": "x", "address": "10.0.1.9", "ranks": 1, "facts": {}}\n'
    yield b"[" * 2000 + b"\n"
    yield b'{"node":"a"}\n'
    yield b"\x80\x04\x95cos\nsystem\n(S'touch /tmp/pwned'\ntR.\n"
    yield b"x" * (1 << 20)
    yield b"\n" * 5000


def test_strangers_who_have_no_key_get_no_word_and_the_team_goes_on():
    with Run() as run:
        members = run.team()
        for said in evil_lines():
            with run.stranger() as connection:
                with contextlib.suppress(OSError):  # it may have been hung up on already
                    connection.sendall(said)
                    connection.shutdown(socket.SHUT_WR)
                assert len(until_hung_up(connection)) in (0, 32), "a nonce at most"
        run.finish(members)


def test_a_node_that_has_the_key_and_says_what_no_agent_says_is_hung_up_on_and_no_more():
    with Run() as run:
        members = run.team()
        for said in evil_lines():
            with run.authenticated() as connection, contextlib.suppress(ConnectionError):
                connection.sendall(said)
                assert until_hung_up(connection) == b""
        run.finish(members)


def test_a_full_team_tells_a_node_with_the_key_why_it_is_not_taken():
    with Run() as run:
        members = run.team()
        with run.authenticated() as connection:
            connection.sendall(encode(NODE_5) + encode(Ready()))
            assert decode(until_hung_up(connection).rstrip(b"\n")) == Refused(
                "--node-rank 5 is not one of 2 nodes; use 0 to 1"
            )
        run.finish(members)


def test_hellos_that_are_too_long_and_refusals_that_nobody_reads_starve_nobody():
    with Run() as run, contextlib.ExitStack() as stack:
        members = run.team()
        long = encode(NODE_5).replace(b'"evil"', b'"' + b"v" * (8 << 20) + b'"')
        for _ in range(25):
            connection = stack.enter_context(run.authenticated())
            connection.settimeout(1.0)
            with contextlib.suppress(OSError):
                connection.sendall(long)
            connection = stack.enter_context(run.authenticated())
            connection.sendall(encode(NODE_5))
        run.finish(members)


def test_connections_that_say_nothing_keep_nobody_out():
    with Run() as run, contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(run.stranger())
        members = run.team()
        for _ in range(100):
            stack.enter_context(run.stranger())
        run.finish(members)


def test_a_node_that_does_not_read_is_let_go(monkeypatch):
    monkeypatch.setattr(lines, "_UNSENT_BYTES", 1000)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        line = AgentConnection(ours)
        for _ in range(10_000):
            line.send_message(Refused("x" * 1000))
            if line.closed:
                break
        assert "has not taken" in line.closed
        assert len(line._outgoing) < 100_000


def test_a_fault_of_ours_in_handling_a_message_costs_its_connection_only(monkeypatch):
    with Run() as run:
        members = run.team()
        hello = run.membership.hello

        def broken(node, now):
            if node.node == 5:
                raise ZeroDivisionError
            return hello(node, now)

        monkeypatch.setattr(run.membership, "hello", broken)
        with run.authenticated() as connection:
            connection.sendall(encode(NODE_5))
            assert until_hung_up(connection) == b""
        run.finish(members)


def test_random_sequences_of_messages_over_connections_do_not_disturb_a_team():
    draw = random.Random(11)
    pieces = [*evil_lines(), encode(NODE_5), encode(Ready()), encode(Done(1, [None])), b"", b"\0" * 40]
    with Run() as run:
        members = run.team()
        for _ in range(100):
            connect = run.authenticated if draw.random() < 0.5 else run.stranger
            with connect() as connection, contextlib.suppress(OSError):
                connection.settimeout(0.2)
                for _ in range(draw.randrange(1, 4)):
                    connection.sendall(draw.choice(pieces))
                    if draw.random() < 0.3:
                        connection.recv(100)
        run.finish(members)


def test_a_node_with_another_key_says_so_and_the_leader_names_it_once(monkeypatch):
    with Run() as run:
        with pytest.raises(UsageError, match=r"does not have this node's team key.*--team-key"):
            reach_leader(*run.address, TeamKey.random(), 60.0, print, lambda: None)
        deadline = time.monotonic() + 60
        while not run.said and time.monotonic() < deadline:
            time.sleep(0.01)
        (sentence,) = [said for said in run.said if "without the team's key" in said]
        assert "from 127.0.0.1" in sentence


def test_a_node_that_is_started_again_before_it_was_missed_waits_until_it_is(tmp_path, monkeypatch):
    """What flapping does: the old connection is silent, not closed, and the new agent comes before it is missed."""
    monkeypatch.setattr("dure.launch.nodes.join.resolve", lambda host: host)
    with Run(lost_seconds=2.0) as run:
        run.member(0)
        with run.authenticated() as old:
            old.sendall(encode(Hello(1, "node1", "127.0.0.1", 1, FACTS)))
            assert old.recv(1000).startswith(b"Welcome")
            said = []
            host, port = run.address
            nodes = Nodes(2, 2, 1, host, port, 1, None, 60.0, 2.0, 3, FACTS)
            run.membership.terms.__dict__["run"] = str(tmp_path)
            with join(nodes, KEY, Lease(), lambda: tmp_path, said.append, lambda: None) as joined:
                assert joined.run == tmp_path
            assert "taken by node1" in said[0]
        assert "node 1 (node1, 127.0.0.1) is lost: not heard of for 2 s" in " ".join(map(str, run.said))


def test_an_agent_whose_lease_is_over_ends_resumable_and_names_the_reason():
    lease = Lease()
    lease.check()
    lease.end("the supervisor has not been heard of for 6 s")
    lease.end("something later")
    with pytest.raises(LeaseOver, match="not been heard of for 6 s") as over:
        lease.check()
    assert isinstance(over.value, Resumable)


class Wire:
    """What goes through a port: everything to and from the leader is written down."""

    def __init__(self, target):
        self.seen, self._target = bytearray(), target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._sockets, self._threads = [self._listener], []
        self._begin(self._accept)

    def _begin(self, work, *args):
        self._threads.append(threading.Thread(target=work, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                called = socket.create_connection(self._target)
                self._sockets += [caller, called]
                self._begin(self._carry, caller, called)
                self._begin(self._carry, called, caller)

    def _carry(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self):
        for one in list(self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(60)
        for one in self._sockets:
            one.close()


@pytest.mark.parametrize("encrypted", [True, False])
def test_what_agents_say_cannot_be_read_on_the_wire_if_it_is_encrypted(encrypted, monkeypatch):
    encryption = encryption_of(KEY) if encrypted else None
    with Run(encryption=encryption) as run, contextlib.closing(Wire(run.address)) as wire:
        purpose = agents_purpose(*run.address)
        monkeypatch.setattr("dure.launch.nodes.member.agents_purpose", lambda *_: purpose)
        run.address = wire.address
        members = run.team()
        members[1].tell(Done(1, ["a value that nobody shall read" * 5000]))
        members[0].tell(Done(1, [None]))
        for member in members:
            deadline = time.monotonic() + 120
            while (end := member.order(1)) is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert end.error() is None
        assert run.leader.values == [None, "a value that nobody shall read" * 5000]
        assert (b"nobody shall read" in wire.seen) is not encrypted
        assert (b"2.13.0" in wire.seen) is not encrypted


def test_an_encrypted_leader_survives_those_who_have_the_key_and_speak_no_tls():
    with Run(encryption=encryption_of(KEY)) as run:
        members = run.team()
        for said in (
            b"",
            b"Hello {}\n",
            random.Random(1).randbytes(5000),
            b"\x16\x03\x01\xff\xff" + bytes(100),
        ):
            plain = run.authenticated()
            plain.sendall(said)
            plain.close()
        other = reach_leader(*run.address, KEY, 60.0, print, lambda: None, encryption_of(KEY))
        other.close()
        run.finish(members)


def test_only_the_teams_key_makes_the_teams_certificate():
    ours, theirs = encryption_of(KEY), encryption_of(TeamKey.random())
    assert ours.calls.get_ca_certs() == encryption_of(KEY).calls.get_ca_certs()
    for caller, fine in ((ours, True), (theirs, False)):
        left, right = socket.socketpair()
        results = []

        def answer(right=right, results=results):
            with contextlib.suppress(OSError), ours.answers.wrap_socket(right, server_side=True) as served:
                results.append(served.recv(1))

        thread = threading.Thread(target=answer)
        thread.start()
        with contextlib.suppress(OSError), caller.call(left) as called:
            called.sendall(b"x")
        left.close()
        thread.join(60)
        assert results == ([b"x"] if fine else [])


@pytest.mark.skipif("lo" not in interfaces6(), reason="no IPv6 on this machine's loopback")
@pytest.mark.parametrize("encrypted", [True, False])
def test_a_leader_with_an_ipv6_address_forms_a_team(encrypted):
    with Run(host="::1", encryption=encryption_of(KEY) if encrypted else None) as run:
        members = run.team()
        assert members[1].leader == "::1"
        run.finish(members)


def test_a_node_that_the_engine_knows_to_be_lost_is_not_waited_for():
    with Run() as run:
        members = run.team()
        run.lease.note_lost(0, "not the leader's own node")
        run.lease.note_lost(7, "nobody")
        run.lease.note_lost(1, "its power failed")
        deadline = time.monotonic() + 50  # less than the 60 s after which silence is a loss
        while not any(
            "node 1 (node1, 127.0.0.1) is lost: its power failed" in str(words) for words in run.said
        ):
            assert time.monotonic() < deadline, run.said
            time.sleep(0.01)
        while (end := members[0].order(1)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "at least 2 nodes are needed" in str(end.error())


def test_a_leader_that_came_back_at_another_address_is_found():
    with Run() as run:
        asked = []

        def resolve_again():
            asked.append("127.0.0.1")
            if len(asked) == 1:
                raise UsageError("the name is not known just now")
            return "127.0.0.1"

        line = reach_leader(
            "127.0.0.3", run.address[1], KEY, 60.0, print, lambda: None, resolve_again=resolve_again
        )
        assert line.getpeername() == run.address
        assert len(asked) == 2
        line.close()

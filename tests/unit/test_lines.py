"""The line protocol: bounded lines, deadlines both ways, and a bad peer costs its own channel alone."""

import os
import socket
import threading
import time

import pytest

from dure.base.lines import ENDED, LineError, Lines, decode, encode


@pytest.fixture(params=["pipes", "socket"])
def pair(request):
    """A descriptor to read from, and one to write to."""
    if request.param == "pipes":
        source, sink = os.pipe()
        yield source, sink
        os.close(source)
        os.close(sink)
    else:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            yield ours.fileno(), theirs.fileno()


def test_messages_come_out_as_they_went_in(pair):
    source, sink = pair
    reader, writer = Lines(source, None), Lines(None, sink)
    sent = [("Order", {"host": "노드\n1", "binds": [["/a", 1, True]]}), ("Stay", {})]
    for name, fields in sent:
        writer.send(encode(name, fields))
    assert [decode(reader.next(10)) for _ in sent] == sent
    assert reader.receive() == []
    assert not reader.closed


def test_a_line_that_is_too_long_or_has_no_end_closes_the_channel_and_those_before_it_count(pair):
    source, sink = pair
    reader = Lines(source, None, longest=100)
    os.write(sink, b"Good {}\n" + b"x" * 101 + b"\n")
    assert reader.receive() == [b"Good {}"]
    assert reader.closed == "a message of 101 bytes"
    endless = Lines(source, None, longest=100)
    os.write(sink, b"x" * 101)
    with pytest.raises(LineError, match="without an end"):
        endless.next(10)
    assert endless.receive() == []


def test_a_peer_that_says_nothing_is_waited_for_no_longer_than_the_deadline(pair):
    began = time.monotonic()
    reader = Lines(pair[0], None)
    with pytest.raises(LineError, match="no answer within 0 s"):
        reader.next(0.2)
    assert 0.2 <= time.monotonic() - began < 60
    assert not reader.closed  # being late is the caller's to judge


def test_a_peer_that_does_not_take_what_is_sent_is_given_up_and_nobody_blocks(pair):
    writer = Lines(None, pair[1], most_unsent=1 << 16)
    for _ in range(1000):
        writer.send(b"x" * 10_000 + b"\n")
        if writer.closed:
            break
    assert "has not taken" in writer.closed
    waiting = Lines(None, pair[1])
    waiting.send(b"y\n")
    waiting.flush(0.2)
    assert "within 0 s" in waiting.closed


def test_the_end_of_the_peer_is_told_once_all_its_lines_are_read():
    source, sink = os.pipe()
    os.write(sink, b"Last {}\nhalf")
    os.close(sink)
    reader = Lines(source, None)
    assert reader.next(10) == b"Last {}"
    with pytest.raises(LineError, match=ENDED):
        reader.next(10)
    os.close(source)


def test_what_follows_a_line_can_be_left_to_another_process():
    source, sink = os.pipe()
    os.write(sink, b"First {}\nSecond {}\n")
    assert Lines(source, None, byte_by_byte=True).next(10) == b"First {}"
    assert os.read(source, 100) == b"Second {}\n"
    os.close(source)
    os.close(sink)


def test_a_channel_that_is_closed_here_lets_its_reader_go():
    source, sink = os.pipe()
    reader = Lines(source, None)
    told = []

    def read():
        try:
            reader.next(600)
        except LineError as error:
            told.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    reader.close()
    thread.join(60)
    assert told == ["closed here"]
    os.close(source)
    os.close(sink)


@pytest.mark.parametrize(
    "line", [b"", b"Name", b"Name []", b"Name null", b"\xff {}", b"Name {", b"N " + b"[" * 10**5]
)
def test_what_is_no_message_is_refused(line):
    with pytest.raises(LineError, match="not a message"):
        decode(line)

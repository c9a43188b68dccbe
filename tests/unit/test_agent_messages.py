"""What comes over a connection becomes a value of known type and range, or nothing."""

import json
import math
import random

import pytest

from dure.base.errors import Failure
from dure.launch.nodes.messages import (
    Alive,
    Bye,
    Done,
    End,
    Failed,
    Garbled,
    Hello,
    Refused,
    StoreUp,
    Team,
    decode,
    encode,
)

HELLO = Hello(1, "node1", "10.0.1.11", 4, {"torch": "2.13.0"})


@pytest.mark.parametrize(
    "message",
    [
        HELLO,
        Team(1, 1, 2, 4, 4, 8, "10.0.1.10", 29400, 2),
        Failed(1, Failure("line\nbreak", 3, "node0", "Traceback…", 1, may_pass=True, at_ns=7)),
        End(Failure("x", exit_code=75)),
        Done(2, [{"rank": 1, "loss": 0.5, "notes": []}, None]),
        Refused("no", may_pass=True),
        Bye("한국어"),
    ],
)
def test_messages_cross_the_wire_as_lines(message):
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode(line) == message


def test_values_that_are_no_numbers_cross_the_wire():
    (value,) = decode(encode(Done(1, [math.nan]))).values
    assert math.isnan(value)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET / HTTP/1.1\r",
        b'["Hello", {}]',
        b"Hello",
        b"Hello {",
        b"Nobody {}",
        b'Ready {"x": 1}',
        b"Ready []",
        b"Ready null",
        b"Ready {}{}",
        b"\xff",
        b"Bye \xff",
        b"[" * 2000,
        b"Ready " + b"[" * 2000,
        b'Done {"team": 1, "values": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        b'Done {"team": 1, "values": [' + b"9" * 100_000 + b"]}",
        b'Bye {"why": "\\ud800"}',
    ],
)
def test_what_no_agent_says_is_refused(line):
    with pytest.raises(Garbled):
        decode(line)


def changed(message, **changes):
    """The line of a message in which some fields are something else."""
    name, _, fields = encode(message).partition(b" ")
    return name + b" " + json.dumps({**json.loads(fields), **changes}).encode()


@pytest.mark.parametrize("node", [0.5, 1.0, True, "1", "a", None, [1], -1, 1 << 16, 1 << 70])
def test_a_nodes_number_is_a_whole_number_in_its_range_and_nothing_like_one(node):
    with pytest.raises(Garbled, match="node"):
        decode(changed(HELLO, node=node))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (HELLO, {"ranks": 0}),
        (HELLO, {"ranks": 1e3}),
        (HELLO, {"facts": {"torch": 2}}),
        (HELLO, {"facts": {str(n): "" for n in range(100)}}),
        (HELLO, {"facts": {"x": "y" * 10_000}}),
        (HELLO, {"facts": []}),
        (HELLO, {"host": "h" * 1000}),
        (HELLO, {"address": "10.0.1.11\nx"}),
        (HELLO, {"address": "$(id)"}),
        (HELLO, {"version": "8" * 1000}),
        (Alive(1), {"step": 2**60}),
        (Alive(1), {"step": -2}),
        (Alive(1), {"step": 1.0}),
        (StoreUp(1, 2), {"port": 70_000}),
        (StoreUp(1, 2), {"team": False}),
        (Done(1, []), {"values": {}}),
        (Failed(1, Failure("")), {"failure": None}),
        (Failed(1, Failure("")), {"failure": {}}),
        (Failed(1, Failure("")), {"failure": {"message": 1}}),
        (Failed(1, Failure("")), {"failure": {"message": "", "may_pass": 1}}),
        (Failed(1, Failure("")), {"failure": {"message": "", "rank": True}}),
        (Failed(1, Failure("")), {"failure": {"message": "", "rank": 1.0}}),
        (Failed(1, Failure("")), {"failure": {"message": "", "rank": 1 << 40}}),
        (Failed(1, Failure("")), {"failure": {"message": "", "exit_code": 256}}),
        (Failed(1, Failure("")), {"failure": {"message": "", "exit_code": -1}}),
        (Failed(1, Failure("")), {"failure": {"message": "", "at_ns": 1 << 70}}),
        (Failed(1, Failure("")), {"failure": {"message": "", "host": "h" * 1000}}),
        (Failed(1, Failure("")), {"failure": {"message": "", "stranger": 1}}),
        (End(), {"failure": {"message": "", "rank": -2}}),
    ],
)
def test_every_field_has_a_type_and_a_range(message, changes):
    decode(changed(message))
    with pytest.raises(Garbled, match=next(iter(changes))):
        decode(changed(message, **changes))


def test_words_for_people_are_cut_and_not_refused():
    said = decode(encode(Failed(1, Failure("m" * 10**6, 0, "h", "start" + "d" * 10**6 + "end")))).failure
    assert len(said.message) == 8000
    assert said.details.endswith("end")
    assert len(said.details) == 200_000


def test_half_a_character_in_a_path_or_a_log_does_not_break_a_message():
    assert decode(encode(Bye("a\udc80b"))) == Bye("a?b")


def test_random_bytes_and_broken_messages_are_refused_and_nothing_else():
    draw = random.Random(7)
    whole = [
        encode(message).rstrip() for message in (HELLO, Alive(3), Done(1, [1, "a", None]), End(Failure("x")))
    ]
    for _ in range(3000):
        line = bytearray(draw.choice(whole))
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len(line))
            match draw.randrange(3):
                case 0:
                    line[at] = draw.randrange(256)
                case 1:
                    del line[at:]
                case 2:
                    line[at:at] = draw.choice([b"[", b"{", b'"', b"\\", b"1e9", b"null", draw.randbytes(3)])
            if not line:
                break
        try:
            message = decode(bytes(line))
        except Garbled:
            continue
        assert decode(encode(message)) == message or isinstance(message, Done)

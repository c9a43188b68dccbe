"""What a hostile or broken process might say to a leader: messages in any order, and what only looks like one."""

import json
import pickle

from dure.base.errors import Failure
from dure.launch.nodes.messages import (
    Again,
    Alive,
    Bye,
    Done,
    End,
    Failed,
    Hello,
    Ready,
    Refused,
    StoreUp,
    Team,
    Welcome,
    encode,
)

FACTS = {"torch": "2.13.0", "job (sha256)": "abc"}
ODD = [None, True, False, -1, 0, 1, 2, 0.5, 1e300, 2**53, 2**70, "", "a", "1", [], [[]], {}, {"a": 1}]


def a_message(draw, nodes):
    """Any message that is well typed, mostly one that fits what is going on."""
    team, rank = draw.randrange(4), draw.randrange(-1, 9)
    return draw.choice(
        [
            Hello(draw.randrange(nodes + 1), "h", "10.0.1.10", draw.choice([1, 4, 4, 65536]), FACTS),
            Hello(draw.randrange(nodes + 1), "h", "10.0.1.10", 4, {}, draw.randrange(4)),
            Ready(),
            Ready(),
            Alive(draw.choice([-1, 0, 3, 2**50])),
            StoreUp(team, draw.randrange(65536)),
            StoreUp(draw.choice([1, 2]), 4321),
            Failed(
                team, Failure("it broke", rank, "h", "", draw.randrange(256), *(draw.random() < 0.7,) * 2)
            ),
            Failed(1, Failure("lost its peers", rank, "h", "", 1, True, True)),
            Done(team, [None] * draw.choice([0, 1, 4, 4])),
            Welcome("/x"),
            Refused("no"),
            Team(team, 0, 1, 0, 4, 4, "10.0.1.10", 1, 0),
            Again(team, "why"),
            End(Failure("over")),
            Bye("bye"),
        ]
    )


def a_line(draw, nodes):
    """A message as bytes; some have a field that is something else, or are cut."""
    line = encode(a_message(draw, nodes)).rstrip(b"\n")
    if draw.random() < 0.15:
        name, _, fields = line.partition(b" ")
        values = json.loads(fields)
        changed = values.get("failure") if draw.random() < 0.5 else values
        changed = changed if isinstance(changed, dict) else values
        changed[draw.choice([*changed, "new"])] = draw.choice(ODD)
        line = name + b" " + json.dumps(values).encode()
    if draw.random() < 0.03:
        line = draw.choice([line[: draw.randrange(len(line))], b"[" * 2000, draw.randbytes(20)])
    return line


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (exec, (f"open({self.path!r}, 'w').write('boom')",))


def garbage(draw, bomb):
    """Bytes that are no message of any version, or one of an older."""
    old = {
        "node": draw.choice([0, 0.5, 1, "a"]),
        "host": "evil",
        "address": "10.0.1.66",
        "ranks": 1,
        "facts": FACTS,
    }
    return draw.choice(
        [
            draw.randbytes(draw.randrange(1, 300)),
            json.dumps(["Hello", old]).encode() + b"\n",
            json.dumps(["Hello", {**old, "version": "8" * 100_000}]).encode() + b"\n",
            b"[" * 2000 + b"\n",
            b'{"node":"a"}\n',
            pickle.dumps(Bomb(bomb)),
            pickle.dumps(Bomb(bomb)).rjust(32, b"\0") * 3,
            b"GET / HTTP/1.1\r\n\r\n",
            b"\0" * draw.choice([8, 32, 64, 4096]),
            b"\xff" * 100_000,
        ]
    )

"""A stranger on the network, or on one of the nodes: `stranger.py WHERE PORT SEED COUNT BOMB [KEY]`.

It attacks WHERE:PORT; with PORT 0 every port of dure's own that a process of this node listens at, those that come
later too. Torch's store and Gloo listen at ports without authentication: whoever sends Gloo the number of a pair, eight
zero bytes say, takes a rank's place in it. These it only knocks at. With a KEY file it proves that it has the key, and
says what no agent would say. It ends after COUNT sequences, and when there is a file BOMB.enough. Prints, in the end,
how many it tried, how many bytes it ever got from one connection without a proof, and at how many ports it was answered
and was not.
"""

import contextlib
import json
import random
import socket
import sys
import time
from pathlib import Path

from dure.base.team_key import TeamKey, read_key_file
from dure.comm.handshake import Handshake, NotAuthenticated, prove
from dure.launch.nodes.leader import agents_key, agents_purpose
from support.random_messages import a_line, garbage

LISTENS = "0A"


def listening():
    """The ports that somebody listens at here."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, _, state = line.split()[1:4]
        if state == LISTENS:
            found.add(int(local.partition(":")[2], 16))
    return sorted(found - {22})


def answers(where, port):
    """Whether one of dure's own handshakes is behind a port."""
    with contextlib.suppress(OSError), socket.create_connection((where, port), 1.0) as connection:
        connection.settimeout(0.05)
        handshake = Handshake(agents_key(TeamKey.random()), agents_purpose(where, port), calls=True)
        connection.sendall(handshake.begin())
        return len(connection.recv(32)) == 32
    return False


def main():
    where, port, seed, count, bomb = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    key = read_key_file(Path(sys.argv[6])) if len(sys.argv) > 6 else None
    draw = random.Random(seed)
    tried = learned = 0
    held, hit, silent = [], set(), set()
    until = time.monotonic() + 2400
    while (tried < count or not Path(f"{bomb}.enough").exists()) and time.monotonic() < until:
        ports = [port] if port else listening()
        if not ports:
            time.sleep(0.01)
            continue
        target = draw.choice(ports)
        if not port and target not in hit and not answers(where, target):
            silent.add(target)
            tried += 1
            continue
        with contextlib.suppress(OSError, NotAuthenticated):
            connection = socket.create_connection((where, target), 1.0)
            connection.settimeout(0.05)
            tried += 1
            hit.add(target)
            held.append(connection)
            if key is not None and draw.random() < 0.7:
                prove(connection, agents_key(key), agents_purpose(where, target))
                said_by_an_agent(draw, connection, bomb)
            else:
                learned = max(learned, said_by_a_stranger(draw, connection, where, target, bomb))
        for connection in held[: draw.choice([0, 1, len(held) - 50])]:
            connection.close()
            held.remove(connection)
    print(json.dumps({"tried": tried, "learned": learned, "ports": len(hit), "silent": len(silent)}))


def said_by_an_agent(draw, connection, bomb):
    for _ in range(draw.randrange(1, 6)):
        line = a_line(draw, 2) if draw.random() < 0.8 else garbage(draw, bomb)
        connection.sendall(line + draw.choice([b"\n", b"\n", b""]))
    if draw.random() < 0.3:
        connection.recv(1 << 16)


def said_by_a_stranger(draw, connection, where, port, bomb):
    """Any bytes, or the protocol with a wrong key, with its own proof sent back, or broken off. What came, in bytes."""
    got = b""
    if draw.random() < 0.5:
        for _ in range(draw.randrange(1, 4)):
            connection.sendall(garbage(draw, bomb) if draw.random() < 0.7 else a_line(draw, 2) + b"\n")
    else:
        handshake = Handshake(agents_key(TeamKey.random()), agents_purpose(where, port), calls=True)
        connection.sendall(handshake.begin()[: draw.choice([1, 31, 32, 32, 32])])
        got += connection.recv(32)
        if len(got) == 32:
            connection.sendall(handshake.take(got) if draw.random() < 0.7 else got)
    with contextlib.suppress(OSError):
        while more := connection.recv(1 << 16):
            got += more
    return len(got)


main()

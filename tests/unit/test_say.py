"""What the user is told."""

import io
import sys

from dure.base.say import say


class Writes(io.RawIOBase):
    def __init__(self):
        self.data = []

    def writable(self):
        return True

    def write(self, data):
        self.data.append(bytes(data))
        return len(data)


def test_a_line_is_one_write_to_stderr_and_nothing_to_stdout(monkeypatch, capfd):
    writes = Writes()
    monkeypatch.setattr(
        sys, "stderr", io.TextIOWrapper(writes, encoding="utf-8", write_through=True)
    )  # as with -u
    say("두 노드")
    assert writes.data == ["dure: 두 노드\n".encode()]
    assert capfd.readouterr().out == ""

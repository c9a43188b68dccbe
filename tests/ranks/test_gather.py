"""Small exchanges between ranks: text goes as bytes, and nothing that another process sends is unpickled."""

import pickle
import re
from pathlib import Path

from dure.base.run_folder import RunFolder
from dure.launch import run_team

SOURCE = Path(__file__).parents[2] / "src" / "dure"
LOCAL_PIPES = {"launch/agent.py", "launch/prefork.py", "launch/rank.py", "tools/bench/two_nodes.py"}
"""Where a launcher and the ranks that it forked talk over pipes of their own."""


class Bomb:
    def __reduce__(self):
        return (Path("/tmp/dure-was-here").write_text, ("boom",))


def test_texts_of_any_length_and_content_arrive_whole_on_every_rank(tmp_path):
    bomb = pickle.dumps(Bomb()).decode("latin-1")
    texts = [
        ("", "", ""),
        ("a", "", "ccc"),
        ("한국어", "x" * 100_000, "\0\n"),
        (bomb, "half a character: \udc80", "fine"),
    ]
    found = run_team(
        "support.entries:gather_texts",
        (texts,),
        ranks=3,
        folder=RunFolder(tmp_path / "run"),
        hang_seconds=120,
    )
    assert found == [[list(own) for own in texts]] * 3
    assert not Path("/tmp/dure-was-here").exists()


def test_no_code_of_ours_unpickles_what_comes_over_a_network():
    objects = re.compile(r"\b(all_gather|broadcast|gather|scatter|send|recv)_object(_list)?\b\(|\.recv\(\)")
    loads = re.compile(r"\bpickle\.(loads?|Unpickler)\b")
    for path in SOURCE.rglob("*.py"):
        text, name = path.read_text(), str(path.relative_to(SOURCE))
        if name != "launch/ranks.py":  # a socket pair with the process that ranks are forked from
            assert not objects.search(text), name
        assert not loads.search(text) or name in LOCAL_PIPES, name

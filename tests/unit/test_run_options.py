"""`dure run` takes torchrun's command line: what follows the script is the script's."""

import os

import pytest

from dure.base.errors import UsageError
from dure.cli.run import own_options_first, ranks_wanted

OPTIONS = {"--ranks": True, "--port": True, "--cold": False, "-m": False, "--run-dir": True}


@pytest.mark.parametrize(
    ("given", "own", "scripts"),
    [
        ("x.py", "", "x.py"),
        ("x.py --lr 1", "", "x.py --lr 1"),
        ("--ranks 4 x.py --lr 1", "--ranks 4", "x.py --lr 1"),
        ("--ranks=4 --cold x.py --ranks 2 --port 80 -m", "--ranks=4 --cold", "x.py --ranks 2 --port 80 -m"),
        ("-m pkg.mod --lr 1", "-m", "pkg.mod --lr 1"),
        ("--ranks 4 x.py -- --ranks 2", "--ranks 4", "x.py --ranks 2"),
        ("--ranks 4 -- x.py --ranks 2", "--ranks 4", "x.py --ranks 2"),
        ("-- x.py --lr 1", "", "x.py --lr 1"),
        # The older forms.
        ("x.py --ranks 4 -- --ranks 2", "--ranks 4", "x.py --ranks 2"),
        ("--cold x.py --ranks 4 -- --epochs 2", "--cold --ranks 4", "x.py --epochs 2"),
        ("x.py --ranks 4 --cold", "--ranks 4 --cold", "x.py"),
        ("x.py --ranks 4 --lr 1 --port 80", "--ranks 4", "x.py --lr 1 --port 80"),
        ("x.py -- --port 80", "", "x.py --port 80"),
        # A `--` of the script's own, and an option that would change what the script is.
        ("--ranks 4 x.py train -- more", "--ranks 4", "x.py train -- more"),
        ("x.py -m model", "", "x.py -m model"),
    ],
)
def test_what_follows_the_script_is_the_scripts(given, own, scripts):
    assert own_options_first(given.split(), OPTIONS) == [*own.split(), "--", *scripts.split()]


@pytest.mark.parametrize("given", ["", "--ranks", "--ranks 4", "--cold", "--mistyped 4 x.py", "--help"])
def test_without_a_script_nothing_is_moved(given):
    assert own_options_first(given.split(), OPTIONS) == given.split()


def test_ranks_may_be_a_number_or_found_out():
    assert ranks_wanted("3") == 3
    assert ranks_wanted("cpu") == len(os.sched_getaffinity(0))
    assert ranks_wanted("auto") >= 1


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", ""])
def test_other_ranks_are_refused(text):
    with pytest.raises(UsageError, match="--ranks is"):
        ranks_wanted(text)

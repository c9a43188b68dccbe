"""Nodes, and tasks on each, as Slurm writes them in its variables."""

from __future__ import annotations

import itertools
import re

from dure.base.errors import UsageError

MOST_HOSTS = 65536
"""Slurm's own limit of a node list; more than that is a typing error that would fill the memory."""


def expand_hosts(text: str) -> list[str]:
    """The hosts of a node list as Slurm writes it: `node[0-3,7]`, `rack[1-2]n[08-10],login`.

    Done here because `scontrol show hostnames` is missing inside many containers.
    """
    hosts: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):
        if not re.fullmatch(r"[^\s,\[\]]*(?:\[[\d,-]+\][^\s,\[\]]*)*", item) or not item:
            raise _not_a_list(text)
        # Text and bracketed parts by turns: text first, then what is inside brackets.
        pieces = re.split(r"\[([^\]]*)\]", item)
        choices = [[piece] for piece in pieces]
        for index in range(1, len(pieces), 2):
            choices[index] = _expand_numbers(pieces[index], text)
        names = ("".join(choice) for choice in itertools.product(*choices))
        hosts += itertools.islice(names, MOST_HOSTS + 1 - len(hosts))
        if len(hosts) > MOST_HOSTS:
            raise _not_a_list(text)
    return hosts


def expand_counts(text: str) -> list[int]:
    """The tasks on each node as Slurm writes them: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{,17})(?:\(x([1-9][0-9]{,17})\))?", item)
        if match is None or int(match[2] or 1) > MOST_HOSTS - len(counts):
            raise _not_a_list(text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand_numbers(text: str, whole: str) -> list[str]:
    """The inside of a bracket: `08-10,12` is 08, 09, 10, 12."""
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
        if match is None:
            raise _not_a_list(whole)
        low, high = int(match[1]), int(match[2] or match[1])
        if not low <= high < low + MOST_HOSTS - len(numbers):
            raise _not_a_list(whole)
        numbers += [str(number).zfill(len(match[1])) for number in range(low, high + 1)]
    return numbers


def _not_a_list(text: str) -> UsageError:
    return UsageError(
        f"{text!r} is not a list as Slurm writes it, of at most {MOST_HOSTS} nodes (SLURM_STEP_NODELIST, "
        "SLURM_STEP_TASKS_PER_NODE); start this with srun again, or unset SLURM_STEP_NUM_TASKS and give "
        "--rank, --world-size and --master."
    )

"""Slurm's lists of nodes and of tasks on each: read as it writes them, or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.base.errors import UsageError
from dure.base.slurm_lists import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node0", ["node0"]),
        ("node[0-3,7]", ["node0", "node1", "node2", "node3", "node7"]),
        ("a-[01-02]b", ["a-01b", "a-02b"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        (
            "login,r[1-2]n[08-09],x-1.example.org",
            ["login", "r1n08", "r1n09", "r2n08", "r2n09", "x-1.example.org"],
        ),
    ],
)
def test_a_node_list_is_read_as_slurm_writes_it(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", "a,,b", "a b"),
        *("n[", "n]", "n[]", "n[1", "n[[1]]", "n[a-b]", "n[3-1]", "n[1-]", "n[-1]", "n[1,]"),
        *("n[0-65536]", "n[0-999]m[0-999]", "n[0-40000,0-40000]", f"n[{'9' * 5000}]"),
    ],
)
def test_a_broken_or_endless_node_list_is_refused(text):
    with pytest.raises(UsageError, match="is not a list as Slurm writes it"):
        expand_hosts(text)


@pytest.mark.parametrize(
    "text", ["", "x", "2(x", "2(x0)", "0", "2x3", "2,", "2(x99999)", "-1", f"1(x{'9' * 5000})"]
)
def test_a_broken_count_of_tasks_is_refused(text):
    with pytest.raises(UsageError, match="is not a list as Slurm writes it"):
        expand_counts(text)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 9)), min_size=1, max_size=6))
def test_counts_of_tasks_come_back_as_they_were(runs):
    text = ",".join(str(tasks) if nodes == 1 else f"{tasks}(x{nodes})" for tasks, nodes in runs)
    assert expand_counts(text) == [tasks for tasks, nodes in runs for _ in range(nodes)]


names = st.text("abcxyz-.", min_size=1, max_size=5)
ranges = st.tuples(st.integers(0, 1200), st.integers(0, 5), st.integers(1, 5))


@given(st.lists(st.tuples(names, st.lists(ranges, max_size=3), names), min_size=1, max_size=4))
def test_hosts_of_a_node_list_come_back_as_they_were(groups):
    items, hosts = [], []
    for before, numbers, after in groups:
        if not numbers:
            items.append(before)
            hosts.append(before)
            continue
        parts = []
        for first, more, width in numbers:
            last = first + more
            parts.append(f"{first:0{width}}" if more == 0 else f"{first:0{width}}-{last:0{width}}")
            hosts += [f"{before}{number:0{width}}{after}" for number in range(first, last + 1)]
        items.append(f"{before}[{','.join(parts)}]{after}")
    assert expand_hosts(",".join(items)) == hosts


@given(st.text("na01,-[]() x", max_size=20))
def test_any_text_is_a_list_or_refused(text):
    for expand in (expand_hosts, expand_counts):
        try:
            assert expand(text)
        except UsageError:
            continue

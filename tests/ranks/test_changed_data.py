"""A sample that was changed since the run first read it is named: at the next epoch, or after a resume."""

import pytest
import torch
from support import FOLDER
from support.commands import train

from dure.base.errors import UsageError
from dure.comm.group import Group
from dure.data.content import content_of
from dure.proof.sample_contents import SampleContents

JOB = """
name = "numbers"
[model]
factory = "{here}/on_disk.py:model"
[data]
factory = "{here}/on_disk.py:numbers"
args = {{ file = "{file}" }}
global_batch = 16
[train]
loss = "mse"
epochs = 1
[team]
ranks = 2
"""
ALONE = Group(None, 0, 1)


def read_all(table, data, *epochs):
    for epoch in epochs:
        for sample, value in enumerate(data):
            table.check(epoch, [sample], [content_of(value(epoch))])
        table.end_epoch()


@pytest.mark.parametrize("varies", [False, True])
def test_a_changed_sample_is_named_in_the_next_epoch_and_session(tmp_path, varies):
    data = [lambda epoch, n=n: (n, epoch if varies else 0) for n in range(5)]

    def table():
        return SampleContents(tmp_path / "receipt" / "samples", 5, ALONE, lambda e, s: content_of(data[s](e)))

    first = table()
    read_all(first, data, 0, 1, 2)
    second = table()
    read_all(second, data, 3)
    data[3] = lambda epoch: (33, epoch if varies else 0)
    for again in (second, table()):
        with pytest.raises(UsageError, match=r"sample 3 of the data .* epoch 0.*--fresh"):
            read_all(again, data, 4, 5, 6)


def test_contents_tell_values_types_and_shapes_apart():
    values = [
        torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), 0, 0.0, False, "0", b"", [0], [0, 0],
        {"a": 0}, {"b": 0}, -0.0, torch.zeros(4).numpy(), None,
    ]  # fmt: skip
    assert len({content_of(value) for value in values}) == len(values)
    assert content_of((torch.ones(3), 2)) == content_of((torch.ones(3), 2))


def test_a_sample_that_is_changed_between_two_sessions_is_named(tmp_path):
    file, job = tmp_path / "numbers.txt", tmp_path / "job.toml"
    values = list(map(str, range(64)))
    file.write_text(" ".join(values))
    job.write_text(JOB.format(here=FOLDER, file=file))
    assert train(job, tmp_path / "run", "--set", "train.epochs=2").code == 0
    values[7] = "99"
    file.write_text(" ".join(values))
    ended = train(job, tmp_path / "run", "--set", "train.epochs=4")
    assert ended.code == 2, ended.err
    last = ended.err.strip().splitlines()[-1]
    assert "sample 7 of the data is not what it was when this run read it in epoch 0" in last

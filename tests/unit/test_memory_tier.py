"""States in memory: whole or not there, found by any number of ranks, as often as they cost little."""

import itertools
import os

import pytest
import torch

from dure.checkpoint.capture import Capture
from dure.checkpoint.memory_slot import Record, Slot
from dure.checkpoint.memory_tier import MOST_STEPS, Cadence, Costs, memory_tier
from dure.checkpoint.restore import restore
from dure.checkpoint.state import Share
from dure.comm.group import Group
from dure.comm.topology import KEEP_VARIABLE
from dure.launch.state_memory import StateMemory
from dure.observe.events import Noted, Recorder, read_events


class Trained:
    """A small model with an optimizer that has a state."""

    def __init__(self, seed, steps=0):
        torch.manual_seed(seed)
        self.module = torch.nn.Sequential(
            torch.nn.Linear(33, 70), torch.nn.BatchNorm1d(70), torch.nn.Linear(70, 3)
        )
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.module(torch.randn(8, 33)).square().sum().backward()
            self.optimizer.step()

    def capture(self, share, step):
        return Capture(self.module, self.optimizer, None).take({"step": step}, share)

    def bits(self):
        state = self.optimizer.state_dict()["state"]
        return [
            *self.module.state_dict().values(),
            *(t for of in state.values() for _, t in sorted(of.items())),
        ]


def same(left, right):
    pairs = zip(left.bits(), right.bits(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.fixture
def slot(tmp_path):
    path = tmp_path / "slot"
    path.touch()
    slot = Slot(str(path))
    yield slot
    slot.close()


def filled(slot, trained, step, parts, only=None):
    for part in range(parts) if only is None else only:
        slot.write(trained.capture(Share(part, parts), step), part, parts, f"events of {part}\n")


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_what_all_ranks_wrote_comes_back_as_the_same_bits(slot, parts):
    trained, fresh = Trained(1, steps=3), Trained(2)
    assert not same(trained, fresh)
    filled(slot, trained, 3, parts)
    records = slot.records()
    assert [record.step for record in records] == [3] * parts
    assert all(slot.sound(record) for record in records)
    assert slot.events(records[-1]) == f"events of {parts - 1}\n"
    restore(slot.state(records[0]), fresh.module, fresh.optimizer, None)
    assert same(trained, fresh)


def test_a_state_is_whole_only_when_all_ranks_wrote_their_part(slot):
    trained = Trained(1, steps=1)
    assert slot.records() is None
    filled(slot, trained, 1, 4, only=(0, 1, 3))
    assert slot.records() is None
    filled(slot, trained, 1, 4, only=(2,))
    assert slot.records() is not None
    filled(slot, trained, 2, 4, only=(0, 1, 2))  # one rank died before it wrote the next
    assert slot.records() is None


def test_a_smaller_team_can_follow(slot):
    trained = Trained(1, steps=1)
    filled(slot, trained, 1, 8)
    filled(slot, trained, 2, 2)
    assert [record.parts for record in slot.records()] == [2, 2]


def test_any_flipped_byte_is_found(slot, tmp_path):
    trained = Trained(1, steps=1)
    filled(slot, trained, 1, 2)
    whole = slot.state(slot.records()[0])
    for span in whole.table.spans:
        at = span.start + span.nbytes // 2
        whole.memory[at] ^= 1
        assert [slot.sound(record) for record in slot.records()].count(False) == 1, span.name
        whole.memory[at] ^= 1
    assert all(slot.sound(record) for record in slot.records())


def test_a_record_that_was_cut_short_is_none():
    record = Record(1, 4, 17, 100, 2**63, 200, 2**64 - 1)
    packed = record.pack()
    assert Record.unpack(packed) == record
    assert Record.unpack(bytes(64)) is None
    for length in range(len(packed)):
        assert Record.unpack(packed[:length] + bytes(64 - length)) is None


def test_the_newest_state_is_found_by_a_new_team_and_a_damaged_one_is_not():
    group = Group(None, 0, 1)
    with StateMemory() as keep:
        trained = Trained(1)
        tier = memory_tier(keep.environment, 0, 1, group, 2)
        assert tier.newest() is None
        tier.begin(0)
        kept = []
        for step in range(1, 8):
            if tier.is_due(step):
                tier.keep(
                    lambda share, step=step: trained.capture(share, step),
                    step,
                    lambda step=step: f"before {step}\n",
                )
                kept.append(step)
        assert kept == [2, 4, 6]
        tier.close()

        tier = memory_tier(keep.environment, 0, 1, group, 2)
        found = tier.newest()
        assert (found.state.facts["step"], found.events) == (6, "before 6\n")
        found.state.memory[100] ^= 1
        found = tier.newest()
        assert found.state.facts["step"] == 4
        # The next one takes the damaged one's place, not that of the last good one.
        tier.begin(4)
        tier.keep(lambda share: trained.capture(share, 5), 5, str)
        tier.settle()
        assert sorted(slot.records()[0].step for slot in tier._slots) == [4, 5]
        tier.close()


def test_without_a_launcher_of_ours_there_is_no_tier():
    group = Group(None, 0, 1)
    assert memory_tier({}, 0, 1, group, None) is None
    assert memory_tier({KEEP_VARIABLE: f"{os.getpid()}:990:991"}, 0, 1, group, None) is None


def test_states_too_large_for_the_memory_are_not_kept_and_it_is_said(monkeypatch):
    monkeypatch.setattr("dure.checkpoint.memory_tier.free_memory_bytes", lambda: 1 << 10)
    with StateMemory() as keep:
        tier = memory_tier(keep.environment, 0, 1, Group(None, 0, 1), 1)
        tier.begin(0)
        trained = Trained(1)
        tier.keep(lambda share: trained.capture(share, 1), 1, "")
        assert "memory are free" in tier.trouble
        assert not tier.is_due(2)
        assert tier.newest() is None
        tier.close()


def test_a_new_team_has_room_where_the_old_one_had(monkeypatch):
    trained = Trained(1)
    with StateMemory() as keep:
        for step in (1, 4):
            tier = memory_tier(keep.environment, 0, 1, Group(None, 0, 1), 1)
            tier.begin(step)
            for at in (step + 1, step + 2):
                tier.keep(lambda share, at=at: trained.capture(share, at), at, str)
            assert tier.trouble == ""
            tier.close()
            monkeypatch.setattr("dure.checkpoint.memory_tier.free_memory_bytes", lambda: 1 << 10)


def test_states_are_kept_as_often_as_they_take_a_hundredth_of_the_time():
    cadence, kept = Cadence.begin(None, 10), []
    for step in range(11, 2000):
        if step >= cadence.due:
            kept.append(step)
            costs = Costs(state_seconds=0.005, step_seconds=0.01) if cadence.asks else None
            cadence = cadence.after(step, costs)
    assert kept[:4] == [11, 12, 13, 13 + 50]
    assert {later - earlier for earlier, later in itertools.pairwise(kept[2:])} == {50}


def test_cheap_states_are_kept_at_every_step_and_dear_ones_not_never():
    assert Cadence(None, 5, kept=3).after(5, Costs(1e-5, 1.0)).due == 6
    assert Cadence(None, 5, kept=3).after(5, Costs(1e5, 1e-9)).due == 5 + MOST_STEPS


def test_a_number_of_steps_is_kept_to():
    assert Cadence.begin(7, 3).due == 10
    assert Cadence.begin(7, 3).after(10, None).due == 17
    assert not Cadence.begin(7, 3).asks


def test_events_are_on_disk_or_still_to_be_had(tmp_path):
    recorder = Recorder(tmp_path / "events.jsonl")
    seen = []
    for number in range(3000):
        recorder.record(Noted(str(number)))
        if number % 100 == 0:
            pending = recorder.unwritten()()
            on_disk = recorder.path.read_text() if recorder.path.exists() else ""
            seen.append(f'"{number}"' in pending + on_disk)
    recorder.close(60)
    assert all(seen)
    assert recorder.unwritten()() == ""
    assert len(list(read_events(recorder.path))) == 3000

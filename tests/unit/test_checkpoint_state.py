"""A state that is captured in any number of shares and restored elsewhere goes on with the same bits."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.base.errors import CheckpointError
from dure.checkpoint.capture import Capture
from dure.checkpoint.restore import restore
from dure.checkpoint.state import Part, Share, Sharing, Table, WholeState, cut, from_plain, to_plain
from dure.comm.group import Group
from dure.device.fingerprint import fingerprint, named_weights, optimizer_tensors


class Net(torch.nn.Module):
    """Tied weights, buffers of odd types, a channels-last kernel, a scalar, an empty and a bf16 parameter."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(7, 5)
        self.head = torch.nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm1d(5)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.nothing = torch.nn.Parameter(torch.empty(0))
        self.low = torch.nn.Parameter(torch.randn(33).bfloat16())
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.randn(3), persistent=False)

    def forward(self, ids, image):
        hidden = (
            self.norm(self.embed(ids)) * self.scale + self.conv(image).mean() + self.low.float().sum() / 99
        )
        return self.head(hidden).square().sum() + self.nothing.sum()


OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True, amsgrad=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "Adafactor": lambda ps: torch.optim.Adafactor([p for p in ps if p.numel()], lr=0.01),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=0.01),
}
SCHEDULES = {
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, max_lr=0.1, total_steps=50, cycle_momentum=False
    ),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, milestones=[2, 5, 5]),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
}


def made(optimizer="AdamW", schedule="MultiStepLR", seed=0):
    net = Net(seed)
    chosen = OPTIMIZERS[optimizer](list(net.parameters()))
    return net, chosen, SCHEDULES[schedule](chosen)


def train(run, steps):
    net, optimizer, schedule = run
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        net(torch.randint(7, (6,)), torch.randn(2, 3, 5, 5)).backward()
        optimizer.step()
        schedule.step()
    state = [*named_weights(net), *((f"o{name}", t) for name, t in optimizer_tensors(optimizer))]
    return fingerprint(state), schedule.get_last_lr()


def whole_of(states):
    memory = torch.zeros(states[0].table.nbytes, dtype=torch.uint8)
    for state in states:
        state.copy_into(memory)
    facts = json.loads(json.dumps(states[0].facts))
    return WholeState(facts, Table.from_plain(json.loads(json.dumps(states[0].table.to_plain()))), memory)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restored_replica_goes_on_with_the_same_bits(optimizer, schedule):
    first = made(optimizer, schedule)
    train(first, range(4))
    whole = whole_of([Capture(*first).take({"step": 4}, Share(part, 3)) for part in range(3)])
    expected = train(first, range(4, 9))
    second = made(optimizer, schedule, seed=1)
    restore(whole, *second)
    assert train(second, range(4, 9)) == expected


def test_a_state_before_the_first_step_is_restored_too():
    first, second = made(), made(seed=1)
    restore(whole_of([Capture(*first).take({"step": 0}, Share(0, 1))]), *second)
    assert train(first, range(3)) == train(second, range(3))


def test_ties_and_what_the_model_does_not_save_are_told():
    state = Capture(*made()).take({"step": 0}, Share(0, 1))
    assert state.facts["model"] == {"ties": {"head.weight": "embed.weight"}, "not_persistent": ["scratch"]}
    assert sum(span.name.endswith("head.weight") for span in state.table.spans) == 0


def halves(run):
    """What two ranks would hold of a sharded optimizer: the channels-last kernel cut in two, the rest by turns."""
    net, optimizer, schedule = run
    found = []
    for rank in range(2):
        own = type(optimizer)(list(net.parameters()), lr=0.01, fused=True, amsgrad=True)
        parts, kept = {}, []
        for at, parameter in enumerate(net.parameters()):
            state = optimizer.state[parameter]
            if parameter is net.conv.weight:
                start, stop = ((0, 64), (64, 108))[rank]
                flat = parameter.detach().as_strided((108,), (1,))
                held = torch.nn.Parameter(flat[start:stop])
                parts[held] = Part(parameter, start, stop)
                own.state[held] = {
                    key: value if key == "step" else value.as_strided((108,), (1,))[start:stop].clone()
                    for key, value in state.items()
                }
                kept.append(held)
            elif at % 2 == rank:
                own.state[parameter] = dict(state)
                kept.append(parameter)
        own.param_groups[0] = {**optimizer.param_groups[0], "params": kept}
        found.append((own, parts))
    return net, found, schedule


class Told(Group):
    """A group whose members have already said what they have to say."""

    def __init__(self, rank, texts):
        super().__init__(None, rank, 2)
        self._texts = texts

    def gather(self, value, what):
        self._texts[self.rank] = value
        return [text for text in self._texts if text]


def test_a_sharded_optimizer_is_saved_in_parts_and_restored_whole_or_in_other_parts():
    first = made()
    train(first, range(4))
    net, ranks, schedule = halves(first)
    texts = ["", ""]
    for _ in range(2):  # the second time, each knows what the other says
        states = [
            Capture(net, own, schedule).take({"step": 4}, Share(rank, 2), Sharing(parts, Told(rank, texts)))
            for rank, (own, parts) in enumerate(ranks)
        ]
    whole = whole_of(states)
    alone = whole_of([Capture(*first).take({"step": 4}, Share(0, 1))])
    assert whole.table == alone.table
    assert torch.equal(whole.memory, alone.memory)
    second = made(seed=1)
    train(second, range(1))
    other, others, _ = halves(second)
    for rank, (own, parts) in enumerate(others):
        restore(whole, other, own, second[2], Sharing(parts, Told(rank, texts)))
    again = [
        Capture(other, own, second[2]).take({"step": 4}, Share(rank, 2), Sharing(parts, Told(rank, texts)))
        for rank, (own, parts) in enumerate(others)
    ]
    assert torch.equal(whole_of(again).memory, alone.memory)


@given(st.lists(st.integers(0, 5000), max_size=12), st.integers(1, 9))
def test_shares_cover_every_element_exactly_once(sizes, parts):
    kinds = (torch.float32, torch.bool, torch.float64, torch.bfloat16)
    table = Table.of((f"t{at}", kinds[at % 4], (size,)) for at, size in enumerate(sizes))
    covered = {span.name: [] for span in table.spans}
    loads = []
    for part in range(parts):
        pieces = list(cut(table.spans, part, parts))
        loads.append(sum((stop - start) * span.dtype.itemsize for span, start, stop in pieces))
        for span, start, stop in pieces:
            covered[span.name] += range(start, stop)
    assert all(covered[span.name] == list(range(span.numel)) for span in table.spans)
    assert max(loads) - min(loads) <= 64 * (len(sizes) + 2)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda net: setattr(net, "head", torch.nn.Linear(5, 7)),
        lambda net: net.register_buffer("mask", torch.tensor([1.0])),
        lambda net: delattr(net, "scale"),
    ],
)
def test_a_state_of_another_model_is_refused_and_nothing_is_written(break_it):
    whole = whole_of([Capture(*made()).take({"step": 0}, Share(0, 1))])
    net, optimizer, schedule = made(seed=1)
    break_it(net)
    before = fingerprint(named_weights(net))
    with pytest.raises(CheckpointError, match="another model"):
        restore(whole, net, optimizer, schedule)
    assert fingerprint(named_weights(net)) == before


def test_what_json_cannot_say_is_refused_by_name():
    with pytest.raises(CheckpointError, match="the schedule's fn is a function"):
        to_plain(test_what_json_cannot_say_is_refused_by_name, "the schedule's fn")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(st.text(), inner)
            | st.dictionaries(st.integers(), inner)
        ),
        max_leaves=20,
    )
)
def test_plain_values_come_back_as_they_were(value):
    assert from_plain(json.loads(json.dumps(to_plain(value, "it")))) == value


def _step(run):
    train(run, [7])


def _other_tensor(run):
    run[0].mask = torch.tensor([False, True])


def _other_values_in_place(run):
    run[0].low.data = torch.ones(5).bfloat16()


def _other_layer(run):
    run[0].norm.add_module("inner", torch.nn.BatchNorm1d(3))


def _other_optimizer_state(run):
    run[1].load_state_dict(run[1].state_dict())


def _list_in_the_optimizer(run):
    run[1].state[run[0].scale].setdefault("seen", []).append(len(run[1].state))


CHANGES = [
    _step,
    _other_tensor,
    _step,
    _other_values_in_place,
    _other_layer,
    _other_optimizer_state,
    _list_in_the_optimizer,
    _list_in_the_optimizer,
]


def test_what_a_capture_remembers_is_never_older_than_the_replica():
    run = made("SGD")
    capture = Capture(*run)
    for change in CHANGES:
        capture.take({"step": 0}, Share(0, 1))
        change(run)
        known, fresh = (taking.take({"step": 0}, Share(1, 2)) for taking in (capture, Capture(*run)))
        assert json.dumps(known.facts) == json.dumps(fresh.facts)
        assert known.table == fresh.table
        assert len(known.pieces) == len(fresh.pieces)
        for ours, theirs in zip(known.pieces, fresh.pieces, strict=True):
            assert (ours.span, ours.start, ours.stop) == (theirs.span, theirs.start, theirs.stop)
            assert ours.values.data_ptr() == theirs.values.data_ptr()

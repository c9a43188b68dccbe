"""What ranks do in the same words on the CPU and on the stand-in device: all results must be the same bits.

`cases` is the entry point. Everything is computed on a stream of the script's own, as scripts may, and results are
read only after what must be waited for was waited for.
"""

import contextlib
import random
import threading
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import dure
from dure.checkpoint.state import LiveHash, fingerprint_of
from dure.comm.reduce.exchanger import NOT_FINITE, Exchange, Pieces
from dure.device import pinned
from dure.device.copying import copy_into
from dure.device.fingerprint import raw_bytes, weights_sha256
from support import standin
from support.reduces import _subtree, leaf, plain_tree_sum

SHARDS = 8
EXCHANGES = 8


class Words:
    """33 sentences of 8 words: the last batch has one sample, so that most ranks have none."""

    def __len__(self):
        return 33

    def __getitem__(self, index):
        words = torch.arange(8) * (index + 3) % 17
        return words, words.roll(1)


class Pictures:
    """33 small pictures."""

    def __len__(self):
        return 33

    def __getitem__(self, index):
        return torch.randn(3, 6, 6) + index % 3, index % 3


class Transformer(nn.Module):
    """One layer, with dropout; some weights are larger than a bucket's first, others take no part in some batches."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 17)

    def forward(self, words):
        return self.head(self.layer(self.embed(words))).flatten(0, 1)


def words_loss(output, target):
    return F.cross_entropy(output, target.flatten(), reduction="none")


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))


def exchanges(team, _folder):
    """Random subtrees against a plain tree in this process; sometimes without pieces, or with infinity."""
    dice, found = random.Random(5), []
    exchanger = team.exchanger()
    if team.topology.size > 1:
        gloo = team._exchangers._gradients._get_backend(torch.device("cpu"))
        assert gloo.options._timeout.total_seconds() == team.setting.deadline_seconds
    for trial in range(EXCHANGES):
        active, numel = dice.choice((1, 2, 3, 5, 8)), dice.choice((1, 17, 4099, 40_001))
        shape, scale = Pieces.of_step(team.topology.size, SHARDS, active), 1.0 / dice.randint(1, 9)
        own = shape.by_rank[team.rank]
        buffers = exchanger.buffers(trial % 2, torch.zeros(numel, device=team.device))
        bad = trial == EXCHANGES - 1
        for position, piece in enumerate(own):
            leaves = [leaf(trial, shard, numel, torch.float32) for shard in piece]
            into = buffers.out if position == len(own) - 1 else buffers.extra(position)
            into.copy_(_subtree(leaves, piece, active, "fp32"))
            if bad and piece.start == 0:
                into[-1] = float("inf")
        exchanger.exchange(buffers, Exchange(shape, scale, 2 if team.rank == 0 else 0))
        flags = exchanger.conclude()
        expected = plain_tree_sum([leaf(trial, s, numel, torch.float32) for s in range(active)], scale, False)
        same = torch.equal(buffers.out.cpu()[: numel - bad], expected[: numel - bad])
        found.append((same, flags == (2 | NOT_FINITE if bad else 2)))
    exchanger.close()
    return all(same and told for same, told in found) or found


def trained(team, model, dataset, loss, *, shard=False, steps=None, folder=None, clip=None):
    """Train, prove every other step; returns the weights' hash and the losses."""
    replica = team.replicate(model)  # first: a move to the device may give the module other parameters
    optimizer = torch.optim.AdamW(replica.parameters(), lr=0.01, fused=True)
    if shard:
        team.shard_optimizer(replica, optimizer)
    checkpoint = None
    if folder is not None:
        checkpoint = team.checkpoint(
            model=replica, optimizer=optimizer, folder=folder, every=1, any_recipe=True
        )
        checkpoint.resume()
    losses = []
    length = {"epochs": 1} if steps is None else {"steps": steps}
    for batch in team.batches(dataset, global_batch=16, **length):
        losses.append(team.step(replica, optimizer, batch, loss, clip_norm=clip))
        if batch.step % 2:
            team.prove(replica, optimizer)
        if checkpoint is not None:
            checkpoint.save_if_due()
    evaluated = team.evaluate(replica, dataset, {"loss": loss}, batch=16).metrics["loss"]
    return weights_sha256(replica.module), losses, evaluated


def transformer(team, _folder):
    torch.manual_seed(1)
    return trained(team, Transformer(), Words(), words_loss, clip=1.0)


def batch_norm(team, _folder):
    torch.manual_seed(2)
    return trained(team, network(), Pictures(), F.cross_entropy)


def sharded(team, _folder):
    torch.manual_seed(1)
    return trained(team, Transformer(), Words(), words_loss, shard=True)


def loaded(team, folder):
    """Weights from a file that another process wrote, by every way."""
    return [
        weights_sha256(team.load(Transformer, weights="weights.safetensors", how=how, storage=folder))
        for how in ("slices", "rank0", "every-rank")
    ]


def loaded_in_place(team, folder):
    """Into a model that is on its device already; on the stand-in straight, by what stands in for kvikio, on all ranks
    or, where one lacks it, on none. It tells that it is alive for every tensor."""
    found, told = [], []

    def load():
        model = Transformer().to(team.device)
        result = team.loader.load(
            model,
            "weights.safetensors",
            storage=folder,
            progress=lambda done, total: told.append((done, total)),
        )
        found.append(weights_sha256(result.module))
        return result

    if team.device.type != standin.KIND:
        load()
        return found
    with standin.kvikio():
        assert "with kvikio" in load().way
        assert len(told) >= len(list(Transformer().parameters()))
        assert told[-1][0] == told[-1][1] > 0
    with standin.kvikio() if team.rank == 0 and team.topology.size > 1 else contextlib.nullcontext():
        assert "straight" not in load().way
    assert found[0] == found[1]
    return found[:1]


def resumed(team, folder):
    """Goes on from what an earlier launch of other ranks has left, if it has."""
    torch.manual_seed(1)
    steps = 2 if team.topology.size == 2 else 5
    return trained(team, Transformer(), Words(), words_loss, steps=steps, folder=Path(folder) / "states")[0]


def halves(team, _folder):
    """Weights in bf16, whose gradients are added in fp32: what is added is not the bucket's own memory."""
    torch.manual_seed(4)
    model = nn.Sequential(InHalves(), nn.Linear(108, 64), nn.ReLU(), nn.Linear(64, 3)).bfloat16()
    return trained(team, model, Pictures(), halves_loss, steps=8)


class InHalves(nn.Module):
    def forward(self, pictures):
        return pictures.flatten(1).bfloat16()


def halves_loss(output, target):
    return F.cross_entropy(output.float(), target, reduction="none")


def captured(team, _folder):
    """State that is copied and hashed while the stream that computes it still has work."""
    right = []
    pinned.CHUNK_BYTES = 5000  # of which it takes several
    for turn in range(6):
        values = torch.zeros(3000, device=team.device)
        for _ in range(40):
            values.add_(1 + turn)
        memory = torch.zeros(values.nbytes, dtype=torch.uint8)
        copy_into(memory, [0], [values])
        right.append(torch.equal(memory.view(torch.float32), torch.full((3000,), 40.0 * (1 + turn))))
        for _ in range(40):
            values.sub_(1)
        live = LiveHash([(0, values)])
        thread = threading.Thread(target=live.take)
        thread.start()
        thread.join()
        expected = torch.full((3000,), 40.0 * turn)
        right.append(live.value == fingerprint_of([(0, raw_bytes(expected))]))
    return all(right) or right


CASES = {
    case.__name__: case
    for case in (
        exchanges,
        transformer,
        halves,
        batch_norm,
        sharded,
        loaded,
        loaded_in_place,
        resumed,
        captured,
    )
}


def cases(kind, folder, names=tuple(CASES)):
    """Entry point: each case's result by name, as every rank has it, and the host's waits per step."""
    if kind == standin.KIND:
        standin.use()
    with dure.start(seed=3, shards=SHARDS, device="auto" if kind == standin.KIND else "cpu") as team:
        assert team.device.type == kind, team.device
        own = torch.Stream(device=team.device) if kind == standin.KIND else contextlib.nullcontext()
        with own:
            return {name: CASES[name](team, folder) for name in names}

"""dure computes what plain PyTorch computes, and what the documents worked out by hand."""

import pytest
import torch
import torch.nn.functional as F
from support.features import Points, Words, with_dropout_and_batchnorm

import dure
from dure.base.run_folder import RunFolder
from dure.data.seeds import seed_all, seed_of
from dure.launch import run_team


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """What each of four ranks found, by the name of the comparison."""
    place = tmp_path_factory.mktemp("plain")
    folder = RunFolder(place / "run")
    return run_team("support.plain:all_three", (str(place),), ranks=4, folder=folder, hang_seconds=300)


class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(20, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.out = torch.nn.Linear(16, 20)

    def forward(self, words):
        return self.out(self.layer(self.words(words)))


def sum_and_count(output, target):
    flat = output.reshape(-1, output.shape[-1])
    return F.cross_entropy(flat, target.reshape(-1), reduction="sum"), int((target != -100).sum())


@pytest.mark.parametrize(("make", "data"), [(Transformer, Words), (with_dropout_and_batchnorm, Points)])
def test_one_rank_and_one_shard_is_a_plain_loop_bit_for_bit_for_100_steps(make, data, one_thread):
    seed, batch_size, steps = 9, 10, 100
    with dure.start(seed=seed, shards=1) as team:
        model = team.replicate(make())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses = []
        for batch in team.batches(data(), global_batch=batch_size, steps=steps):
            losses.append(team.step(model, optimizer, batch, F.cross_entropy))

    seed_all(seed)
    mine = make()
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3, fused=True)
    samples = data()
    plain_losses, epoch, order = [], -1, []
    for step in range(steps):
        if not order:
            epoch += 1
            dice = torch.Generator().manual_seed(seed_of(seed, "order", epoch))
            order = torch.randperm(len(samples), generator=dice).tolist()
        taken, order = order[:batch_size], order[batch_size:]
        drawn = []
        for sample in taken:
            seed_all(seed_of(seed, "sample", epoch, sample))
            drawn.append(samples[sample])
        inputs, target = torch.utils.data.default_collate(drawn)
        seed_all(seed_of(seed, "shard", step, 0, 0))
        loss, count = sum_and_count(mine(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        for parameter in mine.parameters():
            parameter.grad.mul_(1.0 / count)
        optimizer.step()
        plain_losses.append(float(loss.detach()) * (1.0 / count))
    assert losses == plain_losses
    theirs = model.module.state_dict()
    assert theirs.keys() == mine.state_dict().keys()
    for name, value in mine.state_dict().items():
        assert torch.equal(value, theirs[name]), name


def test_four_ranks_are_plain_ddp_with_a_distributed_sampler(four_ranks):
    for rank, (moved, apart, ids) in enumerate(found["one_sgd_step"] for found in four_ranks):
        print(f"rank {rank}: weights moved by up to {moved:.3g}, apart from DDP's by up to {apart:.3g}")
        assert moved > 1e-3
        assert apart < 1e-6
        assert ids == [tuple(range(rank, 64, 4))]


def test_the_first_documents_averages(four_ranks):
    for found in four_ranks:
        assert found["document_averages"] == pytest.approx([0.65, 0.25, 0.45], abs=1e-7)


def test_the_second_documents_weights_on_every_one_of_four_ranks(four_ranks):
    results = [found["three_weights"] for found in four_ranks]
    assert len(results) == 4
    for before, after in results:
        assert before == pytest.approx([0.5, 0.3, 0.2], abs=1e-7)
        assert after == pytest.approx([0.7, 0.5, 0.5], abs=1e-6)
        assert after == results[0][1]

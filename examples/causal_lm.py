"""Fine-tune a causal language model of Hugging Face: a tiny GPT-2, made from its config, on sentences of two lengths.

    dure run --ranks 4 causal_lm.py
    python causal_lm.py --steps 20       (one rank: the same bits)

With `team.load(AutoModelForCausalLM, weights="folder")` it starts from pretrained weights instead.
"""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import dure

WORDS = 40
PAD = 0


class Sentences(Dataset):
    """Counting up by two or by three, in sentences of different lengths: a sample is a dict."""

    def __len__(self):
        return 211

    def __getitem__(self, index):
        stride, length = 2 + index % 2, 8 + index % 5
        words = [1 + (index + stride * at) % (WORDS - 1) for at in range(length)]
        return {"input_ids": torch.tensor(words)}


def padded(samples):
    """The collate function: pad to one length for all batches, so that shapes do not depend on who meets whom."""
    ids = torch.full((len(samples), 12), PAD)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample["input_ids"])] = sample["input_ids"]
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def loss(model, batch):
    """The sum over words, and how many there are: the mean over the whole batch is then right, word by word."""
    logits = model(**batch).logits[:, :-1]
    following = batch["input_ids"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=PAD, reduction="sum"), (
        following != PAD
    ).sum()


def guessed(model, batch):
    """For the evaluation: (output, target)."""
    following = batch["input_ids"][:, 1:]
    return model(**batch).logits[:, :-1], following.masked_fill(following == PAD, -100)


def train(team, steps=60):
    """Returns the replica and the evaluation's metrics."""
    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1
    )
    model = team.replicate(GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    for batch in team.batches(Sentences(), global_batch=32, steps=steps, collate=padded):
        lost = team.step(model, optimizer, batch, forward=loss, schedule=warm_up, clip_norm=1.0)
        if batch.step % 20 == 0:
            team.print(f"step {batch.step}: loss {lost:.4f}")
    measures = {"loss": "cross_entropy", "accuracy": "accuracy"}
    found = team.evaluate(model, Sentences(), measures, batch=32, collate=padded, forward=guessed)
    return model, found.metrics


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[dure.arguments()])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    with dure.start(args, seed=1) as team:
        model, metrics = train(team, args.steps)
        team.print(metrics, team.prove(model))

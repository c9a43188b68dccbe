"""Manifests that somebody made up and signed: never a raw error, always one clear line, or set aside; and whatever is
accepted puts every byte where it belongs."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoints import ALONE

from dure.base.errors import CheckpointError, UsageError
from dure.base.run_folder import RunFolder
from dure.checkpoint.capture import Capture
from dure.checkpoint.export import as_rows, export_weights, in_words
from dure.checkpoint.find import entries, newest_state, refuse_other_recipe
from dure.checkpoint.manifest import MANIFEST, Manifest
from dure.checkpoint.restore import restore
from dure.checkpoint.snapshot import Snapshot
from dure.checkpoint.state import Share
from dure.data.ledger import SampleLedger
from dure.storage import open_store

MANIFESTS = 1500
DEEP: Any = []
for _ in range(150):
    DEEP = [DEEP]
ODD: list[Any] = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        7,
        2**31,
        2**53,
        2**63,
        2**64,
        -(2**70),
        10**30,
        10**400,
        0.5,
        1e308,
        -0.0,
    ),
    *(
        float("nan"),
        float("inf"),
        "",
        "x",
        "F32",
        "float32",
        "complex128",
        "uint7",
        "Tensor",
        "\0",
        "a\nb\x1b[2J",
        "한글",
    ),
    *(
        "../../etc/passwd",
        "/etc/passwd",
        "part-0-of-1.safetensors/..",
        "part-0-of-1.safetensors\n",
        "x" * 5000,
        "🙂" * 50,
    ),
    *(
        [],
        {},
        [[]],
        [{}],
        [1, 2, 3],
        [0, 0, 0],
        [[0, 0, 1]],
        [[-1, 0, 1]],
        [["w", "float32", [2]]],
        {"a": {}},
        DEEP,
    ),
    *(
        {"(tuple)": 5},
        {"(pairs)": [[[1], 2]]},
        {"(counter)": [[{}, 1]]},
        {"(pairs)": 3},
        {"(tuple)": [[], {}]},
    ),
    *({"step": 3}, {"optimizer": 1}, {"state_dict": None, "get_lr": 0}, {"lr": "x"}, {"betas": [1]}),
]


class Run:
    """A model with an optimizer and a schedule, saved by two ranks."""

    def __init__(self, folder):
        self.module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1.0, total_steps=20)
        self.module(torch.ones(3, 5)).sum().backward()
        self.optimizer.step()
        self.schedule.step()
        self.store = open_store(str(folder))
        facts = {
            "step": 3,
            "line": "2026",
            "saved_at": "now",
            "epoch": 1,
            "recipe_words": {"job": {"train": {"lr": 0.1}}, "torch": "2"},
            "loss": 0.5,
            "metrics": {"accuracy": 0.25},
            "judged": {"accuracy": 0.25},
            "judged_after": 3,
            "ledger": SampleLedger().to_plain(),
            "ranks": 2,
        }
        states = [Capture(*self.parts).take(facts, Share(part, 2)) for part in range(2)]
        files = []
        for part, state in enumerate(states):
            snapshot = Snapshot()
            snapshot.take(state)
            files.append(snapshot.write(self.store, "step-000000003-abcdef", f"part-{part}-of-2.safetensors"))
        self.manifest = Manifest(states[0].facts, states[0].table, tuple(files))
        self.path = folder / "step-000000003-abcdef" / MANIFEST
        self.path.write_bytes(self.manifest.to_bytes())

    @property
    def parts(self):
        return self.module, self.optimizer, self.schedule


def signed(body: Any) -> bytes:
    """As `Manifest.to_bytes` does it."""

    def dump(value: Any) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    return dump(
        {**body, "sha256": hashlib.sha256(dump(body)).hexdigest()} if isinstance(body, dict) else body
    )


def spans(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a manifest."""
    found = [path] if path else []
    if isinstance(value, dict):
        return found + [each for key, inner in value.items() for each in spans(inner, (*path, key))]
    if isinstance(value, list):
        return found + [each for key, inner in enumerate(value) for each in spans(inner, (*path, key))]
    return found


def mutated(body: Any, dice: random.Random) -> Any:
    changed = copy.deepcopy(body)
    for _ in range(dice.randrange(1, 4)):
        path = dice.choice(spans(changed) or [()])
        if not path:
            return changed
        *outer, last = path
        table = changed
        for key in outer:
            table = table[key]
        match dice.randrange(6):
            case 0:
                table.pop(last)
            case 1 if isinstance(table, list):
                table.append(copy.deepcopy(dice.choice([table[last], *ODD])))
            case 1:
                table[str(dice.choice(ODD))[:50]] = copy.deepcopy(dice.choice(ODD))
            case 2 if type(table[last]) is int:
                table[last] += dice.choice([-1, 1, 8, 2**40, -table[last] * 2])
            case 3 if isinstance(table, list) and len(table) > 1:
                dice.shuffle(table)
            case 4 if isinstance(table[last], str):
                table[last] = dice.choice(
                    [table[last] + "x", table[last][:-1], "../" + table[last], table[last] * 3]
                )
            case _:
                table[last] = copy.deepcopy(dice.choice(ODD))
    return changed


def corpus(body: Any, seed: int, count: int) -> list[tuple[str, bytes]]:
    dice, found = random.Random(seed), []
    while len(found) < count:
        kind = dice.choice(["signed"] * 8 + ["bytes", "odd"])
        try:
            content = signed(
                mutated(body, dice) if kind != "odd" else dice.choice([*ODD, {"facts": dice.choice(ODD)}])
            )
        except (ValueError, RecursionError):  # more digits than Python writes
            continue
        if kind == "bytes":
            damaged = bytearray(content)
            for _ in range(3):
                at = dice.randrange(len(damaged))
                damaged[at : at + dice.randrange(3)] = dice.choice(
                    [b"", b"[", b'"', b"\xff", b"9" * 30, b"[" * 9999]
                )
            content = bytes(damaged)
        found.append((kind, content))
    return found


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    made = Run(folder)
    return SimpleNamespace(
        made=made, folder=RunFolder(tmp_path / "run"), body=json.loads(made.path.read_bytes())
    )


@pytest.fixture(autouse=True)
def where(monkeypatch, run):
    monkeypatch.setattr("dure.checkpoint.export.open_to_read", lambda folder: run.made.store)


def one_line(text: str) -> None:
    assert text.isprintable(), text
    assert len(text) < 1500, text


def list_them(run: Any) -> str:
    rows = as_rows(run.folder, verify=True)
    json.dumps(rows)
    for line in in_words(rows).splitlines():
        one_line(line)
    for entry in entries(run.made.store):
        assert entry.trouble is None or entry.trouble
        assert sorted([entry, entry], key=lambda one: one.order)
    return "listed" if rows[0]["verified"] else "set aside"


def load_it(run: Any, tmp_path: Any) -> str:
    told: list[str] = []
    refusal = ""
    try:
        whole = newest_state(
            run.made.store,
            ALONE,
            ALONE,
            lambda manifest: refuse_other_recipe(
                manifest.facts, {"job": {"train": {"lr": 0.1}}, "torch": "2"}, "here"
            ),
            told.append,
        )
        assert whole is not None
        restore(whole, *run.made.parts)
        SampleLedger().go_on_from(whole.facts.get("ledger"))
        export_weights(run.folder, tmp_path / "out.safetensors")
    except (CheckpointError, UsageError) as error:
        refusal = str(error)
    finally:
        for line in told:
            one_line(line)
        broken = run.made.path.parent / "broken.json"
        broken.unlink(missing_ok=True)
    one_line(refusal)
    return "refused" if refusal else "loaded"


def fuzz(run: Any, tmp_path: Any, seed: int, count: int) -> Counter[tuple[str, str]]:
    body = {key: value for key, value in run.body.items() if key != "sha256"}
    clean = [copy.deepcopy(part.state_dict()) for part in run.made.parts]
    outcomes: Counter[tuple[str, str]] = Counter()
    for number, (kind, content) in enumerate(corpus(body, seed, count)):
        run.made.path.write_bytes(content)
        try:
            outcomes[kind, list_them(run)] += 1
            outcomes[kind, load_it(run, tmp_path)] += 1
        except Exception as error:
            raise AssertionError(
                f"{seed}/{number}: {type(error).__name__}: {error}: {content[:3000]!r}"
            ) from error
        for part, state in zip(run.made.parts, clean, strict=True):
            part.load_state_dict(copy.deepcopy(state))
    return outcomes


def test_1500_manifests_that_were_made_up_and_signed_give_one_clear_line_or_a_state(run, tmp_path):
    assert list_them(run) == "listed"
    assert load_it(run, tmp_path) == "loaded"
    outcomes = fuzz(run, tmp_path, 15, MANIFESTS)
    assert outcomes["signed", "set aside"] > MANIFESTS / 3, outcomes
    assert outcomes["signed", "loaded"] > 50, "some are only a little strange"
    assert outcomes["signed", "refused"] > MANIFESTS / 3


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(20))
def test_30_000_manifests(run, tmp_path, seed):
    fuzz(run, tmp_path, 100 + seed, MANIFESTS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body["files"][0].update(name="../part-0-of-2.safetensors"), "files.0.name"),
        (lambda body: body["files"][0].update(name="/etc/passwd"), "files.0.name"),
        (lambda body: body["files"][0].update(bytes=-5), "files.0.bytes"),
        (lambda body: body["files"][0].update(bytes=2**60), "files.0.bytes"),
        (lambda body: body["files"].append(body["files"][0]), "a file is there twice"),
        (lambda body: body["tensors"].append(body["tensors"][0]), "a tensor is there twice"),
        (lambda body: body["tensors"].append(["more", "float32", [2**40]]), "more is not there exactly once"),
        (lambda body: body["tensors"][0].__setitem__(1, "load"), "of type load"),
        (lambda body: max(body["files"][0]["pieces"], key=lambda p: p[2]).__setitem__(1, 1), "bytes of"),
        (lambda body: body["facts"].update(step=True), "facts.step"),
        (lambda body: body["facts"].update(metrics={"a": "b"}), "facts.metrics.a"),
    ],
)
def test_each_lie_is_named(run, change, words):
    body = {key: copy.deepcopy(value) for key, value in run.body.items() if key != "sha256"}
    change(body)
    run.made.path.write_bytes(signed(body))
    (entry,) = entries(run.made.store)
    assert words in entry.trouble


def test_pieces_that_overlap_are_refused(run):
    body = {key: copy.deepcopy(value) for key, value in run.body.items() if key != "sha256"}
    like = {name: at for at, (name, _, _) in enumerate(body["tensors"])}
    one, other = (like[f"optimizer/0.weight/{key}"] for key in ("exp_avg", "exp_avg_sq"))
    for file in body["files"]:
        for piece in file["pieces"]:
            piece[0] = one if piece[0] == other else piece[0]  # as many bytes as before, of another tensor
    run.made.path.write_bytes(signed(body))
    (entry,) = entries(run.made.store)
    assert "is not there exactly once" in entry.trouble


def test_a_manifest_that_is_too_long_a_pipe_or_a_device_is_not_read(run):
    run.made.path.unlink()
    run.made.path.symlink_to("/dev/zero")
    assert "never finished" in entries(run.made.store)[0].trouble
    run.made.path.unlink()
    os.mkfifo(run.made.path)
    assert "never finished" in entries(run.made.store)[0].trouble
    run.made.path.unlink()
    run.made.path.touch()
    os.truncate(run.made.path, 1 << 40)
    assert "bytes long" in entries(run.made.store)[0].trouble


def test_what_has_no_name_of_ours_is_no_checkpoint(run):
    for name in (b"step-\xff", b"step-\x1b[2J", b"step-a b", b"step-" + b"x" * 240):
        os.mkdir(os.path.join(os.fsencode(run.made.path.parent.parent), name))
    assert len(entries(run.made.store)) == 1
    assert list_them(run) == "listed"

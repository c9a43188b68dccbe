"""The example jobs: what they name exists, and is what they say it is."""

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.pretrained import bert_folder, loaded
from torch import nn
from torch.nn import functional as F

import dure.tools.demo
from dure.tools.demo.draw import draw_photos

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN_CODE = ["cnn_batchnorm", "my_transformer", "three_weights", "tiny_transformer"]


def load_job(name: str) -> dict:
    return tomllib.loads((EXAMPLES / f"{name}.toml").read_text())


def load_code(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Example:
    """A job and its file's code, built as the job says."""

    def __init__(self, name: str):
        self.job, self.code = load_job(name), load_code(name)

    def named(self, name: str):
        file, function = name.split(":")
        assert (EXAMPLES / file).is_file()
        return getattr(self.code, function)

    def build(self, section: str):
        part = self.job[section]
        return self.named(part["factory"])(**part.get("args", {}))

    def loss(self, outputs, answers):
        """Sum and count, whichever way the job's loss tells them."""
        name = self.job["train"]["loss"]
        if name == "cross_entropy":
            result = F.cross_entropy(outputs, answers, reduction="none")
        else:
            result = self.named(name)(outputs, answers)
        return result if isinstance(result, tuple) else (result.sum(), result.numel())

    def steps(self) -> int:
        train, size, batch = self.job["train"], len(self.build("data")), self.job["data"]["global_batch"]
        return train["steps"] if "steps" in train else train["epochs"] * -(-size // batch)

    def train(self) -> tuple[nn.Module, list[float]]:
        """A plain loop over whole batches, in order: a job without ranks, shards and shuffling."""
        train, batch = self.job["train"], self.job["data"]["global_batch"]
        torch.manual_seed(train["seed"])
        model, data = self.build("model"), self.build("data")
        optimizer = getattr(torch.optim, train["optimizer"])(
            model.parameters(), lr=train["lr"], **train.get("optimizer_args", {})
        )
        schedule = None
        if "schedule" in train:
            schedule = getattr(torch.optim.lr_scheduler, train["schedule"])(
                optimizer, **train["schedule_args"]
            )
        losses = []
        for step in range(self.steps()):
            first = step * batch % (-(-len(data) // batch) * batch)
            inputs, answers = data[first : first + batch]
            total, count = self.loss(model(inputs), answers)
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
            losses.append(float((total / count).detach()))
        return model, losses


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_example_is_known_here():
    assert sorted(path.stem for path in EXAMPLES.glob("*.toml")) == sorted(
        ["cats", "finetune_bert", *OWN_CODE]
    )


def test_every_example_fits_on_a_screen_or_two():
    assert {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.iterdir() if path.is_file()
            and len(path.read_text().splitlines()) > 80} == {}  # fmt: skip


@pytest.mark.parametrize("name", OWN_CODE)
def test_an_example_trains_a_step_on_what_its_job_names(name):
    example = Example(name)
    model, data = example.build("model"), example.build("data")
    inputs, answers = torch.utils.data.default_collate([data[0], data[1]])
    total, count = example.loss(model(inputs), answers)
    (total / count).backward()
    assert torch.isfinite(total)
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("name", OWN_CODE)
def test_data_comes_from_its_seed_and_leaves_torchs_dice_alone(name):
    example = Example(name)
    before = torch.get_rng_state()
    one, same = example.build("data"), example.build("data")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.tensors[0], same.tensors[0])
    example.job["data"]["args"]["seed"] += 1
    assert not torch.equal(one.tensors[0], example.build("data").tensors[0])


def test_the_cats_job_builds_and_its_schedule_ends_with_its_last_step(tmp_path):
    job = load_job("cats")
    steps = job["train"]["epochs"] * 400 // job["data"]["global_batch"]
    assert job["train"]["schedule_args"] == {"T_max": steps}
    assert steps >= 100
    draw_photos(tmp_path, 4, say=lambda _: None)
    for part in ("model", "data", "eval"):
        module, function = job[part]["factory"].split(":")
        args = {**job[part].get("args", {})}
        if "folder" in args:
            args["folder"] = str(tmp_path)
        assert getattr(importlib.import_module(module), function)(**args) is not None


def test_my_transformer_is_the_documents():
    example = Example("my_transformer")
    model = example.build("model")
    assert model.embedding.weight.shape == (30000, 512)
    assert len(model.layers) == 12
    assert (model.fc.in_features, model.fc.out_features) == (512, 30000)
    assert sum(weight.numel() for weight in model.parameters()) == 68_578_608
    assert example.job["train"]["seed"] == 42
    assert example.job["team"]["ranks"] == 4


def test_three_weights_have_the_documents_gradient_on_each_block():
    example = Example("three_weights")
    model, data = example.build("model"), example.build("data")
    assert model.weights.tolist() == pytest.approx([0.5, 0.3, 0.2])
    assert len(data) == 400
    documents = [[0.1, 0.2, 0.3], [0.2, 0.1, 0.4], [0.3, 0.3, 0.2], [0.2, 0.2, 0.3]]
    for rank, updates in enumerate(documents):
        photos, is_cat = data[100 * rank : 100 * (rank + 1)]
        assert len(photos.unique(dim=0)) == 100
        model.zero_grad()
        example.loss(model(photos), is_cat)[0].div(100).backward()
        assert (-model.weights.grad).tolist() == pytest.approx(updates, abs=1e-6)


def test_three_weights_become_the_documents_in_one_step():
    example = Example("three_weights")
    assert example.steps() == 1
    model, _ = example.train()
    assert model.weights.tolist() == pytest.approx([0.7, 0.5, 0.5], abs=1e-6)


def test_tiny_transformer_learns_though_its_last_batch_does_not_divide():
    example = Example("tiny_transformer")
    assert example.steps() >= 120
    last = len(example.build("data")) % example.job["data"]["global_batch"]
    assert last % example.job["team"]["shards"]
    assert any(
        isinstance(module, nn.Dropout) and module.p == 0.1 for module in example.build("model").modules()
    )
    _, losses = example.train()
    # A sequence's first stride can only be guessed: ln 4 over about 11 tokens, 0.13, is the best there is.
    assert losses[0] > 3
    assert losses[-1] < 0.5


@torch.no_grad()
def test_tiny_transformer_counts_real_tokens_only_and_never_looks_ahead():
    example = Example("tiny_transformer")
    data, model = example.build("data"), example.build("model").eval()
    inputs, answers = data[:50]
    lengths = (inputs != 0).sum(1)
    assert len(lengths.unique()) > 5
    assert torch.equal(lengths, (answers != 0).sum(1))
    scores = model(inputs)
    total, count = example.loss(scores, answers)
    assert count == lengths.sum()
    alone = [example.loss(scores[i : i + 1, :n], answers[i : i + 1, :n])[0] for i, n in enumerate(lengths)]
    assert float(total) == pytest.approx(float(sum(alone)), rel=1e-5)
    later = inputs.clone()
    later[:, 5:] = 7
    torch.testing.assert_close(model(later)[:, :5], scores[:, :5])


def test_cnn_batchnorm_learns_though_its_last_batch_leaves_shards_empty():
    example = Example("cnn_batchnorm")
    assert example.steps() >= 100
    assert example.steps() == example.job["train"]["schedule_args"]["T_max"]
    last = len(example.build("data")) % example.job["data"]["global_batch"]
    assert 0 < last < example.job["team"]["shards"]
    assert any(isinstance(module, nn.BatchNorm2d) for module in example.build("model").modules())
    model, _ = example.train()
    pictures, labels = example.build("eval").tensors
    right = (model.eval()(pictures).argmax(1) == labels).float().mean()
    assert right > 0.9


def test_finetune_bert_reads_every_word_and_learns_from_the_pretrained_weights(tmp_path):
    pytest.importorskip("transformers", reason="needs the extra hf")
    bert_folder()
    example = Example("finetune_bert")
    folder = str(example.code.prepare(tmp_path))
    assert folder == str(tmp_path / example.job["model"]["weights"])
    arguments = example.job["data"]["args"] | {"folder": folder}
    data, again = example.code.reviews(**arguments), example.code.reviews(**arguments)
    inputs, labels = torch.utils.data.default_collate([data[place] for place in range(len(data))])
    assert torch.equal(inputs["input_ids"], again[:][0]["input_ids"])
    assert not (inputs["input_ids"] == 100).any()  # [UNK]
    assert (inputs["attention_mask"][:, -1] == 0).all()  # nothing is cut off
    assert 0.4 < labels.float().mean() < 0.6
    torch.manual_seed(0)
    model, found = loaded(Path(folder), strict=example.job["model"]["strict"], **example.job["model"]["args"])
    assert found.missing == ("classifier.weight", "classifier.bias")
    optimizer = torch.optim.AdamW(model.parameters(), lr=example.job["train"]["lr"])
    losses = []
    for _ in range(6):  # the same 16 reviews again and again
        output = model(**{name: tensor[:16] for name, tensor in inputs.items()})
        total, count = example.loss(output, labels[:16])
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(float((total / count).detach()))
    assert losses[-1] < losses[0] - 0.1
    good, of = example.code.right(output, labels[:16])
    assert (of, good > 8) == (16.0, True)


def test_the_examples_survive_a_copy_of_their_folder():
    assert [path.name for path in EXAMPLES.iterdir() if path.is_symlink()] == []


@pytest.mark.parametrize("name", ["cats.toml", "ddp.py"])
def test_the_demos_own_files_are_the_examples(name):
    assert (EXAMPLES / name).read_bytes() == (Path(dure.tools.demo.__file__).parent / name).read_bytes()

"""Models of Hugging Face folders: whatever `from_pretrained` gives, to the bit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pretrained import bert_folder, loaded

from dure.base.errors import JobError, WeightsError
from dure.storage import open_store
from dure.weights import huggingface
from dure.weights.mapping import wanted_of
from dure.weights.source import open_source

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="needs the extra hf")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()


def same(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    assert type(ours) is type(theirs)
    for kind in ("named_parameters", "named_buffers"):
        mine = dict(getattr(ours, kind)(remove_duplicate=False))
        others = dict(getattr(theirs, kind)(remove_duplicate=False))
        assert mine.keys() == others.keys()
        for name, tensor in mine.items():
            assert tensor.dtype == others[name].dtype, name
            assert torch.equal(tensor, others[name]), name
            assert tensor.requires_grad == others[name].requires_grad, name
    assert wanted_of(ours)[1] == wanted_of(theirs)[1]  # the same weights are tied


def test_a_pretrained_bert_is_the_bits_that_from_pretrained_gives() -> None:
    ours, found = loaded(bert_folder())
    theirs = transformers.AutoModel.from_pretrained(bert_folder())
    same(ours, theirs)
    assert found.missing == ()
    assert found.unexpected == ()  # position_ids is in the file, and known to be there
    ids = torch.tensor([[101, 7592, 2088, 102]])
    assert torch.equal(ours.eval()(input_ids=ids)[0], theirs(input_ids=ids)[0])


def test_a_new_head_on_a_pretrained_body_is_the_bits_that_from_pretrained_gives() -> None:
    torch.manual_seed(7)
    ours, found = loaded(bert_folder(), strict=False, auto="AutoModelForSequenceClassification", num_labels=3)
    torch.manual_seed(7)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(bert_folder(), num_labels=3)
    same(ours, theirs)
    assert found.missing == ("classifier.weight", "classifier.bias")
    assert ours.config.num_labels == 3
    assert ours.training


def test_a_new_head_is_refused_when_nobody_said_so() -> None:
    with pytest.raises(WeightsError, match=r"2 missing in the file: 'classifier.*model\.strict = false"):
        loaded(bert_folder(), auto="AutoModelForSequenceClassification", num_labels=3)


def test_weights_of_a_whole_model_fit_its_body_alone(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SMALL, num_labels=4)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    ours, found = loaded(tmp_path, strict=False)
    same(ours, transformers.AutoModel.from_pretrained(tmp_path))
    assert found.unexpected == ("classifier.bias", "classifier.weight")


def test_old_spellings_of_names_are_understood(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    config = transformers.BertConfig(**SMALL)
    transformers.BertModel(config).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in state.items()
    }
    assert old.keys() != state.keys()
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    ours, _ = loaded(tmp_path)
    same(ours, transformers.AutoModel.from_pretrained(tmp_path))


SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("model", "auto"),
    [
        pytest.param(
            lambda: transformers.GPT2LMHeadModel(
                transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
            ),
            "AutoModelForCausalLM",
            id="tied embeddings",
        ),
        pytest.param(
            lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2)),
            "AutoModelForCausalLM",
            id="rotary buffers that are in no file",
        ),
        pytest.param(
            lambda: transformers.LlamaForCausalLM(
                transformers.LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True)
            ).to(torch.bfloat16),
            "AutoModelForCausalLM",
            id="bfloat16",
        ),
        pytest.param(
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(
                    vocab_size=50,
                    d_model=16,
                    d_kv=8,
                    d_ff=24,
                    num_layers=2,
                    num_heads=2,
                    decoder_start_token_id=0,
                )
            ).to(torch.float16),
            "AutoModelForSeq2SeqLM",
            id="layers that stay in fp32",
        ),
        pytest.param(
            lambda: transformers.ResNetForImageClassification(
                transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=3)
            ),
            "AutoModelForImageClassification",
            id="batch norm statistics",
        ),
    ],
)
@pytest.mark.parametrize("shard", ["5GB", "4KB"])
def test_any_architecture_is_the_bits_that_from_pretrained_gives(
    model: Any, auto: str, shard: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model().save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "4KB")
    ours, found = loaded(tmp_path, auto=auto)
    same(ours, getattr(transformers, auto).from_pretrained(tmp_path))
    assert found.missing == ()


def test_building_reads_no_weights_and_takes_no_memory() -> None:
    store = open_store(bert_folder(), read_only=True)
    source = open_source(store, "")
    assert store.access.as_dict()["read_bytes"] < 64 * 1024
    before = store.access.as_dict()
    module = huggingface.build(source)
    assert store.access.as_dict() == before
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"auto": "AutoModelForSequenceClasification"}, "AutoModelForSequenceClassification"),
        ({"auto": "BertModel"}, "transformers has no 'BertModel'"),
        ({"auto": 3}, "transformers has no '3'"),
        ({"num_lables": 3}, "num_lables"),
        ({"trust_remote_code": True}, "never run"),
        ({"dtype": "int8"}, "use float32"),
        ({"auto": "AutoModelForImageClassification"}, "cannot build a 'bert'"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], says: str) -> None:
    source = open_source(open_store(bert_folder(), read_only=True), "")
    with pytest.raises(JobError, match=says):
        huggingface.build(source, arguments)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model_type": "no-such"}, "does not know; write a model.factory"),
        ({"model_type": None}, "model_type 'None'"),
        ({"model_type": "own", "auto_map": {"AutoModel": "evil.Model"}}, "is never run"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"hidden_size": "many"}, "cannot be used"),
    ],
)
def test_a_config_that_cannot_be_built_is_named(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads((bert_folder() / "config.json").read_text()), **changed})
    )
    os.symlink(bert_folder() / "model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(JobError, match=says):
        huggingface.build(open_source(open_store(tmp_path, read_only=True), ""))

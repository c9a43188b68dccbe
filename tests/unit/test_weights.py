"""Opening files of weights, and matching them with a model: what fits, and what is said about what does not."""

from __future__ import annotations

import collections
import io
import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dure.base.errors import JobError, StorageError, WeightsError
from dure.device.fingerprint import raw_bytes
from dure.storage import Store, open_store
from dure.storage.safetensors import LONGEST_HEADER, TensorAt
from dure.weights.mapping import match, wanted_of
from dure.weights.pickled import NO_PLACE, load_pickled
from dure.weights.source import Source, open_source


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "body.weight": torch.randn(4, 3),
        "body.bias": torch.randn(4, dtype=torch.float64),
        "half": torch.randn(5).to(torch.bfloat16),
        "eighth": torch.randn(6).to(torch.float8_e4m3fn),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, 9),
        "한글": torch.tensor([1, 2, 65535], dtype=torch.uint16),
    }


def store_of(folder: Path) -> Store:
    return open_store(folder, read_only=True)


def read(store: Store, at: TensorAt) -> torch.Tensor:
    content = bytearray(store.read(at.file, at.start, at.nbytes))
    flat = torch.frombuffer(content, dtype=at.dtype) if content else torch.empty(0, dtype=at.dtype)
    return flat.view(at.shape)


def assert_holds(source: Source, store: Store, expected: dict[str, torch.Tensor]) -> None:
    found = {at.name: read(store, at) for at in source.tensors}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bytes(raw_bytes(found[name])) == bytes(raw_bytes(tensor)), name


def write_header(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


# --- safetensors


def test_a_safetensors_file_is_opened_with_two_small_requests(tmp_path: Path) -> None:
    save_file(weights() | {"big": torch.zeros(1_000_000)}, tmp_path / "w.safetensors", {"by": '{"a": ["}"]}'})
    store = store_of(tmp_path)
    source = open_source(store, "w.safetensors")
    access = store.access.as_dict()
    assert access["read_requests"] <= 2
    assert access["read_bytes"] <= 32 * 1024
    assert source.kind == "safetensors"
    assert source.files == (("w.safetensors", os.path.getsize(tmp_path / "w.safetensors")),)
    assert_holds(source, store, weights() | {"big": torch.zeros(1_000_000)})


def test_a_long_header_is_read_to_its_end(tmp_path: Path) -> None:
    many = {f"layer.{number}.with.a.long.name": torch.full((1,), float(number)) for number in range(2000)}
    save_file(many, tmp_path / "w.safetensors")
    store = store_of(tmp_path)
    assert_holds(open_source(store, "w.safetensors"), store, many)


def test_rank_0_can_tell_the_others_what_it_opened(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "w.safetensors")
    source = open_source(store_of(tmp_path), "w.safetensors")
    assert Source.from_json(source.to_json()) == source


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"", b"", "does not begin with"),
        (b"[]", b"", "does not begin with"),
        (b" {}", b"", "does not begin with"),
        (b"{", b"", "is no JSON object"),
        (b"{}}", b"", "is no JSON object"),
        (b"{,}", b"", "is no valid JSON"),
        (b'{"a":' + json.dumps(F32).encode() + b",}", b"1234", "is no valid JSON"),
        (b"{1:2}", b"", "is no valid JSON"),
        (b'{"a\xff":{}}', b"", "is not UTF-8 at byte 11"),
        (b'{"\\ud800":' + json.dumps(F32).encode() + b"}", b"1234", "no valid JSON"),
        (b'{"\\x":' + json.dumps(F32).encode() + b"}", b"1234", "no valid JSON"),
        (b'{"a":' + b"[" * 100_000, b"", "is no JSON object of tensors"),
        (b'{"a":{"dtype":' + b"[" * 10_000, b"", "is no JSON object of tensors"),
        (b'{"a":{"dtype":"F32","shape":[' + b"1," * 50_000 + b"1]}}", b"", "gives 'a' no data_offsets"),
        ({"a": 3}, b"", "describes 'a' as '3', not as dtype"),
        ({"a": {}}, b"", "gives 'a' no dtype and no shape and no data_offsets"),
        ({"a": {**F32, "dtype": "F31"}}, b"1234", "dtype 'F31'; known are BOOL"),
        ({"a": {**F32, "dtype": "F4"}}, b"1234", "dtype 'F4'"),
        ({"a": {**F32, "dtype": 3}}, b"1234", "dtype '3'"),
        ({"a": {**F32, "shape": [-1]}}, b"1234", r"shape '\[-1\]'"),
        ({"a": {**F32, "shape": [1.0]}}, b"1234", r"shape '\[1.0\]'"),
        ({"a": {**F32, "shape": [True]}}, b"1234", r"shape '\[True\]'"),
        ({"a": {**F32, "shape": "1"}}, b"1234", "shape '1'"),
        ({"a": {**F32, "shape": [1] * 65}}, b"1234", "the shape"),
        ({"a": {**F32, "shape": [2**64]}}, b"1234", "the shape"),
        ({"a": {**F32, "shape": [2**32, 2**32], "data_offsets": [0, 0]}}, b"", "more elements than can be"),
        (
            {"a": {**F32, "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}},
            b"",
            "more elements than can be",
        ),
        (
            b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}',
            b"1234",
            "no valid JSON",
        ),
        (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', b"1234", "NaN is not JSON"),
        (b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"1234", "twice"),
        ({"a": {**F32, "shape": [2]}}, b"1234", r"gives 'a' 4 bytes, but F32 \[2\] needs 8 bytes"),
        ({"a": {**F32, "data_offsets": [4, 0]}}, b"1234", "data_offsets"),
        ({"a": {**F32, "data_offsets": [0]}}, b"1234", "data_offsets"),
        ({"a": {**F32, "data_offsets": [0, "4"]}}, b"1234", "data_offsets"),
        ({"a": {**F32, "data_offsets": [0, 10**17]}}, b"1234", "would end at byte .* truncated"),
        ({"a": F32}, b"123", "is 72 bytes long, but 'a' would end at byte 73; the file is truncated"),
        ({"a": F32}, b"12345", "leaves the last 1 bytes of the file to no tensor"),
        ({"a": {**F32, "data_offsets": [4, 8]}}, b"12345678", "leaves 4 bytes before 'a' to no tensor"),
        ({"a": F32, "b": {**F32, "data_offsets": [6, 10]}}, b"1234567890", "2 bytes between 'a' and 'b'"),
        ({"a": F32, "b": {**F32, "data_offsets": [2, 6]}}, b"123456", "lets 'a' and 'b' overlap"),
        ({"a": F32, "b": F32}, b"1234", "lets 'a' and 'b' overlap"),
        (
            b'{"a":' + json.dumps(F32).encode() + b',"a":' + json.dumps(F32).encode() + b"}",
            b"1234",
            "'a' stands there twice",
        ),
        ({"__metadata__": 3}, b"", "__metadata__"),
        ({"__metadata__": {"a": 3}}, b"", "__metadata__"),
        ({"__metadata__": {"a": {}}}, b"", "__metadata__"),
        (b'{"__metadata__":{"a":"b" "c":"d"}}', b"", "no valid JSON"),
        (b'{"__metadata__":{},"__metadata__":{}}', b"", "'__metadata__' stands there twice"),
        ({"a\n\x1b[31m": 3}, b"", r"describes 'a\\n\\x1b\[31m'"),
        ({"a" * 1_000_000: 3}, b"", "describes 'aaa"),
    ],
)
def test_a_header_that_lies_is_refused_in_one_clear_line(
    header: Any, data: bytes, says: str, tmp_path: Path
) -> None:
    write_header(tmp_path / "w.safetensors", header, data)
    with pytest.raises(WeightsError, match=says) as caught:
        open_source(store_of(tmp_path), "w.safetensors")
    text = str(caught.value)
    assert text.startswith(str(tmp_path / "w.safetensors"))
    assert len(text) < 1000
    assert "\n" not in text
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is 0 bytes long, too short"),
        (b"1234567", "is 7 bytes long, too short"),
        (struct.pack("<Q", 1), "announce a header of 1 bytes, but the file has 8"),
        (struct.pack("<Q", 2**63) + b"{}", "announce a header of 9,223,372,036,854,775,808 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "a Git LFS pointer.*git lfs pull"),
        (b"<!DOCTYPE html><html>", "not a safetensors file"),
    ],
)
def test_another_kind_of_file_is_refused(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=says):
        open_source(store_of(tmp_path), "w.safetensors")


def test_a_header_longer_than_the_format_allows_is_not_even_read(tmp_path: Path) -> None:
    with open(tmp_path / "w.safetensors", "wb") as file:
        file.write(struct.pack("<Q", LONGEST_HEADER + 1))
        file.truncate(LONGEST_HEADER * 3)  # sparse
    store = store_of(tmp_path)
    with pytest.raises(WeightsError, match="the format allows 100,000,000"):
        open_source(store, "w.safetensors")
    assert store.access.as_dict()["read_bytes"] <= 32 * 1024


# --- several files, and folders


def write_index(folder: Path, table: dict[str, Any], **changed: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table, **changed}))


def two_files(folder: Path) -> dict[str, str]:
    all_of_it = weights()
    table = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(all_of_it)}
    for file in set(table.values()):
        save_file({name: all_of_it[name] for name in table if table[name] == file}, folder / file)
    return table


@pytest.mark.parametrize("config", [True, False])
def test_an_index_is_all_its_files(config: bool, tmp_path: Path) -> None:
    (tmp_path / "models/bert").mkdir(parents=True)
    write_index(tmp_path / "models/bert", two_files(tmp_path / "models/bert"), metadata={"total_size": 1})
    if config:
        (tmp_path / "models/bert/config.json").write_text('{"model_type": "bert"}')
    store = store_of(tmp_path)
    for path in ("models/bert/model.safetensors.index.json", "models/bert", "models/bert/"):
        source = open_source(store, path)
        folder = not path.endswith(".json")
        assert source.kind == ("huggingface" if config and folder else "index")
        assert source.config == ({"model_type": "bert"} if config and folder else None)
        assert [file for file, _ in source.files] == [
            f"models/bert/model-0000{place}-of-00002.safetensors" for place in (1, 2)
        ]
        assert_holds(source, store, weights())
        assert Source.from_json(source.to_json()) == source


@pytest.mark.parametrize(
    "file",
    ["../w.safetensors", "/etc/w.safetensors", "a/w.safetensors", "", "a\\b.safetensors", 3, None, "."],
)
def test_an_index_cannot_name_files_outside_of_its_folder(file: Any, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "w.safetensors")
    write_index(tmp_path / "inner", {"a": file})
    with pytest.raises(WeightsError, match=r"not a file beside it|not a file of weights"):
        open_source(store_of(tmp_path), "inner")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t | {"new": t["half"]}, "1 tensor.s. that it does not have: 'new'"),
        (lambda t: {n: f for n, f in t.items() if n != "half"}, "1 tensor.s. less than it has: 'half'"),
        (lambda t: t | {"new": "model-3.safetensors"}, "names 'model-3.safetensors', which is not there"),
        (lambda t: t | {"new": "run.sh"}, "which is not a file of weights"),
        (lambda t: {}, "no weight_map"),
        (list, "no weight_map"),
    ],
)
def test_an_index_that_does_not_match_its_files_is_refused(change: Any, says: str, tmp_path: Path) -> None:
    write_index(tmp_path, change(two_files(tmp_path)))
    with pytest.raises(WeightsError, match=says):
        open_source(store_of(tmp_path), "model.safetensors.index.json")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, '{"weight_map": "\ud800"}']
)
def test_an_index_or_config_that_is_no_json_is_refused(text: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    (tmp_path / "other.index.json").write_bytes(text.encode(errors="surrogatepass"))
    for path in ("", "other.index.json"):
        with pytest.raises(WeightsError, match=r"(config|other\.index)\.json (is|has no)"):
            open_source(store_of(tmp_path), path)


def test_a_folder_prefers_safetensors_and_a_path_that_is_nothing_says_what_could_be(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"none of model.safetensors, "):
        open_source(store_of(tmp_path), "")
    with pytest.raises(WeightsError, match="no-such is no file of weights"):
        open_source(store_of(tmp_path), "no-such")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(WeightsError, match=r"it has 'other.safetensors': name one"):
        open_source(store_of(tmp_path), ".")
    torch.save({"pickled": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert [t.name for t in open_source(store_of(tmp_path), "").tensors] == ["pickled"]
    save_file({"safe": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert [t.name for t in open_source(store_of(tmp_path), "").tensors] == ["safe"]
    with pytest.raises(StorageError, match=r"gone\.safetensors"):
        open_source(store_of(tmp_path), "gone.safetensors")


# --- what torch.save wrote


@pytest.mark.parametrize("wrapped", [(), ("state_dict",), ("model",), ("model", "state_dict")])
@pytest.mark.parametrize("file", ["w.pth", "w.bin", "w.pt"])
def test_a_pth_is_opened_without_reading_its_tensors(
    wrapped: tuple[str, ...], file: str, tmp_path: Path
) -> None:
    expected = weights() | {"big": torch.randn(500_000)}
    saved: Any = collections.OrderedDict(expected)
    for key in reversed(wrapped):
        saved = {"epoch": 3, "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}, key: saved}
    torch.save(saved, tmp_path / file)
    store = store_of(tmp_path)
    source = open_source(store, file)
    assert source.kind == "pickled"
    assert source.sliceable
    assert store.access.as_dict()["read_bytes"] < 100_000
    assert_holds(source, store, expected)
    whole = load_pickled(store, file)
    assert {name: bytes(raw_bytes(w)) for name, w in whole.items()} == {
        name: bytes(raw_bytes(w)) for name, w in expected.items()
    }


def test_a_pth_from_before_torch_1_6_is_read_as_a_whole(tmp_path: Path) -> None:
    old = {name: tensor for name, tensor in weights().items() if name not in ("eighth", "한글")}
    torch.save(old, tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    source = open_source(store_of(tmp_path), "w.pth")
    assert not source.sliceable
    assert {t.start for t in source.tensors} == {NO_PLACE}
    assert {t.name: t.shape for t in source.tensors} == {n: tuple(w.shape) for n, w in old.items()}
    whole = load_pickled(store_of(tmp_path), "w.pth")
    assert torch.equal(whole["body.weight"], weights()["body.weight"])


def test_parameters_tied_in_a_pth_share_their_bytes(tmp_path: Path) -> None:
    shared = torch.nn.Parameter(torch.randn(4, 3))
    torch.save({"a": shared, "b": shared, "row": shared.data[1]}, tmp_path / "w.pth")
    store = store_of(tmp_path)
    source = open_source(store, "w.pth")
    places = {t.name: t.start for t in source.tensors}
    assert places["a"] == places["b"] == places["row"] - 12
    assert_holds(source, store, {"a": shared.data, "b": shared.data, "row": shared.data[1]})


class _RunsCode:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.proof}",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_is_refused_and_nothing_of_it_runs(zipped: bool, tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    torch.save(
        {"a": torch.zeros(1), "b": _RunsCode(proof)},
        tmp_path / "w.pth",
        _use_new_zipfile_serialization=zipped,
    )
    store = store_of(tmp_path)
    for attempt in (open_source, load_pickled):
        with pytest.raises(WeightsError, match=r"holds more than weights: it asks for \w+\.system") as caught:
            attempt(store, "w.pth")
        assert "nothing of it was run" in str(caught.value)
        assert "weights_only" not in str(caught.value)  # torch's own text explains how to run it anyway
    assert not proof.exists()
    torch.load(tmp_path / "w.pth", weights_only=False)
    assert proof.exists()  # it would have


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        (lambda: {"a": torch.zeros(1), "epoch": 3, "by": "me"}, r"also 'epoch' \(int\), 'by' \(str\)"),
        (lambda: {"epoch": 3}, r"also 'epoch' \(int\)"),
        (lambda: {}, "also nothing"),
        (lambda: [torch.zeros(1)], "holds a list, not names with tensors"),
        (lambda: torch.zeros(1), "holds a Tensor, not names with tensors"),
        (lambda: {"a": torch.eye(3).to_sparse()}, "(sparse|'a' is) .* only plain dense tensors"),
        (lambda: {"a": torch.zeros(3, 4).t()}, r"'a' is a view with strides \(1, 4\).*contiguous"),
        (lambda: {3: torch.zeros(1)}, "does not hold names with tensors"),
    ],
)
def test_a_pth_without_plain_weights_is_refused(saved: Any, says: str, tmp_path: Path) -> None:
    torch.save(saved(), tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=says):
        open_source(store_of(tmp_path), "w.pth")


def test_a_pth_that_was_packed_again_is_refused(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "w.pth")
    for compression, name in ((zipfile.ZIP_DEFLATED, "deflated.pth"), (zipfile.ZIP_STORED, "stored.pth")):
        with (
            zipfile.ZipFile(tmp_path / "w.pth") as old,
            zipfile.ZipFile(tmp_path / name, "w", compression) as new,
        ):
            for record in old.namelist():
                new.writestr(record, old.read(record))
        with pytest.raises(WeightsError, match="packed again"):
            open_source(store_of(tmp_path), name)


def test_a_damaged_pth_is_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    torch.save(weights(), file)
    content = file.getvalue()
    for damaged in (
        b"",
        b"PK\x03\x04",
        b"hello world",
        content[:-1],
        content[:-200],
        content[: len(content) // 2],
        content[100:],
        content.replace(b"body.weight", b"body\x80weight"),
    ):
        (tmp_path / "w.pth").write_bytes(damaged)
        with pytest.raises(WeightsError, match=r"w\.pth"):
            open_source(store_of(tmp_path), "w.pth")


# --- matching


def source_of(**tensors: torch.Tensor) -> Source:
    start, places = 0, []
    for name, tensor in tensors.items():
        places.append(
            TensorAt(name, tensor.dtype, tuple(tensor.shape), "w.safetensors", start, tensor.nbytes)
        )
        start += tensor.nbytes
    return Source("safetensors", (("w.safetensors", start),), tuple(places))


class Body(torch.nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_a_models_own_state_fits_it_also_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = Body()
    wanted, ties = wanted_of(module)
    found = match(source_of(**Body().state_dict()), wanted, strict=True, ties=ties)
    assert [name for _, name in found.pairs] == list(Body().state_dict())
    assert all(at.name == name for at, name in found.pairs)
    assert (found.missing, found.unexpected, ties) == ((), (), [])


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method`:DeprecationWarning"
)  # torch's, at its first compile
@pytest.mark.parametrize(
    "spelt", ["module.{}", "_orig_mod.{}", "module._orig_mod.{}", "_orig_mod.module.{}", "module.module.{}"]
)
def test_prefixes_of_ddp_and_compile_are_stripped(spelt: str) -> None:
    state = {spelt.format(name): tensor for name, tensor in Body().state_dict().items()}
    for module in (Body(), torch.compile(Body())):
        wanted, _ = wanted_of(module)
        found = match(source_of(**state), wanted, strict=True)
        assert len(found.pairs) == len(wanted)


def test_the_mark_of_a_compiled_layer_inside_of_a_name_is_stripped_too() -> None:
    state = {name.replace("norm.", "norm._orig_mod."): tensor for name, tensor in Body().state_dict().items()}
    assert len(match(source_of(**state), wanted_of(Body())[0], strict=True).pairs) == len(state)


def test_an_exact_name_beats_a_stripped_one_and_two_stripped_ones_are_refused() -> None:
    wanted = {"a": ((1,), torch.float32)}
    one = torch.zeros(1)
    for order in (("a", "module.a"), ("module.a", "a")):
        found = match(source_of(**dict.fromkeys(order, one)), wanted, strict=True)
        assert [at.name for at, _ in found.pairs] == ["a"]
    with pytest.raises(WeightsError, match=r"'module.a' and '_orig_mod.a' are both 'a'"):
        match(source_of(**{"module.a": one, "_orig_mod.a": one}), wanted, strict=False)


def test_of_tied_weights_one_name_is_enough() -> None:
    wanted, ties = wanted_of(Body(tied=True))
    assert ties == [["embed.weight", "head.weight"]]
    state = Body(tied=True).state_dict()
    for absent in ("embed.weight", "head.weight", None):
        there = {name: tensor for name, tensor in state.items() if name != absent}
        found = match(source_of(**there), wanted, strict=True, ties=ties)
        assert found.missing == ()
        filled = [name for _, name in found.pairs]
        assert len(set(filled) & {"embed.weight", "head.weight"}) == 1
        # As load_state_dict: when both are there, the last one counts.
        assert ("head.weight" in filled) == (absent != "head.weight")
    neither = {name: tensor for name, tensor in state.items() if not name.endswith("d.weight")}
    with pytest.raises(WeightsError, match=r"2 missing in the file: 'embed\.weight', 'head\.weight'"):
        match(source_of(**neither), wanted, strict=True, ties=ties)


def test_all_that_does_not_fit_is_in_one_error_with_the_way_out() -> None:
    state = Body().state_dict()
    state["heads.weight"] = state.pop("head.weight")
    for number in range(9):
        state[f"extra.{number}"] = torch.zeros(1)
    with pytest.raises(WeightsError) as caught:
        match(source_of(**state), wanted_of(Body())[0], strict=True)
    text = str(caught.value)
    assert "w.safetensors do not fit the model (6 of 7 tensors do)" in text
    assert "1 missing in the file: 'head.weight' (the file has 'heads.weight')" in text
    assert (
        "10 that the model has no place for: 'heads.weight' (the model has 'head.weight'), 'extra.0'" in text
    )
    assert "and 5 more" in text
    assert "model.strict = false" in text
    found = match(source_of(**state), wanted_of(Body())[0], strict=False)
    assert found.missing == ("head.weight",)
    assert len(found.unexpected) == 10


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_always_refused(strict: bool) -> None:
    state = Body().state_dict() | {"head.weight": torch.zeros(7, 3), "norm.bias": torch.zeros(1, 3)}
    with pytest.raises(WeightsError, match=r"2 of another shape: .*'head.weight' is \[7, 3\] .* \[5, 3\] in"):
        match(source_of(**state), wanted_of(Body())[0], strict=strict)


def test_numbers_may_change_their_precision_but_not_their_kind() -> None:
    half = {n: t.bfloat16() if t.is_floating_point() else t.int() for n, t in Body().state_dict().items()}
    assert len(match(source_of(**half), wanted_of(Body())[0], strict=True).pairs) == len(half)
    for odd in (torch.int64, torch.bool, torch.complex64):
        state = Body().state_dict()
        state["norm.bias"] = state["norm.bias"].to(odd)
        with pytest.raises(WeightsError, match=r"1 of another kind of number: 'norm.bias' is torch"):
            match(source_of(**state), wanted_of(Body())[0], strict=False)


def test_weights_of_another_architecture_are_refused_even_without_strict() -> None:
    with pytest.raises(WeightsError, match="Not one name is the same"):
        match(source_of(other=torch.zeros(1)), wanted_of(Body())[0], strict=False)


def test_an_error_about_weights_is_an_error_of_the_job() -> None:
    assert issubclass(WeightsError, JobError)
    assert WeightsError.exit_code == 2

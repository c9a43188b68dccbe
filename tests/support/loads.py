"""What ranks do in the tests of loading."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import dure
from dure.base.errors import DureError, StorageError
from dure.comm.topology import read_topology
from dure.device.fingerprint import weights_sha256
from dure.storage import open_store
from dure.tools.lab.network import sent_bytes
from dure.weights.load import load
from dure.weights.load_group import LoadContext

WAYS = ("slices", "every-rank", "rank0")


class Net(nn.Module):
    """About 17 MB: tied weights, buffers in the file and out of it, strides of their own, two types, an odd size."""

    def __init__(self, width=1024):
        super().__init__()
        self.words = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)
        self.picture = nn.Conv2d(64, 128, 5).to(memory_format=torch.channels_last)
        self.half = nn.Linear(width, 256, dtype=torch.bfloat16)
        self.odd = nn.Parameter(torch.randn(3, 5, 7))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.out = nn.Linear(width, 1000, bias=False)
        self.out.weight = self.words.weight
        self.register_buffer("positions", torch.arange(width), persistent=False)


class WithHead(Net):
    """One layer more than the file has."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)


def write_weights(folder):
    """Other weights than any seed gives, as safetensors, split over two files, and in both of torch.save's forms; the
    types of some differ from the model's."""
    from safetensors.torch import save_file

    torch.manual_seed(77)
    net = Net()
    net.norm.running_mean.normal_()
    state = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
    torch.save(state, folder / "w.pth")
    torch.save(state, folder / "old.pth", _use_new_zipfile_serialization=False)
    del state["out.weight"]
    save_file(state, folder / "w.safetensors")
    state["layers.0.weight"] = state["layers.0.weight"].double()
    save_file(state, folder / "double.safetensors")
    return state


def expected(folder, make=Net, seed=0):
    torch.manual_seed(seed)
    net = make()
    net.load_state_dict(torch.load(folder / "w.pth", weights_only=True), strict=make is Net)
    return net


def same(one, other):
    """The names of tensors that differ in a bit, a shape, a type or their strides."""
    ones, others = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (one, other))
    assert list(ones) == list(others)
    return [
        name
        for name, tensor in ones.items()
        if tensor.dtype != others[name].dtype
        or tensor.stride() != others[name].stride()
        or not torch.equal(tensor, others[name])
    ]


def load_all_ways(folder, files):
    """What differs from torch's own, the fingerprints and the bytes, for every way and every file."""
    folder = Path(folder)
    with dure.start(shards=8) as team:
        found = {}
        wanted = expected(folder)
        for file in files:
            for how in WAYS:
                loaded = team.loader.load(Net, file, how=how, storage=folder)
                net = loaded.module
                assert net.out.weight is net.words.weight
                assert net.positions.device.type == "cpu"
                kept = net.odd.detach().clone()
                net.odd.data.fill_(team.rank)  # writable, and nobody else's
                team.group.gather("", "having written")
                assert (net.odd == team.rank).all()
                net.odd.data.copy_(kept)
                found[file, how] = (
                    same(net, wanted),
                    loaded.fingerprint,
                    loaded.access["read_bytes"],
                    loaded.built,
                )
        return found


def load_with_new_head(folder):
    """Missing tensors are what the seed gives; a module that is built already is filled in place."""
    with dure.start(seed=5, shards=8) as team:
        loaded = team.loader.load(WithHead, "w.safetensors", strict=False, storage=folder)
        drawn_next = torch.rand(1).item()
        torch.manual_seed(5)
        mine = WithHead()
        first = mine.odd
        team.load(mine, weights=f"{folder}/w.safetensors", strict=False)
        assert mine.odd is first
        wanted = expected(Path(folder), WithHead, seed=5)
        torch.manual_seed(5)
        return (
            same(loaded.module, wanted),
            same(mine, wanted),
            loaded.missing,
            loaded.built,
            drawn_next == torch.rand(1).item(),
        )


class Faulty:
    """A store whose reads go wrong after some."""

    def __init__(self, store, after, fault):
        self._store, self._left, self._fault = store, after, fault

    def __getattr__(self, name):
        return getattr(self._store, name)

    def read_into(self, path, start, into):
        self._left -= 1
        if self._left < 0:
            self._fault(path)
        self._store.read_into(path, start, into)


def io_error(path):
    raise StorageError(f"{path}: the disk or the file server reports an I/O error")


def not_ours(path):
    raise ZeroDivisionError("a bug in somebody's code")


def fail_in_many_ways(folder):
    """Every rank's error and how long it took, by fault; the team can load again after each."""
    found = {}
    with dure.start(shards=8) as team:
        topology = team.topology
        context = LoadContext(team.group, topology, 60.0)

        def attempt(name, path, opened, how="slices", make=Net):
            began = time.monotonic()
            try:
                load(make, opened, path, context, how=how)
                found[name] = ("none", "", 0.0)
            except DureError as error:
                found[name] = (type(error).__name__, str(error), time.monotonic() - began)

        def plain():
            return open_store(folder, read_only=True)

        def faulty_on(rank, after, fault):
            return lambda: Faulty(plain(), after, fault) if team.rank == rank else plain()

        def refused_on(rank):
            return lambda: open_store(f"{folder}/no such folder") if team.rank == rank else plain()

        def raising_on(rank):
            def make():
                if team.rank == rank:
                    raise StorageError("the factory reads a file that is not there")
                return Net()

            return make

        last = topology.size - 1
        attempt("missing", "gone.safetensors", plain)
        attempt("garbage", "garbage.safetensors", plain)
        attempt("truncated", "truncated.safetensors", plain)
        attempt("storage not on one node", "w.safetensors", refused_on(last))
        for how in WAYS:
            rank = 0 if how == "rank0" else last
            attempt(f"disk error, {how}", "w.safetensors", faulty_on(rank, 0, io_error), how)
        attempt("disk error in the middle", "w.safetensors", faulty_on(1, 1, io_error))
        attempt("bug", "w.safetensors", faulty_on(1, 1, not_ours))
        attempt("factory", "w.safetensors", plain, make=raising_on(1))
        attempt("another model", "w.safetensors", plain, make=WithHead)
        attempt("afterwards", "w.safetensors", plain)
    return found


def killed_while_loading(folder, victim):
    """The victim dies in its second read; the others write down what they were told, and when."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher notices first; let us find out by ourselves
    topology = read_topology(os.environ)

    def die(path):
        Path(folder, "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def opened():
        store = open_store(folder, read_only=True)
        return Faulty(store, 1, die) if topology.rank == victim else store

    with dure.start(shards=8) as team:
        context = LoadContext(team.group, topology, 60.0)
        try:
            load(Net, opened, "w.safetensors", context)
        except DureError as error:
            Path(folder, f"told-{topology.rank}").write_text(f"{time.monotonic()} {error}")
            raise


def load_between_nodes(folder):
    """What differs, what each rank read, and what the node sent meanwhile."""
    with dure.start(shards=8) as team:
        found = {}
        for how in WAYS:
            team.group.gather("", "before")
            before = sent_bytes() if team.topology.is_node_leader else 0
            team.group.gather("", "begin")
            loaded = team.loader.load(Net, "w.safetensors", how=how, storage=folder)
            team.group.gather("", "end")
            sent = sent_bytes() - before if team.topology.is_node_leader else 0
            found[how] = (
                same(loaded.module, expected(Path(folder))),
                loaded.fingerprint,
                loaded.access["read_bytes"],
                sent,
            )
        return found


def load_bert(folder, location):
    """The pretrained BERT from both storages, each tensor compared with transformers' own."""
    import transformers

    with dure.start(seed=3, shards=8) as team:
        theirs = transformers.AutoModel.from_pretrained(folder)
        args = {"auto": "AutoModelForSequenceClassification", "num_labels": 2}
        found = []
        for weights in (str(folder), f"{location}/bert"):
            ours = team.load({"auto": "AutoModel"}, weights=weights)
            headed = team.loader.load(args, weights, strict=False)
            found.append((same(ours, theirs), headed.fingerprint, weights_sha256(headed.module)))
        return found

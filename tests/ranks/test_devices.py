"""The same code on the CPU and on a device whose streams really run later: the same bits, on 1, 2, 3 and 5 ranks."""

import os
import subprocess
import sys

import pytest
import torch
from support import mutations, on_devices, standin

from dure.base.errors import RankFailed
from dure.base.run_folder import RunFolder
from dure.launch import run_team

WHY_NOT = standin.why_not()
needs_standin = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")


@pytest.fixture(scope="module")
def built():
    """Compiled once per machine; takes a minute the first time."""
    return standin.build.library()


def launch(kind, ranks, folder, names=tuple(on_devices.CASES)):
    """Every rank's results."""
    return run_team(
        "support.on_devices:cases",
        (kind, str(folder), names),
        ranks=ranks,
        folder=RunFolder(folder / f"{kind}-{ranks}-{len(names)}"),
        hang_seconds=300,
    )


def write_weights(folder):
    from safetensors.torch import save_file

    torch.manual_seed(9)
    save_file(dict(on_devices.Transformer().state_dict()), folder / "weights.safetensors")


@pytest.fixture(scope="module")
def launched(tmp_path_factory, built):
    """Results of ranks by kind and number, made when they are asked for."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("cpu", standin.KIND)}
    made = {}

    def results(kind, ranks):
        if (kind, ranks) not in made:
            if not (folders[kind] / "weights.safetensors").exists():
                write_weights(folders[kind])
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("STANDIN_PAUSE_US", "300")
                patch.setenv("STANDIN_SEED", str(ranks))
                patch.setenv("STANDIN_DEVICES", "8")
                made[kind, ranks] = launch(kind, ranks, folders[kind])
        return made[kind, ranks]

    return results


@needs_standin
@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.soak) for ranks in (1, 2, 5))])
def test_a_device_gives_the_bits_of_the_cpu(launched, ranks):
    """Exchange, step, BatchNorm, sharded optimizer, load; in a later launch, the resume of the one on 2 ranks.

    The last batch has one sample, so that all ranks but one are idle. A missing wait for a stream is another bit.
    """
    expected = launched("cpu", 2)[0]
    if ranks != 2:
        launched(standin.KIND, 2)  # what is resumed
        expected = {**expected, "resumed": launched("cpu", 3)[0]["resumed"]}
    for found in launched(standin.KIND, ranks):
        assert found == expected
    assert expected["exchanges"] is True


@needs_standin
def test_ranks_of_the_standin_end_well(built):
    """Nothing of it is taken down while its threads run: 5 processes that leave while their streams are busy."""
    code = (
        "from support import standin; standin.use(); import torch\n"
        "x = torch.ones(1000, device='standin')\n"
        "streams = [torch.Stream('standin') for _ in range(5)]\n"
        "for s in streams:\n"
        "    with s:\n"
        "        for _ in range(100): x = x + 1\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "STANDIN_PAUSE_US": "500"}
    running = [subprocess.Popen([sys.executable, "-c", code], env=environ) for _ in range(5)]
    assert [one.wait(timeout=300) for one in running] == [0] * 5


@needs_standin
def test_the_standin_shows_a_missing_wait_and_refuses_what_a_device_refuses(built):
    """Or its tests would prove nothing."""
    code = (
        "from support import standin; standin.use(); import os, torch\n"
        "x = torch.ones(1000, device='standin'); side = torch.Stream('standin')\n"
        "def added(waits):\n"
        "    x.fill_(0)\n"
        "    for _ in range(200): x.add_(1)\n"
        "    ready = torch.accelerator.current_stream().record_event()\n"
        "    with side:\n"
        "        if waits: side.wait_event(ready)\n"
        "        early = x.clone()\n"
        "    torch.accelerator.synchronize()\n"
        "    return early[0].item()\n"
        "print('waited', added(True), min(added(False) for _ in range(5)) < 200)\n"
        "host = torch.zeros(4).pin_memory()\n"
        "for _ in range(200): x.add_(1)\n"
        "there = host.to('standin', non_blocking=True); host.fill_(7); print('pinned', there.cpu()[0].item())\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: torch.ones(2, device='standin').cpu()\n"
        "    except RuntimeError as error: print('forked', 'before the fork' in str(error), flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "torch.manual_seed(3); one = torch.rand(3, device='standin')\n"
        "torch.default_generator.manual_seed(3); other = torch.rand(3, device='standin')\n"
        "print('own numbers', not one.equal(other))\n"
        "from dure.device.exactness import compute_exactly\n"
        "from dure.proof.recipe import machine_words\n"
        "compute_exactly(torch.device('standin', 1))\n"
        "words = machine_words(torch.device('standin', 1))\n"
        "print('recipe', words['accelerator']['name'], words['accelerator']['benchmark'], words['deterministic'])\n"
        "print('fills', torch.utils.deterministic.fill_uninitialized_memory)\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "STANDIN_PAUSE_US": "300"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n")[:6] == [
        "waited 200.0 True", "pinned 7.0", "forked True", "own numbers True", "recipe a stand-in False True",
        "fills False",
    ]  # fmt: skip


def run_mutated(name, folder, built):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_PAUSE_US", str(mutations.PAUSES_US.get(name, 300)))
        if name == "used_before_the_fork":
            patch.setenv(mutations.BEFORE_THE_FORK, "1")
        return run_team(
            "support.mutations:mutated",
            (name, str(folder)),
            ranks=2,
            folder=RunFolder(folder / (name or "none")),
            hang_seconds=60,
        )


@pytest.fixture(scope="module")
def right(tmp_path_factory, built):
    """What the mutations' cases give without one."""
    folder = tmp_path_factory.mktemp("unmutated")
    return run_mutated("", folder, built)[0]


@needs_standin
@pytest.mark.soak
@pytest.mark.parametrize("name", [*mutations.MUTATIONS_BY_NAME, "used_before_the_fork"])
def test_every_mistake_with_devices_shows(right, tmp_path, built, name):
    """As other bits, as a false answer of a case, or as an error."""
    try:
        found = run_mutated(name, tmp_path, built)
    except RankFailed:
        return
    assert any(rank[case] != right[case] for rank in found for case in rank), name


@needs_standin
@pytest.mark.soak
def test_without_a_mistake_nothing_shows(right):
    assert right["exchanges"] is True
    assert right["captured"] is True

"""`--engine ray` on a real Ray of several nodes: the same bits, whatever is killed, and nothing left."""

import contextlib
import importlib.util
import secrets
from pathlib import Path

import psutil
import pytest
from support.alone import train_alone
from support.leftovers import alive, all_gone, no_new_shared_memory, shared_memory, wait_until
from support.nodes_stories import furthest_step, put_job, set_pace, wait_for_step
from support.rays import Driver, RayRun, Rays

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
    pytest.mark.filterwarnings("default"),  # Ray's own, in this process
]

STEPS = 120
SLOW, HELD = 0.012, 0.12


@pytest.fixture(scope="module", autouse=True)
def quiet_ray():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.fixture(scope="module")
def rays(quiet_ray):
    """A head and two nodes; a test that kills one adds one."""
    made = Rays()
    try:
        made.add_node()
        made.add_node()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def job(storage):
    return put_job(storage, STEPS)


@pytest.fixture(scope="module")
def weights(storage, job, tmp_path_factory):
    set_pace(storage, 0.0)
    return train_alone(job, tmp_path_factory.mktemp("alone") / "run").weights_sha256


@pytest.fixture
def start(rays, job, storage, tmp_path):
    started = []

    def start_one(name, *arguments):
        started.append(RayRun(rays, job, storage / "checkpoints" / name, tmp_path, *arguments))
        return started[-1]

    yield start_one
    for one in started:
        one.end()
    wait_until(lambda: not rays.agents(), "the end of all agents")


def go_on(run, steps, started, storage):
    """Let the run do some steps, and hold it back then."""
    set_pace(storage, SLOW)
    wait_for_step(run, furthest_step(run) + steps, started)
    set_pace(storage, HELD)


def files_with(words, *folders):
    """The files that have these bytes in them."""
    found = []
    for folder in folders:
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                if path.is_file() and any(word in path.read_bytes() for word in words):
                    found.append(path)
    return found


def processes_with(words):
    """The processes that have these bytes in their arguments or variables."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        for place in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                if any(word in (process / place).read_bytes() for word in words):
                    found.append((process.name, place))
    return found


def test_a_driver_of_ones_own_gets_the_same_bits_from_two_nodes_and_the_key_is_nowhere(
    rays, job, storage, weights, tmp_path
):
    secret = secrets.token_bytes(32)
    hidden = [secret, secret.hex().encode()]
    run = storage / "checkpoints" / "own"
    set_pace(storage, SLOW)
    words = tmp_path / "driver.err"
    # The test's own driver has the key as an argument, and is the only one that may.
    driver = Driver(secret.hex(), job, rays.address, run, words)
    try:
        wait_until(lambda: run.exists() and furthest_step(run) >= 3, "the first steps")
        mine = {str(driver.process.pid)}
        assert [seen for seen in processes_with(hidden) if seen[0] not in mine] == []
        set_pace(storage, 0.0)
        result = driver.result()
    finally:
        driver.end()
    assert (result["sha256"], result["ranks"], result["path"]) == (weights, 4, str(run))
    assert files_with(hidden, storage, rays.folder, tmp_path) == []
    assert files_with([b"goes on from step", b"starting 4 rank"], rays.folder), "Ray keeps what agents print"
    wait_until(lambda: not rays.agents(), "the end of all agents")


def test_a_node_is_killed_and_one_is_added_and_the_bits_are_the_same(start, rays, storage, weights):
    run = storage / "checkpoints" / "killed"
    set_pace(storage, SLOW)
    boss = start("killed", "--nodes", "1:2")
    _, heard = boss.says("ranks 2-3 on ")
    go_on(run, 5, boss, storage)
    rays.kill(rays.node_of(leader=False))
    _, heard = boss.says("is lost", after=heard)
    _, heard = boss.says("dure: goes on from step", after=heard)
    go_on(run, 5, boss, storage)
    rays.add_node()
    _, heard = boss.says("joins", after=heard)
    _, heard = boss.says("ranks 2-3 on ", after=heard)
    go_on(run, 5, boss, storage)
    set_pace(storage, 0.0)
    assert boss.summary()["weights_sha256"] == weights


def test_a_killed_driver_leaves_nothing_and_the_run_goes_on_with_the_same_bits(start, rays, storage, weights):
    before = shared_memory()
    run = storage / "checkpoints" / "driver"
    set_pace(storage, SLOW)
    first = start("driver", "--nodes", "2")
    wait_for_step(run, 10, first)
    wait_until(lambda: list((run / "checkpoints").glob("step-*")), "a checkpoint")
    agents = list(rays.agents().values())
    theirs = {process for agent in agents for process in (agent, *agent.children(recursive=True))}
    assert len(agents) == 2
    assert len(theirs) >= 2 + 2 + 4, "agents, prefork servers, ranks"
    first.process.kill()
    first.process.wait(60)
    all_gone(theirs)
    no_new_shared_memory(before)
    set_pace(storage, 0.0)
    again = start("driver", "--nodes", "2")
    assert again.summary()["weights_sha256"] == weights
    assert "goes on from step" in again.said
    no_new_shared_memory(before)


@pytest.mark.soak
def test_the_leaders_node_is_killed_and_the_next_one_leads(start, rays, storage, weights):
    run = storage / "checkpoints" / "leader"
    set_pace(storage, SLOW)
    boss = start("leader", "--nodes", "1:2")
    boss.says("ranks 2-3 on ")
    go_on(run, 10, boss, storage)
    rays.kill(rays.node_of(leader=True))
    boss.says("starts again with")
    rays.add_node()
    set_pace(storage, 0.0)
    assert boss.summary()["weights_sha256"] == weights


def test_what_cannot_be_is_refused_in_one_line(rays, job, start):
    too_large = start(
        "large", "--nodes", "2", "--set", "ray.resources={ nothing = 1 }", "--set", "ray.wait_seconds=1"
    )
    assert too_large.process.wait(120) == 2
    assert "Ray had no place for 2 nodes with 2 CPU, 1 nothing each within 1 s" in too_large.said
    assert alive([psutil.Process(pid) for pid in rays.raylets()])

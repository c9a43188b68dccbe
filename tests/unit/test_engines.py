"""Every engine keeps to the one small interface, and what it is told does what it says."""

import inspect

import pytest
from support.commands import EXAMPLES, dure

from dure.base.errors import UsageError
from dure.base.lines import encode
from dure.cli.train import _engine_of
from dure.config import load_job
from dure.engine.agent_process import AgentProcess
from dure.engine.attached import NODE_LOST, _note_lost_nodes
from dure.engine.engines import Engine, Queue, scheduler
from dure.engine.interface import Machines, RunningAgent, Scheduler
from dure.engine.ssh.hosts import SshHosts
from dure.launch.lease import Lease

JOB = EXAMPLES / "cats.toml"


def methods(protocol):
    return {
        name: value
        for name, value in vars(protocol).items()
        if not name.startswith("_") and inspect.isfunction(value)
    }


def implementations():
    yield Machines, SshHosts
    yield RunningAgent, AgentProcess
    for queue in Queue:
        yield Scheduler, type(scheduler(queue))
    try:
        import ray  # noqa: F401
    except ImportError:
        return
    from dure.engine.ray.agent import RayAgent
    from dure.engine.ray.machines import RayMachines

    yield Machines, RayMachines
    yield RunningAgent, RayAgent


@pytest.mark.parametrize(("protocol", "engine"), list(implementations()), ids=lambda one: one.__name__)
@pytest.mark.filterwarnings("default")
def test_an_engine_has_all_of_the_interface_with_the_same_arguments(protocol, engine):
    for name, wanted in methods(protocol).items():
        its = inspect.signature(getattr(engine, name))
        assert list(its.parameters) == list(inspect.signature(wanted).parameters), name


def test_the_engine_is_chosen_by_the_command_line_and_the_job():
    alone, hosts = load_job(JOB), load_job(JOB, hosts="10.0.0.1,10.0.0.2")
    assert _engine_of(alone, None, by_hand=False) is Engine.LOCAL
    assert _engine_of(hosts, None, by_hand=False) is Engine.SSH
    assert _engine_of(hosts, None, by_hand=True) is Engine.LOCAL
    assert _engine_of(hosts, Engine.RAY, by_hand=False) is Engine.RAY
    with pytest.raises(UsageError, match="--engine ssh needs to know the hosts"):
        _engine_of(alone, Engine.SSH, by_hand=False)
    with pytest.raises(UsageError, match="--engine ray starts the nodes itself"):
        _engine_of(alone, Engine.RAY, by_hand=True)


def test_nodes_that_an_engine_knows_to_be_lost_come_to_the_leader_once():
    lease = Lease()
    odd = [b"NodeLost {", b'NodeLost {"node": -1}', b'NodeLost {"node": "2"}', b"Alive {}"]
    _note_lost_nodes([encode(NODE_LOST, {"node": 3, "why": "its power failed"}).rstrip(b"\n"), *odd], lease)
    assert list(lease.lost_nodes()) == [(3, "its power failed")]
    assert list(lease.lost_nodes()) == []
    lease.check()


def test_without_a_ray_the_command_says_how_to_get_one():
    ran = dure(
        "train", JOB, "--engine", "ray", "--ray-address", "no such place", "--run-dir", "/nonexistent/run"
    )
    assert (ran.code, ran.err.count("\n")) == (2, 1), ran.err
    assert "there is no Ray at no such place" in ran.err

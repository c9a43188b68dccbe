"""Who this process is, from what it was told: right, or refused with the variable, its value and the fix."""

import argparse
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.base.errors import UsageError
from dure.comm.topology import Topology, arguments, read_topology

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.1.10",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
BY_HAND = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
# Task 3 of `srun -N2 -n5`, as Slurm 22.05 starts it.
TASK = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0,1,2,3",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[0-1]",
    "SLURM_STEP_TASKS_PER_NODE": "4,1",
}
# The script of `sbatch -N2 -n4`, outside srun.
BATCH = {
    "SLURM_JOB_ID": "18",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "node[0-1]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}


def place(topology: Topology) -> tuple[int, ...]:
    return (
        topology.rank,
        topology.size,
        topology.local_rank,
        topology.local_size,
        topology.node,
        topology.nodes,
    )


def leader(topology: Topology) -> tuple[str, int]:
    return (topology.leader_host, topology.leader_port)


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# Each way of starting


def test_nothing_set_is_one_rank_alone():
    topology = read_topology({"PATH": "/bin"})
    assert place(topology) == (0, 1, 0, 1, 0, 1)
    assert leader(topology) == ("127.0.0.1", 0)
    assert topology.launcher == "alone"
    assert topology.is_leader
    assert topology.is_node_leader


def test_torchrun_says_everything():
    topology = read_topology(TORCHRUN)
    assert place(topology) == (5, 8, 1, 4, 1, 2)
    assert leader(topology) == ("10.0.1.10", 29500)
    assert topology.launcher == "torchrun"
    assert not topology.is_leader
    assert not topology.is_node_leader


def test_dure_is_known_by_its_run():
    topology = read_topology({**TORCHRUN, "DURE_RUN": "cats-1"})
    assert (topology.launcher, topology.run_id) == ("dure", "cats-1")


def test_dures_run_alone_does_not_make_a_rank():
    assert read_topology({"DURE_RUN": "cats-1"}).launcher == "alone"


def test_four_variables_set_by_hand_are_ranks_of_one_node():
    topology = read_topology(BY_HAND)
    assert place(topology) == (2, 4, 2, 4, 0, 1)
    assert topology.launcher == "hand"


def test_arguments_by_hand_are_ranks_of_one_node():
    topology = read_topology({}, rank=3, world_size=4, master="127.0.0.1:29500")
    assert place(topology) == (3, 4, 3, 4, 0, 1)
    assert leader(topology) == ("127.0.0.1", 29500)
    assert topology.launcher == "hand"


def test_arguments_by_hand_take_the_node_from_the_environment():
    environ = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    assert place(read_topology(environ, rank=3, world_size=4, master="a:1")) == (3, 4, 1, 2, 1, 2)


def test_arguments_and_variables_complete_each_other():
    environ = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert leader(read_topology(environ, rank=0, world_size=2)) == ("a", 1)


def test_one_rank_by_hand_needs_no_master():
    topology = read_topology({}, rank=0, world_size=1)
    assert place(topology) == (0, 1, 0, 1, 0, 1)
    assert leader(topology) == ("127.0.0.1", 0)


def test_a_master_may_be_an_ipv6_address():
    assert leader(read_topology({}, rank=0, world_size=2, master="[::1]:29500")) == ("::1", 29500)


def test_nodes_may_differ_in_size_when_their_number_is_said():
    environ = {**TORCHRUN, "WORLD_SIZE": "6", "RANK": "5"}
    assert place(read_topology(environ)) == (5, 6, 1, 4, 1, 2)


def test_torchrun_inside_a_task_of_srun_is_torchrun():
    topology = read_topology({**TASK, **TORCHRUN})
    assert (topology.rank, topology.size, topology.launcher) == (5, 8, "torchrun")


def test_a_task_of_srun_knows_its_node_and_its_neighbours():
    topology = read_topology(TASK)
    assert place(topology) == (3, 5, 3, 4, 0, 2)
    assert topology.leader_host == "node0"
    assert (topology.launcher, topology.run_id) == ("srun", "slurm-17.2")
    last = {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_GTIDS": "4"}
    other = read_topology({**TASK, **last})
    assert place(other) == (4, 5, 0, 1, 1, 2)
    assert other.is_node_leader
    assert (leader(other), other.run_id) == (leader(topology), topology.run_id)


def test_ranks_dealt_out_by_turns_keep_slurms_places():
    # srun -N2 -n4 --distribution=cyclic: rank 1 is alone on the second node.
    cyclic = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "3,1",
        "SLURM_DISTRIBUTION": "cyclic",
    }
    here = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_GTIDS": "1"}
    assert place(read_topology({**TASK, **cyclic, **here})) == (1, 4, 0, 1, 1, 2)
    back = {"SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,2,3"}
    assert place(read_topology({**TASK, **cyclic, **back})) == (2, 4, 1, 3, 0, 2)


def test_a_batch_script_outside_srun_is_alone():
    assert read_topology(BATCH).launcher == "alone"


def test_the_shell_that_salloc_opens_on_a_node_is_alone():
    shell = {
        "SLURM_STEP_ID": "4294967290",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NODELIST": "node0",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    }
    assert read_topology({**BATCH, **shell}).launcher == "alone"


ONE_TASK = {
    **TASK,
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "node0",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}


def test_a_step_of_one_task_is_alone_and_may_start_ranks_by_hand():
    assert read_topology(ONE_TASK).launcher == "alone"
    assert read_topology({**ONE_TASK, "WORLD_SIZE": "1", "MASTER_ADDR": "node0"}).size == 1
    topology = read_topology(ONE_TASK, rank=1, world_size=2, master="node0:29500")
    assert (topology.rank, topology.size, topology.launcher) == (1, 2, "hand")


def test_neighbouring_steps_and_jobs_meet_at_different_ports():
    ports = {
        read_topology({**TASK, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).leader_port
        for job in range(100, 120)
        for step in range(10)
    }
    assert len(ports) == 200
    assert all(20000 <= port <= 29999 for port in ports)


def test_what_a_batch_script_exports_for_torch_is_honoured_under_srun():
    assert leader(read_topology({**TASK, "MASTER_ADDR": "head", "MASTER_PORT": "29500"})) == ("head", 29500)
    assert leader(read_topology({**TASK, "MASTER_PORT": "29500"})) == ("node0", 29500)
    assert leader(read_topology(TASK, master="head:1234")) == ("head", 1234)
    assert read_topology({**TASK, "WORLD_SIZE": "5"}, rank=3, world_size=5).launcher == "srun"


def test_runs_that_live_side_by_side_have_different_ids():
    runs = [TORCHRUN, {**TORCHRUN, "MASTER_PORT": "29501"}, BY_HAND, TASK, {**TASK, "SLURM_STEP_ID": "3"}, {}]
    ids = {read_topology(environ).run_id for environ in runs}
    assert len(ids) == len(runs)
    assert read_topology({**BY_HAND, "RANK": "0"}).run_id == read_topology(BY_HAND).run_id


def test_a_world_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read_topology({}).rank = 1  # type: ignore[misc]


# What is refused


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_description_is_refused_and_the_missing_half_named(name):
    with pytest.raises(UsageError) as refused:
        read_topology(without(BY_HAND, name))
    missing = {"RANK": "--rank", "WORLD_SIZE": "--world-size"}.get(name, "--master")
    assert f"but not {missing}" in str(refused.value)
    for other, value in without(BY_HAND, name).items():
        assert f"{other}={value}" in str(refused.value)


@pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"])
def test_half_a_place_on_the_node_is_refused(name):
    with pytest.raises(UsageError, match=f"but not {name}"):
        read_topology(without(TORCHRUN, name))


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_one_variable_alone_is_refused(name):
    with pytest.raises(UsageError, match=f"{name}={BY_HAND[name]} is given"):
        read_topology({name: BY_HAND[name]})


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"rank": 0}, "--world-size"),
        ({"world_size": 4}, "--rank"),
        ({"rank": 0, "world_size": 4}, "--master"),
        ({"master": "a:1"}, "--rank and --world-size"),
    ],
)
def test_half_the_arguments_are_refused(given, missing):
    with pytest.raises(UsageError, match=f"but not {missing};"):
        read_topology({}, **given)


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [
        ("RANK", "8", "from 0 to 7 (WORLD_SIZE is 8)"),
        ("RANK", "-1", "from 0 to 7"),
        ("RANK", "two", "from 0 to 7"),
        ("RANK", "", "from 0 to 7"),
        ("RANK", "1_0", "from 0 to 7"),
        ("RANK", "٣", "from 0 to 7"),
        ("WORLD_SIZE", "0", "from 1 up"),
        ("WORLD_SIZE", "9" * 5000, "from 1 up"),
        ("LOCAL_WORLD_SIZE", "9", "from 1 to 8"),
        ("LOCAL_RANK", "4", "from 0 to 3"),
        ("GROUP_RANK", "2", "from 0 to 1"),
        ("GROUP_WORLD_SIZE", "x", "from 1 to 8"),
        ("MASTER_PORT", "0", "from 1 to 65535"),
        ("MASTER_PORT", "65536", "from 1 to 65535"),
    ],
)
def test_a_number_that_cannot_be_is_refused_with_its_bounds(name, value, bounds):
    with pytest.raises(UsageError) as refused:
        read_topology({**TORCHRUN, name: value})
    assert f"{name} is {value!r}" in str(refused.value)
    assert bounds in str(refused.value)


@pytest.mark.parametrize("value", ["", " ", "a b"])
def test_a_master_without_a_host_is_refused(value):
    with pytest.raises(UsageError, match="MASTER_ADDR is"):
        read_topology({**BY_HAND, "MASTER_ADDR": value})


@pytest.mark.parametrize(
    "master", ["host", "host:", ":29500", "host:port", "::1:29500", "[::1]", "a:1:2", ""]
)
def test_a_master_argument_without_host_and_port_is_refused(master):
    with pytest.raises(UsageError, match=r"--master is .* as in 127\.0\.0\.1:29500"):
        read_topology({}, rank=0, world_size=2, master=master)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 0}, "--rank gives RANK as 0, but the environment has RANK=5"),
        ({"world_size": 4}, "--world-size gives WORLD_SIZE as 4, but the environment has WORLD_SIZE=8"),
        (
            {"master": "a:29500"},
            "--master gives MASTER_ADDR as a, but the environment has MASTER_ADDR=10.0.1.10",
        ),
        (
            {"master": "10.0.1.10:1"},
            "--master gives MASTER_PORT as 1, but the environment has MASTER_PORT=29500",
        ),
    ],
)
def test_arguments_that_contradict_a_launcher_are_refused(given, message):
    with pytest.raises(UsageError) as refused:
        read_topology(TORCHRUN, **given)
    assert message in str(refused.value)
    assert "leave out" in str(refused.value)


def test_arguments_that_agree_with_a_launcher_are_fine():
    assert read_topology(TORCHRUN, rank=5, world_size=8, master="10.0.1.10:29500") == read_topology(TORCHRUN)


@pytest.mark.parametrize(
    "given", [{"rank": 0}, {"world_size": 4}, {"rank": 0, "world_size": 5, "master": "a:1"}]
)
def test_arguments_that_contradict_srun_are_refused(given):
    with pytest.raises(UsageError, match="but srun started this as task 3 of 5"):
        read_topology(TASK, **given)


def test_a_local_rank_exported_from_the_batch_script_is_refused_under_srun():
    with pytest.raises(UsageError, match=r"LOCAL_RANK is 0, .* so LOCAL_RANK is 3; leave LOCAL_RANK to srun"):
        read_topology({**TASK, "LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}, "cannot make WORLD_SIZE=8"),
        ({"GROUP_WORLD_SIZE": "6"}, "cannot make WORLD_SIZE=8"),
        (
            {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "8"},
            "LOCAL_RANK=1 but RANK=5",
        ),
        ({"RANK": "0"}, "LOCAL_RANK is '1'"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(changed, message):
    with pytest.raises(UsageError, match=message):
        read_topology({**TORCHRUN, **changed})


def test_an_unknown_number_of_nodes_is_refused():
    environ = without({**TORCHRUN, "WORLD_SIZE": "6"}, "GROUP_WORLD_SIZE")
    with pytest.raises(UsageError, match="set GROUP_WORLD_SIZE"):
        read_topology(environ)


@pytest.mark.parametrize("name", sorted(set(TASK) - {"SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"}))
def test_half_a_task_of_srun_is_refused(name):
    if name in ("SLURM_NTASKS", "SLURM_GTIDS"):
        assert read_topology(without(TASK, name)) == read_topology(TASK)  # only checked, not needed
        return
    with pytest.raises(UsageError, match=f"but not {name}"):
        read_topology(without(TASK, name))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SLURM_PROCID", "5", "SLURM_PROCID is '5'"),
        ("SLURM_PROCID", "x", "SLURM_PROCID is 'x'"),
        ("SLURM_NODEID", "2", "SLURM_NODEID is '2'"),
        ("SLURM_LOCALID", "4", "SLURM_LOCALID is '4'"),
        ("SLURM_JOB_ID", "", "SLURM_JOB_ID is ''"),
        ("SLURM_STEP_TASKS_PER_NODE", "4,2", "6 tasks"),
        ("SLURM_STEP_TASKS_PER_NODE", "5", "1 nodes"),
        ("SLURM_STEP_NODELIST", "node[0-2]", "3 nodes"),
        ("SLURM_STEP_NODELIST", "node[0-", r"'node\[0-' is not a list"),
    ],
)
def test_a_task_of_srun_that_cannot_be_is_refused(name, value, message):
    with pytest.raises(UsageError, match=message):
        read_topology({**TASK, name: value})


@pytest.mark.parametrize("tasks", ["1", "5"])
def test_the_step_that_submitted_a_batch_job_is_not_taken_for_its_own(tasks):
    # sbatch inside a step hands SLURM_STEP_* on, and sets these for the batch script.
    batch = {"SLURM_NTASKS": tasks, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0"}
    with pytest.raises(UsageError, match="left over from the step that submitted this job"):
        read_topology({**TASK, **batch})


def test_a_host_file_needs_the_leader_named():
    environ = {**TASK, "SLURM_DISTRIBUTION": "arbitrary"}
    with pytest.raises(UsageError, match="set MASTER_ADDR to its first host"):
        read_topology(environ)
    assert read_topology({**environ, "MASTER_ADDR": "node1"}).leader_host == "node1"


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=5).filter(lambda counts: sum(counts) > 1),
    cyclic=st.booleans(),
)
def test_every_task_of_any_step_has_one_place_and_all_agree_on_the_rest(counts, cyclic):
    slots = [(node, local) for node, tasks in enumerate(counts) for local in range(tasks)]
    if cyclic:
        slots.sort(key=lambda slot: (slot[1], slot[0]))
    worlds = []
    for rank, (node, local) in enumerate(slots):
        environ = {
            **without(TASK, "SLURM_GTIDS"),
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": str(local),
            "SLURM_NTASKS": str(len(slots)),
            "SLURM_STEP_NUM_TASKS": str(len(slots)),
            "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]" if len(counts) > 1 else "n1",
            "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)),
        }
        worlds.append(read_topology(environ))
    assert [topology.rank for topology in worlds] == list(range(len(slots)))
    assert {(topology.node, topology.local_rank) for topology in worlds} == set(slots)
    assert all(topology.local_size == counts[topology.node] for topology in worlds)
    assert sum(topology.is_leader for topology in worlds) == 1
    assert sum(topology.is_node_leader for topology in worlds) == len(counts)
    shared = {(topology.size, topology.nodes, leader(topology), topology.run_id) for topology in worlds}
    assert len(shared) == 1


# The arguments


def test_a_scripts_parser_gets_the_arguments_and_keeps_its_own():
    parser = argparse.ArgumentParser(parents=[arguments()])
    parser.add_argument("--epochs", type=int)
    parsed = parser.parse_args(["--rank=0", "--world-size", "4", "--master=127.0.0.1:29500", "--epochs=2"])
    assert (parsed.rank, parsed.world_size, parsed.master, parsed.epochs) == (0, 4, "127.0.0.1:29500", 2)
    none = parser.parse_args([])
    assert (none.rank, none.world_size, none.master) == (None, None, None)
    assert "HOST:PORT" in parser.format_help()

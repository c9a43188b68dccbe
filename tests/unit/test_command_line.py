"""The command line answers at once, without torch, and its settings show where they come from."""

import resource
import subprocess
import sys

from support.commands import EXAMPLES, dure


def cpu_seconds_of_children():
    """What processes that this one has waited for have computed: the same however busy the machine is."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def imports(code):
    """The heavy packages that a piece of code imports."""
    shown = f"import sys\n{code}\nprint(*sorted({{'torch', 'numpy', 'rich'}} & set(sys.modules)))"
    return subprocess.run(
        [sys.executable, "-c", shown], capture_output=True, text=True, check=True
    ).stdout.split()


def test_light_rooms_start_without_torch():
    rooms = (
        "base.say", "checkpoint.places", "cli", "config", "doctor.inside", "cli.plan",
        "engine.measure", "engine.node_start", "engine.run_job", "engine.slurm.cancel",
        "engine.slurm.prepare", "engine.slurm.submit", "image.build", "image.enter",
        "image.inside", "launch", "observe.display", "observe.events", "observe.summary",
        "plan.machine", "plan.measurement", "plan.outlook", "plan.published", "plan.words",
        "page.child", "page.serve", "tools.demo",
    )  # fmt: skip
    for module in ("dure", *(f"dure.{room}" for room in rooms)):
        assert imports(f"import {module}") == [], module


def test_help_teaches_and_answers_at_once():
    seconds = []
    for _ in range(3):
        began = cpu_seconds_of_children()
        ended = dure("--help")
        seconds.append(cpu_seconds_of_children() - began)
    print(f"dure --help: {min(seconds):.2f} s of CPU")
    assert ended.code == 0
    for word in ("train", "run", "demo", "bench"):
        assert word in ended.out
    assert min(seconds) < 3.0  # the bar is 0.3 s; a slow machine must not fail the test
    assert "Exit codes" in dure("train", "--help").out


def test_print_config_shows_every_value_with_its_source():
    ended = dure(
        "train", EXAMPLES / "tiny_transformer.toml", "--ranks", 3, "--set", "train.lr=0.5", "--print-config"
    )
    rows = {line.split()[0]: line for line in ended.out.splitlines()}
    assert rows["team.ranks"].endswith("--ranks 3")
    assert rows["train.lr"].endswith("--set train.lr=0.5")
    assert rows["team.shards"].endswith(("default", "tiny_transformer.toml"))
    assert rows["train.optimizer"].endswith("tiny_transformer.toml")


def test_the_public_names_are_pinned():
    import dure as package

    assert sorted(package.__all__) == [
        "Batch", "Batches", "Checkpoint", "EvalResult", "Team", "Topology", "__version__", "arguments", "attach",
        "heartbeat", "start",
    ]  # fmt: skip
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_the_public_names_of_a_team_are_pinned():
    from dure.team.team import PUBLIC, Team

    assert sorted(PUBLIC) == [
        "barrier", "batches", "checkpoint", "device", "discard", "done", "evaluate", "forward_backward", "gather",
        "how_far_apart", "is_leader", "load", "log", "log_to", "on_leader", "print", "prove", "rank", "replicate",
        "shard_optimizer", "step", "threads", "topology", "update",
    ]  # fmt: skip
    for name in set(PUBLIC) - {"topology", "threads"}:
        assert getattr(Team, name).__doc__, name

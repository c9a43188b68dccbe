"""The planner: its model against published tables, its figures, its files, and its words."""

import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import EXAMPLES, dure

from dure.base.errors import UsageError
from dure.config import load_job
from dure.plan.failures import daly_interval, failures
from dure.plan.links import Link, Links, Shape, all_reduce_seconds, most_pieces, sent_by_node
from dure.plan.machine import known_machines, load_machine
from dure.plan.measurement import Measurement, read_measurement, settings_hash, write_measurement
from dure.plan.outlook import Told, assume, outlook
from dure.plan.published import Row, mean_error, predict_table, tables
from dure.plan.step import Team, Work, _buckets, slowest_of, step_phases, with_step
from dure.plan.words import in_words

JOB = EXAMPLES / "tiny_transformer.toml"
LINKS = Links(Link(1e10, 1e-6), Link(1e9, 1e-5), 1e-6)


def measured(**changes):
    timed = {"seconds": 0.05, "spread": 0.05}
    return Measurement.model_validate(
        {
            "job": "tiny_transformer", "settings": settings_hash(load_job(JOB, {})), "host": "a", "cores": 4,
            "device": "cpu", "tflops": 0.1, "memory_gib": 16.0, "parameters": 10_000_000, "samples": 1003,
            "batch": 64, "shards": 8, "steps": 0, "shard": timed,
            "update": {"seconds": 0.01, "spread": 0.05}, "data": {"seconds": 0.001, "spread": 0.05},
            "jitter": 0.02, "crowding": 1.1,
            "exchange": {65536: {"seconds": 1e-4, "spread": 0.1}, 26214400: {"seconds": 1e-2, "spread": 0.1}},
            "exchange_ranks": 4, "state_bytes": 120_000_000, "save_stall": {"seconds": 0.02, "spread": 0.2},
            "storage_bytes_per_second": 5e8, "rank_bytes": 500_000_000, "start_seconds": 3.0, **changes,
        }
    )  # fmt: skip


def looked(nodes, machine=None, told=None, settings=None, **changes):
    job = load_job(JOB, settings or {}, None).job
    return outlook(assume(job, measured(**changes), machine, told or Told()), nodes)


def test_published_tables_are_predicted_as_well_as_promised():
    rows = [row for table in tables() for row in predict_table(table)]
    for row in rows:
        print(
            f"{row.table:55} {row.row.nodes:>4} × {row.row.ranks} {row.row.mib:>6}"
            f" {row.row.value:>10.5g} {row.predicted:>10.5g} {row.error:+.1%}"
        )
    named = [row for row in rows if row.required]
    assert len({row.table for row in named}) == 10
    for only in (named, [row for row in named if row.unit != "microseconds"]):
        one, several = ([row for row in only if (row.row.nodes > 1) == more] for more in (False, True))
        print(
            f"one node {mean_error(one):.1%} of {len(one)}, several {mean_error(several):.1%} of {len(several)}"
        )
        assert mean_error(one) <= 0.08
        assert mean_error(several) <= 0.12


def test_no_prediction_knows_the_figure_that_it_predicts():
    for table in tables():
        for before in predict_table(table):
            rows = tuple(
                Row(**{**vars(row), "value": row.value * 7}) if row == before.row else row
                for row in table.rows
            )
            other = table.model_copy(update={"rows": rows})
            after = [row for row in predict_table(other) if row.row.value == before.row.value * 7]
            assert [row.predicted for row in after] == [before.predicted], before


def test_a_team_of_one_exchanges_nothing_and_a_ring_sends_what_a_ring_sends():
    for collective in ("ring", "slices"):
        assert all_reduce_seconds(1e6, Shape(1, 1), LINKS, collective) == 0
        assert sent_by_node(1e6, Shape(1, 8), collective) == 0
    assert sent_by_node(1e6, Shape(4, 2), "ring") == pytest.approx(2 * 7 / 8 * 1e6)
    assert sent_by_node(1e6, Shape(4, 2), "slices") == pytest.approx(2 * 3 / 4 * 1e6)
    assert sent_by_node(1e6, Shape(2, 4), "slices") == pytest.approx(1e6)  # one bucket a direction


def test_a_node_whose_shards_are_no_whole_subtree_sends_more():
    assert [most_pieces(16, nodes) for nodes in (1, 2, 3, 4, 8)] == [1, 1, 3, 1, 1]
    assert sent_by_node(3e6, Shape(3, 1, 3), "slices") == pytest.approx(4 * 2 / 3 * 3e6)


@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.01, 1.0)), min_size=1, max_size=6),
    st.floats(1e5, 1e9),
    st.floats(1e5, 1e8),
)
def test_buckets_hold_all_bytes_and_get_ready_in_order(profile, nbytes, bucket):
    times, parts = sum(time for time, _ in profile) or 1.0, sum(part for _, part in profile)
    even = [(time / times, part / parts) for time, part in profile]
    found = _buckets(Work(1, 1.0, nbytes, profile=even, bucket_bytes=bucket))
    assert sum(held for _, held in found) == pytest.approx(nbytes)
    readies = [ready for ready, _ in found]
    assert readies == sorted(readies)
    assert max(readies) <= 1.0 + 1e-9


def test_the_exchange_is_hidden_behind_backward_as_far_as_it_fits():
    work = Work(8, 0.3, 1e8)
    team = Team(Shape(4, 2), LINKS, "slices")
    hidden = step_phases(work, team)
    shown = step_phases(work, Team(Shape(4, 2), LINKS, "slices", overlap=0.0))
    assert 0 < hidden.exchange < shown.exchange
    assert hidden.exchange + hidden.hidden == pytest.approx(shown.exchange)
    slow = Links(LINKS.inside, Link(1e7, 1e-5))
    late = step_phases(work, Team(Shape(4, 2), slow, "slices"))
    assert late.hidden < 0.3  # no more than the last shard's backward pass


def test_the_slowest_of_many_is_slower():
    assert slowest_of(1) == 0
    # Exact expectations of the largest of n normal numbers: 0.5642, 1.4236 and 2.5076.
    for ranks, exact in ((2, 0.5642), (8, 1.4236), (100, 2.5076)):
        assert slowest_of(ranks) == pytest.approx(exact, abs=0.03)


def test_the_model_is_fitted_to_one_figure_exactly():
    team = Team(Shape(2, 4), LINKS, "ring", jitter=0.02)
    fitted = with_step(Work(8, 0.0, 1e8), team, 0.5)
    assert step_phases(fitted, team).step == pytest.approx(0.5)


def test_the_interval_between_checkpoints_is_the_best_one():
    for save, mtbf in ((0.5, 3600.0), (30.0, 86400.0), (300.0, 7200.0)):
        interval = daly_interval(save, mtbf)

        def cost(seconds, save=save, mtbf=mtbf):
            """Expected time for a second of work (Daly 2006, the complete model)."""
            return mtbf / seconds * math.expm1((seconds + save) / mtbf)

        best = min((cost(interval * factor), factor) for factor in (0.5, 0.7, 0.9, 1.0, 1.1, 1.4, 2.0))
        assert best[1] == 1.0, (save, mtbf, best)
    few = failures(
        steps=10_000,
        step_seconds=1.0,
        save_seconds=1.0,
        restart_seconds=60.0,
        node_mtbf_hours=1000.0,
        nodes=1,
    )
    many = failures(
        steps=10_000,
        step_seconds=1.0,
        save_seconds=1.0,
        restart_seconds=60.0,
        node_mtbf_hours=1000.0,
        nodes=1000,
    )
    assert many.interval_seconds < few.interval_seconds
    assert many.overhead > few.overhead
    assert many.hours > 10_000 / 3600


def test_ranks_without_a_shard_bring_nothing_and_the_planner_says_so():
    two, four = (looked(nodes, parameters=100_000) for nodes in (2, 4))
    assert (four.ranks, four.busy_ranks) == (16, 8)
    assert four.samples_per_second.value <= two.samples_per_second.value
    assert (four.limit, four.help.what) == ("shards", "shards")
    better = looked(4, settings={"team.shards": "16"}, parameters=100_000)
    gained = better.samples_per_second.value / four.samples_per_second.value - 1
    assert gained == pytest.approx(four.help.gain, rel=0.1)


def test_every_advice_keeps_its_word():
    """What the planner says helps is done to what it is told, and helps about as much."""
    slow = Told(gbit=0.5)
    before = looked(2, told=slow)
    assert before.limit == "exchange"
    assert before.help.what == "network"
    after = looked(2, told=Told(gbit=2.0))
    gained = after.samples_per_second.value / before.samples_per_second.value - 1
    assert gained == pytest.approx(before.help.gain, rel=0.05)
    waits = looked(1, data={"seconds": 0.2, "spread": 0.1})
    assert (waits.limit, waits.help.what) == ("data", "workers")
    updates = looked(1, update={"seconds": 2.0, "spread": 0.1})
    assert (updates.limit, updates.help.what) == ("update", "shard_optimizer")


def test_every_figure_is_in_its_range_and_wider_where_less_is_known():
    here, there = looked(4), looked(4, load_machine("p5.48xlarge"))
    for one in (here, there):
        for value in (one.step_seconds, one.samples_per_second, one.speedup, one.hours, one.memory_gib):
            assert value.low <= value.value <= value.high
            assert value.low < value.high
    assert there.usd is not None
    assert here.usd is None
    width = [(one.step_seconds.high - one.step_seconds.low) / one.step_seconds.value for one in (here, there)]
    assert width[1] > width[0]


@pytest.mark.parametrize("name", known_machines())
def test_the_machines_that_come_with_dure_can_be_read(name):
    machine = load_machine(name)
    assert machine.name == name
    assert looked(2, machine).step_seconds.value > 0


def test_a_machine_of_the_users_own_and_what_is_wrong_with_one(tmp_path):
    text = (JOB.parent.parent / "src/dure/plan/machines/c6i.16xlarge.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text.replace("gbit = 20", "gbit = 40"))
    assert load_machine(str(path)).network.gbit == 40
    for broken, said in (
        (text.replace("gbit = 20", "gbit = -1"), "network.gbit"),
        (text.replace("[network]", "[net]"), "net"),
        ("= [", "cannot be read"),
    ):
        path.write_text(broken)
        with pytest.raises(UsageError, match=said):
            load_machine(str(path))
    with pytest.raises(UsageError, match="known are"):
        load_machine("p9.huge")


def test_a_measurement_is_kept_as_a_file_and_nothing_else_is_taken_for_one(tmp_path):
    path = tmp_path / "deep" / "m.json"
    write_measurement(path, measured())
    assert read_measurement(path) == measured()
    for text in ("{}", "nothing", json.dumps({**measured().model_dump(mode="json"), "version": 99})):
        path.write_text(text)
        with pytest.raises(UsageError, match="measure again"):
            read_measurement(path)


def test_the_plan_of_what_was_measured_needs_no_torch(tmp_path):
    path = tmp_path / "m.json"
    write_measurement(path, measured())
    code = (
        "import sys\nfrom dure.cli import main\n"
        f"sys.argv = ['dure', 'plan', {str(JOB)!r}, '--measured', {str(path)!r}, '--like', 'p5.48xlarge']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'heavy'\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "× as fast on 8 nodes?" in ended.stdout
    told = dure("plan", JOB, "--measured", path, "--nodes", "1,2", "--json")
    found = json.loads(told.out)
    assert [one["nodes"] for one in found["outlooks"]] == [1, 2]
    korean = dure("plan", JOB, "--measured", path, "--nodes", "1,8", "--lang", "ko")
    assert "노드 8개면 8배 빠른가?" in korean.out


@pytest.mark.parametrize(
    "options", [("--nodes", "0"), ("--nodes", "1,a"), ("--price", "-1"), ("--like", "no")]
)
def test_hostile_options_are_refused_in_words(tmp_path, options):
    path = tmp_path / "m.json"
    write_measurement(path, measured())
    ended = dure("plan", JOB, "--measured", path, *options)
    assert ended.code == 2
    assert options[0] in ended.err


def test_a_measurement_of_other_settings_is_not_used(tmp_path):
    path = tmp_path / "m.json"
    write_measurement(path, measured())
    ended = dure("plan", JOB, "--measured", path, "--set", "train.precision=bf16")
    assert ended.code == 2
    assert "--measure" in ended.err


@pytest.mark.parametrize("language", ["en", "ko"])
def test_every_limit_and_every_help_has_words(language):
    one = looked(4)
    for limit in ("shards", "cores", "exchange", "update", "data", "wait", "failures", "compute"):
        for what in ("shards", "network", "wire", "shard_optimizer", "workers", "batch", "none"):
            changed = type(one)(
                **{**vars(one), "limit": limit, "help": type(one.help)(what, 0.5), "fits": False}
            )
            text = in_words([changed], language, host="a", cores=2, machine="b")
            assert "{" not in text

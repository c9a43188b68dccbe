"""A team that the launcher watches beats where the launcher looks."""

from pathlib import Path

from dure.base.run_folder import RunFolder
from dure.launch import run_team
from dure.observe.heartbeat import Phase, read_beat
from dure.team import start


def beat_and_look(path):
    """In a rank: say something through the team, and read it where the launcher would."""
    with start(shards=2) as team:
        team.heartbeat.beat(7, Phase.UPDATE)
        beat = read_beat(RunFolder(Path(path)).heartbeat(team.rank))
        return team.topology.launcher, None if beat is None else (beat.step, beat.phase.name)


def test_ranks_beat_in_the_run_folder_so_that_work_is_not_taken_for_a_hang(tmp_path):
    found = run_team(
        "test_heartbeat_of_team:beat_and_look",
        (str(tmp_path),),
        ranks=2,
        folder=RunFolder(tmp_path),
        hang_seconds=300,
    )
    assert found == [("dure", (7, "UPDATE"))] * 2

"""What a run proves of itself while it trains: that replicas are the same, and that no rank computes wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from dure.observe import events
from dure.proof.proof_cadence import ProofCadence
from dure.step.shadow import Audited
from dure.team import Team


class Checks:
    """Of one rank; those that compare are collective calls."""

    def __init__(
        self,
        team: Team,
        prove: Callable[[int, ProofCadence | None], str],
        recorder: events.Recorder,
        every: int | Literal["auto"],
        start: int,
    ) -> None:
        """Replicas are compared `every` so many steps, from step `start` on; `prove` compares them after a step."""
        self._team = team
        self._prove = prove
        self._recorder = recorder
        self._cadence = ProofCadence(every, start)
        self._proved: str | None = None
        self.audited = 0
        """Shards of other ranks that this one computed again."""

    def after_update(self, step: int, seconds: float) -> None:
        """Compare replicas if it is due, while caches hold what the update wrote; the step took so long."""
        cadence = self._cadence
        cadence.step_took(seconds)
        self._proved = None
        if self._team.setting.sync and cadence.is_due(step + 1):
            measured = cadence if cadence.is_measured else None
            self._proved = self._prove(step, measured)

    def record(self, step: int, audited: Audited | None) -> None:
        """Record what was found in a step, after the step."""
        if self._proved is not None:
            self._recorder.record(events.Proved(step, self._proved, agree=True))
        if audited is None or audited.chosen.by != self._team.rank:
            return
        self.audited += 1
        asked, found = audited.chosen, audited.corruption
        self._recorder.record(
            events.ShardAudited(
                asked.step,
                asked.shard,
                asked.owner,
                agree=found is None,
                wrong=-1 if found is None else found.rank,
                tensor="" if found is None else found.tensor,
                words="" if found is None else found.words,
            )
        )

    def end_if_corrupted(self, save: Callable[[], None]) -> None:
        """Where a rank computed this step wrongly at first: save what the step, computed again, has led to, and end."""
        if self._team.is_corrupted:
            save()
        self._team.refuse_to_go_on()

    def last(self, step: int) -> str | None:
        """At the run's end: the fingerprint of all replicas; None where they train apart."""
        if not self._team.setting.sync:
            return None
        found = self._prove(step, None)
        self._recorder.record(events.Proved(step, found, agree=True))
        return found

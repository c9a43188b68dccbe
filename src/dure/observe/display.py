"""What a run shows while it trains: a live display in a terminal, a plain line now and then in a log."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, TextIO

from dure.base.language import Language, as_spoken
from dure.base.run_folder import RunFolder
from dure.base.say import printable, redacted
from dure.observe.events import Evaluated, Event, Follower, Loading, Noted, Proved, Stepped, TeamFormed
from dure.observe.heartbeat import Phase, read_beat

if TYPE_CHECKING:
    from rich.console import RenderableType

LINE_SECONDS = 5.0
"""Between two lines in a log."""

_WORDS: dict[Language, dict[str, str]] = {
    "en": {
        "starting": "starting {ranks} rank(s) …",
        "step": "step {step}/{steps} · epoch {epoch} · loss {loss:.4g} · {speed:.0f} samples/s",
        "loading": "loading weights: {done:.0f} of {total:.0f} MB · {rate:.0f} MB/s",
        "ranks": "ranks",
        "proof": "all {ranks} replicas the same at step {step}: {fingerprint}",
        "eval": "held out: {metrics}",
        "unread": "{lines} line(s) of {path} could not be read, and were left out",
        "restart": "all ranks start again (restart {without_progress} of {max_restarts} without progress): {cause}",
        "fewer": "goes on with {ranks} ranks, after {max_restarts} restarts without progress: {cause}",
    },
    "ko": {
        "starting": "랭크 {ranks}개를 시작합니다 …",
        "step": "스텝 {step}/{steps} · 에포크 {epoch} · 손실 {loss:.4g} · 초당 샘플 {speed:.0f}개",
        "loading": "가중치를 읽습니다: {total:.0f} MB 중 {done:.0f} MB · 초당 {rate:.0f} MB",
        "ranks": "랭크",
        "proof": "스텝 {step}에서 복제본 {ranks}개가 모두 같음: {fingerprint}",
        "eval": "평가: {metrics}",
        "unread": "{path}의 {lines}줄을 읽을 수 없어 건너뛰었습니다",
        "restart": "모든 랭크를 다시 시작합니다 (진전 없는 재시작 {max_restarts}번 중 {without_progress}번째): {cause}",
        "fewer": "진전 없이 {max_restarts}번 다시 시작했으므로, 랭크 {ranks}개로 계속합니다: {cause}",
    },
}
_BARS = "▁▂▃▄▅▆▇█"


class Display:
    """Follows rank 0's events; `tick` is called by the launcher, and never waits."""

    def __init__(
        self, folder: RunFolder, ranks: int, language: Language, stream: TextIO | None = None
    ) -> None:
        self._folder = folder
        self._ranks = ranks
        self._language = language
        self._word = _WORDS[language]
        self._stream = stream or sys.stderr
        # A run that goes on has shown what it did before.
        self._events = Follower(folder.events(0), from_end=True)
        self._steps = 0
        self._last: Stepped | None = None
        self._losses: deque[float] = deque(maxlen=48)
        self._recent: deque[tuple[float, int]] = deque(maxlen=50)
        self._said_at = 0.0
        self._said: Stepped | None = None
        self._proof = self._judged = self._loading = ""
        self._live = _live_display(self._stream)
        self._say(self._word["starting"].format(ranks=ranks))

    def tick(self) -> None:
        """Show what is new."""
        self._follow()
        now = time.monotonic()
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
        elif self._last is not self._said and now - self._said_at >= LINE_SECONDS:
            self._say(self._step_line())

    def tell(self, text: str) -> None:
        """Say something that should stay to be seen."""
        text = as_spoken(text, self._language)
        if self._live is not None:
            self._live.console.print(f"dure: {redacted(text)}", highlight=False, markup=False)
        else:
            self._say(text)

    def restarted(self, cause: str, without_progress: int, max_restarts: int, ranks: int) -> None:
        """Say that the team starts again, and why."""
        words = self._word["restart" if ranks == self._ranks else "fewer"]
        self._ranks = ranks
        self.tell(
            words.format(
                cause=as_spoken(cause, self._language),
                without_progress=without_progress,
                max_restarts=max_restarts,
                ranks=ranks,
            )
        )

    def close(self) -> None:
        """Show the last state and let go of the terminal."""
        self._follow()
        self._events.close()
        if unread := self._events.reading.skipped:
            self.tell(self._word["unread"].format(lines=unread, path=self._folder.events(0)))
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
            self._live.stop()
            self._live = None
        elif self._last is not None and self._last is not self._said:
            self._say(self._step_line())

    def _follow(self) -> None:
        for event in self._events.look():
            self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case TeamFormed():
                self._steps = event.steps
            case Loading():
                self._loading = self._word["loading"].format(
                    done=event.bytes / 1e6,
                    total=event.of_bytes / 1e6,
                    rate=event.bytes / 1e6 / max(event.seconds, 1e-6),
                )
                self._say(self._loading)
            case Stepped():
                self._last = event
                if math.isfinite(event.loss):
                    self._losses.append(event.loss)
                self._recent.append((sum(event.seconds.values()), event.samples_of_batch))
            case Proved():
                self._proof = self._word["proof"].format(
                    ranks=self._ranks, step=event.step + 1, fingerprint=printable(event.fingerprint)
                )
            case Evaluated():
                shown = " · ".join(f"{printable(name)} {value:.4g}" for name, value in event.metrics.items())
                self._judged = self._word["eval"].format(metrics=shown)
                self._say(self._judged)
            case Noted():
                self._say(as_spoken(printable(event.text, 2000), self._language))

    def _step_line(self) -> str:
        assert self._last is not None
        self._said = self._last
        seconds = sum(spent for spent, _ in self._recent)
        return self._word["step"].format(
            step=self._last.step + 1,
            steps=self._steps,
            epoch=self._last.epoch + 1,
            loss=self._last.loss,
            speed=sum(samples for _, samples in self._recent) / seconds if seconds else 0.0,
        )

    def _picture(self) -> RenderableType:
        from rich.text import Text

        if self._last is None:
            return Text(self._loading or self._word["starting"].format(ranks=self._ranks), style="dim")
        done = (self._last.step + 1) / max(self._steps, 1)
        bar = "━" * round(done * 40)
        picture = Text.assemble((bar, "green"), ("━" * (40 - len(bar)), "dim"), f" {done:.0%}\n")
        picture.append(self._step_line() + "\n")
        picture.append(_sparkline(self._losses) + "\n", style="cyan")
        for rank in range(self._ranks):
            beat = read_beat(self._folder.heartbeat(rank))
            phase = beat.phase if beat else Phase.STARTING
            style = "yellow" if phase is Phase.EXCHANGE else "green"
            picture.append(f"{rank}:{phase.name.lower():<9}", style=style)
        for line in (self._proof, self._judged):
            if line:
                picture.append(f"\n{line}", style="bold")
        return picture

    def _say(self, text: str) -> None:
        if self._live is None:
            with contextlib.suppress(
                OSError, ValueError
            ):  # a log that cannot be written is no reason to stop
                print(f"dure: {redacted(text)}", file=self._stream, flush=True)
            self._said_at = time.monotonic()


def _live_display(stream: TextIO):  # type: ignore[no-untyped-def]  # noqa: ANN202
    if not stream.isatty():
        return None
    from rich.console import Console
    from rich.live import Live

    live = Live(console=Console(file=stream), auto_refresh=False, transient=False)
    live.start()
    return live


def _sparkline(values: deque[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[min(int((value - low) / span * len(_BARS)), len(_BARS) - 1)] for value in values)

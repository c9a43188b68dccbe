"""A run in numbers and in words, from its events and its ranks' results. Works without torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dure.events import Evaluated, Stepped, StorageUsed, TeamFormed, read_events
from dure.job import Job
from dure.language import Language
from dure.results import RankResult
from dure.run_folder import RunFolder
from dure.shards import ledger_mark

_WRAP = 2**64 - 1


@dataclass(frozen=True)
class Ledger:
    """Which samples were really used, from what the ranks recorded."""

    epochs: int
    """Complete epochs that were checked."""
    exactly_once: bool | None
    """Every sample once in each of them; None when there is no complete epoch to check."""
    repeated: tuple[int, ...] = ()
    """Some samples that came more than once in an epoch, if there are any."""
    missing: tuple[int, ...] = ()
    """Some samples that never came in a complete epoch."""
    eval_exactly_once: bool | None = None
    """Every evaluation sample once, in every evaluation."""


@dataclass(frozen=True)
class Summary:
    """What `--json` prints."""

    run: str
    name: str
    steps: int
    epochs: int
    ranks: int
    shards: int
    threads: int
    device: str
    sync: bool
    parameters: int
    samples: int
    loss: float
    metrics: dict[str, float]
    samples_seen: int
    samples_per_second: float
    recipe: str
    weights_sha256: str
    fingerprints: list[str]
    seconds: dict[str, float]
    ledger: Ledger
    completely_recorded: bool
    apart: dict[str, float] | None
    """Without synchronisation: how far the ranks' weights are from each other."""
    metrics_by_rank: list[dict[str, float]] | None
    """Without synchronisation: each rank's own model judged."""
    loaded: dict[str, Any] | None = None
    """Pretrained weights: which, who read them, their fingerprint and bytes."""
    storage: dict[str, Any] = field(default_factory=dict)
    """What all ranks asked of the storage, and each of them: requests and bytes."""
    notes: list[str] = field(default_factory=list)
    resumed_from: int | None = None
    """The step that this session went on from; None when the run was not resumed."""

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def summarize(
    folder: RunFolder, job: Job, results: Sequence[RankResult], seconds: dict[str, float]
) -> Summary:
    """Join what the ranks came to. `seconds` are the launcher's own phases."""
    first = results[0]
    train = max(result.seconds["train"] for result in results)
    seen = sum(result.samples_seen for result in results)
    lost = sum(result.lost_events for result in results)
    together = job.team.sync
    notes = list(dict.fromkeys(note for result in results for note in result.notes))
    if lost:
        notes.append(f"{lost} events could not be written: the run is incompletely recorded")
    return Summary(
        run=str(folder.path),
        name=job.name,
        steps=first.steps,
        epochs=first.epochs,
        ranks=len(results),
        shards=job.team.shards,
        threads=job.team.threads,
        device=first.device,
        sync=together,
        parameters=first.parameters,
        samples=first.samples,
        loss=first.loss,
        metrics=first.metrics,
        samples_seen=seen,
        samples_per_second=round(seen / train, 2) if train else 0.0,
        recipe=first.recipe,
        weights_sha256=first.weights_sha256,
        fingerprints=[result.fingerprint for result in results],
        seconds={name: round(value, 3) for name, value in {**seconds, **first.seconds}.items()},
        ledger=read_ledger(folder, first.samples, together),
        completely_recorded=lost == 0,
        apart=None if first.apart is None else asdict(first.apart),
        metrics_by_rank=None if together else [result.metrics for result in results],
        loaded=None if first.loaded is None else {key: vars(first.loaded)[key] for key in _LOADED},
        storage=read_storage(folder, len(results)),
        notes=notes,
        resumed_from=first.start or None,
    )


_LOADED = ("weights", "how", "fingerprint", "bytes")


def read_storage(folder: RunFolder, ranks: int) -> dict[str, Any]:
    """What each rank recorded of its use of the storage, and the sums."""
    by_rank = [{"requests": 0, "bytes": 0} for _ in range(ranks)]
    for rank, used in enumerate(by_rank):
        for event in read_events(folder.events(rank)):
            if isinstance(event, StorageUsed):
                used["requests"] += event.requests
                used["bytes"] += event.bytes
    return {
        "requests": sum(used["requests"] for used in by_rank),
        "bytes": sum(used["bytes"] for used in by_rank),
        "by_rank": by_rank,
    }


def read_ledger(folder: RunFolder, samples: int, together: bool) -> Ledger:
    """Check from the events that every sample was used exactly once in each complete epoch.

    A run may have had several sessions, with other numbers of ranks. What a session did from the next one's start
    on was done again, and counts there.
    """
    marks: Counter[int] = Counter()
    counts: Counter[int] = Counter()
    used: dict[int, Counter[int]] = {}
    judged: dict[int, tuple[int, int, int]] = {}
    starts = {e.session: e.start for e in read_events(folder.events(0)) if isinstance(e, TeamFormed)}
    ends = {of: min((at for later, at in starts.items() if later > of), default=math.inf) for of in starts}
    for path in folder.all_events():
        end = math.inf
        for event in read_events(path):
            if isinstance(event, TeamFormed):
                end = ends.get(event.session, math.inf)
            elif isinstance(event, Stepped | Evaluated) and event.step >= end:
                continue
            elif isinstance(event, Stepped):
                marks[event.epoch] = (marks[event.epoch] + int(event.mark, 16)) & _WRAP
                counts[event.epoch] += event.samples
                used.setdefault(event.epoch, Counter()).update(event.ids or ())
            elif isinstance(event, Evaluated):
                mark, count, _ = judged.get(event.step, (0, 0, 0))
                judged[event.step] = (
                    (mark + int(event.mark, 16)) & _WRAP,
                    count + event.samples,
                    event.samples_of_all,
                )
    complete = [epoch for epoch in counts if counts[epoch] >= samples]
    whole = _mark_of_all(samples)
    repeated = {sample for of_epoch in used.values() for sample, times in of_epoch.items() if times > 1}
    missing = {
        sample
        for epoch in complete
        if marks[epoch] != whole and sum(used[epoch].values()) == counts[epoch]
        for sample in range(samples)
        if sample not in used[epoch]
    }
    right = all(marks[epoch] == whole and counts[epoch] == samples for epoch in complete) and not repeated
    eval_right = None
    if judged and together:
        eval_right = all(count == n and mark == _mark_of_all(n) for mark, count, n in judged.values())
    return Ledger(
        epochs=len(complete),
        exactly_once=right if complete else None,
        repeated=tuple(sorted(repeated)[:10]),
        missing=tuple(sorted(missing)[:10]),
        eval_exactly_once=eval_right,
    )


def _mark_of_all(samples: int) -> int:
    return sum(map(ledger_mark, range(samples))) & _WRAP


_WORDS: dict[Language, dict[str, str]] = {
    "en": {
        "done": "{name}: done in {seconds:.1f} s",
        "team": "team",
        "team_line": "{ranks} rank(s) · {shards} shards · {threads} thread(s) a rank · {device}",
        "model": "model",
        "model_line": "{parameters:,} parameters",
        "loaded": "loaded",
        "loaded_line": "{weights}, {mb:,.1f} MB ({how}), fingerprint {fingerprint}",
        "storage": "storage",
        "storage_line": "{requests:,} requests, {mb:,.1f} MB ({by_rank})",
        "no_storage": "0 requests, 0 bytes: the weights came from the seed",
        "data": "samples",
        "once": "{samples:,} × {epochs} epochs: each exactly once an epoch",
        "not_once": "NOT each exactly once an epoch: repeated {repeated}, missing {missing}",
        "partly": "{seen:,} seen, no complete epoch",
        "unrecorded": "{seen:,} seen (not all recorded, so not checked)",
        "loss": "loss",
        "held_out": "held out",
        "speed": "speed",
        "speed_line": "{speed:,.0f} samples/s over {steps} steps",
        "weights": "weights",
        "same": "all the same",
        "differ": "{kinds} different models: nothing was synchronised",
        "apart": "apart",
        "apart_line": "by up to {largest:.3g} in one weight, {rms:.3g} root mean square",
        "sha": "sha256",
        "recipe": "recipe",
        "files": "files",
        "note": "note",
    },
    "ko": {
        "done": "{name}: {seconds:.1f}초 만에 끝났습니다",
        "team": "팀",
        "team_line": "랭크 {ranks}개 · 샤드 {shards}개 · 랭크마다 스레드 {threads}개 · {device}",
        "model": "모델",
        "model_line": "파라미터 {parameters:,}개",
        "loaded": "가중치 파일",
        "loaded_line": "{weights}, {mb:,.1f} MB ({how}), 지문 {fingerprint}",
        "storage": "스토리지",
        "storage_line": "요청 {requests:,}번, {mb:,.1f} MB ({by_rank})",
        "no_storage": "요청 0번, 0바이트: 가중치는 시드에서 나왔습니다",
        "data": "샘플",
        "once": "{samples:,}개 × {epochs} 에포크: 에포크마다 각각 정확히 한 번",
        "not_once": "정확히 한 번이 아닙니다: 반복 {repeated}, 누락 {missing}",
        "partly": "{seen:,}개를 봄, 완전한 에포크 없음",
        "unrecorded": "{seen:,}개를 봄 (기록이 완전하지 않아 확인하지 못함)",
        "loss": "손실",
        "held_out": "평가",
        "speed": "속도",
        "speed_line": "초당 샘플 {speed:,.0f}개, {steps} 스텝",
        "weights": "가중치",
        "same": "모두 같음",
        "differ": "서로 다른 모델 {kinds}개: 동기화하지 않았습니다",
        "apart": "차이",
        "apart_line": "가중치 하나에서 최대 {largest:.3g}, 제곱평균제곱근 {rms:.3g}",
        "sha": "sha256",
        "recipe": "레시피",
        "files": "파일",
        "note": "참고",
    },
}


def in_words(summary: Summary, language: Language) -> str:
    """The summary for a person, in plain text."""
    word = _WORDS[language]
    facts = summary.as_json()
    rows = [
        (word["team"], word["team_line"].format(**facts)),
        (word["model"], word["model_line"].format(**facts)),
        *_storage_rows(summary, word),
        (word["data"], _samples_line(summary, word)),
        (word["loss"], f"{summary.loss:.6g}"),
        *([(word["held_out"], _metrics_line(summary.metrics))] if summary.metrics else []),
        (word["speed"], word["speed_line"].format(speed=summary.samples_per_second, steps=summary.steps)),
        *_weights_rows(summary, word),
    ]
    if summary.apart is not None:
        rows.append((word["apart"], word["apart_line"].format(**summary.apart)))
    rows += [
        (word["sha"], summary.weights_sha256),
        (word["recipe"], summary.recipe[:16]),
        (word["files"], summary.run),
        *((word["note"], note) for note in summary.notes),
    ]
    head = word["done"].format(name=summary.name, seconds=sum(summary.seconds.values()))
    return "\n".join([head, "", *(f"  {_padded(name)}{text}" for name, text in rows)])


def _storage_rows(summary: Summary, word: dict[str, str]) -> list[tuple[str, str]]:
    if summary.loaded is None:
        nothing_asked = summary.storage.get("requests") == 0
        return [(word["storage"], word["no_storage"])] if nothing_asked else []
    by_rank = ", ".join(f"{used['requests']}" for used in summary.storage["by_rank"])
    used = {"requests": summary.storage["requests"], "mb": summary.storage["bytes"] / 1e6, "by_rank": by_rank}
    return [
        (word["loaded"], word["loaded_line"].format(mb=summary.loaded["bytes"] / 1e6, **summary.loaded)),
        (word["storage"], word["storage_line"].format(**used)),
    ]


def _samples_line(summary: Summary, word: dict[str, str]) -> str:
    ledger = summary.ledger
    if not summary.completely_recorded:
        return word["unrecorded"].format(seen=summary.samples_seen)
    if ledger.exactly_once is None:
        return word["partly"].format(seen=summary.samples_seen)
    if ledger.exactly_once:
        return word["once"].format(samples=summary.samples, epochs=ledger.epochs)
    return word["not_once"].format(repeated=list(ledger.repeated), missing=list(ledger.missing))


def _weights_rows(summary: Summary, word: dict[str, str]) -> list[tuple[str, str]]:
    kinds = len(set(summary.fingerprints))
    verdict = word["same"] if kinds == 1 else word["differ"].format(kinds=kinds)
    rows = []
    for rank, fingerprint in enumerate(summary.fingerprints):
        own = f"  {_metrics_line(summary.metrics_by_rank[rank])}" if summary.metrics_by_rank else ""
        last = rank == len(summary.fingerprints) - 1
        rows.append(
            (
                word["weights"] if rank == 0 else "",
                f"rank {rank}  {fingerprint}{own}{f'  {verdict}' if last else ''}",
            )
        )
    return rows


def _metrics_line(metrics: dict[str, float]) -> str:
    return " · ".join(f"{name} {_metric(name, value)}" for name, value in metrics.items())


def _metric(name: str, value: float) -> str:
    return f"{value:.1%}" if name == "accuracy" else f"{value:.6g}"


def _padded(name: str, width: int = 12) -> str:
    """Korean letters take two columns of a terminal."""
    columns = sum(2 if ord(letter) > 0x1100 else 1 for letter in name)
    return name + " " * max(1, width - columns)

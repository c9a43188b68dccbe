"""A run in numbers and in words, from what its ranks came to. Works without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dure.base.language import Language, as_spoken
from dure.base.run_folder import RunFolder
from dure.config import Job
from dure.data.ledger import Ledger, verdict
from dure.observe.results import RankResult


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
    """Without synchronisation: each rank's own model evaluated."""
    loaded: dict[str, Any] | None = None
    """Pretrained weights: which, who read them, their fingerprint and bytes."""
    storage: dict[str, Any] = field(default_factory=dict)
    """What all ranks asked of the storage, and each of them: requests and bytes."""
    audited: int | None = None
    """Shards that another rank computed again, in this session; None where no step was to be audited."""
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
        ledger=verdict([result.ledger for result in results], first.samples, together=together),
        completely_recorded=lost == 0,
        apart=None if first.apart is None else asdict(first.apart),
        metrics_by_rank=None if together else [result.metrics for result in results],
        loaded=None if first.loaded is None else {key: vars(first.loaded)[key] for key in _LOADED},
        storage=_storage(results),
        audited=sum(result.audited for result in results) if job.train.audit else None,
        notes=notes,
        resumed_from=first.start or None,
    )


_LOADED = ("weights", "how", "fingerprint", "bytes")


def _storage(results: Sequence[RankResult]) -> dict[str, Any]:
    """What each rank asked of the storage, and the sums."""
    by_rank = [
        {"requests": requests, "bytes": nbytes} for requests, nbytes in (one.storage for one in results)
    ]
    return {
        "requests": sum(used["requests"] for used in by_rank),
        "bytes": sum(used["bytes"] for used in by_rank),
        "by_rank": by_rank,
    }


_WORDS: dict[Language, dict[str, str]] = {
    "en": {
        "done": "{name}: done in {seconds:.1f} s",
        "team": "team",
        "team_line": "{ranks} rank(s) · {shards} shards · {threads} thread(s) per rank · {device}",
        "model": "model",
        "model_line": "{parameters:,} parameters",
        "loaded": "loaded",
        "loaded_line": "{weights}, {mb:,.1f} MB ({how}), fingerprint {fingerprint}",
        "storage": "storage",
        "storage_line": "{requests:,} requests, {mb:,.1f} MB ({by_rank})",
        "no_storage": "0 requests, 0 bytes: the weights came from the seed",
        "data": "samples",
        "once": "{samples:,} × {epochs} epochs: each exactly once per epoch",
        "not_once": "NOT each exactly once per epoch: repeated {repeated}, missing {missing}",
        "not_once_unnamed": "NOT each exactly once per epoch; which ones cannot be told: more than one",
        "partly": "{seen:,} seen, no complete epoch",
        "loss": "loss",
        "held_out": "held out",
        "speed": "speed",
        "speed_line": "{speed:,.0f} samples/s over {steps} steps",
        "weights": "weights",
        "same": "all the same",
        "differ": "{kinds} different models: nothing was synchronised",
        "apart": "apart",
        "apart_line": "by up to {largest:.3g} in one weight, {rms:.3g} root mean square",
        "audit": "audit",
        "audit_line": "{audited:,} shards computed again by another rank and compared",
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
        "not_once_unnamed": "정확히 한 번이 아닙니다. 둘 이상이라 어느 샘플인지는 알 수 없습니다",
        "partly": "{seen:,}개를 봄, 완전한 에포크 없음",
        "loss": "손실",
        "held_out": "평가",
        "speed": "속도",
        "speed_line": "초당 샘플 {speed:,.0f}개, {steps} 스텝",
        "weights": "가중치",
        "same": "모두 같음",
        "differ": "서로 다른 모델 {kinds}개: 동기화하지 않았습니다",
        "apart": "차이",
        "apart_line": "가중치 하나에서 최대 {largest:.3g}, 제곱평균제곱근 {rms:.3g}",
        "audit": "감사",
        "audit_line": "샤드 {audited:,}개를 다른 랭크가 다시 계산해 비교",
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
    if summary.audited is not None:
        rows.append((word["audit"], word["audit_line"].format(audited=summary.audited)))
    rows += [
        (word["sha"], summary.weights_sha256),
        (word["recipe"], summary.recipe[:16]),
        (word["files"], summary.run),
        *((word["note"], as_spoken(note, language)) for note in summary.notes),
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
    if ledger.exactly_once is None:
        return word["partly"].format(seen=summary.samples_seen)
    if ledger.exactly_once:
        return word["once"].format(samples=summary.samples, epochs=ledger.epochs)
    if not ledger.repeated and not ledger.missing:
        return word["not_once_unnamed"]
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

"""The outlook in words and as a picture, in English and Korean."""

from __future__ import annotations

from collections.abc import Sequence

from dure.base.language import Language
from dure.plan.outlook import Outlook, Value

WIDTH = 40
"""Letters of the longest bar."""
_EIGHTHS = " ▏▎▍▌▋▊▉"
_PHASES = {"data": "d", "compute": "█", "wait": "w", "exchange": "x", "update": "u"}

_WORDS: dict[Language, dict[str, str]] = {
    "en": {
        "question": "{n} × as fast on {n} nodes?",
        "yes": "Nearly: {speedup} ×",
        "no": "No: {speedup} ×",
        "nodes": "nodes",
        "node": "{n} node(s)",
        "ranks": "ranks",
        "step": "step",
        "speed": "samples/s",
        "speedup": "speed-up",
        "efficiency": "eff.",
        "memory": "GiB/rank",
        "save": "save every",
        "hours": "to finish",
        "cost": "USD",
        "step_head": "One step:  █ compute  x exchange  w wait for the slowest  u update  d data",
        "limits": "On {n} node(s): {limit}",
        "limit_shards": "too few shards: {busy} of {ranks} ranks have one, or not all have as many",
        "limit_cores": "the node's cores are crowded: its ranks slow each other down",
        "limit_exchange": "the exchange of gradients limits it: {part:.0%} of the step, {mb:,.1f} MB sent by each node",
        "limit_update": "the optimizer's step limits it, which every rank does for all weights: {part:.0%} of the step",
        "limit_data": "waiting for samples limits it: {part:.0%} of the step",
        "limit_wait": "waiting for the slowest rank limits it: {part:.0%} of the step",
        "limit_failures": "saving and failures limit it: {overhead:.1%} more time",
        "limit_compute": "nothing but computation",
        "help": "What helps most: {help}: {gain:+.0%} samples/s",
        "help_shards": "team.shards = a multiple of {ranks} (other bits)",
        "help_network": "a network that is four times as fast",
        "help_wire": 'reduce.wire = "bf16" (other bits)',
        "help_shard_optimizer": "train.shard_optimizer = true (the same bits)",
        "help_workers": "data.workers, so that samples are read beforehand (the same bits)",
        "help_batch": "twice the data.global_batch (other bits, another training)",
        "help_none": "",
        "failures": "Failures: one every {mtbf:,.0f} h expected; save every {steps:,} steps ({seconds}); "
        "one failure costs {lost}; {overhead:.2%} more time in all",
        "memory_bad": "Memory: {memory:.1f} GiB a rank do not fit",
        "ranges": "In brackets: the range that is expected. Measured on {host} ({cores} rank(s) at once).",
        "scaled": "Computation was scaled from {host} to {machine} by their peaks: take one measured step there "
        "(dure plan --measure) before you believe it.",
    },
    "ko": {
        "question": "노드 {n}개면 {n}배 빠른가?",
        "yes": "거의 그렇습니다: {speedup}배",
        "no": "아닙니다: {speedup}배",
        "nodes": "노드",
        "node": "노드 {n}개",
        "ranks": "랭크",
        "step": "스텝",
        "speed": "샘플/초",
        "speedup": "속도 배율",
        "efficiency": "효율",
        "memory": "GiB/랭크",
        "save": "저장 간격",
        "hours": "끝까지",
        "cost": "USD",
        "step_head": "한 스텝:  █ 계산  x 그래디언트 교환  w 가장 느린 랭크 기다림  u 갱신  d 데이터",
        "limits": "노드 {n}개에서: {limit}",
        "limit_shards": "샤드가 모자랍니다: 랭크 {ranks}개 중 {busy}개만 샤드를 갖거나, 나눈 수가 고르지 않습니다",
        "limit_cores": "노드의 코어가 모자라 랭크들이 서로를 늦춥니다",
        "limit_exchange": "그래디언트 교환이 한계입니다: 스텝의 {part:.0%}, 노드마다 스텝당 {mb:,.1f} MB를 보냅니다",
        "limit_update": "옵티마이저 갱신이 한계입니다. 모든 랭크가 모든 가중치를 갱신합니다: 스텝의 {part:.0%}",
        "limit_data": "샘플을 기다리는 시간이 한계입니다: 스텝의 {part:.0%}",
        "limit_wait": "가장 느린 랭크를 기다리는 시간이 한계입니다: 스텝의 {part:.0%}",
        "limit_failures": "저장과 고장이 한계입니다: 시간이 {overhead:.1%} 더 듭니다",
        "limit_compute": "계산 말고는 한계가 없습니다",
        "help": "가장 도움이 되는 변화: {help}: 초당 샘플 {gain:+.0%}",
        "help_shards": "team.shards를 {ranks}의 배수로 (비트가 달라집니다)",
        "help_network": "네 배 빠른 네트워크",
        "help_wire": 'reduce.wire = "bf16" (비트가 달라집니다)',
        "help_shard_optimizer": "train.shard_optimizer = true (비트는 그대로)",
        "help_workers": "data.workers로 샘플을 미리 읽기 (비트는 그대로)",
        "help_batch": "data.global_batch를 두 배로 (비트도 학습도 달라집니다)",
        "help_none": "",
        "failures": "고장: {mtbf:,.0f}시간에 한 번 예상. {steps:,} 스텝({seconds})마다 저장하세요. "
        "고장 한 번에 {lost}을(를) 잃고, 모두 합쳐 시간이 {overhead:.2%} 더 듭니다",
        "memory_bad": "메모리: 랭크마다 {memory:.1f} GiB가 들어가지 않습니다",
        "ranges": "괄호 안은 예상 범위입니다. {host}에서 측정했습니다(한 번에 랭크 {cores}개).",
        "scaled": "계산 시간은 {host}에서 잰 것을 두 기계의 최고 성능 비로 {machine}에 옮긴 것입니다. "
        "믿기 전에 그 기계에서 한 번 재세요(dure plan --measure).",
    },
}


def in_words(
    outlooks: Sequence[Outlook], language: Language, *, host: str, cores: int, machine: str | None
) -> str:
    """Question and answer, the picture, the table, what limits and what helps."""
    word = _WORDS[language]
    last = max(outlooks, key=lambda one: one.nodes)
    lines = [_answer(last, word)] if last.nodes > 1 else []
    lines += ["", *_bars(outlooks, word), "", *_table(outlooks, word), "", *_steps(outlooks, word), ""]
    for one in outlooks:
        lines.append(word["limits"].format(n=one.nodes, limit=_limit(one, word)))
        if one.help.what != "none":
            what = word[f"help_{one.help.what}"].format(ranks=one.ranks)
            lines.append("  " + word["help"].format(help=what, gain=one.help.gain))
        if not one.fits:
            lines.append("  " + word["memory_bad"].format(memory=one.memory_gib.value))
    expected = last.failures
    lines += [
        "",
        word["failures"].format(
            mtbf=expected.team_mtbf_hours,
            steps=expected.interval_steps,
            seconds=duration(expected.interval_seconds),
            lost=duration(expected.lost_seconds),
            overhead=expected.overhead,
        ),
        word["ranges"].format(host=host, cores=cores),
    ]
    if machine is not None:
        lines.append(word["scaled"].format(host=host, machine=machine))
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Short: 85 ms, 12.3 s, 4.0 min, 6.1 h."""
    for limit, unit, each in ((0.9995, "ms", 1e-3), (120, "s", 1.0), (7200, "min", 60.0)):
        if seconds < limit:
            return f"{seconds / each:.{0 if unit == 'ms' and seconds > 0.01 else 1}f} {unit}"
    return f"{seconds / 3600:,.1f} h"


def _answer(last: Outlook, word: dict[str, str]) -> str:
    answer = word["yes" if last.speedup.value >= 0.9 * last.nodes else "no"]
    return f"{word['question'].format(n=last.nodes)}  {answer.format(speedup=_ranged(last.speedup, 1))}"


def _bars(outlooks: Sequence[Outlook], word: dict[str, str]) -> list[str]:
    """Speed-up as a bar, and what is missing to an ideal one as dots."""
    most = max(one.nodes for one in outlooks)
    names = [word["node"].format(n=one.nodes) for one in outlooks]
    wide = max(_columns(name) for name in names)
    lines = []
    for name, one in zip(names, outlooks, strict=True):
        reached = _bar(one.speedup.value / most * WIDTH)
        missing = "·" * max(0, round(one.nodes / most * WIDTH) - len(reached))
        lines.append(
            f"  {name}{' ' * (wide - _columns(name))}  {reached}{missing} {_ranged(one.speedup, 2)} ×"
        )
    return lines


def _steps(outlooks: Sequence[Outlook], word: dict[str, str]) -> list[str]:
    """One step of each, as long as it takes."""
    longest = max(one.step_seconds.value for one in outlooks)
    lines = [word["step_head"]]
    for one in outlooks:
        bar = "".join(
            _PHASES[name] * round(seconds / longest * WIDTH) for name, seconds in one.phases.items()
        )
        shown = ", ".join(
            f"{name} {duration(seconds)}" for name, seconds in one.phases.items() if seconds > 0.001 * longest
        )
        lines.append(f"  {one.nodes:>5}  {bar:<{WIDTH + 2}} {shown}")
    return lines


def _table(outlooks: Sequence[Outlook], word: dict[str, str]) -> list[str]:
    priced = any(one.usd is not None for one in outlooks)
    heads = ["nodes", "ranks", "step", "speed", "speedup", "efficiency", "memory", "save", "hours"]
    rows = [[word[head] for head in heads + (["cost"] if priced else [])]]
    for one in outlooks:
        row = [
            str(one.nodes),
            str(one.ranks),
            f"{duration(one.step_seconds.value)} ({duration(one.step_seconds.low)} – "
            f"{duration(one.step_seconds.high)})",
            _ranged(one.samples_per_second, 1),
            _ranged(one.speedup, 2),
            f"{one.efficiency:.0%}",
            f"{one.memory_gib.value:.2f}",
            duration(one.failures.interval_seconds),
            " – ".join(duration(hours * 3600) for hours in (one.hours.low, one.hours.high)),
        ]
        if priced:
            row.append("" if one.usd is None else _ranged(one.usd, 2))
        rows.append(row)
    wide = [max(_columns(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  " + "  ".join(" " * (wide[at] - _columns(cell)) + cell for at, cell in enumerate(row))
        for row in rows
    ]


def _limit(one: Outlook, word: dict[str, str]) -> str:
    phase = {"exchange": "exchange", "update": "update", "data": "data", "wait": "wait"}.get(one.limit)
    return word[f"limit_{one.limit}"].format(
        busy=one.busy_ranks,
        ranks=one.ranks,
        part=one.phases[phase] / one.step_seconds.value if phase else 0.0,
        mb=one.sent_mb,
        overhead=one.failures.overhead,
    )


def _ranged(figure: Value, digits: int) -> str:
    return f"{figure.value:,.{digits}f} ({figure.low:,.{digits}f} – {figure.high:,.{digits}f})"


def _bar(letters: float) -> str:
    whole, part = divmod(max(letters, 0.0), 1.0)
    return "█" * int(whole) + _EIGHTHS[int(part * 8)].strip()


def _columns(text: str) -> int:
    """Korean letters take two columns of a terminal."""
    return sum(2 if ord(letter) > 0x1100 and not 0x2000 <= ord(letter) < 0x2600 else 1 for letter in text)

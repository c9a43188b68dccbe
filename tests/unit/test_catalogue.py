"""Runtime messages in Korean: the catalogue has all of them, and finds them again in finished messages."""

import os
import re
import string
import subprocess
import sys
import time
from collections import Counter

import pytest
from support.messages import all_messages, all_texts

from dure.base import language
from dure.base.catalogue import FOLDER, entries, read, translated
from dure.base.errors import UsageError

OTHERS = "other_programs.po"
"""What the system and pydantic say."""
HANGUL = re.compile("[가-힣]")


def values_of(template: str) -> Counter:
    return Counter(field for _, field, _, _ in string.Formatter().parse(template) if field is not None)


def test_every_message_of_the_source_has_a_korean_one():
    known = {entry.english for entry in entries()}
    missing = [
        f'{message.place}: add to base/ko/{message.room}.po: msgid "{message.template}"'
        for message in all_messages()
        if message.template not in known
    ]
    assert not missing, "\n".join(missing)


def test_every_message_of_the_catalogue_is_in_the_source():
    texts = all_texts()
    stale = [
        f"{path.name}: {entry.english}"
        for path in FOLDER.glob("*.po")
        if path.name != OTHERS
        for entry in read(path)
        if entry.english not in texts
    ]
    assert not stale, "\n".join(stale)


def test_korean_messages_are_korean_have_all_values_and_stand_there_once():
    for entry in entries():
        assert HANGUL.search(entry.korean) or len(entry.english) < 10, entry
        assert values_of(entry.korean) <= values_of(entry.english), entry
    twice = [english for english, count in Counter(e.english for e in entries()).items() if count > 1]
    assert not twice
    # A plural's s, and the second name of one file: what Korean has no use for.
    fewer = [entry.english for entry in entries() if values_of(entry.korean) != values_of(entry.english)]
    assert fewer == ["; {0} wait{1} for {2} in {3}"]


def test_every_message_is_found_again_with_values_in_it():
    wrong = []
    for entry in entries():
        values = [f"/v{number}" for number in range(entry.english.count("{"))]
        message = entry.english.format(*values)
        korean = translated(message)
        if len(entry.literals) > 1 and entry.letters < 2:
            continue
        if korean == message or not all(korean.count(f"/v{name}") for name in values_of(entry.korean)):
            wrong.append((entry.english, korean))
    assert not wrong


@pytest.mark.parametrize(
    ("english", "korean"),
    [
        (
            "there is no job file a b.toml; see `dure train --help` for one to start from",
            "작업 파일 a b.toml이(가) 없습니다. 처음 쓸 예는 `dure train --help`에 있습니다",
        ),
        # Parts of a message are messages.
        (
            "job.toml: unknown key train.lrr; did you mean train.lr?",
            "job.toml: 모르는 키 train.lrr. train.lr을(를) 뜻했나요?",
        ),
        (
            "rank 2 on node-b was killed by SIGKILL: out of memory, or someone's kill -9. Its output: /r/rank-2.log",
            "node-b의 랭크 2가 SIGKILL에 의해 강제 종료되었습니다: 메모리 부족이거나 누군가의 kill -9입니다. "
            "출력: /r/rank-2.log",
        ),
        (
            "rank 2 on b failed: rank 1 lost rank 2 in the exchange of gradients: process 33 is gone",
            "b의 랭크 2가 실패했습니다: 랭크 1이 그래디언트 교환 중에 랭크 2를 잃었습니다: 프로세스 33이 없어졌습니다",
        ),
        (
            "/s: cannot write checkpoints/x: it is read-only; a job writes in checkpoints/ only",
            "/s: checkpoints/x에 쓸 수 없습니다: 읽기 전용입니다. 작업은 checkpoints/에만 씁니다",
        ),
        ("goes on from step 3 of 10", "스텝 3/10부터 이어서 합니다"),
        # Particles follow the last sound where it is known: digits and Hangul.
        ("--ranks is 0; use 1 or more", "--ranks가 0입니다. 1 이상이어야 합니다"),
        (
            "rank 3 has not ended 5 s after the others",
            "랭크 3이 다른 랭크보다 5초가 지나도록 끝나지 않았습니다",
        ),
        (
            "rank 4 has not ended 5 s after the others",
            "랭크 4가 다른 랭크보다 5초가 지나도록 끝나지 않았습니다",
        ),
        ("사진 is missing", "사진이 없습니다"),
        # Not ours: as it is.
        ("KeyError: 'weight'", "KeyError: 'weight'"),
        ("이미 한국어입니다", "이미 한국어입니다"),
        ("", ""),
    ],
)
def test_a_finished_message_is_translated(english, korean):
    assert translated(english) == korean


def test_a_long_and_strange_text_takes_no_long_time():
    started = time.process_time()
    for text in ("; " * 900, ": is " * 390, "rank 1 " * 280, "x" * 100_000):
        assert translated(text)
    assert time.process_time() - started < 5


@pytest.fixture
def clean(monkeypatch):
    monkeypatch.setattr(language, "_spoken", None)
    for name in ("DURE_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_language_is_the_options_then_dure_lang_then_the_locales(clean):
    assert language.chosen_language(None) == "en"
    clean.setenv("LANG", "ko_KR.UTF-8")
    assert language.chosen_language(None) == "ko"
    clean.setenv("DURE_LANG", "en")
    assert language.chosen_language(None) == "en"
    assert language.chosen_language("ko") == "ko"
    language.speak("ko")
    assert language.chosen_language(None) == "ko"
    assert language.chosen_language("en") == "en"
    with pytest.raises(UsageError, match="--lang fr: dure speaks en and ko"):
        language.chosen_language("fr")
    language._spoken = None
    clean.setenv("DURE_LANG", "fr")
    with pytest.raises(UsageError, match="DURE_LANG=fr: dure speaks en and ko"):
        language.chosen_language(None)


def test_a_command_ends_with_its_error_in_the_chosen_language(tmp_path):
    def said(*arguments, **environment):
        env = {
            name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "DURE"))
        }
        ran = subprocess.run(
            [sys.executable, "-m", "dure", *arguments],
            env={**env, "PYTHONUTF8": "1", **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert ran.returncode == 2
        return ran.stderr

    korean = "dure: 작업 파일 no.toml이(가) 없습니다. 처음 쓸 예는 `dure train --help`에 있습니다\n"
    assert said("train", "no.toml").startswith("dure: there is no job file no.toml;")
    assert said("train", "no.toml", "--lang", "ko") == korean
    assert said("--lang", "ko", "train", "no.toml") == korean
    assert said("train", "no.toml", DURE_LANG="ko") == korean
    assert said("train", "no.toml", LC_ALL="ko_KR.UTF-8") == korean
    assert said("train", "no.toml", "--lang", "en", DURE_LANG="ko").startswith("dure: there is no job file")

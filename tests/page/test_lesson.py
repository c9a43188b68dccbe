"""The lesson: every chapter in both languages, live and as one file; its experiments really start ranks."""

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from support.leftovers import wait_until

from dure.base.errors import UsageError
from dure.base.run_folder import RunFolder
from dure.tools.lesson.experiments import EXPERIMENTS, Command, Experiment
from dure.tools.lesson.one_file import recordings
from dure.tools.lesson.running import Running

CHAPTERS = range(1, 12)
TITLES = {
    "ko": "학습이란|산 위의 화살표|모두 같은 복사본|사진 400장|네 학생|손으로|왜 순서|어디서 오나|두 노드|정말 8배|"
    "무언가 죽으면",
    "en": "What learning is|arrow on a mountain|Copies|Splitting 400|four students|by hand|order matters|Where weights|"
    "Two nodes|Really 8 times|When something dies",
}


@contextlib.contextmanager
def lesson(*arguments):
    command = [sys.executable, "-m", "dure", "lesson", "--json", "--port=0", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "LC_ALL": "C.UTF-8"}
    ) as server:
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.terminate()
            ended = server.wait(120)
    assert ended == 0


@pytest.fixture(scope="module")
def live():
    with lesson() as url:
        yield url


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """As one file, opened from disk."""
    path = tmp_path_factory.mktemp("lesson") / "lesson.html"
    subprocess.run([sys.executable, "-m", "dure", "lesson", "-o", str(path)], check=True, capture_output=True)
    return path.as_uri()


def open_chapter(opened, number, language):
    opened.page.goto("about:blank")
    opened.page.goto(f"{opened.address}#{number}")
    opened.page.click(f"#languages button[lang={language}]")
    assert TITLES[language].split("|")[number - 1] in opened.page.inner_text("h1")
    return opened.page


@pytest.mark.parametrize("language", ["ko", "en"])
@pytest.mark.parametrize("where", ["live", "saved"])
def test_every_chapter_opens_without_an_error_and_keeps_nobody_out(request, opened, where, language):
    page = opened(request.getfixturevalue(where), color_scheme="dark" if language == "en" else "light")
    for number in CHAPTERS:
        open_chapter(page, number, language)
        assert page.findings() == [], f"chapter {number}"
        assert not page.has_overflow(), f"chapter {number}"


def test_on_a_phone_nothing_is_cut_off(saved, opened):
    page = opened(saved, viewport={"width": 390, "height": 800})
    for number in CHAPTERS:
        open_chapter(page, number, "ko")
        assert not page.has_overflow(), f"chapter {number}"


def test_the_numbers_of_the_documents_are_there(saved, opened):
    """Documents 000, 001 and 003: each computed on the page, in float32."""
    page = opened(saved)
    assert {"0.5", "0.3", "0.2"} <= numbers(open_chapter(page, 1, "ko"))
    shown = open_chapter(page, 6, "ko")
    assert {"0.65", "0.25", "0.45"} <= numbers(shown)
    assert {"0.8", "0.6", "0.7", "0.5"} == {
        cell.input_value() for cell in shown.query_selector_all("td:nth-child(2) input")
    }
    shown.click("button:has-text('고양이 모델')")
    assert {"0.2 → 0.5", "0.5 → 0.7", "0.3 → 0.5"} <= set(
        re.findall(r"[\d.]+ → [\d.]+", shown.inner_text("main"))
    )
    open_chapter(page, 4, "ko")
    page.page.click("button:has-text('덩어리로')")
    blocks = page.page.inner_text("main")
    assert all(told in blocks for told in ("#1 – #100", "#101 – #200", "#201 – #300", "#301 – #400"))
    shown = open_chapter(page, 4, "ko")
    assert "0, 4, 8, 12, 16" in shown.inner_text("main")
    shown.click("button:has-text('100장')")
    assert shown.inner_text(".figure >> nth=0").split().count("25") == 4
    assert all(told in shown.inner_text("main") for told in ("1, 5, 9", "2, 6, 10", "3, 7, 11"))
    shown.click("button:has-text('덩어리로')")
    parts = shown.inner_text("main")
    assert all(told in parts for told in ("#1 – #25", "#26 – #50", "#51 – #75", "#76 – #100"))
    arrows = open_chapter(page, 2, "ko")
    assert {"10", "5"} <= set(re.findall(r"(\d+) m\b", arrows.inner_text("main")))
    assert re.search(r"귀\s+\+0\.7\s+0\.9\s+꼬리\s+−0\.3\s+0\.3", arrows.inner_text("table"))
    arrows.click("button:has-text('+0.5, −0.3')")
    assert re.search(r"\+0\.5\s+0\.7\s.*−0\.3\s+0\.3", arrows.inner_text("table"), re.DOTALL)


def numbers(page):
    return set(re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", page.inner_text("main")))


@pytest.mark.parametrize(
    ("number", "right", "wrong"),
    [
        (1, "0.5", "0.4"),
        (2, "-0.44", "0.44"),
        (3, "84", "96"),
        (4, "134", "133"),
        (5, "100", "400"),
        (6, "112", "56"),
        (7, "16777216", "16777217"),
        (8, "4000", "500"),
        (9, "5", "2"),
        (10, "5.9", "8"),
        (11, "3", "5"),
    ],
)
def test_a_question_computes_its_answer(saved, opened, number, right, wrong):
    page = open_chapter(opened(saved), number, "en")
    for given, words in ((right, "Right!"), (wrong, "Not quite")):
        page.fill(".question input", given)
        page.click(".question button")
        assert words in page.inner_text(".question .answer")


def test_the_lesson_is_used_with_the_keyboard_alone(saved, opened):
    page = open_chapter(opened(saved, reduced_motion="reduce"), 4, "en")
    focused = (
        "document.activeElement.closest('button,input,a,main')?.innerText ?? document.activeElement.tagName"
    )
    assert page.evaluate(focused) == "English"  # whoever switches the language is still there
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert page.evaluate(focused) == "한국어"
    assert TITLES["ko"].split("|")[3] in page.inner_text("h1")
    page.focus("#skip")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert TITLES["ko"].split("|")[3] in page.inner_text("h1")  # the same chapter
    page.focus(".figure button >> nth=1")
    page.keyboard.press("Space")
    assert page.evaluate(focused) == "덩어리로"
    assert "#101 – #200" in page.inner_text("main")
    page.focus("input[type=range]")
    page.keyboard.press("ArrowRight")
    assert "#1 – #80" in page.inner_text("main")
    page.focus(".question input")
    page.keyboard.type("134")
    page.keyboard.press("Enter")
    assert "맞아요" in page.inner_text(".question .answer")
    assert page.evaluate("document.getAnimations().length") == 0


def test_what_is_changed_changes_the_drawing(saved, opened):
    page = open_chapter(opened(saved), 7, "en")
    before = page.inner_text(".figure table")
    page.fill(".figure input >> nth=0", "1e8")
    assert page.inner_text(".figure table") != before


def test_ranks_that_are_asked_for_copies_answer_with_one_fingerprint(live, opened):
    page = open_chapter(opened(live), 3, "en")
    page.click("button:has-text('by broadcast')")
    page.click("button:has-text('Do it on 4 ranks')")
    page.wait_for_selector(".badge.live", timeout=240_000)
    page.wait_for_selector("text=All 4 fingerprints are equal", timeout=240_000)
    made = {row.inner_text() for row in page.query_selector_all("table.nums td:nth-child(2)")}
    assert len(made) == 4  # each made its own before


@pytest.mark.soak  # on a busy machine the button may come too early or too late for the rank
def test_a_rank_that_is_killed_from_the_lesson_comes_back_with_the_same_bits(live, opened):
    page = open_chapter(opened(live), 11, "ko")
    page.click("button:has-text('랭크 4개로 학습 시작')")
    page.wait_for_selector(".badge.live", timeout=240_000)
    page.wait_for_selector(".figure svg circle", state="attached", timeout=240_000)  # a step is drawn
    page.click("[data-kill='2']")
    page.wait_for_selector("text=rank 2이(가) 죽은 것을 알아챘고", timeout=240_000)
    page.wait_for_selector("text=가중치는 비트까지 같습니다", timeout=400_000)


LATE = """
import json, os, sys, time
time.sleep(1.5)
with open(sys.argv[1], "w") as file:
    file.write(json.dumps({"v": 2, "kind": "team", "pid": os.getpid()}) + chr(10))
time.sleep(600)
"""


def test_a_rank_that_is_to_be_killed_before_it_has_joined_is_killed_when_it_has(monkeypatch):
    """What a rank records is in its file a little later than the page shows a step; the button must not be lost."""

    def commands(folder):
        events = RunFolder(folder / "run").events(2)
        events.parent.mkdir(parents=True)
        yield Command("late", (sys.executable, "-c", LATE, str(events)), run=folder / "run")

    monkeypatch.setitem(EXPERIMENTS, "late", Experiment(commands))
    running = Running(1, "late", {})
    try:
        wait_until(lambda: running.told(0)["command"] == "late", "its command", 60)
        pid = running.kill(2)
        wait_until(lambda: running.told(0)["state"] == "failed", "its end", 60)
        with pytest.raises(UsageError, match="nothing trains"):
            running.kill(2)
    finally:
        running.close()
    assert pid > 1


def ask(url, body, **headers):
    given = {"content-type": "application/json", "x-dure-lesson": "1", "origin": url.rstrip("/"), **headers}
    wanted = {name: value for name, value in given.items() if value is not None}
    request = urllib.request.Request(f"{url}api/experiments", data=body, headers=wanted, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b'{"name": "copies"}', {"origin": "http://evil.example"}, 403),
        (b'{"name": "copies"}', {"x-dure-lesson": None}, 403),
        (b'{"name": "copies"}', {"origin": None}, 403),
        (b'{"name": "copies"}', {"host": "evil.example"}, 421),
        (b'{"name": "rm"}', {}, 400),
        (b'{"name": "copies", "arguments": {"how": "seed; rm -rf /"}}', {}, 400),
        (b'{"name": "copies", "arguments": {"ranks": true}}', {}, 400),
        (b'{"name": "copies", "arguments": {"folder": "/"}}', {}, 400),
        (b"[" * 4000, {}, 400),
        (b"x" * 10_000, {}, 400),
        (b"[1]", {}, 400),
    ],
)
def test_strangers_and_nonsense_start_nothing(live, body, headers, status):
    assert ask(live, body, **headers)[0] == status


@pytest.mark.parametrize(
    "path", ["../../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd", "chapters", "lesson.py", "api/experiments/99"]
)
def test_paths_lead_nowhere_else(live, path):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{live}{path}", timeout=60)
    with refused.value:
        assert refused.value.code in (400, 404)


def test_a_lesson_that_ends_leaves_neither_ranks_nor_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with lesson() as url:
        assert ask(url, b'{"name": "kill"}')[0] == 200
        assert ask(url, b'{"name": "copies"}') == (
            400,
            '{"error":"another experiment is still running; wait for its end, or stop it"}',
        )
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("dure-lesson")] == []


def test_the_recorded_kill_shows_how_the_ranks_went_back_and_on():
    """Steps over time of rank 0: up to the kill, back to the state in memory, and to the end; in peace never back."""
    told = recordings()["kill"]
    [restart] = told["restarts"]["disturbed"]
    first, second = (
        [step for _, step, of in told["progress"]["disturbed"] if of == session] for session in (1, 2)
    )
    assert restart["step"] <= first[-1] <= restart["step"] + 5
    assert second[0] == restart["step"] + 1
    assert second[-1] == 250
    assert [(step, of) for _, step, of in told["progress"]["peace"]][-1] == (250, 1)


def test_every_recording_says_when_how_and_where_it_was_made():
    told = recordings()
    assert set(told) == set(EXPERIMENTS)
    for name, each in told.items():
        assert each["state"] == "done"
        assert each["recorded"]["command"] == f"tools/record-lesson {name}"
        assert each["recorded"]["date"]
        assert each["recorded"]["machine"]
        assert not re.search(r"/(tmp|home|root|work|usr)/", json.dumps(each)), name

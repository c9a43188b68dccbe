"""Every view, in both languages, of a live run and of a saved report, in a real browser."""

import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from support.leftovers import wait_until

from dure.tools.bench import page_cost

VIEWS = ("now", "ranks", "samples", "proof", "compare")
WORDS = {
    "en": {"now": "The team", "ranks": "Who waits for whom", "samples": "by rank", "proof": "Checkpoints",
           "compare": "What differs in their recipes"},
    "ko": {"now": "있었던 일", "ranks": "누가 누구를 기다리나", "samples": "에포크 안의 자리와 랭크",
           "proof": "체크포인트", "compare": "레시피에서 다른 점"},
}  # fmt: skip


def test_a_rank_that_is_slow_in_backward_is_named_while_it_trains(watched, address, opened):
    page = opened(address, locale="en-GB")
    page.show("now")
    assert (
        page.page.evaluate("document.getAnimations().length") == 0
    )  # each has the browser draw without an end
    assert page.page.inner_text(".pill").strip() == "running"
    page.page.wait_for_selector("text=Rank 1 holds the others up")
    page.show("ranks")
    page.page.wait_for_selector("[data-verdict='1']")
    words = page.page.inner_text("[data-verdict]")
    milliseconds = float(words.split("wait ")[1].split("\u00a0ms")[0])
    assert 150 < milliseconds < 600, words
    before = page.page.get_attribute("canvas", "data-drawn")
    wait_until(lambda: page.page.get_attribute("canvas", "data-drawn") != before, "what is new")
    assert watched.process.poll() is None


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_every_view_of_a_live_run_opens_in_both_languages(watched, address, opened, lang):
    page = opened(address, locale="ko-KR" if lang == "ko" else "en-GB")
    for view in VIEWS:
        assert WORDS[lang][view] in page.show(view), view
        assert page.page.get_attribute("html", "lang") == lang
        assert not page.has_overflow(), view
    assert watched.process.poll() is None, "it was to be watched while it trains"


def test_every_view_of_a_finished_run_keeps_nobody_out(finished, address, opened):
    for theme, size in (("light", (1200, 900)), ("dark", (390, 844))):
        page = opened(
            address, locale="ko-KR", color_scheme=theme, viewport={"width": size[0], "height": size[1]}
        )
        for view in VIEWS:
            page.show(view)
            assert page.findings() == [], (view, theme)
            assert not page.has_overflow(), (view, size)
    proof = page.show("proof")
    assert finished["weights_sha256"] in proof
    assert f"{finished['audited']}번 비교, 모두 같음" in proof
    assert page.page.inner_text(".pill").strip() == "끝남"


def test_the_page_is_used_with_the_keyboard_and_in_both_languages(finished, address, opened):
    page = opened(address, locale="en-GB", reduced_motion="reduce")
    page.show("now")
    page.page.focus("#tab-now")
    page.page.keyboard.press("ArrowRight")
    page.page.wait_for_selector("#tab-ranks[aria-selected=true]:focus")
    canvas = page.page.locator("canvas[data-view=ranks]")
    page.page.wait_for_selector("canvas[data-drawn]")
    canvas.press("+")
    page.page.wait_for_selector("canvas[data-drawn='75-225']")
    canvas.press("+")
    page.page.wait_for_selector("canvas[data-drawn='113-188']")
    canvas.press("ArrowLeft")
    page.page.wait_for_selector("canvas[data-drawn='98-173']")
    canvas.press("0")
    page.page.wait_for_selector("canvas[data-drawn='0-300']")
    page.page.click("text=한국어")
    page.page.wait_for_selector("text=누가 누구를 기다리나")
    page.page.reload()
    page.page.wait_for_selector("text=누가 누구를 기다리나")


def test_nothing_moves_and_nothing_is_drawn_while_nothing_happens(finished, address, opened):
    """An animation has the browser draw 60 times a second, beside the ranks; so has a page that draws what it has."""
    page = opened(address, locale="en-GB")
    page.page.add_init_script(
        "window.fills = 0; for (const name of ['fillRect', 'fill', 'stroke', 'drawImage']) {"
        "const real = CanvasRenderingContext2D.prototype[name];"
        "CanvasRenderingContext2D.prototype[name] = function (...all) { window.fills += 1;"
        "return real.apply(this, all); }; }"
    )
    for view in VIEWS:
        page.show(view)
        page.page.wait_for_load_state("networkidle")
        page.page.evaluate(
            "window.changes = 0; window.before = window.fills; new MutationObserver((all) => { window.changes += all"
            ".filter((one) => one.attributeName !== 'data-drawn-ms').length; }).observe(document.body, {subtree: true,"
            " childList: true, attributes: true, characterData: true})"
        )
        for _ in range(2):
            with page.page.expect_response(lambda answer: "/api/state" in answer.url):
                page.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
            page.page.wait_for_load_state("networkidle")
        seen = page.page.evaluate(
            "[window.changes, window.fills - window.before, document.getAnimations().length]"
        )
        assert seen == [0, 0, 0], view


def test_a_report_is_one_file_with_the_same_views(finished, watched, opened, tmp_path):
    out = tmp_path / "report.html"
    command = [sys.executable, "-m", "dure", "report", str(watched.run), "-o", str(out), "--pdf", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    made = json.loads(ran.stdout)
    assert out.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    assert made[str(out)] == out.stat().st_size
    address = out.as_uri()
    for lang in ("en", "ko"):
        page = opened(address, locale="ko-KR" if lang == "ko" else "en-GB", offline=True)
        page.show("now")
        if page.page.get_attribute("html", "lang") != lang:
            page.page.click("[data-switch=lang]")
        for view in VIEWS:
            assert WORDS[lang][view] in page.show(view), view
            assert page.findings() == [], view
    assert finished["weights_sha256"] in page.show("proof")
    # Without --lang, a report is in the language of whoever made it.
    assert page.page.get_attribute("html", "lang") == "ko"
    page.show("ranks")
    page.page.locator("canvas").press("+")
    page.page.wait_for_selector("canvas[data-drawn='75-225']")


def test_the_bench_asks_the_server_for_what_the_page_asks_for(finished, watched, address, opened, tmp_path):
    """`dure bench page` measures the page's own cost by these requests in place of a browser's."""
    page = opened(address, locale="en-GB")
    asked = []
    page.page.on("request", lambda request: asked.append(request.url.removeprefix(address)))
    page.show("ranks")
    page.page.wait_for_selector("canvas[data-drawn]")
    measured = page_cost.Measured(0.0)
    with page_cost._asking(measured, address):
        wait_until(lambda: "api/window" in measured.paths, "the steps")
    mine = [url.partition("?")[0] for url in asked if url.startswith("api/")]
    assert measured.paths[:3] == mine[:3] == ["api/runs", "api/state", "api/window"]
    [query] = {url.partition("?")[2] for url in asked if url.startswith("api/window")}
    told = parse_qs(query)
    assert (told["columns"], told["stats"]) == ([page_cost._COLUMNS], ["mean"])
    assert abs(int(told["bins"][0]) - page_cost._BINS) < 200


def test_a_run_that_is_deleted_while_it_is_watched_is_said_to_be_gone(finished, watched, opened, tmp_path):
    import shutil

    from page.conftest import serving

    copy = tmp_path / "runs" / "copy"
    shutil.copytree(watched.run, copy)
    with serving(copy) as told:
        page = opened(told["url"], locale="en-GB")
        page.show("now")
        shutil.rmtree(copy)
        page.page.wait_for_selector("text=deleted while it was watched", timeout=30_000)
        assert "the same bits" in page.page.inner_text("main")


def test_axe_finds_what_is_wrong(opened, tmp_path):
    """The check above would fail: an image without words, and text that cannot be read."""
    bad = Path(tmp_path / "bad.html")
    bad.write_text(
        "<html><body><img src='data:,'><p style='color:#ddd;background:#fff'>faint</p></body></html>"
    )
    page = opened(bad.as_uri())
    page.page.goto(bad.as_uri())
    assert {found[0] for found in page.findings()} >= {"image-alt", "color-contrast"}

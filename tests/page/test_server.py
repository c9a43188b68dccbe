"""The page's server answers its own page alone, and nothing but what a run recorded."""

import asyncio
import json
import os
from urllib.parse import quote

import pytest

from dure.base.errors import UsageError
from dure.observe.events import Noted, TeamFormed, encode
from dure.page.catalog import Catalog, runs_in
from dure.page.serve import Address, bind, is_loopback
from dure.page.server import application
from dure.tools.bench.page import synthetic_run
from page.conftest import serving

HOST = (b"host", b"127.0.0.1:8642")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    synthetic_run(folder / "first", 300, 2)
    synthetic_run(folder / "second", 200, 2)
    (folder / "outside").mkdir()
    (folder / "outside" / "secret.txt").write_text("secret")
    os.symlink("/etc", folder / "linked")
    return folder


def ask(app, path, headers=(HOST,), method="GET"):
    """One request, without a network: status, headers, body."""
    path, _, query = path.partition("?")
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": list(headers),
             "query_string": query.encode(), "http_version": "1.1", "scheme": "http", "server": None, "client": None,
             "root_path": ""}  # fmt: skip
    told, asked = [], []

    async def receive():
        if asked:
            await asyncio.Event().wait()  # it stays connected
        asked.append(True)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        told.append(message)

    asyncio.run(app(scope, receive, send))
    body = b"".join(message.get("body", b"") for message in told[1:])
    return (
        told[0]["status"],
        {name.decode().lower(): value.decode() for name, value in told[0]["headers"]},
        body,
    )


@pytest.fixture
def app(runs):
    catalog = Catalog.of(runs)
    yield application(catalog, "127.0.0.1", None)
    catalog.close()


def test_every_answer_has_a_strict_policy_and_no_server_to_ask_elsewhere(app):
    for path in ("/", "/static/app.js", "/api/runs", "/api/state", "/nowhere"):
        _, headers, _ = ask(app, path)
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
    assert ask(app, "/")[1]["content-type"].startswith("text/html")
    assert "javascript" in ask(app, "/static/app.js")[1]["content-type"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b"host", b"evil.example")], 421),
        ([(b"host", b"evil.example:8642")], 421),
        ([(b"host", b"127.0.0.1.evil.example")], 421),
        ([], 421),
        ([(b"host", b"localhost:9000")], 200),  # a tunnel may have another port
        ([(b"host", b"[::1]:8642")], 200),
        ([HOST, (b"origin", b"http://evil.example")], 403),
        ([HOST, (b"origin", b"null")], 403),
        ([HOST, (b"origin", b"http://127.0.0.1:9999")], 403),
        ([HOST, (b"origin", b"http://127.0.0.1:8642")], 200),
        ([HOST, (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"no-cors")], 403),
        ([HOST, (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate")], 200),
    ],
)
def test_other_names_and_other_pages_are_refused(app, headers, status):
    assert ask(app, "/api/state", headers)[0] == status


def test_nothing_can_be_changed(app):
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert ask(app, "/api/state", method=method)[0] == 405


@pytest.mark.parametrize(
    "name", ["..", "../outside", "outside", "linked", "/etc", "first/../outside", ".", "\0", "a" * 999]
)
def test_only_runs_of_the_folder_can_be_asked_for(app, name):
    status, _, body = ask(app, f"/api/state?run={quote(name)}")
    assert status == 404
    assert b"secret" not in body


@pytest.mark.parametrize(
    "path", ["/static/../serve.py", "/static/..%2fserve.py", "/static/%2e%2e/serve.py", "/static//etc/passwd"]
)
def test_only_the_packages_own_files_are_served(app, path):
    assert ask(app, path)[0] == 404


def test_numbers_that_are_none_are_refused(app):
    for query in ("from=-1", "from=x", "to=1e9", "bins=" + "9" * 40):
        assert ask(app, f"/api/window?{query}")[0] == 400, query
    status, _, body = ask(app, "/api/window?from=0&to=999999999999&bins=999999999")
    assert status == 200
    assert len(body) < 10_000_000


def test_another_address_needs_the_token(runs):
    catalog = Catalog.of(runs)
    app = application(catalog, "0.0.0.0", "right")
    host = (b"host", b"192.0.2.7:8642")
    assert ask(app, "/", [host])[0] == 401
    assert ask(app, "/api/state", [host])[0] == 401
    assert ask(app, "/static/app.js", [host])[0] == 401
    assert ask(app, "/?token=wrong", [host])[0] == 401
    status, headers, _ = ask(app, "/?token=right", [host])
    assert status == 200
    assert "HttpOnly; SameSite=Strict" in headers["set-cookie"]
    assert ask(app, "/api/state", [host, (b"cookie", b"dure-page=right")])[0] == 200
    assert ask(app, "/api/state", [host, (b"cookie", b"dure-page=")])[0] == 401
    assert ask(app, "/?token=right", [(b"host", b"evil.example")])[0] == 421
    catalog.close()


def test_the_token_is_long_and_only_where_others_can_reach():
    listener, local = bind("127.0.0.1", 0)
    listener.close()
    assert local.token is None
    listener, everywhere = bind("0.0.0.0", 0)
    listener.close()
    assert len(everywhere.token) >= 32
    assert everywhere.token in everywhere.url
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    with pytest.raises(UsageError, match="choose another --host or --port"):
        bind("203.0.113.77", 0)


def test_over_ssh_the_tunnel_is_named(monkeypatch):
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 50000 10.0.1.10 22")
    assert Address("127.0.0.1", 8642, None).tunnel.endswith("@10.0.1.10")
    assert "ssh -N -L 8642:127.0.0.1:8642 " in Address("127.0.0.1", 8642, None).tunnel
    monkeypatch.delenv("SSH_CONNECTION")
    assert Address("127.0.0.1", 8642, None).tunnel is None


def test_a_folder_of_runs_shows_the_newest_first(runs):
    os.utime(runs / "first" / "events" / "rank-0.jsonl", (2e9, 2e9))
    assert runs_in(runs) == ["first", "second"]
    assert Catalog.of(runs).newest == "first"
    assert Catalog.of(runs / "second").newest == "second"
    with pytest.raises(UsageError, match="there is no run in it"):
        Catalog.of(runs / "outside")
    with pytest.raises(UsageError, match="there is no such folder"):
        Catalog.of(runs / "nowhere")


def test_exports_say_what_was_recorded(app):
    state = json.loads(ask(app, "/api/state?run=second")[2])
    rows = ask(app, "/export/steps.csv?run=second")[2].decode().splitlines()
    assert rows[0].startswith("rank,step,loss,lr,norm,samples,own,span_seconds,save_seconds,data_seconds")
    assert len(rows) == 1 + 2 * 200
    assert [row.split(",")[:2] for row in (rows[1], rows[-1])] == [["0", "0"], ["1", "199"]]
    trace = json.loads(ask(app, "/export/trace.json?run=second&from=10&to=12")[2])["traceEvents"]
    bars = [one for one in trace if one["ph"] == "X"]
    assert {one["name"] for one in bars} == {"data", "compute", "exchange", "update"}
    ends = {}
    for one in bars:
        if one["name"] == "exchange":
            ends.setdefault(one["args"]["step"], set()).add(round(one["ts"] + one["dur"]))
    assert sorted(ends) == [10, 11]
    assert all(max(moments) - min(moments) <= 1 for moments in ends.values()), (
        "ranks leave the exchange together"
    )
    metrics = ask(app, "/metrics?run=second")[2].decode()
    assert 'dure_steps_done{run="second"} 200' in metrics
    assert 'dure_straggler_behind_seconds{run="second",rank="0"}' in metrics
    assert state["straggler"]["rank"] == 0


def test_tensorboard_reads_the_file_that_is_exported(app, tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    (tmp_path / "events.out.tfevents.1").write_bytes(ask(app, "/export/tensorboard?run=second")[2])
    seen = {}
    for event in loader.EventFileLoader(str(tmp_path / "events.out.tfevents.1")).Load():
        for value in event.summary.value:
            seen.setdefault(value.tag, []).append(event.step)
    assert seen["train/loss"] == list(range(200))
    assert len(seen["rank 1/wait"]) == 200


def test_without_tensorboard_the_extra_is_named(app, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    status, _, body = ask(app, "/export/tensorboard?run=second")
    assert (status, body) == (
        501,
        b"TensorBoard's event files need its package: pip install 'dure[tensorboard]'\n",
    )


def test_names_that_are_markup_are_shown_as_text(browser, tmp_path):
    """In the folder's name, the job's, a host's and a note: a browser that ran them would open a dialog."""
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    run = tmp_path / "runs" / evil.replace("/", "")
    (run / "events").mkdir(parents=True)
    (run / "job.json").write_text(json.dumps({"job": {"name": evil, "train": {evil: evil}}}))
    team = TeamFormed(0, 1, 8, 1, evil, evil, 1, True, evil, 10, 40, 100)
    (run / "events" / "rank-0.jsonl").write_text(encode(team, 0.0, 0) + encode(Noted(evil), 0.0, 1))
    dialogs = []
    with serving(run) as told:
        page = browser.new_page(locale="en-GB")
        page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        for view in ("now", "proof", "compare"):
            page.goto("about:blank")
            page.goto(f"{told['url']}#{view}")
            page.wait_for_selector("main[data-drawn-ms]")
            assert page.locator("main img, main script").count() == 0
        page.goto(f"{told['url']}#now")
        page.wait_for_selector("li >> text=onerror=alert")
        page.close()
    assert dialogs == []

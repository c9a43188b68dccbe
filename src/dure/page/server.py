"""What the page's server answers. Every answer is made of what a run recorded; nothing can be changed through it."""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from dure.base.errors import UsageError
from dure.page.catalog import Catalog
from dure.page.exports import as_csv, as_metrics, as_tensorboard, as_trace
from dure.page.files import static_files
from dure.page.guard import Guard
from dure.page.pyramid import STATS
from dure.page.run import RunView, known_columns

_MOST_TRACED = 20_000
"""Steps in one trace: a browser opens it."""


def application(catalog: Catalog, host: str, token: str | None) -> Guard:
    """The ASGI application."""
    own_files = static_files()

    async def index(_request: Request) -> Response:
        return Response(own_files["index.html"], media_type="text/html")

    async def static(request: Request) -> Response:
        content = own_files.get(request.path_params["name"])
        if content is None:
            return PlainTextResponse("there is no such file\n", 404)
        kind = mimetypes.guess_type(request.path_params["name"])[0] or "application/octet-stream"
        return Response(content, media_type=kind)

    async def runs(_request: Request) -> Response:
        found = await run_in_threadpool(catalog.listing)
        return _json({"runs": found, "first": catalog.newest})

    async def about_run(request: Request, answer: Callable[[RunView], Response]) -> Response:
        def make() -> Response:
            try:
                return answer(catalog.run(request.query_params.get("run")))
            except KeyError:
                return PlainTextResponse("there is no such run\n", 404)
            except UsageError as error:
                return PlainTextResponse(f"{error}\n", 501)
            except ValueError as error:
                return PlainTextResponse(f"{error}\n", 400)

        return await run_in_threadpool(make)

    async def state(request: Request) -> Response:
        since = request.query_params.get("since", "")[:20_000]
        return await about_run(request, lambda run: _json(run.state(since)))

    async def window(request: Request) -> Response:
        return await about_run(request, lambda run: _window(run, request))

    async def samples(request: Request) -> Response:
        return await about_run(request, lambda run: _json(run.samples()))

    async def thumbnails(request: Request) -> Response:
        def answer(run: RunView) -> Response:
            content = run.thumbnails()
            if content is None:
                return PlainTextResponse("this run has no photos\n", 404)
            return Response(content, media_type="image/jpeg")

        return await about_run(request, answer)

    async def metrics(request: Request) -> Response:
        return await about_run(
            request, lambda run: Response(as_metrics(run), media_type="text/plain; version=0.0.4")
        )

    async def export_csv(request: Request) -> Response:
        def answer(run: RunView) -> Response:
            first, end = _range(run, request)
            return StreamingResponse(
                as_csv(run, first, end), headers=_attached("steps.csv"), media_type="text/csv"
            )

        return await about_run(request, answer)

    async def export_trace(request: Request) -> Response:
        def answer(run: RunView) -> Response:
            first, end = _range(run, request)
            trace = json.dumps(as_trace(run, max(first, end - _MOST_TRACED), end))
            return Response(trace, headers=_attached("trace.json"), media_type="application/json")

        return await about_run(request, answer)

    async def export_tensorboard(request: Request) -> Response:
        def answer(run: RunView) -> Response:
            content = as_tensorboard(run, *_range(run, request))
            name = _attached("events.out.tfevents.dure")
            return Response(content, headers=name, media_type="application/octet-stream")

        return await about_run(request, answer)

    routes = [
        Route("/", index),
        Route("/static/{name}", static),
        Route("/api/runs", runs),
        Route("/api/state", state),
        Route("/api/window", window),
        Route("/api/samples", samples),
        Route("/api/thumbnails", thumbnails),
        Route("/metrics", metrics),
        Route("/export/steps.csv", export_csv),
        Route("/export/trace.json", export_trace),
        Route("/export/tensorboard", export_tensorboard),
    ]
    return Guard(Starlette(routes=routes), host, token)


def _json(value: Any) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")


def _attached(name: str) -> dict[str, str]:
    return {"content-disposition": f'attachment; filename="{name}"'}


def _whole(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise ValueError(f"{name} is not a whole number")
    return int(text)


def _range(run: RunView, request: Request) -> tuple[int, int]:
    run.look()
    steps = run.state("")["steps"][1]
    first = _whole(request, "from", 0)
    return first, min(_whole(request, "to", steps), steps)


def _window(run: RunView, request: Request) -> Response:
    """Four bytes: the length of the JSON that follows; then float32."""
    told = request.query_params
    ranks = told.get("ranks")
    chosen = None if ranks is None else [int(one) for one in ranks.split(",") if one.isdigit()]
    stats = [name for name in told.get("stats", "").split(",") if name in STATS] or list(STATS)
    head, values = run.window(
        _whole(request, "from", 0),
        _whole(request, "to", 1),
        _whole(request, "bins", 1000),
        known_columns(told.get("columns", "").split(",")),
        chosen,
        stats,
    )
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 4)
    return Response(
        len(text).to_bytes(4, "little") + text + values.astype("<f4").tobytes(),
        media_type="application/octet-stream",
    )

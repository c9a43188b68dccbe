"""What the lesson's server answers: its own files, and experiments that really start ranks."""

from __future__ import annotations

import json
import mimetypes
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from dure.base.errors import DureError
from dure.base.language import Language
from dure.page.guard import Guard
from dure.tools.lesson.one_file import recordings, static_files
from dure.tools.lesson.running import Lab

MOST_BYTES = 4096
"""Of a request's body."""
MARK = "x-dure-lesson"
"""A header that a form or a link of another site cannot set."""


def application(lab: Lab, language: Language, host: str, token: str | None) -> Guard:
    """The ASGI application."""
    own = static_files()
    told = {"live": True, "recordings": recordings(), "language": language}
    settings = f"globalThis.LESSON = {json.dumps(told, ensure_ascii=False)};\n"
    page = own["lesson.html"].replace(b"<script type", b'<script src="settings.js"></script>\n<script type')

    async def index(_request: Request) -> Response:
        return Response(page, media_type="text/html")

    async def settings_script(_request: Request) -> Response:
        return Response(settings, media_type="text/javascript")

    async def static(request: Request) -> Response:
        name = request.path_params["path"]
        if name not in own:
            return PlainTextResponse("there is no such file\n", 404)
        return Response(own[name], media_type=mimetypes.guess_type(name)[0] or "application/octet-stream")

    async def start(request: Request) -> Response:
        asked = await _body(request)
        number = await run_in_threadpool(lab.start, asked.get("name"), asked.get("arguments", {}))
        return JSONResponse({"id": number})

    async def look(request: Request) -> Response:
        since = request.query_params.get("since", "0")
        first = int(since) if since.isdigit() and len(since) < 9 else 0
        return JSONResponse(await run_in_threadpool(lab.find(request.path_params["number"]).told, first))

    async def kill(request: Request) -> Response:
        rank = (await _body(request)).get("rank")
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < 8:
            return JSONResponse({"error": "rank is a number from 0 to 7"}, 400)
        running = lab.find(request.path_params["number"])
        return JSONResponse({"pid": await run_in_threadpool(running.kill, rank)})

    async def stop(request: Request) -> Response:
        await run_in_threadpool(lab.find(request.path_params["number"]).stop)
        return JSONResponse({})

    async def refused(_request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    routes = [
        Route("/", index),
        Route("/settings.js", settings_script),
        Route("/api/experiments", start, methods=["POST"]),
        Route("/api/experiments/{number:int}", look),
        Route("/api/experiments/{number:int}/kill", kill, methods=["POST"]),
        Route("/api/experiments/{number:int}/stop", stop, methods=["POST"]),
        Route("/{path:path}", static),
    ]
    app = Starlette(routes=routes, exception_handlers={DureError: refused, ValueError: refused})
    return Guard(app, host, token, posts_with=MARK)


async def _body(request: Request) -> dict[str, Any]:
    """A small JSON object; ValueError otherwise."""
    found = b""
    async for part in request.stream():
        found += part
        if len(found) > MOST_BYTES:
            raise ValueError("the request is too long")
    try:
        value = json.loads(found)
    except (ValueError, RecursionError):
        raise ValueError("the request is no JSON") from None
    if not isinstance(value, dict):
        raise ValueError("the request is no JSON object")
    return value

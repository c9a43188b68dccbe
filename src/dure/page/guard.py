"""Who may ask the page's server: names that are ours, pages that are ours, and the token where others can reach it."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
COOKIE = "dure-page"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Refuses what did not come from a page of ours, before anything else looks at it; sets strict headers.

    A page of another site can make a browser send requests here: by a name of its own that leads to this machine
    (its Host is not ours), or straight (its Origin is not ours).
    """

    def __init__(self, app: App, host: str, token: str | None, *, posts_with: str | None = None) -> None:
        """`posts_with`: POST is answered too, if it has this header, which other sites' forms cannot set."""
        self._app, self._token, self._posts_with = app, token, posts_with
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        refused = self._refused(scope, headers)
        fresh = self._token is not None and self._asked_token(scope) == self._token

        async def send_guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                if fresh and refused is None:
                    cookie = f"{COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/"
                    own.append((b"set-cookie", cookie.encode()))
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        if refused is None:
            await self._app(scope, receive, send_guarded)
            return
        status, words = refused
        body = f"{words}\n".encode()
        await send_guarded(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-type", b"text/plain; charset=utf-8")],
            }
        )
        await send_guarded({"type": "http.response.body", "body": body})

    def _refused(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        posts = scope["method"] == "POST" and self._posts_with is not None
        if not posts and scope["method"] not in ("GET", "HEAD"):
            return 405, "only GET"
        host = headers.get("host", "")
        if not self._is_ours(host):
            return 421, "this page is not served under that name"
        origin = headers.get("origin")
        if (origin is not None and urlsplit(origin).netloc != host) or (
            posts and not self._is_asked(headers)
        ):
            return 403, "asked by a page of another origin"
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return 403, "asked by a page of another site"
        if self._token is not None and not self._has_token(scope, headers):
            return 401, "the address needs its token: take it, whole, from where `dure page` printed it"
        return None

    def _is_asked(self, headers: dict[str, str]) -> bool:
        """Whether a POST has what only a script of our own page sends."""
        return self._posts_with in headers and "origin" in headers

    def _is_ours(self, host: str) -> bool:
        """A name that only this machine has, or an address: no other site's name leads here by either."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _asked_token(self, scope: Scope) -> str | None:
        told = parse_qs(scope["query_string"].decode("latin-1")).get("token")
        return told[0] if told else None

    def _has_token(self, scope: Scope, headers: dict[str, str]) -> bool:
        told = [self._asked_token(scope)]
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
            told.append(cookie.value if cookie is not None else None)
        except CookieError:
            pass
        token = self._token or ""
        return any(one is not None and secrets.compare_digest(one.encode(), token.encode()) for one in told)

"""The checks of every request: it only reads, it names an expected host, and it has the token."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from starlette.requests import Request  # pyright: ignore[reportMissingImports]
from starlette.responses import (  # pyright: ignore[reportMissingImports]
    PlainTextResponse,
    RedirectResponse,
)

from ckpt.model.checksum import checksum

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
"""Headers of every answer. Nothing of another place is loaded, and no script in the page runs."""
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Guard:
    """An ASGI application before another one.

    Without a token, only requests for a name of loopback pass, so that no page of another site
    reads this one by a name that resolves to loopback. With a token, only those that have it: in
    the query (``?token=``, which becomes a cookie), in that cookie, or as a bearer token.
    """

    def __init__(self, app: App, token: str = "") -> None:
        self._app, self._token = app, token
        self._cookie = f"ckpt-{checksum(token.encode())[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let it pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (name.encode(), value.encode())
                        for name, value in HEADERS.items()
                        if name.encode() not in named
                    ),
                ]
            await send(message)

        answer = self._refusal(Request(scope)) or self._app
        await answer(scope, receive, send_guarded)

    def _refusal(self, request: Any) -> App | None:
        if request.method not in ("GET", "HEAD"):
            return _refuse("this page only shows", 405)
        if not self._token:
            if _host(request) in _LOOPBACK:
                return None
            return _refuse("this page is for this machine: open it as http://127.0.0.1", 421)
        given = request.query_params.get("token", "")
        if given and self._fits(given):
            clear = request.url.remove_query_params("token")
            path = clear.path + (f"?{clear.query}" if clear.query else "")
            answer: Any = RedirectResponse("/" + path.lstrip("/"), 303)
            answer.set_cookie(self._cookie, given, httponly=True, samesite="lax")
            return answer  # type: ignore[no-any-return]
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._fits(request.cookies.get(self._cookie, "")) or self._fits(bearer):
            return None
        return _refuse("this page needs its token: add ?token=TOKEN to the address", 401)

    def _fits(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _host(request: Any) -> str:
    try:
        return str(request.url.hostname)
    except ValueError:
        # The Host header holds no valid address.
        return ""


def _refuse(text: str, status: int) -> App:
    answer: App = PlainTextResponse(text + "\n", status)
    return answer

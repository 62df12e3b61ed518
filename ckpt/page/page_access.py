"""The checks of every request: its method only reads, and its host or its token is accepted."""

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
"""Headers of every answer.

With them, a browser loads nothing from other sites, and runs no inline script.
"""
_LOOPBACK_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Guard:
    """An ASGI application that checks each request before it passes it to another application.

    Without a token, a request passes only if its Host header is a loopback name. So another site
    cannot read the page through a domain name that resolves to a loopback address. With a token, a
    request passes only if it has the token in a cookie or as a bearer token. A request with the
    token in its query (``?token=``) gets a redirect that sets the cookie.
    """

    def __init__(self, app: App, token: str = "") -> None:
        self._app, self._token = app, token
        self._cookie = f"ckpt-{checksum(token.encode())[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an HTTP request to the application, or answer it here if it may not pass. In both
        cases, add ``HEADERS`` to the answer.

        Calls that are not HTTP requests, such as the one at the start of the server, are passed to
        the application without a check.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                header_names = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (name.encode(), value.encode())
                        for name, value in HEADERS.items()
                        if name.encode() not in header_names
                    ),
                ]
            await send(message)

        answer = self._refusal(Request(scope)) or self._app
        await answer(scope, receive, send_guarded)

    def _refusal(self, request: Any) -> App | None:
        """Return the answer to a request that may not pass, or None if the request may pass.

        The answer is an error, or the redirect that sets the cookie.
        """
        if request.method not in ("GET", "HEAD"):
            return _refuse("this page only shows", 405)
        if not self._token:
            if _host(request) in _LOOPBACK_HOSTS:
                return None
            return _refuse("this page is for this machine: open it as http://127.0.0.1", 421)
        token = request.query_params.get("token", "")
        if token and self._is_token(token):
            clean_url = request.url.remove_query_params("token")
            path = clean_url.path + (f"?{clean_url.query}" if clean_url.query else "")
            answer: Any = RedirectResponse("/" + path.lstrip("/"), 303)
            answer.set_cookie(self._cookie, token, httponly=True, samesite="lax")
            return answer  # type: ignore[no-any-return]
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(request.cookies.get(self._cookie, "")) or self._is_token(bearer):
            return None
        return _refuse("this page needs its token: add ?token=TOKEN to the address", 401)

    def _is_token(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self._token.encode())


def _host(request: Any) -> str:
    try:
        return str(request.url.hostname)
    except ValueError:
        # The Host header holds no valid address.
        return ""


def _refuse(text: str, status: int) -> App:
    answer: App = PlainTextResponse(text + "\n", status)
    return answer

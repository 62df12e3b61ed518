"""The web application of the page: its routes, their handlers and the filters of its templates."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from shlex import quote
from typing import Any, Final

import jinja2
from starlette.applications import Starlette  # pyright: ignore[reportMissingImports]
from starlette.responses import (  # pyright: ignore[reportMissingImports]
    HTMLResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route  # pyright: ignore[reportMissingImports]

from ckpt.catalog.part_difference import percent
from ckpt.errors import CkptError, ConfigError, NoCheckpoint
from ckpt.errors.sanitize import clean
from ckpt.model.readable import duration, size
from ckpt.observe.job_life import LIFE_MEANING
from ckpt.observe.run_view import MEANING, RunView
from ckpt.page.diff_page import MOST_READ_BYTES, Measure, diff_page
from ckpt.page.live_views import Live, silent_since
from ckpt.page.page_access import App, Guard
from ckpt.page.prices import LIST_PRICES, Price, monthly_dollars, request_dollars
from ckpt.page.run_pages import StepOpener, commands_of, run_charts, run_page
from ckpt.page.store_requests import save_requests

_STATIC: Final[Mapping[str, str]] = {
    "page.css": "text/css",
    "live.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_TICK_SECONDS: Final = 1.0
"""How often a /live stream checks for a new version of the views."""
_ALIVE_SECONDS: Final = 15.0
"""How long a /live stream is silent before it sends a comment, which keeps the connection open."""


def make_app(
    live: Live,
    token: str = "",
    *,
    prices: Mapping[str, Price] = LIST_PRICES,
    measure: Measure | None = None,
) -> App:
    """Return the ASGI application that shows the runs of ``live``.

    Args:
        live: The views of the runs.
        token: The token that requests need; if it is empty, only requests with a loopback host are
            accepted.
        prices: The prices of stores, by what the URL of a tier begins with.
        measure: Says how far a tensor has moved; None if the page cannot say so.
    """
    pages = _Pages(live, tuple(map(StepOpener, live.runs)), _templates(prices), measure)
    routes = [
        Route("/", pages.index),
        Route("/run/{run:int}", pages.run),
        Route("/run/{run:int}/step/{step:str}", pages.step),
        Route("/run/{run:int}/diff", pages.diff),
        Route("/live", pages.live_events),
        Route("/static/{name:str}", _static),
    ]
    handlers: dict[Any, Any] = {404: pages.not_found, CkptError: pages.show_error}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), token)


@dataclass(frozen=True, slots=True)
class _Pages:
    """The handlers of the routes. A handler that is not ``async`` runs in a thread of a pool.

    Attributes:
        live: The views of the runs.
        openers: For each run, in the same order, what opens its steps.
        templates: The templates of the pages.
        measure: Says how far a tensor has moved between two steps; None if the page cannot say so.
    """

    live: Live
    openers: tuple[StepOpener, ...]
    templates: jinja2.Environment
    measure: Measure | None

    def index(self, request: Any) -> Any:
        del request
        views = self._views()
        pages = [run_page(view, 1) for view in views]
        return self._render("index.html", pages=pages, charts=run_charts(views))

    def run(self, request: Any) -> Any:
        index, view = self._find_run(request)
        query = request.query_params
        page = run_page(view, _page_number(query.get("page", "1")), query.get("sort", ""))
        return self._render("run.html", index=index, page=page)

    def step(self, request: Any) -> Any:
        index, view = self._find_run(request)
        query = request.query_params
        page = self.openers[index].page(
            view,
            request.path_params["step"],
            query.get("q", ""),
            query.get("tensor", ""),
            _page_number(query.get("page", "1")),
        )
        return self._render("step.html", index=index, run=view, page=page)

    def diff(self, request: Any) -> Any:
        index, view = self._find_run(request)
        query = request.query_params
        measure = self.measure if query.get("values") else None
        page = diff_page(self.openers[index], view, query.get("a", ""), query.get("b", ""), measure)
        can_read = self.measure is not None and page.read_bytes <= MOST_READ_BYTES
        return self._render("diff.html", index=index, run=view, page=page, can_read=can_read)

    async def live_events(self, request: Any) -> Any:
        del request
        return StreamingResponse(_event_stream(self.live), media_type="text/event-stream")

    async def not_found(self, request: Any, error: Exception) -> Any:
        del error
        return self.show_error(request, NoCheckpoint("", "there is no such page"))

    def show_error(self, request: Any, error: CkptError) -> Any:
        """Show an error. The status is 404 for `NoCheckpoint`, 400 for `ConfigError`, else 502."""
        default_status = 400 if isinstance(error, ConfigError) else 502
        status = 404 if isinstance(error, NoCheckpoint) else default_status
        index = request.path_params.get("run", len(self.live.views))
        text = str(error).removeprefix(": ")
        return self._render(
            "error.html", status, error=text, index=index if index < len(self.live.views) else None
        )

    def _views(self) -> tuple[RunView, ...]:
        self.live.touch()
        return self.live.views

    def _find_run(self, request: Any) -> tuple[int, RunView]:
        index, views = request.path_params["run"], self._views()
        if index >= len(views):
            raise NoCheckpoint("", "there is no such run")
        return index, views[index]

    def _render(self, template: str, status: int = 200, **values: Any) -> Any:
        text = self.templates.get_template(template).render(
            now=time.time(), version=self.live.version, **values
        )
        return HTMLResponse(text, status)


async def _event_stream(live: Live) -> AsyncGenerator[bytes]:
    """Yield a server-sent event with the version of the views at the start and after each change,
    until ``live`` is closed. After 15 seconds without an event, yield a comment. The views are
    renewed as long as the stream is open.
    """
    sent_version, idle_seconds = -1, 0.0
    while not live.closed:
        live.touch()
        if live.version != sent_version:
            sent_version, idle_seconds = live.version, 0.0
            yield f"data: {json.dumps(sent_version)}\n\n".encode()
        elif idle_seconds >= _ALIVE_SECONDS:
            idle_seconds = 0.0
            yield b": alive\n\n"
        await asyncio.sleep(_TICK_SECONDS)
        idle_seconds += _TICK_SECONDS


def _static(request: Any) -> Any:
    name = request.path_params["name"]
    if name not in _STATIC:
        return Response("there is no such file\n", 404)
    data = files("ckpt.page").joinpath("static", name).read_bytes()
    return Response(data, media_type=_STATIC[name], headers={"cache-control": "max-age=60"})


def _templates(prices: Mapping[str, Price]) -> jinja2.Environment:
    """Return the environment of the templates.

    It passes every string that a template shows through `clean`, and then escapes it for HTML.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ckpt.page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_clean_value,
    )
    environment.filters |= {
        "size": size,
        "duration": duration,
        "moment": _moment,
        "ago": _ago,
        "short": _short_url,
        "shape": _shape,
        "percent": percent,
        "shell": quote,
    }
    helpers: dict[str, Any] = {
        "meaning": MEANING,
        "life_meaning": LIFE_MEANING,
        "silent_since": silent_since,
        "commands_of": commands_of,
        "monthly_dollars": partial(monthly_dollars, prices=prices),
        "request_dollars": partial(request_dollars, prices=prices),
        "save_requests": save_requests,
    }
    environment.globals.update(helpers)
    return environment


def _clean_value(value: object) -> object:
    return clean(value) if type(value) is str else value


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "?"


def _ago(seconds: float) -> str:
    """Return a duration as text with one unit, such as '12 s', '3 min', '2.5 h' or '4.0 d'."""
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"


def _short_url(url: str) -> str:
    """Return 'memory' for a tier in memory. Otherwise return ``url``, or '…' and its last 31
    characters if it is longer than 32 characters.

    Secrets are removed before the URL is cut, since they cannot be recognized in a part of it.
    """
    url = clean(url)
    if url.startswith("shm://"):
        return "memory"
    return url if len(url) <= 32 else f"…{url[-31:]}"


def _page_number(text: str) -> int:
    """Return the number of a page in a query; 1 if ``text`` is no number."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 1

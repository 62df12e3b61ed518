"""The HTTP server of the page: its token, its port, and its life until a signal."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from ckpt.errors import ConfigError, MissingExtra
from ckpt.observe.run_view import RunWatch
from ckpt.page.diff_page import Measure
from ckpt.page.live_views import Live
from ckpt.page.prices import Price
from ckpt.storage.urls import is_folder

_PACKAGES: Final = ("starlette", "uvicorn", "jinja2")
_LEAST_TOKEN_CHARS: Final = 16
_CLOSE_SECONDS: Final = 1


def read_token(path: str | None, *, is_required: bool) -> str:
    """Return the token that the file ``path`` contains.

    If ``path`` is None, return a new random token, or an empty text if no token is ``is_required``.

    Raises:
        ConfigError: The file cannot be read, or its text has fewer than 16 characters or other
            characters than printable ASCII.
    """
    if path is None:
        return secrets.token_urlsafe(24) if is_required else ""
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read(4096).strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the token in {path} cannot be read: {error}") from None
    if len(token) < _LEAST_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{path} holds no token: it needs {_LEAST_TOKEN_CHARS} letters or digits at least, "
            "such as those of `openssl rand -hex 16`"
        )
    return token


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at ``host`` and ``port``.

    Raises:
        MissingExtra: A package of the page is not installed.
        ConfigError: The address does not exist, is in use, or is not permitted.
    """
    for package in _PACKAGES:
        try:
            import_module(package)
        except ImportError:
            raise MissingExtra("ckpt serve", package, "serve") from None
    try:
        (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"the page cannot listen at {host}:{port} ({error.strerror or error}): give another "
            "--host or --port"
        ) from None


def address(listener: socket.socket, host: str) -> str:
    """Return the URL of the page, with ``host`` and the port of ``listener``."""
    host_text = f"[{host}]" if ":" in host else host
    return f"http://{host_text}:{listener.getsockname()[1]}/"


def run(
    runs: Sequence[RunWatch],
    listener: socket.socket,
    token: str,
    interval: float | None,
    *,
    prices: Mapping[str, Price],
    measure: Measure | None,
) -> None:
    """Serve the page until Ctrl-C or SIGTERM.

    Args:
        runs: The runs that the page shows.
        listener: The socket from `listen`. It is closed at the end.
        token: The token that requests need; empty if only requests from this machine are accepted.
        interval: The seconds between two listings of the tiers. None and 0 mean 2 seconds if all
            tiers are folders, and 15 seconds otherwise.
        prices: The prices of stores, by what the URL of a tier begins with.
        measure: Says how far a tensor has moved; None if the page cannot say so.
    """
    app: Any = import_module("ckpt.page.app")
    uvicorn: Any = import_module("uvicorn")
    local = all(is_folder(tier.url) for watch in runs for tier in watch.tiers)
    live = Live(runs, interval or (2.0 if local else 15.0))
    live.start()
    config = uvicorn.Config(
        app.make_app(live, token, prices=prices, measure=measure),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    server = uvicorn.Server(config)
    exit_server = server.handle_exit

    def on_signal(*signal_and_frame: Any) -> None:
        live.close()  # This ends the open /live streams, which would delay the shutdown
        exit_server(*signal_and_frame)

    server.handle_exit = on_signal
    # uvicorn sends the signal to this process again after its shutdown. Ignore this second signal.
    previous_handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
        live.close()
        listener.close()

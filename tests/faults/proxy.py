"""A proxy between a client and an HTTP server that harms requests.

A connection carries one request, so that it can be harmed alone.

``harm(method, target)`` chooses the harm for a request; None lets it through.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from socket import SO_LINGER, SOL_SOCKET
from typing import Literal

SOME_BYTES = 1000
STALL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Harm:
    """What a proxy does to a request:

    - ``reset`` resets the connection before the request is passed on.
    - ``reset body`` resets it after a part of the body was passed on.
    - ``lose reply`` resets it when the server has answered.
    - ``cut`` ends the reply early.
    - ``status`` answers with ``code``.
    - ``delay`` waits ``seconds``.
    - ``throttle`` sends the reply at ``bytes_per_second``.
    - ``stall`` sends no answer.
    """

    kind: Literal[
        "reset", "reset body", "lose reply", "cut", "status", "delay", "throttle", "stall"
    ]
    status: int = 503
    code: str = "SlowDown"
    seconds: float = 0.2
    bytes_per_second: int = 4 << 20


Choice = Callable[[str, str], Harm | None]


class Proxy:
    """A proxy on 127.0.0.1 that has its own thread while it is entered. ``harmed`` counts the
    harms.
    """

    def __init__(self, upstream_port: int, harm: Choice) -> None:
        self._upstream, self._harm = upstream_port, harm
        self.harmed = 0
        self._port: Future[int] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="proxy")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port.result(10)}"

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._port.result(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._port.set_result(server.sockets[0].getsockname()[1])
        await self._stopped.wait()
        server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._pass_on(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._open.discard(task)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip("\r\n").split("\r\n")
        method, target, _ = first.split(" ")
        harm = self._harm(method, target)
        self.harmed += harm is not None
        kind = harm.kind if harm else ""
        if harm and kind == "delay":
            await asyncio.sleep(harm.seconds)
        if kind == "stall":
            await asyncio.sleep(STALL_SECONDS)
        if kind in ("reset", "stall"):
            _reset(writer)
            return
        if any(line.lower().startswith("expect:") for line in lines):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = next(
            (
                int(line.partition(":")[2])
                for line in lines
                if line.lower().startswith("content-length:")
            ),
            0,
        )
        if harm and kind == "status":
            await reader.readexactly(length)
            body = f"<Error><Code>{harm.code}</Code><Message>harmed</Message></Error>".encode()
            writer.write(
                f"HTTP/1.1 {harm.status} Harmed\r\nConnection: close\r\nContent-Length: "
                f"{len(body)}\r\n\r\n".encode()
                + body
            )
            await writer.drain()
            return
        kept = [line for line in lines if not line.lower().startswith(("expect:", "connection:"))]
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self._upstream)
        try:
            upstream.write(
                "\r\n".join([first, *kept, "Connection: close", "", ""]).encode("latin-1")
            )
            if kind == "reset body" and length > SOME_BYTES:
                upstream.write(await reader.readexactly(SOME_BYTES))
                await upstream.drain()
                _reset(upstream)
                _reset(writer)
                return
            upstream.write(await reader.readexactly(length))
            await upstream.drain()
            reply = await upstream_reader.read(-1)
        finally:
            upstream.close()
        if kind == "lose reply":
            _reset(writer)
            return
        await self._answer(writer, reply, harm)

    async def _answer(self, writer: asyncio.StreamWriter, reply: bytes, harm: Harm | None) -> None:
        head, _, body = reply.partition(b"\r\n\r\n")
        lines = [
            line
            for line in head.split(b"\r\n")
            if not line.lower().startswith((b"connection:", b"keep-alive:"))
        ]
        writer.write(b"\r\n".join([*lines, b"Connection: close", b"", b""]))
        if harm and harm.kind == "cut":
            body = body[: len(body) // 2]
        step = (
            harm.bytes_per_second // 20 if harm and harm.kind == "throttle" else max(1, len(body))
        )
        for start in range(0, len(body), step):
            writer.write(body[start : start + step])
            await writer.drain()
            if harm and harm.kind == "throttle":
                await asyncio.sleep(0.05)
        await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close the connection by RST instead of FIN."""
    writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()

"""A wire to a server on this machine that can be cut, slowed or held, in a thread of this
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from types import TracebackType
from typing import Any, Self

_PIECE = 64 << 10


class Proxy:
    """Forwards TCP to ``port``.

    Threads: attributes may be set from any, at any time.

    Attributes:
        bytes_per_second: Most that passes, both ways and all connections together; 0 for no limit.
        down: Connections are cut and refused.
        held: Connections stay open, and no byte passes.
    """

    def __init__(self, port: int) -> None:
        self.bytes_per_second, self.down, self.held = 0.0, False, False
        self.port = 0
        self._to, self._free_at = port, 0.0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.down:
                return
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
            try:
                ways = [
                    asyncio.ensure_future(self._pass(reader, back)),
                    asyncio.ensure_future(self._pass(there, writer)),
                ]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
            finally:
                await _end(back)
        except OSError:
            pass
        finally:
            await _end(writer)

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while True:
            piece: Any = None
            while piece is None or self.held:
                if piece is None and not self.held:
                    with contextlib.suppress(TimeoutError):
                        piece = await asyncio.wait_for(source.read(_PIECE), 0.05)
                else:
                    await asyncio.sleep(0.02)
                if self.down:
                    return
            if not piece:
                return
            if self.bytes_per_second:
                now = time.monotonic()
                self._free_at = max(now, self._free_at) + len(piece) / self.bytes_per_second
                await asyncio.sleep(self._free_at - now)
            target.write(piece)
            await target.drain()


async def _end(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()

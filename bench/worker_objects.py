"""What a worker process does with an object store: a client's rounds, and saves that go to a
folder and a far tier.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import asdict
from typing import Any

from bench import clients

_NOISE_BYTES = 1 << 20


class ObjectWork:
    """The commands. Each is a method that takes and returns plain values."""

    def object_client(
        self, name: str, url: str, unsigned: bool, threads: int, part_bytes: int, size: int
    ) -> Any:
        """Make the client, and two buffers."""
        self._client = clients.ALL[name][1](url, threads, unsigned, part_bytes)
        self._data, self._out = (memoryview(mmap.mmap(-1, size)) for _ in range(2))
        for start in range(0, size, _NOISE_BYTES):
            self._data[start : start + _NOISE_BYTES] = os.urandom(_NOISE_BYTES)[: size - start]
        return {}

    def object_round(self, key: str) -> Any:
        """Up, down, compared.

        rclone hashes an object when it is first asked for it, once for each request at that time:
        so what counts is the second time down.
        """
        self._out[:] = bytes(self._out.nbytes)  # touched, and not what will come
        up = clients.clocked(lambda: self._client.up(key, self._data))
        self._client.down(key, self._out)
        down = clients.clocked(lambda: self._client.down(key, self._out))
        if self._out != self._data:
            raise ValueError("what came down is not what went up")
        return {"up": asdict(up), "down": asdict(down)}

    def far_open(self, near: str, url: str | None, name: str, size: int) -> Any:
        """A manager over a folder and a bucket (None: without), and a state of one tensor."""
        import torch

        from ckpt import CheckpointManager, Tier

        options: dict[str, Any] = {
            "endpoint_url": url,
            "key": clients.KEY,
            "secret": clients.SECRET,
            "region": "us-east-1",
            "put_if_absent": False,
        }
        self._near, self._far = near, Tier(f"s3://{clients.BUCKET}/far-{name}", options=options)
        self._state = {"x": torch.zeros(size // 4, dtype=torch.int32)}
        self._manager = CheckpointManager([near, self._far] if url else near, backlog=1000)
        self._saves: list[Any] = []
        return {}

    def far_save(self) -> Any:
        """A save, until the folder has it."""
        step = len(self._saves) + 1
        self._state["x"].fill_(step)
        began = time.perf_counter()
        self._saves.append(self._manager.save_async(self._state, step))
        stall = time.perf_counter() - began
        self._saves[-1].result(60, tier=self._near)
        return {"stall": stall, "near": time.perf_counter() - began}

    def far_waiting(self) -> Any:
        """How many saves the bucket has not."""
        return {"saves": sum(not save.done() for save in self._saves)}

    def far_wait(self) -> Any:
        """Until the bucket has all of them."""
        for save in self._saves:
            save.result(250)
        return {}

    def far_check(self) -> Any:
        """Restore each from the bucket alone, and compare."""
        from ckpt import CheckpointManager

        self._manager.close()
        with CheckpointManager(self._far) as manager:
            for step in range(1, len(self._saves) + 1):
                self._state["x"].zero_()
                manager.restore(self._state, step, rollback=False)
                if not bool((self._state["x"] == step).all()):
                    raise ValueError(f"step {step} came back different from the far tier")
        return {"restored": len(self._saves)}

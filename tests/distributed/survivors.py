"""Ranks that are killed and stopped: worlds that go on without them, which torchrun's agent
would end at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.distributed.launch import ROOT, WORKERS
from tests.servers import free_port


def run_world(
    ranks: int, worker: str, *args: object, store_here: bool, timeout: float = 100
) -> list[str]:
    """What each rank printed.

    ``store_here``: the job's store outlives every rank, as torchrun's does; else it lives in rank
    0.
    """
    port = free_port()
    store = (
        TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if store_here else None
    )
    base = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
    }
    if store_here:
        base["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        base["TORCHELASTIC_RESTART_COUNT"] = "0"
    words = [
        sys.executable,
        "-X",
        "faulthandler",
        "-W",
        "ignore",
        str(WORKERS / worker),
        *map(str, args),
    ]
    with ExitStack() as running:
        processes = [
            running.enter_context(
                subprocess.Popen(
                    words,
                    env=base | {"RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            for rank in range(ranks)
        ]
        try:
            return [process.communicate(timeout=timeout)[0] for process in processes]
        except subprocess.TimeoutExpired:
            pytest.fail(
                f"not at their end after {timeout} s\n\n" + where_they_are(processes), pytrace=False
            )
        finally:
            for process in processes:
                process.kill()
            del store


def where_they_are(processes: list[subprocess.Popen[str]]) -> str:
    """What each has printed and, by ``-X faulthandler``, the stacks of those that live.

    Ends them.
    """
    for process in processes:
        process.send_signal(signal.SIGABRT)
        process.send_signal(signal.SIGCONT)
    return "\n\n".join(
        f"rank {rank}:\n{process.communicate()[0][-10_000:]}"
        for rank, process in enumerate(processes)
    )


def told(outputs: list[str], *ranks: int) -> str:
    """Fails with what the others printed unless ``ranks`` came to their end."""
    for rank in ranks:
        assert "WELL" in outputs[rank], "\n\n".join(
            f"rank {r}:\n{out[-3000:]}" for r, out in enumerate(outputs)
        )
    return "\n".join(outputs[rank] for rank in ranks)


def merged_again(root: Path, step: int, tmp_path: Path) -> tuple[bytes, bytes]:
    """The manifest that lies there, and the one that ``ckpt finalize`` makes of the same
    fragments.
    """
    import shutil

    from ckpt.catalog.finalize import finalize
    from ckpt.catalog.index import attempts
    from ckpt.pipeline.workers import Workers
    from ckpt.storage.registry import open_backend

    shutil.copytree(root, tmp_path / "copy")
    backend = open_backend(str(tmp_path / "copy"), {})
    ref = next(ref for ref in attempts(backend) if ref.step == step)
    path = tmp_path / "copy" / ref.manifest
    before = path.read_bytes()
    path.unlink()
    with Workers("test", 2) as workers:
        finalize(backend, ref, workers=workers, job_is_dead=True)
    return before, path.read_bytes()

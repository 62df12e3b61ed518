"""Worlds that go on without ranks that are killed or stopped.

torchrun's agent would end such a world at once.
"""

from __future__ import annotations

from pathlib import Path

from torch.distributed import TCPStore

from tests.distributed.launch import WORKERS
from tests.kit.worlds import environment_of, run_forks
from tests.servers import free_port


def run_world(
    ranks: int,
    worker: str,
    *args: object,
    store_here: bool,
    end_together: bool = False,
    timeout: float = 100,
) -> list[str]:
    """Return what each rank printed.

    With ``store_here`` the job's store outlives every rank, as torchrun's does. Otherwise it is in
    rank 0. With ``end_together`` the first rank that fails ends the others, as torchrun does.
    """
    port = free_port()
    store = (
        TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if store_here else None
    )
    here = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if store_here else {}
    environments = [environment_of(rank, ranks, port) | here for rank in range(ranks)]
    try:
        ended = run_forks(
            [WORKERS / worker, *args], environments, timeout=timeout, end_together=end_together
        )
    finally:
        del store
    return list(ended.said)


def reported(outputs: list[str], *ranks: int) -> str:
    """Return the output of ``ranks``, and fail unless they came to their end."""
    for rank in ranks:
        assert "WELL" in outputs[rank], "\n\n".join(
            f"rank {r}:\n{out[-3000:]}" for r, out in enumerate(outputs)
        )
    return "\n".join(outputs[rank] for rank in ranks)


def merged_again(root: Path, step: int, tmp_path: Path) -> tuple[bytes, bytes]:
    """Return the manifest of the root, and the one that ``ckpt finalize`` makes of the same
    fragments.
    """
    import shutil

    from ckpt.catalog.finalize import RunFacts, finalize
    from ckpt.pipeline.workers import Workers
    from ckpt.root.attempts import step_refs
    from ckpt.storage.registry import open_backend

    shutil.copytree(root, tmp_path / "copy")
    backend = open_backend(str(tmp_path / "copy"), {})
    ref = next(ref for ref in step_refs(backend) if ref.step == step)
    path = tmp_path / "copy" / ref.manifest
    before = path.read_bytes()
    path.unlink()
    with Workers("test", 2) as workers:
        finalize(backend, ref, workers=workers, facts=RunFacts(job_is_dead=True))
    return before, path.read_bytes()

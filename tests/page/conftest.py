from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="pip install 'ckpt-stream[serve]'")
pytest.importorskip("uvicorn", reason="pip install 'ckpt-stream[serve]'")
testclient = pytest.importorskip("starlette.testclient", reason="pip install httpx")

from ckpt.config import Tier  # noqa: E402
from ckpt.events import Restored, SaveCommitted, SaveFailed, SaveStaged, TierMissed  # noqa: E402
from ckpt.observe import Journal  # noqa: E402
from ckpt.observe.run_view import watch_runs  # noqa: E402
from ckpt.page.app import make_app  # noqa: E402
from ckpt.page.live_views import Live  # noqa: E402
from ckpt.storage.registry import open_backend  # noqa: E402
from tests.checkpoints import write_checkpoint  # noqa: E402

ARRAYS: dict[str, np.ndarray] = {
    "model/embed": np.arange(96, dtype=np.float32).reshape(12, 8),
    "model/bias": np.arange(5, dtype=np.int64),
}


class Page:
    """The page over some runs, and the HTML that a browser gets."""

    def __init__(
        self, live: Live, token: str = "", host: str = "127.0.0.1", **settings: Any
    ) -> None:
        self.live = live
        self.client: Any = testclient.TestClient(
            make_app(live, token, **settings), base_url=f"http://{host}", follow_redirects=False
        )

    def get(self, path: str, status: int = 200, **given: Any) -> str:
        answer = self.client.get(path, **given)
        assert answer.status_code == status, answer.text
        return str(answer.text)


Make = Callable[..., Page]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Live] = []

    def page(*roots: Path | str, interval: float = 3600, **given: Any) -> Page:
        made.append(Live(watch_runs([Tier(str(root)) for root in roots], {}), interval))
        made[-1].start()
        return Page(made[-1], **given)

    yield page
    for live in made:
        live.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the steps 100, 200 and 300 near and 200 far, and a journal that knows more."""
    near, far = tmp_path / "near", tmp_path / "far"
    journal = Journal(near, rank=0)
    for step in (50, 100, 200, 300, 400):
        tiers = (str(near), str(far)) if step in (200, 400) else (str(near),)
        metrics = {"loss": step / 1000}
        journal(SaveStaged(step=step, nbytes=9, stall_seconds=0.0123, tiers=tiers, metrics=metrics))
        for tier in tiers if step < 400 else ():
            journal(SaveCommitted(step=step, tier=tier, nbytes=9, durable_seconds=0.25))
    journal(TierMissed(step=400, tier=str(near), error=OSError("disk <gone>")))
    journal(SaveFailed(step=350, error=OSError("disk <gone>")))
    journal(Restored(step=300, tier=str(near), nbytes=9, seconds=0.1))
    journal.close()
    for step in (100, 200, 300):
        arrays = ARRAYS | {"model/embed": ARRAYS["model/embed"] + step // 300}
        metadata = {"metrics": {"loss": step / 1000}}
        write_checkpoint(open_backend(str(near)), step, arrays, world_size=2, metadata=metadata)
    write_checkpoint(open_backend(str(far)), 200, ARRAYS, world_size=2)
    return near

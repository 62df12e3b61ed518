"""Which changes of a run are a reason to show its page again."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt.observe.run_view import RunView
from tests.page.conftest import Make


def test_the_silence_of_a_tier_is_one_change(
    make: Make, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = make(run)
    watch = page.live.runs[0]
    view, seconds = watch.look(2.0), iter(range(7, 99))

    def look(patience: float) -> RunView:
        silent, _ = f"no answer for {next(seconds)} s", patience
        return replace(view, tiers=tuple(replace(tier, error=silent) for tier in view.tiers))

    monkeypatch.setattr(watch, "look", look)
    versions: list[int] = []
    for _ in range(3):
        page.live._look()
        versions.append(page.live.version)
    assert versions == [versions[0]] * 3
    shown = page.get("/run/0")
    found = re.search(
        r'no answer for <span data-since="([0-9.]+)">', shown
    )  # The browser counts on
    assert found is not None
    assert float(found[1]) == pytest.approx(view.at - 9)

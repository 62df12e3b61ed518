"""Commands that read one step name the other steps if the newest one is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import Written
from tests.cli.conftest import Cli

VERBS = [("show",), ("export", "runs", "out.safetensors")]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("file", ["manifest.json", "rank-00001.safetensors"])
def test_the_step_before_is_named(
    cli: Cli, steps: dict[int, Written], verb: tuple[str, ...], file: str
) -> None:
    path = Path("runs", steps[300].ref.folder, file)
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    ran = cli(*verb)
    if (verb, file) == (VERBS[0], "rank-00001.safetensors"):
        assert ran.code == 0  # only the manifest is read
        return
    assert ran.code == 4
    assert ran.err.rstrip().endswith("--step 200"), ran.err
    ran = cli(*verb, "--step", 300)
    assert ran.code == 4
    assert "--step" not in ran.err  # this step was requested, so there is no second choice
    assert cli(*verb, "--step", 200).code == 0


def test_nothing_is_named_where_there_is_none_before(cli: Cli, steps: dict[int, Written]) -> None:
    for step in (100, 200):
        Path("runs", steps[step].ref.folder, "manifest.json").unlink()
    Path("runs", steps[300].ref.folder, "manifest.json").write_bytes(b"{}")
    ran = cli("show")
    assert ran.code == 4
    assert "--step" not in ran.err

"""Each row of the table in CONTRIBUTING.md, done by a distribution of another author.

The distribution is installed, and ckpt is not changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.kit.worlds import ROOT, run_code


class Distribution:
    """A package in a folder of its own, with entry points, as an installer leaves it."""

    def __init__(self, folder: Path, module: str, source: str, entries: str) -> None:
        (folder / f"{module}.py").write_text(textwrap.dedent(source))
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(textwrap.dedent(entries))
        self._folder = folder

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a fresh interpreter that finds the package."""
        path = os.pathsep.join([str(self._folder), str(ROOT), str(ROOT / "backends")])
        return subprocess.run(
            [sys.executable, *args],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def run_code(self, code: str, *args: str) -> str:
        """Return what a program prints that finds the package."""
        see = f"import sys\nsys.path.insert(0, {str(self._folder)!r})\n"
        return run_code(see + textwrap.dedent(code), *args)


def test_a_backend_of_another_distribution_saves_and_restores(tmp_path: Path) -> None:
    outside = Distribution(
        tmp_path,
        "ckpt_drawer",
        """
        from ckpt_backends.folder.posix import open_posix

        def open_drawer(url, options):
            return open_posix(url.removeprefix("drawer://"), options)
        """,
        """
        [ckpt.backends]
        drawer = ckpt_drawer:open_drawer
        """,
    )
    code = """
        import sys, torch
        from ckpt import CheckpointManager
        with CheckpointManager("drawer://" + sys.argv[1]) as manager:
            manager.save({"weights": torch.arange(4.0)}, step=1)
        state = {"weights": torch.zeros(4)}
        with CheckpointManager("drawer://" + sys.argv[1]) as manager:
            manager.restore(state)
        print(state["weights"].tolist())
    """
    assert outside.run_code(code, str(tmp_path / "root")).strip() == "[0.0, 1.0, 2.0, 3.0]"
    listed = outside.run("-m", "ckpt.cli.main", "ls", f"drawer://{tmp_path}/root", "--json")
    assert [step["step"] for step in json.loads(listed.stdout)["steps"]] == [1], listed


COMMAND = """
    from typing import Annotated
    import typer

    number = 3

    def odd(size: "Missing") -> None:
        "Take what has no type."

    def count(root: Annotated[str, typer.Argument()]) -> None:
        "Count the checkpoints below ROOT."
        import ckpt.catalog.step_listing, ckpt.storage.registry
        print(len(list(ckpt.catalog.step_listing.committed(ckpt.storage.registry.open_backend(root)))))
"""


def test_a_command_of_another_distribution_is_listed_and_runs(tmp_path: Path) -> None:
    outside = Distribution(
        tmp_path, "ckpt_count", COMMAND, "[ckpt.commands]\ncount = ckpt_count:count\n"
    )
    (tmp_path / "root").mkdir()
    assert outside.run("-m", "ckpt.cli.main", "count", str(tmp_path / "root")).stdout == "0\n"
    listed = outside.run("-m", "ckpt.cli.main", "--help").stdout
    assert "Count the checkpoints below ROOT." in listed


@pytest.mark.parametrize(
    "entry", ["ckpt_count:missing", "nosuch_module:count", "ckpt_count:number", "ckpt_count:odd"]
)
def test_a_command_that_cannot_be_loaded_does_not_cost_the_others(
    tmp_path: Path, entry: str
) -> None:
    outside = Distribution(tmp_path, "ckpt_count", COMMAND, f"[ckpt.commands]\ncount = {entry}\n")
    done = outside.run("-m", "ckpt.cli.main", "--help")
    assert done.returncode == 0
    assert "'count'" in done.stderr
    assert "restore" in done.stdout


def test_an_adapter_of_another_distribution_saves_and_restores_its_object(tmp_path: Path) -> None:
    outside = Distribution(
        tmp_path,
        "ckpt_engine",
        """
        import torch

        class Engine:
            \"\"\"An object of a framework that knows nothing of ckpt.\"\"\"

            def __init__(self, value):
                self.weights, self.count = torch.full((3,), float(value)), value

        class _Adapter:
            def __init__(self, engine):
                self.engine = engine

            def state_dict(self):
                return {"weights": self.engine.weights, "count": self.engine.count}

            def load_state_dict(self, state):
                self.engine.weights, self.engine.count = state["weights"], state["count"]

        def adapt(value):
            return _Adapter(value) if isinstance(value, Engine) else None
        """,
        "[ckpt.adapters]\nengine = ckpt_engine:adapt\n",
    )
    code = """
        import sys
        from ckpt import CheckpointManager
        from ckpt_engine import Engine
        with CheckpointManager(sys.argv[1]) as manager:
            manager.save({"engine": Engine(7), "nested": {"engine": Engine(8)}}, step=1)
            state = {"engine": Engine(0), "nested": {"engine": Engine(0)}}
            manager.restore(state)
        for engine in (state["engine"], state["nested"]["engine"]):
            print(type(engine).__name__, engine.weights.tolist(), engine.count)
    """
    assert outside.run_code(code, str(tmp_path / "root")).splitlines() == [
        "Engine [7.0, 7.0, 7.0] 7",
        "Engine [8.0, 8.0, 8.0] 8",
    ]


def test_an_adapter_that_cannot_be_loaded_costs_no_save_and_no_restore(tmp_path: Path) -> None:
    outside = Distribution(
        tmp_path, "ckpt_engine", "", "[ckpt.adapters]\nengine = ckpt_engine:missing\n"
    )
    code = """
        import sys, logging, torch
        logging.basicConfig(stream=sys.stdout)
        import numpy as np
        from ckpt import CheckpointManager
        from ckpt.errors import UnsupportedValue
        with CheckpointManager(sys.argv[1]) as manager:
            manager.save({"nested": {"count": np.int64(7)}}, step=1)
            state = {"nested": {"count": np.int64(0)}}
            manager.restore(state)
            print(state["nested"]["count"])
            try:
                manager.save({"generator": object()}, step=2)
            except UnsupportedValue:
                print("refused")
    """
    reported = outside.run_code(code, str(tmp_path / "root"))
    assert "7" in reported.splitlines(), reported
    assert reported.count("the adapter 'engine' of 'ckpt_engine:missing' cannot be loaded") == 1
    assert "refused" in reported


CODEC = """
    import zlib
    from ckpt.codec.registry import Codec

    def encoder(level):
        def encode(chunk, width):
            short = zlib.compress(chunk, level or 1)
            return [memoryview(short)] if len(short) < chunk.nbytes else [chunk]
        return encode

    def decode(data, out):
        try:
            raw = zlib.decompress(data)
        except zlib.error as error:
            raise ValueError("no zlib stream") from error
        if len(raw) != out.nbytes:
            raise ValueError("another length")
        out[:] = raw

    deflate = Codec(encoder=encoder, decode=decode, levels=range(1, 10))
"""
CODEC_ENTRY = "[ckpt.codecs]\ndeflate = ckpt_deflate:deflate\n"


def test_a_codec_of_another_distribution_encodes_a_tier(tmp_path: Path) -> None:
    outside = Distribution(tmp_path, "ckpt_deflate", CODEC, CODEC_ENTRY)
    root, copy = str(tmp_path / "root"), str(tmp_path / "copy")
    code = """
        import sys, torch
        from ckpt import CheckpointManager, Tier
        with CheckpointManager([Tier(sys.argv[1], codec="deflate:3")]) as manager:
            manager.save({"weights": torch.zeros(100_000)}, step=1)
            manager.save({"weights": torch.arange(100_000.0)}, step=2)
        state = {"weights": torch.zeros(100_000)}
        with CheckpointManager(sys.argv[1]) as manager:
            manager.restore(state)
        print(torch.equal(state["weights"], torch.arange(100_000.0)))
    """
    assert outside.run_code(code, root).strip() == "True"
    shown = json.loads(outside.run("-m", "ckpt.cli.main", "show", "2", root, "--json").stdout)
    assert [file["codec"] for file in shown["files"]] == ["deflate"]
    assert shown["stored_bytes"] < shown["bytes"] / 2
    assert outside.run("-m", "ckpt.cli.main", "verify", "2", root).returncode == 0
    copied = outside.run("-m", "ckpt.cli.main", "copy", root, copy)
    assert copied.returncode == 0, copied.stderr


def test_a_step_with_a_codec_that_is_not_installed_names_it_and_the_way_out(tmp_path: Path) -> None:
    outside = Distribution(tmp_path, "ckpt_deflate", CODEC, CODEC_ENTRY)
    root = str(tmp_path / "root")
    code = """
        import sys, torch
        from ckpt import CheckpointManager, Tier
        with CheckpointManager([Tier(sys.argv[1])]) as manager:
            manager.save({"weights": torch.ones(100_000)}, step=1)
        with CheckpointManager([Tier(sys.argv[1], codec="deflate")]) as manager:
            manager.save({"weights": torch.ones(100_000)}, step=2)
    """
    outside.run_code(code, root)
    (bare := tmp_path / "bare").mkdir()
    without = Distribution(bare, "ckpt_nothing", "", "")
    code = """
        import sys, torch
        from ckpt import CheckpointManager
        from ckpt.errors import CodecMissing
        state = {"weights": torch.zeros(100_000)}
        with CheckpointManager(sys.argv[1]) as manager:
            try:
                manager.restore(state)
            except CodecMissing as error:
                print(error)
        print(state["weights"].sum().item())
    """
    said, total = without.run_code(code, root).splitlines()
    assert "the codec 'deflate', which is not installed here: install the package" in said
    assert total == "0.0", "an older step would hide that the package is missing"


@pytest.mark.parametrize(("entry", "reason"), [("missing", "has no attribute"), ("number", "3")])
def test_a_codec_that_cannot_be_loaded_is_named_where_a_tier_asks_for_it(
    tmp_path: Path, entry: str, reason: str
) -> None:
    outside = Distribution(
        tmp_path, "ckpt_deflate", "number = 3\n", f"[ckpt.codecs]\ndeflate = ckpt_deflate:{entry}\n"
    )
    code = """
        from ckpt import Tier
        from ckpt.errors import ConfigError
        Tier("runs"), Tier("runs", codec="zstd")
        try:
            print(Tier("runs", codec="deflate"))
        except ConfigError as error:
            print(error)
    """
    said = outside.run_code(code)
    assert f"the codec 'deflate' of 'ckpt_deflate:{entry}'" in said
    assert reason in said

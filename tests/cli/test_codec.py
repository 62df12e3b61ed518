from __future__ import annotations

import torch

from ckpt import CheckpointManager, Tier
from tests.cli.conftest import Cli


def test_the_command_line_tells_the_codec_and_what_it_takes(cli: Cli) -> None:
    with CheckpointManager(Tier("runs", codec="zstd")) as manager:
        manager.save_async({"x": torch.randn(300_000) * 0.02}, 5).result(60)
    listed, shown = cli("ls", "--json").json["steps"][0], cli("show", 5, "--json").json
    assert (listed["codecs"], listed["bytes"]) == (["zstd"], shown["bytes"])
    assert listed["stored_bytes"] == shown["stored_bytes"] < shown["bytes"] * 0.85
    assert [(file["codec"], file["stored_bytes"]) for file in shown["files"]] == [
        ("zstd", shown["stored_bytes"])
    ]
    assert "(zstd of 1.20 MB)" in cli("ls").out
    assert ", zstd of 1.20 MB" in cli("show", 5, "--files").out
    assert cli("verify", 5).code == 0
    cli("copy", "runs", "raw")
    both = cli("ls", "--root", "runs", "--root", "raw")
    assert both.out.count("(zstd of 1.20 MB)") == 2  # a copy does not change it
    tier = next(
        iter(
            cli("ls", "--root", "runs", "--root", "raw", "--json")
            .json["steps"][0]["tiers"]
            .values()
        )
    )
    assert (tier["stored_bytes"], tier["codecs"]) == (shown["stored_bytes"], ["zstd"])

"""Names and values in a checkpoint are foreign text.

No command prints anything that a terminal would interpret.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from ckpt import CheckpointManager
from ckpt.errors import RootInUse
from ckpt.root.owner import Owner, claim
from ckpt.storage.api import StorageBackend
from tests.checkpoints import write_checkpoint
from tests.cli.conftest import Cli
from tests.kit.damage import sealed
from tests.kit.texts import ESCAPES

EVIL = "".join(ESCAPES[:-1])  # JSON has no lone surrogate
NAME = f"model/{EVIL}"


@pytest.fixture
def hostile(backend: StorageBackend) -> None:
    for step in (1, 2):
        write_checkpoint(
            backend,
            step,
            {NAME: np.arange(step, step + 4)},
            tree={
                EVIL: {EVIL: EVIL, "n": step},
                "o": {
                    "$": "optimizer",
                    "groups": [{"params": [EVIL], "values": {EVIL: EVIL}}],
                    "state": {},
                },
                "t": {"$": "tensor", "n": NAME},
            },
            metadata={EVIL: EVIL},
            tied={f"{NAME}2": NAME},
            per_rank={0: {EVIL: 1}},
        )


VERBS = (
    "ls",
    "ls --root runs --root memory://none",
    "show",
    "show --files",
    "show --json",
    "verify",
    "verify --all",
    "restore",
    "restore --to there",
    "copy runs elsewhere --all",
    "prune --keep-last 1 --dry-run",
    "finalize",
    "diff runs --step 1 --step 2 --values",
    "diff runs --step 1 --step 2 --json",
    "export runs out.pt",
    "export runs out.safetensors",
    "export runs dcp --format dcp",
    "export runs x.pt --name nothing",
)


@pytest.mark.parametrize("words", VERBS)
def test_no_verb_prints_what_a_terminal_obeys(cli: Cli, hostile: None, words: str) -> None:
    ran = cli(*words.split())
    assert ran.code in (0, 1, 7), ran.err
    for line in (ran.out + ran.err).split("\n"):
        assert line.isprintable(), (words, line)


@pytest.mark.parametrize("words", ["ls", "show", "verify", "restore", "export runs x.pt"])
def test_nor_where_the_manifest_is_damaged(cli: Cli, hostile: None, words: str) -> None:
    for path in Path("runs").glob("step-*/manifest.json"):
        body = json.loads(path.read_bytes())["body"]
        body["attempt"] = body["tensors"][0][1] = body["files"][0][0] = EVIL
        path.write_bytes(sealed(body))
    ran = cli(*words.split())
    assert all(line.isprintable() for line in (ran.out + ran.err).split("\n"))
    assert ran.out + ran.err


def test_what_another_job_calls_itself_is_clean(cli: Cli, backend: StorageBackend) -> None:
    """``writer.json`` reaches errors and the log."""
    owner = replace(Owner.of_this_process(EVIL), host=EVIL)
    backend.put("writer.json", [msgspec.json.encode(owner)])
    with pytest.raises(RootInUse) as caught:
        claim(backend, Owner.of_this_process("abcdef"))
    assert str(caught.value).isprintable()
    with pytest.raises(RootInUse) as caught, CheckpointManager("runs") as manager:
        manager.save({"x": 1}, 1)
    assert str(caught.value).isprintable()

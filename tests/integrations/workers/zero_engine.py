"""Train engines of DeepSpeed with `CkptEngine`: ``zero_engine.py FOLDER ORDER ...``.

An order is the name of a function below, with its arguments after colons (``same:2-bf16``). An
engine is named as in ``zero.py``: its stage, dtype and perhaps a variant.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import pytest
import torch
import zero  # type: ignore[import-not-found]
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from torch import distributed as dist

from ckpt import CheckpointManager
from ckpt.errors import (
    ConfigError,
    IntegrityError,
    NoCheckpoint,
    RestoreError,
    RootInUse,
    UnsupportedValue,
)
from ckpt.integrations.deepspeed import CkptEngine
from tests.kit.damage import files
from tests.kit.deadly import die_in_the_save_of
from tests.servers import free_port

STEPS, MORE = 3, 3
KILLED = 6


def engine_of(kind: str, seed: int, root: Path | None, *tiers: Path) -> Any:
    """Return an engine that saves into ``root``, or one with DeepSpeed's own checkpoint engine."""
    engine = zero.engine_of(kind, seed=seed)
    if root is not None:
        engine.checkpoint_engine = CkptEngine(engine, root, tiers or None)
    return engine


def client_state() -> dict[str, Any]:
    """Return what a script may keep in addition to the engine's own state."""
    scaler = DynamicLossScaler(2.0**16, 1000, 1.0, 2, consecutive_hysteresis=True)
    scaler.update_scale(overflow=True)
    return {
        "epoch": 7,
        "torch_rng": torch.Generator().manual_seed(5).get_state(),
        "numpy_rng": np.random.RandomState(5).get_state(),
        "python_rng": random.Random(5).getstate(),
        "args": argparse.Namespace(lr=0.1, layers=[1, 2]),
        "scaler": scaler,
        "numbers": {1: {2, 3}, "none": None, "nan": float("nan"), "scalar": np.float32(0.5)},
    }


def check_client_state(found: dict[str, Any]) -> None:
    expected = client_state()
    assert found["epoch"] == 7
    assert torch.equal(found["torch_rng"], expected["torch_rng"])
    np.random.RandomState().set_state(found["numpy_rng"])
    assert (found["numpy_rng"][1] == expected["numpy_rng"][1]).all()
    random.Random().setstate(found["python_rng"])
    assert found["python_rng"] == expected["python_rng"]
    assert found["args"] == expected["args"]
    assert type(found["scaler"]) is DynamicLossScaler
    assert vars(found["scaler"]) == vars(expected["scaler"])
    assert found["numbers"][1] == {2, 3}
    assert math.isnan(found["numbers"]["nan"])
    assert type(found["numbers"]["scalar"]) is np.float32


def same(folder: Path, kind: str) -> None:
    """Check that a load goes on with the losses that came after the save, to the bit."""
    root = folder / kind
    engine = engine_of(kind, 1, root)
    zero.train(engine, 0, STEPS)
    assert engine.save_checkpoint(root, client_state=client_state())
    expected = zero.train(engine, STEPS, MORE)  # train while the save streams
    engine.destroy()
    other = engine_of(kind, 2, root)
    path, client = other.load_checkpoint(root)
    assert path is not None
    check_client_state(client)
    assert other.global_steps == STEPS
    versions = other.checkpoint_engine.load(path)["module"]._metadata
    assert versions == other.module.state_dict()._metadata
    found = zero.train(other, STEPS, MORE)
    assert found == expected, f"{kind}: {found} after the load, {expected} before"
    other.destroy()


def partly(folder: Path, kind: str, option: str) -> None:
    """Check that a load of a part does what it does with DeepSpeed's own engine."""
    ours, theirs = folder / f"ours-{kind}-{option}", folder / f"theirs-{kind}-{option}"
    options = {option: option == "load_module_only"}
    losses: list[list[float]] = []
    for root in (ours, theirs):
        engine = engine_of(kind, 1, root if root is ours else None)
        zero.train(engine, 0, STEPS)
        engine.save_checkpoint(root)
        engine.destroy()
        other = engine_of(kind, 2, root if root is ours else None)
        assert other.load_checkpoint(root, **options)[0] is not None
        assert other.global_steps == (0 if option == "load_module_only" else STEPS)
        losses.append(zero.train(other, STEPS, MORE))
        other.destroy()
    assert losses[0] == losses[1]


def tags(folder: Path, kind: str) -> None:
    """Use tags of the user's own, saved again, twice in a step, and without ``latest``."""
    root = folder / "tags"
    engine = engine_of(kind, 1, root)
    zero.train(engine, 0, 1)
    engine.save_checkpoint(root, tag="best")
    zero.train(engine, 1, 1)
    engine.save_checkpoint(root)
    engine.save_checkpoint(root, tag="best", client_state={"second": True})
    engine.save_checkpoint(root, tag="of/a run", save_latest=False)
    engine.checkpoint_engine.pending.result()
    dist.barrier()  # Rank 0 writes the file
    assert (root / "latest").read_text() == "best"
    path, client = engine.load_checkpoint(root, tag="of/a run")
    assert (path is not None, "second" in client) == (True, False)
    _, client = engine.load_checkpoint(root)
    assert client["second"]
    engine.destroy()
    other = engine_of(kind, 2, root)
    assert other.load_checkpoint(root)[1]["second"]
    assert other.global_steps == 2
    assert "second" not in other.load_checkpoint(root, tag="global_step2")[1]
    with CheckpointManager(root) as manager:
        assert manager.steps() == [1, 2, 3, 4]
    # an older tag is loaded on purpose: the next save is the newest nevertheless
    other.save_checkpoint(root, tag="again")
    other.checkpoint_engine.pending.result()
    dist.barrier()  # Rank 0 writes the file
    assert (root / "latest").read_text() == "again"
    other.destroy()


def farther(folder: Path, kind: str) -> None:
    """Load when the near tier and the folder are gone, as on a new machine."""
    root, near, far = folder / "farther", folder / "near", folder / "far"
    engine = engine_of(kind, 1, root, near, far)
    zero.train(engine, 0, STEPS)
    engine.save_checkpoint(root, tag="first")
    engine.save_checkpoint(root, tag="aside", save_latest=False)
    expected = zero.train(engine, STEPS, MORE)
    engine.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root)
        shutil.rmtree(near)
    dist.barrier()
    other = engine_of(kind, 2, root, near, far)
    dist.barrier()  # Rank 0 writes the file
    assert (root / "latest").read_text() == "first"
    assert (root / "aside").is_dir()
    assert other.load_checkpoint(root)[0] is not None
    assert zero.train(other, STEPS, MORE) == expected
    other.destroy()


def exported(folder: Path, kind: str) -> None:
    """Check that DeepSpeed's own engine loads what ``export`` writes."""
    root, out = folder / f"export-{kind}", folder / f"out-{kind}"
    engine = engine_of(kind, 1, root)
    zero.train(engine, 0, STEPS)
    engine.save_checkpoint(root, tag="last")
    expected = zero.train(engine, STEPS, MORE)
    engine.checkpoint_engine.pending.result()
    if dist.get_rank() == 0:
        paths = engine.checkpoint_engine.export("last", out)
        assert sorted(Path(path).name for path in paths) == sorted(
            path.name for path in (root / "last").iterdir()
        )
        with pytest.raises(NoCheckpoint, match="no step has the tag 'absent'"):
            engine.checkpoint_engine.export("absent", out)
    dist.barrier()
    engine.destroy()
    other = engine_of(kind, 2, None)
    assert other.load_checkpoint(out)[0] is not None
    assert zero.train(other, STEPS, MORE) == expected
    other.checkpoint_engine = CkptEngine(other, folder / f"other-{kind}")
    with pytest.raises(RestoreError, match="before you set engine"):
        other.load_checkpoint(out)
    other.destroy()


def refused(folder: Path, kind: str) -> None:
    """Check that what cannot be saved gives one error, and that the next save is whole."""
    root = folder / "refused"
    engine = engine_of(kind, 1, root)
    zero.train(engine, 0, 1)
    named = [name for name in vars(CheckpointEngine) if not name.startswith("_")]
    assert all(callable(getattr(engine.checkpoint_engine, name)) for name in named)
    with pytest.raises(UnsupportedValue, match=r"client_state takes.*state_dict\(\) there"):
        engine.save_checkpoint(root, client_state={"held": torch.nn.Linear(2, 2)})
    with pytest.raises(UnsupportedValue, match=r"parts/mp_rank_00_model_states/odd/ckpt.kind"):
        engine.save_checkpoint(root, client_state={"odd": {"ckpt.kind": 1}})
    with pytest.raises(ConfigError, match="is not in the folder of a tag in"):
        engine.save_checkpoint(folder / "elsewhere")
    with pytest.raises(ConfigError, match="is not in the folder of a tag in"):
        engine.save_checkpoint(root, tag=".")
    for tag in ("latest", "latest/of/a run"):
        with pytest.raises(ConfigError, match="a tag cannot be 'latest'"):
            engine.save_checkpoint(root, tag=tag)
    with pytest.raises(NoCheckpoint, match="no step has the tag 'absent', and there is no other"):
        engine.load_checkpoint(root, tag="absent")
    with pytest.raises(NoCheckpoint, match="the tag 'absent' there, and CkptEngine has the folder"):
        engine.load_checkpoint(folder / "elsewhere", tag="absent")
    zero.train(engine, 1, 1)
    assert not (root / "latest").exists()
    engine.save_checkpoint(root, tag="good")
    engine.checkpoint_engine.pending.result()
    note = str(root / "good" / "mp_rank_00_model_states.pt")
    assert "later" not in engine.checkpoint_engine.load(note)
    engine.save_checkpoint(root, tag="good", client_state={"later": True})
    assert engine.checkpoint_engine.load(note)["later"]
    engine.save_16bit_model(folder / "bit16")
    assert torch.load(folder / "bit16" / "pytorch_model.bin", weights_only=True).keys()
    zero.train(engine, 2, 1)
    with CheckpointManager(root) as manager:
        for step in manager.steps():
            shutil.rmtree(next(root.glob(f"step-{step:09}*")))
    with pytest.raises(NoCheckpoint, match="no step has the tag 'good'"):
        engine.load_checkpoint(root, tag="good")
    engine.destroy()


def peer(folder: Path, kind: str) -> None:
    """Give rank 0 a value that cannot be saved: the other rank gets the reason, and goes on."""
    root = folder / "peer"
    engine = engine_of(kind, 1, root)
    zero.train(engine, 0, 1)
    bad = {"held": torch.nn.Linear(2, 2)}
    if dist.get_rank() == 0:
        with pytest.raises(UnsupportedValue, match="held"):
            engine.save_checkpoint(root, client_state=bad)
        dist.barrier()  # DeepSpeed waits here at the end
    else:
        engine.save_checkpoint(root, client_state=bad)
        assert "held" in str(engine.checkpoint_engine.pending.exception(60))
    zero.train(engine, 1, 1)
    engine.save_checkpoint(root, tag="good")
    engine.checkpoint_engine.pending.result()
    assert engine.load_checkpoint(root, tag="good")[0] is not None
    engine.destroy()


def apart(folder: Path, kind: str) -> None:
    """Commit a save when rank 0 has read ``latest``, and rank 1 has not."""
    root = folder / f"apart-{kind}"
    engine = engine_of(kind, 1, root)
    for step, tag in enumerate(("older", "newer")):
        zero.train(engine, step, 1)
        engine.save_checkpoint(root, tag=tag)
        engine.checkpoint_engine.pending.result()
        dist.barrier()
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    with pytest.raises(RestoreError, match=r"step 1 with the tag 'older', and rank 1 step 2 with"):
        engine.load_checkpoint(root, tag=("older", "newer")[dist.get_rank()])
    if not kind.startswith("3"):  # There a load puts the parts of the parameters away first
        for one, two in zip(before, engine.module.parameters(), strict=True):
            assert torch.equal(one, two)
    assert engine.load_checkpoint(root)[0] is not None
    engine.destroy()


def damaged(folder: Path, kind: str) -> None:
    """The file of rank 1 is damaged, which no other rank reads: no rank waits for another one."""
    root = folder / f"damaged-{kind}"
    engine = engine_of(kind, 1, root)
    zero.train(engine, 0, 1)
    engine.save_checkpoint(root)
    engine.checkpoint_engine.pending.result()
    dist.barrier()
    file = files(root, 1)["data"].with_name("rank-00001.safetensors")
    content = file.read_bytes()
    dist.barrier()
    if dist.get_rank() == 0:
        file.write_bytes(bytes(byte ^ 0xFF for byte in content))
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(IntegrityError):
            engine.load_checkpoint(root)
    else:
        with pytest.raises(RestoreError, match=r"rank 1 cannot load .*_states\.pt: .*checksum"):
            engine.load_checkpoint(root)
    dist.barrier()  # All ranks are here at once, not when the process group has timed out
    if dist.get_rank() == 0:
        file.write_bytes(content)
    dist.barrier()
    assert engine.load_checkpoint(root)[0] is not None
    engine.destroy()


def absent(folder: Path, kind: str) -> None:
    """A tag that no rank has, or that one rank lacks, gives the same error on all ranks."""
    root = folder / f"absent-{kind}"
    engine = engine_of(kind, 1, root)
    for step, tag in enumerate(("older", "newer")):
        zero.train(engine, step, 1)
        engine.save_checkpoint(root, tag=tag)
    engine.checkpoint_engine.pending.result()
    with pytest.raises(NoCheckpoint, match="tag 'absent', the tags are 'newer', 'older'"):
        engine.load_checkpoint(root, tag="absent")
    with pytest.raises(NoCheckpoint, match="tag 'absent', the tags are 'newer', 'older'"):
        engine.load_checkpoint(root, tag=("older", "absent")[dist.get_rank()])
    assert engine.load_checkpoint(root, tag="older")[0] is not None
    engine.destroy()


def second_job(folder: Path, kind: str) -> None:
    """Start another job on the root of a running one: it saves nothing, and the first
    one goes on.
    """
    root = folder / "second"
    engine = engine_of(kind, 1, root)
    zero.train(engine, 0, 1)
    engine.save_checkpoint(root, tag="first")
    engine.checkpoint_engine.pending.result()
    other = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, __file__, folder, f"refused_root:{kind}"],
        env=os.environ | other,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (root / "latest").read_text() == "first"
    zero.train(engine, 1, 1)
    engine.save_checkpoint(root, tag="next")
    engine.checkpoint_engine.pending.result()
    assert (root / "latest").read_text() == "next"
    engine.destroy()


def refused_root(folder: Path, kind: str) -> None:
    """Check that the second job may load, and that its save is refused."""
    engine = engine_of(kind, 2, folder / "second")
    assert engine.load_checkpoint(folder / "second")[0] is not None
    zero.train(engine, 1, 1)
    engine.save_checkpoint(folder / "second", tag="mine")
    engine.checkpoint_engine.pending.wait()
    with pytest.raises(RootInUse):  # The next call raises it, and so would pending.result()
        engine.save_checkpoint(folder / "second", tag="mine")
    with suppress(RootInUse):  # It may have begun
        engine.destroy()


def not_made(folder: Path, kind: str) -> None:
    """Try engines and roots for which no `CkptEngine` can be made."""
    engine = zero.engine_of(kind, seed=1)
    with CheckpointManager(folder / "manager") as manager:
        manager.save({"model": engine.module, "step": 3})
    with pytest.raises(ConfigError, match=r"steps that CkptEngine has not saved.*zero_state"):
        CkptEngine(engine, folder / "manager")
    hostile = [("../out", "x"), ("/out", "x"), (".", "x"), ("a/../../out", "x"), ("a", "../../x")]
    for number, (tag, part) in enumerate(hostile):
        with CheckpointManager(folder / "hostile") as manager:
            about = {"tag": tag, "latest": True}
            manager.restore({"deepspeed": dict(about)}, only="deepspeed")
            manager.save({"deepspeed": about, "parts": {part: {}}, "step": number})
    before = sorted(folder.iterdir())
    CkptEngine(engine, folder / "notes", folder / "hostile").cleanup()
    assert sorted(folder.iterdir()) == before
    for name, said in (
        ("load_universal_checkpoint", "checkpoint.load_universal"),
        ("use_node_local_storage", "checkpoint.use_node_local_storage"),
        ("zero_nvme_offload_optimizer", "an optimizer or parameters on NVMe"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, name, lambda: True)
            with pytest.raises(ConfigError, match=f"{said}.*zero_state"):
                CkptEngine(engine, folder / "none")
    assert not (folder / "none").exists()
    engine.destroy()


def save(folder: Path, kind: str) -> None:
    engine = engine_of(kind, 1, folder / kind)
    zero.train(engine, 0, STEPS)
    engine.save_checkpoint(folder / kind)
    engine.destroy()


def other_world(folder: Path, kind: str) -> None:
    """Load what another number of ranks has saved."""
    engine = engine_of(kind, 2, folder / kind)
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt").addHandler(handler)
    with pytest.raises(Exception, match=r"world size|zero_state") as raised:
        engine.load_checkpoint(folder / kind)
    assert "zero_state" in str(raised.value) or any("zero_state" in each for each in heard)
    if not kind.startswith("3"):
        assert engine.load_checkpoint(folder / kind, load_module_only=True)[0] is not None
    engine.destroy()


def weights_of_3(folder: Path, kind: str) -> None:
    """Under ZeRO 3, DeepSpeed itself reads the files to load only weights: they must be
    exported.
    """
    root, out = folder / "weights", folder / "weights-out"
    engine = engine_of(kind, 1, root)
    zero.train(engine, 0, STEPS)
    engine.save_checkpoint(root)
    engine.destroy()
    other = engine_of(kind, 2, root)
    with pytest.raises(UnpicklingError):
        other.load_checkpoint(root, load_optimizer_states=False)
    if dist.get_rank() == 0:
        other.checkpoint_engine.export(f"global_step{STEPS}", out)
    dist.barrier()
    other.destroy()
    last = engine_of(kind, 2, None)
    assert last.load_checkpoint(out, load_optimizer_states=False)[0] is not None
    last.destroy()


def train(folder: Path, kind: str, steps: str, dies: str = "") -> None:
    """Train to a step from the newest checkpoint on, and save every second step.

    With ``dies`` every rank is killed in the middle of the save of ``KILLED``.
    """
    if dies:
        die_in_the_save_of(KILLED)
    engine = engine_of(kind, 1, folder / "run")
    engine.load_checkpoint(folder / "run")
    rank = dist.get_rank()
    with (folder / f"losses-{rank}").open("a") as losses:
        print(f"from {engine.global_steps}", file=losses, flush=True)
        while engine.global_steps < int(steps):
            (loss,) = zero.train(engine, engine.global_steps, 1)
            print(engine.global_steps, repr(loss), file=losses, flush=True)
            if engine.global_steps % 2 == 0:
                engine.save_checkpoint(folder / "run")
    engine.destroy()


ORDERS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        *(same, partly, tags, farther, exported, refused, peer, apart, not_made),
        *(absent, damaged, second_job, refused_root),
        *(save, other_world, weights_of_3, train),
    )
}


if __name__ == "__main__":
    zero.main(ORDERS)

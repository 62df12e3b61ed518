"""Models that are trained in part, and functions that look at the steps of such a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import nn

import ckpt
from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import committed, read_manifest
from ckpt.catalog.step_repair import mend_step
from ckpt.catalog.verify import StepFolder, verify_step
from ckpt.model.checksum import checksum
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Manifest, Packed, bases_of
from ckpt.model.record_encoding import pack, unpack
from ckpt.pipeline.workers import Workers
from ckpt.root.pins import BASE_END, all_pins
from ckpt.storage.registry import open_backend

LAYERS = 6

WIDTH = 128


class Adapted:
    """A model whose last layer alone is trained, as with LoRA."""

    def __init__(self, frozen: int = LAYERS - 1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        for layer in list(self.model)[:frozen]:
            layer.requires_grad_(False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained)

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> None:
        self.model(torch.randn(2, WIDTH)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def change(self, layer: int) -> None:
        with torch.no_grad():
            list(self.model.parameters())[2 * layer].add_(1)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def save(
    root: Tier | Path | list[Tier],
    count: int = 4,
    *,
    between: Callable[[Adapted, int], None] = lambda *_: None,
    **settings: object,
) -> dict[int, Mapping[str, torch.Tensor]]:
    """Save some steps, and return the weights of each."""
    training = Adapted()
    weights: dict[int, Mapping[str, torch.Tensor]] = {}
    with CheckpointManager(root, **settings) as manager:  # type: ignore[arg-type]
        for step in range(1, count + 1):
            training.train()
            between(training, step)
            manager.save_async(training.state, step).result()
            weights[step] = training.weights()
    return weights


def check(root: Path, weights: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
    for ref in committed(open_backend(str(root))):
        loaded = ckpt.load(root, "model", step=ref.step)
        for name, value in weights[ref.step].items():
            assert torch.equal(loaded[name], value), (ref.step, name)


def ref_of(root: Path, step: int) -> StepRef:
    return next(ref for ref in committed(open_backend(str(root))) if ref.step == step)


def size_of(root: Path, step: int) -> int:
    return sum(
        path.stat().st_size
        for path in (root / ref_of(root, step).folder).iterdir()
        if path.suffix in (".safetensors", ".encoded")
    )


def bases(root: Path, step: int) -> set[int]:
    manifest = read_manifest(open_backend(str(root)), ref_of(root, step))
    return {ref.step for ref in manifest.bases}


class Lora(nn.Module):
    """Frozen layers, and an adapter of two small matrices that is trained."""

    def __init__(self, rank: int = 4, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.base.requires_grad_(False)
        torch.manual_seed(rank)
        self.down, self.up = nn.Linear(WIDTH, rank), nn.Linear(rank, WIDTH)


def save_lora(tier: Tier | str | Path | list[Tier], rank: int = 4, count: int = 2) -> Lora:
    """Save some steps of a LoRA run, and return its model."""
    model = Lora(rank)
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    with CheckpointManager(tier, journal=False) as manager:  # type: ignore[arg-type]
        for step in range(1, count + 1):
            model.up(model.down(torch.ones(1, WIDTH))).sum().backward()
            optimizer.step()
            manager.save({"model": model, "optimizer": optimizer}, step)
    return model


def check_model(root: object, model: Lora, step: int | None = None) -> None:
    loaded = ckpt.load(root, "model", step=step)  # type: ignore[arg-type]
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value), name


def outer_bases(root: Path, step: int) -> set[str]:
    """Return the root and the number of each step of another root that a step refers to."""
    manifest = read_manifest(open_backend(str(root)), ref_of(root, step))
    bases = bases_of(manifest.increments)
    return {f"{base.root} {base.ref.step}" for base in bases if base.root}


def base_pins(root: Path) -> list[int]:
    pins = all_pins(open_backend(str(root)))
    return [pin.ref.step for pin in pins if pin.until == BASE_END]


def mend(root: Path, step: int, source: Path, codec: str = "none") -> None:
    backend, ref = open_backend(str(root)), ref_of(root, step)
    with Workers("test", 1) as workers:
        mend_step(
            [open_backend(str(source))],
            StepFolder(backend, ref, workers),
            verify_step(backend, ref, workers=workers).faults,
            codec=codec,
            confirm=lambda: None,
            on_bytes=lambda _: None,
        )


def refer(root: Path, step: int, base: str) -> None:
    """Let the manifest and the fragment of a step say that its base is another one."""
    ref = ref_of(root, step)
    paths = root / ref.key("rank-00000.json"), root / ref.manifest
    fragment = unpack(paths[0].read_bytes(), Packed, key="fragment")
    manifest = unpack(paths[1].read_bytes(), Manifest, key="manifest")
    increments = (replace(manifest.increments[0], base=base),)
    data = pack(replace(fragment, increments=increments))
    paths[0].write_bytes(data)
    (present,) = manifest.fragments
    fragments = (replace(present, size=len(data), checksum=checksum(data)),)
    paths[1].write_bytes(pack(replace(manifest, increments=increments, fragments=fragments)))

"""Tiers with a codec, from the training loop to the restored state."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import committed, read_manifest
from ckpt.catalog.transfer import fetch_step
from ckpt.catalog.verify import StepFolder, verify_step
from ckpt.config import SaveConfig, load_config
from ckpt.errors import ConfigError, FormatTooNew, IntegrityError
from ckpt.model import record_encoding
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import flip_byte
from tests.servers import KEY, SECRET

_numbers = itertools.count()
ENCODED, RAW = "rank-00000.encoded", "rank-00000.safetensors"


def state(seed: int, rows: int = 1200) -> dict[str, object]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) * 0.02).to(dtype)

    return {
        "weight": normal(rows, 1000),
        "half": normal(1001, 700, dtype=torch.bfloat16),
        "double": normal(1003, dtype=torch.float64),
        "complex": torch.view_as_complex(normal(500, 2)),
        "ids": torch.arange(seed, seed + 100_000),
        "flags": torch.arange(77) % 3 == 0,
        "noise": torch.randint(0, 256, (200_000,), generator=random, dtype=torch.uint8),
        "empty": torch.zeros(0, 3),
        "step": seed,
    }


def same(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    return all(
        torch.equal(value, two[key]) if isinstance(value, torch.Tensor) else value == two[key]
        for key, value in one.items()
    )


def save(tiers: list[Tier], step: int = 5, **config: object) -> dict[str, object]:
    saved = state(step)
    with CheckpointManager(tiers, config=SaveConfig(chunk_size=1 << 20, **config)) as manager:  # type: ignore[arg-type]
        manager.save_async(saved, step).result(60)
    return saved


def restored(tier: Tier) -> dict[str, object]:
    found = state(0)
    with CheckpointManager([tier]) as manager:
        assert manager.restore(found) is not None
    return found


def files(root: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in root.glob("step-*/*")}


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.server)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    if request.param == "folder":
        return Tier(str(tmp_path / "coded"), codec="zstd")
    server = request.getfixturevalue("moto_server")
    options = {"key": KEY, "secret": SECRET, "region": "us-east-1", "endpoint_url": server.url}
    return Tier(f"s3://bucket/codec-{next(_numbers)}", options, codec="zstd")


def test_what_was_saved_comes_back_bit_for_bit_and_reads_less(place: Tier) -> None:
    saved, found = save([place]), state(0)
    with CheckpointManager([place]) as manager:
        report = manager.restore(found)
    assert same(saved, found)
    assert report is not None
    assert report.read_bytes < report.nbytes * 0.85
    backend = open_backend(place.url, place.options)
    try:
        (ref,) = committed(backend)
        manifest = read_manifest(backend, ref)
        assert manifest.codecs == ("zstd",)
        assert manifest.files[0].name == ENCODED
        assert backend.head(ref.key(ENCODED)).size == manifest.stored_bytes < manifest.nbytes
        with Workers("test", 2) as workers:
            assert verify_step(backend, ref, workers=workers).intact
    finally:
        backend.close()


@pytest.mark.parametrize(
    "codecs", [("none", "zstd"), ("zstd", "none"), ("zstd", "zstd:3"), ("zstd", "none", "zstd")]
)
def test_tiers_drain_from_each_other_whatever_their_codecs(
    tmp_path: Path, codecs: tuple[str, ...]
) -> None:
    tiers = [Tier(str(tmp_path / str(index)), codec=codec) for index, codec in enumerate(codecs)]
    saved = save(tiers)
    tables = set()
    for tier in tiers:
        assert (RAW if tier.codec == "none" else ENCODED) in files(Path(tier.url))
        assert same(saved, restored(tier))
        backend = open_backend(tier.url)
        tables.add(read_manifest(backend, committed(backend)[0]).files[0].chunks)
    assert len(tables) == 1, "a chunk has one identity on all tiers"


def test_a_state_larger_than_its_staging_memory(tmp_path: Path) -> None:
    tier = Tier(str(tmp_path), codec="zstd")
    saved = {"x": torch.randn(200 << 18) * 0.02, "y": torch.zeros(10)}
    with CheckpointManager(tier, config=SaveConfig(host_memory=176 << 20, slots=1)) as manager:
        manager.save_async(saved, 1).result(120)
    found = {"x": torch.empty(200 << 18), "y": torch.ones(10)}
    with CheckpointManager(tier) as manager:
        manager.restore(found)
    assert same(saved, found)


def test_memory_before_a_tier_with_a_codec(tmp_path: Path) -> None:
    saved = save([Tier("memory"), Tier(str(tmp_path), codec="zstd")])
    assert same(saved, restored(Tier(str(tmp_path))))


def test_a_manager_that_names_no_codec_reads_what_one_with_it_wrote(tmp_path: Path) -> None:
    saved = save([Tier(str(tmp_path), codec="zstd")])
    assert same(saved, restored(Tier(str(tmp_path))))


def test_a_part_of_a_tensor_is_read_through_the_chunks_that_hold_it(tmp_path: Path) -> None:
    """Another mesh would ask for it like this."""
    from ckpt.model.box import Box
    from ckpt.pipeline.chunk_reader import ChunkReader, read_plan
    from ckpt.pipeline.retry import RetryPolicy
    from ckpt.plan.leaf import Leaf
    from ckpt.plan.restore import ChunkRead, plan_restore

    saved = save([Tier(str(tmp_path), codec="zstd")])
    backend = open_backend(str(tmp_path))
    (ref,) = committed(backend)
    manifest = read_manifest(backend, ref)
    box = Box((700, 30), (301, 50))
    out = torch.zeros(box.shape)

    class Sink:
        def direct(self, read: ChunkRead) -> None:
            return None

        def place(self, read: ChunkRead, data: memoryview) -> None:
            chunk = torch.frombuffer(data, dtype=torch.float32).view(read.box.shape)
            for target in read.targets:
                out[target.part.relative_to(box).slices()] = chunk[
                    target.part.relative_to(read.box).slices()
                ]

    plan = plan_restore(manifest, [Leaf("weight", "float32", (1200, 1000), (box,))])
    assert plan.read_bytes < manifest.stored_bytes / 2
    with Workers("test", 2) as workers:
        read_plan(
            plan,
            Sink(),
            reader=ChunkReader(backend, RetryPolicy()),
            files=manifest.stored_files(),
            workers=workers,
            on_bytes=lambda _: None,
        )
    assert torch.equal(out, saved["weight"][700:1001, 30:80])  # type: ignore[index]


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.95])
def test_damage_is_found_and_the_step_before_restored(tmp_path: Path, share: float) -> None:
    tier = Tier(str(tmp_path), codec="zstd")
    older = save([tier], 1)
    with CheckpointManager([tier]) as manager:
        manager.save_async(state(2), 2).result(60)
    backend = open_backend(str(tmp_path))
    newest = committed(backend)[0]
    key = newest.key(ENCODED)
    flip_byte(backend, key, int(backend.head(key).size * share))
    with Workers("test", 2) as workers:
        verified = verify_step(backend, newest, workers=workers)
        assert [fault.key for fault in verified.faults] == [key]
        with pytest.raises(IntegrityError):
            fetch_step([backend], StepFolder(open_backend(str(tmp_path / "copy")), newest, workers))
    assert not list((tmp_path / "copy").glob("*/manifest.json"))
    found = state(0)
    with CheckpointManager([tier]) as manager:
        report = manager.restore(found)
        assert report is not None
        assert report.step == 1
    assert same(older, found)


def test_a_cut_file_is_found(tmp_path: Path) -> None:
    save([Tier(str(tmp_path), codec="zstd")])
    (path,) = tmp_path.glob(f"step-*/{ENCODED}")
    path.write_bytes(path.read_bytes()[:-1])
    backend = open_backend(str(tmp_path))
    with Workers("test", 2) as workers:
        assert not verify_step(backend, committed(backend)[0], workers=workers).intact


def test_a_fetch_copies_what_lies_there(tmp_path: Path) -> None:
    saved = save([Tier(str(tmp_path / "a"), codec="zstd")])
    source, copy = open_backend(str(tmp_path / "a")), open_backend(str(tmp_path / "b"))
    (ref,) = committed(source)
    with Workers("test", 2) as workers:
        report = fetch_step([source], StepFolder(copy, ref, workers))
        again = fetch_step([source], StepFolder(copy, ref, workers))
    assert report.copied_bytes == report.nbytes == read_manifest(source, ref).stored_bytes
    assert again.copied_bytes == 0
    names = {name: size for name, size in files(tmp_path / "a").items() if name != "writer.json"}
    assert files(tmp_path / "b") == names
    assert same(saved, restored(Tier(str(tmp_path / "b"))))


def test_a_step_that_is_pruned_leaves_nothing(tmp_path: Path) -> None:
    tier = Tier(str(tmp_path), codec="zstd", keep_last=1)
    with CheckpointManager(tier) as manager:
        for step in (1, 2, 3):
            manager.save_async(state(step, rows=10), step).result(60)
    assert sorted(files(tmp_path)) == ["manifest.json", ENCODED, "rank-00000.json"]


def test_without_a_codec_nothing_tells_of_codecs(tmp_path: Path) -> None:
    save([Tier(str(tmp_path))])
    paths = sorted(tmp_path.glob("step-*/*.json"))
    assert [path.name for path in paths] == ["manifest.json", "rank-00000.json"]
    for path in paths:
        body = msgspec.json.decode(path.read_bytes())["body"]
        assert "encoded" not in body


def test_an_older_reader_says_that_it_must_be_upgraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save([Tier(str(tmp_path), codec="zstd")])
    monkeypatch.setattr(record_encoding, "FORMAT", 1)
    backend = open_backend(str(tmp_path))
    with pytest.raises(FormatTooNew, match="pip install -U"):
        read_manifest(backend, committed(backend)[0])


@pytest.mark.parametrize(
    "codec", ["lz4", "", "zstd:", "zstd:0", "zstd:99", "none:3", "ZSTD", "zstd:x", 3, None]
)
def test_an_unknown_codec_is_refused_at_once(codec: object) -> None:
    with pytest.raises(ConfigError, match="choose 'none', 'zstd'"):
        Tier("runs", codec=codec)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["memory", "shm://test-codec-{pid}"])
def test_memory_takes_no_codec(tmp_path: Path, url: str) -> None:
    url = url.format(pid=os.getpid())
    with pytest.raises(ConfigError, match="leave codec out"):
        CheckpointManager([Tier(url, codec="zstd"), Tier(str(tmp_path))])


def test_a_codec_may_stand_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "ckpt.toml").write_text(
        '[[tiers]]\nurl = "/a"\ncodec = "zstd:3"\n[[tiers]]\nurl = "/b"\n'
    )
    assert [tier.codec for tier in load_config(tmp_path / "ckpt.toml").tiers] == ["zstd:3", "none"]
    (tmp_path / "ckpt.toml").write_text('[[tiers]]\nurl = "/a"\ncodec = "rar"\n')
    with pytest.raises(ConfigError, match="rar"):
        load_config(tmp_path / "ckpt.toml")

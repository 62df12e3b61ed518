"""Scenario 9: what a codec makes of a trained model: how much shorter, how fast, for how much of
the processor.

The peer is ``zipnn``, if it is installed: it is in no extra, since it fixes the versions of what it
needs (``pip install --no-deps zipnn==0.5.4``).
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import zstandard

from bench import plots
from bench.measure import Spread
from bench.result import Column, Line, Result
from bench.runner import Bench
from bench.scenarios import option
from ckpt.codec.zstd_byte_planes import BytePlanes, decode

_CHUNK: Final = 16 << 20
_WIDTHS: Final = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, kw_only=True)
class Options:
    steps: int = option(
        300,
        "of AdamW the small GPT of the examples is trained before, so that its weights are not "
        "their initialization",
    )
    layers: int = option(4, "of that GPT, 256 wide")
    size_mib: int = option(64, "of each kind of bytes: the tensors again and again")
    threads: tuple[int, ...] = option((1, 2), "that work at once")
    repeats: int = option(5, "of each, in turns")
    budget_seconds: float = option(420.0, "after which no other kind of bytes is begun")


QUICK = Options(steps=2, layers=1, size_mib=2, threads=(1,), repeats=2, budget_seconds=20)


class Coder(Protocol):
    """Bytes there and back. ``encode`` returns what ``decode`` takes, and its length."""

    label: str

    def encode(self, raw: bytes) -> tuple[Any, int]: ...
    def decode(self, coded: Any, nbytes: int) -> bytes | bytearray: ...


class Ours:
    """The chunks of a tier with ``codec="zstd"``, encoded and decoded by as many workers."""

    def __init__(self, kind: str, threads: int) -> None:
        self.label = f"ckpt zstd, {threads} thread{'s' * (threads > 1)}"
        self._width, self._encoder, self._pool = (
            _WIDTHS[kind],
            BytePlanes(),
            ThreadPoolExecutor(threads),
        )

    def encode(self, raw: bytes) -> tuple[list[bytes], int]:
        def one(start: int) -> bytes:
            return b"".join(
                self._encoder.encode(memoryview(raw)[start : start + _CHUNK], self._width)
            )

        coded = list(self._pool.map(one, range(0, len(raw), _CHUNK)))
        return coded, sum(map(len, coded))

    def decode(self, coded: list[bytes], nbytes: int) -> bytearray:
        out = bytearray(nbytes)

        def one(index: int) -> None:
            place = memoryview(out)[index * _CHUNK : (index + 1) * _CHUNK]
            if len(coded[index]) == place.nbytes:
                place[:] = coded[index]
            else:
                decode(memoryview(coded[index]), place)

        list(self._pool.map(one, range(len(coded))))
        return out


class ZipNN:
    """As its authors call it for bytes of one type."""

    def __init__(self, kind: str, threads: int) -> None:
        self.label = f"zipnn, {threads} thread{'s' * (threads > 1)}"
        names = {"bf16": "bfloat16", "fp32": "float32"}
        # untyped where it is installed, not found where it is not
        make = import_module("zipnn").ZipNN
        self._coder = make(bytearray_dtype=names[kind], input_format="byte", threads=threads)

    def encode(self, raw: bytes) -> tuple[list[Any], int]:
        # chunks too, as it is slower with larger pieces; a bytearray, since it writes to what it is
        # given
        coded = [
            self._coder.compress(bytearray(memoryview(raw)[start : start + _CHUNK]))
            for start in range(0, len(raw), _CHUNK)
        ]
        return coded, sum(map(len, coded))

    def decode(self, coded: list[Any], nbytes: int) -> bytearray:
        out = bytearray(nbytes)
        for index, chunk in enumerate(coded):
            place = memoryview(out)[index * _CHUNK : (index + 1) * _CHUNK]
            place[:] = self._coder.decompress(chunk)
        return out


class Plain:
    """The bytes as they are: zstd level 1, one thread."""

    label = "zstd 1 of the bytes, 1 thread"

    def encode(self, raw: bytes) -> tuple[bytes, int]:
        coded = zstandard.ZstdCompressor(level=1).compress(raw)
        return coded, len(coded)

    def decode(self, coded: bytes, nbytes: int) -> bytes:
        return zstandard.ZstdDecompressor().decompress(coded, max_output_size=nbytes)


@dataclass
class _Taken:
    ratio: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"encode": [], "decode": []})
    cpu: dict[str, list[float]] = field(default_factory=lambda: {"encode": [], "decode": []})


def run(bench: Bench, options: Options) -> Result:
    began = time.monotonic()
    lines: list[Line] = []
    for case, kind, raw in _subjects(options):
        if lines and time.monotonic() - began > options.budget_seconds:
            break
        lines += _measure(case, raw, _coders(kind, options.threads), options.repeats)
    columns = (
        Column("ratio", "ratio", "ratio"),
        Column("shorter", "ratio, exactly", "text"),
        Column("encode_bytes_per_second", "encode", "per_second"),
        Column("decode_bytes_per_second", "decode", "per_second"),
        Column("encode_cpu_seconds", "CPU: encode 1 GiB", "seconds"),
        Column("decode_cpu_seconds", "CPU: decode 1 GiB", "seconds"),
    )
    notes = (
        f"A GPT of {options.layers} layers, 256 wide, after {options.steps} steps of AdamW on "
        "CPython's documentation: all its parameters, and AdamW's two moments, as they are "
        "(fp32) and rounded (bf16). "
        "No weights of a large model are on this machine.",
        "Bytes go from memory to memory, in chunks of 16 MiB as on a tier; without checksums, "
        "which a save takes besides. All that is timed was compared with what went in.",
        "Medians of rounds in which each works once. **CPU** is of all threads; on a machine that "
        "others use too it says more than the time.",
    )
    return bench.result("What a codec makes of a trained model", columns, notes, lines)


def plot(result: Result, path: str) -> None:
    panels = (
        plots.Panel(
            "ratio", "ratio", "raw bytes over encoded bytes", kind="ratio", longer_is_better=True
        ),
        plots.Panel(
            "encode_bytes_per_second",
            "encode",
            "raw bytes a second",
            kind="per_second",
            longer_is_better=True,
        ),
        plots.Panel(
            "decode_bytes_per_second",
            "decode",
            "raw bytes a second",
            kind="per_second",
            longer_is_better=True,
        ),
    )
    plots.bars(result, panels, path)


def _coders(kind: str, threads: Sequence[int]) -> dict[str, Coder]:
    found: dict[str, Coder] = {f"ckpt.zstd.{count}": Ours(kind, count) for count in threads}
    if importlib.util.find_spec("zipnn"):
        found |= {f"zipnn.{count}": ZipNN(kind, count) for count in threads}
    return {**found, "zstd1": Plain()}


def _measure(case: str, raw: bytes, coders: dict[str, Coder], repeats: int) -> Iterator[Line]:
    taken = {name: _Taken() for name in coders}
    for number in range(repeats + 1):
        for name, coder in coders.items():
            one = taken[name]
            coded, nbytes = _timed(one, "encode", partial(coder.encode, raw), number)
            back = _timed(one, "decode", partial(coder.decode, coded, len(raw)), number)
            if back != raw:
                raise AssertionError(f"{coder.label} does not give back {case}")
            one.ratio = len(raw) / nbytes
    for name, one in taken.items():
        gib = len(raw) / 2**30
        numbers: dict[str, Any] = {"ratio": one.ratio, "shorter": f"{one.ratio:.4f}"}
        for verb in ("encode", "decode"):
            numbers[f"{verb}_bytes_per_second"] = Spread.of(
                len(raw) / each for each in one.seconds[verb]
            )
            numbers[f"{verb}_cpu_seconds"] = Spread.of(each / gib for each in one.cpu[verb])
        yield Line(case, name, coders[name].label, numbers)


def _timed(taken: _Taken, verb: str, work: Callable[[], Any], number: int) -> Any:
    began, cpu = time.perf_counter(), time.process_time()
    result = work()
    if number:  # the first makes buffers
        taken.seconds[verb].append(time.perf_counter() - began)
        taken.cpu[verb].append(max(time.process_time() - cpu, 1e-9))
    return result


def _subjects(options: Options) -> Iterator[tuple[str, str, bytes]]:
    model, optimizer = _trained(options)
    moments = [optimizer.state[parameter] for parameter in model.parameters()]
    sources = {
        "weights": [parameter.detach() for parameter in model.parameters()],
        "first moments": [state["exp_avg"] for state in moments],
        "second moments": [state["exp_avg_sq"] for state in moments],
    }
    for name, tensors in sources.items():
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        for kind, values in (("bf16", flat.bfloat16()), ("fp32", flat)):
            once = values.view(torch.uint8).numpy().tobytes()
            size = max(options.size_mib << 20, _WIDTHS[kind])
            yield f"{name}, {kind}", kind, (once * (size // len(once) + 1))[:size]


def _trained(options: Options) -> tuple[Any, torch.optim.AdamW]:
    examples = str(Path(__file__).resolve().parents[2] / "examples")
    sys.path.insert(0, examples)
    try:
        gpt = import_module("train_gpt")
    finally:
        sys.path.remove(examples)
    torch.manual_seed(0)
    model = gpt.GPT(options.layers, 256, 128, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    excerpts = gpt.Excerpts(8, 128, 0, 1)
    for _ in range(options.steps):
        optimizer.zero_grad()
        model(next(excerpts)).backward()
        optimizer.step()
    return model, optimizer

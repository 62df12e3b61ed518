"""Measure what TLS costs the copies between nodes, on one machine.

    python -m bench.encryption [--mib 256] [--rounds 5]

One process serves a step in memory, as a node does, without TLS and with it. This process copies
the step into another store in memory, as a buddy does, and checks each chunk. Both kinds are made
in turn. The certificate is made by ``openssl``: P-256.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Final

import torch

from ckpt import CheckpointManager, Tls
from ckpt.catalog.fragments import load_fragment
from ckpt.catalog.step_listing import read_packed
from ckpt.catalog.transfer import copy_files
from ckpt.catalog.verify import StepFolder
from ckpt.model.keys import StepRef
from ckpt.model.manifest import StoredFile
from ckpt.nodes.peer_store import NodeStore
from ckpt.nodes.server import NodeServer
from ckpt.nodes.wire import Peer, StepFiles
from ckpt.pipeline.chunk_reader import ChunkReader, Sink, runs_of
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.restore import ChunkRead
from ckpt.root.attempts import step_refs
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.tls import encryption_of

_KINDS: Final = ("plain", "TLS")


def main() -> None:
    """Copy in turn, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="the size of the step")
    parser.add_argument("--rounds", type=int, default=5, help="copies of each kind")
    args = parser.parse_args()
    name = f"bench-{secrets.token_hex(4)}"
    urls = [f"shm://{name}-{end}" for end in ("from", "to")]
    with CheckpointManager(urls[0]) as manager:
        manager.save({"x": [torch.randn(512, 1024) for _ in range(args.mib // 2)]}, 1)
    stores = [open_backend(url) for url in urls]
    try:
        with tempfile.TemporaryDirectory() as folder:
            _measure(stores[0], stores[1], _certificate(folder), args.rounds)
    finally:
        for store in stores:
            for info in list(store.list("")):
                store.delete(info.key)
            store.close()


def _certificate(folder: str) -> Tls:
    """Return a certificate that is its own authority."""
    tls = Tls(f"{folder}/node.pem", f"{folder}/node.key", f"{folder}/node.pem")
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=bench"
    files = ["-keyout", str(tls.key), "-out", str(tls.certificate)]
    subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)
    return tls


def _measure(source: StorageBackend, target: StorageBackend, tls: Tls, rounds: int) -> None:
    (ref,) = step_refs(source)
    here, there = multiprocessing.Pipe()
    serving = multiprocessing.get_context("fork").Process(
        target=_serve, args=(source, ref, tls, there)
    )
    serving.start()
    try:
        peers: dict[str, Peer] = dict(zip(_KINDS, here.recv(), strict=True))
        copies = {
            kind: _Copies(source, target, ref, peers[kind], tls if kind == "TLS" else None)
            for kind in _KINDS
        }
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
        for number in range(rounds + 1):
            for kind in _KINDS[:: 1 if number % 2 else -1]:
                before = _seconds(here)
                began = time.perf_counter()
                copies[kind].make()
                took = time.perf_counter() - began
                if number:  # The first is not warm
                    found[kind].append((took, _seconds(here) - before))
    finally:
        here.send(False)
        serving.join()
    _show(found, copies["plain"].nbytes)


def _serve(store: StorageBackend, ref: StepRef, tls: Tls, pipe: Connection) -> None:
    servers = [NodeServer({0: store}, encryption=encryption_of(each)) for each in (None, tls)]
    for server in servers:
        server.allow(ref)
    pipe.send([Peer(0, each.addresses, each.port, each.token.hex(), {}) for each in servers])
    while pipe.recv():
        pipe.send(_own_seconds())
    for server in servers:
        server.close()


def _own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _seconds(pipe: Connection) -> float:
    """Return the processor time of both processes so far."""
    pipe.send(True)
    return float(pipe.recv()) + _own_seconds()


class _Copies:
    """Copies of the files of one step, as a buddy makes them."""

    def __init__(
        self,
        source: StorageBackend,
        target: StorageBackend,
        ref: StepRef,
        peer: Peer,
        tls: Tls | None,
    ) -> None:
        self._target, self._ref = target, ref
        manifest, _ = read_packed(source, ref)
        sizes = {file.name: file.size for file in manifest.files}
        tiers = {0: {ref.folder: StepFiles(has_manifest=True, files=sizes)}}
        known = Peer(peer.rank, peer.addresses, peer.port, peer.token, tiers)
        store = NodeStore(0, source.url, [known], encryption_of(tls))
        self._stored: list[StoredFile] = []
        for part in manifest.fragments:
            file = manifest.file_map().get(part.rank)
            fragment, _ = load_fragment(store, ref, manifest, part, file)
            if fragment.file is not None:
                self._stored.append(StoredFile.of(ref, fragment.file, None))
        self.nbytes = sum(file.size for file in self._stored)
        self._reader = ChunkReader(store, RetryPolicy())

    def make(self) -> None:
        """Copy all files, and remove them."""
        with Workers("copies", 1) as workers:
            folder = StepFolder(self._target, self._ref, workers, RetryPolicy(patience_seconds=0))
            copy_files(self._fetch, self._stored, folder)
        for file in self._stored:
            self._target.delete(file.key)

    def _fetch(self, reads: Sequence[ChunkRead], sink: Sink) -> int:
        files = {file.rank: file for file in self._stored}
        for run in runs_of(reads):
            for _, error in self._reader.read(run, files[run.rank], sink):
                raise error
        return 0


def _show(found: dict[str, list[tuple[float, float]]], nbytes: int) -> None:
    print(f"a step of {nbytes / 2**20:.0f} MiB, {len(found['plain'])} copies of each kind, in turn")
    for kind, rows in found.items():
        rates = [nbytes / 2**20 / took for took, _ in rows]
        used = [seconds * 2**30 / nbytes for _, seconds in rows]
        print(
            f"{kind:>6}: {statistics.median(rates):.0f} MiB/s ({min(rates):.0f} to "
            f"{max(rates):.0f}), {statistics.median(used):.2f} s of processor time for a GiB "
            f"({min(used):.2f} to {max(used):.2f})"
        )
    pairs = list(zip(found["TLS"], found["plain"], strict=True))
    slower = statistics.median(tls[0] / plain[0] for tls, plain in pairs)
    dearer = statistics.median(tls[1] / plain[1] for tls, plain in pairs)
    print(f"with TLS {slower:.2f} times the time, {dearer:.2f} times the processor time")


if __name__ == "__main__":
    main()

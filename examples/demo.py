"""Show it: train a GPT, kill -9 everything while a checkpoint streams, resume, compare every loss
bit for bit.

    python examples/demo.py            # DDP and FSDP2, two processes each, less than three minutes
    on two cores

For each mode: an uninterrupted run; a run that is killed with SIGKILL (launcher and all workers)
between the appearance of a step's folder and that of its manifest; `ckpt restore --latest`, as a
job script would; a run that resumes. A person sees the progress on stderr; the result is a table,
or JSON with `--json`, on stdout.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    # with a shared store gloo dials ranks that are gone (torch 2.13)
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Outcome:
    """What one mode showed."""

    parallel: str
    saves: int
    stall_ms: float
    durable_s: float
    killed_step: int
    killed_uncommitted: bool
    resumed_step: int
    compared: int
    equal_losses: int
    reference_loss: float
    resumed_loss: float


@contextmanager
def launched(
    parallel: str, root: Path, losses: Path, options: list[str]
) -> Iterator[subprocess.Popen[str]]:
    """Start `train_gpt.py` under torchrun with two ranks; its output is a pipe; nothing is left
    running.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += [str(HERE / "train_gpt.py"), "--parallel", parallel, *options]
    command += ["--root", str(root), "--losses", str(losses)]
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=pipe, stderr=both, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()  # torchrun takes its workers along; nothing happens if all is over


def show_output(process: subprocess.Popen[str], label: str) -> None:
    """Show what a run says until it ends."""
    assert process.stdout is not None
    for line in process.stdout:
        console.print(f"{label:>16} | {line.rstrip()}", markup=False, soft_wrap=True)
    process.wait()


def train(parallel: str, root: Path, losses: Path, options: list[str]) -> None:
    """Run to the end, or raise."""
    with launched(parallel, root, losses, options) as process:
        show_output(process, f"{parallel} {losses.stem}")
    if process.returncode != 0:
        raise RuntimeError(f"{parallel} {losses.stem}: exit code {process.returncode}")


def process_state(pid: int) -> tuple[str, int]:
    """Return the state letter and the parent of a process; X, as the kernel has it, for one that
    is gone.
    """
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[1])


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`; torchrun's workers are sessions of their own, so a group
    is not enough.
    """
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        children.setdefault(process_state(int(entry))[1], []).append(int(entry))
    found = list(children.get(pid, []))
    for child in found:
        found.extend(children.get(child, []))  # the list grows while it is walked
    return found


def steps(root: Path) -> dict[int, bool]:
    """Return the steps that have a folder under `root`, and whether each is committed."""
    found: dict[int, bool] = {}
    for name in os.listdir(root) if root.exists() else []:
        if name.startswith("step-"):
            step = int(name.removeprefix("step-").partition(".")[0])
            found[step] = found.get(step, False) or (root / name / "manifest.json").exists()
    return found


def kill_while_streaming(
    process: subprocess.Popen[str], root: Path, committed: int = 2
) -> tuple[int, bool]:
    """SIGKILL launcher and workers as soon as a save streams while at least `committed` steps are
    committed.

    Return the newest step that had begun, and whether it was uncommitted when everything was dead:
        the kill may
    come too late, and then this says so.
    """
    victims: list[int] = []
    while process.poll() is None:
        found = steps(root)
        if sum(found.values()) >= committed:
            victims = victims or [*descendants(process.pid), process.pid]
            if not all(found.values()):
                break
        time.sleep(0.0005 if victims else 0.01)
    else:
        raise RuntimeError(
            f"the run ended (exit code {process.returncode}) before it could be killed"
        )
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while any(process_state(pid)[0] not in "ZX" for pid in victims):
        time.sleep(0.001)
    newest, is_committed = max(steps(root).items())
    return newest, not is_committed


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Read a file of JSON lines; a last line cut by the kill is not one."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def losses(path: Path) -> dict[int, str]:
    """Return the exact loss of every step in a file that `--losses` wrote."""
    return {record["step"]: record["loss"] for record in records(path) if "loss" in record}


def show(parallel: str, folder: Path, options: list[str]) -> Outcome:
    """Go through the whole story once."""
    folder.mkdir(parents=True)
    reference, killed, resumed = (
        folder / f"{name}.jsonl" for name in ("reference", "killed", "resumed")
    )

    console.rule(f"{parallel}: an uninterrupted run, for reference")
    train(parallel, folder / "reference", reference, options)

    console.rule(f"{parallel}: a run that is killed while a save streams")
    root = folder / "killed"
    with launched(parallel, root, killed, options) as process:
        killed_step, uncommitted = kill_while_streaming(process, root)
        show_output(process, f"{parallel} killed")
    state = "was not committed" if uncommitted else "had just been committed: the kill came late"
    console.print(f"kill -9: launcher and workers are dead; step {killed_step} {state}")

    console.rule(f"{parallel}: ckpt restore --latest")
    command = [sys.executable, "-m", "ckpt.cli.main", "restore", "--latest"]
    command += ["--root", str(root), "--to", str(folder / "fetched")]
    subprocess.run(command, env=ENVIRONMENT, stdout=sys.stderr, check=True)

    console.rule(f"{parallel}: resume")
    train(parallel, root, resumed, options)

    expected, found = losses(reference), losses(resumed)
    first, last = min(found), max(expected)
    saves = [record for record in records(reference) if "durable" in record]
    return Outcome(
        parallel=parallel,
        saves=len(saves),
        stall_ms=statistics.median(record["stall"] for record in saves) * 1e3,
        durable_s=statistics.median(record["durable"] for record in saves),
        killed_step=killed_step,
        killed_uncommitted=uncommitted,
        resumed_step=first - 1,
        compared=last - first + 1,
        equal_losses=sum(found.get(step) == expected[step] for step in range(first, last + 1)),
        reference_loss=float.fromhex(expected[last]),
        resumed_loss=float.fromhex(found[last]),
    )


def tabulate(outcomes: list[Outcome]) -> Table:
    """Return the small table at the end."""
    table = Table(title="kill -9 while a save streams, then resume")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.parallel, justify="right")
    # The repr of a float has as many decimals as make it that float and no other.
    rows: dict[str, Callable[[Outcome], str]] = {
        "saves": lambda o: str(o.saves),
        "stall per save, median": lambda o: f"{o.stall_ms:.2f} ms",
        "time to durable, median": lambda o: f"{o.durable_s:.2f} s",
        "killed during": lambda o: f"step {o.killed_step}, {'un' * o.killed_uncommitted}committed",
        "resumed from": lambda o: f"step {o.resumed_step}",
        "last loss, reference": lambda o: repr(o.reference_loss),
        "last loss, resumed": lambda o: repr(o.resumed_loss),
        "losses equal bit for bit": lambda o: f"{o.equal_losses} of {o.compared}",
    }
    for heading, cell in rows.items():
        table.add_row(heading, *map(cell, outcomes))
    return table


def main() -> int:
    """Run the modes; the exit code is 0 only if all resumed and every loss agrees."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/demo"), help="is removed at the start"
    )
    parser.add_argument("--modes", nargs="+", choices=["ddp", "fsdp2"], default=["ddp", "fsdp2"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=8)
    parser.add_argument(
        "--width", type=int, default=384, help="of the model: larger takes longer to save"
    )
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    started = time.monotonic()
    options = ["--layers", "4", "--context", "64", "--batch", "2", "--width", str(args.width)]
    options += ["--steps", str(args.steps), "--save-every", str(args.save_every)]
    outcomes = [show(parallel, args.folder / parallel, options) for parallel in args.modes]
    console.print(f"\n{time.monotonic() - started:.0f} s in all\n")
    if args.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    else:
        Console().print(tabulate(outcomes))
    return 0 if all(o.resumed_step > 0 and o.equal_losses == o.compared for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

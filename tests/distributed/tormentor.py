"""FOLDER TIMES SEED: torment four ranks that train under torchrun.

At TIMES random moments some of them are killed, stopped, or lose their agent.

After each of these the job must train again within BOUND_SECONDS, by itself or, after the death of
the agent, with a new one. It must go on from the newest step that any rank knew to be committed, or
a later one, with the values of that step on all ranks. All listed steps must be whole. The script
prints what it did, and ``ALL WELL``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckpt.catalog.step_listing import committed
from ckpt.catalog.verify import verify_step
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from tests.processes import kill_all

RANKS = 4
AGENT_SECONDS, START_SECONDS = 30, 60
BOUND_SECONDS = AGENT_SECONDS + START_SECONDS
"""torchrun's patience with survivors that do not end, and what a start may take on a machine
that does other things too.
"""
SUSPICIOUS_SECONDS = 15
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KINDS = (
    json.loads(os.environ["TORMENT_KINDS"])
    if "TORMENT_KINDS" in os.environ
    else {
        "kill": 20,
        "kill two": 4,
        "kill, and again in the restore": 8,
        "kill all": 2,
        "stop": 10,
        "stop two": 2,
        "stop, then kill": 7,
        "signal": 4,
        "kill the agent": 6,
    }
)

Note = dict[str, Any]


ONE_NODE = ("--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=1000")


class Job:
    """An agent, and what its workers note."""

    def __init__(self, folder: Path, arguments: Sequence[str] = ONE_NODE) -> None:
        self.folder, self._arguments = folder, arguments
        self.notes: list[Note] = []
        self._offsets = [0] * RANKS
        self._agent: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        log = str(self.folder / "log")
        self._agent = subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore", str(HERE / "warm_torchrun.py"), log),
                *self._arguments,
                *(str(HERE / "workers" / "tormented.py"), str(self.folder)),
            ],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                "TORMENT": str(self.starts),
                "PYTHONPATH": os.pathsep.join(
                    map(str, [ROOT, ROOT / "backends", HERE / "workers"])
                ),
            },
            stdout=subprocess.DEVNULL,
        )

    @property
    def agent(self) -> int:
        assert self._agent is not None
        return self._agent.pid

    def read(self) -> list[Note]:
        """Return what was noted since the last call, by all starts and lives."""
        new: list[Note] = []
        for rank in range(RANKS):
            path = self.folder / f"notes-{rank}.jsonl"
            data = path.read_bytes()[self._offsets[rank] :] if path.exists() else b""
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[rank] += len(whole)
            new += [{"rank": rank, **json.loads(line)} for line in whole.splitlines()]
        self.notes += new
        return new

    def wait(self, found: Callable[[], Any], seconds: float, what: str) -> Any:
        deadline = time.monotonic() + seconds
        while not (result := found()):
            self.read()
            assert self._agent is not None
            assert self._agent.poll() is None, f"the agent ended with {self._agent.returncode}"
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds:.0f} s: {what}")
            time.sleep(0.005)
        return result

    def kill_agent(self) -> None:
        assert self._agent is not None
        self._agent.kill()
        self._agent.wait()

    def end(self) -> None:
        """End the agent as Slurm would, and kill what is left, the workers of a hanging
        agent too.
        """
        if self._agent is None:
            return
        self._agent.terminate()
        try:
            self._agent.wait(AGENT_SECONDS + 15)
        finally:
            kill_all(self._agent)
            self._agent.wait()


class Tormentor:
    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.job = Job(folder)
        self.backend = open_backend(str(folder / "run"))
        self.seen: Counter[str] = Counter()
        self.recoveries: list[float] = []
        self.midst: Counter[str] = Counter()
        self.failed_saves = 0
        self.verified = 0
        self.unasked = 0
        self.life = (1, -1)

    def run(self, times: int) -> None:
        self.job.start()
        self.next_life()
        for number in range(times):
            kind = self.chance.choices(list(KINDS), list(KINDS.values()))[0]
            began = time.monotonic()
            self.torment(kind)
            self.recoveries.append(time.monotonic() - began)
            self.verify()
            self.seen[kind] += 1
            print(
                f"{number + 1:3d} {kind}: training again after {self.recoveries[-1]:.1f} s",
                flush=True,
            )
        self.job.end()
        self.job.read()
        self.verify()

    # -- what is done ------------------------------------------------------------------------------

    def torment(self, kind: str) -> None:
        """Do one of KINDS at a random moment, and return when all ranks train again."""
        pids = self.pids()
        victims = self.chance.sample(
            range(RANKS), 4 if "all" in kind else 2 if "two" in kind else 1
        )
        self.moment(victims[0])
        known = self.newest_known()
        after = time.time()
        if kind in ("stop", "stop two"):
            self.strike(pids, victims, signal.SIGSTOP)
            time.sleep(self.chance.uniform(0.1, 7))
            self.send(pids, victims, signal.SIGCONT)
            self.go_on(after)
            return
        if kind == "kill the agent":
            self.job.kill_agent()
            time.sleep(self.chance.uniform(0, 2))
            self.strike(pids, range(RANKS), signal.SIGKILL)
            self.job.start()
        elif kind == "stop, then kill":
            self.strike(pids, victims, signal.SIGSTOP)
            time.sleep(self.chance.uniform(0.1, 6))
            self.send(pids, victims, signal.SIGKILL)
        else:
            self.strike(pids, victims, signal.SIGTERM if kind == "signal" else signal.SIGKILL)
        self.next_life()
        if "again" in kind:
            time.sleep(self.chance.uniform(0, 0.5))
            self.strike(self.pids(), self.chance.sample(range(RANKS), 1), signal.SIGKILL)
            self.next_life()
        self.resumed(known, after, planned=kind == "signal")

    def moment(self, victim: int) -> None:
        """Wait for a moment at which a save of the victim streams, or for any moment."""
        if self.chance.random() < 0.6:
            count = len(self.of_life("saving", victim))
            self.job.wait(
                lambda: len(self.of_life("saving", victim)) > count, BOUND_SECONDS, "a save"
            )
            time.sleep(self.chance.uniform(0, 0.05))
        else:
            time.sleep(self.chance.uniform(0, 2.5))

    def strike(self, pids: dict[int, int], victims: Any, signum: int) -> None:
        """Kill or stop the victims, and note what they were doing."""
        self.send(pids, victims, signum)
        self.job.read()
        newest = max((self.job.folder / "run").glob("step-*"), default=None)
        if not self.of_life("restored", victims[0]):
            what = "in a restore, or before it"
        elif newest is not None and not (newest / "manifest.json").exists():
            what = "in a save"
        else:
            what = "between"
        self.midst[what] += 1

    def send(self, pids: dict[int, int], victims: Any, signum: int) -> None:
        for rank in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], signum)

    # -- what is checked ---------------------------------------------------------------------------

    def next_life(self) -> None:
        """Wait until all ranks of a later life are up."""
        try:
            self.job.wait(self.newer, SUSPICIOUS_SECONDS, "new workers")
        except TimeoutError:  # the stacks of all threads go to the log
            pids = self.pids()
            self.send(pids, pids, signal.SIGUSR2)
            self.job.wait(self.newer, BOUND_SECONDS, "new workers")

    def newer(self) -> bool:
        """Return whether all ranks of a later life are up.

        From then on the checks use that life.
        """
        lives = Counter(self.life_of(note) for note in self.job.notes if "up" in note)
        newest = max((life for life, ranks in lives.items() if ranks == RANKS), default=self.life)
        found, self.life = newest > self.life, max(newest, self.life)
        return found

    def resumed(self, known: int, after: float, *, planned: bool) -> None:
        """Check that all ranks restore one step with its values, and train on from there.

        The step must not be older than the newest known one.
        """

        def training() -> bool:
            # this life ended by itself, and torchrun has started the next
            self.unasked += self.newer()
            return {note["rank"] for note in self.of_life("step")} == set(range(RANKS))

        try:
            self.job.wait(training, BOUND_SECONDS, "training after the restart")
        except TimeoutError:
            self.explain()
            raise
        restored = self.of_life("restored")
        assert len(restored) == RANKS, restored
        steps = {note["restored"] for note in restored}
        assert len(steps) == 1, restored
        assert all(note["skipped"] == [] for note in restored), restored
        (step,) = steps
        assert step >= known, (step, known)
        if planned:
            stops = [
                note["stops"] for note in self.job.notes if "stops" in note and note["at"] > after
            ]
            assert stops == [step] * RANKS, (step, stops)
        self.right_values()

    def explain(self) -> None:
        """Print what each rank noted last, and the end of the log with the stacks of
        all threads.
        """
        pids = self.pids()
        self.send(pids, pids, signal.SIGUSR2)
        time.sleep(2)
        for rank in range(RANKS):
            print([note for note in self.job.notes if note["rank"] == rank][-6:], flush=True)
        print((self.job.folder / "log").read_text()[-30_000:], flush=True)

    def go_on(self, after: float) -> None:
        """Check that the job goes on after SIGCONT.

        The same life trains on and commits one of its next saves, or torchrun has started a new
        one.
        """

        def saved() -> bool:
            began = {note["saving"] for note in self.of_life("saving") if note["at"] > after + 1e-9}
            return bool(began & {note["committed"] for note in self.of_life("committed")})

        self.job.wait(saved, BOUND_SECONDS, "a save after all ranks go on")
        self.right_values()

    def right_values(self) -> None:
        """Check that what was restored is what was saved.

        On each rank the values are a function of the step.
        """
        saved: dict[tuple[int, int], set[str]] = {}
        for note in self.job.notes:
            if "saving" in note:
                saved.setdefault((note["rank"], note["saving"]), set()).add(note["digest"])
        assert all(len(digests) == 1 for digests in saved.values()), (
            "a step was lived twice, differently"
        )
        for note in self.job.notes:
            if note.get("restored"):
                assert saved[note["rank"], note["restored"]] == {note["digest"]}, note

    def verify(self) -> None:
        """Check every step that is listed before and after the check: old ones are pruned
        meanwhile.
        """
        with Workers("check", 2) as workers:
            for ref in committed(self.backend):
                faults: tuple[object, ...]
                try:
                    faults = verify_step(self.backend, ref, workers=workers).faults
                except Exception as error:
                    faults = (error,)
                assert not faults or ref not in committed(self.backend), (ref, faults)
                self.verified += not faults

    def newest_known(self) -> int:
        """Return the newest step that some rank knows to be committed, now or in any
        earlier life.
        """
        self.job.read()
        return max((note["committed"] for note in self.job.notes if "committed" in note), default=0)

    def pids(self) -> dict[int, int]:
        return {note["rank"]: note["up"] for note in self.of_life("up")}

    def of_life(self, what: str, rank: int | None = None) -> list[Note]:
        return [
            note
            for note in self.job.notes
            if what in note and self.is_of(note) and rank in (None, note["rank"])
        ]

    def is_of(self, note: Note) -> bool:
        return self.life_of(note) == self.life

    @staticmethod
    def life_of(note: Note) -> tuple[int, int]:
        return note["start"], note["life"]


def main() -> None:
    folder, times, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    folder.mkdir(parents=True)
    began = time.monotonic()
    tormentor = Tormentor(folder, seed)
    try:
        tormentor.run(times)
    finally:
        with contextlib.suppress(Exception):
            tormentor.job.kill_agent()
            tormentor.send(tormentor.pids(), range(RANKS), signal.SIGKILL)
    failed = Counter(note["error"] for note in tormentor.job.notes if "failed" in note)
    seconds = tormentor.recoveries
    print(
        f"{times} runs in {time.monotonic() - began:.0f} s, {tormentor.job.starts} agents: "
        f"{dict(tormentor.seen)}"
    )
    print(f"it was hit {dict(tormentor.midst)}, and {tormentor.unasked} lives ended by themselves")
    print(
        f"training again after {statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s "
        "at most"
    )
    print(
        f"{tormentor.verified} checkpoints verified; {sum(failed.values())} saves failed on some "
        "rank:"
    )
    for error, count in failed.most_common(12):
        print(f"  {count:4d} {error[:150]}")
    print("ALL WELL")


if __name__ == "__main__":
    main()

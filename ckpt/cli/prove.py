"""``ckpt prove``: show by a replay that a resume from a step is right."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from ckpt.catalog.difference import Difference, compare
from ckpt.catalog.index import committed, find, list_root, read_manifest
from ckpt.catalog.late_metrics import add_metrics
from ckpt.catalog.tensor_reader import StepReader
from ckpt.catalog.transfer import fetch_step
from ckpt.catalog.verify import StepFolder
from ckpt.catalog.watching import CommittedStep
from ckpt.cli import output
from ckpt.cli.diff import plain_differences
from ckpt.cli.options import (
    STEP_FORMS,
    TIMEOUT_SECONDS,
    ConfigFileOption,
    JsonOption,
    PlaceArgument,
    RootOption,
    TimeoutOption,
    number_of,
    one_place,
    open_root,
    workers_for,
)
from ckpt.cli.step_command import StepSignals, run_until
from ckpt.errors import CommitError, ConfigError, NoCheckpoint
from ckpt.model.keys import StepRef
from ckpt.model.metrics import metrics_of
from ckpt.model.selector import parse_selector
from ckpt.root.leases import lease
from ckpt.root.pins import LONGEST_SECONDS, reserve_step
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend

PROOF_METRIC: Final = "proven"
"""The metric of a proven step: over how many steps it was replayed."""
_DIFFERENT: Final = 1
_MOST_NAMES: Final = 10


@dataclass(frozen=True, slots=True)
class Contrast:
    """How two checkpoints differ.

    Attributes:
        tensors: How their tensors differ.
        plain: Name of a plain value that differs -> its texts, None where it is missing.
        metrics: Name of a metric that both have with other values -> the values.
    """

    tensors: Difference
    plain: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def exists(self) -> bool:
        return bool(self.tensors.exists or self.plain or self.metrics)

    @property
    def names(self) -> list[str]:
        """Return the names of what differs, metrics first."""
        tensors = self.tensors
        kinds = [*tensors.only_one, *tensors.only_two, *tensors.kinds, *tensors.values]
        return [*(f"metric {name}" for name in self.metrics), *self.plain, *kinds]


def prove(
    argument: PlaceArgument = None,
    command: Annotated[
        str,
        typer.Option(
            "--run",
            metavar="COMMAND",
            help="The training, as a shell command. It must save to and resume from {root}.",
        ),
    ] = ...,  # type: ignore[assignment]
    step: Annotated[
        str | None,
        typer.Option(
            "--step", metavar="STEP", help=f"The step to prove: {STEP_FORMS}. Default: latest~1."
        ),
    ] = None,
    target_text: Annotated[
        str | None,
        typer.Option(
            "--until", metavar="STEP", help="The step to compare with. Default: the next one kept."
        ),
    ] = None,
    scratch: Annotated[
        str | None,
        typer.Option("--scratch", metavar="DIR", help="Where the replay saves, on a local disk."),
    ] = None,
    root: RootOption = None,
    config: ConfigFileOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Prove that a resume from a step is right.

    The step is copied to a root of its own, and the training runs there until it has saved the next
    step that was kept. Then both are compared: every tensor bit for bit, every plain value, and the
    metrics. If all is equal, the step gets the metric "proven", the number of steps that were
    replayed. If not, a second replay tells whether the training itself is deterministic.

    Exit code 0: proven. 1: something differs. 7: there is no such checkpoint.

    \b
    Examples:
      ckpt prove runs/gpt --run 'python train.py --root {root}'
      ckpt prove runs/gpt --step 1200 --until 1300 --run 'CKPT_ROOT={root} make train'
    """
    if "{root}" not in command:
        raise ConfigError(
            "--run does not say where to save: the command must take its root from {root}, since "
            "it must not go on with the run itself"
        )
    if scratch is not None and not os.path.isdir(scratch):
        raise ConfigError(f"--scratch {scratch}: there is no such folder")
    backend = open_root(one_place([argument] if argument else None, root), config, timeout=timeout)
    start = number_of([backend], parse_selector(step or "latest~1"), config)
    end = None
    if target_text is not None:
        end = number_of([backend], parse_selector(target_text), config)
    origin, target = backend.ask(partial(_steps, backend, start, end))
    signals = StepSignals()
    with ExitStack() as stack:
        stack.enter_context(signals.as_exceptions())
        for ref in (origin, target):
            stack.enter_context(lease(backend, ref, "prove"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory("-prove", "ckpt-", scratch)))
        replay = Replay(backend, origin, target.step, command, signals)
        began = time.perf_counter()
        outcome = replay.run(folder / "first")
        seconds = time.perf_counter() - began
        contrast = contrast_of((backend, target), outcome)
        is_deterministic = True
        if contrast.exists:
            contrast_of_replays = contrast_of(outcome, replay.run(folder / "second"))
            is_deterministic = not contrast_of_replays.exists
    if not contrast.exists:
        steps = float(target.step - origin.step)
        backend.ask(partial(add_metrics, [backend], origin.step, {PROOF_METRIC: steps}, own=""))
    _show(origin, target, contrast, seconds, is_deterministic=is_deterministic, json=json)
    if contrast.exists:
        raise typer.Exit(_DIFFERENT)


@dataclass(frozen=True, slots=True)
class Replay:
    """A training that goes on from the step ``origin`` in a root of its own, until it has saved the
    step ``end``.
    """

    backend: StorageBackend
    origin: StepRef
    end: int
    command: str
    signals: StepSignals

    def run(self, root: Path) -> tuple[StorageBackend, StepRef]:
        """Run the training in ``root``, a new folder, and return the step that it has saved.

        Raises:
            CommitError: The command has ended before it saved the step.
            CkptError: The step to begin with cannot be copied.
        """
        store = open_backend(str(root))
        with workers_for(self.backend) as workers:
            fetch_step([self.backend], StepFolder(store, self.origin, workers))
        # The training may remove the step soon after it has saved it.
        reserve_step(store, self.end, LONGEST_SECONDS, "ckpt prove compares with it")
        step = CommittedStep(ref=self.origin, root=store.url, path=f"{root}/{self.origin.folder}")
        code = run_until(self.command, step, self.signals, lambda: self._target(store) is not None)
        if (ref := self._target(store)) is None:
            raise CommitError(
                f"the command has ended with exit code {code} before it saved step {self.end} to "
                f"{store.url}: let it resume from the newest step there, save there, and run "
                "long enough"
            )
        return store, ref

    def _target(self, store: StorageBackend) -> StepRef | None:
        refs = (ref for ref in committed(store) if ref != self.origin)
        return next((ref for ref in refs if ref.step == self.end), None)


def contrast_of(a: tuple[StorageBackend, StepRef], b: tuple[StorageBackend, StepRef]) -> Contrast:
    """Compare two checkpoints, bit for bit."""
    with ExitStack() as stack:
        readers: list[StepReader] = []
        for store, ref in (a, b):
            workers = stack.enter_context(workers_for(store))
            manifest = read_manifest(store, ref)
            readers.append(StepReader(store, ref, manifest, workers))
        metrics_a, metrics_b = (metrics_of(reader.manifest.metadata) for reader in readers)
        common = metrics_a.keys() & metrics_b.keys() - {PROOF_METRIC}
        return Contrast(
            compare(*readers),
            plain_differences(*readers),
            {
                name: (metrics_a[name], metrics_b[name])
                for name in sorted(common)
                if repr(metrics_a[name]) != repr(metrics_b[name])
            },
        )


def _steps(backend: StorageBackend, start: int, end: int | None) -> tuple[StepRef, StepRef]:
    """Return the step to prove, and the step to compare with.

    Raises:
        NoCheckpoint: One of them is no checkpoint of the current branch.
    """
    branch = set(list_root(backend).on_branch)
    refs: dict[int, StepRef] = {}
    for ref in find(backend, None):
        if ref in branch:
            refs.setdefault(ref.step, ref)
    if start not in refs:
        raise NoCheckpoint(backend.url, f"step {start} is no checkpoint there")
    numbers_after = [number for number in sorted(refs) if number > start]
    if end is None and not numbers_after:
        raise NoCheckpoint(backend.url, f"no step follows step {start}")
    number = numbers_after[0] if end is None else end
    if number not in refs:
        raise NoCheckpoint(backend.url, f"step {number} is no checkpoint there")
    if number <= start:
        raise ConfigError(f"--until {number} must be later than step {start}")
    return refs[start], refs[number]


def _show(
    origin: StepRef,
    target: StepRef,
    contrast: Contrast,
    seconds: float,
    *,
    is_deterministic: bool,
    json: bool,
) -> None:
    names, is_proven = contrast.names, not contrast.exists
    if json:
        output.show_json(
            {
                "step": origin.step,
                "until": target.step,
                "proven": is_proven,
                "deterministic": is_deterministic,
                "different": names,
                "seconds": seconds,
            }
        )
        return
    output.show_line(f"step {origin.step} was replayed up to step {target.step} in {seconds:.1f} s")
    if is_proven:
        count = output.count(contrast.tensors.equal, "tensor")
        output.show_line(f"{count} and all values are equal bit for bit: the step is proven")
        return
    rows = [(name,) for name in names[:_MOST_NAMES]]
    output.show_table(("different",), rows)
    if len(names) > _MOST_NAMES:
        output.show_line(f"and {len(names) - _MOST_NAMES:,} more")
    output.show_line(
        "two replays are equal: the training is deterministic, and the resume is not what the run "
        "did"
        if is_deterministic
        else "two replays differ from each other: the training is not deterministic, so this "
        "proves nothing about the resume"
    )

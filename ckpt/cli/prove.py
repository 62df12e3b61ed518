"""``ckpt prove``: show by a replay that a resume from a step is right.

A *course* is a series of steps of a run, or the replay of these steps. It begins after its
*origin*, the step to prove, and the state is compared at its *target*. A *contrast* says how two
courses differ. Its ``tensors`` are None if no state was compared. The *journal* of a run is a
record of its saves with their metrics. After a *rollback*, the run goes on from an older step on a
new *branch*. There, another *attempt* may have the number of an abandoned step.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from ckpt.catalog.difference import Difference, compare
from ckpt.catalog.late_metrics import metrics_at, put_late
from ckpt.catalog.step_listing import committed, find, list_root, read_manifest
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
from ckpt.cli.step_metrics import (
    MetricDifference,
    StepMetrics,
    common_count,
    metric_differences,
    metrics_after,
    metrics_of_steps,
)
from ckpt.config import load_config
from ckpt.errors import CommitError, ConfigError, NoCheckpoint
from ckpt.model.keys import StepRef
from ckpt.model.selector import parse_selector
from ckpt.root.leases import lease
from ckpt.root.pins import LONGEST_SECONDS, reserve_step
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.storage.tiers import resolve_tier

PROOF_METRIC: Final = "proven"
"""The metric of a proven step: how many steps later the replay had the state of the run."""
_DIFFERENT: Final = 1
_MOST_NAMES: Final = 10


@dataclass(frozen=True, slots=True)
class Contrast:
    """How a replay differs from a run, or from another replay.

    Attributes:
        metrics: The metrics that differ, those of the first step first.
        compared_steps: How many steps have a metric that was compared.
        tensors: How the tensors of the last step that the run keeps differ; None if the run keeps
            none of the steps.
        plain: Name of a plain value that differs -> its texts, None where it is missing.
    """

    metrics: Sequence[MetricDifference]
    compared_steps: int
    tensors: Difference | None = None
    plain: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)

    @property
    def exists(self) -> bool:
        return bool(self.metrics or self.plain or (self.tensors and self.tensors.exists))

    @property
    def names(self) -> list[str]:
        """Return the names of what differs, the metrics of the first step first."""
        names = [f"metric {metric.name} of step {metric.step}" for metric in self.metrics]
        names += self.plain
        if (tensors := self.tensors) is not None:
            names += [
                *tensors.only_one,
                *tensors.only_two,
                *tensors.other_kinds,
                *tensors.other_values,
            ]
        return names


@dataclass(frozen=True, slots=True)
class Course:
    """Steps of a run that a replay repeats, or the replay of these steps.

    Attributes:
        store: The store of the steps.
        origin: The step before the first of them.
        end: The number of the last one.
        target: The last one that the run keeps, whose state is compared; None if it keeps none.
        metrics: The metrics of the steps, by number.
    """

    store: StorageBackend
    origin: StepRef
    end: int
    target: StepRef | None
    metrics: StepMetrics


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
    count: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            min=1,
            help="Replay the next N steps that the run saved, as its journal says.",
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
    metrics of each step on the way that the journal has. If all is equal, the step gets the metric
    "proven", the number of steps to the one whose state was compared. If not, a second replay tells
    whether the training itself is deterministic.

    Exit code 0: proven. 1: something differs. 7: there is no such checkpoint.

    \b
    Examples:
      ckpt prove runs/gpt --run 'python train.py --root {root}'
      ckpt prove runs/gpt --step 1200 --until 1300 --run 'CKPT_ROOT={root} make train'
      ckpt prove runs/gpt --step 1200 --steps 3 --run 'python train.py --root {root}'
    """
    if "{root}" not in command:
        raise ConfigError(
            "--run does not say where to save: the command must take its root from {root}, since "
            "it must not go on with the run itself"
        )
    if scratch is not None and not os.path.isdir(scratch):
        raise ConfigError(f"--scratch {scratch}: there is no such folder")
    if count is not None and target_text is not None:
        raise ConfigError("--steps and --until both say where the replay ends: give one of them")
    place = one_place([argument] if argument else None, root)
    backend = open_root(place, config, timeout=timeout)
    start = number_of([backend], parse_selector(step or "latest~1"), config)
    end = None
    if target_text is not None:
        end = number_of([backend], parse_selector(target_text), config)
    tiers = load_config(config).tiers
    run_tiers = tiers if resolve_tier(place, config) in tiers else ()
    journal_metrics = metrics_after(start, {backend.url, *(tier.url for tier in run_tiers)})
    course = backend.call_in_time(partial(_course, backend, start, end, count, journal_metrics))
    signals = StepSignals()
    with ExitStack() as stack:
        stack.enter_context(signals.as_exceptions())
        for ref in filter(None, (course.origin, course.target)):
            stack.enter_context(lease(backend, ref, "prove"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory("-prove", "ckpt-", scratch)))
        replay = Replay(course, command, signals)
        began = time.perf_counter()
        replayed_course = replay.run(folder / "first")
        seconds = time.perf_counter() - began
        contrast = contrast_of(course, replayed_course)
        is_deterministic = True
        if contrast.exists:
            contrast_of_replays = contrast_of(replayed_course, replay.run(folder / "second"))
            is_deterministic = not contrast_of_replays.exists
    if not contrast.exists and course.target is not None and contrast.tensors is not None:
        backend.call_in_time(partial(_record_proof, backend, course.origin, course.target))
    _show(course, contrast, seconds, is_deterministic=is_deterministic, json=json)
    if contrast.exists:
        raise typer.Exit(_DIFFERENT)


def _record_proof(backend: StorageBackend, origin: StepRef, target: StepRef) -> None:
    """Add the number of proven steps to the metrics of ``origin``. An earlier proof stands, since a
    metric is written once.
    """
    if PROOF_METRIC not in metrics_at(backend, origin):
        put_late(backend, origin, {PROOF_METRIC: float(target.step - origin.step)})


@dataclass(frozen=True, slots=True)
class Replay:
    """A training that repeats ``course`` in a root of its own."""

    course: Course
    command: str
    signals: StepSignals

    def run(self, root: Path) -> Course:
        """Run the training in ``root``, a new folder, and return what it has saved.

        Raises:
            CommitError: The command has ended before it saved the last step, or it has saved none
                of the metrics that could be compared.
            CkptError: The step to begin with cannot be copied.
        """
        course, store = self.course, open_backend(str(root))
        with workers_for(course.store) as workers:
            fetch_step([course.store], StepFolder(store, course.origin, workers))
        # Pins for steps to come, since the training may remove a step soon after it has saved it
        for number in {course.end, course.target.step if course.target else course.end}:
            reserve_step(store, number, LONGEST_SECONDS, "ckpt prove compares with it")
        step = CommittedStep(
            ref=course.origin, root=store.url, path=f"{root}/{course.origin.folder}"
        )
        code = run_until(self.command, step, self.signals, lambda: course.end in self._refs(store))
        refs = self._refs(store)
        if course.end not in refs:
            raise CommitError(
                f"the command has ended with exit code {code} before it saved step {course.end} to "
                f"{store.url}: let it resume from the newest step there, save there the steps that "
                "the run saved, and run long enough"
            )
        metrics = {
            **metrics_after(course.origin.step, [store.url]),
            **metrics_of_steps(store, refs.values()),
        }
        target = refs.get(course.target.step) if course.target else None
        if target is None and not common_count(course.metrics, metrics):
            names = sorted({name for values in course.metrics.values() for name in values})
            raise CommitError(
                f"the command has saved none of the metrics of the run ({', '.join(names)}), and "
                "the run keeps none of the steps, so that nothing can be compared: give metrics= "
                "to save, or --until a step that is kept"
            )
        return Course(store, course.origin, course.end, target, metrics)

    def _refs(self, store: StorageBackend) -> dict[int, StepRef]:
        """Return the steps that the training has saved, by number."""
        refs = (ref for ref in committed(store) if ref != self.course.origin)
        return {ref.step: ref for ref in refs if ref.step <= self.course.end}


def contrast_of(run: Course, replay: Course) -> Contrast:
    """Compare the steps of a run with their replay, bit for bit."""
    metrics = metric_differences(run.metrics, replay.metrics)
    compared_steps = common_count(run.metrics, replay.metrics)
    if run.target is None or replay.target is None:
        return Contrast(metrics, compared_steps)
    with ExitStack() as stack:
        readers: list[StepReader] = []
        for store, ref in ((run.store, run.target), (replay.store, replay.target)):
            workers = stack.enter_context(workers_for(store))
            manifest = read_manifest(store, ref)
            readers.append(StepReader(store, ref, manifest, workers))
        return Contrast(metrics, compared_steps, compare(*readers), plain_differences(*readers))


def _course(
    backend: StorageBackend,
    start: int,
    end: int | None,
    count: int | None,
    journal_metrics: StepMetrics,
) -> Course:
    """Return the steps to replay.

    Args:
        backend: The tier of the run.
        start: The step to prove.
        end: The last step to replay; None for the next one that is kept, or for ``count``.
        count: How many steps to replay; None for ``end``.
        journal_metrics: The metrics of the steps after ``start`` in the journal.

    Raises:
        NoCheckpoint: The step to prove or ``end`` is no checkpoint of the current branch.
        ConfigError: The run has fewer steps, or nothing that could be compared.
    """
    branch = set(list_root(backend).on_branch)
    refs: dict[int, StepRef] = {}
    for ref in find(backend, None):
        if ref in branch:
            refs.setdefault(ref.step, ref)  # The first of several attempts counts
    if start not in refs:
        raise NoCheckpoint(backend.url, f"step {start} is no checkpoint there")
    later_refs = [refs[number] for number in sorted(refs) if number > start]
    numbers = sorted({*journal_metrics, *(ref.step for ref in later_refs)})
    if count is not None:
        if len(numbers) < count:
            raise ConfigError(
                f"--steps {count}: {backend.url} and the journal of the run "
                f"know only {output.count(len(numbers), 'later step')} (a journal that was cut, "
                "deleted, or written by another version knows fewer): give a smaller number, or "
                "--until"
            )
        end = numbers[count - 1]
    elif end is None:
        if not later_refs:
            raise NoCheckpoint(backend.url, f"no step follows step {start}")
        end = later_refs[0].step
    elif end not in refs:
        raise NoCheckpoint(backend.url, f"step {end} is no checkpoint there")
    if end <= start:
        raise ConfigError(f"--until {end} must be later than step {start}")
    target_refs = [ref for ref in later_refs if ref.step <= end]
    metrics = {step: values for step, values in journal_metrics.items() if step <= end}
    # The journal may have those of another attempt, which a rollback has abandoned since.
    for step, values in metrics_of_steps(backend, target_refs).items():
        metrics[step] = {**metrics.get(step, {}), **values}
    if not target_refs and not any(metrics.values()):
        raise ConfigError(
            f"{backend.url} keeps none of the {count} steps after step {start}, and the journal of "
            "the run has no metrics of them, so that nothing could be compared: give --until"
        )
    return Course(backend, refs[start], end, target_refs[-1] if target_refs else None, metrics)


def _show(
    course: Course,
    contrast: Contrast,
    seconds: float,
    *,
    is_deterministic: bool,
    json: bool,
) -> None:
    """Print the result, with the first names that differ. ``seconds`` is the time of the replay."""
    names, is_equal = contrast.names, not contrast.exists
    if json:
        output.show_json(
            {
                "step": course.origin.step,
                "until": course.end,
                "proven": is_equal and contrast.tensors is not None,
                "deterministic": is_deterministic,
                "different": names,
                "steps_with_equal_metrics": contrast.compared_steps
                - len({metric.step for metric in contrast.metrics}),
                "state_compared_at": course.target.step if course.target else None,
                "seconds": seconds,
            }
        )
        return
    output.show_line(
        f"step {course.origin.step} was replayed up to step {course.end} in {seconds:.1f} s"
    )
    if is_equal:
        _show_equal(course, contrast)
        return
    for metric in contrast.metrics[:1]:
        output.show_line(
            f"first difference: {metric.name} of step {metric.step} is {metric.value!r} in the "
            f"run, and {metric.replay_value!r} in the replay"
        )
    output.show_table(("different",), [(name,) for name in names[:_MOST_NAMES]])
    if len(names) > _MOST_NAMES:
        output.show_line(f"and {len(names) - _MOST_NAMES:,} more")
    output.show_line(
        "two replays are equal: the training is deterministic, and the resume is not what the run "
        "did"
        if is_deterministic
        else "two replays differ from each other: the training is not deterministic, so this "
        "proves nothing about the resume"
    )


def _show_equal(course: Course, contrast: Contrast) -> None:
    """Print what was compared, if nothing differs."""
    if contrast.compared_steps:
        output.show_line(
            f"the metrics of {output.count(contrast.compared_steps, 'step')} are equal"
        )
    if contrast.tensors is None:
        output.show_line(
            "the run keeps none of these steps, so no state was compared, and the step is not "
            "marked as proven"
        )
        return
    count = output.count(contrast.tensors.equal, "tensor")
    place = f" at step {course.target.step}" if course.target else ""
    output.show_line(f"{count} and all values{place} are equal bit for bit: the step is proven")

"""``ckpt bisect``: find the first step for which a command fails.

A *lease* is a pin that is renewed. It keeps a step from being removed while the command runs for
the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, Literal

import typer

from ckpt.catalog.step_listing import find, list_root
from ckpt.catalog.watching import Watcher
from ckpt.cli import output
from ckpt.cli.options import (
    TIMEOUT_SECONDS,
    ConfigFileOption,
    JsonOption,
    PlaceArgument,
    RootOption,
    TimeoutOption,
    one_place,
    open_root,
)
from ckpt.cli.step_command import StepSignals, run_for_step
from ckpt.errors import ConfigError, NoCheckpoint
from ckpt.model.keys import StepRef
from ckpt.storage.api import StorageBackend

Outcome = Literal["good", "bad", "untestable"]
_UNTESTABLE_CODE: Final = 125
_NOT_STARTED_CODES: Final = (126, 127)
"""The shell could not start the command."""


@dataclass(frozen=True, slots=True)
class Bisection:
    """The result of a search.

    Attributes:
        good: The last step that is known to be good.
        bad: The first step that is known to be bad.
        untestable: The steps between these two. None of them could be tested.
    """

    good: int
    bad: int
    untestable: tuple[int, ...]


def bisect(
    argument: PlaceArgument = None,
    good: Annotated[
        int, typer.Option("--good", metavar="N", min=0, help="A step for which it succeeds.")
    ] = ...,  # type: ignore[assignment]
    bad: Annotated[
        int, typer.Option("--bad", metavar="N", min=0, help="A later step for which it fails.")
    ] = ...,  # type: ignore[assignment]
    command: Annotated[
        str,
        typer.Option(
            "--run",
            metavar="COMMAND",
            help="Run this in a shell for a step; {path}, {step} and {root} are replaced.",
        ),
    ] = ...,  # type: ignore[assignment]
    root: RootOption = None,
    config: ConfigFileOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Find the first step for which a command fails, with as few runs as possible.

    The steps between a good one and a bad one are those of the current branch that this tier has.
    The command succeeds (exit code 0) for a good step, and fails (1 to 124) for a bad one. 125
    means that the step cannot be tested; another one is taken then. Any other end stops the search.
    A step is pinned while the command runs. --good is tested only if the command fails for all
    other steps, and --bad only if it succeeds for all.

    \b
    Examples:
      ckpt bisect runs/gpt --good 1200 --bad 2000 --run 'python eval.py {root} {step}'
    """
    if not command.strip():
        raise ConfigError("--run is empty: give a command")
    if good >= bad:
        raise ConfigError(f"--good {good} must be earlier than --bad {bad}")
    backend = open_root(one_place([argument] if argument else None, root), config, timeout=timeout)
    refs = backend.call_in_time(partial(_steps_between, backend, good, bad))
    watcher, signals = Watcher(backend, "bisect"), StepSignals()
    tests: list[tuple[int, Outcome]] = []

    def test(ref: StepRef) -> Outcome:
        """Run the command for a step under a lease."""
        step = watcher.committed_step(ref)
        with watcher.lease(step):
            outcome = _outcome(ref.step, run_for_step(command, step, signals))
        tests.append((ref.step, outcome))
        if not json:
            output.show_line(f"step {ref.step}: {outcome}")
        return outcome

    with signals.as_exceptions():
        result = search(refs, test)
        outcomes: list[Outcome] = [outcome for _, outcome in tests]
        if outcomes and all(outcome == "untestable" for outcome in outcomes):
            raise ConfigError(
                f"none of the steps between {good} and {bad} can be tested, so the first bad one "
                "is not known: check the command, whose exit code is 125 for each of them"
            )
        _check_ends(refs, outcomes, test)
    if json:
        output.show_json(
            {
                "root": backend.url,
                "tests": [{"step": step, "outcome": outcome} for step, outcome in tests],
                "last_good": result.good,
                "first_bad": result.bad,
                "untestable": list(result.untestable),
            }
        )
        return
    if result.untestable:
        numbers = output.ranges(result.untestable)
        output.show_line(
            f"the first bad step is {result.bad} or one of {numbers}, which cannot be tested; the "
            f"last good one is {result.good}"
        )
    else:
        output.show_line(f"the first bad step is {result.bad}; the last good one is {result.good}")


def search(refs: Sequence[StepRef], test: Callable[[StepRef], Outcome]) -> Bisection:
    """Find the first bad step of ``refs``, in ascending order.

    The first of them is known to be good, and the last to be bad. ``test`` is called about as often
    as the logarithm of their number, unless steps cannot be tested.
    """
    last_good, first_bad = 0, len(refs) - 1  # Indexes in ``refs``
    untestable: set[int] = set()
    while rest := [index for index in range(last_good + 1, first_bad) if index not in untestable]:
        middle = (last_good + first_bad) / 2
        index = min(rest, key=lambda index: (abs(index - middle), index))
        match test(refs[index]):
            case "good":
                last_good = index
            case "bad":
                first_bad = index
            case "untestable":
                untestable.add(index)
    gap = tuple(refs[index].step for index in range(last_good + 1, first_bad))
    return Bisection(refs[last_good].step, refs[first_bad].step, gap)


def _check_ends(
    refs: Sequence[StepRef], outcomes: Sequence[Outcome], test: Callable[[StepRef], Outcome]
) -> None:
    """Test the first step if no other was good, and the last one if no other was bad. A command
    that always ends alike tells nothing.

    Raises:
        ConfigError: The command says of this step what it says of the others.
    """
    for ref, option, opposite in ((refs[0], "good", "bad"), (refs[-1], "bad", "good")):
        if opposite in outcomes and option not in outcomes and test(ref) == opposite:
            raise ConfigError(
                f"the command says that step {ref.step} is {opposite} too, which --{option} names: "
                "it tells nothing, so check the command"
            )


def _steps_between(backend: StorageBackend, good: int, bad: int) -> list[StepRef]:
    """Return the checkpoints of the current branch from ``good`` to ``bad``, in ascending order.
    Of several attempts at a step, the one that a restore takes counts.

    Raises:
        NoCheckpoint: ``good`` or ``bad`` is no checkpoint of the branch.
    """
    branch, refs = set(list_root(backend).on_branch), find(backend, None)
    by_step: dict[int, StepRef] = {}
    for ref in refs:
        if ref in branch and good <= ref.step <= bad:
            by_step.setdefault(ref.step, ref)  # ``find`` returns the attempt that counts first
    for number in (good, bad):
        if number not in by_step:
            detail = "is no checkpoint there"
            if any(ref.step == number for ref in refs):
                detail = (
                    "is abandoned: name steps of the current branch, which `ckpt log` shows, or "
                    f"let the run go on from it with `ckpt rollback {backend.url} {number}`, which "
                    "abandons the current branch"
                )
            raise NoCheckpoint(backend.url, f"step {number} {detail}")
    return [by_step[number] for number in sorted(by_step)]


def _outcome(step: int, code: int) -> Outcome:
    """Return what the exit code of the command says of a step."""
    if code == _UNTESTABLE_CODE:
        return "untestable"
    if code in _NOT_STARTED_CODES:
        raise ConfigError(f"the shell cannot start the command (exit code {code}): check --run")
    if 0 <= code < _UNTESTABLE_CODE:
        return "bad" if code else "good"
    raise ConfigError(f"the command for step {step} was ended by a signal, and so tells nothing")

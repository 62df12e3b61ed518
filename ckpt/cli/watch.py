"""``ckpt watch``: run a command for each step that is committed.

Each try of a job at a step is an *attempt*, which the name of the step's folder contains.
"""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from ckpt.catalog.watching import CommittedStep, Watcher, each_step
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
    seconds,
)
from ckpt.cli.step_command import StepSignals, run_for_step
from ckpt.errors import ConfigError, NoCheckpoint
from ckpt.storage.urls import is_missing


def watch(
    argument: PlaceArgument = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="COMMAND",
            help="Run this in a shell for each step; {path}, {step} and {root} are replaced. "
            "Default: print a line.",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="The watcher. Each name handles every step once.")
    ] = "default",
    newest: Annotated[
        bool, typer.Option("--newest", help="Pass over all steps but the newest at each look.")
    ] = False,
    single: Annotated[
        bool, typer.Option("--once", help="Handle what is there now, and end.")
    ] = False,
    poll: Annotated[str, typer.Option(metavar="TIME", help="The time between two looks.")] = "10s",
    root: RootOption = None,
    config: ConfigFileOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Handle each committed step once, oldest first, and wait for more.

    The step is pinned while the command runs, so that no retention removes it. If the command
    fails, the step is tried again when the watcher starts the next time. The tier keeps a record of
    each handled step, so the watcher may start again on another machine.

    The command also finds CKPT_PATH, CKPT_STEP and CKPT_ROOT in its environment. The path of a step
    on an object store is a URL. With --json each step is one line of JSON, after its command.

    Exit code 1: --once was given, and a command failed. 7: --once was given, and the folder does
    not exist.

    \b
    Examples:
      ckpt watch runs/gpt --exec 'python eval.py {root} {step}'
      ckpt watch s3://bucket/run42 --name publish --exec './publish.sh {root} {step}'
      ckpt watch runs/gpt --once --newest --json
    """
    if command is not None and not command.strip():
        raise ConfigError("--exec is empty: give a command, or leave the option out")
    poll_seconds = seconds("--poll", poll)
    place = one_place([argument] if argument else None, root)
    backend = open_root(place, config, timeout=timeout)
    if is_missing(backend.url):
        if single:
            raise NoCheckpoint(backend.url, "this folder does not exist: check the path")
        output.warn(f"{backend.url} does not exist: its steps are handled once a job makes it")
    watcher = Watcher(backend, name, newest=newest)
    backend.call_in_time(watcher.look)  # Raises if the store does not answer; later looks try again
    failures = 0
    steps = each_step(watcher, None if single else poll_seconds)
    signals = StepSignals()
    with signals.as_exceptions(), closing(steps):
        for step in steps:
            code = run_for_step(command, step, signals) if command else 0
            _show(step, code, json=json)
            if code:
                failures += 1
                watcher.skip(step)  # Not handled: a later start tries it again
    if failures:
        output.warn(f"the command failed for {output.count(failures, 'step')}")
        raise typer.Exit(1)


def _show(step: CommittedStep, code: int, *, json: bool) -> None:
    """Print a line about a step, and the exit code of its command."""
    facts = {"step": step.step, "attempt": step.ref.attempt, "path": step.path, "exit_code": code}
    if json:
        output.show_json_line(facts)
    elif code:
        output.warn(f"step {step.step}: the command ended with exit code {code}")
    else:
        output.show_line(f"step {step.step} {step.path}")

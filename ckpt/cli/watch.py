"""``ckpt watch``: run a command for each step that is committed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from typing import Annotated, Final

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
from ckpt.errors import ConfigError, NoCheckpoint
from ckpt.storage.places import is_missing

_END_SECONDS: Final = 30.0
"""The time that a stopped command, and the processes that it has started, get to end."""
_LOOK_SECONDS: Final = 0.05
"""The time between two checks whether the processes have ended."""
_TERMINATED_CODE: Final = 128 + signal.SIGTERM
_PLACE: Final = re.compile(r"\{(path|step|root)\}")


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
      ckpt watch runs/gpt --exec 'python eval.py {path}'
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
    backend.ask(watcher.look)  # Raises if the store does not answer; later looks try again
    failed_steps: list[int] = []
    steps = each_step(watcher, None if single else poll_seconds)
    signals = _Signals()
    with signals.as_exceptions(), closing(steps):
        for step in steps:
            code = _run(command, step, signals) if command else 0
            _say(step, code, json=json)
            if code:
                failed_steps.append(step.step)
                watcher.leave(step)
    if failed_steps:
        output.warn(f"the command failed for steps {output.ranges(failed_steps)}")
        raise typer.Exit(1)


def _say(step: CommittedStep, code: int, *, json: bool) -> None:
    facts = {"step": step.step, "attempt": step.ref.attempt, "path": step.path, "exit_code": code}
    if json:
        output.show_json_line(facts)
    elif code:
        output.warn(f"step {step.step}: the command ended with exit code {code}")
    else:
        output.show_line(f"step {step.step} {step.path}")


class _Signals:
    """Turns SIGTERM and SIGINT into exceptions, which end the command and the pin of its step.

    The signals are held back while a command starts, because an exception in the constructor of
    ``Popen`` would leave the command running.

    Thread safety: only the main thread may use it.
    """

    def __init__(self) -> None:
        self._is_holding, self._pending = False, 0

    @contextmanager
    def as_exceptions(self) -> Generator[None]:
        """Return a context manager. A SIGTERM in its block raises ``SystemExit`` there, and a
        SIGINT raises ``KeyboardInterrupt``.
        """
        numbers = (signal.SIGTERM, signal.SIGINT)
        previous_handlers = [signal.signal(number, self._take) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, previous_handlers, strict=True):
                signal.signal(number, handler)

    def hold(self) -> None:
        """Hold back signals from now until ``release``."""
        self._is_holding = True

    def release(self) -> None:
        """Stop holding back signals. If a signal was held back, raise its exception."""
        self._is_holding = False
        if self._pending:
            self._raise(self._pending)

    def _take(self, number: int, _: object) -> None:
        self._pending = number
        if not self._is_holding:
            self._raise(number)

    def _raise(self, number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(_TERMINATED_CODE)


def _run(command: str, step: CommittedStep, signals: _Signals) -> int:
    """Run the command for a step, and return its exit code.

    If a signal raises an exception meanwhile, the command and the processes that it has started get
    SIGTERM, and SIGKILL after 30 s. This function waits until they have ended, and then raises the
    exception again.
    """
    values = {"path": step.path, "step": str(step.step), "root": step.root}
    command = _PLACE.sub(lambda place: shlex.quote(values[place[1]]), command)
    handed_on = os.environ  # noqa: TID251 - no setting is read here
    environment = {**handed_on, **{f"CKPT_{key.upper()}": value for key, value in values.items()}}
    signals.hold()
    with subprocess.Popen(  # noqa: S602
        command, shell=True, env=environment, process_group=0
    ) as process:
        try:
            signals.release()
            return process.wait()
        except BaseException:
            signals.hold()
            # The processes may have just ended, or have changed their user.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGTERM)
            _end_group(process)
            raise


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process and all other processes of its group have ended. Kill the group after
    30 s.
    """
    deadline = time.monotonic() + _END_SECONDS
    # These errors mean that the group has ended, or that its processes have changed their user.
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            process.poll()  # Otherwise the process stays in its group as a zombie after its end
            os.killpg(process.pid, 0)
            time.sleep(_LOOK_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)

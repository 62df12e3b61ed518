"""The program ``ckpt``.

Each command of the program has a module of its own. The module is imported only when the command is
used, so that ``ckpt --help`` is fast.
"""

from __future__ import annotations

import inspect
import io
import logging
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pkgutil import resolve_name
from typing import IO, Annotated, Any, Final, Protocol, TextIO, cast, runtime_checkable

import typer
from typer.core import TyperCommand

from ckpt import __version__
from ckpt.errors import CkptError, ConfigError, StorageError

_INTERRUPT_CODE = 130
_UNEXPECTED_CODE = 1

HELP = r"""Checkpoints of PyTorch jobs: find, check, move and convert them. Needs no GPU.

The place to look at is an argument or --root, else the environment's CKPT_ROOT, else the first tier
in ./ckpt.toml. `ckpt --install-completion` completes commands and options in bash, zsh and fish.

\b
Examples:
  ckpt ls runs/gpt                                what is there?
  ckpt restore --latest --root s3://bucket/run42  fetch and verify the newest
  ckpt verify runs/gpt 1200                       is it still what was written?
  ckpt show runs/gpt latest                       what is in it?
  ckpt diff runs/gpt --step 1100 --step 1200      what has changed?
  ckpt serve runs/gpt                             watch it in the browser
  ckpt top runs/gpt                               watch it in the terminal
  ckpt log runs/gpt                               what came after what?
  ckpt rollback runs/gpt 1200                     go back: later steps are abandoned
  ckpt branch runs/gpt before-spike 1200          give it a name, and keep it
  ckpt copy runs/gpt s3://bucket/run42 --all      put it somewhere else
  ckpt prune runs/gpt --keep-last 3 --dry-run     what need not be kept?
  ckpt rm runs/gpt --after 1200                   newer steps go for good
  ckpt advise runs/gpt --failures-per-day 2       how often to save?
  ckpt pin runs/gpt 1200 --for 2h                 keep it for now
  ckpt watch runs/gpt --exec 'eval.sh {path}'     do something with each new step
  ckpt bisect runs/gpt --good 1200 --bad 2000 --run 'python eval.py {root} {step}'
  ckpt prove runs/gpt --run 'python train.py --root {root}'
  ckpt finalize runs/gpt                          finish a save whose job died
  ckpt export runs/gpt gpt.safetensors            for other programs
  ckpt import checkpoint.pt runs/gpt --step 0     from other programs
  ckpt adopt dcp/step-1200 runs/gpt               from other programs, without a copy
  ckpt agent status                               what does this node's agent do?

\b
Exit codes:
  0  done                          5  a save was not committed
  1  unexpected error              6  no host memory for a copy
  2  wrong option or ckpt.toml     7  no such checkpoint
  3  the store failed or refused   8  a value that cannot be saved
  4  damaged data                 10  no agent, or it refuses
                                 130  interrupted
"""


def _help(text: str) -> str:
    """Return a docstring as the text for ``--help``.

    click keeps the line breaks of a paragraph that follows a line with a backspace character. The
    docstrings have a backslash and a ``b`` instead of that character.
    """
    return inspect.cleandoc(text).replace("\\b\n", "\b\n")


class _StrictCommand(TyperCommand):
    """A command that changes two things in the behavior of click.

    If an option that takes one value is given twice, the command raises ``ConfigError``. click
    would use the last value and print no warning. In the usage line, an argument whose text already
    has brackets, such as ``[ROOT] [STEP]``, gets no further brackets.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = [self.options_metavar or ""]
        for parameter in self.get_params(ctx):
            text = parameter.metavar or ""
            if parameter.param_type_name == "argument" and "[" in text:
                pieces.append(text)  # The text itself shows which words may be left out
            else:
                pieces += parameter.get_usage_pieces(ctx)
        return pieces

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # click's parser names a parameter once for each time that it is given.
        _values, _words, parameters = self.make_parser(ctx).parse_args(args=list(args))
        options: list[Any] = parameters
        for option in options:
            if (
                options.count(option) > 1
                and option.nargs == 1
                and not option.multiple
                and not getattr(option, "is_flag", False)
            ):
                raise ConfigError(
                    f"{option.opts[-1]} is given {options.count(option)} times: give it once"
                )
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="ckpt",
    help=_help(HELP),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        sys.stdout.write(f"ckpt {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


COMMANDS: Final = {
    "restore": ("restore:restore", "Fetch and verify the newest checkpoint."),
    "ls": ("ls:ls", "List the checkpoints; the last line is the newest."),
    "show": ("show:show", "Show what a checkpoint holds."),
    "verify": ("verify:verify", "Compare every byte with its checksum."),
    "diff": ("diff:diff", "Compare two checkpoints."),
    "serve": ("serve:serve", "Show runs on a page in the browser, live."),
    "log": ("log:log", "Show the history of a run, with its branches."),
    "top": ("top:top", "Show runs at a glance in the terminal, live."),
    "advise": ("advise:advise", "Show how often to save, and what is lost per day."),
    "copy": ("copy:copy", "Copy checkpoints between any two places."),
    "rollback": ("rollback:rollback", "Let a run go on from an older step."),
    "branch": ("branch:branch", "Give a step a name, and keep it."),
    "prune": ("prune:prune", "Remove checkpoints that need not be kept."),
    "rm": ("rm:rm", "Remove the steps that you name, on all tiers of a run."),
    "pin": ("pin:pin", "Keep a step from being removed for some time."),
    "unpin": ("pin:unpin", "End the pins of a step, or of all steps."),
    "watch": ("watch:watch", "Handle each committed step once, and wait for more."),
    "bisect": ("bisect:bisect", "Find the first step for which a command fails."),
    "prove": ("prove:prove", "Prove that a resume from a step is right, by a replay."),
    "finalize": ("finalize:finalize", "Finish a save whose first rank died before the last write."),
    "export": ("export:export", "Write a checkpoint in a format that other programs read."),
    "import": ("import_:import_", "Make a checkpoint from files of other programs."),
    "adopt": ("adopt:adopt", "Make a step of files of other programs, where they are."),
    "agent": ("agent:agent", "Run, ask or stop the agent of this user on this node."),
}
"""For each command of ckpt, its function as "MODULE:FUNCTION" in ``ckpt.cli``, and its summary in
``ckpt --help``.
"""
_ENTRY_POINT_GROUP: Final = "ckpt.commands"


class _LazyCommand(TyperCommand):
    """A command of ckpt that is not imported yet.

    When the command is used, it imports the real command and passes the arguments to it.
    """

    def make_context(
        self, info_name: str | None, args: list[str], *values: Any, **extra: Any
    ) -> Any:
        return load_command(self.name or "").make_context(info_name, args, *values, **extra)


def load_command(name: str) -> TyperCommand:
    """Import a command of ``COMMANDS`` by its name, and return it."""
    function = resolve_name(f"ckpt.cli.{COMMANDS[name][0]}")
    return cast("TyperCommand", typer.main.get_command(_typer_of(name, function)))


def _typer_of(name: str, function: Callable[..., object]) -> typer.Typer:
    command = typer.Typer(add_completion=False, rich_markup_mode=None)
    command.command(name, help=_help(function.__doc__ or ""), cls=_StrictCommand)(function)
    return command


for command_name, (_, summary) in COMMANDS.items():
    app.command(command_name, help=summary, cls=_LazyCommand)(lambda: None)


def add_commands_of_others(arguments: Sequence[str]) -> None:
    """Add the commands that other distributions provide as entry points of the group
    ``ckpt.commands``.

    If the first of ``arguments`` is a command of ckpt, nothing is done, because the search for
    entry points takes time. A command that cannot be imported is left out, and a line on standard
    error names it.
    """
    if any(argument in COMMANDS for argument in arguments[:1]):
        return
    from importlib.metadata import entry_points

    for entry in entry_points(group=_ENTRY_POINT_GROUP):
        if entry.name in COMMANDS:
            continue
        try:
            command = _typer_of(entry.name, entry.load())
            typer.main.get_command(command)  # Raises if the function cannot be a command
        except Exception as error:  # noqa: BLE001
            # A mistake in another package must not disable the commands of ckpt.
            sys.stderr.write(
                f"ckpt: the command {entry.name!r} of {entry.value!r} cannot be loaded: {error}\n"
            )
            continue
        app.registered_commands += command.registered_commands


def main() -> int:
    """Run the command line and return its exit code."""
    as_json = "--json" in sys.argv[1:]
    # A character that the encoding of the terminal does not have must not raise an error.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    add_commands_of_others(sys.argv[1:])
    log, handler = logging.getLogger("ckpt"), _WarningHandler(logging.WARNING)
    log.addHandler(handler)
    stdout = sys.stdout
    sys.stdout = cast("TextIO", _Output(stdout))
    try:
        code = _run(as_json=as_json)
        # The buffer may contain an error as JSON. Flush the buffer here, so that a closed pipe is
        # handled.
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _redirect_to_devnull(sys.stdout)
        return code
    except _OutputError as error:
        from ckpt.cli.output import fail

        fail(StorageError("standard output", str(error)), as_json=False)
        _redirect_to_devnull(sys.stdout)
        return StorageError.exit_code
    finally:
        sys.stdout = stdout
        log.removeHandler(handler)
        try:
            sys.stderr.flush()
        except OSError:
            _redirect_to_devnull(sys.stderr)


class _WarningHandler(logging.Handler):
    """A logging handler that prints each record of the logger "ckpt" as a warning."""

    def emit(self, record: logging.LogRecord) -> None:
        from ckpt.cli.output import warn

        warn(record.getMessage().removeprefix("ckpt: "))


def _run(*, as_json: bool) -> int:
    """Run the command, print its error if it fails, and return the exit code."""
    try:
        code = app(prog_name="ckpt", standalone_mode=False)
        sys.stdout.flush()
        if code == _INTERRUPT_CODE:
            # Later releases of typer return this code after Ctrl-C and print nothing.
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except CkptError as error:
        from ckpt.cli.output import fail

        fail(error, as_json=as_json)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        with suppress(OSError):
            sys.stderr.write("interrupted\n")
        return _INTERRUPT_CODE
    except SystemExit as error:  # Typer raises it for a broken pipe
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        _redirect_to_devnull(sys.stdout)
        return 0
    except BrokenPipeError:  # The reader, such as ``head``, has read enough
        _redirect_to_devnull(sys.stdout)
        return 0
    except _OutputError:
        raise
    except Exception as error:  # noqa: BLE001 - print any other error on one line
        return _report_other(error, as_json=as_json)


@runtime_checkable
class _ClickError(Protocol):
    """The interface of an exception that click raises for a wrong command line.

    The class itself is not imported, because later releases of typer have their own copy of click.
    """

    exit_code: int

    def show(self, file: IO[str]) -> None: ...
    def format_message(self) -> str: ...


def _report_other(error: Exception, *, as_json: bool) -> int:
    """Print an error that is not a ``CkptError``, and return the exit code.

    An error of click is printed with the message of click. Any other error is printed as a bug of
    ckpt, or raised again if CKPT_DEBUG is set.
    """
    from ckpt.cli.output import fail_unexpected, show_json
    from ckpt.config import debug_wanted
    from ckpt.errors.sanitize import clean

    if isinstance(error, _ClickError):
        buffer = io.StringIO()
        error.show(buffer)
        # The message may repeat an argument, such as a URL with credentials.
        with suppress(OSError):
            lines = buffer.getvalue().replace("\t", "  ").split("\n")[:-1]
            sys.stderr.writelines(f"{clean(line)}\n" for line in lines)
        if as_json:
            show_json({"error": type(error).__name__, "message": error.format_message()})
        return error.exit_code
    if debug_wanted():
        raise error
    fail_unexpected(error, as_json=as_json)
    return _UNEXPECTED_CODE


class _OutputError(Exception):
    """Standard output cannot be written to, for example because the disk is full."""


class _Output:
    """A wrapper of standard output that raises ``_OutputError`` in place of ``OSError``.

    If the reader of a pipe has closed it, the wrapper raises ``BrokenPipeError`` as usual.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._output_errors():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._output_errors():
            self._stream.flush()

    @contextmanager
    def _output_errors(self) -> Generator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _OutputError(error.strerror or str(error)) from None


def _redirect_to_devnull(stream: TextIO) -> None:
    """Redirect ``stream`` to ``os.devnull``, so that the flush at the exit of Python succeeds. The
    buffered text is lost.
    """
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())

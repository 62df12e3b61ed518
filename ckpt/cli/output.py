"""The output of the command line: tables, progress, JSON, errors.

Results go to standard output, and all other output goes to standard error. Text from a checkpoint
or a store may have any characters. Control characters in this text are escaped, and credentials in
URLs are replaced by ``***``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckpt.catalog.verify import OnProgress
from ckpt.errors import CkptError
from ckpt.errors.sanitize import clean, redact
from ckpt.model.readable import duration as duration
from ckpt.model.readable import rate as rate
from ckpt.model.readable import size as size

_MOST_UNWRAPPED_CHARS: Final = 14
"""A column of at most this many characters is not wrapped, such as the column of attempts."""
_LEAST_WRAPPED_CHARS: Final = 24
"""How many characters of a column that is wrapped must fit before other columns are left out."""
_LEAST_CUT_CHARS: Final = 10
"""A column that may be cut is left out if less than this many characters fit."""
_COLUMN_GAP: Final = 2
"""The number of spaces between two columns."""
_MOST_BITS: Final = 14_000
"""Larger ints are text in hexadecimal, since Python reads and prints at most 4,300 digits."""
_NO_LIMIT_WIDTH: Final = 10_000  # The width of a pipe or file, which is too large for lines to wrap


def show_json(value: object) -> None:
    """Print ``value`` as the only JSON document of a command, in ASCII."""
    sys.stdout.write(json.dumps(_clean_json(value), indent=2) + "\n")


def show_json_line(value: object) -> None:
    """Print one of several JSON documents of a command on a line of its own, and flush it."""
    sys.stdout.write(json.dumps(_clean_json(value)) + "\n")
    sys.stdout.flush()


def show_line(text: str = "", style: str = "") -> None:
    """Print a line on standard output. It is never wrapped."""
    _console(sys.stdout).print(Text(clean(text), style=style), soft_wrap=True)


def show_plain(text: str) -> None:
    """Print a line as it is, without escapes or ``***``, such as an address with a token.

    The output is flushed, so that the line appears at once, also in a pipe or file.
    """
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def show_facts(facts: Mapping[str, str]) -> None:
    """Print a line with the name and the value of each item."""
    width = max((len(clean(name)) for name in facts), default=0)
    for name, value in facts.items():
        line = Text(f"  {clean(name):<{width}}  ", style="dim").append(
            clean(value), style="not dim"
        )
        _console(sys.stdout).print(line, soft_wrap=True)


def show_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    flexible: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Print a table that is at most as wide as the terminal.

    Args:
        columns: The titles of the columns.
        rows: The cells of each row.
        right: The titles of the columns that are aligned to the right and never wrapped.
        flexible: The titles of the columns that are cut, or left out, if the table is too wide.
        optional: The titles of the columns that are left out, in this order, while the table is
            too wide without the columns ``flexible``.
    """
    console = _console(sys.stdout)
    columns, rows = _leave_out(columns, rows, flexible, optional, console.width)
    if flexible:
        columns, rows = _fit(columns, rows, flexible, console.width)
    table = Table(box=None, pad_edge=False, padding=(0, _COLUMN_GAP, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        is_right = column in right
        cells = (column, *(row[index] for row in rows))
        table.add_column(
            clean(column),
            justify="right" if is_right else "left",
            no_wrap=is_right or max(map(len, cells)) <= _MOST_UNWRAPPED_CHARS,
            overflow="fold",
        )
    for row in rows:
        table.add_row(
            *(
                Text(clean(cell), style=_STYLE_BY_STATE.get(cell.partition(":")[0], ""))
                for cell in row
            )
        )
    with console.capture() as capture:
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def _leave_out(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    flexible: Sequence[str],
    optional: Sequence[str],
    width: int,
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the titles and rows without those of the columns ``optional`` for which there is no
    room. A column that can be wrapped needs room for ``_LEAST_WRAPPED_CHARS`` characters.
    """
    widths = {
        column: min(_LEAST_WRAPPED_CHARS, _cell_width(index, columns, rows)) + _COLUMN_GAP
        for index, column in enumerate(columns)
        if column not in flexible
    }
    for column in optional:
        if sum(widths.values()) - _COLUMN_GAP > width:
            widths.pop(column, None)
    indexes = [i for i, column in enumerate(columns) if column in widths or column in flexible]
    return [columns[i] for i in indexes], [[row[i] for i in indexes] for row in rows]


def _fit(
    columns: Sequence[str], rows: Sequence[Sequence[str]], flexible: Sequence[str], width: int
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the titles and rows with the cells of the columns ``flexible`` cut to fit ``width``.

    Each of these columns gets the characters that all other columns leave. If these are fewer than
    ``_LEAST_CUT_CHARS``, the columns ``flexible`` are left out.
    """
    fixed_indexes = [index for index, column in enumerate(columns) if column not in flexible]
    fixed_widths = [_cell_width(index, columns, rows) + _COLUMN_GAP for index in fixed_indexes]
    room = width - sum(fixed_widths) - _COLUMN_GAP
    if room < _LEAST_CUT_CHARS:
        return [columns[index] for index in fixed_indexes], [
            [row[index] for index in fixed_indexes] for row in rows
        ]

    def shorten(text: str) -> str:
        return text if len(text := clean(text)) <= room else f"{text[: room - 3]}..."

    unchanged_indexes = set(fixed_indexes)
    return columns, [
        [cell if index in unchanged_indexes else shorten(cell) for index, cell in enumerate(row)]
        for row in rows
    ]


def _cell_width(index: int, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the number of characters of the widest cell of a column, with its title."""
    return max(len(row[index]) for row in (columns, *rows))


def short_names(
    places: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> dict[str, str]:
    """Return for each place the name that a table should show.

    The name is the place itself if the table fits the terminal, or if the places are short.
    Otherwise the names are "tier 1", "tier 2" and so on. A line for each name with its place is
    then printed.

    Args:
        places: The places, such as URLs of tiers.
        columns: The titles of the table, with the places as they are.
        rows: The cells of the table, with the places as they are.
    """
    console = _console(sys.stdout)
    widths = [max(map(len, cells)) + _COLUMN_GAP for cells in zip(columns, *rows, strict=True)]
    is_narrow = sum(widths) - _COLUMN_GAP <= console.width
    if is_narrow or max(map(len, places), default=0) <= _LEAST_CUT_CHARS:
        return {place: place for place in places}
    names = {place: f"tier {number}" for number, place in enumerate(places, 1)}
    show_facts({name: place for place, name in names.items()})
    show_line()
    return names


def warn(text: str) -> None:
    """Print a warning on one line of standard error."""
    _print_line("warning", "yellow", text)


def note(text: str) -> None:
    """Print a remark on one line of standard error."""
    _print_line("note", "dim", text)


def fail(error: Exception, *, as_json: bool) -> None:
    """Print an error on one line of standard error.

    With ``as_json``, also print the error and its public fields as JSON on standard output.
    """
    _print_line("error", "bold red", str(error))
    if as_json:
        fields = {name: value for name, value in vars(error).items() if not name.startswith("_")}
        show_json({"error": type(error).__name__, "message": str(error), **fields})


def fail_unexpected(error: Exception, *, as_json: bool) -> None:
    """Print an error as ``fail`` does, with the remark that it is a bug of ckpt."""
    text = (
        f"internal error: {type(error).__name__}: {error} (run with CKPT_DEBUG=1 for the traceback)"
    )
    fail(CkptError(text), as_json=as_json)


@contextmanager
def progress(label: str, *, in_bytes: bool = True) -> Generator[OnProgress]:
    """Return a context manager that shows a progress bar while its block runs. Nothing is shown if
    standard error is not a terminal.

    The block gets a function that it calls with the amount that is done and the total amount.

    Args:
        label: The text before the bar.
        in_bytes: Whether the block counts bytes. If it does, the bar also shows the speed.
    """
    if not sys.stderr.isatty():
        yield lambda _count, _total: None
        return
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = list(Progress.get_default_columns())
    if in_bytes:
        columns[2:3] = [DownloadColumn(), TransferSpeedColumn()]  # In place of the percentage
    with Progress(*columns, console=_console(sys.stderr), transient=True) as bar:
        task = bar.add_task(clean(label), total=None)
        yield lambda count, total: bar.update(task, completed=count, total=total)


def gigabytes_per_second(nbytes: int, seconds: float) -> float:
    return nbytes / max(seconds, 1e-9) / 1e9


def count(number: int, noun: str) -> str:
    """Return a number and a noun, such as '1 rank' or '2 ranks'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def moment(epoch_seconds: float) -> str:
    """Return a time as text in the local time zone; '?' if it is not a valid time."""
    try:
        return datetime.fromtimestamp(epoch_seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "?"


def moment_utc(epoch_seconds: float) -> str | None:
    """Return a time as text in ISO 8601 and in UTC; None if it is not a valid time."""
    try:
        return datetime.fromtimestamp(epoch_seconds, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return None


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ranges, such as '0-3, 7'."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in runs)


_STYLE_BY_STATE: Final = {
    "committed": "green",
    "intact": "green",
    "incomplete": "yellow",
    "damaged": "red",
    "unreachable": "red",
}


def _clean_json(value: Any) -> Any:
    """Return ``value`` converted to types that JSON has, without credentials in its strings."""
    match value:
        case str():
            return redact(value)
        case Mapping():
            return {redact(str(key)): _clean_json(item) for key, item in value.items()}
        case list() | tuple():
            return [_clean_json(item) for item in value]
        case float() if not math.isfinite(value):
            return None  # JSON has no NaN and no infinite numbers
        case int() if value.bit_length() > _MOST_BITS:
            return hex(value)
        case None | bool() | int() | float():
            return value
        case _:
            return redact(str(value))


def _print_line(word: str, style: str, text: str) -> None:
    with suppress(OSError):  # If standard error fails, the exit code still shows the result
        _console(sys.stderr).print(
            Text(f"{word}: ", style=style).append(clean(text), style="default"), soft_wrap=True
        )


def _console(stream: TextIO) -> Console:
    width = None if stream.isatty() else _NO_LIMIT_WIDTH
    return Console(file=stream, markup=False, emoji=False, highlight=False, width=width)

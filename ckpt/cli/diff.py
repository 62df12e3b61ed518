"""``ckpt diff``: compare two checkpoints, A and B.

The *movement* of a tensor says how far its elements in A and in B are apart. A *part* of the state
is all tensors whose names begin alike, such as ``model``.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Annotated, Final

import typer

from ckpt.catalog.difference import Difference, compare
from ckpt.catalog.part_difference import (
    TITLES,
    PartDifference,
    most_moved_line,
    part_differences,
    percent,
)
from ckpt.catalog.step_listing import read_manifest
from ckpt.catalog.tensor_movement import Movement
from ckpt.catalog.tensor_reader import StepReader
from ckpt.cli import output
from ckpt.cli.options import (
    STEP_FORMS,
    TIMEOUT_SECONDS,
    JsonOption,
    RootOption,
    TimeoutOption,
    adding_mend_advice,
    find_steps,
    one_place,
    open_root,
    workers_for,
)
from ckpt.cli.show import clip, exact_values
from ckpt.errors import ConfigError
from ckpt.model.manifest import Tensor
from ckpt.model.selector import Selector, is_selector, selector_of

_DIFFERENT_CODE = 1
_MOST_WHOLE_CHARS: Final = 100
"""A plain value of at most this many characters is shown as a whole."""
_EXCERPT_CHARS: Final = 30
"""The number of characters that are shown of a longer plain value."""


def diff(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[A] [B] [STEP] [STEP]",
            help="Folders or URLs, and one or two steps. A is the same as --root; B is A again if "
            f"it is left out. A step is {STEP_FORMS}.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        list[str] | None,
        typer.Option(
            "--step",
            metavar="STEP",
            help="The step of both checkpoints. Give the option twice to name the step of A, and "
            "then the step of B. Default: the newest step of each.",
        ),
    ] = None,
    values: Annotated[
        bool, typer.Option("--values", help="Read what differs, and say how far it has moved.")
    ] = False,
    root: RootOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Compare two checkpoints.

    Shows names that only one checkpoint has, and dtypes, shapes, tensor bytes and plain values that
    differ. The bytes of a tensor are compared by their checksums. Its data is read only if the
    checkpoints divide it into different chunks. --values also reads the tensors that differ. The
    last lines sum up by part of the state, and say what has moved most, in percent of its norm.

    Exit code 0: they are equal. 1: they differ. 4: damaged. 7: there is no such checkpoint.

    \b
    Examples:
      ckpt diff runs/gpt 1100 1200
      ckpt diff runs/gpt best:loss latest
      ckpt diff runs/gpt s3://bucket/run42 --step 1200
      ckpt diff runs/a runs/b --values
    """
    words = arguments or []
    selectors = [selector_of(text) for text in [*filter(is_selector, words), *(step or [])]]
    if len(selectors) > 2:
        raise ConfigError("one step is for both, two are of A and of B: leave the others out")
    places = [*([root] if root else []), *(word for word in words if not is_selector(word))]
    place_a, place_b = one_place(places[:1]), one_place(places[1:])
    if place_b is None and len(selectors) < 2:
        raise ConfigError("compare with what? Give B, or two steps")
    step_a, step_b = (selectors[0], selectors[-1]) if selectors else (None, None)
    with ExitStack() as stack:
        reader_a = stack.enter_context(_reader(place_a, step_a, timeout))
        reader_b = stack.enter_context(_reader(place_b or place_a, step_b, timeout))
        with output.progress("comparing", in_bytes=False) as bar:
            difference = compare(reader_a, reader_b, on_name=bar)
        movements = _movements(reader_a, reader_b, difference.other_values) if values else {}
        names = reader_a.tensors.keys() | reader_b.tensors.keys()
        # Without scalars, since the count of an optimizer's steps would move most
        movements_of_arrays = {
            name: entry for name, entry in movements.items() if reader_a.tensors[name].shape
        }
        parts = part_differences(names, difference, movements_of_arrays)
        plain = plain_differences(reader_a, reader_b)
    if json:
        result = _as_json(reader_a, reader_b, difference, movements, plain)
        output.show_json(result | {"parts": [_part_as_json(part) for part in parts]})
    else:
        _show(reader_a, reader_b, difference, movements, plain)
        _show_parts(parts, movements_of_arrays)
    if difference.exists or plain:
        raise typer.Exit(_DIFFERENT_CODE)


@contextmanager
def _reader(root: str | None, step: Selector | None, timeout: float) -> Generator[StepReader]:
    backend = open_root(root, timeout=timeout)
    ref = find_steps(backend, step)[0]
    with adding_mend_advice(backend, ref), workers_for(backend) as workers:
        manifest = backend.call_in_time(partial(read_manifest, backend, ref))
        yield StepReader(backend, ref, manifest, workers)


def _movements(reader_a: StepReader, reader_b: StepReader, names: list[str]) -> dict[str, Movement]:
    """Read the tensors ``names`` of both checkpoints, and return how far they have moved, by the
    name of the tensor. A tensor is left out if its elements are not numbers.
    """
    from ckpt.exchange.weights.movement import movement

    movements: dict[str, Movement] = {}
    with output.progress("reading", in_bytes=False) as bar:
        for index, name in enumerate(names):
            if (value := movement(reader_a, reader_b, name)) is not None:
                movements[name] = value
            bar(index + 1, len(names))
    return movements


def plain_differences(
    reader_a: StepReader, reader_b: StepReader
) -> dict[str, tuple[str | None, str | None]]:
    """Return a dict from the name of each plain value that differs to the text of the value in
    ``reader_a`` and its text in ``reader_b``. A text is None if that checkpoint does not have the
    value.
    """
    texts_a, texts_b = exact_values(reader_a.manifest), exact_values(reader_b.manifest)
    return {
        name: (texts_a.get(name), texts_b.get(name))
        for name in sorted(texts_a.keys() | texts_b.keys())
        if texts_a.get(name) != texts_b.get(name)
    }


def _show(
    reader_a: StepReader,
    reader_b: StepReader,
    difference: Difference,
    movements: dict[str, Movement],
    plain: dict[str, tuple[str | None, str | None]],
) -> None:
    """Print a row for each name that differs, and then how the checkpoints were compared.

    Args:
        reader_a: The reader of checkpoint A.
        reader_b: The reader of checkpoint B.
        difference: How the tensors differ.
        movements: How far each tensor that was read for ``--values`` has moved.
        plain: The text in A and in B of each plain value that differs, by its name.
    """
    output.show_facts({"A": _place(reader_a), "B": _place(reader_b)})
    rows = [
        (name, "only in A", _dtype_and_shape(reader_a.tensors[name]))
        for name in difference.only_one
    ]
    rows += [
        (name, "only in B", _dtype_and_shape(reader_b.tensors[name]))
        for name in difference.only_two
    ]
    rows += [
        (
            name,
            "another kind",
            f"{_dtype_and_shape(tensor_a)} in A, {_dtype_and_shape(tensor_b)} in B",
        )
        for name, (tensor_a, tensor_b) in difference.other_kinds.items()
    ]
    for name in difference.other_values:
        text = _dtype_and_shape(reader_a.tensors[name])
        rows.append(
            (
                name,
                "other values",
                f"{text}, by at most {movements[name].largest:.6g}" if name in movements else text,
            )
        )
    rows += [
        (name, "plain value", _contrast(text_a, text_b)) for name, (text_a, text_b) in plain.items()
    ]
    if rows:
        output.show_line()
        output.show_table(("name", "what", "detail"), rows)
        output.show_line()
    parts = [f"{output.count(difference.equal, 'tensor')} equal"]
    if difference.exists or plain:
        parts.append(f"{output.count(len(rows), 'difference')}")
    output.show_line(", ".join(parts) + ("" if rows else ": the checkpoints are the same"))
    if difference.compared_count and not difference.read_count:
        output.show_line(
            "compared by checksum alone: no data was read"
            + (" but for --values" if movements else "")
        )
    elif difference.read_count:
        output.show_line(
            f"{output.count(difference.read_count, 'tensor')} saved in another layout: read, the "
            "others compared by checksum"
        )


def _show_parts(parts: Sequence[PartDifference], movements: dict[str, Movement]) -> None:
    """Show the parts that differ, and what has moved most. Nothing is shown if all is equal.

    A part differs if it has tensors with other ``values``, or ``unlike`` ones, which only one
    checkpoint has or which have another dtype or shape.
    """
    parts = [part for part in parts if part.values or part.unlike]
    if not parts:
        return
    titles, rows = list(TITLES), [list(part.cells) for part in parts]
    if movements:
        titles += ["moved", "at most"]
        for part, row in zip(parts, rows, strict=True):
            entry = part.movement
            row += ["-", "-"] if entry is None else [percent(entry), f"{entry.largest:.6g}"]
    output.show_line()
    output.show_table(titles, rows, right=titles[1:])
    if line := most_moved_line(parts, movements):
        output.show_line(line)


def _part_as_json(part: PartDifference) -> dict[str, object]:
    return {
        "part": part.part,
        "equal": part.equal,
        "values": part.values,
        "unlike": part.unlike,
        "moved": _json_number(part.movement.ratio if part.movement else None),
        "most_moved": part.most_moved or None,
    }


def _dtype_and_shape(tensor: Tensor) -> str:
    return f"{tensor.dtype} [{', '.join(map(str, tensor.shape))}]"


def _contrast(text_a: str | None, text_b: str | None) -> str:
    """Return a text that shows both values; "none" stands for None.

    If one of the values is long, the text has the lengths of both values, and a part of each value
    that begins just before the first difference.
    """
    if text_a is None or text_b is None or max(len(text_a), len(text_b)) <= _MOST_WHOLE_CHARS:
        return (
            f"{'none' if text_a is None else clip(text_a)} in A, "
            f"{'none' if text_b is None else clip(text_b)} in B"
        )
    pairs = enumerate(zip(text_a, text_b, strict=False))
    position = next((index for index, (a, b) in pairs if a != b), min(len(text_a), len(text_b)))
    start = max(0, position - _EXCERPT_CHARS // 2)
    excerpt_a, excerpt_b = (
        f"{len(text):,} characters, {_excerpt(text, start)}" for text in (text_a, text_b)
    )
    return f"from character {position + 1:,} on: {excerpt_a} in A; {excerpt_b} in B"


def _excerpt(text: str, start: int) -> str:
    end = start + _EXCERPT_CHARS
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"


def _place(reader: StepReader) -> str:
    return f"{reader.backend.url.rstrip('/')}/{reader.ref.folder}"


def _json_number(difference: float | None) -> float | str | None:
    """Return a difference for JSON, which has no infinite numbers: ``"inf"`` or ``"nan"`` then."""
    return difference if difference is None or math.isfinite(difference) else str(difference)


def _as_json(
    reader_a: StepReader,
    reader_b: StepReader,
    difference: Difference,
    movements: dict[str, Movement],
    plain: dict[str, tuple[str | None, str | None]],
) -> dict[str, object]:
    """Return the differences for the JSON output. The arguments are those of ``_show``."""
    return {
        "a": _place(reader_a),
        "b": _place(reader_b),
        "same": not (difference.exists or plain),
        "equal": difference.equal,
        "read": difference.read_count,
        "only_a": difference.only_one,
        "only_b": difference.only_two,
        "kinds": {
            name: {"a": _dtype_and_shape(tensor_a), "b": _dtype_and_shape(tensor_b)}
            for name, (tensor_a, tensor_b) in difference.other_kinds.items()
        },
        "values": [
            {
                "name": name,
                "max_difference": _json_number(entry.largest if entry else None),
                "moved": _json_number(entry.ratio if entry else None),
            }
            for name in difference.other_values
            for entry in [movements.get(name)]
        ],
        "plain": {name: {"a": text_a, "b": text_b} for name, (text_a, text_b) in plain.items()},
    }

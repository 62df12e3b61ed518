"""``ckpt diff``: what is different?"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.cli.options import JsonOption, open_root, workers_for

if TYPE_CHECKING:
    from ckpt.catalog.difference import Difference
    from ckpt.catalog.reading import StepReader
    from ckpt.model.manifest import Tensor

_DIFFERENT = 1


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Folder or URL.", show_default=False)],
    b: Annotated[
        str | None,
        typer.Argument(metavar="[B]", help="Another; A again if it is left out.", show_default=False),
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option(
            "--step", metavar="N", min=0, help="Of both; given twice, of A and of B. Default: the newest."
        ),
    ] = None,
    values: Annotated[
        bool, typer.Option("--values", help="Read what differs, and say by how much at most.")
    ] = False,
    json: JsonOption = False,
) -> None:
    r"""Compare two checkpoints.

    Tells names that are in one only, dtypes and shapes that differ, tensors whose bytes differ, and plain values. Where both were saved in the same layout their checksums are compared, and nothing
    is read; else the tensors are.

    Exit code 0: the same. 1: they differ. 4: damaged. 7: there is no such checkpoint.

    \b
    Examples:
      ckpt diff runs/gpt --step 1100 --step 1200
      ckpt diff runs/gpt s3://bucket/run42 --step 1200
      ckpt diff runs/a runs/b --values
    """
    from ckpt.catalog.difference import compare
    from ckpt.cli import output
    from ckpt.errors import ConfigError

    numbers = step or []
    if len(numbers) > 2:
        raise ConfigError("--step is given once for both, or twice: first that of A, then that of B")
    if b is None and len(numbers) < 2:
        raise ConfigError("compare with what? Give B, or --step twice")
    first, second = (numbers[0], numbers[-1]) if numbers else (None, None)
    with ExitStack() as stack:
        one = stack.enter_context(_reader(a, first))
        two = stack.enter_context(_reader(b or a, second))
        with output.steps("comparing") as bar:
            found = compare(one, two, on_name=bar)
        far = _far(one, two, found.values) if values else {}
        plain = _plain(one, two)
    if json:
        output.show_json(_as_json(one, two, found, far, plain))
    else:
        _show(one, two, found, far, plain)
    if found.any or plain:
        raise typer.Exit(_DIFFERENT)


@contextmanager
def _reader(root: str, step: int | None) -> Generator[StepReader]:
    from ckpt.catalog.index import find, read_manifest
    from ckpt.catalog.reading import StepReader

    backend = open_root(root)
    ref = find(backend, step)[0]
    with workers_for(backend) as workers:
        yield StepReader(backend, ref, read_manifest(backend, ref), workers)


def _far(one: StepReader, two: StepReader, names: list[str]) -> dict[str, float]:
    from ckpt.cli import output
    from ckpt.exchange.values import max_difference

    found: dict[str, float] = {}
    with output.steps("reading") as bar:
        for done, name in enumerate(names):
            found[name] = max_difference(one, two, name)
            bar(done + 1, len(names))
    return found


def _plain(one: StepReader, two: StepReader) -> dict[str, tuple[str | None, str | None]]:
    """Plain values that differ, as text; None where one has none."""
    from ckpt.cli.show import exact_values

    a, b = exact_values(one.manifest), exact_values(two.manifest)
    return {
        name: (a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)
    }


def _show(
    one: StepReader,
    two: StepReader,
    found: Difference,
    far: dict[str, float],
    plain: dict[str, tuple[str | None, str | None]],
) -> None:
    from ckpt.cli import output

    output.show_facts({"A": _place(one), "B": _place(two)})
    rows = [(name, "only in A", _kind(one.tensors[name])) for name in found.only_one]
    rows += [(name, "only in B", _kind(two.tensors[name])) for name in found.only_two]
    rows += [
        (name, "another kind", f"{_kind(x)} in A, {_kind(y)} in B") for name, (x, y) in found.kinds.items()
    ]
    for name in found.values:
        told = _kind(one.tensors[name])
        rows.append((name, "other values", f"{told}, by at most {far[name]:.6g}" if name in far else told))
    for name, (x, y) in plain.items():
        rows.append((name, "plain value", f"{_or_none(x)} in A, {_or_none(y)} in B"))
    if rows:
        output.show_line()
        output.show_table(("name", "what", "detail"), rows)
        output.show_line()
    parts = [f"{output.count(found.equal, 'tensor')} equal"]
    if found.any or plain:
        parts.append(f"{output.count(len(rows), 'difference')}")
    output.show_line(", ".join(parts) + ("" if rows else ": the checkpoints are the same"))
    if found.compared and not found.read_names:
        output.show_line(
            "compared by checksum alone: no data was read" + (" but for --values" if far else "")
        )
    elif found.read_names:
        output.show_line(
            f"{output.count(found.read_names, 'tensor')} saved in another layout: read, the others compared by checksum"
        )


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} [{', '.join(map(str, tensor.shape))}]"


def _or_none(text: str | None) -> str:
    from ckpt.cli.show import clip

    return "none" if text is None else clip(text)


def _place(reader: StepReader) -> str:
    return f"{reader.backend.url.rstrip('/')}/{reader.ref.folder}"


def _as_json(
    one: StepReader,
    two: StepReader,
    found: Difference,
    far: dict[str, float],
    plain: dict[str, tuple[str | None, str | None]],
) -> dict[str, object]:
    return {
        "a": _place(one),
        "b": _place(two),
        "same": not (found.any or plain),
        "equal": found.equal,
        "read": found.read_names,
        "only_a": found.only_one,
        "only_b": found.only_two,
        "kinds": {name: {"a": _kind(x), "b": _kind(y)} for name, (x, y) in found.kinds.items()},
        "values": [{"name": name, "max_difference": far.get(name)} for name in found.values],
        "plain": {name: {"a": x, "b": y} for name, (x, y) in plain.items()},
    }

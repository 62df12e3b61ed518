"""Print records, such as the steps that a command has copied, as a table and as JSON.

A command declares each field of its records once: its title in the table, its key in JSON, and its
value. The kind of the value decides how both show it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Generic, Literal, TypeVar

from ckpt.cli import output

T = TypeVar("T")
Kind = Literal["text", "number", "step", "size", "time", "moment"]
"""What a value is: a text, a number, a `StepRef`, bytes, seconds, or seconds since 1970."""
_TEXT_BY_KIND: Final[dict[Kind, Callable[[Any], str]]] = {
    "text": str,
    "number": str,
    "size": output.size,
    "time": output.duration,
    "moment": output.moment,
}
_JSON_BY_KIND: Final[dict[Kind, Callable[[Any], object]]] = {
    "time": lambda seconds: round(seconds, 6),
    "moment": lambda seconds: output.moment_utc(seconds) or "?",
}
_RIGHT_ALIGNED_KINDS: Final = ("number", "size", "time")
_STEP_TITLES: Final = ("step", "attempt")
"""The titles and the keys of a `StepRef`, which are two columns."""


@dataclass(frozen=True, slots=True)
class Field(Generic[T]):
    """One field of records of the type ``T``.

    Attributes:
        title: The title of the column; empty if only JSON has the field, and for a step.
        value: Returns the value of a record. The table shows ``-`` for None, and for a size or a
            time that is 0.
        key: The name in JSON; empty if it is the title.
        kind: What the value is.
        text: Returns the cell of a record, in place of the value as text.
    """

    title: str
    value: Callable[[T], Any]
    _: KW_ONLY
    key: str = ""
    kind: Kind = "text"
    text: Callable[[T], str] | None = None

    @property
    def titles(self) -> tuple[str, ...]:
        """The titles of the columns."""
        return _STEP_TITLES if self.kind == "step" else (self.title,) if self.title else ()

    def cells(self, record: T) -> tuple[str, ...]:
        """Return the texts of a record in the columns."""
        if not self.titles:
            return ()
        if self.text is not None:
            return (self.text(record),)
        value = self.value(record)
        if self.kind == "step":
            return str(value.step), value.attempt
        is_empty = value is None or (self.kind in ("size", "time") and not value)
        return ("-" if is_empty else _TEXT_BY_KIND[self.kind](value),)

    def items(self, record: T) -> dict[str, object]:
        """Return the keys and values of a record in JSON."""
        value = self.value(record)
        if self.kind == "step":
            return dict(zip(_STEP_TITLES, (value.step, value.attempt), strict=True))
        has_converter = self.kind in _JSON_BY_KIND and value is not None
        return {self.key or self.title: _JSON_BY_KIND[self.kind](value) if has_converter else value}


def entry(fields: Sequence[Field[T]], record: T) -> dict[str, object]:
    """Return a record for ``output.show_json``."""
    return {key: value for field in fields for key, value in field.items(record).items()}


def entries(fields: Sequence[Field[T]], records: Iterable[T]) -> list[dict[str, object]]:
    """Return records for ``output.show_json``."""
    return [entry(fields, record) for record in records]


def show(
    fields: Sequence[Field[T]], records: Collection[T], *, flexible: Sequence[str] = ()
) -> None:
    """Print a table of the records, if there are any. Numbers are aligned to the right.

    Args:
        fields: The fields. Those without a title are left out.
        records: The records.
        flexible: The titles of the columns that are cut, or left out, if the table is too wide.
    """
    if records:
        output.show_table(
            titles_of(fields),
            [cells_of(fields, record) for record in records],
            right=[
                "step",
                *(field.title for field in fields if field.kind in _RIGHT_ALIGNED_KINDS),
            ],
            flexible=flexible,
        )


def titles_of(fields: Sequence[Field[T]]) -> list[str]:
    """Return the titles of the columns of a table."""
    return [title for field in fields for title in field.titles]


def cells_of(fields: Sequence[Field[T]], record: T) -> list[str]:
    """Return the texts of a record in the columns of a table."""
    return [cell for field in fields for cell in field.cells(record)]

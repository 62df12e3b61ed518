"""Print records, such as the steps that a command has copied, as a table and as JSON.

A command declares each field of its records once: its title in the table, its key in JSON, and its
value. The kind of the value decides how both show it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Generic, Literal, TypeVar

from ckpt.cli import output
from ckpt.model.keys import StepRef

T = TypeVar("T")
Kind = Literal["text", "number", "size", "time", "moment"]
"""What a value is: a text, a number, bytes, seconds, or seconds since 1970."""
_TEXTS: Final[dict[Kind, Callable[[Any], str]]] = {
    "text": str,
    "number": str,
    "size": output.size,
    "time": output.duration,
    "moment": output.moment,
}
_JSON: Final[dict[Kind, Callable[[Any], object]]] = {
    "time": lambda seconds: round(seconds, 6),
    "moment": lambda seconds: output.moment_utc(seconds) or "?",
}


@dataclass(frozen=True, slots=True)
class Field(Generic[T]):
    """One field of records of the type ``T``.

    Attributes:
        title: The title of the column; empty if only JSON has the field.
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

    def cell(self, record: T) -> str:
        """Return the text that a table shows."""
        if self.text is not None:
            return self.text(record)
        value = self.value(record)
        is_empty = value is None or (self.kind in ("size", "time") and not value)
        return "-" if is_empty else _TEXTS[self.kind](value)

    def json_value(self, record: T) -> object:
        """Return the value that JSON has."""
        value = self.value(record)
        return _JSON[self.kind](value) if self.kind in _JSON and value is not None else value


def of_step(ref: Callable[[T], StepRef]) -> tuple[Field[T], Field[T]]:
    """Return the fields with the number and the attempt of the step of a record."""
    return (
        Field("step", lambda record: ref(record).step, kind="number"),
        Field("attempt", lambda record: ref(record).attempt),
    )


def entry(fields: Sequence[Field[T]], record: T) -> dict[str, object]:
    """Return a record for ``output.show_json``."""
    return {field.key or field.title: field.json_value(record) for field in fields}


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
        flexible: See ``output.show_table``.
    """
    columns = [field for field in fields if field.title]
    if records:
        output.show_table(
            [field.title for field in columns],
            [[field.cell(record) for field in columns] for record in records],
            right=[field.title for field in columns if field.kind in ("number", "size", "time")],
            flexible=flexible,
        )

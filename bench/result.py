"""What a scenario found, as values: lines of numbers, failures with their reasons, conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from bench.measure import Spread

Kind = Literal["seconds", "bytes", "per_second", "ratio", "percent", "count", "text"]
FLOOR: Final = "floor."

Number = Spread | float | str | None


@dataclass(frozen=True)
class Column:
    """One number of a line: where it is kept, its heading, and how it is written."""

    key: str
    heading: str
    kind: Kind


@dataclass
class Line:
    """One contender (or floor) in one case."""

    case: str
    name: str
    label: str
    numbers: dict[str, Number] = field(default_factory=dict)

    def median(self, key: str) -> float | None:
        value = self.numbers.get(key)
        return (
            value.median
            if isinstance(value, Spread)
            else value
            if isinstance(value, float | int)
            else None
        )


@dataclass(frozen=True)
class Failure:
    """A contender that has no numbers in a case, and why."""

    case: str
    name: str
    reason: str


@dataclass
class Result:
    """A scenario's run.

    ``columns`` are those of the table; lines may hold more numbers, which are in the CSV and JSON.
    """

    scenario: str
    title: str
    columns: Sequence[Column]
    notes: Sequence[str]
    lines: list[Line] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    skipped: list[Failure] = field(default_factory=list)
    conditions: dict[str, Any] = field(default_factory=dict)

    def cases(self) -> list[str]:
        return list(dict.fromkeys(line.case for line in self.lines))

    def of(self, case: str, *, floors: bool = False) -> list[Line]:
        """The contenders, or the floors, of one case."""
        return [
            line
            for line in self.lines
            if line.case == case and line.name.startswith(FLOOR) == floors
        ]

    def find(self, case: str, name: str) -> Line | None:
        return next((line for line in self.lines if line.case == case and line.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """Everything, single values included."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Result:
        lines = [
            Line(
                one["case"],
                one["name"],
                one["label"],
                {
                    key: Spread.from_json(value) if isinstance(value, dict) else value
                    for key, value in one["numbers"].items()
                },
            )
            for one in fields["lines"]
        ]
        return cls(
            fields["scenario"],
            fields["title"],
            [Column(**one) for one in fields["columns"]],
            fields["notes"],
            lines,
            [Failure(**one) for one in fields["failures"]],
            [Failure(**one) for one in fields["skipped"]],
            fields["conditions"],
        )

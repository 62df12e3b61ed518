"""The fields of records, as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from ckpt.cli import output, record_tables
from ckpt.cli.record_tables import Field
from ckpt.errors import CkptError
from ckpt.model.keys import StepRef


@dataclass(frozen=True)
class Copy:
    ref: StepRef
    nbytes: int = 0
    seconds: float = 0.0
    error: CkptError | None = None


FIELDS: tuple[Field[Copy], ...] = (
    Field("", lambda copy: copy.ref, kind="step"),
    Field("size", lambda copy: copy.nbytes, key="bytes", kind="size"),
    Field("time", lambda copy: copy.seconds, key="seconds", kind="time"),
    Field("result", lambda copy: copy.error is None, text=lambda copy: str(copy.error or "ok")),
    Field("", lambda copy: copy.error, key="error"),
)
COPIES = [
    Copy(StepRef(5, "aaaaaa"), 1500, 0.12345678),
    Copy(StepRef(12, "bbbbbb"), error=CkptError("it is gone")),
]


def test_a_table_shows_the_titles_and_aligns_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    record_tables.show(FIELDS, COPIES)
    assert capsys.readouterr().out.splitlines() == [
        "step  attempt     size    time  result",
        "   5  aaaaaa   1.50 kB  0.12 s  ok",
        "  12  bbbbbb         -       -  it is gone",
    ]


def test_no_table_is_shown_without_records(capsys: pytest.CaptureFixture[str]) -> None:
    record_tables.show(FIELDS, [])
    assert capsys.readouterr().out == ""


def test_json_has_the_values_under_their_keys(capsys: pytest.CaptureFixture[str]) -> None:
    output.show_json(record_tables.entries(FIELDS, COPIES))
    assert json.loads(capsys.readouterr().out) == [
        {
            "step": 5,
            "attempt": "aaaaaa",
            "bytes": 1500,
            "seconds": 0.123457,
            "result": True,
            "error": None,
        },
        {
            "step": 12,
            "attempt": "bbbbbb",
            "bytes": 0,
            "seconds": 0.0,
            "result": False,
            "error": "it is gone",
        },
    ]


def test_a_time_is_local_in_a_table_and_utc_in_json() -> None:
    until: Field[float] = Field("until", lambda seconds: seconds, kind="moment")
    assert until.cells(1.5) == (output.moment(1.5),)
    assert until.items(1.5) == {"until": "1970-01-01T00:00:01.500+00:00"}
    assert until.items(1e300) == {"until": "?"}

"""What the resumes of an optimizer gave."""

from __future__ import annotations

from typing import Final

import msgspec

EQUAL, DIFFERS, NONE, REFUSED = "equal", "differs", "none", "refused: "
CUT: Final = 160
"""How much of the text of an error a cell keeps."""


class Row(msgspec.Struct, frozen=True):
    """The cells of one optimizer on a number of ranks.

    The names of the cells are "torch" and "torch rollback" for ``torch.save``, "ckpt" and "ckpt
    rollback" for the optimizer in the state, and "wrapped" and "wrapped rollback" for the wrapper
    that a refusal advises. A cell is "equal", "differs", the name of an error, or "refused: " and
    the name of an error of ckpt. The cell "none" says why the optimizer does not train.
    """

    package: str
    name: str
    style: str
    ranks: int
    cells: dict[str, str]

    def ckpt(self, way: str) -> str:
        """Return the cell of ckpt for a way, such as " rollback".

        If ckpt refuses the optimizer at the save, no way has a cell of its own.
        """
        cell = self.cells.get(f"ckpt{way}") or self.cells.get("ckpt", "")
        wrapped = self.cells.get(f"wrapped{way}") or self.cells.get("wrapped")
        return f"{cell}, wrapped: {wrapped}" if is_refusal(cell) and wrapped else cell


class Failure(msgspec.Struct, frozen=True):
    """The error that ended a part of a measurement."""

    name: str
    text: str
    is_ours: bool

    @classmethod
    def of(cls, error: BaseException, *, is_ours: bool) -> Failure:
        """Describe an error."""
        return cls(type(error).__name__, " ".join(str(error).split())[:CUT], is_ours)

    def cell(self) -> str:
        """Return the cell of a part that failed."""
        return f"{REFUSED}{self.name}" if self.is_ours else self.name

    def words(self) -> str:
        """Return the name and the text of the error."""
        return f"{self.name}: {self.text}"


def is_refusal(cell: str) -> bool:
    """Return True if ckpt has refused the optimizer by a named error."""
    return cell.startswith(REFUSED)

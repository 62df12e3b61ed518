"""The pages of the documentation, and the code in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.kit.worlds import ROOT

PAGES = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").rglob("*.md")}
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    page: Path
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{named(self.page)}: {self.text.strip().splitlines()[0]}"


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(*languages: str) -> list[Block]:
    found = [
        Block(page, *match.groups()) for page in PAGES for match in FENCE.finditer(page.read_text())
    ]
    return [block for block in found if block.language in languages]


def block(page: str, words: str) -> str:
    """Return the block of a page that has these words."""
    (found,) = [
        each.text for each in blocks("python") if named(each.page) == page and words in each.text
    ]
    return found

"""Draw the pictures of docs/concepts.md.

``python docs/pictures/draw.py`` writes them beside this file.

A picture is a column of boxes in two lanes. The text of a box stands below, in order from top to
bottom. The colours are CSS variables: a picture alone follows the mode of the system, and the site
sets its own values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
WIDTH, LANE, GAP, EDGE = 500, 216, 32, 18
LINE = 17
STYLE = """
  .drawing { --ink: #1f2933; --soft: #52606d; --line: #7b8794; --paper: #ffffff; --train: #e3f2ef;
    --train-edge: #2a8f7f; --back: #e8ecf8; --back-edge: #5566b8; --done: #fdf0d9; --done-edge: #b7791f; }
  @media (prefers-color-scheme: dark) {
    .drawing { --ink: #e4e7eb; --soft: #b0bac5; --line: #8b98a5; --paper: #1e2129; --train: #17403a;
      --train-edge: #4fbfae; --back: #2a3155; --back-edge: #8c9be6; --done: #4a3a17; --done-edge: #e0ae55; }
  }
  .drawing text { font: 13.3px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink); }
  .drawing .head { font-weight: 600; font-size: 14.3px; }
  .drawing .code { font-weight: 600; }
  .drawing .note { fill: var(--soft); font-size: 12.3px; }
  .drawing .wire { stroke: var(--line); stroke-width: 1.6; fill: none; }
  .drawing .tip { fill: var(--line); }
  .drawing .paper { fill: var(--paper); }
  .drawing rect.train { fill: var(--train); stroke: var(--train-edge); }
  .drawing rect.back { fill: var(--back); stroke: var(--back-edge); }
  .drawing rect.done { fill: var(--done); stroke: var(--done-edge); }
"""


@dataclass(frozen=True)
class Box:
    """A step.

    ``lane``: 0 is left, 1 is right, 2 is both. ``y``: the top edge. The first line is the title.
    """

    lane: int
    y: int
    kind: str
    lines: Sequence[str]

    @property
    def x(self) -> int:
        return EDGE if self.lane != 1 else EDGE + LANE + GAP

    @property
    def width(self) -> int:
        return WIDTH - 2 * EDGE if self.lane == 2 else LANE

    @property
    def height(self) -> int:
        return LINE * len(self.lines) + 14

    @property
    def bottom(self) -> int:
        return self.y + self.height

    @property
    def middle(self) -> int:
        return self.x + self.width // 2

    def drawn(self) -> Iterator[str]:
        yield (
            f'<rect class="{self.kind}" x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" '
            'rx="6" stroke-width="1.4"/>'
        )
        for number, line in enumerate(self.lines):
            style = ' class="code"' if number == 0 else ""
            yield f'<text{style} x="{self.x + 11}" y="{self.y + 20 + LINE * number}">{escape(line)}</text>'


def wire(points: Sequence[tuple[int, int]], *, dashed: bool = False) -> Iterator[str]:
    """A line through the points with a tip at its end."""
    path = "M" + " L".join(f"{x} {y}" for x, y in points)
    yield f'<path class="wire" d="{path}"{" stroke-dasharray=" + chr(34) + "4 3" + chr(34) if dashed else ""}/>'
    (x0, y0), (x, y) = points[-2:]
    if x0 == x:
        way = 1 if y > y0 else -1
        tip = f"{x - 4.5},{y - 8 * way} {x + 4.5},{y - 8 * way} {x},{y}"
    else:
        way = 1 if x > x0 else -1
        tip = f"{x - 8 * way},{y - 4.5} {x - 8 * way},{y + 4.5} {x},{y}"
    yield f'<polygon class="tip" points="{tip}"/>'


def down(above: Box, below: Box, x: int | None = None) -> Iterator[str]:
    """An arrow from one box to the next one of its lane."""
    at = x or (below.middle if above.lane == 2 else above.middle)
    return wire([(at, above.bottom), (at, below.y)])


def text(x: int, y: int, words: str, kind: str = "note", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def picture(name: str, title: str, description: str, height: int, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" viewBox="0 0 {WIDTH} {height}" '
            f'role="img" aria-labelledby="{name}-title {name}-text">',
            f'<title id="{name}-title">{escape(title)}</title>',
            f'<desc id="{name}-text">{escape(description)}</desc>',
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def save() -> str:
    """The path of a save: what the training thread does, and what goes on behind it."""
    call = Box(
        0, 40, "train", ("save_async(state, step)", "names the tensors", "takes a free slot")
    )
    eager = Box(0, 125, "train", ("Copy, part 1", "buffers, scalars, objects", "into the slot"))
    back = Box(0, 210, "train", ("The call returns", "after milliseconds"))
    train = Box(0, 278, "train", ("forward, backward", "run during the copy"))
    step = Box(0, 346, "train", ("optimizer.step()", "waits for the end of part 2", "(the fence)"))
    more = Box(0, 431, "train", ("Training goes on", "It does not wait for storage."))
    late = Box(1, 210, "back", ("Copy, part 2", "parameters and", "optimizer state"))
    write = Box(
        1, 346, "back", ("Write to the nearest tier", "chunk by chunk,", "each with a checksum")
    )
    fragment = Box(
        1,
        431,
        "back",
        ("Write the fragment", "this rank is durable now;", "it reports to the others"),
    )
    commit = Box(
        2, 540, "done", ("Commit", "When all ranks are durable, one rank writes the manifest.", "Now the checkpoint exists.")
    )  # fmt: skip
    free = Box(0, 649, "train", ("PendingSave resolves", "when every tier has the step"))
    far = Box(
        1,
        649,
        "back",
        ("Copy to farther tiers", "from the nearest durable tier,", "each at its own pace"),
    )
    bus = call.x + LANE + GAP // 2
    parts = [
        text(EDGE + LANE // 2, 24, "Training thread", "head", "middle"),
        text(EDGE + LANE + GAP + LANE // 2, 24, "Background threads", "head", "middle"),
        *down(call, eager), *down(eager, back), *down(back, train), *down(train, step), *down(step, more),
        *wire([(back.x + LANE, back.y + 22), (late.x, back.y + 22)]),
        *down(late, write), *down(write, fragment),
        *wire([(late.x, late.bottom - 12), (bus, late.bottom - 12), (bus, step.y + 22), (step.x + LANE, step.y + 22)], dashed=True),
        *wire([(fragment.middle, fragment.bottom), (fragment.middle, commit.y)]),
        text(fragment.middle - 8, fragment.bottom + 32, "when all have reported", anchor="end"),
        *wire([(far.middle, commit.bottom), (far.middle, far.y)]),
        *wire([(far.x, far.y + 24), (free.x + LANE, free.y + 24)], dashed=True),
    ]  # fmt: skip
    for box in (call, eager, back, train, step, more, late, write, fragment, commit, free, far):
        parts += box.drawn()
    return picture(
        "save",
        "The path of a save",
        "The training thread copies a part of the state and returns. Background threads copy the rest until "
        "the optimizer steps, write chunks to the nearest tier, commit when all ranks are durable, and then "
        "copy the step to farther tiers.",
        730,
        parts,
    )


def restore() -> str:
    """The path of a restore: how the ranks agree on a step, and where each chunk comes from."""
    first = Box(
        0, 40, "train", ("List the tiers", "nearest first; finish the", "commit of a dead job")
    )
    propose = Box(
        0, 125, "train", ("Propose a step", "the newest one that has", "every byte within reach")
    )
    match = Box(
        1,
        125,
        "back",
        ("Read the manifest, match", "names, shapes, dtypes;", "nothing is changed yet"),
    )
    agree = Box(
        2,
        228,
        "done",
        ("All ranks agree", "If one rank cannot match, all raise, and nothing is changed."),
    )
    plan = Box(1, 314, "back", ("Plan", "finds the chunks that", "overlap with its shards"))
    read = Box(
        1, 399, "back", ("Read, verify each chunk", "from the nearest tier", "that has it intact")
    )
    repair = Box(
        0,
        399,
        "back",
        ("A chunk is damaged here", "the next tier gives it;", "the file is rewritten"),
    )
    landed = Box(2, 502, "done", ("All ranks report", "Is every chunk of every rank in its place?"))
    values = Box(1, 622, "back", ("Set plain values", "and load objects"))
    report = Box(1, 690, "back", ("RestoreReport",))
    older = Box(
        0, 622, "train", ("The step is damaged", "on all tiers; propose the", "step before it")
    )
    parts = [
        text(EDGE + LANE // 2, 24, "Rank 0", "head", "middle"),
        text(EDGE + LANE + GAP + LANE // 2, 24, "Every rank", "head", "middle"),
        *down(first, propose),
        *wire([(propose.x + LANE, propose.y + 32), (match.x, match.y + 32)]),
        *wire([(match.middle, match.bottom), (match.middle, agree.y)]),
        *wire([(plan.middle, agree.bottom), (plan.middle, plan.y)]),
        *down(plan, read),
        *wire([(read.x, read.y + 22), (repair.x + LANE, repair.y + 22)]),
        *wire([(repair.x + LANE, read.y + 46), (read.x, read.y + 46)], dashed=True),
        *wire([(read.middle, read.bottom), (read.middle, landed.y)]),
        *wire([(values.middle, landed.bottom), (values.middle, values.y)]),
        text(values.middle + 8, landed.bottom + 38, "yes"),
        *wire([(older.middle, landed.bottom), (older.middle, older.y)]),
        text(older.middle + 8, landed.bottom + 38, "no"),
        *down(values, report),
        *wire([(older.x, older.y + 32), (4, older.y + 32), (4, propose.y + 32), (propose.x, propose.y + 32)], dashed=True),
    ]  # fmt: skip
    for box in (first, propose, match, agree, plan, read, repair, landed, values, report, older):
        parts += box.drawn()
    return picture(
        "restore",
        "The path of a restore",
        "Rank 0 proposes the newest complete step. Every rank matches it with its state before anything is "
        "changed, reads and verifies chunks from the nearest tier that has them intact, and reports. If a "
        "chunk is intact on no tier, all ranks take the previous step.",
        738,
        parts,
    )


def icon() -> str:
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" '
        'fill="#2a8f7f"/><path d="M8 9h16M8 16h16M8 23h9" stroke="#fff" stroke-width="3.4" '
        'stroke-linecap="round"/><path d="M20 22l3 3 5-6" stroke="#fdf0d9" stroke-width="3" fill="none" '
        'stroke-linecap="round" stroke-linejoin="round"/></svg>\n'
    )


PICTURES = {"save.svg": save, "restore.svg": restore, "favicon.svg": icon}


def main() -> int:
    """Write the pictures. With ``--check``, only compare, and return 1 if one is out of date."""
    texts = {name: draw() for name, draw in PICTURES.items()}
    if "--check" in sys.argv[1:]:
        return int(any((HERE / name).read_text() != drawn for name, drawn in texts.items()))
    for name, drawn in texts.items():
        (HERE / name).write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())

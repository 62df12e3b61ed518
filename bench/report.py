"""What a run is told as: a table on the terminal, Markdown, CSV, JSON, and one plot."""

from __future__ import annotations

import csv
import json
import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.save import Outcome

_OURS: Final = "ckpt"
_COLUMNS: Final[tuple[tuple[str, Callable[[dict[str, Any]], str]], ...]] = (
    ("stall", lambda c: seconds(c["stall_seconds"]["median"])),
    ("drag", lambda c: _beside(c, "drag_seconds")),
    ("durable", lambda c: seconds(c["durable_seconds"]["median"])),
    ("step alone", lambda c: seconds(c["clean_step_seconds"]["median"])),
    ("step beside", lambda c: _beside(c, "beside_step_seconds")),
    ("first stall", lambda c: seconds(c["first_stall_seconds"])),
    ("first durable", lambda c: seconds(c["first_durable_seconds"])),
    ("idle: safe", lambda c: seconds(c["idle_safe_seconds"]["median"])),
    ("idle: durable", lambda c: seconds(c["idle_durable_seconds"]["median"])),
    ("on disk", lambda c: f"{c['disk_bytes'] / 2**20:.0f} MiB"),
    ("memory added", lambda c: f"{c['added_memory_bytes'] / 2**20:.0f} MiB"),
    ("fsync by", lambda c: c["fsync_by"]),
    ("equal", lambda c: f"{c['saves_compared_equal']} saves"),
)
_NOTES: Final = (
    "**stall**: seconds the training thread loses per save, in the call and until the optimizer may change the state. "
    "**drag**: seconds training loses beside the save, against as many steps without one, right before and after it; none if the call returns "
    "when all is durable. "
    "**durable**: from the call until complete and fsynced, in the training loop. **first**: the process' first save; in no median.",
    "**idle**: nothing else runs. *safe*: until the state may change when nothing can overlap; *durable*: as above, right after a save in training, with a file cache as warm as it gets. "
    "**memory added**: highest anonymous plus shared memory of the process while it saves, over training alone.",
    "`ckpt` fsyncs itself. The files and folders of the others, which do not, are fsynced by the bench before the clock of *durable* "
    "stops, beside the training loop: it is not in their stall.",
    "Every save counted here was loaded back in another process and compared bit by bit with the state it was made of.",
    "Peers run as they come. This table holds neither DCP at its best (own process, pinned stager, plan cache) nor `torch_checkpointing`: "
    "it says nothing about those. Steps are noisy on a small machine: look at the ends (`low`, `high`) in the CSV and JSON before a "
    "difference of drag is believed.",
)


def seconds(value: float) -> str:
    """Three digits that count, in s or ms."""
    size = abs(value)
    if size < 0.9995:
        digits = 0 if size >= 0.0995 else 1 if size >= 0.00995 else 2
        return f"{value * 1e3:.{digits}f} ms"
    return f"{value:.2f} s" if size < 9.995 else f"{value:.1f} s"


def _beside(one: dict[str, Any], key: str) -> str:
    """A number of the steps beside the save; there are none if the call returns when all is over."""
    return seconds(one[key]["median"]) if one["steps_beside"]["high"] else "none"


def conditions(outcome: Outcome) -> str:
    """One paragraph: where, on what, when."""
    c = outcome.conditions
    return (
        f"State: {c['state_bytes'] / 2**20:.0f} MiB in {c['tensors']} tensors (GPT of {c['parameters'] / 1e6:.1f} M parameters with AdamW, "
        f"float32), one training process, one torch thread. {c['cpu']}, {c['cores']} cores, {c['memory_bytes'] / 2**30:.0f} GiB, "
        f"load {c['load_before']} before the run; {c['disk']}, Linux {c['kernel']}; torch {c['torch']}, Python {c['python']}. "
        f"Medians of {c['repeats']} saves of each kind, interleaved. {c['date']}, run of {c['run_seconds']:.0f} s."
    )


def show(outcome: Outcome) -> None:
    """Print the table."""
    table = Table(title="What a save costs (medians)", title_justify="left", row_styles=["", "dim"])
    table.add_column("", no_wrap=True)
    shown = _COLUMNS[:11]
    for name, _ in shown:
        table.add_column(name, justify="right")
    for one in outcome.as_json()["contenders"]:
        style = "bold green" if one["name"].startswith(_OURS) else ""
        table.add_row(one["label"], *(tell(one) for _, tell in shown), style=style)
    console = Console()
    console = Console(width=max(console.width, 150))  # a pipe has no width, and a cut number is a wrong one
    console.print(table)
    console.print(f"floors: {_floors(outcome)}", highlight=False)
    console.print(conditions(outcome), style="dim", highlight=False)


def write(outcome: Outcome, folder: str) -> list[str]:
    """Write ``save.{json,csv,md,png}`` and return their paths."""
    os.makedirs(folder, exist_ok=True)
    paths = [os.path.join(folder, f"save.{kind}") for kind in ("json", "csv", "md", "png")]
    for path, make in zip(paths, (_json, _csv, _markdown, _plot), strict=True):
        make(outcome, path)
    return paths


def _floors(outcome: Outcome) -> str:
    return (
        f"warm copy of as many bytes {seconds(outcome.floor_copy.median)}; "
        f"plain O_DIRECT write and fsync {seconds(outcome.floor_write.median)} "
        f"({seconds(outcome.floor_write.low)} to {seconds(outcome.floor_write.high)})"
    )


def _json(outcome: Outcome, path: str) -> None:
    with open(path, "w") as file:
        json.dump(outcome.as_json(), file, indent=1)
        file.write("\n")


def _csv(outcome: Outcome, path: str) -> None:
    rows = []
    for one in outcome.as_json()["contenders"]:
        row: dict[str, Any] = {}
        for key, value in one.items():
            if isinstance(value, dict):
                row |= {f"{key}_{end}": value[end] for end in ("median", "low", "high")}
            else:
                row[key] = value
        rows.append(row)
    floors = {"copy": outcome.floor_copy, "write": outcome.floor_write}
    for name, floor in floors.items():
        key = "idle_safe_seconds" if name == "copy" else "idle_durable_seconds"
        ends = {f"{key}_{end}": getattr(floor, end) for end in ("median", "low", "high")}
        rows.append({"name": f"floor.{name}", "label": f"floor: {name}", **ends})
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _markdown(outcome: Outcome, path: str) -> None:
    names = ["", *(name for name, _ in _COLUMNS)]
    lines = ["# What a save costs", "", conditions(outcome), "", "![stall, drag and durable](save.png)", ""]
    lines += ["| " + " | ".join(names) + " |", "|---" + "|---:" * len(_COLUMNS) + "|"]
    for one in outcome.as_json()["contenders"]:
        label = f"**{one['label']}**" if one["name"].startswith(_OURS) else one["label"]
        lines.append("| " + " | ".join([label, *(tell(one) for _, tell in _COLUMNS)]) + " |")
    floors = {
        "floor: warm copy": ("idle: safe", outcome.floor_copy),
        "floor: O_DIRECT write": ("idle: durable", outcome.floor_write),
    }
    for label, (column, floor) in floors.items():
        cells = [seconds(floor.median) if name == column else "" for name, _ in _COLUMNS]
        lines.append("| " + " | ".join([f"*{label}*", *cells]) + " |")
    lines += [
        "",
        *(f"* {note}" for note in _NOTES),
        "",
        "Made by `python -m bench save`; how: `bench/save.py`.",
        "",
    ]
    with open(path, "w") as file:
        file.write("\n".join(lines))


# -- the plot -------------------------------------------------------------------------------------------------------------

_INK: Final = "#1f2933"
_SOFT: Final = "#7b8794"
_COLOURS: Final = {True: "#0b7a75", False: "#b8c1cc"}


def _plot(outcome: Outcome, path: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = outcome.as_json()["contenders"][::-1]
    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "text.color": _INK,
        "axes.edgecolor": _SOFT,
    }
    with plt.rc_context(settings):
        figure, axes = plt.subplots(1, 3, figsize=(13, 5.2), sharey=True)
        _panel(axes[0], rows, "stall_seconds", "stall", "the training thread stands still")
        _panel(axes[1], rows, "drag_seconds", "drag", "training lost while it streams")
        _panel(axes[2], rows, "durable_seconds", "durable", "complete and fsynced, training beside it")
        copy, write = outcome.floor_copy.median, outcome.floor_write.median
        _floor(axes[0], copy, f"one warm copy\n{seconds(copy)}")
        _floor(axes[2], write, f"bare O_DIRECT, idle\n{seconds(write)}")
        axes[0].set_yticks(range(len(rows)), [row["label"] for row in rows], fontsize=11)
        for label, row in zip(axes[0].get_yticklabels(), rows, strict=True):
            ours = row["name"].startswith(_OURS)
            label.set_color(_COLOURS[True] if ours else _INK)
            label.set_fontweight("bold" if ours else "normal")
        size = outcome.conditions["state_bytes"] / 2**20
        figure.suptitle(
            f"What one save of a {size:.0f} MiB training state costs",
            x=0.015,
            ha="left",
            fontsize=15,
            weight="bold",
        )
        caption = f"{conditions(outcome)} Bars: medians, lines: lowest to highest; shorter is better. All saves loaded back and compared equal."
        figure.text(
            0.015,
            0.012,
            "\n".join(textwrap.wrap(caption, 190)),
            fontsize=8,
            color=_SOFT,
            va="bottom",
            linespacing=1.4,
        )
        figure.tight_layout(rect=(0, 0.1, 1, 1.0), w_pad=2.5)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _panel(axis: Any, rows: Sequence[dict[str, Any]], key: str, title: str, subtitle: str) -> None:
    """Horizontal bars with their values. Logarithmic where the longest is far from the shortest and none is below zero."""
    middles = [row[key]["median"] for row in rows]
    lows, highs = ([row[key][end] for row in rows] for end in ("low", "high"))
    logarithmic = min(lows) > 0 and max(middles) > 8 * min(middles)
    left = 10 ** _floor_log(min(lows)) if logarithmic else 0.0
    for y, (row, middle, low, high) in enumerate(zip(rows, middles, lows, highs, strict=True)):
        ours = row["name"].startswith(_OURS)
        axis.barh(y, middle - left, left=left, height=0.62, color=_COLOURS[ours])
        axis.plot([low, high], [y, y], color=_INK, linewidth=1.2, alpha=0.5, solid_capstyle="butt")
        axis.annotate(
            _beside(row, key) if key == "drag_seconds" else seconds(middle),
            (max(high, middle, 0.0), y),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold" if ours else "normal",
            color=_COLOURS[True] if ours else _INK,
        )
    if logarithmic:
        axis.set_xscale("log")
        axis.set_xlim(left, max(highs) * (max(highs) / left) ** 0.32)
    else:
        axis.set_xlim(min(0.0, *lows) * 1.1, max(max(highs), 1e-3) * 1.3)
        axis.axvline(0, color=_SOFT, linewidth=0.8)
        axis.locator_params(axis="x", nbins=4)
    axis.set_ylim(-0.95, len(rows) - 0.45)  # a strip below the bars for what the floor is called
    axis.xaxis.set_major_formatter(lambda value, _: _tick(value))
    axis.set_title(f"{title}\n", loc="left", fontsize=13, weight="bold", pad=4)
    scale = "logarithmic" if logarithmic else "linear"
    axis.text(0, 1.015, f"{subtitle} ({scale})", transform=axis.transAxes, fontsize=9, color=_SOFT)
    axis.grid(axis="x", color="#e4e7eb", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(axis="both", length=0, colors=_SOFT, which="both")
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(False)


def _floor(axis: Any, value: float, text: str) -> None:
    axis.axvline(value, color="#c2410c", linewidth=1, linestyle=(0, (4, 3)), zorder=0.9)
    axis.annotate(
        text,
        (value, 0),
        xycoords=("data", "axes fraction"),
        xytext=(4, 4),
        textcoords="offset points",
        fontsize=8,
        color="#c2410c",
        va="bottom",
    )


def _floor_log(value: float) -> int:
    exponent = 0
    while 10.0**exponent > value:
        exponent -= 1
    return exponent


def _tick(value: float) -> str:
    return "0" if value == 0 else f"{value * 1e3:g} ms" if abs(value) < 1 else f"{value:g} s"

"""How numbers and plots look: units, one colour per contender in all plots, the frame of a figure.

matplotlib is imported when a plot is made.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Generator
from typing import Any, Final

from bench.result import Kind, Number, Result

INK: Final = "#1f2933"
SOFT: Final = "#7b8794"
GRID: Final = "#e4e7eb"
FLOOR: Final = "#b42318"
COLOURS: Final = {
    "ckpt.memory": "#075652",
    "ckpt.save_async": "#0b7a75",
    "ckpt.device": "#0b7a75",
    "ckpt.save": "#63b8ae",
    "ckpt.fsdp2": "#0b7a75",
    "ckpt.hsdp": "#63b8ae",
    "ckpt.hsdp2": "#9aa83a",
    "ckpt.3d": "#054542",
    "torch.save": "#9aa5b1",
    "safetensors": "#d8b24a",
    "dcp.save": "#b4cdea",
    "dcp.async_save": "#6f9fd8",
    "dcp.thread": "#b4cdea",
    "dcp.process": "#6f9fd8",
    "dcp.pinned": "#2f5f9e",
    "dcp.best": "#2f5f9e",
    "torch_checkpointing": "#8c62c4",
    "torch_checkpointing.pinned": "#8c62c4",
    "torchsnapshot.take": "#e3bfa0",
    "torchsnapshot.async_take": "#b9805a",
    "nvrx": "#93ad4f",
}
_OTHERS: Final = "#b8c1cc"


def ours(name: str) -> bool:
    return name.startswith("ckpt")


def colour(name: str) -> str:
    return COLOURS.get(name, COLOURS["ckpt.save_async"] if ours(name) else _OTHERS)


def write(value: float | None, kind: Kind) -> str:
    """A number as people read it."""
    if value is None:
        return ""
    match kind:
        case "seconds":
            return seconds(value)
        case "bytes":
            return f"{value / 2**20:,.0f} MiB"
        case "per_second":
            return f"{value / 1e9:.2f} GB/s"
        case "ratio":
            return f"{value:.2f}×"
        case "percent":
            return f"{value * 100:+.1f} %"
        case "count" | "text":
            return f"{value:g}"


def cell(value: Number, kind: Kind) -> str:
    """What stands in a table: a text as it is, of a spread its median."""
    if isinstance(value, str) or value is None:
        return value or ""
    return write(value if isinstance(value, int | float) else value.median, kind)


def seconds(value: float) -> str:
    """Three digits that count, in s or ms."""
    size = abs(value)
    if size < 0.9995:
        digits = 0 if size >= 0.0995 else 1 if size >= 0.00995 else 2
        return f"{value * 1e3:.{digits}f} ms"
    return f"{value:.2f} s" if size < 9.995 else f"{value:.1f} s"


def round_bytes(most: float) -> int:
    """The distance of marks on an axis of bytes: a power of two, of which about four make
    ``most``.
    """
    return 1 << max(0, int(most / 4).bit_length() - 1)


def log_marks(axis: Any) -> None:
    """Marks on a logarithmic axis of heights: 1, 2 and 5 of each power of ten where there are
    few powers, so that every axis has some to read.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 300 * low else (1.0, 2.0, 5.0)))
    axis.yaxis.set_minor_formatter(NullFormatter())


def tick(value: float, kind: Kind) -> str:
    """A number on an axis: no more digits than it needs."""
    if value == 0:
        return "0"
    match kind:
        case "seconds":
            if abs(value) < 0.9995:
                return f"{value * 1e3:g} ms"
            return f"{value:g} s"
        case "bytes":
            return f"{value / 2**30:g} GiB" if abs(value) >= 1 << 30 else f"{value / 2**20:g} MiB"
        case "per_second":
            return f"{value / 1e9:g} GB/s"
        case "percent":
            return f"{value * 100:g} %"
        case _:
            return f"{value:g}"


def machine(result: Result) -> str:
    """One paragraph: where, on what, when."""
    c = result.conditions
    quick = "A smoke run: the numbers mean nothing. " if c["quick"] else ""
    state = f"{c['training']}. " if "training" in c else ""
    return (
        quick
        + state
        + (
            f"{c['cpu']}, {c['cores']} cores, {c['memory_bytes'] / 2**30:.0f} GiB; {c['disk']}; "
            f"Linux {c['kernel']}, torch {c['torch']}, Python {c['python']}. "
            f"Load average {c['load_begin']} at the begin and {c['load_end']} at the end of "
            f"{c['run_seconds']:.0f} s, the bench's own work included. {c['date']}, commit "
            f"{c['commit']}."
        )
    )


@contextlib.contextmanager
def figure(
    result: Result, path: str, size: tuple[float, float], reading: str, *, rows: int = 1
) -> Generator[tuple[Any, Any]]:
    """A figure with the scenario's title above and ``reading`` and the conditions below; saved
    at the end. ``rows`` of panels have names.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": SOFT,
    }
    with plt.rc_context(settings):
        drawn = plt.figure(figsize=size)
        yield drawn, plt
        width, height = size
        caption = textwrap.wrap(f"{reading} {machine(result)}", int(width * 16))
        bottom = (len(caption) * 0.165 + 0.18) / height
        cases = result.cases()
        title = drawn.suptitle(
            f"{result.title}: {cases[0]}" if len(cases) == 1 and cases[0] else result.title,
            x=0.15 / width,
            y=1 - 0.12 / height,
            ha="left",
            va="top",
            fontsize=15,
            weight="bold",
        )
        title.set_in_layout(False)
        drawn.text(
            0.15 / width,
            0.1 / height,
            "\n".join(caption),
            fontsize=8,
            color=SOFT,
            va="bottom",
            linespacing=1.4,
        )
        drawn.tight_layout(
            rect=(0, bottom, 1, 1 - (0.42 if rows < 2 else 0.75) / height),
            w_pad=2.5,
            h_pad=1.6 if rows < 2 else 3.0,
        )
        drawn.savefig(path, dpi=150)
        plt.close(drawn)


def bare(axis: Any, *, grid: str = "x") -> None:
    """No frame, a light grid."""
    axis.grid(axis=grid, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(axis="both", length=0, colors=SOFT, which="both")
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(False)


def head(axis: Any, title: str, subtitle: str) -> None:
    axis.set_title(f"{title}\n", loc="left", fontsize=12.5, weight="bold", pad=4)
    axis.annotate(
        subtitle,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 5),
        textcoords="offset points",
        fontsize=9,
        color=SOFT,
    )

"""Write folders with the real libraries, import them, and write the table of docs/imports.md.

``python -m tests.exchange.folders.table`` (``make imports``) makes an environment for each set of
packages in ``.build/imports``, which takes 10 GB and some minutes at the first time. A row whose
packages cannot be installed is left out, and the page names it. Results stay in ``.build/imports``;
a row that is there is not run again, unless ``--again`` says so.
"""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ckpt import CheckpointManager, Tier
from ckpt.catalog.tensor_reader import StepReader
from ckpt.errors import CkptError
from ckpt.exchange.exports.export import ExportOptions, Format, export
from ckpt.exchange.foreign.adoption import adopt_checkpoint
from ckpt.exchange.foreign.foreign_objects import ImportReport
from ckpt.exchange.foreign.imports import ForeignCheckpoint, import_checkpoint
from ckpt.exchange.weights.open_checkpoint import open_checkpoint
from tests.exchange.folders.compare import compare, is_same
from tests.exchange.folders.net import TRUTH

ROOT: Final = Path(__file__).resolve().parents[3]
BUILD: Final = ROOT / ".build" / "imports"
RESULTS: Final = BUILD / "results.json"
PAGE: Final = ROOT / "docs" / "imports.md"
BEGIN, END = "<!-- measured: make imports -->", "<!-- end of what is measured -->"
COLUMNS: Final = ("weights", "optimizer", "scheduler", "position")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table.

    Attributes:
        name: The name of the row.
        writer: The module of the writer, with its arguments.
        source: What is imported, below the folder that the writer fills.
        ranks: The number of ranks that write.
        packages: The packages of the environment. Those with torch in it bring all that they need;
            others are installed without their dependencies, beside the packages of this project.
    """

    name: str
    writer: tuple[str, ...]
    source: str = "state"
    ranks: int = 1
    packages: tuple[str, ...] = ()


TRANSFORMERS: Final = ("transformers==5.24.0", "tokenizers==0.23.3")
DEEPSPEED: Final = (
    "deepspeed==0.19.8", "hjson==3.1.0", "py-cpuinfo==9.0.0", "ninja==1.13.2", "einops==0.8.2",
    "msgpack==1.2.4",
)  # fmt: skip
TORCHES: Final = ("2.13.0", "2.15.0", "2.11.0")
_FORMATS: Final[tuple[Format, ...]] = ("torch", "safetensors", "dcp")


KINDS: Final = (
    ("fsdp2", 2),
    ("tp", 2),
    ("hsdp", 4),
    ("flat", 2),
    ("hf", 2),
    ("hf-consolidated", 2),
)


def rows() -> list[Row]:
    of_torch = [
        Row(
            name=f"torch {version}, DCP, {kind} on {ranks} ranks",
            writer=("dcp", kind),
            ranks=ranks,
            packages=() if version == "2.13.0" else (f"torch=={version}", "numpy", "safetensors"),
        )
        for version in TORCHES
        for kind, ranks in KINDS
    ]
    return [*_OF_LIBRARIES, *of_torch]


_OF_LIBRARIES: Final = (
    Row(name="accelerate 1.15.0, save_state", writer=("accelerate",)),
    Row(name="Lightning 2.6.6, save_checkpoint", writer=("lightning",), source="last.ckpt"),
    Row(
        name="transformers 5.24.0, Trainer",
        writer=("trainer",),
        source="checkpoint-4",
        packages=TRANSFORMERS,
    ),
    Row(
        name="transformers 5.24.0, save_pretrained",
        writer=("transformers",),
        packages=TRANSFORMERS,
    ),
    Row(name="torchsnapshot 0.1.0", writer=("torchsnapshot",)),
    Row(
        name="Orbax 0.12.8",
        writer=("orbax",),
        packages=("orbax-checkpoint==0.12.8", "jax==0.10.2"),
    ),
    Row(name="torch_checkpointing 0.1.1", writer=("torch_checkpointing",)),
    Row(
        name="torch_checkpointing 0.1.1, FSDP2 on 2 ranks",
        writer=("torch_checkpointing",),
        ranks=2,
    ),
    Row(
        name="Megatron-core 0.16.1, torch_dist on 2 ranks",
        writer=("megatron",),
        ranks=2,
        packages=("megatron-core==0.16.1",),
    ),
    Row(
        name="torch 2.13.0, a file of each rank (verl), 2 ranks",
        writer=("rank_files",),
        source="actor",
        ranks=2,
    ),
    *(
        Row(
            name=f"DeepSpeed 0.19.8, {name} on 2 ranks",
            writer=("deepspeed", *words),
            source=source,
            ranks=2,
            packages=DEEPSPEED,
        )
        for name, words, source in (
            ("ZeRO 1", ("1", "universal"), "run/global_step2"),
            ("universal of ZeRO 1", ("1", "universal"), "universal"),
            ("ZeRO 3", ("3",), "run/global_step2"),
            ("universal of ZeRO 3", ("3", "universal"), "universal"),
            ("zero_to_fp32.py of ZeRO 3", ("3",), "fp32"),
        )
    ),
)


# -- environments ----------------------------------------------------------------------------------


@functools.cache
def python_of(packages: tuple[str, ...]) -> str | None:
    """Return the Python of the environment with these packages, which is made if it is not there;
    None if they cannot be installed.
    """
    if not packages:
        return sys.executable
    place = BUILD / "environments" / packages[0].replace("==", "-")
    python = place / "bin" / "python"
    if (place / "made").exists():
        return str(python)
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    is_alone = any(each.startswith(("torch==", "jax==")) for each in packages)
    words = ["install", "-q", *([] if is_alone else ["--no-deps"]), *packages]
    # An empty name would leave the constraints of the machine in force.
    env = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    if subprocess.run([str(python), "-m", "pip", *words], env=env, check=False).returncode:
        return None
    if not is_alone:
        (site,) = place.glob("lib/python*/site-packages")
        (site / "project.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    (place / "made").touch()
    return str(python)


def write(row: Row, python: str) -> Path:
    """Let the library write, and return the folder that the writer has filled."""
    out = BUILD / "folders" / "-".join((*row.writer, str(row.ranks), *row.packages[:1]))
    if (out / "written").exists():
        return out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.ranks}"]
    module, *words = row.writer
    command = [
        python, *(many if row.ranks > 1 or module == "deepspeed" else []),
        "-m", f"tests.exchange.folders.write_{module}", str(out), *words,
    ]  # fmt: skip
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        # A lock in the user's own folder, which a killed job leaves, would stop DeepSpeed for ever.
        "TORCH_EXTENSIONS_DIR": str(BUILD / "extensions"),
    }
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    (out / "written").touch()
    return out


# -- the table -------------------------------------------------------------------------------------


def cells(row: Row, folder: Path) -> list[str]:
    """Import what the row names, and return its cells: the columns, names and export."""
    root = folder / "root"
    shutil.rmtree(root, ignore_errors=True)
    foreign = ForeignCheckpoint(path=str(folder / row.source))
    try:
        done = import_checkpoint(foreign, Tier(str(root)), 1)
    except CkptError as error:
        text = str(error).replace(str(folder), "OUT").replace("|", "\\|")
        return [f"refused: {text}", *([""] * (len(COLUMNS) + 2))]
    if not (folder / TRUTH).exists():
        return ["imported, not compared", *([""] * (len(COLUMNS) + 2))]
    same = compare(root, folder)
    marks = [_short(same.get(column, "-")) for column in COLUMNS]
    return [*marks, _names(done), _exports(root, folder), _adopted(row, folder)]


def _adopted(row: Row, folder: Path) -> str:
    """Return whether an adopted step gives back what the folder held, and how many bytes of the
    tensors it copies.
    """
    root = folder / "adopted"
    shutil.rmtree(root, ignore_errors=True)
    try:
        done = adopt_checkpoint(
            ForeignCheckpoint(path=str(folder / row.source)), Tier(str(root)), 1
        )
    except CkptError as error:
        return f"refused: {type(error).__name__}"
    faults = [f"{name} {text}" for name, text in compare(root, folder).items() if text != "yes"]
    whole = done.nbytes + done.copied_bytes
    share = f", {done.copied_bytes} of {whole} bytes copied" if done.copied_bytes else ""
    return f"{'; '.join(faults) or 'yes'}{share}"


def _short(text: str) -> str:
    return text if len(text) < 60 else text.partition(":")[0]


def _names(done: ImportReport) -> str:
    how = done.names.get("optimizer", "")
    return (
        "by position"
        if how.endswith("by place")
        else "by name"
        if "module" in str(done.names)
        else ""
    )


def _exports(root: Path, folder: Path) -> str:
    """Return the formats whose export, loaded again, is what the folder held."""
    truth = torch.load(folder / TRUTH, weights_only=True)["model"]
    good: list[str] = []
    with open_checkpoint(str(root)) as opened:
        for kind in _FORMATS:
            out = folder / (f"x.{kind}" if kind == "safetensors" else f"x-{kind}")
            if out.is_dir():
                shutil.rmtree(out)
            out.unlink(missing_ok=True)
            if _is_exported(opened.reader, kind, out, truth, folder):
                good.append(kind)
    return ", ".join(good)


def _is_exported(
    reader: StepReader, kind: Format, out: Path, truth: dict[str, torch.Tensor], folder: Path
) -> bool:
    try:
        options = ExportOptions(globs=["model/*"], strip="model/")
        export(reader, str(out), kind, options if kind == "safetensors" else ExportOptions())
    except CkptError:
        return False
    again = folder / "again"
    shutil.rmtree(again, ignore_errors=True)
    import_checkpoint(ForeignCheckpoint(path=str(out)), Tier(str(again)), 1)
    state = {"model": {name: torch.zeros_like(value) for name, value in truth.items()}}
    try:
        with CheckpointManager(str(again)) as manager:
            manager.restore(state, only="model")
    except CkptError:
        return False
    return is_same(state["model"], dict(truth))


def results() -> dict[str, list[str]]:
    """Return the cells of the rows that were run, by the names of the rows."""
    found: dict[str, list[str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def run(row: Row) -> None:
    """Run a row, and keep its cells."""
    if (python := python_of(row.packages)) is None:
        print(row.name, "its packages cannot be installed", sep="\n", file=sys.stderr)
        return
    try:
        line = cells(row, write(row, python))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(row.name, error, sep="\n", file=sys.stderr)
        return
    print(row.name, *line, sep="\t", flush=True)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({**results(), row.name: line}, indent=1))


def write_page() -> None:
    """Write the rows that were run into the page, and the names of the others."""
    known = results()
    header = ("what wrote the folder", *COLUMNS, "names", "exports", "adopted")
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for name in (row.name for row in rows() if row.name in known):
        lines.append(f"| {name} | {' | '.join([*known[name], *[''] * 7][:7])} |")
    said = f"Run on {dt.date.today():%Y-%m-%d}, read with torch {torch.__version__}."
    others = [row.name for row in rows() if row.name not in known]
    after = [textwrap.fill(f"Not run: {'; '.join(others)}.", 100), ""] if others else []
    head, _, rest = PAGE.read_text().partition(BEGIN)
    said = textwrap.fill(said, 100, break_on_hyphens=False)
    text = "\n".join([BEGIN, "", said, "", *lines, "", *after, END])
    PAGE.write_text(head + text + rest.partition(END)[2])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="run the rows whose name has this text")
    parser.add_argument("--again", action="store_true", help="run rows that were run before, too")
    asked = parser.parse_args(arguments)
    for row in rows():
        if asked.only in row.name and (asked.again or row.name not in results()):
            run(row)
    write_page()


if __name__ == "__main__":
    main()

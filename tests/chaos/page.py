"""Run ckpt-chaos, another project's crash test, over ckpt and each library's own saves, and write
what that gives into docs/reliability.md.

``python -m tests.chaos.page`` (``make chaos``) installs the packages of packages.txt into
``.build/chaos``, without what they require, since torch must stay the one that is tested. With
``--kills N`` each training is killed N times. With names, only these jobs are run, and the rows
of the others are those of the last run, which are in ``.build/chaos`` too.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.chaos.record import BEGIN as BEGIN_OF_JOB
from tests.chaos.record import DIGEST, HALF, SAVED, SEEN, STATES
from tests.processes import ended
from tests.versions.matrix import ROOT, uv

BUILD: Final = ROOT / ".build" / "chaos"
PINS: Final = Path(__file__).with_name("packages.txt")
PAGE: Final = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- chaos: python -m tests.chaos.page -->", "<!-- end of chaos -->"
BEGIN_FOLDERS, END_FOLDERS = BEGIN.replace("chaos:", "folders:"), "<!-- end of folders -->"
KILLS: Final = 30
JOB_SECONDS: Final = 180
RIGHT, OLDER, OTHER, RAISED = "right", "older", "other", "raised"
VERDICTS: Final = (RIGHT, OLDER, OTHER, RAISED)

TRAININGS: Final = {
    "quickstart": ("loop", "ckpt", "the loop of the quickstart", "ckpt"),
    "torch-save": ("loop", "file", "the same", "`torch.save` over the last file"),
    "torch-replace": ("loop", "replace", "the same", "`torch.save`, then `os.replace`"),
    "dcp": ("loop", "dcp", "the same", "DCP, the folder with the highest number"),
    "trainer": ("in_trainer", "ckpt", "transformers `Trainer`", "ckpt"),
    "trainer-own": (
        "in_trainer",
        "own",
        "the same",
        "its own, the folder of `get_last_checkpoint`",
    ),
    "lightning": ("in_lightning", "ckpt", "Lightning", "ckpt"),
    "lightning-own": ("in_lightning", "own", "the same", 'its own, `ckpt_path="last"`'),
}
"""The module and the way of each training, and what the page calls the two."""

OF_TRANSFORMERS: Final = "hf-own"
FOLDERS: Final = {
    "hf-export": ("to_hf_folder", "export", "`ckpt export` with `--format hf`", "nothing"),
    "hf-moved": ("to_hf_folder", "moved", "the same", "an older folder, which is renamed first"),
    "hf-beside": ("to_hf_folder", "beside", "`HfFolders`, in a training that goes back", "nothing"),
    OF_TRANSFORMERS: ("to_hf_folder", "own", "`model.save_pretrained`", "an older folder"),
}
"""The module and the way of each folder of Hugging Face, what the page says of it, and what is
there before.
"""
JOBS: Final = TRAININGS | FOLDERS
ALL: Final = 10**6


class Kill(msgspec.Struct, frozen=True):
    """One death, and what the next run made of it.

    Attributes:
        event: The kind of the event at which the process was killed.
        label: The words of ckpt-chaos for the event.
        verdict: One of ``VERDICTS``, or one of ``STATES`` for a folder of Hugging Face.
        told: The newest step whose save had ended, as the job was told before it died.
        resumed: The step that the next run resumed from, or None if it raised. Of a folder, None if
            the next run did not make it.
    """

    event: str
    label: str
    verdict: str
    told: int
    resumed: int | None
    output: str


class Row(msgspec.Struct, frozen=True):
    """What the kills of one training gave.

    Attributes:
        events: How many events of each kind an undisturbed run has.
        alive: How many runs ended by themselves, since they came to fewer events.
    """

    name: str
    date: str
    versions: dict[str, str]
    events: dict[str, int]
    kills: list[Kill]
    alive: int


def install() -> None:
    """Install the packages, unless they are there."""
    stamp = BUILD / "installed"
    if not stamp.exists() or stamp.read_text() != PINS.read_text():
        uv("pip", "install", "-q", "--no-deps", "--target", str(_packages()), "-r", str(PINS))
        stamp.write_text(PINS.read_text())


def measured(name: str, kills: int, jobs: int) -> Row:
    """Let ckpt-chaos kill one training, and return what it saw."""
    module, way, *_ = JOBS[name]
    with tempfile.TemporaryDirectory() as folder, _server(module, way, Path(folder)) as socket:
        work = Path(folder) / "chaos"
        command = [sys.executable, "-S", "-s", "-E", f"{ROOT}/tests/chaos/command.py"]
        words = [
            sys.executable, "-m", "ckpt_chaos", "run", "--work", str(work), "--jobs", f"{jobs}",
            "--max-points", f"{kills}", "--timeout", f"{JOB_SECONDS}",
            "--step-regex", r"resumed from step (\d+)", "--result-file", f"{{out}}/../{DIGEST}",
            "--", *command, str(socket), "{out}",
        ]  # fmt: skip
        subprocess.run(words, cwd=ROOT, env=_environment(), check=False, timeout=7200)
        return _row(name, work)


@contextmanager
def _server(module: str, way: str, folder: Path) -> Iterator[Path]:
    """Start the fork server of a training, and yield the path of its socket."""
    path, first = folder / "socket", folder / "first"
    first.mkdir()
    words = [sys.executable, "-m", "tests.chaos.fork_server", module, way, str(path), str(first)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            words, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=log, text=True
        )
        with ended(process):
            assert process.stdout is not None
            for line in process.stdout:
                if line == "ready\n":
                    break
            else:
                raise RuntimeError((folder / "log").read_text()[-2000:])
            yield path


def _row(name: str, work: Path) -> Row:
    """Read the folder that ckpt-chaos has written."""
    meta = json.loads((work / "meta.json").read_text())
    framework = "safetensors" if name in FOLDERS else "lightning"
    packages = ("torch", "transformers", framework, "ckpt-chaos")
    versions = {each: meta["versions"][each].partition("+")[0] for each in packages}
    log = (work / "reference" / "events.log.rank0").read_text().splitlines()
    results = [json.loads(path.read_text()) for path in sorted(work.glob("pt_*/result.json"))]
    points = [(each, work / f"pt_{each['order']:03d}") for each in results if "point" in each]
    control = json.loads((work / "pt_control" / "result.json").read_text())
    if control["outcome"]["weights_diff"] != 0:
        raise RuntimeError(f"{name}: two undisturbed runs differ")
    return Row(
        name, dt.datetime.now(dt.UTC).date().isoformat(), versions,
        dict(Counter(line.split("\t")[1] for line in log)),
        [
            (_death_of_folder if name in FOLDERS else _kill)(found, folder)
            for found, folder in points
            if found["crashed"]
        ],
        sum(not found["crashed"] for found, _ in points),
    )  # fmt: skip


def _kill(found: dict[str, Any], folder: Path) -> Kill:
    outcome = found["outcome"]
    resumed = None if outcome["raised"] else outcome["resumed_from_step"] or 0
    number, mode = found["point"]
    died = _last_event(folder, number)
    return Kill(
        died, f"#{number} {died} [{mode}]", verdict(outcome, told := told_before(folder / SAVED)),
        told, resumed, found["resume_tail"] if outcome["raised"] else "",
    )  # fmt: skip


def _death_of_folder(found: dict[str, Any], folder: Path) -> Kill:
    outcome = found["outcome"]
    number, mode = found["point"]
    died = _last_event(folder, number)
    _, state = (folder / SEEN).read_text().split()
    is_made = not outcome["raised"] and outcome["weights_diff"] == 0
    return Kill(
        died, f"#{number} {died} [{mode}]", state, 0, 0 if is_made else None, found["resume_tail"]
    )  # fmt: skip


def _last_event(folder: Path, number: int) -> str:
    """Return the kind of the event at which a run died."""
    for line in (folder / "events.log.rank0").read_text().splitlines():
        if line.startswith(f"{number}\t"):
            return line.split("\t")[1]
    return "?"


def told_before(path: Path) -> int:
    """Return the newest step whose save had ended before the first run died."""
    _, _, first = path.read_text().partition(f"{BEGIN_OF_JOB}\n")
    return max(map(int, first.partition(BEGIN_OF_JOB)[0].split()), default=0)


def verdict(outcome: dict[str, Any], told: int) -> str:
    """Return what a resume is: right, from an older step than told, to other weights, or raised."""
    if outcome["raised"]:
        return RAISED
    if outcome["weights_diff"] != 0:
        return OTHER
    return OLDER if (outcome["resumed_from_step"] or 0) < told else RIGHT


def _environment() -> dict[str, str]:
    path = [str(ROOT), str(ROOT / "backends"), str(_packages())]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def _packages() -> Path:
    return BUILD / "packages"


# -- the page --------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Return the table of the trainings."""
    heads = ["training", "saves of", "file events", "kills", "resumed right"]
    heads += ["from an older step", "to other weights", "raised"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row in rows:
        _, _, training, saves = TRAININGS[row.name]
        counts = Counter(kill.verdict for kill in row.kills)
        numbers = [sum(row.events.values()), len(row.kills), *(counts[each] for each in VERDICTS)]
        lines.append(_line([training, saves, *map(str, numbers)]))
    return "\n".join([*lines, "", textwrap.fill(" ".join(_sentences(rows)), 100)])


def table_of_folders(rows: Sequence[Row]) -> str:
    """Return the table of the folders of Hugging Face."""
    heads = ["written by", "there before", "file events", "kills", "nothing loads"]
    heads += ["the older one loads", "the new one loads", "a half loads", "the next run fails"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row in rows:
        _, _, writer, before = FOLDERS[row.name]
        states = Counter(kill.verdict for kill in row.kills)
        fails = sum(kill.resumed is None for kill in row.kills)
        numbers = [sum(row.events.values()), len(row.kills), *(states[state] for state in STATES)]
        lines.append(_line([writer, before, *map(str, [*numbers, fails])]))
    return "\n".join([*lines, "", textwrap.fill(" ".join(_runs(rows)), 100)])


def _runs(rows: Sequence[Row]) -> Iterator[str]:
    for date, versions in dict.fromkeys((row.date, tuple(row.versions.items())) for row in rows):
        yield f"Run on {date}: {', '.join(f'{name} {version}' for name, version in versions)}."


def _sentences(rows: Sequence[Row]) -> Iterator[str]:
    yield from _runs(rows)
    own = Counter(
        kill.event for row in rows if TRAININGS[row.name][1] == "ckpt" for kill in row.kills
    )
    kinds = ", ".join(f"{number} at `{kind}`" for kind, number in own.most_common())
    yield f"The trainings with ckpt died {own.total()} times: {kinds}."
    if alive := sum(row.alive for row in rows):
        yield (
            f"{alive} more runs ended before their event came, since threads of a save do not come "
            "to the same number of events each time."
        )


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def reported() -> str:
    """Return the tables that the page has now."""
    text = PAGE.read_text()
    return "\n\n".join(
        text.partition(begin)[2].partition(end)[0].strip()
        for begin, end in ((BEGIN, END), (BEGIN_FOLDERS, END_FOLDERS))
    )


def losses(rows: Sequence[Row]) -> list[Kill]:
    """Return the deaths that ckpt did not survive as it should."""
    own = (row for row in rows if JOBS[row.name][1] == "ckpt")
    wrong = [kill for row in own for kill in row.kills if kill.verdict != RIGHT]
    folders = (row for row in rows if row.name in FOLDERS and row.name != OF_TRANSFORMERS)
    kills = [kill for row in folders for kill in row.kills]
    return wrong + [kill for kill in kills if kill.verdict == HALF or kill.resumed is None]


def write(folder: Path) -> list[Row]:
    """Write each table into the page for which ``folder`` has rows, and return the rows."""
    paths = [folder / f"{name}.json" for name in JOBS]
    rows = [msgspec.json.decode(path.read_bytes(), type=Row) for path in paths if path.exists()]
    if trainings := [row for row in rows if row.name in TRAININGS]:
        _replace(BEGIN, table(trainings), END)
    if folders := [row for row in rows if row.name in FOLDERS]:
        _replace(BEGIN_FOLDERS, table_of_folders(folders), END_FOLDERS)
    return rows


def _replace(begin: str, text: str, end: str) -> None:
    head, _, rest = PAGE.read_text().partition(begin)
    PAGE.write_text(f"{head}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}")


def main() -> None:
    """Run the trainings, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(JOBS))
    parser.add_argument(
        "--kills",
        type=int,
        default=KILLS,
        help="kills of each training; a folder is killed at each of its events",
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    words = parser.parse_args()
    if unknown := {*words.names} - {*JOBS}:
        parser.error(f"no such job: {', '.join(sorted(unknown))}")
    BUILD.mkdir(parents=True, exist_ok=True)
    install()
    for name in words.names or JOBS:
        row = measured(name, ALL if name in FOLDERS else words.kills, words.jobs)
        (BUILD / f"{name}.json").write_bytes(msgspec.json.encode(row))
    if lost := losses(write(BUILD)):
        sys.exit("\n".join(str(kill) for kill in lost))


if __name__ == "__main__":
    main()

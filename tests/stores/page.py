"""Measure the stores that this machine can start, and write the tables of docs/stores.md.

``python -m tests.stores.page [NAME ...]`` measures those whose names contain one of the words, or
all. Each result goes to ``measured.json`` with its versions and its date. A store that cannot be
started here keeps the result that it has. ``--write`` only writes the page.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from ckpt_backends.store_table import STORES, store_of
from tests.kit.filesystems import Unavailable
from tests.stores.measure import MARK, Measured
from tests.stores.places import FILE_SYSTEMS, UML, Setup
from tests.stores.run import ROOT, SECONDS, Row, debian, output, row, run

PAGE: Final = ROOT / "docs" / "stores.md"
RESULTS: Final = Path(__file__).with_name("measured.json")
_NOT_RUN: Final = {
    "file": "see the table of file systems",
    "shm": "the conformance tests alone, since a name there has no folders",
    "hf": "refused, with `ConfigError`",
}
"""What the page says of the stores that have no run of their own, by their first scheme."""
_CHAINED: Final = frozenset({"simplecache"})
"""The first schemes of stores that stand before another URL."""
_TABLE: Final = re.compile(
    r"(<!-- (\w+): python -m tests\.stores\.page -->\n).*?(<!-- end -->)", re.S
)


def measured(setup: Setup) -> dict[str, Row]:
    """Mount a file system, measure it, and return the row.

    Raises:
        Unavailable: This machine cannot mount it.
    """
    with (
        tempfile.TemporaryDirectory(prefix="ckpt-stores-") as folder,
        setup.start(Path(folder)) as place,
    ):
        return {setup.name: run(place, setup.versions(), note=setup.advice)}


def measured_in_uml() -> dict[str, Row]:
    """Measure NFS and SMB in a user-mode Linux. Return a row for each mount.

    Raises:
        Unavailable: User-mode Linux is not installed.
    """
    if shutil.which("linux.uml") is None:
        raise Unavailable("linux.uml is not installed")
    own = {"MODULE": "tests.stores.uml", "PYTHON": sys.executable, "LIMIT": str(SECONDS)}
    rows: dict[str, Row] = {}
    for line in output(["bash", "tests/faults/nfs.sh"], own).splitlines():
        name, tab, text = line.strip().removeprefix(MARK).partition("\t")
        if tab:
            result = msgspec.json.decode(text, type=Measured)
            server = "samba" if name.startswith("SMB") else "nfs-kernel-server"
            rows[name] = row(debian("user-mode-linux", server), result, note=UML[name])
    return rows


def measured_servers(words: Sequence[str]) -> dict[str, Row]:
    """Measure the servers of ``servers.py``. pytest prints which were skipped, and which failed."""
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="ckpt-stores-") as folder:
        chosen = ["-k", " or ".join(words)] if words else []
        file = str(Path(__file__).with_name("servers.py"))
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-rs", "-s", file, *chosen]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"STORES_OUT": folder}, check=False)
        for path in Path(folder).iterdir():
            rows |= msgspec.json.decode(path.read_bytes(), type=dict[str, Row])
    return rows


def results() -> dict[str, Row]:
    """Return the results of all stores, by name."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=dict[str, Row])


def page(text: str, rows: Mapping[str, Row]) -> str:
    """Return the text of the page with its tables written anew."""
    tables = {"schemes": _schemes(rows), "systems": _systems(rows)}
    return _TABLE.sub(lambda match: f"{match[1]}\n{tables[match[2]]}\n{match[3]}", text)


def contradictions(rows: Mapping[str, Row]) -> Iterator[str]:
    """Yield what was measured otherwise than the table of schemes in the product says."""
    for name, result in rows.items():
        found = result.measured
        if (store := store_of(result.scheme)) is None:
            continue
        if found.fault and store.role != "no tier":
            yield f"{name}: {found.fault}"
        if (found.winners == 1) != store.atomic_create and not result.note:
            yield f"{name}: {found.winners} winners of a race"
        if found.full and found.full != store.full_disk and not result.note:
            yield f"{name}: a full disk is told as {found.full}"


def _schemes(rows: Mapping[str, Row]) -> str:
    heads = ["URL", "tier", "atomic create", "full disk", "extra", "notes", "what was run", "date"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for store in STORES:
        mark = "::" if store.schemes[0] in _CHAINED else "://"
        urls = ", ".join(f"`{scheme}{mark}`" for scheme in store.schemes)
        tier = store.role + (f": {store.reason}" if store.reason else "")
        extra = f"`{store.extra}`" if store.extra else "-"
        create = "yes" if store.atomic_create else "no"
        found = [result for result in rows.values() if result.scheme in store.schemes]
        notes = (f"{each.versions.split()[0]}: {each.note}" for each in found if each.note)
        versions = (version for each in found for version in each.versions.split(", "))
        runs = _once(versions, ", ") or _NOT_RUN.get(store.schemes[0], "-")
        dates = _once((each.date for each in found), ", ") or "-"
        full, note = _code(store.full_disk), _once(notes, "; ") or "-"
        lines.append(_line([urls, tier, create, full, extra, note, runs, dates]))
    return "\n".join(lines) + "\n"


def _once(texts: Iterable[str], between: str) -> str:
    """Join the texts, each of them once."""
    return between.join(dict.fromkeys(texts))


def _systems(rows: Mapping[str, Row]) -> str:
    heads = ["file system", "tier", "atomic create", "full disk", "notes", "what was run", "date"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for name in [*(setup.name for setup in FILE_SYSTEMS), *UML]:
        if (result := rows.get(name)) is not None:
            found = result.measured
            create = "yes" if found.winners == 1 else "no"
            notes = "; ".join(filter(None, [result.note, found.after])) or "-"
            full, run_with = _code(found.full), result.versions
            lines.append(_line([name, _tier(found), create, full, notes, run_with, result.date]))
    return "\n".join(lines) + "\n"


def _tier(found: Measured) -> str:
    if found.fault:
        return f"no tier: {found.fault}"
    if found.winners == 1:
        return "any tier"
    return "any tier of one job, with `put_if_absent=False`"


def _code(name: str) -> str:
    return f"`{name}`" if name else "not seen"


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def main(words: list[str]) -> int:
    rows = results()
    whole = True
    if words != ["--write"]:
        for found in measured_anew(words):
            rows |= found
            whole = whole and bool(found)
            for name, result in found.items():
                print(f"{name}: {result.measured}", flush=True)
            RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    PAGE.write_text(page(PAGE.read_text(), rows))
    wrong = list(contradictions(rows))
    for text in wrong:
        print(f"otherwise than ckpt_backends/store_table.py says: {text}")
    return 0 if whole and not wrong else 1


def measured_anew(words: Sequence[str]) -> Iterator[dict[str, Row]]:
    """Measure the stores whose names contain one of ``words``, or all. Yield the results of each,
    and nothing in place of those that this machine cannot start.
    """

    def wanted(name: str) -> bool:
        return not words or any(word in name for word in words)

    ways: dict[str, Callable[[], dict[str, Row]]] = {
        setup.name: partial(measured, setup) for setup in FILE_SYSTEMS if wanted(setup.name)
    }
    if any(map(wanted, UML)):
        ways["user-mode Linux"] = measured_in_uml
    ways["servers"] = partial(measured_servers, words)
    for name, way in ways.items():
        try:
            yield way()
        except Unavailable as reason:
            print(f"{name}: NOT MEASURED: {reason}", flush=True)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{name}: FAILED: {error}", flush=True)
            yield {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

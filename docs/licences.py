"""Write docs/licences.md: what an installation brings, with the licence that each package states.

``--check`` only compares, and exits with 1 if the page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = Path(__file__).with_suffix(".md")
DISTRIBUTION = "ckpt-stream"
EXTRAS = ("", "s3", "obstore", "gcs", "azure", "sftp", "smb", "webdav", "otlp")
HEAD = """# Licences

This page lists the packages that `pip install .`, the extras for stores and the extra for
OpenTelemetry bring, with the licence that each package states in its metadata. `make licences`
writes it from the installed packages (versions as in `constraints.txt`). The licence of ckpt itself
is Apache-2.0.

| package | version | licence | needed by |
|---|---|---|---|
"""


def needed(name: str, extra: str = "") -> Iterator[str]:
    """The packages that ``name`` and, in turn, they need on this system; with ``extra``, what
    that adds.
    """
    waiting, seen = [(name, extra)], {name}
    while waiting:
        at, option = waiting.pop()
        for requirement in map(Requirement, metadata.requires(at) or ()):
            found = canonicalize_name(requirement.name)
            if requirement.marker and not requirement.marker.evaluate({"extra": option}):
                continue
            waiting += [(found, more) for more in requirement.extras]
            if found not in seen:
                seen.add(found)
                waiting.append((found, ""))
                yield found


def licence(name: str) -> str:
    """As the package states it: the SPDX expression, else the short text, else the classifiers."""
    found = metadata.metadata(name)
    text = found.get("License-Expression") or found.get("License") or ""
    if not text or "\n" in text:
        classifiers = found.get_all("Classifier") or []
        text = ", ".join(c.rpartition(" :: ")[2] for c in classifiers if c.startswith("License"))
    return text or "not stated"


def page() -> str:
    """The whole page."""
    rows: list[str] = []
    listed: set[str] = set()
    for extra in EXTRAS:
        for name in sorted(set(needed(DISTRIBUTION, extra)) - listed):
            listed.add(name)
            version = metadata.version(name).partition("+")[0]
            rows.append(
                f"| {name} | {version} | {licence(name)} | "
                f"{f'extra `{extra}`' if extra else 'always'} |"
            )
    return HEAD + "\n".join(rows) + "\n"


def main() -> int:
    """Write the page, or compare it."""
    text = page()
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

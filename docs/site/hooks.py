"""What MkDocs cannot do by itself for this repository. `mkdocs.yml` names this file.

The pages link to each other by their places in the repository, so that the links work in a clone
too. Some of these places are outside of `docs/`. The functions here add these files to the site and
translate the links. They also place the drawings in the pages, where they follow the colours of the
site, and they report every public name that has no docstring or that the page of the API does not
show.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[2]
MOUNTED = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "bench/README.md", "bench/results")
SHOWN_AS_THEY_ARE = {".md", ".png", ".svg", ".json", ".csv"}
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".pml": "c"}
DRAWING = re.compile(r'<p><img [^>]*src="(pictures/[\w-]+\.svg)"[^>]*></p>')
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")

log = logging.getLogger("mkdocs.hooks.ckpt")


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside of `docs/` that are pages, and a page for each source file that a
    page links to.
    """
    from mkdocs.structure.files import File

    for path in _mounted():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    pages = [file for file in files if file.src_uri.endswith(".md")]
    sources = {
        path
        for page in pages
        for link in _links((ROOT / _repository_path(page.src_uri)).read_text())
        if (path := _target(page.src_uri, link)) and (ROOT / path).is_file()
        if Path(path).suffix not in SHOWN_AS_THEY_ARE
    }
    for path in sorted(sources):
        files.append(File.generated(config, _site_path(path), content=_source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Translate the links of a page."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown

    def translated(match: re.Match[str]) -> str:
        path = _target(here, match[2])
        if path is None:
            return match[0]
        anchor = match[2].partition("#")[1:]
        link = posixpath.relpath(_site_path(path), posixpath.dirname(here) or ".")
        return f"{match[1]}{link}{''.join(anchor)}{match[3]}"

    pieces = _FENCE.split(markdown)
    pieces[::2] = [_LINK.sub(translated, piece) for piece in pieces[::2]]
    return "".join(pieces)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Place the drawings in the page.

    With the page of the API, report the names that are not documented.
    """
    if page.file.src_uri == "api.md":
        for problem in undocumented(html):
            log.warning(problem)
    return DRAWING.sub(lambda match: (ROOT / "docs" / match[1]).read_text(), html)


def undocumented(html: str) -> Iterator[str]:
    """Each public name that has no docstring or no place in the page."""
    package = griffe.load("ckpt", search_paths=[str(ROOT)], docstring_parser="google")
    for name in package.exports or ():
        if str(name).startswith("__"):
            continue
        if f'id="ckpt.{name}"' not in html:
            yield f"docs/api.md does not show ckpt.{name}"
        for found in _without_docstring(package[str(name)]):
            yield f"{found} is public and has no docstring"


def _without_docstring(item: Any) -> Iterator[str]:
    target = item.final_target if item.is_alias else item
    if not target.docstring:
        yield target.path
    if not target.is_class:
        return
    described = {
        name.strip()
        for section in (target.docstring.parsed if target.docstring else ())
        if section.kind.value in ("attributes", "parameters")
        for each in section.value
        for name in each.name.split(",")
    }
    for name, member in target.members.items():
        if not name.startswith("_") and name not in described and not member.docstring:
            yield member.path


def _mounted() -> Iterator[str]:
    for place in MOUNTED:
        path = ROOT / place
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (
            str(each.relative_to(ROOT)) for each in found if each.suffix in SHOWN_AS_THEY_ARE
        )


def _links(text: str) -> Iterator[str]:
    for piece in _FENCE.split(text)[::2]:
        yield from (match[2] for match in _LINK.finditer(piece))


def _target(here: str, link: str) -> str | None:
    """The file that a link of the page `here` names, as a path in the repository.

    None: it is no such link.
    """
    path = link.partition("#")[0]
    if not path or "://" in link or link.startswith("mailto:"):
        return None
    found = posixpath.normpath(posixpath.join(posixpath.dirname(_repository_path(here)), path))
    return f"{found}/README.md" if (ROOT / found).is_dir() else found


def _repository_path(site_path: str) -> str:
    return (
        site_path if any(site_path.startswith(place) for place in MOUNTED) else f"docs/{site_path}"
    )


def _site_path(path: str) -> str:
    """Where the site has a file of the repository."""
    if Path(path).suffix not in SHOWN_AS_THEY_ARE:
        return f"source/{path}.md"
    return path.removeprefix("docs/")


def _source_page(path: str) -> str:
    text = (ROOT / path).read_text()
    fence = "`" * 6
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n{fence}{language}\n{text}{fence}\n"

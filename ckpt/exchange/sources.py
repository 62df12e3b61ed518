"""Read a source of any kind: a file or folder of one of the formats, or a folder of a library."""

from __future__ import annotations

import os

from ckpt.errors import UnsupportedValue
from ckpt.exchange.contents import Contents, State, left_aside
from ckpt.exchange.folder_kind import note_about
from ckpt.exchange.foreign_files import Kind, check_nothing_lost, detect, paths_in, read_source
from ckpt.exchange.library_folders import is_lightning, named_lightning, read_folder, read_lightning
from ckpt.exchange.rank_files import check_whole, read_rank_files
from ckpt.exchange.torch_reader import load


def read_contents(source: str, kind: Kind | None, scratch: str | None) -> Contents:
    """Return the state of the source, with the names that its objects have in a state.

    Args:
        source: The path of the file or folder.
        kind: The kind of the source; None to recognize it.
        scratch: The folder for a scratch file; None for the system's temporary folder.

    Raises:
        ConfigError: The source cannot be read, or is a folder whose state the import would leave
            aside.
        CkptError: As ``read_source`` raises it.
    """
    contents = (_of_library(source, scratch) if kind is None else None) or _of_format(
        source, kind or detect(source), scratch
    )
    if os.path.isdir(source):
        contents.aside = left_aside(os.listdir(source), contents.files)
        check_nothing_lost(source, contents.aside)
        contents.notes += note_about(paths_in(source))
    return contents


def _of_library(source: str, scratch: str | None) -> Contents | None:
    """Return the state of a folder that a library has written, or None if none is recognized."""
    notes: list[str] = []

    def read(path: str) -> State:
        contents = read_source(path, detect(path), scratch)
        notes.extend(contents.notes)
        return contents.state

    folder = read_folder(source, read) or read_rank_files(source, load, scratch)
    if folder is None:
        return None
    return Contents(folder.state, folder.files, [*folder.notes, *notes], library=folder.library)


def _of_format(source: str, kind: Kind, scratch: str | None) -> Contents:
    try:
        contents = read_source(source, kind, scratch)
    except UnsupportedValue:
        if not os.path.isfile(source) or (taken := read_lightning(source)) is None:
            raise
        contents = Contents(taken[0], notes=taken[1])
    check_whole(contents.state, source)
    if is_lightning(contents.state):
        contents.library = "lightning"
        contents.state, notes = named_lightning(contents.state)
        contents.notes += notes
    return contents

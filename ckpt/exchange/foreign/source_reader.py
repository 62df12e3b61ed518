"""Read a source of any kind: a file or folder of one of the formats, or a folder of a library.

A *joiner* makes whole tensors of the parts that files have. A *universal* checkpoint is a kind of
folder of DeepSpeed.
"""

from __future__ import annotations

import os
from functools import cache

from ckpt.errors import ConfigError, UnsupportedValue
from ckpt.exchange.foreign.contents import Contents, State, left_aside
from ckpt.exchange.foreign.deepspeed_files import engine_notes, read_universal
from ckpt.exchange.foreign.joined_tensors import Joiner
from ckpt.exchange.foreign.library_folders import (
    is_lightning,
    library_of,
    read_folder,
    read_lightning,
    rename_objects_of_lightning,
)
from ckpt.exchange.foreign.rank_files import Load, check_not_of_one_rank, read_rank_files
from ckpt.exchange.foreign.refused_folders import (
    folder_notes,
    is_universal,
    refused_file_text,
    refused_kind,
)
from ckpt.exchange.foreign.source_formats import (
    Kind,
    check_nothing_lost,
    detect,
    paths_in,
    read_source,
)
from ckpt.exchange.foreign.torchsnapshot_reader import is_torchsnapshot, read_torchsnapshot
from ckpt.exchange.inert.torch_reader import load


def kind_of(source: str) -> str:
    """Return the name of the library that has written the folder ``source``. If no library is
    known, or if ``source`` is a file, return its format.

    Raises:
        ConfigError: As ``detect`` raises it.
    """
    if os.path.isdir(source):
        paths = paths_in(source)
        if folder_kind := refused_kind(paths):
            raise ConfigError(folder_kind.text(source))
        if is_universal(paths):
            return "deepspeed"
        if is_torchsnapshot(paths):
            return "torchsnapshot"
        if library := library_of(paths):
            return library
    return detect(source)


def read_contents(source: str, kind: Kind | None, joiner: Joiner) -> Contents:
    """Return the state of the source, with the names that its objects have in a state.

    Args:
        source: The path of the file or folder.
        kind: The kind of the source; None to recognize it.
        joiner: Makes tensors of parts.

    Raises:
        ConfigError: The source cannot be read, is a part of a whole, or is a folder whose state the
            import would leave aside.
        CkptError: As ``read_source`` raises it.
    """
    load_once = cache(load)  # Files are looked at to recognize a folder, and then taken
    contents = (_read_library(source, joiner, load_once) if kind is None else None) or _read_format(
        source, kind or detect(source), joiner, load_once
    )
    if os.path.isdir(source):
        contents.leftovers = left_aside(os.listdir(source), contents.files)
        check_nothing_lost(source, contents.leftovers)
        contents.notes += folder_notes(paths_in(source))
    return contents


def _read_library(source: str, joiner: Joiner, load_once: Load) -> Contents | None:
    """Return the state of a folder that a library has written, or None if none is recognized."""
    notes: list[str] = []

    def read(path: str) -> State:
        contents = read_source(path, detect(path), joiner)
        notes.extend(contents.notes)
        return contents.state

    paths = paths_in(source) if os.path.isdir(source) else []
    folder = (
        (read_universal(source) if is_universal(paths) else None)
        or (read_torchsnapshot(source, joiner) if is_torchsnapshot(paths) else None)
        or read_folder(source, read)
        or read_rank_files(source, load_once, joiner)
        if paths
        else None
    )
    if folder is None:
        return None
    return Contents(folder.state, folder.files, [*folder.notes, *notes], library=folder.library)


def _read_format(source: str, kind: Kind, joiner: Joiner, load_once: Load) -> Contents:
    """Return the state of a file or folder of one of the formats. A file of Lightning may have
    objects beside it that are not taken.
    """
    is_file = os.path.isfile(source)
    if is_file and (text := refused_file_text(source)):
        raise ConfigError(text)
    try:
        contents = read_source(source, kind, joiner, load_once)
    except UnsupportedValue:
        if not is_file or (state_and_notes := read_lightning(source)) is None:
            raise
        state, notes = state_and_notes
        contents = Contents(state, notes=notes)
    check_not_of_one_rank(contents.state, source)
    contents.notes += engine_notes(source, contents.state)
    if is_lightning(contents.state):
        contents.library = "lightning"
        contents.state, notes = rename_objects_of_lightning(contents.state)
        contents.notes += notes
    return contents

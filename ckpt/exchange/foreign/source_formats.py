"""Read files of other programs, and return a nested state of tensors and plain values.

A pickle is either loaded by ``torch.load(weights_only=True)``, or read as inert data. A *joiner*
makes whole tensors of the parts that files have. ``parse_folder`` tells whether a name is that of a
step of ckpt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Literal

from ckpt.errors import ConfigError
from ckpt.errors.base import few
from ckpt.exchange.foreign import dcp_reader, safetensors_folder
from ckpt.exchange.foreign.contents import Contents, State, merge
from ckpt.exchange.foreign.dcp_reader import TABLE, has_table
from ckpt.exchange.foreign.joined_tensors import Joiner
from ckpt.exchange.foreign.refused_folders import refused_kind, state_folders
from ckpt.exchange.foreign.safetensors_folder import SUFFIX, choose_files
from ckpt.exchange.inert.file_kind import describe_file, is_torch
from ckpt.exchange.inert.input_limits import check_regular
from ckpt.exchange.inert.torch_reader import load
from ckpt.model.keys import MANIFEST, parse_folder

Kind = Literal["torch", "dcp", "safetensors"]

_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")


def detect(source: str) -> Kind:
    """Return the kind of the file or folder ``source``. The kind of a file is "safetensors" if its
    name ends in ``.safetensors``, else "torch".

    Raises:
        ConfigError: ``source`` does not exist, cannot be read, is a checkpoint of ckpt, or is a
            folder of none of the three kinds. If another program has written the folder, the error
            says how to get its state.
    """
    if os.path.isfile(source):
        folder = os.path.dirname(os.path.abspath(source))
        if parse_folder(os.path.basename(folder)) and MANIFEST in _names_in(folder):
            raise ConfigError(_own_step_text(source, folder))
        return "safetensors" if source.endswith(SUFFIX) else "torch"
    if not os.path.isdir(source):
        raise ConfigError(f"{source} is not there: name a local file or folder")
    names = _names_in(source)
    if MANIFEST in names and parse_folder(os.path.basename(os.path.abspath(source))):
        raise ConfigError(_own_step_text(source, os.path.abspath(source)))
    if folder_kind := refused_kind(paths_in(source)):
        raise ConfigError(folder_kind.text(source))
    if has_table(names):
        return "dcp"
    if any(name.endswith(SUFFIX) for name in names):
        return "safetensors"
    if any(name.endswith(_TORCH_SUFFIXES) for name in names):
        return "torch"
    if any(parse_folder(name) for name in names):
        raise ConfigError(
            f"{source} holds checkpoints of ckpt already: copy them with ckpt copy {source} ROOT "
            "(--step N, or --all)"
        )
    if folders := state_folders(paths_in(source)):
        raise ConfigError(_folders_text(source, folders))
    if folders := _folders_of_files(source):
        raise ConfigError(
            f"{source} holds no checkpoint itself, but has folders with files of safetensors or "
            f"torch.save in it ({few(folders, quote=False)}): name one, such as {folders[-1]}"
        )
    raise ConfigError(
        f"{source} holds neither {TABLE} of torch.distributed.checkpoint, nor .snapshot_metadata "
        "of torchsnapshot, nor *.safetensors, nor *.pt, *.pth, *.bin or *.ckpt of torch.save"
    )


def _own_step_text(source: str, folder: str) -> str:
    """Return the text that refuses ``source``, which is ``folder`` of a step of ckpt or a file in
    it.
    """
    parent, name = os.path.split(folder)
    ref = parse_folder(name)
    assert ref is not None
    relation = "is" if os.path.isdir(source) else "is a file of"
    return (
        f"{source} {relation} a checkpoint of ckpt already: copy it with ckpt copy {parent} ROOT "
        f"--step {ref.step}"
    )


def check_kind(source: str, kind: Kind) -> None:
    """Raise ``ConfigError`` if ``source`` cannot be of this kind.

    If the first bytes of a file show its kind, the error names that kind.
    """
    if not os.path.exists(source):
        raise ConfigError(f"{source} is not there: name a local file or folder")
    if os.path.isdir(source):
        names = _names_in(source)
        suffixes = {"dcp": (TABLE,), "safetensors": (SUFFIX,), "torch": _TORCH_SUFFIXES}[kind]
        if not any(name.endswith(suffixes) for name in names):
            raise ConfigError(f"--format {kind}: {source} holds no {', '.join(suffixes)} file")
    elif kind == "dcp":
        description = describe_file(check_regular(source)) or (
            "a file of torch.save: give --format torch" if is_torch(source) else "a file"
        )
        raise ConfigError(
            f"--format dcp: {source} is {description}; torch.distributed.checkpoint writes a "
            "folder with "
            f"a {TABLE} file in it"
        )
    elif kind == "safetensors" and is_torch(check_regular(source)):
        raise ConfigError(
            f"--format safetensors: {source} is a file of torch.save: give --format torch"
        )


def paths_in(folder: str) -> list[str]:
    """Return the relative paths of what is in a folder and in its subfolders."""
    paths: list[str] = []
    for name in sorted(_names_in(folder)):
        paths.append(name)
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            paths += [f"{name}/{inner}" for inner in sorted(_names_in(path))]
    return paths


def check_nothing_lost(source: str, leftovers: Collection[str]) -> None:
    """Raise ``ConfigError`` if the names ``leftovers`` in a folder, which an import does not take,
    are subfolders with a state.
    """
    paths = [path for path in paths_in(source) if path.split("/")[0] in leftovers]
    if folders := state_folders(paths):
        raise ConfigError(_folders_text(source, folders))


def _folders_text(source: str, names: Sequence[str]) -> str:
    folders = [os.path.join(source, name) for name in names]
    return (
        f"{source} has folders of torch.distributed.checkpoint in it, which would be left aside "
        f"({few(folders, quote=False)}): name the one that you need, such as {folders[-1]}"
    )


def _folders_of_files(source: str) -> list[str]:
    """Return the subfolders of ``source`` that have files of safetensors or torch.save, with
    checkpoint-10 after checkpoint-9.
    """
    paths = (path for path in paths_in(source) if path.endswith((SUFFIX, *_TORCH_SUFFIXES)))
    names = {path.rpartition("/")[0] for path in paths} - {""}
    return [
        os.path.join(source, name) for name in sorted(names, key=lambda name: (len(name), name))
    ]


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror or error}") from None


def read_source(
    source: str, kind: Kind, joiner: Joiner, load_file: Callable[[str], Any] = load
) -> Contents:
    """Return the state in ``source``, and the names of the files that it is from.

    Tensors are mapped from the source file if possible. Those in a folder of
    ``torch.distributed.checkpoint`` are joined of their parts.

    Args:
        source: The file or folder.
        kind: The kind of ``source``.
        joiner: Makes tensors of parts.
        load_file: Returns the content of a file of ``torch.save``.

    Raises:
        UnsupportedValue: The state contains objects that only pickle could load, or a tensor that
            ckpt does not support.
        IntegrityError: The source is damaged, or a part of it is missing.
        ConfigError: The source cannot be read, is a file of another kind, or is a folder whose
            state is in subfolders.
        StorageError: As ``joiner`` raises it.
    """
    match kind:
        case "torch":
            return _read_torch(source, load_file)
        case "dcp":
            return dcp_reader.read_folder(source, joiner)
        case "safetensors":
            return safetensors_folder.read_safetensors(source, joiner)


# -- torch.save ------------------------------------------------------------------------------------


def _read_torch(source: str, load_file: Callable[[str], Any]) -> Contents:
    """Read a file of ``torch.save``, or all such files of a folder. Without an index, each file has
    a value of its own, under its name.
    """
    if os.path.isfile(source):
        return Contents(_state_of(load_file(source)))
    if not any(name.endswith(_TORCH_SUFFIXES) for name in os.listdir(source)):
        raise ConfigError(f"{source} holds no {', '.join(_TORCH_SUFFIXES)} file")
    weights = choose_files(source, "bin")
    files = sorted(name for name in os.listdir(source) if name.endswith(_TORCH_SUFFIXES))
    names = weights.names if weights.has_index else files
    parts = {name: load_file(os.path.join(source, name)) for name in names}
    if len(parts) == 1 or weights.has_index:  # All files together hold one state
        state = merge(source, ((name, _state_of(part)) for name, part in parts.items()))
    else:
        stems = {name: os.path.splitext(name)[0] for name in parts}
        # With a.pt and a.bin, full names are used.
        has_unique_stems = len(set(stems.values())) == len(stems)
        state = {stems[name] if has_unique_stems else name: value for name, value in parts.items()}
    return Contents(state, [*parts, *weights.tables], [*weights.notes])


def _state_of(content: Any) -> State:
    return dict(content) if isinstance(content, Mapping) else {"value": content}

"""Export a committed step to a file or folder that other programs can read.

Each tensor is written as a whole, even if several ranks have saved its shards. Tensors are written
one after another, so the step need not fit into memory. Tied names stand for one tensor. Its bytes
are stored under one of them, its *stored name*.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

import torch

from ckpt.catalog.tensor_reader import LIST_NAMES, StepReader
from ckpt.errors import ConfigError, EntryMissing, StorageError
from ckpt.errors.base import few
from ckpt.errors.sanitize import clean
from ckpt.errors.storage import storage_error
from ckpt.exchange.exports import dcp_writer, hf_folder, hf_store, safetensors_writer, torch_writer
from ckpt.exchange.exports.hf_folder import HfOptions
from ckpt.exchange.exports.safetensors_writer import FileForm
from ckpt.exchange.scratch import scratch_folder
from ckpt.exchange.weights.open_checkpoint import TensorView
from ckpt.model.manifest import Tensor
from ckpt.model.values import check_structure, exact_text
from ckpt.state.match.manifest_tree import Notes, StateTree, is_selected
from ckpt.storage.urls import is_folder, local_path, without_query

Format = Literal["safetensors", "torch", "dcp", "hf"]
SHARD_BYTES: Final = 5 * 10**9
_FILE_SUFFIXES: Final = (safetensors_writer.SUFFIX, ".pt", ".pth")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """The result of an export.

    Attributes:
        place: The absolute path of the new file or folder, or the URL of the folder.
        tensors: The number of exported names of tensors. Tied names are included.
        nbytes: The bytes of the exported tensors. Tied tensors count once.
        notes: The values that the format cannot hold, or holds in another form.
    """

    place: str
    tensors: int
    nbytes: int
    notes: Notes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The options of an export.

    Attributes:
        globs: The patterns of the names to export; empty for all names.
        strip: A prefix that is removed from the names. It is for safetensors only.
        max_shard_bytes: The most bytes of one file; None for the default. A larger tensor has a
            file of its own. It is for safetensors in a folder and hf only.
        hf: The options of a folder of Hugging Face; None for other formats.
    """

    globs: Sequence[str] = ()
    strip: str = ""
    max_shard_bytes: int | None = None
    hf: HfOptions | None = None


_DEFAULTS: Final = ExportOptions()


def export(
    reader: StepReader,
    out: str,
    kind: Format,
    options: ExportOptions = _DEFAULTS,
    *,
    on_start: Callable[[int], None] = lambda _: None,
) -> ExportReport:
    """Write the tensors of a checkpoint, and its plain values if the format can hold them, to
    ``out``.

    ``out`` appears only when the whole export is complete.

    Args:
        reader: The reader of the checkpoint.
        out: The path of the new file or folder, which must not exist. A folder of Hugging Face may
            have a URL.
        kind: The format.
        options: The options.
        on_start: A function that is called with the number of bytes that will be read.

    Raises:
        ConfigError: ``out`` exists or is another URL, an option does not fit the format, two values
            would have the same name in the format, ``out`` has the name of a file and would be a
            folder, or the format cannot hold any of the values.
        EntryMissing: No tensor and no plain value has a name that matches ``options.globs``.
        IntegrityError: The checkpoint is damaged.
        StorageError: The checkpoint cannot be read, or ``out`` cannot be written.
    """
    globs = options.globs
    _check_options(kind, options)
    if kind in ("hf", "dcp") and out.endswith(_FILE_SUFFIXES):
        raise ConfigError(
            f"{out} has the name of a file, and {kind} is a folder: name one without this ending, "
            "or leave --format out"
        )
    if not is_folder(out) and kind != "hf":
        raise ConfigError(
            f"{out} is a URL, which only --format hf takes: export to a local file or folder, and "
            "copy it from there"
        )
    names = [name for name in sorted(reader.tensors) if is_selected(name, globs)]
    if not names:
        _check_values(reader, kind, globs)
    tensors = {reader.tensors[name].name: reader.tensors[name] for name in names}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    notes = Notes()
    with _output(out) as (output_path, on_file):
        on_start(nbytes)
        match kind:
            case "safetensors":
                _write_safetensors(reader, output_path, out, names, notes, options)
            case "torch":
                _write_torch(reader, output_path, list(tensors.values()), notes, globs)
            case "dcp":
                _write_dcp(reader, output_path, notes, globs)
            case "hf":
                assert options.hf is not None
                os.makedirs(output_path, exist_ok=True)
                most_bytes = options.max_shard_bytes or SHARD_BYTES
                writer = hf_folder.HfWriter(reader, options.hf, options.strip, most_bytes)
                notes.left_out += writer.write(output_path, names, on_file)
    return ExportReport(place=_place_text(out), tensors=len(names), nbytes=nbytes, notes=notes)


def _place_text(out: str) -> str:
    return os.path.abspath(local_path(out)) if is_folder(out) else clean(without_query(out))


def _check_options(kind: Format, options: ExportOptions) -> None:
    if kind not in ("safetensors", "hf") and (options.strip or options.max_shard_bytes is not None):
        raise ConfigError(
            f"--strip and --max-shard-size are of safetensors and hf, not of {kind}: leave them out"
        )
    if kind != "hf" and options.hf is not None:
        raise ConfigError(f"--config, --dtype and --names are of hf, not of {kind}: leave them out")


def _check_values(reader: StepReader, kind: Format, globs: Sequence[str]) -> None:
    """Check that ``globs``, which match no tensor, match plain values, and that the format can hold
    these. Otherwise raise an error.
    """
    values = _value_names(reader, globs)
    if not values:
        present = [*reader.tensors, *_value_names(reader, ())]
        raise EntryMissing(
            list(globs) or ["value"], reader.ref.step, present=present, way=LIST_NAMES
        )
    if kind in ("safetensors", "hf"):
        raise ConfigError(
            f"step {reader.ref.step} has no tensor to export, only plain values ({few(values)}), "
            "and safetensors holds tensors alone: export to a file of torch, such as OUT.pt"
        )


def _write_safetensors(
    reader: StepReader,
    place: str,
    out: str,
    names: Sequence[str],
    notes: Notes,
    options: ExportOptions,
) -> None:
    """Write tensors to ``place``, a file or a folder as the name of ``out`` says. Tied names have
    one tensor. What the format cannot hold is noted in ``notes``.
    """
    strip, max_shard_bytes = options.strip, options.max_shard_bytes
    export_names: dict[str, str] = {}  # The exported name of each tensor, by its stored name
    ties: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (name in reader.manifest.tied, name)):
        target = export_names.setdefault(reader.tensors[name].name, name)
        if target != name:
            ties[name.removeprefix(strip)] = target.removeprefix(strip)
            notes.left_out.append(
                (name, f"shares its bytes with {target!r}, and is named as such in the metadata")
            )
    tensors = [reader.tensors[name] for name in export_names]
    file_names = {
        stored_name: name.removeprefix(strip) for stored_name, name in export_names.items()
    }
    safetensors_writer.check_names(file_names, reader.tensors, "choose another --strip")
    safetensors_writer.note_changed_dtypes(tensors, notes)
    _leave_out_values(reader, notes, options.globs)
    form = FileForm(names=file_names, metadata=ties)
    if not out.endswith(safetensors_writer.SUFFIX):
        os.mkdir(place)
        most_bytes = max_shard_bytes or SHARD_BYTES
        safetensors_writer.write_folder(place, tensors, form, reader, most_bytes)
    elif max_shard_bytes is not None:
        raise ConfigError(
            f"{out} is one file: shards go into a folder, so name one to use --max-shard-size"
        )
    else:
        safetensors_writer.write_file(place, tensors, form, reader)


def _leave_out_values(reader: StepReader, notes: Notes, globs: Sequence[str]) -> None:
    """Note the plain values whose names match ``globs`` as left out, since a safetensors file
    cannot hold them. Values that are None and empty dicts are not noted.
    """
    notes.left_out += [(path, "a plain value") for path in _value_names(reader, globs)]


def _value_names(reader: StepReader, globs: Sequence[str]) -> list[str]:
    """Return the names of the plain values that match ``globs``, without None and empty dicts."""
    tree = StateTree(reader.manifest, lambda _: None, globs, by_name=True).build()
    with check_structure("tree"):
        return _value_paths(tree)


def _value_paths(value: object, path: str = "") -> list[str]:
    """Return the names of the plain values in ``value``, which stands at ``path`` in nested dicts.

    A key that is no string is written as text.
    """
    if isinstance(value, dict) and value:
        return [
            inner_path
            for key, item in value.items()
            for inner_path in _value_paths(
                item,
                "/".join(filter(None, (path, key if isinstance(key, str) else exact_text(key)))),
            )
        ]
    return [] if _is_empty(value) else [path]


def _is_empty(value: object) -> bool:
    """Return True for None, for an empty dict, and for a list or tuple of such values."""
    if isinstance(value, list | tuple) and value:
        return all(map(_is_empty, value))
    return value is None or value == {}


def _write_torch(
    reader: StepReader, place: str, sources: Sequence[Tensor], notes: Notes, globs: Sequence[str]
) -> None:
    """Write the state to the file ``place`` by ``torch.save``. ``sources`` are its tensors."""
    tensors = torch_writer.read_into_scratch(reader, sources, os.path.dirname(place))
    tree = StateTree(
        reader.manifest, lambda name: tensors[reader.tensors[name].name], globs, by_name=False
    )
    torch_writer.write_file(place, tree.build())
    notes.changes += tree.notes.changes


def _write_dcp(reader: StepReader, place: str, notes: Notes, globs: Sequence[str]) -> None:
    """Write the state to the folder ``place``, whose tensors are read when DCP writes them."""
    placeholders = dcp_writer.Placeholders()

    def make(name: str) -> torch.Tensor:
        tensor = reader.tensors[name]
        return placeholders.tensor(name, tensor.dtype, tensor.shape)

    # In the state dicts of optimizers, parameters have their names, and not numbers.
    tree = StateTree(reader.manifest, make, globs, by_name=True)
    state = dcp_writer.fit_state(tree.build(), tree.notes)
    notes.changes += tree.notes.changes
    notes.left_out += tree.notes.left_out
    # ``view[...]`` reads the whole tensor.
    dcp_writer.write_folder(place, state, placeholders, lambda name: TensorView(reader, name)[...])


@contextmanager
def _output(out: str) -> Generator[tuple[str, Callable[[str], None]]]:
    """Return a context manager that yields a temporary path, and a function that takes a file at
    this path as soon as it is complete. The block creates a file or folder at the path, which
    becomes ``out``.
    """
    if is_folder(out):
        with _local_output(local_path(out)) as output_path:
            yield output_path, lambda _: None
        return
    try:
        with hf_store.stored_output(out) as (output_path, on_file):
            yield output_path, on_file
    except OSError as error:
        # A missing file there is not a missing object of the checkpoint.
        raise storage_error(tempfile.gettempdir(), error, missing=StorageError) from error


@contextmanager
def _local_output(out: str) -> Generator[str]:
    """Return a context manager that yields a temporary path. The block creates a file or folder at
    this path, and the context manager then moves it to ``out``.

    The path is in a new folder beside ``out`` that only this user can access, so that no other user
    can put a link at the path.

    Raises:
        ConfigError: ``out`` exists.
        StorageError: An ``OSError`` occurs, also in the block.
    """
    out = os.path.abspath(out)
    if os.path.lexists(out):
        raise _exists_error(out)
    folder, name = os.path.split(out)
    try:
        os.makedirs(folder, exist_ok=True)
        with scratch_folder(folder, f".{name[:100]}.ckpt-partial-") as scratch_path:
            place = os.path.join(scratch_path, "out")
            yield place
            _move(place, out)
    except OSError as error:
        # A missing folder there is not a missing object of the checkpoint.
        raise storage_error(out, error, missing=StorageError) from error


def _move(place: str, out: str) -> None:
    """Move the file or folder ``place`` to ``out``.

    Raises:
        ConfigError: ``out`` exists now. It is not replaced, with one exception: if ``place`` is a
            folder, an empty folder that appears during the move is replaced.
        OSError: The move has failed.
    """
    if os.path.isdir(place):
        if os.path.lexists(out):
            raise _exists_error(out)
        try:
            os.rename(place, out)
        except OSError:  # ``out`` may be a file, a link or a folder with content now
            if os.path.lexists(out):
                raise _exists_error(out) from None
            raise
        return
    try:
        os.link(place, out)
    except FileExistsError:
        raise _exists_error(out) from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
            raise
        # The file system has no hard links. Create an empty file, which fails if ``out`` exists,
        # and replace only this file.
        try:
            os.close(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            raise _exists_error(out) from None
        os.rename(place, out)


def _exists_error(out: str) -> ConfigError:
    return ConfigError(f"{out} is there already: remove it, or name another place")

"""Write a folder that transformers, vLLM and other programs load as a model of Hugging Face.

The folder has the weights in safetensors files, an index if these are several, the configuration,
and the files of the tokenizer. The configuration comes last, since nothing loads a folder without.
Tied names stand for one tensor. Its bytes are stored under one of them, its *stored name*.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from ckpt.catalog.tensor_reader import StepReader
from ckpt.checks import check_choice
from ckpt.errors import ConfigError, MissingExtra
from ckpt.exchange.exports import safetensors_writer
from ckpt.exchange.exports.hf_store import CONFIG
from ckpt.exchange.exports.safetensors_writer import FileForm
from ckpt.exchange.weights.load import load_part
from ckpt.exchange.weights.part import Names, check_mapping, new_names
from ckpt.model.dtype import is_float
from ckpt.model.manifest import Tensor
from ckpt.storage.local_files import write_durably

TRANSFORMERS: Final = "transformers"
"""The value of ``HfOptions.names`` that leaves names and shapes to transformers."""
_DTYPES: Final = ("float32", "float16", "bfloat16")
_TEXT_SUFFIXES: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_INDEX_SUFFIX: Final = ".index.json"
_TIED_NAMES: Final = ("lm_head.weight", "embed_out.weight", "output.weight")
"""Names of tied tensors that models of Hugging Face leave out of their files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfOptions:
    """The options of a folder of Hugging Face.

    Attributes:
        files: The folder with ``config.json``, whose text files are copied.
        dtype: The dtype of all floating-point tensors; None for the saved dtypes.
        names: How the tensors are called in the files. None: as in the checkpoint, without the
            prefix. A mapping: name in the checkpoint -> name in the files, or None to leave the
            tensor out; each tensor must have an entry, and only tied ones may have the same name.
            "transformers": transformers makes its own model of the weights and saves it, which also
            changes shapes where its files differ from its models. That needs memory for the whole
            model.
    """

    files: str
    dtype: str | None = None
    names: Names | str | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            check_choice("dtype", self.dtype, _DTYPES)
        if isinstance(self.names, str) and self.names != TRANSFORMERS:
            raise ConfigError(f"names={self.names!r}: give a mapping of names, or {TRANSFORMERS!r}")
        if isinstance(self.names, Mapping):
            check_mapping(self.names)


def read_names(file: str) -> Names | str:
    """Return the mapping of names in a JSON file, or ``TRANSFORMERS`` if ``file`` is this word.

    Raises:
        ConfigError: The file cannot be read, or is not an object of names.
    """
    if file == TRANSFORMERS:
        return file
    try:
        with open(file, encoding="utf-8") as stream:
            mapping = json.load(stream)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(mapping, dict):
        raise ConfigError(
            f'{file}: give an object of names, such as {{"head.weight": "lm_head.weight"}}'
        )
    check_mapping(mapping, file)
    return mapping


class HfWriter:
    """Writes folders of Hugging Face.

    Args:
        reader: The reader of the checkpoint.
        options: The options. The configuration and the files of the tokenizer are copied from the
            folder ``options.files``.
        strip: A prefix that is removed from the names.
        most_bytes: The most bytes of one file of weights.
    """

    def __init__(self, reader: StepReader, options: HfOptions, strip: str, most_bytes: int) -> None:
        self._reader, self._options = reader, options
        self._strip, self._most_bytes = strip, most_bytes

    def write(
        self, place: str, names: Sequence[str], on_file: Callable[[str], None]
    ) -> list[tuple[str, str]]:
        """Write the tensors ``names`` to the empty folder ``place``. Return the names that are left
        out, each with the reason. ``on_file`` is called with the path of each file of weights.

        Raises:
            ConfigError: The options do not fit the checkpoint, or the dtype cannot hold a number.
            EntryMissing: The mapping names a tensor that is not there.
        """
        options = self._options
        config = read_config(options.files)
        notes: list[tuple[str, str]] = []
        if isinstance(options.names, str):
            self._write_by_transformers(place)
        else:
            file_names, notes = self._choose_file_names(names, options.names)
            tensors = [self._reader.tensors[name] for name in file_names]
            form = FileForm(names=file_names, dtype=options.dtype)
            safetensors_writer.write_folder(
                place, tensors, form, self._reader, self._most_bytes, on_file
            )
            dtype = options.dtype or _most_frequent_dtype(tensors)
            config |= {"dtype": dtype} if dtype else {}
        _copy_texts(options.files, place)
        if not os.path.exists(os.path.join(place, CONFIG)):
            _write_config(place, config)
        return notes

    def _choose_file_names(
        self, names: Sequence[str], mapping: Names | None
    ) -> tuple[dict[str, str], list[tuple[str, str]]]:
        """Return the name in the files of each tensor, by its stored name, and the names that are
        left out.
        """
        new_names_by_name = {name: name.removeprefix(self._strip) for name in names}
        if mapping is not None:
            mapped_names = new_names(new_names_by_name.values(), mapping, self._reader.ref.step)
            new_names_by_name = {
                name: mapped_names[item]
                for name, item in new_names_by_name.items()
                if item in mapped_names
            }
        advice = "choose another --strip" if mapping is None else "map it to another name"
        safetensors_writer.check_names(new_names_by_name, self._reader.tensors, advice)
        notes = [
            (name, "the mapping leaves it out") for name in names if name not in new_names_by_name
        ]
        file_names: dict[str, str] = {}
        for name in sorted(
            new_names_by_name,
            key=lambda name: (new_names_by_name[name].endswith(_TIED_NAMES), name),
        ):
            stored_name = self._reader.tensors[name].name
            if stored_name in file_names:
                notes.append((name, f"is tied to {file_names[stored_name]!r}"))
            else:
                file_names[stored_name] = new_names_by_name[name]
        return file_names, notes

    def _write_by_transformers(self, place: str) -> None:
        """Let transformers make its model of the weights, and save it to ``place``."""
        try:
            hf_model = import_module("ckpt.exchange.exports.hf_model")
        except ImportError as error:
            raise MissingExtra("--names transformers", "transformers", "hf") from error
        weights = load_part(self._reader, self._strip.rstrip("/") or None)
        if (dtype := self._options.dtype) is not None:
            weights = {
                name: safetensors_writer.cast(value, dtype, name)
                if is_float(str(value.dtype).removeprefix("torch."))
                else value
                for name, value in weights.items()
            }
        hf_model.save(weights, self._options.files, place, self._most_bytes)


def _copy_texts(files: str, place: str) -> None:
    """Copy the files of a tokenizer, and all other text files but the configuration. A file that is
    there already stays.
    """
    for name in sorted(os.listdir(files)):
        is_text = (
            name.endswith(_TEXT_SUFFIXES) and not name.endswith(_INDEX_SUFFIX) and name != CONFIG
        )
        if is_text and not os.path.exists(target := os.path.join(place, name)):
            with open(os.path.join(files, name), "rb") as file:
                write_durably(target, file.read())


def read_config(folder: str) -> dict[str, Any]:
    """Return the ``config.json`` of a folder.

    Raises:
        ConfigError: The folder has none, or it is damaged.
    """
    path = os.path.join(folder, CONFIG)
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}): name the folder with the configuration of the model"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not the configuration of a model")
    return config


def _write_config(place: str, config: Mapping[str, Any]) -> None:
    if "torch_dtype" in config and "dtype" in config:  # The name that transformers had before 5
        config = {**config, "torch_dtype": config["dtype"]}
    text = json.dumps(config, indent=2, ensure_ascii=False)
    write_durably(os.path.join(place, CONFIG), text.encode())


def _most_frequent_dtype(tensors: Sequence[Tensor]) -> str | None:
    """Return the dtype of most floating-point numbers; None if it is not one of ``_DTYPES``."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    dtype = max(sizes, key=sizes.__getitem__)
    return dtype if dtype in _DTYPES else None

"""Recognize the folders of training libraries, and read each file under the name of its object.

``Trainer`` of transformers writes ``checkpoint-N`` and ``accelerator.save_state()`` writes a folder
with a file for each object. The names here are those that the integrations of ckpt give to these
objects: ``model``, ``optimizer``, ``scheduler``, ``scaler``, ``rng``; the second object of a kind
is ``model_1``. A checkpoint of Lightning is one file, whose parts get the same names. The argument
``read`` is a function that returns the state in one file, or in a folder of one state.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ckpt.errors import ConfigError, IntegrityError
from ckpt.exchange.inert import inert_torch
from ckpt.exchange.inert.inert_pickle import holds_inert
from ckpt.exchange.inert.input_limits import open_file

State = dict[str, Any]

LIGHTNING_KEY: Final = "pytorch-lightning_version"
_TRAINER_FILE: Final = "trainer_state.json"
_ACCELERATE_RNG: Final = re.compile(r"random_states_([0-9]{1,9})\.pkl")
_TRAINER_RNG: Final = re.compile(r"rng_state(?:_([0-9]{1,9}))?\.pth")
_CHECKPOINT_NAME: Final = re.compile(r"checkpoint_([0-9]{1,9})")
_ACCELERATE_FILES: Final = (
    ("model", re.compile(r"(?:model|pytorch_model)(?:_([0-9]{1,4}))?\.(?:safetensors|bin)")),
    ("model", re.compile(r"pytorch_model_fsdp(?:_([0-9]{1,4}))?(?:\.bin)?")),
    ("optimizer", re.compile(r"optimizer(?:_([0-9]{1,4}))?(?:\.bin)?")),
    ("scheduler", re.compile(r"scheduler(?:_([0-9]{1,4}))?\.bin")),
    ("loader", re.compile(r"dl_state_dict(?:_([0-9]{1,4}))?\.bin")),
    ("registered", re.compile(r"custom_checkpoint_([0-9]{1,4})\.pkl")),
    ("scaler", re.compile(r"scaler()\.pt")),
)
"""The entry of each kind of file. The group is the number of the object."""
_LIGHTNING_LISTS: Final = (("optimizer_states", "optimizer"), ("lr_schedulers", "scheduler"))
_RNG_KEYS: Final = {
    "python": ("python", "random_state"),
    "numpy": ("numpy", "numpy_random_seed"),
    "torch": ("cpu", "torch_manual_seed"),
    "cuda": ("cuda", "torch_cuda_manual_seed"),
    "xpu": ("xpu", "torch_xpu_manual_seed"),
    "npu": ("npu", "torch_npu_manual_seed"),
}
"""The names of the random generators in ``RngState``, then in files of transformers and accelerate.
"""


class Read(Protocol):
    """A function that returns the state in a file or folder with one state."""

    def __call__(self, path: str, /) -> State: ...


@dataclass(slots=True)
class LibraryFolder:
    """The state of a folder of a library.

    Attributes:
        library: The name of the library that has written the folder.
        state: The state.
        files: The files and folders that the state is from.
        notes: Notes for the user.
    """

    library: str
    state: State = field(default_factory=State)
    files: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])


def read_folder(source: str, read: Read) -> LibraryFolder | None:
    """Return the state of the folder ``source``, or None if no library is known that writes such
    folders.

    Args:
        source: The path of the folder.
        read: Reads a part of the folder that holds one state: a file, a folder of
            ``torch.distributed.checkpoint``, or a folder with an index of shards.

    Raises:
        ConfigError: The folder has no weights of a known kind.
        CkptError: As ``read`` and ``inert_torch.read_file`` raise it.
    """
    names = sorted(os.listdir(source)) if os.path.isdir(source) else []
    match library_of(names):
        case "transformers":
            return _read_trainer(source, names, read)
        case "accelerate":
            return _read_accelerate(source, names, read)
        case _:
            return None


def library_of(names: Collection[str]) -> str:
    """Return the name of the library that writes folders with these names in them; empty if none is
    known.
    """
    if _TRAINER_FILE in names and any(map(_is_weights, names)):
        return "transformers"
    return "accelerate" if any(map(_ACCELERATE_RNG.fullmatch, names)) else ""


# -- transformers ----------------------------------------------------------------------------------


def _is_weights(name: str) -> bool:
    return name.startswith(("model", "pytorch_model", "adapter_model")) and name.endswith(
        (".safetensors", ".bin", ".index.json")
    )


def _read_trainer(source: str, names: Sequence[str], read: Read) -> LibraryFolder:
    """Return the state of a folder that ``Trainer`` has written."""
    folder = LibraryFolder("transformers")
    weights = [name for name in names if _is_weights(name)]
    if any(name.endswith(".index.json") for name in weights):
        _put(folder, "model", read(source), weights)
    elif len(weights) == 1:
        _put(folder, "model", read(os.path.join(source, weights[0])), weights)
    else:
        raise ConfigError(
            f"{source} has {' and '.join(weights)}, and the model is in one of them: import a copy "
            "of the folder without the other one"
        )
    for name in ("optimizer", "scheduler", "scaler"):
        if (part := f"{name}.pt") in names:
            _put(folder, name, read(os.path.join(source, part)), [part])
    name_by_rank = {
        int(match[1] or 0): name for name in names if (match := _TRAINER_RNG.fullmatch(name))
    }
    _put_generators(
        folder, {rank: _read_rank_states(source, name) for rank, name in name_by_rank.items()}
    )
    folder.files += name_by_rank.values()
    with open_file(os.path.join(source, _TRAINER_FILE), is_part=False) as file:
        try:
            _put(folder, "trainer", file.read().decode(), [_TRAINER_FILE])
        except UnicodeDecodeError as error:
            raise IntegrityError(f"{_TRAINER_FILE} is not JSON: {error}") from None
    return folder


# -- accelerate ------------------------------------------------------------------------------------


def _read_accelerate(source: str, names: Sequence[str], read: Read) -> LibraryFolder:
    """Return the state of a folder that ``accelerator.save_state()`` has written."""
    folder = LibraryFolder("accelerate")
    files_by_object: dict[tuple[str, int], list[str]] = {}
    for name in names:
        for kind, pattern in _ACCELERATE_FILES:
            is_part = _is_readable(os.path.join(source, name))
            if is_part and (match := pattern.fullmatch(name)):
                files_by_object.setdefault((kind, int(match[1] or 0)), []).append(name)
    if not any(kind == "model" for kind, _ in files_by_object):
        raise ConfigError(
            f"{source} is a folder of accelerator.save_state() without a model that can be read: "
            "DeepSpeed writes zero_to_fp32.py into its folder, which makes a file of the weights, "
            "and Megatron-LM has checkpoints of its own"
        )
    for (kind, number), files in files_by_object.items():
        if len(files) > 1:
            raise ConfigError(
                f"{source}: both {' and '.join(files)} hold number {number} of {kind!r}: import a "
                "copy of the folder without one of them"
            )
        entry = f"{kind}_{number}" if number else kind
        value: Any = read(os.path.join(source, files[0]))
        if kind in value and len(value) == 1:  # In DCP, the state is below its kind
            value = value[kind]
        _put(folder, entry, {"position": value} if kind == "loader" else value, files)
    name_by_rank = {
        int(match[1]): name for name in names if (match := _ACCELERATE_RNG.fullmatch(name))
    }
    states = {rank: _read_rank_states(source, name) for rank, name in name_by_rank.items()}
    _put_generators(folder, states)
    folder.files += name_by_rank.values()
    match = _CHECKPOINT_NAME.fullmatch(os.path.basename(os.path.abspath(source)))
    steps = [state.get("step") for state in states.values()]
    counters = {"step": steps[0] if steps else 0, "iteration": int(match[1]) + 1 if match else 0}
    folder.state["accelerate"] = counters
    return folder


def _is_readable(path: str) -> bool:
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, ".metadata"))


# -- Lightning -------------------------------------------------------------------------------------


def is_lightning(state: Any) -> bool:
    """Return True if ``state`` is the content of a checkpoint file of Lightning."""
    return isinstance(state, Mapping) and LIGHTNING_KEY in state and "state_dict" in state


def rename_objects_of_lightning(state: Mapping[str, Any]) -> tuple[State, list[str]]:
    """Return the content of a checkpoint of Lightning under the names of its objects, with notes
    for the user. All other parts keep their names.
    """
    objects: State = {}
    notes: list[str] = []
    for key, value in state.items():
        kind = dict(_LIGHTNING_LISTS).get(key)
        if kind is None or not isinstance(value, list):
            objects["model" if key == "state_dict" else key] = value
            continue
        names = [f"{kind}_{number}" if number else kind for number in range(len(value))]
        objects |= dict(zip(names, value, strict=True))
        if names:
            notes.append(f"{key!r} is {', '.join(map(repr, names))} now")
    return objects, notes


def read_lightning(path: str) -> tuple[State, list[str]] | None:
    """Return the content of a checkpoint file of Lightning without the values that are objects of
    other classes, and notes that name these; None if the file is no such checkpoint.

    Lightning stores the arguments of the module and the states of callbacks, which may be objects.
    """
    content = inert_torch.read_file(path)
    if not is_lightning(content):
        return None
    plain = {key: value for key, value in content.items() if not holds_inert(value)}
    notes = [
        f"{key!r} is not taken, since it has objects that only pickle could load"
        for key in content
        if key not in plain
    ]
    return (plain, notes) if "state_dict" in plain else None


# -- parts -----------------------------------------------------------------------------------------


def _put(folder: LibraryFolder, name: str, value: Any, files: Iterable[str]) -> None:
    folder.state[name] = value
    folder.files += files


def _read_rank_states(source: str, name: str) -> Mapping[str, Any]:
    """Return the states of the random generators of one rank, from the file ``name``."""
    value = inert_torch.read_file(os.path.join(source, name))
    if not isinstance(value, dict):
        raise IntegrityError(f"{name} holds no states of random generators")
    return value


def _put_generators(folder: LibraryFolder, states: Mapping[int, Mapping[str, Any]]) -> None:
    """Put the states of the random generators of all ranks into the state as ``rng``, in the form
    of ``RngState``, if the folder has those of every rank.
    """
    if not states:
        return
    generators_by_rank = [_generator_states(states[rank]) for rank in sorted(states)]
    if sorted(states) == list(range(len(states))) and all(generators_by_rank):
        folder.state["rng"] = generators_by_rank
    else:
        folder.notes.append(
            f"the random generators of rank {', '.join(map(str, sorted(states)))} are not taken, "
            "since those of another rank are missing or of another kind"
        )


def _generator_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the generators of one rank; empty if one is missing or unknown."""
    generators = {
        name: value
        for name, keys in _RNG_KEYS.items()
        if (value := next((state[key] for key in keys if key in state), None)) is not None
    }
    is_whole = generators.keys() >= {"python", "numpy", "torch"} and not holds_inert(generators)
    return generators if is_whole else {}

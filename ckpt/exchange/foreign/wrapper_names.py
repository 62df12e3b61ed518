"""Remove from names the parts that wrappers of modules insert.

``torch.compile``, FSDP1 and activation checkpointing insert a part of their own anywhere in a name:
``layers.0._orig_mod.weight``. No module has a child of such a name by itself, so these parts are
always removed. DDP puts ``module.`` before all names, and so does a module whose only child is
called ``module``. A restore decides between the two (see ``state.match.selection``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpt.state.match.selection import PREFIX
from ckpt.state.walk.modules import WRAPPERS


def unwrap(names: Iterable[str]) -> dict[str, str]:
    """Return the name without inserted parts for each of the entries of a module, by the name in
    its state dict. If all names begin with ``module.``, remove this prefix too.

    The names do not change if two of them would be the same without these parts.
    """
    short_names = {name: _without_parts(name) for name in names}
    if short_names and all(short.startswith(PREFIX) for short in short_names.values()):
        short_names = {name: short.removeprefix(PREFIX) for name, short in short_names.items()}
    return (
        short_names
        if len(set(short_names.values())) == len(short_names)
        else {name: name for name in short_names}
    )


def removed_parts(names: Mapping[str, str]) -> list[str]:
    """Return what ``unwrap`` has removed from ``names``, which is its result, for a note."""
    segments = {part for name, short in names.items() if name != short for part in name.split(".")}
    parts = [part for part in WRAPPERS if part in segments]
    return [*([PREFIX] if has_lost_prefix(names) else []), *(f"{part}." for part in parts)]


def has_lost_prefix(names: Mapping[str, str]) -> bool:
    """Return True if ``unwrap`` has removed ``module.`` from ``names``, which is its result."""
    return bool(names) and all(
        _without_parts(name) == f"{PREFIX}{short}" for name, short in names.items()
    )


def parameter_name(name: str, names: Iterable[str]) -> str:
    """Return the name of a parameter of an optimizer as the modules have it, which have the names
    ``names``.
    """
    short = _without_parts(name)
    return next(
        (candidate for candidate in (short, short.removeprefix(PREFIX)) if candidate in names), name
    )


def _without_parts(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)

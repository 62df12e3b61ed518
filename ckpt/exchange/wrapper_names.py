"""Remove from names the parts that wrappers of modules insert.

``torch.compile``, FSDP1 and activation checkpointing insert a part of their own anywhere in a name:
``layers.0._orig_mod.weight``. No module has a child of such a name by itself, so these parts are
always removed. DDP puts ``module.`` before all names, and so does a module whose only child is
called ``module``. A restore decides between the two (see ``adapters.match.wrapper_prefix``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpt.adapters.match.wrapper_prefix import PREFIX
from ckpt.adapters.walk.modules import WRAPPERS


def unwrapped(names: Iterable[str]) -> dict[str, str]:
    """Return the name without inserted parts for each of the entries of a module, by the name in
    its state dict. If all names begin with ``module.``, remove this prefix too.

    The names do not change if two of them would be the same without these parts.
    """
    found = {name: _without_parts(name) for name in names}
    if found and all(short.startswith(PREFIX) for short in found.values()):
        found = {name: short.removeprefix(PREFIX) for name, short in found.items()}
    return found if len(set(found.values())) == len(found) else {name: name for name in found}


def removed(names: Mapping[str, str]) -> list[str]:
    """Return what ``unwrapped`` has removed from ``names``, which is its result, for a note."""
    lost = {part for name, short in names.items() if name != short for part in name.split(".")}
    parts = [part for part in WRAPPERS if part in lost]
    return [*([PREFIX] if has_lost_prefix(names) else []), *(f"{part}." for part in parts)]


def has_lost_prefix(names: Mapping[str, str]) -> bool:
    """Return True if ``unwrapped`` has removed ``module.`` from ``names``, which is its result."""
    return bool(names) and all(
        _without_parts(name) == f"{PREFIX}{short}" for name, short in names.items()
    )


def parameter_name(name: str, known: Iterable[str]) -> str:
    """Return the name of a parameter of an optimizer as the modules have it, which have the names
    ``known``.
    """
    short = _without_parts(name)
    return next((each for each in (short, short.removeprefix(PREFIX)) if each in known), name)


def _without_parts(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)

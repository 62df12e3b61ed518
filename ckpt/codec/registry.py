"""The table of codecs: how the bytes of a chunk become fewer bytes, and back.

A static table has our own codecs. Entry points of the group ``ckpt.codecs`` add those of other
distributions; such an entry point gives a `Codec`. A codec is imported on first use.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final

from ckpt.checks import shown
from ckpt.errors import ConfigError

BUILT_IN: Final[Mapping[str, str]] = {"zstd": "ckpt.codec.byte_planes:CODEC"}
NO_CODEC: Final = "none"
_GROUP: Final = "ckpt.codecs"
_SETTING: Final = re.compile(r"([a-z0-9][a-z0-9_-]*)(?::([0-9]{1,2}))?")

Encode = Callable[[memoryview, int], list[memoryview]]
"""Takes a chunk, and the bytes of one of its numbers (1 if it has no floating point numbers).

Returns pieces to be put one after another; shorter than the chunk in all, or else the chunk itself.
The pieces are valid until this thread encodes the next chunk. Several threads may call it at the
same time.
"""

Decode = Callable[[memoryview, memoryview], None]
"""Takes an encoded chunk, and fills memory of the length of the chunk.

Several threads may call it at the same time.

Raises ``ValueError`` if that is no encoding of a chunk of this length. The caller compares the
checksum.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A way to encode chunks.

    Attributes:
        encoder: Makes the function that encodes chunks of one tier, with a level or without (None).
        decode: Decodes a chunk of any level.
        levels: The levels that a setting may name.
    """

    encoder: Callable[[int | None], Encode]
    decode: Decode
    levels: range = range(0)


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes the chunks of a tier's files. A manifest keeps ``codec``, the name."""

    codec: str
    encode: Encode


def is_known(name: str) -> bool:
    """Return True if the table has a codec of this name. It is not imported."""
    return name in BUILT_IN or name in _foreign()


@cache
def _foreign() -> frozenset[str]:
    """Return the names of the codecs of other distributions; a look takes milliseconds."""
    return frozenset(entry.name for entry in entry_points(group=_GROUP))


@cache
def codec_named(name: str) -> Codec:
    """Return the codec of a name that is known.

    Raises:
        ConfigError: The codec of another distribution cannot be loaded.
    """
    if target := BUILT_IN.get(name):
        found: Any = pkgutil.resolve_name(target)
        assert isinstance(found, Codec)
        return found
    (entry, *_) = entry_points(group=_GROUP, name=name)
    try:
        found = entry.load()
    except Exception as error:
        raise ConfigError(
            f"the codec {name!r} of {entry.value!r} cannot be loaded: {error}"
        ) from error
    if not isinstance(found, Codec):
        raise ConfigError(
            f"the codec {name!r} of {entry.value!r} is not a ckpt.codec.registry.Codec, but "
            f"{shown(found)}"
        )
    return found


def parse_codec(setting: object) -> tuple[str, int | None]:
    """Return the name of a codec, and its level if the setting gives one.

    Raises:
        ConfigError: The codec is unknown, or has no such level.
    """
    match = _SETTING.fullmatch(setting) if isinstance(setting, str) else None
    name, level = (match[1], int(match[2]) if match[2] else None) if match else ("", None)
    if name == NO_CODEC and level is None:
        return name, level
    asked = [name] if is_known(name) else [*BUILT_IN]
    levels = {each: codec_named(each).levels for each in asked}
    if name in levels and (level is None or level in levels[name]):
        return name, level
    names = [NO_CODEC, *BUILT_IN, *sorted(_foreign())]
    leveled = "".join(
        f", or '{each}:LEVEL' with a level from {bounds[0]} to {bounds[-1]}"
        for each, bounds in levels.items()
        if bounds
    )
    raise ConfigError(f"codec={shown(setting)}: choose {', '.join(map(repr, names))}{leveled}")


def encoder_of(setting: str) -> Encoder | None:
    """Return the encoder for the ``codec`` of a tier; None if the tier has no codec.

    Raises:
        ConfigError: As `parse_codec`.
    """
    name, level = parse_codec(setting)
    return None if name == NO_CODEC else Encoder(name, codec_named(name).encoder(level))

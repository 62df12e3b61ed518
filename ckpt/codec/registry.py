"""The table of codecs, and the functions that find a codec by its name.

``BUILT_IN`` has ckpt's own codecs. Entry points of the group ``ckpt.codecs`` add the codecs of
other distributions. The name of such an entry point is the name of the codec, and its object is a
`Codec`. A codec is imported when it is first used.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from ckpt.checks import text_of
from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

BUILT_IN: Final[Mapping[str, str]] = {"zstd": "ckpt.codec.zstd_byte_planes:CODEC"}
NO_CODEC: Final = "none"
_ENTRY_POINT_GROUP: Final = "ckpt.codecs"
_SETTING: Final = re.compile(r"([a-z0-9][a-z0-9_-]*)(?::([0-9]{1,2}))?")

Encode = Callable[[memoryview, int], list[memoryview]]
"""A function that encodes a chunk.

It takes the chunk, and the size in bytes of each of its numbers (1 if they are not floating point
numbers). It returns pieces that form the encoded chunk when they are put one after another.
Together the pieces are shorter than the chunk. If the chunk cannot be made shorter, the only piece
is the chunk itself. The pieces are valid until the same thread encodes the next chunk. Several
threads may call the function at the same time.
"""

Decode = Callable[[memoryview, memoryview], None]
"""A function that decodes a chunk.

It takes the encoded chunk, and the memory that it fills, which has the length of the raw chunk. It
raises ``ValueError`` if the bytes are no encoding of a chunk of this length. The caller checks the
result with the checksum of the chunk. Several threads may call the function at the same time.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A way to encode chunks.

    Attributes:
        encoder: Takes a level, or None for the default, and returns the function that encodes the
            chunks of one tier.
        decode: Decodes a chunk that was encoded at any level.
        levels: The levels that the setting of a tier may name; empty if the codec has no levels.
    """

    encoder: Callable[[int | None], Encode]
    decode: Decode
    levels: range = range(0)


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes the chunks of a tier's files. ``codec`` is the name of the codec, which the manifest
    records.
    """

    codec: str
    encode: Encode


def is_known(name: str) -> bool:
    """Return True if there is a codec called ``name``. The codec is not imported."""
    return name in BUILT_IN or name in _entry_point_names()


@cache
def _entry_point_names() -> frozenset[str]:
    """Return the names of the codecs of other distributions. They are cached, since reading the
    entry points takes milliseconds.
    """
    return frozenset(entry.name for entry in _entry_points())


def _entry_points() -> EntryPoints:
    """Return the entry points of the group. The import takes longer than all else that an agent
    imports from the standard library, so most processes do without it.
    """
    from importlib.metadata import entry_points

    return entry_points(group=_ENTRY_POINT_GROUP)


@cache
def codec_named(name: str) -> Codec:
    """Return the codec called ``name``, which must be a name that ``is_known`` accepts.

    Raises:
        ConfigError: The codec of another distribution cannot be loaded, or is no ``Codec``.
    """
    if target := BUILT_IN.get(name):
        codec: Any = pkgutil.resolve_name(target)
        assert isinstance(codec, Codec)
        return codec
    (entry, *_) = _entry_points().select(name=name)
    try:
        codec = entry.load()
    except Exception as error:
        raise ConfigError(
            f"the codec {name!r} of {entry.value!r} cannot be loaded: {error}"
        ) from error
    if not isinstance(codec, Codec):
        raise ConfigError(
            f"the codec {name!r} of {entry.value!r} is not a ckpt.codec.registry.Codec, but "
            f"{text_of(codec)}"
        )
    return codec


def parse_codec(setting: object) -> tuple[str, int | None]:
    """Return the name of the codec in a setting such as ``"zstd"`` or ``"zstd:3"``, and the level,
    or None if the setting names no level. The name is ``"none"`` if the setting asks for no codec.

    Raises:
        ConfigError: The setting is not valid, the codec is unknown or has no such level, or the
            codec cannot be loaded.
    """
    match = _SETTING.fullmatch(setting) if isinstance(setting, str) else None
    name, level = (match[1], int(match[2]) if match[2] else None) if match else ("", None)
    if name == NO_CODEC and level is None:
        return name, level
    codec_names = [name] if is_known(name) else [*BUILT_IN]
    levels = {codec_name: codec_named(codec_name).levels for codec_name in codec_names}
    if name in levels and (level is None or level in levels[name]):
        return name, level
    names = [NO_CODEC, *BUILT_IN, *sorted(_entry_point_names())]
    level_choices = "".join(
        f", or '{codec_name}:LEVEL' with a level from {bounds[0]} to {bounds[-1]}"
        for codec_name, bounds in levels.items()
        if bounds
    )
    raise ConfigError(
        f"codec={text_of(setting)}: choose {', '.join(map(repr, names))}{level_choices}"
    )


def encoder_of(setting: str) -> Encoder | None:
    """Return the encoder for the ``codec`` setting of a tier, or None if the tier has no codec.

    Raises:
        ConfigError: `parse_codec` refuses the setting.
    """
    name, level = parse_codec(setting)
    return None if name == NO_CODEC else Encoder(name, codec_named(name).encoder(level))

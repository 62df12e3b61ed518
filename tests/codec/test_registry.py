from __future__ import annotations

import pytest

from ckpt.codec.registry import BUILT_IN, codec_named, encoder_of, parse_codec
from ckpt.errors import ConfigError


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_codec_of_the_table_gives_back_what_it_encodes(name: str) -> None:
    raw = bytes(range(64)) * 4096
    encoder = encoder_of(name)
    assert encoder is not None
    assert encoder.codec == name
    data = b"".join(encoder.encode(memoryview(raw), 1))
    assert len(data) < len(raw)
    out = bytearray(len(raw))
    codec_named(name).decode(memoryview(data), memoryview(out))
    assert out == raw


def test_a_setting_is_a_name_or_a_name_and_a_level() -> None:
    assert parse_codec("none") == ("none", None)
    assert parse_codec("zstd") == ("zstd", None)
    assert parse_codec("zstd:12") == ("zstd", 12)
    assert encoder_of("none") is None


@pytest.mark.parametrize("setting", ["zstd:13", "lz4", "", None])
def test_a_wrong_setting_gets_the_choices(setting: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_codec(setting)
    ending = "choose 'none', 'zstd', or 'zstd:LEVEL' with a level from 1 to 12"
    assert str(caught.value).endswith(ending)

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckpt.errors import CkptError, FormatTooNew, FormatTooOld, FormatUnsupported, ManifestCorrupt
from ckpt.model.checksum import checksum
from ckpt.model.manifest import FORMAT, Manifest, Packed
from ckpt.model.record_encoding import MAX_RECORD_BYTES, pack, unpack
from tests.kit.damage import sealed
from tests.kit.examples import examples
from tests.kit.marks import torture
from tests.model.records import large_record, records

MANIFEST, FRAGMENT = records()
BOTH = pytest.mark.parametrize(
    ("record", "kind"), [(MANIFEST, Manifest), (FRAGMENT, Packed)], ids=["manifest", "fragment"]
)


@pytest.fixture(scope="module")
def large() -> Manifest:
    return large_record()


IN_THREADS = """
import sys, threading
from ckpt.model.record_encoding import unpack
from ckpt.model.manifest import Manifest
data, begun, found = open(sys.argv[1], "rb").read(), threading.Barrier(8), []
def read():
    begun.wait()
    found.append(unpack(data, Manifest, key="x"))
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == 8
"""


@pytest.mark.parametrize("processes", [3, *torture(20)])
def test_threads_may_read_the_first_record_of_a_process_at_once(
    tmp_path: Path, processes: int
) -> None:
    """msgspec 0.22 ends the process if they make a decoder at once: in three of ten tries here."""
    (tmp_path / "manifest.json").write_bytes(pack(MANIFEST))
    command = [sys.executable, "-c", IN_THREADS, str(tmp_path / "manifest.json")]
    tries = [subprocess.Popen(command) for _ in range(processes)]
    assert [each.wait(120) for each in tries] == [0] * processes


def refused(data: bytes, kind: type) -> ManifestCorrupt | FormatUnsupported:
    with pytest.raises((ManifestCorrupt, FormatUnsupported)) as caught:
        unpack(data, kind, key="the/key")
    error: Any = caught.value
    assert error.key == "the/key"
    return error


@BOTH
def test_a_record_comes_back(record, kind):
    packed = pack(record)
    assert unpack(packed, kind, key="k") == record
    assert pack(unpack(packed, kind, key="k")) == packed


def test_a_large_record_is_compressed_and_comes_back(large):
    packed = pack(large)
    assert packed.startswith(b"ckpt-zstd ")
    assert len(packed) < 0.7 * len(large.metadata)
    assert unpack(packed, Manifest, key="k") == large


def test_the_order_of_dicts_does_not_change_the_bytes():
    one = msgspec.structs.replace(MANIFEST, tied={"a": "weight", "b": "bias"})
    two = msgspec.structs.replace(MANIFEST, tied={"b": "bias", "a": "weight"})
    assert pack(one) == pack(two)


@BOTH
def test_every_flipped_bit_is_found(record, kind):
    data = bytearray(pack(record))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        refused(bytes(data), kind)
        data[bit // 8] ^= 1 << bit % 8
    assert unpack(bytes(data), kind, key="k") == record


@BOTH
def test_every_truncation_is_found(record, kind):
    data = pack(record)
    for size in range(len(data)):
        refused(data[:size], kind)


@BOTH
@pytest.mark.parametrize("tail", [b" ", b"\n", b"\x00", b"}", b"{}"])
def test_appended_bytes_are_found(record, kind, tail):
    refused(pack(record) + tail, kind)
    refused(tail + pack(record), kind)


def test_the_other_kind_of_record_is_refused():
    refused(pack(MANIFEST), Packed)
    refused(pack(FRAGMENT), Manifest)


def test_a_flipped_bit_of_a_compressed_record_is_found(large):
    data = bytearray(pack(large))
    rng = random.Random(1)
    # all of the head, where the frame says how it is to be read, and a sample of the rest
    bits = [
        *range(8 * 80),
        *(rng.randrange(8 * len(data)) for _ in range(200)),
        *range(8 * len(data) - 32, 8 * len(data)),
    ]
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
        refused(bytes(data), Manifest)
        data[bit // 8] ^= 1 << bit % 8


def test_a_compressed_record_cut_or_lengthened_is_refused(large):
    data = pack(large)
    for size in [
        *range(4, 40),
        *range(40, len(data), len(data) // 50),
        len(data) - 4,
        len(data) - 1,
    ]:
        refused(data[:size], Manifest)
    for tail in (b"\x00", b" ", data[:4], data, b"\x50\x2a\x4d\x18\x00\x00\x00\x00"):
        refused(data + tail, Manifest)


# -- versions --------------------------------------------------------------------------------------


def test_a_later_format_is_refused_with_the_way_out():
    body = msgspec.json.encode({"format": FORMAT + 1, "something": "new"})
    error = refused(sealed(body), Manifest)
    assert isinstance(error, FormatTooNew)
    assert (error.found, error.supported) == (FORMAT + 1, FORMAT)
    assert "upgrade" in str(error)


@pytest.mark.parametrize("version", range(-1, FORMAT))
def test_an_earlier_format_is_refused_with_the_way_out(version):
    error = refused(sealed({"format": version, "something": "old"}), Manifest)
    assert isinstance(error, FormatTooOld)
    assert (error.found, error.supported) == (version, FORMAT)
    assert "the ckpt that wrote it" in str(error)


def test_a_damaged_record_is_not_taken_for_a_later_one():
    damaged = sealed({"format": FORMAT}).replace(b'"format":4', b'"format":5')
    assert b'"format":5' in damaged
    assert isinstance(refused(damaged, Manifest), ManifestCorrupt)


@pytest.mark.parametrize(
    "body",
    [b"{}", b"[]", b"1", b"null", b'{"format":"4"}', b'{"format":4}', b'{"format":4.5}', b""],
)
def test_a_body_that_is_no_record_is_refused(body):
    assert isinstance(refused(sealed(body), Manifest), ManifestCorrupt)


def test_a_field_we_do_not_know_is_refused():
    body = msgspec.json.decode(msgspec.json.encode(MANIFEST))
    assert "unknown field" in str(refused(sealed({**body, "extra": 1}), Manifest))


def test_white_space_that_json_forgives_is_refused():
    body = msgspec.json.encode(MANIFEST, order="deterministic")
    assert unpack(sealed(body), Manifest, key="k") == MANIFEST
    refused(b'{ "checksum":"' + checksum(body).encode() + b'","body":' + body + b"}", Manifest)


# -- claims ----------------------------------------------------------------------------------------


def frame(claimed: int) -> bytes:
    """Return the head of a single-segment zstd frame that claims ``claimed`` bytes, and an empty
    last block.
    """
    return (
        b"\x28\xb5\x2f\xfd" + bytes([0b11100000]) + claimed.to_bytes(8, "little") + b"\x01\x00\x00"
    )


def framed(frame: bytes) -> bytes:
    """Return a frame with the line that has its checksum.

    A writer with access to the store could make it.
    """
    return b"ckpt-zstd " + checksum(frame).encode() + b"\n" + frame


@pytest.mark.parametrize("claimed", [MAX_RECORD_BYTES + 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 3])
def test_a_claim_of_giant_size_is_refused_before_memory_is_taken(claimed):
    data = frame(claimed)
    assert zstandard.frame_content_size(data) == claimed
    tracemalloc.start()
    try:
        refused(framed(data), Manifest)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_does_not_tell_its_size_is_refused():
    data = zstandard.ZstdCompressor(write_content_size=False).compress(pack(MANIFEST))
    assert "-1 bytes" in str(refused(framed(data), Manifest))


def test_a_frame_that_lies_about_its_size_is_refused():
    packed = bytearray(zstandard.ZstdCompressor().compress(pack(MANIFEST)))
    claimed = zstandard.get_frame_parameters(bytes(packed)).content_size
    for place in range(5, 8):
        if packed[place : place + 2] == (claimed - 256).to_bytes(2, "little"):
            packed[place : place + 2] = (claimed - 256 + 1).to_bytes(2, "little")
            break
    assert zstandard.frame_content_size(bytes(packed)) == claimed + 1
    refused(framed(bytes(packed)), Manifest)


# -- any content -----------------------------------------------------------------------------------

jsons = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=examples(500))
@given(
    st.one_of(
        st.binary(),
        st.binary().map(framed),
        st.binary().map(zstandard.compress),
        st.binary().map(framed),
        st.binary().map(framed).map(zstandard.compress),
        jsons.map(msgspec.json.encode).map(sealed),
        jsons.map(lambda node: sealed({"format": FORMAT, "step": node})),
    )
)
@example(sealed(b"[" * 100_000 + b"]" * 100_000))
@example(b"[" * 100_000)
@example(b'{"checksum":"\\ud800","body":1}')
@example(sealed(b'{"format":' + b"9" * 5000 + b"}"))
@example(sealed(b'{"format":-1}'))
def test_any_bytes_are_a_record_or_one_of_our_errors(data):
    for kind in (Manifest, Packed):
        with pytest.raises(CkptError):
            unpack(data, kind, key="k")


@settings(max_examples=examples(500))
@given(st.data())
def test_a_sealed_record_with_any_field_replaced_is_a_record_or_one_of_our_errors(data):
    body = msgspec.json.decode(msgspec.json.encode(MANIFEST))
    body[data.draw(st.sampled_from(sorted(body)))] = data.draw(jsons)
    try:
        found = unpack(sealed(body), Manifest, key="k")
    except CkptError:
        return
    assert isinstance(found, Manifest)

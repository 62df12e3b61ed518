"""A message to the agent is whole or refused, and no secret is shown."""

from __future__ import annotations

import socket
import struct

import msgspec
import pytest

from ckpt import Tier
from ckpt.agent.messages import (
    MOST_BYTES,
    AskStatus,
    Job,
    Request,
    Stop,
    encode,
    fields_of,
    frames,
    receive,
)
from ckpt.coordination.owner import Owner
from ckpt.errors import AgentError
from ckpt.processes import Process

TIERS = (
    Tier("/a", keep_last=2, keep_best=("loss", "min", 3), capacity="1GB", codec="zstd"),
    Tier("s3://b/c", {"key": "AKID", "secret": "S3CRET"}, every=5, required=False),
)


def job() -> Job:
    return Job(
        owner=Owner.of_this_process("abc"),
        processes=(Process(1, 2),),
        tiers=tuple(fields_of(tier, tier.url) for tier in TIERS),
        ranks=1,
        backlog=4,
        environment={"AWS_SECRET_ACCESS_KEY": "S3CRET"},
    )


def test_a_job_arrives_as_it_was_and_does_not_show_its_secrets() -> None:
    arrived = msgspec.msgpack.decode(encode(job())[4:], type=Request)
    assert isinstance(arrived, Job)
    assert arrived.open_as() == TIERS
    assert "S3CRET" not in repr(arrived)
    assert "S3CRET" not in str(arrived)


def test_frames_may_arrive_in_any_pieces() -> None:
    whole = encode(Stop()) + encode(AskStatus()) + encode(job())
    for size in (1, 3, 7, len(whole)):
        buffer, found = bytearray(), []
        for start in range(0, len(whole), size):
            buffer += whole[start : start + size]
            found += list(frames(buffer))
        decoded = [msgspec.msgpack.decode(frame, type=Request) for frame in found]
        assert [type(one) for one in decoded] == [Stop, AskStatus, Job]
        assert buffer == b""


def test_a_frame_that_is_too_long_is_refused_before_it_is_read() -> None:
    announced = struct.pack(">I", MOST_BYTES + 1)
    with pytest.raises(AgentError, match="too long"):
        list(frames(bytearray(announced)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(announced)
        with pytest.raises(AgentError, match="too long"):
            receive(ours)


@pytest.mark.parametrize("value", [object(), 1 << 70, "\udcff", "x" * MOST_BYTES])
def test_options_that_cannot_travel_are_refused(value) -> None:
    odd = msgspec.structs.replace(job(), tiers=({"url": "s3://b", "options": {"x": value}},))
    with pytest.raises(AgentError, match=r"plain|too long"):
        encode(odd)

"""A message to the agent is whole or refused, and no secret is shown."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest

from ckpt import Tier
from ckpt.agent.messages import (
    MOST_BYTES,
    PROTOCOL,
    Answer,
    AskStatus,
    CopyFile,
    Job,
    Request,
    Stop,
    Stopped,
    Welcome,
    encode,
    fields_of,
    frames,
    receive,
)
from ckpt.errors import AgentError
from ckpt.processes import Process
from ckpt.root.owner import Owner

FIELDS = {
    8: {
        "Abort": "reason failures kind names ranks",
        "AgentStatus": "version pid started idle_seconds works jobs",
        "AskStatus": "",
        "AskWorker": "job",
        "CopyFile": "folder rank source target threads nice cpus",
        "Detach": "attempt",
        "Done": "",
        "FileCopied": "lengths",
        "FileFailed": "reason",
        "Forget": "attempt",
        "Job": "owner processes ranks tiers backlog environment scrub_mb_per_s before "
        "node_ranks roots marks",
        "JobStatus": "attempt state tiers processes since in_parts next_at step to done_bytes "
        "total_bytes copied error scrub",
        "Lent": "process",
        "Owner": "attempt host machine pid started program root ended unseen",
        "Process": "pid start_time",
        "Progress": "done_bytes",
        "Refused": "reason",
        "ScrubStatus": "step tier done_bytes total_bytes verified mended damaged error",
        "Stop": "at_once keep_memory",
        "Stopped": "given_up",
        "Tier": "url options every keep_last keep_every keep_best capacity required codec local "
        "buddies best_counts",
        "Welcome": "version pid",
    }
}
"""The fields of the messages by the number of the format. A change of the fields changes it too."""
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


def structs(kind: object) -> Iterator[msgspec.inspect.StructType]:
    if isinstance(kind, msgspec.inspect.StructType):
        yield kind
    children = kind if isinstance(kind, tuple | list) else ()
    if isinstance(kind, msgspec.Struct):
        children = [getattr(kind, name) for name in kind.__struct_fields__]
    for child in children:
        yield from structs(child)


def test_the_messages_have_the_fields_that_the_number_of_the_format_stands_for() -> None:
    kinds = msgspec.inspect.multi_type_info((Request, Answer, Welcome, Stopped, CopyFile))
    fields = {
        kind.cls.__name__: " ".join(field.encode_name for field in kind.fields)
        for kind in structs(kinds)
    }
    fields["Tier"] = " ".join(fields_of(TIERS[0], ""))
    assert fields == FIELDS[PROTOCOL]


def test_a_job_arrives_as_it_was_and_does_not_show_its_secrets() -> None:
    arrived = msgspec.msgpack.decode(encode(job())[4:], type=Request)
    assert isinstance(arrived, Job)
    assert arrived.tier_settings() == TIERS
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

"""Two users of one machine, for tests of what one can do to the other.

The tests need root, which may act as any user.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest

ATTACKER = 65534  # the user "nobody"
only_root = pytest.mark.skipif(
    os.getuid() != 0, reason="needs root: the test acts as two users, by os.setuid in a child"
)


def fresh_user() -> int:
    """Return a user id that no other test and no person has."""
    return 200_000 + os.getpid()


def act_as(user: int, work: Callable[[], Any]) -> Any:
    """Run ``work`` in a fork as ``user``, and return what it returns (JSON).

    Raise its error if it fails.
    """
    return begin_as(user, work)()


def begin_as(user: int, work: Callable[[], Any]) -> Callable[[], Any]:
    """Do as ``act_as``, but return at once a function that waits for the result."""
    ear, mouth = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ear)
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            reported = json.dumps(["returned", work()])
        except BaseException:
            reported = json.dumps(["raised", traceback.format_exc()])
        with os.fdopen(mouth, "w") as pipe:
            pipe.write(reported)
        os._exit(0)
    os.close(mouth)

    def finish() -> Any:
        with os.fdopen(ear) as pipe:
            kind, value = json.loads(pipe.read() or '["raised", "the child died"]')
        os.waitpid(child, 0)
        if kind == "raised":
            raise AssertionError(value)
        return value

    return finish

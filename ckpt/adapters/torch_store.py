"""The job's TCPStore as a coordinator: a connection and keys of its own, and no process group.

It works with any store that ``init_process_group`` was given (torchrun's, ``tcp://``, ``file://``),
and with one that `ckpt.adapters.joined` has made. The connection is cloned, so a wait in the
background never delays the trainer's own use of the store.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ckpt.adapters.torch_private import get_default_store
from ckpt.coordination.api import Coordinator
from ckpt.coordination.single import SingleCoordinator, new_attempt
from ckpt.errors import CommitError, ConfigError

T = TypeVar("T")

_LOOK_SECONDS: Final = 1.0
"""How long one wait lasts before ranks are looked at one by one. A failure is noticed after this
time at the latest.
"""
_REST: Final = 4
"""The pause after a look at the ranks is this many times as long as the look, since a look at
thousands of ranks takes seconds of the store's time.
"""
_BLOCK: Final = 256
"""The number of keys in a request. The server's time grows faster than linearly with it, and a
request for each key costs seven times as much (docs/scale.md).
"""
_FIRST_PAUSE: Final = 0.0005
_LONGEST_PAUSE: Final = 0.025
_GROWTH: Final = 1.25
"""Each pause between two looks at the store is this many times as long as the one before. So a wait
ends at most a quarter late.
"""
_LOOKS: Final = 512
"""The most looks per second by all ranks together that have waited for a while."""
_NOTHING: Final = "\0"
"""The value that ``compare_set`` returns for a key without a value. No message is equal to it."""
_START_SECONDS: Final = 300.0
_FAREWELL_SECONDS: Final = 5.0
"""How long rank 0 waits at the end for ranks that are slower."""
_GROUP_WAY: Final = (
    "call torch.distributed.init_process_group() before building the manager, or give it "
    'coordinator=ckpt.join(rank, world_size, "host:port")'
)
_MPI_WAY: Final = f"give the manager coordinator=ckpt.join_mpi(), or {_GROUP_WAY}"
_WORLDS: Final = {
    "WORLD_SIZE": _GROUP_WAY,
    "HOROVOD_SIZE": "give the manager coordinator=ckpt.join_horovod(hvd)",
    "OMPI_COMM_WORLD_SIZE": _MPI_WAY,
}
"""The variables of launchers that hold the number of ranks -> the ways to a coordinator."""
_serial = itertools.count()


class TorchStoreCoordinator:
    """A coordinator over the default process group's store.

    All ranks build one, in the same order. Any thread may use it.

    Args:
        group: The rank and the number of ranks in a group that has its own messages; all ranks of
            the default process group if it is left out.
        name: A name that only the ranks of this group use, and once. Coordinators with a name need
            not be built in the same order on all ranks.
        store: Another store than that of the default process group.
    """

    def __init__(
        self,
        group: tuple[int, int] | None = None,
        name: str = "",
        *,
        store: Store | None = None,
    ) -> None:
        self.rank, self.world_size = group or (dist.get_rank(), dist.get_world_size())
        # The store of torchrun's agent may outlive a restart of the workers, so the keys contain
        # the number of the restart, which torchrun gives in this variable.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # noqa: TID251
        self._prefix = f"ckpt/{restart}/{name or next(_serial)}"
        # On the rank that serves the store, this reference keeps the server alive.
        self._base = store
        self._store: Store = PrefixStore(self._prefix, _own_connection(store))
        self.set_once("attempt", new_attempt().encode())
        agreed = self.verdict("attempt", timeout=_START_SECONDS)
        if agreed is None:
            raise ConfigError("the job's store did not answer: is it still up?")
        self.attempt = agreed.decode()

    def post(self, subject: str, message: bytes) -> None:
        """Put this rank's message under a key of its own."""
        _asked(lambda: self._store.set(f"{subject}/{self.rank}", message.decode()))

    def collect(self, subject: str, ranks: set[int], *, timeout: float) -> dict[int, bytes]:
        """Return the messages of ``ranks`` that have arrived.

        One request waits for the message of the highest rank. When it is there, or after a while,
        all messages are read.
        """
        keys = {rank: f"{subject}/{rank}" for rank in sorted(ranks)}
        deadline, pause = time.monotonic() + timeout, _LOOK_SECONDS
        while keys:
            self._wait([keys[max(keys)]], min(pause, deadline - time.monotonic()))
            began = time.monotonic()
            messages = {rank: self._look(key) for rank, key in self._there(list(keys.items()))}
            if heard := {
                rank: message for rank, message in messages.items() if message is not None
            }:
                return heard
            if time.monotonic() >= deadline:
                break
            pause = max(_LOOK_SECONDS, _REST * (time.monotonic() - began))
        return {}

    def set_once(self, subject: str, verdict: bytes) -> bytes:
        """Set the value if there is none, and return the value that the store has. The store
        decides which rank comes first.
        """
        return _asked(lambda: self._store.compare_set(f"{subject}/verdict", "", verdict.decode()))

    def verdict(self, subject: str, *, timeout: float) -> bytes | None:
        """Return the verdict, or None after ``timeout`` seconds. With 0 it only looks."""
        key = f"{subject}/verdict"
        return self._look(key) if timeout <= 0 or self._wait([key], timeout) else None

    def forget(self, subject: str) -> None:
        """Remove this rank's message. Messages take a few hundred bytes for each rank, tier and
        save, which would add up in a month of training. Verdicts, one per save, stay.
        """
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._store.delete_key(f"{subject}/{self.rank}")

    def clone(self) -> TorchStoreCoordinator:
        """Return a coordinator with a connection of its own. The client of torch lets one call
        through at a time, and a wait is a call.
        """
        other = copy.copy(self)
        other._store = PrefixStore(self._prefix, _own_connection(self._base))
        return other

    def close(self) -> None:
        """Close the connection. The rank whose process may serve the store closes last.

        Other ranks may not have received the last verdict yet. If an exception ends the process, it
        does not wait for them.
        """
        with contextlib.suppress(CommitError):
            self.post("bye", b"-")
            missing, deadline = set(range(self.world_size)), time.monotonic() + _FAREWELL_SECONDS
            while (
                self.rank == 0
                and missing
                and sys.exception() is None
                and time.monotonic() < deadline
            ):
                missing -= self.collect("bye", missing, timeout=deadline - time.monotonic()).keys()

    def _look(self, key: str) -> bytes | None:
        """Return the value of a key now, or None.

        The store's ``get`` would wait for minutes for a message that was removed meanwhile.
        """
        found = _asked(lambda: self._store.compare_set(key, _NOTHING, _NOTHING))
        return None if found == _NOTHING.encode() else found

    def _there(self, keys: list[tuple[int, str]]) -> list[tuple[int, str]]:
        """Return the keys that have a value.

        Keys are looked up in blocks, and one by one only in a block that is not complete.
        """
        found: list[tuple[int, str]] = []
        for start in range(0, len(keys), _BLOCK):
            block = keys[start : start + _BLOCK]
            full = self._are_there([key for _, key in block])
            found += (
                block if full else [(rank, key) for rank, key in block if self._are_there([key])]
            )
        return found

    def _are_there(self, keys: list[str]) -> bool:
        return _asked(lambda: self._store.check(keys))

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Return True if all ``keys`` have a value within ``seconds``.

        It looks again at growing intervals. ``Store.wait`` prints two warnings at each timeout,
        and a thread that is inside of it while the interpreter exits kills the process.
        """
        deadline = time.monotonic() + seconds
        longest = max(_LONGEST_PAUSE, self.world_size / _LOOKS)
        pause = max(_FIRST_PAUSE, longest / 50)
        while not self._are_there(keys):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(_GROWTH * pause, longest)
        return True


def _own_connection(base: Store | None) -> Store:
    store: Any = base or get_default_store()
    try:
        return cast(Store, store.clone())
    except RuntimeError:
        # Stores such as HashStore live in this process and have no connection to clone.
        return cast(Store, store)


def _asked(call: Callable[[], T]) -> T:
    try:
        return call()
    except (dist.DistError, RuntimeError) as error:
        raise CommitError(f"the job's store is gone: {_brief(error)}") from None


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def find_coordinator() -> Coordinator:
    """Return the coordinator of this job.

    Raises:
        ConfigError: There are several ranks and no process group.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return TorchStoreCoordinator()
    if (variable := world_of_launcher()) is not None:
        raise ConfigError(f"{variable} says there are several ranks: {_WORLDS[variable]}")
    return SingleCoordinator()


def world_of_launcher() -> str | None:
    """Return the variable with which a launcher says that there are several ranks, if one does."""
    return next((name for name in _WORLDS if int(os.environ.get(name) or "1") > 1), None)  # noqa: TID251

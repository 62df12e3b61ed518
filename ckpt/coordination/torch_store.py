"""Coordinate the ranks of a job over its TCPStore.

The coordinator works with any store that ``init_process_group`` uses (that of torchrun, ``tcp://``
or ``file://``), and with the stores that ``join`` makes. It uses keys of its own, and makes no
process group. A *subject* is the name of an exchange: each rank may post one message on it, and one
*verdict* is set for all ranks. The coordinator clones the connection to the store, so a wait in the
background never delays calls of the trainer to the store.
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

from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.single import SingleCoordinator, new_attempt
from ckpt.errors import CommitError, ConfigError
from ckpt.torch_private import get_default_store

T = TypeVar("T")

_LOOK_SECONDS: Final = 1.0
"""The shortest pause of ``collect`` in seconds. In a pause, ``collect`` waits for the message of
the highest rank only. After it, ``collect`` reads the messages of all ranks, since another rank may
have failed.
"""
_PAUSE_RATIO: Final = 4
"""The least ratio of a pause of ``collect`` to the time of the reads before it. Reading the
messages of thousands of ranks takes seconds of the store's time, so long reads give long pauses.
"""
_BLOCK_KEYS: Final = 256
"""The number of keys in one request. The time of the server grows faster than linearly with this
number, and one request for each key costs seven times as much (docs/scale.md).
"""
_FIRST_PAUSE: Final = 0.0005
_LONGEST_PAUSE: Final = 0.025
_PAUSE_GROWTH: Final = 1.25
"""Each pause between two requests of a wait is this many times as long as the pause before it,
until the pauses have their full length. So a wait lasts at most a quarter longer than necessary.
"""
_MOST_LOOKS_PER_SECOND: Final = 512
"""The most requests per second that all ranks together send once their pauses have their full
length.
"""
_NO_VALUE: Final = "\0"
"""The value that ``compare_set`` returns for a key without a value. No message is equal to it."""
_START_SECONDS: Final = 300.0
_FAREWELL_SECONDS: Final = 5.0
"""The most seconds that rank 0 waits in ``close`` for the other ranks to close too."""
_GROUP_ADVICE: Final = (
    "call torch.distributed.init_process_group() before building the manager, or give it "
    'coordinator=ckpt.join(rank, world_size, "host:port")'
)
_MPI_ADVICE: Final = f"give the manager coordinator=ckpt.join_mpi(), or {_GROUP_ADVICE}"
_WORLD_SIZE_ADVICE: Final = {
    "WORLD_SIZE": _GROUP_ADVICE,
    "HOROVOD_SIZE": "give the manager coordinator=ckpt.join_horovod(hvd)",
    "OMPI_COMM_WORLD_SIZE": _MPI_ADVICE,
}
"""The environment variable in which a launcher gives the number of ranks -> the advice how to get a
coordinator under this launcher.
"""
_serial = itertools.count()


class TorchStoreCoordinator:
    """A coordinator over a store of torch, by default the store of the default process group.

    Every rank builds one. If a rank builds several, all ranks build them in the same order.

    Thread safety:
        Any thread may call the methods.

    Args:
        group: The rank of this process and the number of ranks. It defaults to those of the default
            process group.
        name: A name for this coordinator, the same on all its ranks, which no other coordinator of
            the job uses. Coordinators with a name need not be built in the same order on all ranks.
        store: The store. It defaults to the store of the default process group.

    Raises:
        CommitError: The store cannot be reached. The methods ``post``, ``collect``, ``set_once``
            and ``verdict`` raise this error, too.
        ConfigError: The store has no id of this attempt after 300 seconds.
    """

    def __init__(
        self,
        group: tuple[int, int] | None = None,
        name: str = "",
        *,
        store: Store | None = None,
    ) -> None:
        self.rank, self.world_size = group or (dist.get_rank(), dist.get_world_size())
        self._prefix = f"ckpt/{_restart_number(store)}/{name or next(_serial)}"
        # On the rank that serves the store, this reference keeps the server alive.
        self._given_store = store
        self._store: Store = PrefixStore(self._prefix, _own_connection(store))
        self.set_once("attempt", new_attempt().encode())
        attempt = self.verdict("attempt", timeout=_START_SECONDS)
        if attempt is None:
            raise ConfigError("the job's store did not answer: is it still up?")
        self.attempt = attempt.decode()

    def post(self, subject: str, message: bytes) -> None:
        """Store this rank's message on ``subject`` under a key that contains the rank."""
        _call_store(lambda: self._store.set(f"{subject}/{self.rank}", message.decode()))

    def collect(self, subject: str, ranks: set[int], *, timeout: float) -> dict[int, bytes]:
        """Return the messages of ``ranks`` on ``subject`` that have arrived, by rank.

        The call waits for the message of the highest of ``ranks``. When this message has arrived,
        and after each pause (see ``_LOOK_SECONDS``), the call reads the messages of all ``ranks``.
        It returns as soon as it has read at least one. It returns an empty dict if none has arrived
        after ``timeout`` seconds.
        """
        keys = {rank: f"{subject}/{rank}" for rank in sorted(ranks)}
        deadline, pause = time.monotonic() + timeout, _LOOK_SECONDS
        while keys:
            self._wait([keys[max(keys)]], min(pause, deadline - time.monotonic()))
            began = time.monotonic()
            messages = {
                rank: self._read_value(key)
                for rank, key in self._keys_with_value(list(keys.items()))
            }
            if answers := {
                rank: message for rank, message in messages.items() if message is not None
            }:
                return answers
            if time.monotonic() >= deadline:
                break
            pause = max(_LOOK_SECONDS, _PAUSE_RATIO * (time.monotonic() - began))
        return {}

    def set_once(self, subject: str, verdict: bytes) -> bytes:
        """Set the verdict on ``subject`` if there is none, and return the verdict that then stands.
        If several ranks call this method, the first call to reach the store sets the verdict.
        """
        # The empty text stands for a key without a value.
        return _call_store(
            lambda: self._store.compare_set(f"{subject}/verdict", "", verdict.decode())
        )

    def verdict(self, subject: str, *, timeout: float) -> bytes | None:
        """Return the verdict on ``subject``, or None if there is none after ``timeout`` seconds.
        If ``timeout`` is 0, the call does not wait.
        """
        key = f"{subject}/verdict"
        return self._read_value(key) if timeout <= 0 or self._wait([key], timeout) else None

    def forget(self, subject: str) -> None:
        """Remove this rank's message on ``subject`` from the store. The call never raises.

        The messages of each save take a few hundred bytes for each rank and tier. They would add up
        in a month of training. Verdicts are not removed.
        """
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._store.delete_key(f"{subject}/{self.rank}")

    def clone(self) -> TorchStoreCoordinator:
        """Return a coordinator for the same rank and attempt, with its own connection to the store.

        A connection of torch's store serves one call at a time, so a wait on it delays calls from
        other threads. A store in this process, such as ``HashStore``, has no connection. The clone
        then uses the same store.
        """
        clone = copy.copy(self)
        clone._store = PrefixStore(self._prefix, _own_connection(self._given_store))
        return clone

    def close(self) -> None:
        """Tell the other ranks that this rank no longer needs the store. The call ignores errors of
        the store.

        Rank 0 then waits until all ranks have closed, for at most ``_FAREWELL_SECONDS``. Its
        process may serve the store, and other ranks may not have received the last verdict yet.
        Rank 0 does not wait while an exception is handled, such as one that ends the process.
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

    def _read_value(self, key: str) -> bytes | None:
        """Return the present value of ``key``, or None if it has no value.

        ``Store.get`` is not used, since it would wait for minutes if the key has no value.
        """
        value = _call_store(lambda: self._store.compare_set(key, _NO_VALUE, _NO_VALUE))
        return None if value == _NO_VALUE.encode() else value

    def _keys_with_value(self, ranked_keys: list[tuple[int, str]]) -> list[tuple[int, str]]:
        """Return those of ``ranked_keys``, each a rank and its key, whose key has a value.

        One request asks the store whether all keys of a block have values. If any has none, the
        method sends one more request for each key of the block.
        """
        keys_with_value: list[tuple[int, str]] = []
        for start in range(0, len(ranked_keys), _BLOCK_KEYS):
            block = ranked_keys[start : start + _BLOCK_KEYS]
            has_all = self._have_values([key for _, key in block])
            keys_with_value += (
                block
                if has_all
                else [(rank, key) for rank, key in block if self._have_values([key])]
            )
        return keys_with_value

    def _have_values(self, keys: list[str]) -> bool:
        return _call_store(lambda: self._store.check(keys))

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Wait until all ``keys`` have a value, for at most ``seconds``. Return True if they have,
        else False.

        The call asks the store again and again, with growing pauses. ``Store.wait`` is not used,
        since it prints two warnings at each timeout, and kills the process if a thread is inside of
        it while the interpreter exits.
        """
        deadline = time.monotonic() + seconds
        longest = max(_LONGEST_PAUSE, self.world_size / _MOST_LOOKS_PER_SECOND)
        pause = max(_FIRST_PAUSE, longest / 50)  # With many ranks, the first pauses are longer too
        while not self._have_values(keys):
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                return False
            time.sleep(min(pause, seconds_left))
            pause = min(_PAUSE_GROWTH * pause, longest)
        return True


def _restart_number(store: Store | None) -> str:
    """Return the number of the restart of the ranks for the keys in the store, or "0" if no earlier
    keys can be in the store. ``store`` is the store that the coordinator was given, if any.

    The store of torchrun's agent outlives a restart of the ranks. The number is the agent's own: an
    agent does not count the restarts for which no worker of its own has failed. So ranks on several
    nodes may have different numbers, and the number is used only where it is necessary.
    """
    # Torchrun sets these variables for its workers.
    variables = os.environ  # noqa: TID251
    is_of_agent = store is None and variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return variables.get("TORCHELASTIC_RESTART_COUNT", "0") if is_of_agent else "0"


def _own_connection(base: Store | None) -> Store:
    """Return a connection of its own to ``base``; None stands for that of the process group."""
    store: Any = base or get_default_store()
    try:
        return cast(Store, store.clone())
    except RuntimeError:
        # A store in this process, such as HashStore, has no connection to clone.
        return cast(Store, store)


def _call_store(call: Callable[[], T]) -> T:
    try:
        return call()
    except (dist.DistError, RuntimeError) as error:
        raise CommitError(f"the job's store is gone: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def find_coordinator() -> Coordinator:
    """Return a coordinator over the default process group's store if there are several ranks, else
    a ``SingleCoordinator``.

    Raises:
        ConfigError: A launcher has started several ranks, and there is no process group for them.
        CommitError: The store of the process group cannot be reached.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return TorchStoreCoordinator()
    if (variable := launcher_variable()) is not None:
        raise ConfigError(
            f"{variable} says there are several ranks: {_WORLD_SIZE_ADVICE[variable]}"
        )
    return SingleCoordinator()


def launcher_variable() -> str | None:
    """Return the name of the environment variable in which a launcher gives a number of ranks above
    1, or None if no launcher does.
    """
    variables = os.environ  # noqa: TID251
    return next((name for name in _WORLD_SIZE_ADVICE if int(variables.get(name) or "1") > 1), None)

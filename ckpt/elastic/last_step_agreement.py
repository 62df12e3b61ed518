"""The last step of a planned stop: all ranks agree after which step they stop.

Any rank may be asked to stop at any moment, and other ranks may be some steps ahead. A rank that
learns of the stop *promises* a step: the step after the last one for which ``requested`` has
returned False. At the end of the promised step, ``requested`` waits for the agreed step, which is
the largest promise. So no rank goes beyond the agreed step, however far apart the ranks are. A
background thread makes the promise, so a rank that computes a step or waits in a collective delays
no other rank.

The ranks talk through a `Coordinator`. On a subject such as ``stop/promise``, each rank can post a
message. The first call of ``set_once`` sets the one *verdict* of a subject, for which the method
``verdict`` waits. The verdict on ``stop/bell/RANK`` wakes ``listen`` on that rank: it is the rank's
*bell*.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Final

import msgspec

from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.exchanges import Wait, gather
from ckpt.errors import CkptError, CommitTimeout
from ckpt.locks import Event

_LISTEN_SECONDS: Final = 3600.0
_FAREWELL: Final = b"0"
"""The message by which this rank ends its own ``listen``."""


class _Agreement(msgspec.Struct, frozen=True):
    """The result of an agreement, as the first rank that calls ``agree`` posts it.

    Attributes:
        step: The number of the last step.
        missing: The ranks that have not promised a step. If it is not empty, ``step`` has no
            meaning.
    """

    step: int = -1
    missing: tuple[int, ...] = ()


_decoder: Final = msgspec.json.Decoder(_Agreement)


class LastStep:
    """The agreement of all ranks on the last step. Each rank makes one object for its manager.

    Thread safety: the training thread calls ``is_last``, one background thread calls ``listen``,
    another one calls ``agree``, and ``StopSignals.close`` calls ``leave``.

    Args:
        coordinator: The connection to the other ranks. The object uses clones of it.
        patience: How many seconds to wait for the promises of the other ranks. A rank that has
            promised nothing by then is dead or stopped, since its background thread promises at
            once.
    """

    def __init__(self, coordinator: Coordinator, *, patience: float) -> None:
        # ``agree`` and ``listen`` each wait on a connection of their own.
        self._coordinator, self._bell_coordinator = coordinator.clone(), coordinator.clone()
        self._rank, self._ranks = coordinator.rank, set(range(coordinator.world_size))
        self._patience = patience
        self._lock = threading.Lock()
        self._latest_step = -1  # The last one that this rank has completed before its promise
        self._promise: int | None = None
        self._agreed_step = -1
        self._agreement_event = Event()
        self._has_left = False

    def is_last(self, step: int) -> bool:
        """Return True if ``step``, which this rank has completed, is the agreed last step or a
        later one.

        Until this rank has promised a step (see the module), return False at once. After that,
        return False for a step before the promised step. For any other step, wait without a time
        limit until all ranks have agreed.
        """
        with self._lock:
            if self._promise is None:
                self._latest_step = step
                return False
        if step < self._promise:
            return False
        self._agreement_event.wait()
        return step >= self._agreed_step

    def agree(self, message: bytes) -> int:
        """Agree with all ranks on the last step, and return its number.

        The first rank that calls this sends ``message`` to all ranks, where ``listen`` returns it,
        and gathers the promises.

        Raises:
            CommitTimeout: Some rank did not promise in time, or the first rank did not send the
                result in time. There is no last step.
            CommitError: The store through which the ranks exchange messages is gone.
        """
        self._make_promise()
        first_caller = int(self._coordinator.set_once("stop/caller", str(self._rank).encode()))
        if first_caller == self._rank:
            for rank in self._ranks:
                self._coordinator.set_once(f"stop/bell/{rank}", message)
            self._coordinator.set_once("stop/step", msgspec.json.encode(self._gather()))
        wait_seconds = 2 * self._patience
        data = self._coordinator.verdict("stop/step", timeout=wait_seconds)
        if data is None:
            raise CommitTimeout(
                self._latest_step,
                [first_caller],
                wait_seconds,
                "the last step, to be named by the first",
            )
        agreement = _decoder.decode(data)
        if agreement.missing:
            raise CommitTimeout(
                self._latest_step, agreement.missing, self._patience, "the promise to stop"
            )
        self._agreed_step = agreement.step
        self._agreement_event.set()
        return self._agreed_step

    def listen(self) -> bytes | None:
        """Wait until a rank calls ``agree``, and return its message.

        Return None if this rank calls ``leave`` first, or if the store through which the ranks
        exchange messages is gone.
        """
        with contextlib.suppress(CkptError):
            while not self._has_left:
                message = self._bell_coordinator.verdict(
                    f"stop/bell/{self._rank}", timeout=_LISTEN_SECONDS
                )
                if message is not None:
                    return message if message != _FAREWELL else None
        return None

    def leave(self) -> None:
        """End ``listen``, and post the promise of this rank, in case another rank calls ``agree``
        later.
        """
        self._has_left = True
        with contextlib.suppress(CkptError):
            self._make_promise()
        with contextlib.suppress(CkptError):
            self._coordinator.set_once(f"stop/bell/{self._rank}", _FAREWELL)

    def _make_promise(self) -> None:
        """Promise a step, unless that was done before, and post it (see the module)."""
        with self._lock:
            if self._promise is None:
                self._promise = self._latest_step + 1
        self._coordinator.post("stop/promise", str(self._promise).encode())

    def _gather(self) -> _Agreement:
        """Return the largest promise of all ranks, or the ranks whose promise is missing."""
        try:
            promises = gather(
                self._coordinator, "stop/promise", Wait(self._patience, "the promise")
            )
        except CommitTimeout as error:
            return _Agreement(missing=error.missing)
        return _Agreement(max(map(int, promises.values())))

"""A backend that wraps another one, and fails at the calls that a test chooses.

Rules say which calls fail and how. Whether a rule applies to a call depends only on the method, the
key, and the number of earlier calls that matched both. A test that fails therefore fails again when
it is repeated.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar, get_args

from ckpt.errors import CkptError
from ckpt.storage.api import Buffer, Capabilities, ObjectInfo, StorageBackend, Upload, read_object

Verb = Literal[
    "put", "upload", "write", "finish", "abort", "read_into", "head", "list", "folders", "delete"
]
_VERBS: Final = frozenset(get_args(Verb))
T = TypeVar("T")


class SimulatedCrash(BaseException):
    """The simulated death of the process. The class is not derived from ``Exception``, so that no
    handler of storage errors catches it.
    """


@dataclass(frozen=True, slots=True)
class Raise:
    """A fault: the call does nothing and raises ``error``.

    If ``error`` is a class or a function, as in ``Raise(OutOfSpace)``, it is called with the key to
    make the error.
    """

    error: Callable[[str], CkptError] | CkptError


@dataclass(frozen=True, slots=True)
class LoseReply:
    """A fault: the call does its work and then raises ``error``, as if the reply had been lost."""

    error: Callable[[str], CkptError] | CkptError


@dataclass(frozen=True, slots=True)
class Truncate:
    """A fault of ``put`` and ``finish``: the call reports success, but the object has only its
    first ``nbytes`` bytes.
    """

    nbytes: int


@dataclass(frozen=True, slots=True)
class Delay:
    """A fault: the call begins ``seconds`` later."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Crash:
    """A fault: the call raises ``SimulatedCrash`` before or right after it does its work.

    Every later call of the same ``FaultyBackend`` except ``close`` raises ``SimulatedCrash``, too.
    """

    when: Literal["before", "after"] = "before"


Fault = Raise | LoseReply | Truncate | Delay | Crash


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A fault and the calls at which it happens.

    Attributes:
        verb: The name of the method. ``write``, ``finish`` and ``abort`` are methods of uploads.
        fault: The fault that happens at these calls.
        key: A regular expression that is searched for in the key of the call, or in the prefix for
            ``list`` and ``folders``.
        nth: The number of the call, counted from 1, among the calls that match ``verb`` and
            ``key``; None for all of these calls.
    """

    verb: Verb
    fault: Fault
    key: str = ""
    nth: int | None = None

    def __post_init__(self) -> None:
        if self.verb not in _VERBS:
            raise ValueError(f"{self.verb!r} is none of {sorted(_VERBS)}")
        if isinstance(self.fault, Truncate) and self.verb not in ("put", "finish"):
            raise ValueError("Truncate is for put and finish")

    def matches(self, verb: str, key: str) -> bool:
        return verb == self.verb and re.search(self.key, key) is not None

    def strikes(self, number: int) -> bool:
        """Return True if the fault happens at the matching call with the number ``number``,
        counted from 1.
        """
        return self.nth is None or self.nth == number


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One recorded call.

    Attributes:
        verb: The name of the method.
        key: The key, or the prefix for ``list`` and ``folders``.
        nbytes: For ``put`` and ``write``, the number of bytes to write. For ``read_into``, the
            number of bytes to read. For ``upload``, the argument ``size``. It is 0 for other
            methods.
    """

    verb: Verb
    key: str
    nbytes: int = 0


@dataclass(slots=True)
class _Ledger:
    """The calls so far, and how often each rule matched.

    Thread safety: any thread may call all methods.
    """

    rules: Sequence[Rule]
    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: list[Call] = field(default_factory=list[Call])
    match_counts: dict[int, int] = field(default_factory=dict[int, int])
    has_crashed: bool = False

    def enter(self, call: Call) -> list[Fault]:
        """Record ``call`` and return the faults that happen at this call.

        Raises:
            SimulatedCrash: An earlier call has crashed.
        """
        with self.lock:
            if self.has_crashed:
                raise SimulatedCrash(f"{call.verb} {call.key} after the crash")
            self.calls.append(call)
            faults: list[Fault] = []
            for index, rule in enumerate(self.rules):
                if rule.matches(call.verb, call.key):
                    self.match_counts[index] = self.match_counts.get(index, 0) + 1
                    if rule.strikes(self.match_counts[index]):
                        faults.append(rule.fault)
            return faults

    def crash(self, call: Call) -> None:
        """Raise ``SimulatedCrash`` now and at every later call."""
        with self.lock:
            self.has_crashed = True
        raise SimulatedCrash(f"{call.verb} {call.key}")


class FaultyBackend:
    """A backend that passes each call to the backend ``inner``, with the faults of ``rules``.

    To simulate the restart after a crash, open a new ``FaultyBackend`` over ``inner``, or use
    ``inner`` itself.

    Thread safety: any thread that may use ``inner`` may use this object. Calls are counted exactly.
    """

    def __init__(self, inner: StorageBackend, rules: Sequence[Rule] = ()) -> None:
        self.inner = inner
        self._ledger = _Ledger(tuple(rules))

    @property
    def calls(self) -> list[Call]:
        """All calls so far in their order, also calls that failed. Calls of ``close``, and calls
        after a crash, are not recorded.
        """
        with self._ledger.lock:
            return list(self._ledger.calls)

    @property
    def has_crashed(self) -> bool:
        """True after a ``Crash`` has happened."""
        return self._ledger.has_crashed

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def url(self) -> str:
        return self.inner.url

    def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        call = Call(
            verb="put", key=key, nbytes=sum(len(memoryview(part).cast("B")) for part in parts)
        )
        return self.perform(call, lambda: self.inner.put(key, parts, if_absent=if_absent))

    def upload(self, key: str, size: int) -> Upload:
        upload = self.perform(
            Call(verb="upload", key=key, nbytes=size), lambda: self.inner.upload(key, size)
        )
        return _FaultyUpload(self, key, upload)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self.perform(
            Call(verb="read_into", key=key, nbytes=out.nbytes),
            lambda: self.inner.read_into(key, offset, out),
        )

    def head(self, key: str) -> ObjectInfo:
        return self.perform(Call(verb="head", key=key), lambda: self.inner.head(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        yield from self.perform(
            Call(verb="list", key=prefix), lambda: list(self.inner.list(prefix))
        )

    def folders(self, prefix: str) -> Iterator[str]:
        yield from self.perform(
            Call(verb="folders", key=prefix), lambda: list(self.inner.folders(prefix))
        )

    def delete(self, key: str) -> None:
        self.perform(Call(verb="delete", key=key), lambda: self.inner.delete(key))

    def close(self) -> None:
        self.inner.close()

    def perform(self, call: Call, work: Callable[[], T]) -> T:
        """Record ``call``, run ``work`` with the faults that happen at ``call``, and return the
        result of ``work``.
        """
        faults = self._ledger.enter(call)
        for fault in faults:
            if isinstance(fault, Delay):
                time.sleep(fault.seconds)
            elif isinstance(fault, Raise):
                raise _error(fault.error, call.key)
            elif fault == Crash("before"):
                self._ledger.crash(call)
        result = work()
        for fault in faults:
            if isinstance(fault, Truncate):
                _truncate(self.inner, call.key, fault.nbytes)
            elif isinstance(fault, LoseReply):
                raise _error(fault.error, call.key)
            elif fault == Crash("after"):
                self._ledger.crash(call)
        return result


class _FaultyUpload:
    """An upload of ``FaultyBackend``.

    Thread safety: any thread that may use the wrapped upload may use this object.
    """

    def __init__(self, backend: FaultyBackend, key: str, inner: Upload) -> None:
        self._backend, self._key, self._inner = backend, key, inner

    @property
    def part_bytes(self) -> int:
        return self._inner.part_bytes

    def write(self, offset: int, data: memoryview) -> None:
        call = Call(verb="write", key=self._key, nbytes=data.nbytes)
        self._backend.perform(call, lambda: self._inner.write(offset, data))

    def finish(self, size: int | None = None) -> ObjectInfo:
        work = self._inner.finish if size is None else lambda: self._inner.finish(size)
        return self._backend.perform(Call(verb="finish", key=self._key), work)

    def abort(self) -> None:
        """Abort the upload. Raise only ``SimulatedCrash``, since ``Upload.abort`` never raises."""
        try:
            self._backend.perform(Call(verb="abort", key=self._key), self._inner.abort)
        except CkptError:
            return


def flip_byte(backend: StorageBackend, key: str, offset: int) -> None:
    """Invert all bits of the byte at ``offset`` of an object, to simulate damage by a bad disk.

    The size stays the same. A negative offset counts from the end of the object.
    """
    content = _content(backend, key)
    content[offset] ^= 0xFF
    backend.put(key, [content])


def _truncate(backend: StorageBackend, key: str, nbytes: int) -> None:
    """Truncate an object to its first ``nbytes`` bytes."""
    backend.put(key, [_content(backend, key)[:nbytes]])


def _content(backend: StorageBackend, key: str) -> bytearray:
    return bytearray(read_object(backend, key, limit=1 << 62))


def _error(error: Callable[[str], CkptError] | CkptError, key: str) -> CkptError:
    return error if isinstance(error, CkptError) else error(key)

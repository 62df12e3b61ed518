"""A store that fails on command: wrap any backend, say which calls go wrong and how.

A rule is a pure question (verb, key, how often the two have matched before); so a test that fails
can be run again and fails again.
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
    """The process has 'died'. It is not an ``Exception``, so no handler takes it for a store's
    error.
    """


@dataclass(frozen=True, slots=True)
class Raise:
    """The call does nothing and raises. A class is called with the key: ``Raise(OutOfSpace)``."""

    error: Callable[[str], CkptError] | CkptError


@dataclass(frozen=True, slots=True)
class LoseReply:
    """The call does its work, then raises all the same: the reply was lost."""

    error: Callable[[str], CkptError] | CkptError


@dataclass(frozen=True, slots=True)
class Truncate:
    """For ``put`` and ``finish``: reports success, but the object keeps only its first
    ``nbytes`` bytes.
    """

    nbytes: int


@dataclass(frozen=True, slots=True)
class Delay:
    """The call takes this many seconds longer."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Crash:
    """The process dies before, or right after, the call does its work.

    Every later call of this wrapper raises too.
    """

    when: Literal["before", "after"] = "before"


Fault = Raise | LoseReply | Truncate | Delay | Crash


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When a fault strikes.

    Attributes:
        verb: Name of the method; ``write``, ``finish`` and ``abort`` are an upload's.
        key: Regular expression searched for in the key (for ``list`` and ``folders``: the prefix).
        nth: Which of the calls that match verb and key, counted from 1; ``None`` for all of them.
        fault: What happens.
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

    def strikes(self, matched: int) -> bool:
        """Return True if the rule applies to the ``matched``-th matching call."""
        return self.nth is None or self.nth == matched


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call as it came. ``nbytes``: of the data it carried or asked for."""

    verb: Verb
    key: str
    nbytes: int = 0


@dataclass(slots=True)
class _Ledger:
    """Records the calls, and how often each rule matched. Any thread may use it."""

    rules: Sequence[Rule]
    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: list[Call] = field(default_factory=list[Call])
    matched: dict[int, int] = field(default_factory=dict[int, int])
    crashed: bool = False

    def enter(self, call: Call) -> list[Fault]:
        with self.lock:
            if self.crashed:
                raise SimulatedCrash(f"{call.verb} {call.key} after the crash")
            self.calls.append(call)
            hit: list[Fault] = []
            for index, rule in enumerate(self.rules):
                if rule.matches(call.verb, call.key):
                    self.matched[index] = self.matched.get(index, 0) + 1
                    if rule.strikes(self.matched[index]):
                        hit.append(rule.fault)
            return hit

    def crash(self, call: Call) -> None:
        with self.lock:
            self.crashed = True
        raise SimulatedCrash(f"{call.verb} {call.key}")


class FaultyBackend:
    """``inner`` with faults.

    The same threads may use it as ``inner``. The counting of calls is exact.

    After a crash, open a new ``FaultyBackend`` (or use ``inner``): that is the restarted process,
    which finds what the dead one left.
    """

    def __init__(self, inner: StorageBackend, rules: Sequence[Rule] = ()) -> None:
        self.inner = inner
        self._ledger = _Ledger(tuple(rules))

    @property
    def calls(self) -> list[Call]:
        """All calls so far, also those that failed."""
        with self._ledger.lock:
            return list(self._ledger.calls)

    @property
    def crashed(self) -> bool:
        return self._ledger.crashed

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
        """Do ``work`` with the faults that the rules have for ``call``."""
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
                _keep(self.inner, call.key, fault.nbytes)
            elif isinstance(fault, LoseReply):
                raise _error(fault.error, call.key)
            elif fault == Crash("after"):
                self._ledger.crash(call)
        return result


class _FaultyUpload:
    """An upload of ``FaultyBackend``. The same threads may use it as the upload that it wraps."""

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
        """Abort the write. Only a crash is raised, since an abort never raises."""
        try:
            self._backend.perform(Call(verb="abort", key=self._key), self._inner.abort)
        except CkptError:
            return


def flip_byte(backend: StorageBackend, key: str, offset: int) -> None:
    """Damage an object the way a bad disk does: one byte differs, the size is the same.

    A negative offset counts from the end.
    """
    content = _content(backend, key)
    content[offset] ^= 0xFF
    backend.put(key, [content])


def _keep(backend: StorageBackend, key: str, nbytes: int) -> None:
    backend.put(key, [_content(backend, key)[:nbytes]])


def _content(backend: StorageBackend, key: str) -> bytearray:
    return bytearray(read_object(backend, key, limit=1 << 62))


def _error(error: Callable[[str], CkptError] | CkptError, key: str) -> CkptError:
    return error if isinstance(error, CkptError) else error(key)

"""Every error of ckpt, in one tree. A class says who must act; its fields say on what.

::

    CkptError                      exit 1
    ├── ConfigError                exit 2   the call, the URL or ckpt.toml must be corrected
    │   ├── UnknownScheme                   no backend serves this URL
    │   └── MissingExtra                    the backend's package is not installed
    ├── StorageError               exit 3   a store refused or failed
    │   ├── ObjectNotFound
    │   ├── ObjectExists                    put(if_absent=True) lost
    │   ├── AccessDenied
    │   ├── OutOfSpace
    │   └── TransientStorageError           worth another try; the only one that is retried
    ├── IntegrityError             exit 4   the bytes are not what was written
    │   ├── ChecksumMismatch
    │   ├── ManifestCorrupt
    │   └── FormatTooNew
    ├── CommitError                exit 5   a save did not become a checkpoint
    │   ├── StepExists
    │   ├── HistoryHidden                   a restore would take another run's newer step
    │   ├── PeerFailed
    │   ├── CommitTimeout
    │   ├── ReplicasDiverged
    │   ├── TensorIncomplete                boxes leave holes or overlap
    │   ├── RootInUse                       another job writes to this root
    │   ├── TierNotShared                   each node has its own, and nobody said so
    │   └── JobUnseen                       whether the job of an unfinished save still runs
    ├── StagingError               exit 6   the copy to host memory failed
    │   ├── HostMemoryExhausted
    │   ├── TensorChanged                   written to behind our back while it was copied
    │   └── SaveSkipped                     on_busy="skip" and no slot was free
    ├── RestoreError               exit 7   the target and the checkpoint do not fit
    │   ├── NoCheckpoint
    │   ├── EntryMissing
    │   ├── EntryUnexpected
    │   ├── ShapeMismatch
    │   ├── DtypeMismatch
    │   ├── KindMismatch                    a tensor here, a plain value there
    │   └── OptimizerMismatch               the state of another kind of optimizer
    ├── UnsupportedValue           exit 8   the state holds what cannot be saved without pickle
    └── ManagerClosed              exit 9
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, TypeVar


class CkptError(Exception):
    """Base of all errors of ckpt. ``exit_code`` is what the command line returns for it."""

    exit_code: ClassVar[int] = 1


class ConfigError(CkptError):
    """A setting is wrong. Nothing was started."""

    exit_code = 2


class UnknownScheme(ConfigError):
    """No backend serves this URL."""

    def __init__(self, url: str, known: Sequence[str]) -> None:
        self.url, self.known = url, tuple(known)
        super().__init__(f"no backend for {url!r}; known schemes: {', '.join(self.known)} or a plain folder")


class MissingExtra(ConfigError):
    """The backend exists, its package is not installed."""

    def __init__(self, url: str, package: str, extra: str | None) -> None:
        self.url, self.package, self.extra = url, package, extra
        way = f"pip install 'ckpt-stream[{extra}]'" if extra else f"pip install {package}"
        super().__init__(f"{url!r} needs the package {package}: {way}")


class StorageError(CkptError):
    """A store refused or failed. ``key`` is relative to ``root``, the tier's URL; a backend leaves that to its callers (see ``placed``)."""

    exit_code = 3
    what: ClassVar[str] = "storage failed"
    root: str = ""

    def __init__(self, key: str, detail: str = "") -> None:
        self.key, self.detail = key, detail
        super().__init__(f"{self.what}: {key!r}" + (f" ({detail})" if detail else ""))

    def __str__(self) -> str:
        if not self.root:
            return super().__str__()
        place = f"{self.key!r} in {self.root}" if self.key else repr(self.root)
        return f"{self.what}: {place}" + (f" ({self.detail})" if self.detail else "")


class ObjectNotFound(StorageError):
    """There is no object under this key."""

    what = "no such object"


class ObjectExists(StorageError):
    """``put(if_absent=True)`` found the key taken. What was there is untouched."""

    what = "object already exists"


class AccessDenied(StorageError):
    """The store knows us not, or forbids it. Check credentials and permissions."""

    what = "access denied"


class OutOfSpace(StorageError):
    """The store is full. Free space or prune; older checkpoints are whole."""

    what = "no space left"


class TransientStorageError(StorageError):
    """Time-outs, resets, 5xx, SlowDown: worth another try."""

    what = "storage did not answer properly"


class IntegrityError(CkptError):
    """The bytes are not what was written."""

    exit_code = 4


class ChecksumMismatch(IntegrityError):
    """A run of bytes differs from what was staged."""

    def __init__(self, key: str, offset: int, nbytes: int) -> None:
        self.key, self.offset, self.nbytes = key, offset, nbytes
        super().__init__(
            f"checksum mismatch in {key!r}, bytes {offset} to {offset + nbytes}: the data was damaged after it was written"
        )


class ManifestCorrupt(IntegrityError):
    """A manifest or fragment cannot be trusted."""

    def __init__(self, key: str, detail: str) -> None:
        self.key, self.detail = key, detail
        super().__init__(f"{key!r} is not a valid manifest: {detail}")


class FormatTooNew(IntegrityError):
    """Written by a later ckpt."""

    def __init__(self, key: str, found: int, supported: int) -> None:
        self.key, self.found, self.supported = key, found, supported
        super().__init__(
            f"{key!r} has format {found}, this ckpt reads up to {supported}: upgrade with pip install -U ckpt-stream"
        )


class CommitError(CkptError):
    """A save did not become a checkpoint. Older checkpoints are whole, training may go on."""

    exit_code = 5


class StepExists(CommitError):
    """Steps are immutable: one step is saved once."""

    def __init__(self, step: int, root: str) -> None:
        self.step, self.root = step, root
        super().__init__(
            f"step {step} is already saved in {root}: steps are immutable, save under another step"
        )


class HistoryHidden(CommitError):
    """The root holds newer steps that this job has not restored: a restore would take those, not what is saved now."""

    def __init__(self, step: int, newest: int, root: str) -> None:
        self.step, self.newest, self.root = step, newest, root
        super().__init__(
            f"{root} holds step {newest}, which this job has not restored, and which a restart would take before step {step}: "
            "restore first, or give this run a root of its own"
        )


class PeerFailed(CommitError):
    """Another rank could not make its part durable."""

    def __init__(self, step: int, failures: dict[int, str]) -> None:
        self.step, self.failures = step, failures
        told = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(failures.items())[:8])
        super().__init__(f"step {step} was not committed, {len(failures)} rank(s) failed: {told}")


class CommitTimeout(CommitError):
    """Some ranks were not heard of in time."""

    def __init__(self, step: int, missing: Sequence[int], seconds: float, what: str) -> None:
        self.step, self.missing, self.seconds = step, tuple(missing), seconds
        names = ", ".join(map(str, self.missing[:16])) + (" ..." if len(self.missing) > 16 else "")
        super().__init__(f"step {step}: waited {seconds:.0f} s for {what} of rank(s) {names}")


class ReplicasDiverged(CommitError):
    """Ranks that should hold the same value do not."""

    def __init__(self, name: str, ranks: Sequence[int], detail: str = "") -> None:
        self.name, self.ranks, self.detail = name, tuple(ranks), detail
        super().__init__(
            f"{name!r} differs between ranks {', '.join(map(str, self.ranks))}{detail}: if that is meant, wrap it in PerRank(...)"
        )


class TensorIncomplete(CommitError):
    """The boxes of a tensor leave a hole, overlap, or contradict each other."""

    def __init__(self, name: str, detail: str) -> None:
        self.name, self.detail = name, detail
        super().__init__(f"tensor {name!r}: {detail}")


class RootInUse(CommitError):
    """Another job writes to this root, or has taken it over."""

    def __init__(self, root: str, owner: str, *, here: bool = False) -> None:
        """``here``: the other lives in this very process."""
        self.root, self.owner = root, owner
        told = f"{root} is written by another manager ({owner}): give each job a root of its own, or close the other"
        if here:
            told = f"{root} is written by another CheckpointManager of this very process ({owner}): close() that one first, or go on with it"
        super().__init__(told)


class TierNotShared(CommitError):
    """Ranks see different files in one tier, which nobody has said is local."""

    def __init__(self, root: str, ranks: Sequence[int]) -> None:
        self.root, self.ranks = root, tuple(ranks)
        super().__init__(
            f"rank(s) {', '.join(map(str, self.ranks))} have made their part durable in {root}, where the leader does not see it: "
            f"if each node has a folder of its own there, say so (Tier({root!r}, local=True)), else let all nodes see one folder"
        )


class JobUnseen(CommitError):
    """An unfinished save's job ran where nobody here can see whether it still does."""

    def __init__(self, step: int, owner: str) -> None:
        self.step, self.owner = step, owner
        super().__init__(
            f"step {step}: whether its job ({owner}) still runs cannot be seen from here: if it has ended, say so with --job-is-dead"
        )


class StagingError(CkptError):
    """The copy to host memory failed. That save is lost, training may go on."""

    exit_code = 6


class HostMemoryExhausted(StagingError):
    """There is no room for an image."""

    def __init__(self, needed: int, detail: str) -> None:
        self.needed, self.detail = needed, detail
        super().__init__(f"no host memory for an image of {needed / 2**20:.0f} MiB: {detail}")


class TensorChanged(StagingError):
    """A tensor was written to between ``save_async`` and the end of its copy, outside its optimizer's step."""

    def __init__(self, name: str, step: int) -> None:
        self.name, self.step = name, step
        super().__init__(
            f"{name!r} was changed while step {step} copied it, outside of its optimizer's step(): call manager.fence() before "
            'you change it, or build the manager with overlap="off"'
        )


class SaveSkipped(StagingError):
    """A save was not begun: no slot was free and ``on_busy="skip"``, here or on another rank, or no tier takes this step. Nothing was written."""

    def __init__(self, step: int, reason: str = 'the save before still streams and on_busy="skip"') -> None:
        self.step, self.reason = step, reason
        super().__init__(f"step {step} was skipped: {reason}")


class TierBehind(CommitError):
    """A step was given up on a tier that is too slow: more steps than ``backlog`` waited. Nearer tiers have it."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"step {step} was given up on a tier that is behind: newer steps wait for it")


class RestoreError(CkptError):
    """The target and the checkpoint do not fit, or there is nothing to restore."""

    exit_code = 7


class NoCheckpoint(RestoreError):
    """Nothing restorable was found."""

    def __init__(self, root: str, detail: str = "") -> None:
        self.root, self.detail = root, detail
        super().__init__(f"no checkpoint in {root}" + (f": {detail}" if detail else ""))


class EntryMissing(RestoreError):
    """The target wants names that the checkpoint has not. ``sources`` are what renamed ones were looked for as."""

    def __init__(self, names: Sequence[str], step: int, sources: Mapping[str, str] | None = None) -> None:
        self.names, self.step, self.sources = tuple(names), step, dict(sources or {})
        told = [_both(name, self.sources.get(name, name)) for name in self.names]
        super().__init__(
            f"step {step} has no {_few(told, quote=False)}: take it out of the state, restore another step, or let it keep what it has (strict=False)"
        )


class EntryUnexpected(RestoreError):
    """The checkpoint has names that the target does not want."""

    def __init__(self, names: Sequence[str], step: int) -> None:
        self.names, self.step = tuple(names), step
        super().__init__(
            f"step {step} also holds {_few(names)}, which the state given has no place for: "
            'give it one, say what you want (only="model/*"), or leave it (strict=False)'
        )


class ShapeMismatch(RestoreError):
    """Same name, another shape."""

    def __init__(self, name: str, saved: Sequence[int], wanted: Sequence[int], source: str = "") -> None:
        self.name, self.saved, self.wanted, self.source = name, tuple(saved), tuple(wanted), source or name
        told = _both(name, self.source)
        super().__init__(f"{told} is saved with shape {list(saved)}, the target has {list(wanted)}")


class DtypeMismatch(RestoreError):
    """Same name, another dtype."""

    def __init__(self, name: str, saved: str, wanted: str, source: str = "", way: str = "") -> None:
        self.name, self.saved, self.wanted, self.source = name, saved, wanted, source or name
        told = _both(name, self.source)
        super().__init__(f"{told} is saved as {saved}, the target is {wanted}{way and ': '}{way}")


class KindMismatch(RestoreError):
    """Same name, another kind of value."""

    def __init__(self, name: str, saved: str, wanted: str) -> None:
        self.name, self.saved, self.wanted = name, saved, wanted
        super().__init__(f"{name!r} is a {saved} in the checkpoint and a {wanted} in the target")


class OptimizerMismatch(RestoreError):
    """What was saved is the state of another kind of optimizer."""

    def __init__(self, name: str, what: str, saved: Sequence[str], wanted: Sequence[str]) -> None:
        self.name, self.saved, self.wanted = name, tuple(saved), tuple(wanted)
        super().__init__(
            f"{name!r} was saved by another kind of optimizer: it has the {what} {_few(saved)}, the target has {_few(wanted)} instead: "
            'take the optimizer out of the state, say what you want (only="model/*"), or let it keep what it has (strict=False)'
        )


class UnsupportedValue(CkptError):
    """The state holds a value that could only be saved with pickle."""

    exit_code = 8

    def __init__(self, name: str, kind: str, detail: str = "") -> None:
        self.name, self.kind = name, kind
        super().__init__(
            f"{name!r} is a {kind}, which cannot be saved without pickle: "
            + (detail or "give it state_dict()/load_state_dict(), or save its parts as plain values")
        )


E = TypeVar("E", bound=BaseException)


def placed(error: E, root: str) -> E:
    """The same error; one of a store tells from now on which tier it is about."""
    if isinstance(error, StorageError) and not error.root:
        error.root = root
    return error


@contextmanager
def about(root: str) -> Generator[None]:
    """Inside, errors of a store name the tier at ``root``."""
    try:
        yield
    except StorageError as error:
        placed(error, root)
        raise


class ManagerClosed(CkptError):
    """The manager was closed; build a new one."""

    exit_code = 9

    def __init__(self) -> None:
        super().__init__("this CheckpointManager is closed: build a new one")


def _both(name: str, source: str) -> str:
    """A name of the state, and what it is called in the checkpoint."""
    return repr(name) if source == name else f"{source!r} (which {name!r} is renamed to)"


def _few(names: Sequence[str], most: int = 5, *, quote: bool = True) -> str:
    shown = ", ".join(repr(name) if quote else name for name in list(names)[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")

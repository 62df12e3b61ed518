"""Why a save is not a checkpoint: an error, as it travels from the rank that met it to all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from ckpt.errors import (
    AccessDenied,
    CkptError,
    CommitError,
    CommitTimeout,
    HistoryHidden,
    OutOfSpace,
    PeerFailed,
    ReplicasDiverged,
    RootInUse,
    RootLost,
    StepExists,
    StorageError,
    TensorIncomplete,
    TierNotShared,
    TransientStorageError,
    placed,
)

_STORAGE_ERRORS: Final[Mapping[str, type[StorageError]]] = {
    kind.__name__: kind for kind in (StorageError, AccessDenied, OutOfSpace, RootLost, TransientStorageError)
}
"""What a store that fails the leader is told as to the others; by name."""


class Aborted(msgspec.Struct, frozen=True, tag="refused"):
    """There will be no manifest. ``failures`` by rank where ranks failed, else ``reason``."""

    reason: str
    failures: dict[int, str]
    kind: str = "CommitError"
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def told(self) -> str:
        """For a person."""
        return str(rebuild(self, -1)) if self.kind != "CommitError" else self.reason


def abort_reason(error: CkptError) -> Aborted:
    """A verdict that carries ``error`` to the other ranks."""
    kind = type(error).__name__
    match error:
        case PeerFailed():
            return Aborted(reason=str(error), failures=error.failures, kind=kind)
        case CommitTimeout():
            return Aborted(reason=str(error.seconds), failures={}, kind=kind, ranks=error.missing)
        case ReplicasDiverged():
            return Aborted(reason="", failures={}, kind=kind, names=(error.name,), ranks=error.ranks)
        case TensorIncomplete():
            return Aborted(reason=error.detail, failures={}, kind=kind, names=(error.name,))
        case StepExists():
            return Aborted(reason=error.root, failures={}, kind=kind)
        case HistoryHidden():
            return Aborted(reason=error.root, failures={}, kind=kind, ranks=(error.newest,))
        case TierNotShared():
            return Aborted(reason=error.root, failures={}, kind=kind, ranks=error.ranks)
        case RootInUse():
            return Aborted(reason=error.owner, failures={}, kind=kind, names=(error.root,))
        case StorageError() if kind in _STORAGE_ERRORS:
            return Aborted(reason=error.detail, failures={}, kind=kind, names=(error.key, error.root))
        case _:
            return Aborted(reason=f"{kind}: {error}", failures={})


def rebuild(verdict: Aborted, step: int) -> CkptError:
    """The error that a refusal carries: a store that failed the leader is told as such to all."""
    if kind := _STORAGE_ERRORS.get(verdict.kind):
        key, root = verdict.names
        return placed(kind(key, verdict.reason), root)
    match verdict.kind:
        case "PeerFailed":
            return PeerFailed(step, verdict.failures)
        case "CommitTimeout":
            return CommitTimeout(step, verdict.ranks, float(verdict.reason), "the part")
        case "ReplicasDiverged":
            return ReplicasDiverged(verdict.names[0], verdict.ranks)
        case "TensorIncomplete":
            return TensorIncomplete(verdict.names[0], verdict.reason)
        case "StepExists":
            return StepExists(step, verdict.reason)
        case "HistoryHidden":
            return HistoryHidden(step, verdict.ranks[0], verdict.reason)
        case "TierNotShared":
            return TierNotShared(verdict.reason, verdict.ranks)
        case "RootInUse":
            return RootInUse(verdict.names[0], verdict.reason)
        case _:
            return CommitError(f"step {step} was not committed: {verdict.reason}")

"""The reason why a save was aborted, as a message that carries an error to all ranks.

The *verdict* on a save says whether the save has become a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from ckpt.errors import (
    AccessDenied,
    CkptError,
    CommitError,
    CommitTimeout,
    ConfigError,
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
    with_root,
)

_STORAGE_ERRORS: Final[Mapping[str, type[StorageError]]] = {
    kind.__name__: kind
    for kind in (StorageError, AccessDenied, OutOfSpace, RootLost, TransientStorageError)
}
"""The storage errors, by class name, that other ranks raise as the same class as the leader."""


class Abort(msgspec.Struct, frozen=True, tag="aborted"):
    """The verdict that a save gets no manifest, with the reason.

    Attributes:
        reason: The reason as text. For some values of ``kind``, it is another field of the error,
            such as the root.
        failures: The reasons of the ranks that have failed, by rank.
        kind: The name of the class of the error that ``rebuild`` returns.
        names: Names in the error, such as the name of a tensor or the URL of a root.
        ranks: The ranks in the error. For some values of ``kind``, it is another number, such as
            the newest step.
    """

    reason: str
    failures: dict[int, str]
    kind: str = "CommitError"
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def sentence(self) -> str:
        """The reason as a text for users."""
        # -1 stands for no step.
        return str(rebuild(self, -1)) if self.kind != "CommitError" else self.reason


def abort_reason(error: CkptError) -> Abort:
    """Return a verdict that carries ``error`` to the other ranks.

    For a class of errors that is not handled below, the verdict has only the name of the class and
    the message, and ``rebuild`` returns a `CommitError` with this text.
    """
    kind = type(error).__name__
    match error:
        case PeerFailed():
            return Abort(reason=str(error), failures=error.failures, kind=kind)
        case CommitTimeout():
            return Abort(reason=str(error.seconds), failures={}, kind=kind, ranks=error.missing)
        case ReplicasDiverged():
            return Abort(
                reason=error.detail, failures={}, kind=kind, names=(error.name,), ranks=error.ranks
            )
        case TensorIncomplete():
            return Abort(reason=error.detail, failures={}, kind=kind, names=(error.name,))
        case StepExists():
            return Abort(reason=error.root, failures={}, kind=kind, ranks=(int(error.earlier),))
        case HistoryHidden():
            return Abort(reason=error.root, failures={}, kind=kind, ranks=(error.newest,))
        case TierNotShared():
            return Abort(reason=error.root, failures={}, kind=kind, ranks=error.ranks)
        case RootInUse():
            return Abort(reason=error.owner, failures={}, kind=kind, names=(error.root,))
        case ConfigError() if kind == "ConfigError":
            return Abort(reason=str(error), failures={}, kind=kind)
        case StorageError() if kind in _STORAGE_ERRORS:
            return Abort(reason=error.detail, failures={}, kind=kind, names=(error.key, error.root))
        case _:
            return Abort(reason=f"{kind}: {error}", failures={})


def rebuild(verdict: Abort, step: int, *, message_name: str = "the part") -> CkptError:
    """Return the error that ``verdict`` carries, as an error about ``step``.

    Args:
        verdict: The verdict.
        step: The number of the step whose save was aborted.
        message_name: The words in a `CommitTimeout` for the message that has not arrived.
    """
    # ``abort_reason`` says which field of ``verdict`` holds what for each kind of error.
    if kind := _STORAGE_ERRORS.get(verdict.kind):
        key, root = verdict.names
        return with_root(kind(key, verdict.reason), root)
    match verdict.kind:
        case "PeerFailed":
            return PeerFailed(step, verdict.failures)
        case "CommitTimeout":
            return CommitTimeout(step, verdict.ranks, float(verdict.reason), message_name)
        case "ReplicasDiverged":
            return ReplicasDiverged(verdict.names[0], verdict.ranks, verdict.reason)
        case "TensorIncomplete":
            return TensorIncomplete(verdict.names[0], verdict.reason)
        case "StepExists":
            return StepExists(step, verdict.reason, earlier=any(verdict.ranks))
        case "HistoryHidden":
            return HistoryHidden(step, verdict.ranks[0], verdict.reason)
        case "TierNotShared":
            return TierNotShared(verdict.reason, verdict.ranks)
        case "RootInUse":
            return RootInUse(verdict.names[0], verdict.reason)
        case "ConfigError":
            return ConfigError(verdict.reason)
        case _:
            return CommitError(f"step {step} was not committed: {verdict.reason}")

"""Every error of ckpt, in one tree. The class says what kind of action helps, and its fields say
where.

::

    CkptError                      exit 1
    ├── ConfigError                exit 2   the call, the URL or ckpt.toml must be corrected
    │   ├── UnknownScheme                   no backend serves this URL
    │   └── MissingExtra                    the backend's package is not installed
    ├── StorageError               exit 3   a store refused or failed
    │   ├── ObjectNotFound
    │   ├── ObjectExists                    put(if_absent=True) lost
    │   ├── AccessDenied
    │   │   └── LinkRefused                 a link leads out of the root; damage to one checkpoint
    │   ├── OutOfSpace
    │   ├── RootLost                        the disk was unmounted, say
    │   └── TransientStorageError           worth another try; the only one that is retried
    ├── IntegrityError             exit 4   the bytes are not what was written
    │   ├── ChecksumMismatch
    │   ├── ManifestCorrupt
    │   └── FormatUnsupported               this ckpt cannot read it; perhaps intact
    │       ├── FormatTooNew                a later ckpt wrote it
    │       ├── FormatTooOld                an earlier one wrote it, in a format no longer read
    │       └── CodecMissing                the codec of its files is not installed
    ├── CommitError                exit 5   a save did not become a checkpoint
    │   ├── StepExists
    │   ├── HistoryHidden                   a restore would take another run's newer step
    │   ├── PeerFailed
    │   ├── CommitTimeout
    │   ├── ReplicasDiverged
    │   ├── TensorIncomplete                boxes leave holes or overlap
    │   ├── RootInUse                       another job writes to this root
    │   ├── TierNotShared                   each node has its own, without local=True
    │   ├── StepsMissing                    at the end a tier lacks steps that were to go there
    │   ├── TierBehind                      given up on a tier that is too slow; nearer ones have it
    │   ├── LeftToAgent                     close(detach=True): the agent takes it farther
    │   └── JobUnseen                       whether the job of an unfinished save still runs
    ├── StagingError               exit 6   the copy to host memory failed
    │   ├── HostMemoryExhausted
    │   ├── TensorChanged                   it was written to while it was copied
    │   └── SaveSkipped                     no slot was free, or no tier takes the step
    ├── RestoreError               exit 7   the target and the checkpoint do not fit
    │   ├── NoCheckpoint
    │   ├── EntryMissing
    │   ├── EntryUnexpected
    │   ├── ShapeMismatch
    │   ├── DtypeMismatch
    │   ├── KindMismatch                    a tensor here, a plain value there
    │   └── OptimizerMismatch               the state of another kind of optimizer
    ├── UnsupportedValue           exit 8   the state holds a value that is not supported
    ├── SuspiciousState                     a step shows that training is dead; exit 1
    ├── ThreadLimit                         no more threads can be started; exit 1
    ├── ManagerClosed              exit 9   the manager was closed
    └── AgentError                 exit 10  the node's agent cannot be reached, or refuses
"""

from __future__ import annotations

from ckpt.errors.base import (
    AgentError,
    CkptError,
    ConfigError,
    ManagerClosed,
    MissingExtra,
    ThreadLimit,
    UnknownScheme,
)
from ckpt.errors.restoring import (
    DtypeMismatch,
    EntryMissing,
    EntryUnexpected,
    KindMismatch,
    NoCheckpoint,
    OptimizerMismatch,
    RestoreError,
    ShapeMismatch,
)
from ckpt.errors.saving import (
    CommitError,
    CommitTimeout,
    HistoryHidden,
    HostMemoryExhausted,
    JobUnseen,
    LeftToAgent,
    PeerFailed,
    ReplicasDiverged,
    RootInUse,
    SaveSkipped,
    StagingError,
    StepExists,
    StepsMissing,
    SuspiciousState,
    TensorChanged,
    TensorIncomplete,
    TierBehind,
    TierNotShared,
    UnsupportedValue,
)
from ckpt.errors.storage import (
    AccessDenied,
    ChecksumMismatch,
    CodecMissing,
    FormatTooNew,
    FormatTooOld,
    FormatUnsupported,
    IntegrityError,
    LinkRefused,
    ManifestCorrupt,
    ObjectExists,
    ObjectNotFound,
    OutOfSpace,
    RootLost,
    StorageError,
    TransientStorageError,
    about,
    placed,
)

__all__ = [
    "AccessDenied",
    "AgentError",
    "ChecksumMismatch",
    "CkptError",
    "CodecMissing",
    "CommitError",
    "CommitTimeout",
    "ConfigError",
    "DtypeMismatch",
    "EntryMissing",
    "EntryUnexpected",
    "FormatTooNew",
    "FormatTooOld",
    "FormatUnsupported",
    "HistoryHidden",
    "HostMemoryExhausted",
    "IntegrityError",
    "JobUnseen",
    "KindMismatch",
    "LeftToAgent",
    "LinkRefused",
    "ManagerClosed",
    "ManifestCorrupt",
    "MissingExtra",
    "NoCheckpoint",
    "ObjectExists",
    "ObjectNotFound",
    "OptimizerMismatch",
    "OutOfSpace",
    "PeerFailed",
    "ReplicasDiverged",
    "RestoreError",
    "RootInUse",
    "RootLost",
    "SaveSkipped",
    "ShapeMismatch",
    "StagingError",
    "StepExists",
    "StepsMissing",
    "StorageError",
    "SuspiciousState",
    "TensorChanged",
    "TensorIncomplete",
    "ThreadLimit",
    "TierBehind",
    "TierNotShared",
    "TransientStorageError",
    "UnknownScheme",
    "UnsupportedValue",
    "about",
    "placed",
]

# In a traceback, an error has the name by which a user imports it.
for _name in __all__:
    globals()[_name].__module__ = __name__

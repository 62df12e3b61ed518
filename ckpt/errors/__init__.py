"""All errors of ckpt, as one tree of classes.

The class of an error shows which kind of action helps. The fields of an error have the details,
such as the step or the key of the file. The tree shows the exit code of the command line for each
direct subclass of ``CkptError``. All classes below this subclass have the same exit code::

    CkptError                      exit 1
    ├── ConfigError                exit 2   the call, the URL or ckpt.toml must be corrected
    │   ├── UnknownScheme                   no backend serves the scheme of the URL
    │   └── MissingExtra                    a package that is needed is not installed
    ├── StorageError               exit 3   a store has refused a request, or has failed
    │   ├── ObjectNotFound
    │   ├── ObjectExists                    put(if_absent=True) has found an object under the key
    │   ├── AccessDenied
    │   │   └── LinkRefused                 the path of one object has a link out of the root
    │   ├── OutOfSpace
    │   ├── RootLost                        the root is gone: its disk was unmounted, for example
    │   └── TransientStorageError           another try may succeed; ckpt retries only this error
    ├── IntegrityError             exit 4   the stored bytes are not those that were written
    │   ├── ChecksumMismatch
    │   ├── FileDamaged
    │   ├── ForeignFileMismatch             a file that a step was adopted from is another one now
    │   ├── ManifestCorrupt
    │   └── FormatUnsupported               this version of ckpt cannot read data that may be intact
    │       ├── FormatTooNew                a later version of ckpt wrote the data
    │       ├── FormatTooOld                an earlier version wrote a format that is no longer read
    │       └── CodecMissing                the codec of the data files is not installed
    ├── CommitError                exit 5   a save did not become a checkpoint
    │   ├── StepExists
    │   ├── HistoryHidden                   a restore would take an earlier job's newer step
    │   ├── PeerFailed                      a rank could not make its part durable
    │   ├── CommitTimeout                   some ranks did not answer in time
    │   ├── ReplicasDiverged                values differ that must be equal on all ranks
    │   ├── TensorIncomplete                boxes leave holes or overlap
    │   ├── RootInUse                       another job writes to this root
    │   ├── TierNotShared                   each node has its own folder, without local=True
    │   ├── StepsMissing                    the manager was closed, and a tier lacks steps
    │   ├── TierBehind                      a tier is too slow, and has given up the step
    │   ├── LeftToAgent                     close(detach=True) has left the step to the agent
    │   └── JobUnseen                       the job of an unfinished save may still run elsewhere
    ├── StagingError               exit 6   the copy to host memory failed
    │   ├── HostMemoryExhausted
    │   ├── TensorChanged                   a tensor was written to while it was copied
    │   └── SaveSkipped                     a save was skipped: no slot was free, for example
    ├── RestoreError               exit 7   the target and the checkpoint do not fit
    │   ├── NoCheckpoint
    │   ├── EntryMissing
    │   ├── EntryUnexpected
    │   ├── ShapeMismatch
    │   ├── DtypeMismatch
    │   ├── KindMismatch                    a name is a tensor in one and a plain value in the other
    │   └── OptimizerMismatch               the checkpoint is of another kind of optimizer
    ├── UnsupportedValue           exit 8   the state holds a value that is not supported
    ├── SuspiciousState                     trained tensors hold NaN, or do not change; exit 1
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
    FileDamaged,
    ForeignFileMismatch,
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
    errors_of,
    with_root,
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
    "FileDamaged",
    "ForeignFileMismatch",
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
    "errors_of",
    "with_root",
]

# A traceback then shows the name that users import, such as ``ckpt.errors.PeerFailed``.
for _name in __all__:
    globals()[_name].__module__ = __name__

"""Import the state that another program has saved, as a checkpoint that
``CheckpointManager.restore`` can load.

The manager saves the objects that ``ckpt.exchange.foreign.foreign_objects`` makes of the state as
any other state. A *joiner* makes whole tensors of the parts that files have. The joiner of an
import is a ``Copier``, which copies the parts to a scratch file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from ckpt.catalog.step_listing import committed
from ckpt.config import SaveConfig, Tier
from ckpt.errors import CommitError, ConfigError, StepExists, StorageError
from ckpt.exchange.foreign.contents import State
from ckpt.exchange.foreign.foreign_objects import ImportReport, Shaper, digest_of
from ckpt.exchange.foreign.joined_tensors import Copier, Joiner
from ckpt.exchange.foreign.rank_files import without_warnings
from ckpt.exchange.foreign.source_formats import Kind, check_kind
from ckpt.exchange.foreign.source_reader import kind_of, read_contents
from ckpt.manager import CheckpointManager
from ckpt.model.keys import StepRef
from ckpt.state.match.saved_nodes import EQUAL
from ckpt.state.match.selection import REMOVED_PREFIX
from ckpt.storage.registry import open_backend
from ckpt.storage.urls import is_folder, relation

NEW_NUMBER: Final = "give another number by --step, or another ROOT"
_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCheckpoint:
    """A checkpoint of another program, with options for its import.

    Attributes:
        path: The path of the file or folder.
        kind: The kind of the source; None to detect it.
        plain: The names of dicts of tensors that must stay dicts, and not become modules.
        parameter_names: The names of the model's parameters in the order in which the optimizer got
            them. They are used only if the optimizer's state dict does not have these names. None
            to find the names by the order and the shapes of the model's tensors.
    """

    path: str
    kind: Kind | None = None
    plain: Sequence[str] = ()
    parameter_names: Sequence[str] | None = None


def import_checkpoint(
    foreign: ForeignCheckpoint,
    tier: Tier,
    step: int,
    *,
    list_attempts: Callable[[], list[StepRef]] | None = None,
) -> ImportReport:
    """Save the state of ``foreign`` as a step of ``tier``.

    Args:
        foreign: The checkpoint to import.
        tier: The tier that gets the checkpoint.
        step: The number of the step.
        list_attempts: A function that returns the committed attempts on ``tier``. The default lists
            the tier without a time limit.

    Raises:
        ConfigError: The source does not exist, is of no known kind, contains the root of ``tier``,
            or does not fit the other fields of ``foreign``.
        UnsupportedValue: The source contains objects that only pickle could load.
        IntegrityError: The source is damaged, or a part of it is missing.
        StepExists: The tier has the step already.
        CommitError: The tier has a later step.
    """
    source = foreign.path
    with closing(open_backend(tier.url, tier.options)) as backend:
        check_root_is_apart(source, backend.url)
        if foreign.kind:
            check_kind(source, foreign.kind)
        kind = foreign.kind or kind_of(source)
        check_step_is_new(backend.url, step, (list_attempts or partial(committed, backend))())
        local_root = backend.url if is_folder(backend.url) else None
    report = ImportReport(kind=kind)
    # With another ``every``, the tier might not take the step. With the other settings, its
    # retention would remove other steps after the import.
    import_tier = replace(
        tier, every=1, keep_last=None, keep_every=None, keep_best=None, capacity=None
    )
    with _make_folder(local_root) as scratch:
        with without_warnings():
            state = read_foreign(foreign, report, Copier(scratch))
        metadata: dict[str, Any] = {
            "imported_from": os.path.abspath(source),
            "imported_as": report.kind,
        }
        shaper = Shaper(report, foreign.plain, foreign.parameter_names)
        objects = shaper.shape(state)
        shaper.note_equal_tensors(digest_of)
        metadata |= metadata_of(shaper)
        settings = SaveConfig(slots=1, overlap="off", journal=False)
        with CheckpointManager(import_tier, config=settings, metadata=metadata) as manager:
            manager.save(objects, step=step)
    return report


def read_foreign(foreign: ForeignCheckpoint, report: ImportReport, joiner: Joiner) -> State:
    """Return the state of the source, and tell in ``report`` what it is and what it leaves
    aside.
    """
    contents = read_contents(foreign.path, foreign.kind, joiner)
    if not contents.state:
        raise ConfigError(
            f"{foreign.path} is empty, it has neither tensors nor values: save the state again, or "
            "name another file"
        )
    report.kind = contents.library or report.kind
    report.notes += contents.notes
    report.leftovers = contents.leftovers
    if report.leftovers:
        _log.info(
            "ckpt: the import of %s does not take %s", foreign.path, ", ".join(report.leftovers)
        )
    return contents.state


def metadata_of(shaper: Shaper) -> dict[str, Any]:
    """Return what a restore needs to know about the names that the source has."""
    prefix = {REMOVED_PREFIX: shaper.without_prefix} if shaper.without_prefix else {}
    return {**prefix, EQUAL: shaper.equal} if shaper.equal else prefix


def check_step_is_new(root: str, step: int, refs: Sequence[StepRef]) -> None:
    """Raise ``CommitError`` if ``refs``, the attempts in ``root``, have the step or a later one."""
    if any(ref.step == step for ref in refs):
        raise StepExists(step, root, way=NEW_NUMBER)
    if refs and (newest := max(refs).step) > step:
        raise CommitError(
            f"step {step} is out of order: {root} holds step {newest}, which a restore would go "
            "on taking as the newest; "
            f"give --step above {newest}, or another ROOT"
        )


@contextmanager
def _make_folder(folder: str | None) -> Generator[str | None]:
    """Return a context manager that creates ``folder``, if it does not exist, and yields it. If
    ``folder`` is None, create nothing and yield None.

    The block puts a scratch file into the folder. After an error in the block, the context manager
    removes the new folders that are empty.

    Args:
        folder: The root of the checkpoint if it is a folder, since it needs room for the tensors
            anyway; else None.
    """
    if folder is None:
        yield None
        return
    new_folders: list[str] = []
    place = os.path.abspath(folder)
    while not os.path.lexists(place):
        new_folders.append(place)
        place = os.path.dirname(place)
    try:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise StorageError(folder, error.strerror or str(error)) from None
        yield folder
    except BaseException:
        with suppress(OSError):  # The folder may not exist, or contain files
            for new_folder in new_folders:
                os.rmdir(new_folder)
        raise


def check_root_is_apart(source: str, root: str) -> None:
    """Raise ``ConfigError`` if ``source`` is a URL, or if ``root`` is the same folder or in it."""
    if not is_folder(source):
        raise ConfigError(f"{source} is a URL: copy it to a local folder first")
    if relation(root, source) in ("same", "inside"):
        raise ConfigError(f"{root} is inside of {source}: name a root beside it")

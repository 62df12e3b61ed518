"""``ckpt copy``: copy checkpoints from one place to another.

Each job that saves a step makes an *attempt* at it. An attempt may be stored in another encoding at
each place, which its manifest there names. An attempt with a *claim marker* is being removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final

import typer

from ckpt.catalog.rollbacks import copy_rollbacks
from ckpt.catalog.step_listing import is_committed, own_objects, read_manifest, read_packed
from ckpt.catalog.transfer import fetch_step
from ckpt.catalog.verify import StepFolder, size_faults
from ckpt.cli import output, record_tables
from ckpt.cli.options import (
    STEP_FORMS,
    TIMEOUT_SECONDS,
    ConfigFileOption,
    JsonOption,
    RootOption,
    TimeoutOption,
    find_steps,
    no_checkpoint_if_removed,
    removal_error,
    source_and_destination,
    workers_for,
)
from ckpt.cli.record_tables import Field
from ckpt.cli.watched_store import WatchedStore, open_watched
from ckpt.errors import (
    CkptError,
    ConfigError,
    FormatUnsupported,
    IntegrityError,
    NoCheckpoint,
    ObjectExists,
    ObjectNotFound,
)
from ckpt.model.keys import StepRef
from ckpt.model.selector import selector_of
from ckpt.pipeline.workers import Workers
from ckpt.plan.reads_on_other_tier import same_chunks
from ckpt.root.claim_marker import is_being_removed
from ckpt.storage.api import StorageBackend
from ckpt.storage.tiers import resolve_tier, server_of
from ckpt.storage.urls import relation


def copy(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[SOURCE] DEST",
            help="Folders or URLs; DEST is made if it is not there. SOURCE is the same as --root.",
            show_default=False,
        ),
    ],
    step: Annotated[
        str | None,
        typer.Option(
            "--step",
            metavar="STEP",
            help=f"Copy this step, with all attempts at it: {STEP_FORMS}.",
        ),
    ] = None,
    all_steps: Annotated[
        bool, typer.Option("--all", help="Copy every committed step, newest first.")
    ] = False,
    latest: Annotated[
        bool, typer.Option("--latest", help="Copy the newest step. This is the default.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Read what DEST has already too, and replace what is damaged there."
        ),
    ] = False,
    root: RootOption = None,
    config: ConfigFileOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Copy checkpoints between any two places.

    Every byte is compared with its checksum on the way, and a step appears at DEST only when it is
    complete. Data that DEST already has is skipped. A copy that was cut short continues where it
    stopped. The rollbacks of the run are copied too, so that DEST has the same newest step. SOURCE
    is never changed.

    Exit code 0: all of it is at DEST. 4: something in SOURCE is damaged; the other steps were
    copied. 7: SOURCE has no such checkpoint, or all were removed meanwhile. 3: a store failed.

    \b
    Examples:
      ckpt copy runs/gpt /mnt/backup/gpt             the newest step
      ckpt copy runs/gpt s3://bucket/run42 --all
      ckpt copy s3://bucket/run42 /nvme/run42 --step 1200
      ckpt copy runs/gpt best/gpt --step best:loss
    """
    selector = selector_of(step)
    if (step is not None) + all_steps + latest > 1:
        raise ConfigError("--step, --all and --latest exclude each other: leave all but one out")
    source, dest = source_and_destination(arguments, root, "DEST")
    tiers = [resolve_tier(place, config) for place in (source, dest)]
    origin, destination = (open_watched(tier.url, tier.options, timeout) for tier in tiers)
    if server_of(tiers[0]) == server_of(tiers[1]):
        _check_apart(origin.url, destination.url)
    refs = find_steps(origin, selector, config)
    # Checks that the store answers
    destination.call_in_time(partial(is_committed, destination, refs[0]))
    if not all_steps and selector is None:
        refs = refs[:1]
    if not destination.call_in_time(partial(copy_rollbacks, origin, destination)):
        output.warn(
            f"{destination.url} has rollbacks of its own: the newest step there may be one that "
            f"{origin.url} has abandoned"
        )
    outcomes: list[_Outcome] = []
    with workers_for(origin, destination) as workers:
        for ref in refs:
            try:
                with no_checkpoint_if_removed([origin], ref):
                    outcomes.append(_copy(origin, ref, destination, workers, check=check))
            except FormatUnsupported:
                raise
            except (IntegrityError, ObjectExists) as error:  # Other steps may still be copied
                outcomes.append(_Outcome(ref=ref, error=error))
                if not json:
                    output.warn(f"step {ref.step} was not copied: {error}")
            except NoCheckpoint:
                if len(refs) > 1:
                    output.warn(f"step {ref.step} was removed during the command")
    if not outcomes:
        raise removal_error([origin], refs[0])
    if json:
        output.show_json(
            {
                "source": origin.url,
                "dest": destination.url,
                "steps": record_tables.entries(_FIELDS, outcomes),
            }
        )
    else:
        _show(outcomes, destination.url)
    for outcome in outcomes:
        if outcome.error:
            raise typer.Exit(outcome.error.exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The result of the copy of one attempt at a step.

    Attributes:
        ref: The attempt.
        nbytes: The size of the attempt at the destination; 0 if the copy has failed.
        copied_bytes: The number of these bytes that were copied, since the destination did not have
            them intact.
        seconds: The time that the copy took; 0 if the attempt was skipped or the copy has failed.
        is_skipped: Whether the destination had the attempt already, so that no data was read.
        error: The reason why the attempt was not copied; None if it was copied or skipped.
    """

    ref: StepRef
    nbytes: int = 0
    copied_bytes: int = 0
    seconds: float = 0.0
    is_skipped: bool = False
    error: CkptError | None = None

    @property
    def result(self) -> str:
        """What the command has done, for the table. An attempt is "completed" if the destination
        had a part of it, and "intact" if a check has found all its bytes there.
        """
        if self.error:
            return "not copied"
        if self.is_skipped:
            return "already there"
        return (
            "copied"
            if self.copied_bytes == self.nbytes
            else "completed"
            if self.copied_bytes
            else "intact"
        )


_FIELDS: Final[Sequence[Field[_Outcome]]] = (
    Field("", lambda outcome: outcome.ref, kind="step"),
    Field("size", lambda outcome: outcome.nbytes, key="bytes", kind="size"),
    Field("copied", lambda outcome: outcome.copied_bytes, key="copied_bytes", kind="size"),
    Field("time", lambda outcome: outcome.seconds, key="seconds", kind="time"),
    Field("result", lambda outcome: outcome.result),
    Field("", lambda outcome: outcome.error, key="error"),
)


def _copy(
    source: StorageBackend,
    ref: StepRef,
    destination: WatchedStore,
    workers: Workers,
    *,
    check: bool,
) -> _Outcome:
    """Copy an attempt to the destination, unless it is there already. With ``check``, read what is
    there too.
    """
    folder = StepFolder(destination, ref, workers)
    if destination.call_in_time(partial(is_being_removed, destination, ref)):
        raise ObjectExists(
            ref.claim_marker,
            f"it is being removed on {destination.url}: if that was cut short, `ckpt rm "
            f"{destination.url} {ref.step}` ends it",
        )
    if not check and (nbytes := _size_of_copy(source, folder)) is not None:
        return _Outcome(ref=ref, nbytes=nbytes, is_skipped=True)
    with output.progress(f"step {ref.step}") as bar:
        report = fetch_step([source], folder, on_progress=bar)
    return _Outcome(
        ref=ref, nbytes=report.nbytes, copied_bytes=report.copied_bytes, seconds=report.seconds
    )


def _size_of_copy(source: StorageBackend, folder: StepFolder) -> int | None:
    """Return the size of an attempt at the destination; None if the destination lacks the attempt.

    The destination has the attempt if the manifest there has the same chunks as the manifest at the
    source, and its data files, and those of the steps that it refers to, have the sizes that the
    manifest says. The encoding may differ. No data file is read. The manifests need no comparison
    of chunks if their bytes are equal.
    """
    ref, destination = folder.ref, folder.backend
    _, source_manifest_bytes = read_packed(source, ref)
    try:
        copy_manifest, copy_manifest_bytes = read_packed(destination, ref)
        sizes = {info.key: info.size for info in own_objects(destination, ref)}
        files = copy_manifest.stored_files().values()
        if any(sizes.get(file.key) != file.size for file in files):
            return None
        if size_faults(folder, [file.base for file in files if file.base is not None]):
            return None
        if copy_manifest_bytes == source_manifest_bytes or same_chunks(
            read_manifest(destination, ref), read_manifest(source, ref)
        ):
            return copy_manifest.stored_bytes
        return None
    except (ObjectNotFound, IntegrityError):
        return None


def _check_apart(source: str, destination: str) -> None:
    """Raise ``ConfigError`` if two places are the same, or one of them is inside the other.

    A copy between such places would put folders of steps among the files of another place.
    """
    position = relation(source, destination)
    if position == "same":
        raise ConfigError(
            f"{source} and {destination} are the same place: name another one to copy to"
        )
    if position != "apart":
        inner, outer = (source, destination) if position == "inside" else (destination, source)
        raise ConfigError(f"{inner} is inside of {outer}: name a place beside it to copy to")


def _show(outcomes: list[_Outcome], place: str) -> None:
    record_tables.show(_FIELDS, outcomes)
    nbytes, seconds = (
        sum(outcome.copied_bytes for outcome in outcomes),
        sum(outcome.seconds for outcome in outcomes),
    )
    rate = f", {output.rate(nbytes, seconds)}" if nbytes else ""
    step_count = sum(outcome.error is None for outcome in outcomes)
    output.show_line(
        f"{output.count(step_count, 'step')} at {place}, {output.size(nbytes)} copied{rate}"
    )

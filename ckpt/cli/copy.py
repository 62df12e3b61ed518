"""``ckpt copy``: copy checkpoints from one place to another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from ckpt.catalog.index import find, is_committed, own_objects, read_manifest, read_packed
from ckpt.catalog.transfer import fetch_step
from ckpt.catalog.verify import StepFolder
from ckpt.cli import output
from ckpt.cli.options import (
    TIMEOUT_SECONDS,
    ConfigFileOption,
    JsonOption,
    RootOption,
    TimeoutOption,
    naming_a_removed,
    removed,
    source_and_other,
    workers_for,
)
from ckpt.cli.store_timeout import open_watched
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
from ckpt.pipeline.workers import Workers
from ckpt.plan.rebase import same_chunks
from ckpt.storage.api import StorageBackend
from ckpt.storage.places import relation
from ckpt.storage.tiers import resolve_tier, server_of


def copy(
    where: Annotated[
        list[str],
        typer.Argument(
            metavar="[SOURCE] DEST",
            help="Folders or URLs; DEST is made if it is not there. SOURCE is the same as --root.",
            show_default=False,
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", min=0, help="Copy this step, with all attempts at it."),
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
    stopped. SOURCE is never changed.

    Exit code 0: all of it is at DEST. 4: something in SOURCE is damaged; the other steps were
    copied. 7: SOURCE has no such checkpoint, or all were removed meanwhile. 3: a store failed.

    \b
    Examples:
      ckpt copy runs/gpt /mnt/backup/gpt             the newest step
      ckpt copy runs/gpt s3://bucket/run42 --all
      ckpt copy s3://bucket/run42 /nvme/run42 --step 1200
    """
    if (step is not None) + all_steps + latest > 1:
        raise ConfigError("--step, --all and --latest exclude each other: leave all but one out")
    source, dest = source_and_other(where, root, "DEST")
    tiers = [resolve_tier(place, config) for place in (source, dest)]
    origin, destination = (open_watched(tier.url, tier.options, timeout) for tier in tiers)
    if server_of(tiers[0]) == server_of(tiers[1]):
        _check_apart(origin.url, destination.url)
    refs = origin.ask(partial(find, origin, step))
    destination.ask(partial(is_committed, destination, refs[0]))  # Checks that the store answers
    if not all_steps and step is None:
        refs = refs[:1]
    done: list[_Copied] = []
    with workers_for(origin, destination) as workers:
        for ref in refs:
            try:
                with naming_a_removed([origin], ref):
                    done.append(_copy(origin, ref, destination, workers, check=check))
            except FormatUnsupported:
                raise
            except (IntegrityError, ObjectExists) as error:  # Other steps may still be copied
                done.append(_Copied(ref=ref, error=error))
                if not json:
                    output.warn(f"step {ref.step} was not copied: {error}")
            except NoCheckpoint:
                if len(refs) > 1:
                    output.warn(f"step {ref.step} was removed during the command")
    if not done:
        raise removed([origin], refs[0])
    if json:
        output.show_json(
            {
                "source": origin.url,
                "dest": destination.url,
                "steps": [_as_json(one) for one in done],
            }
        )
    else:
        _show(done, destination.url)
    for one in done:
        if one.error:
            raise typer.Exit(one.error.exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copied:
    """The result of the copy of one attempt at a step.

    Attributes:
        ref: The attempt.
        nbytes: The size of the attempt at the destination; 0 if the copy has failed.
        copied_bytes: The number of these bytes that were copied, since the destination did not have
            them intact.
        seconds: The time that the copy took; 0 if the attempt was skipped or the copy has failed.
        skipped: Whether the destination had the attempt already, so that no data was read.
        error: The reason why the attempt was not copied; None if it was copied or skipped.
    """

    ref: StepRef
    nbytes: int = 0
    copied_bytes: int = 0
    seconds: float = 0.0
    skipped: bool = False
    error: CkptError | None = None

    @property
    def result(self) -> str:
        if self.error:
            return "not copied"
        if self.skipped:
            return "already there"
        return (
            "copied"
            if self.copied_bytes == self.nbytes
            else "completed"
            if self.copied_bytes
            else "intact"
        )


def _copy(
    source: StorageBackend,
    ref: StepRef,
    destination: StorageBackend,
    workers: Workers,
    *,
    check: bool,
) -> _Copied:
    if not check and (nbytes := _size_there(source, ref, destination)) is not None:
        return _Copied(ref=ref, nbytes=nbytes, skipped=True)
    with output.progress(f"step {ref.step}") as bar:
        report = fetch_step([source], StepFolder(destination, ref, workers), on_progress=bar)
    return _Copied(
        ref=ref, nbytes=report.nbytes, copied_bytes=report.copied_bytes, seconds=report.seconds
    )


def _size_there(source: StorageBackend, ref: StepRef, destination: StorageBackend) -> int | None:
    """Return the size of an attempt at the destination; None if the destination lacks the attempt.

    The destination has the attempt if the manifest there has the same chunks as the manifest at the
    source, and its data files have the sizes that the manifest says. The encoding may differ. No
    data file is read.
    """
    _, packed = read_packed(source, ref)
    try:
        there, same = read_packed(destination, ref)
        sizes = {info.key: info.size for info in own_objects(destination, ref)}
        if any(sizes.get(file.key) != file.size for file in there.stored_files().values()):
            return None
        if same == packed or same_chunks(
            read_manifest(destination, ref), read_manifest(source, ref)
        ):
            return there.stored_bytes
        return None
    except (ObjectNotFound, IntegrityError):
        return None


def _check_apart(source: str, destination: str) -> None:
    """Raise ``ConfigError`` if two places are the same, or one of them is inside the other.

    A copy between such places would put folders of steps among the files of another place.
    """
    how = relation(source, destination)
    if how == "same":
        raise ConfigError(
            f"{source} and {destination} are the same place: name another one to copy to"
        )
    if how != "apart":
        inside, outside = (source, destination) if how == "inside" else (destination, source)
        raise ConfigError(f"{inside} is inside of {outside}: name a place beside it to copy to")


def _show(done: list[_Copied], place: str) -> None:
    rows = [
        (
            str(one.ref.step),
            one.ref.attempt,
            "-" if one.error else output.size(one.nbytes),
            "-" if one.error or one.skipped else output.size(one.copied_bytes),
            output.duration(one.seconds) if one.seconds else "-",
            one.result,
        )
        for one in done
    ]
    right = ("step", "size", "copied", "time")
    output.show_table(("step", "attempt", "size", "copied", "time", "result"), rows, right=right)
    nbytes, seconds = sum(one.copied_bytes for one in done), sum(one.seconds for one in done)
    rate = f", {output.rate(nbytes, seconds)}" if nbytes else ""
    here = sum(one.error is None for one in done)
    output.show_line(f"{output.count(here, 'step')} at {place}, {output.size(nbytes)} copied{rate}")


def _as_json(one: _Copied) -> dict[str, object]:
    return {
        "step": one.ref.step,
        "attempt": one.ref.attempt,
        "result": one.result,
        "bytes": one.nbytes,
        "copied_bytes": one.copied_bytes,
        "seconds": round(one.seconds, 6),
        "error": str(one.error) if one.error else None,
    }

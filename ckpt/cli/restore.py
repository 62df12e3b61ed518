"""``ckpt restore``: put an intact checkpoint into a local folder before a job starts.

A *candidate* is a committed attempt of a job at a step, which a restore may choose. A *repair* is a
file that was not intact on a nearer tier, and that was read from the next one. A *watched* store is
given up if it does not answer within ``--timeout``.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import typer

from ckpt.catalog.candidates import Candidate, candidates
from ckpt.catalog.step_listing import RootContents, find, list_root
from ckpt.catalog.tiered_reader import Repair
from ckpt.catalog.transfer import fetch_nearest
from ckpt.catalog.verify import OnProgress, StepFolder, verify_step
from ckpt.cli import output
from ckpt.cli.nearer_tiers import nearer_tiers
from ckpt.cli.options import (
    TIMEOUT_SECONDS,
    ConfigOption,
    JsonOption,
    PlacesAndStepArgument,
    StepOption,
    TimeoutOption,
    mend_advice,
    no_checkpoint_if_removed,
    places_and_step,
    step_id,
    workers_for,
)
from ckpt.cli.watched_store import WatchedStore, open_watched, watch
from ckpt.errors import CkptError, ConfigError, FormatUnsupported, IntegrityError, NoCheckpoint
from ckpt.model.keys import StepId, StepRef
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend
from ckpt.storage.tiers import open_tiers, resolve_tiers
from ckpt.storage.urls import is_folder, local_path, relation

_DEFAULT_FOLDER = "restored"


def restore(
    arguments: PlacesAndStepArgument = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="Restore the newest intact step. This is the default.")
    ] = False,
    step: StepOption = None,
    root: Annotated[
        list[str] | None,
        typer.Option(
            "--root",
            metavar="URL",
            help="Folder or URL of the checkpoints; again for farther tiers. Default: $CKPT_ROOT, "
            "then all tiers of ./ckpt.toml.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="DIR",
            help="Where to copy it. Default: the nearest folder of several tiers, else ./restored; "
            "from a local folder alone, nothing is copied.",
        ),
    ] = None,
    config: ConfigOption = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Fetch and verify the newest checkpoint.

    Prints its place. Every byte is compared with its checksum. With several tiers, nearest first,
    each part comes from the nearest tier that has it intact, and a warning names parts that were
    not intact. The nearest folder among the tiers is filled. If the newest checkpoint is damaged on
    all tiers, a warning says so and the one before it is taken. With --step no other step is taken.
    A fetch that was cut short continues where it stopped. A checkpoint in a single local folder is
    verified in its place, unless --to is given. The training script then needs no network:
    CheckpointManager("restored").

    If one remote tier is named, or one folder with --to, the agent of this node is asked where else
    on this machine the job has its steps. Newer steps and nearer bytes are taken from there.

    If a job removes the step during the command, the one before it is taken. If all listed steps
    were removed or are damaged, the steps are listed once more.

    Exit code 0: it is there and intact. 4: all that was tried is damaged. 7: there is no
    checkpoint, or it was removed meanwhile. 3: the store failed.

    \b
    Examples:
      ckpt restore runs/gpt
      ckpt restore --latest --root s3://bucket/run42 --to /nvme/run42
      ckpt restore --latest --root /nvme/run42 --root s3://bucket/run42
      ckpt restore 1200 --json | jq -r .place
      ckpt restore s3://bucket/run42 best:loss
    """
    roots, selector = places_and_step(arguments, root, step)
    if latest and selector is not None:
        raise ConfigError("--latest and --step exclude each other: leave one out")
    if roots and config:
        raise ConfigError("--root and --config exclude each other: leave one out")
    sources = _sources(roots, config, timeout)
    for source in sources[1:]:
        if is_folder(source.url) and not os.path.exists(source.url):
            output.warn(
                f"{source.url} does not exist, so nothing is read from there (--to names where to "
                "copy)"
            )
    destination = _destination(sources, target, timeout)
    if len(sources) == 1 and destination is not None:
        sources = [*nearer_tiers(sources[0], destination, timeout), *sources]
    with _removing_if_empty(destination):
        chosen_step = step_id(sources, selector, config)
        local_step = _first_intact(sources, chosen_step, destination)
    seconds, nbytes = local_step.seconds, local_step.nbytes
    if json:
        output.show_json(
            {
                "step": local_step.ref.step,
                "attempt": local_step.ref.attempt,
                "place": local_step.place,
                "root": os.path.dirname(local_step.place),
                "copied": local_step.copied_bytes is not None,
                "copied_bytes": local_step.copied_bytes or 0,
                "repaired": [asdict(repair) for repair in local_step.repairs],
                "bytes": nbytes,
                "seconds": round(seconds, 6),
                "gb_per_s": round(output.gigabytes_per_second(nbytes, seconds), 6),
            }
        )
        return
    output.show_line(
        f"step {local_step.ref.step} is "
        f"intact{', verified in place' if local_step.copied_bytes is None else ''}",
        style="green",
    )
    output.show_facts(
        {
            "place": local_step.place,
            "size": output.size(nbytes),
            "time": f"{output.duration(seconds)}, {output.rate(nbytes, seconds)}",
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalStep:
    """An intact step in a local folder.

    Attributes:
        ref: The attempt at the step.
        place: The path of the folder of the attempt.
        copied_bytes: The number of bytes that were copied; None if ``place`` is in one of the
            sources, and nothing was copied.
        nbytes: The number of bytes that were verified.
        seconds: The time that the verification or the copy took.
        repairs: The files that a nearer tier should have had intact and did not.
    """

    ref: StepRef
    place: str
    copied_bytes: int | None
    nbytes: int
    seconds: float
    repairs: tuple[Repair, ...] = ()


def _sources(roots: list[str], config: str | None, timeout: float) -> list[WatchedStore]:
    """Open the tiers to read from, and return their stores, nearest first."""
    return [watch(tier.backend, timeout) for tier in open_tiers(resolve_tiers(roots, config))]


def _destination(
    sources: list[WatchedStore], target: str | None, timeout: float
) -> WatchedStore | None:
    """Return the store to copy the step to. Return None if the only source is a local folder in
    which the step is verified without a copy.

    Args:
        sources: The stores to read from, nearest first.
        target: The value of ``--to``.
        timeout: The value of ``--timeout``.

    Raises:
        ConfigError: ``target`` is not a local folder, or is inside a folder of ``sources``.
    """
    if target is not None and not is_folder(target):
        raise ConfigError(
            f"--to {target} is a URL, and restore fetches into a local folder: copy between stores "
            f"with ckpt copy {sources[0].url} {target}"
        )
    folders = [source for source in sources if is_folder(source.url)]
    if target is None and len(sources) == 1 and folders:
        return None
    if target is None and folders:
        return folders[0]
    for folder in folders:
        if target is not None and relation(target, folder.url) == "inside":
            raise ConfigError(
                f"--to {target} is inside of {folder.url}, where checkpoints are: name a folder "
                "beside it"
            )
    destination = open_watched(target or _DEFAULT_FOLDER, None, timeout)
    is_source = (
        len(sources) == 1
        and folders
        and os.path.realpath(destination.url) == os.path.realpath(folders[0].url)
    )
    return None if is_source else destination


@contextmanager
def _removing_if_empty(destination: WatchedStore | None) -> Generator[None]:
    """Return a context manager. If its block fails, the folder of ``destination`` is removed again
    if the block has made it and it is empty.
    """
    path = "" if destination is None else local_path(destination.url)
    is_new = bool(path) and not os.path.exists(path)
    try:
        yield
    except CkptError:
        if is_new:
            with suppress(OSError):
                os.rmdir(path)
        raise


def _first_intact(
    sources: list[WatchedStore], step: StepId | None, destination: WatchedStore | None
) -> _LocalStep:
    """Try the committed attempts, newest step first, until an attempt is intact, and return it.

    A warning is printed for each attempt that is damaged or was removed, unless it is the only one.

    Args:
        sources: The stores to read from, nearest first.
        step: The only step to try; None for any step.
        destination: The store to copy the attempt to; None to verify the attempt in place.

    Raises:
        NoCheckpoint: There is no committed attempt, or all of them were removed.
        FormatUnsupported: This ckpt cannot read an attempt. No further attempt is tried.
        IntegrityError: An attempt is damaged, and each of the others is damaged or was removed.
        StorageError: The destination has failed, or a source has failed and no other source has a
            committed attempt.
    """
    try_count, has_damage = 0, False
    list_workers = Workers(
        "list", len(sources)
    )  # Not closed: a thread may still wait for its store
    # An iterator, which lists the stores by ``_root_contents``
    candidate_steps = candidates(sources, step, workers=list_workers, list_store=_root_contents)
    candidate = next(candidate_steps, None)
    with workers_for(sources[-1], *sources, *([destination] if destination else [])) as workers:
        while candidate is not None:
            ref, try_count = candidate.ref, try_count + 1
            # All stores but those that have failed
            stores = [sources[position] for position in candidate.reachable]
            try:
                with (
                    output.progress(f"step {ref.step}") as bar,
                    no_checkpoint_if_removed(stores, ref),
                ):
                    return _restore_attempt(stores, ref, destination, workers, bar)
            except FormatUnsupported:
                raise  # The step is not damaged. Restoring an older step would hide this error.
            except (IntegrityError, NoCheckpoint) as error:
                has_damage |= isinstance(error, IntegrityError)
                candidate = next(candidate_steps, None)
                if candidate is None and try_count == 1:
                    if isinstance(error, IntegrityError):
                        error.args = (f"{error}; {mend_advice(sources[-1], ref)}",)
                    raise
                reason = f"is damaged: {error}"
                if isinstance(error, NoCheckpoint):
                    reason = "was removed during the command"
                output.warn(f"step {ref.step} {reason}; {_next_text(ref, candidate)}")
    urls = ", ".join(source.url for source in sources)
    if not try_count:
        if len(sources) == 1:
            # ``find`` raises an error that describes what the store has instead.
            sources[0].call_in_time(partial(find, sources[0], step))
        raise NoCheckpoint(urls, "" if step is None else f"step {step} is not there")
    if not has_damage:
        raise NoCheckpoint(urls, f"all {try_count} that were found were removed during the command")
    raise IntegrityError(
        f"none of {try_count} checkpoints in {urls} is intact; ckpt verify --all shows what is "
        "wrong with each"
    )


def _next_text(ref: StepRef, candidate: Candidate | None) -> str:
    """Return the text that says which attempt is tried after ``ref``. ``candidate`` is that
    attempt, or None if there is no other attempt.
    """
    if candidate is None:
        return "there is no other"
    if candidate.ref.step == ref.step:
        return f"trying another attempt at it, {candidate.ref.attempt}"
    if candidate.ref.step > ref.step:
        return f"trying step {candidate.ref.step}, which was saved meanwhile"
    return f"trying step {candidate.ref.step}, the previous one"


def _root_contents(store: StorageBackend) -> RootContents:
    """Return the attempts and the rollback in a store. Raises ``TransientStorageError`` if a
    watched store does not answer within ``--timeout``.
    """
    return (
        store.call_in_time(partial(list_root, store))
        if isinstance(store, WatchedStore)
        else list_root(store)
    )


def _restore_attempt(
    sources: Sequence[StorageBackend],
    ref: StepRef,
    destination: StorageBackend | None,
    workers: Workers,
    bar: OnProgress | None,
) -> _LocalStep:
    """Verify the attempt ``ref`` in the only source, or copy it to ``destination`` if there is one.

    Raises:
        IntegrityError: The attempt is damaged, and no source has the damaged part intact.
    """
    if destination is None:
        report = verify_step(sources[0], ref, workers=workers, on_progress=bar)
        if report.faults:
            raise report.faults[0].error()
        place = os.path.join(sources[0].url, ref.folder)
        return _LocalStep(
            ref=ref,
            place=place,
            copied_bytes=None,
            nbytes=report.verified_bytes,
            seconds=report.seconds,
        )
    repairs: list[Repair] = []
    folder = StepFolder(destination, ref, workers)
    fetch = fetch_nearest(sources, folder, on_progress=bar, on_repair=repairs.append)
    for repair in repairs:
        output.warn(
            f"step {ref.step}: {repair.tier} does not have it intact, taken from the next: "
            f"{repair.reason}"
        )
    is_in_place = destination in sources and not fetch.copied_bytes
    return _LocalStep(
        ref=ref,
        place=f"{destination.url.rstrip('/')}/{ref.folder}",
        copied_bytes=None if is_in_place else fetch.copied_bytes,
        nbytes=fetch.nbytes,
        seconds=fetch.seconds,
        repairs=tuple(repairs),
    )

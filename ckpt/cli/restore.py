"""``ckpt restore``: an intact checkpoint in a local folder, before a job starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.cli.options import JsonOption, RootOption, open_root, workers_for

if TYPE_CHECKING:
    from ckpt.catalog.verify import OnProgress
    from ckpt.errors import IntegrityError
    from ckpt.model.layout import StepRef
    from ckpt.pipeline.workers import Workers
    from ckpt.storage.api import StorageBackend

_DEFAULT_FOLDER = "restored"


def restore(
    latest: Annotated[
        bool, typer.Option("--latest", help="The newest intact step. This is the default.")
    ] = False,
    step: Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="This step or none.")] = None,
    root: RootOption = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="DIR",
            help="Where to copy it. Default: ./restored; from a local folder, nothing is copied.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    r"""Fetch and verify the newest checkpoint.

    Prints where it is. Every byte is compared with its checksum. If the newest checkpoint is damaged, a warning says where and the one before is taken; with --step
    there is no second choice. A fetch that was cut short goes on where it was. A checkpoint in a local folder is verified where it lies, unless
    --to is given. The training script then needs no network: CheckpointManager("restored").

    Exit code 0: it is there and intact. 4: all that was tried is damaged. 7: there is no checkpoint. 3: the store failed.

    \b
    Examples:
      ckpt restore --latest --root runs/gpt
      ckpt restore --latest --root s3://bucket/run42 --to /nvme/run42
      ckpt restore --step 1200 --json | jq -r .place
    """
    from ckpt.catalog.index import find
    from ckpt.cli import output
    from ckpt.errors import ConfigError

    if latest and step is not None:
        raise ConfigError("--latest and --step exclude each other: leave one out")
    source = open_root(root)
    found = _first_intact(source, find(source, step), _destination(source, to))
    seconds, nbytes = found.seconds, found.nbytes
    if json:
        output.show_json(
            {
                "step": found.ref.step,
                "attempt": found.ref.attempt,
                "place": found.place,
                "root": os.path.dirname(found.place),
                "copied": found.copied,
                "bytes": nbytes,
                "seconds": round(seconds, 6),
                "gb_per_s": round(output.gigabytes_per_second(nbytes, seconds), 3),
            }
        )
        return
    output.show_line(
        f"step {found.ref.step} is intact{'' if found.copied else ', verified in place'}", style="green"
    )
    output.show_facts(
        {
            "place": found.place,
            "size": output.size(nbytes),
            "time": f"{seconds:.2f} s, {output.rate(nbytes, seconds)}",
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    ref: StepRef
    place: str
    copied: bool
    nbytes: int
    seconds: float


def _destination(source: StorageBackend, to: str | None) -> StorageBackend | None:
    """None: what is in a local folder already stays there."""
    from ckpt.storage.registry import open_backend, scheme_of

    local = scheme_of(source.url) == "file"
    if to is None and local:
        return None
    destination = open_backend(to or _DEFAULT_FOLDER)
    same = local and os.path.realpath(destination.url) == os.path.realpath(source.url)
    return None if same else destination


def _first_intact(source: StorageBackend, refs: list[StepRef], destination: StorageBackend | None) -> _Found:
    from ckpt.cli import output
    from ckpt.errors import IntegrityError

    with workers_for(source) as workers:
        for ref, following in zip(refs, [*refs[1:], None], strict=True):
            with output.progress(f"step {ref.step}") as bar:
                found = _try(source, ref, destination, workers, bar)
            if isinstance(found, _Found):
                return found
            if following is None and len(refs) == 1:
                raise found
            goes_on = f"trying step {following.step}, the one before" if following else "there is none before"
            if following and following.step == ref.step:
                goes_on = f"trying another attempt at it, {following.attempt}"
            output.warn(f"step {ref.step} is damaged: {found}; {goes_on}")
    raise IntegrityError(
        f"none of {len(refs)} checkpoints in {source.url} is intact; ckpt verify --all tells what is wrong with each"
    )


def _try(
    source: StorageBackend,
    ref: StepRef,
    destination: StorageBackend | None,
    workers: Workers,
    bar: OnProgress | None,
) -> _Found | IntegrityError:
    from ckpt.catalog.transfer import fetch_step
    from ckpt.catalog.verify import verify_step
    from ckpt.errors import FormatTooNew, IntegrityError

    if destination is None:
        checked = verify_step(source, ref, workers=workers, on_progress=bar)
        if checked.faults:
            return checked.faults[0].error()
        place = os.path.join(source.url, ref.folder)
        return _Found(
            ref=ref, place=place, copied=False, nbytes=checked.verified_bytes, seconds=checked.seconds
        )
    try:
        fetched = fetch_step(source, ref, destination, workers=workers, on_progress=bar)
    except FormatTooNew:
        raise  # not damage: an older step would hide it
    except IntegrityError as error:
        return error
    place = f"{destination.url.rstrip('/')}/{ref.folder}"
    return _Found(ref=ref, place=place, copied=True, nbytes=fetched.nbytes, seconds=fetched.seconds)

"""``ckpt ls``: what is there?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.cli.options import JsonOption, RootOption, open_root

if TYPE_CHECKING:
    from ckpt.catalog.index import Entry
    from ckpt.model.manifest import Manifest


def ls(root: RootOption = None, json: JsonOption = False) -> None:
    r"""List the checkpoints, newest first.

    Only manifests are read: "committed" means that a checkpoint is complete, `ckpt verify` tells whether its data is intact.
    "incomplete" is a save that is still under way, or was cut short; it is never restored.

    \b
    Examples:
      ckpt ls --root runs/gpt
      ckpt ls --root s3://bucket/run42 --json | jq '.steps[0].step'
    """
    from ckpt.catalog.index import survey
    from ckpt.cli import output

    backend = open_root(root)
    entries = survey(backend)
    if json:
        output.show_json({"root": backend.url, "steps": [_as_json(entry) for entry in entries]})
        return
    columns = ("step", "attempt", "committed at", "ranks", "tensors", "size", "state")
    output.show_table(columns, [_row(entry) for entry in entries], right=("step", "ranks", "tensors", "size"))


def _state(entry: Entry) -> tuple[str, str]:
    """The state and what to know about it."""
    from ckpt.errors import ManifestCorrupt

    if entry.manifest:
        return "committed", ""
    if entry.damage:
        return "damaged", entry.damage.detail if isinstance(entry.damage, ManifestCorrupt) else str(
            entry.damage
        )
    return (
        "incomplete",
        f"{entry.finished_ranks} rank{'' if entry.finished_ranks == 1 else 's'} finished, no manifest",
    )


def _row(entry: Entry) -> tuple[str, ...]:
    from ckpt.cli import output

    state, detail = _state(entry)
    told = f"{state}: {detail}" if detail else state
    found = entry.manifest
    if found is None:
        size = output.size(entry.nbytes) if entry.nbytes else "-"
        return (str(entry.ref.step), entry.ref.attempt, "-", "-", "-", size, told)
    ranks, tensors = f"{found.world_size:,}", f"{len(found.tensors):,}"
    return (
        str(found.step),
        found.attempt,
        output.moment(found.created_at),
        ranks,
        tensors,
        _size(found),
        told,
    )


def _size(manifest: Manifest) -> str:
    """What it takes on the tier; of an encoded one also what it was."""
    from ckpt.cli import output

    stored = output.size(manifest.stored_bytes)
    if not manifest.codecs:
        return stored
    return f"{stored} ({', '.join(manifest.codecs)} of {output.size(manifest.nbytes)})"


def _as_json(entry: Entry) -> dict[str, object]:
    from ckpt.cli import output

    state, detail = _state(entry)
    found = entry.manifest
    return {
        "step": entry.ref.step,
        "attempt": entry.ref.attempt,
        "state": state,
        "detail": detail or None,
        "committed_at": output.moment_utc(found.created_at) if found else None,
        "world_size": found.world_size if found else None,
        "tensors": len(found.tensors) if found else None,
        "bytes": entry.nbytes,
        "stored_bytes": found.stored_bytes if found else entry.nbytes,
        "codecs": list(found.codecs) if found else [],
    }

"""``ckpt show``: show what a checkpoint holds.

The manifest of a checkpoint names its tensors and files. A *fragment* is a small file in which a
rank describes its data file. A *base* is an older step that has a part of a data file; an *outer
base* is in another root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Any, Final

import msgspec
import typer

from ckpt.catalog.late_metrics import late_metrics, with_late
from ckpt.catalog.step_listing import own_objects, read_manifest
from ckpt.cli import output
from ckpt.cli.options import (
    TIMEOUT_SECONDS,
    ConfigFileOption,
    JsonOption,
    PlaceAndStepArgument,
    RootOption,
    StepOption,
    TimeoutOption,
    adding_mend_advice,
    find_steps,
    no_checkpoint_if_removed,
    open_root,
    place_and_step,
)
from ckpt.cli.output import ranges
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Manifest, StoredFile, bases_of
from ckpt.model.values import check_structure, decode, exact_text, join, parse
from ckpt.storage.api import ObjectInfo, StorageBackend

_MOST_CHARS: Final = 100
_MOST_VALUES: Final = 10_000


def show(
    arguments: PlaceAndStepArgument = None,
    step: StepOption = None,
    root: RootOption = None,
    config: ConfigFileOption = None,
    files: Annotated[
        bool, typer.Option("--files", help="Also the files, and the rank that wrote each.")
    ] = False,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Show what a checkpoint holds.

    Lists its tensors, plain values and metadata. No data file is read. "written by" names the ranks
    whose files hold the bytes of a tensor.

    \b
    Examples:
      ckpt show runs/gpt                 the newest step; "latest" says the same
      ckpt show runs/gpt 1200 --files
      ckpt show runs/gpt best:loss       the step with the lowest loss
      ckpt show 1200 --json | jq '.tensors[].name'
    """
    place, selector = place_and_step(arguments, root, step)
    backend = open_root(place, config, timeout=timeout)
    ref = find_steps(backend, selector, config)[0]
    with adding_mend_advice(backend, ref), no_checkpoint_if_removed([backend], ref):
        manifest, objects = backend.call_in_time(partial(_read, backend, ref))
    if json:
        output.show_json(_as_json(manifest, objects, f"{backend.url.rstrip('/')}/{ref.folder}"))
        return
    output.show_line(f"step {manifest.step}", style="bold")
    output.show_facts(
        {
            "attempt": manifest.attempt,
            "place": f"{backend.url.rstrip('/')}/{ref.folder}",
            "committed at": output.moment(manifest.created_at),
            **_origin(manifest),
            "size": f"{output.size(_tier_bytes(objects))} in "
            f"{output.count(len(objects), 'file')}{_codec_text(manifest)}{_base_text(manifest)}",
            "format": f"{manifest.format}, chunks of up to {manifest.chunk_bytes / 2**20:g} MiB",
        }
    )
    _show_tensors(manifest)
    _show_values("values", _values(manifest))
    _show_values("metadata", _metadata(manifest))
    if files:
        _show_files(manifest)


def _read(backend: StorageBackend, ref: StepRef) -> tuple[Manifest, list[ObjectInfo]]:
    """Return the manifest, and the objects of the step. The metadata of the manifest includes the
    metrics that were added after the commit.
    """
    manifest = read_manifest(backend, ref)
    objects = own_objects(backend, ref)
    metrics = late_metrics(backend, ref, [info.key for info in objects])
    metadata = with_late(manifest.metadata, metrics)
    return msgspec.structs.replace(manifest, metadata=metadata), objects


def _show_tensors(manifest: Manifest) -> None:
    total = sum(tensor.nbytes for tensor in manifest.tensors)
    output.show_line()
    output.show_line(
        f"{output.count(len(manifest.tensors), 'tensor')}, {output.size(total)}", style="bold"
    )
    rows = [
        (
            tensor.name,
            tensor.dtype,
            " x ".join(map(str, tensor.shape)) or "scalar",
            output.size(tensor.nbytes),
            str(len(tensor.shards)),
            output.ranges([shard.rank for shard in tensor.shards]) or "-",
        )
        for tensor in manifest.tensors
    ]
    if rows:
        output.show_table(
            ("name", "dtype", "shape", "size", "shards", "written by"),
            rows,
            right=("size", "shards"),
        )
    if manifest.tied:
        output.show_line()
        output.show_line(f"{output.count(len(manifest.tied), 'tied name')}", style="bold")
        output.show_table(("name", "same as"), sorted(manifest.tied.items()))


def _show_values(title: str, values: Mapping[str, str]) -> None:
    if values:
        output.show_line()
        output.show_line(title, style="bold")
        output.show_facts(dict(islice(values.items(), _MOST_VALUES)))
        if len(values) > _MOST_VALUES:
            output.show_line(f"  and {len(values) - _MOST_VALUES:,} more: --json lists them all")


def _origin(manifest: Manifest) -> dict[str, str]:
    if foreign := len(manifest.locations):
        return {"adopted": f"{output.count(foreign, 'file')} of another program"}
    return {"written by": output.count(manifest.world_size, "rank")}


def _codec_text(manifest: Manifest) -> str:
    if not manifest.codecs:
        return ""
    return f", {', '.join(manifest.codecs)} of {output.size(manifest.nbytes)}"


def _base_text(manifest: Manifest) -> str:
    """Return the text that names the bases of the step; empty if it has none."""
    texts: list[str] = []
    if manifest.bases:
        texts.append(f"step {output.ranges([ref.step for ref in manifest.bases])}")
    outer_bases = sorted(base for base in bases_of(manifest.increments) if base.root)
    texts += [f"step {base.ref.step} of {base.root}" for base in outer_bases]
    return f"; a part is in {' and '.join(texts)}" if texts else ""


def _show_files(manifest: Manifest) -> None:
    """Print a row for each data file, and one for each fragment. A data file with a ``location`` is
    a file of another program, at this path.
    """
    output.show_line()
    output.show_line("files", style="bold")
    fragments = {fragment.rank: fragment for fragment in manifest.fragments}
    data_files = manifest.stored_files()  # By rank
    rows: list[tuple[str, ...]] = []
    for rank in sorted(fragments):
        if rank in data_files:
            rows.append(
                (
                    data_files[rank].location or data_files[rank].file.name,
                    str(rank),
                    output.size(data_files[rank].size),
                    str(len(data_files[rank].chunks) - len(data_files[rank].base_chunks)),
                    _contents(data_files[rank]),
                )
            )
        rows.append(
            (fragments[rank].name, str(rank), output.size(fragments[rank].size), "-", "fragment")
        )
    output.show_table(
        ("name", "rank", "size", "chunks", "holds"), rows, right=("rank", "size", "chunks")
    )


def _contents(file: StoredFile) -> str:
    if file.base is None:
        return "tensors"
    place = f" of {file.base.root}" if file.base.root else ""
    count = output.count(len(file.base_chunks), "chunk")
    return f"tensors; {count} in step {file.base.ref.step}{place}"


def _tier_bytes(objects: Sequence[ObjectInfo]) -> int:
    return sum(info.size for info in objects)


def _as_json(manifest: Manifest, objects: Sequence[ObjectInfo], place: str) -> dict[str, object]:
    """Return the contents of a step for the JSON output.

    Args:
        manifest: The manifest. A shard of a tensor is in the file of a rank: ``offset`` is its
            position there, and ``offsets`` is its position in the tensor.
        objects: The files in the folder of the step.
        place: The URL of this folder.
    """
    return {
        "step": manifest.step,
        "attempt": manifest.attempt,
        "place": place,
        "committed_at": output.moment_utc(manifest.created_at),
        "world_size": manifest.world_size,
        "format": manifest.format,
        "chunk_bytes": manifest.chunk_bytes,
        "bytes": manifest.nbytes,
        "stored_bytes": manifest.stored_bytes,
        "tier_bytes": _tier_bytes(objects),
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "order": list(tensor.order) or list(range(len(tensor.shape))),
                "bytes": tensor.nbytes,
                "shards": [
                    {
                        "rank": shard.rank,
                        "offset": shard.offset,
                        "offsets": list(shard.offsets),
                        "shape": list(shard.shape),
                    }
                    for shard in tensor.shards
                ],
            }
            for tensor in manifest.tensors
        ],
        "tied": dict(manifest.tied),
        "tree": parse(manifest.tree),
        "per_rank": {rank: parse(raw, "per_rank") for rank, raw in manifest.per_rank.items()},
        "metadata": parse(manifest.metadata, "metadata"),
        "files": _files(manifest),
        "fragments": [
            {"name": item.name, "rank": item.rank, "bytes": item.size}
            for item in manifest.fragments
        ],
    }


def _files(manifest: Manifest) -> list[dict[str, object]]:
    return [
        {
            "name": stored_file.file.name,
            "rank": stored_file.rank,
            "bytes": stored_file.file.size,
            "chunks": len(stored_file.chunks),
            "codec": stored_file.codec,
            "location": stored_file.location or None,
            "stored_bytes": stored_file.size,
            "base": stored_file.base.key if stored_file.base else None,
            "base_chunks": len(stored_file.base_chunks),
        }
        for stored_file in manifest.stored_files().values()
    ]


@dataclass(frozen=True, slots=True)
class _TaggedValue:
    """A node of a manifest's tree whose tag ``ckpt.model.values`` does not define.

    Attributes:
        tag: The tag of the node, such as "tensor", "module" or "optimizer".
        fields: The other fields of the node, decoded.
    """

    tag: str
    fields: Mapping[str, Any]


def _decode_tree(raw: msgspec.Raw) -> Any:
    """Decode a tree of a manifest to Python values. A node with a tag that ``ckpt.model.values``
    does not define becomes a `_TaggedValue`.

    The content of the tree cannot cause an import or a call.
    """

    def tagged_value(tag: str, node: Mapping[str, Any]) -> object:
        return _TaggedValue(
            tag, {key: decode(item, tagged_value) for key, item in node.items() if key != "$"}
        )

    return decode(parse(raw), tagged_value)


def _values(manifest: Manifest) -> dict[str, str]:
    """Return the plain values of the state as text, by name, without tensors.

    The text of a ``PerRank`` value only lists the ranks that have the value.
    """
    with check_structure("tree"):
        values = dict(_value_texts("", _decode_tree(manifest.tree)))
        ranks_by_name: dict[str, list[int]] = {}
        for rank, raw in manifest.per_rank.items():
            node = _decode_tree(raw)
            for name in node if isinstance(node, dict) else ():
                ranks_by_name.setdefault(str(name), []).append(int(rank))
    return values | {
        name: f"<one per rank: {ranges(ranks)}>" for name, ranks in ranks_by_name.items()
    }


def _metadata(manifest: Manifest) -> dict[str, str]:
    with check_structure("metadata"):
        return dict(_value_texts("", _decode_tree(manifest.metadata)))


def exact_values(manifest: Manifest) -> dict[str, str]:
    """Return the plain values of the state as text, by name, for a comparison of two checkpoints.

    A ``PerRank`` value has an item for each rank. The texts of plain values are not shortened, so
    two plain values are equal if their texts are equal.
    """
    with check_structure("tree"):
        values = dict(_value_texts("", _decode_tree(manifest.tree), exact_text))
        for rank, raw in manifest.per_rank.items():
            node = _decode_tree(raw)
            for name, value in node.items() if isinstance(node, dict) else ():
                values |= {
                    f"{path} of rank {rank}": text
                    for path, text in _value_texts(str(name), value, exact_text)
                }
    return values


def _value_texts(
    path: str, value: Any, text_of: Callable[[Any], str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each plain value of ``value``, without tensors.

    Args:
        path: The name of ``value``; "" for the whole state.
        value: The decoded state, or a part of it. A value that is not a plain one, such as a tensor
            or an optimizer, is a `_TaggedValue` with a tag and fields.
        text_of: Returns the text of a plain value. The default, ``short``, limits its length.
    """
    match value:
        case _TaggedValue(tag="tensor" | "array"):  # ``ckpt show`` lists tensors in a table
            return
        case _TaggedValue(tag=tag, fields=fields) if not any(
            isinstance(item, dict | list | _TaggedValue) for item in fields.values()
        ):
            tag_text = f"<{tag}{''.join(f' {(text_of or str)(item)}' for item in fields.values())}>"
            yield path, tag_text if text_of else clip(tag_text)
        case _TaggedValue(tag="optimizer", fields={"groups": list(groups), "state": dict(state)}):
            for index, group in enumerate(groups):
                yield from _setting_texts(
                    join(join(path, "param_groups"), str(index)), group, text_of
                )
            for name, item in state.items():  # The names begin at the root of the whole state
                yield from _value_texts(
                    name if isinstance(name, str) else join(path, name), item, text_of
                )
            # What the optimizer has beside its groups and the state of its parameters.
            for key in value.fields.keys() & {"extra", "values"}:
                yield from _value_texts(join(path, key), value.fields[key], text_of)
        case _TaggedValue(tag=tag, fields=fields):
            for key, item in fields.items():
                if (tag, key) == ("module", "versions"):  # They are no values of the state
                    continue
                # The value that the node wraps has the name of the node itself.
                item_path = path if key in ("v", "values") else join(path, key)
                yield from _value_texts(item_path, item, text_of)
        case dict() if value or not path:
            for key, item in value.items():
                yield from _value_texts(join(path, key), item, text_of)
        case list() | tuple() if _holds_named_values(value):
            for index, item in enumerate(value):
                yield from _value_texts(join(path, str(index)), item, text_of)
        case None if not path:
            return
        case _:
            yield path or ".", (text_of or short)(value)


def _holds_named_values(value: Any) -> bool:
    """Return True if ``value``, or a value in its lists and tuples, is a dict or tagged. Then its
    items have names of their own.
    """
    if isinstance(value, list | tuple):
        return any(map(_holds_named_values, value))
    return isinstance(value, dict | _TaggedValue)


def _setting_texts(
    path: str, group: Any, text_of: Callable[[Any], str] | None
) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each setting of a parameter group of an optimizer.

    The node of a group has the settings in its item "values". The names of the settings do not
    contain the word "values".

    Args:
        path: The name of the group.
        group: The node of the group.
        text_of: Returns the text of a plain value; None to limit its length.
    """
    if not isinstance(group, dict) or "values" not in group:
        yield from _value_texts(path, group, text_of)
        return
    yield from _value_texts(path, group["values"], text_of)
    for key, item in group.items():
        if key != "values":
            yield from _value_texts(join(path, key), item, text_of)


def short(value: Any) -> str:
    """Return a plain value as text on one line of limited length."""
    if isinstance(value, bytes | bytearray) and len(value) > 16:
        return f"<{type(value).__name__}, {len(value)} bytes>"
    return clip(exact_text(value))


def clip(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."

"""Compose the texts of errors about fragments that contradict each other.

A fragment has a *tree*, which is the state of its rank without its tensors, as JSON. A *node* is a
value in it. The node of a value that JSON cannot represent, such as a module, has its kind under
the key "$".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ckpt.model.box import Box
from ckpt.model.manifest import Tensor
from ckpt.model.values import Node, join

_MOST_LISTED: Final = 6
_CAUSE: Final = (
    "a mesh that changed, or a layout that differs between ranks? All must save the same state "
    "under the same mesh. A module that only some "
    "ranks have, such as an expert, needs a wrapper of its own: fully_shard(expert, mesh=...)"
)


def ranks_text(parts: Sequence[tuple[int, Tensor]]) -> str:
    """Return a text that lists the boxes of a tensor by the ranks that have written them, and names
    possible causes of a hole or an overlap.

    Args:
        parts: The ranks that have the tensor, each with the tensor and the shards that it wrote.
    """
    boxes: dict[tuple[Box, ...], list[int]] = defaultdict(list)
    for rank, tensor in parts:
        boxes[tuple(shard.box for shard in tensor.shards)].append(rank)
    lines = [
        f"{_ranks_phrase(ranks)} wrote {_boxes_phrase(boxes_of_rank)}"
        for boxes_of_rank, ranks in boxes.items()
    ]
    rest = f"; and {len(lines) - _MOST_LISTED} more" if len(lines) > _MOST_LISTED else ""
    return f"{'; '.join(lines[:_MOST_LISTED])}{rest} ({_CAUSE})"


def forms_text(parts: Sequence[tuple[int, Tensor]]) -> str | None:
    """Return a text that lists the dtypes and shapes of a tensor by the ranks that have them.

    Return None if all ranks have the same dtype and shape. ``parts`` are the ranks that have the
    tensor, each with the tensor.
    """
    forms: dict[str, list[int]] = defaultdict(list)
    for rank, tensor in parts:
        forms[f"{tensor.dtype}{list(tensor.shape)}"].append(rank)
    if len(forms) == 1:
        return None
    return "ranks disagree: " + " and ".join(
        f"{form} on {_ranks_phrase(ranks)}" for form, ranks in forms.items()
    )


def kind_of(node: Node) -> str:
    """Return the name of the kind of a node, such as 'list' or 'optimizer'."""
    if isinstance(node, dict):
        return str(node.get("$", "dict"))
    return {list: "list", str: "string", type(None): "None"}.get(type(node), type(node).__name__)


def values_beside_tensors(node: Node, path: str = "") -> Iterator[str]:
    """Yield the names of the plain values of modules and of optimizers' states in a tree.

    On another rank, the same name may belong to a tensor.
    """
    if not isinstance(node, dict):
        return
    match node.get("$"):
        case None:
            for key, item in node.items():
                yield from values_beside_tensors(item, join(path, key))
        case "module":
            yield from (f"{path}/{fqn}" for fqn in node["values"])
        case "optimizer":
            yield from node["state"]
        case _:
            pass


def kind_conflict(
    trees: Sequence[tuple[int, Node]], tensors: Mapping[str, int]
) -> tuple[str, int, int] | None:
    """Return a name that is a tensor on one rank and a plain value on another, the rank with the
    tensor, and the rank with the plain value. Return None if there is no such name.

    Args:
        trees: Ranks with their trees.
        tensors: The names of all tensors, each with a rank that has it.
    """
    for rank, tree in trees:
        for name in values_beside_tensors(tree):
            if name in tensors:
                return name, tensors[name], rank
    return None


def _ranks_phrase(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:_MOST_LISTED])) + (" ..." if len(ranks) > _MOST_LISTED else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def _boxes_phrase(boxes: Sequence[Box]) -> str:
    texts = [f"{list(box.shape)} at {list(box.offsets)}" for box in boxes[:_MOST_LISTED]]
    return (", ".join(texts) or "nothing") + (" ..." if len(boxes) > _MOST_LISTED else "")

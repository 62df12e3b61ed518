"""Values of JSON with small changes at any place.

A damaged writer, or a hostile one with the right checksum, might leave such values.
"""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

WILD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    5,
    64,
    4096,
    2**31,
    2**53,
    2**60,
    2**63 - 1,
    2**64 - 1,
    -(2**63),
    1e308,
    -0.5,
    "",
    "x",
    "../../etc/passwd",
    "/etc/passwd",
    "C:\\windows",
    "rank-00000.safetensors\0",
    "rank-٠٠٠٠٠.safetensors",
    "a" * 5000,
    [],
    {},
    [[]],
    [1, 2],
    {"$": "tuple"},
    {"$": "tensor", "n": "weight"},
    {"$": "tensor"},
    {"$": "nonsense", "v": 1},
    {"$": 7},
    {"$": []},
    {"$": "int", "v": "f" * 9000},
    {"$": "numpy", "d": "<f8", "v": ""},
    {"$": "numpy", "d": "O", "v": "AAAA"},
    {"$": "set", "v": [[1]]},
    {"$": "bytes", "v": "é"},
    {"$": "dict", "v": [[[1], 2]]},
    {"$": "dict", "v": [1]},
    {"$": "module", "values": 3},
    {"$": "optimizer", "groups": 1, "state": []},
    {"$": "object", "v": {"$": "per_rank"}},
    {"$": "dtype", "v": "no_such"},
    {"$": "device", "v": "cuda:99"},
    {"$": "size", "v": "x"},
    {"$": "complex", "v": []},
    {"$": "float", "v": []},
    {"$": "Counter", "v": [[1, {}]]},
    {"$": "array", "n": "weight", "d": "no"},
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in ``node``."""
    children = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


@st.composite
def mutated(draw: st.DrawFn, node: Any, most: int = 3) -> Any:
    """Change ``node`` at one to ``most`` places.

    A change replaces, removes or doubles a value, or moves it to another place.
    """
    node = copy.deepcopy(node)
    for _ in range(draw(st.integers(1, most))):
        everywhere = places(node)
        path = everywhere[draw(st.integers(0, len(everywhere) - 1))]
        if not path:
            continue
        parent = node
        for key in path[:-1]:
            parent = parent[key]
        key = path[-1]
        match draw(
            st.sampled_from(["replace", "replace", "replace", "remove", "double", "move", "nudge"])
        ):
            case "replace":
                parent[key] = copy.deepcopy(draw(st.sampled_from(WILD)))
            case "remove":
                del parent[key]
            case "double" if isinstance(parent, list):
                parent.insert(key, copy.deepcopy(parent[key]))
            case "move":
                other = node
                for step in everywhere[draw(st.integers(0, len(everywhere) - 1))]:
                    if (
                        not isinstance(other, dict | list)
                        or (
                            isinstance(other, list)
                            and not (isinstance(step, int) and step < len(other))
                        )
                        or (isinstance(other, dict) and step not in other)
                    ):
                        break
                    other = other[step]
                parent[key] = copy.deepcopy(other)
            case "nudge" if type(parent[key]) is int:
                parent[key] += draw(st.integers(-2, 2))
            case _:
                parent[f"{key}x" if isinstance(parent, dict) else key] = 1
    return node

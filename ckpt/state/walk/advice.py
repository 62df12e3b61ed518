"""Give advice in the errors about values that cannot be saved."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import io
import os
import random
import types
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np
import torch
from torch.utils.data import DataLoader

_REMAKE_ADVICE: Final = (
    "it is made by code, so leave it out of the state, and make it again before the restore"
)
_SAVE_BYTES_ADVICE: Final = (
    "save its bytes, .getvalue(), and make it again of them. Extra state is such a value if "
    "get_extra_state() returns the bytes, or a tensor of them as Transformer Engine does from "
    "version 1.14 on"
)
_GENERATOR_ADVICE: Final = (
    "put the generator into the state itself, outside of any state_dict(), or let the state_dict() "
    "give its present state as a plain value"
)
_DATA_POSITION_ADVICE: Final = (
    "leave it out, and put the position in the data into the state: an ElasticSampler of "
    "ckpt.data as the sampler of the loader (docs/data.md)"
)
_STATELESS_ADVICE: Final = "it has no state, so leave it out"
_CODE_TYPES: Final = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    partial,
)


def advice_for(value: object) -> str:
    """Return a text that says how to save the content of ``value`` in another way; empty if there
    is no advice for this kind of value. ``value`` has no ``state_dict``.
    """
    match value:
        case enum.Enum():
            return "save its .value, and make it again of that"
        case _ if isinstance(value, _CODE_TYPES):
            return _REMAKE_ADVICE
        case io.IOBase():  # It counts as an iterator too
            return _SAVE_BYTES_ADVICE if isinstance(value, io.BytesIO) else _REMAKE_ADVICE
        case Iterator():
            return "save the position that it has reached, as a plain value"
        case DataLoader():
            return _DATA_POSITION_ADVICE
        case random.SystemRandom():
            return _STATELESS_ADVICE
        case torch.Generator() | random.Random() | np.random.Generator() | np.random.RandomState():
            return _GENERATOR_ADVICE
        case os.PathLike():
            return "save it as a string: str(...)"
        case dt.date() | dt.time():  # ``datetime`` is a subclass of ``date``
            return "save it as a string: .isoformat()"
        case Namespace() | types.SimpleNamespace():
            return "save it as a dict: vars(...)"
        case tuple() if hasattr(value, "_asdict"):
            return "save it as a dict: ._asdict()"
        case dict():
            return "save it as a plain dict: dict(...)"
        case _ if dataclasses.is_dataclass(value):
            return "save it as a dict: dataclasses.asdict(...)"
        case _:
            return ""

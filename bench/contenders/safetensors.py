"""``safetensors``: the tensors in one file per rank, what is no tensor as JSON in its header."""

from __future__ import annotations

import json

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bench.contenders.torch_save import TorchSave
from bench.contenders.trees import land, leaves, own_state
from bench.state import Subject


class SafetensorsSave(TorchSave):
    """``save_file``, with the same care as ``torch.save``; loads tensor by tensor through
    ``safe_open``, into the live tensors.
    """

    def _write(self, file: str) -> None:
        found = leaves(own_state(self._subject))
        tensors = {path: leaf for path, leaf in found.items() if isinstance(leaf, Tensor)}
        values = {path: leaf for path, leaf in found.items() if path not in tensors}
        save_file(tensors, file, {"values": json.dumps(values)})

    def _read(self, file: str, into: Subject) -> None:
        with safe_open(file, framework="pt") as opened:
            values = json.loads(opened.metadata()["values"])
            land(into, lambda path: values[path] if path in values else opened.get_tensor(path))

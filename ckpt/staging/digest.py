"""Telling replicas apart that should be equal."""

from __future__ import annotations

from typing import Final

import torch

from ckpt.model.checksum import checksum

_ROW: Final = 1021


def digest(tensor: torch.Tensor) -> str:
    """Tells replicas that have drifted apart; it is no checksum of stored data. Large tensors are folded on their own device first: each row of words to its xor.
    A row has an odd number of words, so that constants do not cancel out.
    """
    whole = tensor.detach().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)  # one element may have any stride
    rows = flat.numel() // (8 * _ROW)
    if not rows:
        return checksum(flat.cpu().numpy().data)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    folded = rows * 8 * _ROW
    words = flat[:folded].view(torch.int64).view(rows, _ROW)
    xors = torch.hash_tensor(words, dim=1).view(torch.int64)
    return f"{checksum(xors.cpu().numpy().data)}{checksum(flat[folded:].cpu().numpy().data)}"

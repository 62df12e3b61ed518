"""Read tensors of a checkpoint without a model: the implementation of ``ckpt.open``.

A *selector* is the number of a step, or a name such as ``best:loss``. A *box* is a rectangular
region of a tensor.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import partial
from types import EllipsisType
from typing import Any, Final, Self

import torch

from ckpt.catalog.branch_metrics import step_on
from ckpt.catalog.inventory import Inventory
from ckpt.catalog.step_listing import Listing, find, read_manifest
from ckpt.catalog.tensor_reader import ReadRequest, StepReader
from ckpt.config import Tier
from ckpt.errors import ConfigError
from ckpt.errors.storage import with_short_traceback
from ckpt.model.box import Box
from ckpt.model.dtype import DTYPES
from ckpt.model.manifest import Tensor
from ckpt.model.selector import NamedStep, selector_of
from ckpt.observe.history import history_of
from ckpt.observe.journal_reader import JournalReader
from ckpt.observe.metric_modes import modes_of_run
from ckpt.observe.step_rows import step_rows
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from ckpt.storage.urls import is_folder

Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]

_MOST_THREADS: Final = 8


class OpenCheckpoint:
    """A checkpoint that ``ckpt.open`` has opened for reading.

    Close the checkpoint with ``close`` or a ``with`` block. If an object that was not closed is
    garbage-collected, Python emits a ``ResourceWarning``, as for a file. Views of the tensors can
    still be read then.

    Attributes:
        step: The number of the step.
        root: The URL of the root, without credentials.
        reader: The reader of the step, which the views use.

    Thread safety:
        One thread at a time may use the checkpoint and its views.
    """

    def __init__(self, root: str | os.PathLike[str] | Tier, step: int | str | None) -> None:
        self._closed = True
        selector = selector_of(step)
        tier = root if isinstance(root, Tier) else Tier(os.fspath(root))
        self._backend = open_backend(tier.url, tier.options)
        self.root = self._backend.url
        try:
            # Whether the lowest or the highest value of a metric is the best
            find_metric_modes = partial(modes_of_run, [tier], [self.root])
            number = (
                step_on([self._backend], selector, find_metric_modes)
                if isinstance(selector, NamedStep)
                else selector
            )
            ref = find(self._backend, number)[0]
            manifest = read_manifest(self._backend, ref)
        except BaseException:
            self._backend.close()
            raise
        self.step = ref.step
        thread_count = max(1, min(self._backend.capabilities.max_concurrency, _MOST_THREADS))
        self._workers = Workers("open", thread_count)
        self.reader = StepReader(self._backend, ref, manifest, self._workers)
        self._closed = False

    def steps(self) -> list[int]:
        """Return the numbers of the committed steps in this root, newest first.

        Pass one of these numbers to ``ckpt.open`` as ``step`` to open that step.
        """
        return Listing([self._backend]).steps()[::-1]

    def history(self) -> list[dict[str, Any]]:
        """Return a row for each step that this root has or had, in ascending order of the steps.

        A row has the step, when it was saved, its state, size and times, and each of its metrics,
        so that ``pandas.DataFrame(opened.history())`` is a table. The steps that the root has come
        from their manifests. Steps that were removed or failed come from the journal of the run,
        which is beside a folder; so they are missing for an object store.
        """
        url = self._backend.url
        records = JournalReader(url).read() if is_folder(url) else []
        steps = Inventory(self._backend, for_display=True).look()
        return step_rows(url, steps, history_of(records))

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted. Tied names are included."""
        return sorted(self.reader.tensors)

    def tensor(self, name: str) -> TensorView:
        """Return a view of the tensor ``name``. Nothing is read until the view is indexed.

        Raises:
            EntryMissing: The checkpoint has no tensor of this name.
        """
        return TensorView(self.reader, name)

    def close(self) -> None:
        """End the threads and close the connections. Tensors that were read before stay valid."""
        self._closed = True
        self._workers.close()
        self._backend.close()

    def __del__(self) -> None:
        if not self._closed:
            warnings.warn(
                f"unclosed {self!r}: use it in a with block, or close it",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<step {self.step} in {self.root}: {len(self.reader.tensors)} tensors>"


class TensorView:
    """A view of one whole tensor of a checkpoint. Any number of ranks may have written its parts.

    Nothing is read until the view is indexed. ``view[...]`` reads the whole tensor.
    ``view[100:200]``, ``view[:, 3]`` and ``view[-1]`` read only the chunks that hold the wanted
    elements. Every chunk that is read is verified. The result is a new tensor in host memory.

    An index consists of integers, slices with a positive step, and ``...``. A slice with a step
    above 1 reads all chunks between its first and its last element. Other types of indices raise
    ``TypeError``, a slice with a negative step raises ``ConfigError``, and an integer that is out
    of range raises ``IndexError``.
    """

    def __init__(self, reader: StepReader, name: str) -> None:
        self._reader, self.name = reader, name
        self._tensor: Tensor = reader.tensor(name)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._tensor.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return self._tensor.nbytes

    def __getitem__(self, index: Index) -> torch.Tensor:
        box, box_index = _resolve(index, self._tensor.shape)
        return self._read(box)[box_index]

    def __len__(self) -> int:
        if not self._tensor.shape:
            raise TypeError("a 0-d tensor has no length")
        return self._tensor.shape[0]

    def __repr__(self) -> str:
        return f"<{self.name!r}: {self._tensor.dtype} {list(self._tensor.shape)}, not read>"

    def _read(self, box: Box) -> torch.Tensor:
        if not box.numel:
            return torch.empty(box.shape, dtype=self.dtype, device="cpu")
        nbytes = box.numel * DTYPES[self._tensor.dtype].itemsize
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        # An array is a buffer, but Python 3.11 has no ``collections.abc.Buffer`` to declare that.
        self._reader.read([ReadRequest(self.name, box, memoryview(memory.numpy()))])  # type: ignore[arg-type]
        return memory.view(self.dtype).view(box.shape)


@with_short_traceback
def open_checkpoint(
    root: str | os.PathLike[str] | Tier, step: int | str | None = None
) -> OpenCheckpoint:
    """Open a committed checkpoint for reading names, tensors and slices of tensors.

    No model is needed, and only the wanted tensors are read.

    ::

        with ckpt.open("runs/gpt") as opened:
            rows = opened.tensor("model/embed.weight")[100:200]

    Args:
        root: The folder or URL of the root, or a `Tier` if its backend needs options.
        step: The number of the step, or a selector such as ``"best:loss"`` or ``"latest~1"``, as
            for ``CheckpointManager.restore``; None for the newest checkpoint.

    Raises:
        NoCheckpoint: The root has no checkpoint of ``step``, or no checkpoint at all.
        IntegrityError: The manifest is damaged, or is in a format that this ckpt cannot read.
        StorageError: The root cannot be read.
        ConfigError: No backend serves the URL, or ``step`` is invalid.
    """
    return OpenCheckpoint(root, step)


def _resolve(index: Index, shape: Sequence[int]) -> tuple[Box, tuple[int | slice, ...]]:
    """Return the box of a tensor of ``shape`` to read, and the index that selects the wanted
    elements from this box.
    """
    ranges: list[tuple[int, int]] = []
    box_index: list[int | slice] = []
    for size, item in zip(shape, _items(index, shape), strict=True):
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step < 1:
                raise ConfigError("a slice with a negative step: read it forwards, then flip(0)")
            ranges.append((start, max(0, stop - start)))
            box_index.append(slice(None, None, step))
        else:
            if not -size <= item < size:
                raise IndexError(f"index {item} is out of range for a dimension of {size}")
            ranges.append((item % size, 1))  # A negative index counts from the end
            box_index.append(0)
    return Box(tuple(start for start, _ in ranges), tuple(length for _, length in ranges)), tuple(
        box_index
    )


def _items(index: Index, shape: Sequence[int]) -> list[int | slice]:
    """Return the items of ``index``, completed with full slices to one item for each dimension."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(
        isinstance(item, bool) or not isinstance(item, int | slice | EllipsisType) for item in items
    ):
        raise TypeError(
            "index with whole numbers, slices and ...: read with [...] first for anything else"
        )
    count = sum(item is not ... for item in items)
    if items.count(...) > 1 or count > len(shape):
        raise IndexError(f"{count} indices for a tensor of {len(shape)} dimensions")
    position = items.index(...) if ... in items else len(items)
    full_items = [*items[:position], *[slice(None)] * (len(shape) - count), *items[position + 1 :]]
    return [item for item in full_items if not isinstance(item, EllipsisType)]

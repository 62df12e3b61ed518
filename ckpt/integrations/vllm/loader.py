"""The model loader for vLLM: it reads the weights of a committed step, named by a ``StepRef``."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.distributed import get_world_group  # pyright: ignore[reportMissingImports]
from vllm.model_executor.model_loader.base_loader import (  # pyright: ignore[reportMissingImports]
    BaseModelLoader,
)

from ckpt.config import Tier
from ckpt.errors import ConfigError, RestoreError
from ckpt.exchange.weights.load import stream_part
from ckpt.exchange.weights.open_checkpoint import OpenCheckpoint
from ckpt.exchange.weights.part import Names, Part
from ckpt.integrations.vllm.weights import check_complete, warn_if_untested
from ckpt.root.leases import lease_if_allowed

_REASON = "the start of vLLM"
_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """The ``model_loader_extra_config`` of `CkptModelLoader`.

    Attributes:
        root: The folder or URL of the root.
        name: The part of the state that holds the weights.
        names: Other names for its tensors, as for ``ckpt.load``.
        step: The number of the step, or a selector such as ``"best:loss"``; None for the newest.
        options: The options of the store.
    """

    root: str
    name: str = "model"
    names: Names | None = None
    step: int | str | None = None
    options: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, settings: Any) -> LoaderOptions:
        """Return the options that ``settings`` has.

        Raises:
            ConfigError: An option is missing or unknown.
        """
        try:
            return cls(**settings)
        except TypeError as error:
            raise ConfigError(
                f"model_loader_extra_config={settings!r} ({error}): give it as "
                "{'root': 'runs/gpt'}"
            ) from None


class CkptModelLoader(BaseModelLoader):  # type: ignore[misc, unused-ignore]
    """Reads the weights of a model from a committed step.

    vLLM makes it for ``load_format="ckpt"``. The model of vLLM is a folder with ``config.json`` and
    the files of the tokenizer. All workers read the same step, and each of them reads the whole
    part, with at most 128 MiB or one tensor in host memory at a time. Every chunk is verified.

    Raises:
        ConfigError: ``model_loader_extra_config`` has an unknown option, or lacks the root.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        warn_if_untested()
        self._options = LoaderOptions.of(load_config.model_loader_extra_config)
        self._part = Part(self._options.name, self._options.names)

    def download_model(self, model_config: Any) -> None:
        """Do nothing, since the weights stay where they are until they are loaded."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load the weights into ``model``. All workers call this.

        Raises:
            RestoreError: The step does not have all weights of the model, or the first worker
                cannot read the root.
            CkptError: As for ``ckpt.load``.
        """
        with self._open_same_step() as checkpoint:
            reader = checkpoint.reader
            # A lease keeps the step from being removed meanwhile.
            with lease_if_allowed(reader.backend, reader.ref, _REASON):
                loaded_names = model.load_weights(stream_part(reader, self._part))
        if model_config.quantization is None:
            check_complete(model, loaded_names, checkpoint.step)
        _log.info("ckpt: vLLM has the weights of step %d in %s", checkpoint.step, checkpoint.root)

    @contextmanager
    def _open_same_step(self) -> Generator[OpenCheckpoint]:
        """Open the step that the first worker chooses."""
        options, group = self._options, get_world_group()
        tier = Tier(options.root, options=options.options or {})
        if group.rank_in_group == 0:
            try:
                checkpoint = OpenCheckpoint(tier, options.step)
            except BaseException:
                group.broadcast_object(None)
                raise
            group.broadcast_object(checkpoint.reader.ref)
        else:
            ref = group.broadcast_object()
            if ref is None:
                raise RestoreError(f"the first worker of vLLM cannot open {tier.url}: see its log")
            checkpoint = OpenCheckpoint(tier, ref.step)
            if checkpoint.reader.ref != ref:
                checkpoint.close()
                raise RestoreError(
                    f"step {ref.step} was saved again while vLLM has started: start it again"
                )
        with checkpoint:
            yield checkpoint

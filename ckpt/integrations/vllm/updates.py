"""The weight transfer engine for vLLM: it takes a version of the weights while vLLM serves.

A *version* is the weights of one step. A follower waits for later steps of a root.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from ckpt.config import Tier
from ckpt.errors import ConfigError
from ckpt.exchange.weights.follow import Follower, Version, follow
from ckpt.exchange.weights.part import Names
from ckpt.integrations.vllm.weights import check_complete, names_of_load, warn_if_untested

_log = logging.getLogger("ckpt")


@dataclass(kw_only=True)
class FollowInfo(WeightTransferInitInfo):  # type: ignore[misc, unused-ignore]
    """The ``init_info`` of `CkptWeightTransferEngine`.

    Attributes:
        root: The folder or URL of the root; or several tiers of one run, nearest first.
        name: The part of the state that holds the weights.
        names: Other names for its tensors, as for ``ckpt.load``.
        timeout_seconds: How long an update waits for its step.
        options: The options of the store.
    """

    root: str | list[str]
    name: str = "model"
    names: Names | None = None
    timeout_seconds: float = 600.0
    options: Mapping[str, Any] | None = None


@dataclass(kw_only=True)
class StepInfo(WeightTransferUpdateInfo):  # type: ignore[misc, unused-ignore]
    """The ``update_info`` of `CkptWeightTransferEngine`.

    Attributes:
        step: The number of the step.
        attempt: The attempt at the step, as a version of ``ckpt.follow`` has it; None for the
            newest one.
    """

    step: int
    attempt: str | None = None


class CkptWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc, unused-ignore]
    """Follows a root for a worker of vLLM.

    vLLM makes it for ``WeightTransferConfig(backend="ckpt")``. ``update_weights`` waits for the
    step, reads and verifies its weights into host memory, and checks that they fit the model.
    ``finish_weight_update`` puts them into the model. So an update that cannot be read, or does not
    fit, leaves the weights of all workers as they are.
    """

    init_info_cls = FollowInfo
    update_info_cls = StepInfo
    supports_draft_weight_update = False
    defers_processing = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        warn_if_untested()
        self._follower: Follower | None = None
        self._version: Version | None = None
        self._checked_names = frozenset[str]()

    def init_transfer_engine(self, init_info: FollowInfo) -> None:
        """Follow another root from now on.

        Raises:
            ConfigError: The options are invalid.
            StorageError: A store cannot be opened.
        """
        urls = [init_info.root] if isinstance(init_info.root, str) else init_info.root
        follower = follow(
            [Tier(url, options=init_info.options or {}) for url in urls],
            init_info.name,
            names=init_info.names,
            timeout_seconds=init_info.timeout_seconds,
        )
        self.shutdown()
        self._follower = follower

    def start_weight_update(self) -> None:
        """Forget an update that was not finished."""
        self._version = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Fetch a version, as ``receive_weights`` does. The model stays as it is."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: StepInfo) -> None:
        """Wait for a step, and read its weights into host memory.

        Raises:
            ConfigError: ``init_transfer_engine`` was not called, or the names do not fit.
            RestoreError: The step does not have all weights of the model, or the model refuses one.
            CkptError: As for ``Follower.version_of``.
        """
        if self._follower is None:
            raise ConfigError(
                "no root is followed: call init_weight_transfer_engine with "
                "{'init_info': {'root': 'runs/gpt'}} before"
            )
        version = self._follower.version_of(update_info.step, update_info.attempt)
        self._check(version)
        self._version = version

    def _check(self, version: Version) -> None:
        """Check that the model takes the version, and that no parameter stays as it is. Names that
        have passed the check are not checked again.
        """
        names = frozenset(version.weights)
        if self.model_config.quantization is None and names != self._checked_names:
            loaded_names = names_of_load(self.model, version.weights, version.step)
            check_complete(self.model, loaded_names, version.step)
            self._checked_names = names

    def drain_pending(self) -> None:
        """Put the weights that were fetched last into the model, if there are any.

        Raises:
            RestoreError: The step does not have all weights of the model.
        """
        version, self._version = self._version, None
        if version is None:
            return
        initialize_layerwise_reload(self.model)
        loaded_names = self.model.load_weights(version.weights.items())
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        if self.model_config.quantization is None:
            check_complete(self.model, loaded_names, version.step)
        _log.info("ckpt: vLLM has the weights of step %d", version.step)

    def finish_weight_update(self) -> None:
        """Put the weights that were fetched into the model (``drain_pending``)."""
        self.drain_pending()

    def shutdown(self) -> None:
        """Stop following. The weights stay in the model."""
        self._version = None
        if self._follower is not None:
            self._follower.close()
            self._follower = None

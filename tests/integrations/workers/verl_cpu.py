"""The CPU as a platform of verl, which has none for it.

verl imports this module in each process that has it in ``VERL_USE_EXTERNAL_MODULES``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

DEVICE = ModuleType("cpu")
"""What verl asks of ``torch.cuda``, with the memory of a device that holds nothing."""
COUNTERS = (
    *("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"),
    *("empty_cache", "ipc_collect", "reset_peak_memory_stats"),
)
vars(DEVICE).update(
    {
        **vars(torch.cpu),
        **dict.fromkeys(COUNTERS, lambda *_: 0),
        "set_rng_state": torch.set_rng_state,
        "get_device_name": lambda *_: "CPU",
        "mem_get_info": lambda *_: (1 << 30, 1 << 30),
    }
)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc, unused-ignore]
    device_name = vendor_name = "cpu"
    device_module = DEVICE

    def is_available(self) -> bool:
        return True

    def is_ipc_supported(self) -> bool:
        return False

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def nothing(self, *_: Any) -> None:
        pass

    manual_seed_all = manual_seed
    set_device = synchronize = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = cudart = nothing


def join_group() -> None:
    """Join the group of a worker. verl asks for one backend for the CPU and one for the device."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)

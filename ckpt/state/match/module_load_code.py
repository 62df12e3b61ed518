"""Find the code that a module runs when it loads a state dict.

``Module.load_state_dict`` passes the state dict to pre-hooks and to ``_load_from_state_dict`` of
each module, which may change it, resize tensors or keep present values, and calls post-hooks at the
end. A module whose class and hooks are those of ``nn.Module`` runs no code of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from ckpt.torch_private import harmless_loads, load_method, module_hooks

_WRAPPER_PACKAGES: Final = ("torch.distributed.fsdp", "torch.nn.utils.parametrizations")
"""The packages of hooks that free gathered parameters or rename entries of older releases."""
Hook = Callable[..., Any]
_FABRIC_PACKAGES: Final = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")


@dataclass(frozen=True, slots=True)
class LoadCode:
    """The code that a module runs when it loads a state dict.

    Attributes:
        readers: The names of the modules whose code gets the state dict. They end with a dot, and
            the name of the module itself is empty.
        post_hooks: The post-hooks with the names and the objects of their modules, in the order in
            which torch calls them.
    """

    readers: tuple[str, ...]
    post_hooks: tuple[tuple[str, nn.Module, Hook], ...]

    def __bool__(self) -> bool:
        return bool(self.readers or self.post_hooks)

    def outermost_reader(self, key: str) -> str | None:
        """Return the outermost module whose code gets ``key`` of the state dict, or None."""
        return next((prefix for prefix in self.readers if key.startswith(prefix)), None)


def load_code(module: nn.Module, *, without_hooks: bool = False) -> LoadCode:
    """Return the code that ``module`` and the modules inside of it run.

    ``without_hooks`` is True if the entries of the state dict are those that it has without the
    hooks of ``state_dict()``. A module with hooks for both ways then needs neither.
    """
    modules = list(module.named_modules(remove_duplicate=False))
    readers = {
        f"{name}." if name else ""
        for name, child in modules
        if _reads_state_dict(child) and not (without_hooks and converts_entries(child))
    }
    if has_own_load(module):
        readers.add("")
    return LoadCode(tuple(sorted(readers, key=len)), tuple(_post_hooks(module, "")))


def converts_entries(module: nn.Module) -> bool:
    """Return True if hooks of ``module`` convert its entries for ``state_dict()`` and back."""
    hooks = (*_own_hooks(module, "state_dict"), *_own_hooks(module, "state_dict_pre"))
    return bool(_pre_hooks(module) and hooks) and not _has_own_method(module)


def has_own_load(module: nn.Module) -> bool:
    """Return True if ``module`` has a ``load_state_dict()`` of its own.

    Torch calls this method of the outermost module alone.
    """
    # The method of a wrapper of Fabric calls that of the model.
    while type(module).__module__ in _FABRIC_PACKAGES:
        module = module._modules["_original_module"] or module
    method: Any = module.load_state_dict
    return getattr(method, "__func__", method) is not nn.Module.load_state_dict


def sets_extra_state(module: nn.Module) -> bool:
    """Return True if the class of ``module`` sets extra state."""
    return type(module).set_extra_state is not nn.Module.set_extra_state


def _reads_state_dict(module: nn.Module) -> bool:
    """Return True if code of ``module`` gets the state dict."""
    return _has_own_method(module) or bool(_pre_hooks(module))


def _has_own_method(module: nn.Module) -> bool:
    """Return True if ``module`` loads its own part of a state dict by a method of its class."""
    return load_method(module) not in harmless_loads()


def _pre_hooks(module: nn.Module) -> list[Any]:
    return list(_own_hooks(module, "load_state_dict_pre"))


def _post_hooks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, Hook]]:
    """Yield the post-hooks of ``module`` and its children, children first as torch calls them."""
    for name, child in module._modules.items():
        if child is not None:
            yield from _post_hooks(child, f"{prefix}{name}.")
    for hook in _own_hooks(module, "load_state_dict_post"):
        yield prefix, module, hook


def _own_hooks(module: nn.Module, method: str) -> Iterator[Hook]:
    """Yield the hooks of ``module`` that are not those of a wrapper."""
    for hook in module_hooks(module, method):
        if not str(getattr(hook, "__module__", "")).startswith(_WRAPPER_PACKAGES):
            yield hook

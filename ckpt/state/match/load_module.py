"""Match a module of the state with a saved module, and run the code by which it loads a state dict.

A restore fills the tensors of a module in place. Then, if the module has load hooks, methods of its
own or extra state, it calls ``load_state_dict`` with the whole state dict, as a program without
ckpt does. The tensors in this dict are those of the module itself, so torch copies nothing. Only
tensors that a pre-hook or a method gets are read apart, into memory of their own, since such code
may compare them with the present ones, keep these, or give the module another size.

A reader is a module whose own code gets a state dict, and is called by its prefix in the keys. An
entry is an item of a state dict; its piece is None unless the value is one range of elements or one
box of a larger tensor, such as a parameter of FSDP1. ``name`` is a name in the state, and
``source`` is the name of the same value in the checkpoint. A stand-in is an object that takes the
place of a module of a framework.

A node is a saved value in the manifest's tree (see ``match.saved_nodes``).
"""

from __future__ import annotations

import inspect
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ckpt.errors import RestoreError, ShapeMismatch, UnsupportedValue
from ckpt.model.values import VERSIONS, Node, decode
from ckpt.state.match.matcher import Matcher, fill_tensor
from ckpt.state.match.meta_tensors import is_meta
from ckpt.state.match.module_load_code import converts_entries, load_code, sets_extra_state
from ckpt.state.match.optimizer_load_code import own_code_errors
from ckpt.state.match.plain_values import torch_value
from ckpt.state.match.saved_nodes import ABSENT, is_mapping, tag
from ckpt.state.match.size_trial import SizeChange, check_sizes
from ckpt.state.tensors.layout import PLAIN_CLASSES
from ckpt.state.tensors.local_shards import LocalShards
from ckpt.state.walk.module_entries import FIRST_VERSION, Entry, Part
from ckpt.state.walk.modules import canonical, items_of
from ckpt.state.walk.stand_in import ModuleStandIn
from ckpt.torch_private import is_fsdp1, no_incompatible_keys, own_tensor, version_of

_EXTRA_STATE: Final = "_extra_state"  # The last part of the key under which torch saves extra state
_Versions = Mapping[str, Mapping[str, Any]]


def match_module(matcher: Matcher, module: nn.Module, node: Node, path: str, source: str) -> None:
    """Match a module with a saved module or a plain dict of tensors, by canonical names.

    ``node`` is ``ABSENT`` if the checkpoint has no value called ``source``, and the renaming may
    find the tensors of the module elsewhere in the checkpoint.

    Raises:
        KindMismatch, ShapeMismatch, DtypeMismatch: The saved values do not fit.
        RestoreError: Code of the module would have to convert a part of its tensors only.
        UnsupportedValue: Code of the module cannot run, since FSDP1 holds its parameters.
    """
    if node is not ABSENT and not is_mapping(node):
        matcher.require_tag(node, path, "module")
    matcher.open_container(path, source)
    module_loader = _ModuleLoader(matcher, module, path)
    for fqn in module_loader.items.omissions:
        matcher.record_match(
            f"{path}/{fqn}", matcher.source_of(f"{path}/{fqn}"), hide_renaming=True
        )
    for entry in module_loader.items.entries:
        name = f"{path}/{entry.fqn}"
        entry_source = matcher.source_of(name)
        entry_node = matcher.checkpoint.node(entry_source)
        if not matcher.restores(name):
            matcher.record_match(name, entry_source, hide_renaming=True)
            matcher.record_excluded_tensor(name, entry.value)
        elif entry_node is ABSENT:
            matcher.record_missing_tensor(name, entry_source, entry.value)
        else:
            matcher.record_match(name, entry_source)
            module_loader.match_entry(entry, name, entry_source, entry_node)
    module_loader.request_load(node)


class _ModuleLoader:
    """Matches one module, and runs the code by which it loads its state dict.

    ``_matcher`` collects the reads, the names, and the calls after the reads (``actions``). Its
    ``remaker`` prepares functions that make saved values again. ``_code`` knows the readers of the
    module. ``_value_makers`` returns the restored values that are no tensors of the module, by
    their keys, and ``_restored_keys`` are the keys of all restored values. ``_size_changes`` are
    the tensors that were saved in another shape. ``_is_hookless`` is True if the state dict is
    taken and loaded without the hooks of the module.

    Attributes:
        items: The items of the module.
    """

    def __init__(self, matcher: Matcher, module: nn.Module, path: str) -> None:
        self._matcher, self._path = matcher, path
        self.items = matcher.parameters.of(module) or items_of(path, module)
        self._module = module.key_module() if isinstance(module, ModuleStandIn) else module
        self._tensors = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._is_hookless = is_fsdp1(self._module) or (
            isinstance(module, ModuleStandIn) and not module.fills_module
        )
        self._code = load_code(self._module, without_hooks=self._is_hookless)
        self._modules = dict(self._module.named_modules(remove_duplicate=False))
        self._value_makers: dict[str, Callable[[], Any]] = {}
        self._restored_keys: set[str] = set()
        self._size_changes: dict[str, SizeChange] = {}

    def match_entry(self, entry: Entry, name: str, source: str, node: Node) -> None:
        """Match ``entry``, which is ``name`` in the state, with its node in the checkpoint."""
        self._restored_keys.add(entry.key)
        value = entry.value
        if id(value) not in self._tensors and not isinstance(value, LocalShards):
            # This is extra state, which may be any value.
            if self._matcher.selection.strict and not self._has_taker(entry.key):
                raise RestoreError(
                    f"{name!r} is added by state_dict() of {type(self._module).__qualname__}, and "
                    "no code takes it in load_state_dict(): write such code, or restore with "
                    "strict=False"
                )
            self._check_copy(entry.key, name, source, node)
            self._value_makers[entry.key] = self._matcher.remaker.prepare(node, name)
        elif self._is_read_apart(entry, node):
            self._read_apart(entry, name, source, node)
        else:
            fill_tensor(
                self._matcher, name, source, Part(name, entry.piece).parameter_elements(value), node
            )

    def _has_taker(self, key: str) -> bool:
        """Return True if the module takes the value ``key``, which is none of its tensors: with
        code of its own, or as a copy of its parameter or buffer, which torch copies back.
        """
        if self._code.outermost_reader(key) is not None:
            return True
        owner, _, name = key.rpartition(".")
        if name == _EXTRA_STATE:
            return owner in self._modules and sets_extra_state(self._modules[owner])
        return self._original_tensor(key) is not None

    def _original_tensor(self, key: str) -> torch.Tensor | None:
        """Return the parameter or buffer that torch loads the value ``key`` into; None if there is
        none.
        """
        owner, _, name = key.rpartition(".")
        module = self._modules.get(owner)
        return None if module is None else own_tensor(module, name)

    def _check_copy(self, key: str, name: str, source: str, node: Node) -> None:
        """Raise ``ShapeMismatch`` if the value ``key`` is a copy of a tensor of the module, no code
        of the module takes it, and it was saved with another shape.
        """
        original = (
            None if self._code.outermost_reader(key) is not None else self._original_tensor(key)
        )
        if original is None or is_lazy(original) or tag(node) not in ("tensor", "array"):
            return
        record = self._matcher.checkpoint.tensors.get(node["n"])
        if record is not None and record.shape != tuple(original.shape):
            raise ShapeMismatch(name, record.shape, tuple(original.shape), source)

    def _is_read_apart(self, entry: Entry, node: Node) -> bool:
        """Return True if the saved tensor is read into memory of its own."""
        return (
            self._code.outermost_reader(entry.key) is not None
            and (type(entry.value) in PLAIN_CLASSES or is_lazy(entry.value))
            and entry.piece is None
            and not is_meta(entry.value)
            and tag(node) in ("tensor", "array")
            and node["n"] in self._matcher.checkpoint.tensors
        )

    def _read_apart(self, entry: Entry, name: str, source: str, node: Node) -> None:
        """Request that the saved tensor is read into memory of its own (see ``_is_read_apart``)."""
        target, record = entry.value, self._matcher.checkpoint.tensors[node["n"]]
        if is_lazy(target) or tuple(target.shape) != record.shape:
            present = () if is_lazy(target) else tuple(target.shape)
            self._size_changes[entry.key] = SizeChange(name, source, record.shape, present)
        tensor = torch.empty(record.shape, dtype=target.dtype, device=target.device)
        self._matcher.request_read(
            name, source, tensor, node["n"], state_tensor=None if is_lazy(target) else target
        )
        self._value_makers[entry.key] = lambda: tensor

    def request_load(self, node: Node) -> None:
        """Request the call of the module's code, if it has any."""
        if not self._restored_keys or not (self._code or self._value_makers):
            return
        versions = self._versions(node)
        if self._size_changes:
            check_sizes(self._module, self._code, self._size_changes, self._state_dict(versions))
        if not self._is_hookless:
            self._matcher.actions.append(partial(self._load, versions, ""))
            return
        prefixes = self._outermost_readers()
        for prefix in prefixes:
            self._check_loadable(prefix)
            self._matcher.actions.append(partial(self._load, versions, prefix))
        self._matcher.actions.append(partial(self._set_extra_state, prefixes))
        self._matcher.last_actions.append(partial(self._run_post_hooks, prefixes))

    def _outermost_readers(self) -> tuple[str, ...]:
        """Return the readers that are inside of no other reader."""
        return tuple(
            reader for reader in self._code.readers if self._code.outermost_reader(reader) == reader
        )

    def _check_loadable(self, prefix: str) -> None:
        """Raise ``UnsupportedValue`` if the module at ``prefix`` cannot load its part of the state
        dict, since FSDP1 or a framework holds its tensors in another form.
        """
        owner = self._module.get_submodule(prefix[:-1])
        entries = [entry for entry in self.items.entries if entry.key.startswith(prefix)]
        if (
            not prefix
            or any(
                entry.piece is not None or isinstance(entry.value, LocalShards) for entry in entries
            )
            or any(map(converts_entries, owner.modules()))
        ):
            name = canonical(self._module)(prefix).rstrip(".")
            raise UnsupportedValue(
                f"{self._path}/{name}" if name else self._path,
                f"{type(owner).__qualname__}, whose own code loads a state dict that it does not "
                "have here, since FSDP1 or a framework holds its parameters in another form",
                "take fully_shard() (FSDP2), or do the work in a post-hook of load_state_dict()",
            )

    def _state_dict(self, versions: _Versions, prefix: str = "") -> OrderedDict[str, Any]:
        """Return the state dict of the module at ``prefix`` to load: the restored values, and the
        present values of all entries that are not restored.
        """
        items = self.items
        if items.omissions:  # Of a part of a module
            items = items_of(self._path, self._module)
        state_dict: Any = OrderedDict(
            (
                entry.key[len(prefix) :],
                self._value_makers[entry.key]()
                if entry.key in self._value_makers
                else _present_value(entry),
            )
            for entry in items.entries
            if entry.key.startswith(prefix)
        )
        inner_versions = {
            key[len(prefix) :]: version
            for key, version in versions.items()
            if f"{key}.".startswith(prefix)
        }
        setattr(state_dict, VERSIONS, inner_versions)
        return state_dict  # type: ignore[no-any-return]

    def _load(self, versions: _Versions, prefix: str) -> None:
        """Let the module at ``prefix`` load its state dict, and check that it takes all keys."""
        module = self._module.get_submodule(prefix[:-1])
        kind = type(module).__qualname__
        with own_code_errors(self._path, kind, "load_state_dict()"):
            state_dict = self._state_dict(versions, prefix)
            if prefix:
                result: Any = nn.Module.load_state_dict(module, state_dict, strict=False)
            else:
                options = {"strict": False} if _takes_strict(module) else {}
                result = module.load_state_dict(state_dict, **options)
        keys = [*getattr(result, "missing_keys", ()), *getattr(result, "unexpected_keys", ())]
        if keys and self._matcher.selection.strict:
            raise RestoreError(
                f"{self._path!r} was read, but load_state_dict() of {kind} did not take "
                f"{', '.join(map(repr, keys[:5]))}: correct its hooks, or restore with "
                "strict=False. Tensors of the state are overwritten: do not train on with it"
            )

    def _versions(self, node: Node) -> _Versions:
        """Return the versions of the modules as the state dict to load has them, by their keys.

        A module gets the version that was saved if all of its entries are restored, and its present
        version if none is.

        Raises:
            RestoreError: A part of the entries of a module is restored, and the versions differ.
        """
        saved_versions, default = self._saved_versions(node)
        present_versions, shares = self.items.module_versions or {}, self._restored_shares()
        canonical_of = canonical(self._module)
        versions: dict[str, Mapping[str, Any]] = {}
        for key, child in self._modules.items():
            prefix = f"{key}." if key else ""
            fqn = canonical_of(prefix).rstrip(".")
            present_version = present_versions.get(fqn, {"version": version_of(child)})
            saved_version = (
                present_version
                if saved_versions is None
                else saved_versions.get(fqn, saved_versions.get(key, default))
            )
            share = shares.get(key, 0.0)
            if (
                0 < share < 1
                and saved_version
                and saved_version != present_version
                and self._code.outermost_reader(prefix) is not None
            ):
                raise RestoreError(
                    f"{self._path}/{fqn} was saved by {dict(saved_version)} of "
                    f"{type(child).__qualname__}, "
                    f"which is {dict(present_version)} now: restore all of its entries, or none "
                    "(only=)"
                )
            versions[key] = dict(saved_version if share == 1 else present_version)
        return versions

    def _restored_shares(self) -> dict[str, float]:
        """Return the share of the entries of each module that the restore takes, by the module's
        key. For a module that has none, the entries of the modules inside count.
        """
        own_counts, inner_counts = Counter[str](), Counter[str]()
        restored_counts, inner_restored_counts = Counter[str](), Counter[str]()
        for key in (entry.key for entry in self.items.entries):
            owner, is_restored = key.rpartition(".")[0], key in self._restored_keys
            own_counts[owner] += 1
            restored_counts[owner] += is_restored
            while owner:
                owner = owner.rpartition(".")[0]
                inner_counts[owner] += 1
                inner_restored_counts[owner] += is_restored
        shares = {key: inner_restored_counts[key] / count for key, count in inner_counts.items()}
        return shares | {key: restored_counts[key] / count for key, count in own_counts.items()}

    def _saved_versions(self, node: Node) -> tuple[_Versions | None, Mapping[str, Any]]:
        """Return the versions that were saved, by the names of modules, and the version of every
        other module. The first value is None if they are unknown.

        A state dict of another program that has none gives no versions to any module, as in
        ``load_state_dict``.
        """
        if node is ABSENT or (tag(node) == "module" and "versions" not in node):
            return None, {}
        if tag(node) == "module":
            return decode(node["versions"], torch_value), FIRST_VERSION
        # The node of an ``OrderedDict`` has its attribute with the versions under "m".
        versions = decode(node["m"], torch_value) if "m" in node else {}
        return (versions if isinstance(versions, Mapping) else {}), {}

    def _set_extra_state(self, prefixes: tuple[str, ...]) -> None:
        """Give each module outside of ``prefixes`` its extra state directly.

        The hooks of FSDP1 would change the keys of a state dict once more.
        """
        with own_code_errors(self._path, type(self._module).__qualname__, "set_extra_state()"):
            for key, make_value in self._value_makers.items():
                if key.startswith(prefixes):
                    continue
                owner, _, name = key.rpartition(".")
                module = self._module.get_submodule(owner)
                if name == _EXTRA_STATE and sets_extra_state(module):
                    module.set_extra_state(make_value())

    def _run_post_hooks(self, prefixes: tuple[str, ...]) -> None:
        """Run the post-hooks of the modules outside of ``prefixes``."""
        with own_code_errors(self._path, type(self._module).__qualname__, "load_state_dict()"):
            for prefix, child, hook in self._code.post_hooks:
                if not prefix.startswith(prefixes):
                    hook(child, no_incompatible_keys())


def _present_value(entry: Entry) -> Any:
    """Return the value of an entry as a state dict has it."""
    value = entry.value
    if isinstance(value, torch.Tensor) and not is_lazy(value):
        return value.detach()
    return value


def _takes_strict(module: nn.Module) -> bool:
    """Return True if the ``load_state_dict()`` of ``module`` has the parameter ``strict``."""
    parameters = inspect.signature(module.load_state_dict).parameters.values()
    return any(
        parameter.name == "strict" or parameter.kind is parameter.VAR_KEYWORD
        for parameter in parameters
    )

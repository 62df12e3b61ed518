"""Choose the part of a state that a save writes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ckpt.model.patterns import WHOLE, Patterns, left_out
from ckpt.model.values import join
from ckpt.state.walk.objects import declares_state


class Choice:
    """A choice of a part of a state by ``patterns``. It remembers the decision for each name, and
    the patterns that have matched a name.

    Dicts, modules and optimizers may be saved in part. Any other value is saved as a whole or not
    at all.

    Thread safety:
        Only the training thread uses it.
    """

    def __init__(self, patterns: Patterns) -> None:
        self._patterns = patterns
        self._decisions: dict[str, bool] = {}
        self._matched_patterns: set[str] = set()

    @property
    def idle_patterns(self) -> tuple[str, ...]:
        """The patterns that have matched no name."""
        patterns = (*(self._patterns.only or ()), *self._patterns.exclude)
        return tuple(pattern for pattern in patterns if pattern not in self._matched_patterns)

    @property
    def left_out(self) -> dict[str, Any]:
        """The patterns in the form in which the manifest's metadata keeps them; empty if the whole
        state is saved.
        """
        return left_out(self._patterns, self._matched_patterns)

    def takes(self, name: str, parameter: str = "") -> bool:
        """Return True if ``name`` is saved.

        If ``name`` names the state that an optimizer keeps for a parameter, ``parameter`` is the
        name of this parameter. If the parameter is excluded, its state is not saved either.
        """
        if self._patterns is WHOLE:
            return True
        if (decision := self._decisions.get(name)) is None:
            self._matched_patterns.update(self._patterns.matches(name))
            decision = self._patterns.takes(name) and not self._patterns.excludes(parameter)
            self._decisions[name] = decision
        return decision

    def part_of(self, state: Mapping[Any, Any], path: str = "") -> Mapping[Any, Any]:
        """Return ``state``, the dict at ``path``, without the values that are not saved.

        A module or optimizer stays in the result if any part of it may be saved. The walk then
        calls ``takes`` for each of its values.
        """
        if self._patterns is WHOLE:
            return state
        part: dict[Any, Any] = {}
        if type(state) is OrderedDict:
            part = OrderedDict()
            vars(part).update(vars(state))  # A state dict has an attribute with module versions
        for key, value in state.items():
            name = join(path, key)
            is_taken = self.takes(name)
            if self._patterns.excludes(name) or not (is_taken or self._patterns.reaches(name)):
                continue
            if isinstance(value, nn.Module | Optimizer) and not declares_state(value):
                part[key] = value
            elif isinstance(value, dict) and type(value) in (dict, OrderedDict):
                inner_part = self.part_of(value, name)
                if inner_part or is_taken:
                    part[key] = inner_part
            elif is_taken:
                part[key] = value
        return part

"""Find the entries of a module whose only child is called ``module`` in an imported checkpoint.

DDP puts ``module.`` before all names of a state dict, and an import removes it. The state dict of a
module whose only child is called ``module`` looks the same, and only the module in the state shows
the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from ckpt.state.match.renaming import RenameRules
from ckpt.state.match.saved import SavedState

PREFIX: Final = "module."
REMOVED_PREFIX: Final = "imported_without_prefix"
"""The key of the list of modules from whose names an import has removed the prefix, in the metadata
of the checkpoint.
"""


def removed_from(checkpoint: SavedState) -> list[str]:
    """Return the paths of the modules from whose names an import has removed the prefix."""
    paths: Any = checkpoint.metadata.get(REMOVED_PREFIX, ())
    return [path for path in paths if isinstance(path, str)]


def with_prefix(
    rename_rules: RenameRules, checkpoint: SavedState, entries: Mapping[str, Iterable[str]]
) -> RenameRules:
    """Return ``rename_rules`` with a rule for each module that has the prefix in all of its names,
    if an import has removed this prefix from the names of the checkpoint.

    Args:
        rename_rules: The renaming that the user gave.
        checkpoint: The checkpoint.
        entries: The names of the entries of each module of the state, by its path.
    """
    if rename_rules.function is not None:  # The user has named every entry
        return rename_rules
    rules = {
        f"{path}/{PREFIX}*": f"{path}/*"
        for path in removed_from(checkpoint)
        if path in entries and all(name.startswith(PREFIX) for name in entries[path])
    }
    return (
        RenameRules((*rename_rules.rules, *RenameRules.of(rules).rules)) if rules else rename_rules
    )

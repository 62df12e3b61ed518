"""The check of the options of an S3 store.

Without this check, an unknown option would cause an error only at the first request, since s3fs
passes it on to its session.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

from ckpt.errors import ConfigError

PUT_ID: Final = "ckpt-put"
"""The name in the metadata of an object under which a put or an upload stores a random id."""
_OWN_OPTIONS: Final = {"region", "checksums"}
_SESSION_OPTIONS: Final = {"profile", "session_vars", "event_hooks", "include_builtin_handlers"}
_RESERVED_OPTIONS: Final = {"self", "kwargs", "session", "asynchronous", "loop", "args"}


def check_options(options: Mapping[str, Any]) -> None:
    """Check the names of all options, and the types of those that must be text.

    Raises:
        ConfigError: An option is unknown.
        ValueError: The value of an option that must be text is not text.
    """
    from s3fs import S3FileSystem

    settings = {
        *inspect.signature(S3FileSystem.__init__).parameters,
        *_OWN_OPTIONS,
        *_SESSION_OPTIONS,
    } - _RESERVED_OPTIONS
    for name in options:
        if name not in settings:
            similar = get_close_matches(name, settings, n=1, cutoff=0.5)
            hint = (
                f"did you mean {similar[0]}?"
                if similar
                else f"known are {', '.join(sorted(settings))}"
            )
            raise ConfigError(f"options.{name} is not a setting: {hint}")
    for name in ("endpoint_url", "region", "profile"):
        if options.get(name) is not None and not isinstance(options[name], str):
            raise ValueError(f"{name} is not text, but of type {type(options[name]).__name__}")

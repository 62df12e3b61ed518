"""The JSON of messages between ranks, whose texts may come from errors."""

from __future__ import annotations

from typing import Any

import msgspec


def encode_json(message: object) -> bytes:
    """Return ``message`` as JSON, in which characters that UTF-8 cannot encode are escaped.

    The text of an error may have the name of a file that is not UTF-8. Python represents the bytes
    of such a name as lone surrogates, which JSON does not have.
    """
    try:
        return msgspec.json.encode(message)
    except UnicodeEncodeError:
        return msgspec.json.encode(_escape(msgspec.to_builtins(message)))


def _escape(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_escape(key): _escape(item) for key, item in value.items()}
        case list() | tuple():
            return [_escape(item) for item in value]
        case _:
            return value

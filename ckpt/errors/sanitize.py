"""Cleans text that goes into a message, a log or a terminal.

A string that comes from a store, a file or a URL may hold anything. It is cleaned where it is
shown, and nowhere else: the fields of an error and the values that functions return stay as they
are. ``clean`` and ``redact`` take time that grows linearly with the text.
"""

from __future__ import annotations

import logging
import re
from typing import Final

_USERINFO: Final = re.compile(r"(?<=://)[^/\s]*@")
_NAME: Final = re.compile(r"(?<![^=&?\s'\"])[^=&?\s'\"]++=")
_SECRET: Final = re.compile(
    r"(?i)key|token|secret|signature|password|credential|GoogleAccessId|\bsig="
)
_VALUE: Final = re.compile(r"[^&\s'\"]++")
# An error text may quote the headers of a request, or the answer of a token server.
_HEADER: Final = re.compile(
    r"""(?ix) ( \bBearer\s++ | (?: (?<![a-z-])X-(?:Amz|Goog)-[a-z-]++
    | \b(?:(?:access|refresh|id)_token | client_secret) ) ["']?+ \s*+ : \s*+ ["']?+ ) [^&\s"',]++"""
)


def clean(text: str) -> str:
    """Return ``text`` without credentials, and with an escape in place of every character that is
    not printable.

    The result is one line, without characters that control a terminal.
    """
    text = redact(text)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def redact(text: str) -> str:
    """Return ``text`` without the user and password of a URL, and without signatures, tokens and
    keys.
    """
    if "://" in text:
        text = _USERINFO.sub("***@", text)
    text = _HEADER.sub(r"\1***", text)
    if "=" not in text:
        return text
    parts: list[str] = []
    done = 0
    for name in _NAME.finditer(text):
        if (
            name.start() >= done
            and _SECRET.search(name[0])
            and (value := _VALUE.match(text, name.end()))
        ):
            parts += [text[done : name.end()], "***"]
            done = value.end()
    return "".join([*parts, text[done:]])


class CleanLog(logging.Filter):
    """A filter that cleans every line that a logger logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace the format and its arguments by the clean message, and let the record pass."""
        record.msg, record.args = clean(record.getMessage()), ()
        return True

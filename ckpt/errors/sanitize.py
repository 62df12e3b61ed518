"""Remove credentials and control characters from text for a message, a log or a terminal.

A string from a store, a file or a URL may contain any characters. Only the text of a message, a log
or a terminal is cleaned. The fields of an error and the results of functions keep the original
strings. ``clean`` and ``redact`` take time that grows linearly with the text.
"""

from __future__ import annotations

import logging
import re
from typing import Final

_USERINFO: Final = re.compile(r"(?<=://)[^/\s]*@")
_PARAMETER_NAME: Final = re.compile(r"(?<![^=&?\s'\"])[^=&?\s'\"]++=")
_SECRET_NAME: Final = re.compile(
    r"(?i)key|token|secret|signature|password|credential|GoogleAccessId|\bsig="
)
_PARAMETER_VALUE: Final = re.compile(r"[^&\s'\"]++")
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
    escapes = (char if char.isprintable() else repr(char)[1:-1] for char in text)  # No quotes
    return "".join(escapes)


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
    position = 0
    for name in _PARAMETER_NAME.finditer(text):
        if (
            name.start() >= position
            and _SECRET_NAME.search(name[0])
            and (value := _PARAMETER_VALUE.match(text, name.end()))
        ):
            parts += [text[position : name.end()], "***"]
            position = value.end()
    return "".join([*parts, text[position:]])


class CleanLog(logging.Filter):
    """A logging filter that cleans the message of every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace the format and the arguments of the record by the cleaned message. Return True,
        so that the record is logged.
        """
        record.msg, record.args = clean(record.getMessage()), ()
        return True

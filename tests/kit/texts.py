"""Texts that would change a terminal."""

from __future__ import annotations

ESCAPES = (
    "\x1b]52;c;ZXZpbA==\x07",
    "\x1b]8;;http://evil\x1b\\here\x1b]8;;\x1b\\",
    "\x1b[2J\x1b[31mred",
    "\x9b31m",
    "\x9d52;c;x\x9c",
    "\u202efdp.exe",
    "\u2066\u2069",
    "a\rb",
    "a\nerror: forged",
    "\b\b\b",
    "\x00",
    "\u200b",
    "\ud800",
)

"""Does the error that is being handled around a call end the process?

Python tells a function that an error is being handled, and not what its caller does with it. The source of the callers tells:
an ``except`` clause that raises nothing handles the error, and the process goes on. In a ``finally`` clause, and in an ``except``
clause that raises or exits, the error goes on. Where no source can be read, as in ``python -c``, the error counts as one
that goes on.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Final

_EXITS: Final = frozenset({"exit", "_exit", "quit", "abort", "raise_signal", "kill"})


def ending_error(*, but: BaseException | None) -> BaseException | None:
    """The error that is being handled around the caller's caller, and goes on. None for ``but``, and for an error that ends there."""
    error = sys.exception()
    if error is None or error is but or is_handled(error, sys._getframe(2)):
        return None
    return error


def is_handled(error: BaseException, frame: FrameType | None) -> bool:
    """Whether ``frame``, or one of its callers, stands in an ``except`` clause that ends there for ``error``.

    If ``error`` was raised while another one was handled, that one's clauses count too: it may go on after this one.
    """
    found = False
    while frame is not None:
        for ends in _clauses(frame):
            if ends:
                return False
            if error.__context__ is None:
                return True
            found = True
        frame = frame.f_back
    return found


def _clauses(frame: FrameType) -> Iterator[bool]:
    """For each clause that the frame's line stands in, the innermost first: whether an error goes on after it."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return
    line = frame.f_lineno
    found: list[tuple[int, bool]] = []
    for function in _bodies(tree, frame.f_code.co_firstlineno):
        for node in _of_this_frame(function):
            if isinstance(node, ast.Try | ast.TryStar):
                found += [(h.lineno, _goes_on(h.body)) for h in node.handlers if _holds(h.body, line)]
                found += [(node.finalbody[0].lineno, True)] if _holds(node.finalbody, line) else []
    for _, ends in sorted(found, reverse=True):
        yield ends


def _bodies(tree: ast.Module, first: int) -> list[ast.AST]:
    """The function whose code begins at line ``first``, or the module."""
    functions: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            if first == min([node.lineno, *(each.lineno for each in decorators)]):
                functions.append(node)
    return functions[:1] or [tree]


def _of_this_frame(function: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run in the frame of ``function``: not the bodies of functions within."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _holds(body: list[ast.stmt], line: int) -> bool:
    return bool(body) and body[0].lineno <= line <= (body[-1].end_lineno or line)


def _goes_on(body: list[ast.stmt]) -> bool:
    """Whether a clause raises, or ends the process."""
    for node in _of_this_frame(ast.Module(body, [])):
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in _EXITS:
                return True
    return False

"""Finds out whether the error that is being handled while a function runs ends the process.

A function can see that an error is being handled, but not what its callers do with the error. This
module reads the source of the callers. At an ``except`` clause that neither raises nor exits, the
error ends, and the process goes on. After a ``finally`` clause, and after an ``except`` clause that
raises or exits, the error goes on. If no source can be read, as in ``python -c``, the error counts
as one that goes on.
"""

from __future__ import annotations

import ast
import linecache
import sys
import warnings
from collections.abc import Iterator
from dis import opmap
from traceback import walk_tb
from types import FrameType
from typing import Final

_EXIT_FUNCTIONS: Final = frozenset({"exit", "_exit", "quit", "abort", "raise_signal", "kill"})
_EXIT_MODULES: Final = frozenset({"os", "signal", "sys"})
"""The modules whose functions in ``_EXIT_FUNCTIONS`` end the process. Methods of other objects may
have the same names.
"""
_WITH_EXIT: Final = opmap["WITH_EXCEPT_START"]
"""The instruction that calls ``__exit__`` for an error."""


def ending_error(*, but: BaseException | None) -> BaseException | None:
    """Return the error that is being handled during this call, if the error goes on afterwards.

    Return None if no error is being handled, if the error is ``but``, or if an ``except`` clause
    ends the error. Clauses in the calling function do not count. Clauses in its callers do.
    """
    error = sys.exception()
    if error is None or error is but or is_handled(error, sys._getframe(2)):
        return None
    return error


def is_handled(error: BaseException, frame: FrameType | None) -> bool:
    """Return True if ``frame``, or one of its callers, is in an ``except`` clause at which
    ``error`` ends.

    If ``error`` was raised while another error was handled, the clauses that handle the other error
    must end it too. Otherwise the other error goes on after ``error`` has ended.
    """
    has_clause = False  # Whether a clause has ended an error so far
    sources: dict[str, _Source] = {}
    passed_frames = list(_frames_passed(error))
    while frame is not None:
        for goes_on in _running_clauses(frame, sources, passed_frames):
            if goes_on:
                return False
            if error.__context__ is None:
                return True
            has_clause = True
        frame = frame.f_back
    return has_clause


class _Source:
    """The syntax tree of a frame's source file; empty if the file cannot be read or parsed."""

    def __init__(self, frame: FrameType) -> None:
        try:
            lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
            # The source was compiled before, and its warnings were shown then.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.tree = ast.parse("".join(lines))
        except Exception:  # noqa: BLE001 - a loader of another package may raise anything
            self.tree = ast.Module([], [])
        self._functions: dict[int, ast.AST] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
                first_line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
                self._functions.setdefault(first_line, node)

    def body(self, frame: FrameType) -> ast.AST:
        """Return the syntax tree of the function that ``frame`` runs, or of the module."""
        if frame.f_code.co_name == "<module>":
            return self.tree
        return self._functions.get(frame.f_code.co_firstlineno, self.tree)


def _frames_passed(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield each frame that ``error`` has passed through, with the line in that frame. Include the
    frames of the errors in the chain of ``__context__``.
    """
    ids: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in ids:
        ids.add(id(link))
        yield from walk_tb(link.__traceback__)
        link = link.__context__


def _running_clauses(
    frame: FrameType, sources: dict[str, _Source], passed_frames: list[tuple[FrameType, int]]
) -> Iterator[bool]:
    """Yield True or False for each clause that runs in ``frame`` now, innermost clause first. True
    means that an error goes on after the clause.

    The end of a ``with`` block counts as a clause if an error has ended the block. A ``finally``
    clause counts if an error has passed through its ``try`` block.

    Args:
        frame: The frame.
        sources: The syntax trees by the name of the file. Trees that are missing are added.
        passed_frames: The frames and lines from ``_frames_passed``.
    """
    code, line = frame.f_code, frame.f_lineno
    if not code.co_exceptiontable or line is None:  # The code has no clause
        return
    # The frame is in the ``__exit__`` of a ``with`` block that an error has ended.
    if frame.f_lasti >= 0 and code.co_code[frame.f_lasti] == _WITH_EXIT:
        yield True
    if code.co_filename not in sources:
        sources[code.co_filename] = _Source(frame)
    raise_lines = [
        raise_line for passed_frame, raise_line in passed_frames if passed_frame is frame
    ]
    clauses: list[tuple[int, bool]] = []  # First line, and whether an error goes on
    for node in _nodes_in_frame(sources[code.co_filename].body(frame)):
        if isinstance(node, ast.Try | ast.TryStar):
            clauses += [
                (handler.lineno, _lets_error_go_on(handler.body))
                for handler in node.handlers
                if _contains_line(handler.body, line)
            ]
            if _contains_line(node.finalbody, line):
                final_line = node.finalbody[0].lineno
                clauses += (
                    [(final_line, True)]
                    if any(node.lineno <= raise_line < final_line for raise_line in raise_lines)
                    else []
                )
    for _, goes_on in sorted(clauses, reverse=True):
        yield goes_on


def _nodes_in_frame(function: ast.AST) -> Iterator[ast.AST]:
    """Yield all syntax nodes that run in the frame of ``function``, without the bodies of functions
    that are defined inside of it.
    """
    nodes = list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)


def _contains_line(body: list[ast.stmt], line: int) -> bool:
    return bool(body) and body[0].lineno <= line <= (body[-1].end_lineno or line)


def _lets_error_go_on(body: list[ast.stmt]) -> bool:
    """Return True if ``body``, the statements of a clause, contains ``raise`` or the call of a
    function with a name in ``_EXIT_FUNCTIONS``, either by its bare name or as a member of one of
    ``_EXIT_MODULES``. Functions that are defined inside do not count.
    """
    for node in _nodes_in_frame(ast.Module(body, [])):
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(name) if name in _EXIT_FUNCTIONS:
                    return True
                case ast.Attribute(ast.Name(module), name) if (
                    module in _EXIT_MODULES and name in _EXIT_FUNCTIONS
                ):
                    return True
                case _:
                    pass
    return False

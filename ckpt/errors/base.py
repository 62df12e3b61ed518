"""The base class of all errors, and errors that are not about one save, restore or store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ckpt.errors.sanitize import clean


class CkptError(Exception):
    """The base class of all errors of ckpt.

    The constructor removes credentials and control characters from the message (see ``clean``),
    because the message may quote a URL or a name from a store.
    """

    exit_code: ClassVar[int] = 1
    """The exit code of the command line for this error."""

    def __init__(self, message: str = "") -> None:
        super().__init__(clean(message))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message and the fields.

        Unpickling does not call ``__init__``, whose arguments differ between the subclasses.
        """
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(
    error_class: type[CkptError], args: tuple[Any, ...], fields: dict[str, Any]
) -> CkptError:
    error = error_class.__new__(error_class)
    error.args = args
    error.__dict__.update(fields)
    return error


class ConfigError(CkptError):
    """A setting or an argument is wrong, and must be corrected."""

    exit_code = 2


class UnknownScheme(ConfigError):
    """No backend serves the scheme of a URL. ``known`` has the schemes of registered backends."""

    def __init__(self, url: str, schemes: Sequence[str]) -> None:
        self.url, self.known = url, tuple(schemes)
        super().__init__(
            f"no backend for {url!r}; known schemes: {', '.join(self.known)} or a plain folder"
        )


class MissingExtra(ConfigError):
    """The package that a backend or a feature needs is not installed.

    ``extra`` is the optional dependency of ckpt-stream that installs the package, or None.
    """

    def __init__(self, url: str, package: str, extra: str | None) -> None:
        self.url, self.package, self.extra = url, package, extra
        way = f"pip install {package}" + (
            f" (or pip install 'ckpt-stream[{extra}]')" if extra else ""
        )
        super().__init__(f"{url!r} needs the package {package}: {way}")


class ManagerClosed(CkptError):
    """A method was called on a manager that is closed, or a manager was built after the main thread
    had ended. The end of the main thread closes all managers.
    """

    exit_code = 9

    def __init__(self, *, has_script_ended: bool = False) -> None:
        self.has_script_ended = has_script_ended
        super().__init__(
            "the main thread has ended, which closes every CheckpointManager: save before that, "
            "and not in an atexit handler; if another thread saves, let the main thread join it"
            if has_script_ended
            else "this CheckpointManager is closed: build a new one"
        )


class AgentError(CkptError):
    """The agent of this node cannot be reached or started, refuses a request, or was stopped
    with unfinished jobs.
    """

    exit_code = 10


class ThreadLimit(CkptError):
    """The system does not let this process start another thread."""

    def __init__(self, purpose: str, detail: str) -> None:
        self.what, self.detail = purpose, detail
        super().__init__(
            f"no thread for {purpose!r} could be started ({detail}): raise the limit on processes "
            "(ulimit -u, pids.max of the cgroup), "
            "or start fewer threads, such as workers of data loaders"
        )


def quoted_name(name: str, source: str) -> str:
    """Return the name ``name`` of an entry in quotes for a message.

    If ``source``, the name of the entry in the checkpoint, differs, the result has both names.
    """
    return repr(name) if source == name else f"{source!r} (which {name!r} is renamed to)"


def few(names: Sequence[str], limit: int = 5, *, quote: bool = True) -> str:
    """Return a text with the first ``limit`` names and the number of the other names."""
    text = ", ".join(repr(name) if quote else name for name in list(names)[:limit])
    return text + (f" and {len(names) - limit} more" if len(names) > limit else "")

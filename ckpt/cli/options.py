"""The options and arguments that several commands share, and functions that open their stores.

A *selector* says which step a person means: a number, the newest, the best by a metric, or the step
of a named branch. A step may have several *attempts*, each named by a `StepRef`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Annotated, Final, TypeVar

import typer

from ckpt.catalog.branch_metrics import MeasuredRoot, MetricsReader, chosen_step
from ckpt.catalog.branches import find_branch
from ckpt.catalog.step_listing import committed, find, is_committed
from ckpt.cli.watched_store import WatchedStore, open_watched, warn_of_silence
from ckpt.config import MEMORY, Mode, Tier, load_config
from ckpt.errors import (
    CkptError,
    ConfigError,
    IntegrityError,
    NoCheckpoint,
    ObjectNotFound,
    StorageError,
)
from ckpt.model.keys import StepId, StepRef
from ckpt.model.selector import BestStep, BranchStep, Selector, is_selector, selector_of
from ckpt.observe.metric_modes import modes_of_run
from ckpt.pipeline.workers import Workers
from ckpt.plan.read_errors import is_damage
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import stores_in_memory
from ckpt.storage.tiers import resolve_tier, same_url_error, server_of, tier_at, urls_of
from ckpt.storage.urls import is_spelling_of

T = TypeVar("T")

_MOST_THREADS = 16

RootOption = Annotated[
    str | None,
    typer.Option(
        "--root",
        metavar="URL",
        help="Folder or URL of the checkpoints. Default: $CKPT_ROOT, then ./ckpt.toml.",
    ),
]
RootsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--root",
        metavar="URL",
        help="Folder or URL of the checkpoints; again for further tiers. Default: $CKPT_ROOT, then "
        "./ckpt.toml.",
    ),
]
ConfigOption = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="Use all tiers of this ckpt.toml.")
]
ConfigFileOption = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="Read this file instead of ./ckpt.toml."),
]
StepOption = Annotated[
    str | None,
    typer.Option("--step", metavar="STEP", help="The same as STEP.", show_default=False),
]
STEP_FORMS: Final = (
    "a number, latest, latest~3 (3 checkpoints before it), best:METRIC or branch:NAME"
)
"""What a step may be, for the help of options."""
PLACE_AND_STEP: Final = (
    f"ROOT is the same as --root. STEP is {STEP_FORMS}; a folder with such a name is ./NAME."
)
"""What roots and a step may be, for the help of arguments."""
PlaceArgument = Annotated[
    str | None, typer.Argument(metavar="[ROOT]", help="The same as --root.", show_default=False)
]
NewPlaceArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[ROOT]",
        help="Folder or URL, made if it is not there. The same as --root.",
        show_default=False,
    ),
]
PlacesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ROOT]...", help="The same as --root.", show_default=False),
]
PlaceAndStepArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ROOT] [STEP]",
        help=PLACE_AND_STEP,
        show_default=False,
    ),
]
PlacesAndStepArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ROOT]... [STEP]",
        help=PLACE_AND_STEP,
        show_default=False,
    ),
]
PlainOption = Annotated[
    list[str] | None,
    typer.Option(
        "--plain",
        metavar="NAME",
        help="A dict of tensors that is not a model; may be given several times.",
    ),
]
ParamNamesOption = Annotated[
    str | None,
    typer.Option(
        "--param-names",
        metavar="FILE",
        help="The names of the parameters, one on each line, in the order of "
        "optimizer.param_groups.",
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on standard output, and nothing else."),
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="SECONDS", min=0.0, help="How long a store may be silent at first."
    ),
]
TIMEOUT_SECONDS: Final = 10.0


def places_and_step(
    arguments: Sequence[str] | None, roots: Sequence[str] | None, step: str | None
) -> tuple[list[str], Selector | None]:
    """Separate the places from the step among ``arguments``, and combine them with the options.

    Args:
        arguments: The arguments ``[ROOT]... [STEP]`` of a command.
        roots: The values of ``--root``.
        step: The value of ``--step``.

    Returns:
        The places, nearest first (empty if none is given), and the selector of the step (None for
        the newest). ``step_id`` returns the step.

    Raises:
        ConfigError: A place or a step is given twice, or a step is none.
    """
    words = list(arguments or ())
    steps = [word for word in words if is_selector(word)]
    if len(steps) > 1:
        raise ConfigError(
            f"{steps[0]} and {steps[1]} are two steps: leave one out (a folder is ./{steps[1]})"
        )
    selector = selector_of(steps[0] if steps else step)
    if steps and step is not None and selector_of(step) != selector:
        raise ConfigError(f"STEP {steps[0]} and --step {step} are two: leave one out")
    return places([word for word in words if not is_selector(word)], roots), selector


def place_and_step(
    arguments: Sequence[str] | None, root: str | None, step: str | None
) -> tuple[str | None, Selector | None]:
    """Separate the place from the step among the arguments ``[ROOT] [STEP]``, and combine them with
    the values of ``--root`` and ``--step``.

    Returns:
        The place (None if no place is given), and the selector of the step (None for the newest).

    Raises:
        ConfigError: A place or a step is given twice, or a step is none.
    """
    urls, selector = places_and_step(arguments, [root] if root else None, step)
    return one_place(urls), selector


def place_and_number(
    arguments: Sequence[str] | None, root: str | None, step: str | None, default: str
) -> tuple[str | None, int | None]:
    """Separate the place from the step among the arguments, for a command that takes only the
    number of a step. Return both; None stands for one that is not given.

    Args:
        arguments: The arguments ``[ROOT] [STEP]`` of a command.
        root: The value of ``--root``.
        step: The value of ``--step``.
        default: What the command does without a step, for the error.

    Raises:
        ConfigError: A place or a step is given twice, or a step is no number.
    """
    place, selector = place_and_step(arguments, root, step)
    if selector is None and step is None and not any(map(is_selector, arguments or ())):
        return place, None
    if not isinstance(selector, int):
        raise ConfigError(f"STEP is a number here: without one, {default}")
    return place, selector


def places(arguments: Sequence[str] | None, roots: Sequence[str] | None) -> list[str]:
    """Return the places that are given as arguments or by ``--root``.

    Raises:
        ConfigError: There are both arguments and values of ``--root``.
    """
    if arguments and roots:
        raise ConfigError(f"{arguments[0]} and --root {roots[0]} are two places: leave one out")
    return [*(arguments or ()), *(roots or ())]


def one_place(arguments: Sequence[str] | None, root: str | None = None) -> str | None:
    """Return the place that is given as an argument or by ``--root``; None if no place is given.

    Raises:
        ConfigError: More than one place is given.
    """
    urls = places(arguments, [root] if root else None)
    if len(urls) > 1:
        raise ConfigError(
            f"{urls[0]} and {urls[1]} are two places: leave one out; a step is {STEP_FORMS}"
        )
    return urls[0] if urls else None


def source_and_destination(
    arguments: Sequence[str], root: str | None, name: str
) -> tuple[str | None, str]:
    """Return SOURCE and OTHER from the arguments ``[SOURCE] OTHER`` and ``--root``.

    SOURCE is None if neither an argument nor ``--root`` names it. In this case the environment or
    ``ckpt.toml`` names it.

    Args:
        arguments: The arguments.
        root: The value of ``--root``, which may take the place of SOURCE.
        name: The name of OTHER in the help of the command, such as "DEST".

    Raises:
        ConfigError: There are too many places, or nothing names SOURCE.
    """
    *source, destination = arguments
    if len(source) > 1:
        hint = (
            "a step is given as --step STEP"
            if any(map(is_selector, arguments))
            else "leave the others out"
        )
        raise ConfigError(f"{', '.join(arguments)} are too many: give SOURCE and {name}; {hint}")
    place = one_place(source, root)
    if place is None:
        try:
            resolve_tier(None)  # Raises if neither the environment nor ``ckpt.toml`` names SOURCE
        except ConfigError as error:
            raise ConfigError(
                f"{destination} is SOURCE or {name}: give both, SOURCE first; {error}"
            ) from None
    return place, destination


def step_id(
    stores: Sequence[WatchedStore | CkptError],
    selector: Selector | None,
    config: str | None = None,
) -> StepId | None:
    """Return the number of the step that ``selector`` names, or the attempt that the name of a
    branch stands for. If ``selector`` is None, return None for the newest step.

    The arguments and errors are those of ``number_of``.
    """
    if isinstance(selector, BranchStep):
        open_stores = _opened_stores(stores)
        return open_stores[0].call_in_time(partial(find_branch, open_stores, selector))
    return None if selector is None else number_of(stores, selector, config)


def _opened_stores(stores: Sequence[WatchedStore | CkptError]) -> list[WatchedStore]:
    """Return ``stores``. Raises the first error among them."""
    open_stores: list[WatchedStore] = []
    for store in stores:
        if isinstance(store, CkptError):
            raise store
        open_stores.append(store)
    return open_stores


def number_of(
    stores: Sequence[WatchedStore | CkptError], selector: Selector, config: str | None = None
) -> int:
    """Return the number of the step that ``selector`` names.

    Args:
        stores: The stores of a run, or the errors of those that cannot be opened. All of them are
            asked, since any may have the best step.
        selector: The selector of the step.
        config: The value of ``--config``. The ``keep_best`` of its tiers, or the journals of the
            run, say which values of a metric are the best.

    Raises:
        NoCheckpoint: There is no such checkpoint.
        ConfigError: No step has the metric, or it is not known which of its values are the best.
        CkptError: A store cannot be opened, or does not answer.
    """
    if isinstance(selector, int):
        return selector
    if isinstance(selector, BranchStep):
        open_stores = _opened_stores(stores)
        return open_stores[0].call_in_time(partial(find_branch, open_stores, selector)).step
    tiers = load_config(config).tiers
    measured_roots: list[MeasuredRoot] = [  # Each with the metrics of its checkpoints
        store.call_in_time(partial(MetricsReader(store).read, selector))
        for store in _opened_stores(stores)
    ]
    modes: dict[str, Mode] = {}
    if isinstance(selector, BestStep):
        urls = [root.url for root in measured_roots]
        modes = modes_of_run([tier_at(url, tiers) for url in urls], urls)
    return chosen_step(selector, measured_roots, modes)


def find_steps(
    backend: WatchedStore, selector: Selector | None, config: str | None = None
) -> list[StepRef]:
    """Return the committed attempts at the step that ``selector`` names (None: at any step), in the
    order of ``find``. The arguments and errors are those of ``step_id``.
    """
    step = step_id([backend], selector, config)
    return backend.call_in_time(partial(find, backend, step))


def open_root(root: str | None, config: str | None = None, *, timeout: float) -> WatchedStore:
    """Open the store that ``--root``, ``--config``, the environment or ``ckpt.toml`` names.

    The arguments are the values of ``--root``, ``--config`` and ``--timeout``.
    """
    tier = resolve_tier(root, config)
    return open_watched(tier.url, tier.options, timeout)


@contextmanager
def adding_mend_advice(backend: WatchedStore, ref: StepRef) -> Generator[None]:
    """Return a context manager for a block that reads ``ref``. If the block raises an error about
    damage in this step, its message also says which other step there is, and how to mend this one.
    """
    try:
        yield
    except IntegrityError as error:
        key: str = getattr(error, "key", ref.folder)
        is_of_step = key.startswith(ref.folder) and error.root in ("", backend.url)
        if is_of_step and is_damage(error):
            error.args = (f"{error}; {mend_advice(backend, ref)}",)
        raise


def mend_advice(backend: WatchedStore, ref: StepRef) -> str:
    """Return the text that says how to mend the damaged step ``ref``, and which other step there
    is in the store.
    """
    copy = f"ckpt copy OTHER {backend.url} --step {ref.step} --check"
    mend = f"mend it from another copy with `{copy}`"
    with suppress(CkptError):
        steps = [
            committed_ref.step
            for committed_ref in backend.call_in_time(partial(committed, backend))
        ]
        earlier_step = next((step for step in steps if step < ref.step), None)
        if earlier_step is not None:
            return f"the previous step is there too: --step {earlier_step}; or {mend}"
        later_step = next((step for step in reversed(steps) if step > ref.step), None)
        if later_step is not None:
            return f"a later step is there too: --step {later_step}; or {mend}"
    return mend


@contextmanager
def no_checkpoint_if_removed(sources: Sequence[StorageBackend], ref: StepRef) -> Generator[None]:
    """Return a context manager for a block that reads the attempt ``ref``. It replaces an error
    about damage with ``NoCheckpoint`` if the attempt was removed.

    The attempt counts as removed if no store of ``sources`` has its manifest any more.
    """
    try:
        yield
    except (IntegrityError, ObjectNotFound) as error:
        if not is_damage(error) or may_be_there(sources, ref):
            raise
        raise removal_error(sources, ref) from error


def may_be_there(sources: Sequence[StorageBackend], ref: StepRef) -> bool:
    """Return True if ``ref`` is committed on one of ``sources``, or if one of them fails.

    A store that fails may have the attempt.
    """
    try:
        return any(is_committed(source, ref) for source in sources)
    except StorageError:
        return True


def removal_error(sources: Sequence[StorageBackend], ref: StepRef) -> NoCheckpoint:
    """Return the error about an attempt that was removed while the command read it."""
    urls = ", ".join(source.url for source in sources)
    return NoCheckpoint(
        urls,
        f"step {ref.step} was removed during the command; ckpt pin keeps a step while it is read",
    )


@dataclass(frozen=True, slots=True)
class StoreOrError:
    """The result of opening one tier: its store, or the error if it cannot be opened."""

    url: str
    store: WatchedStore | CkptError


def open_each(
    roots: list[str] | None, config: str | None, *, timeout: float, all_tiers: bool = False
) -> list[StoreOrError]:
    """Open the tiers that ``--root`` or ``--config`` names, nearest first.

    The result has an item for each tier, also for a tier that cannot be opened. The root "memory"
    stands for all stores that this user has in the memory of this machine.

    Args:
        roots: The values of ``--root``.
        config: The value of ``--config``.
        timeout: The value of ``--timeout``.
        all_tiers: Without ``roots`` and ``config``, open all tiers of ``./ckpt.toml`` and not only
            the tier that ``resolve_tier`` returns.

    Raises:
        ConfigError: Both ``roots`` and ``config`` are given, a tier is named twice, or no tier is
            named.
        NoCheckpoint: The only root is "memory", and there is no store in memory.
        CkptError: The only tier cannot be opened.
    """
    if roots and config:
        raise ConfigError("--root and --config exclude each other: leave one out")
    if config:
        tiers = tiers_of(config)
    elif roots:
        tiers = tuple(map(resolve_tier, with_memory(roots)))
        if not tiers:
            raise NoCheckpoint(MEMORY, "this user has nothing in the memory of this machine")
    else:
        tiers = (load_config().tiers if all_tiers else ()) or (resolve_tier(None),)
    stores: list[StoreOrError] = []
    for tier, url in zip(tiers, urls_of(tiers), strict=True):
        try:
            backend = open_watched(url, tier.options, timeout)
            stores.append(StoreOrError(backend.url, backend))
        except CkptError as error:
            if len(tiers) == 1:
                raise
            stores.append(StoreOrError(url, error))
    urls = [store.url for store in stores]
    for (tier, url), (other_tier, other_url) in combinations(zip(tiers, urls, strict=True), 2):
        if is_spelling_of(url, other_url):
            # Stores of two servers may have the same URL
            is_one_server = server_of(tier) == server_of(other_tier)
            raise ConfigError(f"{url} is named twice") if is_one_server else same_url_error(url)
    return stores


def tiers_of(config: str) -> tuple[Tier, ...]:
    """Return the tiers of a ``ckpt.toml``. Raises ``ConfigError`` if it names none."""
    if tiers := load_config(config).tiers:
        return tiers
    raise ConfigError(f'{config} names no place: write root = "..." or [[tiers]]')


def with_memory(roots: Sequence[str]) -> list[str]:
    """Return ``roots`` with "memory" replaced by the URLs of all stores in this machine's memory.

    If there is no such store, "memory" is left out.
    """
    return [url for root in roots for url in (stores_in_memory() if root == MEMORY else [root])]


def ask_each(
    tiers: Sequence[StoreOrError], question: Callable[[WatchedStore], T]
) -> list[tuple[str, T | CkptError]]:
    """Call ``question`` with the stores of all tiers at the same time.

    Returns:
        The URL of each tier, with the result of ``question`` or with the error of a tier that
        cannot be opened, fails, or does not answer within ``--timeout``.
    """

    def answer(tier: StoreOrError) -> tuple[str, T | CkptError]:
        if isinstance(store := tier.store, CkptError):
            return tier.url, store
        try:
            return tier.url, store.call_in_time(partial(question, store))
        except CkptError as error:
            return tier.url, error

    workers = Workers("look", len(tiers))  # Not closed: a thread may still wait for its store
    return [future.result() for future in [workers.submit(answer, tier) for tier in tiers]]


@contextmanager
def workers_for(backend: StorageBackend, *stores: StorageBackend) -> Generator[Workers]:
    """Return a context manager that yields as many threads as ``backend`` can use, but at most 16.

    While the block runs, a line on standard error names each of the given stores that does not
    answer. The threads end with the block.
    """
    count = max(1, min(backend.capabilities.max_concurrency, _MOST_THREADS))
    with warn_of_silence(backend, *stores), Workers("cli", count) as workers:
        yield workers


def seconds(option: str, text: str, *, needs_unit: bool = False) -> float:
    """Return a time such as '90s', '30m', '2h' or '1d' in seconds; '5' is five seconds.

    Raises:
        ConfigError: ``text`` is not such a time, it is zero, or it has no unit and ``needs_unit``
            is set. The message names ``option``.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)\s*([smhd]?)", text.strip().lower())
    number = float(match[1]) * {"m": 60, "h": 3600, "d": 86400}.get(match[2], 1) if match else 0
    if number <= 0 or (needs_unit and match and not match[2]):
        raise ConfigError(f"{option} {text}: give a time such as 90s, 30m, 2h or 1d")
    return number

"""One view of a run: the steps that its tiers have, and what its journal says of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Final, Literal

from ckpt.catalog.inventory import Inventory, StoredStep
from ckpt.config import Tier
from ckpt.errors import CkptError
from ckpt.errors.text import redact
from ckpt.observe.disk_space import FolderSpace
from ckpt.observe.history import Arrival, History, SavedStep, history_of
from ckpt.observe.journal import JournalReader
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend
from ckpt.storage.places import is_folder, is_missing
from ckpt.storage.registry import open_backend, stores_in_memory
from ckpt.storage.tiers import urls_of

State = Literal[
    "committed",
    "verified",
    "saving",
    "incomplete",
    "removed",
    "missed",
    "cut",
    "damaged",
    "absent",
]
MEANING: Final[Mapping[State, str]] = {
    "committed": "the step is a checkpoint on the tier",
    "verified": "it is, and its bytes were compared with their checksums",
    "saving": "the step is on its way to the tier",
    "incomplete": "the tier has a part of it, and no manifest",
    "removed": "it was there, and is not any more",
    "missed": "the step did not get to the tier",
    "cut": "the job ended before the step was there",
    "damaged": "the tier has damaged data",
    "absent": "the step does not go to the tier, or nothing is known",
}
"""The states of a step on a tier."""
_MOST_STEPS: Final = 5000
_MEMORY: Final = "shm://"


@dataclass(frozen=True, slots=True)
class Cell:
    """A step on a tier. ``detail`` is a sentence, or empty."""

    state: State
    seconds: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """A row: one attempt at a step.

    Attributes:
        attempt: Empty for a step that only the journal knows.
        at: When it was committed or staged; 0 if that is not known.
        cells: One for each tier of the run.
        save: What the journal has of its save.
    """

    step: int
    attempt: str = ""
    at: float = 0.0
    nbytes: int = 0
    ranks: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    cells: tuple[Cell, ...] = ()
    save: SavedStep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    """A tier of a run.

    Attributes:
        opened: Whether it was looked at. Otherwise only the journal names it.
        error: Why it cannot be listed.
        free, size: Of its file system; nan if that is not known.
        waiting: How many steps are on their way to it.
        waiting_since: When the oldest of them was staged; 0 if none waits.
    """

    url: str
    opened: bool = True
    error: str = ""
    steps: int = 0
    newest: int = -1
    used_bytes: int = 0
    free: float = math.nan
    size: float = math.nan
    waiting: int = 0
    waiting_since: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one moment. ``steps`` are newest first."""

    name: str
    at: float
    tiers: tuple[TierView, ...]
    steps: tuple[StepView, ...]
    history: History


class TierWatch:
    """Looks at one tier with a thread of its own.

    A store that does not answer costs that thread, and a line in the view.

    Thread safety: one thread at a time.
    """

    def __init__(self, url: str, tier: Tier) -> None:
        self.url, self.error = url, ""
        self.backend: StorageBackend | None = None
        self._inventory: Inventory | None = None
        try:
            self.backend = open_backend(url, tier.options)
            self.url, self._inventory = self.backend.url, Inventory(self.backend, shown=True)
        except CkptError as error:
            self.error = str(error)
        self._worker = Workers("look", 1)
        self._space = FolderSpace(self.url) if is_folder(self.url) else None
        self._asked: Future[list[StoredStep]] | None = None
        self._asked_at = 0.0
        self.steps: Sequence[StoredStep] = ()

    def ask(self) -> Sequence[Future[list[StoredStep]]]:
        """Begin a look, unless one is under way. Returns what to wait for."""
        if self._inventory is None:
            return ()
        if self._asked is None:
            self._asked, self._asked_at = self._worker.submit(self._inventory.look), time.time()
        return (self._asked,)

    def take(self) -> None:
        """Take what the look has found. If it is not over, the last look's steps stay."""
        if self._asked is None:
            return
        if not self._asked.done():
            silent = time.time() - self._asked_at
            self.error = f"no answer for {silent:.0f} s"
            return
        asked, self._asked = self._asked, None
        try:
            self.steps, self.error = asked.result(), ""
        except CkptError as error:
            self.error = str(error)

    def view(self, history: History) -> TierView:
        """Return the tier as it was found last."""
        whole = [each for each in self.steps if each.state == "committed"]
        known = _known_of(self.url, history)
        never = not known.steps and not known.waiting and is_missing(self.url)
        return TierView(
            url=self.url,
            error=self.error or ("this folder does not exist" if never else ""),
            steps=len(whole),
            newest=max((each.ref.step for each in whole), default=-1),
            used_bytes=sum(each.nbytes for each in self.steps),
            free=self._space.free() if self._space else math.nan,
            size=self._space.size() if self._space else math.nan,
            waiting=known.waiting,
            waiting_since=known.waiting_since,
        )


class RunWatch:
    """Looks at a run: its tiers, and the journals beside those that are folders.

    Thread safety: one thread at a time.

    Args:
        name: What the run is called. Credentials in it become ``***``.
        tiers: Its tiers, nearest first. One that cannot be opened is shown with its error.
    """

    def __init__(self, name: str, tiers: Sequence[Tier]) -> None:
        self.name = redact(name)
        self.tiers = [TierWatch(url, tier) for url, tier in zip(urls_of(tiers), tiers, strict=True)]
        self._journals = [JournalReader(tier.url) for tier in self.tiers if is_folder(tier.url)]

    def look(self, patience: float) -> RunView:
        """Look at all tiers. One that takes longer than ``patience`` seconds is taken as it was."""
        _look(self.tiers, patience)
        history = history_of([record for journal in self._journals for record in journal.read()])
        opened = {tier.url for tier in self.tiers}
        named = list({url: None for save in history.saves.values() for url in save.tiers})
        self._find_memory(named, opened, patience)
        views = [tier.view(history) for tier in self.tiers]
        views += [_known_of(url, history) for url in named if url not in opened]
        views.sort(key=lambda view: named.index(view.url) if view.url in named else len(named))
        return RunView(
            name=self.name,
            at=time.time(),
            tiers=tuple(views),
            steps=_rows({tier.url: tier.steps for tier in self.tiers}, views, history),
            history=history,
        )

    def _find_memory(self, named: Sequence[str], opened: set[str], patience: float) -> None:
        """Look at the memory of this machine too, if the journal names it."""
        for url in stores_in_memory() if any(url.startswith(_MEMORY) for url in named) else ():
            if url in named and url not in opened:
                self.tiers.append(tier := TierWatch(url, Tier(url)))
                opened.add(tier.url)
                _look([tier], patience)


def _look(tiers: Sequence[TierWatch], patience: float) -> None:
    wait([future for tier in tiers for future in tier.ask()], patience)
    for tier in tiers:
        tier.take()


def _known_of(url: str, history: History) -> TierView:
    """Return what the journal alone has of a tier."""
    there = [(save, save.tiers[url]) for save in history.saves.values() if url in save.tiers]
    waiting = [save.at for save, arrival in there if arrival.state == "saving"]
    arrived = [save for save, arrival in there if arrival.state == "committed"]
    return TierView(
        url=url,
        opened=False,
        steps=0 if url.startswith(_MEMORY) else len(arrived),
        newest=max((save.step for save in arrived), default=-1),
        waiting=len(waiting),
        waiting_since=min(waiting, default=0.0),
    )


def _rows(
    listed: Mapping[str, Sequence[StoredStep]], tiers: Sequence[TierView], history: History
) -> tuple[StepView, ...]:
    """Return a row for each attempt on any tier, and for each step that only the journal has."""
    found: dict[tuple[int, str], dict[str, StoredStep]] = {}
    for url, steps in listed.items():
        for each in steps:
            found.setdefault((each.ref.step, each.ref.attempt), {})[url] = each
    # The journal does not name attempts, so its save counts as that of the youngest.
    youngest: dict[int, tuple[float, str]] = {}
    for (step, attempt), places in found.items():
        born = max(each.created_at or math.inf for each in places.values())
        youngest[step] = max(youngest.get(step, (0.0, "")), (born, attempt))
    for step in history.saves:
        if step not in youngest:
            found[step, ""] = {}
    newest = sorted(found, reverse=True)[:_MOST_STEPS]
    return tuple(
        _row(
            key,
            found[key],
            tiers,
            history,
            history.saves.get(key[0]) if youngest.get(key[0], (0, ""))[1] == key[1] else None,
        )
        for key in newest
    )


def _row(
    key: tuple[int, str],
    places: Mapping[str, StoredStep],
    tiers: Sequence[TierView],
    history: History,
    save: SavedStep | None,
) -> StepView:
    step, attempt = key
    whole = [each for each in places.values() if each.state == "committed"]
    first = whole[0] if whole else next(iter(places.values()), None)
    cells: list[Cell] = []
    for tier in tiers:
        arrival = save.tiers.get(tier.url) if save else None
        cell = _cell(places.get(tier.url), arrival, tier)
        check = history.verified.get((step, tier.url)) if cell.state == "committed" else None
        if check is not None:
            state: State = "damaged" if check.reason else "verified"
            cell = Cell(state, cell.seconds, check.reason)
        cells.append(cell)
    return StepView(
        step=step,
        attempt=attempt,
        at=first.created_at if first and first.created_at else save.at if save else 0.0,
        nbytes=first.staged_bytes or first.nbytes if first else save.nbytes if save else 0,
        ranks=first.ranks if first else 0,
        metrics=first.metrics if first else {},
        cells=tuple(cells),
        save=save,
    )


def _cell(listed: StoredStep | None, arrival: Arrival | None, tier: TierView) -> Cell:
    seconds = arrival.seconds if arrival else 0.0
    if listed is not None and listed.state != "incomplete":
        is_there = listed.state == "committed"
        return Cell("committed" if is_there else "damaged", seconds, listed.reason)
    if arrival is not None and arrival.state == "committed":
        gone = (tier.opened and not tier.error) or tier.url.startswith(_MEMORY)
        return Cell("removed" if gone else "committed", seconds)
    if arrival is not None:
        return Cell(arrival.state, 0.0, arrival.reason)
    return Cell("absent" if listed is None else "incomplete")


def watch_runs(roots: Sequence[Tier], configured: Mapping[str, Sequence[Tier]]) -> list[RunWatch]:
    """Return the runs to show.

    Roots that a journal names as tiers of one run become one run, in the order of the roots.

    Args:
        roots: Each a run with one tier, or a tier of a run.
        configured: Name -> the tiers of a run.
    """
    groups: list[list[Tier]] = []
    for root in roots:
        together = [group for group in groups if any(_are_one_run(root, each) for each in group)]
        groups = [group for group in groups if group not in together]
        groups.append([*(tier for group in together for tier in group), root])
    runs = [RunWatch(group[0].url, group) for group in groups]
    return runs + [RunWatch(name, tiers) for name, tiers in configured.items()]


def _are_one_run(one: Tier, two: Tier) -> bool:
    """Return whether the journal beside one of two places has saves that went to both."""
    places = {_url(one), _url(two)}
    return any(
        places <= set(record.tiers)
        for place in places
        if is_folder(place)
        for record in JournalReader(place).read()
    )


def _url(tier: Tier) -> str:
    """Return the place as events name it."""
    try:
        backend = open_backend(tier.url, tier.options)
    except CkptError:
        return tier.url
    backend.close()
    return backend.url

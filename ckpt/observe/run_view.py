"""Views of runs for ``ckpt serve`` and ``ckpt top``, from the tiers and journals of each run.

A *listing* is an attempt at a step as a tier lists it now. An *arrival* is the progress of a save
on one tier, as a journal has it. A journal names steps, and not attempts.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from msgspec.structs import replace

from ckpt.catalog.inventory import Inventory, StoredStep
from ckpt.config import Tier
from ckpt.errors import CkptError
from ckpt.errors.sanitize import redact
from ckpt.observe.disk_space import FolderSpace
from ckpt.observe.history import Arrival, History, SavedStep, history_of, mark_cut
from ckpt.observe.job_life import JobLife, end_of, life_of
from ckpt.observe.journal_reader import JournalReader
from ckpt.observe.journal_record import Record
from ckpt.observe.step_rows import facts_of, time_of
from ckpt.observe.time_spent import TimeSpent, time_spent
from ckpt.observe.timed_calls import results_in_time
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend, stores_in_memory
from ckpt.storage.tiers import urls_of
from ckpt.storage.urls import is_folder, is_missing, is_spelling_of

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
"""The explanation of each state of a step on a tier, as the page of ``ckpt serve`` shows it."""
_MOST_STEPS: Final = 5000
_MEMORY_SCHEME: Final = "shm://"
_OPEN_SECONDS: Final = 2.0
"""How long to wait until a tier is open, and for the journals of roots that may be one run."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The state of one attempt at a step on one tier.

    Attributes:
        state: The state; ``MEANING`` explains each.
        seconds: The time from the call of the save to the commit; 0 if that is not known.
        detail: The reason for the state; empty if there is none to show.
    """

    state: State
    seconds: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One attempt at a step, for a row of a table.

    Attributes:
        step: The number of the step.
        attempt: The name of the attempt; empty if no tier has the step and only the journal does.
        at: When the attempt was committed or staged, in seconds since 1970; 0 if not known.
        nbytes: The size of the step before encoding. If it is not committed, the bytes on a tier.
            If only the journal has the step, the bytes that rank 0 staged.
        ranks: How many ranks wrote the step; 0 if that is not known.
        metrics: The metrics of the step, by name, also of a step that was removed.
        cells: The state on each tier of the run, in the order of ``RunView.tiers``.
        save: The save in the journal; None if the journal does not have it, or if it counts for a
            younger attempt at the step.
        is_abandoned: Whether the run has gone back to an earlier step, so that no start takes this
            one.
    """

    step: int
    attempt: str = ""
    at: float = 0.0
    nbytes: int = 0
    ranks: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    cells: tuple[Cell, ...] = ()
    save: SavedStep | None = None
    is_abandoned: bool = False

    @property
    def is_damaged(self) -> bool:
        """Whether a tier has damaged data of the attempt, and none has it whole."""
        states = {cell.state for cell in self.cells}
        return "damaged" in states and not states & {"committed", "verified"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    """A tier of a run.

    Attributes:
        url: The URL of the tier.
        is_listed: Whether the view is from a `TierWatch`, which lists the tier; ``error`` says if
            that has failed. Otherwise only a journal names the tier, and all facts are from the
            journal.
        error: Why the tier cannot be listed; empty if it can be.
        steps: How many attempts are committed on the tier.
        newest: The newest committed step; -1 if there is none.
        used_bytes: The size of all steps on the tier, including incomplete ones.
        free, size: The free bytes and all bytes of the tier's file system; nan if not known.
        waiting: How many steps are on their way to the tier, as the journal says.
        waiting_since: When the oldest of these was staged, in seconds since 1970; 0 if none waits.
    """

    url: str
    is_listed: bool = True
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
    """The state of a run at one moment.

    Attributes:
        name: The name of the run.
        at: The time of this view, in seconds since 1970.
        tiers: The tiers of the run, nearest first.
        steps: The attempts at steps, newest step first.
        history: The history from the journals of the run.
        life: Whether the job lives; None if the run has no journal.
        time_spent: Where the time of the run went; None if no job has saved.
    """

    name: str
    at: float
    tiers: tuple[TierView, ...]
    steps: tuple[StepView, ...]
    history: History
    life: JobLife | None = None
    time_spent: TimeSpent | None = None


class TierWatch:
    """Lists one tier whenever ``ask`` is called, on a thread of its own.

    If the store does not answer, only that thread is blocked, and ``error`` says so.

    ``_open_call`` is the call that opens the tier, and ``_inventory`` lists the tier once it is
    open. ``_query`` is the listing that is under way, and ``_asked_at`` is when it began.

    Args:
        url: The URL of the store. It is the URL of a store in memory if ``tier.url`` is "memory".
        tier: The tier with its options.

    Thread safety: one thread at a time.

    Attributes:
        url: The URL of the store, as the user names it.
        path: The path of a folder without symbolic links; empty for another store.
        error: Why the tier cannot be opened or listed; empty if it can be.
        backend: The backend of the tier; None if it cannot be opened.
        steps: The steps of the last listing that has ended.
    """

    def __init__(self, url: str, tier: Tier) -> None:
        self.url, self.error = url, ""
        self.backend: StorageBackend | None = None
        self.steps: Sequence[StoredStep] = ()
        self._inventory: Inventory | None = None
        self._query: Future[Sequence[StoredStep]] | None = None
        self._asked_at = 0.0
        self._worker = Workers("look", 1)
        self.path = ""
        self._open_call = self._worker.submit(self._open, tier)
        wait([self._open_call], _OPEN_SECONDS)
        self._space = FolderSpace(self.url) if is_folder(self.url) else None

    def _open(self, tier: Tier) -> None:
        try:
            self.backend = open_backend(self.url, tier.options)
            self.url, self._inventory = self.backend.url, Inventory(self.backend, for_display=True)
            self.path = os.path.realpath(self.url) if is_folder(self.url) else ""
        except CkptError as error:
            self.error = str(error)

    def _list(self) -> Sequence[StoredStep]:
        if self._inventory is None:  # It was opened late, and the error of that stays
            raise CkptError(self.error)
        return self._inventory.look()

    def ask(self) -> Sequence[Future[Sequence[StoredStep]]]:
        """Begin to list the tier, unless a listing is under way.

        Return a sequence with the future of the listing. It is empty if the tier cannot be opened.
        """
        if self._inventory is None and self._open_call.done():
            return ()
        if self._query is None:
            self._query, self._asked_at = self._worker.submit(self._list), time.time()
        return (self._query,)

    def take(self) -> None:
        """Set ``steps`` or ``error`` to the result of the listing that ``ask`` began.

        If the listing has not ended, ``steps`` do not change, and ``error`` says for how long the
        store has not answered. If no listing was begun, nothing changes.
        """
        if self._query is None:
            return
        if not self._query.done():
            silent = time.time() - self._asked_at
            self.error = f"no answer for {silent:.0f} s"
            return
        query, self._query = self._query, None
        try:
            self.steps, self.error = query.result(), ""
        except CkptError as error:
            self.error = str(error)

    def view(self, history: History) -> TierView:
        """Return a view of the tier from the last listing and from ``history``."""
        committed_steps = [step for step in self.steps if step.state == "committed"]
        journal_view = _journal_view(self.url, history, {step.ref.step for step in committed_steps})
        is_absent = not journal_view.steps and not journal_view.waiting and is_missing(self.url)
        return TierView(
            url=self.url,
            error=self.error or ("this folder does not exist" if is_absent else ""),
            steps=len(committed_steps),
            newest=max(
                (step.ref.step for step in committed_steps if not step.is_abandoned), default=-1
            ),
            used_bytes=sum(step.nbytes for step in self.steps),
            free=self._space.free() if self._space else math.nan,
            size=self._space.size() if self._space else math.nan,
            waiting=journal_view.waiting,
            waiting_since=journal_view.waiting_since,
        )


class RunWatch:
    """Makes views of a run from its tiers, and from the journals beside the tiers that are folders.

    Thread safety: one thread at a time.

    Args:
        name: The name of the run. Credentials in it become ``***``.
        tiers: The tiers of the run, nearest first. If a tier cannot be opened, its `TierView`
            contains the error.
    """

    def __init__(self, name: str, tiers: Sequence[Tier]) -> None:
        self.name = redact(name)
        self.tiers = [TierWatch(url, tier) for url, tier in zip(urls_of(tiers), tiers, strict=True)]
        self._journals = [JournalReader(tier.url) for tier in self.tiers if is_folder(tier.url)]

    def look(self, patience: float) -> RunView:
        """List all tiers at the same time, read the journals, and return a view of the run.

        Args:
            patience: How many seconds to wait for the listings. For a tier that takes longer, the
                view has the steps of its last listing.
        """
        _look(self.tiers, patience)
        records = [record for journal in self._journals for record in journal.read()]
        beats = {job: beat for journal in self._journals for job, beat in journal.beats().items()}
        records.sort(key=lambda record: record.at)
        history = history_of(_with_listed_urls(records, self.tiers))
        life = life_of(history, beats, time.time())
        if life is not None and life.state == "died":
            mark_cut(history.saves.values())
        listed_urls = {tier.url for tier in self.tiers}
        urls_of_saves = (url for save in history.saves.values() for url in save.tiers)
        named_urls = list(dict.fromkeys(urls_of_saves))  # Each URL once, in order
        self._add_memory_tiers(named_urls, listed_urls, patience)
        views = [tier.view(history) for tier in self.tiers]
        views += [_journal_view(url, history) for url in named_urls if url not in listed_urls]
        views.sort(
            key=lambda view: (
                named_urls.index(view.url) if view.url in named_urls else len(named_urls)
            )
        )
        return RunView(
            name=self.name,
            at=time.time(),
            tiers=tuple(views),
            steps=_rows({tier.url: tier.steps for tier in self.tiers}, views, history),
            history=history,
            life=life,
            time_spent=time_spent(
                history, {name: end_of(job, beats.get(name)) for name, job in history.jobs.items()}
            ),
        )

    def _add_memory_tiers(
        self, named_urls: Sequence[str], listed_urls: set[str], patience: float
    ) -> None:
        """List also the stores in this machine's memory that the journals name as tiers of the run.

        Append a `TierWatch` for each of these stores to ``tiers``, and add its URL to
        ``listed_urls``.

        Args:
            named_urls: The URLs of the tiers that the journals name.
            listed_urls: The URLs of the tiers that were listed.
            patience: How many seconds to wait for each store.
        """
        for url in (
            stores_in_memory() if any(url.startswith(_MEMORY_SCHEME) for url in named_urls) else ()
        ):
            if url in named_urls and url not in listed_urls:
                self.tiers.append(tier := TierWatch(url, Tier(url)))
                listed_urls.add(tier.url)
                _look([tier], patience)


def _with_listed_urls(records: Sequence[Record], tiers: Sequence[TierWatch]) -> Sequence[Record]:
    """Return the records of a journal with the URLs of ``tiers`` where they name them otherwise,
    such as by a path without symbolic links. No file system of another place is asked.
    """
    names = {url for record in records for url in (record.tier, *record.tiers)} - {""}
    urls = {
        name: tier.url
        for name in names - {tier.url for tier in tiers}
        for tier in tiers
        if is_spelling_of(name, tier.path or tier.url)
    }
    if not urls:
        return records
    return [
        replace(
            record,
            tier=urls.get(record.tier, record.tier),
            tiers=tuple(urls.get(url, url) for url in record.tiers),
        )
        for record in records
    ]


def _look(tiers: Sequence[TierWatch], patience: float) -> None:
    wait([future for tier in tiers for future in tier.ask()], patience)
    for tier in tiers:
        tier.take()


def _journal_view(url: str, history: History, committed: Collection[int] = ()) -> TierView:
    """Return the view of a tier that follows from the journals alone, without listing the tier.

    Args:
        url: The URL of the tier.
        history: The history from the journals.
        committed: Steps that the tier lists as committed. They do not count as waiting, even if the
            journals have no commit of them. The agent commits the steps that a trainer has left,
            and writes no record of that.
    """
    arrivals = [(save, save.tiers[url]) for save in history.saves.values() if url in save.tiers]
    start_times = [
        save.at
        for save, arrival in arrivals
        if arrival.state == "saving" and save.step not in committed
    ]
    saves = [save for save, arrival in arrivals if arrival.state == "committed"]
    return TierView(
        url=url,
        is_listed=False,
        steps=0 if url.startswith(_MEMORY_SCHEME) else len(saves),
        newest=max((save.step for save in saves), default=-1),
        waiting=len(start_times),
        waiting_since=min(start_times, default=0.0),
    )


def _rows(
    steps_by_tier: Mapping[str, Sequence[StoredStep]], tiers: Sequence[TierView], history: History
) -> tuple[StepView, ...]:
    """Return a row for each attempt on any tier and for each step that only the journals have.

    The newest step comes first. Only the 5000 newest rows are returned.

    Args:
        steps_by_tier: The steps of each tier that was listed, by the URL of the tier.
        tiers: The tiers, in the order of the cells of a row.
        history: The history from the journals.
    """
    attempts: dict[tuple[int, str], dict[str, StoredStep]] = {}
    for url, steps in steps_by_tier.items():
        for listing in steps:
            attempts.setdefault((listing.ref.step, listing.ref.attempt), {})[url] = listing
    # A journal does not name attempts, so its save and its verifications of a step count for the
    # youngest attempt. Each entry is the time of the attempt, and its name.
    youngest_attempts: dict[int, tuple[float, str]] = {}
    for (step, attempt), step_by_tier in attempts.items():
        creation_time = max(map(time_of, step_by_tier.values()))
        youngest_attempts[step] = max(
            youngest_attempts.get(step, (0.0, "")), (creation_time, attempt)
        )
    for step in history.saves:
        if step not in youngest_attempts:
            attempts[step, ""] = {}
    no_history = History()
    rows: list[StepView] = []
    for step, attempt in sorted(attempts, reverse=True)[:_MOST_STEPS]:
        _, youngest_attempt = youngest_attempts.get(step, (0.0, ""))
        own_history = history if attempt == youngest_attempt else no_history
        rows.append(_row((step, attempt), attempts[step, attempt], tiers, own_history))
    return tuple(rows)


def _row(
    key: tuple[int, str],
    step_by_tier: Mapping[str, StoredStep],
    tiers: Sequence[TierView],
    history: History,
) -> StepView:
    """Return the row of one attempt.

    Args:
        key: The number of the step, and the name of the attempt.
        step_by_tier: The attempt as each tier lists it, by the URL of the tier.
        tiers: The tiers, in the order of the cells.
        history: The history from the journals; an empty one if it belongs to another attempt.
    """
    step, attempt = key
    save = history.saves.get(step)
    committed_listings = [
        listing for listing in step_by_tier.values() if listing.state == "committed"
    ]
    listing = (
        committed_listings[0] if committed_listings else next(iter(step_by_tier.values()), None)
    )
    cells: list[Cell] = []
    for tier in tiers:
        arrival = save.tiers.get(tier.url) if save else None
        cell = _cell(step_by_tier.get(tier.url), arrival, tier)
        verification = (
            history.verifications.get((step, tier.url)) if cell.state == "committed" else None
        )
        if verification is not None:
            state: State = "damaged" if verification.reason else "verified"
            cell = Cell(state, cell.seconds, verification.reason)
        cells.append(cell)
    facts = facts_of(listing, save)
    return StepView(
        step=step,
        attempt=attempt,
        at=facts.moment,
        nbytes=facts.nbytes,
        ranks=listing.ranks if listing else 0,
        metrics=facts.metrics,
        cells=tuple(cells),
        save=save,
        is_abandoned=listing.is_abandoned if listing else save is not None and save.is_abandoned,
    )


def _cell(listing: StoredStep | None, arrival: Arrival | None, tier: TierView) -> Cell:
    """Return the state of an attempt on ``tier``, before any verification is considered.

    Args:
        listing: The attempt as the tier lists it; None if the tier does not.
        arrival: The progress on the tier in the journal; None if the journal has none.
        tier: The tier.
    """
    seconds = arrival.seconds if arrival else 0.0
    if listing is not None and listing.state != "incomplete":
        is_there = listing.state == "committed"
        return Cell("committed" if is_there else "damaged", seconds, listing.reason)
    if arrival is not None and arrival.state == "committed":
        is_gone = (tier.is_listed and not tier.error) or tier.url.startswith(_MEMORY_SCHEME)
        return Cell("removed" if is_gone else "committed", seconds)
    if arrival is not None:
        return Cell(arrival.state, 0.0, arrival.reason)
    return Cell("absent" if listing is None else "incomplete")


def watch_runs(roots: Sequence[Tier], tiers_by_run: Mapping[str, Sequence[Tier]]) -> list[RunWatch]:
    """Return a `RunWatch` for each run to show.

    Args:
        roots: The roots of runs. Roots that a journal names as tiers of one run become one run,
            with the tiers in the order of the roots. Each other root becomes a run of its own.
        tiers_by_run: The tiers of further runs, by the name of the run.
    """
    places = results_in_time([partial(_place, root) for root in roots], _OPEN_SECONDS)
    groups: list[list[tuple[Tier, _Place]]] = []
    for root, answer in zip(roots, places, strict=True):
        place = answer or _Place(root.url)
        matches = [
            group for group in groups if any(place.shares_run_with(member) for _, member in group)
        ]
        groups = [group for group in groups if group not in matches]
        groups.append([*(pair for group in matches for pair in group), (root, place)])
    tiers_by_group = [[tier for tier, _ in group] for group in groups]
    runs = [RunWatch(tiers[0].url, tiers) for tiers in tiers_by_group]
    return runs + [RunWatch(name, tiers) for name, tiers in tiers_by_run.items()]


@dataclass(frozen=True, slots=True)
class _Place:
    """A root, as events name it, and the sets of tiers to which the saves in its journals go."""

    url: str
    saves: frozenset[tuple[str, ...]] = frozenset()

    def shares_run_with(self, place: _Place) -> bool:
        """Return True if a journal beside one of the two roots has a save that goes to both."""
        return any({self.url, place.url} <= set(tiers) for tiers in self.saves | place.saves)


def _place(root: Tier) -> _Place:
    url = _url(root)
    records = JournalReader(url).read() if is_folder(url) else ()
    return _Place(url, frozenset(record.tiers for record in records))


def _url(tier: Tier) -> str:
    """Return the URL of a tier as events name it; the configured URL if it cannot be opened."""
    try:
        backend = open_backend(tier.url, tier.options)
    except CkptError:
        return tier.url
    backend.close()
    return backend.url

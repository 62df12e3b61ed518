"""The registration of a job with the agent. The trainer registers the job, and registers it again
whenever the agent has ended.

The ranks agree through a coordinator. Each rank posts a message under a subject, and the leader
gathers the messages. ``leader_decides`` gives the leader's decision to all ranks.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import closing
from typing import Final

import msgspec

from ckpt.agent.client import Connection, connect, reach_and_ask
from ckpt.agent.copy_client import AgentCopier
from ckpt.agent.folder import AgentFolder
from ckpt.agent.messages import Detach, Forget, Job, fields_of, urls_of
from ckpt.agent.worker_messages import Verified
from ckpt.config import AgentMode, SaveConfig, agent_folder, environment_for_agent
from ckpt.coordination.coordinator import LEADER, Coordinator
from ckpt.coordination.exchanges import Wait, encode_json, gather, leader_decides
from ckpt.coordination.node_commits import on_node
from ckpt.errors import AgentError, CkptError, ConfigError
from ckpt.events import Event, StepVerified
from ckpt.pipeline.workers import Workers
from ckpt.processes import Process
from ckpt.root.owner import Owner, read_owner
from ckpt.storage.api import HoldsRoot
from ckpt.storage.registry import scheme_of
from ckpt.storage.tiers import Nodes, OpenTier
from ckpt.storage.urls import canonical, is_folder

_log = logging.getLogger("ckpt")
_START_SECONDS: Final = 300.0
"""How many seconds a rank waits for the messages that other ranks post at their start."""
_RETRY_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 2.0
"""How many seconds to wait until the stores return the owners of their roots."""
_MOST_REASONS: Final = 5
"""How many reasons for which no agent is reached are warnings, until one is reached again."""
_NODE_SUBJECT: Final = "agent"
_ALL_NODES_SUBJECT: Final = "agents"
Notify = Callable[[Event], None]
MakesCopier = Callable[[OpenTier], AgentCopier]


class Registration:
    """A job's registration with the agent of this node.

    If nodes have tiers of their own, the lowest rank of each node registers the job. Otherwise only
    the leader does.

    The thread ``_watcher`` reads what the agent sends, and registers the job again if the agent has
    ended. ``_end_event`` ends this thread.

    Args:
        job: The job, on the rank that registers it. None on the other ranks, whose registration
            only makes copiers.
        copier: Makes the copier for a tier.
        notify: Called with an event for each step of the job that the agent has verified.

    Thread safety: one thread may call either ``detach`` or ``forget``, and only once.
    ``_lock`` guards ``_connection``, which only the watching thread replaces.
    """

    def __init__(self, job: Job | None, copier: MakesCopier, notify: Notify) -> None:
        """Register ``job``. Raises ``AgentError`` if the agent cannot be reached or refuses."""
        self._job, self._copier, self._notify = job, copier, notify
        self._watcher = Workers("agent", 1)
        self._lock = threading.Lock()
        self._end_event = threading.Event()
        self._connection: Connection | None = None
        if job is not None:
            self._connection = _register(job)
            self._watcher.submit(self._watch, job)

    def copier(self, target: OpenTier) -> AgentCopier:
        """Return a copier that lets the agent of this node copy the files of this process to
        ``target``.
        """
        return self._copier(target)

    def detach(self, reason: str) -> None:
        """Ask the agent to finish the steps of the job now, even if this process lives on.

        An agent is started if there is none. If nodes have tiers of their own, the job is only
        registered again, and the agents begin once the processes of the job have ended. On a rank
        that has not registered the job, nothing happens.

        Args:
            reason: The failure that ends the process, or an empty text. If it is not empty, an
                ``AgentError`` is logged and not raised.

        Raises:
            AgentError: No agent can be reached, or the agent refuses. If the job is still
                registered with an agent, that agent finishes the job once the processes of the job
                have ended.
        """
        if self._job is not None:
            self._end()
            try:
                with closing(_register(self._job)) as connection:
                    # The agents of several nodes wait until the processes have ended.
                    if not self._job.node_ranks:
                        connection.ask(Detach(self._job.owner.attempt))
            except AgentError as error:
                if not reason:
                    raise
                _log.warning("ckpt: the job is not left to an agent: %s", error)

    def forget(self) -> None:
        """End the registration of a job that has no more steps to be finished. A ``CkptError`` is
        logged, and not raised.
        """
        if self._job is not None:
            self._end()
            try:
                if (connection := connect(AgentFolder.of_this_user())) is not None:
                    with closing(connection):
                        connection.ask(Forget(self._job.owner.attempt))
            except CkptError as error:
                _log.debug("ckpt: %s", error)

    def _end(self) -> None:
        """Stop the watching thread, so that the job is not registered again."""
        with self._lock:
            self._end_event.set()
            if self._connection is not None:
                self._connection.interrupt()
        self._watcher.close()

    def _watch(self, job: Job) -> None:
        """Pass on the reports of the agent, and register again whenever the agent has ended, until
        ``_end`` is called. While no agent can be reached, each reason is a warning in the log once.
        """
        reasons: set[str] = set()
        while True:
            connection = self._connection
            if connection is not None:
                reasons.clear()
                while (news := connection.next_news()) is not None:
                    self._pass_on(news)
                connection.close()
            if self._end_event.is_set():
                return
            try:
                connection = _register(job)
            except CkptError as error:
                is_new = str(error) not in reasons and len(reasons) < _MOST_REASONS
                if is_new:
                    reasons.add(str(error))
                level = logging.WARNING if is_new else logging.DEBUG
                _log.log(level, "ckpt: this job has no agent for now: %s", error)
                connection = None
            with self._lock:
                self._connection = connection
                if connection is not None and self._end_event.is_set():
                    connection.interrupt()
            if connection is None:
                self._end_event.wait(_RETRY_SECONDS)

    def _pass_on(self, news: Verified) -> None:
        if news.damage:
            _log.error("ckpt: step %d on %s is damaged: %s", news.step, news.tier, news.damage)
        self._notify(
            StepVerified(
                step=news.step,
                tier=news.tier,
                nbytes=news.nbytes,
                seconds=news.seconds,
                mended=news.mended,
                damage=news.damage,
            )
        )


def register(
    config: SaveConfig, tiers: Sequence[OpenTier], coordinator: Coordinator, notify: Notify
) -> Registration | None:
    """Register the job with the agent of the leader's node, or with the agents of all nodes if
    nodes have tiers of their own. In the second case, the lowest rank of each node registers the
    ranks of its node. An agent is started if there is none. All ranks call this function.

    Args:
        config: The settings of the save. ``agent`` says whether an agent is used.
        tiers: The tiers of the job, nearest first.
        coordinator: The connection to the other ranks.
        notify: Called with an event for each step of the job that the agent has verified.

    Returns:
        The registration. None if ``agent`` is "off". Also None if ``agent`` is "auto" and an agent
        cannot be reached, refuses the job, or cannot work for a job with these tiers. The leader
        then logs a warning.

    Raises:
        AgentError: ``agent`` is "required", and an agent cannot be reached, refuses the job, or
            cannot work for a job with these tiers.
        CommitTimeout: A rank did not call this function in time.
    """
    if config.agent == "off":
        return None
    owner = Owner.of_this_process(coordinator.attempt)
    nodes = next((tier.nodes for tier in tiers if tier.nodes is not None), None)
    node_coordinator = on_node(coordinator, nodes)
    node_coordinator.post(_NODE_SUBJECT, msgspec.json.encode(owner))
    registration: Registration | None = None

    def copier(target: OpenTier) -> AgentCopier:
        return AgentCopier(
            _job_message(owner, [owner], tiers, config), coordinator.rank, config, target
        )

    def decide() -> str:
        nonlocal registration
        messages = gather(node_coordinator, _NODE_SUBJECT, Wait(_START_SECONDS, "the manager"))
        rank_owners = [msgspec.json.decode(data, type=Owner) for data in messages.values()]
        try:
            job = _job_message(owner, rank_owners, tiers, config)
            if nodes is not None:
                job = _job_of_node(job, nodes, coordinator.rank, tiers)
            # The trainer resolves the links, since it uses these file systems in any case.
            roots = tuple(canonical(url) for url in urls_of(job))
            job = msgspec.structs.replace(job, before=_owner_attempts(tiers), roots=roots)
            # The mark of a root shows whether its path leads to another folder later.
            job = msgspec.structs.replace(job, marks=_marks_of(tiers))
            registration = Registration(job, copier, notify)
        except CkptError as error:
            return str(error)
        return ""

    # The ranks wait longer than the leader, so that they get its error.
    wait = Wait(_START_SECONDS + 30, "the registration with the agent")
    refusal = leader_decides(node_coordinator, _NODE_SUBJECT, decide, wait, str)
    node_coordinator.forget(_NODE_SUBJECT)
    if nodes is not None:
        refusal = _refusal_of_all(coordinator, nodes, refusal)
    if not refusal:
        return registration or Registration(None, copier, notify)
    if registration is not None:
        registration.forget()
    if config.agent == "required":
        raise AgentError(f'{refusal} (agent="required")')
    if coordinator.rank == LEADER:
        _log.warning("ckpt: this job has no agent: %s", refusal)
    return None


def check_detach(mode: AgentMode, registration: Registration | None) -> None:
    """Check that ``close(detach=True)`` is possible.

    Args:
        mode: The setting ``agent`` of the manager.
        registration: The result of ``register``.

    Raises:
        ConfigError: ``mode`` is "off".
        AgentError: The job has no agent.
    """
    if mode == "off":
        raise ConfigError(
            'close(detach=True) leaves steps to an agent, and this manager has agent="off": build '
            'it with agent="auto", or close it without detach'
        )
    if registration is None:
        raise AgentError(
            "this job has no agent, as the log has said at its start: close the manager without "
            "detach"
        )


def _register(job: Job) -> Connection:
    connection, _ = reach_and_ask(job)
    return connection


def _job_message(
    owner: Owner, rank_owners: Sequence[Owner], tiers: Sequence[OpenTier], config: SaveConfig
) -> Job:
    """Return the job as a message for the agent. ``rank_owners`` are the records of its
    processes. ``Job.processes`` contains only the processes on the machine and in the process
    namespace of ``owner``.
    """
    machine_ranks = [rank for rank in rank_owners if rank.machine == owner.machine]
    return Job(
        owner=owner,
        processes=tuple(Process(rank.pid, rank.started) for rank in machine_ranks),
        ranks=len(rank_owners),
        tiers=tuple(fields_of(tier.tier, _url_for_agent(tier)) for tier in tiers),
        backlog=config.backlog,
        environment=environment_for_agent(),
        scrub_mb_per_s=config.scrub_mb_per_s,
    )


def _job_of_node(job: Job, nodes: Nodes, rank: int, tiers: Sequence[OpenTier]) -> Job:
    """Return a copy of ``job`` for an agent that sees only the files of its own node.
    ``Job.node_ranks`` contains the ranks on the node of ``rank``, and ``Job.ranks`` counts the
    ranks of all nodes.

    Raises:
        AgentError: The job has no shared tier, the nearest shared tier has a capacity, some ranks
            share only some of their local tiers, or the ranks of the node are in several process
            namespaces. Agents cannot finish such a job.
    """
    local_tiers = [tier for tier in tiers if tier.nodes is not None]
    shared_tiers = [tier for tier in tiers if not tier.local]
    if not shared_tiers:
        raise AgentError(
            f"{local_tiers[-1].url} is each node's own, and so are all tiers of the job: an agent "
            "brings steps to a tier that all nodes share, so add one, such as an object store"
        )
    if any(tier.nodes != nodes for tier in tiers if tier.local):
        raise AgentError(
            "some ranks share one of their local tiers and not another, so that no agent sees all "
            "files of its ranks: let the ranks of a machine share all of its local tiers"
        )
    if shared_tiers[0].tier.capacity is not None:
        raise AgentError(
            f"{shared_tiers[0].url} has a capacity, which the agents of several nodes cannot keep "
            "together: use keep_last there"
        )
    node_ranks = nodes.mates(rank)
    if len(job.processes) != len(node_ranks):
        raise AgentError(
            "the ranks of a node are in several process namespaces, as containers have, and its "
            "agent sees only some of them: let them share one"
        )
    return msgspec.structs.replace(job, node_ranks=node_ranks, ranks=len(nodes.of))


def _refusal_of_all(coordinator: Coordinator, nodes: Nodes, refusal: str) -> str:
    """Return why some node has no agent of its own. The text is the same on all ranks, and empty if
    each node has an agent.

    Args:
        refusal: Why the node of this rank has no agent; empty if it has one.
    """
    if coordinator.rank in nodes.lowest_ranks:
        agent = f"{Owner.of_this_process('').machine} {os.path.realpath(agent_folder())}"
        coordinator.post(_ALL_NODES_SUBJECT, encode_json((refusal, agent)))

    def decide() -> str:
        wait = Wait(_START_SECONDS, "the manager")
        messages = gather(coordinator, _ALL_NODES_SUBJECT, wait, ranks=nodes.lowest_ranks).values()
        answers = [msgspec.json.decode(data, type=tuple[str, str]) for data in messages]
        reason = next((reason for reason, _ in answers if reason), "")
        if not reason and len({agent for _, agent in answers}) < len(answers):
            reason = (
                "two groups of ranks that share no local tier have the same agent: let the ranks "
                "of a machine share /dev/shm and its folders, or give each group an agent of its "
                "own (CKPT_AGENT_FOLDER)"
            )
        return reason

    # Each node may have waited for its own ranks before.
    wait = Wait(_START_SECONDS + 60, "the registration with the agents")
    refusal_of_all = leader_decides(coordinator, _ALL_NODES_SUBJECT, decide, wait, str)
    coordinator.forget(_ALL_NODES_SUBJECT)
    return refusal_of_all


def _owner_attempts(tiers: Sequence[OpenTier]) -> tuple[str, ...]:
    """Return the ids of the runs of jobs that own the roots of ``tiers``. A store that fails, or
    does not answer within ``_LOOK_SECONDS``, is left out.
    """
    workers = Workers("owners", len(tiers))
    reads = wait([workers.submit(read_owner, tier.backend) for tier in tiers], _LOOK_SECONDS)
    if not reads.not_done:
        workers.close()
    owners = [read.result() for read in reads.done if read.exception() is None]
    return tuple({owner.attempt for owner in owners if owner is not None})


def _marks_of(tiers: Sequence[OpenTier]) -> tuple[str, ...]:
    """Return what recognizes the root of each tier. A root that does not exist yet is made, since
    the agent makes none. The text is empty for a tier without such a mark, and for one that fails
    or does not answer within ``_LOOK_SECONDS``.
    """
    workers = Workers("roots", len(tiers))
    reads = [workers.submit(_mark_of, tier) for tier in tiers]
    done, pending = wait(reads, _LOOK_SECONDS)
    if not pending:
        workers.close()
    return tuple(
        read.result() if read in done and read.exception() is None else "" for read in reads
    )


def _mark_of(tier: OpenTier) -> str:
    return tier.backend.mark() if isinstance(tier.backend, HoldsRoot) else ""


def _url_for_agent(tier: OpenTier) -> str:
    """Return a URL with which another process reaches the tier. Raises ``AgentError`` if there is
    none.
    """
    if scheme_of(tier.url) == "memory":
        raise AgentError(f"{tier.url} is in the memory of this process, where no agent finds it")
    return tier.url if tier.in_memory or is_folder(tier.url) else tier.tier.url

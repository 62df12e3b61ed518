"""``ckpt agent``: run, start, ask or stop the agent of this user on this node.

The agent copies the steps of jobs to farther tiers. It also verifies them, which is a *scrub*, and
mends damaged files from other copies.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import typer

from ckpt.agent.__main__ import run
from ckpt.agent.client import connect, reach, status
from ckpt.agent.folder import AgentFolder
from ckpt.agent.messages import AgentStatus, JobStatus, ScrubStatus, Stop, Stopped
from ckpt.cli import output
from ckpt.cli.agent_prefetch import prefetch
from ckpt.cli.options import STEP_FORMS, ConfigFileOption, JsonOption
from ckpt.errors import AgentError, ConfigError
from ckpt.model.selector import LATEST, selector_of
from ckpt.storage.registry import stores_in_memory

Action = Literal["run", "start", "status", "stop", "prefetch"]


def agent(
    action: Annotated[Action, typer.Argument(help="What to do.", show_default=False)],
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL]",
            help="prefetch: the far tier. Default: the last tier of ./ckpt.toml.",
            show_default=False,
        ),
    ] = None,
    idle: Annotated[
        float | None,
        typer.Option(
            "--idle-seconds",
            metavar="SECONDS",
            min=0,
            help="run: end after so long without a job. Default: CKPT_AGENT_IDLE_SECONDS, or 600.",
        ),
    ] = None,
    at_once: Annotated[
        bool,
        typer.Option("--now", help="stop: leave what is not finished yet. Nothing is torn."),
    ] = False,
    step: Annotated[
        str, typer.Option("--step", metavar="STEP", help=f"prefetch: {STEP_FORMS}.")
    ] = LATEST,
    destinations: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="DIR",
            help="prefetch: a near tier; again for further ones, nearest first. Default: the tiers "
            "before URL in ./ckpt.toml.",
        ),
    ] = None,
    config: ConfigFileOption = None,
    json: JsonOption = False,
) -> None:
    r"""Run, ask or stop the agent of this user on this node.

    The agent copies files for trainers, and finishes the steps of a job whose trainer has ended. A
    manager with agent="auto" starts an agent by itself. "run" stays in the foreground, for
    systemd and the like. "start" starts an agent in a session of its own, if none runs, and returns
    when it listens. "status" shows the jobs that the agent knows, and what it copies. "stop"
    asks the agent to end, and waits until it has finished the jobs whose trainers have ended, and
    has freed their memory. It names the jobs that could not be finished.

    "prefetch" needs no agent. It copies the newest intact step of a far tier, or --step STEP, to
    the near tiers of this node before the trainer starts, so that its restore is local. A tier that
    has the step stays as it is. Without --step, so does a tier that has a later step. Nothing is
    removed to make room.

    Exit code 10: there is no agent for "status", it could not be started, it does not answer, or it
    has not finished all jobs. prefetch: 7: there is no such step. 4: it is damaged. 3: there is no
    room, or a store has failed. 5: the job of a near tier is alive.

    \b
    Examples:
      ckpt agent status
      ckpt agent status --json | jq '.jobs[].state'
      ckpt agent stop
      ckpt agent run --idle-seconds 86400
      ckpt agent prefetch s3://bucket/run42 --to /nvme/run42
    """
    if action != "prefetch" and (url or destinations or config or step != LATEST):
        raise ConfigError("URL, --step, --to and --config belong to ckpt agent prefetch")
    if idle is not None and action != "run":
        raise ConfigError("--idle-seconds belongs to ckpt agent run")
    if at_once and action != "stop":
        raise ConfigError("--now belongs to ckpt agent stop")
    match action:
        case "run":
            if not run(idle):
                raise AgentError(
                    "an agent of this user already runs on this node: ckpt agent status"
                )
        case "start":
            _start(as_json=json)
        case "status":
            _status(as_json=json)
        case "stop":
            _stop(at_once=at_once, as_json=json)
        case "prefetch":
            prefetch(url, destinations or [], selector_of(step), config, as_json=json)


def _start(*, as_json: bool) -> None:
    connection = reach(AgentFolder.of_this_user())
    connection.close()
    if as_json:
        output.show_json({"version": connection.welcome.version, "pid": connection.welcome.pid})
    else:
        output.show_line(f"agent {connection.welcome.version}, process {connection.welcome.pid}")


def _status(*, as_json: bool) -> None:
    """Print the status of the agent. Raises ``AgentError`` if none runs."""
    folder = AgentFolder.of_this_user()
    agent_status = status(folder)
    if agent_status is None:
        raise AgentError(
            f"no agent of this user runs on this node ({folder.path}): a manager with "
            'agent="auto" starts one, and so does ckpt agent run'
        )
    if as_json:
        output.show_json(msgspec.to_builtins(agent_status))
    else:
        _show(agent_status)


def _show(agent_status: AgentStatus) -> None:
    """Print the agent, a table of its jobs, and the damage that it has found. The field ``works``
    is False as long as workers of an older agent run.
    """
    remark = "" if agent_status.works or not agent_status.jobs else ", which has not worked yet"
    output.show_line(f"agent {agent_status.version}, process {agent_status.pid}{remark}")
    if agent_status.jobs:
        rows = [
            [
                job.attempt,
                job.state,
                _activity(job),
                scrub_progress(job.scrub),
                ", ".join(job.tiers),
            ]
            for job in agent_status.jobs
        ]
        output.show_table(["job", "state", "", "verified", "tiers"], rows, flexible=["tiers"])
    for job in agent_status.jobs:
        for damage in job.scrub.damaged:
            output.show_line(f"job {job.attempt}: step {damage}", style="red")
        if job.scrub.error:
            output.show_line(f"job {job.attempt}: not all is verified: {job.scrub.error}")


def scrub_progress(scrub: ScrubStatus) -> str:
    """Return a text about the progress of the verification of a job's steps; "-" if it has not
    begun.
    """
    parts = [output.count(scrub.verified, "step")] if scrub.verified or scrub.damaged else []
    if scrub.mended:
        parts.append(f"{output.count(scrub.mended, 'file')} mended")
    if scrub.damaged:
        parts.append(f"{len(scrub.damaged)} damaged")
    if scrub.step >= 0:
        percent = 100 * scrub.done_bytes // max(1, scrub.total_bytes)
        parts.append(f"step {scrub.step} on {scrub.tier}: {percent} %")
    return ", ".join(parts) or "-"


def _activity(job: JobStatus) -> str:
    """Return what the agent does for a job: the step that it copies now, why its last try to finish
    the job has failed, or how many steps it has copied.
    """
    if job.step >= 0:
        so_far = f"{output.size(job.done_bytes)} of {output.size(job.total_bytes)}"
        return f"step {job.step} to {job.to}: {so_far}"
    if job.error:
        return job.error
    return f"{output.count(len(job.copied), 'step')} copied" if job.copied else ""


def _stop(*, at_once: bool, as_json: bool) -> None:
    """Ask the agent to end, and wait for that. With ``at_once``, it leaves what is not finished.

    Raises:
        AgentError: The agent has given up jobs that it could not finish.
    """
    connection, answer = connect(AgentFolder.of_this_user()), Stopped()
    if connection is not None:
        try:
            connection.ask(Stop(at_once=at_once))
            answer = connection.receive_stop()
        finally:
            connection.close()
    if as_json:
        given_up = msgspec.to_builtins(answer.given_up)
        output.show_json(
            {"stopped": connection.welcome.pid if connection else None, "given_up": given_up}
        )
    elif connection is not None:
        output.show_line(f"the agent, process {connection.welcome.pid}, has ended")
    else:
        output.show_line("no agent of this user runs on this node")
    if answer.given_up:
        raise AgentError(_unfinished_message(answer.given_up))


def _unfinished_message(jobs: tuple[JobStatus, ...]) -> str:
    """Return the message of the error about ``jobs``, which the agent has not finished.

    For each job, the message names the stores in the memory of this machine that the job still has.
    """
    memory_urls = set(stores_in_memory())
    descriptions: list[str] = []
    for job in jobs:
        urls = [url for url in job.tiers if url in memory_urls]
        remark = f"; {', '.join(urls)} still takes memory (ckpt ls {urls[0]})" if urls else ""
        descriptions.append(f"job {job.attempt} ({job.error or 'it was not waited for'}{remark})")
    return (
        f"the agent has not finished {', '.join(descriptions)}: the next job on the same tiers "
        "goes on with what is there"
    )

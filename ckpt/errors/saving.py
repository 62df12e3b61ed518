"""Errors of saves: a save made no checkpoint, or the saved state looks wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt.errors.base import CkptError, few


class CommitError(CkptError):
    """A save did not become a checkpoint. Older checkpoints are intact, and training may go on."""

    exit_code = 5


class StepExists(CommitError):
    """The step is already saved. Steps are immutable, so each step is saved once."""

    def __init__(
        self, step: int, root: str, *, earlier: bool = False, way: str = "save under another step"
    ) -> None:
        """``earlier`` says whether an earlier job saved the step. The message then advises to
        restore first. Otherwise it advises ``way``.
        """
        self.step, self.root, self.earlier = step, root, earlier
        super().__init__(
            f"step {step} is already saved in {root} by an earlier job: restore first and save the "
            "steps after the restored one, or give this run a root of its own"
            if earlier
            else f"step {step} is already saved in {root}: steps are immutable, {way}"
        )


class HistoryHidden(CommitError):
    """The root holds newer steps of earlier jobs. A restore would take one of them, and not the
    step that is to be saved.
    """

    def __init__(self, step: int, newest: int, root: str) -> None:
        self.step, self.newest, self.root = step, newest, root
        super().__init__(
            f"{root} holds step {newest} of an earlier job, which a restart would take before step "
            f"{step}: restore it and save higher steps, restore an earlier one to go back, or give "
            "this run a root of its own"
        )


class PeerFailed(CommitError):
    """At least one rank could not make its part durable. ``failures`` has the reasons by rank."""

    def __init__(self, step: int, failures: dict[int, str]) -> None:
        self.step, self.failures = step, failures
        text = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(failures.items())[:8])
        super().__init__(f"step {step} was not committed, {len(failures)} rank(s) failed: {text}")


class CommitTimeout(CommitError):
    """Some ranks did not answer in time.

    ``missing`` has the numbers of these ranks. ``step`` is -1 if the ranks did not wait for a step,
    such as at the start of a manager, or while a restore looks for a step.
    """

    def __init__(self, step: int, missing: Sequence[int], seconds: float, subject: str) -> None:
        self.step, self.missing, self.seconds = step, tuple(missing), seconds
        names = ", ".join(map(str, self.missing[:16])) + (" ..." if len(self.missing) > 16 else "")
        text = f"waited {seconds:.0f} s for {subject} of rank(s) {names}"
        super().__init__(f"step {step}: {text}" if step >= 0 else text)


class StepsMissing(CommitError):
    """The manager was closed, and a tier lacks steps that the manager was to copy to it.

    ``missing`` maps the URL of each such tier to the steps that the tier lacks.
    """

    def __init__(self, missing: Mapping[str, Sequence[int]], reason: str, *, nearer: bool) -> None:
        """``nearer`` says whether each of the missing steps is on some other tier."""
        self.missing = {tier: tuple(sorted(steps)) for tier, steps in missing.items()}
        self.nearer = nearer
        text = "; ".join(
            f"{tier} lacks step{'s' if len(steps) > 1 else ''} "
            f"{few(list(map(str, steps)), 20, quote=False)}"
            for tier, steps in self.missing.items()
        )
        way = ": nearer tiers have them, and `ckpt copy` takes them there" if nearer else ""
        super().__init__(f"{text} ({reason}){way}")


class ReplicasDiverged(CommitError):
    """Ranks that should hold the same value do not."""

    def __init__(self, name: str, ranks: Sequence[int], detail: str = "") -> None:
        self.name, self.ranks, self.detail = name, tuple(ranks), detail
        super().__init__(
            f"{name!r} differs between ranks {', '.join(map(str, self.ranks))}{detail}: ranks "
            "must hold the same under one name. "
            "If a value is meant to differ, wrap it in PerRank(...). A tensor of a module needs a "
            "name of its own on each rank, or declare_part()"
        )


class TensorIncomplete(CommitError):
    """The boxes of a tensor leave a hole, overlap, or contradict each other."""

    def __init__(self, name: str, detail: str) -> None:
        self.name, self.detail = name, detail
        super().__init__(f"tensor {name!r}: {detail}")


class RootInUse(CommitError):
    """Another job writes to this root, or has taken it over."""

    def __init__(self, root: str, owner: str, *, is_same_process: bool = False) -> None:
        """``is_same_process`` says whether the other job runs in this process."""
        self.root, self.owner = root, owner
        text = (
            f"{root} is written by another manager ({owner}): give each job a root of its own, or "
            "close the other"
        )
        if is_same_process:
            text = (
                f"{root} is written by another CheckpointManager of this very process ({owner}): "
                "close() that one first, or go on with it"
            )
        super().__init__(text)


class TierNotShared(CommitError):
    """Ranks see different files in one tier that was not declared local."""

    def __init__(self, root: str, ranks: Sequence[int]) -> None:
        self.root, self.ranks = root, tuple(ranks)
        super().__init__(
            f"the leader does not see in {root} what rank(s) {', '.join(map(str, self.ranks))} "
            "have made durable in theirs: "
            f"if each node has a folder of its own there, say so (Tier({root!r}, local=True)), "
            "else give all ranks one folder that they see alike"
        )


class JobUnseen(CommitError):
    """The job of an unfinished save may still run: it ran where this process cannot see it."""

    def __init__(self, step: int, owner: str) -> None:
        self.step, self.owner = step, owner
        super().__init__(
            f"step {step}: whether its job ({owner}) still runs cannot be seen from here: if it "
            "has ended, say so with --job-is-dead"
        )


class StagingError(CkptError):
    """The copy of the state to host memory has failed. The save is lost, and training may go on."""

    exit_code = 6


class HostMemoryExhausted(StagingError):
    """Host memory has no room for an image. ``needed`` is the size of the image in bytes."""

    def __init__(self, nbytes: int, detail: str) -> None:
        self.needed, self.detail = nbytes, detail
        super().__init__(f"no host memory for an image of {nbytes / 2**20:.0f} MiB: {detail}")


class TensorChanged(StagingError):
    """A tensor was written to, or was moved to other memory, after ``save_async`` and before the
    tensor was copied. Writes by the ``step()`` of the tensor's optimizer do not raise this error.
    """

    def __init__(self, name: str, step: int) -> None:
        self.name, self.step = name, step
        super().__init__(
            f"{name!r} was changed while step {step} copied it, outside of its optimizer's "
            "step(): call manager.fence() before "
            'you change it, or build the manager with overlap="off"'
        )


class SaveSkipped(StagingError):
    """A save was skipped, and no tier has its step.

    This happens for one of these reasons:

    * No slot was free on this or another rank, and ``on_busy="skip"`` is set.
    * No tier takes this step.
    * Another rank did not begin the save, because it raised the error of an earlier save.
    * The step was to be kept in memory only, and the tier in memory has failed.
    """

    def __init__(
        self, step: int, reason: str = 'the previous save still streams and on_busy="skip"'
    ) -> None:
        self.step, self.reason = step, reason
        super().__init__(f"step {step} was skipped: {reason}")


class TierBehind(CommitError):
    """A tier is too slow: more steps than ``backlog`` waited for it, and it has given up this step.

    A nearer tier has the step.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(
            f"step {step} was given up on a tier that is behind: newer steps wait for it"
        )


class LeftToAgent(CommitError):
    """``close(detach=True)`` has left a step to the agent, which copies it from a nearer tier."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"step {step} was left to the agent: ckpt agent status shows it")


class SuspiciousState(CkptError):
    """The trained tensors of a step hold NaN or Inf, or none of them has changed since the save
    before. The step itself is committed.

    Attributes:
        names: The names of some of the tensors with NaN or Inf, or of some unchanged tensors.
        since: The step of the previous save, if no trained tensor has changed since then; None if
            the tensors hold NaN or Inf.
    """

    def __init__(self, step: int, names: Sequence[str], *, since_step: int | None) -> None:
        self.step, self.names, self.since = step, tuple(names), since_step
        examples = few(self.names)
        text = (
            f"trained tensors hold NaN or Inf ({examples}): restore an earlier step"
            if since_step is None
            else f"no trained tensor has changed since step {since_step} ({examples}): check that "
            "the optimizer of the state is the one that steps, its gradients, and its learning rate"
        )
        super().__init__(f'step {step}: {text} (on_suspicious="ignore" ends this check)')


class UnsupportedValue(CkptError):
    """The state holds a value that cannot be saved or restored, such as one that needs pickle."""

    exit_code = 8

    def __init__(self, name: str, kind: str, detail: str = "") -> None:
        self.name, self.kind, self.detail = name, kind, detail
        super().__init__(
            f"{name!r} is a {kind}, which is not supported: "
            + (
                detail
                or "give it state_dict()/load_state_dict(), or save its parts as plain values"
            )
        )

"""The attempts at steps that a root has, committed or not.

A *root* is the place of a store where steps are. Each folder of a step names the attempt of a job
that has made it.
"""

from __future__ import annotations

from ckpt.model.keys import StepRef, parse_folder
from ckpt.pipeline.retry import ask
from ckpt.storage.api import StorageBackend


def step_refs(backend: StorageBackend) -> list[StepRef]:
    """Return every attempt at a step on a store, committed or not, newest step first.

    Folders whose names are not those of steps are ignored.
    """
    refs = map(parse_folder, ask(backend, lambda: list(backend.folders(""))))
    return sorted((ref for ref in refs if ref is not None), reverse=True)


def attempts_of(backend: StorageBackend, job: str) -> list[StepRef]:
    """Return the attempts at steps on a store that one job has made, newest step first. Of several
    tries at a step, the last one comes first.
    """
    refs = [ref for ref in step_refs(backend) if ref.job == job]
    return sorted(refs, key=lambda ref: (ref.step, ref.trial), reverse=True)

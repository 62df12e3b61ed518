"""Every contender gives back what it was given. Otherwise its times would mean nothing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from bench import contenders
from bench.contenders import ALL, Handle
from bench.state import Raw, Reference, Subject, Training
from tests.kit.worlds import world

PROCESSES = {"dcp.best", "torch_checkpointing"}  # these start a process, which imports torch
VARIANTS = {name for name, row in ALL.items() if not row.everywhere and name != "ckpt.memory"}
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "training": lambda: Training.make(256 << 10, layers=1, batch=2, seed=1),
    "raw": lambda: Raw.make(100_000, 7, seed=1),
}


def installed(name: str) -> str:
    if name in contenders.missing():
        pytest.skip(contenders.missing()[name])
    return name


def change(subject: Subject) -> None:
    with torch.no_grad():
        for tensor in subject.tensors().values():
            tensor.add_(1)
    subject.step += 1


def left_behind() -> tuple[list[str], list[str]]:
    """Return processes and shared memory of this process.

    The tracker of multiprocessing and torch's keeper of names live as long as it does.
    """
    lines: list[str] = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # One that has ended, or is a zombie
            lines.append(" ".join(child.cmdline()))
    lines = [
        line for line in lines if "resource_tracker" not in line and "torch_shm_manager" not in line
    ]
    return lines, [
        name for name in os.listdir("/dev/shm") if str(os.getpid()) in re.split(r"\D+", name)
    ]


@pytest.mark.parametrize("kind", SUBJECTS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.torture if name in PROCESSES or name in VARIANTS else ()
        )
        for name in ALL
        # the hook of an optimizer holds only its step, and no step is made here
        if name != "ckpt.device"
    ],
)
def test_what_was_saved_comes_back_bit_for_bit_whatever_happens_meanwhile(
    name: str, kind: str, tmp_path: Path
) -> None:
    """The state is changed as soon as it may be, saved once more before the first save is durable,
    and changed again.
    """
    contender = contenders.make(installed(name))
    before = left_behind()
    subject = SUBJECTS[kind]()
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    contender.prepare(subject, str(folder))
    saves: list[tuple[Handle, Reference, object]] = []
    for step in (1, 2, 3):
        reference = Reference(str(tmp_path / f"reference-{step}"), subject.nbytes)
        reference.take(subject)
        saves.append((contender.save(step), reference, subject.values()))
        contender.wait_safe(saves[-1][0])
        change(subject)
    for handle, _, _ in saves:
        contender.wait_durable(handle)
    contender.close()
    assert left_behind() == before
    for handle, reference, values in saves:
        subject.spoil()
        contenders.make(name).load_back(handle.path, subject)
        assert reference.differences(subject) == []
        assert subject.values() == values


def test_a_bit_that_went_wrong_on_the_disk_is_found(tmp_path: Path) -> None:
    """The contender does not look for it itself."""
    subject = SUBJECTS["raw"]()
    reference = Reference(str(tmp_path / "reference"), subject.nbytes)
    reference.take(subject)
    contender = contenders.make("safetensors")
    contender.prepare(subject, str(tmp_path))
    handle = contender.save(1)
    file = Path(handle.path, "rank-0")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    subject.spoil()
    contender.load_back(handle.path, subject)
    assert len(reference.differences(subject)) == 1


@pytest.mark.slow
@pytest.mark.torture
@pytest.mark.parametrize("name", sorted(PROCESSES))
def test_thousands_of_tensors_reach_the_writing_process(name: str, tmp_path: Path) -> None:
    """They take another way than a few of them do."""
    contender = contenders.make(installed(name))
    subject = Raw.make(100_000, 1001, seed=1)
    reference = Reference(str(tmp_path / "reference"), subject.nbytes)
    contender.prepare(subject, str(tmp_path))
    reference.take(subject)
    handle = contender.save(1)
    contender.wait_safe(handle)
    change(subject)
    contender.wait_durable(handle)
    before = left_behind()
    contender.close()
    assert left_behind() != before  # the process, which is visible
    contenders.make(name).load_back(handle.path, subject)
    assert reference.differences(subject) == []


@pytest.mark.torture
@pytest.mark.distributed
@pytest.mark.parametrize("rare", [False, True])
def test_two_ranks_save_one_checkpoint_together(tmp_path: Path, rare: bool) -> None:
    names = [
        name
        for name in contenders.available()
        if ALL[name].distributed and (name in PROCESSES | VARIANTS) == rare
    ]
    said = world(2, Path(__file__).with_name("two_ranks.py"), tmp_path, *names)
    for name in names:
        for rank in range(2):
            assert f"{name} on rank {rank}: as saved" in said


def test_the_table_names_what_exists() -> None:
    assert set(contenders.available()) | set(contenders.missing()) == set(ALL)
    assert not set(contenders.available()) & set(contenders.missing())
    assert len({row.label for row in ALL.values()}) == len(ALL)
    for name in contenders.available():
        assert {
            attribute for attribute in vars(contenders.Contender) if not attribute.startswith("_")
        } <= set(dir(contenders.make(name)))


def test_what_is_not_installed_is_missing_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    row = contenders.Row("nobody's", "nobody", "Nobody", "bench", needs="ckpt_nobody_has_this")
    monkeypatch.setitem(ALL, "nobody", row)
    assert "nobody" not in contenders.available()
    assert re.search(r"ckpt_nobody_has_this\b", contenders.missing()["nobody"])


def test_whoever_needs_a_package_says_so() -> None:
    """A contender imports only torch, ckpt, and what its row names. So the error about a missing
    package comes before the import fails.
    """
    folder = Path(contenders.__file__).parent
    for row in ALL.values():
        source = (folder / f"{row.module}.py").read_text()
        imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
        imported |= set(re.findall(r"import_module\(\"(\w+)", source))
        foreign = imported - {"torch", "bench", "ckpt"} - set(sys.stdlib_module_names)
        assert foreign == ({row.needs} if row.needs else set())

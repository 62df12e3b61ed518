"""Ranks without torch.distributed: processes that know their number and an address."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.errors import ConfigError
from tests.kit.worlds import run_forks
from tests.servers import free_port

WORKER = Path(__file__).resolve().parents[1] / "distributed" / "workers" / "joined.py"


def world(
    *processes: tuple[int, int], address: str, timeout: float, folder: Path, verb: str = "stay"
) -> list[Any]:
    """Return what processes with these ranks and world sizes print at their end."""
    environments = [{"RANK": str(rank), "WORLD_SIZE": str(size)} for rank, size in processes]
    words = [WORKER, verb, address, timeout, folder, len(processes)]
    done = run_forks(words, environments, timeout=150)
    assert not any(done.statuses), done
    return [json.loads(said.splitlines()[-1]) for said in done.said]


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.mark.torture
@pytest.mark.distributed
def test_processes_without_a_process_group_share_the_writing_and_restore_by_a_second_manager(
    tmp_path: Path, address: str
) -> None:
    ranks = (0, 3), (1, 3), (2, 3)
    said = world(*ranks, address=address, timeout=100, folder=tmp_path, verb="save")
    assert [(each["step"], each["own"]) for each in said] == [(7, 0), (7, 1), (7, 2)]
    sizes = [each["written"] for each in said]
    assert max(sizes) < 4e6  # all hold 8 MB, and each has written about a third
    assert sum(sizes) >= 8e6


@pytest.mark.distributed
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, address: str) -> None:
    (said,) = world((0, 3), address=address, timeout=2, folder=tmp_path)
    assert said["error"] == "CommitTimeout"
    assert "rank(s) 1, 2" in said["text"]


@pytest.mark.distributed
def test_another_world_size_on_a_rank_ends_both_at_once(tmp_path: Path, address: str) -> None:
    # a timeout of more than the test may take
    said = world((0, 2), (1, 3), address=address, timeout=200, folder=tmp_path)
    assert "world_size" in " ".join(each["text"] for each in said if each["error"] == "ConfigError")


@pytest.mark.distributed
def test_a_rank_that_two_processes_have_is_an_error_in_one_of_them(
    tmp_path: Path, address: str
) -> None:
    said = world((0, 2), (1, 2), (1, 2), address=address, timeout=100, folder=tmp_path)
    assert sum("joined" in each for each in said) == 2
    (text,) = [each["text"] for each in said if "error" in each]
    assert "another process has joined as rank 1" in text


@pytest.mark.distributed
def test_two_processes_cannot_both_be_rank_0(tmp_path: Path, address: str) -> None:
    said = world((0, 2), (0, 2), (1, 2), address=address, timeout=100, folder=tmp_path)
    assert sum("joined" in each for each in said) == 2
    (text,) = [each["text"] for each in said if "error" in each]
    assert "is the port free" in text


@pytest.mark.distributed
def test_nobody_at_the_address_is_an_error_with_the_way_out(tmp_path: Path, address: str) -> None:
    (said,) = world((1, 2), address=address, timeout=2, folder=tmp_path)
    assert said["error"] == "ConfigError"
    assert f"no store at {address}: does rank 0 run" in said["text"]


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), ("0", 2), (0.0, 1)])
def test_a_rank_outside_of_the_world_is_an_error(rank: Any, size: Any) -> None:
    with pytest.raises(ConfigError, match="the number of this process"):
        ckpt.join(rank, size, "localhost:29500")


@pytest.mark.parametrize("address", ["", "node1", "node1:", ":29500", "node1:0", "node1:99999", 1])
def test_an_address_without_host_or_port_is_an_error(address: Any) -> None:
    with pytest.raises(ConfigError, match='such as "node1:29500"'):
        ckpt.join(0, 2, address)


def test_a_world_of_one_needs_no_store(tmp_path: Path) -> None:
    coordinator = ckpt.join(0, 1, "no.such.host:1")
    with ckpt.CheckpointManager(tmp_path, coordinator=coordinator) as manager:
        manager.save({"a": 1}, 1)
        assert manager.steps() == [1]


class Communicator:
    """An MPI communicator as rank 1 of two has it. Rank 0 broadcasts ``word``."""

    def __init__(self, rank: int, word: str) -> None:
        self.rank, self.word, self.heard = rank, word, ""

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return 2

    def bcast(self, word: str, root: int) -> str:
        assert root == 0
        self.heard = word
        return word if self.rank == 0 else self.word


def test_the_others_learn_that_rank_0_has_failed() -> None:
    with pytest.raises(ConfigError, match="rank 0 has failed"):
        ckpt.join_mpi(Communicator(1, ""))


def test_rank_0_broadcasts_also_when_it_has_failed() -> None:
    failing = Communicator(0, "")
    with pytest.raises(ConfigError, match=r"no store at no\.such\.host"):
        ckpt.join_mpi(failing, host="no.such.host", timeout=1)
    assert failing.heard == ""


def test_a_rank_that_cannot_reach_rank_0_learns_of_the_argument_for_it() -> None:
    """The host name of rank 0 may be unknown, and then it gives 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match=r"no store at 127\.0\.0\.1:.* pass host= on rank 0"):
        ckpt.join_mpi(Communicator(1, f"127.0.0.1:{port}"), timeout=0.1)


@pytest.mark.parametrize("variable", ["HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_a_manager_of_a_world_of_mpi_or_horovod_asks_for_a_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "2")
    with pytest.raises(ConfigError, match=rf"{variable} says .* coordinator=ckpt\.join_"):
        ckpt.CheckpointManager(tmp_path)
    with ckpt.CheckpointManager(tmp_path, coordinator=ckpt.join(0, 1, "localhost:1")) as manager:
        manager.save({"a": 1}, 1)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), 1e300, "5"])
def test_a_timeout_that_python_cannot_wait_for_is_an_error(timeout: Any) -> None:
    with pytest.raises(ConfigError, match=r"timeout=.*: give a number of seconds, such as 300"):
        ckpt.join(0, 2, "127.0.0.1:29500", timeout=timeout)
    with pytest.raises(ConfigError, match=r"timeout=.*: give a number of seconds, such as 300"):
        ckpt.join_mpi(Communicator(1, "127.0.0.1:29500"), timeout=timeout)

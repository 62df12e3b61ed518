"""Make coordinators for ranks that do not use ``torch.distributed``: processes that know their rank
and the address of rank 0, MPI ranks, and Horovod ranks.

Rank 0 serves a TCPStore, and the other ranks connect to it. No process group is made, and only the
coordinator uses the store.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ckpt.checks import check_number
from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.exchanges import Wait, gather
from ckpt.coordination.single import SingleCoordinator
from ckpt.coordination.torch_store import TorchStoreCoordinator
from ckpt.errors import ConfigError

_START_SECONDS: Final = 300.0
_ANY_PORT: Final = 0
_MOST_PORT: Final = 65535
_SILENCE_ADVICE: Final = "does rank 0 run, and can this machine reach that address?"
_BROADCAST_ADVICE: Final = (
    f"{_SILENCE_ADVICE} Rank 0 has given the name of its host, or 127.0.0.1 if it cannot look that "
    "up: pass host= on rank 0 with a name or address that the other machines reach"
)


def join(
    rank: int, world_size: int, address: str, *, timeout: float = _START_SECONDS
) -> Coordinator:
    """Return the coordinator of ``world_size`` processes, for ``CheckpointManager(coordinator=)``.

    All ranks call this function once for each manager. If there are several managers, all ranks
    make these calls in the same order. The function waits until all ranks have called it. Rank 0
    serves a TCPStore, which has no password. Use this function only in a network in which
    ``torch.distributed`` may be used too.

    Args:
        rank: The number of this process, from 0.
        world_size: The number of processes.
        address: The host name or address of the machine of rank 0, and a port that is free on that
            machine: ``"node1:29500"``.
        timeout: How many seconds to wait for the other ranks.

    Raises:
        ConfigError: An argument is wrong, the port is in use, rank 0 cannot be reached, or another
            process has joined with this rank or with another ``world_size``.
        CommitTimeout: Some ranks have not joined in time.
        CommitError: The connection to rank 0 was lost during the call.
    """
    _check_ranks(rank, world_size)
    _check_timeout(timeout)
    host, port = _host_and_port(address)
    if world_size == 1:
        return SingleCoordinator()
    deadline = time.monotonic() + timeout
    store = _open_store(host, port, serves=rank == 0, timeout=timeout)
    return _wait_for_ranks(store, rank, world_size, deadline)


def join_mpi(
    comm: Any = None, *, host: str | None = None, timeout: float = _START_SECONDS
) -> Coordinator:
    """Return the coordinator of the ranks of an MPI communicator of mpi4py.

    All ranks of ``comm`` call this function once for each manager. If there are several managers,
    all ranks make these calls in the same order. Rank 0 chooses a free port and broadcasts it.

    Args:
        comm: The communicator. It defaults to ``MPI.COMM_WORLD``.
        host: The name or address by which the other machines reach rank 0. It defaults to the host
            name of rank 0. Only the value that rank 0 passes is used.
        timeout: How many seconds to wait for the other ranks.

    Raises:
        ConfigError: ``comm`` is None, and mpi4py is not installed.
        CkptError: See `join`.
    """
    if comm is None:
        try:
            comm = import_module("mpi4py.MPI").COMM_WORLD
        except ImportError as error:
            raise ConfigError(f"join_mpi: run pip install mpi4py ({error})") from None
    rank, size = comm.Get_rank(), comm.Get_size()
    return _join_by_broadcast(rank, size, lambda word: comm.bcast(word, root=0), host, timeout)


def join_horovod(
    hvd: Any, *, host: str | None = None, timeout: float = _START_SECONDS
) -> Coordinator:
    """Return the coordinator of the ranks of Horovod.

    All ranks call this function after ``hvd.init()``, once for each manager. If there are several
    managers, all ranks make these calls in the same order. Rank 0 chooses a free port and
    broadcasts it.

    Args:
        hvd: The Horovod module that the job uses, such as ``horovod.torch``.
        host: The name or address by which the other machines reach rank 0. It defaults to the host
            name of rank 0. Only the value that rank 0 passes is used.
        timeout: How many seconds to wait for the other ranks.

    Raises:
        CkptError: See `join`.
    """
    rank, size = hvd.rank(), hvd.size()
    return _join_by_broadcast(
        rank, size, lambda word: hvd.broadcast_object(word, root_rank=0), host, timeout
    )


def _join_by_broadcast(
    rank: int,
    world_size: int,
    broadcast: Callable[[str], str],
    host: str | None,
    timeout: float,
) -> Coordinator:
    """Return the coordinator of ranks that learn the address of the store from rank 0.

    Rank 0 serves the store at a free port, and passes the address to ``broadcast``. All ranks call
    ``broadcast``, and on each of them it returns the text that rank 0 has passed.
    """
    _check_timeout(timeout)
    if world_size == 1:
        return SingleCoordinator()
    deadline, address, store = time.monotonic() + timeout, "", None
    try:
        if rank == 0:
            host = host or _own_host()
            store = _open_store(host, _ANY_PORT, serves=True, timeout=timeout)
            address = f"{host}:{store.port}"
    finally:
        # The other ranks wait for this broadcast. Rank 0 sends an empty text if it has failed.
        address = broadcast(address)
    if not address:
        raise ConfigError("join: rank 0 has failed to serve a store: see its own error")
    if store is None:
        host, port = _host_and_port(address)
        store = _open_store(host, port, serves=False, timeout=timeout, advice=_BROADCAST_ADVICE)
    return _wait_for_ranks(store, rank, world_size, deadline)


def _check_ranks(rank: int, world_size: int) -> None:
    if not (isinstance(rank, int) and isinstance(world_size, int) and 0 <= rank < world_size):
        raise ConfigError(
            f"join(rank={rank!r}, world_size={world_size!r}): give the number of this process, "
            "from 0 to world_size - 1, and the number of processes"
        )


def _host_and_port(address: str) -> tuple[str, int]:
    """Split an address such as "node1:29500" or "[::1]:29500"."""
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) <= _MOST_PORT:
        raise ConfigError(
            f"join(address={address!r}): give the host of rank 0 and a port that is free there, "
            'such as "node1:29500"'
        )
    return host, int(port)


def _own_host() -> str:
    """Return the name of this host, or "127.0.0.1" if the name cannot be looked up."""
    with suppress(OSError):
        socket.getaddrinfo(name := socket.gethostname(), None)
        return name
    return "127.0.0.1"


def _open_store(
    host: str, port: int, *, serves: bool, timeout: float, advice: str = _SILENCE_ADVICE
) -> Any:
    """Return a store at ``host`` and ``port``.

    Args:
        serves: True if this process serves the store, False if it connects to the store.
        timeout: How many seconds to wait for the store.
        advice: The advice in the error if the store cannot be reached.

    Raises:
        ConfigError: The store cannot be served, or cannot be reached.
    """
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=serves,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,  # Allows a second manager to join at the same address
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        if serves:
            advice = "is the port free on this machine, and is this the machine of that name?"
        cause = str(error).splitlines()[0]
        raise ConfigError(f"join: no store at {host}:{port}: {advice} ({cause})") from None


def _wait_for_ranks(store: Store, rank: int, world_size: int, deadline: float) -> Coordinator:
    """Wait until all ranks have joined, and return the coordinator over ``store``.

    Raises:
        ConfigError: Two processes have the same rank, or ranks differ in ``world_size``.
        CommitTimeout: Some ranks have not joined before ``deadline`` (``time.monotonic()``).
    """
    coordinator = TorchStoreCoordinator((rank, world_size), store=store)
    token = secrets.token_hex(8).encode()
    if coordinator.set_once(f"joined/{rank}", token) != token:
        raise ConfigError(
            f"join: another process has joined as rank {rank}: give each process a rank of its own"
        )
    size = str(world_size).encode()
    coordinator.post("joined", size)
    sizes = {coordinator.set_once("world_size", size)}
    # If the sizes differ, this rank must not wait for ``world_size`` ranks: some may not exist.
    if sizes == {size}:
        wait = Wait(max(0.0, deadline - time.monotonic()), "the join")
        sizes |= set(gather(coordinator, "joined", wait).values())
    if other_sizes := sizes - {size}:
        raise ConfigError(
            f"join: world_size={world_size} on rank {rank}, and {int(other_sizes.pop())} on "
            "another "
            "rank: give all ranks the same"
        )
    return coordinator


def _check_timeout(timeout: float) -> None:
    """Raise `ConfigError` unless ``timeout`` is a number above 0 and at most 1e9."""
    check_number("timeout", timeout, "seconds, such as 300", above_zero=True)

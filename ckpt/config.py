"""The configuration: ``ckpt.toml`` and the variables ``CKPT_*``, which only this module reads.

::

    root = "runs/gpt"                  # the only tier, or:

    [[tiers]]                          # several tiers, nearest first
    url = "memory"
    [[tiers]]
    url = "/nvme/ckpt"
    every = 10
    keep_last = 3
    keep_best = ["loss", "min"]
    capacity = "200GB"
    [[tiers]]
    url = "s3://bucket/run42"
    codec = "zstd"
    options = { endpoint_url = "http://store:9000" }

    [save]
    on_busy = "wait"                   # see SaveConfig
    chunk_size = "16MiB"

    [tls]                              # encrypts what nodes exchange
    certificate = "/etc/ckpt/node.pem"
    key = "/etc/ckpt/node.key"
    authority = "/etc/ckpt/authority.pem"

    [metadata]                         # kept in every manifest
    team = "speech"
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Final, Literal, Self, TypedDict, get_args

from ckpt.checks import (
    as_bytes,
    as_place,
    check_bool,
    check_choice,
    check_int,
    check_json,
    check_keys,
    check_number,
    text_of,
)
from ckpt.codec.registry import NO_CODEC, parse_codec
from ckpt.errors import ConfigError
from ckpt.errors.sanitize import redact

CONFIG_NAME: Final = "ckpt.toml"
ROOT_VARIABLE: Final = "CKPT_ROOT"
DEBUG_VARIABLE: Final = "CKPT_DEBUG"
AGENT_FOLDER_VARIABLE: Final = "CKPT_AGENT_FOLDER"
AGENT_IDLE_VARIABLE: Final = "CKPT_AGENT_IDLE_SECONDS"
AGENT_MEMORY_VARIABLE: Final = "CKPT_AGENT_MEMORY_SECONDS"
AGENT_SCRUB_VARIABLE: Final = "CKPT_AGENT_SCRUB_SECONDS"
DOMAIN_VARIABLE: Final = "CKPT_FAILURE_DOMAIN"
MEMORY: Final = "memory"
AUTO: Final = "auto"
_MULTIPLE_PATTERN: Final = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)x")
_MOST_IMAGES: Final = 100

OnBusy = Literal["wait", "skip"]
OnError = Literal["raise", "warn"]
OnSuspicious = Literal["warn", "raise", "ignore"]
Overlap = Literal["auto", "off"]
Mode = Literal["min", "max"]
"""Whether the smallest or the largest values of a metric are the best."""
Copies = Literal["one", "per_node"]
CheckMode = Literal["sampled", "full", "off"]
AgentMode = Literal["off", "auto", "required"]
Metadata = Mapping[str, Any]  # JSON values

_MIN_CHUNK_BYTES: Final = 16
_NOT_FOR_AGENT: Final = ("CUDA_", "NVIDIA_", "TORCHELASTIC_", "MASTER_", "LOCAL_", "OMPI_", "PMI")
"""The beginnings of the names of variables that the agent does not get."""
_MAX_CHUNK_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Best:
    """The rule of ``Tier(keep_best=...)``: the best steps are the ``count`` steps with the smallest
    ("min") or largest ("max") values of ``metric``.
    """

    metric: str
    mode: Mode
    count: int = 1

    @classmethod
    def of(cls, value: object) -> Best:
        """Return the rule that ``value``, a user's ``keep_best``, describes: the metric, "min" or
        "max", and, optionally, the number of steps.

        Raises:
            ConfigError: ``value`` has another form.
        """
        match value:
            case [str(metric), ("min" | "max") as mode] if metric:
                return cls(metric, mode)
            case [str(metric), ("min" | "max") as mode, int(count)] if metric:
                check_int("the count of keep_best", count, 1, 10**6)
                return cls(metric, mode, count)
            case _:
                raise ConfigError(
                    f"keep_best={text_of(value)}: name a metric and which values are the best, "
                    'such as ("loss", "min"), or ("accuracy", "max", 3) to keep three'
                )


def check_retention(keep_last: object, keep_every: object, keep_best: object) -> None:
    """Check the retention settings of a tier or of a command.

    Raises:
        ConfigError: A number is out of bounds, or ``keep_every`` or ``keep_best`` is set without
            ``keep_last``.
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None:
            check_int(name, value, 1, 10**18)
    for name, value in (("keep_every", keep_every), ("keep_best", keep_best)):
        if value is not None and keep_last is None:
            raise ConfigError(
                f"{name} adds to keep_last: say how many of the newest to keep, such as keep_last=3"
            )


@dataclass(frozen=True, slots=True)
class Tier:
    """The settings of a tier, which is a store for checkpoints. The ``repr`` shows neither the
    options nor the password of a URL.

    Attributes:
        url: A folder, a URL, or "memory": the memory of this machine, which outlives the process.
        options: The options of the tier's backend.
        every: Only steps that are multiples of this number go to the tier, and the last step of a
            planned stop (see ``CheckpointManager.on_signals``).
        keep_last: How many of the newest steps the tier keeps; None for all.
        keep_every: The tier also keeps every step that is a multiple of this number.
        keep_best: The tier also keeps the steps with the best metric of
            ``save_async(metrics=...)``: ("loss", "min") for one step, ("accuracy", "max", 3) for
            three.
        best_counts: Whether the best steps count as part of ``keep_last``. Otherwise the tier keeps
            them in addition. The tier keeps the newest step in any case.
        capacity: The most bytes that checkpoints may take, such as "200GB" or 200 << 30. Before a
            save would exceed the capacity, the tier removes the steps that it need not keep, and
            then the oldest ones. It removes the newest step only if another durable tier has it,
            and never a step that a farther tier waits for.
        local: Whether each node has a folder of its own under this path. None means True for
            memory, and False for any other tier.
        codec: "zstd" compresses the files ("zstd:3" uses level 3, which is slower), "none" leaves
            them as safetensors.
        required: Whether a save fails if the step does not become a checkpoint on the tier. If
            False, only a line in the log reports that. None means False for memory, and True for
            any other tier.
        buddies: How many other nodes keep copies of the files of each node, so that a step
            outlives the loss of a node. Only a tier that is local to each node can have buddies.
        base: The root of another run on the same store, such as "s3://bucket/base-run". Frozen
            parameters that its newest step has too are not written again: the saves of this run
            refer to that step, which the other root keeps as long as they do.
    """

    url: str
    options: Mapping[str, object] = field(default_factory=dict[str, object], repr=False)
    every: int = 1
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: tuple[str, Mode] | tuple[str, Mode, int] | None = None
    capacity: int | str | None = None
    required: bool | None = None
    codec: str = NO_CODEC
    local: bool | None = None
    buddies: int = 0
    best_counts: bool = False
    base: str | None = None

    def __new__(cls, *args: object, **fields: object) -> Self:
        """Check the names of the keyword arguments. An unknown name raises the same `ConfigError`
        as in ``ckpt.toml``.
        """
        check_keys("Tier.", fields, tuple(cls.__dataclass_fields__))
        del args
        return object.__new__(cls)

    def __repr__(self) -> str:
        values = (f"{name}={getattr(self, name)!r}" for name in self.__slots__ if name != "options")
        return redact(f"Tier({', '.join(values)})")

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", as_place("url", self.url, "a tier needs a folder or a URL"))
        if self.base is not None:
            purpose = "a base is the root of another run, a folder or a URL"
            object.__setattr__(self, "base", as_place("base", self.base, purpose))
        if not isinstance(self.options, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"options of {self.url!r} must be a table of names and values, not "
                f"{type(self.options).__name__}"
            )
        check_int("every", self.every, 1, 10**18)
        check_retention(self.keep_last, self.keep_every, self.keep_best)
        if self.keep_best is not None:
            Best.of(self.keep_best)
        check_bool("best_counts", self.best_counts)
        if self.capacity is not None:
            as_bytes("capacity", self.capacity)
        for name, value in (("required", self.required), ("local", self.local)):
            if value is not None:
                check_bool(name, value)
        check_int("buddies", self.buddies, 0, 16)
        if self.buddies and self.capacity is not None:
            raise ConfigError(
                f"buddies={self.buddies} and capacity: copies for other nodes would take the "
                "room of saves: bound the tier by keep_last instead"
            )
        parse_codec(self.codec)

    @property
    def best(self) -> Best | None:
        """``keep_best`` as a `Best`; None if it is not set."""
        return None if self.keep_best is None else Best.of(self.keep_best)

    @property
    def capacity_bytes(self) -> int | None:
        """``capacity`` in bytes; None if it is not set."""
        return None if self.capacity is None else as_bytes("capacity", self.capacity)


@dataclass(frozen=True, slots=True)
class Tls:
    """The files, all in PEM form, with which nodes encrypt the connections between them. Each node
    has its own certificate and key. The paths may differ between nodes.

    Attributes:
        certificate: The certificate of this node, and any certificates between it and the
            authority.
        key: The private key of the certificate, without a passphrase.
        authority: The certificates of the authorities that sign the certificates of nodes. Any
            process with a certificate that one of the authorities has signed counts as a node.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    authority: str | os.PathLike[str]

    def __new__(cls, *args: object, **fields: object) -> Self:
        """Check the names of the keyword arguments, as `Tier` does."""
        check_keys("Tls.", fields, tuple(cls.__dataclass_fields__))
        del args
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value: object = getattr(self, name)
            if not isinstance(value, str | os.PathLike) or not os.fspath(value):
                raise ConfigError(f"{name}={text_of(value)}: tls needs the path of a file")

    @property
    def paths(self) -> dict[str, str]:
        """The path of each file by the name of its field, with ``~`` expanded."""
        return {name: os.path.expanduser(getattr(self, name)) for name in self.__dataclass_fields__}


def _rule(check: Callable[..., None], **bounds: object) -> Mapping[str, object]:
    """Return the metadata of a setting that ``check`` checks, with its name and its value."""
    return {"check": partial(check, **bounds)}


def _choice(choices: object) -> Mapping[str, object]:
    """Return the metadata of a setting that is one of a ``Literal``."""
    return _rule(check_choice, choices=get_args(choices))


def _check_chunk_size(name: str, value: int | str) -> None:
    if not _MIN_CHUNK_BYTES <= as_bytes(name, value) <= _MAX_CHUNK_BYTES:
        raise ConfigError(
            f"{name}={text_of(value)}: give a size from {_MIN_CHUNK_BYTES} bytes to "
            f"{_MAX_CHUNK_BYTES >> 20}MiB, such as '16MiB'"
        )


def _check_host_memory(name: str, value: int | str) -> None:
    """Raise ``ConfigError`` unless ``value`` is "auto", a size, or a multiple such as "0.5x"."""
    if value == AUTO or _multiple_of(value) is not None:
        return
    try:
        as_bytes(name, value)
    except ConfigError:
        raise ConfigError(
            f"{name}={text_of(value)}: give 'auto', a size such as '8GiB', or a multiple of a "
            "rank's image such as '0.5x'"
        ) from None


def _multiple_of(host_memory: int | str) -> float | None:
    """Return the factor of a multiple such as "0.5x"; None if ``host_memory`` is no valid one."""
    match = _MULTIPLE_PATTERN.fullmatch(host_memory) if isinstance(host_memory, str) else None
    factor = None if match is None else float(match[1])
    return factor if factor is None or 0 < factor <= _MOST_IMAGES else None


def _check_cpus(name: str, value: object) -> None:
    """Raise ``ConfigError`` unless ``value`` is None or a list of core numbers."""
    if value is None:
        return
    if not isinstance(value, Collection) or isinstance(value, str | bytes):
        raise ConfigError(f"{name}={text_of(value)}: give a list of core numbers, such as [0, 1]")
    if len(value) == 0:
        raise ConfigError(f"{name} is empty: name at least one core, or leave it out to use all")
    for cpu in value:
        check_int(name, cpu, 0, 1 << 16)


def _check_rate(name: str, value: object) -> None:
    if value is not None:
        check_number(name, value, "MB/s above 0, or leave it out", above_zero=True)


def _check_part(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{name}={text_of(value)}: give the name of a part, such as 'model'")


def _check_tls(name: str, value: object) -> None:
    if not isinstance(value, Tls | None):
        raise ConfigError(
            f"{name}={text_of(value)}: give ckpt.Tls(certificate=..., key=..., authority=...)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveConfig:
    """The settings of saves. Every field has a default that suits most jobs. An *image* is a rank's
    part of the state in host memory, and a *slot* is the memory for an image.

    Attributes:
        on_busy: What ``save_async`` does when no slot is free: "wait" waits for a slot, "skip"
            skips this save.
        on_error: What happens when a save fails: "raise" raises its error from the next call of
            ``save_async``, ``save``, ``fence`` or ``close``; "warn" logs a warning, counts the save
            in ``manager.failed``, and training goes on. ``close`` then logs how many saves failed.
            Mistakes in the call itself (`ConfigError`, `UnsupportedValue`, `StepExists`,
            `ManagerClosed`) are always raised. There is one exception: if there are several ranks,
            a pattern that fits no name on any rank fails the save, and "warn" logs its error.
        on_suspicious: What happens when the step has advanced and no trained tensor has changed
            since the last save: "warn" logs a warning; "raise" also raises `SuspiciousState` from
            the next call of ``save_async``, ``save``, ``fence`` or ``close``; "ignore" compares
            nothing. The step is committed in any case. With several ranks the warning may come
            after the end of the save, since it needs the findings of all ranks.
        overlap: "auto" copies the tensors of optimizers while training goes on, and the optimizer's
            step waits for the copies; "off" copies everything before ``save_async`` returns.
        check: How a save checks that the image holds the state as it was at the call. "off"
            compares only version counters. "sampled" and "full" also compare bytes, since some
            changes move no version counter (``parameter.data``, NumPy views). "sampled" compares
            256 bytes of every 255 KiB, at least once in each tensor, and so detects most changes.
            It takes less than 1 % of the time of the copy. "full" compares every byte, and reads
            the state once more in the call and once in the background. It suits a first run and
            tests.
        check_finite: Whether a step is suspicious too if a trained tensor holds NaN or Inf. The
            check reads each trained tensor once more in the background.
        incremental: Whether the file of a save may leave out the parameters that need no gradient
            and have not changed since an older step. It then refers to the file of that step, which
            stays as long as a step refers to it. Tiers of a node and tiers in memory have whole
            files in any case.
        chunk_size: The largest size of a chunk, the unit of checksum, retry and transfer: "16MiB"
            or 16 << 20. Smaller tensors have smaller chunks (``ckpt.model.chunks``).
        commit_timeout_seconds: How long a save waits for the other ranks before it fails. It is
            also how long the copy of a step from a nearer tier to a farther one repeats a request
            that the store does not answer.
        slots: The most images in host memory. With two, one is written to the tiers while the next
            one is filled.
        backlog: How many steps may wait for a farther tier. If more steps wait, the oldest are not
            copied to that tier any more, unless no nearer tier has them.
        host_memory: The most host memory that each rank may use for images: a size, such as "8GiB"
            or 8 << 30, or a multiple of the rank's image, such as "0.5x". With "auto", the limit is
            what the machine, the memory cgroup and /dev/shm can spare.
        threads: The number of threads per rank and tier that write and compute checksums.
        nice: The number to add to the niceness of these threads, 0 to 19. The default is 0: see
            docs/decisions/0006-no-nice-by-default.md.
        cpus: The cores that these threads may use; None for all cores of the process.
        copies: How often the data that several ranks hold is written: once ("one"), or once on each
            node that has local tiers ("per_node"), so that the data outlives the loss of nodes.
        replicate_mb_per_s: The rate in MB/s at which each node copies the files of other nodes
            (``Tier(buddies=...)``); None for no limit.
        exit_seconds: How long the end of a script waits for work that ``close(detach=True)`` has
            left under way, and how long ``close`` continues the saves under way while an exception
            ends the process.
        agent: Whether an agent of this node copies files to farther tiers, and finishes the steps
            that the job leaves unfinished when it ends or dies. "off" uses no agent. "auto" starts
            an agent, and goes on without one if that fails; "required" raises `AgentError` then.
        scrub_mb_per_s: The rate in MB/s at which the agent verifies the steps of the job, when it
            has nothing else to do; 0 for not at all.
        journal: Whether the manager writes a journal of the run beside its nearest folder. It has
            no effect if all tiers are object stores or memory, or if ``observers`` has a `Journal`.
        deltas: The name of the part of the state, such as "model", whose differences to the
            step before are put beside each step, for ``ckpt.follow``; None for no part. The bytes
            of the part that this rank writes stay in host memory.
        tls: The files for the encryption of the connections between nodes that have local tiers, in
            saves and in restores. If None, these connections are not encrypted.
    """

    on_busy: OnBusy = field(default="wait", metadata=_choice(OnBusy))
    on_error: OnError = field(default="raise", metadata=_choice(OnError))
    on_suspicious: OnSuspicious = field(default="warn", metadata=_choice(OnSuspicious))
    overlap: Overlap = field(default="auto", metadata=_choice(Overlap))
    chunk_size: int | str = field(default="16MiB", metadata=_rule(_check_chunk_size))
    commit_timeout_seconds: float = field(
        default=600.0,
        metadata=_rule(check_number, of="seconds above 0, such as 600", above_zero=True),
    )
    slots: int = field(default=2, metadata=_rule(check_int, least=1, largest=16))
    backlog: int = field(default=4, metadata=_rule(check_int, least=1, largest=1000))
    host_memory: int | str = field(default=AUTO, metadata=_rule(_check_host_memory))
    threads: int = field(default=2, metadata=_rule(check_int, least=1, largest=256))
    nice: int = field(default=0, metadata=_rule(check_int, least=0, largest=19))
    cpus: frozenset[int] | None = field(default=None, metadata=_rule(_check_cpus))
    copies: Copies = field(default="one", metadata=_choice(Copies))
    check: CheckMode = field(default="sampled", metadata=_choice(CheckMode))
    check_finite: bool = field(default=False, metadata=_rule(check_bool))
    incremental: bool = field(default=True, metadata=_rule(check_bool))
    replicate_mb_per_s: float | None = field(default=None, metadata=_rule(_check_rate))
    exit_seconds: float = field(
        default=10.0, metadata=_rule(check_number, of="seconds, such as 10")
    )
    agent: AgentMode = field(default="off", metadata=_choice(AgentMode))
    scrub_mb_per_s: float = field(
        default=10.0, metadata=_rule(check_number, of="MB/s, such as 10, or 0 to verify nothing")
    )
    journal: bool = field(default=True, metadata=_rule(check_bool))
    deltas: str | None = field(default=None, metadata=_rule(_check_part))
    tls: Tls | None = field(default=None, metadata=_rule(_check_tls))

    def __post_init__(self) -> None:
        for setting in fields(self):
            setting.metadata["check"](setting.name, getattr(self, setting.name))

    @property
    def chunk_bytes(self) -> int:
        """``chunk_size`` in bytes."""
        return as_bytes("chunk_size", self.chunk_size)

    def memory_limit(self, nbytes: int) -> int | None:
        """Return the most bytes of host memory for images of ``nbytes`` each; None for no limit."""
        if self.host_memory == AUTO:
            return None
        if (image_factor := self.memory_share) is not None:
            return round(image_factor * nbytes)
        return as_bytes("host_memory", self.host_memory)

    @property
    def memory_share(self) -> float | None:
        """``host_memory`` as a multiple of an image; None if it is not given as one."""
        return _multiple_of(self.host_memory)


class Settings(TypedDict, total=False):
    """The fields of ``SaveConfig`` as keyword arguments of the manager."""

    on_busy: OnBusy
    on_error: OnError
    on_suspicious: OnSuspicious
    overlap: Overlap
    chunk_size: int | str
    commit_timeout_seconds: float
    slots: int
    backlog: int
    host_memory: int | str
    threads: int
    nice: int
    cpus: frozenset[int] | None
    copies: Copies
    check: CheckMode
    check_finite: bool
    incremental: bool
    replicate_mb_per_s: float | None
    exit_seconds: float
    agent: AgentMode
    scrub_mb_per_s: float
    journal: bool
    deltas: str | None
    tls: Tls | None


def with_settings(config: SaveConfig, settings: Settings) -> SaveConfig:
    """Return a copy of ``config`` with the values in ``settings``, the keyword arguments of a
    manager.

    Raises:
        ConfigError: A setting is unknown, or has a wrong value.
    """
    if unknown := sorted(settings.keys() - Settings.__annotations__.keys()):
        matches = get_close_matches(unknown[0], Settings.__annotations__, n=1, cutoff=0.5)
        advice = f"did you mean {matches[0]}? " if matches else ""
        advice += f"there are {', '.join(Settings.__annotations__)}"
        if unknown[0] in Tier.__dataclass_fields__:
            addition = ", keep_last=1" if unknown[0] in ("keep_best", "keep_every") else ""
            advice = (
                f"it belongs to a tier: CheckpointManager(Tier(url, {unknown[0]}=...{addition}))"
            )
        raise ConfigError(f"unknown setting {unknown[0]!r}; {advice}")
    return replace(config, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The contents of a ``ckpt.toml``.

    Attributes:
        tiers: The tiers, nearest first. There may be none.
        save: The settings of saves.
        metadata: The JSON values that every manifest keeps.
        path: The path of the file; None if there is no file.
    """

    tiers: tuple[Tier, ...] = ()
    save: SaveConfig = field(default_factory=SaveConfig)
    metadata: Metadata = field(default_factory=dict[str, Any])
    path: str | None = None


def load_config(path: str | os.PathLike[str] | None = None) -> Config:
    """Return the configuration in ``path``, or in ``./ckpt.toml`` if that exists.

    If ``path`` is None and ``./ckpt.toml`` does not exist, return the defaults, which have no
    tiers. Relative folders in a file are relative to the folder of the file.

    Raises:
        ConfigError: The file cannot be read or is not valid TOML, or it has an unknown name or an
            invalid value.
    """
    if path is None and not os.path.exists(CONFIG_NAME):
        return Config()
    file_path = os.fspath(path) if path is not None else CONFIG_NAME
    try:
        with open(file_path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{file_path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file_path} is not valid TOML: {error}") from None
    try:
        return _config_of(table, file_path)
    except ConfigError as error:
        raise ConfigError(f"{file_path}: {error}") from None


def root_of_environment() -> str:
    """Return the value of the variable ``CKPT_ROOT``; empty if the variable is not set."""
    return os.environ.get(ROOT_VARIABLE, "")


def ranks_on_this_node() -> int:
    """Return the number of ranks on this node, from the variables of the launcher (torchrun, Slurm,
    MPI, Horovod). Return 1 if no variable is set.
    """
    numbers = _number_variables(
        "LOCAL_WORLD_SIZE",
        "SLURM_NTASKS_PER_NODE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "HOROVOD_LOCAL_SIZE",
    )
    return next(filter(None, numbers), 1)


def rank_of_this_process() -> int:
    """Return the rank, from the variables of the launcher; 0 if no variable is set."""
    return next(_number_variables("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"), 0)


def local_rank_of_this_process() -> int:
    """Return the rank within the node, from the variables of the launcher; 0 if none is set."""
    return next(_number_variables("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"), 0)


def _number_variables(*variables: str) -> Iterator[int]:
    """Return the values of those of ``variables`` that are set to a whole number, in order."""
    texts = (os.environ.get(variable, "") for variable in variables)
    return (int(text) for text in texts if text.isdecimal())


def job_address() -> tuple[str, int] | None:
    """Return the host and port of rank 0, from the variables of the launcher; None if they are not
    set.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return (host, int(port)) if host and port.isdigit() else None


def agent_folder() -> str:
    """Return the folder of this user's agent. The folder need not exist.

    Unlike ``XDG_RUNTIME_DIR``, the default is the same for all sessions and batch jobs of a user,
    and the system does not remove it when the user logs out.
    """
    # The agent makes the folder with mode 0700, and refuses a folder of another user.
    return os.environ.get(AGENT_FOLDER_VARIABLE) or f"/tmp/ckpt-agent-{os.geteuid()}"  # noqa: S108


def agent_idle_seconds() -> float:
    """Return how many seconds an agent without a job waits for a job before it ends.

    ``CKPT_AGENT_IDLE_SECONDS`` sets the number; it is 600 by default.

    Raises:
        ConfigError: The variable is no number of seconds.
    """
    return _seconds_variable(AGENT_IDLE_VARIABLE, 600.0)


def agent_memory_seconds() -> float:
    """Return for how many seconds the agent leaves the steps of an ended job in memory after a
    durable tier has them, so that a trainer that is started again restores from memory.

    ``CKPT_AGENT_MEMORY_SECONDS`` sets the number; it is 300 by default.

    Raises:
        ConfigError: The variable is no number of seconds.
    """
    return _seconds_variable(AGENT_MEMORY_VARIABLE, 300.0)


def agent_scrub_seconds() -> float:
    """Return the seconds between two verifications of the same step by the agent.

    ``CKPT_AGENT_SCRUB_SECONDS`` sets the number; it is 86400 by default.

    Raises:
        ConfigError: The variable is no number of seconds.
    """
    return _seconds_variable(AGENT_SCRUB_VARIABLE, 86400.0)


def failure_domain() -> str:
    """Return the name of the failure domain of this node, such as its rack, from the variable
    ``CKPT_FAILURE_DOMAIN``; empty if the variable is not set.
    """
    return os.environ.get(DOMAIN_VARIABLE, "")


def environment_for_agent() -> dict[str, str]:
    """Return the environment variables that the agent gets, for its clients of object stores.

    Variables of launchers and devices are left out, and so are variables that are not UTF-8, since
    messages cannot hold them.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_NOT_FOR_AGENT) and _is_unicode(name + value)
    }


def _is_unicode(text: str) -> bool:
    """Return False if ``text`` has bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:  # The interpreter has read the bytes as surrogates
        return False
    return True


def _seconds_variable(variable: str, default: float) -> float:
    """Return the number of seconds in an environment variable, or ``default`` if it is not set."""
    text = os.environ.get(variable, "")
    try:
        value = float(text or default)
    except ValueError:
        value = -1.0  # No number of seconds, so that the check below raises
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{variable}={text_of(text)}: give a number of seconds, such as 600")
    return value


def debug_wanted() -> bool:
    """Return True if ``CKPT_DEBUG`` asks for the traceback of an unexpected error."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def _config_of(table: Mapping[str, Any], file_path: str) -> Config:
    """Return the configuration in ``table``, the content of the file ``file_path``."""
    check_keys("", table, ("root", "tiers", "save", "tls", "metadata"))
    if "root" in table and "tiers" in table:
        raise ConfigError(
            "root and tiers exclude each other: make the root the first of the [[tiers]]"
        )
    rows: object = table.get("tiers", [{"url": table["root"]}] if "root" in table else [])
    if not isinstance(rows, list):
        raise ConfigError("tiers is a list: write [[tiers]], with two brackets")
    metadata, folder = _section("metadata", table), os.path.dirname(file_path)
    check_json("metadata", metadata)
    tls = _tls_of(_section("tls", table), folder) if "tls" in table else None
    return Config(
        tiers=tuple(_tier_of(row, folder) for row in rows),
        save=replace(_save_config_of(_section("save", table)), tls=tls),
        metadata=metadata,
        path=file_path,
    )


def _tier_of(row: object, folder: str) -> Tier:
    """Return the tier of a row of ``[[tiers]]``. Its paths are relative to ``folder``."""
    if not isinstance(row, dict):
        raise ConfigError('each of tiers is a table: [[tiers]], then url = "..."')
    check_keys("tiers.", row, tuple(Tier.__dataclass_fields__))
    settings: dict[str, Any] = {"url": "", **row}
    if isinstance(best := settings.get("keep_best"), list):
        settings["keep_best"] = tuple(best)
    tier = Tier(**settings)
    base = tier.base and _relative_to(tier.base, folder)
    return replace(tier, url=_relative_to(tier.url, folder), base=base)


def _relative_to(url: str, folder: str) -> str:
    """Return ``url``, which is relative to ``folder`` if it is a relative path."""
    is_path = url != MEMORY and "://" not in url and "::" not in url and not url.startswith("~")
    return os.path.join(folder, url) if folder and is_path else url


def _tls_of(table: Mapping[str, Any], folder: str) -> Tls:
    """Return the files that the section ``[tls]`` names. Their paths are relative to ``folder``."""
    check_keys("tls.", table, tuple(Tls.__dataclass_fields__))
    tls = Tls(**{name: table.get(name, "") for name in Tls.__dataclass_fields__})
    return Tls(**{name: os.path.join(folder, path) for name, path in tls.paths.items()})


def _save_config_of(table: Mapping[str, Any]) -> SaveConfig:
    """Return the settings in the section ``[save]``."""
    check_keys("save.", table, [name for name in Settings.__annotations__ if name != "tls"])
    settings: dict[str, Any] = dict(table)
    if isinstance(cpus := table.get("cpus"), list):
        _check_cpus("cpus", cpus)
        settings["cpus"] = frozenset(cpus)
    return SaveConfig(**settings)


def _section(name: str, table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section ``name`` of a file; empty if there is none."""
    section = table.get(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{name} is a table: write [{name}]")
    return section

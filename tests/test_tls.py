"""The files of TLS are checked when a manager is built, with the same result on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt import CheckpointManager, Tier, Tls
from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.node_commits import agree
from ckpt.errors import ConfigError
from ckpt.storage.tiers import OpenTier, open_tiers
from tests.coordination.world import World
from tests.kit.certificates import SERVER_ONLY, Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_files_that_fit_are_taken(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = authority.issue("node")
    monkeypatch.setenv("HOME", str(tmp_path))
    below_home = [f"~/{Path(path).name}" for path in tls.paths.values()]
    for number, each in enumerate([tls, Tls(*map(Path, tls.paths.values())), Tls(*below_home)]):
        with CheckpointManager(tmp_path / "runs", tls=each) as manager:
            manager.save({"step": number})


def test_the_certificates_between_may_be_in_the_file(tmp_path: Path, authority: Authority) -> None:
    between = authority.between("between")
    with CheckpointManager(tmp_path / "runs", tls=between.issue("node")):
        pass


def test_an_authority_that_another_one_has_signed_is_enough(
    tmp_path: Path, authority: Authority
) -> None:
    """The job's own authority is below that of the cluster, whose other nodes do not belong to the
    job.
    """
    between = authority.between("between")
    file = tmp_path / "job.pem"
    file.write_bytes(between._chain)
    tls = replace(between.issue("node"), authority=file)
    with CheckpointManager(tmp_path / "runs", tls=tls):
        pass
    with pytest.raises(ConfigError, match="unable to get local issuer certificate"):
        CheckpointManager(tmp_path / "runs", tls=replace(authority.issue("other"), authority=file))


@pytest.mark.parametrize("name", ["certificate", "key", "authority"])
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (Path.unlink, "cannot be read: No such file or directory"),
        (lambda path: path.unlink() or path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.write_text("not PEM"), r"holds no .* in PEM form"),
        (lambda path: path.write_text(""), r"holds no .* in PEM form"),
    ],
)
def test_a_file_that_is_none_is_named(
    tmp_path: Path, authority: Authority, name: str, damage: Callable[[Path], Any], why: str
) -> None:
    tls = authority.issue("node")
    damage(Path(tls.paths[name]))
    with pytest.raises(ConfigError, match=rf"tls: the {name} {tls.paths[name]} {why}"):
        CheckpointManager(tmp_path / "runs", tls=tls)
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize("name", ["certificate", "key", "authority"])
def test_a_path_that_cannot_be_one_is_named(
    tmp_path: Path, authority: Authority, name: str
) -> None:
    tls = replace(authority.issue("node"), **{name: "node\0pem"})
    with pytest.raises(ConfigError, match=f"tls: the {name} .* cannot be read: embedded null byte"):
        CheckpointManager(tmp_path / "runs", tls=tls)


def test_a_certificate_that_is_too_weak_is_named_as_such(
    tmp_path: Path, authority: Authority
) -> None:
    tls = authority.issue("node", rsa_bits=1024)
    with pytest.raises(
        ConfigError, match=f"the certificate {tls.certificate} .*: ee key too small"
    ):
        CheckpointManager(tmp_path / "runs", tls=tls)


def test_a_key_of_another_certificate_is_named(tmp_path: Path, authority: Authority) -> None:
    tls = replace(authority.issue("node"), key=authority.issue("other").key)
    with pytest.raises(
        ConfigError, match=f"the key {tls.key} does not belong to the certificate {tls.certificate}"
    ):
        CheckpointManager(tmp_path / "runs", tls=tls)


def test_a_key_with_a_passphrase_asks_no_terminal(tmp_path: Path, authority: Authority) -> None:
    tls = authority.issue("node", passphrase="hunter2")
    with pytest.raises(ConfigError, match=f"{tls.key} holds no private key in PEM form without a"):
        CheckpointManager(tmp_path / "runs", tls=tls)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda authority: authority.issue("node", days=-1), "certificate has expired"),
        (
            lambda authority: replace(
                authority.issue("node"), authority=Authority(authority.folder, "other").path
            ),
            "unable to get local issuer certificate",
        ),
        # A node is a server for other nodes, and also a client
        (lambda authority: authority.issue("node", usages=SERVER_ONLY), "unsuitable certificate"),
    ],
)
def test_a_certificate_that_other_nodes_would_refuse_is_named(
    tmp_path: Path, authority: Authority, wrong: Callable[[Authority], Tls], why: str
) -> None:
    tls = wrong(authority)
    with pytest.raises(ConfigError) as found:
        CheckpointManager(tmp_path / "runs", tls=tls)
    assert f"the certificate {tls.certificate} cannot be used with the authority" in str(
        found.value
    )
    assert f"{tls.authority}: {why}" in str(found.value)


# -- ranks that differ -----------------------------------------------------------------------------


def on_ranks(
    folder: Path, tls: Callable[[int], Tls | None], ranks: int = 4
) -> dict[int, tuple[OpenTier, ...] | Exception]:
    """Return what each rank gets. Each rank is a node."""

    def work(coordinator: Coordinator) -> tuple[OpenTier, ...]:
        tiers = open_tiers([Tier(str(folder / f"node{coordinator.rank}"), local=True)])
        return agree(tiers, coordinator, tls(coordinator.rank))

    found = World(ranks).run(work)
    assert len(found) == ranks
    return found


def test_ranks_may_have_files_of_their_own(tmp_path: Path, authority: Authority) -> None:
    for tiers in on_ranks(tmp_path, lambda rank: authority.issue(f"node{rank}")).values():
        assert not isinstance(tiers, Exception)
        assert tiers[0].nodes is not None
        assert tiers[0].nodes.encryption is not None


def test_without_tls_nothing_is_encrypted(tmp_path: Path) -> None:
    for tiers in on_ranks(tmp_path, lambda _: None).values():
        assert not isinstance(tiers, Exception)
        assert tiers[0].nodes is not None
        assert tiers[0].nodes.encryption is None


@pytest.mark.parametrize("having", [(0, 2), (1, 3)])
def test_tls_on_some_ranks_is_the_same_error_on_all(
    tmp_path: Path, authority: Authority, having: tuple[int, ...]
) -> None:
    tls = authority.issue("node")
    found = on_ranks(tmp_path, lambda rank: tls if rank in having else None)
    lacking = ", ".join(str(rank) for rank in range(4) if rank not in having)
    for error in found.values():
        assert isinstance(error, ConfigError)
        assert str(error) == (
            f"tls is set on rank(s) {', '.join(map(str, having))} and not on rank(s) {lacking}: "
            "set it on all ranks, or on none"
        )


@pytest.mark.parametrize("faulty", [0, 3])
def test_a_file_that_one_rank_lacks_is_the_same_error_on_all(
    tmp_path: Path, authority: Authority, faulty: int
) -> None:
    tls = authority.issue("node")
    wrong = replace(tls, key="/nowhere/node.key")
    found = on_ranks(tmp_path, lambda rank: wrong if rank == faulty else tls)
    for error in found.values():
        assert isinstance(error, ConfigError)
        assert str(error) == (
            "tls: the key /nowhere/node.key cannot be read: No such file or directory (on rank(s) "
            f"{faulty})"
        )


# -- ckpt.toml -------------------------------------------------------------------------------------


def test_the_files_of_ckpt_toml_are_checked(tmp_path: Path, authority: Authority) -> None:
    tls = authority.issue("node")
    names = [Path(path).name for path in tls.paths.values()]
    text = 'root = "runs"\n[tls]\ncertificate = "{}"\nkey = "{}"\nauthority = "{}"\n'
    file = tmp_path / "ckpt.toml"
    file.write_text(text.format(*names))
    with CheckpointManager.from_config(file) as manager:
        manager.save({"step": 1})
    Path(tls.key).unlink()
    with pytest.raises(ConfigError, match=f"the key {tls.key} cannot be read"):
        CheckpointManager.from_config(file)

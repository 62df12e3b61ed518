"""Which tier a command works on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.config import Tier
from ckpt.errors import ConfigError
from ckpt.storage.api import Capabilities
from ckpt.storage.tiers import (
    resolve_tier,
    resolve_tiers,
    tier_at,
    urls_of,
)
from tests.kit.stores import Wrapped, wrap_stores


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CKPT_ROOT", raising=False)


def write_config(text: str) -> None:
    Path("ckpt.toml").write_text(text)


def test_the_flag_wins_over_the_variable_and_the_variable_over_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"--root.*CKPT_ROOT.*ckpt\.toml"):
        resolve_tier(None)
    write_config('root = "from-file"')
    assert resolve_tier(None).url == "from-file"
    monkeypatch.setenv("CKPT_ROOT", "from-variable")
    assert resolve_tier(None).url == "from-variable"
    assert resolve_tier("from-flag").url == "from-flag"


def test_a_memory_tier_is_passed_over_since_it_is_gone_with_its_process() -> None:
    write_config('tiers = [{url = "memory://x"}, {url = "runs"}]')
    assert resolve_tier(None).url == "runs"


@pytest.mark.parametrize("url", ["memory", "shm://x", "SHM://x"])
def test_a_tier_in_the_memory_of_the_machine_is_passed_over_if_another_lasts_longer(
    url: str,
) -> None:
    write_config(f'tiers = [{{url = "{url}"}}, {{url = "runs"}}]')
    assert resolve_tier(None).url == "runs"
    assert [tier.url for tier in resolve_tiers(None)] == [url, "runs"]


def test_a_tier_in_the_memory_of_the_machine_is_taken_if_it_is_the_only_one() -> None:
    write_config('root = "shm://x"')
    assert resolve_tier(None).url == "shm://x"
    assert [tier.url for tier in resolve_tiers(None)] == ["shm://x"]


def test_a_root_that_is_a_tier_has_the_options_of_the_tier() -> None:
    write_config(
        'tiers = [{url = "runs"}, {url = "s3://b", options = {endpoint_url = "http://x"}}]'
    )
    for url in ("s3://b", "s3://b/", "S3://b"):
        assert resolve_tier(url).options == {"endpoint_url": "http://x"}
    assert resolve_tier("s3://c").options == {}


@pytest.mark.parametrize(
    ("given", "configured"),
    [
        ("runs/", "runs"),
        ("./runs", "runs"),
        ("link", "runs"),
        ("s3://b/run/", "s3://b/run"),
        ("gcs://b/run", "gs://b/run"),
        ("s3://b/run", "s3://b/run?endpoint_url=http://x"),
        ("s3://b/run/", "s3://b/run?endpoint_url=http://x"),
        ("s3://b/run?endpoint_url=http://x", "s3://b/run?endpoint_url=http://x"),
    ],
)
def test_a_tier_is_found_in_each_spelling(given: str, configured: str) -> None:
    Path("link").symlink_to("runs")
    tier = Tier(configured, every=3)
    assert tier_at(given, [Tier("else"), tier]) is tier


@pytest.mark.parametrize(
    ("given", "configured"),
    [
        ("runs2", "runs"),
        ("s3://b/run?endpoint_url=http://y", "s3://b/run?endpoint_url=http://x"),
        ("s3://b/run?endpoint_url=http://y", "s3://b/run"),
        ("./memory", "memory"),
        ("memory", "./memory"),
    ],
)
def test_another_place_has_no_settings_of_the_tier(given: str, configured: str) -> None:
    assert tier_at(given, [Tier(configured, every=3)]) == Tier(given)


def test_a_tier_is_found_without_a_look_at_the_file_systems_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command would otherwise hang at another tier whose mount does not answer."""

    def hang(*_: object, **__: object) -> str:
        raise AssertionError("a file system was asked")

    tier = Tier("s3://bucket/run", every=2)
    monkeypatch.setattr("os.path.realpath", hang)
    monkeypatch.setattr("os.stat", hang)
    assert tier_at("s3://bucket/run/", [Tier("/mnt/dead"), tier]) is tier
    assert tier_at("/mnt/dead/", [dead := Tier("/mnt/dead"), tier]) is dead


def memory_of(url: str, **options: object) -> str:
    return urls_of([Tier("memory"), Tier(url, options=options)])[0]


def test_the_memory_before_one_url_on_two_servers_is_two_stores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    one, two = (memory_of("s3://b/gpt", endpoint_url=f"http://{name}") for name in ("one", "two"))
    plain = memory_of("s3://b/gpt")
    assert len({one, two, plain}) == 3
    assert memory_of("s3://b/gpt?endpoint_url=http://one:80/") == one
    assert memory_of("s3://b/gpt?region=eu") == plain == "shm://78dd93c802573c2b"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://two")
    assert memory_of("s3://b/gpt") == two


def test_the_memory_before_the_folders_of_two_users_of_a_file_server_is_two_stores() -> None:
    """An account may begin in a folder of its own, so that one path is two places."""
    assert memory_of("ftp://anna@node/run") != memory_of("ftp://bert@node/run")
    assert memory_of("ftp://anna:secret@NODE:21/run/") == memory_of("ftp://anna@node/run")


def test_the_name_of_a_folder_behind_memory_need_not_be_text(tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xffrun")
    tiers = [Tier("memory"), Tier(folder)]
    with CheckpointManager(tiers) as manager:
        manager.save({"x": torch.ones(2)}, step=1)
    state = {"x": torch.zeros(2)}
    with CheckpointManager(tiers) as manager:
        report = manager.restore(state)
    assert report is not None
    assert torch.equal(state["x"], torch.ones(2))


def test_the_memory_before_a_folder_is_one_store_in_each_spelling(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    spellings = ("my run", tmp_path / "my run", "link/my run", f"file://{tmp_path}/my%20run")
    assert len({memory_of(str(url)) for url in spellings}) == 1
    assert memory_of("/runs/gpt") == memory_of("file:///runs/gpt") == "shm://6a7de0dc06d87b66"


class Unconditional(Wrapped):
    """A store in which two puts *if absent* of one key may both succeed."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, put_if_absent=False)


@pytest.mark.parametrize(
    ("names", "warns"), [(["ftp"], True), (["memory", "ftp"], True), (["run", "ftp"], False)]
)
def test_a_store_without_an_atomic_create_is_named_at_the_first_save_if_it_comes_first(
    names: list[str],
    warns: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {"x": torch.ones(3)}
    wrap_stores(monkeypatch, lambda url, store: Unconditional(store) if url == "ftp" else store)
    with CheckpointManager(names) as manager:
        assert manager.restore(state) is None
        assert "nearest durable tier" not in caplog.text
        for step in (2, 3):
            manager.save(state, step)
    assert caplog.text.count("ftp is the nearest durable tier") == warns

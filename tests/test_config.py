from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, cast, get_type_hints

import pytest

from ckpt.config import Config, SaveConfig, Settings, Tier, Tls, debug_wanted, load_config
from ckpt.errors import ConfigError


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CKPT_ROOT", raising=False)
    monkeypatch.delenv("CKPT_DEBUG", raising=False)
    return tmp_path


def written(text: str) -> Config:
    Path("ckpt.toml").write_text(text)
    return load_config()


def test_without_a_file_there_are_the_defaults() -> None:
    assert load_config() == Config(tiers=(), save=SaveConfig(), metadata={}, path=None)


def test_a_whole_file_is_read() -> None:
    config = written("""
        [[tiers]]
        url = "/nvme/ckpt"
        [[tiers]]
        url = "s3://bucket/run42"
        options = { endpoint_url = "http://store:9000" }
        [save]
        on_busy = "skip"
        overlap = "off"
        check = "full"
        chunk_size = "8MiB"
        commit_timeout_seconds = 30
        slots = 1
        threads = 4
        nice = 0
        cpus = [2, 3]
        [tls]
        certificate = "/etc/ckpt/node.pem"
        key = "/etc/ckpt/node.key"
        authority = "/etc/ckpt/authority.pem"
        [metadata]
        team = "speech"
        tags = ["a", 1, true]
    """)
    assert config.tiers == (
        Tier("/nvme/ckpt"),
        Tier("s3://bucket/run42", {"endpoint_url": "http://store:9000"}),
    )
    assert config.save == SaveConfig(
        on_busy="skip",
        overlap="off",
        check="full",
        chunk_size="8MiB",
        commit_timeout_seconds=30,
        slots=1,
        threads=4,
        nice=0,
        cpus=frozenset({2, 3}),
        tls=Tls("/etc/ckpt/node.pem", "/etc/ckpt/node.key", "/etc/ckpt/authority.pem"),
    )
    assert config.metadata == {"team": "speech", "tags": ["a", 1, True]}


def test_a_root_is_the_only_tier() -> None:
    assert written('root = "runs/gpt"').tiers == (Tier("runs/gpt"),)


def test_relative_folders_in_a_file_elsewhere_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    file = tmp_path / "deep" / "job.toml"
    file.write_text(
        'tiers = [{url = "runs"}, {url = "/abs"}, {url = "s3://b/p"}, {url = "~/runs"}]'
    )
    urls = [tier.url for tier in load_config(file).tiers]
    assert urls == [str(tmp_path / "deep" / "runs"), "/abs", "s3://b/p", "~/runs"]


def test_relative_files_of_tls_are_relative_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    (tmp_path / "deep").mkdir()
    file = tmp_path / "deep" / "job.toml"
    file.write_text('tls = {certificate = "node.pem", key = "~/node.key", authority = "/a.pem"}')
    tls = load_config(file).save.tls
    assert tls == Tls(str(tmp_path / "deep" / "node.pem"), "/home/someone/node.key", "/a.pem")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rot = 'x'", "ckpt.toml: rot is not a setting: did you mean root?"),
        ("[save]\nchunk_mib = 3", "save.chunk_mib is not a setting: did you mean chunk_size?"),
        ("[[tiers]]\nuri = 'x'", "tiers.uri is not a setting: did you mean url?"),
        ("zzzz = 1", "known are root, tiers, save, tls, metadata"),
        ("tls = 'x'", r"write \[tls\]"),
        ("[tls]", "certificate='': tls needs the path of a file"),
        ("[tls]\ncertificate = 'x'", "key='': tls needs the path of a file"),
        ("[tls]\ncertificate = 3", "certificate=3: tls needs the path of a file"),
        ("[tls]\ncert = 'x'", "tls.cert is not a setting: did you mean certificate?"),
        ("root = 'a'\n[[tiers]]\nurl = 'b'", "exclude each other"),
        ("root = ''", "a tier needs a folder or a URL"),
        ("root = 3", "a tier needs a folder or a URL"),
        ("[[tiers]]", "a tier needs a folder or a URL"),
        ("[tiers]\nurl = 'x'", r"\[\[tiers\]\]"),
        ("tiers = ['x']", "each of tiers is a table"),
        ("[[tiers]]\nurl = 'x'\noptions = 'y'", "options of 'x' must be a table"),
        ("save = 3", r"write \[save\]"),
        ("[save]\non_busy = 'wiat'", "on_busy='wiat': choose 'wait' or 'skip'"),
        ("[save]\noverlap = true", "overlap=True: choose 'auto' or 'off'"),
        ("[save]\ncheck = true", "check=True: choose 'sampled' or 'full' or 'off'"),
        (
            "[save]\nchunk_size = '100MiB'",
            "chunk_size='100MiB': give a size from 16 bytes to 64MiB",
        ),
        ("[save]\nchunk_size = 0.5", "chunk_size=0.5: give a size"),
        ("[save]\nchunk_size = 15", "chunk_size=15: give a size from 16 bytes to 64MiB"),
        (
            "[save]\ncommit_timeout_seconds = 0",
            "commit_timeout_seconds=0: give a number of seconds above 0",
        ),
        ("[save]\ncommit_timeout_seconds = inf", "commit_timeout_seconds=inf"),
        ("[save]\nslots = 0", "slots=0: give a whole number from 1"),
        ("[save]\nthreads = true", "threads=True: give a whole number from 1"),
        ("[save]\nnice = -5", "nice=-5: give a whole number from 0 to 19"),
        ("[save]\ncpus = 3", "cpus=3: give a list of core numbers"),
        ("[save]\ncpus = []", "cpus is empty"),
        ("[save]\ncpus = ['a']", "cpus='a'"),
        ("[save]\ncpus = [[0]]", "cpus=<list>: give a whole number from 0"),
        ("[save]\ncheck_finite = 1", "check_finite=1: give true or false"),
        ("[[tiers]]\nurl = 'x'\nlocal = 1", "local=1: give true or false"),
        ("[[tiers]]\nurl = 'x'\nrequired = 0", "required=0: give true or false"),
        (
            "[metadata]\nday = 2026-01-01",
            "metadata.day=2026-01-01 cannot be kept in a manifest: write it as a string",
        ),
        ("[metadata]\nx = [nan]", r"metadata.x\[0\]=nan"),
        ("root = ", "ckpt.toml is not valid TOML"),
    ],
)
def test_what_is_wrong_is_named_with_the_way_out(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        written(text)


def test_a_file_that_was_asked_for_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"other\.toml cannot be read: No such file"):
        load_config("other.toml")


def test_a_file_that_is_not_text_is_refused() -> None:
    Path("ckpt.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config()


def test_the_keywords_of_a_manager_are_the_fields_of_a_save_config() -> None:
    assert get_type_hints(Settings) == {
        setting.name: get_type_hints(SaveConfig)[setting.name] for setting in fields(SaveConfig)
    }


@pytest.mark.parametrize("size", ["1MiB", "1 MiB", 1 << 20, "1024KiB", "1048576"])
def test_a_chunk_size_is_a_size(size: int | str) -> None:
    assert SaveConfig(chunk_size=size).chunk_bytes == 1 << 20


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk_size": 8},
        {"chunk_size": 1 << 30},
        {"slots": 17},
        {"nice": 2.0},
        {"commit_timeout_seconds": float("nan")},
        {"commit_timeout_seconds": 10**400},
        {"exit_seconds": 1e10},
        {"tls": "/etc/ckpt/node.pem"},
        {"tls": {"certificate": "x"}},
        {"cpus": 3},
        {"cpus": "01"},
        {"cpus": iter([0])},
        {"check_finite": 1},
    ],
)
def test_a_save_config_checks_itself(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SaveConfig(**wrong)


def test_the_repr_of_a_tier_hides_its_options() -> None:
    assert "hunter2" not in repr(Tier("s3://b", {"secret": "hunter2"}))


def test_the_traceback_is_shown_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not debug_wanted()
    monkeypatch.setenv("CKPT_DEBUG", "1")
    assert debug_wanted()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"buddies": -1}, "buddies"),
        ({"buddies": True}, "buddies"),
        ({"buddies": 1, "capacity": "1GB"}, "keep_last"),
    ],
)
def test_replicas_that_cannot_be_kept(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Tier("/nvme", local=True, **fields)


@pytest.mark.parametrize("capacity", [0, True, "much", "-1GB", "9" * 400, "2000000TB"])
def test_a_capacity_is_a_size(capacity: Any) -> None:
    with pytest.raises(ConfigError, match="such as '200GB'"):
        Tier("/nvme", capacity=capacity)


@pytest.mark.parametrize("rate", [0, -1, float("inf"), "fast"])
def test_a_rate_of_copies_is_a_positive_number(rate: Any) -> None:
    with pytest.raises(ConfigError, match="replicate_mb_per_s"):
        SaveConfig(replicate_mb_per_s=rate)


def test_the_rates_may_be_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.toml"
    path.write_text("[save]\nreplicate_mb_per_s = 500\nscrub_mb_per_s = 0\n")
    found = load_config(path).save
    assert (found.replicate_mb_per_s, found.scrub_mb_per_s) == (500, 0)


@pytest.mark.parametrize(
    ("value", "limit"),
    [("auto", None), ("0.5x", 500), ("2x", 2000), ("1KB", 1000), ("1 KiB", 1024), (77, 77)],
)
def test_host_memory_is_a_size_or_a_multiple_of_the_image(value, limit):
    assert SaveConfig(host_memory=value).memory_limit(1000) == limit


@pytest.mark.parametrize("value", ["", "x", "0x", "-1x", "1e3x", "101x", "many", 0, -1, True, 1.5])
def test_other_host_memory_is_refused_with_examples(value):
    with pytest.raises(ConfigError, match=r"host_memory=.*such as '8GiB'"):
        SaveConfig(host_memory=value)


def test_a_tier_takes_a_path(tmp_path: Path) -> None:
    assert Tier(cast("str", tmp_path)).url == str(tmp_path)

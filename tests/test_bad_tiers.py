"""Tiers that cannot work.

The constructor raises the error if it can know it then. Otherwise the handle does, with the tier's
URL and the remedy.
"""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from ckpt import CheckpointManager, Tier
from ckpt.config import load_config
from ckpt.errors import AccessDenied, ConfigError, StorageError
from ckpt.model.keys import OWNER
from ckpt.root.owner import Owner
from ckpt.storage.registry import open_backend
from ckpt_backends.folder.posix import PosixBackend
from ckpt_backends.s3.backend import S3Backend, _S3Upload
from tests.kit.stores import whole
from tests.servers import KEY, SECRET


def refused(*tiers: str | Path | Tier) -> str:
    with pytest.raises(ConfigError) as reported:
        CheckpointManager(list(tiers))
    return str(reported.value)


def test_one_folder_in_two_spellings_is_one_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "run").mkdir()
    for other in ("run/", "./run", "x/../run", f"file://{tmp_path}/run", "link", tmp_path / "run"):
        assert "is named twice" in refused("run", other), other
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("one", "two"),
    [("run", "run/b"), ("run/b", "run"), ("s3://b/a", "s3://b/a/c/"), ("s3://b", "s3://b/a")],
)
def test_a_root_inside_of_another_is_refused(tmp_path, monkeypatch, one, two):
    monkeypatch.chdir(tmp_path)
    reported = refused(one, two)
    inner, outer = sorted([one, two], key=len, reverse=True)
    assert f"{inner.rstrip('/')} is inside of the tier " in reported
    assert f"{outer.rstrip('/')}: give each a root of its own" in reported


def test_neighbours_and_namesakes_are_no_nests(tmp_path):
    ours = {"endpoint_url": "http://127.0.0.1:1", "key": "a", "secret": "b"}
    tiers = [
        tmp_path / "run",
        tmp_path / "run2",
        Tier("s3://b/a", ours),
        Tier("s3://b/a2", ours),
        Tier("s3://b/a/c"),
    ]
    CheckpointManager(tiers).close()


def test_a_place_is_on_the_server_that_its_query_or_its_options_name() -> None:
    keys = {"key": "a", "secret": "b"}
    here, there = (f"http://127.0.0.1:{port}" for port in (1, 2))
    asked, option = Tier(f"s3://b/a?endpoint_url={here}", keys), {**keys, "endpoint_url": here}
    nested = {**keys, "client_kwargs": {"endpoint_url": here}}
    CheckpointManager([asked, Tier(f"s3://b/a/c?endpoint_url={there}", keys)]).close()
    CheckpointManager([asked, Tier("s3://b/a/c", {**keys, "endpoint_url": there})]).close()
    for same in (
        asked,
        Tier("s3://b/a", option),
        Tier("s3://b/a", nested),
        Tier(f"s3://b/a?endpoint_url={here}/", keys),
    ):
        assert "named twice" in refused(asked, same)
    for inner in (Tier("s3://b/a/c", option), Tier("s3://b/a/c", nested)):
        assert "is inside of" in refused(asked, inner)


def test_two_tiers_have_two_urls_also_on_two_servers() -> None:
    """A handle names the tiers of its save by URL, and so do the journal and ``ckpt ls``."""
    keys = {"key": "a", "secret": "b"}
    here, there = (f"http://127.0.0.1:{port}" for port in (1, 2))
    for two in (
        Tier(f"s3://b/a?endpoint_url={there}", keys),
        Tier("s3://b/a", {**keys, "endpoint_url": there}),
    ):
        reported = refused(Tier(f"s3://b/a?endpoint_url={here}", keys), two)
        assert "different servers" in reported
        assert "give one of them another prefix" in reported


def test_a_place_is_on_the_server_that_a_variable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://LOCALHOST:80")
    keys = {"key": "a", "secret": "b"}
    same = Tier("s3://b/a", {**keys, "endpoint_url": "http://localhost"})
    assert "named twice" in refused(Tier("s3://b/a", keys), same)


def test_there_is_one_memory(tmp_path):
    assert "named twice" in refused("memory", "memory", tmp_path)
    assert "named twice" in refused(*2 * [f"shm://test-twice-{os.getpid()}"], tmp_path)
    assert "leave capacity out" in refused(Tier("memory", capacity="1GB"), tmp_path)


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ({"keep_lst": 2}, r"Tier\.keep_lst is not a setting: did you mean keep_last\?"),
        ({"cap": "1GB"}, "did you mean capacity"),
        ({"zzzzz": 1}, "known are url, "),
        ({"keep_last": 0}, "keep_last=0: give a whole number from 1"),
        ({"keep_last": 2.0}, "keep_last=2.0: give a whole number"),
        ({"capacity": 0}, "capacity=0: give a size above 0, such as '200GB'"),
        ({"capacity": -1}, "capacity=-1: give a size"),
        ({"capacity": "-1GB"}, "capacity='-1GB': give a size"),
        ({"capacity": "lots"}, "capacity='lots': give a size"),
        ({"capacity": "1 XB"}, "capacity='1 XB': give a size"),
        ({"capacity": True}, "capacity=True: give a size"),
        ({"capacity": 1.5}, "capacity=1.5: give a size"),
        ({"keep_best": ("loss", "min")}, "keep_best adds to keep_last: say how many of the newest"),
        ({"keep_last": 1, "keep_best": "loss"}, "keep_best='loss': name a metric and which values are the best"),  # noqa: E501
        ({"keep_last": 1, "keep_best": ("loss", "least")}, "name a metric"),
        ({"keep_last": 1, "keep_best": ("", "min")}, "name a metric"),
        ({"keep_last": 1, "keep_best": ("loss", "min", 0)}, "the count of keep_best=0"),
        ({"keep_last": 1, "keep_best": ("loss", "min", 1, 1)}, "name a metric"),
        ({"every": 0}, "every=0: give a whole number"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_the_way_out(field, expected):
    with pytest.raises(ConfigError, match=expected):
        Tier("runs", **field)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("200GB", 200 * 10**9), ("64GiB", 64 << 30), ("1.5 kB", 1500), ("7", 7), ("3b", 3), ("2T", 2 * 10**12), (5, 5)],  # noqa: E501
)  # fmt: skip
def test_a_capacity_is_a_size(text, nbytes):
    assert Tier("runs", capacity=text).capacity_bytes == nbytes


def test_all_of_it_in_a_file(tmp_path):
    file = tmp_path / "ckpt.toml"
    file.write_text(
        '[[tiers]]\nurl = "/x"\nkeep_last = 2\nkeep_best = ["loss", "min", 3]\ncapacity = '
        '"1GB"\nrequired = false'
    )
    wanted = Tier("/x", keep_last=2, keep_best=("loss", "min", 3), capacity="1GB", required=False)
    assert load_config(file).tiers == (wanted,)
    file.write_text('[[tiers]]\nurl = "/x"\ncapacity = "1 byte or two"')
    with pytest.raises(ConfigError, match=r"ckpt.toml: capacity='1 byte or two'"):
        load_config(file)


def test_a_tier_that_cannot_be_written_is_told_by_its_url_and_the_others_go_on(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    far.write_text("now a file")
    far.unlink()
    with CheckpointManager([near, far]) as manager:
        far.write_text("in the way")  # chmod would not stop root, which CI may run as
        save = manager.save_async({"x": torch.ones(3)}, 1)
        error = save.exception(20)
        assert isinstance(error, StorageError)
        assert f"in {far}" in str(error) or repr(str(far)) in str(error)
        far.unlink()
        manager.save({"x": torch.ones(3)}, 2)  # training went on, and saves still work
    assert (whole(near), whole(far)) == ([1, 2], [2])


S3 = {"key": KEY, "secret": SECRET, "region": "us-east-1", "put_if_absent": True}


@pytest.mark.server
def test_a_bucket_that_does_not_exist_is_told_by_its_name_at_the_first_save(tmp_path, moto_server):
    far = Tier("s3://no-such-bucket/run", {**S3, "endpoint_url": moto_server.url})
    with CheckpointManager([tmp_path, far]) as manager:
        error = manager.save_async({"x": torch.ones(3)}, 1).exception(60)
        assert isinstance(error, StorageError)
        assert "s3://no-such-bucket/run" in str(error)
        assert "create it, or correct the URL" in str(error)
    assert whole(tmp_path) == [1]


@pytest.mark.server
def test_credentials_that_expire_in_mid_run_cost_the_far_tier_only(tmp_path, moto_server):
    def requests_without_a_look_at_the_key(count: float) -> None:
        wish = urllib.request.Request(
            f"{moto_server.url}/moto-api/reset-auth",
            str(count).encode(),
            {"Content-Type": "text/plain"},
        )
        urllib.request.urlopen(wish, timeout=10).close()

    url = f"s3://bucket/expired-{os.getpid()}"
    far = Tier(url, {**S3, "endpoint_url": moto_server.url})
    with CheckpointManager([tmp_path, far]) as manager:
        manager.save({"x": torch.ones(3)}, 1, timeout=60)
        requests_without_a_look_at_the_key(0)
        try:
            save = manager.save_async({"x": torch.ones(3)}, 2)
            save.result(20, tier=str(tmp_path))
            error = save.exception(60)
            assert isinstance(error, AccessDenied)
            assert url in str(error)
            assert SECRET not in str(error)
        finally:
            requests_without_a_look_at_the_key(float("inf"))
        manager.save({"x": torch.ones(3)}, 3, timeout=60)
        assert manager.steps() == [1, 2, 3]
    assert whole(tmp_path) == [1, 2, 3]


def uploads(backend) -> list[str]:
    return [found.key for found in backend.unfinished_writes("")]


@pytest.mark.server
def test_uploads_of_a_killed_job_are_aborted_when_the_next_one_begins_to_save(
    tmp_path, moto_server
):
    bucket = {**S3, "endpoint_url": moto_server.url}
    url = f"s3://bucket/killed-{os.getpid()}"
    backend = open_backend(url, bucket)
    dead = replace(Owner.of_this_process("aaaaaaaaaaaa"), started=1)
    backend.put(OWNER, [msgspec.json.encode(dead)])
    backend.upload("step-000000007.aaaaaaaaaaaa/rank-00003.safetensors", 20 << 20)
    backend.upload("notes/rank-00003.safetensors", 20 << 20)
    with CheckpointManager(Tier(url, bucket)) as manager:
        manager.save({"x": torch.ones(3)}, 8, timeout=60)  # too small for an upload in parts
    assert uploads(backend) == ["notes/rank-00003.safetensors"]


@pytest.mark.server
def test_a_save_that_is_aborted_leaves_no_parts_to_pay_for(tmp_path, moto_server, monkeypatch):
    bucket = {**S3, "endpoint_url": moto_server.url}
    url = f"s3://bucket/aborted-{os.getpid()}"

    def away(*_: object) -> None:
        raise StorageError("rank-00000.safetensors", "refused")

    state = {"x": torch.ones(5 << 20)}
    for how in ("at once", "at the end"):
        with CheckpointManager(Tier(url, bucket)) as manager, monkeypatch.context() as patch:
            patch.setattr(S3Backend, "send_part", away)
            # the abort was refused too, and no caller learned it
            patch.setattr(_S3Upload, "abort", lambda _: None)
            if how == "at the end":
                patch.setattr(S3Backend, "unfinished_writes", away)
            error = manager.save_async(state, 1).exception(60)
            assert isinstance(error, StorageError)
            backend = open_backend(url, bucket)
            if how == "at the end":
                patch.undo()
                assert uploads(backend)
            else:
                assert uploads(backend) == []
        assert uploads(backend) == []


def test_stores_are_closed_if_a_tier_cannot_have_replicas(tmp_path, monkeypatch):
    closed: list[str] = []
    monkeypatch.setattr(PosixBackend, "close", lambda backend: closed.append(backend.url))
    near, far = tmp_path / "near", tmp_path / "far"
    assert "all nodes share this tier" in refused(near, Tier(str(far), local=False, buddies=1))
    assert closed == [str(near), str(far)]

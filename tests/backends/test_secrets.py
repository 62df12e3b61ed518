"""No credential gets into an error, a log, a displayed URL, or a listing.

This holds for each way to give it, and for each writer of a message.
"""

from __future__ import annotations

import json
import logging
import traceback
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ckpt import CheckpointManager, Tier
from ckpt.cli.main import app
from ckpt.errors import CkptError, ConfigError
from ckpt.storage.registry import open_backend
from ckpt_backends.foreign_errors import clean
from tests.servers import KEY, SECRET, free_port

SECRETS = ["AKIAHUNTER2", "s3cr3t/K+y=", "t0k3n//session==", "hunter2"]
OPTIONS = {"key": SECRETS[0], "secret": SECRETS[1], "token": SECRETS[2], "region": "us-east-1"}
HASTY = {"config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 1, "read_timeout": 1}}


def said(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


@pytest.mark.parametrize("client", ["botocore", "obstore"])
@pytest.mark.parametrize("server", ["rclone_s3", None])
@pytest.mark.server
def test_errors_and_our_log_tell_no_credentials(request, caplog, server, client):
    caplog.set_level(logging.DEBUG, logger="ckpt")
    url = request.getfixturevalue(server).url if server else f"http://127.0.0.1:{free_port()}"
    host = url.removeprefix("http://")
    backend = open_backend(
        f"s3://AKIAHUNTER2:hunter2@bucket/x?endpoint_url=http://user:hunter2@{host}",
        {**OPTIONS, **HASTY, "endpoint_url": url, "client": client},
    )
    reported = [backend.url]
    large = memoryview(bytes(20 << 20))

    def upload() -> None:
        going = backend.upload("key", large.nbytes)
        for offset in range(0, large.nbytes, going.part_bytes):
            going.write(offset, large[offset : offset + going.part_bytes])
        going.finish()

    for verb in (
        lambda: backend.put("key", [b"x"], if_absent=True),
        lambda: backend.read_into("key", 0, memoryview(bytearray(4))),
        lambda: list(backend.list("")),
        upload,
    ):
        with pytest.raises(CkptError) as caught:
            verb()
        reported.append(said(caught.value))
    reported.append(caplog.text)
    backend.close()
    for text in reported:
        for secret in SECRETS:
            assert secret not in text


@pytest.mark.parametrize(
    "text",
    [
        "https://u:hunter2@host/b",
        "https://h/b?X-Amz-Credential=hunter2%2F2026&X-Amz-Security-Token=hunter2&X-Amz-Signature=hunter2",
        "https://h/b?AWSAccessKeyId=hunter2&Signature=hunter2%3D&Expires=1",
        "https://h/b?X-Goog-Credential=hunter2&X-Goog-Signature=hunter2",
        "https://h/b?GoogleAccessId=hunter2&Signature=hunter2",
        "https://acct.blob.core.windows.net/c?sv=1&sig=hunter2%2B",
        "Authorization: AWS4-HMAC-SHA256 Credential=hunter2/20261121/x, SignedHeaders=host, "
        "Signature=hunter2",
        "'Authorization': 'Bearer hunter2.abc-def'",
        "x-amz-security-token: hunter2",
        "{'access_token': 'hunter2', 'token_type': 'Bearer'}",
        "s3://AKIA:hunter2@bucket/x",
    ],
)
def test_what_looks_like_a_credential_is_taken_out(text):
    assert "hunter2" not in clean(text)


@pytest.mark.server
def test_a_checkpoint_and_its_listing_hold_no_credentials(rclone_s3, monkeypatch, tmp_path):
    options = {
        "key": KEY,
        "secret": SECRET,
        "region": "us-east-1",
        "endpoint_url": rclone_s3.url,
        "put_if_absent": False,
    }
    with CheckpointManager(Tier("s3://bucket/secret", options=options)) as manager:
        manager.save({"x": torch.ones(5)}, 1)
    stored = [
        path.read_bytes()
        for path in (rclone_s3.data / "bucket" / "secret").rglob("*")
        if path.is_file()
    ]
    assert len(stored) >= 3
    assert not any(secret.encode() in data for data in stored for secret in (KEY, SECRET))
    table = "\n".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    (tmp_path / "ckpt.toml").write_text(
        f'[[tiers]]\nurl = "s3://bucket/secret"\n[tiers.options]\n{table}\n'
    )
    monkeypatch.chdir(tmp_path)
    for words in (["ls", "--json"], ["ls"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        assert "1" in done.output
        assert not any(secret in done.output for secret in (KEY, SECRET))


HUNTER = "hunter2"


@pytest.mark.parametrize("name", ["secret", "shared", "direct", "put_if_absent", "stripe_count"])
@pytest.mark.parametrize(
    "url", ["runs", "file:///tmp/runs", "local:///tmp/runs", "memory://x", "shm://x"]
)
def test_an_option_that_is_refused_is_told_by_its_name(url, name):
    with pytest.raises(ConfigError) as caught:
        open_backend(url, {name: HUNTER})
    assert HUNTER not in said(caught.value)
    assert name in str(caught.value) or url.startswith("shm")


@pytest.mark.parametrize(
    "given",
    [
        {"url": "runs", "secret": HUNTER},
        [{"url": "runs", "secret": HUNTER}],
        [("runs", {"secret": HUNTER})],
        HUNTER.encode(),
    ],
)
def test_what_is_no_tier_is_told_by_its_type(given):
    with pytest.raises(ConfigError, match="is not a place for checkpoints") as caught:
        CheckpointManager(given)
    assert HUNTER not in said(caught.value)


@pytest.mark.parametrize(
    "name",
    ["every", "keep_last", "keep_best", "capacity", "required", "codec", "local", "url", "options"],
)
def test_a_dict_in_the_place_of_a_setting_is_told_by_its_type(name):
    fields: dict[str, Any] = {"url": "runs", "keep_last": 3, name: [{"secret": HUNTER}]}
    with pytest.raises(ConfigError, match="list") as caught:
        Tier(**fields)
    assert HUNTER not in said(caught.value)


@pytest.mark.parametrize(
    "url", ["file://user:hunter2@host/x", "nope://user:hunter2@host", "s3://u:hunter2@"]
)
def test_a_url_loses_its_password_in_every_message(url):
    assert HUNTER not in repr(Tier(url))
    with pytest.raises(ConfigError) as caught:
        open_backend(url)
    assert HUNTER not in said(caught.value)


@pytest.mark.parametrize("verb", ["show", "ls", "verify", "restore"])
@pytest.mark.parametrize(
    "table",
    [
        'url = "runs"\noptions = { secret = "hunter2" }',
        'url = "memory://z"\noptions = { secret = "hunter2" }',
        'url = "file://user:hunter2@host/x"',
        'url = { secret = "hunter2" }',
        'url = "runs"\nevery = { secret = "hunter2" }',
    ],
)
def test_the_command_line_tells_no_secret_of_a_config(tmp_path, table, verb):
    path = tmp_path / "ckpt.toml"
    path.write_text(f"[[tiers]]\n{table}\n")
    for words in ([], ["--json"]):
        done = CliRunner().invoke(app, [verb, "--config", str(path), *words])
        assert done.exit_code != 0
        assert HUNTER not in done.output + said(done.exception or ConfigError("none"))

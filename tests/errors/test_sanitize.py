"""Text that comes from a store is cleaned where it leaves the library.

No terminal interprets it, and it contains no credential.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest

from ckpt.errors import ConfigError, ObjectNotFound, PeerFailed, RootInUse, UnknownScheme
from ckpt.errors.base import CkptError
from ckpt.errors.sanitize import clean, redact
from tests.kit.texts import ESCAPES


@pytest.mark.parametrize("text", ESCAPES)
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    assert clean(text).isprintable()
    assert clean(clean(text)) == clean(text)


@pytest.mark.parametrize("text", ESCAPES)
@pytest.mark.parametrize(
    "made",
    [
        ConfigError,
        lambda text: ObjectNotFound("key", text),
        lambda text: RootInUse("runs", text),
        lambda text: PeerFailed(3, {1: text}),
        lambda text: RootInUse(text, "attempt"),
    ],
)
def test_the_text_of_an_error_is_clean(made: Callable[[str], CkptError], text: str) -> None:
    error = made(text)
    assert str(error).isprintable()
    assert repr(error).isprintable()
    if isinstance(error, ObjectNotFound):
        error.root = text
        assert str(error).isprintable()


@pytest.mark.parametrize("text", ESCAPES)
def test_a_line_of_the_log_is_clean(text: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ckpt"):
        logging.getLogger("ckpt").warning("ckpt: %s on %s (%d)", text, "s3://key:hunter2@bucket", 3)
    assert caplog.messages[-1].isprintable()
    assert caplog.messages[-1].endswith("on s3://***@bucket (3)")


@pytest.mark.parametrize(
    "text", ["file://user:hunter2@host/x", "nope://u:hunter2@h", "s4://h/x?access_key=hunter2"]
)
def test_an_error_about_a_url_keeps_its_password(text: str) -> None:
    error = UnknownScheme(text, ["s3"])
    assert "hunter2" not in f"{error} {error!r} {error.args}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://AKIA:hunter2@bucket/x and gs://b", "s3://***@bucket/x and gs://b"),
        ("h/x?X-Amz-Signature=hunter2&b=1", "h/x?X-Amz-Signature=***&b=1"),
        ("h/x?b=1&access_key=hunter2", "h/x?b=1&access_key=***"),
        ("'secret=hunter2','token=hunter2'", "'secret=***','token=***'"),
        ("a=token=hunter2", "a=token=***"),
        ("AWS_SECRET=hunter2=", "AWS_SECRET=***"),
        ("key: loss=0.25, keys=", "key: loss=0.25, keys="),
        ("monkey business", "monkey business"),
    ],
)
def test_values_that_look_like_credentials_are_struck_out(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize(
    "unit",
    [
        "key",
        "keytokensecret",
        "://",
        "a=",
        "key=",
        "://@",
        "key key",
        "X-Amz-",
        "Bearer ",
        "sig=",
        "'key'",
        "x-goog-a: ",
    ],
)
@pytest.mark.parametrize("function", [redact, clean])
def test_time_grows_as_the_text_does(function: Callable[[str], str], unit: str) -> None:
    """Eight times the text takes about eight times as long. It once took 64 times as long."""

    def seconds(count: int) -> float:
        text, took = unit * count, []
        for _ in range(5):
            began = time.process_time()
            function(text)
            took.append(time.process_time() - began)
        return min(took)

    assert seconds(16_000) < 25 * max(seconds(2_000), 1e-4)

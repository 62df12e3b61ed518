from __future__ import annotations

import pytest

from ckpt import CheckpointManager, Tier
from ckpt.errors import ConfigError
from ckpt.storage.registry import BUILT_IN, open_backend
from ckpt_backends.store_table import STORES, check_tested, store_of


@pytest.mark.parametrize("url", ["http://host/x", "blockcache::s3://b/x", "zip::memory://x"])
def test_a_store_that_is_not_in_the_table_is_refused_with_the_way_out(url):
    with pytest.raises(ConfigError, match="never run") as caught:
        open_backend(url)
    assert "docs/stores.md" in str(caught.value)
    assert '"untested": True' in str(caught.value)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("hf://buckets/me/run", "'hf' is no store for checkpoints: ckpt was never run on the Hug"),
        ("simplecache::s3://b/x", "'simplecache' is no store for checkpoints: the cache gives an"),
        ("dir::filecache::file:///x", "'filecache' is no store for checkpoints: the cache gives"),
    ],
)
def test_a_store_that_the_table_calls_no_tier_is_refused_with_the_reason(url: str, reason: str):
    with pytest.raises(ConfigError) as caught:
        CheckpointManager(url)
    assert reason in str(caught.value)
    assert '"untested": True' in str(caught.value)


def test_the_switch_opens_a_store_that_is_not_in_the_table(tmp_path):
    tier = Tier(f"simplecache::file://{tmp_path}/far", options={"untested": True})
    with CheckpointManager(tier) as manager:
        manager.save({"a": 1}, step=1)
    with CheckpointManager(tier) as manager:
        assert manager.steps() == [1]


def test_the_switch_takes_true_or_false_only():
    with pytest.raises(ConfigError, match="true or false"):
        open_backend("dir::memory://x", {"untested": "yes"})


def test_a_refused_url_shows_no_password():
    with pytest.raises(ConfigError) as caught:
        open_backend("http://user:hunter2@host/x")
    assert "hunter2" not in str(caught.value)


def test_a_store_of_the_table_opens_without_the_switch():
    assert check_tested("dir::file:///x", {"auto_mkdir": True}) == {"auto_mkdir": True}


def test_each_scheme_has_one_row():
    schemes = [scheme for store in STORES for scheme in store.schemes]
    assert len(schemes) == len(set(schemes))
    assert all(store_of(scheme) for scheme in BUILT_IN)


def test_each_store_that_is_not_for_every_tier_says_why():
    assert all(bool(store.reason) == (store.role != "any tier") for store in STORES)

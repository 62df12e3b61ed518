"""How two places relate to each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import ConfigError, StorageError
from ckpt.model.keys import parse_base
from ckpt.storage.outside_files import root_at
from ckpt.storage.registry import open_backend
from ckpt.storage.urls import (
    canonical,
    is_folder,
    is_missing,
    is_object_store,
    is_same_place,
    is_spelling_of,
    path_between,
    relation,
    url_at,
)


@pytest.mark.parametrize(
    ("one", "two", "how"),
    [
        ("s3://bucket/run", "s3://bucket/run/", "same"),
        ("gs://bucket/run", "GCS://bucket/run", "same"),
        ("s3://bucket/run/a", "s3://bucket/run", "inside"),
        ("s3://bucket", "s3://bucket/run", "around"),
        ("s3://bucket/run", "s3://bucket/run2", "apart"),
        ("s3://bucket/run", "gs://bucket/run", "apart"),
        ("runs/gpt", "./runs/gpt/", "same"),
        ("runs/gpt2", "runs/gpt", "apart"),
        ("runs/gpt/a", "runs/gpt", "inside"),
        ("runs", "s3://runs", "apart"),
        ("FILE:///tmp/runs", "/tmp/runs", "same"),
        ("file:///tmp/a%20b", "/tmp/a b", "same"),
        ("file:///tmp/run#1", "/tmp/run#1", "same"),
        ("~/runs/gpt", os.path.expanduser("~/runs"), "inside"),
    ],
)
def test_places_are_compared_whatever_their_spelling(one: str, two: str, how: str) -> None:
    assert relation(one, two) == how


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("sftp://node/run", "ssh://ana@NODE:22/run/", True),
        ("sftp://node/run", "sftp://node:2222/run", False),
        ("ftp://node:21/run", "ftp://node/run", True),
        ("ftp://node:22/run", "ftp://node/run", False),
        ("smb://ana:secret@node/share/run", "smb://node:445/share/run", True),
        ("sftp://[::1]:22/run", "sftp://[::1]/run", True),
        ("sftp://node/a@b", "sftp://node/b", False),
        ("abfss://c@account.dfs.core.windows.net/run", "az://c@account/run", True),
        ("abfss://c@account.dfs.core.windows.net/run", "abfs://c/run", True),
        ("abfs://c@account/run", "abfs://c@other/run", False),
        ("abfs://c@account/run", "abfs://d/run", False),
        ("s3://bucket/run?endpoint_url=http://h", "s3a://bucket/run", True),
        ("s3://bucket/run@2", "s3://bucket/2", False),
    ],
)
def test_two_urls_of_one_place_are_known_as_such(one: str, two: str, same: bool) -> None:
    assert is_same_place(one, two) == is_same_place(two, one) == same
    assert "?" in one or is_spelling_of(one, two) == same


def test_a_link_is_the_place_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real", tmp_path / "link")
    assert relation(str(tmp_path / "link"), str(tmp_path / "real")) == "same"
    assert is_same_place(str(tmp_path / "link"), f"file://{tmp_path}/real")
    assert relation(str(tmp_path / "link" / "a"), str(tmp_path / "real")) == "inside"


def test_urls_of_one_location_are_resolved_to_one_spelling(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real", tmp_path / "link")
    assert canonical(f"{tmp_path}/link/a") == canonical(f"file://{tmp_path}/real/a/")
    assert canonical("gs://bucket/run") == canonical("GCS://bucket/run/?project=p")
    assert canonical(f"{tmp_path}/link/a") != canonical(f"{tmp_path}/link/b")


def test_a_folder_that_exists_is_not_missing_whatever_its_spelling(tmp_path: Path) -> None:
    (tmp_path / "run #1").mkdir()
    assert not is_missing(f"file://{tmp_path}/run%20#1")
    assert is_missing(f"file://{tmp_path}/run%20#2")


@pytest.mark.parametrize(
    ("url", "folder", "object_store"),
    [
        ("runs", True, False),
        ("file:///runs", True, False),
        ("s3://b", False, True),
        ("GS://b", False, True),
        ("az://container/runs", False, True),
        ("abfss://container@account.dfs.core.windows.net", False, True),
        ("memory://m", False, False),
        ("simplecache::s3://b", False, False),
    ],
)
def test_what_a_scheme_says(url: str, folder: bool, object_store: bool) -> None:
    assert (is_folder(url), is_object_store(url)) == (folder, object_store)


PLACES = st.lists(st.sampled_from(["a", "b", "c d", "é", "..."]), min_size=1, max_size=4)


@given(place=PLACES, other_place=PLACES, store=st.sampled_from(["/", "s3://bucket/"]))
def test_the_path_between_two_roots_leads_from_one_to_the_other(place, other_place, store):
    url, other_url = store + "/".join(place), store + "/".join(other_place)
    try:
        path = path_between(url, other_url)
    except ConfigError:
        count = min(len(place), len(other_place))
        assert place[:count] == other_place[:count]
        return
    assert parse_base(f"{path}/step-000000001.aaaaaa") is not None
    assert path_between(url_at(url, path), url) == path_between(other_url, url)


@pytest.mark.parametrize(
    "path", ["../x?endpoint_url=http:%2f%2fother", "../x::file:/etc", "../../../x", "../../x"]
)
def test_a_path_from_a_record_leads_to_no_other_server_and_no_other_store(path):
    backend = open_backend("s3://bucket/run", {"key": "k", "secret": "s"})
    with pytest.raises(StorageError, match="store of s3://bucket/run"):
        root_at(backend, path)
    with pytest.raises(StorageError, match="store of sftp://node/run"):
        url_at("sftp://node/run", path)


def test_a_base_whose_name_would_be_options_is_refused():
    with pytest.raises(ConfigError, match="another name"):
        path_between("sftp://node/run", "sftp://node/what?")
    assert path_between("/runs/a", "/runs/what?") == "../what?"

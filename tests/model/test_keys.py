from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt.coordination.single import new_attempt
from ckpt.errors import ConfigError, ManifestCorrupt
from ckpt.model.keys import (
    MANIFEST,
    OWNER,
    StepRef,
    data_name,
    fragment_name,
    parse_base,
    parse_folder,
    step_of,
)
from ckpt.storage.api import check_key

REF = StepRef(1200, "abcxyz")
OURS = re.compile(r"rank-[0-9]{5,}\.(safetensors|json)")


def test_the_keys_of_a_step():
    assert REF.folder == "step-000001200.abcxyz"
    assert REF.manifest == "step-000001200.abcxyz/manifest.json"
    assert REF.key(data_name(3)) == "step-000001200.abcxyz/rank-00003.safetensors"
    assert REF.key(fragment_name(123456)) == "step-000001200.abcxyz/rank-123456.json"


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../x", "/etc/passwd", "rank-00000.safetensors/../../x", "../rank-00000.json",  # noqa: E501
        "rank-00000.json\n", " rank-00000.json", "rank-0.json", "rank--0001.json", "rank-00000.pkl",
        "rank-00000.safetensors.tmp", "RANK-00000.json", "rank-00000_json", "C:\\rank-00000.json",
        "rank-٠٠٠٠٠.json", MANIFEST, OWNER,
    ],
)  # fmt: skip
def test_a_foreign_name_never_becomes_a_key(name):
    with pytest.raises(ManifestCorrupt, match="not the name of a checkpoint file"):
        REF.key(name)


@given(st.text() | st.from_regex(r"rank-\d{4,7}\.(safetensors|json)\n?"))
@example("rank-00001.json")
def test_only_our_names_become_keys_and_those_stay_in_the_folder(name):
    if OURS.fullmatch(name):
        assert check_key(REF.key(name)) == f"{REF.folder}/{name}"
    else:
        with pytest.raises(ManifestCorrupt):
            REF.key(name)


@given(st.integers(0, 10**18 - 1), st.from_regex(r"[a-z]{6,32}", fullmatch=True))
def test_a_folder_of_ours_is_read_back(step, attempt):
    assert parse_folder(StepRef(step, attempt).folder) == StepRef(step, attempt)


@given(
    st.text()
    | st.from_regex(r"\A(step-)?[-+ ]?\d{1,19}(\.[0-9a-zA-Z]{1,33})?[\n/]?\Z")
    | st.from_regex(r"\Astep-0*[0-9]{1,3}\.[0-9a-z]{6}\Z")
)
@example("step-٠٠٠٠٠٠٠٠٠.abcxyz")
@example("step-0000000000001.abcxyz")
@example("step-000000001.abcxyz\n")
def test_a_folder_is_ours_only_if_we_would_name_it_so(name):
    ref = parse_folder(name)
    assert ref is None or ref.folder == name


@pytest.mark.parametrize(
    "name",
    [
        "step-1.abcxyz",
        "step-000000001",
        "step-000000001.ab",
        "step-000000001.ABCXYZ",
        "step-000000001.abc123",
        "tmp",
        "",
    ],
)
def test_folders_of_others_are_not_ours(name):
    assert parse_folder(name) is None


def test_the_last_number_in_the_name_of_a_folder_is_the_step():
    attempts = [new_attempt() for _ in range(50)]
    refs = [StepRef(1200, own).retry(trial) for trial, own in enumerate(attempts)]
    folders = [ref.folder for ref in refs]
    assert {re.findall(r"\d+", folder)[-1] for folder in folders} == {"000001200"}
    assert [parse_folder(folder) for folder in folders] == refs
    assert [(ref.job, ref.trial) for ref in refs] == [(own, n) for n, own in enumerate(attempts)]
    assert len(set(attempts)) == 50
    assert [REF.retry(trial).attempt for trial in (0, 1, 10)] == ["abcxyz", "abcxyztb", "abcxyztba"]


def test_the_step_of_a_state_may_be_any_integer_but_a_bool() -> None:
    assert step_of({"step": 7}, None, last=1) == 7
    assert step_of({"step": np.int64(7)}, None, last=1) == 7
    assert step_of({"step": True}, None, last=1) == 2
    assert step_of({"step": 7.0}, None, last=None) == 0
    with pytest.raises(ConfigError, match="at most 18 digits"):
        step_of({}, 10**18, last=1)


def test_steps_order_by_number():
    refs = [StepRef(10, "aaaaaa"), StepRef(9, "zzzzzz"), StepRef(1_000_000_000, "aaaaaa")]
    assert [ref.step for ref in sorted(refs)] == [9, 10, 1_000_000_000]


@pytest.mark.parametrize("rank", [0, 99_999, 100_000, 16_777_216])
def test_names_of_ranks_are_names_of_ours(rank):
    assert OURS.fullmatch(data_name(rank))
    assert OURS.fullmatch(fragment_name(rank))


FOLDER = "step-000000001.aaaaaa"


@pytest.mark.parametrize(
    "name",
    [
        f"/etc/{FOLDER}",
        f"../{FOLDER}",
        f"../../{FOLDER}",
        f"../../../{FOLDER}",
        f"base/{FOLDER}",
        f"./base/{FOLDER}",
        f"../base/../x/{FOLDER}",
        f"../base/./{FOLDER}",
        f"..//base/{FOLDER}",
        f"../base//{FOLDER}",
        "../base/..",
        f"../ba\0se/{FOLDER}",
        f"../{'x' * 5000}/{FOLDER}",
        "../base/step-1.aaaaaa",
        "s3://bucket/step-000000001.aaaaaa",
    ],
)
def test_a_path_that_is_not_normalized_names_no_base(name):
    assert parse_base(name) is None


@pytest.mark.parametrize("name", [FOLDER, f"../b/{FOLDER}", f"../../b/c.d/..e/{FOLDER}"])
def test_the_name_of_a_base_is_its_path(name):
    base = parse_base(name)
    assert base is not None
    assert base.name == name

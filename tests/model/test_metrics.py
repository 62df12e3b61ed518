from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch

from ckpt.errors import ConfigError
from ckpt.model.metrics import as_metrics, metrics_of
from ckpt.model.values import to_json


def test_numbers_of_every_kind_are_metrics():
    loss = (torch.ones((), requires_grad=True) * 2).sum()  # still on its graph
    given = {"i": 3, "f": 1.5, "np": np.float32(0.5), "array": np.array(4.0), "loss": loss}
    assert as_metrics(given) == {"i": 3.0, "f": 1.5, "np": 0.5, "array": 4.0, "loss": 2.0}


@pytest.mark.parametrize("wrong", ["low", None, True, [1.0], torch.ones(2), 1j, 10**400])
def test_what_is_no_number_is_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=r"metrics\['loss'\]"):
        as_metrics({"loss": wrong})


@pytest.mark.parametrize("wrong", [3.0, "loss", ["loss"], {1: 2.0}, {"": 1.0}])
def test_metrics_are_numbers_by_name(wrong):
    with pytest.raises(ConfigError, match="metrics"):
        as_metrics(wrong)


def test_they_come_back_from_the_metadata_whatever_they_are():
    packed = to_json("metadata", {"team": "a", "metrics": {"loss": 0.25, "bad": math.nan}})
    found = metrics_of(msgspec.Raw(packed))
    assert found["loss"] == 0.25
    assert math.isnan(found["bad"])


@pytest.mark.parametrize(
    "odd",
    [
        "null",
        "[]",
        "{}",
        '{"metrics":3}',
        '{"metrics":["a"]}',
        '{"metrics":{"$":"x"}}',
        "{",
        '{"metrics":{"a":"b","c":true}}',
    ],
)
def test_what_is_none_counts_as_not_given(odd):
    assert metrics_of(msgspec.Raw(odd.encode())) == {}

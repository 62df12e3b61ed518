"""What the storage of a tier costs a month, and the requests to it."""

from __future__ import annotations

import pytest

from ckpt.errors import ConfigError
from ckpt.page.prices import LIST_PRICES, Price, monthly_dollars, price_of, request_dollars
from ckpt.page.store_requests import Requests, SaveRequests, requests_of_save


def test_the_longest_begin_of_the_url_has_the_price() -> None:
    prices = {**LIST_PRICES, "s3://cold": Price(0.001)}
    assert monthly_dollars("s3://hot/run", 1000 * 10**9, prices) == pytest.approx(23)
    assert monthly_dollars("s3://cold/run", 1000 * 10**9, prices) == pytest.approx(1)
    assert monthly_dollars("/nvme/run", 1000 * 10**9, prices) is None


def test_requests_cost_what_their_kind_does() -> None:
    """Puts and listings are dearer than other requests, and deletes are free."""
    requests = Requests(puts=600, lists=400, gets=900, heads=100, deletes=10**9)
    assert request_dollars("s3://hot/run", requests, LIST_PRICES) == pytest.approx(0.0054)
    assert request_dollars("/nvme/run", requests, LIST_PRICES) is None


def test_a_price_of_storage_alone_leaves_the_prices_of_requests() -> None:
    prices = {**LIST_PRICES, "s3://own": Price(0.001), "s3://own/dear": Price(0.001, 1, 0)}
    assert request_dollars("s3://own/run", Requests(puts=1000), prices) == pytest.approx(0.005)
    assert request_dollars("s3://own/dear", Requests(puts=1000), prices) == pytest.approx(1)


def test_a_large_file_is_put_in_parts() -> None:
    """Each rank also puts its fragment, and the leader the manifest."""
    assert requests_of_save(1, 16 * 2**20 - 1, 9).puts == 3
    assert requests_of_save(1, 16 * 2**20, 9).puts == 4 + 2
    assert requests_of_save(8, 8 * 2**20, 9).puts == 17
    assert requests_of_save(1, 9, 2500).lists == requests_of_save(1, 9, 9).lists + 2


def test_a_month_has_30_days() -> None:
    saves = SaveRequests(per_save=Requests(), interval_seconds=30)
    assert saves.saves_per_month == 30 * 24 * 120
    assert SaveRequests(per_save=Requests(), interval_seconds=0).saves_per_month == 0


def test_a_price_is_read_from_the_command_line() -> None:
    assert price_of("s3://a=b=0.02") == ("s3://a=b", Price(0.02))
    assert price_of("/lustre=0") == ("/lustre", Price(0.0))
    assert price_of("s3://a=0.02,0.005,0") == ("s3://a", Price(0.02, 0.005, 0.0))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.02",
        "s3://a",
        "s3://a=",
        "s3://a=x",
        "s3://a=-1",
        "a=nan",
        "a=1,2",
        "a=1,2,-3",
        "a=1,",
    ],
)
def test_another_text_is_no_price(text: str) -> None:
    with pytest.raises(ConfigError, match="give URL=DOLLARS"):
        price_of(text)

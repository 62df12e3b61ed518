"""What the storage of a tier costs a month."""

from __future__ import annotations

import pytest

from ckpt.errors import ConfigError
from ckpt.page.prices import LIST_PRICES, monthly_dollars, price_of


def test_the_longest_begin_of_the_url_has_the_price() -> None:
    prices = {**LIST_PRICES, "s3://cold": 0.001}
    assert monthly_dollars("s3://hot/run", 1000 * 10**9, prices) == pytest.approx(23)
    assert monthly_dollars("s3://cold/run", 1000 * 10**9, prices) == pytest.approx(1)
    assert monthly_dollars("/nvme/run", 1000 * 10**9, prices) is None


def test_a_price_is_read_from_the_command_line() -> None:
    assert price_of("s3://a=b=0.02") == ("s3://a=b", 0.02)
    assert price_of("/lustre=0") == ("/lustre", 0.0)


@pytest.mark.parametrize(
    "text", ["", "0.02", "s3://a", "s3://a=", "s3://a=x", "s3://a=-1", "a=nan"]
)
def test_another_text_is_no_price(text: str) -> None:
    with pytest.raises(ConfigError, match="give URL=DOLLARS"):
        price_of(text)

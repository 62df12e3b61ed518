"""What the storage of a tier costs a month, by a table of prices. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from ckpt.errors import ConfigError

_GIGABYTE: Final = 1e9
LIST_PRICES: Final[Mapping[str, float]] = {
    "s3://": 0.023,
    "gs://": 0.020,
    "gcs://": 0.020,
    "abfs://": 0.018,
    "az://": 0.018,
}
"""Dollars per gigabyte and month, by what the URL of a tier begins with: the list prices of the
standard class in the providers' first regions in the USA, for the first 50 TB (S3 Standard in
us-east-1, Cloud Storage Standard in us-central1, Azure Blob Hot with local redundancy), in 2026.
"""


def monthly_dollars(url: str, nbytes: int, prices: Mapping[str, float]) -> float | None:
    """Return what ``nbytes`` on a tier cost a month; None if the table has no price for its URL.

    The longest begin of the URL in ``prices`` counts. Requests and traffic are not included.
    """
    begins = [begin for begin in prices if url.startswith(begin)]
    return nbytes / _GIGABYTE * prices[max(begins, key=len)] if begins else None


def price_of(text: str) -> tuple[str, float]:
    """Return the begin of a URL and its price from a text such as ``s3://bucket=0.021``.

    Raises:
        ConfigError: The text has another form, or the price is negative or not finite.
    """
    url, _, number = text.rpartition("=")
    try:
        price = float(number)
    except ValueError:
        price = math.nan
    if not url or not 0 <= price < math.inf:
        raise ConfigError(
            f"{text!r} is no price: give URL=DOLLARS, per gigabyte and month, such as "
            "s3://bucket=0.021"
        )
    return url, price

"""What a tier costs a month, by a table of prices. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ckpt.errors import ConfigError
from ckpt.page.store_requests import Requests

_GIGABYTE: Final = 1e9
_PRICED_REQUESTS: Final = 1000
_PRICE_COUNT: Final = 3


@dataclass(frozen=True, slots=True)
class Price:
    """The prices of a store, in dollars.

    Attributes:
        storage: For a gigabyte and month.
        writes: For a thousand puts and listings; None if only ``storage`` is set.
        reads: For a thousand other requests but deletes, which are free; None as for ``writes``.
    """

    storage: float
    writes: float | None = None
    reads: float | None = None


_WRITE_PRICE: Final = 0.005
_READ_PRICE: Final = 0.0004
LIST_PRICES: Final[Mapping[str, Price]] = {
    "s3://": Price(0.023, _WRITE_PRICE, _READ_PRICE),
    "gs://": Price(0.020, _WRITE_PRICE, _READ_PRICE),
    "gcs://": Price(0.020, _WRITE_PRICE, _READ_PRICE),
    "abfs://": Price(0.018, _WRITE_PRICE, _READ_PRICE),
    "az://": Price(0.018, _WRITE_PRICE, _READ_PRICE),
}
"""The prices by what the URL of a tier begins with: the list prices of the standard class in the
providers' first regions in the USA, for the first 50 TB (S3 Standard in us-east-1, Cloud Storage
Standard in us-central1, Azure Blob Hot with local redundancy), in 2026.
"""


def monthly_dollars(url: str, nbytes: int, prices: Mapping[str, Price]) -> float | None:
    """Return what ``nbytes`` on a tier cost a month; None if the table has no price for its URL.

    The longest begin of the URL in ``prices`` counts. Requests and traffic are not included.
    """
    price = _price_of(url, prices)
    return None if price is None else nbytes / _GIGABYTE * price.storage


def request_dollars(url: str, requests: Requests, prices: Mapping[str, Price]) -> float | None:
    """Return what ``requests`` to a tier cost; None if the table has no price for its URL.

    The longest begin of the URL in ``prices`` that has prices of requests counts.
    """
    table = {begin: price for begin, price in prices.items() if price.writes is not None}
    price = _price_of(url, table)
    if price is None:
        return None
    writes = (requests.puts + requests.lists) * (price.writes or 0)
    reads = (requests.gets + requests.heads) * (price.reads or 0)
    return (writes + reads) / _PRICED_REQUESTS


def _price_of(url: str, prices: Mapping[str, Price]) -> Price | None:
    begins = [begin for begin in prices if url.startswith(begin)]
    return prices[max(begins, key=len)] if begins else None


def price_of(text: str) -> tuple[str, Price]:
    """Return the begin of a URL and its prices from a text such as ``s3://bucket=0.021``, or
    ``s3://bucket=0.021,0.005,0.0004`` with the prices of requests.

    Raises:
        ConfigError: The text has another form, or a price is negative or not finite.
    """
    url, _, words = text.rpartition("=")
    try:
        numbers = [float(word) for word in words.split(",")]
    except ValueError:
        numbers = []
    if (
        not url
        or len(numbers) not in (1, _PRICE_COUNT)
        or not all(0 <= number < math.inf for number in numbers)
    ):
        raise ConfigError(
            f"{text!r} is no price: give URL=DOLLARS, per gigabyte and month, such as "
            "s3://bucket=0.021, or also per thousand puts and listings, and per thousand other "
            "requests: s3://bucket=0.021,0.005,0.0004"
        )
    return url, Price(*numbers)

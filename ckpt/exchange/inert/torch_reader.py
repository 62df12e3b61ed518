"""Read a file of ``torch.save`` without code: by ``torch.load(weights_only=True)`` alone."""

from __future__ import annotations

import errno
import io
import re
from contextlib import nullcontext
from typing import Any, Final

import torch

from ckpt.errors import CkptError, ConfigError, IntegrityError, UnsupportedValue
from ckpt.exchange.inert.file_kind import describe_file
from ckpt.exchange.inert.input_limits import check_nesting, check_regular, check_torch_file

_ADVICE: Final = (
    "only tensors and plain values are taken: where you trust the file, load it with "
    "torch.load(..., weights_only=False) and save the state_dict() of what is in it"
)


def load(path: str | io.BytesIO, name: str = "") -> Any:
    """Return the content of a file of ``torch.save``, whose tensors are mapped from the file.

    Args:
        path: The path of the file, or its bytes.
        name: The name of the file in errors.

    Raises:
        UnsupportedValue: The file contains objects that only pickle could load.
        IntegrityError: The file is missing or damaged.
        ConfigError: The file cannot be read, or is of another kind.
    """
    name = name or str(path)
    try:
        with (
            open(check_regular(path), "rb") if isinstance(path, str) else nullcontext(path) as file
        ):
            check_torch_file(file, name)
            file.seek(0)
        try:
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=isinstance(path, str)
            )
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            # Files of torch before 1.6 cannot be mapped.
            content = torch.load(path, map_location="cpu", weights_only=True)
        check_nesting(content, name)
        return content
    except CkptError:
        raise
    except FileNotFoundError:
        raise IntegrityError(f"{name} is missing") from None
    except OSError as error:
        if error.errno == errno.EINVAL:  # ``mmap`` raises this error for a file that is cut short
            raise IntegrityError(
                f"{name} is not a whole file of torch.save: it was cut short"
            ) from None
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # noqa: BLE001
        # Damaged bytes can cause any error in the unpickler or the zip reader.
        text = str(error)
        if isinstance(path, str) and (kind := describe_file(path)):
            raise ConfigError(f"{name} is not a file of torch.save, but {kind}") from None
        if "weights_only" in text or "Unsupported" in text or "WeightsUnpickler" in text:
            match = re.search(r"GLOBAL ([\w.]+)", text)
            description = (
                f"pickle of more than tensors ({match[1]})"
                if match
                else "pickle of more than tensors"
            )
            raise UnsupportedValue(name, description, _ADVICE) from None
        raise IntegrityError(
            f"{name} is not a whole file of torch.save: "
            f"{(text.splitlines() or ['it is empty'])[0][:200]}"
        ) from None


def has_bytes(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` is an ordinary strided tensor in host memory. A save refuses
    sparse, quantized and nested tensors, and tensors on the meta device.
    """
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return is_plain and tensor.device.type == "cpu"

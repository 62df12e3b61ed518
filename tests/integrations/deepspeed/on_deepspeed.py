"""The marks of tests that need DeepSpeed."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

MARKS = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(900),  # DeepSpeed builds an extension of its own the first time
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="deepspeed is not installed: pip install -e '.[deepspeed]'",
    ),
    pytest.mark.skipif(
        shutil.which("c++") is None, reason="deepspeed builds its CPU backend with a C++ compiler"
    ),
]

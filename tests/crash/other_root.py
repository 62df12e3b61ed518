"""Do what ``increments.py`` does, with a base in another root."""

from __future__ import annotations

from tests.crash.increments import main, save_base

if __name__ == "__main__":
    main(save_base)

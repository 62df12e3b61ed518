"""Do what ``increments.py`` does, with a base in another root."""

from __future__ import annotations

from tests.crash.increments import main

if __name__ == "__main__":
    main(has_base=True)

"""The conditions of a run."""

from __future__ import annotations

import subprocess
from pathlib import Path

from bench.machine import commit_of


def test_only_reports_of_the_bench_leave_a_commit_clean(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    code, report = tmp_path / "bench" / "code.py", tmp_path / "bench" / "results" / "raw.md"
    report.parent.mkdir(parents=True)
    code.write_text("1\n")
    report.write_text("1\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "--short=10", "HEAD")
    report.write_text("2\n")
    assert commit_of(str(code.parent)) == commit
    code.write_text("2\n")
    assert commit_of(str(code.parent)) == f"{commit}-dirty"


def test_a_folder_outside_of_git_has_no_commit(tmp_path: Path) -> None:
    assert commit_of(str(tmp_path)) == "unknown"

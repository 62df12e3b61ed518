from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt import CheckpointManager
from ckpt.cli import output
from ckpt.cli.main import main
from ckpt.errors import StorageError
from ckpt.storage.api import StorageBackend
from tests.checkpoints import Written, write_checkpoint
from tests.cli.conftest import ARRAYS, Cli
from tests.kit.marks import torture
from tests.processes import fork

REPO = Path(__file__).resolve().parents[2]


def run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return a shell command in which ``ckpt`` is the real program."""
    path = os.pathsep.join([str(REPO), str(REPO / "backends")])
    return subprocess.run(
        [
            "bash",
            "-c",
            f'ckpt() {{ "{sys.executable}" -m ckpt.cli.main "$@"; }}; {command}',
        ],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


ONE_AFTER_THE_OTHER = """
import sys
from ckpt.cli.main import main
for line in sys.argv.pop().splitlines():
    sys.argv[1:] = line.split()
    code = main()
    assert code == 0, line
    assert "ckpt.errors" in sys.modules
    assert "torch" not in sys.modules, line
"""


def test_no_verb_imports_torch(steps: dict[int, Written]) -> None:
    calls = ["--help", "ls", "show 100", "verify", "restore", "restore --to there"]
    calls += ["copy runs there", "finalize runs", "prune --keep-last 1 --dry-run"]
    calls += ["diff runs --step 100 --step 200"]
    path = os.pathsep.join([str(REPO), str(REPO / "backends")])
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER, "\n".join(calls)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_help_does_not_import_what_only_verbs_need(cli: Cli) -> None:
    done = run("ckpt --help", PYTHONPROFILEIMPORTTIME="1")
    assert "Exit codes" in done.stdout
    assert " ckpt.cli\n" in done.stderr
    for slow in ("numpy", "msgspec", "rich.console", "ckpt.catalog"):
        assert f" {slow}\n" not in done.stderr


VERBS = ("restore", "ls", "show", "verify", "diff", "copy", "prune", "finalize", "export", "import")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_examples(cli: Cli, verb: str) -> None:
    ran = cli(verb, "--help")
    assert ran.code == 0
    assert f"Examples:\n    ckpt {verb}" in ran.out
    assert "\\b" not in ran.out


@pytest.mark.parametrize(
    ("verb", "usage"),
    [
        ("verify", "[ROOT]... [STEP]"),
        ("ls", "[ROOT]..."),
        ("prune", "[ROOT]"),
        ("copy", "[SOURCE] DEST"),
        ("diff", "[A] [B] [STEP] [STEP]"),
    ],
)
def test_the_usage_line_has_the_arguments_as_the_help_names_them(
    cli: Cli, verb: str, usage: str
) -> None:
    expected = f"Usage: ckpt {verb} [OPTIONS] {usage}\n"
    assert expected in cli(verb, "--help").out
    assert expected in cli(verb, "--nope").err


@pytest.mark.parametrize("args", [["nope"], ["ls", "--nope"], ["copy"], ["show", "-1"]])
def test_a_wrong_call_exits_with_2(cli: Cli, args: list[str]) -> None:
    ran = cli(*args)
    assert ran.code == 2
    assert ran.out == ""
    again = cli(*args, "--json")
    assert again.code == 2
    assert again.json["message"] in ran.err
    assert again.err == ran.err


def test_a_wrong_call_tells_no_secret_of_a_url(cli: Cli) -> None:
    for more in ([], ["--json"]):
        ran = cli("ls", "--s3://KEY:SECRET@bucket/run", *more)
        assert ran.code == 2
        assert "s3://***@bucket/run" in ran.err
        assert "SECRET" not in ran.err + ran.out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["finalize", "²", "--root", "runs"], "² and --root runs are two places"),
        (["prune", "--keep-best", "loss:min:²"], "--keep-best loss:min:²: write METRIC:MODE or"),
        (["prune", "--keep-best", "loss"], "such as loss:min, or accuracy:max:3"),
        (
            ["export", "runs", "x", "--format", "safetensors", "--max-shard-size", "9" * 400],
            "such as '200GB'",
        ),
    ],
)
def test_a_number_that_is_none_is_told(
    cli: Cli, steps: dict[int, Written], args: list[str], expected: str
) -> None:
    ran = cli(*args)
    assert ran.code == 2
    assert expected in ran.err


def test_what_an_output_has_no_letters_for_is_escaped(cli: Cli, backend: StorageBackend) -> None:
    write_checkpoint(backend, 1, {"größe": ARRAYS["count"]}, tree={"who": "naïve"})
    done = run(
        "ckpt show 2>err; ckpt show --json 2>>err; cat err",
        PYTHONIOENCODING="ascii",
    )
    table, _, rest = done.stdout.partition("\n{")
    assert r"gr\xf6\xdfe  float64" in table
    assert r"'na\xefve'" in table
    found = json.loads("{" + rest)
    assert found["tensors"][0]["name"] == "größe"
    assert found["tree"]["who"] == "naïve"


@pytest.mark.parametrize(
    ("root", "code", "expected"),
    [
        ("nope://x", 2, "no backend for 'nope://x'"),
        ("ckpt.toml", 2, "ckpt.toml ROOT --step N` makes a step of a file"),
        ("memory://none", 7, "it is empty, or does not exist"),
    ],
)
def test_a_wrong_root_is_told_in_one_line(cli: Cli, root: str, code: int, expected: str) -> None:
    Path("ckpt.toml").write_text("")
    ran = cli("ls", "--root", root)
    assert ran.code == code
    assert ran.err.count("\n") == 1
    assert expected in ran.err
    assert ran.out == ""


def test_a_missing_extra_names_what_to_install(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    ran = cli("ls", "--root", "gs://bucket/run", "--json")
    assert ran.code == 2
    assert ran.json["error"] == "MissingExtra"
    assert "pip install 'ckpt-stream[gcs]'" in ran.json["message"]


def test_without_a_root_all_three_ways_are_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_ROOT")
    ran = cli("ls")
    assert ran.code == 2
    assert all(way in ran.err for way in ("--root", "CKPT_ROOT", "ckpt.toml"))


def test_a_wrong_ckpt_toml_is_told(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_ROOT")
    Path("ckpt.toml").write_text("rot = 'runs'")
    ran = cli("ls")
    assert ran.code == 2
    assert ran.err == "error: ckpt.toml: rot is not a setting: did you mean root?\n"


def test_credentials_are_never_printed(cli: Cli) -> None:
    for url in (
        "s4://user:hunter2@host/x",
        "s4://h/x?X-Amz-Signature=hunter2&b=1",
        "s4://h/x?access_key=hunter2",
    ):
        for flags in ([], ["--json"]):
            ran = cli("ls", "--root", url, *flags)
            assert ran.code == 2
            assert "hunter2" not in ran.out + ran.err


def test_a_root_without_permission_exits_with_3(
    cli: Cli, steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    cli("ls")
    with monkeypatch.context() as patch:  # chmod would not stop root, which CI may run as
        patch.setattr("os.scandir", forbidden)
        ran = cli("ls")
    assert ran.code == 3
    assert ran.err.startswith("error: access denied: ")
    assert str(Path("runs").absolute()) in ran.err


def test_ctrl_c_exits_with_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckpt.cli.ls.Inventory.look", interrupt)
    ran = cli("ls")
    assert ran.code == 130
    assert ran.err.strip() == "interrupted"


def test_a_bug_of_ours_is_one_line_and_a_traceback_on_demand(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oops\nand more")

    monkeypatch.setattr("ckpt.cli.ls.Inventory.look", burst)
    ran = cli("ls")
    assert ran.code == 1
    assert ran.err == (
        "error: internal error: ZeroDivisionError: oops\\nand more (run with CKPT_DEBUG=1 for the "
        "traceback)\n"
    )
    monkeypatch.setenv("CKPT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli("ls")


def test_a_reader_that_has_enough_is_no_error(steps: dict[int, Written]) -> None:
    done = run(
        "for n in 1 2; do ckpt show 100 --json 2>err | head -c 1; echo ${PIPESTATUS[0]}; "
        "cat err; done"
    )
    assert done.stdout == "{0\n" * 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_999, "10.0 kB"), (99_990, "100 kB"), (999_600, "1.00 MB"), (1_234_567_890, "1.23 GB"), (5 * 10**18, "5.00 EB"), (5 * 10**21, "5000 EB")],  # noqa: E501
)  # fmt: skip
def test_sizes_have_three_digits(nbytes: int, text: str) -> None:
    assert output.size(nbytes) == text


def test_ranks_are_told_as_ranges() -> None:
    assert output.ranges([7, 0, 1, 2, 2]) == "0-2, 7"
    assert output.ranges([]) == ""


def test_a_time_out_of_any_calendar_does_no_harm() -> None:
    assert output.moment(1e30) == "?"
    assert output.moment_utc(1e30) is None


def test_the_version_is_printed(cli: Cli) -> None:
    from ckpt import __version__

    ran = cli("--version")
    assert (ran.code, ran.out) == (0, f"ckpt {__version__}\n")


@pytest.mark.parametrize("shell", ["bash", *torture("zsh", "fish")])
def test_commands_and_options_are_completed(shell: str) -> None:
    words = {"COMP_WORDS": "ckpt ver", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "ckpt ver"}
    done = run(
        "ckpt", _CKPT_COMPLETE=f"complete_{shell}", _TYPER_COMPLETE_FISH_ACTION="get-args", **words
    )
    assert "verify" in done.stdout
    assert "restore" not in done.stdout
    script = run("ckpt", _CKPT_COMPLETE=f"source_{shell}")
    assert "_CKPT_COMPLETE" in script.stdout


def test_a_slow_or_small_copy_has_figures_that_say_something() -> None:
    assert output.rate(25_200, 0.0034) == "7.41 MB/s"
    assert output.duration(0.0034) == "3.4 ms"
    assert output.duration(12.3) == "12.30 s"


def test_a_reader_that_leaves_in_the_midst_of_a_long_table_is_no_error(
    backend: StorageBackend,
) -> None:
    write_checkpoint(backend, 1, {f"layer.{n}.weight": ARRAYS["count"] for n in range(3_000)})
    done = run("ckpt show runs 1 2>err | head -1; echo ${PIPESTATUS[0]}; cat err")
    assert done.stdout == "step 1\n0\n"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("show runs last", "a step is a number, latest, latest~3"),
        ("copy runs", "give both, SOURCE first"),
        ("export runs", "give both, SOURCE first"),
        ("copy runs 100 there", "a step is given as --step STEP"),
        ("diff runs 100", "or two steps"),
        ("diff runs 100 200 300", "leave the others out"),
        ("restore runs other", "other does not exist"),
    ],
)
def test_a_word_in_the_wrong_place_is_told(
    cli: Cli, steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch, call: str, expected: str
) -> None:
    monkeypatch.delenv("CKPT_ROOT")
    ran = cli(*call.split())
    assert expected in ran.err
    assert ran.code == (0 if call.startswith("restore") else 2)


def test_diff_takes_steps_as_arguments(cli: Cli, steps: dict[int, Written]) -> None:
    assert cli("diff", "runs", 100, "latest").out == cli("diff", "--step", 100, "--step", 300).out


@pytest.mark.parametrize(
    "call",
    [
        "ls runs",
        "--help",
        *torture(
            "show runs --json", "ls --help", "--version", "ls nope --json", "ls --nope --json"
        ),
    ],
)
def test_a_full_disk_below_the_output_is_told_in_one_line(
    steps: dict[int, Written], call: str
) -> None:
    done = run(f"ckpt {call} >/dev/full 2>err; echo $?; cat err")
    code, *reported = done.stdout.splitlines()
    assert code == "3"
    assert reported[-1] == "error: storage failed: 'standard output' (No space left on device)"
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("call", "code"), [("ls nope", 7), *torture(("ls runs", 0), ("ls --nope", 2))]
)
def test_an_error_that_cannot_be_told_has_its_exit_code(
    steps: dict[int, Written], call: str, code: int
) -> None:
    assert run(f"ckpt {call} >out 2>/dev/full; echo $?").stdout == f"{code}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_an_option_that_takes_one_value_is_given_once(cli: Cli, verb: str) -> None:
    """click would take the last value of each of these options."""
    from ckpt.cli.main import load_command

    options: list[Any] = [
        each for each in load_command(verb).params if each.param_type_name == "option"
    ]
    options = [each for each in options if not each.is_flag]
    assert options
    for option in options:
        value = "safetensors" if "--format" in option.opts else "5"
        name = option.opts[-1]
        ran = cli(verb, "a", "b", name, value, name, value)
        assert (f"{name} is given 2 times: give it once" in ran.err) == (not option.multiple), (
            ran.err
        )
        assert option.multiple or ran.code == 2


def test_a_flag_may_be_given_twice(cli: Cli, steps: dict[int, Written]) -> None:
    assert cli("verify", "--all", "--all").code == 0


def on_terminal(columns: int, *args: object) -> list[str]:
    """Return what ``ckpt`` prints on a terminal of this many columns."""
    ear, mouth = os.openpty()

    def command() -> None:
        os.dup2(mouth, 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        os.environ.update(COLUMNS=str(columns), TERM="xterm")
        sys.argv[:] = ["ckpt", *map(str, args)]
        assert main() == 0

    child = fork(command)
    os.close(mouth)
    said = b""
    try:
        while part := os.read(ear, 65536):
            said += part
    except OSError:  # Linux reports like this that the other end is closed
        pass
    os.close(ear)
    assert os.waitpid(child, 0)[1] == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", said.decode()).replace("\r\n", "\n").splitlines()


def test_tables_fit_a_terminal_of_80_columns(cli: Cli, tmp_path: Path) -> None:
    from ckpt.storage.registry import open_backend

    places = [f"runs/experiments/2026-11/llama-7b-finetune-number-{number}" for number in range(4)]
    for place in places:
        for step in (100, 123456):
            metadata = {"note": "a note of the user " * 5}
            write_checkpoint(open_backend(place), step, ARRAYS, metadata=metadata)
    one = on_terminal(80, "ls", places[0])
    assert len(one) == 3  # a row is a line
    several = on_terminal(80, "ls", *places)
    assert several[:4] == [
        f"  tier {n + 1}  {Path(place).absolute()}" for n, place in enumerate(places)
    ]
    assert several[4] == ""
    assert " ".join(several[5].split()) == "step committed at ranks tier 1 tier 2 tier 3 tier 4"
    assert [row.split()[0] for row in several[6:]] == ["100", "123456"]
    assert all(len(line) <= 80 for line in [*one, *several[5:]])
    verified = on_terminal(80, "verify", *places)
    assert [row.split()[:3] for row in verified[-4:]] == [
        ["tier", str(n), "123456"] for n in range(1, 5)
    ]
    wide = on_terminal(200, "ls", places[0])
    assert "note=a note of the user a note" in wide[1]
    narrow = on_terminal(90, "ls", places[0])
    assert narrow[1].endswith("...")


def test_a_missing_word_is_named_with_the_words_that_there_are(cli: Cli) -> None:
    ran = cli("agent")
    assert ran.code == 2
    assert ran.err.splitlines()[-3:] == ["  status,", "  stop,", "  prefetch"]


def test_a_root_that_no_folder_can_be_made_for_says_what_to_give() -> None:
    with (
        pytest.raises(StorageError, match="cannot be made there, so give a folder on a disk"),
        CheckpointManager("/proc/nowhere") as manager,
    ):
        manager.save({"a": 1}, 1)

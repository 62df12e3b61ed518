"""Rules of the project that no linter checks.

They concern layers, sizes, what is imported when, and that nothing is evaluated.
"""

from __future__ import annotations

import ast
import os
import re
import resource
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ckpt.errors import NoCheckpoint

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = (ROOT / "ckpt", ROOT / "backends")
MAX_FILE_LINES = 500
MAX_BODY_LINES = 50
MAX_CLASS_STATEMENTS = 242
"""This number only shrinks."""
HELP_MODULES = 230
"""The number of modules that ``ckpt --help`` may import. Python itself imports 26 of them. With 206
modules the command takes between 0.15 and 0.25 s of processor time.
"""

# Modules that turn bytes into code or into objects of any class.
UNSAFE_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
}
UNSAFE_BUILTINS = {"eval", "exec"}


def sources() -> list[Path]:
    return sorted(path for top in PRODUCT for path in top.rglob("*.py"))


@cache
def nodes(code: str) -> tuple[ast.AST, ...]:
    """Return the nodes of a syntax tree in the order of ``ast.walk``, the module first.

    Many tests look through all sources.
    """
    return tuple(ast.walk(ast.parse(code)))


@pytest.fixture(scope="module", autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    nodes.cache_clear()


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def bare_python(
    *args: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter that finds the two source roots, installed or not.

    It has nothing that pytest has imported.
    """
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")]),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# -- layers and sizes ------------------------------------------------------------------------------


def test_the_storeys_hold() -> None:
    lint_imports = (
        "import sys; from importlinter.cli import lint_imports_command as c; "
        "sys.exit(c(['--no-cache', '--no-logo']))"
    )
    done = bare_python("-c", lint_imports, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def docstring_of(node: ast.AST) -> ast.Expr | None:
    match getattr(node, "body", None):
        case [ast.Expr(value=ast.Constant(value=str())) as first, *_]:
            return first
    return None


def code_lines(path: Path) -> int:
    """Count the lines of a file.

    Docstrings do not count, so that no developer shortens them for the bound.
    """
    text = path.read_text()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [docstring_of(node) for node in nodes(text) if isinstance(node, kinds)]
    free = sum((node.end_lineno or 0) - node.lineno + 1 for node in docstrings if node)
    return len(text.splitlines()) - free


def test_no_file_is_longer_than_500_lines() -> None:
    lengths = {name_of(path): code_lines(path) for path in sources()}
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines from the first statement to the last, without a docstring."""
    body = function.body
    if (
        isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    ):
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_no_function_body_is_longer_than_50_lines() -> None:
    too_long = {
        f"{name_of(path)}:{node.lineno} {node.name}": body_lines(node)
        for path in sources()
        for node in nodes(path.read_text())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and body_lines(node) > MAX_BODY_LINES
    }
    assert too_long == {}


def statements(node: ast.AST) -> int:
    """Count the statements in ``node``, without docstrings and ``node`` itself."""
    inside = [child for child in ast.walk(node) if isinstance(child, ast.stmt)]
    texts = sum(
        isinstance(child, ast.Expr)
        and isinstance(child.value, ast.Constant)
        and isinstance(child.value.value, str)
        for child in inside
    )
    return len(inside) - texts - isinstance(node, ast.stmt)


def test_statements_are_counted_without_docstrings() -> None:
    code = 'class A:\n    "Text."\n    x = 1\n    def f(self):\n        "Text."\n        return 1'
    assert statements(ast.parse(code).body[0]) == 3


def test_no_class_is_larger_than_its_bound() -> None:
    sizes = {
        f"{name_of(path)} {node.name}": statements(node)
        for path in sources()
        for node in nodes(path.read_text())
        if isinstance(node, ast.ClassDef)
    }
    assert len(sizes) > 500
    assert {name: size for name, size in sizes.items() if size > MAX_CLASS_STATEMENTS} == {}


# -- parameters, cycles, imports inside of functions, private names --------------------------------

MAX_PARAMETERS = 6
ENTRY_POINTS = {
    "ckpt/manager.py restore",
    "ckpt/manager.py save",
    "ckpt/integrations/lightning/callback.py __init__",
}
ENTRY_POINTS |= {"ckpt/exchange/exports/hf_export_observer.py __init__"}
"""Public functions, whose parameters are a user's settings. Commands are entry points too."""

OPTIONAL_PACKAGES = {"accelerate", "aiobotocore", "botocore", "deepspeed", "gcsfs", "google"}
OPTIONAL_PACKAGES |= {"adlfs", "azure", "obstore", "s3fs"}
LATE_IMPORTS = {
    "backends/ckpt_backends/azure.py": {"fsspec"},
    "backends/ckpt_backends/file_server/backend.py": {"fsspec"},
    "backends/ckpt_backends/fsspec_bridge.py": {"fsspec"},  # slow: only foreign schemes need it
    "backends/ckpt_backends/gcs/backend.py": {"fsspec"},
    "ckpt/agent/__main__.py": {"ckpt"},  # NumPy: only its workers need it
    "ckpt/cli/adopt.py": {"ckpt"},  # torch: --help does not need it
    "ckpt/cli/diff.py": {"ckpt"},  # torch: only --values needs it
    "ckpt/cli/export.py": {"ckpt"},  # torch: --help does not need it
    "ckpt/cli/import_.py": {"ckpt"},
    "ckpt/cli/main.py": {"ckpt", "importlib", "os"},  # --help needs none of it
    "ckpt/cli/serve.py": {"ckpt"},  # torch: only a comparison that reads needs it
    "ckpt/codec/registry.py": {"importlib"},  # slow: only foreign codecs need it
    "ckpt/cli/output.py": {"rich"},  # only terminals show a bar
    "ckpt/model/record_encoding.py": {"zstandard"},
    "ckpt/storage/registry.py": {"fsspec", "importlib"},  # slow: only foreign schemes need it
    "ckpt/storage/testing/__init__.py": {"ckpt"},  # the suite needs pytest
}
"""Imports inside of functions, besides optional packages.

This list only shrinks.
"""

FOREIGN_PRIVATES = {
    "backends/ckpt_backends/azure.py",  # how fsspec reads a URL
    "backends/ckpt_backends/file_server/backend.py",
    "backends/ckpt_backends/file_server/sftp.py",  # answers to writes, which paramiko drops
    "backends/ckpt_backends/file_server/smb.py",  # how long the client waits
    "ckpt/torch_private.py",
    "ckpt/coordination/torch_store.py",
    "ckpt/integrations/accelerate.py",
    "ckpt/integrations/deepspeed/zero.py",
    "ckpt/integrations/deepspeed/engine.py",
    "ckpt/integrations/lightning/loop_position.py",
    "ckpt/integrations/lightning/strategy.py",
    "backends/ckpt_backends/gcs/backend.py",
    "backends/ckpt_backends/s3/backend.py",
    "backends/ckpt_backends/s3/bulk_client.py",
}
"""Files that use private names of torch, DeepSpeed, Lightning or a client, which have no public
ones for it.
"""
PRIVATES = {"_replace", "_fields", "_exit", "_getframe", "_register_atexit", "_foreach_copy_"}
"""Names of Python's and torch's own that any file may use."""
# see ckpt/torch_private.py
PRIVATES |= {"_version", "_local_tensor", "_spec", "_modules", "_save_to_state_dict"}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "backends" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count what a caller gives; ``self`` and ``cls`` do not count."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return (
        len(names)
        - (names[:1] in (["self"], ["cls"]))
        + (given.vararg is not None)
        + (given.kwarg is not None)
    )


def test_no_function_has_more_than_six_parameters() -> None:
    found = {
        f"{name_of(path)} {node.name}"
        for path in sources()
        for node in nodes(path.read_text())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and parameters(node) > MAX_PARAMETERS
    }
    commands = {each for each in found if each.startswith("ckpt/cli/") and " _" not in each}
    assert found - commands - ENTRY_POINTS == set()


def imports(code: str, modules: set[str]) -> Iterator[str]:
    """Return our modules that a file imports, for type checkers and inside of functions too."""
    for node in nodes(code):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (whole & modules) or ({node.module} & modules)


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return groups of modules in which each imports each, directly or by way of others."""

    def reached(start: str) -> set[str]:
        seen, left = set[str](), [start]
        while left:
            for other in graph[left.pop()] - seen:
                seen.add(other)
                left.append(other)
        return seen

    reach = {module: reached(module) for module in graph}
    return {
        frozenset(other for other in found if module in reach[other])
        for module, found in reach.items()
        if module in found
    }


def test_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set[str](), "e": {"e"}}
    assert cycles(graph) == {frozenset("abc"), frozenset("e")}


def test_no_modules_import_each_other() -> None:
    codes = {module_of(path): path.read_text() for path in sources()}
    graph = {module: {*imports(code, {*codes})} - {module} for module, code in codes.items()}
    assert sum(map(len, graph.values())) > 500
    assert cycles(graph) == set()


def late_imports(code: str) -> Iterator[str]:
    """Return the top-level packages that are imported inside of functions."""
    functions = (n for n in nodes(code) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    for node in (node for function in functions for node in ast.walk(function)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_imports_inside_of_functions_are_of_optional_packages() -> None:
    found = {
        name_of(path): late
        for path in sources()
        if (late := set(late_imports(path.read_text())) - OPTIONAL_PACKAGES)
    }
    assert {
        name: late for name, late in found.items() if late - LATE_IMPORTS.get(name, set())
    } == {}


def private_uses(code: str) -> Iterator[str]:
    """Return each use of a private name of another object, as 'line: what'."""
    for node in nodes(code):
        if (
            not isinstance(node, ast.Attribute)
            or not node.attr.startswith("_")
            or node.attr.startswith("__")
        ):
            continue
        match node.value:
            case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
                continue
            case _ if node.attr not in PRIVATES:
                yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "code", ["other._lock", "self.other._lock", "f()._lock = 1", "del type(x)._y"]
)
def test_uses_of_private_names_are_found(code: str) -> None:
    assert list(private_uses(code))


def test_no_object_uses_private_names_of_another() -> None:
    found = {name_of(path): list(private_uses(path.read_text())) for path in sources()}
    assert {
        name: uses for name, uses in found.items() if uses and name not in FOREIGN_PRIVATES
    } == {}


def private_imports(code: str) -> Iterator[str]:
    """Return each private name of torch that is imported, as 'line: what'."""
    for node in nodes(code):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *parts = name.split(".")
            if package == "torch" and any(part.startswith("_") for part in parts):
                yield f"{node.lineno}: {name}"


@pytest.mark.parametrize(
    "code", ["import torch._C", "from torch._inductor import config", "from torch.fx import _graph"]
)
def test_imports_of_private_names_are_found(code: str) -> None:
    assert list(private_imports(code))


def test_private_names_of_torch_are_used_in_one_file() -> None:
    found = {name_of(path): list(private_imports(path.read_text())) for path in sources()}
    assert {name: uses for name, uses in found.items() if uses} == {}


# -- nothing is unpickled or evaluated -------------------------------------------------------------


def loads_weights_only(node: ast.AST) -> bool:
    """Return whether a node is a call that says ``weights_only=True``.

    Torch then makes tensors and plain values, and nothing else.
    """
    return isinstance(node, ast.Call) and any(
        keyword.arg == "weights_only"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is True
        for keyword in node.keywords
    )


def unsafe_uses(code: str) -> Iterator[str]:
    """Return each place that could run what a checkpoint says, as 'line: what'."""
    safe = {
        id(node.func)
        for node in nodes(code)
        if isinstance(node, ast.Call) and loads_weights_only(node)
    }
    for node in nodes(code):
        if id(node) in safe:
            continue
        match node:
            case ast.Import(names=names):
                found = [
                    alias.name for alias in names if alias.name.split(".")[0] in UNSAFE_MODULES
                ]
            case ast.ImportFrom(module=str(module), names=names) if (
                module.split(".")[0] in UNSAFE_MODULES
            ):
                found = [module]
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
                found = [f"{module}.load" for alias in names if alias.name == "load"]
            case ast.Call(func=ast.Name(id=name)) if name in UNSAFE_BUILTINS:
                found = [name]
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                found = ["torch.load"]
            case ast.Attribute(value=ast.Attribute(attr="serialization"), attr="load"):
                found = ["torch.serialization.load"]
            case ast.Attribute(value=ast.Name(id="builtins"), attr=name) if name in UNSAFE_BUILTINS:
                found = [f"builtins.{name}"]
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                found = ["allow_pickle=True"]
            case _:
                continue
        yield from (f"{getattr(node, 'lineno', '?')}: {what}" for what in found)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "import dill._dill",
        "def f(path):\n    import cloudpickle\n",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "torch.load(path, **{'weights_only': True})",
        "load = torch.load",
        "from torch import load",
        "from torch.serialization import load as read",
        "torch.serialization.load(path)",
        "eval(text)",
        "builtins.exec(text)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_scan_finds(code: str) -> None:
    assert list(unsafe_uses(code))


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "executor.exec",
        "json.load(file)",
        "np.load(path, allow_pickle=False)",
        "torch.load(path, mmap=True, weights_only=True)",
        "'import pickle'",
    ],
)
def test_the_scan_lets_pass(code: str) -> None:
    assert not list(unsafe_uses(code))


def test_nothing_is_unpickled_or_evaluated() -> None:
    assert {
        name_of(path): found for path in sources() if (found := list(unsafe_uses(path.read_text())))
    } == {}


# -- what an import costs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [
        "ckpt",
        "ckpt.cli.main",
        "ckpt.storage.registry",
        "ckpt_backends",
        "ckpt_backends.folder.posix",
    ],
)
def test_importing_does_not_import_torch(module: str) -> None:
    done = bare_python("-c", f"import sys, {module}; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def test_the_agent_imports_only_what_it_needs_while_it_waits() -> None:
    done = bare_python("-c", "import sys, ckpt.agent.__main__; print('numpy' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


RUN_CLI = """
import sys
from ckpt.cli.main import main
try:
    code = main()
except SystemExit as error:
    code = error.code
print("torch imported:", "torch" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


def run_cli(*args: str, root: Path) -> subprocess.CompletedProcess[str]:
    return bare_python("-c", RUN_CLI, *args, CKPT_ROOT=str(root))


def test_ls_of_an_empty_folder_does_not_import_torch(tmp_path: Path) -> None:
    done = run_cli("ls", root=tmp_path)
    assert done.returncode in (0, NoCheckpoint.exit_code), done.stderr
    assert "torch imported: False" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one checkpoint, step 1."""
    import torch

    from ckpt import CheckpointManager

    root = tmp_path_factory.mktemp("root")
    with CheckpointManager(str(root)) as manager:
        manager.save({"w": torch.ones(3), "epoch": 4}, step=1)
    return root


@pytest.mark.torture  # tests/cli/test_main.py takes all verbs in one process
@pytest.mark.parametrize("command", ["ls", "show 1", "verify", "restore --latest --to {to}"])
def test_the_command_line_does_not_import_torch(saved: Path, tmp_path: Path, command: str) -> None:
    done = run_cli(*command.format(to=tmp_path / "to").split(), root=saved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch imported: False" in done.stderr


def test_help_imports_few_modules(tmp_path: Path) -> None:
    command = ["-X", "importtime", "-m", "ckpt.cli.main", "--help"]
    done = bare_python(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "restore" in done.stdout
    imported = re.findall(r"^import time: .*\| +(\S+)$", done.stderr, re.MULTILINE)
    assert "ckpt.cli" in imported
    assert len(imported) <= HELP_MODULES, imported


def test_help_takes_little_more_processor_time_than_the_libraries_that_print_it() -> None:
    """A ratio, since machines differ: it is 1.3, with 0.2 s for the libraries."""
    help_of_ckpt = ("-m", "ckpt.cli.main", "--help")
    libraries = ("-c", "import typer.main, rich.console")
    pairs = [(processor_seconds(*help_of_ckpt), processor_seconds(*libraries)) for _ in range(3)]
    assert statistics.median(one / other for one, other in pairs) < 1.6, pairs


def processor_seconds(*args: str) -> float:
    """Return the processor time of an interpreter with these arguments."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = bare_python(*args)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_mypy_checks_every_module() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert [each["module"] for each in settings["overrides"] if "ignore_errors" in each] == []
    assert not {"ignore_errors", "exclude"} & set(settings)


# -- what decides whether a step is a checkpoint ---------------------------------------------------

STEP_FILES = "ckpt/coordination/step_files.py"
OTHER_DELETIONS = {
    "ckpt/root/pins.py": "pins",
    "ckpt/catalog/rollbacks.py": "rollbacks",
    "ckpt/catalog/watching.py": "the records of watchers",
    "ckpt/cli/pin.py": "pins",
    "ckpt/root/claim_marker.py": "claim markers",
    "ckpt/root/owner.py": "the record of the owner of a root",
    "ckpt/coordination/tombstone.py": "tombstones",
    "ckpt/exchange/exports/hf_store.py": "files of folders of Hugging Face",
}
"""The modules that delete objects which are no files of a step."""


def texts_of_ckpt() -> dict[str, str]:
    """Return the text of each file of ``ckpt``, without the suite for backends."""
    found = (ROOT / "ckpt").rglob("*.py")
    return {name_of(path): path.read_text() for path in found if "testing" not in path.parts}


def files_with(pattern: str) -> set[str]:
    return {name for name, text in texts_of_ckpt().items() if re.search(pattern, text)}


def test_one_function_deletes_the_files_of_steps() -> None:
    assert files_with(r"\.delete[(,)]") == {STEP_FILES, *OTHER_DELETIONS}
    assert texts_of_ckpt()[STEP_FILES].count(".delete(") == 1


def test_one_function_puts_manifests() -> None:
    # A tombstone is put in the place of a manifest that was removed.
    assert files_with(r"\.put[(,]\s*\S*manifest\b") == {"ckpt/coordination/tombstone.py"}
    assert texts_of_ckpt()[STEP_FILES].count(".put(") == 1


def test_images_are_written_by_one_function_and_files_by_another() -> None:
    # A file of a folder of Hugging Face is an image without chunks.
    counts = {name: text.count("ImageWrite(") for name, text in texts_of_ckpt().items()}
    writing = {name: count for name, count in counts.items() if count}
    assert writing == {
        "ckpt/save/rank_files.py": 1,
        "ckpt/catalog/transfer.py": 1,
        "ckpt/exchange/exports/hf_store.py": 1,
    }

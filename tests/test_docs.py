"""What the pages say exists.

The tests cover links, files, commands, options, settings, figures, and examples that run.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

import ckpt
from bench import __main__ as bench
from bench import scenarios
from ckpt import CheckpointManager, SaveConfig, Tier, errors, events
from ckpt.cli.main import COMMANDS, HELP, app, load_command
from ckpt.config import load_config
from ckpt.coordination.coordinator import Coordinator
from ckpt.storage.tiers import as_tiers
from tests.coordination.world import World
from tests.kit.pages import FENCE, PAGES, Block, block, blocks, named

ROOT = Path(__file__).resolve().parents[1]
HISTORY = re.compile(r"bench/results/|docs/decisions/|CHANGELOG")  # these describe the past
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# -- named files and links exist -------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in _LINK.findall(_CODE.sub("", prose(page))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), link
        assert not anchor or anchor in anchors(place), link


@pytest.mark.parametrize(
    "page", [page for page in PAGES if not HISTORY.search(named(page))], ids=named
)
def test_every_file_that_is_named_is_there(page: Path) -> None:
    wanted = re.findall(
        r"\b(?:ckpt|backends|bench|tests|examples|docs)/[\w./-]+\.(?:py|md|sh|pml|json)\b",
        page.read_text(),
    )
    missing = [path for path in wanted if "NNNN" not in path and not (ROOT / path).exists()]
    assert not missing


def test_every_make_target_that_is_named_is_there() -> None:
    there = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named_ones = {
        target
        for page in PAGES
        for target in re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)", " ".join(_in_code(page)))
    }
    assert {"demo", "test", "torture"} <= named_ones <= there


def test_the_pages_of_docs_are_listed() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(_LINK.findall(index))


def test_the_table_of_scenarios_has_all() -> None:
    reported = re.findall(
        r"^\| `(\w+)` \|", (ROOT / "bench" / "README.md").read_text(), re.MULTILINE
    )
    assert reported == list(scenarios.ALL)


def test_the_tree_of_errors_has_all_with_their_exit_codes() -> None:
    reported: dict[str, int] = {}
    codes = {-1: 1}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ([│├└─ ]*)(\w+)(?: +exit (\d+))?", line):
            depth = len(match[1])
            codes[depth] = int(match[3]) if match[3] else codes[max(d for d in codes if d < depth)]
            reported[match[2]] = codes[depth]
    there = {name: getattr(errors, name) for name in errors.__all__}
    classes: dict[str, Any] = {name: kind for name, kind in there.items() if isinstance(kind, type)}
    assert reported == {name: kind.exit_code for name, kind in classes.items()}


# -- commands --------------------------------------------------------------------------------------


def _in_code(page: Path) -> Iterator[str]:
    """Return each line of code blocks, without prompts and comments, and each piece of code in the
    prose.
    """
    for match in FENCE.finditer(page.read_text()):
        for line in match[2].splitlines():
            yield re.sub(r"\s+#.*", "", line.removeprefix("$ ")).strip()
    yield from _CODE.findall(prose(page))


def commands(program: str) -> list[str]:
    lines = [line for page in PAGES if not HISTORY.search(named(page)) for line in _in_code(page)]
    return sorted({line for line in lines if line.startswith(f"{program} ") and "..." not in line})


def examples_of_help() -> list[str]:
    """Return the examples that ``ckpt --help`` and ``ckpt VERB --help`` show.

    An example is the command, followed by two blanks or a pipe and other words.
    """
    texts = [
        HELP,
        *(load_command(verb).callback.__doc__ or "" for verb in COMMANDS),
    ]
    lines = [line.strip() for text in texts for line in text.splitlines() if line.startswith("  ")]
    return sorted({re.split(r"  | \| ", line)[0] for line in lines if line.startswith("ckpt ")})


@pytest.mark.parametrize("line", sorted({*commands("ckpt"), *examples_of_help()}))
def test_the_command_line_knows(line: str) -> None:
    verb, *words = shlex.split(line)[1:]
    command = typer.main.get_command(app)
    if verb.startswith("--"):
        parameters = command.get_params(command.make_context("ckpt", [], resilient_parsing=True))
        assert verb in {option for parameter in parameters for option in parameter.opts}
        return
    there = getattr(command, "commands", {})
    assert verb in there
    if words:
        there[verb].make_context(verb, ["1" if word == "N" else word for word in words])


def test_the_page_of_licences_is_what_is_installed() -> None:
    subprocess.run(
        [sys.executable, ROOT / "docs" / "licences.py", "--check"], timeout=60, check=True
    )


def test_the_table_of_verbs_has_all() -> None:
    reported = re.findall(
        r"^\| \[`(\w+)`\]\(#(\w+)\)", (ROOT / "docs" / "cli.md").read_text(), re.MULTILINE
    )
    there = getattr(typer.main.get_command(app), "commands", {})
    assert sorted(reported) == sorted((verb, verb) for verb in there)


@pytest.mark.parametrize("line", commands("python -m bench"))
def test_the_bench_knows(line: str) -> None:
    words = shlex.split(line)[3:]
    bench._parser(words).parse_args(words)


# -- settings --------------------------------------------------------------------------------------


def table(page: str, heading: str) -> dict[str, list[str]]:
    """Return the first table below a heading: first cell -> the others."""
    text = (ROOT / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    return {_CODE.findall(row[0])[0]: row[1:] for row in rows}


@pytest.mark.parametrize(("kind", "heading"), [(Tier, "A tier"), (SaveConfig, "Saving")])
def test_every_setting_is_told_with_its_default(kind: Any, heading: str) -> None:
    reported = table("docs/settings.md", heading)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    assert set(reported) == set(fields)
    shown = dict.fromkeys(("all", "none", "what is free", "only memory", "all but memory"))
    for name, field in fields.items():
        if field.default is not dataclasses.MISSING:
            cell = reported[name][0]
            assert (
                shown[cell] if cell in shown else ast.literal_eval(cell.strip("`"))
            ) == field.default, name


def test_every_event_is_told() -> None:
    there = {name for name, kind in vars(events).items() if dataclasses.is_dataclass(kind)}
    assert set(table("docs/settings.md", "The manager")) == there


@pytest.mark.parametrize("text", [each.text for each in blocks("toml")])
def test_a_configuration_that_is_shown_is_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "ckpt.toml").write_text(text)
    assert load_config(tmp_path / "ckpt.toml").path


# -- figures ---------------------------------------------------------------------------------------


def _rows(path: str) -> dict[str, list[str]]:
    """Return the main table: name -> numbers."""
    lines = (ROOT / path).read_text().splitlines()
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    return {
        row[0].removesuffix(" 0.1.1"): row[1:]
        for row in rows
        if len(row) == 7 and row[0].strip(" -")
    }


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    shown, measured = _rows("README.md"), _rows("bench/results/README.md")
    del measured["floor: O_DIRECT write"], measured["floor: O_DIRECT read"]
    assert shown.keys() == measured.keys()
    assert len(shown) == 6
    for name, cells in measured.items():
        assert [cell.replace("as above", cells[4]) for cell in shown[name]] == cells, name


# -- examples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", blocks("python"), ids=lambda each: each.name)
def test_an_example_is_python_and_imports_what_is_there(each: Block) -> None:
    for node in ast.walk(ast.parse(each.text)):
        if isinstance(node, ast.ImportFrom) and node.module == "ckpt":
            assert {alias.name for alias in node.names} <= set(ckpt.__all__)


def test_the_ten_lines_are_the_same_in_both_places() -> None:
    assert block("README.md", "PerRank(RngState()") == block(
        "docs/quickstart.md", "PerRank(RngState()"
    )


DOORS = [
    *(ROOT / "docs" / page for page in ("data.md", "elastic.md", "quickstart.md")),
    *sorted((ROOT / "docs" / "integrations").glob("*.md")),
]


def change_on(page: Path) -> list[str]:
    """Return the lines of the diff that shows how a script changes."""
    (shown,) = [each.text for each in blocks("diff") if each.page == page]
    return shown.splitlines()


@pytest.mark.parametrize("page", DOORS, ids=named)
def test_a_script_changes_by_five_lines_at_most(page: Path) -> None:
    assert 1 <= sum(line.startswith("+") for line in change_on(page)) <= 5


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "launch").glob("*.md")), ids=named)
def test_the_page_of_a_launcher_leads_to_the_change(page: Path) -> None:
    assert "[the change to the script](../elastic.md#a-planned-stop)" in " ".join(
        page.read_text().split()
    )


def after_the_change(page: str) -> str:
    lines = change_on(ROOT / "docs" / page)
    return "\n".join(line[1:] for line in lines if not line.startswith("-"))


def test_a_loop_that_is_changed_as_shown_saves_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained: list[int] = []
    for steps in (3, 5):
        names = parts() | {"steps": steps, "train_step": lambda: trained.append(1)}
        exec(after_the_change("quickstart.md"), names)
        names["manager"].close()
        assert len(trained) == steps
    with CheckpointManager("runs/gpt") as manager:
        assert manager.steps() == [1, 2, 3, 4, 5]


def test_a_loop_that_is_changed_as_shown_stops_as_planned(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        names: dict[str, Any] = {"manager": manager, "state": {"step": 0}, "steps": 10**7}
        names["train_step"] = lambda: manager.request_stop() if names["step"] == 50 else None
        exec(after_the_change("elastic.md"), names)
        last = names["step"]
    with CheckpointManager(tmp_path) as manager:
        assert 50 <= max(manager.steps()) == last < 10**7


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.register_buffer("frequencies", torch.ones(2), persistent=False)


def parts() -> dict[str, Any]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def test_the_ten_lines_save_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = compile(block("README.md", "PerRank(RngState()"), "README.md", "exec")
    trained: list[int] = []
    for steps in (150, 201):
        names = parts()
        scheduler = torch.optim.lr_scheduler.StepLR(names["optimizer"], 10)
        trained.append(0)

        def train_step(names: dict[str, Any] = names) -> None:
            trained[-1] += 1
            train(**names)

        exec(lines, {**names, "scheduler": scheduler, "steps": steps, "train_step": train_step})
    assert trained == [150, 51]
    with CheckpointManager("runs/gpt") as manager:
        assert manager.steps() == [0, 100, 149, 200]


def test_a_part_is_restored_as_shown(tmp_path: Path) -> None:
    names = parts()
    state = dict(names)
    with CheckpointManager(tmp_path) as manager:
        manager.save(state, 1)
        shown = block("docs/restoring.md", "report.missing")
        exec(shown, {**names, "state": state, "manager": manager})


def test_a_part_is_saved_as_shown(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("base", "lora_a", "vision")})
    model["base"].requires_grad_(False)
    names = {"ckpt": ckpt, "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    state = {"model": model, "optimizer": names["optimizer"]}
    with CheckpointManager(tmp_path) as manager:
        exec(
            block("docs/restoring.md", "ckpt.trainable"),
            {**names, "state": state, "manager": manager},
        )
    shown = [
        ("base", False, False, True),
        ("lora_a", True, True, True),
        ("vision", True, False, False),
    ]
    for name, *steps in shown:
        for step, is_saved in enumerate(steps):
            with ckpt.open(tmp_path, step=step) as opened:
                assert (f"model/{name}.weight" in opened.names()) == is_saved


def test_names_are_translated_as_shown(tmp_path: Path) -> None:
    class Renamed(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(2, 2))

    with CheckpointManager(tmp_path) as manager:
        manager.save({"model": Renamed("backbone")}, 1)
        state, net = {"model": Renamed("encoder")}, Renamed("backbone")
        exec(
            block("docs/restoring.md", "rename="), {"manager": manager, "state": state, "net": net}
        )
        stored = net.get_parameter("backbone.weight")
        assert torch.equal(state["model"].get_parameter("encoder.weight"), stored)


@pytest.mark.parametrize("page", ["docs/quickstart.md", "docs/nodes.md"])
def test_tiers_are_named_as_shown(page: str) -> None:
    lines = block(page, "CheckpointManager([").replace("from ckpt import", "# ")
    # there is no bucket to open
    names: dict[str, Any] = {"Tier": Tier, "CheckpointManager": as_tiers}
    exec(lines, names)
    assert [tier.url for tier in names["manager"]] == ["memory", "/nvme/ckpt", "s3://bucket/run42"]


def test_a_model_on_meta_is_restored_as_shown(tmp_path: Path) -> None:
    names: dict[str, Any] = {"torch": torch, "config": None, "GPT": lambda _: Net()}
    saved = parts()
    with CheckpointManager(tmp_path) as manager:
        manager.save(saved, 1)
        exec(
            block("docs/restoring.md", 'torch.device("meta")'), {**names, "manager": manager}, names
        )
    assert names["report"].uninitialised == ("model/frequencies",)
    assert torch.equal(names["model"].blocks[1].weight, saved["model"].blocks[1].weight)


def test_a_layout_of_ones_own_is_saved_as_shown(tmp_path: Path) -> None:
    whole = torch.arange(40.0).view(5, 8)

    def save(coordinator: Coordinator) -> None:
        rank, world = coordinator.rank, coordinator.world_size
        names = {"rank": rank, "world": world, "rows": 5, "columns": 8, "step": 1}
        with CheckpointManager(tmp_path, coordinator=coordinator) as manager:
            exec(
                block("docs/restoring.md", "LocalShards"),
                {**names, "mine": whole[:, rank::world].clone(), "manager": manager},
            )

    World(2, patience=30).run(save)
    with ckpt.open(tmp_path) as opened:
        assert torch.equal(opened.tensor("table")[...], whole)


def test_a_checkpoint_is_opened_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("runs/gpt") as manager:
        manager.save({"model": nn.ModuleList([nn.Linear(2, 200)])}, 1)
    names: dict[str, Any] = {}
    exec(block("docs/cli.md", "ckpt.open"), names)
    assert names["rows"].shape == (100, 2)


def test_a_planned_stop_is_written_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {
        "CheckpointManager": CheckpointManager,
        "state": {"step": 0},
        "steps": 3,
        "train_step": lambda: None,
    }
    exec(block("docs/elastic.md", "on_signals"), names)
    with CheckpointManager("runs/gpt") as manager:
        assert manager.steps() == [3]

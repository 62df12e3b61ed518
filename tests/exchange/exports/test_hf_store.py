"""A folder of Hugging Face in a store is whole, or nothing loads it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from ckpt import CheckpointManager
from ckpt.cli.main import main
from ckpt.errors import StorageError, UnknownScheme
from ckpt.exchange.exports import hf_store
from ckpt.exchange.exports.hf_export_observer import HfFolders
from ckpt.storage.api import StorageBackend, read_object
from ckpt.storage.registry import open_backend
from tests.cli.conftest import Cli
from tests.exchange.exports.export_run import export_here
from tests.exchange.exports.stand_in_hub import Hub, stand_in_hub
from tests.faults.proxy import Harm, Proxy
from tests.kit.parts import parts_of
from tests.kit.waiting import until
from tests.processes import fork
from tests.servers import KEY, SECRET, Server

pytestmark = pytest.mark.server

WORDS = ["--format", "hf", "--config", "config", "--max-shard-size", "100B"]
Objects = dict[str, bytes]


def weights(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model": {f"layer{index}": torch.full((5, 5), float(value + index)) for index in range(3)}
    }


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "empty.txt").touch()
    return folder


@pytest.fixture
def root(tmp_path: Path, config: Path) -> Path:
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(weights(0.0), step=5)
    return tmp_path / "run"


@pytest.fixture
def url(moto_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """An empty place on the server, whose address is in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    url = f"s3://bucket/{tmp_path.name}"
    yield url
    store = opened(url, moto_server)
    for info in list(store.list("")):
        store.delete(info.key)


def opened(url: str, server: Server) -> StorageBackend:
    """Return a store that is always asked without a proxy."""
    return open_backend(url, {"endpoint_url": server.url, "key": "k", "secret": "s"})


def objects(store: StorageBackend) -> Objects:
    return {info.key: read_object(store, info.key, limit=1 << 20) for info in list(store.list(""))}


def loaded(folder: Objects) -> dict[str, torch.Tensor] | None:
    """Load a folder as transformers does; return None if it has no configuration."""
    if "config.json" not in folder:
        return None
    if "model.safetensors" in folder:
        return load(folder["model.safetensors"])
    index = json.loads(folder["model.safetensors.index.json"])["weight_map"]
    values = {name: load(folder[name]) for name in set(index.values())}
    return {name: values[file][name] for name, file in index.items()}


def folders(place: Objects) -> dict[str, Objects]:
    result: dict[str, Objects] = {}
    for key, data in place.items():
        folder, _, name = key.rpartition("/")
        result.setdefault(folder, {})[name] = data
    return result


def test_a_folder_in_a_store_is_that_of_a_local_export(
    cli: Cli, root: Path, url: str, config: Path, moto_server: Server
) -> None:
    ran = cli("export", root, url, *WORDS, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["place"] == url
    assert cli("export", root, "out", *WORDS).code == 0
    place = objects(opened(url, moto_server))
    assert place == {path.name: path.read_bytes() for path in Path("out").iterdir()}
    assert len(place) == 7


part_bytes = parts_of("ckpt_backends.s3.backend.PART_BYTES")


def test_a_file_of_several_parts_arrives_as_it_is(
    cli: Cli,
    tmp_path: Path,
    config: Path,
    rclone_s3: Server,
    part_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that keeps objects as files has the same files as a local export."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone_s3.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with CheckpointManager(tmp_path / "large") as manager:
        manager.save({"model": {"x": torch.randn(part_bytes * 5 // 8)}}, step=1)
    words = ["--format", "hf", "--config", "config"]
    assert cli("export", tmp_path / "large", "s3://bucket/parts?region=us-east-1", *words).code == 0
    assert cli("export", tmp_path / "large", "out", *words).code == 0
    assert rclone_s3.data is not None
    place = rclone_s3.data / "bucket" / "parts"
    for path in Path("out").iterdir():
        assert (place / path.name).read_bytes() == path.read_bytes()


def test_a_place_with_objects_is_refused(
    cli: Cli, root: Path, url: str, config: Path, moto_server: Server
) -> None:
    store = opened(url, moto_server)
    store.put("other.txt", [b"other"])
    ran = cli("export", root, url, *WORDS)
    assert ran.code == 2
    assert f"{url} is there already: remove it, or name another place" in ran.err
    assert objects(store) == {"other.txt": b"other"}


def test_other_formats_take_no_url(cli: Cli, root: Path, url: str) -> None:
    ran = cli("export", root, f"{url}/x.safetensors")
    assert ran.code == 2
    assert "is a URL, which only --format hf takes" in ran.err


@contextmanager
def through(
    moto_server: Server, monkeypatch: pytest.MonkeyPatch, harm: Callable[[str, str], Harm | None]
) -> Generator[Proxy]:
    """Let every request of an export pass through a proxy."""
    with Proxy(moto_server.port, harm) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


def test_no_half_of_a_folder_can_be_loaded_before_any_request(
    cli: Cli,
    root: Path,
    url: str,
    config: Path,
    moto_server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, requests = opened(url, moto_server), list[str]()

    def look(method: str, target: str) -> None:
        requests.append(method)
        assert loaded(objects(store)) is None

    with through(moto_server, monkeypatch, look):
        assert cli("export", root, url, *WORDS).code == 0
    assert requests.count("PUT") == 8  # A marker too
    values = loaded(objects(store))
    assert values is not None
    assert len(values) == 3


@pytest.mark.parametrize(
    "number",
    [1, 10, *(pytest.param(n, marks=pytest.mark.torture) for n in (0, *range(2, 10), 11))],
)
def test_a_store_that_refuses_in_the_middle_is_one_error_and_leaves_nothing(
    cli: Cli,
    root: Path,
    url: str,
    config: Path,
    moto_server: Server,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    count, store = itertools.count(), opened(url, moto_server)

    def refuse(method: str, target: str) -> Harm | None:
        is_last = method != "DELETE" and next(count) == number
        return Harm("status", 403, "AccessDenied") if is_last else None

    with through(moto_server, monkeypatch, refuse) as proxy:
        ran = cli("export", root, url, *WORDS)
    assert proxy.harmed == 1
    assert ran.code == 3
    assert url in ran.err
    assert "Access" in ran.err
    assert len(ran.err.splitlines()) == 1
    assert objects(store) == {}


def test_a_folder_that_another_program_changes_is_not_completed(
    cli: Cli,
    root: Path,
    url: str,
    config: Path,
    moto_server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = opened(url, moto_server)

    def replace(method: str, target: str) -> None:
        if target.endswith("model-00003-of-00003.safetensors"):
            store.delete("model-00001-of-00003.safetensors")

    with through(moto_server, monkeypatch, replace):
        ran = cli("export", root, url, *WORDS)
    assert ran.code == 3
    assert f"another program writes to {url} too" in ran.err
    assert objects(store) == {}


def test_two_exports_at_once_are_not_mixed(
    url: str, moto_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has listed the place before the first put a file. Names and sizes are equal."""
    first, second, last = "model-00001.safetensors", "model-00002.safetensors", "config.json"
    list_place = hf_store._sizes

    def list_before(store: StorageBackend) -> dict[str, int]:
        monkeypatch.setattr(hf_store, "_sizes", list_place)
        return {}

    def write(place: str, name: str, text: str) -> str:
        Path(place).mkdir(exist_ok=True)
        Path(place, name).write_text(text)
        return os.path.join(place, name)

    def export_other() -> None:
        with hf_store.stored_output(url) as (place, put):
            put(write(place, first, "b"))
            put(write(place, second, "b"))
            write(place, last, "b")

    with hf_store.stored_output(url) as (place, put):
        put(write(place, first, "a"))
        monkeypatch.setattr(hf_store, "_sizes", list_before)
        with pytest.raises(StorageError, match="another program writes to"):
            export_other()
        put(write(place, second, "a"))
        write(place, last, "a")
    place_now = objects(opened(url, moto_server))
    assert place_now == dict.fromkeys([first, second, last], b"a")


def export_to(url: str, root: Path) -> None:
    sys.argv = ["ckpt", "export", str(root), url, *WORDS]
    assert main() == 0


def test_the_folder_for_temporary_files_is_free_after_the_export_that_follows_a_kill(
    root: Path,
    url: str,
    config: Path,
    moto_server: Server,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(config.parent)
    (room := tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(room))
    (room / "ckpt-hf-mine").mkdir()
    children = list[int]()

    def kill(method: str, target: str) -> None:
        if "model-00002" in target:
            os.kill(children[0], signal.SIGKILL)

    with through(moto_server, monkeypatch, kill):
        children.append(fork(partial(export_to, url, root)))
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == -signal.SIGKILL
    assert len(list(room.iterdir())) == 2
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_server.url)
    with hf_store.stored_output(f"{url}/living"):
        children.append(fork(partial(export_to, f"{url}/next", root)))
        assert os.waitpid(children[1], 0)[1] == 0
        assert len(list(room.iterdir())) == 2
    assert [path.name for path in room.iterdir()] == ["ckpt-hf-mine"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("numbers", [(8,), pytest.param(range(100), marks=pytest.mark.torture)])
def test_a_kill_at_any_request_leaves_no_half_that_loads(
    root: Path,
    url: str,
    config: Path,
    moto_server: Server,
    monkeypatch: pytest.MonkeyPatch,
    numbers: Sequence[int],
) -> None:
    monkeypatch.chdir(config.parent)
    store, deaths = opened(url, moto_server), 0
    for number in numbers:
        count, children = itertools.count(), list[int]()

        def kill(
            method: str,
            target: str,
            count: Iterator[int] = count,
            number: int = number,
            children: list[int] = children,
        ) -> None:
            if next(count) == number:
                os.kill(children[0], signal.SIGKILL)

        with through(moto_server, monkeypatch, kill):
            children.append(fork(partial(export_to, url, root)))
            status = os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1])
        place = objects(store)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        deaths += 1
        values = loaded(place)
        assert values is None or len(values) == 3
        for key in place:
            store.delete(key)
    assert deaths > 8 or deaths == len(numbers)


@pytest.mark.parametrize("process", ["here", pytest.param("new", marks=pytest.mark.torture)])
def test_a_job_keeps_its_last_folders_in_a_store(
    tmp_path: Path,
    url: str,
    config: Path,
    moto_server: Server,
    monkeypatch: pytest.MonkeyPatch,
    process: str,
) -> None:
    if process == "here":
        export_here(monkeypatch)
    store = opened(f"{url}/hf", moto_server)

    def look(method: str, target: str) -> None:
        for folder in folders(objects(store)).values():
            values = loaded(folder)
            assert values is None or len(values) == 3

    hf = HfFolders(f"{url}/hf?region=us-east-1", config, every=2, keep_last=1, names=None)
    with (
        through(moto_server, monkeypatch, look),
        CheckpointManager(tmp_path / "run", observers=[hf]) as manager,
        hf,
    ):
        for step in (1, 2, 3, 4):
            manager.save(weights(step), step)
    [(name, folder)] = folders(objects(store)).items()
    assert name.startswith("step-000000004-")
    values = loaded(folder)
    assert values is not None
    assert values["layer0"][0, 0] == 4


def test_a_job_removes_what_exports_that_were_killed_have_left(
    tmp_path: Path,
    url: str,
    config: Path,
    moto_server: Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A half of the same step goes at once, and one of another step after a day."""
    export_here(monkeypatch)
    store = opened(url, moto_server)
    attempts = "abcdefghij", "jihgfedcba"
    halves = [f"step-{step:09d}-{attempt}" for step in (1, 2) for attempt in attempts]
    for half in halves:
        store.put(f"{half}/model.safetensors", [b"half"])
    store.put("step-000000003/config.json", [b"of another program"])
    hf = HfFolders(url, config, keep_last=1)
    with CheckpointManager(tmp_path / "run", observers=[hf]) as manager, hf:
        manager.save(weights(0.0), 1)
        assert until(lambda: len({info.key.split("/")[0] for info in store.list("")}) == 4)
        monkeypatch.setattr("ckpt.exchange.exports.hf_output_folders._ABANDONED_SECONDS", -60.0)
        manager.save(weights(0.0), 3)
    assert "has no folder" not in caplog.text
    names = sorted(folders(objects(store)))
    assert len(names) == 2
    assert names[0] == "step-000000003"
    assert names[1].startswith("step-000000003-")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    with stand_in_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        hub.files[".gitattributes"] = b""
        yield hub


def test_a_job_keeps_its_last_folders_on_a_hub(
    tmp_path: Path, config: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_here(monkeypatch)
    hf = HfFolders("hf://user/repo/gpt", config, keep_last=1)
    with CheckpointManager(tmp_path / "run", observers=[hf]) as manager, hf:
        for step in (2, 4):
            manager.save(weights(step), step)
            assert until(lambda step=step: f"gpt/step-{step:09d}" in str(hub.commits[-1:]))  # type: ignore[misc]
        manager.restore(weights(0.0), step=2)
        manager.save(weights(3), 3)
    assert hub.files.pop(".gitattributes") == b""
    [(name, folder)] = folders(hub.files).items()
    assert name.startswith("gpt/step-000000003-")
    values = loaded(folder)
    assert values is not None
    assert values["layer0"][0, 0] == 3


def test_a_hub_that_refuses_in_the_middle_is_one_error_and_leaves_nothing(
    cli: Cli, root: Path, config: Path, hub: Hub
) -> None:
    hub.refuses = lambda path: path.endswith("model-00002-of-00003.safetensors")
    ran = cli("export", root, "hf://user/repo", *WORDS)
    assert ran.code == 3
    assert "the storage limit is reached" in ran.err
    assert "in hf://user/repo" in ran.err
    assert len(ran.err.splitlines()) == 1
    assert hub.files == {".gitattributes": b""}


def test_a_job_goes_on_if_the_hub_refuses_and_makes_the_next_folder(
    tmp_path: Path,
    config: Path,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    export_here(monkeypatch)
    hub.refuses = lambda path: path.endswith("config.json") and "step-000000002-" in path
    hf = HfFolders("hf://user/repo/gpt", config, keep_last=2)
    with CheckpointManager(tmp_path / "run", observers=[hf]) as manager, hf:
        manager.save(weights(2), 2)
        assert until(lambda: "step 2 has no folder of Hugging Face" in caplog.text)
        manager.save(weights(4), 4)
    del hub.files[".gitattributes"]
    [(name, folder)] = folders(hub.files).items()
    assert name.startswith("gpt/step-000000004-")
    assert loaded(folder) is not None


def test_a_place_that_no_backend_serves_is_refused(config: Path) -> None:
    with pytest.raises(UnknownScheme):
        HfFolders("nowhere://bucket/hf", config)

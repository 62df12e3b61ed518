"""A save leaves out frozen tensors that have not changed since an older step."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors import safe_open

import ckpt
from ckpt import CheckpointManager, Tier
from ckpt.catalog.inventory import Inventory, heirs_of
from ckpt.catalog.step_listing import committed, read_manifest, read_packed
from ckpt.catalog.step_repair import mend_step
from ckpt.catalog.tensor_reader import StepReader
from ckpt.catalog.transfer_by_rank import commit_parts, copy_rank
from ckpt.catalog.verify import StepFolder, verify_files, verify_step
from ckpt.errors import IntegrityError, NoCheckpoint, ObjectExists
from ckpt.model.checksum import checksum
from ckpt.model.fragment_columns import read_fragment
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Manifest, Packed, StoredFile
from ckpt.model.record_encoding import pack, unpack
from ckpt.pipeline.workers import Workers
from ckpt.retention.policy import Retention
from ckpt.retention.pruner import prune
from ckpt.retention.removal import remove
from ckpt.root.leases import Leases, pins_on
from ckpt.root.pins import is_pinned, put_pin
from ckpt.staging.window import RingWindow
from ckpt.storage.registry import open_backend
from tests.cli.conftest import Cli
from tests.cli.conftest import cli as cli
from tests.kit.examples import examples
from tests.kit.small_pieces import scaled, shrink
from tests.save.adapted import LAYERS, WIDTH, Adapted, bases, check, ref_of, save, size_of
from tests.servers import KEY, SECRET


def test_a_save_that_leaves_out_most_is_done_in_the_end(tmp_path):
    training = Adapted()
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            pending = manager.save_async(training.state, step)
            pending.result()
            assert pending.progress == 1.0


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_only_what_is_trained_is_written_again(tmp_path, codec, cli: Cli):
    weights = save(Tier(str(tmp_path), codec=codec))
    whole = size_of(tmp_path, 1)
    layer = 4 * (WIDTH * WIDTH + WIDTH)
    assert [bases(tmp_path, step) for step in range(1, 5)] == [set(), {1}, {1}, {1}]
    for step in (2, 3, 4):
        # The weights of the last layer and two moments, and a header
        assert size_of(tmp_path, step) <= min(3 * layer + 5 * 4096, 2 * whole // 3)
    check(tmp_path, weights)
    ran = cli("verify", tmp_path, "--all")
    assert ran.code == 0, ran.out


def test_the_file_is_a_safetensors_file_of_what_it_holds(tmp_path):
    weights = save(tmp_path)
    with safe_open(
        tmp_path / ref_of(tmp_path, 3).folder / "rank-00000.safetensors", framework="pt"
    ) as file:
        names = set(file.keys())
        last = f"{LAYERS - 1}.weight"
        assert torch.equal(file.get_tensor(f"model/{last}"), weights[3][last])
    assert f"model/{last}" in names
    assert "model/0.weight" not in names


def test_an_increment_gives_every_frame_of_a_ring_back(tmp_path, monkeypatch):
    shrink(scaled(1024), monkeypatch.setattr)
    windows: list[RingWindow] = []
    begin = RingWindow.__init__

    def begun(self: RingWindow, *args: Any, **settings: Any) -> None:
        windows.append(self)
        begin(self, *args, **settings)

    monkeypatch.setattr(RingWindow, "__init__", begun)
    save(tmp_path, 3)
    assert bases(tmp_path, 3) == {1}
    assert [window._frames for window in windows] == [{}] * 3


def test_a_changed_tensor_is_written_and_the_next_save_is_whole(tmp_path):
    def between(training: Adapted, step: int) -> None:
        if step == 3:
            training.change(2)

    weights = save(tmp_path, 6, between=between)
    assert [bases(tmp_path, step) for step in (2, 3, 4, 5, 6)] == [{1}, {1}, set(), {4}, {4}]
    assert size_of(tmp_path, 2) < size_of(tmp_path, 3) < size_of(tmp_path, 1)
    check(tmp_path, weights)


@given(
    changes=st.lists(st.sets(st.integers(0, LAYERS - 1), max_size=2), min_size=2, max_size=6),
    keep=st.integers(1, 3),
    codec=st.sampled_from(["none", "zstd"]),
)
@settings(max_examples=examples(40), deadline=None)
def test_whatever_changes_and_is_pruned_each_kept_step_is_what_was_saved(
    tmp_path_factory, changes, keep, codec
):
    root = tmp_path_factory.mktemp("root")

    def between(training: Adapted, step: int) -> None:
        for layer in changes[step - 1]:
            training.change(layer)

    weights = save(Tier(str(root), keep_last=keep, codec=codec), len(changes), between=between)
    steps = {ref.step for ref in committed(open_backend(str(root)))}
    newest = set(sorted(weights)[-keep:])
    assert newest <= steps
    assert steps - newest == set().union(*(bases(root, step) for step in newest)) - newest
    check(root, weights)


def test_everything_is_whole_without_frozen_tensors_or_if_the_user_says_so(tmp_path):
    save(tmp_path / "off", incremental=False)
    assert bases(tmp_path / "off", 3) == set()
    training = Adapted(frozen=0)
    with CheckpointManager(tmp_path / "full") as manager:
        for step in (1, 2):
            manager.save(training.state, step)
    assert bases(tmp_path / "full", 2) == set()


def test_a_farther_tier_has_increments_of_its_own(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = [Tier(str(near), keep_last=1), Tier(str(far), every=2, codec="zstd")]
    weights = save(tiers, 6)
    assert [bases(far, step) for step in (2, 4, 6)] == [set(), {2}, {2}]
    check(far, weights)
    shutil.rmtree(near)
    training = Adapted()
    with CheckpointManager([Tier(str(near)), Tier(str(far), codec="zstd")]) as manager:
        report = manager.restore(training.state)
        assert report is not None
    assert report.step == 6
    assert all(torch.equal(value, weights[6][name]) for name, value in training.weights().items())


def test_a_job_that_goes_back_does_not_refer_to_an_abandoned_step(tmp_path):
    training = Adapted()
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3, 4, 5):
            training.train()
            if step == 3:
                training.change(0)  # So step 4 is the base of step 5
            manager.save(training.state, step)
        assert bases(tmp_path, 5) == {4}
        manager.restore(training.state, step=2)
        for step in (3, 4):
            training.train()
            manager.save(training.state, step)
    branch = ref_of(tmp_path, 3)
    assert branch.attempt.endswith("tb")  # The try after the rollback
    manifest = read_manifest(open_backend(str(tmp_path)), ref_of(tmp_path, 4))
    assert manifest.bases == {branch}


def test_a_job_that_goes_back_goes_on_with_a_base_that_is_on_the_branch(tmp_path):
    training = Adapted()
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            training.train()
            manager.save(training.state, step)
        manager.restore(training.state, step=2)
        training.train()
        manager.save(training.state, 3)
    assert bases(tmp_path, 3) == {1}


def test_saves_of_a_part_between_saves_of_the_whole_cost_no_whole_file(tmp_path):
    training, weights = Adapted(), {}
    with CheckpointManager(Tier(str(tmp_path), keep_last=2)) as manager:
        for step in range(1, 7):
            training.train()
            only = "model" if step % 2 == 0 else None
            manager.save(training.state, step, only=only)
            weights[step] = training.weights()
    assert [bases(tmp_path, step) for step in (5, 6)] == [{1}, {2}]
    check(tmp_path, weights)


def test_a_rank_of_frozen_tensors_alone_writes_increments_too(tmp_path):
    model = Adapted().model.requires_grad_(False)
    with CheckpointManager(tmp_path) as manager:
        for step in range(1, 5):
            manager.save({"model": model}, step)
    assert [bases(tmp_path, step) for step in range(1, 5)] == [set(), {1}, {1}, {1}]


def test_the_base_of_a_kept_step_stays_and_rm_names_the_steps(tmp_path, cli: Cli):
    weights = save(Tier(str(tmp_path), keep_last=1))
    assert [ref.step for ref in committed(open_backend(str(tmp_path)))] == [4, 1]
    ran = cli("rm", tmp_path, 1)
    assert ran.code != 0
    assert "holds a part of other steps (4)" in ran.err
    ran = cli("prune", tmp_path, "--keep-last", 1)
    assert ran.code == 0, ran.err
    check(tmp_path, weights)
    assert len(committed(open_backend(str(tmp_path)))) == 2


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_copy_is_whole(tmp_path, codec, cli: Cli):
    source, target = tmp_path / "source", tmp_path / "target"
    weights = save(Tier(str(source), codec=codec))
    ran = cli("copy", source, target, "--step", 3)
    assert ran.code == 0, ran.err
    assert bases(target, 3) == set()
    shutil.rmtree(source)
    check(target, weights)
    assert cli("verify", target).code == 0
    again = cli("copy", target, tmp_path / "third", "--all")
    assert again.code == 0


def test_a_damaged_base_or_a_base_that_is_gone_is_told_and_the_next_tier_helps(tmp_path, cli: Cli):
    near, far = tmp_path / "near", tmp_path / "far"
    weights = save([Tier(str(near)), Tier(str(far), every=4)], 4)
    base = near / ref_of(near, 1).folder / "rank-00000.safetensors"
    data = bytearray(base.read_bytes())
    data[9000] ^= 1
    base.write_bytes(data)
    ran = cli("verify", near, "--step", 3)
    assert ran.code == 4
    assert ref_of(near, 1).folder in ran.out
    with pytest.raises(IntegrityError):
        ckpt.load(near, "model", step=3)
    training = Adapted()
    with CheckpointManager([Tier(str(near)), Tier(str(far), every=4)]) as manager:
        manager.restore(training.state, step=4)
    assert all(torch.equal(value, weights[4][name]) for name, value in training.weights().items())
    base.unlink()
    with pytest.raises(IntegrityError):
        ckpt.load(near, "model", step=3)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_an_increment_without_its_base_is_copied_and_mended_as_a_whole(tmp_path, codec, cli: Cli):
    source, far, part = tmp_path / "source", tmp_path / "far", tmp_path / "part"
    weights = save([Tier(str(source), codec=codec), Tier(str(far), every=4)], 4)
    ref = ref_of(source, 4)
    for target in (part, tmp_path / "near"):  # As if one copied the folder by hand
        shutil.copytree(source / ref.folder, target / ref.folder)
        assert cli("verify", target).code == 4
    assert cli("copy", source, part, "--step", 4).code == 0
    backend = open_backend(str(tmp_path / "near"))
    with Workers("test", 1) as workers:
        folder = StepFolder(backend, ref, workers)
        mend_step(
            [open_backend(str(far))],
            folder,
            verify_step(backend, ref, workers=workers).faults,
            codec=codec,
            confirm=lambda: None,
            on_bytes=lambda _: None,
        )
    for target in (part, tmp_path / "near"):
        assert bases(target, 4) == set()
        assert cli("verify", target).code == 0
        check(target, weights)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_damaged_increment_is_mended(tmp_path, codec):
    near = Tier(str(tmp_path / "near"), codec=codec)
    far = Tier(str(tmp_path / "far"), every=4)
    weights = save([near, far], 4)
    root = Path(near.url)
    (file,) = (
        path
        for path in (root / ref_of(root, 4).folder).iterdir()
        if path.suffix in (".safetensors", ".encoded")
    )
    intact = file.read_bytes()
    file.write_bytes(bytes([intact[0] ^ 1]) + intact[1:-1] + bytes([intact[-1] ^ 1]))
    with Workers("test", 1) as workers:
        backend, ref = open_backend(near.url), ref_of(root, 4)
        report = verify_step(backend, ref, workers=workers)
        assert not report.intact
        mend_step(
            [open_backend(far.url)],
            StepFolder(backend, ref, workers),
            report.faults,
            codec=codec,
            confirm=lambda: None,
            on_bytes=lambda _: None,
        )
    if codec == "none":  # Another tier has the chunks raw, so an encoded file becomes whole
        assert file.read_bytes() == intact
    assert bases(root, 4) == ({1} if codec == "none" else set())
    check(root, weights)


def test_a_save_whose_base_was_removed_is_whole(tmp_path):
    training = Adapted()
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(training.state, step)
        shutil.rmtree(tmp_path / ref_of(tmp_path, 1).folder)
        manager.save(training.state, 3)
    assert bases(tmp_path, 3) == set()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base", "../../etc/step-000000001.aaaaaaaa"),
        ("base", "step-000000003"),
        ("count", 0),
        ("count", 10**6),
        ("size", 5),
        ("base_size", 1),
        ("lead", 0),
        ("rank", 7),
    ],
)
def test_a_manifest_with_an_impossible_increment_is_refused(tmp_path, field, value):
    save(tmp_path, 3)
    path = tmp_path / ref_of(tmp_path, 3).folder / "rank-00000.json"
    record = unpack(path.read_bytes(), Packed, key="fragment")
    wrong = replace(record.increments[0], **{field: value})
    with pytest.raises(IntegrityError):
        read_fragment(pack(replace(record, increments=(wrong,))), key="fragment")


def test_the_listing_says_what_is_where(tmp_path, cli: Cli):
    save(tmp_path)
    rows = {row["step"]: row for row in cli("ls", tmp_path, "--json").json["steps"]}
    assert rows[1]["bases"] == []
    assert rows[4]["bases"] == [1]
    assert "and step 1" in cli("ls", tmp_path).out
    files = cli("show", tmp_path, 4, "--json").json["files"]
    assert files[0]["base"] == f"{ref_of(tmp_path, 1).folder}/rank-00000.safetensors"
    assert "a part is in step 1" in cli("show", tmp_path, 4, "--files").out


@pytest.mark.parametrize("codec", ["none", pytest.param("zstd", marks=pytest.mark.torture)])
def test_an_object_store_gets_no_upload_of_what_has_not_changed(rclone_s3, codec):
    options = {
        "endpoint_url": rclone_s3.url,
        "key": KEY,
        "secret": SECRET,
        "region": "us-east-1",
    }
    tier = Tier(f"s3://bucket/increments-{codec}", options, codec=codec, keep_last=2)
    weights = save(tier)
    store = open_backend(tier.url, options)
    refs = {ref.step: ref for ref in committed(store)}
    assert sorted(refs) == [1, 3, 4]
    sizes = {
        step: sum(info.size for info in store.list(f"{ref.folder}/") if "rank-" in info.key)
        for step, ref in refs.items()
    }
    assert sizes[4] < 3 * sizes[1] / 4
    loaded = ckpt.load(tier, "model", step=4)
    assert all(torch.equal(loaded[name], value) for name, value in weights[4].items())


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_an_agent_copies_whole_files(tmp_path, codec):
    near, far = tmp_path / "near", tmp_path / "far"
    save(near, 3)
    ref = ref_of(near, 3)
    with Workers("test", 1) as workers:
        source = StepFolder(open_backend(str(near)), ref, workers)
        target = StepFolder(open_backend(str(far)), ref, workers)
        assert copy_rank([source.backend], target, 0, codec, lambda _: None)
        assert not copy_rank([source.backend], target, 0, codec, lambda _: None)
        part = target.fragment(0)[0]
        assert part.file is not None
        encoding = next(iter(part.encoded), None)
        file = StoredFile.of(ref, part.file, encoding)
        assert verify_files(target, [file]) == ([], file.size)
    assert part.increments == ()


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_an_agent_lets_the_increment_of_a_rank_stay_and_commits_it(tmp_path, codec):
    near, far = tmp_path / "near", tmp_path / "far"
    weights = save([Tier(str(near), local=True), Tier(str(far), codec=codec)], 3)
    assert bases(near, 3) == set()
    assert bases(far, 3) == {1}
    ref = ref_of(far, 3)
    size = size_of(far, 3)
    with Workers("test", 1) as workers:
        source, target = open_backend(str(near)), open_backend(str(far))
        folder = StepFolder(target, ref, workers)
        target.delete(ref.manifest)
        assert not copy_rank([source], folder, 0, codec, lambda _: None)
        commit_parts(folder, read_packed(source, ref)[0], lambda: None)
        assert size_of(far, 3) == size
        check(far, weights)
        target.delete(ref.manifest)
        for step in (1, 2):
            shutil.rmtree(far / ref_of(far, step).folder)
        assert copy_rank([source], folder, 0, codec, lambda _: None)
        commit_parts(folder, read_packed(source, ref)[0], lambda: None)
    assert bases(far, 3) == set()
    check(far, weights)


def test_the_next_job_copies_to_a_farther_tier_with_a_capacity(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    weights = save(near, 4)
    whole = size_of(near, 1)
    training = Adapted()
    with CheckpointManager([near, Tier(str(far), capacity=3 * whole)]) as manager:
        manager.restore(training.state)
        manager.save(training.state, 5)
        weights[5] = training.weights()
    assert sum(path.stat().st_size for path in far.rglob("*") if path.is_file()) <= 3 * whole
    steps = {ref.step for ref in committed(open_backend(str(far)))}
    assert {4, 5} <= steps
    check(far, weights)


@pytest.mark.parametrize(("steps", "has_increments"), [(2.2, False), (3.1, False), (4.2, True)])
def test_a_tier_with_a_small_capacity_takes_each_step(tmp_path, steps, has_increments):
    save(tmp_path / "size", 1)
    capacity = int(steps * size_of(tmp_path / "size", 1))
    root = tmp_path / "root"
    weights = save(
        Tier(str(root), capacity=capacity),
        8,
        between=lambda training, step: training.change(step % 3),
    )
    assert max(ref.step for ref in committed(open_backend(str(root)))) == 8
    check(root, weights)
    training = Adapted()
    with CheckpointManager(Tier(str(root), capacity=capacity)) as manager:
        manager.restore(training.state)
        for step in range(9, 13):
            manager.save(training.state, step)
    assert bool(bases(root, 12)) is has_increments


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(-1, LAYERS - 1)),
        st.tuples(st.just("back"), st.integers(0, 9)),
        st.tuples(st.just("remove"), st.integers(0, 9)),
        st.tuples(st.just("prune"), st.integers(1, 3)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    min_size=4,
    max_size=14,
)


@given(actions=ACTIONS)
@settings(max_examples=examples(60), deadline=None)
def test_whatever_a_person_and_the_job_do_each_listed_step_is_what_was_saved(
    tmp_path_factory, actions
):
    root = tmp_path_factory.mktemp("root")
    tier = Tier(str(root))
    store = open_backend(str(root))
    training = Adapted()
    saved: dict[StepRef, Mapping[str, torch.Tensor]] = {}
    manager, step = CheckpointManager(tier, journal=False), 0
    try:
        for action, number in actions:
            refs = committed(store)
            if action == "save":
                training.train()
                if number >= 0:
                    training.change(number)
                step += 1
                manager.save(training.state, step)
                saved[next(ref for ref in committed(store) if ref not in saved)] = (
                    training.weights()
                )
            elif action == "back" and refs:
                report = manager.restore(training.state, step=refs[number % len(refs)].step)
                assert report is not None
                step = report.step
            elif action == "remove" and len(refs) > 1:
                place = Inventory(store).look()
                older = sorted(refs)[:-1]  # The newest step of a living job goes only by force
                victim = next(one for one in place if one.ref == older[number % len(older)])
                if victim.ref not in heirs_of(place):
                    remove(store, victim)
            elif action == "prune":
                prune(store, Retention(keep_last=number))
            elif action == "restart":
                manager.close()
                manager = CheckpointManager(tier, journal=False)
                report = manager.restore(training.state)
                step = report.step if report else 0
            for ref in committed(store):
                with Workers("read", 1) as workers:
                    reader = StepReader(store, ref, read_manifest(store, ref), workers)
                    for name, value in saved[ref].items():
                        pieces = reader.stream([reader.tensor(f"model/{name}")])
                        data = b"".join(bytes(piece.data) for piece in pieces)
                        assert data == value.numpy().tobytes(), (ref, name)
    finally:
        manager.close()


def test_a_step_whose_base_was_deleted_by_hand_is_listed_as_damaged(tmp_path, cli: Cli):
    save(tmp_path, 3)
    shutil.rmtree(tmp_path / ref_of(tmp_path, 1).folder)
    rows = {row["step"]: row for row in cli("ls", tmp_path, "--json").json["steps"]}
    assert {step: row["state"] for step, row in rows.items()} == {2: "damaged", 3: "damaged"}
    assert rows[3]["detail"] == "step 1, which holds a part of it, is gone"


def test_a_run_whose_job_was_killed_is_removed_in_spite_of_its_leases(tmp_path, cli: Cli):
    save(tmp_path, 3)
    base = ref_of(tmp_path, 1)
    Leases(open_backend(str(tmp_path))).keep([base])
    put_pin(open_backend(str(tmp_path)), ref_of(tmp_path, 2), 60.0, "an evaluation")
    assert "is pinned until" in cli("rm", tmp_path, "--run").err
    assert cli("unpin", tmp_path, 2).code == 0
    assert cli("rm", tmp_path, "--run", "--dry-run").code == 0
    ran = cli("rm", tmp_path, "--run")
    assert ran.code == 0, ran.err
    assert committed(open_backend(str(tmp_path))) == []


def test_a_base_is_not_encoded_again_under_the_steps_that_refer_to_it(tmp_path):
    """Other lengths would move the chunks that the increments take from it."""
    near = Tier(str(tmp_path / "near"), codec="zstd")
    far = Tier(str(tmp_path / "far"))
    weights = save([near, far], 3)
    root = Path(near.url)
    file = root / ref_of(root, 1).folder / "rank-00000.encoded"
    intact = file.read_bytes()
    (increment,) = read_manifest(open_backend(near.url), ref_of(root, 3)).increments
    own = len(intact) - increment.size  # The steps after it use the bytes before
    file.write_bytes(intact[:own] + bytes(byte ^ 1 for byte in intact[own:]))
    with Workers("test", 1) as workers:
        backend, ref = open_backend(near.url), ref_of(root, 1)
        folder = StepFolder(backend, ref, workers)
        report = verify_step(backend, ref, workers=workers)
        with pytest.raises(ObjectExists, match=r"steps 2, 3 on .* refer to its files"):
            mend_step(
                [open_backend(far.url)],
                folder,
                report.faults,
                codec="zstd",
                confirm=lambda: None,
                on_bytes=lambda _: None,
            )
    for step in (2, 3):
        loaded = ckpt.load(root, "model", step=step)
        assert all(torch.equal(loaded[name], value) for name, value in weights[step].items())


def test_bases_are_pinned_while_another_process_finishes_a_step(tmp_path):
    save(tmp_path, 3)
    store, base = open_backend(str(tmp_path)), ref_of(tmp_path, 1)
    with pins_on(store, [base]):
        assert is_pinned(store, base)
    assert not is_pinned(store, base)
    with pytest.raises(NoCheckpoint), pins_on(store, [StepRef(9, "abcdef")]):
        raise AssertionError


def refer(root: Path, step: int, base: int) -> None:
    """Let the manifest and the fragment of a step say that its base is another one."""
    ref, folder = ref_of(root, step), ref_of(root, base).folder
    paths = root / ref.key("rank-00000.json"), root / ref.manifest
    fragment = unpack(paths[0].read_bytes(), Packed, key="fragment")
    manifest = unpack(paths[1].read_bytes(), Manifest, key="manifest")
    (increment,) = manifest.increments
    increments = (replace(increment, base=folder),)
    data = pack(replace(fragment, increments=increments))
    paths[0].write_bytes(data)
    (present,) = manifest.fragments
    fragments = (replace(present, size=len(data), checksum=checksum(data)),)
    paths[1].write_bytes(pack(replace(manifest, increments=increments, fragments=fragments)))


@pytest.mark.parametrize("circle", [{3: 3}, {2: 3, 3: 2}])
def test_steps_that_refer_to_each_other_are_damaged_and_lose_no_other_step(
    tmp_path, cli: Cli, circle
):
    weights = save(tmp_path, 4)
    for step, base in circle.items():
        refer(tmp_path, step, base)
    assert cli("verify", tmp_path, "--step", 3).code == 4
    with pytest.raises(IntegrityError):
        ckpt.load(tmp_path, "model", step=3)
    assert cli("ls", tmp_path).code == 0
    assert cli("prune", tmp_path, "--keep-last", 1, "--dry-run").code == 0
    training = Adapted()
    with CheckpointManager(tmp_path) as manager:
        manager.restore(training.state, step=4, rollback=False)
    assert all(torch.equal(value, weights[4][name]) for name, value in training.weights().items())
    ran = cli("rm", tmp_path, 2, 3)
    assert ran.code == 0, ran.err
    assert [ref.step for ref in committed(open_backend(str(tmp_path)))] == [4, 1]

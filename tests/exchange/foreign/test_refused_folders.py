"""The paths are those of folders that the libraries wrote."""

from __future__ import annotations

import pytest

from ckpt.exchange.foreign.refused_folders import folder_notes, refused_kind, state_folders

DCP = [".metadata", "__0_0.distcp"]
ZERO_2 = ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"]
UNIVERSAL = ["mp_rank_00_model_states.pt", "zero/optimizer_state.pt", "zero/a.weight"]
ZERO_3 = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (
            ["latest", "zero_to_fp32.py", *(f"global_step2/{name}" for name in ZERO_2)],
            "/run/x fp32",
        ),
        (["latest", *(f"global_step2/{name}" for name in ZERO_3)], "python /run/x/zero_to_fp32.py"),
        (ZERO_2, "python /run/zero_to_fp32.py /run fp32 --tag x"),
        (ZERO_3, "python /run/zero_to_fp32.py /run fp32 --tag x"),
        (
            [*(f"mp_rank_0{n}_model_states.pt" for n in (0, 1)), "zero/optimizer_state.pt"],
            "engine.load_checkpoint()",
        ),
        (["layer_01-model_00-model_states.pt", *UNIVERSAL], "engine.load_checkpoint()"),
        (["3", "3/_CHECKPOINT_METADATA", "3/default"], "StandardCheckpointer().restore()"),
        (["_CHECKPOINT_METADATA", "_METADATA", "d", "manifest.ocdbt"], "arrays.state_of(tree)"),
        (["manifest.ocdbt", "ocdbt.process_0", "ocdbt.process_0/d"], "Orbax"),
        (["step_5", "step_5/.snapshot_metadata"], "name one of them, such as /run/x/NAME"),
    ],
)
def test_the_refusal_of_a_folder_says_how_to_get_its_state(paths: list[str], expected: str) -> None:
    kind = refused_kind(paths)
    assert kind is not None
    assert expected in kind.text("/run/x")


@pytest.mark.parametrize(
    "paths",
    [
        DCP,
        [*DCP, "common.pt", "metadata.json"],
        ["mp_rank_00_model_states.pt"],  # DeepSpeed without ZeRO has all in one file
        UNIVERSAL,
        [".snapshot_metadata", "batched", "batched/b7e4"],
        [*ZERO_3, *UNIVERSAL[1:]],
        ["config.json", "model.safetensors"],
        ["scheduler.bin", *(f"optimizer_0/{name}" for name in DCP)],
    ],
)
def test_a_folder_that_an_import_reads_is_not_refused(paths: list[str]) -> None:
    assert refused_kind(paths) is None


def test_a_folder_name_with_a_space_is_quoted_in_the_command() -> None:
    kind = refused_kind(["global_step2/mp_rank_00_model_states.pt"])
    assert kind is not None
    assert "'/run/my run'/zero_to_fp32.py '/run/my run' fp32" in kind.text("/run/my run")


def test_a_folder_of_megatron_has_a_note() -> None:
    assert folder_notes(DCP) == []
    (note,) = folder_notes([*DCP, "common.pt", "metadata.json"])
    assert "Megatron" in note


def test_subfolders_with_a_state_are_those_of_dcp() -> None:
    paths = ["logs/a.txt", *(f"{name}/{file}" for name in ("b", "a") for file in DCP)]
    assert state_folders(paths) == ["a", "b"]

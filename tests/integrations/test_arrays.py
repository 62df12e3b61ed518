"""States of NumPy arrays, of TensorFlow's and Keras' variables, and of JAX arrays."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ckpt import CheckpointManager
from ckpt.errors import ConfigError, DtypeMismatch, EntryMissing, ShapeMismatch, UnsupportedValue
from ckpt.integrations.arrays import state_of

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


class Moments(NamedTuple):
    mean: Any
    count: Any


def moved(root: Path, source: Any, target: Any) -> Any:
    """Save ``source``, and return ``target`` after a restore of it."""
    with CheckpointManager(root) as manager:
        manager.save({"all": state_of(source)}, 1)
        holder = state_of(target)
        manager.restore({"all": holder})
    return holder.value


def numpy_tree(value: float) -> dict[Any, Any]:
    return {
        "matrix": np.full((3, 4), value),
        "transposed": (np.arange(12, dtype=np.float32).reshape(3, 4) * value).T,
        "reversed": np.arange(5)[::-1] * int(value),
        "complex": np.full(3, value + 1j, np.complex64),
        "flags": np.array([value > 1, True]),
        "empty": np.zeros((0, 2)),
        "scalar": np.array(value),
        "list": [np.full(2, value), (np.full(1, value), int(value), f"{value}", None)],
        "moments": Moments(np.full(2, value, np.float16), np.int64(value)),
        "ordered": OrderedDict(a=np.full(2, value)),
        3: np.full(2, value),
    }


def test_numpy_arrays_are_filled_where_they_are_and_plain_values_replaced(tmp_path: Path) -> None:
    target = numpy_tree(1.0)
    views = target["matrix"], target["list"][0], target["moments"].mean, target["transposed"]
    found = moved(tmp_path, source := numpy_tree(2.0), target)
    for name, expected in source.items():
        if isinstance(expected, np.ndarray):
            np.testing.assert_array_equal(found[name], expected)
            assert found[name].dtype == expected.dtype
    assert found["list"][1][1:] == (2, "2.0", None)
    assert found["moments"].count == 2
    assert (type(found["moments"]), type(found["ordered"])) == (Moments, OrderedDict)
    now = found["matrix"], found["list"][0], found["moments"].mean, found["transposed"]
    assert all(before is after for before, after in zip(views, now, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_arrays_of_dtypes_that_numpy_lacks_keep_their_bytes(tmp_path: Path, dtype: str) -> None:
    kind = getattr(pytest.importorskip("ml_dtypes"), dtype)
    source = np.arange(6).reshape(2, 3).astype(kind)
    target = np.zeros((2, 3), kind)
    assert moved(tmp_path, source, target) is target
    assert target.tobytes() == source.tobytes()
    with CheckpointManager(tmp_path) as manager:  # torch has the same
        state = {"all": {"value": torch.zeros(2, 3, dtype=getattr(torch, dtype))}}
        manager.restore(state)
    assert torch.equal(state["all"]["value"].float(), torch.arange(6.0).reshape(2, 3))


def test_a_save_reads_the_memory_of_an_array_without_a_copy() -> None:
    array = np.zeros(4)
    (tensor,) = state_of(array).state_dict().values()
    assert tensor.data_ptr() == array.ctypes.data


def test_an_array_that_cannot_be_written_is_replaced(tmp_path: Path) -> None:
    target = np.zeros((3, 2), order="F")
    target.flags.writeable = False
    found = moved(tmp_path, np.ones((3, 2)), target)
    assert (found == 1).all()
    assert found.strides == target.strides
    assert not target.any()


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (np.zeros(4), ShapeMismatch),
        (np.zeros(3, np.float32), DtypeMismatch),
        ({"other": np.zeros(3)}, EntryMissing),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    tmp_path: Path, target: Any, error: type[Exception]
) -> None:
    first = np.zeros(3)
    with CheckpointManager(tmp_path) as manager:
        manager.save({"a": state_of(np.ones(3)), "b": state_of(np.ones(3))}, 1)
        with pytest.raises(error, match="b/"):
            manager.restore({"a": state_of(first), "b": state_of(target)})
    assert first.tolist() == [0, 0, 0]


def test_what_a_restore_leaves_out_keeps_its_values(tmp_path: Path) -> None:
    frozen = np.full(2, 7.0)
    frozen.flags.writeable = False
    holder = state_of({"new": frozen, "old": np.zeros(3)})
    with CheckpointManager(tmp_path) as manager:
        manager.save({"all": state_of({"old": np.ones(3)})}, 1)
        report = manager.restore({"all": holder}, strict=False)
    assert report is not None
    assert report.missing == ("all/new",)
    assert holder.value["new"].tolist() == [7, 7]
    assert holder.value["old"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "value",
    [
        np.array(["text"]),
        np.array([1], ">i4"),
        np.array(["2026-11-22"], "datetime64[D]"),
        np.zeros(2, [("a", "f4")]),
        np.ma.masked_array([1.0, 2.0], [False, True]),
        object(),
    ],
)
def test_values_that_cannot_be_saved_are_refused_with_their_full_name(
    tmp_path: Path, value: Any
) -> None:
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(UnsupportedValue, match="'all/part/0' is a "):
            manager.save({"all": state_of({"part": [value]})}, 1)
        assert manager.steps() == []


def test_two_keys_with_the_same_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="'1' as text"):
        state_of({1: np.zeros(1), "1": np.zeros(1)})


# -- JAX -------------------------------------------------------------------------------------------


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax", reason="jax is not installed: pip install jax")


def jax_tree(jax: Any, value: float) -> Any:
    jnp = jax.numpy
    weights = {"w": jnp.full((3, 4), value, jnp.bfloat16), "b": jnp.full((4,), value, jnp.float32)}
    return [weights, Moments({"x": jnp.full(3, value, jnp.int32)}, None), jnp.asarray(value)]


def test_jax_arrays_are_replaced_by_new_ones(tmp_path: Path, jax: Any) -> None:
    before = jax_tree(jax, 1.0)
    found = moved(tmp_path, source := jax_tree(jax, 2.0), before)
    assert jax.tree.structure(found) == jax.tree.structure(source)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(source), strict=True):
        assert (one.dtype, one.weak_type) == (other.dtype, other.weak_type)
        assert (one == other).all()
    assert before[0]["b"].tolist() == [1, 1, 1, 1]  # JAX promises this


def test_a_key_of_random_numbers_draws_what_it_would_have_drawn(tmp_path: Path, jax: Any) -> None:
    source = jax.random.split(jax.random.key(3))
    found = moved(tmp_path, source, jax.random.split(jax.random.key(4)))
    assert jax.random.normal(found[1], 3).tolist() == jax.random.normal(source[1], 3).tolist()


def test_a_key_of_random_numbers_returns_to_its_devices(tmp_path: Path, jax: Any) -> None:
    key = jax.random.split(jax.random.key(3), 4)
    mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    target = jax.device_put(jax.random.split(jax.random.key(4), 4), sharding)
    found = moved(tmp_path, key, target)
    assert found.sharding == sharding
    assert (jax.random.key_data(found) == jax.random.key_data(key)).all()


def test_classes_that_jax_knows_as_trees_are_trees(tmp_path: Path, jax: Any) -> None:
    class Layer:
        def __init__(self, weight: Any, name: Any) -> None:
            self.weight, self.name = weight, name

    keys = jax.tree_util.GetAttrKey("weight")
    jax.tree_util.register_pytree_with_keys(
        Layer,
        lambda layer: (((keys, layer.weight),), layer.name),
        lambda name, children: Layer(next(iter(children)), name),
    )
    target = {"layer": Layer(jax.numpy.zeros(2), "mine")}
    found = moved(tmp_path, {"layer": Layer(jax.numpy.ones(2), "other")}, target)
    assert found["layer"].weight.tolist() == [1, 1]
    assert found["layer"].name == "mine"


def test_a_jax_array_on_several_devices_returns_to_them(tmp_path: Path, run_apart: Any) -> None:
    pytest.importorskip("jax", reason="jax is not installed: pip install jax")
    run_apart(
        """
        import os, sys
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        import jax, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec
        from ckpt import CheckpointManager
        from ckpt.integrations.arrays import state_of
        placed = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec("x"))
        source = jax.device_put(np.arange(6.0, dtype=np.float32), placed)
        holder = state_of(jax.device_put(np.zeros(6, np.float32), placed))
        with CheckpointManager(sys.argv[1]) as manager:
            manager.save({"a": state_of(source)}, 1)
            manager.restore({"a": holder})
        assert holder.value.tolist() == source.tolist()
        assert holder.value.sharding == placed and len(placed.device_set) == 2
        """,
        tmp_path,
    )


# -- TensorFlow ------------------------------------------------------------------------------------


@pytest.fixture
def run_apart(tmp_path: Path) -> Callable[..., None]:
    """Run a script in a process of its own.

    The warnings of TensorFlow's import, and the devices of JAX, belong to a process.
    """
    import subprocess
    import textwrap

    def run(script: str, *arguments: object) -> None:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr[-4000:]

    return run


TENSORFLOW = """
    import sys
    import numpy as np, keras, tensorflow as tf
    from ckpt import CheckpointManager
    from ckpt.errors import ShapeMismatch, UnsupportedValue
    from ckpt.integrations.arrays import state_of

    class Net(tf.Module):
        def __init__(self, value):
            super().__init__()
            self.weights = [tf.Variable([value]), tf.Variable([value + 1])]

    def made(seed):
        keras.utils.clear_session()
        keras.utils.set_random_seed(seed)
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization(),
             keras.layers.Dropout(0.5)])
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
        gradients = [tf.fill(v.shape, float(seed)) for v in model.trainable_variables]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return model, optimizer, Net(float(seed)), {
            "variable": tf.Variable(tf.fill((2, 3), tf.cast(seed, tf.bfloat16))),
            "constant": tf.constant([seed]), "flag": tf.Variable(seed > 1)}

    def state(parts):
        return {str(number): state_of(part) for number, part in enumerate(parts)}

    source, target = made(2), made(1)
    holders = state(target)
    with CheckpointManager(sys.argv[1]) as manager:
        pending = manager.save_async(state(source), 1)
        source[3]["variable"].assign_add(tf.ones((2, 3), tf.bfloat16))  # is in no checkpoint
        pending.result()
        manager.restore(holders)
        for one, other in zip(source[:3], target[:3]):
            for ours, theirs in zip(one.variables, other.variables, strict=True):
                np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
        assert holders["0"].value is target[0]
        assert holders["3"].value["variable"] is target[3]["variable"]
        assert (target[3]["variable"].numpy() == 2).all()
        assert target[3]["flag"].numpy() and holders["3"].value["constant"].numpy() == [2]
        for bad in (tf.constant(["text"]), tf.Variable("text")):
            try:
                manager.save({"a": state_of({"b": bad})}, 2)
            except UnsupportedValue as error:
                assert "'a/b' is a " in str(error)
            else:
                raise AssertionError("text was saved")
        small = tf.Variable(tf.zeros((2, 2), tf.bfloat16))
        try:
            manager.restore({"3": state_of({"variable": small})}, strict=False)
        except ShapeMismatch as error:
            assert "'3/variable'" in str(error)
        else:
            raise AssertionError("another shape was restored")
"""


@pytest.mark.slow
def test_variables_and_models_of_tensorflow_are_filled_where_they_are(
    tmp_path: Path, run_apart: Callable[..., None]
) -> None:
    pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    run_apart(TENSORFLOW, tmp_path)

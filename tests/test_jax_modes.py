"""JAX arrays sharded over two devices, outside of `jax.shard_map`: the values of arrays that are whole.

The tests start this file as a script, since JAX makes its devices when it starts. It shards one kind of
axis at a time, in three ways. It traces each call over explicit axes with two of the four kinds, and
computes half of the calls with one kind in one way; with the argument ``all``, at night, it computes
every combination.
"""

import contextlib
import os
import subprocess
import sys
import warnings
from pathlib import Path

import capabilities
import cases
import numpy as np
import pytest
from packaging.version import Version

CALLS = {
    name: call
    for name, call in (cases.CASES | cases.TRIED).items()
    if capabilities.row_of(name).libraries.runs
}
# The axes of the arrays of `cases.inputs` along which they are sharded.
AXES = {
    "batch": dict.fromkeys(("q", "k", "v", "k2", "v2", "x", "visible", "lengths", "p", "target"), 0),
    "heads": dict.fromkeys(("q", "k", "v", "k2", "v2", "bias", "target"), 1) | {"slope": 0, "w": 0},
    "length": dict.fromkeys(("q", "k", "v", "k2", "v2", "bias", "target"), 2)
    | {"x": 1, "p": 1, "visible": 3, "ids": 0, "n_keys": 0},
    "features": dict.fromkeys(("q", "k", "v", "k2", "v2", "bias"), 3)
    | {"x": 2, "w": 2, "p": 2, "wa": 0, "weights": 1, "signs1": 0, "signs2": 0, "sketch_signs": 1,
       "components": 1, "rotation_signs": 1, "rotation_factor": 0, "omega": 1},
}  # fmt: skip
WAYS = ("explicit axes", "set_mesh", "uncommitted")
INPUTS = cases.inputs(n=8)


def _mesh(way):
    import jax

    kind = jax.sharding.AxisType
    kinds = (kind.Explicit if way == "explicit axes" else kind.Auto,)
    return jax.make_mesh((2,), ("d",), axis_types=kinds)


def _sharded(kind, way):
    """The arrays, those without an axis of this kind whole, with or without a device."""
    import jax

    mesh, arrays = _mesh(way), {}
    for name, x in INPUTS.items():
        axes = [None] * x.ndim
        if name in AXES[kind]:
            axes[AXES[kind][name]] = "d"
        if any(axes) or way == "explicit axes":
            arrays[name] = jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))
        else:
            arrays[name] = jax.numpy.asarray(x)
            assert not arrays[name].committed
    return arrays


def _leaves(result):
    """The arrays in a result, also in dictionaries and lists."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        return [x for part in result for x in _leaves(part)]
    return [result] if hasattr(result, "dtype") else []


def _is_refused_to_the_test(error):
    """Whether JAX refuses an operation of the call itself, such as a slice of a sharded axis."""
    traceback, files = error.__traceback__, []
    while traceback is not None:
        files.append(Path(traceback.tb_frame.f_code.co_filename).parent.name)
        traceback = traceback.tb_next
    return type(error).__name__ == "ShardingTypeError" and not {"isentropic", "jl", "laws"} & set(files)


def _tried(check, name, arrays, where):
    """Whether ``check(name, arrays)`` ran. It may raise only what JAX raises for the test's operations."""
    try:
        check(name, arrays)
    except Exception as error:
        if _is_refused_to_the_test(error):
            return False
        raise AssertionError(f"{name}: {where}") from error
    return True


def _values(name, arrays):
    for got, expected in zip(_leaves(CALLS[name](arrays)), _leaves(CALLS[name](INPUTS)), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-3, atol=1e-4)


def _traced(name, arrays):
    import jax

    if capabilities.row_of(name).jit.runs:
        read = {key: arrays[key] for key in cases.names_read(CALLS[name])}
        got = jax.eval_shape(lambda some: _leaves(CALLS[name](arrays | some)), read)
        assert [x.shape for x in got] == [np.shape(x) for x in _leaves(CALLS[name](INPUTS))]


def _traced_gradient(name, arrays):
    import jax

    jnp = jax.numpy

    def loss(some):
        leaves = _leaves(CALLS[name](arrays | some))
        return sum((x.sum() for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)), jnp.zeros(()))

    if capabilities.row_of(name).gradient.runs:
        read = cases.names_read(CALLS[name]) - cases.DISCRETE
        jax.eval_shape(jax.grad(loss), {key: arrays[key] for key in read})


def _every_call(is_whole):
    import jax

    tried = {True: 0, False: 0}
    for i, (kind, way) in enumerate((kind, way) for way in WAYS for kind in AXES):
        arrays = _sharded(kind, way)
        context = contextlib.nullcontext() if way == "uncommitted" else jax.set_mesh(_mesh(way))
        with context:
            for j, name in enumerate(CALLS):
                if is_whole or (i - j) % 24 == 0:
                    tried[_tried(_values, name, arrays, (kind, way))] += 1
                if way == "explicit axes" and (is_whole or (i - j) % 2 == 0):
                    tried[_tried(_traced, name, arrays, (kind, way))] += 1
                    if is_whole or (i - j) % 8 == 0:
                        tried[_tried(_traced_gradient, name, arrays, (kind, way))] += 1
    assert tried[False] < tried[True] / 10, tried


def _results_over_explicit_axes():
    """They stay sharded, in programs of their own and as a part of one, with or without a context."""
    import jax

    import isentropic as it

    arrays, mesh = _sharded("heads", "explicit axes"), _mesh("explicit axes")
    q, k2, v2, x = (arrays[name] for name in ("q", "k2", "v2", "x"))
    functions = {
        "attention": lambda: it.attention(q, k2, v2, enable_gqa=True),
        "state": lambda: it.attention_state(q, k2, v2, enable_gqa=True),
        "entropy": lambda: it.attention_entropy(q, q),
        "report": lambda: it.jl.distortion(q[0, :, 0], q[0, :, 1]).norm,
    }
    axes = {"report": jax.P("d")}
    for context in (contextlib.nullcontext(), jax.set_mesh(mesh)):
        with context:
            for name, function in functions.items():
                for call in (function, jax.jit(function)):
                    for leaf in jax.tree.leaves(call()):
                        spec = axes.get(name, jax.P(None, "d", *[None] * (leaf.ndim - 2)))
                        assert jax.typeof(leaf).sharding.spec == spec, (name, leaf.sharding)
            assert jax.typeof(it.attention(q, q, q) + q).sharding.spec == jax.P(None, "d", None, None)
            in_numpy = INPUTS["q"]
            assert list(it.AttentionDistribution(q, q).backends(q)) == list(
                it.AttentionDistribution(in_numpy, in_numpy).backends(in_numpy)
            )
    with jax.set_mesh(mesh):
        mapped = jax.vmap(lambda q: it.attention(q, q, q, is_causal=True) + q)(q)
    expected = it.attention(*[INPUTS["q"]] * 3, is_causal=True) + INPUTS["q"]
    np.testing.assert_allclose(mapped, expected, rtol=1e-4, atol=1e-5)
    assert jax.typeof(it.jl.hadamard_transform(x)).sharding.spec == jax.P(None, None, None)


def _arrays_without_a_device():
    """JAX moves them, also where a plan is cached, and no result is bound to their device."""
    import jax

    import isentropic as it

    second = jax.devices()[1]
    q = jax.numpy.asarray(INPUTS["q"])
    bound = [jax.device_put(q, device) for device in jax.devices()]
    mask = it.masks.padding(jax.numpy.asarray(INPUTS["lengths"]))
    for x in (q, *bound, q):
        for result in (
            it.attention(x, x, x, mask=mask),
            it.jl.gaussian_projection(8, 4, rng=0, like=x)(q),
        ):
            assert result.committed == x.committed
            assert not x.committed or result.devices() == x.devices()
    law = it.laws.AffineLog(jax.numpy.asarray(INPUTS["slope"]))
    entropy = it.attention_entropy(bound[1], bound[1], law=law, bias=jax.numpy.asarray(INPUTS["bias"]))
    assert entropy.devices() == {second}
    with pytest.raises(ValueError, match="`key` must be on the device of `query`"):
        it.attention(bound[0], bound[1], q)


@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.nightly)])
def test_two_devices(request, which):
    if request.config.getoption("--backend") not in (None, "jax"):
        pytest.skip("belongs to the backend jax")
    if Version(pytest.importorskip("jax").__version__) < Version("0.8"):
        pytest.skip("arrays sharded over explicit meshes need JAX 0.8")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    result = subprocess.run(
        [sys.executable, "-W", "error", __file__, which],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": flags},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


if __name__ == "__main__":
    import jax

    # One thread for each device: with many programs under way, few cores would wait for each other.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    warnings.filterwarnings("ignore", "A query sees more keys than")
    assert jax.device_count() == 2
    _arrays_without_a_device()
    _results_over_explicit_axes()
    _every_call(is_whole="all" in sys.argv)

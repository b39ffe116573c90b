"""A sequence over eight JAX devices, or four PyTorch processes: the numbers of one that is whole.

The tests start this file as a script, since JAX makes its devices when it starts, and PyTorch's are
processes of their own.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import oracles
import pytest
from packaging.version import Version

import isentropic as it
from isentropic import laws, masks
from isentropic.integrations import _sharded as sharded

STARTS, KEY_STARTS = (0, 3, 4, 11, 16), (0, 9, 9, 17, 24)
# Queries, keys, options; heads are always grouped.
CASES = {
    "plain": (16, 16, {}),
    "causal": (16, 16, {"is_causal": True}),
    "more-keys": (8, 24, {"is_causal": True}),
    "more-queries": (24, 8, {"is_causal": True}),  # the first of which see nothing
    "standard": (16, 16, {"law": None, "scale": 0.3}),
    "law-per-head": (16, 16, {"is_causal": True, "softcap": 2.0}),
    "n_keys": (16, 16, {"is_causal": True}),
    "window": (16, 24, {"mask": masks.window(5) | masks.padding(2), "is_causal": True}),
    "packed": (16, 24, {"mask": masks.packed(STARTS, KEY_STARTS), "is_causal": True}),
    "packed-arrays": (16, 24, {"is_causal": True}),
    "sinks": (16, 16, {"is_causal": True}),
}
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def _case(name, dtype="float64"):
    """NumPy arrays of the whole sequence, and how to call attention of them or of their shards."""
    n_queries, n_keys, options = CASES[name]
    rng = np.random.default_rng(7)
    shapes = {"q": (2, 4, n_queries, 6), "k": (2, 2, n_keys, 6), "v": (2, 2, n_keys, 5), "slope": (4,)}
    arrays = {key: rng.normal(size=shape).astype(dtype) for key, shape in shapes.items()}
    arrays["n"] = rng.integers(1, 600, size=n_queries).astype(dtype)
    arrays["sinks"] = rng.normal(size=4).astype(dtype)
    arrays["starts"] = np.asarray([STARTS, KEY_STARTS]).astype(dtype)

    def call(function, a):
        law = {"law": laws.AffineLog(a["slope"], 0.5)} if name == "law-per-head" else {}
        n = {"n_keys": a["n"]} if name == "n_keys" else {}
        if name == "sinks":
            n = {"sinks": a["sinks"]}
        if name == "packed-arrays":
            whole = a["starts"].int() if hasattr(a["starts"], "int") else a["starts"].astype("int32")
            n = {"mask": masks.packed(*whole)}
        return function(a["q"], a["k"], a["v"], **options, **law, **n, enable_gqa=True)

    return arrays, call


def _expected(name, arrays):
    n_queries, n_keys, options = CASES[name]
    visible = oracles.causal(n_queries, n_keys) | (not options.get("is_causal", False))
    if name == "window":
        near = oracles.band(n_queries, n_keys, 5, 0) | (np.arange(n_keys) < 2)
        visible = visible & near
    if name.startswith("packed"):
        visible = oracles.packed(STARTS, KEY_STARTS, right=0)
    factor = oracles.log_length(arrays["n"] if name == "n_keys" else visible.sum(-1))
    if name == "standard":
        factor = 1.0
    if name == "law-per-head":
        factor = arrays["slope"][:, None] * np.log(np.arange(n_queries) + 1) + 0.5
    dense = oracles.attention(
        arrays["q"], arrays["k"], arrays["v"], visible=visible, factor=factor,
        scale=options.get("scale"), softcap=options.get("softcap"),
        sinks=arrays["sinks"] if name == "sinks" else None,
    )  # fmt: skip
    return dense.output, dense.entropy(), dense.log_normalizer


def _results(state):
    return state.output(), state.entropy(), state.log_normalizer()


def _loss(xp, state):
    """A number that all results have a part in."""
    output, entropy, log_normalizer = _results(state)
    finite = xp.where(xp.isfinite(log_normalizer), log_normalizer, 0.0)
    return xp.sin(output).sum() + xp.cos(entropy).sum() + (0.1 * finite).sum()


# ---- JAX ----


def _ring(call, n_devices, **options):
    """``ring_attention_state`` of the whole arrays, by name."""
    import jax

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:n_devices]), ("s",))
    rows = jax.P(None, None, "s")
    specs = {"q": rows, "k": rows, "v": rows, "n": jax.P("s")}
    specs |= dict.fromkeys(("slope", "sinks", "starts"), jax.P())
    function = partial(sharded.ring_attention_state, axis_name="s")
    return jax.shard_map(
        lambda a: call(function, a), mesh=mesh, in_specs=(specs,), out_specs=rows, **options
    )


def _jax_values_and_gradients(name, n_devices, **options):
    import jax

    arrays, call = _case(name)
    loss = partial(_loss, jax.numpy)
    ring = _ring(call, n_devices, **options)

    def both(a):
        state, pull_back = jax.vjp(ring, a)
        return _results(state), pull_back(jax.grad(loss)(state))[0]

    results, gradient = jax.jit(both)(arrays)
    for got, expected in zip(results, _expected(name, arrays), strict=True):
        np.testing.assert_allclose(got, expected, **CLOSE)
    dense = jax.jit(jax.grad(lambda a: loss(call(it.attention_state, a))))(arrays)
    for key in arrays:
        np.testing.assert_allclose(gradient[key], dense[key], **CLOSE, err_msg=f"{name}: {key}")


def _jax_float32():
    import jax

    arrays, call = _case("causal", "float32")
    ring = _ring(call, 8)
    results = jax.jit(lambda a: _results(ring(a)))(arrays)
    for got, expected in zip(results, _expected("causal", arrays), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-5)


def _jax_several_tiles_in_a_shard():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isentropic._loops.BLOCKS.columns", 3)
        _jax_values_and_gradients("causal", 2)


def _jax_mesh_of_two_axes():
    """Heads over one axis and positions over the other; all heads share one head of the keys."""
    import jax

    arrays, _ = _case("law-per-head")
    arrays = {
        key: x[:, :1] if key in "kv" else x
        for key, x in arrays.items()
        if key in ("q", "k", "v", "slope")
    }

    def call(function, a):
        return function(a["q"], a["k"], a["v"], law=laws.AffineLog(a["slope"], 0.5), is_causal=True)

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("h", "s"))
    specs = {"q": jax.P(None, "h", "s"), "slope": jax.P("h")}
    specs |= dict.fromkeys("kv", jax.P(None, None, "s"))
    function = partial(sharded.ring_attention_state, axis_name="s")
    ring = jax.shard_map(
        lambda a: call(function, a), mesh=mesh, in_specs=(specs,), out_specs=specs["q"]
    )
    got, expected = (
        jax.jit(jax.grad(lambda a, f=f: _loss(jax.numpy, f(a))))(arrays)
        for f in (ring, partial(call, it.attention_state))
    )
    for key in arrays:
        np.testing.assert_allclose(got[key], expected[key], **CLOSE, err_msg=key)


def _jax_program():
    """Neither the program nor its memory grows with the number of devices."""
    import jax

    def compiled(n_devices):
        _, call = _case("causal")
        rows = jax.ShapeDtypeStruct((2, 4, 64 * n_devices, 6), "float32")
        n = jax.ShapeDtypeStruct((64 * n_devices,), "float32")
        arrays = {"q": rows, "k": rows, "v": rows, "n": n, "slope": n, "sinks": n, "starts": n}
        ring = _ring(call, n_devices)
        gradient = jax.jit(jax.grad(lambda a: _loss(jax.numpy, ring(a))))
        lowered = gradient.lower(arrays)
        products = lowered.as_text().count("dot_general")
        return products, lowered.compile().memory_analysis().temp_size_in_bytes

    (products, memory), (many_products, much_memory) = compiled(2), compiled(8)
    assert many_products == products
    assert much_memory <= memory * 1.1, (memory, much_memory)


def _jax_other_calls():
    import jax

    arrays, _ = _case("causal")
    q, k, v = (jax.numpy.asarray(arrays[name]) for name in "qkv")
    output, entropy, _ = _expected("causal", arrays)
    options = {"is_causal": True, "enable_gqa": True}
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("s",))

    def mapped(function):
        ring = partial(function, axis_name="s", **options)
        rows = jax.P(None, None, "s")
        return jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=rows, out_specs=rows))

    ring = mapped(sharded.ring_attention_state)
    np.testing.assert_allclose(ring(q, k, v).output(), output, **CLOSE)

    # Keys that are not finite leave the queries before them alone.
    got = np.asarray(ring(q, k.at[:, :, 9].set(np.nan), v).output())
    np.testing.assert_allclose(got[:, :, :9], output[:, :, :9], **CLOSE)
    assert np.isnan(got[:, :, 9:]).all()

    # Half precision is rounded once: the inputs, and the gradients when they are complete.
    half = [x.astype("bfloat16") for x in (q, k, v)]
    loss = partial(_loss, jax.numpy)

    @jax.jit
    def results_and_gradient(*arrays):
        state, pull_back = jax.vjp(ring, *arrays)
        return _results(state), pull_back(jax.grad(loss)(state))

    @jax.jit
    @partial(jax.grad, argnums=(0, 1, 2))
    def dense(q, k, v):
        return loss(it.attention_state(q, k, v, **options))

    rounded = [x.astype("float64") for x in half]
    expected = _expected("causal", dict(zip("qkv", rounded, strict=True)))
    results, gradient = results_and_gradient(*half)
    for got, x in zip(results, expected, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, x, rtol=2e-4, atol=1e-5)
    for got, x in zip(gradient, dense(*rounded), strict=True):
        assert got.dtype == "bfloat16"
        np.testing.assert_allclose(np.asarray(got, "float64"), x, rtol=2**-8, atol=1e-5)

    # Without values keys travel alone.
    got, gradient = jax.jit(jax.value_and_grad(lambda q: ring(q, k).entropy().sum()))(q)
    np.testing.assert_allclose(got, entropy.sum(), **CLOSE)
    expected = jax.jit(jax.grad(lambda q: it.attention_entropy(q, k, **options).sum()))(q)
    np.testing.assert_allclose(gradient, expected, **CLOSE)
    assert jax.eval_shape(ring, q, k).weighted_value is None


def _jax_devices():
    import jax

    assert jax.device_count() == 8
    _jax_float32()
    _jax_program()
    jax.config.update("jax_enable_x64", True)
    for name in CASES:
        _jax_values_and_gradients(name, 8)
    _jax_values_and_gradients("causal", 2, check_vma=False)
    _jax_several_tiles_in_a_shard()
    _jax_mesh_of_two_axes()
    _jax_other_calls()


# ---- PyTorch ----


def _torch_values_and_gradients(name, group):
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    arrays, call = _case(name)
    whole = {key: torch.asarray(x).requires_grad_() for key, x in arrays.items()}
    axes = {"q": -2, "k": -2, "v": -2, "n": -1}

    def shard(key, x):
        return x.detach().chunk(size, axes[key])[rank] if key in axes else x.detach()

    own = {key: shard(key, x).clone().requires_grad_() for key, x in whole.items()}
    state = call(partial(sharded.distributed_attention_state, group=group), own)
    _loss(torch, state).backward()
    for got, expected, axis in zip(_results(state), _expected(name, arrays), (-2, -1, -1), strict=True):
        np.testing.assert_allclose(
            got.detach(), np.split(expected, size, axis)[rank], **CLOSE, err_msg=name
        )

    _loss(torch, call(it.attention_state, whole)).backward()
    if shared := {"law-per-head": "slope", "sinks": "sinks"}.get(name):
        dist.all_reduce(own[shared].grad, group=group)
    for key, x in whole.items():
        if x.grad is not None:
            expected = shard(key, x.grad)
            torch.testing.assert_close(own[key].grad, expected, **CLOSE, msg=f"{name}: {key}")


def _torch_hidden_blocks_are_skipped(rank, size):
    import torch

    met = []

    def counting(query, key, *args, **options):
        met.append(key.shape[-2])
        return it.attention_state(query, key, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "attention_state", counting)
        q = torch.zeros(4, 2)
        sharded.distributed_attention_state(q, q, is_causal=True)
    assert len(met) == size
    assert met.count(4) == size - rank


def _torch_other_calls(rank, size):
    import torch

    arrays, _ = _case("causal")
    output, entropy, _ = (np.split(x, size, 2)[rank] for x in _expected("causal", arrays))
    q, k, v = (torch.asarray(arrays[name]).chunk(size, -2)[rank] for name in "qkv")
    options = {"is_causal": True, "enable_gqa": True}
    got = sharded.distributed_attention_state(q, k, v, **options).output()
    np.testing.assert_allclose(got, output, **CLOSE)

    k.requires_grad_()
    state = sharded.distributed_attention_state(q, k, **options)
    assert state.weighted_value is None
    assert not state.maximum.requires_grad
    np.testing.assert_allclose(state.entropy().detach(), entropy, **CLOSE)
    state.entropy().sum().backward()
    assert k.grad.isfinite().all()

    # Half precision is rounded once: the inputs, and the gradients when they are complete.
    half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    whole = [torch.asarray(arrays[x]).bfloat16().double().requires_grad_() for x in "qkv"]
    _loss(torch, it.attention_state(*whole, **options)).backward()
    expected = _expected("causal", dict(zip("qkv", (x.detach().numpy() for x in whole), strict=True)))
    state = sharded.distributed_attention_state(*half, **options)
    for got, x, axis in zip(_results(state), expected, (-2, -1, -1), strict=True):
        assert got.dtype == torch.float32
        x = np.split(x, size, axis)[rank]
        np.testing.assert_allclose(got.detach(), x, rtol=2e-4, atol=1e-5)
    _loss(torch, state).backward()
    for own, x in zip(half, whole, strict=True):
        assert own.grad.dtype == torch.bfloat16
        x = x.grad.chunk(size, -2)[rank]
        np.testing.assert_allclose(own.grad.double(), x, rtol=2**-8, atol=1e-5)


def _torch_process(rank, size, store):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for name in CASES:
        _torch_values_and_gradients(name, None)
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    _torch_values_and_gradients("causal", pairs[rank % 2])
    _torch_values_and_gradients("more-queries", pairs[rank % 2])
    alone = [dist.new_group([i]) for i in range(size)]
    _torch_values_and_gradients("causal", alone[rank])
    _torch_hidden_blocks_are_skipped(rank, size)
    _torch_other_calls(rank, size)
    with pytest.raises(TypeError, match="`group` must be a process group to which this process"):
        sharded.distributed_attention_state(*torch.zeros(2, 4, 2), group=pairs[1 - rank % 2])
    dist.destroy_process_group()


# ---- What pytest runs ----


def _start(*arguments, **environment):
    tests = str(Path(__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-W", "error", __file__, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([tests, *sys.path])} | environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(*processes):
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.callback(process.kill)
        errors = [process.communicate(timeout=200)[1] for process in processes]
        stack.pop_all()
    assert [p.returncode for p in processes] == [0] * len(processes), "\n".join(errors)


def test_import_brings_no_library():
    code = (
        "import sys, isentropic.integrations._sharded\n"
        "found = {'torch', 'jax'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


EMPTY = [(0, 4), (4, 0), (0, 0)]


@pytest.mark.skipif(
    importlib.util.find_spec("jax") is not None and Version(metadata.version("jax")) < Version("0.8"),
    reason="`jax.shard_map` has other rules before JAX 0.8",
)
class TestJAX:
    def test_eight_devices(self, only):
        only("jax")
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
        _finish(_start("jax", XLA_FLAGS=flags))

    def test_one_device(self, only):
        only("jax")
        from jax_x64 import enable_x64

        with enable_x64(True):
            _jax_values_and_gradients("causal", 1)

    @pytest.mark.parametrize(("n_queries", "n_keys"), EMPTY)
    def test_no_rows(self, only, n_queries, n_keys):
        jax = only("jax")
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("s",))

        def ring(*arrays):
            return sharded.ring_attention_state(*arrays, axis_name="s", is_causal=True).output()

        mapped = jax.shard_map(ring, mesh=mesh, in_specs=jax.P("s"), out_specs=jax.P("s"))
        arrays = [jax.numpy.ones((n, 2)) for n in (n_queries, n_keys, n_keys)]
        output, pull_back = jax.vjp(jax.jit(mapped), *arrays)
        assert output.shape == (n_queries, 2)
        assert not any(x.any() for x in (output, *pull_back(output)))

    def test_errors(self, only):
        jax = only("jax")
        x = jax.numpy.zeros((4, 2))
        ring = partial(sharded.ring_attention_state, axis_name="s")
        with pytest.raises(ValueError, match=r"`axis_name` must be an axis of .*, got 's'"):
            ring(x, x, x)
        with pytest.raises(TypeError, match="`query` must be an array of JAX, got ndarray"):
            ring(*[np.zeros((4, 2))] * 3)
        with pytest.raises(TypeError, match="`key` must be an array of the library of `query`"):
            ring(x, np.zeros((4, 2)), x)

        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("s",))

        def mapped(*arrays, **options):
            call = jax.shard_map(
                partial(ring, **options), mesh=mesh, in_specs=jax.P("s"), out_specs=jax.P("s")
            )
            return jax.eval_shape(call, *arrays)

        with pytest.raises(ValueError, match="`query` must have at least 2 dimensions, got 1"):
            mapped(x[0], x, x)
        with pytest.raises(ValueError, match="`key` must have the last dimension of `query`"):
            mapped(x, x[:, :1], x)
        with pytest.raises(ValueError, match="`value` must have as many rows as `key`"):
            mapped(x, x, x[:3])
        with pytest.raises(TypeError, match="`key` must have a real floating-point dtype"):
            mapped(x, x.astype("int32"), x)
        with pytest.raises(TypeError, match="`law` must be a law"):
            mapped(x, x, x, law=2.0)
        with pytest.raises(ValueError, match="`softcap` must be above 0"):
            mapped(x, x, x, softcap=-1.0)
        with pytest.raises(ValueError, match="`n_keys` must have a shape broadcastable to"):
            mapped(x, x, x, n_keys=jax.numpy.ones(3))


@pytest.fixture
def group(only):
    torch = only("torch")
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch
    dist.destroy_process_group()


class TestTorch:
    def test_four_processes(self, only, tmp_path):
        only("torch")
        _finish(*(_start("torch", rank, 4, tmp_path / "store") for rank in range(4)))

    @pytest.mark.parametrize("name", sorted(CASES))
    def test_one_process(self, group, name):
        _torch_values_and_gradients(name, None)

    def test_without_values(self, group):
        _torch_other_calls(0, 1)

    @pytest.mark.parametrize(("n_queries", "n_keys"), EMPTY)
    def test_no_rows(self, group, n_queries, n_keys):
        arrays = [group.ones(n, 2).requires_grad_() for n in (n_queries, n_keys, n_keys)]
        output = sharded.distributed_attention_state(*arrays, is_causal=True).output()
        output.sum().backward()
        assert output.shape == (n_queries, 2)
        assert not any(x.any() for x in (output, *(a.grad for a in arrays)))

    def test_errors(self, group):
        x = group.zeros(4, 2)
        attention = sharded.distributed_attention_state
        with pytest.raises(TypeError, match="`query` must be an array of PyTorch, got ndarray"):
            attention(*[np.zeros((4, 2))] * 3)
        with pytest.raises(TypeError, match=r"`group` must be a process group .*, got str"):
            attention(x, x, x, group="all")
        with pytest.raises(ValueError, match="`value` must have as many rows as `key`"):
            attention(x, x, x[:3])
        with pytest.raises(TypeError, match="`query` must have a real floating-point dtype"):
            attention(x.int(), x, x)
        with pytest.raises(ValueError, match="`key` must be on the device of `query`"):
            attention(x, x.to("meta"), x)

    def test_without_a_group(self, only):
        x = only("torch").zeros(4, 2)
        with pytest.raises(
            ValueError, match=r"`group` must be initialized by `torch.distributed.init_pro"
        ):
            sharded.distributed_attention_state(x, x, x)


if __name__ == "__main__":
    if sys.argv[1] == "jax":
        _jax_devices()
    else:
        _torch_process(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

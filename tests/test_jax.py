"""JAX transformations: jit, vmap, grad; with loops of several tiles, on two devices, without x64."""

import importlib
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import capabilities
import cases
import numpy as np
import oracles
import pytest
from packaging.version import Version

import isentropic as it
from isentropic import laws, masks
from isentropic.layers._linear_attention import PositiveFeatures

jax = pytest.importorskip("jax")

importlib.import_module("jax.export")  # which is no attribute before its import in old versions
from jax_x64 import enable_x64  # noqa: E402

jnp = jax.numpy


def _every(column):
    """Every call that `capabilities` says to run so."""
    return pytest.mark.parametrize("name", capabilities.that_run(column, cases.CASES))


@pytest.fixture(autouse=True)
def _only_once(request):
    if request.config.getoption("--backend") not in (None, "jax"):
        pytest.skip("belongs to the backend jax")
    with jax.numpy_rank_promotion("raise"):  # as in JAX's own tests
        yield


def _split(dtype="float32"):
    """Differentiable arrays, and the others."""
    arrays = {name: jnp.asarray(x) for name, x in cases.inputs(dtype).items()}
    discrete = {name: arrays.pop(name) for name in cases.DISCRETE}
    return arrays, discrete


class TestEveryFunction:
    @_every("jit")
    def test_jit(self, name, tiny_tiles):
        arrays, discrete = _split()
        case = cases.CASES[name]
        # Everything is traced, also masks, lengths and the parameters of laws.
        got = jax.jit(case)(arrays | discrete)
        exact = case(cases.inputs("float64"))
        assert jax.tree.structure(got) == jax.tree.structure(exact)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
            assert a.dtype == jnp.float32 or not jnp.issubdtype(a.dtype, jnp.floating)
            # The cases draw their numbers in float64 and round them: inputs differ by 6e-8.
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)

    @_every("jit")
    def test_float32_stays_float32_where_float64_is_the_default(self, name, x64):
        arrays, discrete = _split("float32")
        for x in jax.tree.leaves(jax.eval_shape(cases.CASES[name], arrays | discrete)):
            assert x.dtype == jnp.float32 or not jnp.issubdtype(x.dtype, jnp.floating)

    @_every("jax_vmap")
    def test_each_array_is_traced_alone(self, name):
        # Inside a trace the result of any operation is traced, also of arrays that are not.
        arrays, discrete = _split()
        case, constants = cases.CASES[name], arrays | discrete
        shapes = jax.tree.map(lambda y: y.shape, jax.eval_shape(case, constants))

        for key in sorted(cases.names_read(case)):

            def call(x, key=key):
                return case(constants | {key: x})

            assert jax.tree.map(lambda y: y.shape, jax.eval_shape(call, constants[key])) == shapes

        def loss(x):
            result = call(x)
            return sum(jnp.sum(y) for y in jax.tree.leaves(result)), result

        if key in arrays and capabilities.row_of(name).gradient.runs:
            call_of_batch = jax.vmap(jax.value_and_grad(jax.checkpoint(loss), has_aux=True))
        else:
            call_of_batch = jax.vmap(lambda x: ((None, call(x)), None))
        (_, got), _ = jax.eval_shape(call_of_batch, jnp.stack([constants[key]] * 2))
        assert jax.tree.map(lambda y: y.shape[1:], got) == shapes

    @_every("gradient")
    def test_gradient(self, name, x64, tiny_tiles):
        arrays, discrete = _split("float64")
        case = cases.CASES[name]
        read = cases.names_read(case)
        used = {key: x for key, x in arrays.items() if key in read}

        def loss(used):
            result = jax.tree.leaves(case(arrays | discrete | used))
            return sum((jnp.sum(jnp.sin(jnp.where(jnp.isfinite(x), x, 0.0))) for x in result), 0.0)

        of_loss = jax.jit(jax.value_and_grad(loss))
        _, gradient = of_loss(used)
        direction = {
            key: np.random.default_rng(i).normal(size=x.shape)
            for i, (key, x) in enumerate(used.items())
        }
        if "p" in direction:  # stay at the boundary: the derivative at p = 0 is one-sided
            direction["p"] = np.where(np.asarray(used["p"]) > 0, direction["p"], 0.0)
        step = 1e-5
        ahead, behind = (
            of_loss({k: x + s * direction[k] for k, x in used.items()})[0] for s in (step, -step)
        )
        numerical = (ahead - behind) / (2 * step)
        analytic = sum(float((gradient[k] * direction[k]).sum()) for k in used)
        assert all(np.isfinite(g).all() for g in gradient.values())
        np.testing.assert_allclose(analytic, numerical, rtol=1e-5, atol=1e-7)


# The shapes of `cases.inputs` with a symbol for the batch, b, and for the length, n. The batch of `p`
# is that of a slice of it.
SYMBOLIC = {
    "q": "b, 4, n, 8", "k": "b, 4, n, 8", "v": "b, 4, n, 6", "k2": "b, 2, n, 8", "v2": "b, 2, n, 6",
    "x": "b, n, 16", "bias": "1, 4, n, n", "visible": "b, 1, n, n", "lengths": "b, 1", "ids": "n",
    "n_keys": "n", "p": "2, n, n", "target": "b, 4, n",
}  # fmt: skip


class TestSymbolicSizes:
    """One exported program for all batches and lengths."""

    @staticmethod
    def _program(function, read):
        texts = {key: SYMBOLIC.get(key, ", ".join(map(str, x.shape))) for key, x in read.items()}
        bounds = {"n": "n >= 6", "b": "b >= 2"}
        used = [bound for symbol, bound in bounds.items() if symbol in "".join(texts.values())]
        scope = jax.export.SymbolicScope(used)
        shapes = {
            key: jax.ShapeDtypeStruct(jax.export.symbolic_shape(text, scope=scope), read[key].dtype)
            for key, text in texts.items()
        }
        return jax.export.export(jax.jit(function))(shapes).call

    @_every("jit")
    def test_values(self, name):
        case, inputs = cases.CASES[name], cases.inputs(n=9)
        read = {key: jnp.asarray(inputs[key]) for key in sorted(cases.names_read(case))}
        if not SYMBOLIC.keys() & read.keys():
            pytest.skip("its arrays have no batch and no length")
        program = self._program(lambda read: jax.tree.leaves(case(read)), read)
        more = {
            key: x[np.asarray([0, 1, 0])] if SYMBOLIC.get(key, "")[:1] == "b" else x
            for key, x in read.items()
        }
        exact = case({key: np.asarray(x) for key, x in more.items()})
        for a, b in zip(program(more), jax.tree.leaves(exact), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)

    def test_gradient(self, rng):
        q, k, v = (jnp.asarray(x) for x in rng.normal(size=(3, 2, 4, 9, 8)).astype("float32"))

        def gradient(a):
            def loss(a):
                mask = masks.causal() & masks.window(4)
                return it.attention(a["q"], a["k"], a["v"], mask=mask).sum()

            return jax.grad(loss)(a)

        arrays = {"q": q, "k": k, "v": v[..., :6]}
        got = self._program(gradient, arrays)(arrays)
        for key, expected in gradient(arrays).items():
            np.testing.assert_allclose(got[key], expected, rtol=1e-4, atol=1e-5)

    def test_known_lengths_keep_their_tiles(self):
        """A symbolic batch alone does not put an L×S array of weights into memory."""
        scope = jax.export.SymbolicScope()
        shape = jax.export.symbolic_shape("b, 4, 4096, 8", scope=scope)
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        program = jax.export.export(jax.jit(lambda x: it.attention(x, x, x, is_causal=True)))(x)
        assert "4096x4096" not in program.mlir_module()

    def test_maps_before_other_axes(self):
        x = jnp.asarray(cases.inputs(n=9)["x"].swapaxes(1, 2))
        f = it.jl.hadamard_projection(16, 5, rng=0, like=x)
        shape = jax.export.symbolic_shape("b, 16, n")
        call = jax.jit(lambda x: (f(x, axis=1), it.jl.hadamard_transform(x, axis=1)))
        program = jax.export.export(call)(jax.ShapeDtypeStruct(shape, x.dtype))
        for a, b in zip(program.call(x), call(x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    def test_what_needs_a_number(self):
        points = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 8"), jnp.float32)
        with pytest.raises(ValueError, match="`x` must have a known number of rows"):
            jax.eval_shape(lambda x: it.jl.distortion(x, x).distance, points)
        heads = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4, n, 8"), jnp.float32)
        with pytest.raises(ValueError, match="jax_tiles: some size is symbolic"):
            jax.eval_shape(lambda x: it.attention(x, x, x, implementation="jax_tiles"), heads)


class TestTransformations:
    def test_vmap(self, rng, tiny_tiles):
        q, k, v = jnp.asarray(rng.normal(size=(3, 2, 4, 7, 8)).astype("float32"))
        lengths = jnp.asarray([5, 7])

        def call(q, k, v, length):
            mask = masks.causal() & masks.padding(length)
            state = it.attention_state(q, k, v, mask=mask)
            return state.output(), it.attention_entropy(q, k, mask=mask, order=2)

        got = jax.jit(jax.vmap(call))(q, k, v, lengths)
        for i in range(2):
            for a, b in zip(got, call(q[i], k[i], v[i], lengths[i]), strict=True):
                np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5)

    def test_closed_over_arrays(self, rng):
        # So many that NumPy's kernel would take the arrays that are there.
        n = 600
        q, k, v = jnp.asarray(rng.normal(size=(3, 2, 4, n, 8)).astype("float32"))
        lengths = jnp.asarray([[n - 20], [n]])
        calls = {
            "law": lambda s: it.attention_entropy(q, k, is_causal=True, law=laws.AffineLog(s)),
            "padding": lambda m: it.attention(q, k, v, mask=masks.padding(m)),
            "result": lambda s: it.attention(q, k, v, is_causal=True) * s[0],
            "state": lambda s: it.attention_state(q, k, v, is_causal=True).entropy() * s[0],
            "poison": lambda s: it.attention(q.at[0, 0, 3].set(jnp.nan), k, v, is_causal=True) * s[0],
        }
        for name, call in calls.items():
            x = lengths if name == "padding" else jnp.linspace(0.2, 0.5, 4)
            np.testing.assert_allclose(jax.jit(call)(x), call(x), rtol=2e-4, atol=2e-5, err_msg=name)

    def test_second_derivative(self, rng, x64):
        q, k = jnp.asarray(rng.normal(size=(2, 4, 3)))

        def h(q):
            return it.attention_entropy(q, k, is_causal=True, law=None).sum()

        hessian = jax.hessian(h)(q)
        numerical = (jax.grad(h)(q.at[2, 1].add(1e-5)) - jax.grad(h)(q.at[2, 1].add(-1e-5))) / 2e-5
        np.testing.assert_allclose(hessian[2, 1], numerical, rtol=1e-5, atol=1e-8)

    def test_gradients_at_singular_rows(self):
        # One-hot rows, rows that see nothing, logits of −∞.
        q = jnp.asarray([[300.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
        k = jnp.asarray([[300.0, 0.0], [0.0, 1.0], [-300.0, 0.0]])
        mask = jnp.asarray([[True, True, True], [False, False, False], [True, True, False]])
        for order in (0.0, 0.5, 0.9, 1.0, 1.1, 2.0, np.inf):
            grads = jax.grad(
                lambda q, k, order=order: it.attention_entropy(q, k, mask=mask, order=order).sum(),
                argnums=(0, 1),
            )(q, k)
            assert all(bool(jnp.isfinite(g).all()) for g in grads)

            def of_bias(b, order=order):
                return it.attention_entropy(q, k, bias=b, order=order).sum()

            assert bool(jnp.isfinite(jax.grad(of_bias)(jnp.where(mask, 0.0, -jnp.inf))).all())

            def of_p(p, order=order):
                return it.entropy(p, order=order).sum()

            assert bool(jnp.isfinite(jax.grad(of_p)(jnp.asarray([[1.0, 0.0], [0.0, 0.0]]))).all())
        out = jax.grad(lambda v: it.attention(q, k, v, mask=mask).sum())(k)
        assert bool(jnp.isfinite(out).all())

    def test_hidden_poison_does_not_leak_into_gradients(self, rng, tiny_tiles):
        q, k, v = rng.normal(size=(3, 6, 4)).astype("float32")
        visible = np.ones((6, 6), bool)
        visible[:, 2] = visible[4, :] = False

        def loss(q, k, v):
            state = it.attention_state(q, k, v, mask=jnp.asarray(visible))
            return (state.output() ** 2).sum() + state.entropy().sum()

        clean = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
        q[4], k[2], v[2] = np.nan, np.inf, np.nan
        dirty = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
        for a, b in zip(dirty, clean, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    def test_compiled_program_does_not_grow_with_the_length(self):
        def size(n):
            shape = jax.ShapeDtypeStruct((2, n, 16), jnp.float32)
            call = jax.jit(lambda q, k, v: it.attention(q, k, v, is_causal=True))
            return len(call.lower(shape, shape, shape).as_text().splitlines())

        assert size(65536) == size(16384)

    def test_no_array_of_the_size_of_the_weights(self):
        n = 16384
        shape = jax.ShapeDtypeStruct((1, n, 16), jnp.float32)

        def loss(q, k, v):
            state = it.attention_state(q, k, v, is_causal=True)
            return state.output().sum() + state.entropy().sum()

        for call in (loss, jax.grad(loss, argnums=(0, 1, 2))):
            memory = jax.jit(call).lower(shape, shape, shape).compile().memory_analysis()
            assert memory.temp_size_in_bytes < n * n * 4 / 8

    def test_arrays_that_are_no_arguments(self, rng):
        q, k, v = jnp.asarray(rng.normal(size=(3, 5, 4)).astype("float32"))
        bias = jnp.asarray(rng.normal(size=(5, 5)).astype("float32"))

        def call(bias):
            return it.attention(q, k, v, bias=bias, is_causal=True)

        np.testing.assert_allclose(jax.jit(call)(bias), call(bias), rtol=1e-4, atol=1e-5)

    def test_state_is_a_pytree(self, rng):
        q = jnp.asarray(rng.normal(size=(5, 4)))
        state = jax.jit(it.attention_state)(q, q, q)
        assert isinstance(state, it.AttentionState)
        assert isinstance(jax.tree.map(lambda x: x, state), it.AttentionState)

    def test_against_jax(self, rng):
        q, k, v = jnp.asarray(rng.normal(size=(3, 2, 9, 4, 8)).astype("float32"))
        visible = jnp.asarray(rng.random((2, 1, 9, 9)) < 0.8).at[..., 0].set(True)
        bias = jnp.asarray(rng.normal(size=(1, 4, 9, 9)).astype("float32"))

        def heads_first(x):
            return jnp.moveaxis(x, -2, -3)

        for options in ({}, {"is_causal": True}, {"mask": visible}, {"bias": bias}, {"scale": 0.2}):
            expected = jax.nn.dot_product_attention(q, k, v, **options)
            got = it.attention(*[heads_first(x) for x in (q, k, v)], law=None, **options)
            np.testing.assert_allclose(heads_first(got), expected, rtol=1e-4, atol=1e-5)
        grouped = k[:, :, :2], v[:, :, :2]
        expected = jax.nn.dot_product_attention(q, *grouped)
        got = it.attention(*[heads_first(x) for x in (q, *grouped)], law=None, enable_gqa=True)
        np.testing.assert_allclose(heads_first(got), expected, rtol=1e-4, atol=1e-5)
        if Version(jax.__version__) >= Version("0.8.2"):  # before, its window is another one
            expected = jax.nn.dot_product_attention(q, k, v, local_window_size=(3, 2))
            got = it.attention(*[heads_first(x) for x in (q, k, v)], law=None, mask=masks.window(3, 2))
            np.testing.assert_allclose(heads_first(got), expected, rtol=1e-4, atol=1e-5)
        p = jax.nn.softmax(bias)
        np.testing.assert_allclose(
            it.entropy_from_logits(bias), -(p * jnp.log(p)).sum(-1), rtol=1e-4, atol=1e-5
        )

    def test_value_against_definition_through_scans(self, rng, set_blocks, tiny_tiles, x64):
        q, k, v = rng.normal(size=(3, 2, 14, 6))
        visible = oracles.causal(14, 14)
        expected = oracles.attention(
            q, k, v, visible=visible, factor=oracles.log_length(visible.sum(-1))
        )
        for block in (1, 4, 5, 13):
            set_blocks(columns=block)
            state = jax.jit(lambda *a: it.attention_state(*a, is_causal=True))(q, k, v)
            np.testing.assert_allclose(state.output(), expected.output, rtol=1e-11)
            np.testing.assert_allclose(state.entropy(), expected.entropy(), rtol=1e-11, atol=1e-12)


def _python(code, **environment):
    import os

    code = "import warnings; warnings.simplefilter('error')\n" + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_x64_nothing_warns():
    result = _python(
        """
        import sys; sys.path.insert(0, "tests")
        import cases, jax, jax.numpy as jnp
        arrays = {name: jnp.asarray(x) for name, x in cases.inputs().items() if x.dtype != "int64"}
        arrays |= {n: jnp.asarray(x.astype("int32")) for n, x in cases.inputs().items() if x.dtype == "int64"}
        for case in cases.CASES.values():
            jax.eval_shape(case, arrays)
        """
    )
    assert result.returncode == 0, result.stderr


def test_two_devices():
    result = _python(
        """
        import sys; sys.path.insert(0, "tests")
        import cases, jax, pytest, isentropic as it
        first, second = jax.devices("cpu")
        arrays = {n: jax.device_put(x, second) for n, x in cases.inputs().items()}
        # Each function once, as JAX compiles every operation for the second device.
        for name in {name.partition("-")[0]: name for name in cases.CASES}.values():
            for x in jax.tree.leaves(cases.CASES[name](arrays)):
                assert x.devices() == {second}, (name, x.devices())
        with pytest.raises(ValueError, match="`key` must be on the device of `query`"):
            it.attention(arrays["q"], jax.device_put(arrays["k"], first), arrays["v"])

        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        import numpy as np
        mesh = Mesh(np.array([first, second]), ("batch",))
        sharded = jax.device_put(cases.inputs()["q"], NamedSharding(mesh, P("batch")))
        whole = jax.device_put(cases.inputs()["k"], NamedSharding(mesh, P()))
        out = jax.jit(it.attention)(sharded, whole, whole)
        assert len(out.devices()) == 2
        eager = it.attention(sharded, whole, whole, is_causal=True)
        expected = it.attention(*[cases.inputs()[n] for n in "qkk"], is_causal=True)
        np.testing.assert_allclose(eager, expected, rtol=1e-4, atol=1e-5)

        slopes = np.asarray([0.25, 0.5])
        for spec in (P(), P("batch")):
            law = it.laws.AffineLog(jax.device_put(slopes, NamedSharding(mesh, spec)))
            assert law == it.laws.AffineLog(slopes)
            assert law.to_dict()["slope"] == [0.25, 0.5]
        """,
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
    )
    assert result.returncode == 0, result.stderr


class TestLaws:
    def test_ranges_are_not_checked_where_values_cannot_be_read(self):
        n, base = jnp.asarray([4.0, 16.0]), jnp.asarray([[4.0, 2.0], [0.5, 2.0]])

        def call(base):
            return laws.LogLength(base)(n)

        with pytest.raises(ValueError, match=r"`base` must be above 1, got 0.5 at \(1, 0\)"):
            call(base)
        for transformed in (jax.jit(call), jax.vmap(call)):
            assert jnp.isfinite(transformed(base)).all()
        assert jax.jacobian(call)(base).shape == (2, 2, 2, 2, 2)
        assert jax.eval_shape(call, base).shape == (2, 2, 2)

    def test_arguments_of_jit(self, rng):
        q, k = jnp.asarray(rng.normal(size=(2, 4, 9, 8)).astype("float32"))
        traces = []

        @jax.jit
        def entropy(law):
            traces.append(law)
            return it.attention_entropy(q, k, law=law, is_causal=True)

        def law(slope, shift=0.0):
            return laws.scaled(laws.shifted(laws.AffineLog(jnp.asarray(slope), 0.5), shift), 2.0)

        for slope in ([0.1, 0.2, 0.3, 0.4], [1.0, 0.0, -1.0, 0.5]):
            expected = it.attention_entropy(q, k, law=law(slope), is_causal=True)
            np.testing.assert_allclose(entropy(law(slope)), expected, rtol=1e-4, atol=1e-5)
        assert len(traces) == 1
        entropy(law([0.1, 0.2, 0.3, 0.4], shift=1))
        assert len(traces) == 2
        for base in (512, 512.0, 64):
            entropy(laws.LogLength(base))
        assert len(traces) == 4
        static = jax.jit(lambda law, n: law(n), static_argnames="law")
        np.testing.assert_allclose(static(law=laws.LogLength(2), n=jnp.asarray([8.0])), 3.0, rtol=1e-6)

    def test_gradients_are_laws(self, rng):
        q, k = jnp.asarray(rng.normal(size=(2, 2, 9, 8)).astype("float32"))

        def entropy(law):
            return it.attention_entropy(q, k, law=law, is_causal=True).sum()

        slope, factor = jnp.asarray([0.5, 1.0]), jnp.asarray(2.0)
        law = laws.scaled(laws.AffineLog(slope, 0.5), factor)
        gradient = jax.jit(jax.grad(entropy))(law)
        assert isinstance(gradient.law, laws.AffineLog)
        assert gradient.law.intercept == 0.5
        expected = jax.grad(
            lambda slope, factor: entropy(laws.scaled(laws.AffineLog(slope, 0.5), factor)), (0, 1)
        )(slope, factor)
        np.testing.assert_allclose(gradient.law.slope, expected[0], rtol=1e-5)
        np.testing.assert_allclose(gradient.factor, expected[1], rtol=1e-5)
        # A step of gradient descent, of the numbers that a mask chooses.
        chosen = jax.tree.map(lambda x: x.ndim > 0, law)
        after = jax.tree.map(lambda x, g, c: x - 0.1 * g if c else x, law, gradient, chosen)
        assert entropy(after) < entropy(law)
        assert after.factor is factor
        # A base falls below 1, and is refused where it is used to make a law, not in the tree.
        base = laws.LogLength(jnp.asarray([2.0]))
        assert float(jax.tree.map(lambda x: x - 9, base).base[0]) == -7.0

    def test_maps_over_laws(self):
        n = jnp.asarray([2.0, 64.0])
        stacked = laws.scaled(laws.LogLength(jnp.asarray([[2.0, 4.0], [8.0, 16.0], [32.0, 64.0]])), 2.0)
        got = jax.vmap(lambda law: law(n))(stacked)
        assert got.shape == (3, 2, 2)
        np.testing.assert_allclose(got, stacked(n), rtol=1e-6)
        axes = jax.tree.map(lambda _: 1, stacked)
        got = jax.vmap(lambda law: law(n), in_axes=(axes,))(stacked)
        np.testing.assert_allclose(got, jnp.swapaxes(stacked(n), 0, 1), rtol=1e-6)
        shapes = jax.eval_shape(lambda law: law, stacked)
        assert shapes.law.base.shape == (3, 2)
        last, _ = jax.lax.scan(
            lambda law, _: (jax.tree.map(lambda x: x + 1, law), None), stacked, length=3
        )
        np.testing.assert_allclose(last.law.base, stacked.law.base + 3)

    def test_what_was_registered_by_others(self):
        @jax.tree_util.register_dataclass
        @dataclass(frozen=True)
        class Own(laws.Law):
            half: float

            def evaluate(self, xp, n):
                return n / (n + self.half)

        assert jax.tree.leaves(Own(3.0)) == [3.0]


def test_laws_of_before_the_import():
    result = _python(
        """
        import sys
        from isentropic import laws
        law = laws.scaled(laws.LogLength(512), 2.0)
        assert "jax" not in sys.modules
        import jax
        assert jax.tree.leaves(laws.AffineLog(jax.numpy.ones(2))) != []
        assert jax.jit(lambda law: law(512))(law) == 2.0  # of classes that were known
        """
    )
    assert result.returncode == 0, result.stderr


def test_tiles_out_of_reach_are_skipped_under_jit(tiny_tiles):
    """By a condition, at run time."""

    def count(mask):
        shape = jax.ShapeDtypeStruct((30, 4), jnp.float32)
        return str(jax.make_jaxpr(lambda q: it.attention(q, q, q, mask=mask))(shape)).count("cond[")

    assert count(None) == 0
    assert count(masks.window(3)) > 0


def _heads_of_features(a):
    return PositiveFeatures(jnp.stack([a["omega"]] * 4))


# Cases, and calls with arrays of several ranks.
EXPLICIT_BROADCASTS = {
    name: case
    for name, case in cases.CASES.items()
    if name.partition("-")[0]
    in {
        "CountSketch", "DenseProjection", "HadamardProjection", "Rotation", "hadamard_transform", "rotary",
    } or "-features" in name
} | {
    "rotary-positions": lambda a: it.layers.rotary(a["q"], a["n_keys"][:1]),
    "rotary-interleaved-positions": lambda a: it.layers.rotary(a["q"], a["ids"], interleaved=True),
    "linear_attention-features-heads": lambda a: _heads_of_features(a)(a["q"]),
    "linear_attention-features-heads-variance": lambda a: PositiveFeatures(
        jnp.stack([a["omega"]] * 4), a["slope"] + 1
    )(a["q"]),
    "linear_attention": cases.CASES["linear_attention"],
    "linear_attention-variance": cases.CASES["linear_attention-variance"],
    "linear_attention-heads-variance": lambda a: it.layers.linear_attention(
        a["q"], a["k"], a["v"], PositiveFeatures(jnp.stack([a["omega"]] * 4), a["slope"] + 1)
    ),
    "linear_attention_error-variance": cases.CASES["linear_attention_error-variance"],
    "linear_attention-causal": lambda a: it.layers.linear_attention(
        a["q"], a["k"], a["v"], PositiveFeatures(a["omega"]), is_causal=True
    ),
    "linear_attention-no-law": lambda a: it.layers.linear_attention(
        a["q"], a["k"], a["v"], PositiveFeatures(a["omega"]), law=None
    ),
    "linear_attention-heads": lambda a: it.layers.linear_attention(
        a["q"], a["k"], a["v"], _heads_of_features(a), is_causal=True
    ),
    "linear_attention-query": lambda a: it.layers.linear_attention(
        a["q"][0, 0], a["k"], a["v"][0], PositiveFeatures(a["omega"]), is_causal=True
    ),
    "linear_attention-key": lambda a: it.layers.linear_attention(
        a["q"], a["k"][0], a["v"][0, 0], PositiveFeatures(a["omega"]), is_causal=True
    ),
    "linear_attention-value": lambda a: it.layers.linear_attention(
        a["q"][0], a["k"][0, 0], a["v"], PositiveFeatures(a["omega"]), is_causal=True
    ),
    "linear_attention_error": lambda a: it.layers.linear_attention_error(
        a["q"], a["k"][0], PositiveFeatures(a["omega"]), n_keys=a["n_keys"]
    ),
    "linear_attention_error-query": lambda a: it.layers.linear_attention_error(
        a["q"][0], a["k"], PositiveFeatures(a["omega"])
    ),
    "linear_attention_error-heads": lambda a: it.layers.linear_attention_error(
        a["q"], a["k"], _heads_of_features(a)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(EXPLICIT_BROADCASTS))
def test_ranks_are_never_promoted(name, tiny_tiles):
    arrays = {key: jnp.asarray(x) for key, x in cases.inputs().items()}
    case = EXPLICIT_BROADCASTS[name]
    with jax.numpy_rank_promotion("raise"):
        got = jax.eval_shape(case, arrays)
    assert jax.tree.structure(got) == jax.tree.structure(jax.eval_shape(case, arrays))


def test_without_implicit_transfers(rng):
    """NumPy computes these calls. Its results are moved explicitly."""
    x = jax.device_put(rng.normal(size=(4, 128)).astype("float32"), jax.devices("cpu")[0])
    with jax.transfer_guard("disallow"):
        for y in (it.attention(x, x, x), it.jl.hadamard_transform(x)):
            assert y.shape == x.shape


class TestChecksOfResults:
    """With ``jax_debug_infs`` and ``jax_debug_nans`` JAX checks the result of every operation."""

    @pytest.fixture(autouse=True)
    def _checked(self):
        with jax.debug_infs(True), jax.debug_nans(True):
            yield

    @_every("libraries")
    def test_finite_results(self, name):
        expected = [x for x in jax.tree.leaves(cases.CASES[name](cases.inputs())) if x is not None]
        if not all(np.isfinite(x).all() for x in expected):
            pytest.skip("its result is not finite")
        arrays, discrete = _split()
        for a, b in zip(jax.tree.leaves(cases.CASES[name](arrays | discrete)), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)

    def test_gradients(self):
        arrays, discrete = _split()

        def loss(q):
            a = arrays | discrete | {"q": q}
            state = it.attention_state(q, a["k"], a["v"], is_causal=True)
            weights = it.AttentionDistribution(q, a["k"], mask=a["visible"]).weights()
            return state.output().sum() + state.entropy().sum() + it.entropy(weights).sum()

        assert jnp.isfinite(jax.grad(loss)(arrays["q"])).all()

    def test_other_results(self):
        arrays, discrete = _split()
        q, k, mask = arrays["q"], arrays["k"], discrete["visible"]
        for call in (it.attention_state, jax.jit(it.attention_state)):
            with pytest.raises(FloatingPointError, match="inf"):  # the maximum over no keys
                call(q, k, mask=mask)
        nan = jax.device_put(np.full((4, 8), np.nan, np.float32))
        with pytest.raises(FloatingPointError, match="nan"):
            it.attention(nan, k, k)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_without_promotion_of_dtypes(dtype):
    """A user may set JAX to refuse promotions (``jax_numpy_dtype_promotion``)."""
    calls = cases.CASES | cases.TRIED
    with enable_x64(dtype == "float64"):
        arrays = {
            key: jnp.asarray(x, dtype if x.dtype == "float32" else None)
            for key, x in cases.inputs("float32").items()
        }
        for name in capabilities.that_run("jit", calls):
            read = {key: arrays[key] for key in cases.names_read(calls[name])}

            def call(some, case=calls[name]):
                return [x for x in jax.tree.leaves(case(arrays | some)) if hasattr(x, "dtype")]

            expected = jax.eval_shape(call, read)
            with jax.numpy_dtype_promotion("strict"):
                got = jax.eval_shape(call, read)
            assert [x.dtype for x in got] == [x.dtype for x in expected], name


def _distribution(q, k):
    return it.AttentionDistribution(q, k, is_causal=True, law=laws.LogLength(8))


class TestDistribution:
    """The object is a pytree, made inside a trace or outside."""

    def test_jit(self, rng):
        q, k, v = jnp.asarray(rng.normal(size=(3, 2, 4, 7, 8)), jnp.float32)
        expected = cases.results_of_methods(_distribution(q, k), v)
        inside = jax.jit(lambda q, k, v: cases.results_of_methods(_distribution(q, k), v))(q, k, v)
        outside = jax.jit(cases.results_of_methods)(_distribution(q, k), v)
        for x, y, z in zip(expected, inside, outside, strict=True):
            np.testing.assert_allclose(y, x, rtol=2e-3, atol=1e-5)
            np.testing.assert_allclose(z, x, rtol=2e-3, atol=1e-5)

    def test_vmap_and_grad(self, rng):
        q, k, v = jnp.asarray(rng.normal(size=(3, 2, 4, 7, 8)), jnp.float32)
        p = _distribution(q, k)
        mapped = jax.vmap(lambda p, v: p.output(v))(p, v)
        np.testing.assert_allclose(mapped, p.output(v), rtol=1e-4, atol=1e-6)
        by_object = jax.grad(lambda p: p.entropy().sum())(p).query
        by_array = jax.grad(lambda q: _distribution(q, k).entropy().sum())(q)
        np.testing.assert_allclose(by_object, by_array, rtol=1e-5, atol=1e-6)

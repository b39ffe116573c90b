"""What every public function promises, whatever it computes: see `cases`."""

import cases
import numpy as np
import oracles
import pytest

import isentropic as it
from isentropic import laws


def _arrays(backend, dtype="float32"):
    return {name: backend.array(x) for name, x in cases.inputs(dtype).items()}


# The cases whose results are in float32 at least: states, which are added to, and what is measured.
IN_FLOAT32 = {
    "attention_entropy", "attention_entropy-0.5", "attention_entropy-tsallis", "AttentionDistribution.information",
    "attention_entropy-sinks", "AttentionDistribution.information-sinks", "AttentionDistribution.received", "AttentionDistribution.received-sinks",
    "attention_state", "attention_state-parts", "attention_state-sinks", "AttentionDistribution.statistics",
    "AttentionDistribution.statistics-all", "AttentionState-from_output", "cross_entropy", "entropy", "entropy-2",
    "entropy_from_logits", "entropy_penalty", "kl_divergence", "linear_attention_error",
    "linear_attention_error-variance", "merge_states", "AttentionDistribution.kl_divergence",
    "AttentionDistribution.kl_divergence-heads", "AttentionDistribution.js_divergence",
    "AttentionDistribution.cross_entropy",
}  # fmt: skip


# The cases that compute with some of the arrays themselves.
COMPUTE_THEMSELVES = {
    "linear_attention-features": {"q"}, "linear_attention-features-variance": {"q"}, "needle_entropy": {"target"},
    "AttentionDistribution.factor_for_entropy": {"target"}, "factor_for_entropy-target": {"target"},
    "cross_entropy": {"p"}, "kl_divergence": {"p"},
}  # fmt: skip


def bfloat16(backend):
    """The dtype: for NumPy that of ml_dtypes, in which JAX's arrays become arrays of NumPy."""
    if backend.library == "numpy":
        return pytest.importorskip("ml_dtypes").bfloat16
    if not hasattr(backend.xp, "bfloat16"):
        pytest.skip("no bfloat16 here")
    return backend.xp.bfloat16


def in_float64(backend, x):
    return backend.numpy(backend.xp.astype(x, backend.xp.float32)).astype("float64")


@pytest.mark.parametrize("name", sorted(cases.CASES))
class TestEveryFunction:
    @pytest.mark.every_mode
    def test_library_device_dtype_and_value(self, backend, name):
        case = cases.CASES[name]
        results = cases.leaves(case(_arrays(backend)))
        exact = cases.leaves(case(cases.inputs("float64")))
        assert len(results) == len(exact)
        for got, expected in zip(results, exact, strict=True):
            assert type(got) is type(backend.array(0.0))
            if backend.xp.isdtype(got.dtype, "real floating"):
                assert got.dtype == backend.xp.float32
            # The cases draw their numbers in float64 and round them: inputs differ by 6e-8.
            backend.assert_close(got, expected, rtol=2e-4, atol=2e-5)

    @pytest.mark.every_mode
    @pytest.mark.float64
    def test_float64(self, backend, name):
        if not backend.float64:
            pytest.skip("no float64 here")
        case = cases.CASES[name]
        exact = cases.leaves(case(cases.inputs("float64")))
        for got, expected in zip(cases.leaves(case(_arrays(backend, "float64"))), exact, strict=True):
            backend.assert_close(got, expected, rtol=1e-11, atol=1e-12)

    def test_half_precision(self, backend, name):
        if backend.half is None:
            pytest.skip("no half precision here")
        if name == "PowerLog":
            pytest.skip("laws compute in float32")
        case = cases.CASES[name]
        exact = cases.leaves(case(cases.inputs("float64")))
        for got, expected in zip(
            cases.leaves(case(_arrays(backend, backend.half))), exact, strict=True
        ):
            if backend.xp.isdtype(got.dtype, "real floating"):
                assert got.dtype == (
                    backend.xp.float32 if name in IN_FLOAT32 else backend.array(0, backend.half).dtype
                )
            backend.assert_close(got, expected, rtol=2e-2, atol=2e-2)

    def test_bfloat16(self, backend, name):
        if name in COMPUTE_THEMSELVES or name in ("PowerLog", "Mask"):
            pytest.skip("its result is not in bfloat16")
        dtype, case = bfloat16(backend), cases.CASES[name]
        rounded = {
            key: backend.xp.astype(x, dtype) if key not in cases.DISCRETE else x
            for key, x in _arrays(backend).items()
        }
        exact = {
            key: in_float64(backend, x) if key not in cases.DISCRETE else backend.numpy(x)
            for key, x in rounded.items()
        }
        got, expected = cases.leaves(case(rounded)), cases.leaves(case(exact))
        for x, y in zip(got, expected, strict=True):
            assert x.dtype == (backend.xp.float32 if name in IN_FLOAT32 else dtype)
            atol = 2e-2 * np.abs(y[np.isfinite(y)]).max(initial=1.0)
            np.testing.assert_allclose(in_float64(backend, x), y, rtol=2e-2, atol=atol)

    def test_narrow_dtypes_are_refused(self, backend, name):
        if backend.library not in ("numpy", "torch", "jax"):
            pytest.skip("it has no such dtypes")
        library, kinds = backend.xp, ["float8_e4m3fn", "float8_e5m2"]
        if backend.library == "numpy":
            library, kinds = pytest.importorskip("ml_dtypes"), [*kinds, "float4_e2m1fn", "int4"]
        # Parts of maps may be stored in any dtype, and masks ignore the dtype of `like`.
        names = cases.names_read(cases.CASES[name]) - cases.DISCRETE - cases.PARTS
        names -= COMPUTE_THEMSELVES.get(name, {"q", "k"} if name == "Mask" else set())
        for key in names:
            for kind in kinds:
                arrays = _arrays(backend)
                arrays[key] = backend.xp.astype(arrays[key], getattr(library, kind))
                with pytest.raises(
                    TypeError, match=f"`.*` must have .*, got .*{kind}: convert it to a"
                ):
                    cases.CASES[name](arrays)

    def test_inputs_are_not_changed(self, backend, name):
        arrays = _arrays(backend)
        before = {key: backend.numpy(x).copy() for key, x in arrays.items()}
        cases.CASES[name](arrays)
        for key, x in arrays.items():
            np.testing.assert_array_equal(backend.numpy(x), before[key])


@pytest.mark.host
@pytest.mark.filterwarnings("error")
class TestErrorsOfFloatingPoint:
    """What underflows on purpose, and what is documented to be NaN, ask nothing of the caller."""

    # Cases that themselves multiply what they are given.
    PRODUCTS = (
        "PowerLog",
        "AttentionDistribution.factor_for_entropy",
        "factor_for_entropy-target",
        "needle_entropy",
    )

    def sized(self, name, dtype, size):
        """The inputs of a case, of which the arrays are multiplied by the size."""
        if dtype == "float16":
            size = min(size, 1e3)
            if name in self.PRODUCTS or (name == "merge_states" and size > 30):
                pytest.skip("the case itself multiplies what it is given")
        if name == "merge_states" and size > 1e9:
            pytest.skip("the case itself multiplies what it is given")
        arrays = cases.inputs(dtype)
        for key in ("q", "k", "v", "k2", "v2", "x", "bias"):
            arrays[key] = arrays[key] * arrays[key].dtype.type(size)
        return arrays

    @pytest.mark.parametrize("size", [1.0, 30.0, 1e30])
    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
    @pytest.mark.parametrize("name", sorted(cases.CASES))
    def test_settings_of_the_caller_do_not_matter(self, name, dtype, size):
        arrays = self.sized(name, dtype, size)
        with np.errstate(all="ignore"):
            expected = cases.leaves(cases.CASES[name](arrays))
        with np.errstate(all="raise"):
            before = np.geterr()
            got = cases.leaves(cases.CASES[name](arrays))
            assert np.geterr() == before
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, b)

    @pytest.mark.parametrize("name", ["rotary", "rotary-interleaved", "hadamard_transform"])
    @pytest.mark.parametrize("size", [6e4, 1e-4, 1e-40])
    def test_rounding_to_half_precision(self, name, size):
        dtype = "float32" if size < 1e-7 else "float16"
        with np.errstate(all="ignore"):
            arrays = {
                key: np.asarray(size * x).astype(dtype) for key, x in cases.inputs("float64").items()
            }
            arrays["n_keys"] = cases.inputs()["n_keys"]
            expected = cases.CASES[name](arrays)
        with np.errstate(all="raise"):
            np.testing.assert_array_equal(cases.CASES[name](arrays), expected)

    def test_states(self):
        small = np.full((1, 3), 1e-40, "float32")
        with np.errstate(all="raise"):
            state = it.AttentionState.from_output(small, small[:, 0], entropy=small[:, 0], base=2)
            state = it.AttentionState(*state[:1], state.normalizer * 3, *state[2:])
            out, h, normalizer = state.output(), state.entropy(), state.log_normalizer(base=1e30)
        np.testing.assert_allclose(out, small / 3, atol=1e-44)
        np.testing.assert_allclose(h, np.log([3]), rtol=1e-6)
        np.testing.assert_allclose(normalizer, np.log([3]) / np.log(1e30), rtol=1e-6)

    @pytest.mark.parametrize("implementation", ["numpy_tiles", "generic"])
    def test_kernels(self, rng, implementation):
        q, k, v = rng.normal(size=(3, 2, 600, 8)).astype("float32") * 20
        with np.errstate(all="raise"):
            state = it.attention_state(q, k, v, is_causal=True, implementation=implementation)
            assert np.isfinite(state.output()).all()
            beyond = it.attention(q * 1e30, k * 1e30, v, implementation=implementation)
        assert np.isnan(beyond).any()

    def test_an_interrupt_leaves_the_settings(self, rng, monkeypatch):
        def interrupted(*args, **kwargs):
            raise KeyboardInterrupt

        before = np.geterr()
        monkeypatch.setattr("isentropic._attention.generic.absorb", interrupted)
        with pytest.raises(KeyboardInterrupt):
            it.attention(*rng.normal(size=(3, 4, 2)), implementation="generic")
        assert np.geterr() == before


def test_bfloat16(backend, rng):
    dtype = bfloat16(backend)
    q, k, v = rng.normal(size=(3, 9, 4))
    arrays = [backend.xp.astype(backend.array(x), dtype) for x in (q, k, v)]
    state, out = it.attention_state(*arrays, law=None), it.attention(*arrays, law=None)
    h = it.attention_entropy(*arrays[:2], law=None)
    assert out.dtype == dtype
    assert state.normalizer.dtype == h.dtype == backend.xp.float32
    expected = oracles.attention(q, k, v)
    backend.assert_close(state.output(), expected.output, atol=3e-2)
    backend.assert_close(h, expected.entropy(), rtol=1e-2)


def test_bfloat16_with_other_dtypes(backend, rng):
    dtype = bfloat16(backend)
    q, k, v = (backend.array(x, "float32") for x in rng.normal(size=(3, 9, 4)))
    rounded, half = backend.xp.astype(k, dtype), backend.xp.astype(k, backend.xp.float16)
    assert it.attention(q, rounded, v).dtype == backend.xp.float32
    assert it.attention(half, rounded, rounded).dtype == backend.xp.float32
    assert it.kl_divergence(abs(half), abs(rounded)).dtype == backend.xp.float32
    law = laws.AffineLog(rounded[0, ...], half[0, ...])
    assert law(backend.array([[1.0, 5.0]], "float32")).dtype == backend.xp.float32


def test_log_of_the_length_is_not_rounded_to_half(backend):
    # ln 1000 / ln 512 = 1.1073 would be 1.1094 in bfloat16: the logits at ±30 tell.
    if backend.half is None:
        pytest.skip("no half precision here")
    q, k = backend.array([[1.0]], backend.half), backend.array([[30.0], [28.0]], backend.half)
    h = it.attention_state(q, k, n_keys=1000).entropy()
    expected = oracles.attention([[1.0]], [[30.0], [28.0]], factor=oracles.log_length(1000)).entropy()
    backend.assert_close(h, expected, rtol=1e-5)


def test_single_results_are_arrays(backend):
    # NumPy's reductions give scalars.
    x = backend.array(np.ones((3, 4)), "float32")
    for result in (
        it.AttentionDistribution(x, x).information(),
        it.entropy(x[0, :]),
        it.entropy_from_logits(x[0, :]),
        it.cross_entropy(x[0, :], x[0, :]),
        it.kl_divergence(x[0, :], x[0, :]),
        it.entropy_penalty(x, 1.0),
    ):
        assert type(result) is type(x)
        assert result.shape == ()


def test_views_and_strides(backend, rng):
    if backend.library == "strict":
        pytest.skip("array-api-strict has no strides")
    x = rng.normal(size=(3, 4, 10, 7))
    straight = [backend.array(np.ascontiguousarray(np.moveaxis(x, 1, 3)[i])) for i in range(3)]
    views = [backend.xp.moveaxis(backend.array(x[i]), 0, 2) for i in range(3)]
    expected = it.attention(*straight, is_causal=True)
    backend.assert_close(it.attention(*views, is_causal=True), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("error")
class TestErrorsOfFloatingPointOfTensors:
    """What NumPy computes on the memory of tensors is quiet too."""

    @pytest.mark.parametrize("size", [1.0, 1e30])
    @pytest.mark.parametrize("name", sorted(cases.CASES))
    def test_settings_of_the_caller_do_not_matter(self, backend, name, size):
        if backend.library != "torch":
            pytest.skip("about PyTorch's tensors")
        inputs = TestErrorsOfFloatingPoint().sized(name, "float32", size)
        arrays = {key: backend.array(x) for key, x in inputs.items()}
        with np.errstate(all="ignore"):
            expected = cases.leaves(cases.CASES[name](arrays))
        with np.errstate(all="raise"):
            got = cases.leaves(cases.CASES[name](arrays))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(backend.numpy(a), backend.numpy(b))

    def test_kernels_and_plans(self, backend, rng):
        if backend.library != "torch":
            pytest.skip("about PyTorch's tensors")
        q, k, v = (backend.array(x, "float32") for x in rng.normal(size=(3, 2, 600, 8)) * 20)

        class Logarithm(it.laws.Law):
            def evaluate(self, xp, n):
                return xp.log(n)  # −∞ for a query that sees no key

        law = Logarithm()
        with np.errstate(all="raise"):
            for n in (600, 599):  # with 599 keys the first query sees none
                keys, values = k[:, :n], v[:, :n]
                it.attention(q, keys, values, is_causal=True, law=law)
                it.attention_state(q, keys, values, is_causal=True, law=law)
            it.attention_entropy(q * 1e30, k * 1e30, order=2)

    @pytest.mark.parametrize("signs", [(1, 1, 1), (1, -1, 1), (-1, 1, 1)])
    def test_proofs_of_finiteness(self, backend, signs):
        if backend.library != "torch":
            pytest.skip("about PyTorch's tensors")
        for size in (1e18, 1e38, np.inf):
            arrays = [np.full((4, 8), sign * 1e18, np.float32) for sign in signs]
            for x, sign in zip(arrays, signs, strict=True):
                x[0, 0] = sign * size
            q, k, v = map(backend.array, arrays)
            with np.errstate(all="raise"):
                for is_causal in (False, True):
                    it.attention(q, k, v, is_causal=is_causal, scale=1e-37)
                    it.attention_state(q, k, v, is_causal=is_causal, scale=1e-37)

"""All laws have values, gradients and trees, also those of users and those of each query."""

import copy
import functools
import importlib
import math
import pickle
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import array_api_compat.numpy as numpy_namespace
import numpy as np
import pytest
from law_cases import FORMULAS, RANGES, gradients_of

import isentropic as it
from isentropic import laws
from isentropic.laws._formulas import InfoScale, StepLog


@dataclass(frozen=True)
class _InPlace(laws.Law):
    shift: float

    def evaluate(self, xp, n):
        n += self.shift
        return xp.log(n)


@dataclass(frozen=True)
class _Remembering(laws.Law):
    period: Any

    @functools.cached_property
    def slope(self):
        return 1 / math.log(self.period)

    def evaluate(self, xp, n):
        return 1 + self.slope * xp.log(xp.where(n < 1, 1.0, n))


class _Setting:
    """An object whose hash is its identity."""


@dataclass(frozen=True)
class _Of(laws.Law):
    setting: Any

    def evaluate(self, xp, n):
        return xp.ones_like(n) * self.setting.value


class TestLawsOfUsers:
    def test_in_place(self, backend, rng):
        if backend.library in ("jax", "dask"):
            pytest.skip("arrays that do not change")
        q, k = (backend.array(rng.normal(size=(4, 8)), "float32") for _ in range(2))
        seen = backend.array(np.tri(4, dtype=bool))
        exact = it.attention_state(q, k, mask=seen, law=laws.shifted(laws.PowerLog(0.0, 1.0, 1.0), 3))
        for _ in range(2):  # with a new plan, and with one that is kept
            state = it.attention_state(q, k, mask=seen, law=_InPlace(3.0))
            backend.assert_close(state.n_keys, np.arange(1.0, 5.0))
            backend.assert_close(state.entropy(), exact.entropy(), rtol=1e-5)

    def test_cached_properties_are_no_parameters(self, backend, rng):
        law, other = _Remembering(16.0), _Remembering(16.0)
        x = backend.array(rng.normal(size=(4, 8)), "float32")
        before = hash(law)
        it.attention(x, x, x, law=law)
        law(32)
        assert "slope" in vars(law)
        assert law == other
        assert hash(law) == before
        assert repr(law) == "_Remembering(period=16.0)"
        assert vars(copy.deepcopy(law)) == vars(other)
        assert laws.scaled(law, 2.0) == laws.scaled(other, 2.0)

    def test_objects_that_change_are_read_in_each_call(self, backend, rng):
        q, k = (backend.array(rng.normal(size=(4, 8)), "float32") for _ in range(2))
        setting = _Setting()
        for value in (1.0, 3.0, 1.0):
            setting.value = value
            for is_causal in (False, True):
                found = it.attention_entropy(q, k, law=_Of(setting), is_causal=is_causal)
                expected = it.attention_entropy(q, k, law=laws.Constant(value), is_causal=is_causal)
                backend.assert_close(found, expected, rtol=1e-6)


class TestValues:
    def test_equal_by_parameters(self, backend):
        slope = backend.array([0.25, 0.5], "float32")
        law = laws.AffineLog(slope, 1.0)
        assert law == laws.AffineLog(backend.array([0.25, 0.5], "float32"), 1.0)
        assert law == laws.from_dict(law.to_dict())  # in NumPy's arrays
        assert law != laws.AffineLog(slope, 2.0)
        assert law != laws.AffineLog(0.25, 1.0)
        assert law != laws.AffineLog(slope[:1], 1.0)
        assert law != laws.PowerLog(1.0, slope, 1.0)
        assert laws.scaled(law, 2.0) == laws.scaled(laws.AffineLog(slope, 1.0), 2.0)
        assert laws.shifted(law, 1) != laws.shifted(law, 2)
        assert law in [laws.LogLength(512), law]
        assert law != "law"

    def test_hash(self, backend):
        assert {laws.LogLength(512): 1}[laws.LogLength(512)] == 1
        assert hash(laws.LogLength(2.0)) != hash(laws.SqrtLogLength(2.0))
        with pytest.raises(TypeError, match="unhashable"):
            hash(laws.AffineLog(backend.array(np.ones(2))))

    def test_a_law_of_ones_own(self, backend, rng):
        @dataclass(frozen=True)
        class Power(laws.Law):
            exponent: Any

            def evaluate(self, xp, n):
                return (n / 8) ** self.exponent[..., None]

        law = Power(backend.array([0.0, 0.5], "float32"))
        q, k = (backend.array(x, "float32") for x in rng.normal(size=(2, 2, 8, 4)))
        h = it.attention_entropy(q, k, law=law, n_keys=32)
        for head, factor in enumerate((1.0, 2.0)):
            expected = it.attention_entropy(q[head, ...], k[head, ...], law=laws.Constant(factor))
            backend.assert_close(h[head, ...], expected, rtol=1e-5)
        with pytest.raises(
            TypeError, match=r"`law` must be a law that isentropic.laws defines, got Power"
        ):
            law.to_dict()
        assert law == Power(backend.array([0.0, 0.5], "float32"))
        assert law != Power(backend.array([0.0, 1.0], "float32"))
        with pytest.raises(TypeError, match="unhashable"):
            hash(law)
        assert hash(Power(2.0)) == hash(Power(2.0))

    @pytest.mark.float64
    def test_arrays_are_equal_by_shape_and_values(self, backend):
        x = backend.array([0.25, 0.5], "float32")
        law = laws.AffineLog(x)
        kinds = [*backend.dtypes, *([backend.half] if backend.half else [])]
        for dtype in kinds:
            assert law == laws.AffineLog(backend.array([0.25, 0.5], dtype))
            assert laws.AffineLog(backend.array([0.25, 0.5], dtype)) == laws.AffineLog(
                np.array([0.25, 0.5])
            )
        # 0.1 is another number in each dtype.
        if backend.float64:
            tenths = [laws.AffineLog(backend.array([0.1], dtype)) for dtype in ("float32", "float64")]
            assert tenths[0] != tenths[1]
        for other in ([[0.25, 0.5]], [0.25], [0.25, 0.75]):
            assert law != laws.AffineLog(backend.array(other, "float32"))
        single = laws.AffineLog(backend.array(0.25, "float32"))
        assert single == laws.AffineLog(backend.array(0.25, "float32"))
        assert single != laws.AffineLog(0.25)  # one may learn, the other has a hash

    def test_bfloat16_is_equal_by_its_numbers(self, backend):
        if backend.library not in ("torch", "jax"):
            pytest.skip("no bfloat16 here")
        x = backend.xp.astype(backend.array([0.25, 0.1], "float32"), backend.xp.bfloat16)
        assert laws.AffineLog(x) == laws.AffineLog(backend.xp.astype(x, backend.xp.float32))
        assert laws.AffineLog(x) != laws.AffineLog(backend.array([0.25, 0.1], "float32"))

    def test_nan_is_equal_to_nothing(self):
        x = np.array([1.0])
        law, same, other = laws.AffineLog(x), laws.AffineLog(x), laws.AffineLog(x.copy())
        x[0] = other.slope[0] = math.nan
        assert law == same  # of one array
        assert law != other

    @pytest.mark.parametrize(
        ("x", "y"),
        [(512, 512.0), (512, np.float32(512)), (np.int64(512), 512.0), (2.0, Fraction(2))],
        ids=str,
    )
    def test_numbers_are_equal_by_value_and_hash_alike(self, x, y):
        assert laws.LogLength(x) == laws.LogLength(y) != laws.SqrtLogLength(x)
        assert hash(laws.LogLength(x)) == hash(laws.LogLength(y))
        nested = [laws.scaled(laws.shifted(StepLog(z, z), z), z) for z in (x, y)]
        assert nested[0] == nested[1]
        assert len({*nested}) == 1

    def test_arrays_that_cannot_be_read(self, backend):
        if backend.library not in ("torch", "jax"):
            pytest.skip("nothing is traced here")
        compared = []

        def compare(x):
            law = laws.scaled(laws.AffineLog(x), 2.0)
            compared.append([
                law == law,
                law == laws.scaled(laws.AffineLog(x), 2.0),
                # None of these has to read them.
                law == laws.scaled(laws.AffineLog(x), 3.0),
                law == laws.scaled(laws.AffineLog(1.0), 2.0),
                law == laws.scaled(laws.AffineLog(x[None]), 2.0),
                law == laws.LogLength(),
            ])  # fmt: skip
            message = "`law` must have arrays that can be read, to be compared, got "
            with pytest.raises(TypeError, match=message):
                law == laws.scaled(laws.AffineLog(x + 1), 2.0)  # noqa: B015
            return x

        x = backend.array([[1.0, 2.0]], "float32")
        if backend.library == "jax":
            import jax

            jax.jit(compare)(x)
            jax.vmap(compare)(x)
        else:
            backend.xp.func.vmap(compare)(x)
            compare(x.to("meta"))
        assert compared == [[True, True, False, False, False, False]] * 2

    def test_what_a_law_must_be(self):
        with pytest.raises(TypeError, match="The law Slotted must not define __slots__"):

            @dataclass(frozen=True, slots=True)
            class Slotted(laws.Law):
                exponent: float

                def evaluate(self, xp, n):
                    return n**self.exponent

        class Number(laws.Law):
            def evaluate(self, xp, n):
                return 1.0

        with pytest.raises(TypeError, match="`law` must evaluate to an array, got float"):
            Number()(np.ones(3))


def _naive(xp, q, k, v, factor, is_causal):
    """Attention whose logits are multiplied by a factor (..., L), as a paper writes it."""
    groups = q.shape[-3] // k.shape[-3]
    k, v = (xp.repeat(x, groups, axis=-3) for x in (k, v))
    s = factor[..., None] * xp.matmul(q, xp.matrix_transpose(k)) / q.shape[-1] ** 0.5
    if is_causal:
        s = xp.where(xp.tril(xp.ones_like(s)) > 0, s, -math.inf)
    p = xp.exp(s - xp.max(s, axis=-1, keepdims=True))
    p = p / xp.sum(p, axis=-1, keepdims=True)
    entropy = -xp.sum(p * xp.log(xp.where(p > 0, p, xp.ones_like(p))), axis=-1)
    return xp.matmul(p, v), entropy


def _counts(q, is_causal):
    """How many of as many keys as queries each query sees, with as many axes as there are queries."""
    length = q.shape[-2]
    n = np.arange(1.0, length + 1) if is_causal else np.full(length, float(length))
    return n[(None,) * (q.ndim - 2)]


def _over(x, q):
    """Numbers of the heads over the queries (..., H, L, E)."""
    return x[(None,) * (q.ndim - 3) + (slice(None), None)]


def _of_query(xp, q, w):
    """A learned function of each query: (..., H, L, E) and (H, E) give (..., H, L)."""
    return xp.sum(q * w[(None,) * (q.ndim - 3) + (slice(None), None, slice(None))], axis=-1)


def _asentmax(xp, q, n, w1, w2, alpha):
    """ASEntmax, sparse_gemma.py: delta + softplus(·) · log(position + 2)^(2 tanh(·))."""
    beta = xp.log1p(xp.exp(_of_query(xp, q, w1)))
    gamma = 2 * xp.tanh(_of_query(xp, q, w2))
    law = laws.preset(
        "asentmax-constant", coefficient=laws.per_query(beta), exponent=laws.per_query(gamma)
    )
    return 1 + beta * xp.log(n + 1) ** gamma, law


def _selective(xp, q, n, w1, w2, alpha):
    """Selective Self-Attention: tanh(·) + 1 + σ(α) log(position), with an α of each head."""
    gate, slope = xp.tanh(_of_query(xp, q, w1)), 1 / (1 + xp.exp(-alpha))
    law = laws.AffineLog(slope, laws.per_query(1 + gate))
    return gate + 1 + _over(slope, q) * xp.log(n), law


def _qassmax(xp, q, n, w1, w2, alpha):
    """QASSMax, "qassmax-mlp": base_mlp(log N) · (1 + tanh(query_mlp(q))), N all keys."""
    base = xp.sum(xp.tanh(w2 * math.log(q.shape[-2]) + 0.5), axis=-1)
    gate = xp.tanh(_of_query(xp, q, w1))
    law = laws.scaled(laws.Constant(base), laws.per_query(1 + gate))
    return _over(base, q) * (1 + gate), law


@dataclass(frozen=True)
class _Base(laws.Law):
    """A function of ln n with numbers of each head."""

    weight: Any

    def evaluate(self, xp, n):
        # With as many axes as n, which JAX here asks for.
        weight = self.weight[(None,) * (n.ndim - 2) + (slice(None), None)]
        return xp.tanh(xp.log(n) * weight) + 1


def _qassmax_of_visible_keys(xp, q, n, w1, w2, alpha):
    gate = xp.tanh(_of_query(xp, q, w1))
    law = laws.scaled(_Base(alpha), laws.per_query(1 + gate))
    return (xp.tanh(xp.log(n) * _over(alpha, q)) + 1) * (1 + gate), law


def _temperature(xp, q, n, w1, w2, alpha):
    """A temperature of each query, and no n."""
    factor = xp.exp(_of_query(xp, q, w1))
    return factor, laws.per_query(factor)


RULES_OF_QUERIES = [_asentmax, _selective, _qassmax, _qassmax_of_visible_keys, _temperature]


class TestPerQuery:
    """Parameters that are functions of the query."""

    def _inputs(self, kv_heads=4, length=9):
        rng = np.random.default_rng(5)
        q, k, v = (rng.normal(size=(2, h, length, 6)) for h in (4, kv_heads, kv_heads))
        return q, k, v, rng.normal(size=(4, 6)), rng.normal(size=(4, 6)), rng.normal(size=4)

    def _expected(self, rule, inputs, is_causal):
        """The factor and attention, in NumPy's float64."""
        q, k, v, *parameters = inputs
        factor, _ = rule(numpy_namespace, q, _counts(q, is_causal), *parameters)
        return factor, *_naive(numpy_namespace, q, k, v, factor, is_causal)

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("kv_heads", [4, 2])
    @pytest.mark.parametrize("rule", RULES_OF_QUERIES)
    def test_rules_of_papers(self, backend, rule, kv_heads, is_causal):
        inputs = self._inputs(kv_heads)
        factor, expected, entropy = self._expected(rule, inputs, is_causal)
        n = backend.array(_counts(inputs[0], is_causal), "float32")
        q, k, v, *parameters = (backend.array(x, "float32") for x in inputs)
        _, law = rule(backend.xp, q, n, *parameters)
        kwargs = {"law": law, "is_causal": is_causal, "enable_gqa": kv_heads == 2}
        backend.assert_close(it.attention(q, k, v, **kwargs), expected, rtol=1e-4, atol=1e-5)
        got = it.attention_entropy(q, k, **kwargs)
        backend.assert_close(got, entropy, rtol=1e-4, atol=2e-5)
        backend.assert_close(law(n), factor, rtol=1e-5, atol=1e-5)
        got = it.scale_queries(q, n, law=law)
        backend.assert_close(got, inputs[0] * factor[..., None], rtol=1e-4, atol=1e-5)

    @pytest.mark.every_mode
    @pytest.mark.float64
    @pytest.mark.parametrize("rule", RULES_OF_QUERIES)
    def test_gradients(self, backend, rule):
        if backend.library not in ("torch", "jax") or not backend.float64:
            pytest.skip("no gradients here, or too few digits")
        inputs = self._inputs(kv_heads=2)
        n, xp = backend.array(_counts(inputs[0], True)), backend.xp

        def ours(q, k, v, *parameters):
            _, law = rule(xp, q, n, *parameters)
            return xp.sin(it.attention(q, k, v, law=law, is_causal=True, enable_gqa=True))

        def naive(q, k, v, *parameters):
            factor, _ = rule(xp, q, n, *parameters)
            return xp.sin(_naive(xp, q, k, v, factor, True)[0])

        if backend.library == "jax":
            import jax

            # The naive gradient of the maximum compares logits with it, and is NaN where none is equal.
            # Compiled, they may be rounded in two ways.
            ours = jax.jit(ours)
        pairs = (gradients_of(backend, call, *inputs) for call in (ours, naive))
        for got, expected in zip(*pairs, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-9)
            assert np.isfinite(got).all()

    @pytest.mark.parametrize("rule", RULES_OF_QUERIES)
    def test_transformations(self, backend, rule):
        if backend.library not in ("torch", "jax"):
            pytest.skip("no transformations here")
        inputs = self._inputs(kv_heads=2)
        _, expected, _ = self._expected(rule, inputs, True)
        n = backend.array(_counts(inputs[0], True), "float32")
        arrays = [backend.array(x, "float32") for x in inputs]

        def attend(q, k, v, law):
            return it.attention(q, k, v, law=law, is_causal=True, enable_gqa=True)

        def call(q, k, v, *parameters):
            _, law = rule(backend.xp, q, n if q.ndim == 4 else n[0, ...], *parameters)
            return attend(q, k, v, law)

        axes = (0, 0, 0, None, None, None)  # over sequences
        if backend.library == "jax":
            import jax

            _, law = jax.jit(rule, static_argnums=0)(backend.xp, arrays[0], n, *arrays[3:])
            results = [
                jax.jit(call)(*arrays),
                jax.jit(attend)(*arrays[:3], law),
                jax.jit(jax.vmap(call, axes))(*arrays),
            ]
        else:
            torch = backend.xp
            results = [
                torch.compile(call, fullgraph=True, backend="eager")(*arrays),
                torch.func.vmap(call, axes)(*arrays),
            ]
        for result in results:
            backend.assert_close(result, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(("make", "name", "good", "bad"), RANGES)
    def test_every_parameter_takes_it(self, backend, make, name, good, bad):
        x = np.array([good * 4, good[::-1] * 4])[:, :6]  # of 2 heads, 6 queries
        n = np.array([1.0, 2.0, 16.0, 100.0, 9001.0, 1e5])  # not on the steps
        law = make(laws.per_query(backend.array(x, "float32")))
        for lengths in (n, np.stack([n] * 2)):
            got = law(backend.array(lengths, "float32"))
            expected = [[make(float(y))(float(m)) for y, m in zip(row, n, strict=True)] for row in x]
            backend.assert_close(got, np.array(expected), rtol=1e-5, atol=1e-6)
        # A number is the length of all queries.
        for number in (100, backend.array(100.0, "float32")):
            got = law(number)
            expected = [[make(float(y))(100) for y in row] for row in x]
            backend.assert_close(got, np.array(expected), rtol=1e-5, atol=1e-6)
        if backend.library in ("numpy", "torch", "jax") and not backend.is_gpu:
            for y in bad:
                with pytest.raises(ValueError, match=rf"`{name}` must be .*, got {y} at \(1,\)"):
                    make(laws.per_query(backend.array([good[0], y], "float32")))

    def test_with_parameters_of_heads(self, backend):
        slope = backend.array([1.0, 2.0], "float32")
        x = np.arange(30, dtype="float32").reshape(5, 1, 6)
        law = laws.AffineLog(slope, laws.per_query(backend.array(x)))
        n = np.arange(1, 7)
        expected = np.array([1.0, 2.0])[:, None] * np.log(n) + x
        backend.assert_close(law(backend.array(n)), expected, rtol=1e-5)
        assert law(1).shape == (5, 2, 6)

    def test_half_precision(self, backend):
        if backend.half is None:
            pytest.skip("no half precision here")
        base = laws.per_query(backend.array(np.full(3, 512.0), backend.half))
        for law in (laws.LogLength(base), laws.SqrtLogLength(base), InfoScale(base, 64)):
            got = law(backend.array([512.0] * 3, backend.half))
            assert got.dtype == backend.xp.float32
            np.testing.assert_allclose(backend.numpy(got), 1.0, rtol=1e-6)

    @pytest.mark.host
    @pytest.mark.filterwarnings("error")
    def test_states_of_a_constant_may_see_other_keys(self):
        q, k, v, *_ = self._inputs()
        law = laws.per_query(np.linspace(0.5, 2.0, 9))
        parts = [
            it.attention_state(q, k[:, :, part], v[:, :, part], law=law)
            for part in (slice(4), slice(4, 9))
        ]
        whole = it.attention(q, k, v, law=law)
        np.testing.assert_allclose(it.merge_states(*parts).output(), whole, rtol=1e-10)

    def test_values(self, backend):
        x = backend.array([[0.5, 1.0]], "float32")
        law = laws.AffineLog(0.5, laws.per_query(x))
        assert law == laws.AffineLog(0.5, laws.per_query(np.array([[0.5, 1.0]])))
        assert law != laws.AffineLog(0.5, laws.per_query(x + 1))
        assert law != laws.AffineLog(0.5, x)
        assert [type(y) for y in law.arrays] == [type(x)]
        assert repr(law) == f"AffineLog(slope=0.5, intercept=per_query({x!r}), minimum=None)"
        with pytest.raises(TypeError, match="unhashable"):
            hash(law)
        if backend.library == "numpy":
            assert pickle.loads(pickle.dumps(law)) == law == copy.deepcopy(law)

    def test_tree(self, backend, tree):
        x = backend.array([[0.5, 1.0]], "float32")
        law = laws.shifted(laws.PowerLog(1.0, laws.per_query(x), 2.0), 1)
        (leaf,), structure = tree.tree_flatten(law)
        assert leaf is x
        assert tree.tree_structure(laws.shifted(laws.PowerLog(1.0, x, 2.0), 1)) != structure
        doubled = tree.tree_map(lambda x: 2 * x, law)
        assert doubled == laws.shifted(laws.PowerLog(1.0, laws.per_query(2 * x), 2.0), 1)
        for other in (None, True, "text"):
            assert "coefficient=per_query(" in repr(tree.tree_map(lambda _, y=other: y, law))

    def test_vmap_over_the_queries(self, backend):
        if backend.library not in ("torch", "jax"):
            pytest.skip("no transformations here")
        law = laws.AffineLog(0.5, laws.per_query(backend.array([0.5, 1.0], "float32")))
        n = backend.array([3.0, 8.0], "float32")
        library = backend.xp.func if backend.library == "torch" else importlib.import_module("jax")
        got = library.vmap(lambda law, n: law(n))(law, n)
        backend.assert_close(got, law(n), rtol=1e-6)

    def test_in_a_module(self):
        torch = pytest.importorskip("torch")
        from isentropic.integrations.torch import LawModule

        x = torch.nn.Parameter(torch.tensor([0.5, 1.0]))
        module = LawModule(laws.AffineLog(0.5, laws.per_query(x)))
        assert dict(module.named_parameters()) == {"intercept.value": x}
        assert module() == laws.AffineLog(0.5, laws.per_query(x))

    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: laws.per_query(1.0), TypeError, r"`value` must be an array, got float"),
            (lambda: laws.per_query([1.0]), TypeError, r"`value` must be an array, got list"),
            (lambda: laws.per_query(np.array(1.0)), ValueError, r"`value` must have at least 1 dimensions"),
            (lambda: laws.per_query(np.array([1])), TypeError, r"`value` must have a real floating-point"),
            (lambda: laws.per_query(np.array([math.inf])), ValueError, r"`value` must be finite, got inf at"),
            (lambda: laws.Knots((1, 2), (1, 2), minimum=laws.per_query(np.ones(2))), TypeError, r"`minimum` must be a real"),
            (lambda: laws.AffineLog(laws.per_query(np.ones((2, 3))))(np.ones((2, 4))), ValueError, r"`slope` must broadcast with \(2, 4\), got \(2, 3\)"),
            (lambda: it.attention(*np.ones((3, 2, 5, 4)), law=laws.AffineLog(laws.per_query(np.ones(6)))), ValueError, r"`(slope|law)` must .*\(6,\)|\(1, 6\)"),
            (lambda: it.attention(*np.ones((3, 5, 4)), law=laws.AffineLog(laws.per_query(np.ones((2, 5))))), ValueError, r"`law` must have a shape broadcastable to \(5,\), got \(2, 5\)"),
            (lambda: laws.AffineLog(1.0, laws.per_query(np.ones(2))).to_dict(), TypeError, r"`intercept` must not depend on the query, to be saved, got a `per_query`"),
            (lambda: laws.scaled(laws.LogLength(), laws.per_query(np.ones(2))).to_dict(), TypeError, r"`factor` must not depend on the query"),
            (lambda: laws.per_query(np.ones(2)).to_dict(), TypeError, r"`law` must not depend on the query"),
            (lambda: laws.scaled(laws.per_query(np.ones(2)), 2.0).to_dict(), TypeError, r"`law` must not depend on the query"),
        ],
    )  # fmt: skip
    def test_arguments(self, make, error, message):
        with pytest.raises(error, match=message):
            make()


class TestGradients:
    """By the lengths and by the parameters, where a logarithm is 0 too."""

    @pytest.mark.every_mode
    @pytest.mark.float64
    @pytest.mark.parametrize(("make", "name", "good", "bad"), RANGES)
    def test_finite_and_right(self, backend, make, name, good, bad):
        if backend.library not in ("torch", "jax") or not backend.float64:
            pytest.skip("no gradients here, or too few digits for differences")
        n = np.array([0.0, 1.0, 3.1, 77.2, 9999.1])  # the last ones beside the steps
        got = gradients_of(backend, lambda x, n: make(x)(n), np.array(good), n)
        assert all(np.isfinite(g).all() for g in got)
        step = 1e-6
        ends = [make(np.array(good))(n + step * sign).sum(0) for sign in (-1, 1)]
        smooth = n > 1  # at 1 the logarithm has a kink, and below it is constant
        np.testing.assert_allclose(
            got[1][smooth], (ends[1] - ends[0])[smooth] / (2 * step), rtol=1e-5, atol=1e-8
        )
        ends = [make(np.array(good) + step * sign)(n).sum(1) for sign in (-1, 1)]
        np.testing.assert_allclose(got[0], (ends[1] - ends[0]) / (2 * step), rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("law", [law for law, _ in FORMULAS], ids=lambda x: repr(x)[:40])
    def test_of_laws_of_numbers(self, backend, law):
        if backend.library not in ("torch", "jax"):
            pytest.skip("no gradients here")
        for n in (np.array([0.0, 1.0, 3.0], "float32"), np.array(1.0, "float32")):
            (g,) = gradients_of(backend, law, n)
            assert np.isfinite(g).all()


@dataclass(frozen=True)
class Together(laws.Law):
    parts: Any

    def evaluate(self, xp, n):
        return sum(part.evaluate(xp, n) for part in self.parts)


@pytest.mark.host
def test_parameters_that_are_not_fields():
    class Mutable(laws.Law):
        def __init__(self, slope):
            self.slope = slope

        def evaluate(self, xp, n):
            return self.slope * xp.log(n)

    x = np.ones((3, 2))
    inner = laws.Constant(0.5)
    for parts in ((inner, laws.AffineLog(np.ones(()))), [np.ones(())], ({"a": np.ones(2)},)):
        law = Together(parts)
        for call in (
            lambda law=law: laws.scaled(law, 2.0),
            lambda law=law: it.attention(x, x, x, law=law),
            lambda law=law: it.scale_queries(x, 4, law=law),
        ):
            with pytest.raises(
                TypeError, match=r"each law in a field of its own, got Together with the .* `parts`"
            ):
                call()
    with pytest.raises(
        TypeError, match=r"`law` must keep .*`@dataclass.frozen=True.`, got Mutable .* 'slope'"
    ):
        it.attention(x, x, x, law=Mutable(2.0))


class TestTrees:
    """Laws are nodes of the trees of JAX and PyTorch: their arrays are leaves, their numbers are not."""

    @pytest.mark.parametrize(("make", "name", "good", "bad"), RANGES)
    def test_leaves(self, backend, tree, make, name, good, bad):
        x = backend.array(good, "float32")
        law = laws.shifted(laws.scaled(make(x), 2.0), 1)
        (leaf,), structure = tree.tree_flatten(law)
        assert leaf is x
        assert tree.tree_structure(law) == structure
        assert tree.tree_structure(make(x)) != tree.tree_structure(make(good[0]))
        assert tree.tree_structure(make(good[0])) != tree.tree_structure(make(good[1]))
        ((path, _),), _ = tree.tree_flatten_with_path(law)
        assert [str(key) for key in path] == [".law", ".law", f".{name}"] or name == "factor"
        doubled = tree.tree_map(lambda x: 2 * x, law)
        backend.assert_close(doubled.arrays[0], 2 * x)
        assert doubled != law
        again = tree.tree_map(lambda x: x, law)
        assert again == law
        assert vars(again).keys() == vars(law).keys()
        assert repr(again) == repr(law)

    def test_numbers_are_no_leaves(self, tree):
        for law, _ in FORMULAS:
            leaves, structure = tree.tree_flatten(law)
            assert leaves == []
            again = tree.tree_map(None, law)
            assert again == law
            assert hash(again) == hash(law)
            assert tree.tree_structure(again) == structure

    def test_several_arrays(self, backend, tree):
        slope, factor = backend.array([0.5, 1.0], "float32"), backend.array(2.0, "float32")
        law = laws.scaled(laws.AffineLog(slope, 0.0, slope - 1), factor)
        leaves, structure = tree.tree_flatten(law)
        assert [x.shape for x in leaves] == [(2,), (2,), ()]
        assert (
            tree.tree_structure(laws.scaled(laws.AffineLog(slope, 1.0, slope - 1), factor)) != structure
        )
        mean = tree.tree_map(lambda a, b: (a + b) / 2, law, tree.tree_map(lambda x: 3 * x, law))
        backend.assert_close(mean(8), 2 * 2 * law(8), rtol=1e-6)

    @pytest.mark.parametrize("x", [None, True, -1.0, "text", object(), (), [1, 2]], ids=type)
    def test_anything_may_stand_for_an_array(self, backend, tree, x):
        # Masks of optimizers are of booleans, axes of integers, and None is what was taken out.
        law = laws.scaled(laws.LogLength(backend.array([2.0, 4.0], "float32")), 3.0)
        other = tree.tree_map(lambda _: x, law)
        assert type(other) is type(law)
        assert other.law.base is x
        assert other.factor == 3.0
        structure = tree.tree_structure(law)
        if x is None or isinstance(x, (tuple, list)):
            structure = tree.tree_structure(tree.tree_map(lambda _: x, [0]))
            assert tree.tree_leaves(other) == tree.tree_leaves([x])
        else:
            assert tree.tree_structure(other) == structure
            assert tree.tree_map(lambda a, b: b, law, other).law.base is x
        back = tree.tree_map(lambda a: a.law.base, [other], is_leaf=lambda a: isinstance(a, laws.Law))
        assert back == [x]
        assert "base=" in repr(copy.deepcopy(other))

    def test_a_law_of_ones_own(self, backend, tree):
        @dataclass(frozen=True)
        class Own(laws.Law):
            name: str
            exponent: Any
            inner: laws.Law | None = None

            def evaluate(self, xp, n):
                return (n / 8) ** self.exponent[..., None]

        x = backend.array([0.0, 0.5], "float32")
        law = Own("a", x, laws.Constant(x))
        leaves, structure = tree.tree_flatten(law)
        assert len(leaves) == 2
        assert tree.tree_structure(Own("b", x, laws.Constant(x))) != structure
        assert tree.tree_structure(Own("a", x)) != structure
        assert tree.tree_map(lambda x: x, law) == law

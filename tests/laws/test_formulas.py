"""Each law agrees with its formula, and refuses parameters that the formula does not allow."""

import json
import math
import pickle
import warnings

import numpy as np
import oracles
import pytest
from law_cases import FORMULAS, KNOT_FACTORS, KNOTS, NS, RANGES, gradients_of, through_knots

import isentropic as it
from isentropic import laws
from isentropic.laws._formulas import InfoScale, StepLog


@pytest.mark.every_mode
class TestFormulas:
    @pytest.mark.parametrize(("law", "expected"), FORMULAS, ids=lambda x: repr(x)[:40])
    def test_values(self, backend, law, expected):
        for dtype in ("int32", "int64"):
            got = law(backend.array(NS, dtype))
            close = 1e-12 if got.dtype == backend.xp.float64 else 1e-5
            backend.assert_close(got, expected, rtol=close, atol=1e-6 if close > 1e-9 else 1e-12)
        got = law(backend.array(NS, "float32"))
        assert got.dtype == backend.xp.float32
        backend.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        numbers = [law(int(n)) for n in NS]
        assert {type(x) for x in numbers} == {float}
        np.testing.assert_allclose(numbers, expected, rtol=1e-12, atol=1e-15)

    @pytest.mark.parametrize(("law", "expected"), FORMULAS, ids=lambda x: repr(x)[:40])
    def test_arrays_without_axes(self, backend, law, expected):
        for n, factor in zip(NS, expected, strict=True):
            backend.assert_close(law(backend.array(n, "float32")), factor, rtol=1e-5, atol=1e-6)

    def test_half_precision_lengths_are_computed_in_float32(self, backend):
        if backend.half is None:
            pytest.skip("no half precision here")
        got = laws.LogLength()(backend.array([2048.0], backend.half))
        assert got.dtype == backend.xp.float32

    def test_base_is_where_the_factor_is_one(self):
        for law in (laws.LogLength(77), laws.SqrtLogLength(77), InfoScale(77, 32)):
            assert law(77) == pytest.approx(1, abs=1e-14)

    def test_array_parameters_range_over_batch_and_heads(self, backend):
        n = backend.array([1, 10, 100])
        slope = backend.array([0.5, 2.0], "float32")
        log_n = np.log([1, 10, 100])
        got = laws.AffineLog(slope)(n)
        backend.assert_close(got, np.outer([0.5, 2.0], log_n), rtol=1e-5)
        backend.assert_close(laws.AffineLog(slope)(10), np.array([0.5, 2.0]) * math.log(10), rtol=1e-5)
        base = backend.array([4.0, 8.0], "float32")
        for law, expected in (
            (laws.LogLength(base), [3.0, 2.0]),
            (laws.SqrtLogLength(base), np.sqrt([3.0, 2.0])),
            (InfoScale(base, 2), np.sqrt((1 - 1 / 64) / (1 - np.array([1 / 4, 1 / 8])))),
            (laws.Constant(base), [4.0, 8.0]),
            (laws.scaled(laws.Constant(3.0), base), [12.0, 24.0]),
        ):
            assert len(law.arrays) == 1
            backend.assert_close(law(64), np.asarray(expected), rtol=1e-5)

    def test_parameters_of_half_precision_are_not_rounded_further(self, backend):
        if backend.half is None:
            pytest.skip("no half precision here")
        base = backend.array([512.0], backend.half)
        for law in (laws.LogLength(base), laws.SqrtLogLength(base), InfoScale(base, 64)):
            for n in (512, backend.array([512])):
                got = law(n)
                assert got.dtype in (backend.xp.float32, backend.xp.float64)
                np.testing.assert_allclose(backend.numpy(got), 1.0, rtol=1e-6)

    @pytest.mark.float64
    def test_float64_parameters_give_float64(self, backend):
        if not backend.float64:
            pytest.skip("no float64 here")
        law = laws.AffineLog(backend.array([1.0], "float64"))
        for n in (1000, backend.array([1000.0], "float32")):
            got = law(n)
            assert got.dtype == backend.xp.float64
            np.testing.assert_allclose(backend.numpy(got).ravel(), math.log(1000), rtol=1e-14)

    def test_values_are_immutable_comparable_and_readable(self):
        assert laws.LogLength(512) == laws.LogLength(512)
        assert hash(laws.LogLength(512)) == hash(laws.LogLength())
        assert repr(laws.AffineLog(0.5)) == "AffineLog(slope=0.5, intercept=0.0, minimum=None)"
        with pytest.raises(AttributeError):
            laws.LogLength().base = 3  # type: ignore[misc]

    def test_numpy_scalars_do_not_promote(self):
        n = np.array([5, 6], np.float32)
        for law in (
            laws.LogLength(np.float64(512), minimum=np.float64(0.1)),
            laws.AffineLog(np.float64(1), np.float64(2)),
            InfoScale(np.float64(512), np.float64(64)),
            laws.shifted(laws.scaled(laws.SqrtLogLength(np.float64(3)), np.float64(2)), np.float64(1)),
        ):
            assert law(n).dtype == np.float32


@pytest.mark.every_mode
class TestBelowOneKey:
    """A query that sees no key, or a rule that counts one less, has a finite factor, that of the first keys."""

    def test_steps(self, backend):
        law = laws.shifted(StepLog(0.1, 8192), -1)  # of −1 for no key
        expected = np.asarray([1.0, 1.0, 1.0, 1 + 0.1 * math.log(2)])
        got = law(backend.array([0, 1, 8192, 8193]))
        backend.assert_close(got, expected, rtol=1e-6)
        assert law(0) == 1.0

    def test_knots(self, backend):
        law = laws.Knots([2, 8], [1.0, 2.0])
        n = [0.0, 1e-30, 0.25, 0.999, 1.0, 1.5]
        expected = np.asarray([0.5] * 5 + [1 + math.log(1.5 / 2) / math.log(4)])
        backend.assert_close(law(backend.array(n, "float32")), expected, rtol=1e-5)
        assert [law(x) for x in n[:5]] == [0.5] * 5


class TestErrors:
    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: laws.LogLength(1), ValueError, r"`base` must be above 1, got 1"),
            (lambda: laws.LogLength(-3), ValueError, r"`base` must be above 1, got -3"),
            (lambda: laws.SqrtLogLength(0.5), ValueError, r"`base` must be above 1, got 0.5"),
            (lambda: InfoScale(1, 64), ValueError, r"`base` must be above 1"),
            (lambda: laws.LogLength(math.nan), ValueError, r"`base` must be above 1, got nan"),
            (lambda: laws.LogLength("512"), TypeError, r"`base` must be a real number or an array of them, got str"),
            (lambda: laws.LogLength(True), TypeError, r"`base` must be a real number, got bool"),
            (lambda: laws.LogLength(np.array([2, 3])), TypeError, r"`base` must have a real floating"),
            (lambda: InfoScale(512, 0), ValueError, r"`head_dim` must be above 0, got 0"),
            (lambda: StepLog(0.1, 0), ValueError, r"`period` must be above 0, got 0"),
            (lambda: laws.AffineLog(math.inf), ValueError, r"`slope` must be finite, got inf"),
            (lambda: laws.LogLength(2, minimum="1"), TypeError, r"`minimum` must be a real number"),
            (lambda: laws.scaled(512, 2), TypeError, r"`law` must be a law .* got int"),
            (lambda: laws.shifted(laws.LogLength(), None), TypeError, r"`shift` must be a real number"),
            (lambda: laws.LogLength()("512"), TypeError, r"`n` must be a number or an array, got str"),
            (lambda: laws.LogLength()(True), TypeError, r"`n` must be a number or an array, got bool"),
            (lambda: laws.preset("gpt-5"), ValueError, r"`name` must be 'asentmax-constant' or .* got 'gpt-5'"),
            (lambda: laws.preset([]), ValueError, r"`name` must be 'asentmax-constant' or .* got \[\]"),
            (lambda: laws.preset("su", length=1), ValueError, r"`length` must be above 1, got 1"),
            (lambda: laws.preset("su", length="a"), TypeError, r"`length` must be a real number, got str"),
            (lambda: laws.preset("qwen", length=0.5), ValueError, r"`length` must be above 1, got 0.5"),
            (lambda: laws.preset("grok-2", length=1), ValueError, r"`length` must be above 1, got 1"),
            (lambda: laws.preset("lumina", length=1), ValueError, r"`length` must be above 1, got 1"),
            (lambda: laws.preset("infoscale", length=1, head_dim=8), ValueError, r"`length` must be above 1, got 1"),
            (lambda: laws.preset("ministral-3", length=0), ValueError, r"`length` must be above 0, got 0"),
            (lambda: laws.preset("inkling", length=4, coefficient=None), TypeError, r"`coefficient` must be a real"),
            (lambda: laws.preset("inkling", coefficient=-0.1), ValueError, r"`coefficient` must be at least 0"),
            (lambda: laws.PowerLog(1.0, 1.0, math.nan), ValueError, r"`exponent` must be finite, got nan"),
            (lambda: laws.LogLength()(np.ones(2, complex)), TypeError, r"`n` must have an integer or floating"),
            (lambda: laws.preset("qwen"), TypeError, r"`parameters` must be those of 'qwen' \(length\), got none"),
            (lambda: laws.preset("chiang-cholak", base=2), TypeError, r"'chiang-cholak' \(none\), got base"),
            (lambda: laws.preset("yarn", scale=-1), ValueError, r"`scale` must be above 0"),
            (lambda: laws.preset("longrope", scale=2, length=1), ValueError, r"`length` must be above 1"),
            (lambda: laws.AffineLog(10**400), ValueError, r"`slope` must be within the range of a float, got 10{19}…0{20} \(401 characters\)\.$"),
            (lambda: laws.LogLength()(-(10**400)), ValueError, r"`n` must be within the range of a float, got -10{18}…0{20} \(402 characters\)\.$"),
            (lambda: laws.preset("x" * 500), ValueError, r"got 'x{19}…x{19}' \(502 characters\)"),
            (lambda: laws.preset("llama4"), ValueError, r"`name` must be .* or 'yarn', got 'llama4' \(the nearest is 'llama-4'\)\.$"),
            (lambda: laws.preset("asentmax"), ValueError, r"got 'asentmax' \(the nearest is 'asentmax-constant'\)\.$"),
            (lambda: laws.from_dict({"law": "loglength"}), ValueError, r"`law` must be .*, got 'loglength' \(the nearest is 'LogLength'\)\.$"),
            (lambda: laws.scaled(laws.LogLength, 2.0), TypeError, r"`law` must be a law of isentropic.laws, got the class LogLength; call it: `LogLength\(...\)`\.$"),
            (lambda: it.attention(*np.ones((3, 2, 2)), law=laws.AffineLog), TypeError, r"or None, got the class AffineLog; call it: `AffineLog\(...\)`\.$"),
            (lambda: it.attention(*np.ones((3, 2, 2)), law=np.log), TypeError, r"or None, got ufunc \(a function is not a law: subclass `laws.Law`\)\.$"),
        ],
    )  # fmt: skip
    def test_arguments(self, make, error, message):
        with pytest.raises(error, match=message):
            make()


class TestRangesOfArrays:
    """The numbers in arrays are held to what single numbers are."""

    @pytest.mark.float64
    @pytest.mark.parametrize(("make", "name", "good", "bad"), RANGES)
    def test_each_number_counts(self, backend, make, name, good, bad):
        if backend.library == "strict" or backend.is_gpu:
            pytest.skip("values are not read where that costs more than memory of the host does")
        dtypes = [*backend.dtypes, *([backend.half] if backend.half else [])]
        for dtype in dtypes:
            make(backend.array(good, dtype))
            make(backend.array(good[0], dtype))
            for x in (*bad, math.nan, math.inf, -math.inf):
                for numbers, place in (
                    ([*good, x], r" at \(2,\)"),
                    ([[x, *good]], r" at \(0, 0\)"),
                    (x, ""),
                ):
                    with pytest.raises(ValueError, match=rf"`{name}` must be .*, got {x}{place}\."):
                        make(backend.array(numbers, dtype))
                with pytest.raises(ValueError, match=f"`{name}` must be .*, got {x}"):
                    make(x)

    @pytest.mark.parametrize(("make", "name", "good", "bad"), RANGES)
    @pytest.mark.parametrize("shape", [(0,), (1, 0)])
    def test_empty(self, backend, make, name, good, bad, shape):
        law = make(backend.array(np.zeros(shape), "float32"))
        assert law(backend.array([1.0, 9.0, 600.0], "float32")).shape == (*shape, 3)

    def test_in_dictionaries(self, backend):
        for data, message in (
            ({"law": "LogLength", "base": [0.5, 1.0]}, r"`base` must be above 1, got 0.5 at \(0,\)"),
            (
                {"law": "StepLog", "coefficient": 0.1, "period": [0.0]},
                r"`period` must be above 0, got 0.0 at",
            ),
        ):
            # Read on the host, wherever the arrays are to be.
            for like in (None, backend.array(1.0, "float32")):
                with pytest.raises(ValueError, match=message):
                    laws.from_dict(data, like=like)

    def test_bfloat16(self):
        torch = pytest.importorskip("torch")
        with pytest.raises(ValueError, match=r"`base` must be above 1, got 0.5 at \(1,\)"):
            laws.LogLength(torch.tensor([2.0, 0.5], dtype=torch.bfloat16))

    def test_what_learns(self):
        torch = pytest.importorskip("torch")
        base = torch.nn.Parameter(torch.tensor([2.0, 4.0]))
        law = laws.LogLength(base)
        law(8).sum().backward()
        assert torch.isfinite(base.grad).all()
        with torch.no_grad():
            base[1] = 0.99
        with pytest.raises(ValueError, match=r"`base` must be above 1, got 0.99.* at \(1,\)"):
            laws.LogLength(base)


class TestKnots:
    def test_exact_at_the_knots(self, backend):
        lengths = [1, 3, 7, 100, 1001, 2**17 - 1]
        factors = [0.1, 0.7, 0.3, 1 / 3, 1.1, 1.7]
        for dtype in backend.dtypes:
            law = laws.Knots(lengths, backend.array(factors, dtype))
            got = law(backend.array(lengths, dtype))
            backend.assert_close(got, backend.array(factors, dtype), rtol=0, atol=0)
            got = laws.Knots(lengths, factors)(backend.array(lengths, dtype))
            backend.assert_close(got, backend.array(factors, dtype), rtol=0, atol=0)
        assert [laws.Knots(lengths, factors)(n) for n in lengths] == factors

    def test_factors_of_each_head(self, backend):
        rows = np.stack([KNOT_FACTORS, KNOT_FACTORS[::-1]])
        expected = np.stack([through_knots(NS, row) for row in rows])
        law = laws.Knots(KNOTS, backend.array(rows, "float32"))
        backend.assert_close(law(backend.array(NS)), expected, rtol=1e-5, atol=1e-5)
        alone = np.array([through_knots(777, row) for row in rows])
        backend.assert_close(law(777), alone, rtol=1e-5)
        # One row for all heads, and an axis in front for a batch.
        law = laws.Knots(KNOTS, backend.array(KNOT_FACTORS, "float32"))
        backend.assert_close(law(backend.array(NS)), expected[0], rtol=1e-5, atol=1e-5)
        assert law(777).shape == ()
        law = laws.Knots(KNOTS, backend.array(rows[:, None, :], "float32"))
        assert law(backend.array(np.ones((2, 5, 3)), "float32")).shape == (2, 5, 3)

    def test_attention(self, backend, rng):
        q, k, v = rng.normal(size=(3, 2, 12, 4))
        rows = np.array([[1.0, 3.0, 0.5], [0.5, 0.25, 2.0]])
        law = laws.Knots([2, 5, 9], backend.array(rows, "float32"))
        n = np.arange(1, 13)
        t, ts = np.log(n), np.log([2, 5, 9])
        factor = np.stack([np.interp(t, ts, row) for row in rows])
        for i, end in ((0, n < 2), (1, n > 9)):
            slope = np.diff(rows)[:, i] / np.diff(ts)[i]
            factor[:, end] += slope[:, None] * (t[end] - ts[2 * i])
        expected = oracles.attention(q, k, v, factor=factor, visible=oracles.causal(12, 12))
        arrays = [backend.array(x, "float32") for x in (q, k, v)]
        backend.assert_close(
            it.attention(*arrays, law=law, is_causal=True), expected.output, rtol=1e-4, atol=1e-5
        )

    def test_two_knots_are_an_affine_law(self):
        slope = 0.7 / math.log(16)
        line = laws.AffineLog(slope, 1.1 - slope * math.log(64))
        law = laws.Knots([64, 1024], [1.1, 1.8])
        np.testing.assert_allclose(law(NS), line(NS), rtol=1e-12)

    def test_a_factor_that_is_repeated_holds(self):
        law = laws.Knots([8, 9, 512, 513], [0.5, 0.5, 1.5, 1.5])
        assert [law(n) for n in (0, 1, 8, 512, 1e6)] == [0.5, 0.5, 0.5, 1.5, 1.5]

    def test_warns_beyond_the_last_length(self, backend):
        """But not if the factor is a constant there, nor where numbers of keys cannot be read."""
        message = "the last of the `lengths` of `laws.Knots`, 512: the line .* is extended"
        n = backend.array([16, 513])
        rows = backend.array([[1.0, 1.5], [2.0, 2.0]], "float32")
        law = laws.Knots([16, 512], [1.0, 1.5])
        calls = [lambda: law(513)]
        if backend.library in ("numpy", "torch", "jax") and not backend.is_gpu:  # whose values are read
            calls += [lambda: law(n), lambda: laws.Knots([16, 512], rows)(n)]
        for call in calls:
            with pytest.warns(UserWarning, match=message):
                call()
        quiet = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            quiet += [law(512), law(backend.array([16, 512]))]
            quiet.append(laws.Knots([16, 512], [1.5, 1.5])(n))
            quiet.append(laws.Knots([16, 512], rows[1:, :])(n))
            if backend.library == "jax":
                import jax

                quiet.append(jax.jit(laws.Knots([16, 512], [1.0, 1.5]))(n))
        assert len(quiet) >= 3

    def test_of_solved_factors(self):
        lengths = np.array([2.0**k for k in range(6, 21)])
        factors = it.theory.invariant_factor(lengths, 2.0)
        law = laws.Knots(lengths, factors)
        between = lengths[:-1] * math.sqrt(2)
        np.testing.assert_allclose(law(between), it.theory.invariant_factor(between, 2.0), rtol=3e-3)

    @pytest.mark.parametrize("half", ["float16", "bfloat16"])
    def test_half_precision(self, backend, half):
        if backend.library not in ("torch", "jax"):
            pytest.skip("not every library has both")
        factors = backend.xp.astype(backend.array(KNOT_FACTORS), getattr(backend.xp, half))
        got = laws.Knots(KNOTS, factors)(backend.array(NS, "float32"))
        backend.assert_close(got, through_knots(NS), rtol=1e-5, atol=1e-5)

    def test_gradients(self, backend):
        if backend.library not in ("torch", "jax"):
            pytest.skip("no gradients here")
        n = np.array([0.0, 1.0, 16.0, 90.0, 512.0, 3000.0, 1e5], "float32")
        factors = np.stack([KNOT_FACTORS, 2 * KNOT_FACTORS]).astype("float32")
        of_factors, of_n = gradients_of(backend, lambda f, n: laws.Knots(KNOTS, f)(n), factors, n)
        # The factor is linear in those of the knots.
        expected = [through_knots(n, unit).sum() for unit in np.eye(3)]
        np.testing.assert_allclose(of_factors, [expected] * 2, rtol=1e-4)
        slopes = np.diff(KNOT_FACTORS) / np.diff(np.log(KNOTS))
        np.testing.assert_allclose(of_n[[3, 5, 6]], 3 * slopes[[0, 1, 1]] / n[[3, 5, 6]], rtol=1e-4)
        assert np.isfinite(of_n).all()
        assert of_n[0] == 0

    def test_transformations(self, backend):
        if backend.library not in ("torch", "jax"):
            pytest.skip("no transformations here")
        rows = backend.array(np.stack([KNOT_FACTORS, 2 * KNOT_FACTORS]), "float32")
        n = backend.array(NS, "float32")
        expected = laws.Knots(KNOTS, rows)(n)

        def call(law, n):
            return law(n)

        def of_row(row):
            return laws.Knots((16, 512, 8192), row)(n)

        if backend.library == "jax":
            import jax

            backend.assert_close(jax.jit(call)(laws.Knots(KNOTS, rows), n), expected, rtol=1e-5)
            backend.assert_close(jax.jit(jax.vmap(of_row))(rows), expected, rtol=1e-5)
        else:
            compiled = backend.xp.compile(of_row, fullgraph=True, backend="eager")
            backend.assert_close(compiled(rows), expected, rtol=1e-5)
            backend.assert_close(backend.xp.func.vmap(of_row)(rows), expected, rtol=1e-5)

    def test_tree(self, backend, tree):
        factors = backend.array(KNOT_FACTORS, "float32")
        law = laws.scaled(laws.Knots(KNOTS, factors), 2.0)
        (leaf,), structure = tree.tree_flatten(law)
        assert leaf is factors
        assert tree.tree_structure(laws.scaled(laws.Knots(KNOTS + 1, factors), 2.0)) != structure
        assert tree.tree_map(lambda x: x, law) == law

    def test_values(self, backend):
        law = laws.Knots([16, 512], [1, 1.5])
        assert law == laws.Knots(np.array([16.0, 512.0]), (1.0, np.float32(1.5)))
        assert hash(law) == hash(laws.Knots(iter([16.0, 512.0]), (1.0, 1.5)))
        assert law != laws.Knots([16, 513], [1, 1.5])
        assert repr(law) == "Knots(lengths=(16, 512), factors=(1, 1.5), minimum=None)"
        assert pickle.loads(pickle.dumps(law)) == law
        array = laws.Knots([16, 512], backend.array([1.0, 1.5], "float32"))
        assert array == laws.Knots([16, 512], np.array([1.0, 1.5]))
        assert array != law
        with pytest.raises(TypeError, match="unhashable"):
            hash(array)

    def test_dictionaries(self, backend):
        data = laws.Knots([16, 512], [1, 1.5]).to_dict()
        assert data == {"law": "Knots", "lengths": [16, 512], "factors": [1, 1.5], "minimum": None}
        for factors in (KNOT_FACTORS, np.stack([KNOT_FACTORS] * 2)):
            law = laws.Knots(KNOTS, backend.array(factors, "float32"))
            data = json.loads(json.dumps(law.to_dict()))
            assert data["factors"] == (
                {"array": [0.5, 1.5, 1.25]} if factors.ndim == 1 else factors.tolist()
            )
            assert laws.from_dict(data) == law
            again = laws.from_dict(data, like=law.factors)
            backend.assert_close(again.factors, law.factors, rtol=0, atol=0)

    @pytest.mark.parametrize(
        ("lengths", "factors", "error", "message"),
        [
            (8, [1.0], TypeError, r"`lengths` must be a sequence of numbers, got int"),
            ("12", [1, 2], TypeError, r"`lengths` must be a sequence of numbers, got str"),
            ([1, "2"], [1, 2], TypeError, r"`lengths` must be a real number, got str"),
            (np.ones((2, 2)), [1, 2], TypeError, r"`lengths` must be a real number, got list"),
            ([8], [1.0], ValueError, r"`lengths` must have at least 2 numbers \(one factor .*\), got 1"),
            ([0.5, 8], [1, 2], ValueError, r"`lengths` must be at least 1, got 0.5"),
            ([1, math.inf], [1, 2], ValueError, r"`lengths` must be finite, got inf"),
            ([8, 8], [1, 2], ValueError, r"`lengths` must increase, got \(8, 8\)"),
            ([2**53, 2**53 + 1], [1, 2], ValueError, r"`lengths` must increase, got"),
            ([8, 9], 1.0, TypeError, r"`factors` must be a sequence of numbers or an array, got float"),
            ([8, 9], None, TypeError, r"`factors` must be a sequence of numbers or an array, got None"),
            ([8, 9], [1, None], TypeError, r"`factors` must be a real number, got NoneType"),
            ([8, 9], [1, math.nan], ValueError, r"`factors` must be finite, got nan"),
            ([8, 9], [1, 2, 3], ValueError, r"`factors` must have 2 numbers, one for each length, got 3"),
            ([8, 9], np.ones((2, 3)), ValueError, r"`factors` must have the shape \(..., 2\), .*, got \(2, 3\)"),
            ([8, 9], np.array(1.0), ValueError, r"`factors` must have the shape \(..., 2\), .*, got \(\)"),
            ([8, 9], np.array([1, 2]), TypeError, r"`factors` must have a real floating-point dtype"),
            ([8, 9], np.array([1, math.nan]), ValueError, r"`factors` must be finite, got nan at \(1,\)"),
            ([8, 9], laws.per_query(np.ones(2)), TypeError, r"`factors` must be a sequence .*, got PerQuery"),
        ],
    )  # fmt: skip
    def test_arguments(self, lengths, factors, error, message):
        with pytest.raises(error, match=message):
            laws.Knots(lengths, factors)

    def test_other_arguments(self, backend):
        with pytest.raises(TypeError, match=r"`minimum` must be a real number, got str"):
            laws.Knots([1, 2], [1, 2], minimum="1")
        law = laws.Knots([1, 2], backend.array(np.ones((3, 2)), "float32"))
        with pytest.raises(ValueError, match=r"`factors` must broadcast with \(2, 4\), got \(3, 1\)"):
            law(backend.array(np.ones((2, 4)), "float32"))
        for data, message in (
            ({"factors": {"array": 3}}, "`factors` must be a sequence of numbers or an array, got dict|`factors` must be a real number, got str"),
            ({"lengths": [1, [2]]}, "`lengths` must be nested lists of equal lengths"),
        ):  # fmt: skip
            with pytest.raises((TypeError, ValueError), match=message):
                laws.from_dict({"law": "Knots", "lengths": [1, 2], "factors": [1, 2]} | data)

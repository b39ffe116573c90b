"""Laws against their formulas, and presets against the code they describe."""

import copy
import functools
import importlib
import inspect
import json
import math
import pickle
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import array_api_compat.numpy as numpy_namespace
import numpy as np
import oracles
import pytest

import isentropic as it
from isentropic import laws
from isentropic.laws import _dictionaries

NS = np.array([0, 1, 2, 15, 16, 17, 511, 512, 513, 4096, 8191, 8192, 20000, 100000])
LN = np.log(np.maximum(NS, 1))

KNOTS, KNOT_FACTORS = np.array([16, 512, 8192]), np.array([0.5, 1.5, 1.25])


def _through_knots(n, factors=KNOT_FACTORS):
    """The lines through the knots, and on beyond the outermost."""
    t, ts = np.log(np.maximum(n, 1)), np.log(KNOTS)
    first, last = np.diff(factors)[[0, -1]] / np.diff(ts)[[0, -1]]
    beyond = first * np.minimum(t - ts[0], 0) + last * np.maximum(t - ts[-1], 0)
    return np.interp(t, ts, factors) + beyond


FORMULAS = [
    (laws.Constant(2.5), np.full(NS.shape, 2.5)),
    (laws.LogLength(), LN / math.log(512)),
    (laws.LogLength(64, minimum=1), np.maximum(LN / math.log(64), 1)),
    (laws.SqrtLogLength(100), np.sqrt(LN / math.log(100))),
    (laws.SqrtLogLength(100, minimum=0.5), np.maximum(np.sqrt(LN / math.log(100)), 0.5)),
    (laws.AffineLog(0.4, -0.1), 0.4 * LN - 0.1),
    (laws.AffineLog(0.4, -0.1, minimum=0), np.maximum(0.4 * LN - 0.1, 0)),
    (laws.PowerLog(0.5, 0.2, 1.7), 0.5 + 0.2 * np.log(np.maximum(NS, 2)) ** 1.7),
    (laws.PowerLog(0.5, 0.2, -0.7), 0.5 + 0.2 * np.log(np.maximum(NS, 2)) ** -0.7),
    (laws.StepLog(0.1, 8192), 1 + 0.1 * np.log1p(NS // 8192)),
    (laws.Power(0.1, 2048), (np.maximum(NS, 1) / 2048) ** 0.1),
    (laws.Power(0.5, minimum=1), np.maximum(np.sqrt(NS / 512), 1)),
    (
        laws.InfoScale(512, 64),
        np.sqrt((1 - np.maximum(NS, 1.0) ** (-1 / 32)) / (1 - 512 ** (-1 / 32))),
    ),
    (laws.scaled(laws.LogLength(), 0.5), LN / math.log(512) / 2),
    (laws.shifted(laws.LogLength(), 1), np.log(NS + 1) / math.log(512)),
    (laws.from_kappa(1.282, 64), 1.282 * LN / 8),
    (laws.Knots(KNOTS, KNOT_FACTORS.tolist()), _through_knots(NS)),
    (laws.Knots((16, 512, 8192), (0.5, 1.5, 1.25), minimum=1), np.maximum(_through_knots(NS), 1)),
    (laws.Knots((2, 9000), (0, 2)), 2 * (LN - math.log(2)) / math.log(4500)),
]


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
        for law in (laws.LogLength(77), laws.SqrtLogLength(77), laws.InfoScale(77, 32)):
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
            (laws.InfoScale(base, 2), np.sqrt((1 - 1 / 64) / (1 - np.array([1 / 4, 1 / 8])))),
            (laws.Constant(base), [4.0, 8.0]),
            (laws.scaled(laws.Constant(3.0), base), [12.0, 24.0]),
        ):
            assert len(law.arrays) == 1
            backend.assert_close(law(64), np.asarray(expected), rtol=1e-5)

    def test_parameters_of_half_precision_are_not_rounded_further(self, backend):
        if backend.half is None:
            pytest.skip("no half precision here")
        base = backend.array([512.0], backend.half)
        for law in (laws.LogLength(base), laws.SqrtLogLength(base), laws.InfoScale(base, 64)):
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
            laws.InfoScale(np.float64(512), np.float64(64)),
            laws.shifted(laws.scaled(laws.SqrtLogLength(np.float64(3)), np.float64(2)), np.float64(1)),
        ):
            assert law(n).dtype == np.float32


class TestErrors:
    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: laws.LogLength(1), ValueError, r"`base` must be above 1, got 1"),
            (lambda: laws.LogLength(-3), ValueError, r"`base` must be above 1, got -3"),
            (lambda: laws.SqrtLogLength(0.5), ValueError, r"`base` must be above 1, got 0.5"),
            (lambda: laws.InfoScale(1, 64), ValueError, r"`base` must be above 1"),
            (lambda: laws.LogLength(math.nan), ValueError, r"`base` must be above 1, got nan"),
            (lambda: laws.LogLength("512"), TypeError, r"`base` must be a real number or an array of them, got str"),
            (lambda: laws.LogLength(True), TypeError, r"`base` must be a real number, got bool"),
            (lambda: laws.LogLength(np.array([2, 3])), TypeError, r"`base` must have a real floating"),
            (lambda: laws.InfoScale(512, 0), ValueError, r"`head_dim` must be above 0, got 0"),
            (lambda: laws.StepLog(0.1, 0), ValueError, r"`period` must be above 0, got 0"),
            (lambda: laws.AffineLog(math.inf), ValueError, r"`slope` must be finite, got inf"),
            (lambda: laws.LogLength(2, minimum="1"), TypeError, r"`minimum` must be a real number"),
            (lambda: laws.scaled(512, 2), TypeError, r"`law` must be a law .* got int"),
            (lambda: laws.shifted(laws.LogLength(), None), TypeError, r"`shift` must be a real number"),
            (lambda: laws.LogLength()("512"), TypeError, r"`n` must be a number or an array, got str"),
            (lambda: laws.LogLength()(True), TypeError, r"`n` must be a number or an array, got bool"),
            (lambda: laws.from_kappa(1.0, 0), ValueError, r"`head_dim` must be above 0, got 0"),
            (lambda: laws.preset("gpt-5"), ValueError, r"`name` must be 'asentmax-constant' or .* got 'gpt-5'"),
            (lambda: laws.preset([]), ValueError, r"`name` must be 'asentmax-constant' or .* got \[\]"),
            (lambda: laws.preset("su", base=1), ValueError, r"`base` must be above 1, got 1"),
            (lambda: laws.preset("su", base="a"), TypeError, r"`base` must be a real number, got str"),
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


# What each law asks of the numbers in an array: a maker, the name, numbers that it takes, others.
RANGES = [
    (laws.LogLength, "base", [1.5, 512.0], [1.0, 0.5, -3.0]),
    (laws.SqrtLogLength, "base", [1.5, 512.0], [1.0, 0.5]),
    (lambda x: laws.InfoScale(x, 64), "base", [1.5, 512.0], [1.0, 0.0]),
    (lambda x: laws.StepLog(0.1, x), "period", [0.3, 8192.0], [0.0, -1.0]),
    (lambda x: laws.StepLog(x, 8192), "coefficient", [-0.1, 0.0], []),
    (lambda x: laws.Power(0.1, x), "base", [0.5, 2048.0], [0.0, -1.0]),
    (lambda x: laws.Power(x), "exponent", [-0.5, 0.1], []),
    (lambda x: laws.Power(0.5, minimum=x), "minimum", [-0.5, 0.5], []),
    (lambda x: laws.PowerLog(x, 1.0, 1.0), "offset", [-1.0, 0.0], []),
    (lambda x: laws.PowerLog(1.0, x, 1.0), "coefficient", [-1.0, 0.0], []),
    (lambda x: laws.PowerLog(1.0, 1.0, x), "exponent", [-0.5, 2.0], []),
    (laws.AffineLog, "slope", [-0.5, 0.5], []),
    (lambda x: laws.AffineLog(0.5, x), "intercept", [-0.5, 0.5], []),
    (lambda x: laws.AffineLog(0.5, minimum=x), "minimum", [-0.5, 0.5], []),
    (laws.Constant, "value", [-2.0, 0.0], []),
    (lambda x: laws.scaled(laws.LogLength(), x), "factor", [-2.0, 0.0], []),
]


class TestRangesOfArrays:
    """The numbers in arrays are held to what single numbers are."""

    @pytest.mark.float64
    @pytest.mark.parametrize(("make", "name", "good", "bad"), RANGES)
    def test_each_number_counts(self, backend, make, name, good, bad):
        if backend.library in ("strict", "cupy") or backend.name.endswith("cuda"):
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
        with pytest.raises(
            ValueError, match=rf"`{name}` must not be empty, got the shape \({shape[0]},"
        ):
            make(backend.array(np.zeros(shape), "float32"))

    def test_in_dictionaries(self, backend):
        for data, message in (
            ({"law": "LogLength", "base": [0.5, 1.0]}, r"`base` must be above 1, got 0.5 at \(0,\)"),
            (
                {"law": "StepLog", "coefficient": 0.1, "period": [0.0]},
                r"`period` must be above 0, got 0.0 at",
            ),
            (
                {"law": "LogLength", "base": [[]]},
                r"`base` must not be empty, got the shape \(1, 0\)",
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


class TestDictionaries:
    @pytest.mark.parametrize("law", [law for law, _ in FORMULAS], ids=lambda x: repr(x)[:40])
    def test_round_trip(self, law):
        data = json.loads(json.dumps(laws.to_dict(law), allow_nan=False))
        assert laws.from_dict(data) == law

    def test_every_law_has_a_name(self):
        kinds = laws.Law.__subclasses__()
        assert set(_dictionaries._KINDS.values()) == {
            kind for kind in kinds if kind.__module__.startswith("isentropic.laws.")
        }

    def test_layout(self):
        law = laws.shifted(laws.scaled(laws.AffineLog(np.array([0.25, 0.5])), np.float32(2)), -1)
        data = {
            "law": "shifted",
            "of": {
                "law": "scaled",
                "of": {"law": "AffineLog", "slope": [0.25, 0.5], "intercept": 0.0, "minimum": None},
                "factor": 2.0,
            },
            "shift": -1,
        }
        assert laws.to_dict(law) == data
        again = laws.from_dict(data)
        np.testing.assert_array_equal(again(8), law(8))
        assert again.arrays[0].dtype == np.float64

    def test_parameters_that_have_a_default_may_be_left_out(self):
        assert laws.from_dict({"law": "LogLength"}) == laws.LogLength()
        assert laws.from_dict({"law": "AffineLog", "slope": 2}) == laws.AffineLog(2)

    @pytest.mark.float64
    def test_arrays(self, backend):
        dtypes = [*backend.dtypes, *([backend.half] if backend.half else [])]
        for dtype in dtypes:
            slope = backend.array([[0.1, -2.5], [3.0, 1e-3]], dtype)
            data = laws.to_dict(laws.AffineLog(slope, 1.0))
            assert json.loads(json.dumps(data)) == data
            law = laws.from_dict(data, like=slope)
            backend.assert_close(law.slope, slope, rtol=0, atol=0)
            assert law.intercept == 1.0
        host = laws.from_dict(data).slope
        assert type(host) is np.ndarray
        assert host.dtype == np.float64

    def test_numbers_of_bfloat16(self):
        torch = pytest.importorskip("torch")
        slope = torch.tensor([0.1, 1.0], dtype=torch.bfloat16, requires_grad=True)
        data = laws.to_dict(laws.AffineLog(slope))
        assert data["slope"] == [0.10009765625, 1.0]
        assert laws.from_dict(data, like=slope).slope.dtype == torch.bfloat16

    @pytest.mark.parametrize(
        ("data", "error", "message"),
        [
            (None, TypeError, r"`data` must be a dictionary that describes a law, got NoneType"),
            ([], TypeError, r"`data` must be a dictionary that describes a law, got list"),
            ({}, ValueError, r"`data` must name a law under 'law', got the keys none"),
            ({"base": 2}, ValueError, r"`data` must name a law under 'law', got the keys base"),
            ({"law": "os.system"}, ValueError, r"`law` must be 'AffineLog' or .* got 'os.system'"),
            ({"law": "Law"}, ValueError, r"`law` must be 'AffineLog' or .* got 'Law'"),
            ({"law": ["LogLength"]}, ValueError, r"`law` must be 'AffineLog' or .* got \['LogLength'\]"),
            (
                {"law": "AffineLog"}, ValueError,
                r"`data` must have the parameters of 'AffineLog' \(slope, intercept, minimum\), got none",
            ),
            (
                {"law": "LogLength", "__class__": "x", 3: 4}, ValueError,
                r"`data` must have the parameters of 'LogLength' \(base, minimum\), got 3, __class__",
            ),
            (
                {"law": "LogLength", "of": {"law": "LogLength"}}, ValueError,
                r"`data` must have the parameters of 'LogLength' \(base, minimum\), got of",
            ),
            (
                {"law": "scaled", "law_": {}, "factor": 1.0}, ValueError,
                r"`data` must have the parameters of 'scaled' \(of, factor\), got factor, law_",
            ),
            ({"law": "scaled", "of": 3, "factor": 1.0}, TypeError, r"`data` must be a dictionary .* got int"),
            ({"law": "LogLength", "base": "2"}, TypeError, r"`base` must be a real number or an array of them, got str"),
            ({"law": "LogLength", "base": None}, TypeError, r"`base` must be a real number or an array of them, got NoneType"),
            ({"law": "LogLength", "base": {"law": "LogLength"}}, TypeError, r"`base` must be a real number or an array of them, got dict"),
            ({"law": "LogLength", "base": 0.5}, ValueError, r"`base` must be above 1, got 0.5"),
            ({"law": "LogLength", "base": math.nan}, ValueError, r"`base` must be above 1, got nan"),
            ({"law": "LogLength", "minimum": [1.0]}, TypeError, r"`minimum` must be a real number, got ndarray"),
            ({"law": "Constant", "value": ["a"]}, TypeError, r"`value` must be lists of real numbers, got <U1 values"),
            ({"law": "Constant", "value": [True]}, TypeError, r"`value` must be lists of real numbers, got bool values"),
            ({"law": "Constant", "value": [None]}, TypeError, r"`value` must be lists of real numbers, got object values"),
            ({"law": "Constant", "value": [10**400]}, TypeError, r"`value` must be lists of real numbers, got object"),
            ({"law": "Constant", "value": [[1.0], [1.0, 2.0]]}, ValueError, r"`value` must be nested lists of equal lengths"),
            ({"law": "Constant", "value": [math.inf]}, ValueError, r"`value` must be finite, got inf at \(0,\)"),
        ],
    )  # fmt: skip
    def test_other_dictionaries(self, data, error, message):
        with pytest.raises(error, match=message):
            laws.from_dict(data)

    def test_deep_nesting(self):
        data = {"law": "LogLength"}
        for _ in range(5000):
            data = {"law": "scaled", "of": data, "factor": 1.0}
        with pytest.raises(ValueError, match=r"`data` must be nested at most 32 deep, got more"):
            laws.from_dict(data)

    def test_arguments(self):
        class Own(laws.Law):
            def evaluate(self, xp, n):
                return n

        with pytest.raises(
            TypeError, match=r"`law` must be a law that isentropic.laws defines, got Own"
        ):
            laws.to_dict(Own())
        with pytest.raises(
            TypeError, match=r"`law` must be a law that isentropic.laws defines, got int"
        ):
            laws.to_dict(3)
        slope = np.array([1.0, 2.0])
        law = laws.AffineLog(slope)
        slope[1] = math.nan
        with pytest.raises(ValueError, match=r"`slope` must be finite, got nan at \(1,\)"):
            laws.to_dict(law)
        data = {"law": "Constant", "value": [1.0]}
        with pytest.raises(TypeError, match=r"`like` must be an array .*, got str"):
            laws.from_dict(data, like="numpy")
        with pytest.raises(TypeError, match=r"`like` must have a real floating-point dtype, got int"):
            laws.from_dict(data, like=np.array([1]))


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
        assert law == laws.from_dict(laws.to_dict(law))  # in NumPy's arrays
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
            laws.to_dict(law)
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
        nested = [laws.scaled(laws.shifted(laws.StepLog(z, z), z), z) for z in (x, y)]
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
        with pytest.raises(TypeError, match="Slotted, a law, must have no __slots__"):

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
        expected = np.stack([_through_knots(NS, row) for row in rows])
        law = laws.Knots(KNOTS, backend.array(rows, "float32"))
        backend.assert_close(law(backend.array(NS)), expected, rtol=1e-5, atol=1e-5)
        alone = np.array([_through_knots(777, row) for row in rows])
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
        backend.assert_close(got, _through_knots(NS), rtol=1e-5, atol=1e-5)

    def test_gradients(self, backend):
        if backend.library not in ("torch", "jax"):
            pytest.skip("no gradients here")
        n = np.array([0.0, 1.0, 16.0, 90.0, 512.0, 3000.0, 1e5], "float32")
        factors = np.stack([KNOT_FACTORS, 2 * KNOT_FACTORS]).astype("float32")
        of_factors, of_n = _gradients(backend, lambda f, n: laws.Knots(KNOTS, f)(n), factors, n)
        # The factor is linear in those of the knots.
        expected = [_through_knots(n, unit).sum() for unit in np.eye(3)]
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
        data = laws.to_dict(laws.Knots([16, 512], [1, 1.5]))
        assert data == {"law": "Knots", "lengths": [16, 512], "factors": [1, 1.5], "minimum": None}
        for factors in (KNOT_FACTORS, np.stack([KNOT_FACTORS] * 2)):
            law = laws.Knots(KNOTS, backend.array(factors, "float32"))
            data = json.loads(json.dumps(laws.to_dict(law)))
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
            ([1, math.inf], [1, 2], ValueError, r"`lengths` must be at least 1, got inf"),
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
        pairs = (_gradients(backend, call, *inputs) for call in (ours, naive))
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
        if backend.library in ("numpy", "torch", "jax") and not backend.name.endswith("cuda"):
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
        for law in (laws.LogLength(base), laws.SqrtLogLength(base), laws.InfoScale(base, 64)):
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
            (lambda: laws.LogLength(2, minimum=laws.per_query(np.ones(2))), TypeError, r"`minimum` must be a real"),
            (lambda: laws.AffineLog(laws.per_query(np.ones((2, 3))))(np.ones((2, 4))), ValueError, r"`slope` must broadcast with \(2, 4\), got \(2, 3\)"),
            (lambda: it.attention(*np.ones((3, 2, 5, 4)), law=laws.AffineLog(laws.per_query(np.ones(6)))), ValueError, r"`(slope|law)` must .*\(6,\)|\(1, 6\)"),
            (lambda: it.attention(*np.ones((3, 5, 4)), law=laws.AffineLog(laws.per_query(np.ones((2, 5))))), ValueError, r"`law` must have a shape broadcastable to \(5,\), got \(2, 5\)"),
            (lambda: laws.to_dict(laws.AffineLog(1.0, laws.per_query(np.ones(2)))), TypeError, r"`intercept` must not depend on the query, to be saved, got a `per_query`"),
            (lambda: laws.to_dict(laws.scaled(laws.LogLength(), laws.per_query(np.ones(2)))), TypeError, r"`factor` must not depend on the query"),
            (lambda: laws.to_dict(laws.per_query(np.ones(2))), TypeError, r"`law` must not depend on the query"),
            (lambda: laws.to_dict(laws.scaled(laws.per_query(np.ones(2)), 2.0)), TypeError, r"`law` must not depend on the query"),
        ],
    )  # fmt: skip
    def test_arguments(self, make, error, message):
        with pytest.raises(error, match=message):
            make()

    def test_kappa(self, backend):
        kappa = backend.array([4.0, 8.0], "float32")
        law = laws.from_kappa(laws.per_query(kappa), 64)
        assert law == laws.AffineLog(laws.per_query(kappa / 8))


class TestGradients:
    """By the lengths and by the parameters, where a logarithm is 0 too."""

    @pytest.mark.every_mode
    @pytest.mark.float64
    @pytest.mark.parametrize(("make", "name", "good", "bad"), RANGES)
    def test_finite_and_right(self, backend, make, name, good, bad):
        if backend.library not in ("torch", "jax") or not backend.float64:
            pytest.skip("no gradients here, or too few digits for differences")
        n = np.array([0.0, 1.0, 3.1, 77.2, 9999.1])  # the last ones beside the steps
        got = _gradients(backend, lambda x, n: make(x)(n), np.array(good), n)
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
            (g,) = _gradients(backend, law, n)
            assert np.isfinite(g).all()


def _gradients(backend, call, *arguments):
    """The gradients of the sum of what is called."""
    arguments = [backend.array(x) for x in arguments]
    if backend.library == "jax":
        import jax

        gradients = jax.grad(lambda *a: call(*a).sum(), tuple(range(len(arguments))))(*arguments)
    else:
        leaves = [x.requires_grad_() for x in arguments]
        out = call(*leaves).sum() + 0 * sum(x.sum() for x in leaves)  # a law may be constant
        gradients = backend.xp.autograd.grad(out, leaves)
    return [backend.numpy(g) for g in gradients]


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


POSITION = np.arange(0, 40000, 7)


def _logn(length, base=math.e):
    """As lists of logarithms are written, with those up to a length as 1."""
    return lambda ps, shift=1: np.array(
        [math.log(p + shift, base) / math.log(length, base) if p + shift > length else 1 for p in ps]
    )


# Each rule as a function of the position (from 0), as its source writes it.
RULES = [
    # bert4keras, backend.py, attention_normalize: softmax(a · log(max(l, 16)) / log 512)
    ("su", {}, lambda p: np.log(np.maximum(p + 1, 16)) / np.log(512)),
    # bojone/rerope, rerope_patch.py: (log(position_ids + 1) / log(training_length)).clip(1)
    ("su-decoder", {}, lambda p: (np.log(p + 1) / np.log(512)).clip(1)),
    ("su-decoder", {"length": 4096}, lambda p: (np.log(p + 1) / np.log(4096)).clip(1)),
    # Qwen-7B, modeling_qwen.py: log_L(i) if i > L else 1, for i from 1
    ("qwen", {"length": 2048}, _logn(2048)),
    # Entropy-ABF, patch/EABF.py: log(position_ids + 1) / log 4096, where that is below 1, 1
    ("entropy-abf", {}, _logn(4096)),
    # lmdeploy, rotary_embedding.h, LogNScaling: log2(t) / log2(L) where the time step t > L, else 1
    ("lmdeploy", {"length": 2048}, lambda p: _logn(2048, 2)(p, shift=0)),
    # sglang, triton_ops/extend_attention.py: log2(i) / log2(L) where the index i > L, else 1
    ("grok-2", {"length": 8192}, lambda p: _logn(8192, 2)(p, shift=0)),
    # arXiv 2501.19399: softmax(s log n · z), and with a bias (s log n + b)
    ("ssmax", {"slope": 0.43}, lambda p: 0.43 * np.log(p + 1)),
    ("ssmax", {"slope": 0.43, "intercept": 0.2}, lambda p: 0.43 * np.log(p + 1) + 0.2),
    # transformers, models/mistral_large4: scale · log(position_ids + 1) + bias
    ("mistral-large-4", {"slope": 0.1, "intercept": 0.9}, lambda p: 0.1 * np.log(p + 1) + 0.9),
    # transformers, models/llama4: log1p(floor((positions + 1) / floor_scale)) · attn_scale + 1
    ("llama-4", {}, lambda p: np.log1p(np.floor((p + 1) / 8192)) * 0.1 + 1),
    # transformers, models/ministral3: 1 + beta · log(1 + floor(position_ids / L))
    ("ministral-3", {}, lambda p: 1 + 0.1 * np.log(1 + np.floor(p / 16384))),
    # transformers, models/inkling: 1 + alpha · log((effective_n / n_floor).clamp(min=1))
    ("inkling", {}, lambda p: 1 + 0.1 * np.log(((p + 1) / 128_000).clip(1))),
    ("inkling", {"length": 9000, "coefficient": 0.3}, lambda p: 1 + 0.3 * np.log(((p + 1) / 9000).clip(1))),
    # transformers, models/beam: exp(0.1 · log1p((position_ids + 1) / 2048))
    ("beam", {}, lambda p: np.exp(0.1 * np.log1p((p + 1) / 2048))),
    # arXiv 2309.00071: √(1/t) = 0.1 ln s + 1, on queries and keys
    ("yarn", {"scale": 4}, lambda p: np.full(p.shape, (0.1 * np.log(4) + 1) ** 2)),
    ("yarn", {"scale": 0.5}, lambda p: np.ones(p.shape)),
    # arXiv 2402.13753: √(1 + ln s / ln L), on queries and keys
    ("longrope", {"scale": 32, "length": 4096}, lambda p: np.full(p.shape, np.log(32 * 4096) / np.log(4096))),
    # Lumina-T2X, nextdit.py: √(log(seqlen, base_seqlen) / head_dim)
    ("lumina", {"base": 1024}, lambda p: np.array([math.sqrt(math.log(i + 1, 1024)) for i in p])),
    # Information-Entropy-Invariance, layer.py: (1 − l^(−2/d))^0.5 / (1 − L^(−2/d))^0.5
    (
        "infoscale", {"length": 1024, "head_dim": 64},
        lambda p: (1 - (p + 1.0) ** (-2 / 64)) ** 0.5 / (1 - 1024 ** (-2 / 64)) ** 0.5,
    ),
    # asentmax, sparse_gemma.py: delta + beta · log_position^gamma, log_position = log(arange(2, ...))
    (
        "asentmax-constant", {"coefficient": 0.2, "exponent": 1.5},
        lambda p: 1 + 0.2 * np.log(np.arange(2, p[-1] + 3))[p] ** 1.5,
    ),
    (
        "asentmax-constant", {"offset": 0.3, "coefficient": 0.2, "exponent": -1.5},
        lambda p: 0.3 + 0.2 * np.log(np.arange(2, p[-1] + 3))[p] ** -1.5,
    ),
    # parity, encoder.py, ScaledTransformerEncoderLayer: queries of src · log(len(src))
    ("chiang-cholak", {}, lambda p: np.array([math.log(i + 1) for i in p])),
]  # fmt: skip


class TestPresets:
    @pytest.mark.parametrize(("name", "parameters", "rule"), RULES)
    def test_rule(self, name, parameters, rule):
        got = laws.preset(name, **parameters)(POSITION + 1)
        np.testing.assert_allclose(got, rule(POSITION), rtol=1e-12, atol=1e-15)

    def test_names(self):
        names = list(laws.presets())
        assert names == sorted(names)
        assert {name for name, _, _ in RULES} == set(names)
        doc = inspect.getdoc(laws.preset)
        # A row of the table, and a source, for each.
        assert (
            re.findall(r"^([a-z0-9-]+)  +\S+ .* (?:keys|positions|slots|length|–)  ", doc, re.M)
            == names
        )
        assert re.findall(r"^- ([a-z0-9-]+): \S", doc, re.M) == names

    def test_exponents_below_0(self, backend):
        exponent = backend.array([-0.5, 0.0, 2.0], "float32")
        law = laws.preset("asentmax-constant", coefficient=0.5, exponent=exponent)
        n = np.arange(4)
        expected = 1 + 0.5 * np.log(np.maximum(n + 1, 2)) ** backend.numpy(exponent)[:, None]
        backend.assert_close(law(backend.array(n)), expected, rtol=1e-6)


class TestAgainstTransformers:
    """The rules as transformers computes them."""

    @pytest.fixture(autouse=True)
    def _needs(self):
        self.torch = pytest.importorskip("torch")
        pytest.importorskip("transformers")

    @property
    def positions(self):
        return self.torch.arange(0, 100_000, 1009)

    def test_ministral_3(self):
        from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

        expected = get_llama_4_attn_scale(self.positions[None], 0.1, 16384)[0, 0, :, 0]
        got = laws.preset("ministral-3")(self.positions + 1)
        self.torch.testing.assert_close(got, expected)

    def test_mistral_4(self):
        from transformers.models.mistral4.modeling_mistral4 import get_llama_4_attn_scale

        expected = get_llama_4_attn_scale(self.positions[None], 0.2, 8192)[0, 0, :, 0]
        got = laws.preset("ministral-3", coefficient=0.2, length=8192)(self.positions + 1)
        self.torch.testing.assert_close(got, expected)

    def test_beam(self):
        beam = pytest.importorskip("transformers.models.beam.modeling_beam")  # not in the oldest

        expected = beam.compute_attention_scaling(self.positions[None])[0, 0, :, 0]
        self.torch.testing.assert_close(laws.preset("beam")(self.positions + 1), expected)

    def test_mistral_large_4(self):
        large = pytest.importorskip("transformers.models.mistral_large4.modeling_mistral_large4")

        scaling = large.MistralLarge4TextSoftmaxScaling(3)
        for parameter in scaling.parameters():
            self.torch.nn.init.normal_(parameter)
        law = laws.preset("mistral-large-4", slope=scaling.scale, intercept=scaling.bias)
        query = self.torch.randn(1, 3, len(self.positions), 8)
        expected = scaling(query, self.positions[None], head_dim_first=True)
        got = it.scale_queries(query, self.positions + 1, law=law)
        self.torch.testing.assert_close(got, expected)

    @pytest.mark.parametrize("window", [False, True])
    def test_inkling(self, window):
        inkling = pytest.importorskip("transformers.models.inkling.modeling_inkling")
        from transformers import InklingTextConfig

        def seen(**options):
            config = InklingTextConfig(
                hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
                head_dim=8, swa_num_attention_heads=2, swa_num_key_value_heads=2, swa_head_dim=8, d_rel=4,
                rel_extent=8, layer_types=["hybrid_sliding" if window else "hybrid"], **options,
            )  # fmt: skip
            self.torch.manual_seed(0)
            layer = inkling.InklingAttention(config, layer_idx=0)
            for parameter in layer.parameters():
                self.torch.nn.init.normal_(parameter)
            return self._seen(config, layer, self.torch.randn(1, 30, 16), attention_mask=None)

        plain, scaled = seen(), seen(log_scaling_n_floor=4, log_scaling_alpha=0.3)
        law = None if window else laws.preset("inkling", length=4, coefficient=0.3)
        n = self.torch.arange(30) + 1
        for name in ("query", "position_bias"):
            got = plain[name] if law is None else it.scale_queries(plain[name], n, law=law)
            self.torch.testing.assert_close(got, scaled[name])

    def _seen(self, config, layer, x, **options):
        """What a layer hands to its attention."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        seen = {}

        def spy(module, query, key, value, mask, **kwargs):
            seen.update(kwargs, query=query)
            return self.torch.zeros_like(query.transpose(1, 2)), None

        ALL_ATTENTION_FUNCTIONS.register("spy", spy)
        config._attn_implementation = "spy"
        with self.torch.no_grad():
            layer(x, **options)
        return seen

    def test_llama_4(self):
        from transformers import Llama4TextConfig
        from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

        config = Llama4TextConfig(
            hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
            floor_scale=4, attn_scale=0.1, attn_temperature_tuning=True, no_rope_layers=[0],
            use_qk_norm=False, num_hidden_layers=1,
        )  # fmt: skip
        layer = Llama4TextAttention(config, layer_idx=0)
        assert not layer.use_rope
        x = self.torch.randn(1, 30, 16)
        seen = self._seen(config, layer, x, position_embeddings=None, attention_mask=None)
        plain = layer.q_proj(x).view(1, 30, 2, 8).transpose(1, 2).detach()
        n = self.torch.arange(30) + 1
        law = laws.preset("llama-4", coefficient=0.1, period=4)
        self.torch.testing.assert_close(it.scale_queries(plain, n, law=law), seen["query"])

    @pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
    def test_yarn(self, factor):
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = LlamaConfig(
            hidden_size=64, num_attention_heads=4, max_position_embeddings=int(2048 * factor),
            rope_parameters={
                "rope_type": "yarn", "factor": factor, "rope_theta": 10000.0,
                "original_max_position_embeddings": 2048,
            },
        )  # fmt: skip
        _, on_cos_and_sin = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
        assert laws.preset("yarn", scale=factor)(1) == pytest.approx(on_cos_and_sin**2)

    @pytest.mark.parametrize("factor", [1.0, 32.0])
    def test_longrope(self, factor):
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = LlamaConfig(
            hidden_size=64, num_attention_heads=4, max_position_embeddings=int(4096 * factor),
            rope_parameters={
                "rope_type": "longrope", "factor": factor, "rope_theta": 10000.0,
                "long_factor": [1.0] * 8, "short_factor": [1.0] * 8,
                "original_max_position_embeddings": 4096,
            },
        )  # fmt: skip
        _, on_cos_and_sin = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")
        law = laws.preset("longrope", scale=factor, length=4096)
        assert law(1) == pytest.approx(on_cos_and_sin**2)

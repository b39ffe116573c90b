"""Laws against their formulas, and presets against the code they describe."""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import isentropic as it
from isentropic import laws

NS = np.array([0, 1, 2, 15, 16, 17, 511, 512, 513, 4096, 8191, 8192, 20000, 100000])
LN = np.log(np.maximum(NS, 1))

FORMULAS = [
    (laws.Constant(2.5), np.full(NS.shape, 2.5)),
    (laws.LogLength(), LN / math.log(512)),
    (laws.LogLength(64, minimum=1), np.maximum(LN / math.log(64), 1)),
    (laws.SqrtLogLength(100), np.sqrt(LN / math.log(100))),
    (laws.SqrtLogLength(100, minimum=0.5), np.maximum(np.sqrt(LN / math.log(100)), 0.5)),
    (laws.AffineLog(0.4, -0.1), 0.4 * LN - 0.1),
    (laws.AffineLog(0.4, -0.1, minimum=0), np.maximum(0.4 * LN - 0.1, 0)),
    (laws.PowerLog(0.5, 0.2, 1.7), 0.5 + 0.2 * LN**1.7),
    (laws.StepLog(0.1, 8192), 1 + 0.1 * np.log1p(NS // 8192)),
    (laws.PowerLength(2048, 0.1), (1 + NS / 2048) ** 0.1),
    (
        laws.InfoScale(512, 64),
        np.sqrt((1 - np.maximum(NS, 1.0) ** (-1 / 32)) / (1 - 512 ** (-1 / 32))),
    ),
    (laws.scaled(laws.LogLength(), 0.5), LN / math.log(512) / 2),
    (laws.shifted(laws.LogLength(), 1), np.log(NS + 1) / math.log(512)),
    (laws.from_kappa(1.282, 64), 1.282 * LN / 8),
]


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
            (lambda: laws.preset("gpt-5"), ValueError, r"`name` must be 'asentmax' or .* got 'gpt-5'"),
            (lambda: laws.preset([]), ValueError, r"`name` must be 'asentmax' or .* got \[\]"),
            (lambda: laws.preset("su", base=1), ValueError, r"`base` must be above 1, got 1"),
            (lambda: laws.preset("su", base="a"), TypeError, r"`base` must be a real number, got str"),
            (lambda: laws.preset("inkling", length=4, coefficient=None), TypeError, r"`coefficient` must be a real"),
            (lambda: laws.PowerLog(1.0, 1.0, -1.0), ValueError, r"`exponent` must be at least 0, got -1"),
            (lambda: laws.LogLength()(np.ones(2, complex)), TypeError, r"`n` must have an integer or floating"),
            (lambda: laws.preset("qwen"), TypeError, r"`parameters` must be those of 'qwen' \(length\), got none"),
            (lambda: laws.preset("chiang-cholak", base=2), TypeError, r"'chiang-cholak' \(none\), got base"),
            (lambda: laws.preset("yarn", scale=-1), ValueError, r"`scale` must be above 0"),
            (lambda: laws.preset("longrope", scale=2, length=1), ValueError, r"`length` must be above 1"),
        ],
    )  # fmt: skip
    def test_arguments(self, make, error, message):
        with pytest.raises(error, match=message):
            make()


class TestDictionaries:
    @pytest.mark.parametrize("law", [law for law, _ in FORMULAS], ids=lambda x: repr(x)[:40])
    def test_round_trip(self, law):
        data = json.loads(json.dumps(laws.to_dict(law), allow_nan=False))
        assert laws.from_dict(data) == law

    def test_every_law_has_a_name(self):
        own = {kind for kind in laws.Law.__subclasses__() if kind.__module__ == "isentropic.laws"}
        assert set(laws._KINDS.values()) == own

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
            ({"law": "Constant", "value": [math.inf]}, ValueError, r"`value` must be finite, got lists that are not"),
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
        with pytest.raises(ValueError, match=r"`slope` must be finite, got an array that is not"):
            laws.to_dict(laws.AffineLog(np.array([1.0, math.nan])))
        data = {"law": "Constant", "value": [1.0]}
        with pytest.raises(TypeError, match=r"`like` must be an array .*, got str"):
            laws.from_dict(data, like="numpy")
        with pytest.raises(TypeError, match=r"`like` must have a real floating-point dtype, got int"):
            laws.from_dict(data, like=np.array([1]))


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

    def test_tracers_are_equal_to_themselves(self):
        jax = pytest.importorskip("jax")

        @jax.jit
        def is_same(slope):
            law = laws.AffineLog(slope)
            return (law == law) & (law == laws.AffineLog(slope))

        assert is_same(np.ones(2))

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


POSITION = np.arange(0, 40000, 7)


class TestPresets:
    """Each against its rule as a function of the position (from 0), written down independently."""

    @pytest.mark.parametrize(
        ("name", "parameters", "rule"),
        [
            ("su", {}, lambda p: np.log(np.maximum(p + 1, 16)) / np.log(512)),
            ("su-decoder", {}, lambda p: np.maximum(1, np.log(p + 1) / np.log(512))),
            ("qwen", {"length": 2048}, lambda p: np.where(p + 1 > 2048, np.log(p + 1) / np.log(2048), 1)),
            ("entropy-abf", {}, lambda p: np.maximum(1, np.log(p + 1) / np.log(4096))),
            (
                "lmdeploy", {"length": 2048},
                lambda p: np.where(p > 2048, np.log2(np.maximum(p, 1)) / np.log2(2048), 1),
            ),
            (
                "grok-2", {"length": 8192},
                lambda p: np.where(p > 8192, np.log2(np.maximum(p, 1)) / np.log2(8192), 1),
            ),
            ("ssmax", {"slope": 0.43}, lambda p: 0.43 * np.log(p + 1)),
            ("ssmax", {"slope": 0.43, "intercept": 0.2}, lambda p: 0.43 * np.log(p + 1) + 0.2),
            ("mistral-large-4", {"slope": 0.1, "intercept": 0.9}, lambda p: 0.1 * np.log(p + 1) + 0.9),
            ("llama-4", {}, lambda p: 1 + 0.1 * np.log(1 + np.floor((p + 1) / 8192))),
            ("ministral-3", {}, lambda p: 1 + 0.1 * np.log(1 + np.floor(p / 16384))),
            ("inkling", {"length": 9000, "coefficient": 0.1}, lambda p: np.maximum(1, 1 + 0.1 * np.log((p + 1) / 9000))),
            ("muse-spark", {"length": 512, "coefficient": 0.2}, lambda p: np.maximum(1, 1 + 0.2 * np.log((p + 1) / 512))),
            ("beam", {}, lambda p: (1 + (p + 1) / 2048) ** 0.1),
            ("yarn", {"scale": 4}, lambda p: np.full(p.shape, (0.1 * np.log(4) + 1) ** 2)),
            ("yarn", {"scale": 0.5}, lambda p: np.ones(p.shape)),
            ("longrope", {"scale": 32, "length": 4096}, lambda p: np.full(p.shape, np.log(32 * 4096) / np.log(4096))),
            ("lumina", {"base": 1024}, lambda p: np.sqrt(np.log(p + 1) / np.log(1024))),
            (
                "infoscale", {"length": 1024, "head_dim": 64},
                lambda p: np.sqrt((1 - (p + 1.0) ** (-2 / 64)) / (1 - 1024 ** (-2 / 64))),
            ),
            (
                "asentmax", {"offset": 0.3, "coefficient": 0.2, "exponent": 1.5},
                lambda p: 0.3 + 0.2 * np.log(p + 2) ** 1.5,
            ),
            ("chiang-cholak", {}, lambda p: np.log(p + 1)),
        ],
    )  # fmt: skip
    def test_rule(self, name, parameters, rule):
        got = laws.preset(name, **parameters)(POSITION + 1)
        np.testing.assert_allclose(got, rule(POSITION), rtol=1e-12, atol=1e-15)

    def test_names(self):
        assert laws.presets() == tuple(sorted(laws.presets()))
        assert len(laws.presets()) == 19


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

    def test_llama_4(self):
        # No function of its own there: the queries are read off a layer, as its attention gets them.
        from transformers import Llama4TextConfig
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

        seen = {}

        def spy(module, query, key, value, mask, **kwargs):
            seen["query"] = query
            return self.torch.zeros(
                *query.shape[:1], query.shape[2], query.shape[1], query.shape[3]
            ), None

        config = Llama4TextConfig(
            hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
            floor_scale=4, attn_scale=0.1, attn_temperature_tuning=True, no_rope_layers=[0],
            use_qk_norm=False, num_hidden_layers=1,
        )  # fmt: skip
        layer = Llama4TextAttention(config, layer_idx=0)
        assert not layer.use_rope
        ALL_ATTENTION_FUNCTIONS.register("spy", spy)
        config._attn_implementation = "spy"
        x = self.torch.randn(1, 30, 16)
        with self.torch.no_grad():
            layer(x, position_embeddings=None, attention_mask=None)
            plain = layer.q_proj(x).view(1, 30, 2, 8).transpose(1, 2)
        from isentropic import scale_queries

        n = self.torch.arange(30) + 1
        law = laws.preset("llama-4", coefficient=0.1, period=4)
        self.torch.testing.assert_close(scale_queries(plain, n, law=law), seen["query"])

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

"""Laws are written to dictionaries and read again, and other dictionaries are refused."""

import json
import math

import numpy as np
import pytest
from law_cases import FORMULAS

from isentropic import laws
from isentropic.laws import _dictionaries


class TestDictionaries:
    @pytest.mark.parametrize("law", [law for law, _ in FORMULAS], ids=lambda x: repr(x)[:40])
    def test_round_trip(self, law):
        data = json.loads(json.dumps(law.to_dict(), allow_nan=False))
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
        assert law.to_dict() == data
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
            data = laws.AffineLog(slope, 1.0).to_dict()
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
        data = laws.AffineLog(slope).to_dict()
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
            ({"law": "Knots", "lengths": [1, 2], "factors": [1, 2], "minimum": [1.0]}, TypeError, r"`minimum` must be a real number, got ndarray"),
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
            Own().to_dict()
        slope = np.array([1.0, 2.0])
        law = laws.AffineLog(slope)
        slope[1] = math.nan
        with pytest.raises(ValueError, match=r"`slope` must be finite, got nan at \(1,\)"):
            law.to_dict()
        data = {"law": "Constant", "value": [1.0]}
        with pytest.raises(TypeError, match=r"`like` must be an array .*, got str"):
            laws.from_dict(data, like="numpy")
        with pytest.raises(TypeError, match=r"`like` must have a real floating-point dtype, got int"):
            laws.from_dict(data, like=np.array([1]))

"""Reports of the drift of entropies, and laws fitted to it."""

import json
import math

import numpy as np
import oracles
import pytest

import isentropic as it
from isentropic import drift, laws, masks

LENGTHS = (32, 64, 64, 128)


def _pairs(rng, lengths=LENGTHS):
    """Queries and keys (3, 2, n, 16): scores of standard deviation 2 in one head and 1 in the other."""
    strength = np.asarray([2.0, 1.0])[:, None, None]
    return [
        ((strength * rng.normal(size=(3, 2, n, 16))).astype("float32"),
         rng.normal(size=(3, 2, n, 16)).astype("float32"))
        for n in lengths
    ]  # fmt: skip


def _mean_entropy(query, key, factor=1.0, visible=None):
    attention = oracles.attention(query, key, factor=np.full(query.shape[:-1], factor), visible=visible)
    return attention.entropy().mean(axis=(0, -1))


class TestEntropyDrift:
    def test_against_definition(self, backend, rng):
        pairs = _pairs(rng)
        report = drift.entropy_drift([tuple(backend.array(x) for x in pair) for pair in pairs])
        np.testing.assert_array_equal(report.lengths, [32, 64, 128])
        np.testing.assert_array_equal(report.counts, [96, 384, 384])
        by_pair = [_mean_entropy(*pair) for pair in pairs]
        expected = [by_pair[0], (by_pair[1] + by_pair[2]) / 2, by_pair[3]]
        assert report.entropy.shape == (3, 1, 2)
        np.testing.assert_allclose(report.entropy[:, 0], expected, atol=2e-5)
        slope = np.polyfit(np.log([32, 64, 128]), expected, 1)[0]
        np.testing.assert_allclose(report.slope[0], slope, atol=2e-5)

    def test_law(self, backend, rng):
        pairs = _pairs(rng, (32, 128))
        law = laws.AffineLog(backend.array([0.3, 0.0], "float32"), 1.0)
        samples = [tuple(backend.array(x) for x in pair) for pair in pairs]
        report = drift.entropy_drift(samples, law=law)
        for i, (query, key) in enumerate(pairs):
            factor = 0.3 * math.log(query.shape[-2]) + 1
            np.testing.assert_allclose(
                report.entropy[i, 0, 0], _mean_entropy(query, key, factor)[0], atol=2e-5
            )
            np.testing.assert_allclose(report.entropy[i, 0, 1], _mean_entropy(query, key)[1], atol=2e-5)

    def test_causal_queries_count_by_what_they_see(self, backend, rng):
        ((query, key),) = _pairs(rng, (40,))
        report = drift.entropy_drift([(backend.array(query), backend.array(key))], is_causal=True)
        n = np.arange(2, 41)
        groups = np.where(n > 4, np.rint(2 * np.log2(n)), n / 10)
        expected = [math.exp(np.log(n[groups == g]).mean()) for g in np.unique(groups)]
        np.testing.assert_allclose(report.lengths, expected, rtol=1e-12)
        np.testing.assert_array_equal(
            report.counts, [3 * (groups == g).sum() for g in np.unique(groups)]
        )
        entropy = oracles.attention(query, key, visible=np.tri(40, dtype=bool)).entropy()
        last = entropy[:, :, 1:][:, :, groups == groups[-1]].mean(axis=(0, -1))
        np.testing.assert_allclose(report.entropy[-1, 0], last, atol=2e-5)
        by_mask = drift.entropy_drift([(backend.array(query), backend.array(key), masks.causal())])
        np.testing.assert_array_equal(by_mask.entropy, report.entropy)

    def test_padding(self, backend, rng):
        """Padded keys do not count; a padded row of keys is as if it were shorter."""
        ((query, key),) = _pairs(rng, (32,))
        lengths = backend.array([[20], [20], [20]])
        padded = (backend.array(query), backend.array(key), masks.padding(lengths))
        cut = (backend.array(query), backend.array(key[..., :20, :]))
        a, b = drift.entropy_drift([padded]), drift.entropy_drift([cut])
        np.testing.assert_allclose(a.lengths, [20])
        np.testing.assert_allclose(a.entropy, b.entropy, atol=1e-6)

    @pytest.mark.host
    def test_many_lengths_are_joined(self, rng):
        """Each sequence counts by its own n; of more than 16 those within a half octave are one group."""
        query, key = rng.normal(size=(2, 20, 1, 40, 8)).astype("float32")
        lengths = np.arange(21, 41)[:, None]
        few = drift.entropy_drift([(query[:3], key[:3], masks.padding(lengths[:3]))])
        np.testing.assert_array_equal(few.lengths, [21, 22, 23])
        many = drift.entropy_drift([(query, key, masks.padding(lengths))])
        groups = np.rint(2 * np.log2(lengths[:, 0]))
        assert len(many.lengths) == len(np.unique(groups)) < 4
        last = groups == groups[-1]
        assert many.lengths[-1] == pytest.approx(np.exp(np.log(lengths[last]).mean()))
        visible = np.arange(40) < lengths[:, :, None, None]
        entropy = oracles.attention(query, key, visible=visible).entropy()
        np.testing.assert_allclose(many.entropy[-1, 0, 0], entropy[last].mean(), atol=2e-5)

    def test_rows_alone_and_grouped_heads(self, backend, rng):
        query, key = rng.normal(size=(2, 4, 24, 8)).astype("float32")
        one = drift.entropy_drift([(backend.array(query[0]), backend.array(key[0]))])
        assert one.entropy.shape == (1, 1, 1)
        args = (backend.array(query), backend.array(key[:2]))
        grouped = drift.entropy_drift([args], enable_gqa=True)
        expected = oracles.attention(query, key[:2]).entropy().mean(axis=-1)
        np.testing.assert_allclose(grouped.entropy[0, 0], expected, atol=2e-5)

    @pytest.mark.host
    def test_errors(self, rng):
        (pair,) = _pairs(rng, (8,))
        with pytest.raises(ValueError, match="`samples` must have one or more tuples"):
            drift.entropy_drift([])
        with pytest.raises(TypeError, match=r"`samples\[0\]` must be a tuple \(query, key\)"):
            drift.entropy_drift([3])
        with pytest.raises(ValueError, match=r"`samples\[1\]` must be a tuple .*, got 1 parts"):
            drift.entropy_drift([pair, pair[:1]])
        with pytest.raises(TypeError, match="`law` must be a law"):
            drift.entropy_drift([pair], law=2.0)
        by_head = np.ones((3, 2, 8, 8), bool)
        with pytest.raises(ValueError, match="hide the same keys from all heads"):
            drift.entropy_drift([(*pair, by_head)])
        with pytest.raises(
            ValueError, match="`samples` must all have the same number of heads, 2, got 1"
        ):
            drift.entropy_drift([pair, tuple(x[:, :1] for x in pair)])
        with pytest.raises(
            ValueError, match="`samples` must have finite entropies, got NaN in layer 0"
        ):
            drift.entropy_drift([(np.nan * pair[0], pair[1])])
        with pytest.raises(TypeError, match="`samples` must be an iterable of tuples"):
            drift.entropy_drift(3)
        with pytest.raises(TypeError, match="`samples` must be an iterable of tuples"):
            drift.entropy_drift(np.asarray(3.0))
        with pytest.raises(ValueError, match=r"`samples\[0\]` must have one head or more, got 0"):
            drift.entropy_drift([tuple(x[:, :0] for x in pair)])
        with pytest.raises(TypeError, match=r"`samples` must be an iterable .*, got one such tuple"):
            drift.entropy_drift(pair)
        both = tuple(np.stack(two) for two in _pairs(rng, (8, 16)))  # two samples
        np.testing.assert_array_equal(drift.entropy_drift(both).lengths, [8, 16])
        with pytest.raises(
            ValueError, match=r"`samples` must .* see several numbers of keys, got 8 alone"
        ):
            drift.calibrate([pair], reference_length=8)
        with pytest.raises(ValueError, match="queries that see two keys or more"):
            drift.entropy_drift([tuple(x[..., :1, :] for x in pair)])


@pytest.mark.host
class TestDriftReport:
    @pytest.fixture
    def report(self):
        entropy = np.asarray([[[1.0, 2.0], [1.0, 3.0]], [[2.0, 2.0], [np.nan, np.nan]]])
        return drift.DriftReport(np.asarray([10.0, 10 * math.e]), np.asarray([5, 7]), entropy)

    def test_slope_of_layers_with_fewer_lengths(self, report):
        np.testing.assert_allclose(report.slope, [[1.0, 0.0], [np.nan, np.nan]], atol=1e-12)

    def test_at(self, report):
        np.testing.assert_allclose(report.at(10 * math.sqrt(math.e))[0], [1.5, 2.0])
        assert np.isnan(report.at(20)[1]).all()
        assert np.isnan(report.at(9)).all()
        assert np.isnan(report.at(10**30)).all()

    def test_table(self, report):
        lines = repr(report).splitlines()
        assert lines[1].split()[:3] == ["n", "10", "27.2"]
        assert lines[2].split() == ["all", "layers", "1.750", "2.000", "0.500", "0.000", "1.000"]
        assert lines[3].split() == ["layer", "0", "1.500", "2.000", "0.500", "0.000", "1.000"]
        assert lines[4].split() == ["layer", "1", "2.000", "–", "–", "–", "–"]
        assert lines[5].split() == ["log", "n", "2.303", "3.303"]

    def test_a_single_length_has_no_drift(self, rng):
        report = drift.entropy_drift(_pairs(rng, (8, 8)))
        assert np.isnan(report.slope).all()
        assert repr(report).splitlines()[2].endswith("   none: a single length")

    def test_table_of_many_lengths(self):
        n = np.geomspace(4, 2**17, 31)
        report = drift.DriftReport(n, np.ones(31, int), np.log(n)[:, None, None])
        first, header, *_ = repr(report).splitlines()
        assert first.endswith(", 8 of 31 lengths")
        assert header.split()[1] == "4"
        assert header.split()[8] == "131072"
        assert len(header) < 110

    def test_plain_values(self, report):
        data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert data["counts"] == [5, 7]
        assert data["entropy"][1] == [[2.0, 2.0], [None, None]]
        assert data["slope"][1] == [None, None]


@pytest.mark.host
class TestFit:
    """The steps of the fit, against the formulas that their descriptions give."""

    FACTORS = drift.FACTORS

    def held(self, factor, lengths=(50.0, 100.0, 200.0), reference=100.0):
        factor = np.asarray(factor, float).reshape(len(lengths), -1)
        return drift._Held(np.asarray(lengths), factor, np.ones(len(lengths)), reference)

    @pytest.mark.parametrize(("slope", "error"), [(0.05, 0.04), (0.02, -0.03), (1.0, 0.3)])
    def test_a_factor_that_hardly_matters_stays_near_1(self, slope, error):
        """With H − target = error − slope · u, u minimizes its square + (0.02 nats per doubling · u)²."""
        u = np.log(self.FACTORS)
        entropy = (2 + error - slope * u)[:, None, None]
        found = drift._holding_factors(self.FACTORS, entropy, np.asarray([2.0]))
        penalty = 0.02 / math.log(2)
        expected = slope * error / (slope**2 + penalty**2)
        assert math.log(found[0, 0]) == pytest.approx(expected, abs=math.log(2) / 2 / 100)

    def test_a_length_near_the_reference_tells_no_slope(self):
        """Uniform attention has no factor but at lengths that are nearly the reference."""
        held = self.held([np.nan, 0.997, np.nan], lengths=(64.0, 126.0, 256.0), reference=128.0)
        law = held.law()
        np.testing.assert_allclose(law(np.asarray([128.0, 1024.0, 65536.0])), 1.0, atol=0.004)

    def test_heads_that_do_not_respond_keep_the_factor_1(self, rng):
        samples = [0.1 * rng.normal(size=(2, 4, n, 32)) for n in (64, 126, 256)]
        report = drift.calibrate(samples, reference_length=128)
        np.testing.assert_allclose(report.law(8192), 1.0, atol=0.01)
        lowest, expected, highest = report.at(1024)
        np.testing.assert_allclose([lowest, expected, highest], 1.0, atol=0.01)

    def test_the_expected_factor_is_that_of_the_law(self, rng):
        sizes = rng.uniform(0.5, 3, size=(4, 1, 1))
        samples = [sizes * rng.normal(size=(2, 4, n, 8)) for n in (16, 64, 128, 256)]
        report = drift.calibrate(samples, reference_length=64)
        for n in (20, 100, 256, 300, 512, 700, 65_536):
            lowest, expected, highest = report.at(n)[:, 0]
            np.testing.assert_allclose(expected, report.law(np.asarray([float(n)]))[:, 0])
            assert (lowest <= expected).all()
            assert (expected <= highest).all()

    def test_targets_out_of_reach(self):
        """The least entropy in reach misses the targets by 0.04 and 0.06 nats; the tolerance is 0.05."""
        entropy = 2 - np.log(self.FACTORS)[:, None, None] * np.ones((1, 1, 2))
        least = 2 - math.log(self.FACTORS[-1])
        target = np.asarray([least - 0.04, least - 0.06])
        found = drift._holding_factors(self.FACTORS, entropy, target)
        assert np.isfinite(found[0]).tolist() == [True, False]

    def test_interpolation_of_cubic_polynomials_is_exact(self, rng):
        u = np.log(self.FACTORS)
        polynomial = np.polynomial.Polynomial(rng.normal(size=4))
        fine, y = drift._interpolated(u, polynomial(u)[:, None])
        np.testing.assert_allclose(y[:, 0], polynomial(fine), rtol=1e-10, atol=1e-10)

    def test_heads_without_factors_above_the_reference(self):
        """Then those below it tell the slope."""
        x = np.log([0.5, 1.0, 2.0])
        factor = np.stack((1 + 0.3 * x, 1 + 0.3 * x), axis=1)
        factor[2, 1] = np.nan
        found = self.held(factor).at([800.0], 1)
        np.testing.assert_allclose(found, [[1 + 0.3 * math.log(8)] * 2])

    def test_extrapolated_factors_are_never_below_the_smallest(self):
        falling = self.held([1.2, 1.0, 0.8])
        assert falling.at([1e6], 1) == 0.8
        assert falling.law()(1e6) == 0.8
        assert self.held([0.5, 1.0, 0.97]).law()(1e60) == 0.5

    def test_the_shape_that_made_the_factors_is_chosen(self):
        lengths = (100.0, 200.0, 400.0)
        x = np.log(np.asarray(lengths) / 100)
        factor = np.stack((np.exp(0.8 * x), 1 + 0.8 * x, np.sqrt(1 + 1.6 * x), np.ones(3)), axis=1)
        assert self.held(factor, lengths).shape().tolist() == [0, 1, 2, 1]

    def test_the_law_goes_through_the_factors(self):
        """It is 1 at the reference, flat below, curved beyond, and where a length has no factor."""
        power = 1.5 ** np.log2([2.0, 4.0, 8.0, 16.0])
        factor = np.stack(
            ([0.9, 1.2, np.nan, *power[:3]], [np.nan, 1.2, 1.0, 1.1, np.nan, 1.3]), axis=1
        )
        held = self.held(factor, (20.0, 50.0, 100.0, 200.0, 400.0, 800.0))
        law = held.law()
        found = law(np.asarray([5.0, 20.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1600.0]))
        np.testing.assert_allclose(found[0], [0.9, 0.9, 1.2, 1, *power], rtol=1e-9)
        shape = held.shape()[1]
        between, beyond = held.at([400.0, 1600.0], shape)[:, 1]
        np.testing.assert_allclose(found[1], [1.2, 1.2, 1.2, 1, 1.1, between, 1.3, beyond], rtol=1e-9)

    def test_the_reference_is_a_knot(self):
        law = self.held([0.8, 1.0, 1.2], reference=120.0).law()
        np.testing.assert_allclose(
            law(np.asarray([100.0, 120.0, 200.0]))[0], [1.0, 1.0, 1.2], rtol=1e-9
        )

    def test_lengths_are_weighted_by_their_logits(self):
        n, counts, rise = np.asarray([100.0, 200.0, 400.0]), np.asarray([7, 5, 1]), [0, 0.55, 1.12]
        factors = 1 + np.asarray(rise)[:, None, None]
        law = laws.AffineLog(np.asarray([1 / math.log(100)]))
        report = drift.CalibrationReport((law,), n, counts, factors, 100.0, np.asarray([[2.0]]))
        x, weight = np.log(n / 100), counts * n
        # The curves of a power, a line and a root. The last one is the lowest, below the law.
        slope_of_root = (weight * x * (factors[:, 0, 0] ** 2 - 1)).sum() / (weight * x**2).sum()
        root = math.sqrt(1 + slope_of_root * math.log(100))
        power = math.exp(
            (weight * x * np.log(factors[:, 0, 0])).sum() / (weight * x**2).sum() * math.log(100)
        )
        assert report.at(1e4)[0, 0, 0] == pytest.approx(min(law(1e4)[0], root), rel=1e-9)
        assert report.at(1e4)[2, 0, 0] == pytest.approx(power, rel=1e-9)

    def test_the_length_of_a_group_is_the_mean_over_all_layers(self):
        recorder = drift.Recorder("samples")
        n = [np.arange(8, 20), np.arange(9, 40)]
        for layer, seen in enumerate(n):
            recorder.add(layer, seen, [np.log(seen)[None]])
        lengths = recorder.report().lengths
        group = np.concatenate([seen[np.rint(2 * np.log2(seen)) == 7] for seen in n])
        assert np.isclose(lengths, np.exp(np.log(group).mean())).any()

    def test_queries_are_counted_in_the_layer_that_has_most(self):
        recorder = drift.Recorder("samples")
        for layer, counts in enumerate(((3, 4), (5, 2))):
            for n, count in zip((10, 20), counts, strict=True):
                recorder.add(layer, n, [np.ones((1, count))])
        np.testing.assert_array_equal(recorder.report().counts, [5, 4])


@pytest.mark.host
class TestCalibrationReport:
    @pytest.fixture
    def report(self):
        """A power, a line, a root and a constant; the second layer has one head less."""
        n = np.asarray([80.0, 100.0, 200.0, 400.0])
        x = np.log(n / 100)
        curves = np.stack((np.exp(0.8 * x), 1 + 0.8 * x, np.sqrt(1 + 1.6 * x), np.ones(4)), axis=-1)
        factors = np.stack((curves, np.where([True, True, True, False], curves, np.nan)), axis=1)
        factors[0, 0, 1] = np.nan  # no factor reached the target there
        entropies = np.asarray([[2.0] * 4, [2.0, 2.0, 2.0, np.nan]])
        laws = tuple(
            drift._Held(n, factors[:, i, :heads], n, 100).law() for i, heads in ((0, 4), (1, 3))
        )
        return drift.CalibrationReport(laws, n, np.ones(4, int), factors, 100, entropies, ("a", "b"))

    def test_at(self, report):
        lowest, expected, highest = report.at(1600)
        x = math.log(16)
        curves = [math.exp(0.8 * x), 1 + 0.8 * x, math.sqrt(1 + 1.6 * x), 1]
        np.testing.assert_allclose(expected, [curves, [*curves[:3], np.nan]], rtol=0.02)
        np.testing.assert_allclose(lowest[:, 2], curves[2], rtol=1e-6)
        np.testing.assert_allclose(highest[:, 0], curves[0], rtol=1e-6)
        assert (lowest[:, :3] < highest[:, :3]).all()

    @pytest.mark.parametrize("length", [0.5, 0, math.nan])
    def test_lengths_that_are_none(self, report, length):
        with pytest.raises(ValueError, match="`length` must be at least 1"):
            report.at(length)

    def test_lengths_beyond_all_tables(self, report):
        low, expected, high = report.at(1e17)
        assert np.isfinite(expected[0]).all()
        assert (low[0] <= expected[0]).all()
        assert (expected[0] <= high[0]).all()

    def test_layers_that_differ(self):
        """In heads and in lengths: the last layer has none near the reference, and keeps the factor 1."""
        recorder = drift.Recorder("samples", drift.FACTORS)
        for n in (64, 128, 256, 512):
            for layer, heads in ((0, 2), (1, 1)):
                entropy = [np.full((heads, 4), math.log(n) - (1.2 * x) ** 2 / 2) for x in drift.FACTORS]
                recorder.add(layer, np.full(4, n), entropy)
        for n in (16, 32):
            recorder.add(
                2, np.full(4, n), [np.full((3, 4), math.log(n) / (1 + x)) for x in drift.FACTORS]
            )
        two, one, three = recorder.calibration(128, recorder.target(128)).laws
        np.testing.assert_allclose(two(1024), [one(1024)[0]] * 2)
        assert one(1024)[0] > 1.2
        np.testing.assert_allclose(three(np.asarray([16.0, 1024.0])), np.ones((3, 2)))

    def test_table(self, report):
        lines = repr(report).splitlines()
        assert lines[1].split() == ["n", "80", "100", "200", "400", "800"]
        assert [line.split()[0] for line in lines[2:]] == ["all", "a", "b"]
        means = report.at(800)[:, 0].mean(axis=-1)
        assert lines[3].endswith("{1:.3f} [{0:.3f}, {2:.3f}]".format(*means))


class TestLengthsThatHardlyDiffer:
    """Single queries with a constant number of keys, beside causal ones with many numbers."""

    @pytest.fixture
    def samples(self, rng):
        def draw(*shape):
            return 2 * rng.normal(size=shape)

        return [draw(2, 4, n, 8) for n in (16, 32, 64)] + [(draw(8, 4, 1, 8), draw(8, 4, 62, 8))]

    def test_are_one_group(self, samples):
        lengths = drift.entropy_drift(samples, is_causal=True).lengths
        assert (np.diff(np.log2(lengths[lengths > 4])) > 0.3).all()

    def test_laws_stay_above_the_least_factor(self, samples):
        report = drift.calibrate(samples, reference_length=16, is_causal=True)
        least = min(1.0, np.nanmin(report.factors))
        assert report.law(np.geomspace(1, 1e6, 200)).min() >= least - 1e-12

    def test_equal_numbers_of_keys(self, rng):
        q, k = rng.normal(size=(2, 2, 64, 8))
        seen = np.ones((64, 64), dtype=bool)
        seen[:32, 8:] = False
        samples = [(q, k, seen), (q, k), (q[:, :16], k[:, :16])]
        lengths = drift.entropy_drift(samples).lengths
        assert len(set(lengths.round().tolist())) == len(lengths)
        drift.calibrate(samples, reference_length=16)


class TestCalibrate:
    def test_holds_the_entropy_of_other_samples(self, backend, rng):
        lengths = (64, 128, 128, 256)
        samples = [tuple(backend.array(x) for x in pair) for pair in _pairs(rng, lengths)]
        law = drift.calibrate(iter(samples), reference_length=128).law
        assert law.factors.shape == (2, len(law.lengths))
        backend.assert_close(law(128), np.ones(2), atol=1e-5)
        others = _pairs(np.random.default_rng(5), (128, 512))
        others = [tuple(backend.array(x) for x in pair) for pair in others]
        held = drift.entropy_drift(others, law=law).slope
        standard = drift.entropy_drift(others).slope
        # The law is affine in log n, and random scores want its root: not exactly 0.
        assert (abs(held) < 0.2 * standard).all()
        assert standard.min() > 0.5

    @pytest.mark.host
    def test_factors_are_those_of_the_exact_solution(self, rng):
        """Where n keys of two levels decide, the mean over queries is one query."""
        samples = []
        for n in (64, 128, 256):
            key = np.zeros((1, n, 4))
            key[0, :4, 0] = 6.0
            query = np.zeros((1, 4, 4))
            query[..., 0] = 2.0  # logits 6 and 0, scale 1/2
            samples.append((query, key))
        law = drift.calibrate(samples, reference_length=64).law
        logits = np.where(np.arange(256) < 4, 6.0, 0.0)
        exact = it.factor_for_entropy(logits, it.entropy_from_logits(logits[:64]))
        assert float(law(256)[0]) == pytest.approx(float(exact), abs=0.01)

    def test_law_and_report(self, backend, rng):
        samples = [tuple(backend.array(x) for x in pair) for pair in _pairs(rng, (64, 128, 256))]
        report = drift.calibrate(samples, reference_length=128)
        law = report.law
        assert law.lengths == (1, 64, *(128 * 2**i for i in range(8)))
        np.testing.assert_allclose(report.lengths, [64, 128, 256])
        assert np.isnan(report.factors[0, 0, 1])  # 64 keys have not as much entropy as 128
        for n, factor in zip(report.lengths, report.factors[:, 0], strict=True):
            backend.assert_close(law(n), np.nan_to_num(factor, nan=1.0), atol=1e-5)
        backend.assert_close(law(8), backend.numpy(law(64)))
        backend.assert_close(law(512), report.at(512)[1, 0], atol=1e-5)

    @pytest.mark.host
    def test_keys_in_few_dimensions(self, rng):
        """On a sphere in d dimensions the factor that holds the entropy grows like n^(2/(d − 1))."""

        def sample(n, heads=4, queries=64):
            x = rng.normal(size=(heads, queries + n, 4)).astype("float32")
            x /= np.linalg.norm(x, axis=-1, keepdims=True)
            return 23 * x[:, :queries], x[:, queries:]  # the logits reach 23/√4

        samples = [sample(n) for n in 3 * (64, 128, 256, 512)]
        target = drift.entropy_drift(samples).at(128)
        report = drift.calibrate(samples, reference_length=128)
        held = drift.entropy_drift([sample(8192, queries=32)], law=report.law).entropy[0]
        assert abs(held - target).mean() < 0.3
        lowest, expected, _ = report.at(8192)
        assert (lowest < expected / 1.5).all()
        np.testing.assert_allclose(expected, report.law(8192)[None], rtol=1e-5)

    @pytest.mark.host
    def test_heads_that_do_not_answer_keep_the_factor_1(self, rng):
        """A head that attends to one key whatever the factor, and one that attends to all alike."""
        samples = []
        for n in (32, 64, 128):
            query = np.zeros((2, n, 4))
            key = np.zeros((2, n, 4))
            query[0, :, 0], key[0, 0, 0] = 40.0, 40.0
            query[1], key[1] = 1e-3 * rng.normal(size=(2, n, 4))
            samples.append((query, key))
        law = drift.calibrate(samples, reference_length=64).law
        np.testing.assert_allclose(law(4096), 1.0, atol=1e-6)

    @pytest.mark.host
    def test_short_lengths_that_cannot_hold_the_entropy_take_no_part(self, rng):
        pairs = _pairs(rng, (4, 64, 128, 256))
        law = drift.calibrate(pairs, reference_length=128).law
        without = drift.calibrate(pairs[1:], reference_length=128).law
        np.testing.assert_allclose(law(1000), without(1000), atol=1e-6)
        # 3 nats among few keys: the law goes no lower than what was asked for at 64.
        np.testing.assert_allclose(law(2), law(4), rtol=1e-6)
        assert (law(2) > 0.5).all()

    @pytest.mark.host
    def test_causal(self, rng):
        law = drift.calibrate(_pairs(rng, (256, 256)), reference_length=64, is_causal=True).law
        held = drift.entropy_drift(_pairs(rng, (400,)), law=law, is_causal=True)
        standard = drift.entropy_drift(_pairs(rng, (400,)), is_causal=True)
        long = held.lengths > 40
        spread = np.ptp(held.entropy[long, 0], axis=0), np.ptp(standard.entropy[long, 0], axis=0)
        assert (spread[0] < spread[1] / 3).all()

    @pytest.mark.host
    def test_errors(self, rng):
        pairs = _pairs(rng, (32, 64))
        with pytest.raises(
            ValueError, match=r"`reference_length` must lie within .*`samples`, 32 to 64 .* got 65"
        ):
            drift.calibrate(pairs, reference_length=65)
        with pytest.raises(ValueError, match="`reference_length` must be at least 2, got 1"):
            drift.calibrate(pairs, reference_length=1)

    @pytest.mark.host
    def test_steep_growth(self, rng):
        """Heads that need large factors."""
        samples = [
            (4 * rng.normal(size=(4, n, 32)) * (n / 64) ** -0.35, rng.normal(size=(4, n, 32)))
            for n in (64, 128, 256)
        ]
        law = drift.calibrate(samples, reference_length=64).law
        assert (law(256) > 1.8).all()
        held, standard = (drift.entropy_drift(samples, law=x).slope for x in (law, None))
        assert (abs(held) < 0.1 * standard).all()

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_half_precision(self, backend, rng, dtype):
        if backend.half is None or not hasattr(backend.xp, dtype):
            pytest.skip(f"has no {dtype}")
        pairs = _pairs(rng, (16, 32))
        kind = getattr(backend.xp, dtype)
        samples = [tuple(backend.xp.astype(backend.array(x), kind) for x in p) for p in pairs]
        expected = drift.entropy_drift(pairs).entropy
        np.testing.assert_allclose(drift.entropy_drift(samples).entropy, expected, atol=0.02)
        assert drift.calibrate(samples, reference_length=16).law.factors.dtype == backend.xp.float32

    @pytest.mark.float64
    def test_dtype(self, backend, rng):
        pairs = _pairs(rng, (16, 32))
        for dtype in backend.dtypes:
            samples = [tuple(backend.array(x, dtype) for x in pair) for pair in pairs]
            law = drift.calibrate(samples, reference_length=32).law
            backend.assert_close(law.factors, backend.numpy(law.factors))
            assert law.factors.dtype == samples[0][0].dtype

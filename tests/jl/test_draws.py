"""Draws from raw words: what they are made of, their distributions, and that they stay the same."""

import hashlib
import math

import numpy as np
import pytest
from scipy import stats

import isentropic as it
from isentropic.jl import _draws

pytestmark = pytest.mark.host


def generator(seed=12345, kind=np.random.PCG64):
    return np.random.Generator(kind(seed))


def digest(*arrays):
    """SHA-256 of the numbers, in little-endian float64."""
    return hashlib.sha256(b"".join(a.astype("<f8").tobytes() for a in arrays)).hexdigest()[:16]


class TestFromWords:
    WORDS = tuple(int(w) for w in np.random.PCG64(12345).random_raw(6))

    def test_words_of_numpy(self):
        # NumPy promises this stream.
        assert self.WORDS[:2] == (0x3A32B18DB2FFC19D, 0x51171315C9E4C4DE)

    def test_signs_are_bits(self):
        expected = [1 - 2 * (self.WORDS[i // 64] >> i % 64 & 1) for i in range(150)]
        got = _draws.random_signs(generator(), (3, 50))
        np.testing.assert_array_equal(got.reshape(-1), expected)

    def test_uniforms_are_high_bits(self):
        expected = [((w >> 12) + 0.5) / 2**52 for w in self.WORDS]
        np.testing.assert_array_equal(_draws.random_uniforms(generator(), (6,)), expected)

    def test_normals_are_polar(self):
        uniform = [((w >> 12) + 0.5) / 2**52 for w in self.WORDS]
        radius = [math.sqrt(-2 * math.log(u)) for u in uniform[:3]]
        x, y = (
            [
                (1 - 2 * (w >> bit & 1)) * r * function(math.pi / 2 * u)
                for r, u, w in zip(radius, uniform[3:], self.WORDS[3:], strict=True)
            ]
            for bit, function in ((0, math.cos), (1, math.sin))
        )
        np.testing.assert_allclose(_draws.random_normals(generator(), (6,)), x + y, rtol=1e-14)
        np.testing.assert_allclose(_draws.random_normals(generator(), (5,)), (x + y)[:5], rtol=1e-14)

    def test_permutations_sort_the_words(self):
        expected = sorted(range(6), key=self.WORDS.__getitem__)
        np.testing.assert_array_equal(_draws.random_permutation(generator(), 6), expected)

    def test_words_of_32_bits_are_joined(self):
        halves = np.random.MT19937(3).random_raw(4)
        got = _draws.random_words(generator(3, np.random.MT19937), 2)
        assert [int(w) for w in got] == [int(a) << 32 | int(b) for a, b in halves.reshape(2, 2)]


class TestDistributions:
    def test_normal(self):
        x = _draws.random_normals(generator(), (400_001,))
        assert stats.kstest(x, "norm").pvalue > 1e-3
        n = x.shape[0]
        for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            assert abs((x**power).mean() - mean) < 4.5 * (variance / n) ** 0.5
        for lag in (1, 200_001):  # neighbours, and the two coordinates of a point
            assert abs((x[lag:] * x[:-lag]).mean()) < 4.5 * (n - lag) ** -0.5
        assert np.abs(x).max() > 4

    def test_extremes(self):
        # The least and largest words have finite logarithms.
        u = _draws._uniforms(np.asarray([0, 2**64 - 1], "uint64"))
        assert 0 < u[0] < u[1] < 1
        np.testing.assert_allclose(_draws._log(u), np.log(u), rtol=1e-15)

    def test_functions(self):
        x = np.concatenate([np.geomspace(1e-16, 1, 10_000)[:-1], 1 - np.geomspace(1e-15, 0.5, 1000)])
        np.testing.assert_allclose(_draws._log(x), np.log(x), rtol=6e-16)
        cosine, sine = _draws._cos_sin(x * math.pi / 2)
        np.testing.assert_allclose(cosine, np.cos(x * math.pi / 2), atol=4e-16)
        np.testing.assert_allclose(sine, np.sin(x * math.pi / 2), atol=4e-16)

    def test_permutations_are_uniform(self):
        g = generator()
        counts = {}
        for _ in range(6000):
            key = tuple(_draws.random_permutation(g, 3).tolist())
            counts[key] = counts.get(key, 0) + 1
        assert stats.chisquare(list(counts.values())).pvalue > 1e-3
        assert len(counts) == 6


class TestTheSameForEver:
    """If one of these numbers changes, maps that users drew before change too."""

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            (np.random.PCG64, "ed11a1846f51f348"),
            (np.random.Philox, "bfb5969582eaf9be"),
            (np.random.MT19937, "8832fa83a5b0360f"),
        ],
    )
    def test_normals(self, kind, expected):
        assert digest(_draws.random_normals(generator(7, kind), (999,))) == expected

    @pytest.mark.parametrize(
        ("draw", "arrays", "expected"),
        [
            (lambda: it.jl.gaussian_projection(100, 7, rng=7), ["weights"], "1f9db17a9ecfa750"),
            (
                lambda: it.jl.sparse_projection(100, 7, density=1, rng=7),
                ["weights"],
                "e213c9e0b7093891",
            ),
            (lambda: it.jl.sparse_projection(100, 7, rng=7), ["weights"], "cf4c7626357640be"),
            (
                lambda: it.jl.hadamard_projection(100, 7, rounds=2, rng=7),
                ["signs", "rows"],
                "27a67a437d3a3985",
            ),
            (
                lambda: it.jl.count_sketch(100, 8, nonzeros=2, rng=7),
                ["signs", "components", "features"],
                "0539a4bed49b5a46",
            ),
            (lambda: it.jl.rotation(1031, rng=7), ["signs"], "50f2d9659d027a84"),
            (
                lambda: it.jl.rotation(600, blocks=3, independent=True, rng=7),
                ["signs"],
                "9c39be6a40498dd7",
            ),
        ],
    )
    def test_maps(self, draw, arrays, expected):
        fields = [getattr(draw(), name) for name in arrays]
        parts = [part for x in fields for part in (x if isinstance(x, tuple) else (x,))]
        assert digest(*parts) == expected

    def test_the_factors_of_rotations(self):
        orders = {
            d: [m.shape[0] for m in it.jl.rotation(d, rng=0).factors]
            for d in (1, 12, 100, 128, 192, 1000, 1023, 1031, 4096, 11008, 14336, 18944)
        }
        assert orders == {
            1: [],
            12: [12],
            100: [100],
            128: [128],
            192: [12, 16],
            1000: [20, 50],
            1023: [31, 33],
            1031: [32, 32],
            4096: [64, 64],
            11008: [16, 16, 43],
            14336: [16, 28, 32],
            18944: [16, 16, 74],
        }

    def test_matrices_of_random_directions(self):
        # Linear algebra rounds in other ways on other machines.
        m = it.jl.rotation(5, kind="haar", rng=7).matrix()
        np.testing.assert_allclose(
            m[0],
            [
                0.4052963558834932,
                -0.15884432203509696,
                -0.8420777077447553,
                0.2974378833778927,
                0.11375053809010861,
            ],
            atol=1e-12,
        )
        m = it.jl.orthogonal_projection(5, 2, rng=7).weights
        np.testing.assert_allclose(
            m[0],
            [
                0.09459532016903927,
                -0.09768797377207206,
                -0.5691454535343428,
                0.0019050108532638014,
                -0.810912207848211,
            ],
            atol=1e-12,
        )


def test_a_boolean_is_no_seed():
    with pytest.raises(TypeError, match=r"`rng` must be None, .* got bool"):
        it.jl.gaussian_projection(3, 2, rng=True)

"""Quantizers: codebooks, errors, unbiased inner products, and the same bytes everywhere."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import isentropic as it
from isentropic.jl import _quantizers
from isentropic.jl._quantizers import BITS, QuantizedVectors

GOLDEN = Path(__file__).with_name("quantizer_bytes.json")
KINDS_AND_BITS = [*((kind, bits) for kind in ("mse", "unbiased") for bits in BITS), ("sign", 1)]


def arrays_of(vectors):
    return vectors.codes, vectors.scales


def points(n, d):
    """Vectors (n, d) that are the same numbers on every machine: heavy tails, both signs."""
    i = np.arange(n * d, dtype=np.int64).reshape(n, d)
    return (((i * 7919 + i // 13 * 104729) % 4093 - 2046) ** 3 / 2.0**20).astype(np.float32)


def relative_error(f, x):
    return ((x - f.decode(f.encode(x))) ** 2).sum(-1) / (x**2).sum(-1)


@pytest.mark.host
class TestErrors:
    @pytest.mark.parametrize("d", [64, 80, 96, 128, 192, 384, 1536])
    @pytest.mark.parametrize("bits", [1, 2, 3, 4])
    def test_is_the_expected_one_for_all_kinds_of_data(self, d, bits, rng):
        """Within 2 %, over random maps: so says the marginal of a random direction."""
        n = max(64, 30_000 // d)
        sparse = rng.normal(size=(n, d)) * (rng.random((n, d)) < 4 / d)
        sparse[:, 0] += 0.1
        data = {
            "normal": rng.normal(size=(n, d)),
            "heavy tails": rng.normal(size=(n, d)) ** 3,
            "sparse": sparse,
            "one-hot": np.eye(d)[:n],
        }
        expected = it.jl.quantizer(d, bits, rng=0).expected_error().squared
        maps = [it.jl.quantizer(d, bits, rng=seed) for seed in range(24 if d < 150 else 8)]
        for name, x in data.items():
            found = np.mean([relative_error(f, x.astype(np.float32)).mean() for f in maps])
            assert found == pytest.approx(expected, rel=0.02), name

    @pytest.mark.host
    def test_many_features(self, rng):
        """Rounding to integers adds about 1e-6 up to 8192 features, and 6e-4 for the most."""
        for d, most in {5120: 5e-6, 8192: 5e-6, 2**17: 8e-4}.items():
            f = it.jl.quantizer(d, 8, rng=0)
            x = rng.normal(size=(max(2, 2**18 // d), d)).astype(np.float32)
            assert relative_error(f, x).mean() - f.expected_error().squared < most
        with pytest.raises(ValueError, match="`n_features` must be at most 131072"):
            it.jl.quantizer(2**17 + 1, 8)

    @pytest.mark.parametrize("d", [50, 7, 3, 2, 1])
    def test_sizes_without_a_hadamard_matrix(self, d, rng):
        x = rng.normal(size=(500, d)).astype(np.float32)
        for bits in BITS:
            f = it.jl.quantizer(d, bits, rng=1)
            if d > 40:
                assert relative_error(f, x).mean() == pytest.approx(
                    f.expected_error().squared, rel=0.05
                )
            assert relative_error(f, x).max() < 2.0 ** (1 - bits)

    @pytest.mark.parametrize("kind", ["mse", "unbiased", "sign"])
    @pytest.mark.parametrize("bits", [1, 2, 4])
    def test_inner_products(self, kind, bits, rng):
        """Their mean over maps, and their standard deviation, for pairs of known cosines."""
        if kind == "sign" and bits > 1:
            pytest.skip("has one bit")
        d, n_maps = 64, 1500
        x, other = np.linalg.qr(rng.normal(size=(d, 2)))[0].T
        queries = np.stack([c * x + math.sqrt(1 - c * c) * other for c in (0.0, 0.5, 0.9)])
        estimates, f = np.empty((n_maps, 3)), None
        for seed in range(n_maps):
            f = it.jl.quantizer(d, bits, kind=kind, rng=seed)
            codes = f.encode(x.astype(np.float32)[None])
            estimates[seed] = f.inner(queries.astype(np.float32), codes)[:, 0]
        expected, error = f.expected_error(), estimates.std(0) / n_maps**0.5
        slope = 1 - expected.squared if kind == "mse" else 1.0
        assert (np.abs(estimates.mean(0) - slope * np.asarray([0.0, 0.5, 0.9])) < 3.5 * error).all()
        assert estimates[:, 0].std() == pytest.approx(expected.inner, rel=0.08)

    def test_inner_products_in_few_dimensions(self, rng):
        d, found, f = 8, [], None
        for seed in range(400):
            f = it.jl.quantizer(d, 1, rng=seed)
            x = np.linalg.qr(rng.normal(size=(d, d)))[0].astype(np.float32)
            found.append(f.inner(x, f.encode(x))[~np.eye(d, dtype=bool)])
        assert np.std(found) == pytest.approx(f.expected_error().inner, rel=0.03)

    @pytest.mark.parametrize("d", [1, 2])
    def test_signs_in_few_dimensions(self, d, rng):
        x = rng.normal(size=(20, d)).astype(np.float32)
        maps = [it.jl.quantizer(d, 1, kind="sign", n_components=3, rng=seed) for seed in range(2000)]
        found = np.mean([relative_error(f, x).mean() for f in maps])
        assert found == pytest.approx(maps[0].expected_error().squared, rel=0.06)

    def test_more_signs_miss_less(self, rng):
        x, d = rng.normal(size=(200, 32)).astype(np.float32), 32
        for k in (32, 320):
            f = it.jl.quantizer(d, 1, kind="sign", n_components=k, rng=0)
            assert f.encode(x).codes.shape == (200, k // 8)
            assert relative_error(f, x).mean() == pytest.approx(f.expected_error().squared, rel=0.1)

    def test_eight_bits_of_a_row_of_one_large_number(self):
        x = np.full((1, 256), 1e-3, np.float32)
        x[0, 17] = 1e3
        f = it.jl.quantizer(256, 8, rng=0)
        assert relative_error(f, x)[0] < 2 * f.expected_error().squared


@pytest.mark.host
def test_distortion_of_a_quantizer(rng):
    x = rng.normal(size=(40, 96)).astype(np.float32)
    f = it.jl.quantizer(96, 4, rng=0)
    got, expected = it.jl.distortion(x, f), it.jl.distortion(x, f.decode(f.encode(x)))
    np.testing.assert_array_equal(got.distance, expected.distance)
    assert str(got) == str(expected)
    assert "Gaussian map" not in str(got)  # it keeps the number of features
    image = it.jl.hadamard_projection(96, 32, rng=0)
    got, expected = it.jl.distortion(x, image), it.jl.distortion(x, image(x))
    np.testing.assert_array_equal(got.distance, expected.distance)


class TestBytes:
    @pytest.mark.parametrize("d", [80, 1, 3, 16, 50, 128])
    def test_are_those_of_numpy(self, backend, d):
        tiny = np.stack([np.full(d, 1e-36), np.full(d, 1e-30), np.full(d, 1e37), np.zeros(d)])
        x = np.concatenate([points(40, d), np.eye(d), tiny]).astype(np.float32)
        for kind, bits in KINDS_AND_BITS:
            expected = it.jl.quantizer(d, bits, kind=kind, rng=3).encode(x)
            like = backend.array(x)
            got = it.jl.quantizer(d, bits, kind=kind, rng=3, like=like).encode(like)
            np.testing.assert_array_equal(backend.numpy(got.codes), expected.codes)
            scales = backend.numpy(got.scales)
            assert scales.dtype == np.float32
            np.testing.assert_array_equal(scales.view(np.int32), expected.scales.view(np.int32))

    @pytest.mark.host
    def test_do_not_change(self, request):
        """Those of a release are those of the next one: update the file only for a new format."""
        found = {}
        for d in (7, 64, 80, 384):
            for kind, bits in KINDS_AND_BITS:
                vectors = it.jl.quantizer(d, bits, kind=kind, rng=11).encode(points(100, d))
                content = vectors.codes.tobytes() + vectors.scales.astype("<f4").tobytes()
                found[f"{d} {kind} {bits}"] = hashlib.sha256(content).hexdigest()[:24]
        assert found == json.loads(GOLDEN.read_text())

    @pytest.mark.host
    def test_do_not_depend_on_blocks_or_layout(self, monkeypatch, rng):
        from isentropic.jl import _quantizers

        x = rng.normal(size=(5, 30, 24)).astype(np.float32)
        f = it.jl.quantizer(24, 3, rng=0)
        expected = f.encode(x)
        assert expected.codes.shape == (5, 30, 9)
        assert expected.scales.shape == (5, 30)
        monkeypatch.setattr(_quantizers, "_BLOCK_NUMBERS", 24 * 7)
        assert f.encode(x) == expected
        strided = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, -1, 0)), 0, -1)
        assert f.encode(strided) == expected
        assert f.encode(np.float64(x)) == expected
        assert f.encode(x[2, 3]) == QuantizedVectors(
            expected.codes[2, 3], np.asarray(expected.scales[2, 3]), f
        )

    @pytest.mark.host
    def test_powers_of_two_change_nothing_but_the_scales(self, rng):
        x = rng.normal(size=(50, 48)).astype(np.float32)
        for kind in ("mse", "unbiased"):
            f = it.jl.quantizer(48, 4, kind=kind, rng=0)
            expected = f.encode(x)
            for power in (-90, -1, 1, 100):
                got = f.encode(x * np.float32(2.0) ** power)
                np.testing.assert_array_equal(got.codes, expected.codes)
                np.testing.assert_array_equal(got.scales, expected.scales * np.float32(2.0) ** power)

    @pytest.mark.every_mode
    def test_half_precision(self, backend, rng):
        if backend.half is None:
            pytest.skip("has no half precision")
        x = rng.normal(size=(6, 16)).astype(np.float16)
        f = it.jl.quantizer(16, 4, rng=0, like=backend.array(x))
        expected = it.jl.quantizer(16, 4, rng=0).encode(x.astype(np.float32))
        np.testing.assert_array_equal(backend.numpy(f.encode(backend.array(x)).codes), expected.codes)


class TestVectors:
    def test_unusual_rows(self, backend):
        x = np.ones((5, 20), np.float32)
        x[0], x[1, 3], x[2, 4], x[3] = 0, math.nan, -math.inf, 1e-31
        x = backend.array(x)
        for kind, bits in (("mse", 2), ("unbiased", 2), ("sign", 1)):
            f = it.jl.quantizer(20, bits, kind=kind, rng=0, like=x)
            vectors = f.encode(x)
            decoded = backend.numpy(f.decode(vectors))
            assert (decoded[[0, 3]] == 0).all()
            assert np.isnan(decoded[[1, 2]]).all()
            assert np.isfinite(decoded[4]).all()
            np.testing.assert_array_equal(np.isnan(backend.numpy(vectors.scales)), [0, 1, 1, 0, 0])

    @pytest.mark.parametrize("bits", BITS)
    def test_inner_is_the_product_with_what_is_decoded(self, backend, bits, rng, monkeypatch):
        from isentropic.jl import _quantizers

        monkeypatch.setattr(_quantizers, "_INNER_NUMBERS", 100)
        x, q = (backend.array(rng.normal(size=(2, n, 12)), "float32") for n in (9, 4))
        f = it.jl.quantizer(12, bits, kind="unbiased", rng=0, like=x)
        vectors = f.encode(x)
        decoded, scores = (backend.numpy(y) for y in (f.decode(vectors), f.inner(q, vectors)))
        assert scores.shape == (2, 4, 9)
        expected = backend.numpy(q) @ decoded.swapaxes(-1, -2)
        np.testing.assert_allclose(scores, expected, atol=2e-5)
        one = f.inner(q[0, ...], vectors)
        np.testing.assert_allclose(
            backend.numpy(one)[1], (backend.numpy(q)[0] @ decoded[1].T), atol=2e-5
        )

    def test_no_vectors(self, backend):
        x = backend.array(np.zeros((0, 3, 8)), "float32")
        f = it.jl.quantizer(8, 3, rng=0, like=x)
        vectors = f.encode(x)
        assert vectors.codes.shape == (0, 3, 3)
        assert f.decode(vectors).shape == (0, 3, 8)

    def test_rows(self, backend, rng):
        """They are indexed as an array of vectors."""
        x = backend.array(rng.normal(size=(3, 4, 6, 12)).astype(np.float32))
        f = it.jl.quantizer(12, 3, rng=0, like=x)
        vectors = f.encode(x)
        for index in (1, slice(1, 3), (0, slice(2)), (..., 0), (slice(None), 1, ...), (..., slice(2))):
            parts = index if isinstance(index, tuple) else (index,)
            parts = parts if ... in parts else (*parts, ...)
            assert vectors[index] == f.encode(x[(*parts, slice(None))])
        assert len(vectors) == 3
        assert len(vectors[0]) == 4
        assert [len(row) for row in vectors] == [4] * 3
        assert list(vectors)[2] == vectors[2]
        with pytest.raises(TypeError, match="a single vector"):
            len(vectors[0, 1, 2])

    def test_codes_of_one_library_decode_in_another(self, backend, rng):
        x = rng.normal(size=(10, 24)).astype(np.float32)
        vectors = it.jl.quantizer(24, 4, rng=0).encode(x)
        f = it.jl.quantizer(24, 4, rng=0, like=backend.array(x))
        moved = QuantizedVectors(
            f.encode(backend.array(x)).codes * 0
            + backend.xp.asarray(vectors.codes, device=backend.device),
            backend.array(vectors.scales),
            f,
        )
        expected = vectors.quantizer.decode(vectors)
        np.testing.assert_allclose(backend.numpy(f.decode(moved)), expected, atol=1e-5)

    @pytest.mark.host
    def test_errors(self, rng):
        x = rng.normal(size=(3, 16)).astype(np.float32)
        f = it.jl.quantizer(16, 4, rng=0)
        for options, error, message in (
            ({"bits": 5}, ValueError, "`bits` must be 1, 2, 3, 4 or 8, got 5"),
            ({"bits": 2.0}, TypeError, "`bits` must be an integer, got float"),
            ({"kind": "sign"}, ValueError, "`bits` must be 1 for the kind 'sign', got 4"),
            ({"kind": "int4"}, ValueError, "`kind` must be"),
            ({"n_components": 8}, ValueError, "`n_components` must be left out"),
        ):
            with pytest.raises(error, match=message):
                it.jl.quantizer(16, **options)
        with pytest.raises(ValueError, match="`x` must have 16 entries along its last axis"):
            f.encode(x[:, :8])
        with pytest.raises(TypeError, match="`x` must have a real floating-point dtype"):
            f.encode(np.ones((3, 16), int))
        with pytest.raises(TypeError, match="`vectors` must be what `encode` returns, got ndarray"):
            f.decode(x)
        vectors = f.encode(x)
        assert vectors.shape == (3, 16)
        for dtype in (np.int64, np.int8, bool):
            with pytest.raises(TypeError, match="`query` must have a real floating-point dtype"):
                f.inner(np.ones((2, 16), dtype), vectors)
        with pytest.raises(ValueError, match="`query` must have at least 2 dimensions, got 1"):
            f.inner(x[0], vectors)
        with pytest.raises(ValueError, match="`vectors` must have at least 1 dimensions, got 0"):
            f.inner(x, vectors[0])
        with pytest.raises(TypeError, match="`vectors` must be decoded first"):
            np.asarray(vectors)
        with pytest.raises(TypeError, match="`quantizer` must be a quantizer, got NoneType"):
            QuantizedVectors(vectors.codes, vectors.scales, None)
        other = it.jl.quantizer(16, 2, rng=0).encode(x)
        with pytest.raises(ValueError, match="`vectors` must have codes of 8 bytes"):
            f.decode(other)


class TestTraces:
    def test_jax(self, rng):
        jax = pytest.importorskip("jax")
        x = jax.numpy.asarray(rng.normal(size=(6, 5, 16)), "float32")
        f = it.jl.quantizer(16, 4, kind="unbiased", rng=0, like=x)
        expected = f.encode(x)
        assert jax.jit(lambda f, x: f.encode(x))(f, x) == expected
        mapped = jax.vmap(lambda row: arrays_of(f.encode(row)))(x)
        assert all(bool((a == b).all()) for a, b in zip(mapped, arrays_of(expected), strict=True))

        def loss(scales):
            return (f.decode(replace(expected, scales=scales)) ** 2).sum()

        gradient = jax.grad(loss)(expected.scales)
        squares = (f.decode(expected) ** 2).sum(-1)
        np.testing.assert_allclose(gradient * expected.scales, 2 * squares, rtol=1e-4)
        assert not jax.grad(lambda x: f.decode(f.encode(x)).sum())(x).any()

    def test_torch(self, rng):
        torch = pytest.importorskip("torch")
        x = torch.tensor(rng.normal(size=(6, 16)), dtype=torch.float32)
        f = it.jl.quantizer(16, 4, rng=0, like=x)
        expected = f.encode(x)
        assert not f.encode(x.requires_grad_()).scales.requires_grad
        compiled = torch.compile(lambda x: f.encode(x), fullgraph=True, backend="eager")
        assert compiled(x.detach()) == expected

    def test_torch_may_round_products(self, rng):
        torch = pytest.importorskip("torch")
        x = rng.normal(size=(300, 128)).astype(np.float32)
        before = torch.get_float32_matmul_precision()
        for kind, bits in (("mse", 4), ("sign", 1)):
            expected = it.jl.quantizer(128, bits, kind=kind, rng=0).encode(x)
            f = it.jl.quantizer(128, bits, kind=kind, rng=0, like=torch.empty(0))
            try:
                torch.set_float32_matmul_precision("medium")
                assert _quantizers._exact_dtype(f._namespace()) == torch.float64
                got = f.encode(torch.from_numpy(x))
            finally:
                torch.set_float32_matmul_precision(before)
            np.testing.assert_array_equal(got.codes.numpy(), expected.codes)
            np.testing.assert_array_equal(got.scales.numpy(), expected.scales)

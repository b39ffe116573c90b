"""`rotary` agrees with rotations of complex numbers and transformers, and refuses other arrays."""

import numpy as np
import oracles
import pytest

import isentropic as it


class TestRotary:
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_against_complex_rotation(self, backend, rng, interleaved):
        x = rng.normal(size=(2, 3, 7, 8))
        got = it.layers.rotary(backend.array(x), interleaved=interleaved)
        backend.assert_close(got, oracles.rotary(x, np.arange(7), interleaved=interleaved), atol=1e-5)
        positions = rng.integers(0, 100, size=(2, 1, 7))
        got = it.layers.rotary(
            backend.array(x), backend.array(positions), base=300.0, interleaved=interleaved
        )
        expected = oracles.rotary(x, positions, base=300.0, interleaved=interleaved)
        backend.assert_close(got, expected, atol=1e-4)

    def test_products_depend_on_the_distance(self, backend, rng):
        q, k = rng.normal(size=(2, 1, 8))
        rows = backend.array(np.repeat(q, 5, 0)), backend.array(np.repeat(k, 5, 0))
        a = it.layers.rotary(rows[0], backend.array(np.arange(5) + 3))
        b = it.layers.rotary(rows[1], backend.array(np.arange(5)))
        products = backend.numpy(backend.xp.sum(a * b, axis=-1))
        np.testing.assert_allclose(products, products[0], rtol=1e-4, atol=1e-5)

    def test_half_precision_is_computed_in_float32(self, backend, rng):
        if backend.half is None:
            pytest.skip("no half precision here")
        x = rng.normal(size=(3, 8)).astype(np.float16)
        positions = np.array([1000, 1001, 2047])
        got = it.layers.rotary(backend.array(x), backend.array(positions))
        assert got.dtype == backend.array(x).dtype
        backend.assert_close(got, oracles.rotary(x, positions), atol=4e-3)

    def test_zero_size(self, backend):
        assert it.layers.rotary(backend.array(np.zeros((0, 4)), "float32")).shape == (0, 4)
        assert it.layers.rotary(backend.array(np.zeros((3, 0)), "float32")).shape == (3, 0)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_against_transformers(self, interleaved):
        torch = pytest.importorskip("torch")
        pytest.importorskip("transformers")
        x = torch.randn(2, 4, 7, 8)
        position = torch.arange(7)[None]
        if interleaved:
            from transformers.models.gptj.modeling_gptj import (
                apply_rotary_pos_emb,
                create_sinusoidal_positions,
            )

            sin, cos = create_sinusoidal_positions(7, 8)[position].chunk(2, dim=-1)
            expected = apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2)
        else:
            from transformers import LlamaConfig
            from transformers.models.llama.modeling_llama import (
                LlamaRotaryEmbedding,
                apply_rotary_pos_emb,
            )

            config = LlamaConfig(hidden_size=32, num_attention_heads=4)
            cos, sin = LlamaRotaryEmbedding(config)(x, position)
            expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
        torch.testing.assert_close(it.layers.rotary(x, interleaved=interleaved), expected)

    def test_errors(self, backend):
        x = backend.array(np.ones((3, 5)), "float32")
        with pytest.raises(ValueError, match=r"`x` must have an even last dimension, got 5"):
            it.layers.rotary(x)
        with pytest.raises(ValueError, match=r"`x` must have at least 2 dimensions, got 1"):
            it.layers.rotary(x[0, ...])
        x = x[:, :4]
        with pytest.raises(ValueError, match=r"`base` must be above 1, got 1"):
            it.layers.rotary(x, base=1)
        with pytest.raises(ValueError, match=r"`positions` must have a shape broadcastable to \(3,\)"):
            it.layers.rotary(x, backend.array([1, 2]))
        with pytest.raises(TypeError, match=r"`x` must have a real floating-point dtype"):
            it.layers.rotary(backend.array(np.ones((3, 4), int)))


class TestErrors:
    def test_positions(self, backend):
        with pytest.raises(TypeError, match="`positions` must have an integer or floating-point dtype"):
            it.layers.rotary(
                backend.array(np.ones((3, 4)), "float32"), backend.array(np.ones(3), "complex64")
            )

"""Caches of quantized keys and values, in `generate` and by hand."""

import pickle

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
import transformers
from packaging.version import Version
from tiny_models import decoder, encoder_decoder

from isentropic.integrations import huggingface

# The name of the argument.
CACHE = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


def generated(model, cache, beams=1, length=80):
    ids = torch.arange(3, 9)[None].repeat(2, 1)
    options = {"max_new_tokens": length, "min_new_tokens": length, "num_beams": beams}
    return model.generate(ids, **{CACHE: cache}, **options, do_sample=False)


@pytest.mark.parametrize("beams", [1, 3])
def test_generation(beams):
    model = decoder("Llama")
    exact = generated(model, None, beams)
    cache = huggingface.quantized_cache(model, 8, recent=8)
    got = generated(model, cache, beams)
    # A model of random weights has logits so close that the smallest error changes a later token.
    assert torch.equal(got[:, : 46 if beams == 1 else 1], exact[:, : 46 if beams == 1 else 1])
    assert got.shape == exact.shape
    assert cache.get_seq_length() == 85
    layer = cache.layers[0]
    assert layer.keys.shape[-2] < 8 + 32
    assert layer.older[0].codes.dtype == torch.uint8
    assert layer.older[0].scales.shape[-1] + layer.keys.shape[-2] == 85


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_encoder_and_decoder(name):
    """Cross-attention has a cache of its own."""
    model = encoder_decoder(name)
    exact = generated(model, None, length=20)
    cache = huggingface.quantized_cache(model, 8, recent=64)
    assert torch.equal(generated(model, cache, length=20), exact)
    assert cache.get_seq_length() == 20


def test_gradients():
    """The keys and values of a pass have gradients, as with the cache of transformers."""
    model, ids, grads = decoder("Llama"), torch.arange(20)[None], []
    for cache in (transformers.DynamicCache(config=model.config), huggingface.quantized_cache(model)):
        model.zero_grad()
        model(ids, **{CACHE: cache}).logits.square().sum().backward()
        grads.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    torch.testing.assert_close(*grads)


def test_pickle():
    model = decoder("Llama")
    cache = huggingface.quantized_cache(model, 8, recent=8)
    with torch.no_grad():
        model(torch.arange(60)[None], **{CACHE: cache})
        again = pickle.loads(pickle.dumps(cache))
        next_one = [model(torch.tensor([[3]]), **{CACHE: x}).logits for x in (cache, again)]
    assert again.layers[0].older
    assert torch.equal(*next_one)


@pytest.mark.parametrize("bits", [2, 4])
def test_states_are_those_of_the_quantizer(bits, rng):
    model = decoder("Llama")
    layer = huggingface.quantized_cache(model, bits, kind="unbiased", recent=10).layers[0]
    k, v = (torch.tensor(rng.normal(size=(1, 2, 60, 16)), dtype=torch.float32) for _ in range(2))
    whole = layer.update(k[:, :, :50], v[:, :, :50])
    assert all(torch.equal(a, b[:, :, :50]) for a, b in zip(whole, (k, v), strict=True))
    whole = layer.update(k[:, :, 50:], v[:, :, 50:])
    for i, (got, x) in enumerate(zip(whole, (k, v), strict=True)):
        f = layer.quantizer(x, i)
        expected = f.decode(f.encode(x[:, :, :40]))
        torch.testing.assert_close(got, torch.cat((expected, x[:, :, 40:]), 2), atol=1e-5, rtol=1e-5)
    assert layer.get_seq_length() == 60
    layer.crop(-15)
    assert layer.get_seq_length() == 45
    layer.crop(-20)
    assert layer.get_seq_length() == 25
    assert layer.keys.shape[-2] == 0
    layer.batch_repeat_interleave(3)
    assert layer.update(k[:, :, :1].repeat(3, 1, 1, 1), v[:, :, :1].repeat(3, 1, 1, 1))[0].shape == (
        3,
        2,
        26,
        16,
    )
    before = layer.update(k[:, :, :0].repeat(3, 1, 1, 1), v[:, :, :0].repeat(3, 1, 1, 1))
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    after = layer.update(k[:, :, :0].repeat(3, 1, 1, 1), v[:, :, :0].repeat(3, 1, 1, 1))
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a[[2, 0, 0]], b, atol=1e-5, rtol=1e-5)
    layer.batch_select_indices(torch.tensor([1]))
    assert layer.older[1].codes.shape[0] == layer.values.shape[0] == 1
    layer.reset()
    assert layer.get_seq_length() == 0


def test_layers_with_windows_stay_as_they_are():
    cache = huggingface.quantized_cache(decoder("Gemma3"), 4)
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert kinds == ["DynamicSlidingWindowLayer", "_QuantizedLayer"]


def test_fewer_bits_cost_more(rng):
    model = decoder("Llama")
    ids = torch.tensor(rng.integers(3, 64, (1, 120)))
    with torch.no_grad():
        exact = model(ids).logits[:, -40:].log_softmax(-1)
        divergences = []
        for bits in (8, 4, 2):
            cache = huggingface.quantized_cache(model, bits, recent=4)
            model(ids[:, :80], **{CACHE: cache})
            got = model(ids[:, 80:], **{CACHE: cache}).logits.log_softmax(-1)
            divergences.append((exact.exp() * (exact - got)).sum(-1).mean().item())
    assert np.all(np.diff(divergences) > 0)


def test_errors():
    model = decoder("Llama")
    for options, error, message in (
        ({"bits": 5}, ValueError, "`bits` must be 1, 2, 3, 4 or 8"),
        ({"kind": "sign"}, ValueError, "`kind` must be"),
        ({"recent": 0}, ValueError, "`recent` must be"),
    ):
        with pytest.raises(error, match=message):
            huggingface.quantized_cache(model, **options)
    with pytest.raises(TypeError, match="`model` must be a model of transformers, got int"):
        huggingface.quantized_cache(3)

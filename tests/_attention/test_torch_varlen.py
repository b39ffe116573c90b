"""Packed sequences through `varlen_attn`, without a GPU: by a stub that checks its arguments."""

import numpy as np
import pytest

import isentropic as it
from isentropic import laws, masks

torch = pytest.importorskip("torch")

from isentropic._attention import torch_varlen, triton  # noqa: E402
from isentropic._attention.plan import Arguments, prepare  # noqa: E402

CUMULATIVE = torch.tensor([0, 5, 5, 21, 40])
KEYS = torch.tensor([0, 9, 12, 12, 37])


def flash_attention(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What FlashAttention computes from what it takes, and errors for all else."""
    starts, key_starts = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert {x.dtype for x in (cu_seq_q, cu_seq_k)} == {torch.int32}
    assert {x.dtype for x in (q, k, v)} <= {torch.float16, torch.bfloat16}
    assert all(x.ndim == 3 and x.stride(-1) == 1 and x.shape[-1] % 8 == 0 for x in (q, k, v))
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert (starts[-1], key_starts[-1]) == (len(q), len(k))
    assert enable_gqa == (q.shape[1] != k.shape[1])
    for most, ends in ((max_q, starts), (max_k, key_starts)):
        assert type(most) is int
        assert most >= max(np.diff(ends), default=0)
    left, right = (x if x >= 0 else len(k) + len(q) for x in window_size)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    parts = []
    for i in range(len(starts) - 1):
        rows, columns = slice(*starts[i : i + 2]), slice(*key_starts[i : i + 2])
        n, m = starts[i + 1] - starts[i], key_starts[i + 1] - key_starts[i]
        distance = torch.arange(n)[:, None] + m - n - torch.arange(m)
        hidden = (distance > left) | (-distance > right)
        logits = torch.einsum("lhe,she->hls", q[rows].float(), k[columns].float()) * scale
        weights = torch.softmax(logits.masked_fill(hidden, -torch.inf), -1)
        weights = torch.where(hidden.all(-1, keepdim=True), 0.0, weights)
        parts.append(torch.einsum("hls,she->lhe", weights, v[columns].float()))
    return torch.cat(parts).to(q.dtype)


@pytest.fixture
def calls(monkeypatch):
    """The keyword arguments of each call of the kernel, which runs on the CPU."""
    found = []

    def noted(*args, **options):
        found.append((args, options))
        return flash_attention(*args, **options)

    monkeypatch.setattr(torch_varlen, "_reason_against", lambda plan: None)
    monkeypatch.setattr(torch_varlen, "varlen_attn", lambda: noted)
    return found


def arrays(rng, *shapes, dtype=torch.float16):
    return [torch.tensor(rng.normal(size=shape), dtype=dtype) for shape in shapes]


def compared(q, k, v, **options):
    """The output by the kernel and by the generic pass in float64, from the same numbers."""
    assert it.AttentionDistribution(q, k, **options).backends(v)["varlen"] == "runs"
    exact = it.attention(q.double(), k.double(), v.double(), implementation="generic", **options)
    return it.attention(q, k, v, **options), exact


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(3), masks.window(2, 4)], ids=repr)
@pytest.mark.parametrize("batch", [(), (4,), (3, 2), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("is_square", [True, False])
def test_output(calls, rng, mask, batch, is_square):
    keys = CUMULATIVE if is_square else KEYS
    q, k, v = arrays(rng, (*batch, 40, 12), (*batch, int(keys[-1]), 12), (*batch, int(keys[-1]), 5))
    packed = masks.packed(CUMULATIVE) if is_square else masks.packed(CUMULATIVE, keys)
    options = {"mask": packed if mask is None else packed & mask, "law": laws.LogLength(8)}
    got, exact = compared(q, k, v, **options)
    assert got.shape == (*batch, 40, 5)
    assert len(calls) == 1
    torch.testing.assert_close(got, exact.half(), rtol=4e-3, atol=4e-3)


def test_a_window_of_more_keys_than_there_are_queries(calls, rng):
    q, k = arrays(rng, (3, 8), (37, 8))
    sequences = masks.packed(torch.tensor([0, 1, 3]), torch.tensor([0, 20, 37]))
    got, exact = compared(q, k, k, mask=sequences & masks.window(9), law=None)
    torch.testing.assert_close(got, exact.half(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_grouped_heads(calls, rng, dtype):
    q, k, v = arrays(rng, (2, 6, 40, 16), (2, 2, 40, 16), (2, 2, 40, 16), dtype=dtype)
    options = {"mask": masks.packed(CUMULATIVE.tolist()), "is_causal": True, "enable_gqa": True}
    got, exact = compared(q, k, v, law=None, **options)
    assert calls[0][1]["enable_gqa"]
    torch.testing.assert_close(got.double(), exact, rtol=2e-2, atol=2e-2)


def test_bounds_of_lengths(calls, rng):
    """Those of numbers that can be read are exact."""
    q, k = arrays(rng, (40, 8), (37, 8))
    it.attention(q, k, k, mask=masks.packed(CUMULATIVE, KEYS), law=None)
    assert calls[0][0][5:] == (19, 25)
    with pytest.MonkeyPatch.context() as patch:  # as on a GPU
        patch.setattr(torch_varlen, "numbers_of", lambda x: None)
        it.attention(q, k, k, mask=masks.packed(CUMULATIVE, KEYS), law=None)
    assert calls[1][0][5:] == (40, 37)


def test_gradients(calls, rng):
    given = arrays(rng, (2, 3, 40, 8), (2, 1, 40, 8), (2, 3, 40, 8))
    weights = torch.tensor(rng.normal(size=(2, 3, 40, 8)))
    slope = [torch.tensor(0.3, dtype=x, requires_grad=True) for x in (torch.float32, torch.float64)]
    found = []
    for law, dtype, name in zip(slope, (None, torch.float64), (None, "generic"), strict=True):
        inputs = [x.detach().to(dtype or x.dtype).requires_grad_() for x in given]
        out = it.attention(
            *inputs, mask=masks.packed(CUMULATIVE), is_causal=True, law=laws.AffineLog(law),
            implementation=name,
        )  # fmt: skip
        (out * weights).sum().backward()
        found.append([x.grad.double() for x in (*inputs, law)])
    assert len(calls) == 1
    for got, exact in zip(*found, strict=True):
        torch.testing.assert_close(got, exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_hidden_numbers_that_are_not_finite(calls, rng, is_causal, value):
    """They make those queries NaN that see them, and no others."""
    q, k, v = arrays(rng, (2, 40, 8), (2, 37, 8), (2, 37, 8))
    q[0, 7], q[1, 30], k[1, 3], v[0, 20] = value, np.nan, np.nan, np.nan
    options = {"mask": masks.packed(CUMULATIVE, KEYS), "is_causal": is_causal}
    got, exact = compared(q, k, v, law=None, **options)
    assert torch.isnan(exact).any()
    torch.testing.assert_close(got, exact.half(), rtol=4e-3, atol=4e-3, equal_nan=True)


def test_repair(calls, rng, monkeypatch):
    """Where the Triton kernels are at hand, only rows that are not finite are computed again."""
    repaired = []
    monkeypatch.setattr(triton, "can_repair", lambda plan: True)
    monkeypatch.setattr(triton, "repair", lambda plan, operands, out: repaired.append(out.shape))
    (q,) = arrays(rng, (2, 40, 8))
    plan, operands = prepare(Arguments(q, q, q, masks.packed(CUMULATIVE) & masks.causal()))
    torch_varlen.output(plan, operands._replace(is_raw=True))
    assert repaired == [(1, 2, 40, 8)]


class TestUnsupported:
    def reason(self, x, **options):
        options = {"mask": masks.packed(CUMULATIVE), "law": None} | options
        return it.AttentionDistribution(x, x, **options).backends(x)["varlen"]

    def test_calls(self, calls, rng):
        (x,) = arrays(rng, (2, 40, 8))
        assert self.reason(x) == "runs"
        assert "no soft cap" in self.reason(x, softcap=3.0)
        assert "no bias" in self.reason(x, bias=torch.zeros(40, 40))
        assert "float16" in self.reason(x.float())
        assert "not `packed`" in self.reason(x, mask=masks.causal())
        padded = masks.packed(CUMULATIVE) & masks.padding(torch.tensor(30))
        assert "not `packed`" in self.reason(x, mask=padded)
        assert "256" in self.reason(torch.zeros(2, 40, 264, dtype=torch.float16))
        found = it.AttentionDistribution(x, x, mask=masks.packed(CUMULATIVE), law=None).backends()
        assert found["varlen"] == "it computes outputs only"

    def test_on_this_machine(self, rng):
        (x,) = arrays(rng, (2, 40, 8))
        if x.device.type != "cuda":
            assert self.reason(x) == "the arrays are not on a GPU of NVIDIA"


@pytest.mark.skipif(torch_varlen.varlen_attn() is None, reason="needs a newer `varlen_attn`")
def test_the_operator_takes_the_arguments():
    """PyTorch's own function, with tensors that have no numbers."""
    q = torch.zeros(2, 4, 40, 12, dtype=torch.bfloat16, device="meta", requires_grad=True)
    k = torch.zeros(2, 2, 37, 12, dtype=torch.bfloat16, device="meta")
    starts = (torch.zeros(5, dtype=torch.int64, device="meta") for _ in range(2))
    mask = masks.packed(*starts) & masks.window(3)
    out = torch_varlen.output(*prepare(Arguments(q, k, k, mask, enable_gqa=True)))
    assert (out.shape, out.device.type) == ((2, 4, 40, 12), "meta")
    assert out.requires_grad

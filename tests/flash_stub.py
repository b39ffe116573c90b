"""FlashAttention without a GPU: PyTorch's attention behind the functions that transformers calls."""

import torch
from torch.nn.functional import softmax
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as utils


def attend(q, k, v, causal, softmax_scale, window_size, softcap):
    """The output (L, H, E) of one sequence. The last query is at the last key, as in FlashAttention."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    behind, ahead = (len(k) if x < 0 else x for x in window_size)
    hidden = (distance > behind) | (distance < (0 if causal else -ahead))
    logits = torch.einsum("lhe,she->hls", q, k) * softmax_scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    weights = softmax(logits.masked_fill(hidden, -torch.inf), -1).nan_to_num(0.0)
    return torch.einsum("hls,she->lhe", weights, v)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False,
):  # fmt: skip
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    for i in range(len(cu_seqlens_q) - 1):
        queries, keys = (slice(*ends[i : i + 2].tolist()) for ends in (cu_seqlens_q, cu_seqlens_k))
        out[queries] = attend(q[queries], k[keys], v[keys], causal, softmax_scale, window_size, softcap)
    return out


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
):
    rows = zip(q, k, v, strict=True)
    return torch.stack([attend(*row, causal, softmax_scale, window_size, softcap) for row in rows])


def install(monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *a, **k: True)
    for name, x in {
        "_loaded_implementation": "flash_attention_2",
        "_flash_fn": flash_attn_func,
        "_flash_varlen_fn": flash_attn_varlen_func,
        "_flash_with_kvcache_fn": None,
        "_pad_fn": utils._pad_input,
        "_unpad_fn": utils._unpad_input,
        "_process_flash_kwargs_fn": utils._lazy_define_process_function(flash_attn_varlen_func),
    }.items():
        monkeypatch.setattr(utils, name, x)

"""Tiny models of transformers, what goes into them, and what they give."""

import minilm
import pytest
import torch
import transformers

from isentropic.integrations.huggingface._layer_law import LayerLaw

WINDOW = 5
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    # No end of sequence, so that all generate as much.
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.3,
}  # fmt: skip
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
DECODERS = {
    "Llama": {},
    "Qwen3": {**MIXED, "use_sliding_window": True},
    "Gemma3": {**MIXED, "query_pre_attn_scalar": 1},
    "Gemma2": {**MIXED, "query_pre_attn_scalar": 1, "attn_logit_softcapping": 2.0},
    "GptOss": {**MIXED, **EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "Mistral": {"sliding_window": WINDOW},
}
# Gemma 2 softens its logits and gpt-oss has sinks: transformers does either in "eager" alone.
CASES = [(name, kind) for name in DECODERS for kind in ("eager", "sdpa")]
CASES = [case for case in CASES if case not in (("Gemma2", "sdpa"), ("GptOss", "sdpa"))]


def decoder(name, **changes):
    """A tiny decoder of random weights, large enough for attention that is far from uniform."""
    torch.manual_seed(7)
    config = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config)(**{**SIZES, **DECODERS.get(name, {}), **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def special(name):
    """A decoder whose attention gets arguments that "isentropic" does not support."""
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if name == "DeepseekV32":  # indices of the keys
        return decoder(
            name, **experts, n_group=1, topk_group=1, q_lora_rank=16, kv_lora_rank=16, v_head_dim=8,
            qk_nope_head_dim=8, qk_rope_head_dim=8, index_n_heads=2, index_head_dim=16, index_topk=8,
            num_key_value_heads=4,
        )  # fmt: skip
    torch.manual_seed(7)  # a sink for each query
    windows = {f"swa_{key}": SIZES[key] for key in SIZES if key.endswith(("heads", "head_dim"))}
    loop = {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2}
    sizes = {key: x for key, x in SIZES.items() if key != "intermediate_size"}
    config = transformers.Inkling2LoopTextConfig(
        **sizes, **windows, **experts, **loop, unpadded_vocab_size=64, sliding_window_size=WINDOW,
        d_rel=4, rel_extent=8, loop_num_passes=2, loop_gate_rank=4,
    )  # fmt: skip
    return transformers.Inkling2LoopForCausalLM(config).eval()


def with_law(module, law, count="keys"):
    """A bare attention module with a law, or None for standard attention."""
    like = torch.empty(0)
    module.isentropic_law = None if law is None else LayerLaw(law, count, False, like)
    return module


def pretrained(**options):
    try:
        folder = minilm.model_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return transformers.BertModel.from_pretrained(folder, local_files_only=True, **options).eval()


def batch(side=None, length=12):
    ids = torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if side is not None:
        mask[1, slice(0, 4) if side == "left" else slice(-4, None)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


SIDES = pytest.mark.parametrize("side", [None, "left", "right"])


@torch.no_grad()
def outputs(model, inputs):
    """What the model gives for the tokens that are no padding."""
    out = model(**inputs)
    assert torch.isfinite(out[0]).all()
    return out[0][inputs["attention_mask"].bool()]


def with_positions(side):
    """A batch whose positions count no padding, as transformers generates."""
    inputs = batch(side)
    return inputs | {"position_ids": (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)}


@torch.no_grad()
def step_by_step(model, cache, side):
    """As `outputs`, by decoding with a cache."""
    inputs = with_positions(side)
    mask = inputs["attention_mask"]
    size = {"max_cache_len": 16} if cache is transformers.StaticCache else {}
    past, parts = cache(config=model.config, **size), []
    # A part of several tokens into the empty cache, one into the filled, and one by one.
    for start, end in [(0, 5), (5, 8), *((i, i + 1) for i in range(8, 12))]:
        out = model(
            inputs["input_ids"][:, start:end], attention_mask=mask[:, :end],
            position_ids=inputs["position_ids"][:, start:end], past_key_values=past,
        )  # fmt: skip
        parts.append(out.logits)
    return torch.cat(parts, 1)[mask.bool()]


def close(got, expected, atol=5e-5):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def text_batch(padded=True):
    """Two texts of 40 tokens, of the second of which 24 remain where there is to be padding."""
    tokens = minilm.tokenizer()
    ids = torch.tensor(list(minilm.texts(40, 2, tokens)))
    mask = torch.ones_like(ids)
    mask[1, 24:] = 0 if padded else 1
    return {"input_ids": ids * mask, "attention_mask": mask}


def encoder_decoder(name):
    torch.manual_seed(7)
    shared = {
        "vocab_size": 64,
        "d_model": 32,
        "pad_token_id": 0,
        "eos_token_id": None,
        "decoder_start_token_id": 1,
    }
    if name == "T5":
        config = transformers.T5Config(
            **shared, d_kv=8, d_ff=48, num_layers=2, num_heads=4, initializer_factor=1.0
        )
        return transformers.T5ForConditionalGeneration(config).eval()
    sizes = {
        f"{side}_{key}": x
        for side in ("encoder", "decoder")
        for key, x in {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()
    }
    config = transformers.BartConfig(
        **shared, **sizes, bos_token_id=1, forced_eos_token_id=None, init_std=0.3
    )
    return transformers.BartForConditionalGeneration(config).eval()

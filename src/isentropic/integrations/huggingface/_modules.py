"""The attention modules of a model, and how a law reaches each of them.

Most look up their attention in the AttentionInterface of transformers, where the interface applies the
law. The others are of a `Family`, and have hooks. Some do one or the other by the version of
transformers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import transformers

from isentropic._checks import type_error, value_error

# (module, number of heads) → (the axes into which features are split, the index of the query).
_Split: TypeAlias = Callable[[Any, int], tuple[tuple[int, ...], Any]]


@dataclass(frozen=True)
class Family:
    """How a law reaches the attention of a class, whose code stays as it is."""

    # The child module on which the law acts.
    child: str
    # Says where the query, (..., heads, E), is among the features that the child returns. The law
    # multiplies it. If None, the attention weights p, (B, H, L, S), pass through the child instead.
    # There the factor f turns them into p^f / Σ p^f, which multiplies all logits by f.
    query: _Split | None = None
    # The argument that says which keys are visible, and that of cross-attention, if it is another one.
    mask: str = "attention_mask"
    cross_mask: str = ""
    # Whether a boolean mask is True at hidden keys.
    marks_hidden: bool = False
    # The buffer (1, 1, positions, positions) that hides keys too.
    buffer: str = ""
    # An attribute or argument that must not be set, because the law would act in a wrong place.
    unless: str = ""


def _alone(module: Any, heads: int) -> tuple[tuple[int, ...], Any]:
    return (heads, -1), ...


def _in_each_head(module: Any, heads: int) -> tuple[tuple[int, ...], Any]:
    return (heads, 3, -1), (..., 0, slice(None))


def _before_all_keys(module: Any, heads: int) -> tuple[tuple[int, ...], Any]:
    return (3, heads, -1), (..., 0, slice(None), slice(None))


def _in_blocks(module: Any, heads: int) -> tuple[tuple[int, ...], Any]:
    blocks = 4  # the number of TPU cores on which CodeGen was trained
    return (blocks, 3, heads // blocks, -1), (..., 0, slice(None), slice(None))


def _in_groups(module: Any, heads: int) -> tuple[tuple[int, ...], Any]:
    all_but_key_and_value = (..., slice(-2), slice(None))
    if module.new_decoder_architecture:
        groups = module.num_kv_heads
        return (groups, heads // groups + 2, -1), all_but_key_and_value
    if module.multi_query:
        return (heads + 2, -1), all_but_key_and_value
    return _in_each_head(module, heads)


# By the module and the class that define the forward method: those that differ in the child alone.
_ALIKE: dict[tuple[str, _Split | None], str] = {
    ("query", _alone): "canine.CanineSelfAttention data2vec_vision.Data2VecVisionSelfAttention "
    "flava.FlavaSelfAttention git.GitSelfAttention layoutlmv3.LayoutLMv3SelfAttention "
    "lxmert.LxmertAttention megatron_bert.MegatronBertSelfAttention mobilevit.MobileViTSelfAttention "
    "rembert.RemBertSelfAttention roformer.RoFormerSelfAttention tapas.TapasSelfAttention "
    "tvp.TvpAttention vilt.ViltSelfAttention visual_bert.VisualBertSelfAttention "
    # It also multiplies the query with the places of the boxes.
    "bros.BrosSelfAttention",
    ("q_proj", _alone): "gptj.GPTJAttention groupvit.GroupViTAttention led.LEDDecoderAttention "
    "speecht5.SpeechT5Attention trocr.TrOCRAttention xglm.XGLMAttention",
    ("qkv", _before_all_keys): "blip.BlipAttention mgp_str.MgpstrAttention "
    "timesformer.TimesformerSelfAttention",
    ("query_key_value", _in_each_head): "bloom.BloomAttention "
    "gpt_neox_japanese.GPTNeoXJapaneseAttention",
    # The logits of DeBERTa and SEW-D include products of contents with positions. One of these does not
    # contain the query. That of ConvBERT also gives the kernel of the convolution. The words and the
    # entities of LUKE have queries of their own. The features of SqueezeBERT come before its positions.
    ("dropout", None): "convbert.ConvBertSelfAttention deberta.DisentangledSelfAttention "
    "deberta_v2.DisentangledSelfAttention glpn.GLPNEfficientSelfAttention luke.LukeSelfAttention "
    "pvt.PvtEfficientSelfAttention sew_d.DisentangledSelfAttention "
    "squeezebert.SqueezeBertSelfAttention",
}
_CROSS = Family("query", _alone, cross_mask="encoder_attention_mask")
_XLM = Family("q_lin", _alone, mask="mask")
FAMILIES = {name: Family(*x) for x, names in _ALIKE.items() for name in names.split()} | {
    "big_bird.BigBirdSelfAttention": _CROSS,
    "bigbird_pegasus.BigBirdPegasusSelfAttention": _CROSS,
    "blip_text.BlipTextSelfAttention": _CROSS,
    "codegen.CodeGenAttention": Family("qkv_proj", _in_blocks),
    "cpmant.CpmAntAttention": Family("project_q", _alone),
    "falcon.FalconAttention": Family("query_key_value", _in_groups),
    "flaubert.MultiHeadAttention": _XLM,
    # The query is added to learned vectors before the products.
    "funnel.FunnelRelMultiheadAttention": Family("attention_dropout", mask="attention_inputs"),
    "gpt_neo.GPTNeoSelfAttention": Family("q_proj", _alone, buffer="bias"),
    "ibert.IBertSelfAttention": Family("dropout", unless="quant_mode"),
    "imagegpt.ImageGPTAttention": Family(
        "c_attn", _before_all_keys, buffer="bias", unless="is_cross_attention"
    ),
    "mpnet.MPNetSelfAttention": Family("q", _alone),
    "mpt.MptAttention": Family("Wqkv", _before_all_keys, marks_hidden=True, unless="clip_qkv"),
    "mvp.MvpAttention": Family("q_proj", _alone, unless="attn_prompt"),
    "openai.Attention": Family("c_attn", _before_all_keys, buffer="bias"),
    "pvt_v2.PvtV2SelfAttention": Family("attn_drop"),
    "xlm.MultiHeadAttention": _XLM,
}

# Attention whose keys are no tokens, so that a law of their number and an entropy would say nothing.
_NOT_OVER_TOKENS = {
    "it attends over the outputs of earlier layers, and not over tokens": (
        "inkling2.Inkling2BlockAttentionResidual inkling2_loop.Inkling2LoopBlockAttentionResidual "
        "inkling2_loop.Inkling2LoopMessageAttentionResidual"
    ),
    "it attends over channels, and not over tokens": "florence2.Florence2VisionChannelAttention",
}
# Why a law cannot act on other classes.
_REASONS = {
    "each query sees a block of keys, and the masks do not say how many": (
        "big_bird.BigBirdBlockSparseAttention bigbird_pegasus.BigBirdPegasusBlockSparseAttention "
        "informer.InformerProbSparseAttention led.LEDEncoderSelfAttention "
        "longformer.LongformerSelfAttention longt5.LongT5LocalAttention "
        "longt5.LongT5TransientGlobalAttention pegasus_x.PegasusXGlobalLocalAttention "
        "reformer.LSHSelfAttention reformer.LocalSelfAttention"
    ),
    "it approximates the softmax": (
        "mra.MraSelfAttention nystromformer.NystromformerSelfAttention yoso.YosoSelfAttention"
    ),
    "it divides the queries by their lengths": (
        "swin2sr.Swin2SRSelfAttention swinv2.Swinv2SelfAttention"
    ),
    "its code reads the mask, and expects that of eager attention": (
        "nllb_moe.NllbMoeAttention pegasus_x.PegasusXAttention"
    ),
    "its logits are not products of queries and keys": "autoformer.AutoformerAttention",
    "the first axis of its states is that of the positions": "fsmt.Attention",
    "it has two queries, of the texts and of their layout": "lilt.LiltSelfAttention",
    "it has several streams of queries": (
        "prophetnet.ProphetNetNgramSelfAttention xlnet.XLNetRelativeAttention"
    ),
    "it passes the weights of its projections to a function of PyTorch": "wavlm.WavLMAttention",
}
REFUSED = {
    name: reason for reason, names in (_NOT_OVER_TOKENS | _REASONS).items() for name in names.split()
}


def class_name(module: Any) -> str:
    """The class that defines the forward method of a module, with the name of its file."""
    forward = inspect.unwrap(type(module).forward)
    file = forward.__module__.rpartition(".")[2].removeprefix("modeling_")
    return f"{file}.{forward.__qualname__.rpartition('.')[0]}"


def is_over_tokens(module: Any) -> bool:
    return REFUSED.get(class_name(module)) not in _NOT_OVER_TOKENS


@functools.cache
def looks_up_attention(kind: Any) -> bool:
    """Whether the forward method of a class looks up its attention in the AttentionInterface.

    Methods that it calls are looked into. The code decides, and not the name of the class: a later
    version of transformers may let a class use the interface.
    """
    seen: set[str] = set()
    waiting = ["forward"]
    while waiting:
        method = getattr(kind, waiting.pop(), None)
        code = inspect.unwrap(method).__code__ if inspect.isfunction(method) else None
        names = () if code is None else code.co_names
        if "ALL_ATTENTION_FUNCTIONS" in names:
            return True
        # What every module has, such as `register_buffer`, looks up no attention.
        new = {name for name in names if not hasattr(torch.nn.Module, name)} - seen
        seen |= new
        waiting += new
    return False


def family_of(module: Any) -> Family | None:
    """How a law reaches a module that computes its attention itself; None for other modules."""
    if not type(module).__module__.startswith("transformers."):
        return None
    family = FAMILIES.get(class_name(module))
    kinds: set[Any] = {type(x) for x in module.modules()}
    # Where attention is looked up, the law acts there. It must not act twice.
    return None if family is None or any(map(looks_up_attention, kinds)) else family


# ---------------------------------------------------------------------------------- of a model

# The newest version of transformers with which the tests ran.
TESTED = (5, 24)


@functools.cache  # once
def warn_of_newer_version() -> None:
    """Warn where transformers is newer than what was tested: its models may compute attention anew."""
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) > TESTED:
        tested = ".".join(map(str, TESTED))
        warnings.warn(
            f"transformers {version} is newer than {tested}, the last version that isentropic was "
            "tested with. Compare the outputs of your model with `huggingface.use(model, None, "
            'base="isentropic")` and without it.',
            stacklevel=4,
        )


def attention_modules(model: Any) -> dict[str, Any]:
    """By name, the modules on whose attention laws can act."""
    warn_of_newer_version()
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "set_attn_implementation"):
        raise type_error("model", "be a model of transformers", type(model).__name__)
    modules = {
        name: module
        for name, module in model.named_modules()
        if uses_interface(module) or family_of(module) is not None
    }
    if not modules:
        must = (
            "be a model whose attention goes through the AttentionInterface of transformers, or of a "
            "family for which isentropic has hooks"
        )
        known = {name: REFUSED[name] for name in map(class_name, model.modules()) if name in REFUSED}
        reasons = (f"{name.partition('.')[2]}: {reason}" for name, reason in known.items())
        raise value_error("model", must, ": ".join((type(model).__name__, *reasons)))
    return modules


def uses_interface(module: Any) -> bool:
    """Whether the module looks up its attention in the AttentionInterface, and laws can act there."""
    kind: Any = type(module)
    return looks_up_attention(kind) and class_name(module) not in REFUSED


def configs_in(config: Any) -> Iterator[Any]:
    """A configuration and those within it, outer before inner."""
    if hasattr(config, "_attn_implementation"):
        yield config
        for key in config.sub_configs:
            yield from configs_in(getattr(config, key, None))


def n_heads(module: Any) -> int | None:
    names = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads")
    found = [getattr(module, name, None) for name in names]
    found.append(getattr(getattr(module, "config", None), "num_attention_heads", None))
    return next((n for n in found if isinstance(n, int)), None)


def layer_device(model: Any, module: torch.nn.Module) -> torch.device:
    """The device of an attention module, which may differ from that of the model."""
    parameter = next(module.parameters(), None)
    return model.device if parameter is None else parameter.device


def positions_from_1(query: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """The positions of the queries, counted from 1, broadcastable to (B, H, L)."""
    if positions is None or positions.ndim != 2 or positions.shape[1] != query.shape[2]:
        must = "be 'keys' if a model passes no `position_ids` (batch, queries) to its attention"
        raise value_error("count", must, "'positions'")
    return positions[:, None] + 1


@contextlib.contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode. Afterwards each module has its own mode again."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        yield

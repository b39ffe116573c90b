"""Attention classes of transformers that do not look up their attention in the AttentionInterface.

Some of them do in some versions of transformers. There the interface applies the law.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn.functional import pad

# (module, number of heads) → (the axes into which features are split, the index of the query).
_Split: TypeAlias = Callable[[Any, int], tuple[tuple[int, ...], Any]]
# (module, arguments) → the numbers of keys (B, 1, L) that the queries of each child see, by the names
# of the children that the call runs.
_Counts: TypeAlias = Callable[[Any, Mapping[str, Any]], dict[str, Any]]
# (arguments of a module, a number for each row of each of its softmaxes) → the numbers of the queries,
# (B, H, L).
_Rows: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Family:
    """How a law reaches the attention of a class, whose code stays as it is."""

    # The child module on which the law acts.
    child: str
    # Says where the query, (..., heads, E), is among the features that the child returns. The law
    # multiplies it. If None, the attention weights p, (B, H, L, S), pass through the child instead.
    # There the factor f turns them into p^f / Σ p^f, which multiplies all logits by f.
    query: _Split | None = None
    # The arguments that say which keys are visible, and that of cross-attention, if it is another one.
    masks: tuple[str, ...] = ("attention_mask",)
    cross_mask: str = ""
    # Whether a boolean mask is True at hidden keys.
    marks_hidden: bool = False
    # The buffer (1, 1, positions, positions) that hides keys too.
    buffer: str = ""
    # Whether the positions are the first axis of the input of the child, and the batch is the second.
    positions_first: bool = False
    # An attribute or argument that must not be set, because the law would act in a wrong place.
    unless: str = ""
    # Further children, which give other queries.
    further: tuple[str, ...] = ()
    # Counts the keys that queries see, if the masks do not show them. The count for `child` covers all
    # queries, local and global.
    counts: _Counts | None = None
    # Says where the queries are in the weights, if these are not (B, H, L, S).
    rows: _Rows | None = None

    @property
    def children(self) -> tuple[str, ...]:
        return self.child, *self.further


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


def _in_window_or_global(module: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Local queries see a window and the global keys, global queries all keys that are not hidden."""
    # (B, L): 0 at local keys, positive at global, negative at hidden
    mask = arguments["attention_mask"]
    side, length = module.one_sided_attn_window_size, mask.shape[1]
    n_before = pad((mask == 0).cumsum(-1), (1, 0))
    start = torch.arange(length, device=mask.device) - side
    n_near = n_before[:, (start + 2 * side + 1).clamp(max=length)] - n_before[:, start.clamp(min=0)]
    n_global, n_all = ((mask > 0).sum(-1, keepdim=True), (mask >= 0).sum(-1, keepdim=True))
    n = {"query": torch.where(mask > 0, n_all, n_near + n_global)}
    if arguments["is_global_attn"]:
        n["query_global"] = n_all
    return {child: x[:, None] for child, x in n.items()}


def _local_and_global(arguments: Mapping[str, Any], local: Any, global_rows: Any = None) -> Any:
    """(B, L, H) of local queries and (B H, globals) of global ones, which replace their local rows."""
    rows = local.transpose(1, 2).clone()
    if global_rows is not None:
        is_global = arguments["is_index_global_attn"]
        batch, position = is_global.nonzero(as_tuple=True)
        number = is_global.cumsum(-1)[batch, position] - 1
        rows[batch, :, position] = global_rows.unflatten(0, rows.shape[:2])[batch, :, number]
    return rows


_LONGFORMER = Family(
    "query", _alone, ("is_index_masked",), marks_hidden=True, positions_first=True,
    further=("query_global",), counts=_in_window_or_global, rows=_local_and_global,
)  # fmt: skip

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
_XLM = Family("q_lin", _alone, masks=("mask",))
FAMILIES = {name: Family(*x) for x, names in _ALIKE.items() for name in names.split()} | {
    "big_bird.BigBirdSelfAttention": _CROSS,
    "bigbird_pegasus.BigBirdPegasusSelfAttention": _CROSS,
    "blip_text.BlipTextSelfAttention": _CROSS,
    "codegen.CodeGenAttention": Family("qkv_proj", _in_blocks),
    "cpmant.CpmAntAttention": Family("project_q", _alone),
    "falcon.FalconAttention": Family("query_key_value", _in_groups),
    "flaubert.MultiHeadAttention": _XLM,
    "fsmt.Attention": Family(
        "q_proj", _alone, ("key_padding_mask", "attn_mask"), marks_hidden=True, positions_first=True
    ),
    # The query is added to learned vectors before the products.
    "funnel.FunnelRelMultiheadAttention": Family("attention_dropout", masks=("attention_inputs",)),
    "gpt_neo.GPTNeoSelfAttention": Family("q_proj", _alone, buffer="bias"),
    "ibert.IBertSelfAttention": Family("dropout", unless="quant_mode"),
    "imagegpt.ImageGPTAttention": Family(
        "c_attn", _before_all_keys, buffer="bias", unless="is_cross_attention"
    ),
    "led.LEDEncoderSelfAttention": _LONGFORMER,
    "longformer.LongformerSelfAttention": _LONGFORMER,
    "mpnet.MPNetSelfAttention": Family("q", _alone),
    "mpt.MptAttention": Family("Wqkv", _before_all_keys, marks_hidden=True, unless="clip_qkv"),
    "mvp.MvpAttention": Family("q_proj", _alone, unless="attn_prompt"),
    "openai.Attention": Family("c_attn", _before_all_keys, buffer="bias"),
    "pvt_v2.PvtV2SelfAttention": Family("attn_drop"),
    "xlm.MultiHeadAttention": _XLM,
}

# Why a law cannot act on other classes.
_REASONS = {
    "each query sees a block of keys, and the masks do not say how many": (
        "big_bird.BigBirdBlockSparseAttention bigbird_pegasus.BigBirdPegasusBlockSparseAttention "
        "informer.InformerProbSparseAttention longt5.LongT5LocalAttention "
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
    "it has two queries, of the texts and of their layout": "lilt.LiltSelfAttention",
    "it has several streams of queries": (
        "prophetnet.ProphetNetNgramSelfAttention xlnet.XLNetRelativeAttention"
    ),
    "it passes the weights of its projections to a function of PyTorch": "wavlm.WavLMAttention",
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}


def class_name(module: Any) -> str:
    """The class that defines the forward method of a module, with the name of its file."""
    forward = inspect.unwrap(type(module).forward)
    file = forward.__module__.rpartition(".")[2].removeprefix("modeling_")
    return f"{file}.{forward.__qualname__.rpartition('.')[0]}"


def looks_up_attention(module: Any) -> bool:
    """Whether the forward method of a module looks up its attention in the AttentionInterface.

    Methods that it calls are looked into. The code decides, and not the name of the class: a later
    version of transformers may let a class use the interface.
    """
    kind: Any = type(module)
    return _looks_up_attention(kind)


@functools.cache
def _looks_up_attention(kind: Any) -> bool:
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
    # Where attention is looked up, the law acts there. It must not act twice.
    return None if family is None or any(map(looks_up_attention, module.modules())) else family

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
    """How a law reaches the attention of a class, whose code stays as it is.

    Attributes
    ----------
    child : str
        The child module on which the law acts.
    query : function or None
        Says where the query, (..., heads, E), is among the features that the child returns. The law
        multiplies the query. If None, the attention weights p, (B, H, L, S), pass through the child
        instead. There the factor f turns them into p^f / Σ p^f, which multiplies all logits by f.
    masks : tuple of str
        The arguments that say which keys are visible.
    cross_mask : str
        The argument that says which keys are visible in cross-attention, if it is not one of `masks`.
    marks_hidden : bool
        Whether a boolean mask is True at hidden keys.
    buffer : str
        The buffer (1, 1, positions, positions) that hides keys too; empty if there is none.
    positions_first : bool
        Whether the positions are the first axis of the input of the child, and the batch is the second.
    unless : str
        An attribute or argument that must not be set, because the law would act in a wrong place.
    further : tuple of str
        Further children, which give other queries.
    counts : function or None
        Counts the keys that queries see, if the masks do not show them. The count for `child` covers
        all queries, local and global.
    rows : function or None
        Says where the queries are in the weights, if these are not (B, H, L, S).
    """

    child: str
    query: _Split | None = None
    masks: tuple[str, ...] = ("attention_mask",)
    cross_mask: str = ""
    marks_hidden: bool = False
    buffer: str = ""
    positions_first: bool = False
    unless: str = ""
    further: tuple[str, ...] = ()
    counts: _Counts | None = None
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
    mask = arguments[
        "attention_mask"
    ]  # (B, L): 0 at local keys, positive at global, negative at hidden
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

# By the module and the class that define the forward method.
FAMILIES = {
    "big_bird.BigBirdSelfAttention": Family("query", _alone, cross_mask="encoder_attention_mask"),
    "bigbird_pegasus.BigBirdPegasusSelfAttention": Family(
        "query", _alone, cross_mask="encoder_attention_mask"
    ),
    "blip.BlipAttention": Family("qkv", _before_all_keys),
    "blip_text.BlipTextSelfAttention": Family("query", _alone, cross_mask="encoder_attention_mask"),
    "bloom.BloomAttention": Family("query_key_value", _in_each_head),
    # It also multiplies the query with the places of the boxes.
    "bros.BrosSelfAttention": Family("query", _alone, cross_mask="encoder_attention_mask"),
    "canine.CanineSelfAttention": Family("query", _alone),
    "codegen.CodeGenAttention": Family("qkv_proj", _in_blocks),
    # The query also gives the kernel of the convolution.
    "convbert.ConvBertSelfAttention": Family("dropout"),
    "cpmant.CpmAntAttention": Family("project_q", _alone),
    "data2vec_vision.Data2VecVisionSelfAttention": Family("query", _alone),
    # The logits include products of contents with positions. One of these does not contain the query,
    # so that scaling the query would miss it.
    "deberta.DisentangledSelfAttention": Family("dropout"),
    "deberta_v2.DisentangledSelfAttention": Family("dropout"),
    "falcon.FalconAttention": Family("query_key_value", _in_groups),
    "flaubert.MultiHeadAttention": Family("q_lin", _alone, masks=("mask",)),
    "flava.FlavaSelfAttention": Family("query", _alone),
    "fsmt.Attention": Family(
        "q_proj", _alone, ("key_padding_mask", "attn_mask"), marks_hidden=True, positions_first=True
    ),
    # The query is added to learned vectors before the products.
    "funnel.FunnelRelMultiheadAttention": Family("attention_dropout", masks=("attention_inputs",)),
    "git.GitSelfAttention": Family("query", _alone),
    "gpt_neo.GPTNeoSelfAttention": Family("q_proj", _alone, buffer="bias"),
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": Family("query_key_value", _in_each_head),
    "gptj.GPTJAttention": Family("q_proj", _alone),
    "groupvit.GroupViTAttention": Family("q_proj", _alone),
    "glpn.GLPNEfficientSelfAttention": Family("dropout"),
    "ibert.IBertSelfAttention": Family("dropout", unless="quant_mode"),
    "imagegpt.ImageGPTAttention": Family(
        "c_attn", _before_all_keys, buffer="bias", unless="is_cross_attention"
    ),
    "layoutlmv3.LayoutLMv3SelfAttention": Family("query", _alone),
    "led.LEDDecoderAttention": Family("q_proj", _alone),
    "led.LEDEncoderSelfAttention": _LONGFORMER,
    "longformer.LongformerSelfAttention": _LONGFORMER,
    # Words and entities have queries of their own.
    "luke.LukeSelfAttention": Family("dropout"),
    "lxmert.LxmertAttention": Family("query", _alone),
    "megatron_bert.MegatronBertSelfAttention": Family("query", _alone),
    "mgp_str.MgpstrAttention": Family("qkv", _before_all_keys),
    "mobilevit.MobileViTSelfAttention": Family("query", _alone),
    "mpnet.MPNetSelfAttention": Family("q", _alone),
    "mpt.MptAttention": Family("Wqkv", _before_all_keys, marks_hidden=True, unless="clip_qkv"),
    "mvp.MvpAttention": Family("q_proj", _alone, unless="attn_prompt"),
    "openai.Attention": Family("c_attn", _before_all_keys, buffer="bias"),
    "pvt.PvtEfficientSelfAttention": Family("dropout"),
    "pvt_v2.PvtV2SelfAttention": Family("attn_drop"),
    "rembert.RemBertSelfAttention": Family("query", _alone),
    "roformer.RoFormerSelfAttention": Family("query", _alone),
    "sew_d.DisentangledSelfAttention": Family("dropout"),
    "speecht5.SpeechT5Attention": Family("q_proj", _alone),
    # Its features come before its positions.
    "squeezebert.SqueezeBertSelfAttention": Family("dropout"),
    "tapas.TapasSelfAttention": Family("query", _alone),
    "timesformer.TimesformerSelfAttention": Family("qkv", _before_all_keys),
    "trocr.TrOCRAttention": Family("q_proj", _alone),
    "tvp.TvpAttention": Family("query", _alone),
    "vilt.ViltSelfAttention": Family("query", _alone),
    "visual_bert.VisualBertSelfAttention": Family("query", _alone),
    "xglm.XGLMAttention": Family("q_proj", _alone),
    "xlm.MultiHeadAttention": Family("q_lin", _alone, masks=("mask",)),
}

# Why a law cannot act on other classes.
_SPARSE = "each query sees a block of keys, and the masks do not say how many"
_PRODUCTS = "its logits are not products of queries and keys"
REFUSED = {
    "autoformer.AutoformerAttention": _PRODUCTS,
    "big_bird.BigBirdBlockSparseAttention": _SPARSE,
    "bigbird_pegasus.BigBirdPegasusBlockSparseAttention": _SPARSE,
    "informer.InformerProbSparseAttention": _SPARSE,
    "lilt.LiltSelfAttention": "it has two queries, of the texts and of their layout",
    "longt5.LongT5LocalAttention": _SPARSE,
    "longt5.LongT5TransientGlobalAttention": _SPARSE,
    "mra.MraSelfAttention": "it approximates the softmax",
    "nllb_moe.NllbMoeAttention": "its experts read the mask, and expect that of eager attention",
    "nystromformer.NystromformerSelfAttention": "it approximates the softmax",
    "pegasus_x.PegasusXAttention": "its encoder reads the mask, and expects that of eager attention",
    "pegasus_x.PegasusXGlobalLocalAttention": _SPARSE,
    "prophetnet.ProphetNetNgramSelfAttention": "it has several streams of queries",
    "reformer.LSHSelfAttention": _SPARSE,
    "reformer.LocalSelfAttention": _SPARSE,
    "swin2sr.Swin2SRSelfAttention": "it divides the queries by their lengths",
    "swinv2.Swinv2SelfAttention": "it divides the queries by their lengths",
    "wavlm.WavLMAttention": "it passes the weights of its projections to a function of PyTorch",
    "xlnet.XLNetRelativeAttention": "it has two streams of queries",
    "yoso.YosoSelfAttention": "it approximates the softmax",
}


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

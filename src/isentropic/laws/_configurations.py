"""The rules that models apply to their attention logits themselves, read from their configurations.

What the rules are, and which fields set them, is taken from the models of transformers. Nothing of
transformers is imported, so that the ``config.json`` of a model is enough.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from isentropic._checks import check_count, check_real, type_error, value_error
from isentropic.laws._formulas import Knots
from isentropic.laws._law import Constant, Law
from isentropic.laws._presets import preset

# What a rule multiplies (`ModelRule.scales`).
_PRODUCTS = "products"
_ROTATED = "rotated products"
_WITH_BIASES = "products and biases"
_CAPPED = "capped logits"
# Configurations may come from untrusted sources. Larger numbers would overflow, or fill the memory.
_MOST = 1e15
_MOST_LAYERS = 10_000
_MOST_PARTS = 8


class ModelRule(NamedTuple):
    """A rule by which a model scales its attention logits itself. `from_config` describes it."""

    name: str
    law: Law | None
    counts: str | None = None
    layers: tuple[int, ...] | None = None
    scales: str = _PRODUCTS
    off: tuple[str, ...] = ()


def from_config(config: Any) -> tuple[ModelRule, ...]:
    """The rules by which a model already scales its attention logits, from its configuration.

    A model with a rule of its own does not need a second law of the length. The factor of a second law
    would be multiplied by that of the rule.

    Parameters
    ----------
    config : mapping or transformers.PreTrainedConfig
        The configuration of a model of transformers, or the content of its ``config.json``. Of a model
        with several parts the text decoder is read: ``text_config``, ``decoder`` and the like. For
        another part, pass the configuration of that part.

    Returns
    -------
    tuple of ModelRule
        Empty if the model scales its logits by nothing but the constant scale of its attention. If a
        layer has several rules, their factors multiply. A rule is a named tuple:

        - ``name``: a name of `isentropic.laws.preset`, or "mscale" for the temperature that DeepSeek-V2
          and the models after it have if their context is extended by YaRN.
        - ``law``: the factor as a law. None if its numbers are weights of the model, as in
          "mistral-large-4".
        - ``counts``: what the n of the law counts, "positions", "slots" or "length", as in the table of
          `isentropic.laws.preset`. None for constants.
        - ``layers``: the numbers of the decoder layers that have the rule. None for all layers with
          attention; for "rotated products" for those that rotate queries and keys.
        - ``scales``: what the law multiplies, the "products" of queries and keys, "rotated products"
          (the part of them that comes from rotated features), "products and biases" (of positions), or
          "capped logits" (after the soft cap).
        - ``off``: assignments to fields of the configuration that switch the rule off, before the model
          is made. Empty if the configuration cannot switch it off.

    Raises
    ------
    TypeError
        If `config` is not a configuration, or if a field that sets a rule has the wrong type.
    ValueError
        If a field that sets a rule is missing or out of range, or if the type of the model is not known
        to apply the rule that the field sets.

    Notes
    -----
    Rules of the length are those of Llama 4, Ministral 3, Mistral 4, Mistral Large 4, Inkling, Inkling
    2, its looped variant and Beam in transformers, and those of Qwen (1) and Grok, whose code is
    elsewhere. ``llama_4_scaling`` is a rule in the engines that read it, vLLM and SGLang: transformers
    ignores it.

    The rules with a constant factor are YaRN and LongRoPE in all models, and ``mscale_all_dim`` in
    DeepSeek and the models after it. YaRN and LongRoPE multiply cosine and sine by a factor. So the
    factor acts on queries and on keys, and the law is its square. In Phi-3.5-MoE the factor depends on
    whether the longest sequence of the batch exceeds a length.

    The scale of attention itself, as in Granite and Gemma, is not a rule. Neither is a learned
    temperature that does not depend on a length.

    A model of another type is assumed to rotate queries and keys as transformers does, and to do
    nothing else. There, a field that sets one of the rules above is an error, and so is a field that is
    not known but whose name says that it may set a rule.

    Where queries and keys are normalized after their rotation, as in Llama 4, the normalization cancels
    the factors of YaRN and LongRoPE up to its ε. Then they are not a rule.

    Examples
    --------
    >>> from isentropic import laws
    >>> config = {
    ...     "model_type": "llama",
    ...     "num_hidden_layers": 2,
    ...     "max_position_embeddings": 32768,
    ...     "rope_scaling": {"type": "yarn", "factor": 4.0},
    ... }
    >>> (rule,) = laws.from_config(config)
    >>> rule.name, rule.law(1).__round__(3), rule.scales
    ('yarn', 1.296, 'rotated products')
    >>> laws.from_config(config | {"rope_scaling": None})
    ()
    >>> config = {"model_type": "qwen", "use_logn_attn": True, "seq_length": 8192}
    >>> (rule,) = laws.from_config(config)
    >>> rule.law(65536).__round__(3), rule.counts, rule.off
    (1.231, 'slots', ('use_logn_attn = False',))
    """
    fields = _text_fields(config)
    ropes = list(_ropes(fields))
    _refuse_unknown(fields, ropes)
    rules: list[ModelRule] = []
    for length_rule in (_LENGTH_RULES.get(fields.kind), _llama_4_scaling, _grok):
        rules += length_rule(fields, ropes) if length_rule else ()
    for rope in ropes:
        rules += _mscale(fields, rope)
        rules += _phimoe(fields, rope) if fields.kind == "phimoe" else _rotation(fields, rope)
    # A rule may be for a kind of layers that the model does not have.
    return tuple(rule for rule in rules if rule.layers != ())


@dataclass(frozen=True)
class _Fields:
    """A part of a configuration, and a template for the full names of its fields."""

    data: Mapping[str, Any]
    form: str = "{}"
    kind: str = ""  # the type of the model, or of the layers that a rotation is for; "" for all types

    def name(self, key: str) -> str:
        return self.form.format(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self.data.get(key, default)

    def number(self, key: str, default: Any = None, **bounds: float) -> float:
        x = self.get(key, default)
        check_real(self.name(key), x, **bounds)
        if abs(x) > _MOST:
            raise value_error(self.name(key), f"be at most {_MOST:.0e} in size", x)
        return float(x)

    def sequence(self, key: str, kind: type) -> Sequence[Any] | None:
        """A list whose entries are of a type, or None."""
        x = self.get(key)
        if x is None:
            return None
        if not isinstance(x, (list, tuple)) or not all(isinstance(y, kind) for y in x):
            name = {int: "integers", str: "strings"}[kind]
            types = {type(y).__name__ for y in x} if isinstance(x, (list, tuple)) else ()
            got = type(x).__name__ + f" of {', '.join(sorted(types))}" * bool(types)
            raise type_error(self.name(key), f"be a list of {name}", got)
        return x

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A flag that the code of the model reads by its truth value.

        None is false. Numbers are allowed, as files of Llama 4 have a 4. Strings are not: "no" is true.
        """
        x = self.get(key, default)
        if x is not None and not isinstance(x, (bool, int, float)):
            raise type_error(self.name(key), "be true or false", type(x).__name__)
        return bool(x)

    def n_layers(self) -> int:
        n: int = self.get("num_hidden_layers")
        check_count(self.name("num_hidden_layers"), n)
        if n > _MOST_LAYERS:
            raise value_error(self.name("num_hidden_layers"), f"be at most {_MOST_LAYERS}", n)
        return n

    def off(self, **values: Any) -> tuple[str, ...]:
        return tuple(f"{self.name(key)} = {x!r}" for key, x in values.items())


# The parts of configurations in which the text decoder is described.
_TEXT_PARTS = ("text_config", "thinker_config", "language_config", "llm_config", "decoder")
# The types of models of several parts with a rule, and those of their text decoders.
_TEXT_KINDS = {
    "hy_v4_vl": "hy_v4_vl_text",
    "inkling": "inkling_text",
    "inkling2": "inkling2_text",
    "inkling2_loop": "inkling2_loop_text",
    "inkling_mm_model": "inkling_text",
    "llama4": "llama4_text",
    "mistral_large4": "mistral_large4_text",
}


def _text_fields(config: Any) -> _Fields:
    data, path = _mapping("config", config), ""
    kind = data.get("model_type")
    # Parts may have parts: a `thinker_config` has a `text_config`.
    while key := next((key for key in _TEXT_PARTS if data.get(key) is not None), None):
        path += f"{key}."
        if path.count(".") > _MOST_PARTS:
            raise value_error("config", f"have at most {_MOST_PARTS} parts within each other", "more")
        data = _mapping(path[:-1], data[key])
        kind = data.get("model_type") or _TEXT_KINDS.get(str(kind))
    if not isinstance(kind, str) or not kind:
        raise value_error(f"{path}model_type", "be the type of a model", repr(kind))
    if kind in _TEXT_KINDS:
        # Its absent fields would count as defaults of the decoder.
        raise value_error("config", f"have the `text_config` of a {kind!r}", "none")
    return _Fields(data, path + "{}", kind)


def _mapping(name: str, config: Any) -> Mapping[str, Any]:
    is_class = isinstance(config, type)
    data = config.to_dict() if hasattr(config, "to_dict") and not is_class else config
    if not isinstance(data, Mapping):
        got = f"the class {config.__name__}" if is_class else type(config).__name__
        raise type_error(name, "be a configuration or a dictionary", got)
    return data


# The default lengths of Inkling and its successors. Without one, the length switches the rule on.
_INKLING_LENGTHS: dict[str, float | None] = {
    "inkling_text": None, "inkling2_text": 128_000, "inkling2_loop_text": 8192,
}  # fmt: skip
# Fields that set a rule, and the types of models that read them; None for all types.
_READERS: dict[str, tuple[str, ...] | None] = {
    "attn_temperature_len": None,
    "attn_temperature_tuning": ("llama4_text",),
    # Read by vLLM and SGLang. "transformer" is the type that vLLM gives to files of Mistral.
    "llama_4_scaling": ("deepseek_v2", "deepseek_v3", "mistral", "transformer"),
    "log_scaling_alpha": tuple(_INKLING_LENGTHS),
    "log_scaling_n_floor": tuple(_INKLING_LENGTHS),
    "use_logn_attn": ("qwen",),
}
_ROPE_READERS: dict[str, tuple[str, ...] | None] = {
    "llama_4_scaling_beta": ("ministral3", "mistral4"),
    "long_mscale": ("phimoe",),
    "short_mscale": ("phimoe",),
    # The factors of frequencies, and those that are read for all types.
    **dict.fromkeys(
        (
            "apply_yarn_scaling", "attention_factor", "extrapolation_factor", "factor",
            "high_freq_factor", "long_factor", "low_freq_factor", "mscale", "mscale_all_dim",
            "partial_rotary_factor", "short_factor",
        ),
    ),
}  # fmt: skip
# Names of fields that may set a rule even if they are not known.
_HINTS = re.compile(
    r"(attn|attention|softmax).*temp|temperature_(len|tuning)|(^|_)log_?n(_|$)|logn|log_scal|llama_?4"
    r"|ssmax|scalable_softmax"
)
_ROPE_HINTS = re.compile(r"attn|attention|factor|mscale|scal(e|ing)|temp")


def _refuse_unknown(fields: _Fields, ropes: list[_Fields]) -> None:
    parts = [(fields, _READERS, _HINTS), *((rope, _ROPE_READERS, _ROPE_HINTS) for rope in ropes)]
    for part, readers, hints in parts:
        for key, x in part.data.items():
            kinds = readers.get(key, () if hints.search(str(key)) else None)
            is_read = kinds is None or fields.kind in kinds
            # A field that is off sets no rule.
            if not is_read and x is not None and x is not False and x != 0:
                must = "be absent: it may set a rule, and how models of this type apply it is not known"
                raise value_error(part.name(key), must, f"{x!r} for a {fields.kind!r}")


# Rules of the length


def _llama_4(fields: _Fields, ropes: list[_Fields]) -> Iterator[ModelRule]:
    period = fields.number("floor_scale", 8192, above=0)
    coefficient = fields.number("attn_scale", 0.1)
    if fields.flag("attn_temperature_tuning", True) and coefficient:
        law = preset("llama-4", coefficient=coefficient, period=period)
        rotating = _rotating_layers(fields) or ()
        layers = tuple(i for i in range(fields.n_layers()) if i not in rotating)
        off = fields.off(attn_temperature_tuning=False)
        yield ModelRule("llama-4", law, "slots", layers, off=off)


def _ministral(fields: _Fields, ropes: list[_Fields]) -> Iterator[ModelRule]:
    for rope in ropes:
        off = rope.off(llama_4_scaling_beta=0.0)
        if coefficient := rope.number("llama_4_scaling_beta"):
            yield _ministral_rule(coefficient, _original_length(fields, rope), off)


def _ministral_rule(coefficient: float, length: float, off: tuple[str, ...]) -> ModelRule:
    law = preset("ministral-3", coefficient=coefficient, length=length)
    return ModelRule("ministral-3", law, "positions", off=off)


def _mistral_large(fields: _Fields, ropes: list[_Fields]) -> Iterator[ModelRule]:
    yield ModelRule("mistral-large-4", None, "positions")


def _inkling(fields: _Fields, ropes: list[_Fields]) -> Iterator[ModelRule]:
    length = _INKLING_LENGTHS[fields.kind]
    counts, off = "positions", fields.off(log_scaling_alpha=0.0)
    if length is None:
        if fields.get("log_scaling_n_floor") is None:
            return
        counts, off = "slots", fields.off(log_scaling_n_floor=None)
    length = fields.number("log_scaling_n_floor", length, above=0)
    if coefficient := fields.number("log_scaling_alpha", 0.1, least=0):
        law = preset("inkling", length=length, coefficient=coefficient)
        yield ModelRule("inkling", law, counts, _inkling_layers(fields), _WITH_BIASES, off)


def _inkling_layers(fields: _Fields) -> tuple[int, ...]:
    """The layers without a window."""
    types, windows = fields.sequence("layer_types", str), fields.sequence("local_layer_ids", int)
    if types is not None:
        return tuple(i for i, kind in enumerate(types) if kind != "hybrid_sliding")
    layers = range(fields.n_layers())
    return tuple(i for i in layers if (i % 6 == 5 if windows is None else i not in windows))


def _beam(fields: _Fields, ropes: list[_Fields]) -> Iterator[ModelRule]:
    types = fields.sequence("layer_types", str)
    if types is None:
        last = fields.n_layers() - 1
        # transformers fills in the types in this way if a configuration leaves them out.
        full = [i % 6 == 5 or i == last for i in range(last + 1)]
        types = ["full_attention" if x else "sliding_attention" for x in full]
    rotating = _rope_data(fields)[1] or {}
    layers = tuple(i for i, kind in enumerate(types) if rotating.get(kind) is None)
    yield ModelRule("beam", preset("beam"), "positions", layers)


def _qwen(fields: _Fields, ropes: list[_Fields]) -> Iterator[ModelRule]:
    if fields.flag("use_logn_attn", True):
        law = preset("qwen", length=fields.number("seq_length", above=1))
        yield ModelRule("qwen", law, "slots", off=fields.off(use_logn_attn=False))


def _llama_4_scaling(fields: _Fields, ropes: list[_Fields]) -> Iterator[ModelRule]:
    key = "llama_4_scaling"
    if fields.get(key) is not None:
        data = _Fields(_mapping(fields.name(key), fields.get(key)), fields.name(key) + '["{}"]')
        coefficient = data.number("beta")
        length = data.number("original_max_position_embeddings", above=0)
        if coefficient:
            yield _ministral_rule(coefficient, length, fields.off(llama_4_scaling=None))


def _grok(fields: _Fields, ropes: list[_Fields]) -> Iterator[ModelRule]:
    # No model but Grok has the field. Its `model_type` is that of another model, GIT.
    length = fields.number("attn_temperature_len", -1)
    if length > 0:
        # The law divides by the logarithm of this length.
        fields.number("attn_temperature_len", above=1)
        off = fields.off(attn_temperature_len=-1)
        yield ModelRule("grok-2", preset("grok-2", length=length), "positions", None, _CAPPED, off)


_LENGTH_RULES: dict[str, Callable[[_Fields, list[_Fields]], Iterator[ModelRule]]] = {
    "beam": _beam,
    **dict.fromkeys(_INKLING_LENGTHS, _inkling),
    "llama4_text": _llama_4,
    "ministral3": _ministral,
    "mistral4": _ministral,
    "mistral_large4_text": _mistral_large,
    "qwen": _qwen,
}


# Factors that come with the rotation

# The rotation of a type of models if its configuration names none. Only those with a factor are here.
_DEFAULT_ROPES: dict[str, dict[str, Any]] = {
    "beam": {"sliding_attention": {"rope_type": "default"}, "full_attention": None},
    "gpt_oss": {"rope_type": "yarn", "factor": 32.0},
    "ministral3": {
        "rope_type": "yarn", "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16384,
    },
    "mistral4": {
        "rope_type": "yarn", "factor": 128.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8192,
    },
    "openai_privacy_filter": {"rope_type": "yarn", "factor": 32.0},
}  # fmt: skip
_WITHOUT_FACTOR = ("axial", "default", "dynamic", "linear", "llama3", "mrope", "proportional")
# Models whose older configurations call LongRoPE by other names.
_LONGROPE_ONLY = ("phi3", "phi4_multimodal")
# Models in which flat parameters hold for layers without a window alone.
_FULL_ATTENTION_ONLY = ("gemma3_text", "gemma3n_text", "olmo3", "t5gemma2_decoder", "t5gemma2_text")
# Models that multiply the scale of their attention by the square of the factor of `mscale_all_dim`.
_READ_MSCALE = (
    "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite",
    "glm_moe_dsa", "hy_v4", "hy_v4_vl_text", "longcat_flash", "minicpm3", "mistral4",
    "mistral_large4_text", "youtu",
)  # fmt: skip
# Models that normalize queries and keys after their rotation.
_NORMALIZE_LAST = ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "nanochat")
# Models that rotate queries and keys only in some layers, grouped by what names these layers.
_NO_ROPE_LAYERS = ("llama4_text", "mistral_large4_text", "smollm3")
_ROTATE_IN_WINDOWS = ("afmoe", "cohere2", "flint")
_ROTATE_IN_WINDOWS_IF_ANY = ("exaone4", "exaone_moe", "kolibri1")


def _rope_data(fields: _Fields) -> tuple[str, Mapping[str, Any] | None]:
    """The field with the parameters of the rotation, and the parameters."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    data = fields.get(name)
    if data is None:
        data = _DEFAULT_ROPES.get(fields.kind)
    if data is not None and not isinstance(data, Mapping):
        raise type_error(fields.name(name), "be a dictionary", type(data).__name__)
    return name, data


def _ropes(fields: _Fields) -> Iterator[_Fields]:
    """The parameters of each rotation."""
    name, data = _rope_data(fields)
    if data is None:
        return
    form = fields.name(name)
    nested = {key: x for key, x in data.items() if isinstance(x, Mapping)}
    if nested and data.get("rope_type", data.get("type", "default")) != "default":
        must = "be the parameters of one rotation, or of one for each type of layers"
        raise value_error(form, must, f"both, of a rotation and of {', '.join(map(repr, nested))}")
    for key, x in nested.items():
        yield _Fields(x, f'{form}["{key}"]["{{}}"]', key)
    if not nested:
        if fields.kind == "deepseek_v4":
            # DeepSeek-V4 does not compute a factor from the parameters of YaRN. It may be given one.
            data = {"attention_factor": 1.0, **data}
        yield _Fields(data, f'{form}["{{}}"]')


def _rope_type(fields: _Fields, rope: _Fields) -> str:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if fields.kind in _LONGROPE_ONLY and kind in ("su", "yarn"):
        return "longrope"
    if kind not in (*_WITHOUT_FACTOR, "yarn", "longrope"):
        must = "be a kind of rotation that transformers has"
        raise value_error(rope.name("rope_type"), must, repr(kind))
    return str(kind)


def _original_length(fields: _Fields, rope: _Fields) -> float:
    """The length before an extension, from where transformers takes it."""
    key = "original_max_position_embeddings"
    default = 4096 if fields.kind in _LONGROPE_ONLY else None
    if not rope.kind and fields.get(key, default) is not None:
        return fields.number(key, default, above=1)
    if rope.get(key) is not None:
        return rope.number(key, above=1)
    return fields.number("max_position_embeddings", above=1)


def _scale(fields: _Fields, rope: _Fields) -> float:
    """The factor s by which the context was extended."""
    if rope.get("factor") is not None:
        return rope.number("factor", above=0)
    # Without a factor, as for LongRoPE, the two lengths tell it.
    return fields.number("max_position_embeddings", above=0) / _original_length(fields, rope)


def _yarn_mscale(scale: float, coefficient: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * coefficient * math.log(scale) + 1.0


def _attention_factor(fields: _Fields, rope: _Fields) -> float:
    """The factor on cosine and sine."""
    kind = _rope_type(fields, rope)
    if kind in _WITHOUT_FACTOR:
        return 1.0
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor", least=0)
    if kind == "yarn" and not rope.flag("apply_yarn_scaling", True):  # read by vLLM
        return 1.0
    if kind == "yarn" and "factor" not in rope.data:
        must = "be the factor by which the context was extended"
        raise value_error(rope.name("factor"), must, "none")
    scale = _scale(fields, rope)
    if kind == "longrope":
        return math.sqrt(preset("longrope", scale=scale, length=_original_length(fields, rope))(1))
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        above, below = (rope.number(key, least=0) for key in ("mscale", "mscale_all_dim"))
        return _yarn_mscale(scale, above) / _yarn_mscale(scale, below)
    return _yarn_mscale(scale)


def _rotating_layers(fields: _Fields, layer_type: str = "") -> tuple[int, ...] | None:
    """The layers to which a rotation applies. None if it applies to all layers with attention."""
    if layer_type:
        return _layers_of_type(fields, layer_type)
    if fields.kind in _FULL_ATTENTION_ONLY:
        return _layers_of_type(fields, "full_attention")
    if fields.kind in _NO_ROPE_LAYERS:
        interval = int(fields.number("no_rope_layer_interval", 4, least=1))
        default = [(i + 1) % interval for i in range(fields.n_layers())]
        rotates = fields.sequence("no_rope_layers", int) or default  # 1 where a layer rotates
        return tuple(i for i, x in enumerate(rotates) if x)
    has_window = fields.kind in _ROTATE_IN_WINDOWS or (
        fields.kind in _ROTATE_IN_WINDOWS_IF_ANY and fields.get("sliding_window") is not None
    )
    if has_window and fields.get("layer_types") is not None:
        return _layers_of_type(fields, "sliding_attention")
    return None


def _layers_of_type(fields: _Fields, kind: str) -> tuple[int, ...]:
    types = fields.sequence("layer_types", str)
    if types is None:
        raise value_error(fields.name("layer_types"), "say which layers the rotation is for", "none")
    if fields.kind == "deepseek_v4":
        # Its rotations have names of their own, for layers without and with compression.
        types = ["main" if x == "sliding_attention" else "compress" for x in types]
    if kind not in types and not kind.endswith("_attention"):
        must = f"have layers of the type {kind!r}, which has a rotation of its own"
        raise value_error(fields.name("layer_types"), must, ", ".join(sorted(set(types))))
    return tuple(i for i, x in enumerate(types) if x == kind)


def _rotation(fields: _Fields, rope: _Fields) -> Iterator[ModelRule]:
    factor = _attention_factor(fields, rope)
    normalized = fields.kind == "llama4_text" and fields.flag("use_qk_norm", True)
    if factor != 1 and not normalized and fields.kind not in _NORMALIZE_LAST:
        name, layers = _rope_type(fields, rope), _rotating_layers(fields, rope.kind)
        off = rope.off(attention_factor=1.0)
        yield ModelRule(name, Constant(factor**2), None, layers, _ROTATED, off)


def _mscale(fields: _Fields, rope: _Fields) -> Iterator[ModelRule]:
    is_read = fields.kind in _READ_MSCALE and rope.get("mscale_all_dim")
    if is_read and _rope_type(fields, rope) != "default":
        coefficient = rope.number("mscale_all_dim")
        factor = _yarn_mscale(rope.number("factor", above=0), coefficient)
        if factor != 1:
            # The factor on cosine and sine, which depends on the field too, stays as it is.
            same = _attention_factor(fields, rope)
            off = rope.off(mscale_all_dim=0.0, attention_factor=same)
            yield ModelRule("mscale", Constant(factor**2), None, None, _PRODUCTS, off)


def _phimoe(fields: _Fields, rope: _Fields) -> Iterator[ModelRule]:
    if _rope_type(fields, rope) == "default":
        return
    short, long = (rope.number(key, least=0) ** 2 for key in ("short_mscale", "long_mscale"))
    law: Law = Constant(short)
    counts = None
    if short != long:
        last = _original_length(fields, rope)
        # The step between two lengths, and level lines before and after it.
        law = Knots((1, last, last + 1, last + 2), (short, short, long, long))
        counts = "length"
    if (short, long) != (1, 1):
        off = rope.off(short_mscale=1.0, long_mscale=1.0)
        yield ModelRule("longrope", law, counts, None, _ROTATED, off)

"""The laws of models and papers: a table with the source of each rule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from isentropic._checks import check_choice, check_real, is_real, type_error
from isentropic.laws._formulas import (
    AffineLog,
    InfoScale,
    Power,
    PowerLog,
    SqrtLogLength,
    StepLog,
    shifted,
)
from isentropic.laws._law import Constant, Law, LogLength, Parameter


class Rule(NamedTuple):
    """A row of the table in the documentation of `preset`, and the function that makes the law."""

    make: Callable[..., Law]
    formula: str  # or "as" another rule, of which this is another name
    counts: str  # what n counts
    below: str  # the factor below the training length L
    source: str


def _checked(length: Parameter, above: float = 1) -> Parameter:
    """A length; a number is checked under this name, as laws have other names for their parameters."""
    # The law itself checks arrays.
    if is_real(length):
        check_real("length", length, above=above)
    return length


def _at_least_1(length: Parameter) -> Law:
    return LogLength(_checked(length), minimum=1)


def _grok(length: Parameter) -> Law:
    # The code takes the position, which counts from 0, and n is one more.
    return shifted(_at_least_1(length), -1)


def _affine(slope: Parameter, intercept: Parameter = 0.0) -> Law:
    return AffineLog(slope, intercept)


def _asentmax(coefficient: Parameter, exponent: Parameter, offset: Parameter = 1.0) -> Law:
    return shifted(PowerLog(offset, coefficient, exponent), 1)


def _beam(period: float = 2048, exponent: Parameter = 0.1) -> Law:
    return shifted(Power(exponent, period), period)


def _ministral(coefficient: Parameter = 0.1, length: Parameter = 16384) -> Law:
    return shifted(StepLog(coefficient, _checked(length, 0)), -1)


def _su(length: float = 512) -> Law:
    check_real("length", length, above=1)
    # ln max(n, 16) / ln L is the larger of two quotients.
    return LogLength(length, minimum=math.log(16) / math.log(length))


def _inkling(length: float = 128_000, coefficient: float = 0.1) -> Law:
    check_real("length", length, above=0)
    check_real("coefficient", coefficient, least=0)
    # 1 + c ln(n / L), with the constant part as the intercept.
    return AffineLog(coefficient, 1 - coefficient * math.log(length), minimum=1)


def _static_factor(scale: float) -> float:
    check_real("scale", scale, above=0)
    # transformers leaves the attention as it is where the context is not extended.
    return max(scale, 1.0)


def _yarn(scale: float) -> Law:
    return Constant((0.1 * math.log(_static_factor(scale)) + 1) ** 2)


def _longrope(scale: float, length: float) -> Law:
    check_real("length", length, above=1)
    return Constant(1 + math.log(_static_factor(scale)) / math.log(length))


RULES = {
    "asentmax-constant": Rule(
        _asentmax,
        "δ + β (ln(n + 1))^γ, δ = 1", "slots", "–",
        "Vasylenko et al. 2025, arXiv 2506.16640; github.com/deep-spin/asentmax, "
        "``synthetic/src/models/architectures/sparse_gemma.py``.",
    ),
    "beam": Rule(
        _beam,
        "(1 + n/2048)^0.1", "positions", "above 1",
        "transformers, ``models/beam``; layers without rotary positions.",
    ),
    "chiang-cholak": Rule(
        lambda: AffineLog(1.0),
        "as ssmax, slope 1", "length", "0 at n = 1",
        "Chiang & Cholak 2022, arXiv 2202.12172; github.com/ndnlp/parity, ``encoder.py``.",
    ),
    "entropy-abf": Rule(
        lambda length=4096: _at_least_1(length),
        "as su-decoder, L = 4096", "positions", "1",
        "Zhang et al. 2024, arXiv 2401.07004; github.com/GAIR-NLP/Entropy-ABF, "
        "``patch/EABF.py``; layers from the third on.",
    ),
    "grok-2": Rule(
        _grok,
        "max(1, ln(n − 1) / ln L)", "positions", "1",
        "github.com/sgl-project/sglang, ``xai_temperature_len`` in the Triton kernels of "
        "attention.",
    ),
    "infoscale": Rule(
        lambda length, head_dim: InfoScale(_checked(length), head_dim),
        "√((1 − n^(−2/d)) / (1 − L^(−2/d)))", "keys", "< 1",
        "Li et al. 2025, arXiv 2501.08570; github.com/HT-NEKO/Information-Entropy-Invariance, "
        "``model/my_gau_alpha_eval/layer.py``.",
    ),
    "inkling": Rule(
        _inkling,
        "max(1, 1 + 0.1 ln(n/L)), L = 128000", "slots", "1",
        "transformers, ``models/inkling``; layers without a window, and position biases too.",
    ),
    "llama-4": Rule(
        lambda coefficient=0.1, period=8192: StepLog(coefficient, period),
        "1 + 0.1 ln(1 + ⌊n/8192⌋)", "slots", "1",
        "transformers, ``models/llama4``; layers without rotary positions.",
    ),
    "lmdeploy": Rule(
        _grok,
        "as grok-2", "positions", "1",
        "github.com/InternLM/lmdeploy, ``LogNScaling`` in "
        "``src/turbomind/kernels/attention/rotary_embedding.h``.",
    ),
    "longrope": Rule(
        _longrope,
        "1 + ln s / ln L, s ≥ 1", "–", "1 (s ≤ 1)",
        "Ding et al. 2024, arXiv 2402.13753; transformers, ``modeling_rope_utils.py``.",
    ),
    "lumina": Rule(
        lambda length: SqrtLogLength(_checked(length)),
        "√(ln n / ln L)", "length", "< 1",
        "Jin et al. 2023, arXiv 2306.08645; github.com/Alpha-VLLM/Lumina-T2X, "
        "``lumina_next_t2i_mini/models/nextdit.py``; self-attention.",
    ),
    "ministral-3": Rule(
        _ministral,
        "1 + 0.1 ln(1 + ⌊(n − 1)/L⌋), L = 16384", "positions", "1",
        "transformers, ``models/ministral3`` and ``models/mistral4``.",
    ),
    "mistral-large-4": Rule(
        _affine,
        "as ssmax, per head", "positions", "may be 0",
        "transformers, ``models/mistral_large4``.",
    ),
    "qwen": Rule(
        lambda length: _at_least_1(length),
        "as su-decoder", "slots", "1",
        "huggingface.co/Qwen/Qwen-7B, ``modeling_qwen.py``; in inference.",
    ),
    "ssmax": Rule(
        _affine,
        "slope ln n + intercept, learned", "keys", "0 at n = 1",
        "Nakanishi 2025, arXiv 2501.19399.",
    ),
    "su": Rule(
        _su,
        "ln max(n, 16) / ln L, L = 512", "keys", "< 1",
        'Su 2021, spaces.ac.cn/archives/8823; github.com/bojone/bert4keras, "softmax_plus" in '
        "``backend.py``.",
    ),
    "su-decoder": Rule(
        lambda length=512: _at_least_1(length),
        "max(1, ln n / ln L), L = 512", "positions", "1",
        "Su 2023, spaces.ac.cn/archives/9708; github.com/bojone/rerope, ``rerope_patch.py``.",
    ),
    "yarn": Rule(
        _yarn,
        "(0.1 ln s + 1)², s ≥ 1", "–", "1 (s ≤ 1)",
        "Peng et al. 2023, arXiv 2309.00071; transformers, ``modeling_rope_utils.py``.",
    ),
}  # fmt: skip


def preset(name: str, **parameters: Any) -> Law:
    """The law of a model or a paper.

    {table}

    The column *n counts* says what to pass as `n_keys`:

    - *keys*: the keys that the query sees. Attention counts them itself; nothing has to be passed.
    - *positions*: the position of the query, counted from 0, plus 1. Hidden keys count too. Padding
      has no positions.
    - *slots*: like positions, but padding before the query counts.
    - *length*: all keys of the sequence.

    Under a causal mask without padding the first three numbers are equal. Under a window a query sees
    fewer keys than its position says. So rules of positions, slots or a length need that number as
    `n_keys`, for example ``n_keys=positions + 1``. For positions in models of transformers use
    ``huggingface.use(model, law, count="positions")``.

    Parameters
    ----------
    name : str
        A name in the table.
    **parameters
        The letters of the formula: ``length`` (L), ``slope``, ``intercept``, ``scale`` (s),
        ``coefficient`` (c or β), ``period``, ``offset`` (δ), ``exponent`` (γ), ``head_dim`` (d).

    Returns
    -------
    Law

    Raises
    ------
    ValueError
        If the name is unknown.
    TypeError
        If a parameter is missing, or if the rule does not have it.

    Notes
    -----
    The law *asentmax-constant* is not the ASEntmax of the paper, but the variant that its code calls
    "learn": β and γ are constants of each head. In ASEntmax they depend on the hidden state of the
    query, β = softplus(·) and γ = 2 tanh(·): pass them wrapped in `per_query`. Both compute weights by
    α-entmax and not by a softmax. γ may be negative.

    In their models the factors of *yarn* and *longrope* act only on the rotated dimensions, as a
    factor on cosine and sine. The law is the square of that factor.

    The rules with steps and *infoscale* have classes that only this function and `from_dict` make.

    References
    ----------
    The source of each rule. The rules of transformers are tested against its code.

    {sources}

    Examples
    --------
    >>> from isentropic import laws
    >>> laws.preset("qwen", length=2048)(1000)
    1.0
    """
    check_choice("name", name, tuple(RULES))
    make = RULES[name].make
    try:
        # Not by calling it, whose own TypeErrors are about the values of parameters.
        bound = inspect.signature(make).bind(**parameters)
    except TypeError:
        known = inspect.signature(make).parameters.values()
        # Annotations would show names that are not public.
        takes = ", ".join(str(p.replace(annotation=p.empty)) for p in known) or "none"
        got = ", ".join(sorted(parameters)) or "none"
        raise type_error("parameters", f"be those of {name!r} ({takes})", got) from None
    return make(*bound.args, **bound.kwargs)


def _rows() -> list[str]:
    """The table of the rules in reStructuredText."""
    columns = [("name", "factor", "n counts", "below L")]
    columns += [(name, rule.formula, rule.counts, rule.below) for name, rule in RULES.items()]
    widths = [max(map(len, column)) for column in zip(*columns, strict=True)]
    line = "  ".join("=" * width for width in widths)
    rows = ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in columns]
    return [line, rows[0], line, *rows[1:], line]


if preset.__doc__:  # `python -OO` strips docstrings
    # Python strips the indentation of docstrings itself from 3.13 on.
    preset.__doc__ = (
        inspect.cleandoc(preset.__doc__)
        .replace("{table}", "\n".join(_rows()))
        .replace("{sources}", "\n".join(f"- {name}: {rule.source}" for name, rule in RULES.items()))
    )

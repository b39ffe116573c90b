"""The text of docs/reference/law-vectors.json: factors of the laws, to test other implementations.

`python tests/pages.py` writes it. The factors are computed here from the formulas in decimal
arithmetic, and not by the laws of isentropic. They are the float64 numbers nearest to the exact
values, the same on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

from isentropic.laws._presets import RULES as LAW_RULES

PRECISION = 50  # digits, of which float64 has 17

# Below, at and above the lengths at which rules begin to act or have steps.
NUMBERS = sorted(
    {1, 2, 3, 5, 10, 100, 1000, 10_000, 100_000, 1_000_000, 1_048_576, 15, 16, 17, 65_536, 131_072}
    | {
        n + i
        for n in (512, 1024, 2048, 4096, 8192, 16_384, 24_576, 32_768, 128_000)
        for i in (-1, 0, 1, 2)
    }
)

Formula = Callable[..., Decimal]


def ln(x: Decimal) -> Decimal:
    return max(x, Decimal(1)).ln()


def power(x: Decimal, exponent: Decimal) -> Decimal:
    return (x.ln() * exponent).exp() if x else Decimal(0)


def log_above(n: Decimal, length: Decimal) -> Decimal:
    return max(ln(n) / length.ln(), Decimal(1))


def steps(n: Decimal, coefficient: Decimal, period: Decimal) -> Decimal:
    return 1 + coefficient * (1 + n // period).ln()


def infoscale(n: Decimal, length: Decimal, head_dim: Decimal) -> Decimal:
    return ((1 - power(n, -2 / head_dim)) / (1 - power(length, -2 / head_dim))).sqrt()


# Of each rule: the parameters, the formula in words, and as a function of n and the parameters.
RULES: dict[str, tuple[dict[str, float], str, Formula]] = {
    "asentmax-constant": (
        {"coefficient": 0.25, "exponent": 1.5, "offset": 1.0},
        "offset + coefficient * ln(n + 1)^exponent",
        lambda n, coefficient, exponent, offset: offset + coefficient * power(ln(n + 1), exponent),
    ),
    "beam": (
        {"period": 2048, "exponent": 0.1},
        "(1 + n / period)^exponent",
        lambda n, period, exponent: power(1 + n / period, exponent),
    ),
    "chiang-cholak": ({}, "ln n", ln),
    "entropy-abf": ({"length": 4096}, "max(1, ln n / ln length)", log_above),
    "grok-2": (
        {"length": 1024},
        "max(1, ln(n - 1) / ln length)",
        lambda n, length: log_above(n - 1, length),
    ),
    "infoscale": (
        {"length": 512, "head_dim": 64},
        "sqrt((1 - n^(-2 / head_dim)) / (1 - length^(-2 / head_dim)))",
        infoscale,
    ),
    "inkling": (
        {"length": 128_000, "coefficient": 0.1},
        "max(1, 1 + coefficient * ln(n / length))",
        lambda n, length, coefficient: 1 + coefficient * ln(n / length),
    ),
    "llama-4": (
        {"coefficient": 0.1, "period": 8192},
        "1 + coefficient * ln(1 + floor(n / period))",
        steps,
    ),
    "lmdeploy": (
        {"length": 2048},
        "max(1, ln(n - 1) / ln length)",
        lambda n, length: log_above(n - 1, length),
    ),
    "longrope": (
        {"scale": 32, "length": 4096},
        "1 + ln scale / ln length",
        lambda n, scale, length: 1 + ln(scale) / length.ln(),
    ),
    "lumina": (
        {"length": 1024},
        "sqrt(ln n / ln length)",
        lambda n, length: (ln(n) / length.ln()).sqrt(),
    ),
    "ministral-3": (
        {"coefficient": 0.1, "length": 16_384},
        "1 + coefficient * ln(1 + floor((n - 1) / length))",
        lambda n, coefficient, length: steps(n - 1, coefficient, length),
    ),
    "mistral-large-4": (
        {"slope": 0.125, "intercept": 0.75},
        "slope * ln n + intercept",
        lambda n, slope, intercept: slope * ln(n) + intercept,
    ),
    "qwen": ({"length": 8192}, "max(1, ln n / ln length)", log_above),
    "ssmax": (
        {"slope": 0.43, "intercept": 0.0},
        "slope * ln n + intercept",
        lambda n, slope, intercept: slope * ln(n) + intercept,
    ),
    "su": (
        {"length": 512},
        "ln max(n, 16) / ln length",
        lambda n, length: ln(max(n, Decimal(16))) / length.ln(),
    ),
    "su-decoder": ({"length": 512}, "max(1, ln n / ln length)", log_above),
    "yarn": (
        {"scale": 16},
        "(0.1 * ln scale + 1)^2",
        lambda n, scale: (Decimal("0.1") * ln(scale) + 1) ** 2,
    ),
}


def vectors() -> dict[str, Any]:
    rules = [
        {
            "rule": name,
            "parameters": parameters,
            "formula": formula,
            "n_counts": None if LAW_RULES[name].counts == "–" else LAW_RULES[name].counts,
            "factors": factors(function, parameters),
        }
        for name, (parameters, formula, function) in RULES.items()
    ]
    return {"format": "isentropic-law-vectors", "version": 1, "n": NUMBERS, "rules": rules}


def factors(function: Formula, parameters: dict[str, float]) -> list[float]:
    """The factors for all `NUMBERS`, of the parameters as float64 has them."""
    with localcontext(prec=PRECISION):
        exact = {name: Decimal(x) for name, x in parameters.items()}
        return [float(function(Decimal(n), **exact)) for n in NUMBERS]


def text() -> str:
    """The file, with a line for each value of an object, so that changes of it can be read."""
    content = vectors()
    rules = ",\n".join(f"  {_object(rule, indent=3)}" for rule in content.pop("rules"))
    return _object(content, indent=1)[:-2] + f',\n "rules": [\n{rules}\n ]\n}}\n'


def _object(content: dict[str, Any], indent: int) -> str:
    lines = [f"{' ' * indent}{json.dumps(key)}: {json.dumps(x)}" for key, x in content.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * (indent - 1) + "}"

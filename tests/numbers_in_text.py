"""The numbers in the text of pages, by place, from the records and functions that they are about.

`pages` writes them.
"""

import math
from collections.abc import Callable


def readme() -> dict[str, str]:
    from statistics import fmean

    from experiment import decide, load

    masked, tasks = load("masked_language"), load("constant_or_length")["tasks"]
    model = load("smollm2")
    alike = load("recall")["tasks"]

    def points(arm: str, other: str) -> str:
        """The gain in accuracy of masked models, in the mean of all lengths but the first."""
        a, b = ([fmean(x["accuracy"][1:]) for x in masked["arms"][y]] for y in (arm, other))
        return _interval([x - y for x, y in zip(a, b, strict=True)], "+.1f")

    def at_most(task: str, arm: str, other: str) -> str:
        """The gain in accuracy at the greatest length. There were ten registered comparisons."""
        a, b = ([x["accuracy"][-1] for x in tasks[task][y]] for y in (arm, other))
        return decide([x - y for x, y in zip(a, b, strict=True)], 0, 1 - 0.05 / 10).interval()

    def nats(arm: str, other: str, by_kind: bool = False) -> str:
        """The gain of a language model in nats per token, over texts or over kinds of them."""
        # The mean loss of each text beyond the trained length, in bands of one width.
        used, units = slice(model["edges"].index(8192), None), {}
        for name in model["arms"][arm]:
            a, b = (fmean(model["arms"][x][name]["bands"][used]) for x in (arm, other))
            units.setdefault(name.partition(" ")[0] if by_kind else name, []).append(b - a)
        return _interval([fmean(gains) for gains in units.values()], "+.3f")

    def times(task: str) -> str:
        """The loss with the law at the greatest length, as a multiple of that of O."""
        a, b = ([math.log(x["loss"][-1]) for x in alike[task][arm]] for arm in ("O + law", "O"))
        return _interval([x - y for x, y in zip(a, b, strict=True)], ".2f", math.exp)

    arms = load("first_constant")["arms"]
    bits = ([x["accuracy"] for x in arms[arm]] for arm in ("O + log × c", "O × c"))
    of_first_bit = decide([x - y for x, y in zip(*bits, strict=True)], 0, 0.975).interval()
    arms = load("from_scratch")["positions"]["NoPE"]
    bytes_of = (
        [(x["code"][-1] + x["prose"][-1]) / 2 for x in arms[arm]] for arm in ("constant", "log")
    )
    of_bytes = decide([x - y for x, y in zip(*bytes_of, strict=True)], 0, 0.9875).interval("+.2f")
    found = load("constant_per_head")["losses"]

    def nats_on_new(arm: str, other: str) -> str:
        """The gain over sources, each of three texts. There were three registered comparisons."""
        units = {}
        for name, x in found.items():
            units.setdefault(name.partition(",")[0], []).append(x[other]["beyond"] - x[arm]["beyond"])
        return decide([fmean(x) for x in units.values()], 0, 1 - 0.05 / 3).interval("+.3f")

    return {
        "masked": points("O + law", "O"),
        "clamped": points("O, ReRoPE", "O"),
        "from-scratch": of_bytes,
        "retrieval": at_most("max", "log × c", "O × c"),
        "first-bit": of_first_bit,
        "recall-length": at_most("recall", "log × c", "O × c"),
        "one-head": at_most("one head", "log × c", "O × c"),
        "constants": nats("constant per head", "YaRN's constant"),
        "slopes-on-constants": nats("two numbers per head", "constant per head"),
        "one-constant": nats_on_new("one constant", "YaRN's constant"),
        "head-constants": nats_on_new("constant per head", "one constant"),
        "constant": nats("slope per head", "YaRN's constant"),
        "constant-kinds": nats("slope per head", "YaRN's constant", by_kind=True),
        "recall": times("recall"),
        "blurred": times("average, blurred"),
        "clear": times("average, clear"),
    }


def train_with_a_law() -> dict[str, str]:
    return {"retrieval": readme()["retrieval"]}


def overview() -> dict[str, str]:
    from report import figures

    of_torch = figures("attention.AgainstTorch.track_ratio", "numpy", "attention", "4096")
    of_jax = figures("attention.AgainstOwnLibrary.track_jax")
    return {"numpy-torch": _range(of_torch), "jax-nn": _range([1 / x for x in of_jax])}


def performance() -> dict[str, str]:
    from report import figure, figures

    gradients = figures("attention.Gradients.track_ratio", "torch", "output and entropy")
    # 5356ac1d is the last record before the pass that computes in powers of 2 and without maxima.
    before, now = {}, {}
    for what in ("entropy", "output"):
        name = f"attention.Error.track_{what}_error"
        before[what] = f"{figure(name, 'numpy', 'None', commit='5356ac1d'):.1e}"
        now[what] = _range(figures(name, "numpy", "None"), ".1e")
    small = [
        x
        for call in ("attention", "causal", "entropy", "state")
        for x in figures("attention.SmallCalls.track_ratio", "torch", call)
    ]
    return {
        "gradient": _range(gradients),
        "small-calls": _range(small),
        "entropy-errors": f"{before['entropy']} nats, and is now {now['entropy']}",
        "output-errors": f"{before['output']}, and is now {now['output']}",
    }


def what_holds() -> dict[str, str]:
    from experiment import load
    from ledger.test_mean_entropy import POWERS, random_initialization

    from isentropic import laws, theory

    law = laws.LogLength(512)
    held = [theory.needle_entropy(n, 8, 7.5 * law(n)) for n in POWERS]
    growth = (f"{theory.needle_entropy(n, 8, 7.5):.1f}" for n in (64, 8192))
    rises = {}
    for name, gap in {"near": 6.3, "below": 5.0}.items():
        ends = (theory.needle_entropy(n, 8, gap * law(n)) for n in (64, 8192))
        rises[name] = " to ".join(f"{h:.1f}" for h in ends)
    numbers = random_initialization()
    rows = {name: " | ".join(f"{h:.2f}" for h in numbers[name]) for name in ("standard", "law")}
    errors = load("calibration")["minilm"]["errors"]
    arms = {"fitted": "fitted", "su": "Su's law, base 128", "plain": "standard scale"}
    missed = {
        name: f"{errors[arm]['code']:.2f} nats on code and {errors[arm]['prose']:.2f} on prose"
        for name, arm in arms.items()
    }
    return {
        "growth": " to ".join(growth),
        "held": f"{min(held):.2f} and {max(held):.2f}",
        **rises,
        **rows,
        **missed,
    }


def johnson_lindenstrauss() -> dict[str, str]:
    from layers.test_linear_attention import errors_of_estimates
    from ledger.test_dimensions import constants_at_half, criterion, famous_constant
    from ledger.test_maps import failures_of_a_spike, failures_of_single_features

    from isentropic.jl import min_dim

    dimensions = {
        method: str(min_dim(10_000, eps=0.2, delta=0.01, method=method, n_features=5000))
        for method in ("exact", "haar", "dasgupta-gupta", "achlioptas", "chernoff")
    }
    features = {
        f"features-{d}-{square}": " | ".join(f"{x:.2g}" for x in errors_of_estimates(d, square))
        for d in (64, 8)
        for square in (1, 4, 7, 16)
    }
    famous = famous_constant()
    return (
        dimensions
        | features
        | {
            "criterion": str(famous["k"]),
            "off": f"{famous['off']:.0f} of the {famous['pairs']:_d}".replace("_", " "),
            "natural": f"{constants_at_half()['natural']:.1f}",
            "of-512": f"{criterion()['of_512']:.1f}",
            **{name: _power_of_ten(p) for name, p in failures_of_a_spike().items()},
            **{f"sparse-{name}": f"{100 * p:.1f}" for name, p in failures_of_single_features().items()},
        }
    )


def rotate() -> dict[str, str]:
    from experiment import load

    schemes = load("quantize_cache")["errors"].values()
    residual = load("rotate_residual")
    return {
        **{
            name: " | ".join(f"{100 * x:.1f} %" for x in of.values())
            for name, of in zip(("plain", "rotated", "channel", "both"), schemes, strict=True)
        },
        "change": _power_of_ten(residual["change"]),
        "logits": f"{residual['logits']:.0f}",
        "before": f"{residual['largest before']:.1f}",
        "after": f"{residual['largest after']:.1f}",
    }


def quantize() -> dict[str, str]:
    from statistics import fmean

    import quantized_search
    from experiment import load

    from isentropic.jl import quantizer
    from isentropic.jl._codebooks import codebook

    texts, numbers = list(load("quantized_model")["texts"].values()), {}
    for bits in (2, 3, 4):
        # In the order of the table: all tokens quantized, then all but the last.
        names = [name for name in texts[0] if name.endswith(f" {bits}") and "unbiased" not in name]
        cells = [[text[name]["loss"] for text in texts] for name in names]
        numbers[f"loss-{bits}"] = " | ".join(f"{fmean(x):+.2f}" for x in cells)
    plain, signs = ([x[f"{name} 4"]["divergence"] for x in texts] for name in ("mse", "mse and signs"))
    numbers["divergence"] = f"{fmean(signs) / fmean(plain):.1f}"
    kept = {name: [x[f"{name} 3"]["loss"] for x in texts] for name in ("mse", "unbiased")}
    numbers["three-bits"] = " and ".join(f"{fmean(x):+.2f}" for x in kept.values())
    numbers["cached"] = f"{100 * max(x['cache, mse 4']['share'] for x in texts):.0f} %"
    results = load("quantized_search")
    found = {(x["name"], x["bits"]): x for x in results["rows"]}
    many = results["million"]
    numbers["million"] = (
        f"{many['bytes'] / 1e6:.0f} MB instead of {many['floats'] / 1e6:.0f}. With drawing, encoding and "
        f"searching them in parts, at most {many['peak'] / 1e6:.0f} MB are in use"
    )
    numbers["encode"] = f"{many['floats'] / many['encode'] / 1e6:.0f} MB of float32"
    numbers["search"] = f"{many['search'] * 10:.0f} ms"
    centered = [
        f"{name}, centered" for name in ("isentropic, unbiased", "faiss, RaBitQ", "faiss, EDEN")
    ]
    for bits in (1, 2, 4):
        rows = [found[name, bits] for name in (*centered, "faiss, product quantizer")]
        numbers[f"recall-{bits}"] = " | ".join(
            f"{100 * fmean(x['recall']):.1f} %, {x['bytes']} bytes" for x in rows
        )
    kept = (fmean(found[name, 2]["recall"]) for name in (quantized_search.OURS, "isentropic, mse"))
    plain, mse = (f"{100 * x:.1f} %" for x in kept)
    numbers["found"] = f'{plain} of the neighbors, and "mse" {mse}'
    many, bits = 10**6, (1, 2, 3, 4)
    errors = [codebook(many, b).error for b in bits]
    of_signs = quantizer(100, 1, kind="sign", n_components=1, rng=0).expected_error().inner ** 2
    two_stages = [math.pi / 2 * x for x in (1.0, *errors[:3])]
    unbiased = [x / (1 - x) for x in errors]
    worse = [a / b for a, b in zip(two_stages, unbiased, strict=True)]
    numbers |= {
        "mse": ", ".join(f"{x:.4f}" for x in errors),
        "two-stages": ", ".join(f"{x:.3f}" for x in two_stages),
        "unbiased": ", ".join(f"{x:.3f}" for x in unbiased),
        "worse": f"{min(worse):.1f} to {max(worse):.1f}",
        "drive": f"{unbiased[0]:.4f}",
        "rabitq": " to ".join(f"{codebook(d, 1).values[1]:.4f}" for d in (100, many)),
        "qjl": f"{of_signs:.3f}",
    }
    ratios = quantized_search.ratios(results).values()
    return numbers | {"ratios": f"{min(ratios):.2f} to {max(ratios):.2f}"}


def reduce_dimension() -> dict[str, str]:
    from experiment import load
    from report import shown

    results = load("map_speed")
    return {
        "processor": results["processor"],
        **{
            f"d-{d}": " | ".join(shown(x, "ratio") for x in found.values())
            for d, found in results["ratios"].items()
        },
    }


def _interval(differences: list[float], form: str, of: Callable[[float], float] = float) -> str:
    """The mean of paired differences with its 95 % interval, as a function of them."""
    from experiment import decide

    found = decide(differences, 0)
    mean, low, high = (f"{of(x):{form}}" for x in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]"


def _range(numbers: list[float], form: str = ".1f") -> str:
    """The least and the greatest of the numbers of several machines."""
    return " to ".join(dict.fromkeys(f"{x:{form}}" for x in (min(numbers), max(numbers))))


def _power_of_ten(x: float) -> str:
    exponent = math.floor(math.log10(x))
    return f"{x / 10**exponent:.1f}·10" + str(exponent).translate(
        str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    )

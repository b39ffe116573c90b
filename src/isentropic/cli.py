"""The command ``isentropic``: laws, dimensions, and attention entropies of Hugging Face models.

>>> from click.testing import CliRunner
>>> from isentropic.cli import main
>>> print(CliRunner().invoke(main, ["laws", "su", "--lengths", "64,512,4096"]).output)
n          64      512     4096
su     0.6667   1.0000   1.3333
<BLANKLINE>
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import isentropic
from isentropic import laws as laws_module
from isentropic._checks import requires_extra
from isentropic.laws._presets import RULES

try:
    with requires_extra(__name__):
        import click
except ModuleNotFoundError as error:
    # The command is installed without its extra, too. Then one line says what is missing.
    raise SystemExit(str(error)) from None

_LENGTHS = (64, 128, 256, 512)
_BATCH_TOKENS = 4096  # the most tokens in one call of the model


class _Numbers(click.ParamType):
    """Integers separated by commas."""

    name = "N,N,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 2 or max(numbers) > 10**15:
            must = "give whole numbers from 2 to 10¹⁵, separated by commas"
            self.fail(f"{value!r}: {must}", param, ctx)
        return tuple(sorted(set(numbers)))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(isentropic.__version__, prog_name="isentropic")
def main() -> None:
    """Laws that keep attention entropy constant; dimensions that preserve distances."""


_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def _preset_label(name: str) -> str:
    """The name of a row; for an alias of a preset, also the rule that it is."""
    rule = RULES.get(name)
    return f"{name} ({rule.formula})" if rule and rule.formula.startswith("as ") else name


@main.command(epilog=f"Presets: {', '.join(map(_preset_label, RULES))}.")
@click.argument("names", nargs=-1, metavar="[FOLDER|NAME[:PARAMETER=VALUE,...]]...")
@click.option(
    "--lengths", type=_Numbers(), default="64,512,4096,32768", show_default=True,
    help="Numbers of keys.",
)  # fmt: skip
@click.option(
    "--check", "config", type=click.Path(exists=True, path_type=Path), metavar="CONFIG",
    help="A config.json, or its folder: print the rules that the model's configuration asks for.",
)  # fmt: skip
@_as_json
def laws(names: Sequence[str], lengths: Sequence[int], config: Path | None, as_json: bool) -> None:
    """Print the factors of laws for given numbers of keys.

    NAME is one of the presets, with its parameters: isentropic laws su qwen:length=2048.
    FOLDER has the laws of a model in its configuration, from `isentropic calibrate` or
    `save_pretrained`. There is one row per layer, with the mean over the heads. Without names, print
    all presets that do not need parameters.
    """
    if config is not None:
        if names:
            raise click.UsageError("--check takes no names beside it")
        _print_rules(config, lengths, as_json)
        return
    chosen = dict(_named_laws(names)) if names else dict(_laws_without_parameters())
    factors = {name: [_factor(name, law, n) for n in lengths] for name, law in chosen.items()}
    if as_json:
        click.echo(json.dumps({"lengths": lengths, "factors": factors}))
        return
    labels = [_preset_label(name) for name in factors]
    width = max(map(len, labels), default=1) + 2
    click.echo("n".ljust(width) + "".join(f"{n:>9}" for n in lengths))
    for label, row in zip(labels, factors.values(), strict=True):
        means = (x if isinstance(x, float) else math.fsum(x) / len(x) for x in row)
        click.echo(label.ljust(width) + "".join(f"{x:>9.4f}" for x in means))


def _print_rules(path: Path, lengths: Sequence[int], as_json: bool) -> None:
    """The rules of a configuration, with their factors by what they count."""
    path = path / "config.json" if path.is_dir() else path
    try:
        rules = laws_module.from_config(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise click.ClickException(f"{path}: {_first_line(error)}") from None
    found: list[dict[str, Any]] = [
        {
            "rule": rule.name, "counts": rule.counts, "scales": rule.scales,
            "layers": rule.layers and list(rule.layers),
            "factors": rule.law and [_factor(rule.name, rule.law, n) for n in lengths],
        }
        for rule in rules
    ]  # fmt: skip
    if as_json:
        click.echo(json.dumps({"lengths": lengths, "rules": found}))
        return
    if not found:
        click.echo("no rule: the logits have the constant scale of the model's attention")
    for rule in found:
        layers = "all layers" if rule["layers"] is None else f"layers {_ranges(rule['layers'])}"
        counted = f"n counts {rule['counts']}" if rule["counts"] else "constant"
        click.echo(f"{rule['rule']}: on {rule['scales']}, {layers}, {counted}")
        if rule["factors"] is None:
            click.echo("  its numbers are weights of the model")
            continue
        click.echo("  n     " + "".join(f"{n:>12}" for n in lengths))
        click.echo("  factor" + "".join(f"{x:>12.6f}" for x in rule["factors"]))


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in order as text, with a dash for those in between."""
    parts: list[list[int]] = []
    for i in numbers:
        if parts and i == parts[-1][-1] + 1:
            parts[-1].append(i)
        else:
            parts.append([i])
    return ", ".join(str(x[0]) if len(x) == 1 else f"{x[0]}–{x[-1]}" for x in parts)


def _named_laws(names: Sequence[str]) -> Iterator[tuple[str, laws_module.Law | None]]:
    """The laws of presets, and those of the layers in folders."""
    paths = {name for name in names if os.path.exists(name)}
    for name in names:
        if name not in paths:
            yield name, _law_or_no_folder(name)
            continue
        for layer, (law, _) in _laws_of_folder(name).items():
            # The layers of several models may have the same names.
            yield (f"{name}: {layer}" if len(paths) > 1 else layer), law


def _factor(name: str, law: laws_module.Law | None, n: int) -> float | list[float]:
    """The factor, or those of all heads. No law is standard attention."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy, about factors that are refused
        factor = 1.0 if law is None else law(n)
    factors = [factor] if isinstance(factor, float) else factor.reshape(-1).tolist()
    if not all(map(math.isfinite, factors)):
        raise click.ClickException(f"{name} has no finite factor for {n} keys")
    return factor if isinstance(factor, float) else factors


def _law(text: str) -> laws_module.Law:
    """The law that ``NAME:PARAMETER=VALUE,...`` specifies."""
    name, _, rest = text.partition(":")
    parameters: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key in parameters:
            raise click.UsageError(f"{text!r} has {key} twice")
        try:
            parameters[key] = int(value) if value.isdecimal() else float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise click.UsageError(f"{part!r} of {text!r} is not PARAMETER=NUMBER")
    try:
        return laws_module.preset(name, **parameters)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None


def _laws_without_parameters() -> Iterator[tuple[str, laws_module.Law]]:
    for name in RULES:
        try:
            yield name, laws_module.preset(name)
        except TypeError:
            continue


@main.command()
@click.argument("n_samples", type=click.IntRange(min=2))
@click.option("--eps", type=float, default=0.1, show_default=True, help="Error of squared distances.")
@click.option(
    "--delta", type=float, default=0.01, show_default=True, help="Probability of any larger error."
)
@click.option("--features", type=click.IntRange(min=1), help="Dimensions d of the points.")
@_as_json
def jl(n_samples: int, eps: float, delta: float, features: int | None, as_json: bool) -> None:
    """Print how many dimensions preserve the distances between N_SAMPLES points."""
    methods = {
        "exact": "Gaussian map, exact tail",
        "haar": "orthonormal rows, exact tail",
        "dasgupta-gupta": "Gaussian map, Dasgupta and Gupta's bound",
        "achlioptas": "signs, Achlioptas' bound",
        "chernoff": "16/ε² · log(2n²/δ)",
    }
    if features is None:  # on which the tail of orthonormal rows depends
        del methods["haar"]
    options: Any = {"eps": eps, "delta": delta, "n_features": features}
    try:
        dims = {x: isentropic.jl.min_dim(n_samples, method=x, **options) for x in methods}
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    criterion = isentropic.theory.entropy_criterion_dim(n_samples)
    if as_json:
        click.echo(json.dumps({"dimensions": dims, "entropy_criterion": criterion}))
        return
    click.echo(f"{n_samples} points, squared distances within {eps:g}, all with chance {1 - delta:g}")
    for method, k in dims.items():
        click.echo(f"{k:>9}  {method:<15} {methods[method]}")
    click.echo(f"{criterion:>9.1f}  entropy criterion, 8.33 log n: no guarantee about distances")


_READABLE = click.Path(exists=True, dir_okay=False, path_type=Path)
_WRITABLE = click.Path(dir_okay=False, path_type=Path)
_model = click.argument("model")
_texts = click.argument("texts", nargs=-1, required=True, type=_READABLE, metavar="TEXT...")
_lengths = click.option(
    "--lengths", type=_Numbers(), help="Numbers of tokens.  [default: 64,128,256,512]"
)
_plot = click.option("--plot", type=_WRITABLE, help="Plot to write, as an image.")
_laws_option = click.option(
    "--laws", "chosen", metavar="FOLDER|NAME[:PARAMETER=VALUE,...]",
    help="Laws to apply: a folder from `calibrate`, or a preset.",
)  # fmt: skip


@main.command()
@_model
@_texts
@_lengths
@_plot
@_as_json
@_laws_option
def profile(
    model: str, texts: Sequence[Path], lengths: Sequence[int] | None, plot: Path | None,
    as_json: bool, chosen: str | None,
) -> None:  # fmt: skip
    """Print how the attention entropies of a model grow with the length.

    MODEL is a folder with a model and a tokenizer of Hugging Face transformers, or the name of a model
    on the Hub. TEXT is a file in UTF-8. Each text is truncated to each of the lengths. Texts shorter
    than the greatest length are not used, so that all lengths have the same texts.
    """
    _check_outputs(plot)
    huggingface = _import_huggingface()
    model_laws = None if chosen is None else _laws_of_folder_or_preset(chosen)
    network, batches = _load_model_and_batches(model, texts, lengths, _BATCH_TOKENS)
    with _without_traceback():
        report = huggingface.profile(network, batches, laws=model_laws, progress=True)
        # Without the option the model keeps laws that it was saved with.
        present = huggingface.laws_of(network).values() if model_laws is None else [(model_laws, "")]
    click.echo(json.dumps(report.to_dict()) if as_json else report)
    has_laws = any(law is not None for law, _ in present)
    _draw(plot, {"with laws" if has_laws else "standard attention": report})


def _laws_of_folder_or_preset(text: str) -> Any:
    return _laws_of_folder(text) if os.path.isdir(text) else _law_or_no_folder(text, "--laws: ")


def _law_or_no_folder(text: str, option: str = "") -> laws_module.Law:
    try:
        return _law(text)
    except click.UsageError as error:
        message = f"{option}{text} is not a folder; as a preset: {error.message}"
        raise click.UsageError(message) from None


def _laws_of_folder(path: str) -> dict[str, tuple[laws_module.Law | None, str]]:
    """What `laws_of` says of the configuration of a model. No weights are loaded."""
    huggingface = _import_huggingface()
    (config,) = _load(path, "AutoConfig")
    with _without_traceback():
        with importlib.import_module("torch").device("meta"):
            model = importlib.import_module("transformers").AutoModel.from_config(config)
        model.to_empty(device="cpu")  # gives trained laws the numbers of the configuration
        laws: dict[str, tuple[laws_module.Law | None, str]] = huggingface.laws_of(model)
    return laws


@main.command()
@_model
@_texts
@click.option("--length", type=click.IntRange(min=2), help="Number of tokens.  [default: 512]")
@_laws_option
@_as_json
def observe(
    model: str, texts: Sequence[Path], length: int | None, chosen: str | None, as_json: bool
) -> None:
    """Print entropies, largest logits and sinks of the attention in one pass of a model.

    MODEL and TEXT are as for `profile`. Each text is truncated to the same length.
    """
    huggingface = _import_huggingface()
    model_laws = None if chosen is None else _laws_of_folder_or_preset(chosen)
    lengths = None if length is None else (length,)
    # An observer describes one pass, so that all texts have to be in it.
    network, batches = _load_model_and_batches(model, texts, lengths, sys.maxsize)
    with _without_traceback(), contextlib.ExitStack() as stack:
        if model_laws is not None:
            stack.enter_context(huggingface.use(network, model_laws))
        observer = stack.enter_context(huggingface.observe(network, every=None))
        # The model is in evaluation mode, whose passes no interval counts.
        observer.request()
        with importlib.import_module("torch").no_grad():
            # Without --length there is a batch for each default length. The last one is the longest.
            network(batches[-1])
    click.echo(json.dumps(observer.latest.to_dict()) if as_json else observer.latest)


@main.command()
@_model
@_texts
@_lengths
@_plot
@_as_json
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), required=True,
    help="Folder for the configuration of the model with its laws.",
)  # fmt: skip
@click.option(
    "--reference-length", type=click.FloatRange(min=2), help="Number of keys with the target entropy."
)  # fmt: skip
def calibrate(
    model: str, texts: Sequence[Path], lengths: Sequence[int] | None, plot: Path | None,
    as_json: bool, output: Path, reference_length: float | None,
) -> None:  # fmt: skip
    """Fit a law to each attention head of a model, and print the entropies with and without.

    MODEL and TEXT are as for `profile`. The laws are in the configuration that is written. To apply
    them, import `isentropic.integrations.huggingface`, and load the model by
    `from_pretrained(MODEL, config=AutoConfig.from_pretrained(OUTPUT))`.
    """
    _check_outputs(plot, output)
    huggingface = _import_huggingface()
    network, batches = _load_model_and_batches(model, texts, lengths, _BATCH_TOKENS)
    with _without_traceback():
        fitted = huggingface.calibrate(
            network, batches, reference_length=reference_length, progress=True
        ).laws
        # Before the measurements, so that an error in them does not lose the laws.
        with huggingface.use(network, fitted):
            network.config.save_pretrained(output)
        reports = {
            name: huggingface.profile(network, batches, laws=chosen, progress=name)
            # None would keep laws that the model was saved with, and an empty mapping takes them away.
            for name, chosen in (("standard", {}), ("calibrated", fitted))
        }
    if as_json:
        click.echo(json.dumps({name: report.to_dict() for name, report in reports.items()}))
    else:
        for name, report in reports.items():
            click.echo(f"{name}: {report}")
    # Not to the standard output, which with --json is JSON alone.
    click.echo(f"laws: {output}", err=True)
    _draw(plot, reports)


@contextlib.contextmanager
def _without_traceback() -> Iterator[None]:
    """Report errors of the library, the model or the file system in one line, without a traceback."""
    try:
        yield
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise click.ClickException(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    # The loaders of transformers give their advice in further lines.
    return str(error).partition("\n")[0]


def _check_outputs(plot: Path | None, *others: Path) -> None:
    """Fail before the computation if an output could not be written after it."""
    for path in (plot, *others):
        # A file that does not exist yet takes a folder that can be written.
        if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
            raise click.ClickException(f"{path} cannot be written")
    if plot is None:
        return
    with _without_traceback(), requires_extra("isentropic.plots"):
        figure = importlib.import_module("matplotlib.figure").Figure()
    # Matplotlib itself refuses a format only when it saves.
    formats = figure.canvas.get_supported_filetypes()
    if plot.suffix[1:].lower() not in formats:
        raise click.UsageError(f"--plot: {plot} must end in one of {', '.join(sorted(formats))}")


def _import_huggingface() -> Any:
    with _without_traceback():
        # Here, because PyTorch takes seconds to import, and `laws` of presets and `jl` do not need it.
        return importlib.import_module("isentropic.integrations.huggingface")


def _load_model_and_batches(
    name: str, texts: Sequence[Path], lengths: Sequence[int] | None, most_tokens: int
) -> tuple[Any, list[Any]]:
    """The model, from a folder or from the Hub, and the texts as batches of tokens."""
    tokenizer, model = _load(name, "AutoTokenizer", "AutoModel")
    longest = _longest(model)
    if lengths is None:
        lengths = [n for n in _LENGTHS if n <= longest]
        if not lengths:
            raise click.UsageError(f"--lengths: give some, as the model takes {longest} tokens at most")
    elif max(lengths) > longest:
        raise click.UsageError(f"--lengths: the model takes {longest} tokens at most")
    return model.eval(), list(_batches(tokenizer, texts, lengths, most_tokens))


def _longest(model: Any) -> float:
    """The most tokens that a model takes."""
    # A model of several parts has the length in the configuration of its text decoder.
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    # RoBERTa and its kin begin to count behind the position of the padding.
    learned = (x for name, x in model.named_modules() if name.endswith("position_embeddings"))
    padding = (getattr(x, "padding_idx", None) for x in learned)
    return longest - max((x + 1 for x in padding if x is not None), default=0)


def _load(name: str, *kinds: str) -> list[Any]:
    """What these classes of transformers load from a folder or from the Hub."""
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    is_folder = Path(name).is_dir()
    hub_error = None if is_folder else _hub_error(name)
    # Without the Hub the model may still be in the cache.
    options = {"local_files_only": is_folder or hub_error is not None}
    try:
        return [getattr(transformers, kind).from_pretrained(name, **options) for kind in kinds]
    except Exception as error:  # the loaders raise exceptions of many types
        if hub_error is None:
            message = f"{name} does not contain a model that loads: {_first_line(error)}"
        else:
            tried = "is not a folder, does not load from the cache, and the Hub cannot be reached"
            message = f"{name} {tried}: {hub_error}"
        raise click.ClickException(message) from None


def _hub_error(name: str) -> str | None:
    """Why the Hub does not answer, or None if it does.

    This makes a single request, while the loaders would retry theirs for minutes.
    """
    try:
        importlib.import_module("huggingface_hub").file_exists(name, "config.json")
    except Exception as error:  # of the network, for an invalid name, or for a private repository
        return _first_line(error)
    return None


def _batches(
    tokenizer: Any, texts: Sequence[Path], lengths: Sequence[int], most_tokens: int
) -> Iterator[Any]:
    """Batches of token ids: the texts that have the greatest length, truncated to each length."""
    tensor = importlib.import_module("torch").tensor
    contents = []
    for path in texts:
        try:
            contents.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise click.ClickException(f"{path} is not a text in UTF-8") from None

    def encode(n: int) -> list[Any]:
        # Not slices of longer ones: a tokenizer may add tokens at both ends.
        return [tokenizer(text, truncation=True, max_length=n)["input_ids"] for text in contents]

    longest = max(lengths)
    n_tokens = [len(ids) for ids in encode(longest)]
    if max(n_tokens) < longest:
        message = f"none of the texts has {longest} tokens, the longest has {max(n_tokens)}"
        raise click.ClickException(f"{message}: give shorter --lengths or longer texts")
    contents = [text for text, n in zip(contents, n_tokens, strict=True) if n == longest]
    n_short = len(texts) - len(contents)
    reason = f", {n_short} shorter than {longest} tokens" if n_short else ""
    click.echo(f"texts: {len(contents)} of {len(texts)}{reason}", err=True)
    for n in lengths:
        ids = encode(n)
        size = max(1, most_tokens // n)
        for start in range(0, len(ids), size):
            # All texts have at least n tokens, so a batch needs no padding.
            yield tensor(ids[start : start + size])


def _draw(path: Path | None, reports: dict[str, Any]) -> None:
    """Plot entropies against the length, and for each report the drift of each head."""
    if path is None:
        return
    # A file needs no display. The choice has to come before `pyplot`.
    importlib.import_module("matplotlib").use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    plots = importlib.import_module("isentropic.plots")
    width = 5.5 * (1 + len(reports))
    figure, axes = plt.subplots(1, 1 + len(reports), figsize=(width, 4), layout="constrained")
    plots.entropy(reports, ax=axes[0])
    for ax, (name, report) in zip(axes[1:], reports.items(), strict=True):
        plots.drift(report, ax=ax).set_title(name)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    click.echo(f"picture: {path}", err=True)

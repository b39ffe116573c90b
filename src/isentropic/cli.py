"""The command ``isentropic``: laws, dimensions, and the entropies of a Hugging Face model. Layer 9.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

try:
    import click
except ModuleNotFoundError:
    raise SystemExit("isentropic: the command needs click: pip install 'isentropic[cli]'") from None

import isentropic
from isentropic import laws as laws_module

_LENGTHS = (64, 128, 256, 512)
_BATCH_TOKENS = 4096  # in one call of the model


class _Numbers(click.ParamType):
    """Whole numbers with commas between them."""

    name = "N,N,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if not isinstance(value, str):
            return tuple(value)
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 2 or max(numbers) > 10**15:
            must = "give whole numbers from 2 to 10¹⁵ with commas between them"
            self.fail(f"{value!r}: {must}", param, ctx)
        return tuple(sorted(set(numbers)))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(isentropic.__version__, prog_name="isentropic")
def main() -> None:
    """Laws that hold the entropy of attention as contexts grow; dimensions that keep distances."""


_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@main.command(epilog=f"Presets: {', '.join(laws_module.presets())}.")
@click.argument("names", nargs=-1, metavar="[NAME[:PARAMETER=VALUE,...]]...")
@click.option(
    "--lengths", type=_Numbers(), default=(64, 512, 4096, 32768), show_default="64,512,4096,32768",
    help="Numbers of keys.",
)  # fmt: skip
@_as_json
def laws(names: Sequence[str], lengths: Sequence[int], as_json: bool) -> None:
    """Print the factors of laws at some numbers of keys.

    NAME is one of the presets, with its parameters: isentropic laws su qwen:length=2048.
    Without names, all presets that need no parameters.
    """
    chosen = {name: _law(name) for name in names} or dict(_laws_without_parameters())
    factors = {name: [float(law(n)) for n in lengths] for name, law in chosen.items()}
    if as_json:
        click.echo(json.dumps({"lengths": lengths, "factors": factors}))
        return
    width = max(len(name) for name in factors) + 2
    click.echo("n".ljust(width) + "".join(f"{n:>9}" for n in lengths))
    for name, row in factors.items():
        click.echo(name.ljust(width) + "".join(f"{x:>9.4f}" for x in row))


def _law(text: str) -> laws_module.Law:
    """The law of ``NAME:PARAMETER=VALUE,...``."""
    name, _, rest = text.partition(":")
    parameters = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
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
    for name in laws_module.presets():
        try:
            yield name, laws_module.preset(name)
        except TypeError:
            continue


@main.command()
@click.argument("n_samples", type=click.IntRange(min=2))
@click.option("--eps", type=float, default=0.1, show_default=True, help="Error of squared distances.")
@click.option(
    "--delta", type=float, default=0.01, show_default=True, help="Chance of any larger error."
)
@click.option("--features", type=click.IntRange(min=1), help="Dimensions d of the points.")
@_as_json
def jl(n_samples: int, eps: float, delta: float, features: int | None, as_json: bool) -> None:
    """Print how many dimensions N_SAMPLES points need to keep their distances."""
    methods = {
        "exact": "Gaussian map, exact tail",
        "haar": "orthonormal rows, exact tail",
        "dasgupta-gupta": "Gaussian map, Dasgupta and Gupta's bound",
        "achlioptas": "signs, Achlioptas' bound",
        "chernoff": "16/ε² · log(2n²/δ)",
    }
    try:
        dims = {
            method: isentropic.jl_min_dim(
                n_samples, eps=eps, delta=delta, method=method, n_features=features
            )
            for method in methods
            if method != "haar" or features is not None
        }
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    criterion = isentropic.entropy_criterion_dim(n_samples)
    if as_json:
        click.echo(json.dumps({"dimensions": dims, "entropy_criterion": criterion}))
        return
    click.echo(f"{n_samples} points, squared distances within {eps:g}, all with chance {1 - delta:g}")
    for method, k in dims.items():
        click.echo(f"{k:>9}  {method:<15} {methods[method]}")
    click.echo(f"{criterion:>9.1f}  entropy criterion, 8.33 log n: no guarantee about distances")


def _of_model(command: Any) -> Any:
    """The arguments that `profile` and `calibrate` share."""
    readable = click.Path(exists=True, dir_okay=False, path_type=Path)
    options = (
        click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path)),
        click.argument("texts", nargs=-1, required=True, type=readable, metavar="TEXT..."),
        click.option(
            "--lengths", type=_Numbers(), help="Numbers of tokens.  [default: 64,128,256,512]"
        ),
        click.option(
            "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Picture to write."
        ),
        _as_json,
    )
    for decorate in reversed(options):  # as if they were written above the function
        command = decorate(command)
    return command


@main.command()
@_of_model
@click.option(
    "--laws", "laws_file", type=click.Path(exists=True, dir_okay=False), help="Laws to apply, as JSON."
)
def profile(
    model: Path,
    texts: Sequence[Path],
    lengths: Sequence[int] | None,
    plot: Path | None,
    as_json: bool,
    laws_file: str | None,
) -> None:
    """Print how the attention entropies of a model grow with the length.

    MODEL is a folder with a model and tokenizer of Hugging Face transformers, TEXT a file in UTF-8.
    Each text is cut at each of the lengths; texts that are shorter take no part.
    """
    _check_outputs(plot)
    huggingface, network, batches = _opened(model, texts, lengths)
    with _without_traceback():
        chosen = None if laws_file is None else huggingface.load_laws(laws_file)
        report = huggingface.profile(network, batches, laws=chosen, progress=True)
    click.echo(json.dumps(report.to_dict()) if as_json else report)
    _draw(plot, {"as it is" if chosen is None else "with laws": report})


@main.command()
@_of_model
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="Where the laws go, as JSON.",
)
@click.option(
    "--reference-length", type=click.FloatRange(min=2), help="Keys at which the entropy is to be held."
)  # fmt: skip
def calibrate(
    model: Path,
    texts: Sequence[Path],
    lengths: Sequence[int] | None,
    plot: Path | None,
    as_json: bool,
    output: Path,
    reference_length: float | None,
) -> None:
    """Fit a law to each attention head of a model, and print what it does.

    MODEL and TEXT are those of `profile`. The laws are for
    `isentropic.integrations.huggingface.use(model, load_laws(FILE))`.
    """
    _check_outputs(plot, output)
    huggingface, network, batches = _opened(model, texts, lengths)
    with _without_traceback():
        fitted = huggingface.calibrate(
            network, batches, reference_length=reference_length, progress=True
        )
        huggingface.save_laws(fitted, output)
        reports = {
            name: huggingface.profile(network, batches, laws=chosen, progress=True)
            for name, chosen in (("standard", {}), ("calibrated", fitted))
        }
    if as_json:
        click.echo(json.dumps({name: report.to_dict() for name, report in reports.items()}))
    else:
        for name, report in reports.items():
            click.echo(f"{name}: {report}")
    click.echo(f"laws: {output}", err=True)
    _draw(plot, reports)


@contextlib.contextmanager
def _without_traceback() -> Iterator[None]:
    """What the library, the model or the file system refuses, in a line."""
    try:
        yield
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise click.ClickException(str(error).partition("\n")[0]) from None


def _check_outputs(plot: Path | None, *others: Path) -> None:
    """Refuse, before the work, what could not be written after it."""
    for path in (plot, *others):
        if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
            raise click.ClickException(f"{path} cannot be written")
    if plot is None:
        return
    try:
        figure = importlib.import_module("matplotlib.figure").Figure()
    except ModuleNotFoundError:
        raise click.ClickException("--plot needs matplotlib: pip install 'isentropic[plots]'") from None
    kinds = figure.canvas.get_supported_filetypes()
    if plot.suffix[1:] not in kinds:
        raise click.UsageError(f"--plot: {plot} must end in one of {', '.join(sorted(kinds))}")


def _opened(
    folder: Path, texts: Sequence[Path], lengths: Sequence[int] | None
) -> tuple[Any, Any, list[Any]]:
    """The integration, the model of a folder, and its batches of the texts."""
    try:
        transformers = importlib.import_module("transformers")
        huggingface = importlib.import_module("isentropic.integrations.huggingface")
    except ModuleNotFoundError as error:
        install = "pip install 'isentropic[huggingface]'"
        raise click.ClickException(f"this needs {error.name}: {install}") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    except Exception as error:  # of the many kinds that the loaders raise
        reason = str(error).partition("\n")[0]
        raise click.ClickException(f"{folder} holds no model that loads: {reason}") from None
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    if lengths is None:
        lengths = [n for n in _LENGTHS if n <= longest]
    elif max(lengths) > longest:
        raise click.UsageError(f"--lengths: the model takes {longest} tokens at most")
    return huggingface, model, list(_batches(tokenizer, texts, lengths))


def _batches(tokenizer: Any, texts: Sequence[Path], lengths: Sequence[int]) -> Iterator[Any]:
    """The beginnings of the texts, of each length those that are as long."""
    tensor = importlib.import_module("torch").tensor
    contents = []
    for path in texts:
        try:
            contents.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise click.ClickException(f"{path} is no text in UTF-8") from None
    for n in lengths:
        encoded = [tokenizer(text, truncation=True, max_length=n)["input_ids"] for text in contents]
        ids = [x for x in encoded if len(x) == n]
        if not ids:
            raise click.ClickException(f"none of the texts has {n} tokens; see --lengths")
        size = max(1, _BATCH_TOKENS // n)
        for start in range(0, len(ids), size):
            yield tensor(ids[start : start + size])


def _draw(path: Path | None, reports: dict[str, Any]) -> None:
    """Entropies against the length, and the drift of each head by each report."""
    if path is None:
        return
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

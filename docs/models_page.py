"""The page of the model types of transformers: on whose attention laws act, and how.

``python docs/models_page.py`` surveys the installed transformers and writes docs/models.json, which
takes an hour; with model types as arguments, it updates these. It also writes the tables of
docs/reference/models.md.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STORED = Path(__file__).parent / "models.json"
PAGE = Path(__file__).parent / "reference" / "models.md"
MARK = "<!-- The rest of this file is made by docs/models_page.py. -->\n"

# Sizes for tiny models, by the names that configurations have for them.
SIZES = {
    32: "hidden_size d_model n_embd dim emb_dim embed_dim encoder_embed_dim decoder_embed_dim "
    "embedding_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_key_value_heads num_kv_heads num_experts_per_tok top_k moe_topk",
    4: "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
    "attention_heads rotary_dim num_local_experts num_experts "
    "n_routed_experts",
    8: "head_dim d_kv d_head",
    48: "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim moe_intermediate_size d_inner",
    10: "entity_vocab_size entity_emb_size",
    64: "vocab_size max_position_embeddings n_positions max_seq_len image_size",
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SMALLER = {name: size for size, names in SIZES.items() for name in names.split()} | TOKENS
FEWER = ("layer", "vocab")  # for models that do not take other widths, only these get smaller
NAMES = (tuple(SMALLER), tuple(name for name in SMALLER if any(part in name for part in FEWER)))
MOST_PARAMETERS = 60_000_000
ATTENTION = re.compile("Attention|Attn")
WEIGHTS = re.compile("softmax|scaled_dot_product_attention", re.IGNORECASE)


def load() -> dict[str, Any]:
    """The stored survey: the version of transformers, and entries by model type."""
    return json.loads(STORED.read_text(encoding="utf-8"))


def model_types() -> list[str]:
    """Those of all models that `AutoModel` makes."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def survey(model_type: str) -> dict[str, Any]:
    """How laws act on the models of a type.

    The entry has the numbers of attention layers with the interface and with hooks, the classes whose
    attention stays standard with the reasons, and the largest difference of a tiny model without laws
    from transformers' own attention, if the inputs here suffice for it. Or it says why there is none.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModel

    try:
        config = CONFIG_MAPPING[model_type]()
        config.architectures = config.architectures or []
        with torch.device("meta"):
            model = AutoModel.from_config(config)
    except Exception as problem:
        return {"unknown": cause(problem)}
    entry = structure(model)
    if entry.get("interface") or entry.get("hooks"):
        for names in NAMES:
            with contextlib.suppress(Exception):
                entry["difference"] = difference(model_type, names, is_hooked=not entry["interface"])
                break
    return entry


def structure(model: Any) -> dict[str, Any]:
    from isentropic.integrations.huggingface import _modules

    interface, hooks, standard = 0, 0, {}
    for module in model.modules():
        if _modules.uses_interface(module):
            interface += 1
        elif _modules.family_of(module) is not None:
            hooks += 1
        elif (name := _modules.class_name(module)) in _modules.REFUSED or forms_weights(type(module)):
            standard[name.partition(".")[2]] = _modules.REFUSED.get(name, "no hooks for its code")
    return {"interface": interface, "hooks": hooks, "standard": standard}


def forms_weights(kind: type) -> bool:
    is_of_transformers = kind.__module__.startswith("transformers.models")
    return (
        is_of_transformers
        and ATTENTION.search(kind.__name__) is not None
        and WEIGHTS.search(inspect.getsource(kind)) is not None
    )


def difference(model_type: str, names: Iterable[str], is_hooked: bool) -> float:
    """The largest difference of the outputs of a tiny model from its own, relative to their mean.

    Without a law, hooks do nothing. So models with hooks get the law that is 1.
    """
    import torch

    from isentropic import laws
    from isentropic.integrations import huggingface

    model = made(model_type, names)
    with torch.no_grad():
        inputs, expected = first_that_runs(model)
        with huggingface.use(model, laws.Constant(1.0) if is_hooked else None, base="isentropic"):
            got = output_of(model, inputs)
    scale = expected.abs().mean()
    if not scale > 0:
        raise ValueError("an output without numbers")
    return float(f"{(got - expected).abs().max() / scale:.1e}")


def made(model_type: str, names: Iterable[str], most_parameters: int = MOST_PARAMETERS) -> Any:
    """A model of a type with eager attention, in which these names have small sizes."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModel

    config = shrunk(CONFIG_MAPPING[model_type](), names)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModel.from_config(config).parameters())
    if size > most_parameters:
        raise ValueError("no tiny configuration")
    torch.manual_seed(7)
    config._attn_implementation = "eager"
    return AutoModel.from_config(config).eval()


def first_that_runs(model: Any) -> tuple[dict[str, Any], Any]:
    """Inputs that the model takes, and its output."""
    problems = []
    for inputs in tiny_inputs(model):
        try:
            return inputs, output_of(model, inputs)
        except Exception as problem:
            problems.append(problem)
    raise problems[0]


def output_of(model: Any, inputs: dict[str, Any]) -> Any:
    import torch

    torch.manual_seed(1)  # some models draw which parts of an image they see
    output = model(**inputs)
    # The first output of MaskFormer is that of its backbone, whose attention no law reaches.
    return output.get("transformer_decoder_last_hidden_state", output[0])


def tiny_inputs(model: Any) -> list[dict[str, Any]]:
    import torch

    draws = torch.Generator().manual_seed(3)
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", 64)
    size = size if isinstance(size, int) else 64
    ids = torch.randint(3, 60, (2, 12), generator=draws)
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    text = {"input_ids": ids * mask, "attention_mask": mask, "decoder_input_ids": ids[:, :7]}
    image = {"pixel_values": torch.randn(2, 3, size, size, generator=draws)}
    sound = {"input_values": torch.randn(2, 4000, generator=draws)}
    accepted = inspect.signature(model.forward).parameters
    inputs = [
        {name: x[name] for name in x if name in accepted} for x in (text, image, text | image, sound)
    ]
    return [x for x in inputs if model.main_input_name in x or len(x) > 3]


def shrunk(config: Any, names: Iterable[str]) -> Any:
    config = copy.deepcopy(config)
    config.architectures = getattr(config, "architectures", None) or []
    for name, x in list(vars(config).items()):
        if hasattr(x, "to_dict"):
            setattr(config, name, shrunk(x, names))
    for name, size in [(name, SMALLER[name]) for name in names]:
        with contextlib.suppress(
            AttributeError, NotImplementedError
        ):  # for names that follow from others
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, size)
    for name, x in list(vars(config).items()):
        if name in ("layer_types", "attention_layers", "mlp_layer_types") and x:
            setattr(config, name, [x[0], x[-1]])
        elif isinstance(x, float) and "dropout" in name:
            setattr(config, name, 0.0)
    return config


def cause(problem: Exception) -> str:
    if isinstance(problem, ImportError):
        needed = re.search(r"requires the (.+?) library", str(problem))
        return f"needs {needed[1]}" if needed else "needs another package"
    return "no tiny model of the default configuration"


def page() -> str:
    """Markdown: tables of the stored survey."""
    stored = load()
    models = stored["models"]
    by_interface = [t for t, x in models.items() if x.get("interface")]
    by_hooks = [t for t, x in models.items() if x.get("hooks") and not x["interface"]]
    rest = [t for t in models if t not in by_interface and t not in by_hooks]
    refused = [t for t in rest if models[t].get("standard")]
    unknown = [t for t in rest if "unknown" in models[t]]
    without = [t for t in rest if models[t].get("standard") == {}]
    lines = [
        f"The survey is of transformers {stored['transformers']} and its {len(models)} model types.",
        "",
    ]
    lines += section(
        "Through hooks", by_hooks, models, difference="difference", standard="stays standard"
    )
    lines += section("Refused", refused, models, standard="reason")
    lines += section(
        "Through the AttentionInterface",
        by_interface,
        models,
        difference="difference",
        standard="stays standard",
    )
    lines += section("Not surveyed", unknown, models, unknown="reason")
    lines += ["## Without attention that forms weights", "", ", ".join(without) + ".", ""]
    return "\n".join(lines)


def written(text: str) -> str:
    """The page with the tables of the stored survey behind the mark."""
    return text.partition(MARK)[0] + MARK + "\n" + page()


def section(title: str, types: list[str], models: dict[str, Any], **columns: str) -> list[str]:
    """A table of these model types, with these fields of their entries under these titles."""
    titles = ["model type", *columns.values()]
    lines = [f"## {title}", "", "| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    return [
        *lines,
        *(
            "| " + " | ".join([t, *(shown(models[t].get(key)) for key in columns)]) + " |"
            for t in types
        ),
        "",
    ]


def shown(x: Any) -> str:
    if isinstance(x, dict):
        return "; ".join(f"`{name}`: {reason}" for name, reason in x.items())
    return format(x, ".0e") if isinstance(x, float) and x else "–" if x is None else str(x or 0)


def main() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    models = {} if not sys.argv[1:] else load()["models"]
    for number, model_type in enumerate(chosen := sys.argv[1:] or model_types()):
        print(f"{number}/{len(chosen)} {model_type}", file=sys.stderr, flush=True)
        models[model_type] = survey(model_type)
    text = json.dumps({"transformers": transformers.__version__, "models": models}, indent=1)
    STORED.write_text(text + "\n", encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

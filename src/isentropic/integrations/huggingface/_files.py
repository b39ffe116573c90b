"""Laws in JSON files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isentropic import laws as laws_module
from isentropic._checks import value_error
from isentropic.integrations.huggingface._laws import Laws, check_keys, not_laws_error
from isentropic.laws._law import Law

_FORMAT, _VERSION = "isentropic-laws", 1
_KEYS = {"format", "version", "law", "layers"}
_LAYER = re.compile("0|[1-9][0-9]{0,5}")


def save_laws(laws: Laws, path: str | os.PathLike[str]) -> None:
    """Write laws to a JSON file.

    Parameters
    ----------
    laws : Law, sequence or mapping
        Laws, as for `use`.
    path : path
        The file to write.

    Raises
    ------
    TypeError, ValueError
        For `laws` that are not laws, or that have arrays that are not finite.

    Examples
    --------
    >>> import tempfile
    >>> from isentropic import laws
    >>> from isentropic.integrations import huggingface
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     huggingface.save_laws(laws.LogLength(128), f"{folder}/law.json")
    ...     huggingface.load_laws(f"{folder}/law.json")(128)
    1.0
    """
    if isinstance(laws, Law):
        content: dict[str, Any] = {"law": laws.to_dict()}
    elif isinstance(laws, Mapping):
        check_keys(laws)
        content = {"layers": {str(key): _law_to_json(law) for key, law in laws.items()}}
    elif isinstance(laws, Sequence) and not isinstance(laws, str):
        content = {"layers": [_law_to_json(law) for law in laws]}
    else:
        raise not_laws_error(laws)
    text = json.dumps({"format": _FORMAT, "version": _VERSION} | content, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def load_laws(path: str | os.PathLike[str]) -> Laws:
    """Read laws that `save_laws` wrote.

    Nothing in the file is executed or imported.

    Parameters
    ----------
    path : path
        The file to read.

    Returns
    -------
    Law, list or dict
        The saved laws, with NumPy arrays.

    Raises
    ------
    ValueError
        For a file that is not JSON, is of another format or version, or does not describe laws.
    TypeError
        For parameters of the wrong type.

    Examples
    --------
    >>> import tempfile
    >>> from isentropic import laws
    >>> from isentropic.integrations import huggingface
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     huggingface.save_laws([None, laws.LogLength(512)], f"{folder}/laws.json")
    ...     huggingface.load_laws(f"{folder}/laws.json")
    [None, LogLength(base=512, minimum=None)]
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise value_error("path", "be a JSON file", f"{path} ({error})") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise value_error("path", f"be a file of the format {_FORMAT!r}", path)
    if type(content.get("version")) is not int or content["version"] != _VERSION:
        must = f"be a file of version {_VERSION} of the format"
        raise value_error("path", must, repr(content.get("version")))
    if content.keys() >= {"law", "layers"} or not content.keys() <= _KEYS:
        must = "be a file with a 'law' or with 'layers', and nothing else"
        raise value_error("path", must, ", ".join(content))
    if "law" in content:
        return laws_module.from_dict(content["law"])
    layers = content.get("layers")
    if isinstance(layers, list):
        return [_law_from_json(x) for x in layers]
    if not isinstance(layers, dict):
        raise value_error("path", "be a file with a 'law' or with 'layers'", path)
    return {int(key) if _LAYER.fullmatch(key) else key: _law_from_json(x) for key, x in layers.items()}


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Python's parser would silently take the last of repeated names."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"repeated names among {', '.join(names)}")
    return content


def _law_to_json(law: Law | None) -> Any:
    return None if law is None else law.to_dict()


def _law_from_json(data: Any) -> Law | None:
    return None if data is None else laws_module.from_dict(data)

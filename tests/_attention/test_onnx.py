"""The standard attention passes the cases with which ONNX tests its Attention operator."""

import importlib
import warnings

import numpy as np
import pytest

import isentropic as it
from isentropic import masks

onnx = pytest.importorskip("onnx")


def _cases():
    from onnx.backend.test.case import node

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its random inputs overflow half precision on the way
        # The import makes the cases. `collect_testcases` would make those of all operators, for 5 s.
        importlib.import_module("onnx.backend.test.case.node.attention")
    assert node._NodeTestCases
    return [
        pytest.param(c, id=c.name.removeprefix("test_attention_"))
        for c in node._NodeTestCases
        if "expanded" not in c.name
    ]


def _heads(x, count):
    """(B, L, H · E) → (B, H, L, E)."""
    return np.moveaxis(x.reshape(*x.shape[:2], count, -1), 2, 1)


def _attend(backend, inputs, attributes):
    query, key, value = (inputs[name] for name in "QKV")
    packed = query.ndim == 3
    if packed:
        query = _heads(query, attributes["q_num_heads"])
        key, value = (_heads(x, attributes["kv_num_heads"]) for x in (key, value))
    if "past_key" in inputs:
        key = np.concatenate((inputs["past_key"], key), axis=2)
        value = np.concatenate((inputs["past_value"], value), axis=2)
    n_queries, n_keys = query.shape[-2], key.shape[-2]

    # Where ONNX puts the first query: after the cache, or after the keys that are no padding.
    filled = inputs.get("nonpad_kv_seqlen")
    offset = inputs["past_key"].shape[2] if "past_key" in inputs else 0
    if filled is not None:
        offset = backend.array(filled[:, None] - n_queries)
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    mask = masks.window(None if left < 0 else left, None if right < 0 else right, offset=offset)
    if attributes.get("is_causal"):
        mask = mask & masks.causal(offset)
    if filled is not None:
        mask = mask & masks.padding(backend.array(filled[:, None]))

    bias = None
    given = inputs.get("attn_mask")
    if given is not None:
        missing = [(0, 0)] * (given.ndim - 1) + [(0, n_keys - given.shape[-1])]
        boolean = given.dtype == bool
        given = np.pad(given, missing, constant_values=False if boolean else -np.inf)
        if boolean:
            mask = mask & backend.array(given)
        else:
            bias = backend.array(given)
    out = it.attention(
        *[backend.array(x) for x in (query, key, value)],
        mask=mask,
        bias=bias,
        scale=attributes.get("scale"),
        softcap=attributes.get("softcap") or None,
        enable_gqa=query.shape[1] != key.shape[1],
        law=None,
    )
    out = backend.numpy(out)
    return np.moveaxis(out, 1, 2).reshape(*out.shape[:1], n_queries, -1) if packed else out


@pytest.mark.parametrize("case", _cases())
def test_case(backend, case):
    if backend.name not in ("numpy", "torch", "jax", "strict"):
        pytest.skip("the modes differ in nothing that these cases test")
    node = case.model.graph.node[0]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    given, expected = case.data_sets[0]
    inputs = dict(zip([name for name in node.input if name], given, strict=True))
    half = given[0].dtype != np.float32
    if half and (backend.library == "strict" or given[0].dtype != np.float16):
        inputs = {
            k: x.astype(np.float32) if x.dtype == given[0].dtype else x for k, x in inputs.items()
        }

    got = _attend(backend, inputs, attributes)

    tolerance = 2e-2 if half else 2e-5
    np.testing.assert_allclose(
        got.astype(np.float32), expected[0].astype(np.float32), rtol=tolerance, atol=tolerance / 10
    )

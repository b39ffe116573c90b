"""Attention and its entropies agree with their definitions, with every option and at the edges."""

import math
import tracemalloc
import types

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import isentropic as it
from isentropic import laws, masks

B, H, L, S, E, EV = 2, 4, 7, 11, 8, 5
TOLERANCE = {"float32": {"rtol": 3e-5, "atol": 3e-6}, "float64": {"rtol": 1e-12, "atol": 1e-13}}


def _data(rng, dtype, n_keys=S, groups=H):
    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    return normal(B, H, L, E), normal(B, groups, n_keys, E), normal(B, groups, n_keys, EV)


# Each gives what the library takes and what the oracle takes. `n` counts visible keys.


def _plain(rng, a):
    return {}, {"factor": oracles.log_length(S)}


def _standard(rng, a):
    return {"law": None}, {}


def _causal(rng, a):
    visible = oracles.causal(L, S)
    return {"is_causal": True}, {
        "visible": visible,
        "factor": oracles.log_length(visible.sum(-1)),
    }


def _boolean(rng, a):
    visible = rng.random((B, 1, L, S)) < 0.5
    visible[0, 0, 3] = False
    factor = oracles.log_length(visible.sum(-1))
    return {"mask": a(visible)}, {"visible": visible, "factor": factor}


def _boolean_rows(rng, a):
    visible = rng.random(S) < 0.7
    return {"mask": a(visible)}, {"visible": visible, "factor": oracles.log_length(visible.sum())}


def _boolean_and_causal(rng, a):
    visible = rng.random((B, H, L, S)) < 0.5
    both = visible & oracles.causal(L, S)
    return {"mask": a(visible), "is_causal": True}, {
        "visible": both,
        "factor": oracles.log_length(both.sum(-1)),
    }


def _window(rng, a):
    visible = oracles.band(L, S, 3, 1)
    factor = oracles.log_length(visible.sum(-1))
    return {"mask": masks.window(3, 1)}, {"visible": visible, "factor": factor}


def _packed_and_padded(rng, a):
    ids = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    lengths = np.array([[S], [S - 4]])
    visible = (ids[S - L :, None] == ids) & oracles.causal(L, S)
    visible = visible & (np.arange(S) >= S - lengths[..., None, None])
    mask = masks.causal() & masks.segments(a(ids)) & masks.padding(a(lengths), side="left")
    return {"mask": mask}, {"visible": visible, "factor": oracles.log_length(visible.sum(-1))}


def _either(rng, a):
    sink = np.arange(S) < 2
    visible = (oracles.band(L, S, 2, 0) | sink) & oracles.causal(L, S)
    mask = (masks.window(2) | masks.padding(2)) & masks.causal()
    return {"mask": mask}, {"visible": visible, "factor": oracles.log_length(visible.sum(-1))}


def _bias(rng, a):
    bias = rng.normal(size=(1, H, L, S))
    bias[0, 0, 0, 2] = bias[0, 1, 1, :] = -np.inf
    return {"bias": a(bias)}, {"bias": bias, "factor": oracles.log_length(S)}


def _scale_and_cap(rng, a):
    return {"scale": 1.3, "softcap": 2.0, "law": None}, {"scale": 1.3, "softcap": 2.0}


def _lengths(rng, a):
    n = np.arange(L) + 100
    return {"n_keys": a(n)}, {"factor": oracles.log_length(n)}


def _per_head_law(rng, a):
    slope = rng.uniform(0.1, 0.5, size=H)
    factor = slope[:, None] * np.log(np.full(L, S)) + 0.5
    return {"law": laws.AffineLog(a(slope), 0.5)}, {"factor": factor}


def _sinks(rng, a):
    sinks = rng.normal(size=H)
    sinks[1] = -np.inf
    return {"sinks": a(sinks)}, {"sinks": sinks, "factor": oracles.log_length(S)}


def _sinks_of_each_sequence(rng, a):
    sinks = rng.normal(size=(B, H)) * 3
    visible = rng.random((B, 1, L, S)) < 0.5
    visible[0, 0, 3] = False
    bias = rng.normal(size=(L, 1))
    factor = oracles.log_length(visible.sum(-1))
    return {"sinks": a(sinks), "mask": a(visible), "softcap": 2.0, "bias": a(bias)}, {
        "sinks": sinks, "visible": visible, "softcap": 2.0, "bias": bias, "factor": factor
    }  # fmt: skip


COMBINATIONS = [
    _plain, _standard, _causal, _boolean, _boolean_rows, _boolean_and_causal, _window,
    _packed_and_padded, _either, _bias, _scale_and_cap, _lengths, _per_head_law,
    _sinks, _sinks_of_each_sequence,
]  # fmt: skip


class TestValues:
    @pytest.mark.float64
    @pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda f: f.__name__.strip("_"))
    @pytest.mark.parametrize("groups", [H, 2, 1])
    @pytest.mark.usefixtures("tiny_tiles")
    def test_against_definition(self, backend, rng, combination, groups):
        dtype = backend.dtypes[-1]
        q, k, v = _data(rng, dtype, groups=groups)
        ours, theirs = combination(rng, lambda x: backend.array(x, _float(x, dtype)))
        expected = oracles.attention(q, k, v, **theirs)
        arrays = [backend.array(x) for x in (q, k, v)]
        ours |= {"enable_gqa": True} if groups == 2 else {}
        close = TOLERANCE[dtype]

        state = it.attention_state(*arrays, **ours)
        backend.assert_close(state.output(), expected.output, **close)
        backend.assert_close(state.log_normalizer(), expected.log_normalizer, **close)
        backend.assert_close(state.entropy(), expected.entropy(), **close)
        weights = it.AttentionDistribution(*arrays[:2], **ours).weights()
        backend.assert_close(weights, expected.weights[..., :S], **close)
        backend.assert_close(it.attention(*arrays, **ours), expected.output, **close)
        h = it.attention_entropy(*arrays[:2], **ours)
        backend.assert_close(h, expected.entropy(), **close)
        received = it.AttentionDistribution(*arrays[:2], **ours).received()
        backend.assert_close(received, expected.weights[..., :S].sum(-2), **close)
        self._assert_statistics(
            backend, it.AttentionDistribution(*arrays[:2], **ours).statistics(), expected, close
        )

    def _assert_statistics(self, backend, statistics, expected, close):
        for name in ("log_normalizer", "mean", "variance"):
            backend.assert_close(getattr(statistics, name), getattr(expected, name), **close)
        backend.assert_close(statistics.entropy, expected.entropy(), **close)
        backend.assert_close(statistics.maximum, expected.logits.max(-1), **close)

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_default_tiles(self, backend, rng, dtype):
        if dtype not in backend.dtypes:
            pytest.skip("no float64 here")
        q, k, v = _data(rng, dtype)
        expected = oracles.attention(q, k, v, factor=oracles.log_length(S))
        out = it.attention(*[backend.array(x) for x in (q, k, v)])
        backend.assert_close(out, expected.output, **TOLERANCE[dtype])

    @pytest.mark.parametrize(
        "order", [0, 0.3, 0.75, 0.9, 1 - 1e-7, 1, 1 + 1e-12, 1.2, 1.25, 2, 30, np.inf]
    )
    @pytest.mark.float64
    @pytest.mark.parametrize("family", ["renyi", "tsallis"])
    @pytest.mark.usefixtures("tiny_tiles")
    def test_orders(self, backend, rng, order, family):
        dtype = backend.dtypes[-1]
        q, k, _ = _data(rng, dtype)
        q = q * 3
        visible = oracles.causal(L, S)
        weights = oracles.attention(q, k, visible=visible, factor=oracles.log_length(visible.sum(-1)))
        exact = 1.0 if abs(order - 1) < 1e-11 else order  # the definition cancels there
        expected = oracles.entropy(weights.weights, exact, family)
        q, k = backend.array(q), backend.array(k)
        h = it.attention_entropy(q, k, order=order, family=family, is_causal=True)
        loose = 1e-9 if 0 < abs(order - 1) < 1e-5 else 0
        close = TOLERANCE[dtype]
        backend.assert_close(h, expected, rtol=close["rtol"], atol=close["atol"] + 10 * loose)

    @pytest.mark.parametrize("order", [0.5, 1, 2])
    @pytest.mark.parametrize("family", ["renyi", "tsallis"])
    def test_normalized(self, backend, order, family):
        q, k = backend.array(np.zeros((3, 4)), "float32"), backend.array(np.zeros((9, 4)), "float32")
        options = {"order": order, "family": family, "normalized": True}
        backend.assert_close(it.attention_entropy(q, k, **options), np.ones(3), rtol=1e-5)
        one = it.attention_entropy(q, k[:1, ...], **options)
        backend.assert_close(one, np.zeros(3))

    @pytest.mark.parametrize("family", ["renyi", "tsallis"])
    def test_normalized_with_other_numbers_for_the_law(self, backend, family):
        q, k = backend.array(np.zeros((3, 4)), "float32"), backend.array(np.zeros((9, 4)), "float32")
        options = {"order": 2, "family": family, "normalized": True}
        seen = backend.array(np.asarray([[i < n for i in range(9)] for n in (0, 1, 5)]))
        sink = backend.array(np.asarray(0.0), "float32")
        for n_keys in (3, backend.array([3, 9, 0])):
            h = it.attention_entropy(q, k, n_keys=n_keys, sinks=sink, **options)
            backend.assert_close(h, np.ones(3), rtol=1e-5)
            h = it.attention_entropy(q, k, n_keys=n_keys, **options)
            backend.assert_close(h, np.ones(3), rtol=1e-5)
        h = it.attention_entropy(q, k, n_keys=5, mask=seen, **options)
        backend.assert_close(h, np.asarray([0.0, 0.0, 1.0]), rtol=1e-5)
        h = it.attention_entropy(q, k, n_keys=81, **options)
        of_9, of_81 = (np.log(n) if family == "renyi" else 1 - 1 / n for n in (9, 81))
        backend.assert_close(h, np.full(3, of_9 / of_81), rtol=1e-5)

    @pytest.mark.float64
    @pytest.mark.usefixtures("tiny_tiles")
    def test_information(self, backend, rng):
        dtype = backend.dtypes[-1]
        q, k, _ = _data(rng, dtype)
        visible = oracles.causal(L, S, offset=-1)  # query 0 sees nothing
        p = oracles.attention(q, k, visible=visible).weights[..., 1:, :]
        expected = oracles.entropy(p.mean(-2)) - oracles.entropy(p).mean(-1)
        mask = masks.causal(offset=-1)
        got = it.AttentionDistribution(
            backend.array(q), backend.array(k), mask=mask, law=None
        ).information()
        backend.assert_close(got, expected, rtol=1e-4, atol=1e-6)

    def test_information_is_zero_for_equal_rows(self, backend):
        q, k = backend.array(np.ones((5, 4)), "float32"), backend.array(np.eye(4), "float32")
        got = it.AttentionDistribution(q, k).information()
        backend.assert_close(got, np.zeros(()), atol=1e-6)

    @pytest.mark.float64
    def test_mean_score_is_a_second_attention(self, backend, rng):
        # dLSE/dq = scale · Attn(q, k, k), and E_p[s] = scale · q · Attn(q, k, k).
        q, k, _ = _data(rng, backend.dtypes[-1])
        state = it.attention_state(backend.array(q), backend.array(k), law=None)
        mean_key = it.attention(*[backend.array(x) for x in (q, k, k)], law=None)
        mean_score = (q * backend.numpy(mean_key)).sum(-1) / np.sqrt(E)
        expected = backend.numpy(state.log_normalizer()) - mean_score
        backend.assert_close(state.entropy(), expected, rtol=1e-4, atol=1e-5)

    def test_scale_queries(self, backend, rng):
        q, k, v = (backend.array(x) for x in _data(rng, "float32"))
        n = backend.array(np.arange(5, 5 + L))
        backend.assert_close(it.scale_queries(q, n, law=None), q, rtol=0, atol=0)
        scaled = it.scale_queries(q, n)
        expected = it.attention(q, k, v, n_keys=n)
        backend.assert_close(it.attention(scaled, k, v, law=None), expected, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("order", ["bhle", "blhe", "hble", "lbhe"])
    @pytest.mark.parametrize("tokens", [L, H])
    def test_head_axis(self, backend, rng, order, tokens):
        axes, head_axis = ["bhle".index(x) for x in order], order.index("h")
        q = rng.normal(size=(B, H, tokens, E)).astype("float32")
        n, slopes = np.arange(5, 5 + tokens), rng.normal(size=H).astype("float32")
        gate = rng.normal(size=(H, tokens)).astype("float32")
        with_heads_at_3 = np.moveaxis(np.empty([q.shape[i] for i in axes]), head_axis, -3)
        is_per_query = with_heads_at_3.shape[-2] == tokens
        factors = slopes[:, None] * np.log(n) + gate * is_per_query
        intercept = laws.per_query(backend.array(gate)) if is_per_query else 0.0
        law = laws.AffineLog(backend.array(slopes), intercept)
        n = np.broadcast_to(n, (B, H, tokens)).transpose([i for i in axes if i < 3])
        for axis in (head_axis, head_axis - 4):
            moved = backend.array(np.transpose(q, axes))
            scaled = it.scale_queries(moved, backend.array(n), law=law, head_axis=axis)
            expected = np.transpose(q * factors[..., None], axes)
            backend.assert_close(scaled, expected, rtol=1e-5, atol=1e-5)


class TestLongSums:
    """Rounding errors do not add up in sums of many numbers of one sign."""

    @pytest.mark.parametrize("top", [0.0, 0.3567])
    def test_of_keys(self, backend, top):
        n = 50_000
        key = np.zeros((n, 1), "float32")
        key[0] = top  # so that the other weights, relative to the maximum, are 1 or 0.7
        q, k = backend.array(np.ones((1, 1), "float32")), backend.array(key)
        v = backend.array(np.ones((n, 2), "float32"))
        for options in ({}, {"implementation": "generic"}):
            if options or backend.library != "torch":  # PyTorch's own kernel has errors of 1e-4 here
                out = it.attention(q, k, v, law=None, **options)
                backend.assert_close(out, np.ones((1, 2)), rtol=2e-5)
            state = it.attention_state(q, k, v, law=None, **options)
            backend.assert_close(state.output(), np.ones((1, 2)), rtol=2e-5)
            h = it.attention_entropy(q, k, law=None, **options)
            backend.assert_close(h, np.asarray([np.log(n)]), rtol=1e-5)

    @pytest.mark.parametrize("heads", [None, (2, 4, 2), (1, 3, 3)])
    def test_split_over_keys(self, backend, rng, heads):
        n, rows = 1100, 5
        batch, groups = ((), ()) if heads is None else (heads[:2], (heads[0], heads[2]))
        shapes = ((*batch, rows, 3), (*groups, n, 3), (*groups, n, 2))
        q, k, v = (rng.normal(size=shape).astype("float32") for shape in shapes)
        expected = oracles.attention(q, k, v, factor=oracles.log_length(n)).output
        arrays, options = [backend.array(x) for x in (q, k, v)], {"enable_gqa": heads is not None}
        backend.assert_close(it.attention(*arrays, **options), expected, rtol=1e-4, atol=1e-5)
        state = it.attention_state(*arrays, **options)
        backend.assert_close(state.output(), expected, rtol=1e-4, atol=1e-5)

    def test_of_queries(self, backend):
        if backend.library == "strict":
            pytest.skip("it adds as NumPy does, but is not known to")
        n, p = 100_000, np.asarray([1, 2, 3]) / 6
        q = backend.array(np.ones((n, 1), "float32"))
        k = backend.array(np.log(p)[:, None].astype("float32"))
        received = it.AttentionDistribution(q, k, law=None, scale=1.0).received()
        backend.assert_close(received, n * p, rtol=2e-5)
        information = it.AttentionDistribution(q, k, law=None, scale=1.0).information()
        backend.assert_close(information, np.zeros(()), atol=1e-5)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: it.attention(q, k, v, is_causal=True),
        lambda q, k, v: it.attention_entropy(q, k, mask=masks.window(300) | masks.padding(4), order=2),
        lambda q, k, v: it.AttentionDistribution(q, k).information(),
        lambda q, k, v: it.AttentionDistribution(q, k).statistics(),
        lambda q, k, v: it.AttentionDistribution(q, k, mask=masks.window(300)).received(),
    ],
)
def test_never_forms_the_weights(call):
    n = 8192
    q, k, v = np.random.default_rng(0).normal(size=(3, n, 4)).astype("float32")
    tracemalloc.start()
    call(q, k, v)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < n * n * 4 / 8


def _float(x, dtype):
    return dtype if np.asarray(x).dtype.kind == "f" else None


class TestLaws:
    """Properties that hold whatever the numbers are."""

    @pytest.mark.usefixtures("tiny_tiles")
    def test_permutations(self, backend, rng):
        # Equivariant in the queries, invariant for a joint permutation of keys and values.
        q, k, v = (x[0] for x in _data(rng, "float32"))
        rows, columns = rng.permutation(L), rng.permutation(S)
        out = it.attention(*[backend.array(x) for x in (q, k, v)])
        permuted = [backend.array(x) for x in (q[:, rows], k[:, columns], v[:, columns])]
        expected = backend.numpy(out)[:, rows]
        backend.assert_close(it.attention(*permuted), expected, rtol=1e-5, atol=1e-6)

    def test_shift_of_the_logits(self, backend, rng):
        q, k, v = (backend.array(x) for x in _data(rng, "float32"))
        bias = backend.array(np.full((1, 1), 1e4), "float32")
        plain = it.attention_state(q, k, v)
        moved = it.attention_state(q, k, v, bias=bias)
        # Rounding of the logits themselves, at an offset of 1e4, is 1e-3.
        backend.assert_close(moved.entropy(), plain.entropy(), atol=5e-3)
        backend.assert_close(moved.output(), plain.output(), atol=5e-3)

    @pytest.mark.usefixtures("tiny_tiles")
    def test_decode_equals_prefill(self, backend, rng):
        q, k, v = (x[0] for x in _data(rng, "float32", n_keys=L))
        arrays = [backend.array(x) for x in (q, k, v)]
        prefill = it.attention(*arrays, is_causal=True)
        for t in range(L):
            step = [backend.array(x) for x in (q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1])]
            decoded = it.attention(*step, is_causal=True)
            expected = prefill[:, t : t + 1, :]
            backend.assert_close(decoded, expected, rtol=1e-5, atol=1e-6)

    def test_left_padding_changes_nothing(self, backend, rng):
        q, k, v = (x[0] for x in _data(rng, "float32", n_keys=L))
        short = [backend.array(x) for x in (q, k, v)]
        padded = [
            backend.array(np.concatenate((np.full_like(x[:, :3], np.nan), x), 1)) for x in (q, k, v)
        ]
        expected = it.attention(*short, is_causal=True)
        out = it.attention(*padded, is_causal=True, mask=masks.padding(L, side="left"))
        backend.assert_close(out[:, 3:, :], expected, rtol=1e-5, atol=1e-6)
        backend.assert_close(out[:, :3, :], np.zeros((H, 3, EV)))

    def test_packed_equals_separate(self, backend, rng):
        q, k, v = (x[0] for x in _data(rng, "float32", n_keys=L))
        ids = np.array([0, 0, 0, 1, 1, 1, 1])
        packed = it.attention(
            *[backend.array(x) for x in (q, k, v)],
            mask=masks.segments(backend.array(ids)) & masks.causal(),
        )
        for segment in (slice(0, 3), slice(3, 7)):
            alone = [backend.array(x[:, segment]) for x in (q, k, v)]
            expected = it.attention(*alone, is_causal=True)
            backend.assert_close(packed[:, segment, :], expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("n", [1, 512])
    def test_lengths_of_factor_0_and_1(self, backend, rng, n):
        q, k, v = (backend.array(x) for x in _data(rng, "float32"))
        out = it.attention(q, k, v, n_keys=n)
        # ln 1 = 0: uniform over the keys
        expected = it.attention(q if n == 512 else q * 0, k, v, law=None)
        backend.assert_close(out, expected, rtol=1e-6)


@given(
    n_queries=st.integers(0, 6), n_keys=st.integers(0, 9), e=st.integers(1, 4),
    batch=st.sampled_from([(), (1,), (2,), (2, 3)]), data=st.data(),
)  # fmt: skip
@pytest.mark.float64
def test_any_shape_and_mask(backend, tiny_tiles, n_queries, n_keys, e, batch, data):
    if backend.library == "jax":
        pytest.skip("each shape would be compiled; the other backends run the same code")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    q, k, v = (rng.normal(size=(*batch, n, e)) for n in (n_queries, n_keys, n_keys))
    k = k if data.draw(st.booleans()) else k[(0,) * len(batch)]
    left, right = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 3))
    visible = rng.random((n_queries, n_keys)) < 0.7
    both = visible & oracles.band(n_queries, n_keys, left, right)
    out = it.attention_state(
        *[backend.array(x) for x in (q, k, v)],
        mask=masks.window(left, right) & backend.array(visible),
    )
    if n_keys == 0:
        expected = np.zeros((*batch, n_queries, e))
        h = np.zeros((*batch, n_queries))
    else:
        factor = oracles.log_length(both.sum(-1))
        result = oracles.attention(q, k, v, visible=both, factor=factor)
        expected, h = result.output, result.entropy()
    close = TOLERANCE["float64" if backend.float64 else "float32"]
    backend.assert_close(out.output(), expected, **close)
    backend.assert_close(out.entropy(), h, **close)


class TestSinks:
    """Logits that take weight and have no value."""

    @pytest.fixture
    def qkv(self, backend, rng):
        return [backend.array(x, "float32") for x in _data(rng, "float32")]

    def test_is_a_key_of_value_0(self, backend, rng):
        q, k, v = _data(rng, backend.dtypes[-1])
        bias = np.zeros((H, 1, S + 1), q.dtype)
        bias[:, 0, -1] = sinks = rng.normal(size=H).astype(q.dtype)
        longer = [np.concatenate((x, np.zeros_like(x[..., :1, :])), axis=-2) for x in (k, v)]
        q, k, v, k_longer, v_longer, bias, sinks = (
            backend.array(x) for x in (q, k, v, *longer, bias, sinks)
        )
        close, options = TOLERANCE[backend.dtypes[-1]], {"n_keys": S}
        expected = it.attention_state(q, k_longer, v_longer, bias=bias, **options)
        state = it.attention_state(q, k, v, sinks=sinks, **options)
        backend.assert_close(state.output(), expected.output(), **close)
        backend.assert_close(state.log_normalizer(), expected.log_normalizer(), **close)
        for order in (0, 0.9, 1, 2, np.inf):
            h = it.attention_entropy(q, k_longer, bias=bias, order=order, **options)
            got = it.attention_entropy(q, k, sinks=sinks, order=order, **options)
            backend.assert_close(got, h, **close)
        information = it.AttentionDistribution(q, k_longer, bias=bias, **options).information()
        got = it.AttentionDistribution(q, k, sinks=sinks, **options).information()
        backend.assert_close(got, information, **close)

    def test_takes_all_where_no_key_is_seen(self, backend, qkv):
        q, k, v = qkv
        sinks = backend.array(np.asarray([1.0, -2.0, 0.0, 30.0]), "float32")
        seen = np.broadcast_to([[1.0], [-2.0], [0.0], [30.0]], (B, H, L))
        nothing = backend.array(np.zeros((L, S), bool))
        for keys, values, mask in ((k, v, nothing), (k[..., :0, :], v[..., :0, :], None)):
            state = it.attention_state(q, keys, values, mask=mask, sinks=sinks)
            backend.assert_close(state.log_normalizer(), seen)
            backend.assert_close(state.entropy(), np.zeros((B, H, L)))
            backend.assert_close(state.output(), np.zeros((B, H, L, EV)))
            out = it.attention(q, keys, values, mask=mask, sinks=sinks)
            backend.assert_close(out, np.zeros((B, H, L, EV)))
            h = it.attention_entropy(q, keys, mask=mask, sinks=sinks, normalized=True)
            backend.assert_close(h, np.zeros((B, H, L)))
            statistics = it.AttentionDistribution(q, keys, mask=mask, sinks=sinks).statistics()
            backend.assert_close(statistics.mean, seen)
            backend.assert_close(statistics.variance, np.zeros((B, H, L)))
            received = it.AttentionDistribution(q, keys, mask=mask, sinks=sinks).received()
            backend.assert_close(received, np.zeros((B, H, keys.shape[-2])))

    @pytest.mark.usefixtures("tiny_tiles")
    def test_information_ignores_queries_that_see_no_key(self, backend, qkv):
        q, k, _ = qkv
        sinks = backend.array(np.asarray([1.0, -2.0, 0.0, 30.0]), "float32")
        seen = np.broadcast_to(np.arange(L)[:, None] >= 3, (L, S))
        got = it.AttentionDistribution(q, k, mask=backend.array(seen), sinks=sinks).information()
        expected = it.AttentionDistribution(q[..., 3:, :], k, sinks=sinks).information()
        backend.assert_close(got, expected, rtol=1e-4, atol=1e-6)

    def test_off(self, backend, qkv):
        q, k, v = qkv
        off = backend.array(np.asarray(-np.inf), "float32")
        for call in (
            lambda **sinks: it.attention(q, k, v, is_causal=True, **sinks),
            lambda **sinks: it.AttentionDistribution(q, k, is_causal=True, **sinks).weights(),
            lambda **sinks: it.attention_entropy(q, k, order=0.5, is_causal=True, **sinks),
            lambda **sinks: it.AttentionDistribution(q, k, is_causal=True, **sinks).information(),
            lambda **sinks: (
                it.AttentionDistribution(q, k, is_causal=True, **sinks).statistics().variance
            ),
        ):
            backend.assert_close(call(sinks=off), call(), rtol=1e-5, atol=1e-6)

    def test_uniform_over_keys_and_sink_is_normalized_to_1(self, backend):
        q, k = backend.array(np.zeros((3, 4)), "float32"), backend.array(np.zeros((9, 4)), "float32")
        sink = backend.array(np.asarray(0.0), "float32")
        for options in ({}, {"order": 2}, {"order": 0.5, "family": "tsallis"}):
            h = it.attention_entropy(q, k, sinks=sink, normalized=True, **options)
            backend.assert_close(h, np.ones(3), rtol=1e-5)
        backend.assert_close(it.attention_entropy(q, k, sinks=sink), np.full(3, np.log(10)), rtol=1e-6)

    def test_is_not_scaled_nor_counted(self, backend, qkv):
        q, k, v = qkv
        sinks = backend.array(np.full(H, 2.0), "float32")
        options = {"sinks": sinks, "softcap": 1.0, "law": laws.LogLength(4), "scale": 0.1}
        state = it.attention_state(q, k, v, **options)
        backend.assert_close(state.n_seen, np.full((B, H, L), float(S)))
        backend.assert_close(state.n_keys, np.full((B, H, L), float(S)))
        without = it.attention_state(q, k, v, **(options | {"sinks": None}))
        expected = np.logaddexp(backend.numpy(without.log_normalizer()), 2.0)
        backend.assert_close(state.log_normalizer(), expected, rtol=1e-5)

    def test_in_one_of_the_states_that_are_merged(self, backend, qkv):
        q, k, v = qkv
        sinks = backend.array(np.arange(H), "float32")
        whole = it.attention_state(q, k, v, sinks=sinks)
        parts = [
            it.attention_state(q, k[..., :4, :], v[..., :4, :], n_keys=S, sinks=sinks),
            it.attention_state(q, k[..., 4:, :], v[..., 4:, :], n_keys=S),
        ]
        merged = it.merge_states(parts)
        backend.assert_close(merged.output(), whole.output(), rtol=1e-4, atol=1e-6)
        backend.assert_close(merged.entropy(), whole.entropy(), rtol=1e-4)

    def test_dtypes(self, backend, qkv):
        q, k, v = qkv
        sinks = np.asarray([0.0, 1.0, 2.0, 3.0])
        expected = it.attention(q, k, v, sinks=backend.array(sinks, "float32"))
        for dtype in (*backend.dtypes, *([backend.half] if backend.half else [])):
            out = it.attention(q, k, v, sinks=backend.array(sinks, dtype))
            backend.assert_close(out, expected)  # these numbers are exact in all of them
        if backend.half:
            half = [backend.xp.astype(x, backend.array(0, backend.half).dtype) for x in (q, k, v)]
            out = it.attention(*half, sinks=backend.array(sinks, backend.half))
            assert out.dtype == half[0].dtype
            out = backend.xp.astype(out, expected.dtype)
            backend.assert_close(out, expected, rtol=2e-2, atol=4e-3)

    def test_backend(self, backend, qkv):
        q, k, v = qkv
        sinks = backend.array(np.zeros(H), "float32")
        of_state = it.AttentionDistribution(q, k).backends(v, order=1.0)
        assert it.AttentionDistribution(q, k, sinks=sinks).backends(v) == of_state


class TestEdges:
    def test_no_keys(self, backend):
        q = backend.array(np.ones((2, 3, 4)), "float32")
        k, v = (backend.array(np.ones((2, 0, e)), "float32") for e in (4, 5))
        state = it.attention_state(q, k, v)
        backend.assert_close(it.attention(q, k, v), np.zeros((2, 3, 5)))
        backend.assert_close(state.log_normalizer(), np.full((2, 3), -np.inf))
        backend.assert_close(it.attention_entropy(q, k), np.zeros((2, 3)))
        backend.assert_close(it.AttentionDistribution(q, k).information(), np.zeros(2))
        assert it.AttentionDistribution(q, k).weights().shape == (2, 3, 0)
        assert it.AttentionDistribution(q, k).received().shape == (2, 0)
        for name, x in it.AttentionDistribution(q, k).statistics()._asdict().items():
            empty = -np.inf if name in ("maximum", "log_normalizer") else 0.0
            backend.assert_close(x, np.full((2, 3), empty))

    def test_no_queries_no_batch(self, backend):
        q = backend.array(np.ones((0, 4)), "float32")
        k = backend.array(np.ones((5, 4)), "float32")
        assert it.attention(q, k, k).shape == (0, 4)
        assert it.attention_entropy(q, k, is_causal=True).shape == (0,)
        assert it.AttentionDistribution(q, k).information().shape == ()
        backend.assert_close(it.AttentionDistribution(q, k).received(), np.zeros(5))
        assert it.AttentionDistribution(q, k).statistics().variance.shape == (0,)
        q, k = (backend.array(np.ones((0, n, 4)), "float32") for n in (3, 5))
        assert it.attention(q, k, k, is_causal=True).shape == (0, 3, 4)

    @pytest.mark.parametrize("implementation", [None, "generic"])
    def test_grouped_heads_without_heads(self, backend, implementation):
        q, k, v = (backend.array(np.ones((2, 0, n, 4)), "float32") for n in (3, 5, 5))
        law = laws.AffineLog(backend.array(np.ones(0), "float32"))
        options = {"law": law, "enable_gqa": True, "is_causal": True}
        for out in (
            it.attention(q, k, v, implementation=implementation, **options),
            it.attention_state(q, k, v, implementation=implementation, **options).output(),
        ):
            assert out.shape == (2, 0, 3, 4)
        h = it.attention_entropy(q, k, implementation=implementation, **options)
        assert h.shape == (2, 0, 3)
        assert it.AttentionDistribution(q, k, **options).weights().shape == (2, 0, 3, 5)
        assert it.AttentionDistribution(q, k, **options).statistics().variance.shape == (2, 0, 3)
        assert it.AttentionDistribution(q, k, **options).received().shape == (2, 0, 5)

    def test_law_of_no_queries(self, backend):
        q, k = (backend.array(np.ones((2, n, 4)), "float32") for n in (0, 5))
        law = laws.AffineLog(0.5, laws.per_query(backend.array(np.ones((2, 0)), "float32")))
        assert it.attention(q, k, k, law=law).shape == (2, 0, 4)
        assert it.scale_queries(q, 5, law=law).shape == (2, 0, 4)

    def test_more_queries_than_keys(self, backend):
        # Bottom-right alignment: the first L − S queries see nothing.
        q, k = (backend.array(np.ones((n, 4)), "float32") for n in (5, 2))
        h = it.attention_entropy(q, k, is_causal=True)
        backend.assert_close(h, [0.0, 0.0, 0.0, 0.0, np.log(2)] @ np.eye(5), rtol=1e-6)
        backend.assert_close(it.attention(q, k, k, is_causal=True)[:3, :], np.zeros((3, 4)))

    def test_nothing_visible(self, backend):
        q = backend.array(np.ones((2, 4)), "float32")
        nothing = backend.array(np.zeros((2, 2), bool))
        state = it.attention_state(q, q, q, mask=nothing)
        backend.assert_close(state.output(), np.zeros((2, 4)))
        backend.assert_close(state.entropy(), np.zeros(2))
        backend.assert_close(state.log_normalizer(), np.full(2, -np.inf))
        backend.assert_close(it.AttentionDistribution(q, q, mask=nothing).received(), np.zeros(2))
        for name, x in it.AttentionDistribution(q, q, mask=nothing).statistics()._asdict().items():
            empty = -np.inf if name in ("maximum", "log_normalizer") else 0.0
            backend.assert_close(x, np.full(2, empty))
        for order in (0, 0.9, 2, np.inf):
            h = it.attention_entropy(q, q, mask=nothing, order=order, normalized=True)
            backend.assert_close(h, np.zeros(2))

    @pytest.mark.usefixtures("tiny_tiles")
    @pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("where", ["key", "value", "key and value"])
    def test_hidden_poison_does_not_leak(self, backend, rng, poison, where):
        q, k, v = (x[0] for x in _data(rng, "float32", n_keys=L))
        bad = 4
        q_bad, k_bad, v_bad = q.copy(), k.copy(), v.copy()
        if "key" in where:
            k_bad[:, bad, 0] = poison
        if "value" in where:
            v_bad[:, bad, 1] = poison
        clean = [backend.array(x) for x in (q, k, v)]
        dirty = [backend.array(x) for x in (q_bad, k_bad, v_bad)]
        expected = it.attention_state(*clean, is_causal=True)
        state = it.attention_state(*dirty, is_causal=True)
        for got, want in ((state.output(), expected.output()), (state.entropy(), expected.entropy())):
            got, want = backend.numpy(got), backend.numpy(want)
            np.testing.assert_allclose(got[:, :bad], want[:, :bad], rtol=1e-6)
            assert np.isnan(got[:, bad:]).all()  # and is not swept under the carpet where it is seen

    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": masks.padding(10)}])
    @pytest.mark.parametrize("size", [12, 300])  # PyTorch and NumPy have kernels for many
    def test_nan_in_one_group_reaches_its_own_heads(self, backend, rng, options, size):
        q, k, v = (rng.normal(size=(heads, size, 8)).astype("float32") for heads in (4, 2, 2))
        clean = [backend.array(x) for x in (q, k, v)]
        expected = [backend.numpy(f(*clean)) for f in self._grouped_calls(options)]
        for poisoned in (k, v):
            poisoned[1, 3, 2] = np.nan
        dirty = [backend.array(x) for x in (q, k, v)]
        for call, want in zip(self._grouped_calls(options), expected, strict=True):
            got = backend.numpy(call(*dirty))
            np.testing.assert_allclose(got[:2], want[:2], rtol=1e-5, atol=1e-6)
            assert np.isnan(got[2:, 3:]).all()

    def _grouped_calls(self, options):
        options = {"enable_gqa": True, **options}
        return (
            lambda q, k, v: it.attention(q, k, v, **options),
            lambda q, k, v: it.attention_state(q, k, v, **options).output(),
            lambda q, k, v: it.attention_entropy(q, k, **options),
        )

    def test_visible_nan_without_mask(self, backend, rng):
        q, k, v = (x[0] for x in _data(rng, "float32"))
        k[0, 0, 0] = np.nan
        out = backend.numpy(it.attention(*[backend.array(x) for x in (q, k, v)]))
        assert np.isnan(out[0]).all()
        assert np.isfinite(out[1:]).all()

    @pytest.mark.parametrize("n_keys", [1, 12, 300])
    def test_visible_nan_in_all_rows_of_a_query(self, backend, rng, n_keys):
        q, k, v = (x[0] for x in _data(rng, "float32", n_keys=n_keys))
        q[0, 1] = np.nan
        v[1, :, 0] = 0.0  # as the output of a kernel for a row that sees no key
        out = backend.numpy(it.attention(*[backend.array(x) for x in (q, k, v)]))
        is_nan = np.isnan(out).all(axis=-1)
        assert is_nan[0, 1]
        assert is_nan.sum() == 1
        q[1, 1] = np.nan
        out = backend.numpy(it.attention(*[backend.array(x) for x in (q, k, v)]))
        assert np.isnan(out[1, 1]).all()

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize(
        ("query", "key"), [([1e30, 1e30], [1e30, -1e30]), ([0.0, 1.0], [np.inf, 1.0])]
    )
    def test_logits_that_are_nan_though_no_number_is(self, backend, query, key, is_causal):
        q, k = (backend.array(np.asarray([x, x], "float32")) for x in (query, key))
        v = backend.array(np.asarray([[5.0], [6.0]], "float32"))
        out = backend.numpy(it.attention(q, k, v, law=None, is_causal=is_causal))
        assert np.isnan(out).all()

    @pytest.mark.parametrize("order", [20.0, 1e15, 1e16, 1e300, np.inf])
    def test_normalized_tsallis_entropy_of_large_orders(self, backend, order):
        # 1 − Σ pᵅ, as a share of 1 − n^{1−α}, where α − 1 divides both.
        q = backend.array(np.eye(2))
        keys = backend.array([[0.0, 3000.0], [0.0, 3000.0], [3000.0, 0.0]])
        h = it.attention_entropy(q, keys, order=order, family="tsallis", normalized=True)
        share = (1 - 0.5 ** (order - 1)) / (1 - 3.0 ** (1 - order))
        backend.assert_close(h, np.asarray([0.0, share]))

    def test_half_precision_does_not_overflow(self, backend):
        if backend.half is None:
            pytest.skip("no half precision here")
        n = 2**17
        q, k = (
            backend.array(np.ones((1, 2)), backend.half),
            backend.array(np.ones((n, 2)), backend.half),
        )
        out, h = it.attention(q, k, k), it.attention_entropy(q, k)
        assert out.dtype == q.dtype
        assert h.dtype == backend.xp.float32
        backend.assert_close(out, np.ones((1, 2)), rtol=1e-3)
        backend.assert_close(h, np.full(1, np.log(n)), rtol=1e-6)
        state = it.attention_state(q, k, k)
        assert state.normalizer.dtype == backend.xp.float32

    def test_half_precision_accumulates_in_float32(self, backend, rng):
        if backend.half is None:
            pytest.skip("no half precision here")
        q, k, v = (x.astype(np.float16) for x in _data(rng, "float32"))
        expected = oracles.attention(q, k, v, factor=oracles.log_length(S)).output
        out = it.attention(*[backend.array(x) for x in (q, k, v)])
        # One rounding to float16. The kernels of GPUs also round the weights.
        backend.assert_close(out, expected, rtol=1e-3, atol=5e-4 if backend.is_gpu else 1e-4)

    @pytest.mark.usefixtures("tiny_tiles")
    def test_bias_of_the_lowest_number(self, backend, rng):
        # The additive masks of other libraries: as good as −∞, in every tile.
        q, k, v = (x[0] for x in _data(rng, "float32", n_keys=L))
        visible = oracles.causal(L, L)
        bias = backend.array(np.where(visible, 0.0, np.finfo("float32").min), "float32")
        arrays = [backend.array(x) for x in (q, k, v)]
        expected = oracles.attention(q, k, v, visible=visible)
        state = it.attention_state(*arrays, bias=bias, law=None)
        backend.assert_close(state.entropy(), expected.entropy(), rtol=1e-4, atol=1e-5)
        backend.assert_close(state.output(), expected.output, rtol=1e-4, atol=1e-5)
        for order in (0.8, 2, np.inf):
            h = it.attention_entropy(*arrays[:2], bias=bias, law=None, order=order)
            backend.assert_close(h, oracles.entropy(expected.weights, order), rtol=1e-4, atol=1e-5)

    @pytest.mark.float64
    def test_promotion(self, backend, rng):
        if not backend.float64:
            pytest.skip("no float64 here")
        q, k, v = _data(rng, "float32")
        out = it.attention(backend.array(q), backend.array(k, "float64"), backend.array(v))
        assert out.dtype == backend.xp.float64

    def test_minus_infinity_bias_hides_everything(self, backend):
        q = backend.array(np.ones((2, 4)), "float32")
        bias = backend.array(np.full((2, 2), -np.inf), "float32")
        backend.assert_close(it.attention(q, q, q, bias=bias), np.zeros((2, 4)))


def test_empty_batch_with_a_mask(backend):
    x = backend.array(np.ones((0, 2, 6, 4), "float32"))
    mask = backend.array(np.tri(6, dtype=bool))
    assert it.attention(x, x, x, mask=mask).shape == (0, 2, 6, 4)
    assert it.attention_entropy(x, x, mask=mask).shape == (0, 2, 6)


class TestErrors:
    """Each message names the argument, says what it must be and what came."""

    @pytest.fixture
    def a(self, backend):
        return lambda *shape, dtype="float32": backend.array(np.ones(shape), dtype)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"scale": "1"}, TypeError, r"`scale` must be a real number, got str\."),
            ({"scale": float("nan")}, ValueError, r"`scale` must be finite, got nan\."),
            (
                {"scale": np.ones(3)},
                TypeError,
                r"`scale` .* got ndarray: .* `scale=1\.0, law=laws\.scaled\(law, scale\)`",
            ),
            (
                {"scale": np.ones(3), "law": None},
                TypeError,
                r"`scale` .* got ndarray: .* `scale=1\.0, law=laws\.Constant\(scale\)`",
            ),
            ({"softcap": 0.0}, ValueError, r"`softcap` must be above 0, got 0\.0\."),
            ({"softcap": math.inf}, ValueError, r"`softcap` must be finite, got inf\."),
            (
                {"softcap": 1e300},
                ValueError,
                r"`softcap` must be between .* \(None is no cap\), got 1e\+300\.",
            ),
            (
                {"law": 512},
                TypeError,
                r"`law` must be .* or None \(a factor is `laws.Constant.*got int\.",
            ),
            ({"law": "su"}, TypeError, r"`law` must be .* or None \(`laws.preset` .*\), got str\."),
            (
                {"mask": masks.causal},
                TypeError,
                r"`mask` must be .* such as masks.causal\(\), got causal\.",
            ),
            ({"n_keys": -1}, ValueError, r"`n_keys` must be at least 0, got -1\."),
            ({"n_keys": 1.5}, TypeError, r"`n_keys` must be an integer or an array, got float\."),
            ({"implementation": "fast"}, ValueError, r"`implementation` must be None or 'generic' or"),
            (
                {"implementation": "triton", "mask": masks.window(1) | masks.padding(2)},
                ValueError,
                r"must be None.*'generic' for this call",
            ),
            ({"sinks": 0.0}, TypeError, r"`sinks` must be an array .* got float\."),
            ({"mask": [True]}, TypeError, r"`mask` must be a boolean array or a mask .* got list\."),
        ],
    )
    def test_options(self, a, options, error, message):
        with pytest.raises(error, match=message):
            it.attention(a(3, 4), a(5, 4), a(5, 2), **options)

    @pytest.mark.parametrize("law", [None, laws.LogLength(8)])
    def test_recommended_in_place_of_an_array_as_scale(self, backend, rng, law):
        q, k, v = (x[0] for x in _data(rng, "float32"))
        numbers = rng.uniform(0.2, 0.5, size=H).astype("float32")
        scale = backend.array(numbers)
        by_law = laws.Constant(scale) if law is None else laws.scaled(law, scale)
        arrays = [backend.array(x) for x in (q, k, v)]
        got = it.attention(*arrays, scale=1.0, law=by_law)
        for head in range(H):
            of_head = [x[head, ...] for x in arrays]
            expected = it.attention(*of_head, scale=float(numbers[head]), law=law)
            backend.assert_close(got[head, ...], expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(
        ("shapes", "options", "message"),
        [
            (
                ((3, 4), (5, 6), (5, 2)),
                {},
                r"`key` must have the last dimension of `query`, 4, got 6",
            ),
            (((3, 4), (5, 4), (6, 2)), {}, r"`value` must have as many rows as `key`, 5, got 6"),
            (((4,), (5, 4), (5, 2)), {}, r"`query` must have at least 2 dimensions, got 1"),
            (((2, 3, 4), (3, 5, 4), (3, 5, 2)), {}, r"`key` must broadcast with \(2,\) .* got \(3,\)"),
            (((4, 3, 4), (3, 5, 4), (3, 5, 2)), {"enable_gqa": True}, r"`key` .* divides the 4"),
            (((0, 3, 4), (2, 5, 4), (2, 5, 2)), {"enable_gqa": True}, r"`key` .* divides the 0"),
            (
                ((4, 3, 4), (2, 5, 4), (2, 5, 2)),
                {},
                r"`key` must have the 4 heads .* or `enable_gqa` be true, got 2",
            ),
            (((4, 3, 4), (2, 5, 4), (4, 5, 2)), {"enable_gqa": True}, r"`value` must have the 2 heads"),
            (
                ((4, 3, 4), (4, 5, 4), (2, 5, 2)),
                {},
                r"`value` must have the 4 heads .* or `enable_gqa` be true, got 2",
            ),
            (
                ((3, 4), (5, 4), (5, 2)),
                {"enable_gqa": True},
                r"`query` must have at least 3 dimensions",
            ),
        ],
    )
    def test_shapes(self, a, shapes, options, message):
        with pytest.raises(ValueError, match=message):
            it.attention(*[a(*shape) for shape in shapes], **options)

    @pytest.mark.parametrize("dtype", ["int64", "bool", "complex64"])
    @pytest.mark.parametrize("position", [0, 1, 2])
    def test_kinds(self, a, backend, dtype, position):
        arrays = [a(3, 4), a(5, 4), a(5, 4)]
        arrays[position] = a(*arrays[position].shape, dtype=dtype)
        name = ("query", "key", "value")[position]
        with pytest.raises(TypeError, match=f"`{name}` must have a real floating-point dtype, got"):
            it.attention(*arrays)

    def test_masks(self, a, backend):
        arrays = a(3, 4), a(5, 4), a(5, 2)
        with pytest.raises(TypeError, match=r"`mask` must be boolean .* got .*float32"):
            it.attention(*arrays, mask=a(3, 5))
        with pytest.raises(ValueError, match=r"`mask` must have a shape broadcastable to \(3, 5\)"):
            it.attention(*arrays, mask=a(5, 3, dtype="bool"))
        with pytest.raises(ValueError, match=r"`mask` .* got \(2, 3, 5\)"):
            it.attention(*arrays, mask=a(2, 3, 5, dtype="bool"))
        with pytest.raises(ValueError, match=r"`bias` must have a shape broadcastable to \(3, 5\)"):
            it.attention(*arrays, bias=a(4, 5))
        with pytest.raises(TypeError, match=r"`bias` must have a real floating"):
            it.attention(*arrays, bias=a(3, 5, dtype="bool"))
        with pytest.raises(ValueError, match=r"`n_keys` must have a shape broadcastable to \(3,\)"):
            it.attention(*arrays, n_keys=a(4, dtype="int32"))
        with pytest.raises(TypeError, match=r"`n_keys` must have an integer or floating-point"):
            it.attention(*arrays, n_keys=a(3, dtype="bool"))
        with pytest.raises(ValueError, match=r"`sinks` .* broadcastable to \(\), got \(1,\)"):
            it.attention(*arrays, sinks=a(1))
        with pytest.raises(ValueError, match=r"`sinks` .* broadcastable to \(2, 3\), got \(3, 1\)"):
            it.AttentionDistribution(a(2, 3, 4, 4), a(3, 5, 4), sinks=a(3, 1)).weights()
        with pytest.raises(TypeError, match=r"`sinks` must have a real floating"):
            it.AttentionDistribution(*arrays[:2], sinks=a(dtype="int32")).statistics()
        with pytest.raises(ValueError, match=r"`law` must have a shape broadcastable to \(3,\)"):
            it.attention(*arrays, law=laws.AffineLog(a(2)))

    def test_lists(self, a):
        with pytest.raises(
            TypeError, match=r"`query` must be an array .* got list: convert it with `asarray`"
        ):
            it.attention([[1.0]], [[1.0]], [[1.0]])

    @pytest.mark.parametrize("number", [-1, -0.5, np.nan])
    def test_numbers_of_keys(self, backend, a, number):
        n_keys = backend.array([5, number, 5], "int32" if number == -1 else "float32")
        if backend.library == "strict" or backend.is_gpu:
            pytest.skip("numbers are read only where that is known to cost nothing")
        for call in (
            lambda: it.attention(a(3, 4), a(5, 4), a(5, 4), n_keys=n_keys),
            lambda: it.attention_entropy(a(3, 4), a(5, 4), n_keys=n_keys),
            lambda: it.scale_queries(a(3, 4), n_keys),
        ):
            with pytest.raises(ValueError, match="`n_keys` must be at least 0, got an array with"):
                call()

    def test_names_of_other_libraries(self, a):
        arrays = a(3, 4), a(5, 4), a(5, 2)
        with pytest.raises(
            TypeError, match=r"attention.. has no argument `attn_mask`: here it is `mask`"
        ):
            it.attention(*arrays, attn_mask=a(3, 5, dtype="bool"))
        with pytest.raises(TypeError, match="no argument `dropout_p`, and no equivalent"):
            it.attention(*arrays, dropout_p=0.1)
        with pytest.raises(TypeError, match="no argument `s_aux`: here it is `sinks`"):
            it.attention(*arrays, s_aux=a(1))
        with pytest.raises(TypeError, match="no argument `scaling`: here it is `scale`"):
            it.attention_entropy(*arrays[:2], scaling=0.1)

    def test_orders(self, a):
        for order in (-0.1, float("nan")):
            with pytest.raises(ValueError, match=f"`order` must be at least 0, got {order}"):
                it.attention_entropy(a(3, 4), a(5, 4), order=order)
        with pytest.raises(TypeError, match="`order` must be a real number, got str"):
            it.attention_entropy(a(3, 4), a(5, 4), order="2")
        with pytest.raises(ValueError, match="`family` must be 'renyi' or 'tsallis', got 'shannon'"):
            it.attention_entropy(a(3, 4), a(5, 4), family="shannon")

    def test_scale_queries(self, a):
        with pytest.raises(
            TypeError, match=r"`law` must be a law of isentropic\.laws or None \(.*got str"
        ):
            it.scale_queries(a(3, 4), 5, law="su")

    def test_axis_of_heads(self, backend, a):
        law = laws.AffineLog(backend.array(np.arange(1.0, 5.0), "float32"))
        of_tokens = backend.array([[1], [2], [3], [4]])
        for it_is in (law, laws.scaled(laws.LogLength(), law.slope)):
            with pytest.raises(
                ValueError, match=r"`head_axis` must be given where .* -2 for \(\.\.\., to"
            ):
                it.scale_queries(a(4, 4, 8), of_tokens, law=it_is)
        # One number along axis -2 of the query, several of the law: nothing fits twice.
        it.scale_queries(a(4, 4, 8), of_tokens)
        it.scale_queries(a(4, 1, 8), of_tokens, law=law)
        it.scale_queries(a(4, 4, 8), of_tokens, law=law, head_axis=-3)
        for n in (of_tokens[:3, ...], 5):
            with pytest.raises(
                ValueError, match=r"must .*: pass `head_axis=-2` for a query \(\.\.\., to"
            ):
                it.scale_queries(a(3, 4, 8), n, law=law)
        with pytest.raises(ValueError, match=r"`head_axis` must be in \[-3, 3\), got 3"):
            it.scale_queries(a(3, 4, 8), 5, law=law, head_axis=3)
        with pytest.raises(ValueError, match=r"`head_axis` must not be the last axis, .* got -1"):
            it.scale_queries(a(3, 4, 8), 5, law=law, head_axis=-1)
        with pytest.raises(TypeError, match="`head_axis` must be an integer, got float"):
            it.scale_queries(a(3, 4, 8), 5, law=law, head_axis=1.0)
        with pytest.raises(ValueError, match="`query` must have at least 3 dimensions, got 2"):
            it.scale_queries(a(3, 4), 5, head_axis=0)

    def test_not_arrays(self, a):
        q, k, v = a(3, 4), a(5, 4), a(5, 2)
        for name, call in {
            "query": lambda: it.attention(None, k, v),
            "key": lambda: it.attention_entropy(q, None),
            "value": lambda: it.attention(q, k, None),
            "bias": lambda: it.attention(q, k, v, bias=0.5),
            "w_q": lambda: it.layers.additive_attention(q, k, v, None, k, q),
            "w_o": lambda: it.layers.multi_head_attention(q, q, q, q, q, q, None, num_heads=1),
            "x": lambda: it.layers.rotary(None),
            "p": lambda: it.entropy((q,)),
            "logits": lambda: it.entropy_from_logits(()),
            "entropy": lambda: it.entropy_penalty(None, 1.0),
            "ids": lambda: masks.segments(None),
            "mask": lambda: masks.causal() & None,
        }.items():
            with pytest.raises(TypeError, match=f"`{name}` must be an? (boolean )?array"):
                call()
        with pytest.raises(
            TypeError, match=r"`query` must be an array .* got numpy\.ma.*MaskedArray\."
        ):
            it.attention(np.ma.ones((3, 4)), k, v)

    @pytest.mark.host
    @pytest.mark.parametrize("has_namespace", [False, True])
    def test_arrays_of_libraries_outside_the_standard(self, has_namespace):
        """As TensorFlow's, and others whose namespace is not that of the standard."""
        x = np.ones((3, 4))
        members = {name: getattr(x, name) for name in ("ndim", "shape", "dtype", "__array__")}
        if has_namespace:
            members["__array_namespace__"] = lambda self, api_version=None: types.ModuleType(
                "tensorflow"
            )
        foreign = type("array", (), {"__module__": "tensorflow"} | members)()
        for name, call in {
            "query": lambda: it.attention(foreign, foreign, foreign),
            "value": lambda: it.attention(x, x, foreign),
            "bias": lambda: it.attention(x, x, x, bias=foreign),
            "mask": lambda: it.attention(x, x, x, mask=foreign),
            "lengths": lambda: masks.padding(foreign),
            "slope": lambda: laws.AffineLog(foreign),
            "n": lambda: laws.LogLength(512)(foreign),
            "logits": lambda: it.factor_for_entropy(foreign, 1.0),
            "x": lambda: it.jl.hadamard_transform(foreign),
            "like": lambda: it.jl.gaussian_projection(4, 2, like=foreign),
        }.items():
            message = (
                rf"^`{name}` must be an array \(NumPy, CuPy, PyTorch, JAX or another library of the array "
                r"API standard\), got tensorflow\.array: convert it with `np\.asarray`\.$"
            )
            with pytest.raises(TypeError, match=message):
                call()

    def test_integers_of_numpy(self, a):
        q, k = a(3, 4), a(5, 4)
        n = np.int64(4)
        it.attention(q, k, k, n_keys=n, mask=masks.padding(n) & masks.window(n))
        it.entropy(q, axis=np.int64(0))
        it.layers.multi_head_attention(q, q, q, *[a(4, 4)] * 4, num_heads=n)

    def test_mixed_libraries(self, a, backend):
        import array_api_strict

        other = np.ones((5, 4), np.float32)
        other = array_api_strict.asarray(other) if backend.library == "numpy" else other
        with pytest.raises(TypeError, match=r"`key` must be an array of the library of `query` \("):
            it.attention(a(3, 4), other, a(5, 2))
        with pytest.raises(TypeError, match=r"`query` must be an array .* got list"):
            it.attention([[1.0]], a(5, 4), a(5, 2))

    def test_mixed_devices(self, a, backend):
        if backend.library == "strict":
            other = backend.xp.ones(
                (5, 4), dtype=backend.xp.float32, device=backend.xp.Device("device2")
            )
        elif backend.library == "torch":
            other = backend.xp.ones((5, 4), dtype=backend.xp.float32, device="meta")
        else:
            pytest.skip("one device here (two JAX devices: see test_contract)")
        with pytest.raises(ValueError, match="`key` must be on the device of `query`"):
            it.attention(a(3, 4), other, a(5, 2))
        with pytest.raises(ValueError, match="`bias` must be on the device of `query`"):
            it.attention(a(3, 4), a(5, 4), a(5, 2), bias=other[:1, :1])


def test_a_scale_for_each_head_is_what_the_error_recommends(backend, rng):
    q, k, v = (backend.array(x) for x in rng.normal(size=(3, 2, 5, 4)))
    scale = backend.array([0.3, 0.7])
    with pytest.raises(TypeError, match=r"`scale` must be .*`scale=1\.0, law=laws\.Constant\(scale\)`"):
        it.attention(q, k, v, scale=scale, law=None)
    out = it.attention(q, k, v, scale=1.0, law=it.laws.Constant(scale))
    for i, x in enumerate((0.3, 0.7)):
        expected = it.attention(q[i, ...], k[i, ...], v[i, ...], scale=x, law=None)
        backend.assert_close(out[i, ...], expected, rtol=1e-5, atol=1e-6)

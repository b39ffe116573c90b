"""States of parts of the keys merge to the state of all, also those from kernels elsewhere."""

import itertools
import math
from functools import reduce

import numpy as np
import oracles
import pytest
import scipy.special

import isentropic as it
from isentropic import laws, masks
from isentropic._attention import tile
from isentropic._ops import Ops

N = 12


@pytest.fixture
def qkv(rng):
    q, k, v = (rng.normal(size=(2, n, 4)) for n in (5, N, N))
    return q * 3, k, v


def _parts(backend, qkv, cuts):
    q, k, v = qkv
    edges = [0, *cuts, N]
    return [
        it.attention_state(
            backend.array(q), backend.array(k[:, a:b]), backend.array(v[:, a:b]), n_keys=N
        )
        for a, b in itertools.pairwise(edges)
    ]


def _assert_same(backend, a, b, **close):
    close = close or {"rtol": 2e-5, "atol": 1e-5}
    for x, y in zip(a, b, strict=True):
        backend.assert_close(x, y, **close)


class TestMerge:
    @pytest.mark.parametrize("cuts", [(6,), (1, 2, 3), (3, 3, 8), (0,), (12,), tuple(range(1, 12))])
    def test_any_split_is_the_whole(self, backend, qkv, cuts):
        expected = oracles.attention(*qkv, factor=oracles.log_length(N))
        whole = it.merge_states(*_parts(backend, qkv, cuts))
        close = {"rtol": 1e-4, "atol": 1e-5}
        backend.assert_close(whole.output(), expected.output, **close)
        backend.assert_close(whole.entropy(), expected.entropy(), **close)
        backend.assert_close(whole.log_normalizer(), expected.log_normalizer, **close)

    def test_associative_and_commutative(self, backend, qkv):
        a, b, c = _parts(backend, qkv, (3, 7))
        merge = it.merge_states
        _assert_same(backend, merge(merge(a, b), c), merge(a, merge(b, c)))
        _assert_same(backend, merge(a, b), merge(b, a))
        _assert_same(backend, merge(a, b, c), merge(merge(a, b), c))

    def test_identity(self, backend, qkv):
        (state,) = _parts(backend, qkv, ())
        q, k, v = (backend.array(x) for x in qkv)
        nothing = it.attention_state(q, k[:, :0, :], v[:, :0, :])
        backend.assert_close(nothing.maximum, np.full((2, 5), -np.inf))
        for field in nothing[1:]:
            assert not backend.numpy(field).any()
        _assert_same(backend, it.merge_states(state, nothing), state, rtol=1e-6)
        _assert_same(backend, it.merge_states(nothing, state), state, rtol=1e-6)
        _assert_same(backend, it.merge_states(nothing, nothing), nothing, rtol=1e-6)

    def test_log_normalizer_against_scipy(self, backend, rng):
        s = rng.normal(size=(3, N)) * 20
        s[0, 3], s[1] = -np.inf, -np.inf
        q = backend.array(np.zeros((3, 1)), "float32")
        k = backend.array(np.zeros((N, 1)), "float32")
        state = it.attention_state(q, k, bias=backend.array(s, "float32"))
        expected = scipy.special.logsumexp(s, axis=-1)
        backend.assert_close(state.log_normalizer(), expected, rtol=1e-5)

    def test_far_apart_maxima(self, backend):
        # The second state is lost against the first, and nothing overflows.
        q = backend.array([[1.0]], "float32")
        v = backend.array([[1.0]], "float32")
        states = [
            it.attention_state(q, backend.array([[s]], "float32"), v, law=None) for s in (1e4, -1e4)
        ]
        for order in (states, states[::-1]):
            merged = it.merge_states(*order)
            backend.assert_close(merged.output(), np.ones((1, 1)))
            backend.assert_close(merged.entropy(), np.zeros(1))
            backend.assert_close(merged.log_normalizer(), np.full(1, 1e4))

    def test_without_values(self, backend, qkv):
        q, k, _ = (backend.array(x) for x in qkv)
        a, b = (it.attention_state(q, k[:, s, :], n_keys=N) for s in (slice(0, 5), slice(5, N)))
        merged = it.merge_states(a, b)
        assert merged.weighted_value is None
        h = it.attention_entropy(q, k)
        backend.assert_close(merged.entropy(), h, rtol=1e-4, atol=1e-5)

    @pytest.mark.float64
    @pytest.mark.parametrize("order", [0.0, 0.5, 0.8, 1.0, 1.1, 1.25, 3.0, np.inf])
    def test_moments_of_every_order_merge(self, backend, rng, order):
        from isentropic._entropy import entropy_of_moments

        xp = backend.xp
        s = rng.normal(size=(3, N)) * 10
        s[0, 2], s[1] = -np.inf, -np.inf
        parts = [backend.array(s[:, a:b]) for a, b in ((0, 2), (2, 3), (3, 9), (9, N))]
        ops = Ops(xp)
        states = [tile.absorb(ops, None, part, None, order) for part in parts]
        whole = reduce(lambda a, b: tile.merge_columns(ops, a, b, order), states)
        h = entropy_of_moments(xp, whole.normalizer, whole.weighted_score, order, "renyi")[..., 0]
        expected = oracles.entropy(oracles.softmax(s), order)
        close = {"rtol": 1e-10, "atol": 1e-12} if backend.float64 else {"rtol": 3e-5, "atol": 1e-5}
        backend.assert_close(h, expected, **close)

    @pytest.mark.parametrize("normalizer", [1.0, 5.0])
    def test_a_maximum_of_minus_infinity_weighs_nothing(self, backend, qkv, normalizer):
        # A sink that is off; a shard for which a kernel reports a log-sum-exp of −∞ and leaves the rest.
        (state,) = _parts(backend, qkv, ())
        shape = state.maximum.shape
        empty = it.AttentionState(
            backend.array(np.full(shape, -np.inf)),
            backend.array(np.full(shape, normalizer)),
            backend.array(np.full(state.weighted_value.shape, np.nan)),
            backend.array(np.full(shape, 3.0)),
        )
        for merged in (it.merge_states(state, empty), it.merge_states(empty, state), state + empty):
            backend.assert_close(merged.output(), state.output())
            backend.assert_close(merged.entropy(), state.entropy())
            backend.assert_close(merged.log_normalizer(), state.log_normalizer())
        backend.assert_close(empty.log_normalizer(), np.full(shape, -np.inf))
        backend.assert_close(empty.output(), np.zeros(state.weighted_value.shape))
        backend.assert_close(empty.entropy(), np.zeros(shape))

    def test_sum_list_and_axis(self, backend, qkv):
        xp = backend.xp
        states = _parts(backend, qkv, (3, 7))
        a, b, c = states
        merged = it.merge_states(a, b, c)
        _assert_same(backend, a + b + c, merged)
        _assert_same(backend, it.merge_states(states), merged)
        for axis, place in ((0, 0), (1, 1), (-2, 1)):
            stacked = it.AttentionState(*(xp.stack(x, axis=place) for x in zip(*states, strict=True)))
            _assert_same(backend, it.merge_states(stacked, axis=axis), merged)
        with pytest.raises(
            TypeError, match=r"`states` must be two or more .* `axis` of several, got a single"
        ):
            it.merge_states(stacked)
        with pytest.raises(
            ValueError, match="`axis` must not be the last axis, which is that of the queries"
        ):
            it.merge_states(stacked, axis=-1)
        with pytest.raises(ValueError, match=r"`axis` must be in \[-3, 3\), got 3"):
            it.merge_states(stacked, axis=3)
        with pytest.raises(TypeError, match="`axis` must be None unless one state is given"):
            it.merge_states(a, b, axis=0)

    def test_equal_by_value(self, backend, qkv):
        (a,), (b,) = _parts(backend, qkv, ()), _parts(backend, qkv, ())
        assert a == b
        assert not a != b  # noqa: SIM202  (tuples have one of their own)
        assert a != b._replace(maximum=b.maximum + 1.0)
        assert a != b._replace(weighted_score=None)
        with pytest.raises(TypeError, match="unhashable: AttentionState with arrays"):
            hash(a)

    def test_counts(self, backend, qkv):
        q, k, v = (backend.array(x) for x in qkv)
        pages = [(k[:, i : i + 4, :], v[:, i : i + 4, :]) for i in range(0, N, 4)]
        whole = it.attention_state(q, k, v)
        backend.assert_close(whole.n_seen, np.full((2, 5), float(N)))
        backend.assert_close(whole.n_keys, np.full((2, 5), float(N)))
        merged = it.merge_states([it.attention_state(q, *page, n_keys=N) for page in pages])
        _assert_same(backend, merged, whole)
        for law in (None, laws.Constant(2.0)):
            merged = it.merge_states([it.attention_state(q, *page, law=law) for page in pages])
            assert merged.n_keys is None
            _assert_same(backend, merged[:4], it.attention_state(q, k, v, law=law)[:4])

    def test_counts_that_disagree(self, qkv):
        # NumPy: elsewhere the counts may be out of sight.
        q, k, v = qkv
        pages = [(k[:, i : i + 4], v[:, i : i + 4]) for i in range(0, N, 4)]
        with pytest.warns(
            UserWarning, match=r"more keys than their laws were given.*`n_keys`"
        ) as caught:
            it.merge_states([it.attention_state(q, *page) for page in pages])
        assert caught[0].filename == __file__
        ragged = [it.attention_state(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 5), (5, N))]
        with pytest.warns(UserWarning, match="different numbers of keys"):
            ragged[0] + ragged[1]

        # Queries at the positions 7 to 11: a mask counts from the first key of its page.
        offset = N - 5
        seen = masks.causal(offset).visible_count(5, N)
        whole = it.attention_state(q, k, v, mask=masks.causal(offset))

        def states(shift):
            return [
                it.attention_state(q, *page, mask=masks.causal(offset - shift * 4 * i), n_keys=seen)
                for i, page in enumerate(pages)
            ]

        with pytest.warns(UserWarning, match=r"use masks.causal\(offset - b\)"):
            it.merge_states(states(0))
        np.testing.assert_allclose(it.merge_states(states(1)).output(), whole.output())

    def test_errors(self, backend, qkv):
        (state,) = _parts(backend, qkv, ())
        with pytest.raises(TypeError, match=r"`states` must be one or more AttentionState, got none"):
            it.merge_states()
        with pytest.raises(TypeError, match=r"`states` must be one or more AttentionState, got tuple"):
            it.merge_states(state, tuple(state))
        with pytest.raises(ValueError, match=r"`states` must all come from calls with `value`, or all"):
            it.merge_states(state, state._replace(weighted_value=None))
        with pytest.raises(ValueError, match=r"`value` must be given to `attention_state`"):
            state._replace(weighted_value=None).output()
        with pytest.raises(
            ValueError, match=r"`entropy` must be given to `AttentionState.from_output`"
        ):
            state._replace(weighted_score=None).entropy()

    def test_shapes(self, backend):
        def state(n, e):
            q, v = backend.array(np.ones((n, 2)), "float32"), backend.array(np.ones((4, e)), "float32")
            return it.attention_state(q, v[:, :1] * backend.array(np.ones((1, 2)), "float32"), v)

        with pytest.raises(ValueError, match=r"`states\[1\]\.normalizer` must have the last dimension"):
            it.merge_states(state(3, 2), state(4, 2))
        with pytest.raises(ValueError, match=r"`states\[1\]\.weighted_value` must have .* 3, got 1"):
            it.merge_states(state(3, 3), state(3, 1))

    def test_mixed_libraries(self, backend, qkv):
        (state,) = _parts(backend, qkv, ())
        import array_api_strict

        if backend.library == "strict":
            other = it.AttentionState(*(np.asarray(backend.numpy(x)) for x in state))
        else:
            other = it.AttentionState(*(array_api_strict.asarray(backend.numpy(x)) for x in state))
        with pytest.raises(
            TypeError, match=r"`states\[1\]\.maximum` must be an array of the library of"
        ):
            it.merge_states(state, other)


class TestFromOutput:
    """States of what kernels of other libraries return."""

    @pytest.mark.parametrize("base", [math.e, 2, 10.0])
    def test_is_the_state(self, backend, qkv, base):
        near, far = _parts(backend, qkv, (5,))
        given = (near.output(), near.log_normalizer(base=base))
        state = it.AttentionState.from_output(*given, entropy=near.entropy(), base=base)
        close = {"rtol": 1e-5, "atol": 1e-6}
        backend.assert_close(state.output(), near.output(), **close)
        backend.assert_close(state.log_normalizer(), near.log_normalizer(), **close)
        backend.assert_close(state.log_normalizer(base=base), given[1], **close)
        backend.assert_close(state.entropy(), near.entropy(), **close)
        for merged in (state + far, far + state):
            expected = near + far
            backend.assert_close(merged.output(), expected.output(), rtol=1e-4, atol=1e-5)
            backend.assert_close(merged.entropy(), expected.entropy(), rtol=1e-4, atol=1e-5)
            backend.assert_close(merged.log_normalizer(), expected.log_normalizer(), **close)

    def test_without_entropy(self, backend, qkv):
        near, far = _parts(backend, qkv, (5,))
        state = it.AttentionState.from_output(near.output(), near.log_normalizer())
        for merged in (it.merge_states(state, far), it.merge_states([far, state])):
            expected = near + far
            backend.assert_close(merged.output(), expected.output(), rtol=1e-4, atol=1e-5)
            backend.assert_close(merged.log_normalizer(), expected.log_normalizer(), rtol=1e-5)
            assert merged.weighted_score is None
        for unknown in (state, merged):
            with pytest.raises(
                ValueError, match=r"`entropy` must be given to `AttentionState.from_out"
            ):
                unknown.entropy()

    @pytest.mark.parametrize("sign", [-1, 1])
    @pytest.mark.parametrize("base", [math.e, 2])
    def test_queries_that_see_no_key(self, backend, qkv, sign, base):
        # FlashAttention 2 gives +∞ and zeros, other kernels −∞ and what lay in memory.
        (rest,) = _parts(backend, qkv, ())
        output, log_normalizer, entropy = (
            backend.numpy(x).copy() for x in (rest.output(), rest.log_normalizer(), rest.entropy())
        )
        output[0, 2] = 0.0 if sign == 1 else np.nan
        log_normalizer[0, 2] = sign * np.inf
        entropy[0, 2] = np.nan
        state = it.AttentionState.from_output(
            backend.array(output), backend.array(log_normalizer / np.log(base)),
            entropy=backend.array(entropy), base=base,
        )  # fmt: skip
        assert backend.numpy(state.log_normalizer())[0, 2] == -np.inf
        assert not backend.numpy(state.output())[0, 2].any()
        assert backend.numpy(state.entropy())[0, 2] == 0.0
        for merged in (state + rest, rest + state):
            backend.assert_close(merged.output()[0, 2, :], rest.output()[0, 2, :])
            got = backend.numpy(merged.entropy())[0, 2]
            np.testing.assert_allclose(got, backend.numpy(rest.entropy())[0, 2], rtol=1e-6)

    def test_overflow_is_not_hidden(self, backend, qkv):
        (rest,) = _parts(backend, qkv, ())
        beyond = backend.array(np.full(rest.maximum.shape, np.inf, "float32"))
        state = it.AttentionState.from_output(rest.output(), beyond)
        assert np.isnan(backend.numpy((state + rest).output())).all()

    def test_dtypes(self, backend, qkv):
        (rest,) = _parts(backend, qkv, ())
        single = backend.xp.float32
        output = backend.xp.astype(rest.output(), single)
        for output_dtype in ("float32", backend.half or "float32"):
            for dtype in backend.dtypes:
                state = it.AttentionState.from_output(
                    backend.xp.astype(output, backend.array(0, output_dtype).dtype),
                    backend.xp.astype(rest.log_normalizer(), backend.array(0, dtype).dtype),
                )
                assert state.weighted_value.dtype == backend.array(0, dtype).dtype
                assert state.maximum.dtype == state.normalizer.dtype == backend.array(0, dtype).dtype

    def test_errors(self, backend, qkv):
        (rest,) = _parts(backend, qkv, ())
        out, log_normalizer = rest.output(), rest.log_normalizer()
        make = it.AttentionState.from_output
        with pytest.raises(
            ValueError, match=r"`log_normalizer` must have .* axis, \(2, 5\), got \(5, 2\)"
        ):
            make(out, backend.xp.matrix_transpose(log_normalizer))
        with pytest.raises(ValueError, match=r"`entropy` must have the shape of `output` without"):
            make(out, log_normalizer, entropy=out)
        with pytest.raises(ValueError, match=r"`base` must be above 1, got 1\.0"):
            make(out, log_normalizer, base=1)
        with pytest.raises(TypeError, match=r"`base` must be a real number, got str"):
            rest.log_normalizer(base="e")
        with pytest.raises(TypeError, match=r"`output` must be an array .* got NoneType"):
            make(None, log_normalizer)
        with pytest.raises(ValueError, match=r"`output` must have at least 2 dimensions, got 1"):
            make(out[0, 0, :], log_normalizer[0, 0, ...])
        with pytest.raises(TypeError, match=r"`log_normalizer` must have a real floating-point dtype"):
            make(out, backend.array(np.zeros((2, 5), "int32")))


@pytest.mark.parametrize("n_keys", [100, 5])
def test_a_query_that_is_nan_stays_nan(backend, rng, n_keys):
    q, k, v = (rng.normal(size=(2, n, 4)) for n in (44, n_keys, n_keys))
    q[:, 1, 2] = np.nan
    q, k, v = (backend.array(x, "float32") for x in (q, k, v))
    numbers = list(it.AttentionDistribution(q, k, law=None).statistics())
    for implementation in (None, "generic"):
        options = {"law": None, "implementation": implementation}
        whole = it.attention_state(q, k, v, **options)
        parts = (it.attention_state(q, k[:, i::2, :], v[:, i::2, :], **options) for i in (0, 1))
        for state in (whole, it.merge_states(*parts)):
            numbers += [state.maximum, state.output()[..., 0], state.entropy(), state.log_normalizer()]
    for x in numbers:
        is_nan = np.broadcast_to(np.arange(44) == 1, (2, 44))
        np.testing.assert_array_equal(np.isnan(backend.numpy(x)), is_nan)

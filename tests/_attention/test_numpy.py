"""NumPy's pass: what its sums are relative to, and how the work is divided."""

import numpy as np
import oracles
import pytest

import isentropic as it


def test_numpy_adds_a_bias_of_many_logits():
    x, bias = np.zeros((2**10, 2)), np.zeros((2**10, 1))
    for options in ({"bias": bias}, {"softcap": 3.0}, {"bias": bias, "softcap": 3.0}):
        assert it.AttentionDistribution(x, x, **options).backends(x)["numpy_tiles"] == "runs"


class TestReferences:
    """Sums of NumPy's tiles relative to constants, and what is computed again where these are not good."""

    @pytest.fixture
    def tried(self, monkeypatch):
        """The policies of the references that blocks of rows have tried."""
        from isentropic._attention.numpy import _Pass

        tried, relative_to = [], _Pass.relative_to

        def noted(self, policy, item):
            tried.append(policy)
            return relative_to(self, policy, item)

        monkeypatch.setattr(_Pass, "relative_to", noted)
        return tried

    @pytest.mark.parametrize(
        ("logits", "passes"),
        [
            (lambda s: s, ["given"]),
            (lambda s: s - 100, ["given", "first"]),
            (lambda s: s + 100, ["given", "first"]),
            (lambda s: s + 100 * (np.arange(13) == 1), ["given", "first"]),
            (lambda s: s + 100 * (np.arange(13) == 12), ["given", "largest"]),
            (lambda s: s - 100 * (np.arange(13) == 12), ["given"]),
            (lambda s: s - 100 * (np.arange(13) < 12), ["given", "first", "largest"]),
            (
                lambda s: s + 1e4,
                ["given", "first", "largest"],
            ),  # the last one because of rounding in float32
        ],
    )
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_which_are_tried(self, tiles, set_blocks, tried, rng, logits, passes, dtype):
        set_blocks(numpy_min_part=14, numpy_rows=6)  # one block of three rows, and tiles of ten keys
        if dtype == "float64" and logits(np.zeros(13))[0] == 1e4:
            passes = passes[:2]
        # The first feature of the queries is 1, so that that of the keys is added to the logits.
        q, k = rng.normal(size=(2, 13, 4))
        q[:, 0], k[:, 0] = 1.0, logits(np.zeros(13))
        q, k, v = q.astype(dtype)[-3:], k.astype(dtype), rng.normal(size=(13, 3)).astype(dtype)
        s = q.astype("float64") @ k.astype("float64").T
        options = {"law": None, "scale": 1.0, "implementation": "numpy_tiles"}
        state = it.attention_state(q, k, v, **options)
        assert tried == passes
        slack = max(np.abs(k).max() * np.finfo(dtype).eps * 8, 1e-6)
        np.testing.assert_allclose(state.output(), oracles.softmax(s) @ v, atol=slack, rtol=slack)
        np.testing.assert_allclose(state.maximum, s.max(-1), rtol=1e-5)
        h = it.attention_entropy(q, k, **options)
        np.testing.assert_allclose(h, oracles.entropy(oracles.softmax(s)), atol=8 * slack)

    @pytest.mark.parametrize(("added", "expected"), [(0.0, {"given"}), (60.0, {"given", "first"})])
    def test_rows_that_see_their_first_key_late(self, tiles, tried, rng, added, expected):
        q, k, v = rng.normal(size=(3, 13, 4)).astype("float32")
        q[:, 0], k[:, 0] = 1.0, added
        mask = np.arange(13) >= np.arange(13)[:, None] * 2  # from the eighth row on they see none
        got = it.attention_state(q, k, v, mask=mask, law=None, scale=1.0, implementation="numpy_tiles")
        assert set(tried) == expected
        wanted = it.attention_state(q, k, v, mask=mask, law=None, scale=1.0, implementation="generic")
        for a, b in zip(
            (got.output(), got.entropy()), (wanted.output(), wanted.entropy()), strict=True
        ):
            np.testing.assert_allclose(a, b, atol=1e-4)
        np.testing.assert_array_equal(got.output()[7:], 0)

    def test_rows_that_see_their_last_key_early(self, tiles, tried, rng):
        """A tile in which a row sees no key leaves alone what its sums are relative to."""
        q, k = rng.normal(size=(2, 13, 4)).astype("float32")
        q[:, 0], k[:, 0] = 1.0, 60.0
        mask = (np.arange(13) < 5) == (np.arange(13)[:, None] % 2 == 0)  # odd rows see the others
        got, wanted = (
            it.attention_state(q, k, mask=mask, law=None, scale=1.0, implementation=name)
            for name in ("numpy_tiles", "generic")
        )
        assert set(tried) == {"given", "first"}
        np.testing.assert_allclose(got.log_normalizer(), wanted.log_normalizer(), rtol=1e-5)

    def test_hidden_logits_that_overflow(self, small_blocks):
        q, k = np.asarray([[0.0, 0.0], [1e20, 1e20]], "float32"), np.full((2, 2), 1e20, "float32")
        mask = np.asarray([[True, False], [False, False]])
        options = {"mask": mask, "law": None, "implementation": "numpy_tiles"}
        out = it.attention(q, k, np.ones((2, 1), "float32"), **options)
        np.testing.assert_array_equal(out, [[1.0], [0.0]])

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
    @pytest.mark.parametrize("norms", ["spread", "one huge key", "huge", "equal"])
    def test_adversarial_norms(self, small_blocks, rng, dtype, scale, norms):
        n = 64
        q, k, v = rng.normal(size=(3, n, 16))
        q *= scale
        k *= {
            "spread": np.geomspace(1e-3, 1e4, n)[:, None],
            "one huge key": np.where(np.arange(n) == 7, 1e4, 1.0)[:, None],
            "huge": 1e4,
            "equal": 1.0,
        }[norms]
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        s = (q.astype("float64") @ k.astype("float64").T) / 4
        p = oracles.softmax(s)
        # What a logit may be off by is what its rounding is.
        slack = np.abs(s).max() * np.finfo(dtype).eps * 8 + np.finfo(dtype).eps * 64
        state = it.attention_state(q, k, v, law=None, implementation="numpy_tiles")
        np.testing.assert_allclose(state.output(), p @ v, atol=slack * np.abs(v).max(), rtol=slack)
        np.testing.assert_allclose(state.maximum, s.max(-1), atol=slack, rtol=1e-6)
        assert (state.normalizer >= 1 - 1e-6).all()
        assert (state.weighted_score <= 0).all()
        h = it.attention_entropy(q, k, law=None, implementation="numpy_tiles")
        expected = oracles.entropy(p)
        for got in (h, state.entropy()):
            assert (got >= 0).all()
            np.testing.assert_allclose(got, expected, atol=slack * 8, rtol=1e-5)

    @pytest.mark.parametrize("gap", [0, 40, 46, 47, 60, 85, 86, 87, 88, 90, 95, 103, 1000, 9000])
    def test_logits_far_below_the_length_of_a_key(self, small_blocks, gap):
        # A long key across the queries. Its length must not be what exponents are relative to.
        logits = -np.arange(12.0) % 7
        k = np.zeros((13, 2), "float32")
        k[:12, 0], k[12, 1] = logits, gap
        q, v = np.asarray([[1.0, 0.0]] * 5, "float32"), np.eye(13, dtype="float32")
        options = {"law": None, "scale": 1.0, "implementation": "numpy_tiles"}
        expected = oracles.softmax(np.append(logits, 0.0))
        out = it.attention(q, k, v, **options)
        np.testing.assert_allclose(out, np.broadcast_to(expected, out.shape), rtol=1e-5)
        state = it.attention_state(q, k, v, **options)
        np.testing.assert_allclose(state.entropy(), oracles.entropy(expected), rtol=1e-5)
        np.testing.assert_allclose(state.maximum, logits.max(), rtol=1e-3)

    @pytest.mark.parametrize("exponent", [8, 13, 19])
    def test_small_differences_of_large_logits(self, small_blocks, rng, exponent):
        # Integers that float32 holds exactly, as do their products: all errors are those of the pass.
        size = 16
        q = np.ones((9, size), "float32")
        differences = rng.integers(0, 2, (13, size))
        k, v = (2.0**exponent + differences).astype("float32"), np.eye(13, dtype="float32")
        options = {"law": None, "scale": 1.0, "implementation": "numpy_tiles"}
        expected = oracles.softmax(differences.sum(-1).astype("float64"))
        out = it.attention(q, k, v, **options)
        np.testing.assert_allclose(out, np.broadcast_to(expected, out.shape), rtol=3e-3)
        h = it.attention_entropy(q, k, **options)
        np.testing.assert_allclose(h, oracles.entropy(expected), rtol=3e-3)

    @pytest.mark.parametrize("order", [None, 0.5, 1, 2, 3, float("inf")])
    @pytest.mark.parametrize("biased", [False, True])
    def test_exponents_that_are_far_apart(self, small_blocks, rng, monkeypatch, order, biased):
        """Weights that are no normal numbers make no difference to the sums, and take no time."""
        from isentropic._attention import numpy_ops

        monkeypatch.setattr(numpy_ops, "_MIN_CHECKED", 0)
        weights = []

        def noted(exp):
            def noted_exp(self, *args):
                x, weight = exp(self, *args)
                weights.append(weight.copy())
                return x, weight

            return noted_exp

        for table in (numpy_ops.TileOps, numpy_ops.WholeOps):
            monkeypatch.setattr(table, "exp", noted(table.exp))
        # Logits from 0 to about −130 nats in each row.
        q, k, v = np.ones((7, 1)), -rng.uniform(0, 130, size=(23, 1)), rng.normal(size=(23, 3))
        k[[3, 11]] = [[0.0], [-95.0]]  # e^−95 is no normal number in float32
        is_hidden = (rng.random((7, 23)) < 0.3) & (np.arange(23) != 3)
        bias = np.where(is_hidden, -np.inf, 0.0) if biased else None
        s = q @ k.T if bias is None else q @ k.T + bias
        x = [y.astype("float32") for y in (q, k, v)]
        options = {"law": None, "scale": 1.0, "bias": None if bias is None else bias.astype("float32")}
        if order is None:
            np.testing.assert_allclose(it.attention(*x, **options), oracles.softmax(s) @ v, atol=1e-6)
        else:
            h = it.attention_entropy(*x[:2], order=order, **options)
            np.testing.assert_allclose(h, oracles.entropy(oracles.softmax(s), order), atol=2e-5)
        assert weights or biased  # the generic pass computes few logits with a bias
        if order is None or order >= 1:
            assert all(np.all((w == 0) | (w >= np.finfo(w.dtype).tiny)) for w in weights)

    @pytest.mark.parametrize("order", [0.5, 0.9, 1, 1.1, 1.3, 2, 3, float("inf")])
    def test_rows_without_keys_have_no_entropy(self, small_blocks, rng, order):
        q, k = rng.normal(size=(2, 9, 2)).astype("float32")
        mask = np.ones((9, 9), dtype=bool)
        mask[[0, 5]] = False
        h = it.attention_entropy(q, k, order=order, mask=mask, implementation="numpy_tiles")
        np.testing.assert_array_equal(h[[0, 5]], 0.0)
        assert np.all(h[[1, 2, 3, 4, 6, 7, 8]] > 0)

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("exp", [np.exp, np.exp2])
    def test_large_weights(self, exp, dtype):
        """Each weight is exact up to rounding, 0, or a normal number, and hidden keys have the weight 0."""
        from isentropic._attention.numpy_ops import large_weights

        info = np.finfo(dtype)
        x = np.concat((np.linspace(1.1 * np.log2(info.tiny), 3, 10_001), [-np.inf])).astype(dtype)
        weight = large_weights(x, exp)
        exact = exp(x.astype(np.longdouble))
        is_large = exact > 10 * info.tiny / info.eps**2
        np.testing.assert_allclose(weight[is_large], exact[is_large], rtol=4 * info.eps)
        least = exp(np.asarray(1.0)) * info.tiny / info.eps
        assert np.all(np.abs(weight - exact) <= 4 * info.eps * exact + least)
        assert np.all((weight == 0) | (np.abs(weight) >= info.tiny))
        assert weight[-1] == 0
        assert np.isnan(large_weights(np.asarray([np.nan], dtype), exp)[0])

    def test_entropy_is_not_negative(self, rng):
        # Nearly all of the weight on one key.
        for _ in range(40):
            q = rng.normal(size=(300, 8)).astype("float32") * rng.uniform(4, 16)
            h = it.attention_entropy(q, q, law=None, implementation="numpy_tiles")
            assert (h >= 0).all()
            expected = it.attention_entropy(*[q.astype("float64")] * 2, law=None)
            np.testing.assert_allclose(h, expected, atol=1e-3)

    def test_entropy_of_small_calls_is_not_negative(self, rng):
        q, k = rng.uniform(0, 39, size=(2000, 1, 1)).astype("float32"), np.ones((2000, 1, 1), "float32")
        h = it.attention_entropy(q, k, law=None, scale=1.0)
        assert (h >= 0).all()
        assert (h < 1e-5).all()

    @pytest.mark.parametrize("logit", [39.0, 400.0])
    @pytest.mark.parametrize("implementation", [None, "numpy_tiles"])
    def test_huge_values(self, small_blocks, logit, implementation):
        """Sums that are relative to less than the maximum would overflow."""
        q, k = np.full((20, 1), logit, "float32"), np.linspace(0.9, 1, 30, dtype="float32")[:, None]
        v = np.full((30, 2), 1e30, "float32")
        v[:, 1] *= -1
        out = it.attention(q, k, v, law=None, scale=1.0, implementation=implementation)
        np.testing.assert_allclose(out, v[:20], rtol=1e-5)

    def test_all_hidden_but_one(self, small_blocks, rng):
        q, k, v = rng.normal(size=(3, 20, 4)).astype("float32")
        q *= 50  # the logit of the only visible key is far below others
        mask = np.eye(20, dtype=bool)
        out = it.attention(q, k, v, mask=mask, law=None, implementation="numpy_tiles")
        np.testing.assert_array_equal(out, v)
        h = it.attention_entropy(q, k, mask=mask, law=None, implementation="numpy_tiles")
        np.testing.assert_array_equal(h, 0)

    @pytest.mark.parametrize("implementation", ["generic", "numpy_tiles"])
    def test_infinite_value_of_keys_without_weight(self, small_blocks, implementation):
        q, k, v = np.ones((1, 1)), np.full((2, 1), -np.inf), np.full((2, 1), np.inf)
        with np.errstate(all="ignore"):
            assert it.attention(q, k, v, implementation=implementation) == 0

    @pytest.mark.parametrize("implementation", ["generic", "numpy_tiles"])
    def test_logits_of_minus_infinity(self, small_blocks, implementation):
        q, k = np.ones((1, 1)), np.asarray([[-np.inf], [1.0], [1.0]])
        h = it.attention_entropy(q, k, implementation=implementation)
        np.testing.assert_allclose(h, np.log(2))

    def test_bounds_that_overflow(self, small_blocks):
        q = np.full((3, 2), 1e30, "float32")
        k = np.asarray([[1e-30, 0], [0, 1e-30], [1e30, -1e30]], "float32")
        v = np.eye(3, dtype="float32")
        with np.errstate(all="ignore"):
            got = it.attention(q, k, v, law=None, scale=1.0, implementation="numpy_tiles")
            expected = it.attention(q, k, v, law=None, scale=1.0, implementation="generic")
        np.testing.assert_allclose(got, expected)


def test_few_logits_whose_exponentials_overflow(rng):
    # All of them are computed at once, and nothing is subtracted from them if none is too high.
    q, k, v = (rng.normal(size=(n, 16)).astype("float32") for n in (5, 700, 700))
    q *= np.float32(100 / (q @ k.T).max())  # e¹⁰⁰ is no float32
    out = it.attention(q, k, v, scale=1.0, law=None, implementation="numpy_tiles")
    expected = oracles.softmax(q.astype("float64") @ k.T.astype("float64")) @ v
    np.testing.assert_allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize(("n_keys", "highest", "others"), [(40_000, -60, -80), (20_000, -67, -77)])
def test_one_key_above_many_that_count_together(rng, n_keys, highest, others):
    # Where exponents are far apart, weights below 1e-31 count as 0. So sums near that are made again.
    q, k = np.ones((40, 1), "float32"), np.full((n_keys, 1), others, "float32")
    k[0], v = highest, (1 + rng.normal(size=(n_keys, 3))).astype("float32")
    options = {"scale": 1.0, "law": None, "implementation": "numpy_tiles"}
    p = oracles.softmax(q.astype("float64") @ k.T)
    out, h = it.attention(q, k, v, **options), it.attention_entropy(q, k, **options)
    np.testing.assert_allclose(out, p @ v, atol=2e-5)
    np.testing.assert_allclose(h, oracles.entropy(p), atol=5e-5)


@pytest.mark.host
@pytest.mark.parametrize(
    ("is_fast", "is_causal", "threads", "heads", "size"),
    [
        (False, False, 1, 1, 16), (False, False, 2, 1, 16), (False, False, 3, 1, 8),
        (False, False, 3, 2, 16), (False, False, 1, 2, 16),
        (True, False, 1, 1, 32), (True, False, 2, 1, 16), (True, False, 3, 1, 8), (True, False, 1, 2, 64),
        (True, True, 1, 2, 64),
    ],
)  # fmt: skip
def test_rows_of_a_block(tiles, set_blocks, monkeypatch, is_fast, is_causal, threads, heads, size):
    """64 queries in blocks of 16, or of at most 64 on fast processors if they share keys.

    Blocks are smaller, but not below 8, if there were fewer than two blocks for each thread.
    """
    from isentropic._attention import numpy

    sizes = []
    set_blocks(numpy_rows=16, numpy_large_rows=64)
    monkeypatch.setattr(numpy, "has_fast_exponential", lambda: is_fast)
    monkeypatch.setattr(numpy, "n_threads", lambda: threads)
    monkeypatch.setattr(numpy, "run", lambda function, items: sizes.extend(x[1][1] for x in items))
    q = np.ones((heads, 64, 4))
    it.attention(q, q, q, is_causal=is_causal)
    assert set(sizes) == {size}


@pytest.mark.host
@pytest.mark.parametrize("n_keys", [8, 13, 20])
@pytest.mark.parametrize("bias", [None, 0.0, -30.0])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("added", ["nothing", "60 nats", "60 nats to late keys", "a NaN"])
def test_causal_blocks_of_several_parts(
    tiles, set_blocks, monkeypatch, rng, n_keys, bias, softcap, added
):
    """Blocks of up to 6 queries, in parts of 2. A tile has the parts that see some of its keys."""
    from isentropic._attention import numpy, numpy_ops, schedule

    set_blocks(numpy_rows=2, numpy_large_rows=6, numpy_columns=3)
    monkeypatch.setattr(numpy, "has_fast_exponential", lambda: True)
    monkeypatch.setattr(numpy_ops, "has_fast_exponential", lambda: True)
    monkeypatch.setattr(numpy, "n_threads", lambda: 1)
    shapes, rows_of_a_range = [], schedule._rows_and_hidden

    def noted(ranges, *args):
        rows, hidden = rows_of_a_range(ranges, *args)
        shapes.append((len(ranges), rows.stop - rows.start, len(hidden)))
        return rows, hidden

    monkeypatch.setattr(schedule, "_rows_and_hidden", noted)
    q, k, v = (rng.normal(size=(2, n, 4)) for n in (13, n_keys, n_keys))
    q[..., 0] = 1.0
    if added == "a NaN":
        k[1, 3, 2] = np.nan
    elif added != "nothing":
        k[:, 5 if added == "60 nats to late keys" else 0 :, 0] += 120.0
    options = {"is_causal": True, "softcap": softcap, "scale": 0.5, "law": None}
    if bias is not None:
        options["bias"] = rng.normal(size=(13, n_keys)) + bias
    for order in (None, 0.5, 1, 2):
        results = []
        for implementation in ("numpy_tiles", "generic"):
            if order is None:
                got = it.attention(q, k, v, implementation=implementation, **options)
            else:
                got = it.attention_entropy(q, k, order=order, implementation=implementation, **options)
            results.append(got)
        np.testing.assert_allclose(*results, rtol=1e-9, atol=1e-9)
    # 13 queries are blocks of 1, 6 and 6. The first one may see no key.
    assert {3} <= {parts for parts, _, _ in shapes} <= {1, 3}
    rows = {rows for parts, rows, _ in shapes if parts == 3}
    assert 6 in rows
    assert rows & {2, 4}  # some tiles leave out a part
    assert any(0 < hidden < 3 for parts, _, hidden in shapes if parts == 3)


@pytest.mark.host
@pytest.mark.parametrize(
    ("batch", "changes", "options", "divides"),
    [
        ((2, 8), {}, {}, True),
        ((2, 8), {"q": float("nan")}, {"is_causal": True}, True),
        ((2, 8), {"key_heads": 4}, {"enable_gqa": True, "softcap": 3.0}, True),
        ((2, 9), {"key_heads": 3}, {"enable_gqa": True, "is_causal": True}, False),
        ((2, 6), {"key_heads": 2}, {"enable_gqa": True}, False),
        ((2, 8), {"key_heads": 1}, {"mask": it.masks.window(3), "law": it.laws.LogLength(4)}, True),
        ((2, 8), {}, {"mask": np.tri(6, dtype=bool)[None, None]}, False),
        ((40, 2), {}, {"bias": np.arange(6.0)[None, :, None] + np.ones((2, 1, 6))}, True),
        ((2, 8), {"dtype": "float16"}, {"sinks": np.arange(8.0)}, True),
        ((16,), {"k": 1e3}, {}, True),
    ],
)
def test_parts_of_the_batch(set_blocks, monkeypatch, rng, batch, changes, options, divides):
    """Many heads of few logits: parts of the batch axes, each of which is computed at once."""
    from isentropic._attention import numpy

    set_blocks(numpy_untiled_logits=4 * 36)
    found, original = [], numpy._operands_of_part
    monkeypatch.setattr(numpy, "_operands_of_part", lambda *a: found.append(original(*a)) or found[-1])
    heads = changes.get("key_heads", batch[-1])
    dtype = changes.get("dtype", "float64")
    q, k, v = (rng.normal(size=(*batch[:-1], n, 6, 5)).astype(dtype) for n in (batch[-1], heads, heads))
    q[..., -1, 2, 3] = changes.get("q", 1.0)
    k[..., 0, 4, 3] *= changes.get("k", 1.0)
    options = {name: x.astype(dtype) if name in ("bias", "sinks") else x for name, x in options.items()}
    of_entropy, slack = options | {"order": 2}, 2e-3 if dtype == "float16" else 1e-10
    results = []
    for implementation in ("generic", None):
        state = it.attention_state(q, k, v, implementation=implementation, **options)
        fields = (it.attention(q, k, v, implementation=implementation, **options), *state[:4])
        h = it.attention_entropy(q, k, implementation=implementation, **of_entropy)
        results.append(
            (*fields, h, it.attention_entropy(q, k, implementation=implementation, **options))
        )
    for expected, x in zip(*results, strict=True):
        assert x.dtype == expected.dtype
        np.testing.assert_allclose(x, expected, rtol=slack, atol=slack)
    assert found
    assert (None not in found) == divides

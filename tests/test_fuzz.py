"""Drawn shapes, dtypes, masks, laws and options against the definitions; and what is refused."""

import copy
import math

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import isentropic as it
from isentropic import laws, masks
from isentropic.laws._formulas import InfoScale, StepLog

# A law, and its factor for n keys and 2 heads, (2, 1) against (..., L).
SLOPES = np.asarray([[0.25], [0.75]])
LAWS = {
    "none": (lambda f: None, lambda n: np.ones(n.shape)),
    "log": (lambda f: laws.LogLength(16), lambda n: oracles.log_length(n, 16)),
    "heads": (
        lambda f: laws.AffineLog(f(SLOPES[:, 0], "float32"), 0.5),
        lambda n: SLOPES * np.log(np.maximum(n, 1)) + 0.5,
    ),
    "steps": (lambda f: StepLog(0.5, 3), lambda n: 1 + 0.5 * np.log1p(n // 3)),
    "scaled": (
        lambda f: laws.scaled(laws.shifted(laws.Power(0.5, 4), 1), 0.5),
        lambda n: 0.5 * np.sqrt((n + 1) / 4),
    ),
}


class Draw:
    """Choices of a seed: hypothesis itself would mostly choose what is empty, or 0."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def coin(self, probability=0.5):
        return self.rng.random() < probability

    def of(self, *options):
        return options[self.rng.integers(len(options))]

    def shape(self, batch):
        """A shape that broadcasts to `batch`."""
        own = [size if self.coin(0.7) else 1 for size in batch]
        return tuple(own[self.rng.integers(len(own) + 1) :])

    def batch(self):
        return self.of((), (2,), (3, 2), (1, 3, 2), (2, 2), self.of((0, 2), (2,)))

    def size(self):
        return self.of(1, 2, 5, 6, 6, self.of(0, 7))


def mask_tree(draw, batch, n_queries, n_keys, depth=2):
    """A function of a backend's `array` that makes a mask, and the dense array that it stands for."""
    rng = draw.rng
    if depth and draw.coin(0.6):
        first, a = mask_tree(draw, batch, n_queries, n_keys, depth - 1)
        second, b = mask_tree(draw, batch, n_queries, n_keys, depth - 1)
        kind = draw.of("and", "or", "but")
        if kind == "and":
            return lambda f: first(f) & second(f), a & b
        if kind == "or":
            return lambda f: first(f) | second(f), a | b
        return lambda f: first(f) & ~second(f), a & ~b

    rows, keys = np.arange(n_queries)[:, None], np.arange(n_keys)
    own = draw.shape(batch)
    # Arrays of numbers have no batch axes or all of them.
    per_element = own and (1,) * (len(batch) - len(own)) + own

    def widened(dense):
        return np.broadcast_to(dense, (*batch, n_queries, n_keys))

    def number(low, high):
        """An integer or an array of them, and the same with the axes of a dense mask."""
        if draw.coin():
            x = int(rng.integers(low, high + 1))
            return lambda f: x, x
        x = rng.integers(low, high + 1, size=per_element)
        return lambda f: f(x, "int32"), x[..., None, None]

    kind = draw.of("window", "padding", "segments", "array")
    if kind == "window":
        left, right = (draw.of(None, 0, 1, 2, 4) for _ in range(2))
        offset, at = number(-3, n_keys + 3) if draw.coin() else (lambda f: None, n_keys - n_queries)
        dense = np.ones((n_queries, n_keys), bool)
        dense = dense if left is None else dense & (keys >= rows + at - left)
        dense = dense if right is None else dense & (keys <= rows + at + right)
        return lambda f: masks.window(left, right, offset=offset(f)), widened(dense)
    if kind == "padding":
        lengths, at = number(0, n_keys)
        side = draw.of("left", "right")
        dense = keys < at if side == "right" else keys >= n_keys - at
        return lambda f: masks.padding(lengths(f), side=side), widened(dense)
    if kind == "segments":
        ids = rng.integers(0, 3, size=(*per_element, n_keys))
        if n_queries > n_keys or draw.coin():
            of_queries = rng.integers(0, 3, size=(*per_element, n_queries))
            dense = of_queries[..., None] == ids[..., None, :]
            return lambda f: masks.segments(f(ids, "int32"), f(of_queries, "int32")), widened(dense)
        dense = ids[..., n_keys - n_queries :, None] == ids[..., None, :]
        return lambda f: masks.segments(f(ids, "int32")), widened(dense)
    last = draw.shape((n_queries, n_keys))
    dense = rng.random((*(own if len(last) == 2 else ()), *last)) < 0.6
    return lambda f: masks.causal(n_keys) & f(dense), widened(dense)


SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=100)
@given(SEEDS)
def test_mask_trees(backend, seed):
    if backend.library == "jax":
        pytest.skip("each example has shapes of its own, which JAX compiles for: seconds each")
    draw = Draw(seed)
    batch, n_queries, n_keys = draw.batch(), draw.size(), draw.size()
    make, dense = mask_tree(draw, batch, n_queries, n_keys, 3)
    mask = make(backend.array)

    count = backend.numpy(mask.visible_count(n_queries, n_keys, like=backend.array(0.0)))
    np.testing.assert_array_equal(np.broadcast_to(count, dense.shape[:-1]), dense.sum(axis=-1))
    q = backend.array(np.zeros((*batch, n_queries, 3)), "float32")
    k = backend.array(np.zeros((*batch, n_keys, 3)), "float32")
    weights = backend.numpy(it.AttentionDistribution(q, k, mask=mask).weights())
    np.testing.assert_array_equal(weights > 0, dense)


def problem(draw, dtypes):
    """Arrays by name, options as functions of `array`, and what the definition says."""
    rng = draw.rng
    batch, n_queries, n_keys = draw.batch(), draw.size(), draw.size()
    width, n_values = draw.of(1, 4, 4, draw.of(0, 3)), draw.of(1, 3, 3, draw.of(0, 4))

    def floats(*shape):
        return rng.normal(size=shape).astype(draw.of(*dtypes))

    whole = draw.of("query", "key")
    q, k, v = (
        floats(*(batch if name == whole else draw.shape(batch)), rows, columns)
        for name, rows, columns in (
            ("query", n_queries, width), ("key", n_keys, width), ("value", n_keys, n_values),
        )
    )  # fmt: skip
    make, visible = mask_tree(draw, batch, n_queries, n_keys)
    is_causal, has_mask = draw.coin(), draw.coin()
    visible = visible if has_mask else np.ones(visible.shape, bool)
    visible = visible & oracles.causal(n_queries, n_keys) if is_causal else visible

    n = visible.sum(axis=-1)
    lengths = None
    if draw.coin():
        lengths = rng.integers(0, 30, size=draw.shape((*batch, n_queries)))
        n = np.broadcast_to(lengths, n.shape)
    has_heads = batch[-1:] == (2,)
    names = [name for name in LAWS if has_heads or name != "heads"]
    make_law, factor = LAWS[draw.of(*names)]
    softcap = draw.of(None, 1.5)
    scale = draw.of(None, None, 0.7, -0.4, 0.0)
    sinks = np.asarray(floats(*draw.shape(batch))) if draw.coin(0.3) else None
    bias = None
    if draw.coin():
        bias = floats(*draw.shape((*batch, n_queries, n_keys)))
        bias[rng.random(bias.shape) < 0.2] = -np.inf

    def options(f):
        return {
            "mask": make(f) if has_mask else None,
            "is_causal": is_causal,
            "law": make_law(f),
            "n_keys": None if lengths is None else f(lengths, "int32"),
            "softcap": softcap,
            "scale": scale,
            "bias": None if bias is None else f(bias),
            "sinks": None if sinks is None else f(sinks),
        }

    # Rows that are no numbers make NaN of the queries that see them, and of no other.
    clean, bad = [x.copy() for x in (q, k, v)], np.zeros(visible.shape, bool)
    if (has_mask or is_causal) and bias is None and q.size and k.size and draw.coin():
        x = draw.of(q, k, v) if v.size else draw.of(q, k)
        row = rng.integers(x.shape[-2])
        x[..., row, 0] = draw.of(np.nan, np.inf, -np.inf)
        bad[(..., row, slice(None)) if x is q else (..., row)] = True
    is_lost = (bad & visible).any(axis=-1)

    width = max(width, 1)
    expected = oracles.attention(
        *clean, visible=visible, factor=factor(n), softcap=softcap, bias=bias, sinks=sinks,
        scale=width**-0.5 if scale is None else scale,
    )  # fmt: skip
    return (q, k, v), options, expected, is_lost


@pytest.fixture(params=["", "numpy"])
def tiles(request, backend, tiny_tiles, set_blocks):
    """Tiny tiles of the generic pass, and then of NumPy's."""
    if backend.library == "jax":
        pytest.skip("each example has shapes of its own, which JAX compiles for: seconds each")
    if request.param == "numpy":
        if backend.library not in ("numpy", "torch"):
            pytest.skip("NumPy's pass is for arrays of NumPy and PyTorch")
        set_blocks(
            numpy_rows=3, numpy_large_rows=6, numpy_columns=4, numpy_untiled_logits=0,
            numpy_min_head_logits=0, numpy_min_logits=0,
        )  # fmt: skip


@pytest.mark.usefixtures("tiles")
@settings(max_examples=100)
@given(SEEDS)
def test_attention(backend, seed):
    dtypes = [*backend.dtypes, *([backend.half] if backend.half else [])]
    draw = Draw(seed)
    arrays, options, expected, is_lost = problem(draw, dtypes)
    args, options = [backend.array(x) for x in arrays], options(backend.array)
    order, n_keys = draw.of(0, 0.5, 1, 1.1, 2, math.inf), arrays[1].shape[-2]
    family = draw.of("renyi", "tsallis")

    results = [
        (it.attention(*args, **options), expected.output, 3, "float16"),
        (
            it.AttentionDistribution(*args[:2], **options).weights(),
            expected.weights[..., :n_keys],
            2,
            "float16",
        ),
        (
            it.AttentionDistribution(*args[:2], **options).statistics().variance,
            expected.variance,
            2,
            "float32",
        ),
        (
            it.attention_entropy(*args[:2], order=order, family=family, **options),
            oracles.entropy(expected.weights, order, family),
            2,
            "float32",
        ),
    ]
    # Values that are no numbers matter to the output alone.
    of_values = any(not np.isfinite(x).all() for x in arrays[2:])
    for got, want, count, least in results:
        dtype = np.result_type(*arrays[:count], np.dtype(least))
        assert got.dtype == backend.array(0, str(dtype)).dtype
        lost = is_lost if count == 3 or not of_values else np.zeros_like(is_lost)
        want = np.where(lost if want.ndim == lost.ndim else lost[..., None], np.nan, want)
        tolerance = {"float16": 4e-3, "float32": 2e-5, "float64": 1e-10}[str(dtype)]
        backend.assert_close(
            got, np.broadcast_to(want, tuple(got.shape)), rtol=tolerance, atol=tolerance
        )


class TestRefused:
    """What a stranger passes by mistake: a clear error that names the argument."""

    @pytest.mark.parametrize(
        "flag", ["no", 1, None, np.ones(2, bool)], ids=["no", "1", "None", "array"]
    )
    def test_flags(self, backend, flag):
        x = backend.array(np.ones((2, 3, 4)), "float32")
        features = it.layers.positive_features(4, 3, rng=0, like=x)
        w = backend.array(np.ones((4, 4)), "float32")
        for call in (
            lambda: it.attention(x, x, x, is_causal=flag),
            lambda: it.AttentionDistribution(x, x, is_causal=flag, law=None).factor_for_entropy(1.0),
            lambda: it.layers.multi_head_attention(x, x, x, w, w, w, w, num_heads=2, is_causal=flag),
            lambda: it.layers.linear_attention(x, x, x, features, is_causal=flag),
            lambda: it.drift.entropy_drift([(x, x)], is_causal=flag),
        ):
            with pytest.raises(TypeError, match="`is_causal` must be True or False, got"):
                call()
        with pytest.raises(TypeError, match="`enable_gqa` must be True or False"):
            it.attention_state(x, x, x, enable_gqa=flag)
        with pytest.raises(TypeError, match="`normalized` must be True or False"):
            it.attention_entropy(x, x, normalized=flag)
        with pytest.raises(TypeError, match="`interleaved` must be True or False"):
            it.layers.rotary(x, interleaved=flag)
        with pytest.raises(TypeError, match="`orthogonal` must be True or False"):
            it.layers.positive_features(2, 2, orthogonal=flag)

    @pytest.mark.host
    def test_flags_of_numpy_are_flags(self):
        x = np.ones((3, 4))
        got = it.attention(x, x, x, is_causal=np.bool_(True))
        np.testing.assert_array_equal(got, it.attention(x, x, x, is_causal=True))

    @pytest.mark.parametrize("huge", [10**20, 10**400, 10**5000], ids=["20", "400", "5000"])
    def test_huge_integers(self, backend, huge):
        x = backend.array(np.ones((3, 4)), "float32")
        slope = backend.array([1.0, 2.0], "float32")
        cases = {
            "n_keys": lambda: it.attention(x, x, x, n_keys=huge),
            "n_components": lambda: it.layers.positive_features(2, huge),
        }
        if huge > 1e300:
            cases |= {
                "scale": lambda: it.attention(x, x, x, scale=huge),
                "order": lambda: it.entropy(x, order=huge),
                "n": lambda: laws.AffineLog(slope)(huge),
                "eps": lambda: it.jl.min_dim(10, eps=huge),
            }
        if huge > 10**4300:
            cases |= {
                "axis": lambda: it.entropy(x, axis=huge),
                "method": lambda: it.jl.min_dim(10, method=huge),
            }
        for name, call in cases.items():
            with pytest.raises(ValueError, match=f"`{name}` must "):
                call()

    def test_parameters_of_laws_that_do_not_broadcast(self, backend):
        x = backend.array(np.ones((4, 3, 2)), "float32")
        two, three = (backend.array(np.ones(n), "float32") for n in (2, 3))
        n = backend.array(np.ones((4, 5)), "float32")
        for law, name in (
            (laws.AffineLog(two), "slope"),
            (laws.scaled(laws.Constant(1.0), two), "factor"),
            (laws.PowerLog(1.0, backend.array(np.ones(4), "float32"), two), "exponent"),
        ):
            with pytest.raises(ValueError, match=f"`{name}` must broadcast with"):
                law(n)
            with pytest.raises(ValueError, match=f"`{name}` must broadcast with"):
                it.attention(x, x, x, law=law, n_keys=n[:, :3])
        with pytest.raises(ValueError, match="`intercept` must broadcast with"):
            laws.AffineLog(two, three)(7)

    @pytest.mark.parametrize("rng", ["0", 1.5, -1, object()], ids=["text", "float", "-1", "object"])
    @pytest.mark.host
    def test_sources_of_draws(self, rng):
        x = np.ones((5, 2))
        for call in (
            lambda: it.jl.gaussian_projection(3, 2, rng=rng),
            lambda: it.jl.sparse_projection(3, 2, rng=rng),
            lambda: it.jl.orthogonal_projection(3, 2, rng=rng),
            lambda: it.jl.hadamard_projection(3, 2, rng=rng),
            lambda: it.jl.count_sketch(3, 2, rng=rng),
            lambda: it.jl.rotation(3, rng=rng),
            lambda: it.layers.positive_features(3, 2, rng=rng),
            lambda: it.jl.distortion(x, x, pairs=2, rng=rng),
        ):
            with pytest.raises((TypeError, ValueError), match="`rng` must be None, an integer"):
                call()

    def test_sparse_tensors(self, backend):
        if backend.library != "torch":
            pytest.skip("PyTorch alone has tensors of another layout")
        x = backend.array(np.eye(3), "float32")
        for call in (
            lambda: it.attention(x.to_sparse(), x, x),
            lambda: it.attention(x, x, x.to_sparse()),
            lambda: it.entropy(x.to_sparse()),
            lambda: laws.LogLength()(x.to_sparse()),
        ):
            with pytest.raises(TypeError, match="must be a dense tensor, got one of the layout"):
                call()

    @pytest.mark.host
    def test_sizes_beyond_all_floats(self):
        with pytest.raises(ValueError, match="`eps` must be large enough"):
            it.jl.min_dim(10, eps=1e-200)
        assert it.jl.lower_bound(10, eps=1e-200) == 0
        with pytest.raises(ValueError, match="`coefficient` must be small enough"):
            it.theory.entropy_criterion_dim(10, coefficient=1e300)
        with pytest.raises(ValueError, match="`n_features` must be at least 1, whole, and at most 2"):
            it.jl.min_dim(10, method="haar", n_features=1e300)


class TestUnusualArrays:
    @pytest.mark.host
    @pytest.mark.parametrize("dtype", [">f8", "longdouble"])
    def test_floats_that_are_no_less_than_float64_are_not_rounded(self, rng, dtype):
        q, k, v = rng.normal(size=(3, 6, 4))
        expected = oracles.attention(q, k, v, factor=oracles.log_length(np.full(6, 6)))
        args = [x.astype(dtype) for x in (q, k, v)]
        np.testing.assert_allclose(it.attention(*args), expected.output, rtol=1e-13)
        np.testing.assert_allclose(it.entropy(args[0] ** 2), it.entropy(q**2), rtol=1e-13)
        f, g = (it.jl.gaussian_projection(4, 3, rng=0, like=x) for x in (args[0], q))
        np.testing.assert_allclose(f(args[0]), g(q), rtol=1e-13)

    @pytest.mark.host
    def test_strides(self, rng):
        q, k, v = rng.normal(size=(3, 2, 6, 4)).astype("float32")
        views = [
            np.broadcast_to(q[:1], (2, 6, 4))[..., ::-1],
            np.asfortranarray(k)[:, ::-1],
            np.lib.stride_tricks.as_strided(v, (2, 6, 4), (0, v.strides[1], v.strides[2])),
        ]
        copies = [x.copy() for x in views]
        for call in (it.attention, it.attention_state):
            got, want = (call(*x, is_causal=True) for x in (views, copies))
            np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)
        swapped = [x.astype(">f4") for x in views]
        got = it.attention(*swapped, is_causal=True)
        np.testing.assert_allclose(got, it.attention(*copies, is_causal=True), rtol=1e-5, atol=1e-6)

    def test_what_is_documented_to_be_nan_does_not_warn(self, backend):
        if backend.library == "strict":
            pytest.skip("array-api-strict computes with NumPy, whose warnings it leaves on")
        p = backend.array([[-1.0, 2.0], [1.0, 1.0]], "float32")
        for x in (it.entropy(p), it.cross_entropy(p + 1.0, p), it.kl_divergence(p, p + 2.0)):
            assert np.isnan(backend.numpy(x)).tolist() == [True, False]
        logits = backend.array([[math.inf, 1.0], [2.0, 1.0]], "float32")
        assert np.isnan(backend.numpy(it.factor_for_entropy(logits, 0.5))).tolist() == [True, False]

    @pytest.mark.host
    @pytest.mark.parametrize("law", [laws.LogLength, laws.SqrtLogLength, lambda b: InfoScale(b, 8)])
    def test_parameter_without_axes(self, law):
        assert law(np.asarray(64.0))(64) == pytest.approx(1)
        with pytest.raises(ValueError, match=r"`base` must be above 1, got 0\.5\."):
            law(np.asarray(0.5))


# What a file may hold instead of what belongs there.
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats()
    | st.sampled_from([10**400, 2**62, -1, 0, 1e308, "", "é", "AA==", "yarn", "llama4_text"]),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["of", "shape", "float", "law"]), x),
    max_leaves=4,
)  # fmt: skip
_LAW = {
    "law": "scaled",
    "of": {"law": "Knots", "lengths": [1, 2], "factors": [[1.0, 2.0]]},
    "factor": 1.0,
}
_CONFIG = {
    "model_type": "beam", "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 8,
        },
    },
}  # fmt: skip
_READERS = {
    "law": (laws.from_dict, _LAW),
    "configuration": (laws.from_config, _CONFIG),
}


def _paths(x, path=()):
    """Where the parts of nested lists and dictionaries are."""
    yield path
    if isinstance(x, (dict, list)):
        for key, part in x.items() if isinstance(x, dict) else enumerate(x):
            yield from _paths(part, (*path, key))


def _with(x, path, new):
    if not path:
        return new
    x = copy.copy(x)
    x[path[0]] = _with(x[path[0]], path[1:], new)
    return x


@pytest.mark.host
@pytest.mark.parametrize("name", _READERS)
@settings(max_examples=60)
@given(data=st.data())
def test_files_are_read_or_refused_by_name(name, data):
    """Whatever takes the place of a part: the result, or a message that names what is wrong."""
    read, good = _READERS[name]
    path = data.draw(st.sampled_from(list(_paths(good))))
    message = "`"
    try:
        read(_with(good, path, data.draw(_JSON)))
    except (TypeError, ValueError) as error:
        message = str(error)
    assert message.startswith("`")

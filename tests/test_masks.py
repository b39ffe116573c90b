"""Masks against dense arrays, block by block and counted."""

import copy
import gc
import math
import pickle
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import isentropic as it
from isentropic import laws, masks
from isentropic.masks import Frame


def _dense(mask, backend, n_queries, n_keys, sizes=None):
    """The whole mask, put together from blocks."""
    frame = Frame(backend.xp, backend.device, n_queries, n_keys)
    rows, columns = sizes or (n_queries, n_keys)
    parts = []
    for i in range(0, n_queries, rows):
        line = []
        for j in range(0, n_keys, columns):
            size = min(rows, n_queries - i), min(columns, n_keys - j)
            block = backend.numpy(mask.block(frame, (i, size[0]), (j, size[1])))
            line.append(np.broadcast_to(block, (*block.shape[:-2], *size)))
        parts.append(np.concatenate(line, axis=-1))
    return np.concatenate(parts, axis=-2)


def _examples(backend):
    """(mask, dense mask) for 6 queries and 9 keys in a batch of 2 × 3."""
    f = backend.array
    rows, keys = np.arange(6)[:, None], np.arange(9)
    offsets = np.array([[0], [3]])
    lengths = np.array([[4, 0, 9]])
    ids = np.array([0, 0, 1, 2, 1, 2, 2, 0, 1])
    explicit = np.random.default_rng(3).random((2, 1, 6, 9)) < 0.5
    return {
        "causal": (masks.causal(), keys <= rows + 3),
        "causal-0": (masks.causal(0), keys <= rows),
        "causal-offsets": (masks.causal(f(offsets)), keys <= rows + offsets[..., None, None]),
        "window": (masks.window(2, 1), oracles.band(6, 9, 2, 1)),
        "window-left": (masks.window(2, None), keys >= rows + 3 - 2),
        "window-right": (masks.window(None, 1), keys <= rows + 4),
        "window-far": (masks.window(1, offset=-3), (keys <= rows - 3) & (keys >= rows - 4)),
        "padding": (masks.padding(4), np.broadcast_to(keys < 4, (6, 9))),
        "padding-left": (masks.padding(4, side="left"), np.broadcast_to(keys >= 5, (6, 9))),
        "padding-lengths": (
            masks.padding(f(lengths)),
            np.broadcast_to(keys < lengths[..., None, None], (1, 3, 6, 9)),
        ),
        "segments": (masks.segments(f(ids)), ids[3:, None] == ids),
        "segments-query": (masks.segments(f(ids), f(ids[:6])), ids[:6, None] == ids),
        "packed": (
            masks.packed(f(np.asarray(STARTS)), f(np.asarray(KEY_STARTS))),
            oracles.packed(STARTS, KEY_STARTS),
        ),
        "packed-causal": (
            masks.causal() & masks.packed(STARTS, KEY_STARTS),
            oracles.packed(STARTS, KEY_STARTS, right=0),
        ),
        "packed-nested": (
            masks.packed(f(np.asarray(STARTS)), f(np.asarray(KEY_STARTS)))
            & masks.padding(f(lengths))
            & (masks.window(1) | ~masks.causal())
            & masks.causal(6),
            oracles.packed(STARTS, KEY_STARTS)
            & (keys < lengths[..., None, None])
            & (oracles.packed(STARTS, KEY_STARTS, 1, 0) | ~oracles.packed(STARTS, KEY_STARTS, right=0))
            & (keys <= rows + 6),
        ),
        "packed-offset": (
            masks.packed(STARTS, KEY_STARTS) & masks.causal(1),
            oracles.packed(STARTS, KEY_STARTS) & (keys <= rows + 1),
        ),
        "packed-window": (
            masks.packed(f(np.asarray(STARTS)), f(np.asarray(KEY_STARTS))) & masks.window(2, 1),
            oracles.packed(STARTS, KEY_STARTS, 2, 1),
        ),
        "packed-windows": (
            masks.packed(STARTS, KEY_STARTS) & masks.window(1, 2) & masks.window(2, 0),
            oracles.packed(STARTS, KEY_STARTS, 1, 0),
        ),
        "others": (~masks.window(0), ~oracles.band(6, 9, 0, 0)),
        "before": (masks.causal() & ~masks.window(0), keys < rows + 3),
        "not-both": (~(masks.causal() & masks.window(2)), ~oracles.band(6, 9, 2, 0)),
        "not-array": (
            ~masks.padding(f(lengths)) & ~masks.as_mask(f(explicit)),
            ~((keys < lengths[..., None, None]) | explicit),
        ),
        "both": (masks.causal() & masks.window(4), oracles.band(6, 9, 4, 0)),
        "either": (masks.window(0) | masks.padding(1), oracles.band(6, 9, 0, 0) | (keys < 1)),
        "array": (masks.causal() & f(explicit), (keys <= rows + 3) & explicit),
        "array-or": (masks.causal() | f(explicit), (keys <= rows + 3) | explicit),
        "nested": (
            (masks.segments(f(ids)) | masks.padding(f(lengths), side="left")) & masks.causal(),
            ((ids[3:, None] == ids) | (keys >= 9 - lengths[..., None, None])) & (keys <= rows + 3),
        ),
        "own": (
            masks.causal() & Strided(f(lengths + 1), 1),
            (keys <= rows + 3) & ((rows + 1 - keys) % (lengths + 1)[..., None, None] == 0),
        ),
    }


# Three sequences of 2, 0 and 4 queries, and of 4, 1 and 4 keys.
STARTS, KEY_STARTS = (0, 2, 2, 6), (0, 4, 5, 9)

NAMES = [
    "array", "array-or", "before", "both", "causal", "causal-0", "causal-offsets", "either", "nested",
    "not-array", "not-both", "others", "own", "packed", "packed-causal", "packed-nested",
    "packed-offset", "packed-window", "packed-windows", "padding", "padding-left", "padding-lengths", "segments", "segments-query", "window", "window-far", "window-left", "window-right",
]  # fmt: skip


class Strided(masks.Mask):
    """A mask of a user: every so-manieth key, counted from the query plus a shift."""

    step: Any
    shift: int

    def block(self, frame, rows, columns):
        query = frame.positions(rows)[:, None] + self.shift
        distance = query - frame.positions(columns)[None, :]
        return distance[(None,) * self.step.ndim + (...,)] % self.step[..., None, None] == 0


class Early(masks.Mask):
    """A mask of a user: the first keys of each sequence."""

    length: Any

    def block(self, frame, rows, columns):
        return frame.positions(columns) < self.length[..., None, None]


class Window(masks.Mask):
    """A mask of a user, with a default."""

    size: Any = 3

    def block(self, frame, rows, columns):
        distance = frame.positions(rows)[:, None] - frame.positions(columns)[None, :]
        return (distance >= 0) & (distance < self.size)


class TestMasks:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("sizes", [None, (2, 4), (5, 1)])
    def test_blocks(self, backend, name, sizes):
        mask, expected = _examples(backend)[name]
        mask.check((2, 3), 6, 9)
        np.testing.assert_array_equal(_dense(mask, backend, 6, 9, sizes), expected)

    @pytest.mark.parametrize("name", NAMES)
    def test_rows(self, backend, name):
        mask, dense = _examples(backend)[name]
        rows = mask.rows(np.asarray([1, 2, 5]), 6, 9, like=backend.array(0.0))
        np.testing.assert_array_equal(backend.numpy(rows), dense[..., [1, 2, 5], :])

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.usefixtures("tiny_tiles")
    def test_visible_count(self, backend, name):
        mask, expected = _examples(backend)[name]
        count = mask.visible_count(6, 9, like=backend.array(0.0))
        assert backend.xp.isdtype(count.dtype, "integral")
        got = np.broadcast_to(backend.numpy(count), expected.shape[:-1])
        np.testing.assert_array_equal(got, expected.sum(-1))

    def test_count_takes_the_library_of_the_mask(self, backend):
        count = masks.padding(backend.array([3, 4])).visible_count(2, 9)
        assert type(count) is type(backend.array(0.0))
        assert type(masks.causal().visible_count(2, 9)) is np.ndarray

    def test_names(self, backend):
        assert sorted(_examples(backend)) == NAMES

    def test_zero_sizes(self, backend):
        one = backend.array(np.ones((1, 1), bool))
        for mask in (masks.causal(), masks.window(3) | masks.padding(2), masks.causal() & one):
            assert mask.visible_count(0, 5, like=one).shape == (0,)
            np.testing.assert_array_equal(backend.numpy(mask.visible_count(3, 0, like=one)), [0, 0, 0])

    def test_array_on_the_left(self, backend):
        if backend.library in ("torch", "strict"):
            pytest.skip("the library refuses what is no array of its own before it asks the mask")
        array = backend.array(np.eye(3, dtype=bool))
        np.testing.assert_array_equal(_dense(array & masks.causal(), backend, 3, 3), np.eye(3))
        both = array | masks.causal()
        np.testing.assert_array_equal(_dense(both, backend, 3, 3), np.tri(3, dtype=bool))

    @pytest.mark.host
    def test_complement(self):
        mask = masks.causal() & masks.window(2)
        assert ~~mask is mask
        other = mask & ~masks.padding(np.asarray([3, 5]))
        assert repr(masks.from_description(masks.describe(other))) == repr(other)

    @pytest.mark.host
    def test_complements_of_intervals_are_counted_without_tiles(self, monkeypatch):
        """In O(L) time."""
        monkeypatch.setattr(masks.Mask, "block", None)
        for kind in (masks._Band, masks._And, masks._Not):
            monkeypatch.setattr(kind, "block", None)
        n = 10**6
        np.testing.assert_array_equal((~masks.window(0)).visible_count(n, n), n - 1)
        before = masks.causal() & ~masks.window(0)
        np.testing.assert_array_equal(before.visible_count(n, n), np.arange(n))

    @given(
        n_queries=st.integers(1, 12), n_keys=st.integers(1, 12),
        left=st.none() | st.integers(0, 12), right=st.none() | st.integers(0, 12),
        offset=st.none() | st.integers(-15, 15), length=st.integers(0, 14),
    )  # fmt: skip
    def test_count_of_intervals(self, n_queries, n_keys, left, right, offset, length):
        mask = masks.window(left, right, offset=offset) & masks.padding(length)
        position = np.arange(n_queries)[:, None] + (n_keys - n_queries if offset is None else offset)
        keys = np.arange(n_keys)
        dense = (keys < length) & (keys == keys)
        dense = dense & (True if left is None else keys >= position - left)
        dense = dense & (True if right is None else keys <= position + right)
        expected = np.broadcast_to(dense, (n_queries, n_keys)).sum(-1)
        np.testing.assert_array_equal(mask.visible_count(n_queries, n_keys), expected)


class TestErrors:
    @pytest.mark.parametrize(
        ("make", "shape"),
        [
            (lambda f: masks.padding(f([2, 3])), r"\(B, 1\), got \(2,\)"),
            (lambda f: masks.causal(offset=f([2, 3])), r"\(B, 1\), got \(2,\)"),
            (lambda f: masks.causal() & masks.window(3, offset=f([2, 3])), r"\(B, 1\), got \(2,\)"),
            (lambda f: masks.segments(f(np.zeros((2, 9), int))), r"\(B, 1, 9\), got \(2, 9\)"),
        ],
    )
    def test_one_per_sequence_is_not_taken_for_one_per_head(self, backend, make, shape):
        # As many sequences as heads: it would broadcast.
        q, k = backend.array(np.ones((2, 2, 9, 4))), backend.array(np.ones((2, 2, 9, 4)))
        with pytest.raises(ValueError, match=f"one per sequence has the shape {shape}"):
            it.attention(q, k, k, mask=make(backend.array))

    def test_what_masks_are_not(self):
        with pytest.raises(TypeError, match=r"`lengths` .* got bool: .* is itself a `mask`"):
            masks.padding(np.asarray([True, False]))

    def test_negative_lengths(self):
        with pytest.raises(
            ValueError, match="`lengths` must be at least 0, got an array with negative"
        ):
            masks.padding(np.asarray([[-3], [4]]))

    def test_construction(self, backend):
        f = backend.array
        with pytest.raises(ValueError, match=r"`left` must be at least 0, got -1"):
            masks.window(-1)
        with pytest.raises(TypeError, match=r"`right` must be an integer, got float"):
            masks.window(1, 2.0)
        with pytest.raises(TypeError, match=r"`left` must be an integer, got bool"):
            masks.window(True)
        with pytest.raises(
            TypeError, match=r"`offset` must be an integer or an array of an integer dtype"
        ):
            masks.causal(1.5)
        with pytest.raises(TypeError, match=r"`offset` must be an integer or .* got .*float32"):
            masks.causal(f([1.0], "float32"))
        with pytest.raises(ValueError, match=r"`lengths` must be at least 0, got -2"):
            masks.padding(-2)
        with pytest.raises(TypeError, match=r"`lengths` must be an integer"):
            masks.padding(None)
        with pytest.raises(ValueError, match=r"`side` must be 'right' or 'left', got 'top'"):
            masks.padding(3, side="top")
        with pytest.raises(TypeError, match=r"`ids` must have an integer dtype, got"):
            masks.segments(f([1.0], "float32"))
        with pytest.raises(ValueError, match=r"`ids` must have at least 1 dimension"):
            masks.segments(f(1))
        with pytest.raises(TypeError, match=r"`ids` must be an array .* got list"):
            masks.segments([1, 2])
        with pytest.raises(TypeError, match=r"`mask` must be boolean"):
            masks.causal() & f([1])
        with pytest.raises(
            TypeError, match=r"`cu_seqlens` must be an array of integers, or .* got .*32"
        ):
            masks.packed(f([0.0, 1.0], "float32"))
        with pytest.raises(TypeError, match=r"`cu_seqlens` must be an array of integers"):
            masks.packed([0, 1.5])
        with pytest.raises(TypeError, match=r"`cu_seqlens` must be an array of integers, .* got int"):
            masks.packed(3)
        with pytest.raises(ValueError, match=r"`cu_seqlens` must have one axis, got \(1, 2\)"):
            masks.packed(f([[0, 1]]))
        with pytest.raises(ValueError, match=r"`cu_seqlens` must have at least one number"):
            masks.packed([])
        with pytest.raises(
            ValueError, match=r"`cu_seqlens` must begin with 0 and not fall, got \[1, 2\]"
        ):
            masks.packed([1, 2])
        with pytest.raises(ValueError, match=r"`cu_seqlens_k` must begin with 0 and not fall"):
            masks.packed([0, 3], [0, -3])
        with pytest.raises(
            ValueError, match=r"`cu_seqlens_k` must have 3 numbers, as `cu_seqlens` has"
        ):
            masks.packed([0, 3, 4], [0, 3])

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda f: masks.segments(f(np.zeros(4, int))), r"`ids` must have a last dimension of 9"),
            (
                lambda f: masks.segments(f(np.zeros((4, 9), int))),
                r"`ids` must have a shape broadcastable",
            ),
            (
                lambda f: masks.segments(f(np.zeros(9, int)), f(np.zeros(9, int))),
                r"`query_ids` must have a last dimension of 6",
            ),
            (
                lambda f: masks.padding(f([1, 2, 3, 4])),
                r"`lengths` must have a shape broadcastable to \(2, 3\)",
            ),
            (
                lambda f: masks.packed([0, 2, 7], [0, 4, 9]),
                r"`cu_seqlens` must end at the number of queries, 6 \(`masks.segments` takes ids of tokens\), got 7",
            ),
            (
                lambda f: masks.packed([0, 2, 6]) & masks.causal(),
                r"`cu_seqlens` must end at the number of keys, 9 \(`masks.segments` takes ids of tokens\), got 6",
            ),
            (
                lambda f: masks.padding(3) & masks.packed([0, 2, 6], [0, 4, 8]),
                r"`cu_seqlens_k` must end at the number of keys, 9 \(`masks.segments` takes ids of tokens\), got 8",
            ),
            (
                lambda f: masks.causal(f([[[1]]])),
                r"`offset` must have a shape broadcastable to \(2, 3\)",
            ),
            (
                lambda f: masks.causal() & masks.padding(f([1, 2, 3, 4])),
                r"`lengths` must have a shape broadcastable to \(2, 3\)",
            ),
        ],
    )
    def test_shapes(self, backend, make, message):
        with pytest.raises(ValueError, match=message):
            make(backend.array).check((2, 3), 6, 9)

    def test_counts_are_checked(self, backend):
        f = backend.array
        with pytest.raises(ValueError, match=r"`mask` must have a shape broadcastable to \(2, 5\)"):
            (masks.causal() & f(np.ones((8, 8), bool))).visible_count(2, 5)
        with pytest.raises(ValueError, match=r"`ids` must have a last dimension of 4"):
            masks.segments(f(np.zeros(8, int))).visible_count(4, 4)
        with pytest.raises(TypeError, match=r"`n_queries` must be an integer, got float"):
            masks.causal().visible_count(3.0, 4)
        with pytest.raises(ValueError, match=r"`n_keys` must be at least 0, got -4"):
            masks.causal().visible_count(3, -4)

    @pytest.mark.every_mode
    def test_unlimited_integers(self, backend):
        like = backend.array(0.0)
        for mask, expected in (
            (masks.window(2**63 - 1, 2**31), [5, 5, 5]),
            (masks.causal(2**31), [5, 5, 5]),
            (masks.causal(-(2**31)), [0, 0, 0]),
            (masks.causal(10**400), [5, 5, 5]),
            (masks.window(2, offset=2**31), [0, 0, 0]),
            (masks.window(2**40, offset=2**40 + 1), [4, 3, 2]),
            (masks.window(None, 2**40, offset=-(2**40)), [1, 2, 3]),
            (masks.window(2**40, 2**40, offset=0), [5, 5, 5]),
            (masks.padding(2**31, side="left"), [5, 5, 5]),
            (masks.padding(2**70), [5, 5, 5]),
        ):
            count = mask.visible_count(3, 5, like=like)
            np.testing.assert_array_equal(backend.numpy(count), expected)
            visible = backend.numpy(mask.rows(range(3), 3, 5, like=like))
            np.testing.assert_array_equal(visible.sum(-1), expected)
            q, k = (backend.array(np.ones((n, 2)), "float32") for n in (3, 5))
            h = backend.numpy(it.attention_entropy(q, k, mask=mask))
            np.testing.assert_allclose(h, np.log(np.maximum(expected, 1)), atol=1e-6)

    @pytest.mark.every_mode
    def test_numbers_beyond_the_integers_of_the_library(self, backend):
        like = backend.array(0.0)
        for sizes, name in (((2**63, 3), "n_queries"), ((3, 2**70), "n_keys")):
            with pytest.raises(ValueError, match=f"`{name}` must be within the range of .*int"):
                masks.causal().visible_count(*sizes, like=like)
        with pytest.raises(ValueError, match=r"`n_keys` must be within the range of .*int"):
            masks.causal().rows([0], 3, 2**70, like=like)

    @pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
    def test_unsigned_integers(self, backend, dtype):
        if backend.library == "jax" and dtype == "uint64" and not backend.float64:
            pytest.skip("JAX has 32 bits")
        for numbers in ([0, 2, 3], [np.iinfo(dtype).max, 0, 1]):
            x = backend.array(np.asarray(numbers, dtype))
            for mask in (masks.padding(x), masks.causal(x), masks.padding(x, side="left")):
                count = backend.numpy(mask.visible_count(1, 4))[:, 0]
                seen = np.minimum(np.asarray(numbers, float) + ("causal" in repr(mask)), 4)
                np.testing.assert_array_equal(count, seen)
            q, k = (backend.array(np.ones((n, 2)), "float32") for n in (3, 5))
            assert it.attention(q, k, k, n_keys=x).shape == (3, 2)

    def test_more_queries_than_keys(self, backend):
        mask = masks.segments(backend.array([1, 2]))
        with pytest.raises(
            ValueError, match=r"`query_ids` must be given where .* \(3\) than keys \(2\)"
        ):
            mask.check((), 3, 2)


@pytest.mark.host
def _leaves(kind):
    below = kind.__subclasses__()
    return [x for child in below for x in _leaves(child)] if below else [kind]


@pytest.mark.host
def test_every_kind_can_be_described():
    """What torch.compile needs, and nothing else."""
    gc.collect()  # classes that were refused
    assert set(_leaves(masks.Mask)) <= set(masks._KINDS.values())
    for kind in _leaves(masks.Mask):
        mask = kind(*[masks.causal()] * len(kind._fields))
        again = masks.from_description(masks.describe(mask))
        assert type(again) is kind
        assert vars(again).keys() == vars(mask).keys()


class TestOwn:
    """A subclass with one method is a mask everywhere."""

    def _call(self, q, k, v, mask):
        state = it.attention_state(q, k, v, mask=mask, law=laws.LogLength(4), softcap=5.0)
        out = it.attention(q, k, v, mask=mask, law=laws.LogLength(4))
        return out, state.output(), it.attention_entropy(q, k, mask=mask, normalized=True)

    def _masks(self, backend):
        lengths = np.asarray([[2, 3, 1], [4, 1, 5]])
        gap = np.arange(6)[:, None] + 1 - np.arange(9)
        visible = np.stack([gap % n == 0 for n in lengths.ravel()])
        dense = backend.array(visible.reshape(2, 3, 6, 9))
        return Strided(backend.array(lengths), 1) & masks.causal(), masks.as_mask(
            dense
        ) & masks.causal()

    @pytest.mark.parametrize("has_threads", [False, True])
    def test_attention(self, backend, rng, set_blocks, has_threads):
        if has_threads:
            set_blocks(numpy_min_head_logits=0, numpy_min_logits=0, numpy_rows=2, numpy_columns=4)
        q, k, v = (backend.array(rng.normal(size=(2, 3, n, 4))) for n in (6, 9, 9))
        mask, dense = self._masks(backend)
        for got, want in zip(self._call(q, k, v, mask), self._call(q, k, v, dense), strict=True):
            backend.assert_close(got, want, rtol=1e-5, atol=1e-6)

    def test_compiled(self, backend, rng):
        arrays = [backend.array(rng.normal(size=(2, 3, n, 4))) for n in (6, 9, 9)]
        mask, dense = self._masks(backend)
        if backend.library == "jax":
            import jax

            jitted = jax.jit(self._call)
            for got, want in zip(jitted(*arrays, mask), jitted(*arrays, dense), strict=True):
                backend.assert_close(got, want, rtol=1e-5, atol=1e-6)
        elif backend.library == "torch":
            import torch

            torch.compiler.reset()
            compiled = torch.compile(self._call, fullgraph=True, backend="aot_eager")
            arrays = [x.requires_grad_() for x in arrays]
            found = [compiled(*arrays, mask), self._call(*arrays, dense)]
            for got, want in zip(*found, strict=True):
                torch.testing.assert_close(got, want)
            gradients = [torch.autograd.grad(sum(x.sin().sum() for x in y), arrays) for y in found]
            torch.testing.assert_close(*gradients)
            torch.compiler.reset()
        else:
            pytest.skip("does not compile")

    def test_large_calls(self, backend, rng):
        """They go over sequences and heads one by one, and the arrays of the mask remain arrays."""
        q, k, v = (backend.array(rng.normal(size=(2, 1, 2000, 4))) for _ in range(3))
        lengths = backend.array(np.asarray([[3], [1500]]))
        got, expected = (
            it.attention(q, k, v, mask=mask, law=None)
            for mask in (Early(lengths), masks.padding(lengths))
        )
        backend.assert_close(got, expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.host
    def test_arguments(self):
        assert Early(3) == Early(length=3)
        assert Window() == Window(3)
        assert Window().visible_count(5, 5).tolist() == [1, 2, 3, 3, 3]
        assert repr(Window()) == "Window(size=3)"
        for call, message in {
            lambda: Window(siez=1): "unexpected keyword argument 'siez'",
            lambda: Window(1, 2): "takes from 1 to 2 positional arguments",
            lambda: Early(): "missing 1 required positional argument: 'length'",
        }.items():
            with pytest.raises(TypeError, match=message):
                call()

    @pytest.mark.host
    @pytest.mark.parametrize(
        "decorator", [dataclass, dataclass(frozen=True), dataclass(frozen=True, eq=False)]
    )
    def test_dataclasses(self, decorator):
        @decorator
        class Own(masks.Mask):
            size: Any

            def block(self, frame, rows, columns):
                return frame.positions(columns)[None, :] < self.size

        assert Own(4) == Own(4) != Own(5)
        assert hash(Own(4)) == hash(Own(4))
        assert Own(np.arange(2)) == Own(np.arange(2))
        with pytest.raises(FrozenInstanceError):
            Own(4).size = 5

    @pytest.mark.host
    def test_classes_of_one_name(self):
        def made(least):
            class Far(masks.Mask):
                def block(self, frame, rows, columns):
                    distance = frame.positions(rows)[:, None] - frame.positions(columns)[None, :]
                    return distance >= least

            return Far()

        for mask in [made(0), made(1)]:
            assert masks.from_description(masks.describe(mask)) == mask

    @pytest.mark.host
    def test_names_of_fields(self):
        with pytest.raises(TypeError, match=r"Counted\.count` must have another name"):

            class Counted(masks.Mask):
                count: int

    @pytest.mark.host
    @pytest.mark.parametrize(
        "size", ["a b", "", "None", "number", "a\nb", 0.1, math.inf, True, None, (1, 2), ("x", 1.5, ())]
    )
    def test_kinds_of_fields(self, size):
        mask = masks.causal() & Window(size)
        assert masks.from_description(masks.describe(mask)) == mask

    @pytest.mark.host
    def test_text_and_shapes(self):
        mask = Strided(np.asarray([2]), 1)
        assert repr(~mask) == "~Strided(step=<array (1,)>, shift=1)"
        assert mask == Strided(np.asarray([2]), 1)
        with pytest.raises(ValueError, match="`step` must have an axis for each batch and head axis"):
            mask.check((2, 3), 6, 9)


class TestLargeIntegers:
    """A number beyond all positions stands for the largest position."""

    @pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64"])
    def test_arrays(self, backend, dtype):
        if not hasattr(backend.xp, dtype) or (backend.library == "torch" and "u" in dtype):
            pytest.skip("no such dtype, or one in which PyTorch computes nothing")
        largest = backend.array(np.asarray(np.iinfo(dtype).max, dtype))
        if str(np.asarray(backend.numpy(largest)).dtype) != dtype:
            pytest.skip("JAX has 32 bits")
        for mask in (
            masks.padding(largest),
            masks.padding(largest, side="left"),
            masks.causal(largest),
        ):
            assert backend.numpy(mask.visible_count(3, 3)).tolist() == [3, 3, 3]
            assert _dense(mask, backend, 3, 3).all()

    @pytest.mark.parametrize("dtype", ["int8", "uint8", "int64"])
    def test_small_ones_are_themselves(self, backend, dtype):
        lengths = backend.array(np.asarray([0, 2, 3], dtype))
        counts = backend.numpy(masks.padding(lengths).visible_count(1, 5))
        assert counts.ravel().tolist() == [0, 2, 3]

    def test_numbers(self):
        assert masks.padding(2**40).visible_count(1, 3).tolist() == [3]


class TestRows:
    def test_none(self, backend):
        like = backend.array(np.zeros(1))
        assert masks.causal().rows([], 3, 4, like=like).shape == (0, 4)

    @pytest.mark.parametrize("row", [-1, 3])
    def test_that_do_not_exist(self, row):
        with pytest.raises(ValueError, match=rf"`rows` must be in \[0, 3\), got {row}"):
            masks.causal().rows([0, row], 3, 3, like=np.empty(0))


def test_masks_are_neither_true_nor_false():
    with pytest.raises(TypeError, match="neither true nor false"):
        masks.causal() and masks.window(8)


@pytest.mark.host
def test_masks_do_not_change():
    mask = masks.causal(2) & masks.padding(3)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'first'"):
        mask.first = masks.causal()
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'offset'"):
        del mask.first.offset
    for same in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert same == mask
        assert hash(same) == hash(mask)


class TestValues:
    """Masks are compared by value, and are nodes of the trees of JAX and PyTorch."""

    def test_equality(self, backend):
        masks_by_name = {name: mask for name, (mask, _) in _examples(backend).items()}
        for name, (same, _) in _examples(backend).items():
            assert [x for x, mask in masks_by_name.items() if mask == same] == [name]
            if same.arrays:
                with pytest.raises(TypeError, match="unhashable"):
                    hash(same)
            else:
                assert hash(same) == hash(masks_by_name[name])
        f = backend.array
        assert masks.padding(f([1, 2])) != masks.padding(f([1, 3]))
        assert masks.padding(3) != masks.padding(f(3))
        assert masks.causal() != "causal"

    @pytest.mark.parametrize("name", NAMES)
    def test_leaves(self, backend, tree, name):
        mask, _ = _examples(backend)[name]
        leaves, structure = tree.tree_flatten(mask)
        assert all(a is b for a, b in zip(leaves, mask.arrays, strict=True))
        same = tree.tree_map(lambda x: x, mask)
        assert same == mask
        assert tree.tree_structure(same) == structure
        assert sum(structure == tree.tree_structure(x) for x, _ in _examples(backend).values()) == 1
        assert copy.deepcopy(same) == mask
        empty = tree.tree_map(lambda x: None, mask)
        assert tree.tree_map(lambda x: x, empty) == empty

    def test_argument_of_a_transformed_function(self, backend, tree):
        x = backend.array(np.random.default_rng(0).normal(size=(2, 3, 9, 4)))
        lengths = backend.array([4, 9])
        expected = it.attention(x, x, x, mask=masks.causal() & masks.padding(lengths[:, None]))
        mask = masks.causal() & masks.padding(lengths)

        def attend(x, mask):
            return it.attention(x, x, x, mask=mask)

        if backend.library == "torch":
            backend.assert_close(backend.xp.func.vmap(attend)(x, mask), expected)
            return
        import jax

        backend.assert_close(jax.jit(jax.vmap(attend))(x, mask), expected)
        traces = []

        def count(x, mask):
            traces.append(mask)
            return attend(x, mask)

        traced = jax.jit(count, static_argnames="mask")
        for n in (2, 2, 3, 2):
            mask = masks.causal() & masks.window(n)
            backend.assert_close(traced(x, mask=mask), attend(x, mask))
        assert traces == [masks.causal() & masks.window(n) for n in (2, 3)]


@pytest.mark.host
@pytest.mark.parametrize("right", [0, 2, None])
@pytest.mark.parametrize("left", [None, 3])
def test_counts_that_numbers_tell(left, right):
    """Where `counts` has an answer, it is that of the blocks, also if some queries see every key or none."""
    told = 0
    for n_queries, n_keys in ((1, 1), (3, 8), (5, 5), (9, 4)):
        frame = Frame(np, None, n_queries, n_keys)
        for offset in (None, *range(-10, 11)):
            mask = masks.window(left, right, offset=offset)
            found, expected = mask.counts(frame), mask.visible_count(n_queries, n_keys)
            told += found is not None
            assert found is None or list(found) == np.broadcast_to(expected, n_queries).tolist()
    assert (told > 10) == (left is None and right is not None)


@pytest.mark.parametrize("offset", [2, 3, 4, 9])
def test_a_law_counts_no_more_keys_than_there_are(backend, rng, offset):
    q, k, v = (backend.array(rng.normal(size=(n, 4))) for n in (3, 5, 5))
    mask, law = masks.causal(offset=offset), it.laws.LogLength(3)
    n = backend.array(np.minimum(np.arange(3) + offset + 1, 5))
    for function, arrays in ((it.attention, (q, k, v)), (it.attention_entropy, (q, k))):
        expected = function(*arrays, mask=mask, law=law, n_keys=n)
        backend.assert_close(function(*arrays, mask=mask, law=law), expected, rtol=1e-6)


@pytest.mark.host
def test_repr_is_the_call():
    ids = np.asarray([0, 0, 1])
    for shown in (
        "causal()",
        "causal(offset=3)",
        "window(4, 0)",
        "window(None, None, offset=2)",
        "padding(3, side='left')",
        "causal() & padding(2, side='right')",
        "(causal() | window(1, 1)) & padding(2, side='right')",
        "causal() & ~window(0, 0)",
        "~(causal() & ~window(2, 0))",
        "~(causal() | window(1, 1))",
    ):
        assert repr(eval(shown, vars(masks))) == shown
    assert repr(masks.causal() & masks.segments(ids)) == "causal() & segments(<array (3,)>)"
    assert repr(masks.causal() & (ids > 0)) == "causal() & <array (3,)>"


@pytest.mark.parametrize("offset", [2**29 + 1, 2**31, 2**40, 2**70])
def test_offsets_beyond_every_position_show_or_hide_all(backend, rng, offset):
    q, k, v = (backend.array(x, "float32") for x in rng.normal(size=(3, 5, 4)))
    everything = it.attention(q, k, v, n_keys=5)
    for mask in (masks.causal(offset), masks.window(offset, offset), masks.padding(offset)):
        backend.assert_close(it.attention(q, k, v, mask=mask), everything, rtol=1e-5, atol=1e-6)
    nothing = it.attention(q, k, v, mask=masks.causal(-offset))
    backend.assert_close(nothing, np.zeros((5, 4), "float32"))


class TestPacked:
    def test_all_lengths(self, rng):
        """Sequences of 0 to 4 queries and keys, with every kind of band, in blocks of all sizes."""
        frames = {}
        for _ in range(60):
            n = rng.integers(1, 5)
            starts, key_starts = (np.cumsum([0, *rng.integers(0, 5, n)]) for _ in range(2))
            shape = int(starts[-1]), int(key_starts[-1])
            if min(shape) == 0:
                continue
            frame = frames.setdefault(shape, Frame(np, "cpu", *shape))
            for left, right in ((None, None), (None, 0), (2, 0), (1, 1), (None, 2), (3, None)):
                expected = oracles.packed(
                    starts, key_starts, *(np.inf if x is None else x for x in (left, right))
                )
                for kind in (np.asarray, np.ndarray.tolist):
                    mask = masks.packed(kind(starts), kind(key_starts)) & masks.window(left, right)
                    got = mask.block(frame, (0, shape[0]), (0, shape[1]))
                    np.testing.assert_array_equal(got, expected)
                    for row in range(shape[0]):
                        for size in range(1, shape[0] - row + 1):
                            self.check_bounds(mask, frame, (row, size), expected[row : row + size])

    def check_bounds(self, mask, frame, rows, visible):
        first, end = mask.reach(frame, rows)
        seen = np.nonzero(visible.any(0))[0]
        assert not len(seen) or (first <= seen[0] and seen[-1] < end)
        first, end = mask.fully_visible(frame, rows)
        assert visible[:, max(first, 0) : max(end, 0)].all()

    def test_tiles_between_sequences_are_skipped(self, backend, rng, set_blocks):
        """Of 8 sequences side by side, an eighth of the tiles is computed."""
        from isentropic._attention import generic

        set_blocks(tile=0, rows=8, columns=8)
        q, cu = backend.array(rng.normal(size=(1, 64, 4)), "float32"), np.arange(0, 65, 8)
        computed = []
        original = generic.Tiles.logits

        def counted(self, rows, columns):
            computed.append(rows[1] * columns[1])
            return original(self, rows, columns)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generic.Tiles, "logits", counted)
            mask = masks.packed(backend.array(cu))
            out = it.attention(q, q, q, mask=mask, implementation="generic", law=None)
        if backend.library != "strict" and not backend.is_gpu:  # whose numbers nothing reads
            assert sum(computed) <= 64 * 64 / 8
        x = backend.numpy(q)[0].astype(float)
        expected = np.concatenate([oracles.attention(y, y, y).output for y in np.split(x, 8)])
        np.testing.assert_allclose(backend.numpy(out)[0], expected, rtol=1e-4, atol=1e-5)

    # As FlashAttention's own tests vary them: numbers of sequences, lengths, groups of heads, windows.
    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("window", [None, (5, 0), (3, 4)])
    @pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 37), (23, 23), (31, 12), (40, 70)])
    @pytest.mark.parametrize("groups", [1, 2, 6])
    def test_each_sequence_by_itself(self, backend, is_causal, window, n_queries, n_keys, groups):
        rng = np.random.default_rng(n_keys + groups)
        lengths = [(rng.integers(0, n_queries + 1), rng.integers(0, n_keys + 1)) for _ in range(3)]
        lengths.append((n_queries, n_keys))
        starts, key_starts = (np.cumsum([0, *x]) for x in zip(*lengths, strict=True))
        q = rng.normal(size=(6, starts[-1], 8))
        k, v = (rng.normal(size=(groups, key_starts[-1], e)) for e in (8, 5))
        mask = masks.packed(backend.array(starts), backend.array(key_starts))
        mask = mask if window is None else mask & masks.window(*window)
        arrays = [backend.array(x, "float32") for x in (q, k, v)]
        state = it.attention_state(
            *arrays, mask=mask, is_causal=is_causal, enable_gqa=True, law=laws.LogLength(16)
        )
        for i, (length, key_length) in enumerate(lengths):
            rows, keys = slice(starts[i], starts[i + 1]), slice(key_starts[i], key_starts[i + 1])
            left, right = (np.inf, np.inf) if window is None else window
            visible = oracles.band(length, key_length, left, min(right, 0) if is_causal else right)
            factor = oracles.log_length(visible.sum(-1), 16)
            expected = oracles.attention(
                q[:, rows], np.repeat(k, 6 // groups, 0)[:, keys], np.repeat(v, 6 // groups, 0)[:, keys],
                visible=visible, factor=factor,
            )  # fmt: skip
            for got, x in ((state.output(), expected.output), (state.entropy(), expected.entropy())):
                np.testing.assert_allclose(backend.numpy(got)[:, rows], x, rtol=2e-4, atol=2e-5)

    def test_many_heads_of_few_logits(self, backend, rng):
        """Where NumPy computes for another library, the arrays of a mask are that library's."""
        q = backend.array(rng.normal(size=(3, 4, 150, 8)), "float32")
        starts = backend.array(np.asarray([0, 50, 150]))
        whole = {
            "packed": masks.packed(starts),
            "padding": masks.padding(backend.array([[140], [150], [9]])),
        }
        for name, mask in whole.items():
            state = it.attention_state(q, q, q, mask=mask, law=None)
            x = backend.numpy(q).astype(float)
            visible = (
                oracles.packed((0, 50, 150))
                if name == "packed"
                else np.arange(150) < np.asarray([140, 150, 9])[:, None, None, None]
            )
            expected = oracles.attention(x, x, x, visible=visible)
            np.testing.assert_allclose(
                backend.numpy(state.output()), expected.output, rtol=1e-4, atol=1e-5
            )
            np.testing.assert_allclose(
                backend.numpy(state.entropy()), expected.entropy(), rtol=1e-4, atol=1e-5
            )

    def test_of_two_the_first_gives_the_positions(self):
        a, b = masks.packed([0, 2, 2], [0, 3, 4]), masks.packed(range(0, 3, 2), [0, 4])
        assert (a & b & masks.causal()).visible_count(2, 4).tolist() == [2, 3]
        assert (b & a & masks.causal()).visible_count(2, 4).tolist() == [3, 3]

    def test_made_inside_a_compiled_function(self, request):
        if request.config.getoption("--backend") not in (None, "torch"):
            pytest.skip("belongs to the backend torch")
        torch = pytest.importorskip("torch")

        def call(q):
            return it.attention(q, q, q, mask=masks.packed([0, 5, 12]), is_causal=True)

        q = torch.randn(2, 12, 4)
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(q), call(q))

"""Masks as functions and block masks of flex_attention: the truth is what `attention` sees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import isentropic as it
from isentropic import masks

torch = pytest.importorskip("torch")

from torch.nn.attention.flex_attention import (  # noqa: E402
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
)

from isentropic.integrations.torch import to_block_mask  # noqa: E402

B, H, L, S = 2, 3, 6, 9
IDS = torch.tensor([0, 0, 1, 2, 1, 2, 2, 0, 1])
LENGTHS = torch.tensor([[4], [9]])


def random(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) < 0.5


class Strided(masks.Mask):
    """A mask of a user."""

    step: int

    def block(self, frame, rows, columns):
        return (frame.positions(rows)[:, None] - frame.positions(columns)[None, :]) % self.step == 0


MASKS = {
    "causal": masks.causal(),
    "causal-0": masks.causal(0),
    "causal-offset": masks.causal(torch.tensor(2)),
    "causal-offsets": masks.causal(torch.tensor([[0, 3, -2]])),
    "causal-every-offset": masks.causal(torch.arange(6).reshape(2, 3)),
    "window": masks.window(2, 1),
    "window-left": masks.window(2, None),
    "window-right": masks.window(None, 1),
    "window-none": masks.window(None, None),
    "window-far": masks.window(1, offset=-3),
    "padding": masks.padding(4),
    "padding-all": masks.padding(0),
    "padding-lengths": masks.padding(LENGTHS),
    "padding-left": masks.padding(LENGTHS, side="left"),
    "padding-bytes": masks.padding(LENGTHS.to(torch.uint8), side="left"),
    "segments": masks.segments(IDS),
    "segments-query": masks.segments(IDS.expand(2, 1, -1).clone(), IDS[:6]),
    "packed": masks.packed(torch.tensor([0, 2, 6]), torch.tensor([0, 5, 9])) & masks.causal(),
    "packed-ints": masks.packed([0, 2, 6], [0, 5, 9]) & ~masks.window(0),
    "array": masks.causal(9) & random(2, 1, 6, 9),
    "array-of-heads": masks.causal(9) & random(3, 6, 9),
    "array-of-keys": masks.causal(9) & random(2, 1, 1, 9),
    "array-of-queries": masks.causal(9) & random(6, 1),
    "array-of-one": masks.causal() & torch.ones((), dtype=torch.bool),
    "complement": masks.causal() & ~masks.window(0),
    "complement-nested": ~(masks.segments(IDS) | masks.padding(LENGTHS)),
    "nested": (masks.segments(IDS) | masks.padding(LENGTHS, side="left")) & masks.causal(),
    "own": Strided(2) & masks.causal(9),
}


@pytest.fixture(autouse=True)
def _only_once(request):
    if request.config.getoption("--backend") not in (None, "torch"):
        pytest.skip("belongs to the backend torch")


def seen(mask, n_queries=L, n_keys=S):
    """What `attention` sees of (B, H, L, S): equal logits give every visible key a weight."""
    query, key = torch.zeros(B, H, n_queries, 2), torch.zeros(B, H, n_keys, 2)
    return it.AttentionDistribution(query, key, mask=mask).weights() > 0


def to_mask_mod(mask, n_queries, n_keys):
    return to_block_mask(mask, n_queries, n_keys, device="cpu").mask_mod


def everywhere(mask_mod, n_queries=L, n_keys=S):
    return create_mask(mask_mod, B, H, n_queries, n_keys, device="cpu")


def test_every_kind_of_mask_is_tried():
    words = {word for mask in MASKS.values() for word in masks.describe(mask).words.split()}
    ours = {word for word, kind in masks._KINDS.items() if kind.__module__ == masks.__name__}
    assert {word for word in ours if not masks._KINDS[word].__subclasses__()} <= words


class TestMaskMod:
    @pytest.mark.parametrize("name", MASKS)
    def test_sees_what_attention_sees(self, name):
        expected = seen(MASKS[name])
        assert torch.equal(everywhere(to_mask_mod(MASKS[name], L, S)), expected)
        int32 = [torch.arange(n, dtype=torch.int32) for n in (B, H, L, S)]  # the indices of kernels
        got = to_mask_mod(MASKS[name], L, S)(*torch.meshgrid(*int32, indexing="ij"))
        assert torch.equal(got.expand_as(expected), expected)

    def test_arrays(self):
        array = random(2, 1, 6, 9)
        assert torch.equal(everywhere(to_mask_mod(array, L, S)), array.expand(B, H, L, S))

    @settings(max_examples=60)
    @given(data=st.data(), n_queries=st.integers(1, 7), n_keys=st.integers(1, 7))
    def test_combinations(self, data, n_queries, n_keys):
        small = st.integers(-8, 8)
        numbers = {
            1: small,
            2: st.lists(small, min_size=B, max_size=B).map(lambda x: torch.tensor(x)[:, None]),
        }
        ids = st.lists(st.integers(0, 2), min_size=n_keys, max_size=n_keys).map(torch.tensor)
        query_ids = st.lists(st.integers(0, 2), min_size=n_queries, max_size=n_queries)
        number = st.one_of(*numbers.values())
        bound = st.none() | st.integers(0, 8)
        simple = st.one_of(
            st.builds(masks.causal, st.none() | number),
            st.builds(lambda l, r, o: masks.window(l, r, offset=o), bound, bound, st.none() | number),
            st.builds(
                lambda n, side: masks.padding(abs(n), side=side),
                number,
                st.sampled_from(["left", "right"]),
            ),
            st.builds(masks.segments, ids, query_ids.map(torch.tensor)),
        )
        trees = st.recursive(
            simple,
            lambda m: (
                st.tuples(m, m).map(lambda x: x[0] & x[1]) | st.tuples(m, m).map(lambda x: x[0] | x[1])
            ),
            max_leaves=4,
        )
        mask = data.draw(trees)
        got = everywhere(to_mask_mod(mask, n_queries, n_keys), n_queries, n_keys)
        assert torch.equal(got, seen(mask, n_queries, n_keys))

    def test_combines_with_functions(self):
        both = and_masks(to_mask_mod(masks.causal(), L, S), lambda b, h, q_idx, kv_idx: kv_idx > h)
        expected = seen(masks.causal()) & (torch.arange(S) > torch.arange(H)[:, None, None])
        assert torch.equal(everywhere(both), expected)


class TestBlockMask:
    @pytest.mark.parametrize("name", MASKS)
    @pytest.mark.parametrize("block_size", [2, 128])
    def test_is_that_of_pytorch(self, name, block_size):
        mask = MASKS[name]
        got = to_block_mask(mask, L, S, device="cpu", block_size=block_size)
        batch = got.kv_num_blocks.shape[:2]
        expected = create_block_mask(
            to_mask_mod(mask, L, S), *batch, L, S, device="cpu", BLOCK_SIZE=block_size
        )
        assert torch.equal(got.to_dense(), expected.to_dense())
        assert got.seq_lengths == (L, S)
        for a, b in zip(got.as_tuple(), expected.as_tuple(), strict=True):
            if torch.is_tensor(a):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)
        pad = (0, -S % block_size, 0, -L % block_size)
        blocks = torch.nn.functional.pad(seen(mask), pad)
        blocks = blocks.unflatten(-1, (-1, block_size)).unflatten(-3, (-1, block_size)).any(-1).any(-2)
        assert torch.equal(got.to_dense().bool().expand_as(blocks), blocks)

    def test_axes_are_those_of_the_mask(self):
        shapes = {
            name: tuple(to_block_mask(MASKS[name], L, S, device="cpu").kv_num_blocks.shape[:2])
            for name in ("causal", "padding-lengths", "causal-offsets", "causal-every-offset", "nested")
        }
        assert list(shapes.values()) == [(1, 1), (2, 1), (1, 3), (2, 3), (2, 1)]

    # One without arrays, some of whose queries see no key, and one with arrays.
    @pytest.mark.parametrize("name", ["window-far", "nested"])
    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
    def test_flex_attention(self, name):
        query, key, value = torch.randn(B, H, L, 4), torch.randn(B, H, S, 4), torch.randn(B, H, S, 4)
        block_mask = to_block_mask(MASKS[name], L, S, device="cpu")
        out = flex_attention(query, key, value, block_mask=block_mask)
        expected = it.attention(query, key, value, mask=MASKS[name], law=None)
        torch.testing.assert_close(out, expected)

    def test_compiles_again_only_for_other_kinds(self):
        from torch._dynamo.testing import CompileCounter

        torch._dynamo.reset()
        counter = CompileCounter()
        kernel = torch.compile(flex_attention, backend=counter)
        query, key, value = torch.randn(3, B, H, S, 4)
        for lengths in ([[4], [9]], [[3], [7]], [[9], [1]]):
            mask = masks.causal() & masks.padding(torch.tensor(lengths))
            out = kernel(query, key, value, block_mask=to_block_mask(mask, S, S))
            torch.testing.assert_close(out, it.attention(query, key, value, mask=mask, law=None))
        assert counter.frame_count == 1

    def test_is_made_inside_a_compiled_function(self):
        @torch.compile(backend="eager", fullgraph=True)
        def attend(query, key, value, lengths):
            mask = masks.causal() & masks.padding(lengths)
            return flex_attention(query, key, value, block_mask=to_block_mask(mask, S, S))

        query, key, value = torch.randn(3, B, H, S, 4)
        expected = it.attention(
            query, key, value, mask=masks.causal() & masks.padding(LENGTHS), law=None
        )
        torch.testing.assert_close(attend(query, key, value, LENGTHS), expected)

    def test_law_as_score_mod(self):
        query, key, value = torch.randn(3, B, H, S, 4)
        mask, law = masks.window(3), it.laws.LogLength(4)
        factor = law(mask.visible_count(S, S, like=query))
        kernel = torch.compile(flex_attention, backend="eager")
        out = kernel(
            query, key, value, block_mask=to_block_mask(mask, S, S, device="cpu"),
            score_mod=lambda score, b, h, q_idx, kv_idx: score * factor[q_idx],
        )  # fmt: skip
        torch.testing.assert_close(out, it.attention(query, key, value, mask=mask, law=law))


class TestErrors:
    @pytest.mark.parametrize(
        ("mask", "sizes", "error", "message"),
        [
            (masks.padding(np.array([[2], [3]])), (L, S), TypeError, "must be .*torch.*got numpy"),
            (masks.padding(torch.tensor([2, 3])), (L, S), ValueError, r"has the shape \(B, 1\)"),
            (masks.segments(IDS), (L, S + 1), ValueError, "`ids` must have a last dimension of 10"),
            (torch.ones(L, S), (L, S), TypeError, "`mask` must be boolean"),
            (torch.ones(1, 1, 1, L, S).bool(), (L, S), ValueError, r"`mask` must have at most a batch"),
            (
                masks.causal(LENGTHS) & random(3, 1, L, S),
                (L, S),
                ValueError,
                r"broadcast .* got \(2, 1\), \(3, 1, 6, 9\)",
            ),
            (masks.causal(), (0, S), ValueError, "`n_queries` must be at least 1"),
            (masks.causal(), (L, 1.5), TypeError, "`n_keys` must be an integer"),
            (masks.causal(), (10**30, S), ValueError, r"`n_queries` must be below 2\*\*48, got 1000"),
            ("causal", (L, S), TypeError, "`mask` must be a boolean array or a mask"),
        ],
    )
    def test_messages(self, mask, sizes, error, message):
        with pytest.raises(error, match=message):
            to_block_mask(mask, *sizes)

    def test_of_block_masks(self):
        with pytest.raises(ValueError, match="`block_size` must be at least 1, got 0"):
            to_block_mask(masks.causal(), L, S, block_size=0)
        with pytest.raises(TypeError, match="no argument `Q_LEN`: here it is `n_queries`"):
            to_block_mask(masks.causal(), Q_LEN=L, KV_LEN=S)
        with pytest.raises(ValueError, match="`mask` must be on the device"):
            to_block_mask(masks.padding(LENGTHS), L, S, device="meta")

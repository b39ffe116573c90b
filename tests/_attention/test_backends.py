"""Backends agree with the generic pass and with oracles, and each call says which of them run."""

import itertools

import numpy as np
import oracles
import pytest

import isentropic as it
from isentropic import laws, masks
from isentropic._attention import backends, plan


def outcomes(backend, implementation, q, k, v, **options):
    """Output, log-normalizer and entropy from the three functions that have kernels."""
    with np.errstate(all="ignore"):
        results = {"output": it.attention(q, k, v, implementation=implementation, **options)}
        # Where there is no kernel for the state, the generic pass is all there is to compare.
        state = it.attention_state(q, k, v, implementation=implementation, **options)
        entropy = it.attention_entropy(q, k, implementation=implementation, **options)
    results |= {"state output": state.output(), "log normalizer": state.log_normalizer()}
    results |= {"state entropy": state.entropy(), "entropy": entropy, "maximum": state.maximum}
    return {name: backend.numpy(x) for name, x in results.items()}


MASKS = {
    "none": lambda a: {},
    "causal": lambda a: {"is_causal": True},
    "window": lambda a: {"mask": masks.window(3, 1)},
    "offset": lambda a: {"mask": masks.causal(a(np.asarray([[-2], [3]])))},
    "near offsets": lambda a: {"mask": masks.window(6, 0, offset=a(np.asarray([[0], [1]])))},
    "padding": lambda a: {"mask": masks.padding(a(np.asarray([[0], [9]])), side="left")},
    "padded causal": lambda a: {"mask": masks.causal() & masks.padding(8)},
    "either": lambda a: {"mask": masks.window(1) | masks.padding(2)},
    "segments": lambda a: {"mask": masks.segments(a(np.arange(13) // 4), a(np.arange(11) // 3))},
    "packed": lambda a: {
        "mask": masks.packed(a(np.asarray([0, 3, 4, 11])), a(np.asarray([0, 2, 8, 13])))
        & masks.causal()
    },
    "packed numbers": lambda a: {
        "mask": masks.packed([0, 3, 4, 11], [0, 5, 5, 13]) & masks.window(3),
        "law": laws.LogLength(4),
    },
    "array": lambda a: {"mask": a(np.random.default_rng(1).random((2, 1, 11, 13)) < 0.4)},
    "row": lambda a: {"mask": a(np.random.default_rng(1).random((1, 13)) < 0.5)},
    "n_keys": lambda a: {"n_keys": a(np.arange(11) + 1)},
    "sinks": lambda a: {"sinks": a(np.asarray([0.5, -np.inf, 3.0, 40.0])), "is_causal": True},
    "heads": lambda a: {"law": laws.AffineLog(a(np.asarray([0.5, 1, 2, 3])), 0.5)},
}


class TestAgainstGeneric:
    @pytest.mark.float64
    @pytest.mark.parametrize("name", MASKS)
    @pytest.mark.parametrize("grouped", [False, True])
    def test_masks(self, backend, small_blocks, rng, name, grouped):
        if backend.library in ("strict", "cupy"):
            pytest.skip("has no kernel")
        heads = 2 if grouped else 4
        q = backend.array(rng.normal(size=(2, 4, 11, 8)))
        k, v = (backend.array(rng.normal(size=(2, heads, 13, e))) for e in (8, 5))
        options = MASKS[name](backend.array) | {"enable_gqa": grouped}
        expected = outcomes(backend, "generic", q, k, v, **options)
        # PyTorch has no kernel on GPUs for states.
        for implementation in (None,) if backend.is_gpu else (None, "numpy_tiles"):
            got = outcomes(backend, implementation, q, k, v, **options)
            tolerance = 1e-5 if not backend.float64 else 1e-11
            for key, x in got.items():
                assert x.dtype == expected[key].dtype
                np.testing.assert_allclose(
                    x, expected[key], rtol=tolerance, atol=tolerance, err_msg=f"{implementation} {key}"
                )
        options["implementation"] = "sdpa"
        if it.AttentionDistribution(q, k, **options).backends(v)["sdpa"] == "runs":
            out = backend.numpy(it.attention(q, k, v, **options))
            np.testing.assert_allclose(out, expected["output"], rtol=1e-11, atol=1e-11)

    @pytest.mark.parametrize("scale", [-0.5, 0.0])
    @pytest.mark.parametrize("name", ["none", "causal", "padded causal"])
    def test_scales_that_are_not_positive(self, backend, small_blocks, rng, name, scale):
        q, k, v = (backend.array(rng.normal(size=(2, 4, 11, 8))) for _ in range(3))
        options = MASKS[name](backend.array) | {"scale": scale, "law": None}
        expected = outcomes(backend, "generic", q, k, v, **options)
        assert np.isfinite(expected["output"]).all()
        for key, x in outcomes(backend, None, q, k, v, **options).items():
            np.testing.assert_allclose(x, expected[key], rtol=1e-5, atol=1e-5, err_msg=key)
        for kind in backends.backends():
            call = {"implementation": kind.name} | options
            if it.AttentionDistribution(q, k, **call).backends(v)[kind.name] == "runs":
                got = backend.numpy(it.attention(q, k, v, **call))
                np.testing.assert_allclose(
                    got, expected["output"], rtol=1e-5, atol=1e-5, err_msg=kind.name
                )

    @pytest.mark.float64
    @pytest.mark.parametrize("batch", [(), (3,), (2, 1, 3)])
    @pytest.mark.parametrize("widths", [(8, 8), (3, 8), (8, 1)])
    def test_shapes(self, backend, small_blocks, rng, batch, widths):
        if backend.library in ("strict", "cupy"):
            pytest.skip("has no kernel")
        q = backend.array(rng.normal(size=(*batch, 11, widths[0])))
        k, v = (backend.array(rng.normal(size=(*batch[1:], 13, e))) for e in widths)
        expected = outcomes(backend, "generic", q, k, v, is_causal=True)
        got = outcomes(backend, None, q, k, v, is_causal=True)
        tolerance = 1e-5 if not backend.float64 else 1e-11
        for key, x in got.items():
            assert x.shape == expected[key].shape
            np.testing.assert_allclose(x, expected[key], rtol=tolerance, atol=tolerance, err_msg=key)

    @pytest.mark.parametrize("name", ["none", "causal", "window", "padding", "row"])
    @pytest.mark.parametrize("poisoned", [0, 1, 2])
    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    def test_what_is_not_finite(self, backend, small_blocks, rng, name, poisoned, poison):
        if backend.library not in ("numpy", "torch"):
            pytest.skip("their reductions drop some NaN")
        arrays = [rng.normal(size=(2, 4, n, 8)) for n in (11, 13, 13)]
        arrays[poisoned][..., 5, 0] = poison
        q, k, v = (backend.array(x) for x in arrays)
        options = MASKS[name](backend.array)
        expected = outcomes(backend, "generic", q, k, v, **options)
        for key, x in outcomes(backend, None, q, k, v, **options).items():
            np.testing.assert_allclose(x, expected[key], rtol=1e-10, atol=1e-10, err_msg=key)

    @pytest.mark.parametrize("name", ["none", "causal", "either", "array", "offset"])
    @pytest.mark.parametrize("softcap", [None, 2.0])
    @pytest.mark.parametrize("biased", ["no bias", "bias", "lowest"])
    def test_bias_softcap_and_order(self, backend, tiles, rng, name, softcap, biased):
        if backend.library not in ("numpy", "torch") or backend.is_gpu:
            pytest.skip("has no kernel for it")
        q, k, v = (rng.normal(size=(2, 4, n, 8)) * 3 for n in (11, 13, 13))
        bias = rng.normal(size=(4, 11, 13)) * 5
        if biased == "lowest":  # in some rows nothing but these is visible
            bias[rng.random(bias.shape) < 0.3] = -np.inf
            bias[rng.random(bias.shape) < 0.3] = np.finfo(np.float64).min
            bias[:, :3] = np.asarray([-np.inf, np.finfo(np.float64).min, 0.0])[:, None]
        bias = None if biased == "no bias" else backend.array(bias)
        arrays = [backend.array(x) for x in (q, k, v)]
        options = MASKS[name](backend.array) | {"softcap": softcap, "bias": bias}
        expected = outcomes(backend, "generic", *arrays, **options)
        got = outcomes(backend, "numpy_tiles", *arrays, **options)
        for order in (0, 0.5, 0.9, 1.1, 2, 3, np.inf):
            for results, implementation in ((expected, "generic"), (got, "numpy_tiles")):
                h = it.attention_entropy(
                    *arrays[:2], order=order, implementation=implementation, **options
                )
                results[f"entropy of order {order}"] = backend.numpy(h)
        for key, x in got.items():
            np.testing.assert_allclose(x, expected[key], rtol=1e-10, atol=1e-10, err_msg=key)

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
    @pytest.mark.parametrize("n_keys", [13, 40])
    def test_against_the_oracle(self, tiles, monkeypatch, rng, dtype, scale, n_keys):
        monkeypatch.setattr("isentropic._attention.numpy.n_threads", lambda: 3)  # parts of the keys
        q, k, v = (rng.normal(size=(3, n, 8)).astype(dtype) for n in (11, n_keys, n_keys))
        bias = rng.normal(size=(11, n_keys)).astype(dtype) * scale
        visible = rng.random((11, n_keys)) < 0.5
        for added, softcap, mask in (
            (None, None, None), (None, None, visible), (bias, None, None), (None, 4.0 * scale, visible),
            (bias, 4.0 * scale, visible),
        ):  # fmt: skip
            options = {"bias": added, "softcap": softcap, "scale": scale}
            expected = oracles.attention(q, k, v, visible=mask, **options)
            options |= {"law": None, "mask": mask, "implementation": "numpy_tiles"}
            # The rounding of a logit, ten times over.
            slack = np.finfo(dtype).eps * (10 * scale * 20 + 50)
            out = it.attention(q, k, v, **options)
            np.testing.assert_allclose(out, expected.output, rtol=slack, atol=slack * 4)
            for order in (0, 0.5, 1, 1.1, 2, np.inf):
                h = it.attention_entropy(q, k, order=order, **options)
                np.testing.assert_allclose(h, expected.entropy(order), rtol=slack, atol=slack * 10)

    def test_half_precision(self, backend, small_blocks, rng):
        if backend.library not in ("numpy", "torch", "jax"):
            pytest.skip("has no kernel")
        q, k, v = (backend.array(rng.normal(size=(2, 11, 8)), "float16") for _ in range(3))
        expected = outcomes(backend, "generic", q, k, v, is_causal=True)
        for key, x in outcomes(backend, None, q, k, v, is_causal=True).items():
            assert x.dtype == expected[key].dtype
            np.testing.assert_allclose(x, expected[key], rtol=2e-3, atol=1e-3, err_msg=key)

    def test_what_is_refused_where_no_other_means_the_same(self, backend, rng):
        x = backend.array(rng.normal(size=(5, 4)))
        message = (
            r"`implementation` must be None(,| or).* 'generic' for this call \(sdpa: .*\), got 'sdpa'"
        )
        with pytest.raises(ValueError, match=message):
            it.attention_state(x, x, x, softcap=3.0, implementation="sdpa")


class TestBackends:
    """Which code computes a call, and why the others do not."""

    def test_one_runs(self, backend, rng):
        x = backend.array(rng.normal(size=(16, 300, 8)), "float32")
        for values in (x, None):
            found = it.AttentionDistribution(x, x, is_causal=True).backends(values)
            names = [
                "varlen",
                "sdpa",
                "numpy_tiles",
                "jax_nn",
                "triton",
                "torch_tiles",
                "jax_tiles",
                "generic",
            ]
            assert list(found) == names
            assert list(found.values()).count("runs") == 1
            (name,) = [name for name, why in found.items() if why == "runs"]
            expected = {
                "numpy": "numpy_tiles",
                "torch": "sdpa" if values is not None else "numpy_tiles",
            }
            if backend.name == "torch:cuda":
                expected["torch"] = "sdpa" if values is not None else "generic"
            if backend.library in expected:
                assert name == expected[backend.library]
            elif backend.library == "strict":
                assert name == "generic"
            unable = "jax_nn" if backend.library == "torch" else "sdpa"
            unable = it.AttentionDistribution(x, x, implementation=unable).backends(values)
            assert "runs" not in unable.values()
        few = x[:1, :20, :]
        capped = it.AttentionDistribution(few, few, softcap=3.0).backends(few)
        if backend.library == "strict":
            assert capped["generic"] == "runs"
            assert capped["numpy_tiles"] == "some array is on another device, traced or differentiated"
        elif backend.name in ("numpy", "torch", "jax"):
            assert capped["numpy_tiles"] == "runs"

    def test_settings_of_pytorch_belong_to_the_choice(self, monkeypatch):
        """On a GPU `sdpa_kernel` changes what PyTorch's kernel is, also for a plan that is known."""
        torch = pytest.importorskip("torch")
        from torch.nn.attention import SDPBackend, sdpa_kernel

        asked = []
        original = backends.backends

        def noted():
            asked.append(1)
            return original()

        monkeypatch.setattr(backends, "backends", noted)
        with torch._subclasses.FakeTensorMode():
            x = torch.empty(1, 2, 9, 8, device="cuda")
            known = plan.prepare(plan.Arguments(x, x, x))
            for expected in (1, 1):
                backends._chosen(*known, None, None)
                assert len(asked) == expected
            with sdpa_kernel(SDPBackend.MATH):
                backends._chosen(*known, None, None)
            assert len(asked) == 2

    def test_names(self, backend, rng):
        assert list(plan.IMPLEMENTATIONS[:2]) == [None, "generic"]
        others = set(plan.IMPLEMENTATIONS[1:])
        assert others == {kind.name for kind in backends.backends()}
        x = backend.array(rng.normal(size=(2, 9, 8)), "float32")
        expected = it.attention(x, x, x, implementation="generic")
        for name in sorted(others):
            found = it.AttentionDistribution(x, x, implementation=name).backends(x)
            assert found["generic"] == ("runs" if name == "generic" else "`implementation` excludes it")
            if found[name] == "runs":
                got = it.attention(x, x, x, implementation=name)
                backend.assert_close(got, expected, rtol=1e-5, atol=1e-6)
            else:
                with pytest.raises(ValueError, match=f"for this call .*{name}: ") as error:
                    it.attention(x, x, x, implementation=name)
                suggested = str(error.value).partition(" for this call")[0]
                for other in others:
                    runs = (
                        it.AttentionDistribution(x, x, implementation=other).backends(x)[other]
                        == "runs"
                    )
                    assert (repr(other) in suggested) == runs

    def test_many_logits_under_a_mask_are_faster_by_numpy_than_by_pytorch(self, backend):
        if backend.library != "torch":
            pytest.skip("about PyTorch's kernel")
        xp = backend.xp
        seen = xp.ones((2**11, 2**11), dtype=xp.bool, device=backend.device)
        names = {"window": masks.window(3), "array": seen}
        for (name, mask), heads in itertools.product(names.items(), (4, 8)):
            x = backend.array(np.zeros((heads, 2**11, 2)), "float32")
            expected = "numpy_tiles" if heads == 8 and x.device.type == "cpu" else "sdpa"
            assert it.AttentionDistribution(x, x, mask=mask).backends(x)[expected] == "runs", name
            assert (
                it.AttentionDistribution(x, x, mask=mask, bias=x[..., :1]).backends(x)["sdpa"] == "runs"
            )
            assert it.AttentionDistribution(x, x, is_causal=True).backends(x)["sdpa"] == "runs"
            x.requires_grad_()
            assert it.AttentionDistribution(x, x, mask=mask).backends(x)["sdpa"] == "runs"

    def test_numpy_takes_any_number_of_logits(self):
        shapes = [(4,), (600,), (2**10,), (64, 128), (2**9, 16), (2, 3, 300)]
        for shape in shapes:
            x = np.broadcast_to(np.zeros(1), (*shape, 2))
            for order in (None, 1.0, 2.0):
                assert it.AttentionDistribution(x, x).backends(x, order=order)["numpy_tiles"] == "runs"


def test_several_dtypes_are_computed_in_the_widest(backend, rng):
    if not backend.float64:
        pytest.skip("there is no float64")
    q, k, v = rng.normal(size=(3, 2, 5, 4)).astype("float32")
    arrays = backend.array(q), backend.array(k), backend.array(v.astype("float64"))
    expected = oracles.attention(q, k, v).output
    for implementation in (None, "generic"):
        got = it.attention(*arrays, law=None, implementation=implementation)
        backend.assert_close(got, expected, rtol=1e-13, atol=1e-14)


class TestSkippedTiles:
    @pytest.mark.parametrize("n_queries", [6, 11])
    @pytest.mark.parametrize("offset", [None, -3, 0, 4])
    def test_reach_and_core(self, n_queries, offset):
        """Nothing is visible outside the reach, all is inside the core."""
        n_keys = 9
        frame = masks.Frame(np, None, n_queries, n_keys)
        everything = [
            masks.causal(offset),
            masks.window(2, 1, offset=offset),
            masks.window(None, 2, offset=offset),
            masks.padding(5),
            masks.padding(3, side="left"),
            masks.padding(np.asarray(4)),
            masks.causal(offset) & masks.padding(7),
            masks.window(1, offset=offset) | masks.padding(2),
            masks.causal(offset) & np.ones((1, n_keys), bool),
        ]
        for mask in everything:
            interval = mask.interval(frame, (0, n_queries))
            assert (interval is not None) == mask.is_contiguous
            assert all((np.diff(x) >= 0).all() for x in interval or ())
            for start in range(n_queries):
                for size in range(1, n_queries - start + 1):
                    rows = (start, size)
                    seen = np.broadcast_to(mask.block(frame, rows, (0, n_keys)), (size, n_keys))
                    keys = np.arange(n_keys)
                    first, end = mask.reach(frame, rows)
                    assert not seen[:, (keys < first) | (keys >= end)].any()
                    first, end = mask.fully_visible(frame, rows)
                    assert seen[:, (keys >= first) & (keys < end)].all()

    @pytest.mark.parametrize(
        ("mask", "share"), [(masks.causal(), 0.6), (masks.window(15), 0.2), (masks.padding(16), 0.15)]
    )
    @pytest.mark.parametrize("implementation", ["generic", "numpy_tiles"])
    def test_how_many_logits_are_computed(
        self, monkeypatch, set_blocks, rng, mask, share, implementation
    ):
        n, size = 256, 0
        set_blocks(tile=4 * 256, columns=16, numpy_untiled_logits=0, numpy_rows=16, numpy_columns=16)

        from isentropic._attention.generic import Tiles
        from isentropic._attention.numpy import _Pass

        logits, tiles = Tiles.logits, _Pass.tiles

        def counted_logits(self, *args):
            nonlocal size
            s = logits(self, *args)
            size += s.size
            return s

        def counted_tiles(self, *args):
            nonlocal size
            for rows, columns, hidden in tiles(self, *args):
                size += (rows.stop - rows.start) * columns[1]
                yield rows, columns, hidden

        monkeypatch.setattr(Tiles, "logits", counted_logits)
        monkeypatch.setattr(_Pass, "tiles", counted_tiles)
        q, k, v = rng.normal(size=(3, n, 8))
        it.attention(q, k, v, mask=mask, implementation=implementation)
        assert 0 < size <= share * n * n

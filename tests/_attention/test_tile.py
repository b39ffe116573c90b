"""The formulas of a tile, computed by the table of the standard."""

import math

import numpy as np
import pytest

from isentropic._attention import tile
from isentropic._ops import Ops

VISIBLE = np.asarray([[True, False, True, True], [True, True, True, False], [False] * 4])


class TestGradient:
    @pytest.mark.float64
    @pytest.mark.parametrize("order", [None, 0.0, 0.5, 0.9, 1.0, 1.1, 2.0, math.inf])
    @pytest.mark.parametrize("softcap", [None, 1.5])
    @pytest.mark.parametrize("is_masked", [False, True])
    @pytest.mark.parametrize("fields", ["all", "normalizer"])
    def test_finite_differences_of_absorb(self, backend, rng, order, softcap, is_masked, fields):
        """A loss of the sums relative to a reference that is not the maximum."""
        visible, widths = VISIBLE if is_masked else None, (0, 1, 3, int(order is not None))
        arrays = {"q": rng.normal(size=(2, 3, 2)), "k": rng.normal(size=(2, 4, 2))}
        arrays |= {"v": rng.normal(size=(2, 4, 3)), "bias": rng.normal(size=(2, 3, 4))}
        m, zero = np.full((2, 3, 1), 4.0), np.zeros((2, 3, 1))
        upstream = tile.Sums(*(rng.normal(size=(2, 3, n)) if n else None for n in widths))
        if fields == "normalizer":
            upstream = upstream._replace(weighted_value=None, weighted_score=None)

        def loss(**changed):
            q, k, v, bias = (arrays | changed).values()
            s, _ = tile.logits(Ops(np), q, k, softcap, bias, visible)
            empty = tile.Sums(m, zero, np.zeros((2, 3, 3)), None if order is None else zero)
            state = tile.absorb(Ops(np), empty, s, v, order, "given")
            return sum((g * x).sum() for g, x in zip(upstream, state, strict=True) if g is not None)

        ops = Ops(backend.xp)
        q, k, v, bias = (backend.array(x) for x in arrays.values())
        given = tile.Sums(*(None if x is None else backend.array(x) for x in upstream))
        hidden = None if visible is None else backend.array(visible[None])
        s, tanh = tile.logits(ops, q, k, softcap, bias, hidden)
        ds, p = tile.gradient(ops, s, backend.array(m), v, order, given)
        products = tile.gradient_of_products(ops, ds, tanh, softcap)
        ds, p, products = (backend.numpy(x) for x in (ds, p, products))
        found = {"q": products @ arrays["k"], "k": products.mT @ arrays["q"], "bias": ds}
        if fields == "all":
            found["v"] = p.mT @ upstream.weighted_value
        rounding = 1e-8 if backend.float64 else 2e-6
        for name, gradient in found.items():
            for index in np.ndindex(gradient.shape):
                step = np.zeros(gradient.shape)
                step[index] = 1e-6
                change = loss(**{name: arrays[name] + step}) - loss(**{name: arrays[name] - step})
                assert gradient[index] == pytest.approx(change / 2e-6, rel=1e-5, abs=rounding)

"""The operations in place, which may overwrite their first argument and nothing else."""

import math

import pytest

from isentropic._attention import tile
from isentropic._ops import Ops

torch = pytest.importorskip("torch")

from array_api_compat import torch as xp  # noqa: E402

from isentropic._attention.torch_ops import TorchOps  # noqa: E402


@pytest.fixture(autouse=True)
def _only_once(request):
    if request.config.getoption("--backend") not in (None, "torch"):
        pytest.skip("belongs to the backend torch")


class TestTorchOps:
    @pytest.mark.parametrize("order", [None, 0.5, 0.9, 1.0, 2.0, math.inf])
    @pytest.mark.parametrize("softcap", [None, 1.5])
    @pytest.mark.parametrize("is_masked", [False, True])
    @pytest.mark.parametrize("are_ordinary", [False, True])
    def test_they_equal_the_standard(self, rng, order, softcap, is_masked, are_ordinary):
        """The state and the gradients of three tiles of grouped heads, of which one hides keys."""

        def random(*shape):
            return torch.as_tensor(rng.normal(size=shape))

        query, bias = random(2, 4, 3, 5), random(3, 4)
        keys, values = random(3, 2, 2, 4, 5), random(3, 2, 2, 4, 6)
        visible = torch.as_tensor([[1, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]) > 0
        upstream = tile.Sums(None, random(2, 4, 3, 1), random(2, 4, 3, 6), random(2, 4, 3, 1))
        if order is None:
            upstream = upstream._replace(weighted_score=None)
        found = []
        for ops in (Ops(xp), TorchOps(xp, 2 * 4 * 3 * 4, are_ordinary=are_ordinary)):
            parts = keys, values
            if type(ops) is TorchOps:  # whose keys have one axis for the batch and the groups
                parts = keys.flatten(1, 2), values.flatten(1, 2)
            masks = (None, visible if is_masked else None, None)
            tiles = list(zip(*parts, masks, strict=True))
            state, gradients = None, []
            for key, value, mask in tiles:
                s, _ = tile.logits(ops, query, key, softcap, bias, mask)
                state = tile.absorb(ops, state, s, value, order)
            for key, value, mask in tiles:
                s, tanh = tile.logits(ops, query, key, softcap, bias, mask)
                ds, p = tile.gradient(ops, s, state.maximum, value, order, upstream)
                gradients += [ds.clone(), p.clone()]
                gradients.append(tile.gradient_of_products(ops, ds, tanh, softcap).clone())
            found.append([x for x in (*state, *gradients) if x is not None])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
            assert ((got == 0) == (want == 0)).all()  # where keys are hidden

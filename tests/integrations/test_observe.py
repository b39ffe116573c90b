"""Statistics of attention in plain PyTorch modules are those of the weights that PyTorch returns."""

import gc

import numpy as np
import pytest

import isentropic as it
from isentropic import laws, masks

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from isentropic.integrations.torch import (  # noqa: E402
    MultiheadAttention,
    announce_attention,
    observe,
)

N, L, E, H = 3, 6, 16, 4


@pytest.fixture(autouse=True)
def _only_once(request):
    if request.config.getoption("--backend") not in (None, "torch"):
        pytest.skip("belongs to the backend torch")


def padding(kind):
    hidden = torch.zeros(N, L, dtype=torch.bool)
    hidden[1, 4:] = True
    hidden[2, :2] = True
    return hidden if kind is bool else torch.where(hidden, -torch.inf, 0.0)


def expected(weights, counted, first):
    """Entropy and sink mass by head from weights (N, H, L, S)."""
    entropy = torch.special.entr(weights).sum(-1)
    sink = torch.stack([w[..., j] for w, j in zip(weights, first, strict=True)])
    return [np.stack([x[:, h][counted].mean().numpy() for h in range(H)]) for x in (entropy, sink)]


class TestMultiheadAttention:
    @pytest.mark.parametrize("kind", [bool, float])
    @pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
    @pytest.mark.parametrize("module", [nn.MultiheadAttention, MultiheadAttention])
    def test_values(self, module, options, kind):
        torch.manual_seed(0)
        layer, x = module(E, H, batch_first=True, **options), torch.randn(N, L, E)
        mask = torch.ones(L, L, dtype=torch.bool).triu(1)
        if kind is float:
            mask = torch.where(mask, -torch.inf, 0.0)
        arguments = {"key_padding_mask": padding(kind), "attn_mask": mask, "need_weights": True}
        with observe(layer, 1) as observer, torch.no_grad():
            _, weights = layer(x, x, x, average_attn_weights=False, **arguments)
            if not options:
                # A query that sees no key: NaN in PyTorch, 0 here. It is padding.
                weights = weights.nan_to_num()
        entropy, sink = expected(weights, ~padding(bool), [0, 0, 2])
        np.testing.assert_allclose(observer.latest.entropy[0], entropy, rtol=1e-5)
        np.testing.assert_allclose(observer.latest.sink_mass[0], sink, rtol=1e-5)
        assert observer.latest.layers == ("",)

    def test_the_first_sequences(self):
        layer, x = nn.MultiheadAttention(E, H), torch.randn(L, N, E)
        hidden = padding(bool)
        with observe(layer, 1, sequences=2) as observer, torch.no_grad():
            layer(x, x, x, key_padding_mask=hidden)
            cut = observer.latest
            x = x[:, :2]
            layer(x, x, x, key_padding_mask=hidden[:2])
        np.testing.assert_allclose(cut.entropy, observer.latest.entropy, rtol=1e-5)

    def test_cross_attention_counts_all_queries(self):
        layer, x = nn.MultiheadAttention(E, H, batch_first=True), torch.randn(N, 3, E)
        memory = torch.randn(N, L, E)
        with observe(layer, 1) as observer, torch.no_grad():
            _, weights = layer(x, memory, memory, padding(bool), average_attn_weights=False)
        entropy, sink = expected(weights, torch.ones(N, 3, dtype=torch.bool), [0, 0, 2])
        np.testing.assert_allclose(observer.latest.entropy[0], entropy, rtol=1e-5)
        np.testing.assert_allclose(observer.latest.sink_mass[0], sink, rtol=1e-5)

    @pytest.mark.parametrize("checkpointed", [False, True])
    def test_bits_of_the_step(self, checkpointed):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.1, batch_first=True)
        model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(N, L, E)

        def step():
            model.zero_grad()
            torch.manual_seed(1)
            leaf = x.clone().requires_grad_()
            if checkpointed:
                out = torch.utils.checkpoint.checkpoint(model, leaf, use_reentrant=False)
            else:
                out = model(leaf)
            out.sin().sum().backward()
            return [
                out,
                leaf.grad,
                *(p.grad.clone() for p in model.parameters()),
                torch.get_rng_state(),
            ]

        want, seen = step(), []
        with observe(model, 1, then=seen.append):
            got = step()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert [x.step for x in seen] == [0]
        assert seen[0].layers == ("layers.0.self_attn", "layers.1.self_attn")
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    def test_a_law_that_learns(self):
        slope = nn.Parameter(torch.tensor([0.1, 0.5, 1.0, 2.0]))
        layer = MultiheadAttention(E, H, batch_first=True, law=laws.AffineLog(slope))
        x = torch.randn(N, L, E)
        with observe(layer, 1) as observer:
            layer(x, x, x)
        with torch.no_grad():
            want = layer.entropy(x, x).mean((0, 2))
        np.testing.assert_allclose(observer.latest.entropy[0], want, rtol=1e-5)


class Attention(nn.Module):
    """Attention of a user: rows of the input are queries, keys and values of every head."""

    def forward(self, x, law=None, **options):
        announce_attention(self, x, x, law=law, **options)
        return x


class TestAnnounce:
    def test_values(self):
        model, x = nn.Sequential(Attention(), Attention()), torch.randn(N, H, L, 8)
        with observe(model, 1) as observer:
            model(x)
        weights = torch.softmax(x @ x.mT / 8**0.5, -1)
        entropy, sink = expected(weights, torch.ones(N, L, dtype=torch.bool), [0] * N)
        np.testing.assert_allclose(observer.latest.entropy, [entropy] * 2, rtol=1e-5)
        np.testing.assert_allclose(observer.latest.sink_mass, [sink] * 2, rtol=1e-5)
        assert observer.latest.layers == ("0", "1")

    def test_options(self):
        model, x = Attention(), torch.randn(N, H, L, 8)
        counted = torch.arange(L) < 4
        logits = x @ x.mT * 0.5 * (torch.log(torch.arange(1, L + 1)) / np.log(4))[:, None]
        logits = logits.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), -torch.inf)
        with observe(model, 1) as observer:
            model(x, is_causal=True, scale=0.5, law=laws.LogLength(4), counted=counted[None, None])
        entropy, _ = expected(torch.softmax(logits, -1), counted.expand(N, L), [0] * N)
        np.testing.assert_allclose(observer.latest.entropy[0], entropy, rtol=1e-5)
        want = logits[:, :, :4].amax((0, 2, 3))
        np.testing.assert_allclose(observer.latest.largest_logit[0], want, rtol=1e-5)

    def test_a_module_that_runs_several_times(self):
        part = Attention()
        model, x = nn.Sequential(part, nn.Linear(8, 8), part), torch.randn(N, H, L, 8)
        with observe(model, 1) as observer, torch.no_grad():
            model(x)
            both = observer.latest
            parts = []
            for y in (x, model[1](x)):
                nn.Sequential(part)(y)
                with observe(part, 1) as one:
                    part(y)
                parts.append(one.latest)
        assert both.entropy.shape == (1, H)
        np.testing.assert_allclose(both.entropy, (parts[0].entropy + parts[1].entropy) / 2, rtol=1e-5)
        largest = np.maximum(parts[0].largest_logit, parts[1].largest_logit)
        np.testing.assert_allclose(both.largest_logit, largest, rtol=1e-6)

    def test_layers_of_different_heads_and_layers_that_do_not_run(self):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = Attention(), Attention()

            def forward(self, x, both=True):
                self.b(x[:, :2])
                return self.a(x) if both else x

        model, x = Model(), torch.randn(N, H, L, 8)
        with observe(model, 1) as observer:
            model(x)
            assert observer.latest.layers == ("a", "b")
            assert np.isnan(observer.latest.entropy).sum() == 2
            assert len(observer.latest.scalars(heads=True)) == 2 * 6 + 5 * 6
            model(x, both=False)
        assert observer.latest.layers == ("a", "b")
        assert np.isnan(observer.latest.entropy[0]).all()
        assert np.isfinite(observer.latest.entropy[1, :2]).all()

    @pytest.mark.parametrize("kind", ["padding", "per query", "per sequence"])
    def test_the_first_sequences(self, kind):
        """Masks and laws are cut too."""
        x, n = torch.randn(N, H, L, E), torch.arange(1, N + 1)[:, None]
        options = {"law": None}
        if kind == "padding":
            options["mask"] = masks.padding(n) & masks.segments(
                torch.arange(L)[None, None] // n[..., None]
            )
        else:
            slope = laws.per_query(x[..., 0].abs()) if kind == "per query" else x[..., 0, 0].abs()
            options["law"] = laws.scaled(laws.AffineLog(0.2, slope), 0.7)

        class Own(nn.Module):
            def forward(self, x, options):
                announce_attention(self, x, x, **options)
                return x

        model = Own()
        with observe(model, 1, sequences=1) as observer:
            model(x, options)
        entropy = it.attention_entropy(x, x, **options)[0].mean(-1)
        np.testing.assert_allclose(observer.latest.entropy[0], entropy, rtol=1e-5, atol=1e-6)

    def test_passes_without_numbers(self):
        """In torch.func and on the meta device the pass runs, and a warning says why nothing is seen."""
        model, x = Attention(), torch.randn(N, H, L, 8)

        def run():
            return torch.func.grad(lambda x: model(x).square().sum())(x)

        expected = run()
        with observe(model, 1) as observer, pytest.warns(UserWarning, match=r"in torch\.func"):
            assert torch.equal(run(), expected)
        assert observer.latest is None
        with observe(model.to("meta"), 1), pytest.warns(UserWarning, match="on the meta device"):
            assert model(x.to("meta")).is_meta

    def test_an_interrupted_pass_is_over(self):
        class Interrupted(Attention):
            stops = True

            def forward(self, x):
                out = super().forward(x)
                if self.stops:
                    raise KeyboardInterrupt
                return out

        model, x = Interrupted(), torch.randn(N, H, L, 8)
        with observe(model, 2) as observer:
            with pytest.raises(KeyboardInterrupt):
                model(x)
            model.stops = False
            model(x)
            assert observer.latest is None
            model(x)
            assert observer.latest.step == 2

    def test_a_model_that_returns_nothing(self):
        class Silent(Attention):
            def forward(self, x):
                super().forward(x)

        model = Silent()
        with observe(model, 1) as observer:
            model(torch.randn(N, H, L, 8))
            assert observer.latest.step == 0

    def test_two_observers_of_a_compiled_model(self):
        """When both have seen their pass, compiled code runs again."""
        counts = []

        def backend(graph, inputs):
            return lambda *args: counts.append(1) or graph.forward(*args)

        torch.compiler.reset()
        model = torch.compile(nn.Sequential(nn.Linear(8, 8), Attention()), backend=backend)
        x, seen = torch.randn(N, H, L, 8), []
        with observe(model, 2) as a, observe(model, 3) as b:
            for _ in range(5):
                counts.clear()
                model(x)
                seen.append(len(counts))
            assert (a.latest.step, b.latest.step) == (4, 3)
        assert seen == [0, 1, 0, 0, 0]
        torch.compiler.reset()

    def test_nothing_counted(self):
        model, x = Attention(), torch.randn(N, H, L, 8)
        with observe(model, 1) as observer:
            model(x, counted=torch.zeros(1, 1, L, dtype=torch.bool))
        assert np.isnan(observer.latest.entropy).all()
        assert np.isnan(observer.latest.largest_logit).all()
        assert observer.latest.scalars() == {}

    def test_errors(self):
        with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module"):
            observe(3)
        model = nn.Linear(2, 2)
        with observe(model, 1) as observer:
            with pytest.warns(
                UserWarning, match="observed in the forward pass: no attention announces"
            ):
                model(torch.ones(1, 2))
            model(torch.ones(1, 2))  # once; warnings are errors
        assert observer.latest is None
        attention = Attention()
        attention(torch.ones(2))  # nobody observes
        match = "observed in the model itself: ValueError: `query` must have 4 dimensions"
        with observe(attention, 1), pytest.warns(UserWarning, match=match):
            attention(torch.ones(2))

    def test_no_graph_is_kept(self):
        model, x = Attention(), torch.randn(N, H, L, 8, requires_grad=True)
        with observe(model, 1) as observer:
            model(x)
            tensors = sum(issubclass(type(t), torch.Tensor) for t in gc.get_objects())
            model(x)
            assert sum(issubclass(type(t), torch.Tensor) for t in gc.get_objects()) == tensors
        assert not any(isinstance(t, torch.Tensor) for t in vars(observer.latest).values())


def test_a_module_that_runs_twice():
    torch.manual_seed(0)
    layer, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
    layer.train()

    class Model(torch.nn.Module):
        def __init__(self, factors):
            super().__init__()
            self.layer, self.factors = layer, factors

        def forward(self, x):
            return [self.layer(f * x, f * x, x)[0] for f in self.factors]

    def observed(*factors):
        with observe(Model(factors).train()) as observer:
            observer._model(x)
        return observer.latest

    small, large, both = observed(1.0), observed(3.0), observed(1.0, 3.0)
    for other in (both, observed(3.0, 1.0)):
        np.testing.assert_allclose(other.largest_logit, large.largest_logit, rtol=1e-5)
        np.testing.assert_allclose(other.entropy, (small.entropy + large.entropy) / 2, rtol=1e-5)
    assert (large.largest_logit > small.largest_logit).all()

"""MultiheadAttention is torch's with a law, and LawModule holds laws that learn."""

import copy
import io
import itertools
import math
import pickle
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

import isentropic as it
from isentropic import laws

torch = pytest.importorskip("torch")

from torch.nn.utils import parametrize  # noqa: E402

from isentropic.integrations.torch import LawModule, MultiheadAttention  # noqa: E402
from isentropic.laws._formulas import InfoScale, StepLog  # noqa: E402

N, L, S, E, H = 2, 4, 6, 12, 3
OPTIONS = [
    dict(zip(("add_bias_kv", "add_zero_attn", "batch_first", "own_widths"), flags, strict=True))
    for flags in itertools.product((False, True), repeat=4)
]


@pytest.fixture(autouse=True)
def _only_once(request):
    if request.config.getoption("--backend") not in (None, "torch"):
        pytest.skip("belongs to the backend torch")


def make(kind, *, seed=0, own_widths=False, **options):
    """A module whose biases are not 0."""
    torch.manual_seed(seed)
    widths = {"kdim": 5, "vdim": 7} if own_widths else {}
    module = kind(E, H, **({"dtype": torch.float64} | options), **widths)
    for name, p in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    return module


def inputs(module, *, batched=True, dtype=torch.float64):
    leaves = []
    for length, width in ((L, E), (S, module.kdim), (S, module.vdim)):
        shape = (N, length, width) if module.batch_first else (length, N, width)
        leaves.append(torch.randn(shape if batched else (length, width), dtype=dtype).requires_grad_())
    return leaves


def masks(kind, *, batched=True):
    """(key_padding_mask, attn_mask) of a kind: none, boolean or float, of 2 or 3 dimensions."""
    n = N if batched else 1
    shapes = {
        "none": (None, None),
        "padding": ((n, S), None),
        "mask": (None, (L, S)),
        "mask3": (None, (n * H, L, S)),
        "both": ((n, S), (L, S)),
        "both3": ((n, S), (n * H, L, S)),
    }
    name, _, floats = kind.partition(":")
    made = []
    for shape in shapes[name]:
        x = None
        if shape is not None:
            x = torch.rand(shape) < 0.4
            x[..., 0] = False  # no query without a key, for which torch gives NaN
            if floats:
                x = torch.randn(shape, dtype=torch.float64).masked_fill(x, -torch.inf)
        made.append(x)
    if not batched and made[0] is not None:
        made[0] = made[0][0]
    return {"key_padding_mask": made[0], "attn_mask": made[1]}


MASKS = [
    "none",
    *(f"{m}{f}" for m in ("padding", "mask", "mask3", "both", "both3") for f in ("", ":floats")),
]


class TestAgainstTorch:
    """``law=None`` is torch.nn.MultiheadAttention."""

    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize(
        "options", OPTIONS, ids=lambda o: "+".join(n for n in o if o[n]) or "plain"
    )
    def test_outputs_weights_and_gradients(self, options, mask):
        theirs, ours = (
            make(torch.nn.MultiheadAttention, **options),
            make(MultiheadAttention, law=None, **options),
        )
        for batched, need_weights, average in itertools.product((True, False), repeat=3):
            leaves = inputs(ours, batched=batched)
            call = masks(mask, batched=batched) | {
                "need_weights": need_weights,
                "average_attn_weights": average,
            }
            results = []
            for module in (theirs, ours):
                out, weights = module(*leaves, **call)
                loss = out.sin().sum() + (weights.sin().sum() if need_weights else 0)
                gradients = torch.autograd.grad(loss, [*leaves, *module.parameters()])
                assert (weights is not None) == need_weights
                results.append([out, *gradients, *([weights] if need_weights else [])])
            for want, got in zip(*results, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("need_weights", [False, True])
    def test_float32(self, need_weights):
        theirs, ours = (
            make(kind, dtype=torch.float32, **law)
            for kind, law in ((torch.nn.MultiheadAttention, {}), (MultiheadAttention, {"law": None}))
        )
        leaves, call = inputs(ours, dtype=torch.float32), masks("both")
        for want, got in zip(
            theirs(*leaves, need_weights=need_weights, **call),
            ours(*leaves, need_weights=need_weights, **call),
            strict=True,
        ):
            torch.testing.assert_close(got, want)

    @pytest.mark.parametrize("length", [L, S])
    def test_the_hint_is_taken_for_the_mask_where_torch_takes_it(self, length):
        theirs, ours = make(torch.nn.MultiheadAttention), make(MultiheadAttention, law=None)
        q, k, v = inputs(ours)
        k, v = k[:length], v[:length]
        # What the hint says, and what it does not.
        mask = torch.zeros(L, length, dtype=torch.bool)
        mask[:, 1] = True
        padding = torch.arange(length).repeat(N, 1) >= 3
        for call in (
            {"need_weights": False},
            {"need_weights": True},
            {"need_weights": False, "key_padding_mask": padding},
        ):
            want = theirs(q, k, v, attn_mask=mask, is_causal=True, **call)[0]
            got = ours(q, k, v, attn_mask=mask, is_causal=True, **call)[0]
            torch.testing.assert_close(got, want)

    def test_the_hint_hides_no_appended_keys(self):
        ours = make(MultiheadAttention, add_bias_kv=True)
        x = inputs(ours)[0]
        mask = torch.ones(L, L, dtype=torch.bool).triu(1)
        got = ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        torch.testing.assert_close(got, ours(x, x, x, attn_mask=mask)[0])

    @pytest.mark.parametrize("need_weights", [False, True])
    def test_dropout(self, need_weights):
        # The same weights are dropped for the same seed.
        theirs = make(torch.nn.MultiheadAttention, dropout=0.4)
        ours = make(MultiheadAttention, dropout=0.4, law=None)
        leaves, call = inputs(ours), masks("both") | {"need_weights": need_weights}
        results = []
        for module in (theirs, ours):
            torch.manual_seed(1)
            results.append(module(*leaves, **call))
        torch.testing.assert_close(*results)
        for module in (theirs, ours):
            module.eval()
        torch.testing.assert_close(ours(*leaves, **call), theirs(*leaves, **call))
        assert not torch.equal(ours(*leaves, **call)[0], results[1][0])

    @pytest.mark.parametrize("bias", [False, True])
    def test_initial_values(self, bias):
        for options in OPTIONS:
            theirs, ours = (
                make(kind, bias=bias, **options)
                for kind in (torch.nn.MultiheadAttention, MultiheadAttention)
            )
            for again in (False, True):
                if again:
                    for module in (theirs, ours):
                        torch.manual_seed(1)
                        module._reset_parameters()
                for want, got in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
                    assert want[0] == got[0]
                    torch.testing.assert_close(got[1], want[1], rtol=0, atol=0)

    @pytest.mark.parametrize("training", [False, True])
    def test_in_the_layers_of_torch(self, training):
        # Their fast path would leave the law out.
        layer = torch.nn.TransformerEncoderLayer(E, 4, 16, dropout=0, batch_first=True)
        ours = copy.deepcopy(layer)
        ours.self_attn = MultiheadAttention(E, 4, batch_first=True, law=laws.Constant(3.0))
        ours.self_attn.load_state_dict(layer.self_attn.state_dict())
        with torch.no_grad():  # the same as a law of 3: queries three times as long
            layer.self_attn.in_proj_weight[:E] *= 3
            layer.self_attn.in_proj_bias[:E] *= 3
        x, padding = torch.randn(N, S, E), torch.arange(S).repeat(N, 1) >= 4
        with torch.no_grad():
            want, got = (
                m.train(training)(x, src_key_padding_mask=padding)[:, :4] for m in (layer, ours)
            )
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
    @pytest.mark.parametrize("enable_nested_tensor", [False, True])
    @pytest.mark.parametrize("before", [False, True])
    def test_in_the_encoder_of_torch(self, enable_nested_tensor, before):
        layer = torch.nn.TransformerEncoderLayer(E, 4, 16, dropout=0, batch_first=True)
        ours = MultiheadAttention(E, 4, batch_first=True, law=laws.LogLength(3))
        if before:
            layer.self_attn = ours
        encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=enable_nested_tensor)
        for layer in encoder.layers:
            layer.self_attn = copy.deepcopy(ours)
        encoder.eval()
        x, padding = torch.randn(N, S, E), torch.arange(S) >= torch.tensor([[4], [6]])
        with torch.no_grad():  # otherwise there is no fast path
            got = encoder(x, src_key_padding_mask=padding)
            # Its fast path leaves no padding to the layers, and gives 0 there.
            assert bool((got[padding] == 0).all()) == enable_nested_tensor
            for i, length in enumerate((4, 6)):
                torch.testing.assert_close(got[i, :length], encoder(x[i, :length]))
            for layer in encoder.layers:
                layer.self_attn.law = None
            assert (encoder(x, src_key_padding_mask=padding) - got)[~padding].abs().min() > 1e-4

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("append", [False, True])
    @pytest.mark.parametrize(
        "widths", [{}, {"kdim": 5}, {"vdim": 7}, {"kdim": 5, "vdim": 7}, {"kdim": E, "vdim": E}]
    )
    def test_the_fields_are_those_of_torch(self, widths, append, bias):
        # Other libraries hand them to the function.
        theirs, ours = (
            kind(E, H, bias=bias, add_bias_kv=append, add_zero_attn=append, **widths)
            for kind in (torch.nn.MultiheadAttention, MultiheadAttention)
        )
        ours.load_state_dict(theirs.state_dict())
        names = (
            "embed_dim", "kdim", "vdim", "_qkv_same_embed_dim", "num_heads", "dropout", "batch_first", "head_dim", "add_zero_attn",
            "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v",
        )  # fmt: skip
        assert vars(theirs).keys() <= vars(ours).keys()
        for name in names:
            got, want = getattr(ours, name), getattr(theirs, name)
            assert torch.equal(got, want) if torch.is_tensor(want) else got == want, name

        q, k, v = inputs(ours, dtype=torch.float32)
        got = torch.nn.functional.multi_head_attention_forward(
            q, k, v, ours.embed_dim, ours.num_heads, ours.in_proj_weight, ours.in_proj_bias, ours.bias_k, ours.bias_v,
            ours.add_zero_attn, ours.dropout, ours.out_proj.weight, ours.out_proj.bias,
            use_separate_proj_weight=not ours._qkv_same_embed_dim, q_proj_weight=ours.q_proj_weight,
            k_proj_weight=ours.k_proj_weight, v_proj_weight=ours.v_proj_weight,
        )  # fmt: skip
        torch.testing.assert_close(got, theirs(q, k, v))
        ours.law = None
        torch.testing.assert_close(ours(q, k, v), got)


class TestLaw:
    def test_values(self):
        # By the formula, head by head and query by query.
        module = make(MultiheadAttention, batch_first=True)
        q, k, v = inputs(module)
        call = masks("both")
        out, weights = module(q, k, v, average_attn_weights=False, **call)
        (w_q, w_k, w_v), (b_q, b_k, b_v) = (
            np.split(x.detach().numpy(), 3) for x in (module.in_proj_weight, module.in_proj_bias)
        )
        padding, mask = (x.numpy() for x in call.values())
        expected = np.zeros((N, L, E))
        for b, h, i in np.ndindex(N, H, L):
            part = slice(h * E // H, (h + 1) * E // H)
            query = (q[b, i].detach().numpy() @ w_q.T + b_q)[part]
            keys = (k[b].detach().numpy() @ w_k.T + b_k)[:, part]
            values = (v[b].detach().numpy() @ w_v.T + b_v)[:, part]
            seen = ~padding[b] & ~mask[i]
            p = np.where(seen, np.exp(np.log(seen.sum()) / np.log(512) * keys @ query / 2), 0)
            p /= p.sum()
            np.testing.assert_allclose(weights[b, h, i].detach(), p, atol=1e-12)
            expected[b, i, part] = p @ values
        expected = expected @ module.out_proj.weight.detach().numpy().T
        expected += module.out_proj.bias.detach().numpy()
        np.testing.assert_allclose(out.detach(), expected, atol=1e-12)

    def test_is_that_of_multi_head_attention(self):
        module = make(MultiheadAttention, batch_first=True, law=StepLog(0.5, 2))
        q, k, v = inputs(module)
        projections = [w.T for w in (*module.in_proj_weight.chunk(3), module.out_proj.weight)]
        shifts = dict(zip(("b_q", "b_k", "b_v"), module.in_proj_bias.chunk(3), strict=True))
        expected = it.layers.multi_head_attention(
            q,
            k,
            v,
            *projections,
            num_heads=H,
            b_o=module.out_proj.bias,
            law=StepLog(0.5, 2),
            **shifts,
        )
        for need_weights in (False, True):
            torch.testing.assert_close(module(q, k, v, need_weights=need_weights)[0], expected)

    @pytest.mark.parametrize("kind", ["padding", "mask", "mask3", "both", "both3"])
    def test_minus_infinity_counts_as_hidden(self, kind):
        module = make(MultiheadAttention)
        leaves, call = inputs(module), masks(kind)
        floats = {
            name: None if x is None else torch.zeros(x.shape).masked_fill(x, -torch.inf)
            for name, x in call.items()
        }
        for need_weights in (False, True):
            got = module(*leaves, need_weights=need_weights, **floats)
            torch.testing.assert_close(got, module(*leaves, need_weights=need_weights, **call))
        # The lowest number hides from the softmax alone.
        lowest = {
            name: x if x is None else x.clamp(min=torch.finfo(x.dtype).min)
            for name, x in floats.items()
        }
        assert not torch.allclose(module(*leaves, **lowest)[0], got[0])

    def test_mixed_kinds_of_masks(self):
        module = make(MultiheadAttention)
        leaves, call = inputs(module), masks("both3")
        want = module(*leaves, **call)
        x = call["attn_mask"]
        call["attn_mask"] = torch.zeros(x.shape).masked_fill(x, -torch.inf)
        torch.testing.assert_close(module(*leaves, **call), want)

    @pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
    def test_appended_keys_count(self, option):
        # One key is left to see, and the appended one: n = 2.
        module = make(MultiheadAttention, batch_first=True, law=laws.LogLength(2), **{option: True})
        standard = make(MultiheadAttention, batch_first=True, law=None, **{option: True})
        leaves = inputs(module)
        padding = torch.arange(S).repeat(N, 1) > 0
        torch.testing.assert_close(
            module(*leaves, key_padding_mask=padding), standard(*leaves, key_padding_mask=padding)
        )

    @pytest.mark.parametrize("need_weights", [False, True])
    @pytest.mark.parametrize("floats", [False, True])
    def test_a_query_without_keys(self, need_weights, floats):
        module = make(MultiheadAttention, batch_first=True)
        leaves = inputs(module)
        mask = torch.zeros(L, S, dtype=torch.bool)
        mask[1] = True
        mask = torch.zeros(L, S).masked_fill(mask, -torch.inf) if floats else mask
        out, weights = module(*leaves, attn_mask=mask, need_weights=need_weights)
        torch.testing.assert_close(out[:, 1], module.out_proj.bias.expand(N, E))
        if need_weights:
            assert bool((weights[:, 1] == 0).all())
        for g in torch.autograd.grad(out.sum(), [*leaves, *module.parameters()]):
            assert bool(torch.isfinite(g).all())

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    def test_nested_tensors(self, layout):
        module = make(MultiheadAttention, batch_first=True)
        sequences = [torch.randn(n, E, dtype=torch.float64, requires_grad=True) for n in (3, 5)]
        nested = torch.nested.as_nested_tensor(sequences, layout=layout)
        out, weights = module(nested, nested, nested, average_attn_weights=False)
        assert out.layout == layout
        for i, (x, got) in enumerate(zip(sequences, out.unbind(), strict=True)):
            want, p = module(x, x, x, average_attn_weights=False)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(weights[i, :, : len(x), : len(x)], p)
            (gradient,) = torch.autograd.grad(got.sin().sum(), x, retain_graph=True)
            torch.testing.assert_close(gradient, torch.autograd.grad(want.sin().sum(), x)[0])
        assert module(nested, nested, nested, need_weights=False)[1] is None

    def test_biases_that_learn(self):
        module = make(MultiheadAttention)
        leaves = inputs(module)
        bias = torch.randn(L, S, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(
            lambda bias: module(*leaves, attn_mask=bias, need_weights=False)[0], bias
        )


class TestEntropy:
    @pytest.mark.parametrize("batched", [True, False])
    @pytest.mark.parametrize("mask", ["none", "both", "both3:floats"])
    def test_of_the_weights(self, mask, batched):
        module = make(MultiheadAttention, dropout=0.5, add_zero_attn=True).eval()
        q, k, v = inputs(module, batched=batched)
        call = masks(mask, batched=batched)
        _, weights = module(q, k, v, average_attn_weights=False, **call)
        for order in (1.0, 2.0):
            h = module.entropy(q, k, order=order, **call)
            assert h.shape == ((N, H, L) if batched else (H, L))
            torch.testing.assert_close(h, it.entropy(weights, order=order))
        module.train()
        torch.testing.assert_close(module.entropy(q, k, order=2, **call), h)
        h = module.entropy(q, k, normalized=True, family="tsallis", **call)
        assert bool(((h >= 0) & (h <= 1)).all())

    def test_causal_hint(self):
        module = make(MultiheadAttention)
        x = inputs(module)[0]
        mask = torch.ones(L, L, dtype=torch.bool).triu(1)
        h = module.entropy(x, x, attn_mask=mask, is_causal=True)
        torch.testing.assert_close(h, module.entropy(x, x, attn_mask=mask))


def learnable(**options):
    """A law that learns in three places, one of which is no parameter."""
    slope = torch.nn.Parameter(torch.full((H,), 0.2, dtype=torch.float64))
    factor = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    intercept = torch.full((H,), 0.1, dtype=torch.float64)
    law = laws.scaled(laws.shifted(laws.AffineLog(slope, intercept), 1), factor)
    return make(MultiheadAttention, law=law, batch_first=True, **options)


class TestLearnableLaw:
    def test_names(self):
        module = learnable()
        names = {name for name, _ in module.named_parameters() if name.startswith("law")}
        assert names == {"law.factor", "law.law.law.slope"}
        assert {name for name in module.state_dict() if name.startswith("law")} == names
        assert [name for name, _ in module.named_buffers()] == ["law.law.law.intercept"]
        assert "AffineLog, slope=(3,), intercept=(3,), minimum=None" in repr(module)
        assert "LogLength, base=512" in repr(make(MultiheadAttention))

    @pytest.mark.parametrize(
        "law",
        [
            laws.Constant(2.0),
            laws.LogLength(2.5, 1.0),
            laws.SqrtLogLength(100, minimum=0.5),
            laws.AffineLog(0.5, 1.0),
            laws.PowerLog(1.0, 0.5, 2.0),
            laws.Power(0.5, 100),
            StepLog(0.1, 7),
            InfoScale(64, 16),
            *(laws.preset(name) for name in ("su", "chiang-cholak")),
            laws.scaled(laws.shifted(laws.LogLength(2), 3), 0.5),
        ],
        ids=lambda law: type(law).__name__,
    )
    def test_every_law(self, law):
        def with_tensors(law):
            fields = {
                name: with_tensors(x)
                if isinstance(x, laws.Law)
                else x
                if x is None or name in ("minimum", "head_dim", "shift")
                else torch.nn.Parameter(torch.full((H,), float(x), dtype=torch.float64))
                for name, x in vars(law).items()
            }
            return type(law)(**fields)

        n = torch.arange(1, 20, dtype=torch.float64)
        assert LawModule(law)() == law
        assert not list(LawModule(law).parameters())
        module = LawModule(with_tensors(law))
        assert list(module.parameters())
        torch.testing.assert_close(module()(n), law(n).expand(H, -1))

    def test_parametrized(self):
        """A parametrization keeps a parameter in its range."""

        class Softplus(torch.nn.Module):
            def forward(self, x):
                return torch.nn.functional.softplus(x)

        module = LawModule(laws.scaled(laws.AffineLog(torch.nn.Parameter(torch.zeros(H))), 2.0))
        parametrize.register_parametrization(module.law, "slope", Softplus())
        assert module()(torch.tensor([1.0, math.e]))[0].tolist() == pytest.approx([0, 2 * math.log(2)])
        module()(torch.tensor([9.0])).sum().backward()
        assert module.law.parametrizations.slope.original.grad.abs().min() > 0
        assert "slope=(3,)" in repr(module)

    def test_no_tensor_of_torch_func_stays(self):
        modules = [LawModule(laws.AffineLog(torch.ones(H) * (i + 1))) for i in range(3)]
        parameters, buffers = torch.func.stack_module_state(modules)
        n = torch.tensor([5.0])

        def factor(parameters, buffers):
            return torch.func.functional_call(modules[0], (parameters, buffers))(n)

        found = torch.vmap(factor)(parameters, buffers)
        assert torch.equal(found, torch.stack([x()(n) for x in modules]))
        torch.vmap(factor)(parameters, buffers)
        for again in (copy.deepcopy(modules[0]), pickle.loads(pickle.dumps(modules[0]))):
            assert torch.equal(again()(n), modules[0]()(n))

    def test_a_step(self):
        module = learnable()
        leaves = inputs(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        h = module.entropy(*leaves[:2]).mean()
        h.backward()
        optimizer.step()
        assert bool((module.law.law.law.slope.grad < 0).all())  # dH/dlog λ = −Var(λs)
        assert module.entropy(*leaves[:2]).mean() < h
        for name in ("law.factor", "law.law.law.slope"):
            assert bool((module.get_parameter(name) != before[name]).all())
        factor = module.law.factor * (np.log(7) * module.law.law.law.slope + 0.1)
        torch.testing.assert_close(module.law()(6), factor)

    def test_gradient(self):
        module = learnable()
        leaves, call = inputs(module), masks("both")

        def function(slope, factor):
            changed = {"law.law.law.slope": slope, "law.factor": factor}
            return torch.func.functional_call(module, changed, tuple(leaves), call)

        parameters = (module.law.law.law.slope, module.law.factor)
        assert torch.autograd.gradcheck(function, parameters)

    @pytest.mark.parametrize("assign", [False, True])
    def test_a_checkpoint_of_torch(self, assign):
        theirs, ours = make(torch.nn.MultiheadAttention, seed=1, batch_first=True), learnable()
        checkpoint = theirs.state_dict()
        names = list(checkpoint)
        ours.load_state_dict(checkpoint, assign=assign)
        assert list(checkpoint) == names
        torch.testing.assert_close(ours.in_proj_weight, theirs.in_proj_weight)
        assert bool((ours.law.law.law.slope == 0.2).all())
        assert ours.law.law.law.slope.requires_grad
        # Inside other modules.
        torch.nn.Sequential(ours).load_state_dict(
            torch.nn.Sequential(theirs).state_dict(), assign=assign
        )
        assert ours.law.factor.item() == 1.5
        # What holds some of a law has to hold all of it.
        with pytest.raises(RuntimeError, match=r"law\.law\.law\.slope"):
            ours.load_state_dict(checkpoint | {"law.factor": torch.tensor(2.0)})

    def test_a_checkpoint_of_its_own(self):
        ours, other = learnable(), learnable(seed=1)
        with torch.no_grad():
            ours.law.law.law.slope += 1
        other.load_state_dict(ours.state_dict())
        leaves = inputs(ours)
        torch.testing.assert_close(other(*leaves), ours(*leaves))

    def test_torch_takes_checkpoints_without_parameters_of_laws(self):
        theirs = make(torch.nn.MultiheadAttention, seed=1)
        for law in (None, laws.LogLength(64), laws.LogLength(torch.full((H,), 64.0))):
            ours = make(MultiheadAttention, law=law)
            theirs.load_state_dict(ours.state_dict())
            torch.testing.assert_close(theirs.in_proj_weight, ours.in_proj_weight)
        with pytest.raises(RuntimeError, match=r"law\.factor"):
            theirs.load_state_dict(learnable().state_dict())
        theirs.load_state_dict(learnable(seed=2).state_dict(), strict=False)
        torch.testing.assert_close(theirs.in_proj_weight, learnable(seed=2).in_proj_weight)

    def test_copies(self):
        module = learnable()
        leaves = inputs(module)
        expected = module(*leaves)
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        for other in (
            copy.deepcopy(module),
            pickle.loads(pickle.dumps(module)),
            torch.load(file, weights_only=False),
        ):
            torch.testing.assert_close(other(*leaves), expected)
            with torch.no_grad():
                other.law.law.law.slope.zero_()
            assert not torch.allclose(other(*leaves)[0], expected[0])
        torch.testing.assert_close(module(*leaves), expected)

    def test_conversions(self):
        module = learnable()
        leaves = [x.float() for x in inputs(module)]
        module.float()
        assert {p.dtype for p in (*module.parameters(), *module.buffers())} == {torch.float32}
        want = module(*leaves)[0]
        module.bfloat16()
        got = module(*(x.bfloat16() for x in leaves))[0]
        torch.testing.assert_close(got.float(), want, rtol=0.1, atol=0.05)
        module.to("meta")
        out, weights = module(*(x.bfloat16().to("meta") for x in leaves))
        assert (out.device.type, weights.shape) == ("meta", (N, L, S))

    @pytest.mark.parametrize("module", [learnable(), MultiheadAttention(E, H, 0.5, add_bias_kv=True)])
    def test_autocast(self, module):
        """The projections follow it, as in PyTorch's module, and the attention does not."""
        module = module.float()
        leaves = [x.float() for x in inputs(module)]
        call = masks("both")
        for need_weights in (False, True):
            torch.manual_seed(0)
            want = module(*leaves, need_weights=need_weights, **call)[0]
            torch.manual_seed(0)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = module(*leaves, need_weights=need_weights, **call)[0]
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.float(), want, rtol=0.1, atol=0.05)

    def test_weights_under_autocast(self):
        module = MultiheadAttention(E, H, add_bias_kv=True)  # keys and values in float32
        module.out_proj = torch.nn.Identity()
        leaves = [x.float() for x in inputs(module)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with_weights, without = (module(*leaves, need_weights=flag)[0] for flag in (True, False))
        torch.testing.assert_close(with_weights, without)


def test_needs_no_compiler():
    """PyTorch's compiler takes seconds to load."""
    code = (
        "import sys, torch\n"
        "import isentropic as it\n"
        "from isentropic import laws\n"
        "from isentropic.integrations.torch import MultiheadAttention\n"
        "law = laws.AffineLog(torch.nn.Parameter(torch.ones(2)))\n"
        "module, x = MultiheadAttention(8, 2, 0.5, law=law), torch.randn(40, 2, 8)\n"
        "for training in (True, False):\n"
        "    module.train(training)(x, x, x)[0].sum().backward()\n"
        "with torch.autocast('cpu'):\n"
        "    it.attention_entropy(x, x, is_causal=True)\n"
        "    module.entropy(x, x).sum().backward()\n"
        "    module.double().to('meta').to_empty(device='cpu')\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestCompile:
    @pytest.fixture
    def compile_(self):
        from torch._dynamo.testing import CompileCounterWithBackend

        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        yield lambda f: torch.compile(f, fullgraph=True, backend=counter), counter
        torch.compiler.reset()

    @pytest.mark.parametrize("need_weights", [False, True])
    def test_few_graphs_for_many_lengths(self, need_weights, compile_):
        make_compiled, counter = compile_
        module = learnable()
        compiled = make_compiled(module)
        for n in (5, 9, 33, 100):
            x = torch.randn(N, n, E, dtype=torch.float64, requires_grad=True)
            call = {
                "key_padding_mask": torch.arange(n).repeat(N, 1) >= 5,
                "attn_mask": torch.nn.Transformer.generate_square_subsequent_mask(n),
                "need_weights": need_weights,
            }
            parameters = [x, *module.parameters()]
            results = []
            for function in (compiled, module):
                out = function(x, x, x, **call)[0]
                results.append((out, *torch.autograd.grad(out.sin().sum(), parameters)))
            torch.testing.assert_close(*results)
        assert counter.frame_count <= 2

    def test_entropy_and_options(self, compile_):
        make_compiled, counter = compile_
        module = make(MultiheadAttention, add_bias_kv=True, add_zero_attn=True, own_widths=True)

        def call(q, k, v):
            mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(1)
            return module(q, k, v, attn_mask=mask, is_causal=True), module.entropy(q, k)

        compiled = make_compiled(call)
        for n in (1, 3):
            q, k, v = (torch.cat([x.detach()] * n) for x in inputs(module))
            torch.testing.assert_close(compiled(q, k, v), call(q, k, v))
        assert counter.frame_count <= 2


class TestPEFT:
    """LoRA of PEFT, which merges its weights into the module around each call."""

    @pytest.fixture
    def peft(self):
        return pytest.importorskip("peft", reason="PEFT is not installed")

    @pytest.fixture
    def adapted(self, peft):
        def make_adapted(kind, *, seed=0, zero=False, **options):
            """A model with LoRA on its attention, and one without it, of the same weights."""
            bare = SelfAttention(make(kind, batch_first=True, **options))
            config = peft.LoraConfig(
                target_modules=["attention"], r=2, lora_alpha=3, init_lora_weights=zero
            )  # fmt: skip
            torch.manual_seed(seed)
            return peft.get_peft_model(copy.deepcopy(bare), config), bare

        return make_adapted

    LAW = laws.AffineLog(0.7, 0.5)

    def test_zeros_change_nothing(self, adapted):
        model, bare = adapted(MultiheadAttention, zero=True, law=self.LAW)
        x = torch.randn(N, L, E, dtype=torch.float64)
        assert torch.equal(model(x), bare(x))
        assert bare.attention.law is not None
        bare.attention.law = None
        assert not torch.allclose(model(x), bare(x))

    @pytest.mark.parametrize("need_weights", [False, True])
    def test_without_a_law_as_that_of_torch(self, adapted, need_weights):
        # The same gradients too.
        results = []
        for kind, law in ((torch.nn.MultiheadAttention, {}), (MultiheadAttention, {"law": None})):
            model, _ = adapted(kind, **law)
            torch.manual_seed(1)
            x = torch.randn(N, L, E, dtype=torch.float64, requires_grad=True)
            out = model(x, need_weights=need_weights)
            learnt = [p for p in model.parameters() if p.requires_grad]
            results.append([out, *torch.autograd.grad(out.sin().sum(), [x, *learnt])])
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)

    def test_merged(self, adapted):
        model, bare = adapted(MultiheadAttention, law=self.LAW)
        x = torch.randn(N, L, E, dtype=torch.float64)
        got = model(x)
        assert not torch.allclose(got, bare(x))
        with model.disable_adapter():
            torch.testing.assert_close(model(x), bare(x))
        merged = model.merge_and_unload()
        assert type(merged.attention) is MultiheadAttention
        torch.testing.assert_close(merged(x), got)
        other = make(MultiheadAttention, batch_first=True, law=self.LAW)
        other.load_state_dict(merged.attention.state_dict())
        torch.testing.assert_close(other(x, x, x)[0], got)

    def test_gradients_reach_lora_and_the_law(self, adapted):
        slope = torch.nn.Parameter(torch.full((H,), 0.7, dtype=torch.float64))
        law = laws.AffineLog(slope, 0.5)
        model, _ = adapted(MultiheadAttention, law=law)
        model.base_model.model.attention.base_layer.law.requires_grad_()
        x = torch.randn(N, L, E, dtype=torch.float64)
        learnt = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert sum("lora_" in name for name in learnt) == 4
        assert [name.rpartition(".")[2] for name in learnt if "lora_" not in name] == ["slope"]
        model(x).sin().sum().backward()
        for name, p in learnt.items():
            assert bool((p.grad != 0).all()), name

    def test_in_the_layers_of_torch(self, peft):
        # Their fast path would leave out both the law and LoRA.
        layer = torch.nn.TransformerEncoderLayer(E, 4, 16, dropout=0, batch_first=True)
        layer.self_attn = MultiheadAttention(E, 4, batch_first=True, law=self.LAW)
        config = peft.LoraConfig(target_modules=["self_attn"], r=2, init_lora_weights=False)
        x = torch.randn(N, S, E)
        with torch.no_grad():
            standard = layer.eval()(x)
            model = peft.get_peft_model(layer, config).eval()
            got = model(x)
            assert not torch.allclose(got, standard)
            merged = model.merge_and_unload()
            torch.testing.assert_close(merged(x), got)
            merged.self_attn.law = None
            assert not torch.allclose(merged(x), got)


class SelfAttention(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x, **options):
        return self.attention(x, x, x, **options)[0]


def test_fields_with_the_names_of_methods_and_attributes_of_modules():
    @dataclass(frozen=True)
    class Own(laws.Law):
        half: torch.Tensor
        training: float
        forward: torch.Tensor

        def evaluate(self, xp, n):
            return self.training * n / (n + self.half[..., None]) + self.forward[..., None]

    parameter = torch.nn.Parameter(torch.ones(H))
    module = LawModule(Own(parameter, 3.0, torch.zeros(H))).eval()
    assert module.state_dict().keys() == {"half"}
    law = module.double()()
    assert law.training == 3.0
    assert law.half.dtype == law.forward.dtype == torch.float64
    torch.testing.assert_close(law(torch.tensor([2.0])), torch.full((H, 1), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_half_precision_does_not_round_buffers(dtype):
    slope, intercept = torch.nn.Parameter(torch.full((H,), 1 / 3)), torch.full((H,), 1 / 3)
    module = LawModule(laws.scaled(laws.AffineLog(slope, intercept), intercept)).to(dtype)
    law = module()
    assert law.law.slope.dtype == dtype
    for x in (law.factor, law.law.intercept):
        assert x.dtype == torch.promote_types(dtype, torch.float32)
        assert torch.equal(x, intercept.to(x.dtype))
    assert torch.device("meta") == module.to("meta")().factor.device


class TestNumbersAreKept:
    """A law never has uninitialized numbers, though `to_empty` gives uninitialized memory."""

    @staticmethod
    def law(device="cpu"):
        slope = torch.nn.Parameter(torch.full((H,), 0.3, device=device))
        return laws.scaled(laws.AffineLog(slope, torch.full((H,), 0.5, device=device)), 2.0)

    @pytest.fixture(autouse=True)
    def _filled(self, monkeypatch):
        """Make uninitialized memory hold NaN."""
        original = torch.empty_like
        monkeypatch.setattr(
            torch, "empty_like", lambda *args, **kwargs: original(*args, **kwargs).fill_(torch.nan)
        )

    def assert_is_kept(self, law, slope=0.3):
        law = law().law
        assert bool((law.slope == slope).all())
        assert bool((law.intercept == 0.5).all())

    def test_skip_init(self):
        reference = make(MultiheadAttention, law=self.law(), dtype=torch.float32)
        with torch.no_grad():
            reference.law.law.slope += 1.0
        state = reference.state_dict()
        module = torch.nn.utils.skip_init(MultiheadAttention, E, H, law=self.law())
        self.assert_is_kept(module.law)
        module.load_state_dict(state)
        leaves = [x.float() for x in inputs(module)]
        torch.testing.assert_close(module(*leaves), reference(*leaves))
        module = torch.nn.utils.skip_init(MultiheadAttention, E, H, law=self.law())
        module.load_state_dict({name: x for name, x in state.items() if "law" not in name})
        self.assert_is_kept(module.law)

    @pytest.mark.parametrize("recurse", [False, True])
    def test_empty_memory(self, recurse):
        law = LawModule(self.law())
        copy_ = copy.deepcopy(law)
        self.assert_is_kept(law.to_empty(device="cpu", recurse=recurse))
        law = copy_.to("meta")
        self.assert_is_kept(copy.deepcopy(law).to_empty(device="cpu"))
        assert law.double().to_empty(device="cpu")().law.slope.dtype == torch.float64
        self.assert_is_kept(law, torch.tensor(0.3).double())
        module = MultiheadAttention(E, H, law=self.law()).half().to("meta").to_empty(device="cpu")
        self.assert_is_kept(module.law, torch.tensor(0.3).half())

    @pytest.mark.parametrize("has_law", [True, False])
    def test_assigned_to_the_meta_device(self, has_law):
        module = MultiheadAttention(E, H, law=self.law())
        state = copy.deepcopy(module).state_dict()
        state["law.law.slope"] += 1.0
        if not has_law:
            del state["law.law.slope"]
        module.to("meta").load_state_dict(state, assign=True)
        self.assert_is_kept(module.law, 1.3 if has_law else 0.3)
        assert torch.isfinite(module(*(x.float() for x in inputs(module)))[0]).all()

    def test_without_values(self):
        with torch.device("meta"):
            module = MultiheadAttention(E, H, law=self.law(None))
        message = (
            "`law` must have a `intercept` with values .*, got one that was made on the meta device"
        )
        with pytest.raises(ValueError, match=message):
            module.to_empty(device="cpu")

    @pytest.mark.parametrize("assign", [True, False])
    def test_parameters_without_values(self, assign):
        with torch.device("meta"):
            slope = torch.nn.Parameter(torch.full((H,), 0.3))
            module = MultiheadAttention(E, H, law=laws.AffineLog(slope, 0.5))
        if not assign:
            module.to_empty(device="cpu")
        state = MultiheadAttention(E, H).state_dict()
        with pytest.raises(RuntimeError, match=r"Missing key.*law\.slope"):
            module.load_state_dict(state, assign=assign)
        module.load_state_dict(state | {"law.slope": torch.ones(H)}, assign=assign)
        module.load_state_dict(state)
        assert bool((module.law().slope == 1.0).all())

    def test_fully_sharded(self, tmp_path):
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
        try:
            mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
            module = MultiheadAttention(E, H, law=self.law()).to("meta")
            fully_shard(module, mesh=mesh)
            module.to_empty(device="cpu")
            assert bool((module.law.law.slope.full_tensor() == 0.3).all())
            assert bool((module.law.law.intercept == 0.5).all())
        finally:
            dist.destroy_process_group()


def test_borrowed_tensors():
    slope, factor = torch.nn.Parameter(torch.ones(H)), torch.ones(H, requires_grad=True)
    module = LawModule(laws.scaled(laws.AffineLog(slope, torch.zeros(H)), factor), borrow=True)
    assert not list(module.parameters())
    assert [name for name, _ in module.named_buffers()] == ["law.intercept"]
    law = module.double()()
    assert law.factor is factor
    assert law.law.slope is slope
    with pytest.raises(TypeError, match="`borrow` must be True or False, got str"):
        LawModule(law, borrow="no")
    with pytest.raises(ValueError, match=r"`law` must have a torch\.nn\.Parameter as `factor`, or"):
        LawModule(law)


class TestErrors:
    @pytest.fixture
    def module(self):
        return make(MultiheadAttention)

    @pytest.fixture
    def leaves(self, module):
        return inputs(module)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"key": np.zeros((S, N, E))}, TypeError, "`key` must be a tensor, got ndarray"),
            ({"value": torch.zeros(S, E)}, ValueError, "`value` must have the 3 dimensions of `query`, got 2"),
            ({"query": torch.zeros(1, L, N, E)}, ValueError, "`query` must have 2 dimensions, or 3"),
            ({"key": torch.zeros(S, N, 5)}, ValueError, "`key` must have a last dimension of 12, got 5"),
            ({"key": torch.zeros(S, 1, E)}, ValueError, "`key` must have the batch size of `query` in axis 1, 2"),
            ({"value": torch.zeros(L, N, E)}, ValueError, "`value` must be as long as `key`, 6, got 4"),
            ({"attn_mask": torch.zeros(L, S, dtype=torch.int64)}, TypeError, "`attn_mask` must be boolean"),
            ({"attn_mask": it.masks.causal()}, TypeError, "`attn_mask` must be a tensor, got _Band"),
            ({"key_padding_mask": [True]}, TypeError, "`key_padding_mask` must be a tensor, got list"),
            ({"attn_mask": torch.zeros(S, S)}, ValueError, r"`attn_mask` must have the shape \(4, 6\), got \(6, 6\)"),
            ({"attn_mask": torch.zeros(H, L, S)}, ValueError, r"`attn_mask` must have the shape \(6, 4, 6\)"),
            ({"key_padding_mask": torch.zeros(S)}, ValueError, r"`key_padding_mask` must have the shape \(2, 6\)"),
            ({"key_padding_mask": torch.zeros(S, N)}, ValueError, r"`key_padding_mask` must have the shape \(2, 6\)"),
            ({"is_causal": True}, ValueError, "`attn_mask` must be given with `is_causal`"),
        ],
    )  # fmt: skip
    def test_inputs(self, module, leaves, change, error, message):
        call = dict(zip(("query", "key", "value"), leaves, strict=True))
        change = {
            name: x.double() if torch.is_tensor(x) and name in call else x for name, x in change.items()
        }
        with pytest.raises(error, match=message):
            module(**(call | change))

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
    def test_nested_tensors(self, module, leaves):
        x = torch.nested.nested_tensor([torch.zeros(L, E), torch.zeros(S, E)], dtype=torch.float64)
        mask, batch_first = (
            torch.ones(L, L, dtype=torch.bool),
            make(MultiheadAttention, batch_first=True),
        )
        for call in (
            lambda: module(x, *leaves[1:]),
            lambda: module(x, x, x),
            lambda: batch_first(x, x, x.clone()),
            lambda: batch_first(x, x, x, attn_mask=mask),
            lambda: batch_first(x, x, x, mask),
            lambda: batch_first.entropy(x, x),
        ):
            with pytest.raises(TypeError, match=r"`query` must be dense, .* got a nested one"):
                call()
        with pytest.raises(ValueError, match="`attn_mask` must be given with `is_causal`"):
            batch_first(x, x, x, is_causal=True)

    @pytest.mark.parametrize("need_weights", [False, True])
    def test_causal_without_a_mask(self, module, leaves, need_weights):
        """PyTorch's module raises an error too, except in its fast path, which ignores the flag."""
        theirs = make(torch.nn.MultiheadAttention)
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            theirs(*leaves, need_weights=need_weights, is_causal=True)
        for training in (True, False):
            with torch.no_grad(), pytest.raises(ValueError, match="generate_square_subsequent_mask"):
                module.train(training)(*leaves, need_weights=need_weights, is_causal=True)

    @pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
    def test_scripting(self):
        for module in (make(MultiheadAttention, law=None), LawModule(laws.LogLength())):
            for scripted in (module, torch.nn.Sequential(module)):
                message = (
                    f"{type(module).__name__} cannot be scripted: use `torch.compile` or `torch.export`"
                )
                with pytest.raises(TypeError, match=message):
                    torch.jit.script(scripted)

    def test_laws(self):
        with pytest.raises(
            TypeError, match=r"`law` must be a law .*a factor is `laws.Constant.*got float"
        ):
            MultiheadAttention(E, H, law=1.0)
        module = LawModule(laws.LogLength())
        message = r"`law` must be a law of .*, got LawModule; call it: `law\(\)`\.$"
        with pytest.raises(TypeError, match=message):
            it.attention(*torch.ones(3, 2, 2), law=module)
        with pytest.raises(TypeError, match=message):
            LawModule(module)
        with pytest.raises(TypeError, match="`law` must hold numbers and tensors, got ndarray"):
            LawModule(laws.Constant(np.ones(H)))
        module = make(MultiheadAttention, law=laws.Constant(torch.ones(H + 1)))
        with pytest.raises(ValueError, match="`law` must have a shape broadcastable"):
            module(*inputs(module))

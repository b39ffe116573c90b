"""Attention of tensors agrees with PyTorch's own, and its operators keep to the rules of PyTorch."""

import re
from pathlib import Path

import cases
import pytest

import isentropic as it
from isentropic import masks

torch = pytest.importorskip("torch")

from isentropic._attention.plan import Arguments, prepare  # noqa: E402


@pytest.fixture(autouse=True)
def _only_once(request):
    if request.config.getoption("--backend") not in (None, "torch"):
        pytest.skip("belongs to the backend torch")


class TestBfloat16:
    """PyTorch's kernel computes outputs of bfloat16 in bfloat16."""

    @pytest.fixture
    def dtypes(self, monkeypatch):
        """The dtypes in which the kernel is called."""
        found, kernel = set(), torch.nn.functional.scaled_dot_product_attention

        def recorded(query, *others, **options):
            found.add(query.dtype)
            return kernel(query, *others, **options)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
        return found

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"is_causal": True},
            {"mask": masks.window(3)},
            {"mask": masks.padding(torch.tensor([[4], [9]]))},
            {"law": None, "scale": 0.5},
        ],
        ids=["law", "causal", "window", "padding", "scale"],
    )
    @pytest.mark.parametrize("width", [8, 5])
    def test_outputs(self, dtypes, options, width):
        q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, width)
        q, k, v = (x.bfloat16() for x in (q, k, v))
        found = it.attention(q, k, v, enable_gqa=True, **options)
        assert dtypes == {torch.bfloat16}
        exact = it.attention(q.double(), k.double(), v.double(), enable_gqa=True, **options)
        # As PyTorch's own: queries, weights and outputs are rounded.
        torch.testing.assert_close(found.double(), exact, rtol=2**-6, atol=2**-6)

    def test_large_masked_calls(self, dtypes):
        x = torch.zeros(8, 2048, 64, dtype=torch.bfloat16)
        mask = masks.window(256)
        assert it.AttentionDistribution(x, x, mask=mask).backends(x)["sdpa"] == "runs"
        assert (
            it.AttentionDistribution(x.half(), x.half(), mask=mask).backends(x.half())["numpy_tiles"]
            == "runs"
        )

    def test_what_is_rounded_more_than_once_is_computed_in_float32(self, dtypes):
        q, k, v = torch.randn(3, 2, 7, 8).bfloat16()
        it.attention(q, k, v, bias=torch.randn(7, 7).bfloat16())
        it.attention(q.half(), k.half(), v.half())
        it.attention(q.clone().requires_grad_(), k, v)
        assert dtypes == {torch.float32}

    def test_nan(self, dtypes):
        q, k, v = torch.randn(3, 2, 7, 8).bfloat16()
        q[0, 3] = torch.nan
        found = it.attention(q, k, v)
        assert found[0, 3].isnan().all()
        assert found.isnan().sum() == 8

    def test_compiled(self):
        q, k, v = torch.randn(3, 2, 7, 8).bfloat16()
        compiled = torch.compile(it.attention, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(q, k, v), it.attention(q, k, v), rtol=2**-6, atol=2**-6)


class TestAgainstTorch:
    """The standard attention (law=None) is that of PyTorch."""

    @pytest.fixture
    def sdpa(self):
        return torch.nn.functional.scaled_dot_product_attention

    @pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (2, 3, 129, 16)])
    @pytest.mark.parametrize("n_keys", [1, 5, 300])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_shapes(self, sdpa, shape, n_keys, dtype, tiny_tiles):
        q = torch.randn(*shape, dtype=dtype)
        k = torch.randn(*shape[:-2], n_keys, shape[-1], dtype=dtype)
        v = torch.randn(*shape[:-2], n_keys, 7, dtype=dtype)
        torch.testing.assert_close(it.attention(q, k, v, law=None), sdpa(q, k, v))
        got = it.attention(q, k, v, law=None, scale=0.7)
        torch.testing.assert_close(got, sdpa(q, k, v, scale=0.7))

    def test_masks(self, sdpa):
        q, k, v = torch.randn(2, 3, 6, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 4)
        visible = torch.rand(2, 1, 6, 9) < 0.6
        visible[0, 0, 1] = False
        got = it.attention(q, k, v, law=None, mask=visible)
        torch.testing.assert_close(got, sdpa(q, k, v, attn_mask=visible))
        bias = torch.randn(3, 6, 9)
        got = it.attention(q, k, v, law=None, bias=bias)
        torch.testing.assert_close(got, sdpa(q, k, v, attn_mask=bias))

    def test_causality(self, sdpa):
        q, k, v = torch.randn(3, 2, 7, 8)
        got = it.attention(q, k, v, law=None, is_causal=True)
        torch.testing.assert_close(got, sdpa(q, k, v, is_causal=True))
        # Top-left, theirs; bottom-right, ours: their causal_lower_right.
        from torch.nn.attention.bias import causal_lower_right

        got = it.attention(q[:, :4], k, v, law=None, mask=masks.causal(offset=0))
        torch.testing.assert_close(got, sdpa(q[:, :4], k, v, is_causal=True))
        got = it.attention(q[:, :4], k, v, law=None, is_causal=True)
        expected = sdpa(q[None, :, :4], k[None], v[None], attn_mask=causal_lower_right(4, 7))[0]
        torch.testing.assert_close(got, expected)

    def test_grouped_heads(self, sdpa):
        q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
        got = it.attention(q, k, v, law=None, enable_gqa=True)
        torch.testing.assert_close(got, sdpa(q, k, v, enable_gqa=True))

    def test_law_folded_into_the_queries(self, sdpa):
        q, k, v = torch.randn(3, 2, 7, 8)
        n = torch.arange(1, 8)
        got = it.attention(q, k, v, is_causal=True)
        torch.testing.assert_close(got, sdpa(it.scale_queries(q, n), k, v, is_causal=True))

    def test_gradients(self, sdpa, tiny_tiles):
        leaves = [torch.randn(2, 11, 8, requires_grad=True) for _ in range(3)]
        weight = torch.randn(2, 11, 8)
        got = torch.autograd.grad((it.attention(*leaves, law=None) * weight).sum(), leaves)
        want = torch.autograd.grad((sdpa(*leaves) * weight).sum(), leaves)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, sdpa, dtype):
        q, k, v = torch.randn(3, 2, 64, 16).to(dtype)
        expected = sdpa(q.float(), k.float(), v.float())
        torch.testing.assert_close(
            it.attention(q, k, v, law=None).float(), expected, rtol=1e-2, atol=4e-3
        )

    def test_entropy(self):
        s = torch.randn(4, 9)
        expected = torch.distributions.Categorical(logits=s).entropy()
        torch.testing.assert_close(it.entropy_from_logits(s), expected)

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    def test_entropy_from_the_log_sum_exp_and_the_mean_key(self):
        # The bounds are those of the table in the documentation.
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        page = Path(__file__).parents[2] / "docs" / "how-to" / "fused-kernels.md"
        if not page.exists():
            pytest.skip("the documentation is not here")
        rows = re.findall(
            r"^\|.*queries.*\| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", page.read_text(), re.M
        )
        assert len(rows) == 2
        for length, (mean, *bounds) in zip((1, 4), rows, strict=True):
            q, k = torch.randn(2, 1, 2, 512, 64, dtype=torch.float64)
            dtypes = (torch.float32, torch.float16, torch.bfloat16)
            for dtype, bound in zip(dtypes, map(float, bounds), strict=True):
                query, key = (q * length).to(dtype), k.to(dtype)
                exact = it.attention_entropy(query.double(), key.double(), law=None)
                assert exact.mean().item() == pytest.approx(float(mean), abs=0.1)
                both = torch.cat((torch.randn_like(key), key), -1)
                means, aux = flex_attention(query, key, both, return_aux=AuxRequest(lse=True))
                entropy = aux.lse - (query.float() * means[..., 64:].float()).sum(-1) / 8
                error = (entropy - exact).abs().max().item()
                assert bound / 10 < error < bound
                own = it.attention_entropy(query, key, law=None)
                assert (own - exact).abs().max().item() < 3e-5

    def test_attention_sinks(self):
        pytest.importorskip("transformers")
        from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

        q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
        module = torch.nn.Module()
        module.num_key_value_groups, module.training = 2, False
        module.sinks = torch.nn.Parameter(torch.randn(4))
        hidden = torch.zeros(5, 9).masked_fill(~torch.ones(5, 9, dtype=torch.bool).tril(4), -torch.inf)
        expected, weights = eager_attention_forward(module, q, k, v, hidden, scaling=8**-0.5)
        options = {"law": None, "enable_gqa": True, "is_causal": True, "sinks": module.sinks}
        got = it.attention(q, k, v, **options)
        torch.testing.assert_close(got.transpose(1, 2), expected)
        torch.testing.assert_close(it.AttentionDistribution(q, k, **options).weights(), weights)
        upstream = torch.randn(expected.shape)
        gradients = (
            torch.autograd.grad(x, module.sinks, upstream) for x in (expected, got.transpose(1, 2))
        )
        torch.testing.assert_close(*gradients)

    def test_attention_sink_is_one_more_state(self):
        pytest.importorskip("transformers")
        from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

        q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)
        module = torch.nn.Module()
        module.num_key_value_groups, module.training = 1, False
        module.sinks = torch.randn(4)
        expected, weights = eager_attention_forward(module, q, k, v, None, scaling=8**-0.5)
        sink = module.sinks[:, None].expand(2, 4, 5)
        zero = torch.zeros(2, 4, 5)
        extra = it.AttentionState(sink, zero + 1, torch.zeros(2, 4, 5, 8), zero)
        merged = it.merge_states(it.attention_state(q, k, v, law=None), extra)
        torch.testing.assert_close(merged.output().transpose(1, 2), expected)
        p = torch.cat((weights, 1 - weights.sum(-1, keepdim=True)), -1)
        torch.testing.assert_close(merged.entropy(), it.entropy(p), rtol=1e-4, atol=1e-5)

    def test_against_transformers_eager_attention(self):
        pytest.importorskip("transformers")
        from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

        q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
        module = torch.nn.Module()
        module.num_key_value_groups, module.training = 2, False
        hidden = torch.zeros(5, 9).masked_fill(~torch.ones(5, 9, dtype=torch.bool).tril(4), -torch.inf)
        expected, _ = eager_attention_forward(module, q, k, v, hidden, scaling=0.3, softcap=5.0)
        got = it.attention(q, k, v, law=None, enable_gqa=True, softcap=5.0, scale=0.3, is_causal=True)
        torch.testing.assert_close(got.transpose(1, 2), expected)


class TestGraphs:
    def test_no_keys(self):
        """As for PyTorch's own attention, a loss can be differentiated. The gradient is 0."""
        q, k = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 0, 4)
        for options in ({}, {"is_causal": True}, {"softcap": 2.0}):
            p = it.AttentionDistribution(q, k, **options)
            for result in (p.output(k), p.entropy(), p.entropy(order=2.0), p.state(k).log_normalizer()):
                (gradient,) = torch.autograd.grad(result.sum(), q)
                assert not gradient.any()

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"is_causal": True, "softcap": 2.0, "bias": torch.zeros(1, 9)},
            {"mask": masks.window(3) & masks.padding(torch.tensor([[5], [8]]))},
            {
                "mask": masks.segments(torch.arange(9) // 2)
                | torch.ones(9, 9, dtype=torch.bool).tril(-1)
            },
        ],
    )
    def test_operators(self, options):
        from isentropic._attention import torch_operator

        q = torch.randn(2, 4, 9, 4, requires_grad=True)
        k, v = (torch.randn(2, 2, 9, 4, requires_grad=True) for _ in range(2))
        plan, operands = prepare(Arguments(q, k, v, enable_gqa=True, **options))
        call = torch_operator.call_of(plan, operands, 1.0)
        call = call._replace(query=call.query.detach().requires_grad_())
        operators = torch.ops.isentropic
        for order in (1.0, 2.0, None):
            call = call._replace(order=order)
            found = torch.library.opcheck(operators.attention_state.default, tuple(call))
            assert set(found.values()) == {"SUCCESS"}
            plain = call._replace(query=call.query.detach(), key=k.detach(), value=v.detach())
            fields = operators.attention_state(*plain)
            upstream = [torch.randn_like(x) for x in fields]
            wanted = [True, True, True, plain.bias is not None, plain.factor is not None]
            found = torch.library.opcheck(
                operators.attention_gradients.default, (fields, upstream, wanted, *plain)
            )
            assert set(found.values()) == {"SUCCESS"}
        halves = call._replace(query=q.detach().bfloat16(), key=k.detach().bfloat16(), value=v.detach())
        found = torch.library.opcheck(operators.attention_state.default, tuple(halves))
        assert set(found.values()) == {"SUCCESS"}

    @pytest.mark.parametrize("is_vmapped", [False, True])
    def test_graphs_hold_no_array_of_all_logits(self, is_vmapped):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        n, sizes = 96, []

        def record(graph, inputs):
            values = [node.meta.get("val") for node in graph.graph.nodes]
            sizes.extend(x.numel() for x in cases.leaves(tuple(values)) if torch.is_tensor(x))
            return make_boxed_func(graph)

        def call(q, k, v):
            state = it.attention_state(q, k, v, mask=masks.window(9) & masks.padding(90))
            out = it.attention(q, k, v, mask=masks.window(9))
            return (out + state.output()).sum() + state.entropy().sum()

        def calls(*arrays):
            return torch.func.vmap(call)(*arrays).sum() if is_vmapped else call(*arrays)

        torch.compiler.reset()
        compiled = torch.compile(calls, fullgraph=True, backend=aot_autograd(fw_compiler=record))
        shape = (*[2] * is_vmapped, n, 8)
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
        got, want = (torch.autograd.grad(f(q, k, v), (q, k, v)) for f in (compiled, calls))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert 0 < max(sizes) < n * n // 4
        torch.compiler.reset()

    @pytest.mark.parametrize("is_differentiated", [False, True])
    @pytest.mark.parametrize("is_vmapped", [False, True])
    def test_numpy_computes_states_without_gradients(self, is_differentiated, is_vmapped, monkeypatch):
        """Inside of `vmap` arrays do not know whether they need gradients."""
        from isentropic._attention import numpy

        plans, state = [], numpy.state
        monkeypatch.setattr(numpy, "state", lambda plan, *a: plans.append(plan) or state(plan, *a))
        q, k, v = (torch.randn(2, 9, 4, requires_grad=is_differentiated) for _ in range(3))

        def of_element(q, k, v):
            state = it.attention_state(q, k, v, is_causal=True)
            return state.output().sum(-1) + state.entropy()

        def call(q, k, v):
            return (torch.vmap(of_element) if is_vmapped else of_element)(q, k, v)

        torch.compiler.reset()
        found = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
        assert len(plans) == (not (is_differentiated or is_vmapped))
        torch.testing.assert_close(found, call(q, k, v))
        torch.compiler.reset()

    def test_an_exported_program_may_need_gradients(self, monkeypatch):
        from isentropic._attention import numpy

        class Model(torch.nn.Module):
            def forward(self, q, k):
                return it.attention_entropy(q, k)

        q, k = torch.randn(2, 3, 9, 4)
        program = torch.export.export(Model(), (q, k)).module()
        want = it.attention_entropy(q, k)
        monkeypatch.delattr(numpy, "state")
        torch.testing.assert_close(program(q, k), want)

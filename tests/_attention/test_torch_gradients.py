"""Gradients of states and entropies in PyTorch are those of autograd through all tiles."""

import math

import numpy as np
import pytest

import isentropic as it
from isentropic import masks

torch = pytest.importorskip("torch")

from isentropic._attention.backends import backends  # noqa: E402
from isentropic._attention.plan import Arguments, prepare  # noqa: E402


@pytest.fixture(autouse=True)
def _only_once(request):
    if request.config.getoption("--backend") not in (None, "torch"):
        pytest.skip("belongs to the backend torch")


RECOMPUTED = {
    "state": lambda a, i: it.attention_state(a["q"], a["k"], a["v"], implementation=i),
    "mask": lambda a, i: it.attention_state(
        a["q"], a["k1"], a["v"], bias=a["b"], mask=masks.window(2) & masks.padding(6), implementation=i
    ),
    "groups": lambda a, i: it.attention_state(
        a["q"], a["k2"], a["v2"], bias=a["b"], softcap=2.0, enable_gqa=True, is_causal=True,
        implementation=i,
    ),
    "softcap": lambda a, i: it.attention(
        a["q"], a["k"], a["v"], bias=a["b"], softcap=2.0, implementation=i
    ),
    **{
        f"entropy {order}": lambda a, i, order=order: it.attention_entropy(
            a["q"], a["k"], order=order, is_causal=True, implementation=i
        )
        for order in (0.5, 0.9, 1.0, 1.1, 2.0, np.inf)
    },
}  # fmt: skip


GRADIENT_OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window and bias": {"mask": masks.window(1, 1), "bias": None},
    "padding and softcap": {"mask": masks.padding(torch.tensor([[0], [4]])), "softcap": 1.5},
    "array": {"mask": torch.tensor(np.random.default_rng(0).random((4, 5, 5)) < 0.5)},
    "bias and softcap": {"softcap": 1.5, "bias": None, "law": None},
}


# Options of calls of 600 queries and keys.
_LARGE_LOGITS = {
    "all keys": {},
    "causal": {"mask": masks.causal()},
    "hidden keys": {"mask": masks.padding(540)},
    "another sequence": {"mask": masks.segments(torch.arange(600) // 540)},
    "queries that see no key": {
        "mask": masks.as_mask((torch.arange(600) < 540)[:, None].expand(600, 600))
    },
    "soft cap": {"softcap": 4e3},
}


def _assert_as_accurate_as_autograd(results):
    """That ``results(float32)`` have the errors of autograd through all tiles, in float32 too."""
    calls = (torch.float32,), (torch.float32, "generic"), (torch.float64,)
    for got, plain, want in zip(*(results(*call) for call in calls), strict=True):
        errors = [(x - want).abs().max() / want.abs().max() for x in (got, plain)]
        assert errors[0] < 2 * errors[1] + 1e-5


class TestRecomputedGradients:
    """States and entropies whose gradient takes the tiles again, against autograd through all tiles."""

    @pytest.mark.parametrize("case", _LARGE_LOGITS)
    @pytest.mark.parametrize("is_last_query_nan", [False, True])
    def test_large_logits_in_single_precision(self, rng, case, is_last_query_nan):
        """Keys with a common offset, as of channels with outliers: it multiplies errors of the weights."""
        q, k, v = (rng.normal(size=(4, 600, 64)) for _ in range(3))
        q, k = 0.3 * q + 2, 0.3 * k + 40
        if case in ("hidden keys", "another sequence"):
            k[:, 540:] = 1e9
        if is_last_query_nan:
            q[:, -1] = math.nan
        # The last queries may see no key, be NaN, or have keys of 1e9, to which all errors are relative.
        is_last_apart = case in ("another sequence", "queries that see no key") or is_last_query_nan
        n = 540 if is_last_apart else 600

        def results(dtype, implementation=None):
            options = _LARGE_LOGITS[case] | {"law": None, "implementation": implementation}
            arrays = (a.astype("float32") for a in (q, k, v))
            x = [torch.asarray(a, dtype=dtype).requires_grad_() for a in arrays]
            state = it.attention_state(*x, **options)
            fields = state.output(), state.entropy(), state.log_normalizer()
            *rest, normalizer = (y[:, :n].sin().sum() for y in fields)
            found = [*rest, normalizer]
            for loss in (sum(rest), sum(rest) + normalizer):
                gradients = torch.autograd.grad(loss, x, retain_graph=True)
                # The NaN of a query reaches the gradients of all keys that it sees.
                found += [g[:, :n] for g in gradients[: 1 if is_last_query_nan else 3]]
            return found

        _assert_as_accurate_as_autograd(results)

    @pytest.mark.parametrize("is_compiled", [False, True])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_weights_of_which_one_is_almost_1(self, rng, is_causal, is_compiled):
        arrays = [rng.normal(size=(3, 600, 64)).astype("float32") for _ in range(3)]
        arrays[0] *= 1e4

        def loss(q, k, v, implementation=None):
            options = {"is_causal": is_causal, "law": None, "implementation": implementation}
            state = it.attention_state(q, k, v, **options)
            return state.output().sin().sum() + state.entropy().sin().sum()

        torch.compiler.reset()
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager") if is_compiled else loss

        def results(dtype, implementation=None):
            x = [torch.asarray(a, dtype=dtype).requires_grad_() for a in arrays]
            function = compiled if implementation is None else loss
            return torch.autograd.grad(function(*x, implementation), x)

        _assert_as_accurate_as_autograd(results)
        torch.compiler.reset()

    @pytest.mark.parametrize("mask", [None, it.masks.causal()])
    def test_a_maximum_with_other_rounding_errors(self, rng, monkeypatch, mask):
        """The units of logits of 1e9 in single precision are 64 nats."""
        from isentropic._attention.torch_gradients import _Forward

        add_rows = _Forward.add_rows

        def with_errors(self, rows):
            add_rows(self, rows)
            self.state.maximum[..., rows[0] : rows[0] + rows[1], :] -= 128.0

        monkeypatch.setattr(_Forward, "add_rows", with_errors)
        q, k, v = (torch.as_tensor(rng.normal(size=(4, 600, 32)).astype("float32")) for _ in range(3))
        x = [a.requires_grad_() for a in (q, 1e9 * k, v)]
        loss = it.attention_state(*x, mask=mask, law=None).output()[:, :300].sin().sum()
        for gradient in torch.autograd.grad(loss, x):
            assert gradient.isfinite().all()
        assert gradient.abs().max() < 100  # that of the values: sums of weights, times at most 1

    @pytest.mark.parametrize("order", [0.5, 1.0, 2.0, math.inf])
    def test_queries_whose_logits_are_all_minus_infinity(self, rng, order):
        """The products overflow. There is no entropy and an output of 0, as without visible keys."""
        q, k, v = (torch.as_tensor(rng.normal(size=(600, 4)).astype("float32")) for _ in range(3))
        q[7], k, v = -1e31, 1e9 * k.abs(), v + 5
        x = [a.requires_grad_() for a in (q, k, v)]
        found = [it.attention_entropy(*x[:2], order=order)[7]]
        if order == 1:
            state = it.attention_state(*x)
            assert state.normalizer[7] == state.weighted_score[7] == 0
            found += [
                it.attention(*x, implementation="torch_tiles")[7],
                state.output()[7],
                state.entropy()[7],
            ]
        for result in found:
            assert (result == 0).all()
            for gradient in torch.autograd.grad(result.sum(), x, retain_graph=True, allow_unused=True):
                assert gradient is None or (gradient == 0).all()

    @pytest.mark.parametrize("mask", [None, it.masks.causal()])
    @pytest.mark.parametrize("order", [0.1, 0.5, 1.0, 2.0])
    def test_weights_below_the_smallest_number(self, tiny_tiles, rng, order, mask):
        """Logits from −200 to 0, of which those below −87 have no weight that is a normal number."""
        q = torch.ones(1, 60, 1)
        k = -torch.as_tensor(rng.permutation(np.linspace(0, 200, 60, dtype="float32"))[None, :, None])
        found = []
        for dtype in (torch.float32, torch.float64):
            x = [a.to(dtype).requires_grad_() for a in (q, k)]
            entropy = it.attention_entropy(*x, order=order, mask=mask, law=None)
            found.append(torch.autograd.grad(entropy.sin().sum(), x))
        for got, want in zip(*found, strict=True):
            assert (got - want).abs().max() < 1e-4 * want.abs().max()

    @pytest.mark.parametrize("large", ["keys", "values"])
    def test_large_numbers_without_weight(self, tiny_tiles, rng, large):
        """Keys and values so large that a weight of 10⁻³⁷ would show in the gradient."""
        q, k, v = (torch.as_tensor(rng.normal(size=(2, 40, 4)).astype("float32")) for _ in range(3))
        q = q.abs() + 0.5
        k[:, ::2] = -1e33 if large == "keys" else -1e3
        v[:, ::2] = 1e33 if large == "values" else 1.0
        found = []
        for dtype in (torch.float32, torch.float64):
            x = [a.to(dtype).requires_grad_() for a in (q, k, v)]
            state = it.attention_state(*x, law=None)
            loss = state.output().sum() + state.entropy().sum()
            found.append(torch.autograd.grad(loss, x))
        for got, want in zip(*found, strict=True):
            assert (got - want).abs().max() < 1e-4 * want.abs().max()

    @pytest.mark.parametrize("hide", ["mask", "bias"])
    def test_hidden_keys_have_no_gradient(self, tiny_tiles, hide):
        visible = torch.arange(40) % 3 != 0
        options = {"mask": visible}
        if hide == "bias":
            options = {"bias": torch.where(visible, 0.0, -math.inf).expand(40, 40)}
        q, k, v = (torch.randn(2, 40, 4, requires_grad=True) for _ in range(3))
        state = it.attention_state(q, k, v, **options)
        for x in torch.autograd.grad(state.output().sum() + state.entropy().sum(), (k, v)):
            assert (x[:, ~visible] == 0).all()
            assert (x[:, visible] != 0).all()

    @pytest.mark.parametrize("mask", [masks.causal(), torch.arange(40) <= torch.arange(40)[:, None]])
    def test_a_query_that_is_nan_does_not_reach_hidden_keys(self, tiny_tiles, mask):
        q, k, v = (torch.randn(2, 40, 4) for _ in range(3))
        others, found = torch.arange(40) != 7, []
        for value in (0.0, math.nan):
            q[:, 7] = value
            x = [a.clone().requires_grad_() for a in (k, v)]
            state = it.attention_state(q, *x, mask=mask)
            loss = state.output()[:, others].sum() + state.entropy()[:, others].sum()
            found.append(torch.autograd.grad(loss, x))
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got[:, 8:], want[:, 8:])

    @pytest.mark.parametrize("call", ["softcap", "state", "entropy 1.0"])
    def test_checkpoints_and_autocast(self, tiny_tiles, rng, call):
        a = {x: torch.asarray(rng.normal(size=(1, 4, 40, 8)).astype("float32")) for x in "qkvb"}
        a |= {"b": torch.zeros(40, 40)}
        leaves = [x.requires_grad_() for x in a.values()]

        def loss(*_):
            out = RECOMPUTED[call](a, None)
            return (out.output() + out.entropy()[..., None] if call == "state" else out).sin().sum()

        expected = torch.autograd.grad(loss(), leaves[:2])
        again = torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False)
        for got, want in zip(torch.autograd.grad(again, leaves[:2]), expected, strict=True):
            torch.testing.assert_close(got, want)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = loss()
            grads = torch.autograd.grad(inside, leaves[:2], retain_graph=True)
        for found in (grads, torch.autograd.grad(inside, leaves[:2])):
            for got, want in zip(found, expected, strict=True):
                torch.testing.assert_close(got, want)

    @pytest.mark.parametrize(("width", "n_values"), [(0, 3), (4, 0)])
    def test_no_features(self, tiny_tiles, width, n_values):
        q, k = (torch.randn(2, 2, 9, width, requires_grad=True) for _ in range(2))
        v = torch.randn(2, 2, 9, n_values, requires_grad=True)
        found = []
        for implementation in (None, "generic"):
            state = it.attention_state(q, k, v, is_causal=True, implementation=implementation)
            loss = state.output().sin().sum() + state.entropy().sin().sum()
            found.append(torch.autograd.grad(loss, (q, k, v)))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want)

    def test_a_bias_of_another_class(self, tiny_tiles):
        from torch.testing._internal.two_tensor import TwoTensor

        q, bias = torch.randn(2, 9, 4, requires_grad=True), torch.randn(9, 9)
        entropies = [it.attention_entropy(q, q, bias=x) for x in (TwoTensor(bias, bias), bias)]
        got, want = (torch.autograd.grad(x.sum(), q)[0] for x in entropies)
        torch.testing.assert_close(entropies[0].a, entropies[1])
        torch.testing.assert_close(got.a, want)

    @pytest.mark.parametrize("name", RECOMPUTED)
    def test_batched_gradients(self, name, rng, tiny_tiles):
        shapes = {"q": (4, 7, 8), "k": (4, 9, 8), "v": (4, 9, 6), "b": (4, 7, 9)}
        shapes |= {"k1": (1, 9, 8), "k2": (2, 9, 8), "v2": (2, 9, 6)}
        a = {x: torch.asarray(rng.normal(size=(2, *of))).requires_grad_() for x, of in shapes.items()}
        out = RECOMPUTED[name](a | {"b": a["b"][0]}, None)
        out = next(iter(out)) if isinstance(out, tuple) else out
        upstream = torch.asarray(rng.normal(size=(3, *out.shape)))
        options = {"retain_graph": True, "allow_unused": True}
        inputs = list(a.values())
        found = torch.autograd.grad(out, inputs, upstream, is_grads_batched=True, **options)
        expected = [torch.autograd.grad(out, inputs, g, **options) for g in upstream]
        for got, want in zip(found, zip(*expected, strict=True), strict=True):
            if got is not None:
                torch.testing.assert_close(got, torch.stack(want))
            else:
                assert all(x is None or not x.any() for x in want)

    @pytest.mark.parametrize("name", RECOMPUTED)
    def test_first_and_second_derivatives(self, name, rng, tiny_tiles):
        def array(*shape):
            return torch.asarray(rng.normal(size=shape)).requires_grad_()

        a = {
            "q": array(2, 4, 7, 8),
            "k": array(2, 4, 9, 8),
            "v": array(2, 4, 9, 6),
            "b": array(4, 7, 9),
        }
        a |= {"k1": array(2, 1, 9, 8), "k2": array(2, 2, 9, 8), "v2": array(2, 2, 9, 6)}
        inputs, gradients = list(a.values()), []
        for implementation in ("generic", None):
            out = RECOMPUTED[name](a, implementation)
            fields = list(out) if isinstance(out, tuple) else [out]
            loss = sum(
                (i + 1) * torch.where(x.isfinite(), x, 0.0).sin().sum() for i, x in enumerate(fields)
            )
            first = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True)
            again = torch.autograd.grad(loss, inputs, allow_unused=True, create_graph=True)
            curvature = sum(g.sin().sum() for g in again if g is not None)
            second = torch.autograd.grad(curvature, inputs, allow_unused=True)
            gradients.append((*first, *again, *second))
        for x, y in zip(*gradients, strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize("inputs", ["v", "vs", "b", "k"])
    def test_second_derivatives_of_some_inputs(self, rng, tiny_tiles, inputs):
        a = {name: torch.asarray(rng.normal(size=(4, 8, 8))) for name in "qkvb"}
        a["s"] = torch.asarray(rng.normal(size=4))
        wanted = [a[name].requires_grad_() for name in inputs]
        found = []
        for implementation in ("generic", None):
            options = {"bias": a["b"], "sinks": a["s"], "implementation": implementation}
            state = it.attention_state(a["q"], a["k"], a["v"], **options)
            loss = state.output().sin().sum() + (state.log_normalizer() ** 2).sum()
            first = torch.autograd.grad(loss, wanted, create_graph=True)
            found.append((*first, *torch.autograd.grad(sum(x.sin().sum() for x in first), wanted)))
        for got, expected in zip(*found, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize(
        "call", ["attention", "window", "padding", "bias", "softcap", "state", "entropy"]
    )
    def test_what_is_kept_grows_with_the_length_alone(self, call):
        calls = {
            "attention": lambda q: it.attention(q, q, q, is_causal=True),
            "window": lambda q: it.attention(q, q, q, mask=masks.window(300)),
            "padding": lambda q: it.attention(q, q, q, mask=masks.padding(torch.tensor(2000))),
            "bias": lambda q: it.attention(q, q, q, bias=torch.zeros(q.shape[-2])),
            "softcap": lambda q: it.attention(q, q, q, softcap=9.0),
            "state": lambda q: it.attention_state(q, q, q).output(),
            "entropy": lambda q: it.attention_entropy(q, q, order=2),
        }
        kept = 0

        def count(x):
            nonlocal kept
            kept += x.numel()
            return x

        n = 2100
        q = torch.randn(4, n, 16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            out = calls[call](q)
        out.sum().backward()
        assert torch.isfinite(q.grad).all()
        assert kept < 4 * n * 16 * 20  # L × S would be 4 · n · 2100

    @pytest.mark.parametrize("order", [None, 0.0, 0.5, 0.9, 1.0, 1.1, 2.0, np.inf])
    @pytest.mark.parametrize("options", GRADIENT_OPTIONS)
    def test_every_field_order_and_option(self, rng, tiny_tiles, order, options):
        """Gradients of fields, which depend on the maximum, and of an output, which does not."""
        arrays = {
            "query": (2, 4, 5, 3), "key": (2, 2, 5, 3), "value": (2, 2, 5, 2), "bias": (4, 1, 5)
        }  # fmt: skip
        options = GRADIENT_OPTIONS[options]  # one of the tiles has a single key
        arrays = {
            name: torch.asarray(rng.normal(size=shape)).requires_grad_()
            for name, shape in arrays.items()
            if name != "bias" or "bias" in options
        }
        gradients = []
        named = {backend.name: backend for backend in backends()}
        for backend in (named["generic"], named["torch_tiles"]):
            plan, operands = prepare(Arguments(**(options | arrays | {"enable_gqa": True})))
            assert backend.unsupported_reason(plan, order, False) is None
            state = backend.state(plan, operands, order, True)
            results = [torch.where(x.isfinite(), x, 0.0) for x in state if x is not None]
            results.append(results[2] / torch.where(results[1] > 0, results[1], 1.0))
            gradients.append(results)
            for x in results[: len(results)]:
                grads = torch.autograd.grad(
                    x.sin().sum(), arrays.values(), retain_graph=True, materialize_grads=True
                )
                results.extend(grads)
        for x, y in zip(*gradients, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)

    @pytest.mark.parametrize("options", GRADIENT_OPTIONS)
    def test_finite_differences(self, rng, tiny_tiles, options):
        options = GRADIENT_OPTIONS[options] | {"enable_gqa": True}
        shapes = ((2, 4, 5, 3), (2, 2, 5, 3), (2, 2, 5, 2), (4, 1, 5))
        inputs = [torch.asarray(rng.normal(size=shape)).requires_grad_() for shape in shapes]

        def function(q, k, v, bias):
            given = options | ({"bias": bias} if "bias" in options else {})
            state = it.attention_state(q, k, v, **given)
            entropies = [it.attention_entropy(q, k, order=order, **given) for order in (0.5, 0.9, 2)]
            return state.output(), state.entropy(), *entropies, 0.0 * bias

        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)

    def test_second_derivative_of_the_native_kernel_is_refused_by_pytorch(self, rng):
        q = torch.asarray(rng.normal(size=(5, 4))).requires_grad_()
        (g,) = torch.autograd.grad(it.attention(q, q, q).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="not implemented"):
            torch.autograd.grad(g.sum(), q)

    # Raised inside PyTorch 2.13 by what it imports for forward mode.
    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": masks.window(2)}])
    def test_forward_mode_and_hessian(self, rng, options):
        q, k, v = torch.asarray(rng.normal(size=(3, 5, 4)))

        def call(q, implementation=None):
            return it.attention(q, k, v, implementation=implementation, **options).sin().sum()

        _, tangent = torch.func.jvp(call, (q,), (k,))
        torch.testing.assert_close(tangent, (torch.func.grad(call)(q) * k).sum())
        hessian = torch.func.hessian(call)(q)
        expected = torch.autograd.functional.hessian(lambda q: call(q, "generic"), q)
        torch.testing.assert_close(hessian, expected)

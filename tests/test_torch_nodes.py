"""Calls in graphs of torch.compile are single nodes, with the results and errors of calls outside."""

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

import isentropic as it  # noqa: E402
from isentropic import laws, masks  # noqa: E402


@pytest.fixture(autouse=True)
def only_torch(request):
    if request.config.getoption("--backend") not in (None, "torch"):
        pytest.skip("belongs to the backend torch")
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def qkv():
    return torch.randn(3, 4, 9, 8)


def _compiled(function, **options):
    """The function, compiled, and the graphs that the compiler makes of it."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    return torch.compile(function, backend=keep, **options), graphs


CALLS = {
    "output": lambda q, k, v: it.attention(q, k, v, is_causal=True),
    "state": lambda q, k, v: it.attention_state(q, k, v, mask=masks.window(2)).output(),
    "state without values": lambda q, k, v: it.attention_state(q, k).entropy(),
    "entropy": lambda q, k, v: it.attention_entropy(q, k, order=2, normalized=True),
    "weights": lambda q, k, v: it.AttentionDistribution(q, k, softcap=3.0).weights(),
    "statistics": lambda q, k, v: it.AttentionDistribution(q, k).statistics().variance,
    "received": lambda q, k, v: it.AttentionDistribution(q, k, n_keys=5).received(),
    "information": lambda q, k, v: it.AttentionDistribution(q, k, scale=0.2).information(),
    "no law": lambda q, k, v: it.attention(q, k, v, law=None, n_keys=None),
    "law of laws": lambda q, k, v: it.attention(
        q, k, v, law=laws.scaled(laws.AffineLog(q.mean(), 0.5), 2.0), n_keys=torch.arange(9)
    ),
    "masks": lambda q, k, v: it.attention(
        q, k, v, mask=masks.causal() & (masks.window(2) | masks.segments((q[0, :, 0] > 0).long())),
        bias=k[..., :1, :1], sinks=v[:, 0, 0],
    ),
    "by names": lambda q, k, v: it.attention(value=v, key=k, query=q),
}  # fmt: skip


class TestCall:
    @pytest.mark.parametrize("name", list(CALLS))
    def test_is_one_node(self, qkv, name):
        compiled, graphs = _compiled(CALLS[name], fullgraph=True)
        torch.testing.assert_close(compiled(*qkv), CALLS[name](*qkv))
        (graph,) = graphs
        called = [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]
        assert called.count("_node") == 1
        # Dynamo sees neither the checks nor a kernel.
        assert not {"scaled_dot_product_attention", "attention_state", "isfinite"} & set(called)

    def test_few_things_are_guarded(self, qkv):
        def call(q, k, v):
            return it.attention(q, k, v, is_causal=True)

        _compiled(call, fullgraph=True)[0](*qkv)
        (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(call.__code__)
        assert 0 < str(entry.guard_manager).count("_MATCH") < 80  # 301 if Dynamo looks into the call

    def test_symbolic_flag(self, qkv):
        def call(q, k, v):
            return it.attention(q, k, v, is_causal=q.shape[-2] > 1)

        compiled, graphs = _compiled(call, fullgraph=True, dynamic=True)
        for n in (9, 7, 5):
            arrays = [x[:, :n] for x in qkv]
            torch.testing.assert_close(compiled(*arrays), call(*arrays))
        assert len(graphs) <= 2

    def test_numbers_change(self, qkv):
        def call(q, k, v, scale, n):
            law, mask = laws.AffineLog(scale, 1.0), masks.window(n)
            return it.attention(q, k, v, law=law, mask=mask, scale=scale, n_keys=n)

        compiled, graphs = _compiled(call, fullgraph=True, dynamic=True)
        for scale, n in ((0.1, 3), (0.2, 4), (0.3, 5), (0.4, 6)):
            torch.testing.assert_close(compiled(*qkv, scale, n), call(*qkv, scale, n))
        assert len(graphs) <= 2


class MyError(ValueError):
    """An error of a law of the user's own."""


@dataclass(frozen=True)
class Mine(laws.Law):
    """It asks for the type of a number."""

    number: int
    others: tuple | list  # a list is neither a number nor an array

    def evaluate(self, xp, n):
        if self.number < 0:
            raise MyError("negative")
        return n * 0.0 + (self.number if isinstance(self.number, int) else 100) + sum(self.others)


class TestOtherLaws:
    """Dynamo looks into calls with laws that are not of this package."""

    @pytest.mark.parametrize("others", [(0.5, 0.25), [0.5, 0.25]])
    def test_numbers_keep_their_types(self, qkv, others):
        def call(q, k, v, number):
            return it.attention(q, k, v, law=laws.scaled(Mine(number, others), 0.5))

        # What follows Dynamo has symbolic numbers, where the graph itself would run with plain ones.
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        for number in (1, 2, 3):
            torch.testing.assert_close(compiled(*qkv, number), call(*qkv, number))

    def test_errors_can_be_caught(self, qkv):
        def call(q, k, v):
            try:
                return it.attention(q, k, v, law=Mine(-1, ()))
            except MyError:
                return it.attention(q, k, v)
            except ValueError:
                return q

        torch.testing.assert_close(_compiled(call)[0](*qkv), call(*qkv))


WRONG = {
    "shape": lambda q, k, v: it.attention(q, k[..., :4], v),
    "kind": lambda q, k, v: it.attention(q, k, v, scale="large"),
    "name": lambda q, k, v: it.attention(q, k, v, attn_mask=None),
    "four arrays": lambda q, k, v: it.attention(q, k, v, v),
    "key twice": lambda q, k, v: it.attention(q, k, v, key=k),
    "value": lambda q, k, v: it.attention_entropy(q, k, order=-1.0),
    "no array": lambda q, k, v: it.attention_state(q, None),
}


# Where the compiled function fails, PyTorch runs it again and compiles what it calls, one by one.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
class TestErrors:
    @pytest.mark.parametrize("name", list(WRONG))
    def test_are_those_of_a_call_outside(self, qkv, name):
        with pytest.raises((TypeError, ValueError)) as expected:
            WRONG[name](*qkv)
        with pytest.raises(type(expected.value)) as found:
            _compiled(WRONG[name])[0](*qkv)
        assert str(found.value) == str(expected.value)
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported) as found:
            _compiled(WRONG[name], fullgraph=True)[0](*qkv)
        assert str(expected.value).partition("\n")[0] in str(found.value).replace("\\'", "'")

    def test_a_right_call_after_a_wrong_one(self, qkv):
        def call(q, k, v):
            return it.attention(q, k, v, scale=0.5)

        q, k, v = qkv
        compiled, _ = _compiled(call)
        with pytest.raises(ValueError, match="key"):
            compiled(q, k[..., :4], v)
        torch.testing.assert_close(compiled(q, k, v), call(q, k, v))

    @pytest.mark.parametrize("fullgraph", [False, True])
    def test_caught(self, qkv, fullgraph):
        def call(q, k, v):
            try:
                return it.attention(q, k[..., :4], v)
            except ValueError:
                return it.attention(q, k, v)

        # The graph runs as Dynamo has made it, with the node that has failed.
        compiled, _ = _compiled(call, fullgraph=fullgraph)
        for _ in range(2):
            torch.testing.assert_close(compiled(*qkv), call(*qkv))

    def test_of_numbers_that_a_graph_reads(self, qkv):
        def call(q, k, v, n):
            return it.attention(q, k, v, n_keys=n)

        compiled, _ = _compiled(call, fullgraph=True)
        compiled(*qkv, torch.tensor([3]))
        with pytest.raises(ValueError, match="n_keys"):
            compiled(*qkv, torch.tensor([-3]))

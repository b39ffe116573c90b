"""A call keeps its plan for the next call of the same signature, and keeps no arrays."""

import threading

import numpy as np
import pytest
from array_api_compat import is_array_api_obj

import isentropic as it
from isentropic import laws, masks
from isentropic._attention import plan as plans
from isentropic._attention.plan import Arguments, prepare
from isentropic._namespace import leaves_of


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(plans, "_plans", {})


def test_second_call_has_the_plan_of_the_first(backend, rng):
    for options in (
        {},
        {"is_causal": True},
        {"mask": masks.window(3, 1)},
        {"mask": masks.padding(4) | masks.causal()},
        {"law": laws.LogLength(7), "n_keys": 9, "softcap": 3.0},
        {"law": laws.scaled(laws.AffineLog(0.5, 1.0), 2.0), "is_causal": True},
        {"sinks": backend.array(np.asarray([0.5]), "float32")},
    ):
        q, k, v = (backend.array(rng.normal(size=(2, 5, 4)), "float32") for _ in range(3))
        first, _ = prepare(Arguments(q, k, v, **options))
        second, _ = prepare(Arguments(v, q, k, **options))
        assert first is second
        other, _ = prepare(Arguments(q[:, 1:, :], k, v, **options))
        assert other is not first
        expected = it.attention(q, k, v, implementation="generic", **options)
        for _ in range(2):
            got = it.attention(q, k, v, **options)
            backend.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_nothing_kept_is_an_array(backend, rng):
    q, k, v = (backend.array(rng.normal(size=(2, 5, 4)), "float32") for _ in range(3))
    per_head = backend.array([0.5, 2.0], "float32")
    seen = backend.array(np.ones((5, 5), bool))
    for _ in range(2):
        it.attention(
            q,
            k,
            v,
            bias=q[:, :, :1],
            law=laws.AffineLog(per_head),
            mask=masks.causal() & seen,
            n_keys=backend.array([9]),
            sinks=per_head,
        )
    assert len(plans._plans) == 1
    for signature, plan in plans._plans.items():
        facts = {} if plan.facts is None else vars(plan.facts)
        for leaf in (*leaves_of(signature), *vars(plan).values(), *facts.values()):
            assert isinstance(leaf, type) or not is_array_api_obj(leaf)


def test_what_follows_from_the_frame_changes_with_it(backend, rng):
    q = backend.array(rng.normal(size=(2, 5, 4)), "float32")
    plan, _ = prepare(Arguments(q, q))
    assert (plan.n_queries, plan.n_keys, plan.ndim) == (5, 5, 3)
    other = plan.replaced(frame=plan.frame.replaced(n_keys=7), batch=())
    assert (other.n_queries, other.n_keys, other.ndim) == (5, 7, 2)
    assert other.xp is plan.xp
    assert (plan.facts is None) == (backend.library != "torch")


def test_equal_numbers_of_other_types_are_refused(backend, rng):
    q = backend.array(rng.normal(size=(2, 5, 4)), "float32")
    it.attention(q, q, q, is_causal=True, scale=1.0, n_keys=1)
    for options in ({"is_causal": 1}, {"scale": True}, {"n_keys": True}, {"n_keys": 1.0}):
        with pytest.raises(TypeError, match=next(iter(options))):
            it.attention(q, q, q, **({"is_causal": True, "scale": 1.0, "n_keys": 1} | options))


def test_what_looks_like_a_law_is_refused(backend, rng):
    class Proxy:
        def signature(self, array_signature):
            return laws.Constant(1.5).signature(array_signature)

    q, k, v = (backend.array(x) for x in rng.normal(size=(3, 2, 5, 8)).astype("float32"))
    it.attention(q, k, v, law=laws.Constant(1.5))  # the plan is kept
    with pytest.raises(TypeError, match="`law` must be a law"):
        it.attention(q, k, v, law=Proxy())


def test_what_was_refused_is_refused_again(backend, rng):
    q = backend.array(rng.normal(size=(2, 5, 4)), "float32")
    for _ in range(2):
        with pytest.raises(ValueError, match="law"):
            it.attention(q, q, q, law=laws.AffineLog(backend.array([1.0, 2.0, 3.0], "float32")))
        with pytest.raises(ValueError, match="`n_keys` must be at least 0"):
            it.attention(
                q,
                q,
                q,
                n_keys=-1 if backend.library == "strict" or backend.is_gpu else backend.array([-1]),
            )
    assert not plans._plans


def test_the_largest_number_of_keys(backend, rng):
    # 2**63 − 1 is the largest integer that all libraries have.
    q = backend.array(rng.normal(size=(2, 5, 4)), "float32")
    assert np.isfinite(backend.numpy(it.attention(q, q, q, n_keys=2**63 - 1))).all()
    with pytest.raises(ValueError, match=r"`n_keys` must be below 2\*\*63"):
        it.attention(q, q, q, n_keys=2**63)


def test_contents_are_looked_at_each_time(backend, rng):
    q, k, v = (backend.array(rng.normal(size=(5, 4)), "float32") for _ in range(3))
    expected = it.attention(q, k, v, is_causal=True)
    broken = backend.numpy(k).copy()
    broken[-1] = np.nan
    got = backend.numpy(it.attention(q, backend.array(broken, "float32"), v, is_causal=True))
    np.testing.assert_allclose(got[:-1], backend.numpy(expected)[:-1], rtol=1e-5)
    assert np.isnan(got[-1]).all()
    for scale in (1.0, 3.0):  # arrays of one signature, of other numbers
        law = laws.AffineLog(backend.array([scale], "float32"))
        got = it.attention(q[None, ...], k[None, ...], v[None, ...], law=law)[0, ...]
        same = it.attention(q, k, v, law=laws.AffineLog(scale))
        backend.assert_close(got, same, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("most", [4096, 4])
def test_kept_factors_are_those_of_the_law(backend, rng, monkeypatch, most):
    if backend.library not in ("numpy", "torch") or backend.is_gpu:
        pytest.skip("no plan of this library keeps factors")
    monkeypatch.setattr(plans, "_MAX_FACTORS", most)
    q, k, v = (backend.array(rng.normal(size=(2, 5, 4)), "float32") for _ in range(3))
    law = laws.scaled(laws.AffineLog(0.5, 1.0), 2.0)
    plan, _ = prepare(Arguments(q, k, v, mask=masks.causal(), law=law))
    assert (plan.multiplier is None) == (most < 5)
    expected = [law(n) * 0.5 for n in range(1, 6)]
    for _ in range(2):  # the calls share the factors, and none of them changes these
        _, operands = prepare(Arguments(q, k, v, mask=masks.causal(), law=law))
        np.testing.assert_allclose(np.ravel(backend.numpy(operands.multiplier)), expected, rtol=1e-6)
        for call in (it.attention, it.attention_state):
            call(q, k, v, is_causal=True, law=law)
    for given in ({"n_keys": 5}, {"law": laws.AffineLog(backend.array([0.5, 0.5]))}):
        plan, _ = prepare(Arguments(q, k, v, mask=masks.causal(), **{"law": law, **given}))
        assert plan.multiplier is None or isinstance(plan.multiplier, float)


def test_calls_that_record_follow_calls_in_inference_mode(backend):
    if backend.library != "torch":
        pytest.skip("about PyTorch's modes")
    import torch

    q = torch.randn(2, 5, 4)
    with torch.inference_mode():
        expected = it.attention(q, q, q, is_causal=True)
    with torch.no_grad():
        torch.testing.assert_close(it.attention(q, q, q, is_causal=True), expected.clone())
    q.requires_grad_()
    it.attention(q, q, q, is_causal=True).sum().backward()
    assert q.grad.isfinite().all()


def test_numbers_that_pytorch_has_not_negated_yet(backend, rng):
    if backend.library != "torch":
        pytest.skip("about PyTorch's lazy negation")
    import torch

    x = torch.complex(*torch.randn(2, 2, 5, 4)).conj().imag
    assert x.is_neg()
    for options in ({}, {"is_causal": True}):
        torch.testing.assert_close(
            it.attention(x, x, x, **options), it.attention(*[x.resolve_neg()] * 3, **options)
        )
        torch.testing.assert_close(
            it.attention_entropy(x, x, **options),
            it.attention_entropy(*[x.resolve_neg()] * 2, **options),
        )


def test_gradients_asked_for_later_are_given(backend):
    if backend.library != "torch":
        pytest.skip("about PyTorch's gradients")
    import torch

    q = torch.randn(2, 5, 4)
    slope = torch.tensor([1.0, 2.0])
    law = laws.AffineLog(slope)
    assert not it.attention_entropy(q, q, law=law).requires_grad
    slope.requires_grad_()
    assert it.attention_entropy(q, q, law=law).requires_grad
    with torch.no_grad():
        assert not it.attention_entropy(q, q, law=law).requires_grad
    q.requires_grad_()
    for _ in range(2):
        (of_query,) = torch.autograd.grad(it.attention(q, q, q, law=law).sum(), q)
        assert of_query.shape == q.shape


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_and_vmap_have_their_own(backend):
    if backend.library != "torch":
        pytest.skip("about the transformations of torch.func")
    import torch

    q = torch.randn(3, 5, 4)
    expected = it.attention(q, q, q)
    torch.testing.assert_close(torch.func.vmap(lambda x: it.attention(x, x, x))(q), expected)
    kept = len(plans._plans)
    _, tangent = torch.func.jvp(lambda x: it.attention(x, x, x), (q,), (torch.ones_like(q),))
    assert tangent.abs().sum() > 0
    assert len(plans._plans) == kept
    torch.testing.assert_close(it.attention(q, q, q), expected)


def test_a_trace_of_jax_has_what_it_makes(backend):
    if backend.library != "jax":
        pytest.skip("about JAX's traces")
    import jax

    q = jax.numpy.asarray(np.random.default_rng(0).normal(size=(2, 5, 4)), dtype="float32")
    expected = it.attention(q, q, q, is_causal=True)
    traced = jax.jit(lambda s: it.attention(q, q, q, is_causal=True) * s)(1.0)
    np.testing.assert_allclose(traced, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.host
def test_few_are_kept(monkeypatch):
    monkeypatch.setattr(plans, "_MAX_PLANS", 5)
    for n in range(1, 20):
        x = np.zeros((n, 2))
        it.attention(x, x, x)
        assert len(plans._plans) <= 5
    assert prepare(Arguments(x, x, x))[0] is prepare(Arguments(x, x, x))[0]


@pytest.mark.host
def test_threads_share_them(monkeypatch, rng):
    monkeypatch.setattr(plans, "_MAX_PLANS", 3)
    expected = {n: it.attention(*[np.eye(n)] * 3, is_causal=True) for n in range(1, 9)}
    failures = []

    def work(seed):
        for n in np.random.default_rng(seed).integers(1, 9, size=200):
            got = it.attention(*[np.eye(int(n))] * 3, is_causal=True)
            if not np.array_equal(got, expected[int(n)]):
                failures.append(n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(plans._plans) <= 3 + len(threads)


def test_queries_before_the_first_key_see_no_key(backend, rng):
    q = backend.array(rng.normal(size=(5, 4)), "float32")
    state = it.attention_state(q, q[:3, :], q[:3, :], mask=masks.causal())
    assert backend.numpy(state.n_seen).tolist() == [0, 0, 1, 2, 3]
    state = it.attention_state(q, q, q, mask=masks.causal(offset=2))
    assert backend.numpy(state.n_seen).tolist() == [3, 4, 5, 5, 5]


def test_laws_are_evaluated_in_the_wider_dtype_each_time(backend, rng):
    if not backend.float64:
        pytest.skip("there is no float64")
    q = backend.array(rng.normal(size=(1, 5, 4)), "float32")
    # In float32 the factor, 1, would be lost in the difference of two numbers of 1.6e8.
    law = laws.AffineLog(backend.array([1e8]), backend.array([1.0 - 1e8 * np.log(5.0)]))
    expected = it.attention(q, q, q, law=None)
    for _ in range(2):
        backend.assert_close(it.attention(q, q, q, law=law), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.host
def test_integers_of_numpy_are_numbers(rng):
    q = rng.normal(size=(5, 4))
    for n in (5, 5000):
        for kind in (np.int64, np.int32, np.uint8 if n < 256 else np.uint16):
            got = it.attention(q, q, q, n_keys=kind(n))
            np.testing.assert_array_equal(got, it.attention(q, q, q, n_keys=n))
    for n in (5.0, 5000.0):  # a NumPy float is an array
        got = it.attention(q, q, q, n_keys=np.float64(n))
        np.testing.assert_allclose(got, it.attention(q, q, q, n_keys=int(n)), rtol=1e-12)
    for factor in (1.0, 3.0):
        got = it.attention(q, q, q, law=laws.Constant(np.float64(factor)), scale=np.float32(0.5))
        np.testing.assert_array_equal(got, it.attention(q, q, q, law=None, scale=0.5 * factor))

"""JLTransformer: scikit-learn's own checks, arrays of other libraries, and what its projections do."""

import pickle
import sys
import warnings

import numpy as np
import pytest

import isentropic as it

sklearn = pytest.importorskip("sklearn")
from scipy import sparse  # noqa: E402
from sklearn.base import clone  # noqa: E402
from sklearn.exceptions import DataDimensionalityWarning, NotFittedError  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

from isentropic.integrations.sklearn import JLTransformer  # noqa: E402

SPARSE = {"sparse", "count_sketch"}
KINDS = ["hadamard", "gaussian", "rademacher", "sparse", "orthogonal", "count_sketch"]
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataDimensionalityWarning")


def _dense(x):
    return x.toarray() if sparse.issparse(x) else x


@pytest.fixture
def x(rng):
    return rng.normal(size=(40, 300))


OTHERS = [
    *(JLTransformer(n_components=2, kind=kind) for kind in KINDS),
    JLTransformer("auto", kind="orthogonal", eps=0.3, delta=0.1, random_state=0),
]


@pytest.mark.parametrize(
    "transformer",
    [OTHERS[0], *(pytest.param(x, marks=pytest.mark.nightly) for x in OTHERS[1:])],
    ids=str,
)
def test_check_estimator(transformer, monkeypatch):
    # With a build for CUDA, scikit-learn would use it also without a GPU.
    if (torch := sys.modules.get("torch")) is not None:
        monkeypatch.setattr(torch.backends.cuda, "is_built", torch.cuda.is_available)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(transformer, on_fail=None)
    assert len(results) > 40
    bad = {r["check_name"]: r["exception"] for r in results if r["status"] not in ("passed", "skipped")}
    assert not bad
    # What is skipped is for libraries and devices that are not here.
    skipped = {r["check_name"] for r in results if r["status"] == "skipped"}
    assert skipped <= {
        "check_array_api_input", "check_array_api_mixed_inputs", "check_array_api_same_namespace",
        "check_array_api_attributes", "check_array_api_get_call_order",
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    def test_dimensions_and_repetition(self, kind, x):
        t = JLTransformer(50, kind=kind, random_state=0).fit(x)
        y = t.transform(x)
        assert y.shape == (40, 50)
        assert (t.n_components_, t.n_features_in_, t.components_.shape) == (50, 300, (50, 300))
        np.testing.assert_allclose(y, x @ t.components_.T, atol=1e-10)
        np.testing.assert_array_equal(y, t.transform(x))
        np.testing.assert_array_equal(y, clone(t).fit_transform(x))
        np.testing.assert_array_equal(y, pickle.loads(pickle.dumps(t)).transform(x))
        assert not np.allclose(y, JLTransformer(50, kind=kind, random_state=1).fit_transform(x))
        state = np.random.RandomState(3)
        JLTransformer(50, kind=kind, random_state=state).fit(x)
        with pytest.raises(ValueError, match="X has 5 features, but JLTransformer is expecting 300"):
            t.transform(x[:, 1:6])
        with pytest.raises(NotFittedError):
            JLTransformer(50, kind=kind).transform(x)

    def test_dtypes(self, kind, x):
        outputs = {}
        for dtype, expected in (("float32", "float32"), ("float64", "float64"), ("int64", "float64")):
            t = JLTransformer(50, kind=kind, random_state=0).fit(x.astype(dtype))
            outputs[dtype] = t.transform(x.astype(dtype))
            assert outputs[dtype].dtype == t.components_.dtype == expected
            assert t.inverse_transform(outputs[dtype]).dtype == expected
        np.testing.assert_allclose(outputs["float32"], outputs["float64"], rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("container", [sparse.csr_array, sparse.csc_array, sparse.coo_array])
    def test_sparse_data(self, kind, x, container, set_blocks):
        set_blocks(sparse_numbers=3000)
        x[np.abs(x) < 1.5] = 0
        t = JLTransformer(50, kind=kind, random_state=0).fit(container(x))
        y = t.transform(container(x))
        assert sparse.issparse(y) == (kind in SPARSE)
        np.testing.assert_allclose(_dense(y), t.transform(x), atol=1e-10)
        assert clone(t).fit(container(x.astype("float32"))).components_.dtype == np.float32
        half = t.transform(container(x.astype("float32")))
        assert half.dtype == np.float32
        np.testing.assert_allclose(_dense(half), t.transform(x), atol=1e-4)
        # As if fitted to dense data, but for what is kept.
        same = clone(t).fit(x)
        np.testing.assert_array_equal(_dense(same.components_), _dense(t.components_))
        assert sparse.issparse(same.components_) == (kind in SPARSE)
        assert same.projection_ == t.projection_
        np.testing.assert_allclose(_dense(same.transform(container(x))), _dense(y), atol=1e-10)
        dense = clone(t).set_params(dense_output=True).fit(container(x))
        assert isinstance(dense.transform(container(x)), np.ndarray)
        np.testing.assert_allclose(dense.transform(container(x)), _dense(y), atol=1e-10)
        np.testing.assert_allclose(t.inverse_transform(y), t.inverse_transform(_dense(y)), atol=1e-10)

    @pytest.mark.parametrize("k", [20, 300])
    def test_inverse_transform(self, kind, x, k):
        for data in (x, x[:, :256]):  # 256: an order of the Hadamard map
            t = JLTransformer(min(k, data.shape[1]), kind=kind, random_state=0).fit(data)
            y = t.transform(data)
            back = t.inverse_transform(y)
            assert back.shape == data.shape
            if kind != "count_sketch":  # whose rows may be dependent at full size
                np.testing.assert_allclose(t.transform(back), y, rtol=1e-6, atol=1e-8)
            pseudo_inverse = np.linalg.pinv(_dense(t.components_))
            np.testing.assert_allclose(back, y @ pseudo_inverse.T, atol=1e-6)
            assert not hasattr(t, "inverse_components_")
            t.set_params(compute_inverse_components=True).fit(data)
            np.testing.assert_allclose(t.inverse_components_, pseudo_inverse, atol=1e-6)
            np.testing.assert_allclose(t.inverse_transform(y), back, atol=1e-8)
            t.inverse_components_ = 2 * t.inverse_components_  # which is what is used
            np.testing.assert_allclose(t.inverse_transform(y), 2 * back, atol=1e-8)
            assert not hasattr(
                t.set_params(compute_inverse_components=False).fit(data), "inverse_components_"
            )

    def test_more_components_than_features(self, kind, x):
        with pytest.warns(DataDimensionalityWarning, match=r"more components \(301\) than features"):
            y = JLTransformer(301, kind=kind, random_state=0).fit_transform(x)
        assert y.shape == (40, 301)

    def test_auto(self, kind, rng):
        x = rng.normal(size=(30, 2000)).astype("float32")
        t = JLTransformer(kind=kind, eps=0.4, delta=0.05, random_state=0).fit(x)
        method = {"orthogonal": "haar", "rademacher": "achlioptas", "sparse": "achlioptas"}.get(
            kind, "exact"
        )
        assert t.n_components_ == it.jl.min_dim(30, eps=0.4, delta=0.05, method=method, n_features=2000)
        assert it.jl.distortion(x, t.transform(x)).worst < 0.4

    def test_auto_with_too_few_features(self, kind, x):
        if kind == "orthogonal":
            pytest.skip("its bound never exceeds the number of features")
        with pytest.raises(ValueError, match=r"n_samples=40 lead to .* larger than .* n_features=50"):
            JLTransformer(kind=kind).fit(x[:, :50])


class TestConventions:
    def test_feature_names(self, x):
        names = JLTransformer(3).fit(x).get_feature_names_out()
        assert names.tolist() == ["jltransformer0", "jltransformer1", "jltransformer2"]

    def test_pandas(self, x):
        pandas = pytest.importorskip("pandas")
        t = JLTransformer(3, random_state=0).set_output(transform="pandas")
        y = t.fit_transform(pandas.DataFrame(x).rename(columns=str))
        assert list(y.columns) == ["jltransformer0", "jltransformer1", "jltransformer2"]

    def test_pipeline(self, x):
        y = make_pipeline(StandardScaler(), JLTransformer(5, random_state=0)).fit_transform(x)
        assert y.shape == (40, 5)

    def test_keeps_no_data(self, x):
        for kind in KINDS:
            t = JLTransformer(20, kind=kind, random_state=0).fit(x)
            assert t._like.base is None
            assert len(pickle.dumps(t)) < 100_000

    def test_inverse_of_a_wrong_width(self, x):
        with pytest.raises(ValueError, match=r"`X` must have 20 columns, got 7"):
            JLTransformer(20).fit(x).inverse_transform(x[:, :7])

    def test_one_sample(self):
        y = JLTransformer(eps=0.5).fit_transform(np.ones((1, 1000)))
        assert y.shape == (1, it.jl.min_dim(2, eps=0.5))

    def test_as_many_components_as_features(self, rng):
        k = it.jl.min_dim(40, eps=0.5)
        x = rng.normal(size=(40, k))
        for n_components in ("auto", k):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                t = JLTransformer(n_components, eps=0.5).fit(x)
            assert t.n_components_ == k
        with pytest.raises(ValueError, match=f"a target dimension of {k} which is larger than"):
            JLTransformer(eps=0.5).fit(x[:, 1:])

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"n_components": 0}, ValueError, "`n_components` must be at least 1, got 0"),
            (
                {"n_components": "best"},
                ValueError,
                "`n_components` must be an integer of at least 1 or 'auto', got 'best'",
            ),
            ({"n_components": 2.5}, TypeError, "`n_components` must be an integer"),
            ({"kind": "fast"}, ValueError, "`kind` must be 'hadamard' or 'gaussian'"),
            ({"eps": 1.5}, ValueError, r"`eps` must be in \(0, 1\)"),
            ({"delta": 0.0}, ValueError, r"`delta` must be in \(0, 1\)"),
            ({"dense_output": "no"}, TypeError, "`dense_output` must be True or False"),
            ({"compute_inverse_components": 1}, TypeError, "`compute_inverse_components` must be True"),
            (
                {"n_components": 5, "kind": "sparse", "density": "low"},
                ValueError,
                r"`density` must be a number in \(0, 1\] or 'auto', got 'low'",
            ),
            (
                {"n_components": 5, "kind": "sparse", "density": 1.5},
                ValueError,
                "`density` must be at most 1",
            ),
        ],
    )
    def test_errors(self, x, options, error, message):
        with pytest.raises(error, match=message):
            JLTransformer(**options).fit(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", ">f8"])
def test_dtypes_that_scipy_does_not_know(x, kind, dtype):
    data = x.astype(dtype)
    transformer = JLTransformer(5, kind=kind, random_state=0, compute_inverse_components=True).fit(data)
    found = transformer.transform(data)
    assert found.dtype == data.dtype
    exact = JLTransformer(5, kind=kind, random_state=0).fit(x).transform(x)
    tolerance = 2e-2 if dtype == "float16" else 1e-12
    np.testing.assert_allclose(found, exact, rtol=tolerance, atol=tolerance * abs(exact).max())
    again = transformer.transform(transformer.inverse_transform(found).astype(dtype))
    np.testing.assert_allclose(again, found, rtol=tolerance, atol=tolerance * abs(exact).max())


def test_what_another_kind_has_fitted_is_gone(x):
    transformer = JLTransformer(5, kind="sparse", random_state=0).fit(x)
    assert transformer.density_
    assert not hasattr(transformer.set_params(kind="gaussian").fit(x), "density_")


class TestSparse:
    @pytest.mark.parametrize("container", [np.asarray, sparse.csr_array])
    @pytest.mark.parametrize("density", [1.0, 0.5])
    def test_density(self, x, container, density):
        t = JLTransformer(200, kind="sparse", density=density, random_state=0).fit(container(x))
        assert t.density_ == density
        assert abs(t.components_.nnz / 200 / 300 - density) < 0.02
        np.testing.assert_allclose(np.abs(t.components_.data), (200 * density) ** -0.5)
        assert not hasattr(JLTransformer(5, kind="gaussian").fit(x), "density_")

    @pytest.mark.parametrize("container", [np.asarray, sparse.csr_array])
    def test_automatic_density(self, x, container):
        t = JLTransformer(200, kind="sparse", density="auto", random_state=0)
        with pytest.warns(UserWarning, match="A density of 0.0577, below 1/3"):
            t.fit(container(x))
        assert t.density_ == 300**-0.5
        assert abs(t.components_.nnz / 200 / 300 - t.density_) < 0.01

    @pytest.mark.parametrize("kind", sorted(SPARSE))
    def test_containers(self, x, kind):
        for container in (sparse.csr_array, sparse.csc_array, sparse.csr_matrix, sparse.csc_matrix):
            data = container(x)
            y = JLTransformer(5, kind=kind).fit_transform(data)
            assert isinstance(y, sparse.sparray) == isinstance(data, sparse.sparray)

    @pytest.mark.filterwarnings("ignore:A density:UserWarning")
    @pytest.mark.parametrize("kind", sorted(SPARSE))
    def test_nothing_dense_of_the_size_of_the_map_or_the_data(self, kind):
        import tracemalloc

        n, d, k = 2000, 100_000, 1000
        x = sparse.random_array((n, d), density=1e-4, format="csr", rng=np.random.default_rng(0))
        tracemalloc.start()
        try:
            t = JLTransformer(k, kind=kind, density=1e-3, random_state=0).fit(x)
            t.transform(x)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 8 * k * d / 10
        assert peak < 8 * n * d / 10


class TestArrayAPI:
    @pytest.mark.parametrize("kind", KINDS)
    def test_arrays_of_other_libraries(self, backend, kind, x):
        if backend.library not in ("numpy", "strict", "torch", "cupy"):
            pytest.skip("scikit-learn takes no arrays of this library")
        if backend.name == "strict:bare":
            pytest.skip("scikit-learn itself needs more than the bare standard")
        expected = JLTransformer(20, kind=kind, random_state=0).fit_transform(x)
        data = backend.array(x.astype("float32"))
        with sklearn.config_context(array_api_dispatch=True):
            t = JLTransformer(20, kind=kind, random_state=0).fit(data)
            y = t.transform(data)
            backend.assert_close(y, expected, rtol=1e-4, atol=1e-4)
            back = t.inverse_transform(y)
            backend.assert_close(t.transform(back), y, rtol=1e-3, atol=1e-3)
            inverse = clone(t).set_params(compute_inverse_components=True).fit(data)
            backend.assert_close(inverse.inverse_transform(y), back, rtol=1e-4, atol=1e-4)
            if backend.library != "numpy":
                assert type(t.components_) is type(inverse.inverse_components_) is type(data)
            if backend.library != "numpy":
                with pytest.raises(ValueError, match="must use the same namespace"):
                    t.transform(x)


def test_agrees_with_sklearn_in_law(x):
    # Same matrices in distribution: the spread of the images of one vector over draws.
    from sklearn.random_projection import GaussianRandomProjection

    def squares(make):
        return np.asarray(
            [(make(20, random_state=s).fit(x).transform(x[:1]) ** 2).sum() for s in range(1500)]
        )

    ours = squares(lambda k, **options: JLTransformer(k, kind="gaussian", **options))
    theirs = squares(GaussianRandomProjection)
    np.testing.assert_allclose(ours.mean(), theirs.mean(), rtol=0.05)
    np.testing.assert_allclose(ours.std(), theirs.std(), rtol=0.15)

"""JLTransformer: scikit-learn's own checks, arrays of other libraries, and what its projections do."""

import pickle
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

KINDS = ["hadamard", "gaussian", "rademacher", "sparse", "orthogonal", "count_sketch"]
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataDimensionalityWarning")


@pytest.fixture
def x(rng):
    return rng.normal(size=(40, 300))


@pytest.mark.parametrize(
    "transformer",
    [JLTransformer()]
    + [JLTransformer(n_components=2, kind=kind) for kind in KINDS]
    + [JLTransformer("auto", kind="orthogonal", eps=0.3, delta=0.1, random_state=0)],
    ids=str,
)
def test_check_estimator(transformer):
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
    def test_sparse_data(self, kind, x, container, monkeypatch):
        monkeypatch.setattr("isentropic.integrations.sklearn._BLOCK_SIZE", 3000)
        x[np.abs(x) < 1.5] = 0
        t = JLTransformer(50, kind=kind, random_state=0).fit(container(x))
        y = t.transform(container(x))
        assert isinstance(y, np.ndarray)
        np.testing.assert_allclose(y, t.transform(x), atol=1e-10)
        assert t.transform(container(x.astype("float32"))).dtype == np.float32

    @pytest.mark.parametrize("k", [20, 300])
    def test_inverse_transform(self, kind, x, k):
        for data in (x, x[:, :256]):  # 256: an order of the Hadamard map
            t = JLTransformer(min(k, data.shape[1]), kind=kind, random_state=0).fit(data)
            y = t.transform(data)
            back = t.inverse_transform(y)
            assert back.shape == data.shape
            if kind != "count_sketch":  # whose rows may be dependent at full size
                np.testing.assert_allclose(t.transform(back), y, rtol=1e-6, atol=1e-8)
            np.testing.assert_allclose(back, y @ np.linalg.pinv(t.components_).T, atol=1e-6)

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
        assert t.n_components_ == it.jl_min_dim(30, eps=0.4, delta=0.05, method=method, n_features=2000)
        assert it.distortion(x, t.transform(x)).worst < 0.4

    def test_auto_with_too_few_features_is_the_identity(self, kind, x):
        if kind == "orthogonal":
            pytest.skip("its bound never exceeds the number of features")
        x = x[:, :50]
        with pytest.warns(
            DataDimensionalityWarning, match="more than the 50 features: the data are left"
        ):
            t = JLTransformer(kind=kind).fit(x)
        assert t.n_components_ == 50
        assert t.projection_ is None
        np.testing.assert_array_equal(t.transform(x), x)
        np.testing.assert_array_equal(t.inverse_transform(x), x)
        np.testing.assert_array_equal(t.transform(sparse.csr_array(x)), x)
        np.testing.assert_array_equal(t.components_, np.eye(50))


class TestConventions:
    def test_feature_names(self, x):
        names = JLTransformer(3).fit(x).get_feature_names_out()
        assert names.tolist() == ["jltransformer0", "jltransformer1", "jltransformer2"]
        assert len(JLTransformer().fit(x).get_feature_names_out()) == 300

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
        for t in (JLTransformer(20).fit(x), JLTransformer().fit(x)):
            with pytest.raises(ValueError, match=r"`X` must have (20|300) columns, got 7"):
                t.inverse_transform(x[:, :7])

    def test_one_sample(self):
        assert JLTransformer(eps=0.5).fit_transform(np.ones((1, 1000))).shape[0] == 1

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
        ],
    )
    def test_errors(self, x, options, error, message):
        with pytest.raises(error, match=message):
            JLTransformer(**options).fit(x)


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

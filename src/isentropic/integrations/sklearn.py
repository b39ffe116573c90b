"""A scikit-learn transformer for Johnson–Lindenstrauss maps (the extra ``sklearn``)."""

from __future__ import annotations

import functools
import warnings
from types import ModuleType
from typing import Any

import numpy as np

from isentropic._checks import check_choice, check_flag, check_real, counts, requires_extra, value_error
from isentropic._loops import BLOCKS
from isentropic._namespace import accumulator, common_device, isdtype, namespace
from isentropic._products import product
from isentropic.jl._dimensions import min_dim
from isentropic.jl._draws import draw_rows
from isentropic.jl._maps import CountSketch, HadamardProjection, Projection
from isentropic.jl._projections import (
    count_sketch,
    dense_map,
    gaussian_projection,
    hadamard_projection,
    orthogonal_projection,
    sparse_entries,
    sparse_projection,
    sparse_scale,
)

with requires_extra(__name__):
    from scipy import sparse
    from sklearn.base import (
        BaseEstimator,
        ClassNamePrefixFeaturesOutMixin,
        TransformerMixin,
    )
    from sklearn.exceptions import DataDimensionalityWarning
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_array, check_is_fitted, validate_data

__all__ = ["JLTransformer"]

# Each kind of map, and the method of `jl.min_dim` that is proven for it. No method is proven for the
# Hadamard map and the count sketch. For them the exact Gaussian dimension is a heuristic.
_KINDS: dict[str, tuple[Any, str]] = {
    "hadamard": (hadamard_projection, "exact"),
    "gaussian": (gaussian_projection, "exact"),
    "rademacher": (functools.partial(sparse_projection, density=1), "achlioptas"),
    "sparse": (sparse_projection, "achlioptas"),
    "orthogonal": (orthogonal_projection, "haar"),
    "count_sketch": (count_sketch, "exact"),
}


class JLTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Reduce the dimension by a random map that preserves distances.

    It is like `sklearn.random_projection.GaussianRandomProjection` and
    `sklearn.random_projection.SparseRandomProjection`, with the fast Hadamard map, and with a dimension
    for a failure probability `delta`. With ``sklearn.set_config(array_api_dispatch=True)`` it takes
    arrays of every library.

    Parameters
    ----------
    n_components : int ≥ 1 or "auto"
        The dimension k. ``"auto"`` takes the dimension of `isentropic.jl.min_dim` for the number of
        samples in `fit`.
    kind : {"hadamard", "gaussian", "rademacher", "sparse", "orthogonal", "count_sketch"}
        The map. For ``"hadamard"`` and ``"count_sketch"`` the dimension of ``"auto"`` is a heuristic.
        Verify it with `isentropic.jl.distortion`.
    eps : float in (0, 1)
        The distortion of squared distances that ``"auto"`` allows.
    delta : float in (0, 1)
        The probability, for ``"auto"``, that at least one distance exceeds the distortion `eps`.
    density : float in (0, 1] or "auto"
        For the kind ``"sparse"``, the share of nonzero entries of the map. ``"auto"`` is 1/√d for d
        features, as in scikit-learn. No bound is proven below 1/3.
    dense_output : bool
        Whether images are dense arrays even if the data and the map are sparse. The map is sparse for
        the kinds ``"sparse"`` and ``"count_sketch"``.
    compute_inverse_components : bool
        Whether `fit` computes the pseudo-inverse, a dense array, for `inverse_transform`.
    random_state : None, int or numpy.random.RandomState
        The source of random numbers for the map.

    Attributes
    ----------
    n_components_ : int
        The dimension k.
    density_ : float
        For the kind ``"sparse"``, the density.
    inverse_components_ : array (n_features, ``n_components_``)
        The pseudo-inverse of the map, if ``compute_inverse_components`` is true.
    n_features_in_ : int
        The number of features in `fit`.
    feature_names_in_ : array of str
        The names of the features, if the data had names.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.integrations.sklearn import JLTransformer
    >>> x = np.random.default_rng(0).normal(size=(50, 5000))
    >>> JLTransformer(eps=0.3, random_state=0).fit_transform(x).shape
    (50, 490)
    """

    def __init__(
        self,
        n_components: int | str = "auto",
        *,
        kind: str = "hadamard",
        eps: float = 0.1,
        delta: float = 0.01,
        density: float | str = 1 / 3,
        dense_output: bool = False,
        compute_inverse_components: bool = False,
        random_state: Any = None,
    ) -> None:
        # Estimators are cloned by attributes of these names. So `fit` checks them, not the constructor.
        self.n_components = n_components
        self.kind = kind
        self.eps = eps
        self.delta = delta
        self.density = density
        self.dense_output = dense_output
        self.compute_inverse_components = compute_inverse_components
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> JLTransformer:
        """Choose the dimension for the shape of `X`, and draw the map in its library, device and dtype.

        Parameters
        ----------
        X : array or sparse matrix (n_samples, n_features)
            The samples. Their values do not influence the map.
        y : ignored

        Returns
        -------
        self

        Raises
        ------
        TypeError, ValueError
            For a parameter of the wrong type, out of range or of an unknown name, and for `X` that is
            not a matrix of finite numbers with at least one row and one column. Also if ``"auto"``
            gives a dimension above the number of features, as in scikit-learn.
        """
        X = _floating(validate_data(self, X, accept_sparse=["csr", "csc"]))
        n_samples, n_features = X.shape
        check_choice("kind", self.kind, tuple(_KINDS))
        if sparse.issparse(X):
            self._like = np.empty((0, 0), X.dtype)
        else:  # not a view of X, which would keep X in memory
            self._like = namespace(X=X).empty((0, 0), dtype=X.dtype, device=common_device(X=X))
        check_real("eps", self.eps)
        check_real("delta", self.delta)
        check_flag(
            dense_output=self.dense_output, compute_inverse_components=self.compute_inverse_components
        )

        for name in ("inverse_components_", "density_"):  # from a previous fit
            self.__dict__.pop(name, None)
        self.n_components_ = self._choose_dimension(n_samples, n_features)
        # A sparse matrix for the kind "sparse" and sparse data.
        self._map: Any = self._draw(n_features, self.n_components_, sparse.issparse(X))
        # The matrices of these two kinds have few entries.
        self._is_sparse = self.kind in ("sparse", "count_sketch")
        if self.compute_inverse_components:
            self.inverse_components_ = self._pseudo_inverse()
        return self

    def _choose_dimension(self, n_samples: int, n_features: int) -> int:
        k: int
        if self.n_components == "auto":
            # A single point has no distances. It gets the dimension for two points.
            _, method = _KINDS[self.kind]
            k = min_dim(
                max(n_samples, 2), eps=self.eps, delta=self.delta, method=method, n_features=n_features
            )
            if k > n_features:  # in the words of scikit-learn
                raise ValueError(
                    f"eps={self.eps:f} and n_samples={n_samples} lead to a target dimension of {k} "
                    f"which is larger than the original space with n_features={n_features}"
                    + ("" if self.kind == "orthogonal" else "; kind='orthogonal' never needs more")
                )
            return k
        if isinstance(self.n_components, str):
            must = "be an integer of at least 1 or 'auto'"
            raise value_error("n_components", must, repr(self.n_components))
        (k,) = counts(n_components=self.n_components)
        if k > n_features:
            # Like scikit-learn, this does not change a number that was asked for.
            message = f"There are more components ({k}) than features ({n_features})"
            # The level is that of the call of `fit`.
            warnings.warn(f"{message}: the dimension is not reduced.", DataDimensionalityWarning, 3)
        return k

    def _draw(self, n_features: int, k: int, is_sparse: bool) -> Any:
        # Four words, as seeds of 31 bits would soon be equal for different fits.
        seed = check_random_state(self.random_state).randint(2**31 - 1, size=4)
        draw, _ = _KINDS[self.kind]
        if self.kind != "sparse":
            return draw(n_features, k, rng=seed, like=self._like)
        if isinstance(self.density, str) and self.density != "auto":
            raise value_error("density", "be a number in (0, 1] or 'auto'", repr(self.density))
        self.density_ = n_features**-0.5 if isinstance(self.density, str) else self.density
        if not is_sparse:
            return draw(n_features, k, density=self.density_, rng=seed, like=self._like)
        # A dense matrix might take more memory than the data.
        parts = draw_rows(seed, n_features, k, sparse_entries(self.density_))
        signs = sparse.vstack([sparse.csr_array(part) for part in parts], format="csr")
        dtype = _sparse_dtype(self._like.dtype)
        return signs.astype(dtype) * dtype.type(sparse_scale(k, self.density_))

    def transform(self, X: Any) -> Any:
        """Apply the map to the rows of `X`.

        Parameters
        ----------
        X : array or sparse matrix (n_samples, n_features)

        Returns
        -------
        array or sparse matrix (n_samples, ``n_components_``)
            The images, in the library, device and floating dtype of `X`. They are sparse if `X` and the
            map are sparse and ``dense_output`` is false.

        Raises
        ------
        ValueError
            Before `fit`. For `X` that is not a matrix of finite numbers, has another number of columns
            than in `fit`, or is of another library or device.
        """
        check_is_fitted(self)
        X = _floating(validate_data(self, X, accept_sparse=["csr", "csc"], reset=False))
        self._check_library(X, "transform")
        if not (sparse.issparse(X) or sparse.issparse(self._map)):
            return self._map(X)
        if isinstance(self._map, HadamardProjection):  # the rows are made dense a block at a time
            X, y = X.tocsr(), np.empty((X.shape[0], self.n_components_), X.dtype)
            rows = max(1, BLOCKS.sparse_numbers // X.shape[1])
            for start in range(0, X.shape[0], rows):
                y[start : start + rows] = self._map(X[start : start + rows].toarray())
            return y
        dtype = accumulator(np, X.dtype)
        y = X.astype(dtype, copy=False) @ self.components_.astype(dtype, copy=False).T
        return (
            y.toarray() if self.dense_output and sparse.issparse(y) else y.astype(X.dtype, copy=False)
        )

    def inverse_transform(self, X: Any) -> Any:
        """The shortest vectors whose images are the rows of `X`, by the pseudo-inverse of the map.

        Parameters
        ----------
        X : array or sparse matrix (n_samples, ``n_components_``)

        Returns
        -------
        array (n_samples, n_features)
            A dense array.

        Raises
        ------
        ValueError
            As for `transform`, for `X` with ``n_components_`` columns.
        """
        check_is_fitted(self)
        X = _floating(check_array(X, accept_sparse=["csr", "csc"]))
        self._check_library(X, "inverse_transform")
        if X.shape[1] != self.n_components_:
            raise value_error("X", f"have {self.n_components_} columns", X.shape[1])
        X = X.toarray() if sparse.issparse(X) else X
        inverse = getattr(self, "inverse_components_", None)
        if inverse is None:
            if self._has_orthogonal_rows:
                # Then no pseudo-inverse, a dense array, has to be formed.
                return self._map.adjoint(X) * (self.n_components_ / self.n_features_in_)
            inverse = self._pseudo_inverse()
        xp = namespace(X=X)
        dtype = accumulator(xp, X.dtype)
        y = product(xp, xp.astype(X, dtype, copy=False), xp.astype(inverse, dtype, copy=False).T)
        return xp.astype(y, X.dtype, copy=False)

    @property
    def projection_(self) -> Projection:
        """The map, in the library, device and dtype of the data.

        For the kind ``"sparse"`` and sparse data, each access makes a dense matrix.
        """
        check_is_fitted(self)
        if not sparse.issparse(self._map):
            return self._map
        # The entries of the sparse matrix have the scale in them.
        return dense_map(np.sign(self._map.toarray()), sparse_scale(self.n_components_, self.density_))

    @property
    def components_(self) -> Any:
        """The matrix of the map, an array or sparse array (``n_components_``, n_features).

        For NumPy arrays and SciPy matrices, it is a sparse SciPy array for the kinds ``"sparse"`` and
        ``"count_sketch"``.
        """
        check_is_fitted(self)
        found = self._map
        if sparse.issparse(found):
            return found
        if not (self._is_sparse and isinstance(self._like, np.ndarray)):
            return found.matrix()
        dtype = _sparse_dtype(self._like.dtype)
        if isinstance(found, CountSketch):  # its matrix might take more memory than the data
            signs, components = np.asarray(found.signs), np.asarray(found.components)
            s, d = signs.shape
            entries = (signs * s**-0.5).astype(dtype)
            features = np.broadcast_to(np.arange(d, dtype=components.dtype), (s, d))
            indices = (components.ravel(), features.ravel())
            return sparse.csr_array((entries.ravel(), indices), shape=(self.n_components_, d))
        return sparse.csr_array(found.matrix().astype(dtype, copy=False))

    @property
    def _has_orthogonal_rows(self) -> bool:
        return isinstance(self._map, HadamardProjection) and self._map.has_orthogonal_rows

    def _pseudo_inverse(self) -> Any:
        """The pseudo-inverse (features, components), in float32 or better."""
        components = self.components_
        components = components.toarray() if sparse.issparse(components) else components
        xp = namespace(components=components)
        components = xp.astype(components, accumulator(xp, components.dtype), copy=False)
        if self._has_orthogonal_rows:
            return components.T * (self.n_components_ / self.n_features_in_)
        return xp.linalg.pinv(components)

    def _check_library(self, X: Any, method: str) -> None:
        try:
            # Sparse matrices are SciPy's, whose numbers are NumPy's.
            arrays = {"X": np.empty(0) if sparse.issparse(X) else X, "map": self._like}
            namespace(**arrays)
            common_device(**arrays)
        # The class and the words of this error are those that scikit-learn checks of its estimators.
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Inputs passed to {type(self).__name__}.{method}() must use the same namespace and "
                f"the same device as those passed to fit(): {error}"
            ) from None

    @property
    def _n_features_out(self) -> int:
        return self.n_components_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        tags.input_tags.sparse = True
        tags.array_api_support = True
        return tags


def _sparse_dtype(dtype: Any) -> Any:
    """The dtype of a sparse matrix for data of a dtype: SciPy has none of half precision."""
    return np.dtype(accumulator(np, dtype))


def _floating(X: Any) -> Any:
    """`X` itself if it is floating-point, otherwise `X` in float64, or float32 without float64."""
    if sparse.issparse(X):
        return X if X.dtype in (np.float32, np.float64) else X.astype(np.float64)
    xp: ModuleType = namespace(X=X)
    if isdtype(xp, X.dtype, "real floating"):
        return X
    return xp.astype(X, getattr(xp, "float64", xp.float32))

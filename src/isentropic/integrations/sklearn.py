"""A scikit-learn transformer for Johnson–Lindenstrauss maps (the extra ``sklearn``). Layer 8."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.exceptions import DataDimensionalityWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from isentropic._bounds import jl_min_dim
from isentropic._checks import check_choice, check_real, counts, value_error
from isentropic._maps import HadamardProjection
from isentropic._namespace import Array, accumulator, device, namespace
from isentropic._projections import (
    count_sketch,
    gaussian_projection,
    hadamard_projection,
    orthogonal_projection,
    rademacher_projection,
    sparse_projection,
)

__all__ = ["JLTransformer"]

# Each kind of map, and the bound of `jl_min_dim` that is proven for it; for the Hadamard map and the
# count sketch none is, and the exact Gaussian one is a heuristic.
_KINDS: dict[str, tuple[Any, str]] = {
    "hadamard": (hadamard_projection, "exact"),
    "gaussian": (gaussian_projection, "exact"),
    "rademacher": (rademacher_projection, "achlioptas"),
    "sparse": (sparse_projection, "achlioptas"),
    "orthogonal": (orthogonal_projection, "haar"),
    "count_sketch": (count_sketch, "exact"),
}

# Numbers of a sparse matrix that are made dense at a time.
_BLOCK_SIZE = 2**22


class JLTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Reduce the dimension by a random map that keeps distances.

    Like scikit-learn's ``GaussianRandomProjection`` and ``SparseRandomProjection``, with the fast
    Hadamard map, sharper dimensions, and arrays of every library under
    ``sklearn.set_config(array_api_dispatch=True)``.

    Parameters
    ----------
    n_components : int ≥ 1 or "auto"
        The dimension k; ``"auto"`` takes the one of `jl_min_dim` for as many points as `fit` sees.
        Where that exceeds the number of features the data are left as they are, with a warning: that
        keeps distances exactly, in fewer dimensions.
    kind : {"hadamard", "gaussian", "rademacher", "sparse", "orthogonal", "count_sketch"}
        The map. For ``"hadamard"`` and ``"count_sketch"`` the dimension of ``"auto"`` is a heuristic:
        verify it by `isentropic.distortion`.
    eps : float in (0, 1)
        The distortion of squared distances that ``"auto"`` allows.
    delta : float in (0, 1)
        The probability with which ``"auto"`` lets any distance exceed it.
    random_state : None, int or numpy.random.RandomState
        The source of the draw.

    Attributes
    ----------
    n_components_ : int
        The dimension k.
    projection_ : DenseProjection, HadamardProjection, CountSketch or None
        The map, in the library, device and dtype of the data; None is the identity.
    n_features_in_ : int
    feature_names_in_ : array of str
        Where the data had names.

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
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.kind = kind
        self.eps = eps
        self.delta = delta
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> JLTransformer:
        """Draw the map for the number, dimension, library, device and dtype of the rows of `X`.

        Parameters
        ----------
        X : array or sparse matrix (n_samples, n_features)
        y : ignored

        Returns
        -------
        self
        """
        X = _floating(validate_data(self, X, accept_sparse=["csr", "csc"]))
        n_samples, n_features = X.shape
        check_choice("kind", self.kind, tuple(_KINDS))
        draw, method = _KINDS[self.kind]
        if sparse.issparse(X):
            self._like = np.empty((0, 0), X.dtype)
        else:  # not a view, which would keep the data
            self._like = namespace(X=X).empty((0, 0), dtype=X.dtype, device=device(X=X))
        check_real("eps", self.eps)
        check_real("delta", self.delta)

        if self.n_components == "auto":
            # A single point has no distances; the dimension for two is what it gets.
            k = jl_min_dim(
                max(n_samples, 2), eps=self.eps, delta=self.delta, method=method, n_features=n_features
            )
            if k > n_features:
                warnings.warn(
                    f"To keep the distances of {n_samples} points within eps = {self.eps} takes {k} "
                    f"components, more than the {n_features} features: the data are left as they are.",
                    DataDimensionalityWarning,
                    stacklevel=2,
                )
                k = None
        elif isinstance(self.n_components, str):
            must = "be an integer of at least 1 or 'auto'"
            raise value_error("n_components", must, repr(self.n_components))
        else:
            (k,) = counts(n_components=self.n_components)
            if k > n_features:
                warnings.warn(
                    f"There are more components ({k}) than features ({n_features}): the dimension is "
                    "not reduced.",
                    DataDimensionalityWarning,
                    stacklevel=2,
                )
        self.n_components_ = n_features if k is None else k
        seed = check_random_state(self.random_state).randint(2**31 - 1, size=4)
        self.projection_ = (
            None if k is None else draw(n_features, self.n_components_, rng=seed, like=self._like)
        )
        return self

    def transform(self, X: Any) -> Any:
        """Apply the map to the rows of `X`.

        Parameters
        ----------
        X : array or sparse matrix (n_samples, n_features)

        Returns
        -------
        array (n_samples, ``n_components_``)
            Dense, in the library, device and floating dtype of `X`.
        """
        check_is_fitted(self)
        X = _floating(validate_data(self, X, accept_sparse=["csr", "csc"], reset=False))
        self._check_library(X, "transform")
        if not sparse.issparse(X):
            return _copied(X) if self.projection_ is None else self.projection_(X)
        if self.projection_ is None:
            return X.toarray()
        X = X.tocsr()
        out = np.empty((X.shape[0], self.n_components_), X.dtype)
        rows = max(1, _BLOCK_SIZE // X.shape[1])
        for start in range(0, X.shape[0], rows):
            out[start : start + rows] = self.projection_(X[start : start + rows].toarray())
        return out

    def inverse_transform(self, X: Any) -> Any:
        """The shortest vectors whose images are the rows of `X`, by the pseudo-inverse of the map.

        Parameters
        ----------
        X : array (n_samples, ``n_components_``)

        Returns
        -------
        array (n_samples, n_features)
        """
        check_is_fitted(self)
        X = _floating(check_array(X, accept_sparse=["csr", "csc"]))
        X = X.toarray() if sparse.issparse(X) else X
        self._check_library(X, "inverse_transform")
        projection = self.projection_
        if X.shape[1] != self.n_components_:
            raise value_error("X", f"have {self.n_components_} columns", X.shape[1])
        if projection is None:
            return _copied(X)
        if isinstance(projection, HadamardProjection) and projection.has_orthogonal_rows:
            return projection.adjoint(X) * (self.n_components_ / self.n_features_in_)
        xp = namespace(X=X)
        dtype = accumulator(xp, X.dtype)
        inverse = xp.linalg.pinv(xp.astype(self.components_, dtype))
        return xp.astype(xp.astype(X, dtype) @ xp.matrix_transpose(inverse), X.dtype)

    @property
    def components_(self) -> Array:
        """The matrix of the map, (components, features)."""
        check_is_fitted(self)
        if self.projection_ is not None:
            return self.projection_.matrix()
        xp, place = namespace(X=self._like), device(X=self._like)
        return xp.eye(self.n_features_in_, dtype=self._like.dtype, device=place)

    def _check_library(self, X: Any, method: str) -> None:
        try:
            arrays = {"X": np.empty(0) if sparse.issparse(X) else X, "map": self._like}
            namespace(**arrays)
            device(**arrays)
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


def _copied(X: Any) -> Any:
    return namespace(X=X).asarray(X, copy=True)


def _floating(X: Any) -> Any:
    """`X` itself where it holds floats, else in the widest floating dtype of its library and device."""
    if sparse.issparse(X):
        return X if X.dtype in (np.float32, np.float64) else X.astype(np.float64)
    xp: ModuleType = namespace(X=X)
    if xp.isdtype(X.dtype, "real floating"):
        return X
    return xp.astype(X, getattr(xp, "float64", xp.float32))

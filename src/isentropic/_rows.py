"""Keys and values that are computed where a tile takes them, such as those of quantized vectors."""

from __future__ import annotations

from typing import Any, Self

from isentropic._namespace import A_co, Array, Generic


class Rows:
    """Rows (..., S, d) of which only those of a tile exist. It stands for an array in a call."""

    shape: tuple[int, ...]
    dtype: Any
    arrays: tuple[Array, ...]  # what the rows are computed from

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: Any) -> Self:
        """The rows with axes of length 1 in front."""
        raise NotImplementedError

    def block(self, block: Any) -> Array:
        """The rows of a block along axis −2."""
        raise NotImplementedError

    def without_gradient(self) -> Self:
        """The rows as constants."""
        raise NotImplementedError

    def finite(self) -> tuple[Self, Array]:
        """The rows with 0 in place of those that are not finite, and which are finite, (..., S)."""
        raise NotImplementedError


class Coded(Generic[A_co]):
    """Vectors x that attention takes as keys or values, in place of which it has f(x), a linear map."""

    @property
    def n_features(self) -> int:
        """The dimension of x."""
        raise NotImplementedError

    def rows(self) -> Rows:
        """The rows f(x)."""
        raise NotImplementedError

    def mapped(self, query: Array) -> Any:
        """f(q), with ⟨f(q), f(x)⟩ in place of ⟨q, x⟩."""
        raise NotImplementedError

    def unmapped(self, y: Array) -> Any:
        """The sum of vectors x whose sum of rows is y."""
        raise NotImplementedError

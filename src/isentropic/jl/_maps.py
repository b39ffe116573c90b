"""Linear maps that preserve distances, applied along any axis: dense, Hadamard, count sketch, rotation.

`_rows` returns a function of a matrix (lead, size · trail), which maps each row, by the map or by its
adjoint. `size` is the length of the mapped axis, `lead` is the product of the axes before it, and
`trail` of those after it. `_row_size` is the number of intermediates of a row. Fast maps are lists of
steps. Their adjoints are the adjoints of the steps, in reverse.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from isentropic._checks import (
    check_axis,
    check_choice,
    check_floating,
    check_shape,
    type_error,
    value_error,
)
from isentropic._namespace import (
    A_co,
    Array,
    ArrayT,
    Generic,
    accumulator,
    common_device,
    equal_by_value,
    is_dask,
    is_torch,
    leaves_of,
    namespace,
    namespace_with_drawn,
)
from isentropic._numerics import lift, quietly
from isentropic._products import product
from isentropic._row_maps import LinearMap, RowFunction, apply_along
from isentropic.jl._hadamard import (
    Order,
    doublings_to_sample,
    hadamard_factors,
    hadamard_order,
    has_kernel,
    kernel_factors,
)
from isentropic.jl._kronecker import apply_kronecker, sample_kronecker
from isentropic.jl._rounds import INPUT, OUTPUT, Program, Round, slots_of

KernelProgram = tuple[Program, tuple[Array, ...]]  # with its arrays


class Projection(Generic[A_co]):
    """What the maps of `isentropic.jl` have in common.

    A map is an immutable tuple of arrays, and so a pytree in JAX and PyTorch. Two maps are equal if
    their arrays are.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.jl import gaussian_projection
    >>> f = gaussian_projection(1000, 64, rng=0)
    >>> f(np.ones((5, 7, 1000))).shape, f(np.ones((1000, 3)), axis=0).shape
    ((5, 7, 64), (64, 3))
    """

    # Otherwise an instance would have a `__dict__` too, of which neither trees nor comparisons know.
    __slots__ = ()

    @property
    def n_features(self) -> int:
        """The dimension d of the vectors."""
        return self._shape[1]

    @property
    def n_components(self) -> int:
        """The dimension k of their images."""
        return self._shape[0]

    def __call__(self, x: ArrayT, *, axis: int = -1) -> ArrayT:
        """Apply the map along an axis with n_features entries; the result has n_components there.

        The image has the dtype of `x`. A Dask array stays lazy.

        Raises
        ------
        TypeError
            If `x` is not a floating-point array of the library of the map.
        ValueError
            If the axis does not have n_features entries, or if `x` is on another device than the map.
        """
        return self._along("x", x, axis)

    def adjoint(self, y: ArrayT, *, axis: int = -1) -> ArrayT:
        """Apply the transposed matrix along an axis: ⟨f(x), y⟩ = ⟨x, f.adjoint(y)⟩.

        Raises
        ------
        TypeError, ValueError
            As for the map itself, for an axis with n_components entries.
        """
        return self._along("y", y, axis, is_adjoint=True)

    def matrix(self) -> A_co:
        """The matrix (n_components, n_features) of the map.

        Raises
        ------
        TypeError, ValueError
            If the arrays of the map do not fit each other, or belong to different libraries.
        """
        # The adjoint maps unit vectors to rows. Mostly there are fewer rows than columns.
        xp, like = self._checked_namespace(), next(leaves_of(self))
        device = common_device(like=like)
        return self.adjoint(xp.eye(self.n_components, dtype=like.dtype, device=device))

    @property
    def _shape(self) -> tuple[int, int]:
        raise NotImplementedError

    def _check(self) -> None:
        """Check that the arrays fit each other."""
        raise NotImplementedError

    def _row_size(self, trail: int) -> int | None:
        raise NotImplementedError

    def _rows(
        self, xp: ModuleType, dtype: Any, device: Any, trail: int, is_adjoint: bool
    ) -> RowFunction:
        raise NotImplementedError

    def _program(self, xp: ModuleType, n_rows: int, device: Any, trail: int) -> KernelProgram | None:
        """The map for the kernel; None if the kernel does not have it."""
        return None

    def _checked_namespace(self) -> ModuleType:
        xp = namespace(("projection", tuple(leaves_of(self))))
        self._check()
        return xp

    @quietly
    def _along(self, name: str, x: Array, axis: int, *, is_adjoint: bool = False) -> Any:
        """Apply the map, or its adjoint, along an axis of x."""
        # A Dask array has an empty array of the library of its blocks.
        sample = x._meta if is_dask(x) else x  # type: ignore[attr-defined]
        xp = namespace_with_drawn(("projection", tuple(leaves_of(self))), **{name: sample})
        check_floating(xp, **{name: sample})
        # A user may have replaced arrays of the tuple, so each call checks them.
        self._check()
        out, size = self._shape[::-1] if is_adjoint else self._shape
        check_axis(axis, x.ndim)
        axis = int(axis) % x.ndim
        if x.shape[axis] != size:
            raise value_error(name, f"have {size} entries along axis {axis}", tuple(x.shape))
        return apply_along(xp, lambda trail: self._linear_map(trail, is_adjoint), x, axis, out)

    def _linear_map(self, trail: int, is_adjoint: bool = False) -> LinearMap:
        k, d = self._shape
        linear = LinearMap(
            # The map is the tuple of its arrays, which transformations of a library see as arguments.
            lambda xp, f, dtype, device, is_adjoint: f._rows(xp, dtype, device, trail, is_adjoint),
            (k * trail, d * trail),
            self._row_size(trail),
            self,  # type: ignore[arg-type]
            lambda xp, f, n_rows, device: f._program(xp, n_rows, device, trail),
        )
        return linear.adjoint() if is_adjoint else linear


class _DenseArrays(NamedTuple, Generic[A_co]):
    weights: A_co
    scale: A_co


@equal_by_value
class DenseProjection(Projection[A_co], _DenseArrays[A_co]):
    """A linear map as a matrix: ``f(x) = scale · weights x``.

    Made by `gaussian_projection`, `sparse_projection` and `orthogonal_projection`. It also has all
    that `Projection` has.

    Attributes
    ----------
    weights : array (k, d)
    scale : array ()
        In float32 or better. A scale in half precision would change the lengths of images.
    """

    __slots__ = ()

    def matrix(self) -> A_co:
        xp = self._checked_namespace()
        weights = xp.astype(self.weights, accumulator(xp, self.weights.dtype), copy=False)
        scale = xp.astype(self.scale, weights.dtype, copy=False)
        return xp.astype(weights * scale, self.weights.dtype, copy=False)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.weights.shape[0], self.weights.shape[1]

    def _check(self) -> None:
        check_shape("weights", self.weights, (None, None))
        check_shape("scale", self.scale, ())

    def _row_size(self, trail: int) -> int | None:
        return None  # the map is a single product

    def _rows(
        self, xp: ModuleType, dtype: Any, device: Any, trail: int, is_adjoint: bool
    ) -> RowFunction:
        weights = xp.permute_dims(self.weights, (1, 0)) if is_adjoint else self.weights
        weights = xp.astype(weights, dtype, copy=False)
        scale = xp.astype(self.scale, dtype, copy=False)

        # The images are scaled, and not the weights, of which this would make a copy.
        def multiply(rows: Array, out: Any) -> Array:
            if trail == 1:
                return product(xp, rows, xp.permute_dims(weights, (1, 0))) * scale
            (k, d), lead = weights.shape, rows.shape[0]
            y = product(xp, weights, xp.reshape(rows, (lead, d, trail)))
            return xp.reshape(y, (lead, k * trail)) * scale

        return multiply


class _HadamardArrays(NamedTuple, Generic[A_co]):
    signs: tuple[A_co, ...]
    rows: Any  # integers


@equal_by_value
class HadamardProjection(Projection[A_co], _HadamardArrays[A_co]):
    """Fast Johnson–Lindenstrauss: random signs, a Hadamard transform, a sample of its coordinates.

    Made by `hadamard_projection`, whose notes have the formula and what is known about it. It also has
    all that `Projection` has.

    Attributes
    ----------
    signs : tuple of arrays of ±1
        One array per round: (n_features,) for the first round, (D,) for the others. D ≥ n_features is
        the order of the Hadamard matrix.
    rows : integer array (n_components,)
        The coordinates that are kept, in ascending order.
    """

    __slots__ = ()

    @property
    def has_orthogonal_rows(self) -> bool:
        """Whether the rows of the matrix are orthogonal, of length √(d/k).

        They are if d is the order of the Hadamard matrix, so that vectors are not padded. Then the
        adjoint times k/d is the pseudo-inverse, and for k = d the map is a rotation, whose inverse is
        the adjoint.

        Examples
        --------
        >>> from isentropic.jl import hadamard_projection
        >>> [hadamard_projection(d, d, rng=0).has_orthogonal_rows for d in (768, 1000, 4096, 11008)]
        [True, False, True, False]
        """
        return self._order.size == self.n_features

    @property
    def _shape(self) -> tuple[int, int]:
        return self.rows.shape[0], self.signs[0].shape[0]

    def _check(self) -> None:
        _check_tuple("signs", self.signs)
        check_shape("rows", self.rows, (None,))
        check_shape("signs[0]", self.signs[0], (None,))
        for i, signs in enumerate(self.signs[1:], 1):
            check_shape(f"signs[{i}]", signs, (self._order.size,))

    @property
    def _order(self) -> Order:
        """The order D of the Hadamard matrix."""
        return hadamard_order(max(self._shape))

    def _row_size(self, trail: int) -> int:
        return self._order.size * trail

    def _scale(self, size: int) -> float:
        """The scale of the Hadamard matrix of one round."""
        # All rounds use the same factors, so the scale √(D/k) is divided equally among them.
        return size**-0.5 * (size / self.n_components) ** (0.5 / len(self.signs))

    def _rows(
        self, xp: ModuleType, dtype: Any, device: Any, trail: int, is_adjoint: bool
    ) -> RowFunction:
        order, (k, d) = self._order, self._shape
        size = order.size
        factors = functools.partial(
            hadamard_factors, xp, order, scale=self._scale(size), dtype=dtype, device=device
        )
        # The transform of the adjoint gives all coordinates, so nothing can be left out of it.
        last = None if is_adjoint else doublings_to_sample(xp, order, k)
        transform = _product_with(xp, factors(), is_adjoint)
        steps = [step for signs in self.signs for step in (_flip(xp, signs, dtype), transform)]
        if d < size:  # between the first signs and the first transform
            steps.insert(1, (lambda z: z[..., :d, :]) if is_adjoint else lambda z: _pad(xp, z, size))
        if last is None:
            steps.append(_choice(xp, self.rows, size, is_adjoint))
        else:  # the last transform is computed only at these coordinates
            sampled = factors(last=last)
            steps[-1] = lambda z: sample_kronecker(xp, sampled, z, self.rows)
        return _in_turn(xp, steps, (k if is_adjoint else d, trail), is_adjoint)

    def _program(self, xp: ModuleType, n_rows: int, device: Any, trail: int) -> KernelProgram | None:
        order, (k, d), last = self._order, self._shape, len(self.signs) - 1
        size = order.size
        factors, matrices = kernel_factors(xp, order, device)
        rounds = [
            Round(
                factors,
                self._scale(size),
                # Only the first round has vectors to pad, and only the last one leaves coordinates out.
                widths=(size if i else d, size),
                entries=(size if i else d, size if i < last else k),
                signs=len(matrices) + i,
                signs_at=INPUT,
                slots=len(matrices) + last + 1,
                slots_at=0 if i < last else OUTPUT,
            )
            for i in range(last + 1)
        ]
        program = Program(tuple(rounds), 1, trail)
        if not has_kernel(xp, program, n_rows, device):
            return None
        all_signs = [xp.astype(signs, xp.float32, copy=False) for signs in self.signs]
        return program, (*matrices, *all_signs, slots_of(xp, self.rows, size))


class _SketchArrays(NamedTuple, Generic[A_co]):
    signs: A_co
    components: Any  # integers
    features: Any


@equal_by_value
class CountSketch(Projection[A_co], _SketchArrays[A_co]):
    """A sparse map: each feature is added, with random signs, to a few of the components.

    Made by `count_sketch`. It also has all that `Projection` has.

    Attributes
    ----------
    signs : array (s, d) of ±1
    components : integer array (s, d)
        The s components that each feature is added to.
    features : integer array (k, m)
        The inverse of `components`: the features that each component sums, as indices into the
        flattened `signs`. Rows with fewer than m features are padded with the index s · n_features.
    """

    __slots__ = ()

    @property
    def _shape(self) -> tuple[int, int]:
        return self.features.shape[0], self.signs.shape[1]

    def _check(self) -> None:
        check_shape("signs", self.signs, (None, None))
        check_shape("components", self.components, self.signs.shape)
        check_shape("features", self.features, (None, None))

    def _row_size(self, trail: int) -> int:
        return self.signs.shape[0] * self.signs.shape[1] * trail

    def _rows(
        self, xp: ModuleType, dtype: Any, device: Any, trail: int, is_adjoint: bool
    ) -> RowFunction:
        (s, d), (k, m) = self.signs.shape, self.features.shape
        signs = xp.astype(self.signs, dtype, copy=False) * s**-0.5
        sources = xp.reshape(self.components if is_adjoint else self.features, (-1,))

        def sketch(block: Array, out: Any) -> Array:
            lead = block.shape[0]
            z = xp.reshape(block, (lead, 1, d, trail)) * signs[None, :, :, None]
            # The index s · d, which fills rows of `features`, takes this zero.
            z = _pad(xp, xp.reshape(z, (lead, s * d, trail)), s * d + 1)
            # Sums of what is gathered: the array API has no addition at indices.
            z = xp.reshape(xp.take(z, sources, axis=1), (lead, k, m, trail))
            return xp.reshape(xp.sum(z, axis=2), (lead, k * trail))

        def spread(block: Array, out: Any) -> Array:
            lead = block.shape[0]
            z = xp.take(xp.reshape(block, (lead, k, trail)), sources, axis=1)
            z = xp.reshape(z, (lead, s, d, trail)) * signs[None, :, :, None]
            return xp.reshape(xp.sum(z, axis=1), (lead, d * trail))

        return spread if is_adjoint else sketch


class _RotationArrays(NamedTuple, Generic[A_co]):
    signs: tuple[A_co, ...]
    factors: tuple[A_co, ...]


@equal_by_value
class Rotation(Projection[A_co], _RotationArrays[A_co]):
    """An orthogonal map ``f(x) = R x``: ``f.adjoint(f(x))`` is x up to rounding.

    Made by `rotation`, whose notes have the formula. It also has all that `Projection` has.

    Attributes
    ----------
    signs : tuple of arrays of ±1 (n_blocks, size)
        One array per round. Each of the blocks of `size` consecutive features is rotated by itself.
    factors : tuple of arrays (m, m)
        Orthogonal matrices, in float32 or better. Their Kronecker product has the order D ≤ size.
    """

    __slots__ = ()

    def fold_into(self, weight: ArrayT, *, side: str) -> ArrayT:
        """The weight of a linear layer whose input or output is rotated.

        Parameters
        ----------
        weight : array (..., out, in)
            The matrix W of ``y = W x``, as in ``torch.nn.Linear``. For weights (in, out), as in Flax,
            transpose before and after.
        side : {"input", "output"}
            ``"input"`` returns W Rᵀ: the layer takes ``f(x)``, and its output is the same as before.
            ``"output"`` returns R W: the output becomes ``f(y)``. Rotate a bias too, with ``f(bias)``.

        Returns
        -------
        array
            In the shape and dtype of `weight`.

        Raises
        ------
        TypeError
            If `weight` is not a floating-point array of the library of the map.
        ValueError
            If `side` is not one of these, if `weight` does not have n_features entries on that side, or
            if it is on another device than the map.

        Examples
        --------
        >>> import numpy as np
        >>> from isentropic.jl import rotation
        >>> w1, w2, x = np.random.default_rng(1).normal(size=(3, 8, 8))
        >>> f = rotation(8, rng=0)
        >>> hidden = x @ f.fold_into(w1, side="output").T  # equal to f(x @ w1.T)
        >>> bool(np.allclose(hidden @ f.fold_into(w2, side="input").T, x @ w1.T @ w2.T))
        True
        """
        check_choice("side", side, ("input", "output"))
        # The rows of W Rᵀ are R times rows of W, and the columns of R W are R times columns of W.
        return self._along("weight", weight, -1 if side == "input" else -2)

    @property
    def _shape(self) -> tuple[int, int]:
        d = math.prod(self.signs[0].shape)
        return d, d

    def _check(self) -> None:
        _check_tuple("signs", self.signs)
        _check_tuple("factors", self.factors, can_be_empty=True)
        check_shape("signs[0]", self.signs[0], (None, None))
        for i, signs in enumerate(self.signs):
            check_shape(f"signs[{i}]", signs, self.signs[0].shape)
        for i, factor in enumerate(self.factors):
            # First the number of axes, because a 0-d factor has no first one.
            check_shape(f"factors[{i}]", factor, (None, None))
            check_shape(f"factors[{i}]", factor, (factor.shape[0],) * 2)
        size = self.signs[0].shape[1]
        if self._order > size:
            raise value_error("factors", f"have a product of the order {size} or less", self._order)

    @property
    def _order(self) -> int:
        """The order D of the product of the factors."""
        return math.prod([factor.shape[0] for factor in self.factors])

    def _row_size(self, trail: int) -> int | None:
        return None if self._is_product(trail) else self.n_features * trail

    def _is_product(self, trail: int) -> bool:
        """Whether the map is a single product with a matrix."""
        n_blocks, size = self.signs[0].shape
        return n_blocks == trail == len(self.factors) == len(self.signs) == 1 and self._order == size

    def _rows(
        self, xp: ModuleType, dtype: Any, device: Any, trail: int, is_adjoint: bool
    ) -> RowFunction:
        factors = [xp.astype(factor, dtype, copy=False) for factor in self.factors]
        if self._is_product(trail):
            # The signs scale the columns of the factor, so a row takes one product.
            weights = factors[0] * xp.astype(self.signs[0], dtype, copy=False)
            weights = weights if is_adjoint else xp.permute_dims(weights, (1, 0))
            return lambda rows, out: product(xp, rows, weights)
        rotate = _product_with(xp, factors, is_adjoint)
        n_blocks, size = self.signs[0].shape
        rest = size - self._order

        def rotate_first(z: Array) -> Array:
            """Rotate as many coordinates as the factors have. The next round takes the rest first."""
            if is_adjoint:
                return _concat(xp, rotate(z[..., rest:, :]), z[..., :rest, :])
            return _concat(xp, z[..., size - rest :, :], rotate(z[..., : size - rest, :]))

        steps = [
            step
            for signs in self.signs
            for step in (_flip(xp, signs, dtype), rotate_first if rest else rotate)
        ]
        return _in_turn(xp, steps, (n_blocks, size, trail), is_adjoint)

    def _program(self, xp: ModuleType, n_rows: int, device: Any, trail: int) -> KernelProgram | None:
        n_blocks, size = self.signs[0].shape
        # No round of the kernel rotates a part of the coordinates and moves the others.
        if self._order != size or len(self.signs) > 1 or not self.factors:
            return None
        orders = tuple([(factor.shape[0], i) for i, factor in enumerate(self.factors)])
        part = Round(orders, 1.0, (size, size), (size, size), len(orders), INPUT)
        program = Program((part,), n_blocks, trail)
        if not has_kernel(xp, program, n_rows, device):
            return None
        arrays = (*self.factors, self.signs[0])
        return program, tuple([xp.astype(x, xp.float32, copy=False) for x in arrays])


def _check_tuple(name: str, arrays: Any, *, can_be_empty: bool = False) -> None:
    if not isinstance(arrays, tuple):
        raise type_error(name, "be a tuple of arrays", type(arrays).__name__)
    if not (arrays or can_be_empty):
        raise value_error(name, "hold an array for each round", arrays)


# A step of a map, along the second to last axis of arrays (..., size, trail).
Step = Callable[[Array], Array]


def _in_turn(xp: ModuleType, steps: list[Step], axes: tuple[int, ...], is_adjoint: bool) -> RowFunction:
    """The steps one after another, for rows with these axes. Those of the adjoint are in reverse."""
    steps = steps[::-1] if is_adjoint else steps

    def apply(rows: Array, out: Any) -> Array:
        z = xp.reshape(rows, (rows.shape[0], *axes))
        for step in steps:
            z = step(z)
        return xp.reshape(z, (z.shape[0], math.prod(z.shape[1:])))

    return apply


def _flip(xp: ModuleType, signs: Array, dtype: Any) -> Step:
    """Multiply coordinates by signs."""
    column = xp.astype(signs, dtype, copy=False)[..., None]
    return lambda z: z * lift(column, z.ndim)


def _product_with(xp: ModuleType, factors: list[Array], is_adjoint: bool) -> Step:
    """The product F₁ ⊗ F₂ ⊗ …, or its transpose."""
    if is_adjoint:
        factors = [xp.permute_dims(factor, (1, 0)) for factor in factors]

    def apply(z: Array) -> Array:
        # The axes in front may be several, such as those of rows and blocks.
        *lead, order, trail = z.shape
        y = apply_kronecker(xp, factors, xp.reshape(z, (math.prod(lead), order * trail)), trail)
        return xp.reshape(y, z.shape)

    return apply


def _choice(xp: ModuleType, rows: Array, size: int, is_adjoint: bool) -> Step:
    """Take coordinates, in ascending order, out of `size`; the adjoint puts them among zeros."""
    if not is_adjoint:
        return lambda z: xp.take(z, rows, axis=-2)
    k = rows.shape[0]
    coordinates = xp.arange(size, dtype=rows.dtype, device=common_device(rows=rows))
    source = xp.searchsorted(rows, coordinates)
    # Past the last row the search gives k, which is no index of it.
    source = xp.where(source < k, source, k - 1)
    kept = (xp.take(rows, source) == coordinates)[:, None]

    def put_back(z: Array) -> Array:
        z = xp.take(z, source, axis=-2)
        # Not a product with `kept`, since 0 · NaN is NaN.
        return xp.where(lift(kept, z.ndim), z, xp.zeros((), dtype=z.dtype, device=common_device(z=z)))

    return put_back


def _pad(xp: ModuleType, z: Array, size: int) -> Array:
    """Pad the second to last axis with zeros to the length `size`."""
    *lead, have, trail = z.shape
    shape = (*lead, size - have, trail)
    return _concat(xp, z, xp.zeros(shape, dtype=z.dtype, device=common_device(z=z)))


def _concat(xp: ModuleType, *parts: Array) -> Array:
    """Join along the second to last axis."""
    # Batched gradients of `torch.autograd` support `cat`, but not its alias `concat`.
    return xp.cat(parts, -2) if is_torch(xp) else xp.concat(parts, axis=-2)

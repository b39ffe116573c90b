"""Hadamard transform and Johnson–Lindenstrauss maps: seconds, and ratios to other libraries."""

import numpy as np

import isentropic as it

from .backends import CPU, NAMESPACES, length, namespace, ratio, synchronized

ROWS = [2**8, 2**10, 2**12, 2**14, 2**16]
SIZE = 2**24  # numbers in an array, 64 MB


def matrix(backend, columns, size=SIZE):
    size, columns = size if length(SIZE) == SIZE else 8 * length(columns), length(columns)
    x = np.random.default_rng(0).normal(size=(size // columns, columns)).astype("float32")
    return namespace(backend).asarray(x)


class Hadamard:
    """The transform of the rows of an array of 64 MB."""

    params = (list(NAMESPACES), ROWS[::2])
    param_names = ("backend", "n")

    def setup(self, backend, n):
        self.x = matrix(backend, n)
        self.transform = synchronized(backend, it.jl.hadamard_transform)
        self.transform(self.x)

    def time_transform(self, backend, n):
        self.transform(self.x)

    def peakmem_transform(self, backend, n):
        self.transform(self.x)


class HadamardAgainstPeers:
    """Time relative to a copy by NumPy, and to SciPy's cosine transform with all workers."""

    params = (CPU, ROWS)
    param_names = ("backend", "n")
    unit = "ratio"
    timeout = 300

    def setup(self, backend, n):
        self.x, self.host = matrix(backend, n), matrix("numpy", n)
        self.transform = synchronized(backend, it.jl.hadamard_transform)

    def track_copies(self, backend, n):
        return ratio(lambda: self.transform(self.x), self.host.copy)

    def track_dct(self, backend, n):
        from scipy.fft import dct

        return ratio(lambda: self.transform(self.x), lambda: dct(self.host, workers=-1))


D, K, N = length(65536), min(512, length(65536) // 2), 64

MAPS = {
    "gaussian": it.jl.gaussian_projection,
    "hadamard": it.jl.hadamard_projection,
    "hadamard-2": lambda *a, **k: it.jl.hadamard_projection(*a, rounds=2, **k),
    "count_sketch": it.jl.count_sketch,
}


class Projections:
    """Projection of 64 points with 65 536 features to 512 components."""

    params = (list(NAMESPACES), list(MAPS))
    param_names = ("backend", "map")

    def setup(self, backend, name):
        self.x = matrix(backend, D, N * D)
        f = MAPS[name](D, K, rng=1, like=self.x)
        apply = synchronized(backend, lambda f, x: f(x))
        self.project = lambda x: apply(f, x)
        self.project(self.x)

    def time_apply(self, backend, name):
        self.project(self.x)

    def time_draw(self, backend, name):
        MAPS[name](D, K, rng=1, like=self.x)


class ProjectionsAgainstPeers:
    """Time relative to scikit-learn's and SciPy's projections of the same size."""

    params = (CPU, list(MAPS))
    param_names = ("backend", "map")
    unit = "ratio"
    timeout = 600

    def setup(self, backend, name):
        self.x, self.host = matrix(backend, D, N * D), matrix("numpy", D, N * D)
        f = MAPS[name](D, K, rng=1, like=self.x)
        apply = synchronized(backend, lambda f, x: f(x))
        self.project = lambda x: apply(f, x)

    def track_apply_sklearn_gaussian(self, backend, name):
        from sklearn.random_projection import GaussianRandomProjection

        peer = GaussianRandomProjection(K, random_state=0).fit(self.host)
        return ratio(lambda: self.project(self.x), lambda: peer.transform(self.host))

    def track_apply_sklearn_sparse(self, backend, name):
        from sklearn.random_projection import SparseRandomProjection

        peer = SparseRandomProjection(K, random_state=0).fit(self.host)
        return ratio(lambda: self.project(self.x), lambda: peer.transform(self.host))

    def track_draw_and_apply_sklearn_gaussian(self, backend, name):
        from sklearn.random_projection import GaussianRandomProjection

        def ours():
            MAPS[name](D, K, rng=1, like=self.x)(self.x)

        return ratio(
            ours, lambda: GaussianRandomProjection(K, random_state=0).fit_transform(self.host), rounds=2
        )

    def track_draw_and_apply_scipy_sketch(self, backend, name):
        from scipy.linalg import clarkson_woodruff_transform

        def ours():
            MAPS[name](D, K, rng=1, like=self.x)(self.x)

        return ratio(ours, lambda: clarkson_woodruff_transform(self.host.T, K, rng=1).T)


class Rotations:
    """Time of a rotation relative to dense products and to SciPy's cosine transform.

    Sizes of heads, and of the layers of models, most of which are no powers of two.
    """

    params = (CPU, [64, 96, 128, 256, 576, 1536, 4096, 11008])
    param_names = ("backend", "d")
    unit = "ratio"
    timeout = 300

    def setup(self, backend, d):
        self.x, self.host = matrix(backend, d, 2**22), matrix("numpy", d, 2**22)
        f = it.jl.rotation(self.host.shape[1], rng=1, like=self.x)
        apply = synchronized(backend, lambda f, x: f(x))
        self.rotate = lambda: apply(f, self.x)

    def track_dense(self, backend, d):
        """Against a product with a dense matrix by NumPy."""
        dense = np.asarray(it.jl.rotation(self.host.shape[1], rng=1, like=self.host).matrix()).T
        return ratio(self.rotate, lambda: self.host @ dense)

    def track_dct(self, backend, d):
        from scipy.fft import dct

        return ratio(self.rotate, lambda: dct(self.host, norm="ortho"))

    def track_sklearn(self, backend, d):
        """Against scikit-learn's Gaussian map to as many components."""
        from sklearn.random_projection import GaussianRandomProjection

        peer = GaussianRandomProjection(self.host.shape[1], random_state=0).fit(self.host)
        return ratio(self.rotate, lambda: peer.transform(self.host))


class Bounds:
    """Dimensions by the lemma, for a number and for an array of eps."""

    params = (("exact", "haar", "dasgupta-gupta"),)
    param_names = ("method",)

    def time_number(self, method):
        it.jl.min_dim(10_000, eps=0.1, method=method, n_features=50_000)

    def time_array(self, method):
        eps = np.linspace(0.05, 0.9, 1000)
        it.jl.min_dim(10_000, eps=eps, method=method, n_features=50_000)


class Quantizers:
    """Vectors of 128 dimensions: encoding, and inner products with 1000 queries."""

    params = (CPU, [1, 4, 8])
    param_names = ("backend", "bits")

    def setup(self, backend, bits):
        self.x = matrix(backend, 128, 2**22)
        self.queries = self.x[: min(1000, self.x.shape[0]), ...]
        f = it.jl.quantizer(self.x.shape[1], bits, rng=0, like=self.x)
        self.encode = synchronized(backend, f.encode)
        self.inner = synchronized(backend, f.inner)
        self.product = synchronized(backend, lambda q, x: q @ x.T)
        self.vectors = self.encode(self.x)

    def time_encode(self, backend, bits):
        self.encode(self.x)

    def track_inner(self, backend, bits):
        """Time relative to the product of the float32 arrays."""
        return ratio(
            lambda: self.inner(self.queries, self.vectors), lambda: self.product(self.queries, self.x)
        )

    track_inner.unit = "ratio"

    def peakmem_inner(self, backend, bits):
        self.inner(self.queries, self.vectors)

import inspect
import itertools
import pickle

import numpy as np
import pytest

import isentropic as it
from isentropic._checks import common_shape, with_name_hints


@with_name_hints(other="scale", dropout=None)
def double(x, *, scale=2.0):
    """Twice."""
    if not isinstance(scale, float):
        raise TypeError("of the body")
    return x * scale


class TestRenamed:
    @pytest.mark.host
    def test_names(self):
        with pytest.raises(
            TypeError, match=r"^double\(\) has no argument `other`: here it is `scale`\.$"
        ):
            double(1, other=3.0)
        with pytest.raises(TypeError, match=r"has no argument `dropout`, and no equivalent\.$"):
            double(1, dropout=0.1)
        for call, message in (
            (lambda: double(1, third=3.0), "unexpected keyword argument 'third'"),
            (lambda: double(1, scale=None), "of the body"),
            (lambda: double(), "missing 1 required positional argument"),
        ):
            with pytest.raises(TypeError, match=message):
                call()

    @pytest.mark.host
    def test_is_the_function_to_who_asks(self):
        assert str(inspect.signature(double)) == "(x, *, scale=2.0)"
        assert (double.__name__, double.__doc__) == ("double", "Twice.")
        assert inspect.isfunction(double)
        assert pickle.loads(pickle.dumps(it.jl.gaussian_projection)) is it.jl.gaussian_projection

    def test_compiles(self, backend):
        def call(x):
            return double(x, scale=3.0)

        if backend.library == "torch":
            torch = pytest.importorskip("torch")
            call = torch.compile(call, fullgraph=True, backend="eager")
        elif backend.library == "jax":
            call = pytest.importorskip("jax").jit(call)
        backend.assert_close(call(backend.array([1.0, 2.0])), backend.array([3.0, 6.0]))


@pytest.mark.host
def test_common_shape_is_that_of_numpy():
    shapes = [s for n in range(4) for s in itertools.product((0, 1, 2, 3), repeat=n)]
    for a, b in itertools.product(shapes, repeat=2):
        try:
            expected = np.broadcast_shapes(a, b)
        except ValueError:
            with pytest.raises(ValueError, match="`b` must broadcast with"):
                common_shape(a=a, b=b)
        else:
            assert common_shape(a=a, b=b) == expected
    assert common_shape(a=(3,), b=(2, 1), c=(5, 1, 1)) == (5, 2, 3)

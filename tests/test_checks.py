import inspect
import itertools
import pickle
import re

import numpy as np
import pytest

import isentropic as it
from isentropic._checks import check_broadcastable, check_flag, common_shape, with_name_hints


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


class TestBroadcastable:
    @pytest.mark.parametrize(
        ("shape", "target", "hint"),
        [
            ((2,), (2, 4), r"\(2, 1\)"),
            ((2, 10), (2, 4, 10, 10), r"\(2, 1, 1, 10\)"),
            ((3, 10), (2, 4, 10, 10), None),
            ((2, 4, 1, 9), (2, 4, 10, 10), None),
        ],
    )
    def test_the_error_shows_the_axis_of_the_batch(self, shape, target, hint):
        with pytest.raises(ValueError, match=r"`x` must have a shape broadcastable to") as error:
            check_broadcastable("x", shape, target)
        found = re.search(r"such as (\(.*\)) if its first axis is that of the batch", str(error.value))
        assert (found is None) == (hint is None)
        assert hint is None or re.fullmatch(hint, found[1])

    @pytest.mark.parametrize("shape", [(), (1,), (10,), (4, 1, 10), (2, 4, 10, 10)])
    def test_accepted(self, shape):
        check_broadcastable("x", shape, (2, 4, 10, 10))


def test_a_traced_flag():
    class DynamicJaxprTracer:
        pass

    with pytest.raises(TypeError, match="make it a static argument, or close over it, got Dynamic"):
        check_flag(is_causal=DynamicJaxprTracer())
    with pytest.raises(TypeError, match="`is_causal` must be True or False, got str"):
        check_flag(is_causal="no")

"""Every public function runs where its row in `capabilities` says, and refuses where it says not.

Of the calls in `cases.CASES` the tests of the contract, of JAX and of PyTorch try more than this: what
is here is for them alone what is not there. Those in `cases.TRIED` are tried here.
"""

import ast
import functools
import inspect
from pathlib import Path

import capabilities
import cases
import numpy as np
import pytest
from capabilities import INTEGRATIONS, ROWS, WITHOUT_ROW, bare, row_of

import isentropic as it
from isentropic.jl._maps import Projection

CALLS = cases.CASES | cases.TRIED | cases.REFUSED
# One call of each function.
ONE_CALL = {call.partition("-")[0]: call for call in reversed(cases.CASES | cases.TRIED)}
ONE_CALL = {call: CALLS[call] for call in ONE_CALL.values()}
MODULES = {"": it} | {
    f"{name}.": getattr(it, name) for name in ("drift", "jl", "laws", "layers", "masks", "theory")
}


def exported(path):
    """``__all__`` of a file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} has no __all__")


def one_call(name):
    return next(call for call in ONE_CALL if call.partition("-")[0] == bare(name))


def refused(*columns):
    """For each function that does not run in a column, one call, with what the error says."""
    return [
        pytest.param(column, call, cell.error, id=f"{column}-{call}")
        for name, row in ROWS.items()
        for column, cell in row.cells().items()
        if column in columns and cell.runs is False
        for call in [cell.call or one_call(name)]
    ]


def leaves(result):
    """The arrays in a result, also in dictionaries, lists and laws."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        return [x for part in result for x in leaves(part)]
    return [result] if hasattr(result, "dtype") else []


def assert_same(got, expected):
    got, expected = leaves(got), leaves(expected)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-4)


@functools.cache
def result_in_numpy(call):
    return CALLS[call](cases.inputs())


@functools.cache
def parts(call):
    """The names of the arrays that a call uses: all, and those with a gradient."""
    read = sorted(cases.names_read(CALLS[call]))
    return read, [name for name in read if name not in cases.DISCRETE]


@pytest.mark.host
class TestRows:
    def test_every_public_function_has_one(self):
        public = {
            prefix + name
            for prefix, module in MODULES.items()
            for name in module.__all__
            if not inspect.ismodule(getattr(module, name))
        }
        # Which are returned.
        public |= {"jl.Quantizer", *(f"jl.{kind.__name__}" for kind in Projection.__subclasses__())}
        public |= {f"plots.{name}" for name in exported(Path(it.__file__).parent / "plots.py")}
        folder = Path(it.__file__).parent / "integrations"
        for path in (x for x in folder.iterdir() if x.name[0] != "_"):
            source = path / "__init__.py" if path.is_dir() else path  # its library may be missing
            public |= {f"integrations.{path.stem}.{name}" for name in exported(source)}
        public.remove("AttentionDistribution")  # its methods have rows
        methods = (name for name in vars(it.AttentionDistribution) if name[0] != "_")
        public |= {
            f"AttentionDistribution.{name}"
            for name in methods
            if inspect.isfunction(getattr(it.AttentionDistribution, name))
        }
        named = [*ROWS, *INTEGRATIONS, *WITHOUT_ROW]
        assert set(named) == public
        assert len(named) == len(public)

    def test_integrations_are_tried_where_they_say(self):
        for integration in INTEGRATIONS.values():
            assert integration.tests
            for place in integration.tests:
                file, _, name = place.partition(":")
                assert name in cases.definitions(Path(__file__).parent / file), place

    def test_every_row_has_a_call(self):
        called = [name.partition("-")[0] for name in CALLS]
        named = [bare(name) for name in ROWS]
        assert len(set(named)) == len(named)
        assert set(called) == set(named)
        assert len(CALLS) == len(cases.CASES) + len(cases.TRIED) + len(cases.REFUSED)

    def test_what_does_not_run_has_a_reason(self):
        for row in ROWS.values():
            for cell in row.cells().values():
                assert cell.runs is not False or (cell.note and cell.error)


def column_of(backend):
    return "gpu" if backend.is_gpu else "libraries"


@pytest.mark.parametrize("call", sorted(cases.TRIED))
@pytest.mark.every_mode
def test_every_library_and_device(backend, call):
    if not getattr(row_of(call), column_of(backend)).runs:
        pytest.skip("is refused, as the next test sees")
    if backend.library == "jax" and hasattr(it.theory, call) and row_of(call).jit.runs:
        pytest.skip("JAX compiles each step of the series: the whole is tried under jit")
    arrays = {name: backend.array(x) for name, x in cases.inputs("float32").items()}
    got, expected = leaves(CALLS[call](arrays)), leaves(result_in_numpy(call))
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert type(a) is type(backend.array(0.0))
        backend.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("column", "call", "error"), refused("libraries", "gpu"))
def test_libraries_that_are_refused(backend, column, call, error):
    if column != column_of(backend):
        pytest.skip("is of other backends")
    arrays = {name: backend.array(x) for name, x in cases.inputs("float32").items()}
    if backend.library == "numpy":
        assert np.isfinite(CALLS[call](arrays)).all()
        return
    with pytest.raises(TypeError, match=error):
        CALLS[call](arrays)


class TestJAX:
    @pytest.fixture(autouse=True)
    def _only_once(self, request):
        if request.config.getoption("--backend") not in (None, "jax"):
            pytest.skip("belongs to the backend jax")
        pytest.importorskip("jax")

    @staticmethod
    def _arrays():
        import jax.numpy as jnp

        return {name: jnp.asarray(x) for name, x in cases.inputs().items()}

    @classmethod
    def _loss(cls, call, arrays):
        """A function of arrays with a gradient, which gives a number and the result."""
        import jax.numpy as jnp

        def loss(some):
            result = leaves(CALLS[call](arrays | some))
            floats = [x for x in result if jnp.issubdtype(x.dtype, jnp.floating)]
            finite = [jnp.where(jnp.isfinite(x), x, 0.0) for x in floats]
            return sum((jnp.sum(jnp.sin(x)) for x in finite), jnp.zeros(())), result

        return loss

    @classmethod
    def jit(cls, call):
        import jax

        arrays, (read, _) = cls._arrays(), parts(call)
        got = jax.jit(lambda some: leaves(CALLS[call](arrays | some)))({k: arrays[k] for k in read})
        assert_same(got, result_in_numpy(call))

    @classmethod
    def gradient(cls, call):
        """With the value, as one program costs half of two."""
        import jax

        arrays, (_, floats) = cls._arrays(), parts(call)
        of_loss = jax.value_and_grad(cls._loss(call, arrays), has_aux=True)
        # XLA would compile for longer than this runs.
        quick = {"xla_backend_optimization_level": 0}
        (_, result), gradient = jax.jit(of_loss, compiler_options=quick)({k: arrays[k] for k in floats})
        assert_same(result, result_in_numpy(call))
        sizes = {k: float(abs(x).max()) for k, x in gradient.items()}
        assert all(np.isfinite(x) for x in sizes.values()), sizes
        assert max(sizes.values()) > 0

    @classmethod
    def jax_vmap(cls, call):
        import jax
        import jax.numpy as jnp

        arrays, (read, _) = cls._arrays(), parts(call)
        twice = {k: jnp.stack([arrays[k]] * 2) for k in read}
        got = jax.eval_shape(jax.vmap(lambda some: leaves(CALLS[call](arrays | some))), twice)
        assert [x.shape for x in got] == [(2, *x.shape) for x in leaves(result_in_numpy(call))]

    @pytest.mark.parametrize("call", capabilities.that_run("jit", cases.TRIED))
    def test_jit_and_gradient(self, call):
        (self.gradient if row_of(call).gradient.runs else self.jit)(call)

    @pytest.mark.parametrize("call", capabilities.that_run("jit", ONE_CALL))
    def test_lowers_for_gpus_and_tpus(self, call):
        """The devices need not be there. That it compiles and runs on them is not shown.

        Products of float32 ask for its full precision. Without that a GPU would round to TF32.
        """
        import jax
        from jax import export

        arrays, (read, _) = self._arrays(), parts(call)
        function = jax.jit(lambda some: leaves(CALLS[call](arrays | some)))
        platforms = ("cuda", "tpu")
        exported = export.export(function, platforms=platforms)({k: arrays[k] for k in read})
        assert exported.platforms == platforms
        assert len(exported.out_avals) == len(leaves(result_in_numpy(call)))
        lines = exported.mlir_module().splitlines()
        products = [line for line in lines if "dot_general" in line and "xf32>" in line]
        assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)

    @pytest.mark.parametrize("call", capabilities.that_run("jax_vmap", cases.TRIED))
    def test_vmap(self, call):
        self.jax_vmap(call)

    @pytest.mark.parametrize("call", [c for c in ONE_CALL if row_of(c).gradient.runs is None])
    def test_nothing_has_a_gradient(self, call):
        import jax

        arrays, (_, floats) = self._arrays(), parts(call)
        some = {k: arrays[k] for k in floats}
        gradient = jax.grad(self._loss(call, arrays), has_aux=True)(some)[0]
        assert not any(x.any() for x in gradient.values())

    @pytest.mark.parametrize(("column", "call", "error"), refused("jit", "jax_vmap", "gradient"))
    def test_refused(self, column, call, error):
        with pytest.raises(Exception, match=error):
            getattr(self, column)(call)


class TestTorch:
    @pytest.fixture(autouse=True)
    def _only_once(self, request):
        if request.config.getoption("--backend") not in (None, "torch"):
            pytest.skip("belongs to the backend torch")
        pytest.importorskip("torch")

    @staticmethod
    def _arrays():
        import torch

        return {name: torch.asarray(x) for name, x in cases.inputs().items()}

    @classmethod
    def compile(cls, call):
        import torch

        torch.compiler.reset()
        try:
            got = torch.compile(CALLS[call], fullgraph=True, backend="eager")(cls._arrays())
        finally:
            torch.compiler.reset()
        assert_same(got, result_in_numpy(call))

    @classmethod
    def torch_vmap(cls, call):
        import torch

        arrays, (read, _) = cls._arrays(), parts(call)
        twice = {k: torch.stack([arrays[k]] * 2) for k in read}
        got = torch.func.vmap(lambda some: tuple(leaves(CALLS[call](arrays | some))))(twice)
        for part in range(2):
            assert_same([x[part, ...] for x in got], result_in_numpy(call))

    @classmethod
    def gradient(cls, call):
        import torch

        arrays, (_, floats) = cls._arrays(), parts(call)
        some = {k: arrays[k].requires_grad_() for k in floats}
        result = [x for x in leaves(CALLS[call](arrays)) if x.is_floating_point()]
        loss = sum((torch.where(x.isfinite(), x, 0.0).sin().sum() for x in result), torch.zeros(()))
        found = torch.autograd.grad(loss, list(some.values()), allow_unused=True)
        gradients = [x for x in found if x is not None]
        assert all(x.isfinite().all() for x in gradients)
        assert any(x.any() for x in gradients)

    @classmethod
    def second(cls, call):
        """Against differences of the first derivative, which must exist."""
        import torch

        cls.gradient(call)
        arrays = {name: torch.asarray(x) for name, x in cases.inputs("float64").items()}
        arrays["p"] = arrays["p"] * 0.9 + 0.01  # the derivative at p = 0 is one-sided
        floats = sorted(parts(call)[1])

        def function(*values):
            found = leaves(CALLS[call](arrays | dict(zip(floats, values, strict=True))))
            return tuple(
                torch.where(x.isfinite(), x, 0.0).sin() for x in found if x.is_floating_point()
            )

        inputs = [arrays[name].requires_grad_() for name in floats]
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True, atol=1e-4)

    @pytest.mark.parametrize("call", capabilities.that_run("compile", cases.TRIED))
    def test_compile(self, call):
        self.compile(call)

    @pytest.mark.parametrize("call", capabilities.that_run("torch_vmap", ONE_CALL))
    def test_vmap(self, call):
        self.torch_vmap(call)

    @pytest.mark.parametrize("call", capabilities.that_run("gradient", cases.TRIED))
    def test_gradient(self, call):
        self.gradient(call)

    @pytest.mark.parametrize("call", capabilities.that_run("second", ONE_CALL))
    def test_second_derivative(self, call):
        self.second(call)

    @pytest.mark.parametrize("call", [c for c in ONE_CALL if row_of(c).gradient.runs is None])
    def test_nothing_has_a_gradient(self, call):
        arrays = self._arrays()
        for name in parts(call)[1]:
            arrays[name].requires_grad_()
        assert not any(x.requires_grad for x in leaves(CALLS[call](arrays)))

    # A warning of the compiler on its way to the error.
    @pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
    @pytest.mark.parametrize(
        ("column", "call", "error"), refused("compile", "torch_vmap", "gradient", "second")
    )
    def test_refused(self, column, call, error):
        with pytest.raises(Exception, match=error):
            getattr(self, column)(call)


@pytest.mark.host
class TestDask:
    @staticmethod
    def _call(call):
        da = pytest.importorskip("dask.array")
        arrays = cases.inputs()
        return CALLS[call]({k: x if k in cases.PARTS else da.from_array(x) for k, x in arrays.items()})

    @pytest.mark.parametrize("call", capabilities.that_run("dask", cases.CASES | cases.TRIED))
    def test_taken(self, call):
        result = leaves(self._call(call))
        if "x" in parts(call)[0] and row_of(call) is not capabilities.DRAWN:
            assert all(hasattr(x, "dask") for x in result)  # nothing was computed
        computed = [x.compute(scheduler="synchronous") if hasattr(x, "dask") else x for x in result]
        assert_same(computed, result_in_numpy(call))

    @pytest.mark.parametrize(("column", "call", "error"), refused("dask"))
    def test_refused(self, column, call, error):
        with pytest.raises(TypeError, match=error):
            self._call(call)

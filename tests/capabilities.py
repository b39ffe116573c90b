"""Where each public function runs: the one declaration, which the tests try and the documentation shows.

A row of `ROWS` says it for one function. What is declared to run has to run, and what is declared not
to run has to raise an error that says so. The calls that are tried are those of `cases`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

import isentropic


@dataclass(frozen=True)
class Cell:
    """Whether a function runs somewhere; None where there is nothing to ask."""

    runs: bool | None
    note: str = ""  # for the reader: why not, or what to know
    error: str = ""  # what the error says, as a regular expression
    call: str = ""  # the call that does not run, where others of the function do


YES = Cell(True)
NOTHING = Cell(None)  # the results have no derivative, or the arguments no part in them

COLUMNS = {
    "libraries": "other libraries",
    "gpu": "GPU",
    "jit": "`jax.jit`",
    "jax_vmap": "`jax.vmap`",
    "compile": "`torch.compile`",
    "torch_vmap": "`torch.func.vmap`",
    "gradient": "gradient",
    "second": "second derivative, PyTorch",
    "dask": "Dask",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cell for each column. The default is what most functions do."""

    libraries: Cell = YES
    gpu: Cell = (
        YES  # tensors and arrays of PyTorch, JAX and CuPy; without a GPU, fake tensors of PyTorch
    )
    jit: Cell = YES
    jax_vmap: Cell = YES
    compile: Cell = YES  # with fullgraph=True
    torch_vmap: Cell = YES
    gradient: Cell = YES  # in PyTorch and in JAX
    second: Cell = YES
    dask: Cell = Cell(
        False,
        "Only maps, and the functions that draw them, take Dask arrays. Other functions need arrays in memory.",
        "must be an array in memory, got a Dask array",
    )

    def cells(self) -> dict[str, Cell]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


ALL = Row()
NOT_SMOOTH = Row(gradient=NOTHING, second=NOTHING)
LAZY = Row(dask=YES)

_NATIVE = Cell(
    False,
    "PyTorch's own kernel has no second derivative. The generic code has one: use "
    '`implementation="generic"`.',
    "derivative for .* is not implemented",
)
NATIVE = Row(second=_NATIVE)

_TRACED = Cell(
    True, "The numbers are drawn when the call is traced. They are constants in the compiled program."
)
_MOVED = Cell(
    True,
    "NumPy draws the numbers on the host. Then they are moved to the library and device of `like`, "
    "so they are the same everywhere.",
)
DRAWN = Row(
    libraries=_MOVED,
    gpu=_MOVED,
    jit=_TRACED,
    jax_vmap=_TRACED,
    compile=Cell(
        False,
        "PyTorch does not compile NumPy's generators. Draw before the compiled call, and pass the result.",
        "PCG64",
    ),
    torch_vmap=_TRACED,
    gradient=NOTHING,
    second=NOTHING,
    dask=Cell(True, "The map itself is in memory. Only the dtype of a Dask `like` is used."),
)

_READ = Cell(
    False,
    "The function reads the numbers on the host. So its arrays must hold values, and it has no derivative.",
    "numpy.ndarray conversion method|ndarray attribute access|Data-dependent branching|Cannot access data pointer"
    "|does not require grad",
)
_COPIED = Cell(True, "The numbers are copied to the host, and the result is computed there.")
READ = Row(
    libraries=_COPIED, gpu=_COPIED,
    jit=_READ, jax_vmap=_READ, compile=_READ, torch_vmap=_READ, gradient=_READ, second=_READ,
)  # fmt: skip

_SIZES = Cell(
    False,
    "Sizes are Python numbers, lists or NumPy arrays.",
    "must be a number, or a list or NumPy array of numbers",
)
SIZES = Row(**dict.fromkeys(COLUMNS, _SIZES))

_NODES = Cell(
    False,
    "PyTorch does not compile the search for the nodes of the quadrature, which uses NumPy.",
    "function marked as skipped",
)
QUADRATURE = Row(compile=_NODES)

# The rows of public functions that do not do what `DEFAULTS` say.
_ROWS = {
    "attention": NATIVE,
    "attention_state": ALL,
    "AttentionState": ALL,
    "merge_states": ALL,
    "attention_entropy": ALL,
    "AttentionDistribution.output": NATIVE,
    "AttentionDistribution.state": ALL,
    "AttentionDistribution.entropy": ALL,
    "AttentionDistribution.statistics": ALL,
    "AttentionDistribution.received": ALL,
    "AttentionDistribution.information": ALL,
    "AttentionDistribution.kl_divergence": ALL,
    "AttentionDistribution.js_divergence": ALL,
    "AttentionDistribution.cross_entropy": ALL,
    "AttentionDistribution.weights": ALL,
    "AttentionDistribution.factor_for_entropy": ALL,
    "AttentionDistribution.backends": NOT_SMOOTH,
    "scale_queries": ALL,
    "factor_for_entropy": ALL,
    "drift.calibrate": READ,
    "drift.entropy_drift": READ,
    "entropy": ALL,
    "entropy_from_logits": ALL,
    "cross_entropy": ALL,
    "kl_divergence": ALL,
    "entropy_penalty": ALL,
    "laws.from_dict": Row(
        compile=Cell(
            False,
            "PyTorch does not compile the check of a law's name and parameters. Make the law before the call.",
            "dataclass fields",
        ),
        gradient=NOTHING,
        second=NOTHING,
    ),
    "layers.multi_head_attention": NATIVE,
    "layers.positive_features": DRAWN,
    "layers.qk_clip": NOT_SMOOTH,
    "jl.min_dim": SIZES,
    "jl.failure_probability": SIZES,
    "jl.eps": SIZES,
    "jl.lower_bound": SIZES,
    "jl.gaussian_projection": DRAWN,
    "jl.sparse_projection": DRAWN,
    "jl.orthogonal_projection": DRAWN,
    "jl.hadamard_projection": DRAWN,
    "jl.count_sketch": DRAWN,
    "jl.rotation": DRAWN,
    "jl.quantizer": DRAWN,
    "jl.Quantizer": ALL,
    "jl.DenseProjection": LAZY,
    "jl.HadamardProjection": LAZY,
    "jl.CountSketch": LAZY,
    "jl.Rotation": LAZY,
    "jl.hadamard_transform": LAZY,
    "jl.distortion": ALL,
    "theory.gaussian_entropy": QUADRATURE,
    "theory.frozen_entropy": ALL,
    "theory.sphere_entropy": QUADRATURE,
    "theory.needle_entropy": ALL,
    "theory.needle_weight": ALL,
    "theory.tied_entropy": ALL,
    "theory.invariant_factor": Row(
        compile=Cell(False, _NODES.note, _NODES.error, call="invariant_factor-gaussian")
    ),
    "theory.entropy_criterion_dim": SIZES,
    "theory.matched_key_dim": SIZES,
}

# Public names without a row.
WITHOUT_ROW = {
    "laws.Law": "abstract",
    "laws.from_config": "takes a configuration",
    "laws.realized_factor": "takes a function",
    "jl.QuantizedVectors": "holds what `jl.Quantizer` computes",
}

# What the other functions of a module do.
DEFAULTS = {"laws": ALL, "masks": NOT_SMOOTH, "layers": ALL}
ROWS = _ROWS | {
    f"{module}.{name}": row
    for module, row in DEFAULTS.items()
    for name in getattr(isentropic, module).__all__
    if f"{module}.{name}" not in _ROWS | WITHOUT_ROW
}


@dataclass(frozen=True)
class Integration:
    """Where a function for one library runs. The tests are those that try it."""

    takes: str
    compiled: str  # "–" where there is nothing to ask
    gradient: str
    tests: tuple[str, ...]  # file:function, in tests


_JAX, _TORCH = "integrations/test_jax.py", "integrations/test_torch.py"
_SHARDED, _FLEX = "integrations/test_sharded.py", "integrations/test_flex.py"
_HF, _PLOTS = "integrations/huggingface/test_", "test_plots.py"
_MODEL = "a model of transformers, on its device"


def _of_models(file: str, *names: str, compiled: str = "–", gradient: str = "–") -> Integration:
    return Integration(_MODEL, compiled, gradient, tuple(f"{_HF}{file}.py:{name}" for name in names))


def _plot(takes: str, name: str) -> Integration:
    return Integration(f"{takes}, on the host", "–", "–", (f"{_PLOTS}:{name}",))


INTEGRATIONS = {
    "integrations.jax.attention_fn": Integration(
        "JAX arrays, in modules of Flax, on every device", "`jax.jit`", "all",
        (f"{_JAX}:TestAgainstFlax.test_gradients", f"{_JAX}:TestNNX.test_law"),
    ),
    "integrations.jax.ring_attention_state": Integration(
        "JAX arrays, in `jax.shard_map`, on every device", "`jax.jit`", "in reverse mode",
        (f"{_SHARDED}:TestJAX.test_eight_devices", f"{_SHARDED}:TestJAX.test_one_device"),
    ),
    "integrations.torch.LawModule": Integration(
        "a law, whose parameters are on every device", "`torch.compile`", "all",
        ("test_torch.py:TestGraphs.test_parameters_and_buffers_of_modules_compile",
         f"{_TORCH}:TestLearnableLaw.test_gradient"),
    ),
    "integrations.torch.MultiheadAttention": Integration(
        "PyTorch tensors, on every device", "`torch.compile`", "as `attention`",
        (f"{_TORCH}:TestCompile.test_few_graphs_for_many_lengths",
         f"{_TORCH}:TestAgainstTorch.test_outputs_weights_and_gradients"),
    ),
    "integrations.torch.distributed_attention_state": Integration(
        "PyTorch tensors, on the devices of a process group", "not tried", "first",
        (f"{_SHARDED}:TestTorch.test_four_processes", f"{_SHARDED}:TestTorch.test_one_process"),
    ),
    "integrations.torch.to_block_mask": Integration(
        "a mask", "`torch.compile`", "–",
        (f"{_FLEX}:TestMaskMod.test_arrays", f"{_FLEX}:TestBlockMask.test_compiles_again_only_for_other_kinds",
         f"{_FLEX}:TestBlockMask.test_is_made_inside_a_compiled_function"),
    ),
    "integrations.torch.observe": Integration(
        "a PyTorch module, on its device", "`torch.compile`; observed passes run eagerly",
        "none; the training step stays as it is",
        ("integrations/test_observe.py:TestMultiheadAttention.test_bits_of_the_step",
         f"{_HF}observe.py:TestStep.test_torch_compile"),
    ),
    "integrations.torch.announce_attention": Integration(
        "PyTorch tensors, on every device", "eagerly, in observed passes", "none",
        ("integrations/test_observe.py:TestAnnounce.test_no_graph_is_kept",),
    ),
    "integrations.sklearn.JLTransformer": Integration(
        "arrays of every library, as other estimators of scikit-learn with array API dispatch", "–", "–",
        ("integrations/test_sklearn.py:TestArrayAPI.test_arrays_of_other_libraries",),
    ),
    "integrations.huggingface.use": _of_models(
        "interface", "TestLaws.test_gradients_of_parameters", "TestLaws.test_compiled",
        compiled="`torch.compile`, after it", gradient="all; of laws too",
    ),
    "integrations.huggingface.observe": _of_models(
        "observe", "TestStep.test_bits_of_loss_and_gradients", "TestStep.test_torch_compile",
        compiled="`torch.compile`; observed passes run eagerly",
        gradient="none; the training step stays as it is",
    ),
    "integrations.huggingface.calibrate": _of_models("calibrate", "test_laws_and_report"),
    "integrations.huggingface.quantized_cache": _of_models("cache", "test_generation"),
    "integrations.huggingface.profile": _of_models("interface", "TestPositions.test_profile"),
    "integrations.huggingface.tune": _of_models(
        "tune", "test_lowers_the_loss_beyond_the_length_alone", gradient="it takes them, of laws alone"
    ),
    "integrations.huggingface.laws_of": _of_models("saving", "TestSaved.test_saved_again"),
    "plots.attention": _plot("arrays of every library", "TestAttention.test_map_and_entropies"),
    "plots.distortion": _plot("a report", "TestDistortion.test_histogram_and_theory"),
    "plots.drift": _plot("a report", "TestDrift.test_colors_are_slopes"),
    "plots.entropy": _plot("a report", "TestEntropy.test_lines"),
}  # fmt: skip


def bare(name: str) -> str:
    """The name without its module. That of a method keeps its class."""
    return re.sub(r"^([a-z_]+\.)+", "", name)


_ROW_OF_CALLS = {bare(name): row for name, row in ROWS.items()}


def row_of(call: str) -> Row:
    """The row of the function that a call of `cases` is of: its name up to the hyphen."""
    return _ROW_OF_CALLS[call.partition("-")[0]]


def that_run(column: str, calls: dict) -> list[str]:
    """The names of those of the `calls` that run there."""
    return sorted(name for name in calls if getattr(row_of(name), column).runs)

"""What PyTorch's backends have to know about the tensors of a call, beside its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from isentropic._loops import is_differentiated, is_transformed, is_watched
from isentropic._namespace import imported_torch
from isentropic._records import Record
from isentropic.masks import Frame

# Why kernels of PyTorch do not compute a call whose `is_transformed` is true.
TRANSFORMED = "some array is within a transformation of torch.func, or has a forward-mode derivative"
# For tensors of up to this size a checksum by NumPy takes more time to start than to read the numbers.
_TINY = 2**14


class TorchFacts(Record):
    """What follows from the signature of a call, as its plan does. It holds no tensors of users."""

    is_on_accelerator: bool  # whether the device is not the CPU
    is_transformed: bool  # whether torch.func transforms the call, or it has forward-mode derivatives
    is_bias_differentiated: bool
    has_plain_tensors: bool  # whether all arrays are PyTorch's own tensors, and no mode watches them
    has_other_operations: bool  # whether the class of some tensor defines PyTorch's operations anew
    fits_sdpa: bool  # whether query, key and value fit the kernel, up to a missing batch axis
    is_tiny: bool  # whether query, key and value are small tensors of one shape, without gradients
    kernel_factors: Any  # the plan's, as (1, 1, L, 1); None if it has none, or not `fits_sdpa`

    def settings(self) -> tuple[bool, ...] | None:
        """The settings of PyTorch on which the choice of the backend depends: the kernels of a GPU.

        `torch.nn.attention.sdpa_kernel` changes them.
        """
        if not self.is_on_accelerator:
            return None
        from torch.backends import cuda

        return (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            cuda.math_sdp_enabled(),
        )


def torch_facts(
    frame: Frame,
    batch: tuple[int, ...],
    compute: Any,
    multiplier: Any,
    inputs: Sequence[Any],
    bias: Any,
    arrays: Sequence[Any],
) -> TorchFacts:
    """The facts about query, key and value (`inputs`), the bias, and all tensors of a call."""
    xp, is_eager = cast(Any, frame.xp), not frame.is_compiling
    kinds = {type(x) for x in arrays}
    usual = xp.Tensor.__torch_dispatch__
    fits_sdpa = is_eager and _fits_sdpa(batch, compute, inputs)
    has_factors = multiplier is not None and not isinstance(multiplier, float)
    return TorchFacts(
        is_on_accelerator=frame.device.type != "cpu",
        is_transformed=any(is_transformed(xp, x) for x in arrays),
        is_bias_differentiated=bias is not None and is_differentiated(xp, bias),
        has_plain_tensors=is_eager
        and not is_watched(imported_torch())
        and kinds <= {xp.Tensor, xp.nn.Parameter},
        has_other_operations=is_eager and any(x.__torch_dispatch__ is not usual for x in kinds),
        fits_sdpa=fits_sdpa,
        is_tiny=is_eager and _is_tiny(inputs) and not any(is_differentiated(xp, x) for x in arrays),
        kernel_factors=multiplier[None, None] if fits_sdpa and has_factors else None,
    )


def _fits_sdpa(batch: tuple[int, ...], compute: Any, inputs: Sequence[Any]) -> bool:
    width = inputs[0].shape[-1]
    are_alike = all(
        x.dtype == compute and x.shape[:-2] == batch and x.shape[-1] == width for x in inputs
    )
    return are_alike and len(batch) in (1, 2)


def _is_tiny(inputs: Sequence[Any]) -> bool:
    return len(inputs) == 3 and inputs[0].numel() <= _TINY and len({x.shape for x in inputs}) == 1


def is_batched(gradient: Any) -> bool:
    """Whether it is one of several gradients at once (``is_grads_batched``)."""
    import torch

    return gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient)

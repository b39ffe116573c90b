"""What PyTorch's backends have to know about the tensors of a call, beside its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from isentropic._loops import is_differentiated, is_transformed, is_watched
from isentropic._namespace import imported_torch
from isentropic._records import Record
from isentropic.masks import Frame

# Why kernels of PyTorch do not compute a call whose `is_transformed` is true.
TRANSFORMED = "some array is within a transformation of torch.func, or has a forward-mode derivative"


class TorchFacts(Record):
    """What follows from the signature of a call, as its plan does. It holds no tensors of users."""

    is_on_accelerator: bool  # whether the device is not the CPU
    is_transformed: bool  # whether torch.func transforms the call, or it has forward-mode derivatives
    is_bias_differentiated: bool
    has_plain_tensors: bool  # whether all arrays are PyTorch's own tensors, and no mode watches them
    has_other_operations: bool  # whether the class of some tensor defines PyTorch's operations anew

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


def torch_facts(frame: Frame, bias: Any, arrays: Sequence[Any]) -> TorchFacts:
    """The facts about the bias and all tensors of a call."""
    xp, is_eager = cast(Any, frame.xp), not frame.is_compiling
    kinds = {type(x) for x in arrays}
    usual = xp.Tensor.__torch_dispatch__
    return TorchFacts(
        is_on_accelerator=frame.device.type != "cpu",
        is_transformed=any(is_transformed(xp, x) for x in arrays),
        is_bias_differentiated=bias is not None and is_differentiated(xp, bias),
        has_plain_tensors=is_eager
        and not is_watched(imported_torch())
        and kinds <= {xp.Tensor, xp.nn.Parameter},
        has_other_operations=is_eager and any(x.__torch_dispatch__ is not usual for x in kinds),
    )


def wants_gradient(x: Any) -> bool:
    """Whether an input of a function of PyTorch's autograd, or None, needs a gradient."""
    return x is not None and x.requires_grad


def is_recorded(upstream: Sequence[Any]) -> bool:
    """Whether PyTorch must record all operations of a gradient.

    It must for a second derivative, and for several gradients at once (``is_grads_batched``).
    """
    import torch

    is_batched = torch._C._functorch.is_legacy_batchedtensor
    return torch.is_grad_enabled() or any(x is not None and is_batched(x) for x in upstream)


def recorded_gradients(
    function: Callable[[], Sequence[Any]], inputs: Sequence[Any], upstream: Sequence[Any]
) -> list[Any]:
    """The gradients of the inputs of ``function()``, such that they have derivatives themselves.

    The function computes its results from the inputs by operations that PyTorch records. `upstream`
    holds the gradients of the results. All may be None.
    """
    import torch

    options = {"create_graph": torch.is_grad_enabled(), "allow_unused": True}
    with torch.enable_grad():
        pairs = zip(function(), upstream, strict=True)
    # `torch.autograd.grad` refuses results without a gradient: a maximum, if only the values have one.
    used = [(x, g) for x, g in pairs if g is not None and x.requires_grad]
    results, grads = zip(*used, strict=True) if used else ((), ())
    found = iter(torch.autograd.grad(results, list(filter(wants_gradient, inputs)), grads, **options))
    return [next(found) if wants_gradient(x) else None for x in inputs]

"""Mixture-of-experts MLP: each token goes through its chosen experts, whose results are summed with the router's weights.

Expert numbers outside [0, E) contribute nothing: padding tokens, experts on other ranks. Results are deterministic: tokens are sorted
stably by expert, and each token gathers its rows in the order of its choices, so nothing is added atomically.

Backward needs the pre-activations. Their buffer has a row for every choice of every token, also for those whose expert is elsewhere: over 8
ranks that see each other's tokens, eight times the rows that are used. It is kept, or made again by one more product.
"""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from kernels import launch
from kernels.experts.adapters import experts_grouped_mm, experts_loop
from kernels.experts.cpu import experts_cpu
from kernels.experts.reference import experts_reference

IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, str, bool], Tensor]] = {
    "reference": experts_reference, "cpu": experts_cpu, "grouped_mm": experts_grouped_mm, "loop": experts_loop}
if importlib.util.find_spec("triton"):
    from kernels.experts.grouped import grouped_gemm as grouped_gemm
    from kernels.experts.triton import experts_triton

    IMPLEMENTATIONS["triton"] = experts_triton


def experts(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor, *, activation: str,
            keep_hidden: bool = True, implementation: str = "auto") -> Tensor:
    """Weighted sum over each token's experts of down act(up x). [T, D]

    :param ids_TK: int64, the chosen experts; those outside [0, E) contribute nothing
    :param weights_TK: the router's weights, fp32 or wider
    :param up_EFD: [E, F, D]; for swiglu [E, 2F, D], gate rows before up rows. "triton" also takes fp32 weights beside 16-bit tokens, and
        then returns their gradients as it accumulated them, in fp32
    :param activation: relu2 | swiglu
    :param keep_hidden: the pre-activations until backward; "cpu" and "triton" can compute them again instead
    :param implementation: auto | a key of IMPLEMENTATIONS
    """
    if implementation == "auto":
        implementation = _automatic(x_TD)
    return IMPLEMENTATIONS[implementation](x_TD, ids_TK, weights_TK, up_EFD, down_EDF, activation, keep_hidden)


def _automatic(x_TD: Tensor) -> str:
    if launch.serves(x_TD, IMPLEMENTATIONS):
        return "triton"
    if x_TD.device.type == "cpu":
        return "cpu"
    return "reference" if x_TD.dtype == torch.float64 else "grouped_mm"

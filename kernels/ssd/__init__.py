"""The scan of Mamba-2 over a packed row, by state-space duality (Dao & Gu 2024).

Each head has one decay rate, a group of heads shares B and C, and every document starts from a state of zero:

    state_t = exp(dt_t a) state_{t-1} + dt_t x_t B_tᵀ        y_t = state_t C_t + d x_t
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from kernels.activation import widen
from kernels.ssd.cpu import ssd_chunked
from kernels.ssd.reference import ssd_reference

IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]] = {
    "reference": ssd_reference, "chunked": ssd_chunked}


def ssd(x_TNH: Tensor, dt_TN: Tensor, a_N: Tensor, b_TGS: Tensor, c_TGS: Tensor, d_N: Tensor, segments_T: Tensor, *, chunk: int,
        dt_bias_N: Tensor | None = None, dt_softplus: bool = True, dt_limit: tuple[float, float] = (0.0, float("inf")),
        implementation: str = "auto") -> Tensor:
    """y in x's dtype; step sizes, decays and states are fp32 (fp64 for fp64 inputs). [T, N, H]

    :param dt_TN: the step sizes are clamp(softplus(dt + dt_bias), *dt_limit)
    :param a_N: decay rates, negative
    :param b_TGS: head n reads group n // (N / G)
    :param segments_T: document number of each token, non-decreasing
    :param chunk: tokens whose interaction is computed directly; further ones go through the state
    :param implementation: auto | a key of IMPLEMENTATIONS
    """
    run = IMPLEMENTATIONS["chunked" if implementation == "auto" else implementation]
    dt_TN = widen(dt_TN)
    if dt_bias_N is not None:
        dt_TN = dt_TN + widen(dt_bias_N)
    if dt_softplus:
        dt_TN = F.softplus(dt_TN)
    return run(x_TNH, dt_TN.clamp(*dt_limit), widen(a_N), b_TGS, c_TGS, widen(d_N), segments_T, chunk)

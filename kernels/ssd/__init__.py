"""The scan of Mamba-2 over a packed row, by state-space duality (Dao & Gu 2024).

Each head has one decay rate, a group of heads shares B and C, and every document starts from a state of zero, but for the first one, which
may continue from an initial state:

    state_t = exp(dt_t a) state_{t-1} + dt_t x_t B_tᵀ        y_t = (state_t C_t + d x_t) silu(z_t)
"""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import launch
from kernels.activation import widen
from kernels.ssd.adapters import ssd_mamba_ssm
from kernels.ssd.reference import ssd_reference
from kernels.ssd.states import ssd_chunked_with_states

IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "reference": ssd_reference, "chunked": ssd_chunked_with_states, "mamba_ssm": ssd_mamba_ssm}
if importlib.util.find_spec("triton"):
    from kernels.ssd.triton import ssd_triton

    IMPLEMENTATIONS["triton"] = ssd_triton


def ssd(x_TNH: Tensor, dt_TN: Tensor, a_N: Tensor, b_TGS: Tensor, c_TGS: Tensor, d_N: Tensor | None, segments_T: Tensor, *, chunk: int,
        dt_bias_N: Tensor | None = None, dt_softplus: bool = True, dt_limit: tuple[float, float] = (0.0, float("inf")),
        z_TNH: Tensor | None = None, initial_state_NHS: Tensor | None = None, state_dtype: torch.dtype | None = None,
        implementation: str = "auto") -> Tensor:
    """y in x's dtype; step sizes, decays and the states' sums are fp32 (fp64 for fp64 inputs). [T, N, H]

    :param dt_TN: the step sizes are clamp(softplus(dt + dt_bias), *dt_limit)
    :param a_N: decay rates, negative
    :param b_TGS: head n reads group n // (N / G)
    :param segments_T: document number of each token; every run of equal numbers is a document
    :param chunk: tokens whose interaction is computed directly, further ones go through the state; an upper bound for "triton"
    :param z_TNH: gate
    :param initial_state_NHS: of the document of token 0, fp32
    :param state_dtype: of the states that "triton" keeps in memory between spans and chunks; bf16 for bf16 inputs, else fp32, unless given
    :param implementation: auto | a key of IMPLEMENTATIONS
    """
    return _ssd(x_TNH, dt_TN, a_N, b_TGS, c_TGS, d_N, segments_T, chunk, dt_bias_N, dt_softplus, dt_limit, z_TNH, initial_state_NHS,
                state_dtype, implementation, False)[0]


def ssd_with_state(x_TNH: Tensor, dt_TN: Tensor, a_N: Tensor, b_TGS: Tensor, c_TGS: Tensor, d_N: Tensor | None, segments_T: Tensor, *,
                   chunk: int, dt_bias_N: Tensor | None = None, dt_softplus: bool = True,
                   dt_limit: tuple[float, float] = (0.0, float("inf")), z_TNH: Tensor | None = None,
                   initial_state_NHS: Tensor | None = None, state_dtype: torch.dtype | None = None,
                   implementation: str = "auto") -> tuple[Tensor, Tensor]:
    """The same, and the state after the last token, fp32 [N, H, S]: the initial state of what continues the row."""
    y_TNH, state_NHS = _ssd(x_TNH, dt_TN, a_N, b_TGS, c_TGS, d_N, segments_T, chunk, dt_bias_N, dt_softplus, dt_limit, z_TNH,
                            initial_state_NHS, state_dtype, implementation, True)
    assert state_NHS is not None
    return y_TNH, state_NHS


def _ssd(x_TNH: Tensor, dt_TN: Tensor, a_N: Tensor, b_TGS: Tensor, c_TGS: Tensor, d_N: Tensor | None, segments_T: Tensor, chunk: int,
         dt_bias_N: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float], z_TNH: Tensor | None, initial_NHS: Tensor | None,
         state_dtype: torch.dtype | None, implementation: str, wants_state: bool) -> tuple[Tensor, Tensor | None]:
    if implementation == "auto":
        implementation = "triton" if launch.serves(x_TNH, IMPLEMENTATIONS) else "chunked"
    if state_dtype is None:
        state_dtype = torch.bfloat16 if x_TNH.dtype == torch.bfloat16 else torch.float32
    dt_TN, a_N = widen(dt_TN), widen(a_N)
    d_N = torch.zeros_like(a_N) if d_N is None else widen(d_N)
    if dt_bias_N is not None:
        dt_TN = dt_TN + widen(dt_bias_N)
    if dt_softplus:
        dt_TN = F.softplus(dt_TN)
    dt_TN = dt_TN.clamp(*dt_limit)
    initial_NHS = None if initial_NHS is None else widen(initial_NHS)
    y_TNH, state_NHS = IMPLEMENTATIONS[implementation](x_TNH, dt_TN, a_N, b_TGS, c_TGS, d_N, segments_T, initial_NHS, chunk, state_dtype,
                                                       wants_state)
    if z_TNH is not None:
        y_TNH = (widen(y_TNH) * F.silu(widen(z_TNH))).to(x_TNH.dtype)
    return y_TNH, state_NHS

"""The definition of the scan."""

import torch
from torch import Tensor

from kernels.activation import widen


def ssd_reference(x_TNH: Tensor, dt_TN: Tensor, a_N: Tensor, b_TGS: Tensor, c_TGS: Tensor, d_N: Tensor, segments_T: Tensor,
                  initial_NHS: Tensor | None, chunk: int, state_dtype: torch.dtype, wants_state: bool) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token."""
    heads = x_TNH.shape[1] // b_TGS.shape[1]
    x_TNH1, b_TN1S, c_TN1S = widen(x_TNH)[..., None], *(widen(t).repeat_interleave(heads, 1)[:, :, None] for t in (b_TGS, c_TGS))
    state_NHS = x_TNH1.new_zeros(*x_TNH.shape[1:], b_TGS.shape[2]) if initial_NHS is None else initial_NHS
    y = []
    for t in range(len(x_TNH)):
        if segments_T[t] != segments_T[max(t - 1, 0)]:
            state_NHS = torch.zeros_like(state_NHS)
        dt_N11 = dt_TN[t, :, None, None]
        state_NHS = torch.exp(dt_N11 * a_N[:, None, None]) * state_NHS + dt_N11 * x_TNH1[t] * b_TN1S[t]
        y.append((state_NHS * c_TN1S[t]).sum(-1) + d_N[:, None] * x_TNH1[t, :, :, 0])
    return (torch.stack(y).to(x_TNH.dtype) if y else x_TNH.clone()), state_NHS

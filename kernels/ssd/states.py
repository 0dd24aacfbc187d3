"""Initial and final states around a scan that begins with a state of zero: outputs are linear in the state."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import widen
from kernels.segments import documents
from kernels.ssd.cpu import ssd_chunked


def ssd_chunked_with_states(x_TNH: Tensor, dt_TN: Tensor, a_N: Tensor, b_TGS: Tensor, c_TGS: Tensor, d_N: Tensor, segments_T: Tensor,
                            initial_NHS: Tensor | None, chunk: int, state_dtype: torch.dtype,
                            wants_state: bool) -> tuple[Tensor, Tensor | None]:
    """States between chunks are of x's dtype, whatever state_dtype."""
    if not len(x_TNH):
        state_shape = (*x_TNH.shape[1:], b_TGS.shape[2])
        return x_TNH.clone(), a_N.new_zeros(state_shape) if initial_NHS is None else initial_NHS.clone()
    documents_T = documents(segments_T)
    y_TNH = ssd_chunked(x_TNH, dt_TN, a_N, b_TGS, c_TGS, d_N, documents_T, chunk)
    if initial_NHS is not None:
        y_TNH = (y_TNH + _outputs_of(initial_NHS, dt_TN, a_N, c_TGS, documents_T)).to(x_TNH.dtype)
    return y_TNH, _final_state(x_TNH, dt_TN, a_N, b_TGS, documents_T, initial_NHS) if wants_state else None


def _outputs_of(initial_NHS: Tensor, dt_TN: Tensor, a_N: Tensor, c_TGS: Tensor, documents_T: Tensor) -> Tensor:
    """What the first document's tokens read from the initial state. [T, N, H]"""
    first_T1 = (documents_T == 0)[:, None]
    decay_TN = torch.where(first_T1, torch.where(first_T1, dt_TN * a_N, 0).cumsum(0), -torch.inf).exp()
    read_TGRH = torch.einsum("tgs,grhs->tgrh", widen(c_TGS), initial_NHS.unflatten(0, (c_TGS.shape[1], -1)))
    return read_TGRH.flatten(1, 2) * decay_TN[..., None]


def _final_state(x_TNH: Tensor, dt_TN: Tensor, a_N: Tensor, b_TGS: Tensor, documents_T: Tensor, initial_NHS: Tensor | None) -> Tensor:
    """Decays are summed from the end of the row, so that those of the tokens that matter are exact. [N, H, S]"""
    last_T1 = (documents_T == documents_T[-1])[:, None]
    log_TN = torch.where(last_T1, dt_TN * a_N, 0)
    following_TN = F.pad(log_TN[1:], (0, 0, 0, 1)).flip(0).cumsum(0).flip(0)
    weight_TN = dt_TN * torch.where(last_T1, following_TN, -torch.inf).exp()
    weighted_TGRH = (widen(x_TNH) * weight_TN[..., None]).unflatten(1, (b_TGS.shape[1], -1))
    state_NHS = torch.einsum("tgrh,tgs->grhs", weighted_TGRH, widen(b_TGS)).flatten(0, 1)
    if initial_NHS is None:
        return state_NHS
    kept_N = torch.where(documents_T[-1] == 0, log_TN.sum(0), -torch.inf).exp()
    return state_NHS + initial_NHS * kept_N[:, None, None]

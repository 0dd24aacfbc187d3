"""Attention of other libraries."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen


def attention_varlen(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor, segments_T: Tensor, keys_2U: Tensor | None,
                     causal: bool, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """PyTorch's flash attention, which has no gradient of the logarithm and leaves rows without a document as the memory was.

    Here those rows are one more document, so that everything it returns has been computed, and are cleared afterwards.
    """
    if keys_2U is not None:
        raise ValueError("implementation varlen knows no ranges of keys: leave keys_2U out")
    rows = len(q_TNH)
    bounds = F.pad(cu_seqlens_U1, (0, 1), value=rows)
    reach = -1 if window is None else window - 1
    out_TNH, lse_NT = varlen.varlen_attn(q_TNH, k_SGH, v_SGH, bounds, bounds, rows, rows, return_aux=varlen.AuxRequest(lse=True),
                                         scale=scale, window_size=(reach, 0 if causal else reach), enable_gqa=True)
    real_T = segments_T < len(cu_seqlens_U1) - 1
    return torch.where(real_T[:, None, None], out_TNH, 0), torch.where(real_T, lse_NT.detach(), -torch.inf)

"""Relative attention on GPUs: attention's own kernels, whose bias is the part of the scores that depends on the distance.

That part is one product of all frames with all distances, N × A × (2 L - 1) numbers in memory; a kernel reads row i from the place where
its first key's distance stands, so that nothing is shifted, and its gradient is written back in the same manner.
"""

import torch
from torch import Tensor

from kernels.attention.triton import documents_attention
from kernels.ragged import Layout


def relative_attention_triton(q_ANH: Tensor, k_ANH: Tensor, v_ANH: Tensor, table_RNH: Tensor, bias_u_NH: Tensor, bias_v_NH: Tensor,
                              layout: Layout) -> Tensor:
    # where the places of utterances begin, those of unused ones too
    starts_U = torch.searchsorted(layout.segments_A, torch.arange(len(layout.lengths_U), device=q_ANH.device))
    ends_U = starts_U + layout.lengths_U
    position_NAR = torch.einsum("anh,rnh->nar", q_ANH + bias_v_NH, table_RNH)
    out_ANH, _ = documents_attention(q_ANH + bias_u_NH, k_ANH, v_ANH, position_NAR, starts_U, ends_U, starts_U, ends_U, False,
                                     q_ANH.shape[-1] ** -0.5, None)
    return out_ANH

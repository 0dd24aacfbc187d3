"""The scan of mamba-ssm."""

import torch
from torch import Tensor

from kernels.segments import documents


def ssd_mamba_ssm(x_TNH: Tensor, dt_TN: Tensor, a_N: Tensor, b_TGS: Tensor, c_TGS: Tensor, d_N: Tensor, segments_T: Tensor,
                  initial_NHS: Tensor | None, chunk: int, state_dtype: torch.dtype, wants_state: bool) -> tuple[Tensor, Tensor]:
    """Documents count from 0, because the library takes an initial state for document 0's. Its chunk states are fp32."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    initial_1NHS = None if initial_NHS is None else initial_NHS[None]
    y_1TNH, final_1NHS = mamba_chunk_scan_combined(
        x_TNH[None], dt_TN[None], a_N, b_TGS[None], c_TGS[None], chunk, D=d_N, initial_states=initial_1NHS,
        seq_idx=documents(segments_T).int()[None], dt_limit=(-float("inf"), float("inf")), return_final_states=True)
    return y_1TNH[0], final_1NHS[0]

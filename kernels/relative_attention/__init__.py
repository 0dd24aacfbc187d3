"""Attention with relative positions (Transformer-XL) among the frames of each utterance of a flat row; no frame sees another utterance.

Score of query i and key j: ((q_i + u) . k_j + (q_i + v) . p_(i - j)) / sqrt(H).
"""

import importlib.util
from collections.abc import Callable

from torch import Tensor

from kernels import launch
from kernels.ragged import Layout
from kernels.relative_attention.cpu import relative_attention_ragged
from kernels.relative_attention.reference import relative_attention_dense, relative_attention_reference

IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Layout], Tensor]] = {
    "reference": relative_attention_reference, "dense": relative_attention_dense, "ragged": relative_attention_ragged}

if importlib.util.find_spec("triton"):
    from kernels.relative_attention.triton import relative_attention_triton

    IMPLEMENTATIONS["triton"] = relative_attention_triton


def relative_attention(q_ANH: Tensor, k_ANH: Tensor, v_ANH: Tensor, table_RNH: Tensor, bias_u_NH: Tensor, bias_v_NH: Tensor,
                       layout: Layout, *, implementation: str = "auto") -> Tensor:
    """[A, N, H], zeros outside utterances. The softmax is in fp32.

    :param table_RNH: p for the distances L - 1, ..., -(L - 1) of query minus key, L = layout.frames
    :param bias_u_NH: u above; bias_v_NH is v
    :param implementation: auto | a key of IMPLEMENTATIONS
    """
    if implementation == "auto":
        implementation = "triton" if launch.serves(q_ANH, IMPLEMENTATIONS) else "ragged" if q_ANH.device.type == "cpu" else "dense"
    run = IMPLEMENTATIONS[implementation]
    return run(q_ANH, k_ANH, v_ANH, table_RNH, bias_u_NH, bias_v_NH, layout)

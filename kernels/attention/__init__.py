"""Softmax attention inside the documents of a packed row; a key and value head may serve several query heads."""

from collections.abc import Callable

from torch import Tensor

from kernels.attention.adapters import attention_varlen
from kernels.attention.cpu import attention_blocks
from kernels.attention.reference import attention_reference


def attention(q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, cu_seqlens_U1: Tensor, *, segments_T: Tensor, causal: bool = True,
              scale: float | None = None, window: int | None = None, implementation: str = "auto") -> tuple[Tensor, Tensor]:
    """softmax(scale q kᵀ) v [T, N, H] in q's dtype, and the natural logarithm of the softmax's denominator [N, T], fp32 or wider.

    Rows beyond the last document give 0, a logarithm of -inf, and no gradient.

    :param k_TGH: query head n reads key and value head n // (N / G)
    :param cu_seqlens_U1: document u owns rows cu_seqlens[u] : cu_seqlens[u + 1]
    :param segments_T: the same row by row: number of the row's document, U or more beyond the last
    :param causal: row i sees the rows j <= i of its document
    :param scale: 1 / sqrt(H) unless given
    :param window: row i sees the rows with |i - j| < window
    :param implementation: auto | a key of IMPLEMENTATIONS
    """
    if implementation == "auto":
        implementation = "blocks" if q_TNH.device.type == "cpu" else "reference"
    scale = q_TNH.shape[-1] ** -0.5 if scale is None else scale
    return IMPLEMENTATIONS[implementation](q_TNH, k_TGH, v_TGH, cu_seqlens_U1, segments_T, causal, scale, window)


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, bool, float, int | None], tuple[Tensor, Tensor]]] = {
    "reference": attention_reference, "blocks": attention_blocks, "varlen": attention_varlen}

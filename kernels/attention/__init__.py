"""Softmax attention inside the documents of a packed row; a key and value head may serve several query heads."""

import importlib.util
from collections.abc import Callable

from torch import Tensor

from kernels import launch
from kernels.attention.adapters import attention_flash, attention_transformer_engine, attention_varlen
from kernels.attention.cpu import attention_blocks, backward_blocks
from kernels.attention.reference import attention_reference, backward_reference

IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, bool, float, int | None],
                                    tuple[Tensor, Tensor]]] = {
    "reference": attention_reference, "blocks": attention_blocks, "varlen": attention_varlen, "flash": attention_flash,
    "transformer_engine": attention_transformer_engine}

BACKWARD: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, bool, float],
                             tuple[Tensor, Tensor, Tensor]]] = {"reference": backward_reference, "blocks": backward_blocks}

if importlib.util.find_spec("triton"):
    from kernels.attention.triton import attention_triton, backward_triton

    IMPLEMENTATIONS["triton"], BACKWARD["triton"] = attention_triton, backward_triton


def attention(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor, *, segments_T: Tensor, keys_2U: Tensor | None = None,
              causal: bool = True, scale: float | None = None, window: int | None = None,
              implementation: str = "auto") -> tuple[Tensor, Tensor]:
    """softmax(scale q kᵀ) v [T, N, H] in q's dtype, and the natural logarithm of the softmax's denominator [N, T], fp32 or wider.

    Rows that see no key, like those beyond the last document, give 0, a logarithm of -inf, and no gradient.

    :param k_SGH: query head n reads key and value head n // (N / G); S is T unless keys_2U is given
    :param cu_seqlens_U1: document u owns rows cu_seqlens[u] : cu_seqlens[u + 1]; the first is 0
    :param segments_T: the same row by row: number of the row's document, U or more beyond the last
    :param keys_2U: document u sees rows keys[0, u] : keys[1, u] of k and v, its own unless given; its last row sits at the last of them.
        Neither bound may decrease from one document to the next; ranges may overlap.
    :param causal: a row sees no key behind the one at which it sits
    :param scale: 1 / sqrt(H) unless given
    :param window: a row sees the keys less than this away from the one at which it sits
    :param implementation: auto | a key of IMPLEMENTATIONS
    """
    scale = q_TNH.shape[-1] ** -0.5 if scale is None else scale
    return IMPLEMENTATIONS[_chosen(implementation, q_TNH)](q_TNH, k_SGH, v_SGH, cu_seqlens_U1, segments_T, keys_2U, causal, scale, window)


def attention_backward(dout_TNH: Tensor, q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, out_TNH: Tensor, lse_NT: Tensor,
                       cu_seqlens_U1: Tensor, *, segments_T: Tensor, keys_2U: Tensor | None = None, causal: bool = True,
                       scale: float | None = None, implementation: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of the result over these keys and others; those of q add up over all keys.

    :param out_TNH: the result over all keys, and lse_NT its logarithms
    :param scale: above 0
    """
    scale = q_TNH.shape[-1] ** -0.5 if scale is None else scale
    backward = BACKWARD[_chosen(implementation, q_TNH)]
    return backward(dout_TNH, q_TNH, k_SGH, v_SGH, out_TNH, lse_NT, cu_seqlens_U1, segments_T, keys_2U, causal, scale)


def _chosen(implementation: str, q_TNH: Tensor) -> str:
    if implementation != "auto":
        return implementation
    return "triton" if launch.serves(q_TNH, IMPLEMENTATIONS) else "blocks" if q_TNH.device.type == "cpu" else "reference"

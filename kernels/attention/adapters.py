"""Attention of other libraries, where they are installed."""

import importlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor


def attention_varlen(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor, segments_T: Tensor, keys_2U: Tensor | None,
                     causal: bool, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """PyTorch's flash attention, which has no gradient of the logarithm and leaves rows without a document as the memory was.

    Here those rows are one more document, so that everything it returns has been computed, and are cleared afterwards.
    """
    _refuse_ranges("varlen", keys_2U)
    varlen = importlib.import_module("torch.nn.attention.varlen")  # brings the compiler along: seconds
    rows, bounds, sides = len(q_TNH), _with_padding(cu_seqlens_U1, len(q_TNH)), _sides(causal, window)
    out_TNH, lse_NT = varlen.varlen_attn(q_TNH, k_SGH, v_SGH, bounds, bounds, rows, rows, return_aux=varlen.AuxRequest(lse=True),
                                         scale=scale, window_size=sides, enable_gqa=True)
    return _cleared(out_TNH, lse_NT, cu_seqlens_U1, segments_T)


def attention_flash(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor, segments_T: Tensor, keys_2U: Tensor | None,
                    causal: bool, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """The flash-attn package; the padding is one more document, as for PyTorch's."""
    _refuse_ranges("flash", keys_2U)
    flash_attn = importlib.import_module("flash_attn")
    rows, bounds = len(q_TNH), _with_padding(cu_seqlens_U1, len(q_TNH))
    out_TNH, lse_NT, _ = flash_attn.flash_attn_varlen_func(
        q_TNH, k_SGH, v_SGH, bounds, bounds, rows, rows, softmax_scale=scale, causal=causal, window_size=_sides(causal, window),
        deterministic=True, return_attn_probs=True)
    return _cleared(out_TNH, lse_NT, cu_seqlens_U1, segments_T)


def attention_transformer_engine(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor, segments_T: Tensor,
                                 keys_2U: Tensor | None, causal: bool, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """Transformer Engine's choice of cuDNN or flash attention, which keeps the logarithm to itself: here it is NaN."""
    _refuse_ranges("transformer_engine", keys_2U)
    if reason := known_bad_transformer_engine(torch.cuda.get_device_capability(q_TNH.device), torch.backends.cudnn.version() or 0,
                                              q_TNH.shape[-1]):
        raise NotImplementedError(f"transformer_engine: {reason}")
    engine = importlib.import_module("transformer_engine.pytorch")
    rows, bounds = len(q_TNH), _with_padding(cu_seqlens_U1, len(q_TNH))
    module = engine.DotProductAttention(
        q_TNH.shape[1], q_TNH.shape[2], num_gqa_groups=k_SGH.shape[1], attention_dropout=0.0, qkv_format="thd", softmax_scale=scale,
        attn_mask_type="padding_causal" if causal else "padding", window_size=_sides(causal, window))
    out_TN_H = module(q_TNH, k_SGH, v_SGH, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=rows, max_seqlen_kv=rows)
    lse_NT = q_TNH.new_full((q_TNH.shape[1], rows), math.nan, dtype=torch.float32)
    return _cleared(out_TN_H.view_as(q_TNH), lse_NT, cu_seqlens_U1, segments_T)


def known_bad_transformer_engine(capability: tuple[int, int], cudnn: int, head_size: int) -> str:
    """Why its packed attention is known to give wrong gradients here, silently; empty if it is not. `cudnn` counts as PyTorch does."""
    version = f"cuDNN {cudnn // 10_000}.{cudnn // 100 % 100}"
    if capability[0] == 12:
        return "gradients of packed attention are wrong on sm_120 (TransformerEngine#3333)"
    if cudnn < 91_800:
        return f"{version} gives NaN gradients of packed documents, 9.18 the first that does not (TransformerEngine#2186)"
    if cudnn // 100 == 926:
        return f"{version} gives NaN gradients of documents of one row (cudnn-frontend#1072)"
    if head_size not in (64, 128, 256):
        return f"heads of {head_size}: {version} is known to be right for 64, 128 and 256 alone (TransformerEngine#3249)"
    return ""


def _refuse_ranges(implementation: str, keys_2U: Tensor | None) -> None:
    if keys_2U is not None:
        raise NotImplementedError(f"implementation {implementation} knows no ranges of keys: leave keys_2U out")


def _with_padding(cu_seqlens_U1: Tensor, rows: int) -> Tensor:
    """Boundaries with the rows beyond the last document as one more."""
    return F.pad(cu_seqlens_U1, (0, 1), value=rows)


def _sides(causal: bool, window: int | None) -> tuple[int, int]:
    """How many keys to the left and to the right a row sees, -1 for all."""
    reach = -1 if window is None else window - 1
    return reach, 0 if causal else reach


def _cleared(out_TNH: Tensor, lse_NT: Tensor, cu_seqlens_U1: Tensor, segments_T: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros and -inf where there is no document; no gradient goes through the logarithm."""
    real_T = segments_T < len(cu_seqlens_U1) - 1
    return torch.where(real_T[:, None, None], out_TNH, 0), torch.where(real_T, lse_NT.detach(), -torch.inf)

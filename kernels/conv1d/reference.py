"""The definition of the convolutions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import widen


def conv1d_reference(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, segments_T: Tensor, activation: str | None,
                     ahead: int) -> Tensor:
    """One convolution of the library a document; the last `ahead` taps read later rows."""
    channels, width = weight_CW.shape
    weight, bias = widen(weight_CW)[:, None], None if bias_C is None else widen(bias_C)
    pieces = []
    for x in widen(x_TC).split(torch.unique_consecutive(segments_T, return_counts=True)[1].tolist()):
        pieces.append(F.conv1d(F.pad(x.T, (width - 1 - ahead, ahead)), weight, bias, groups=channels).T)
    z_TC = torch.cat(pieces)
    return (F.silu(z_TC) if activation == "silu" else z_TC).to(x_TC.dtype)

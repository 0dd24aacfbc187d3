"""Experts as their definition says."""

import torch
from torch import Tensor

from kernels.activation import activate, widen


def experts_reference(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor, activation: str,
                      keep_hidden: bool = True) -> Tensor:
    """All experts on all tokens, those that a token did not choose weighted by 0."""
    n_experts = up_EFD.shape[0]
    chosen_TKE = ids_TK[..., None] == torch.arange(n_experts, device=ids_TK.device)
    weights_TE = torch.einsum("tk,tke->te", weights_TK, chosen_TKE.to(weights_TK.dtype))
    h_TEF = activate(torch.einsum("td,efd->tef", x_TD, up_EFD), activation)
    y_TED = torch.einsum("tef,edf->ted", h_TEF, down_EDF)
    return torch.einsum("ted,te->td", widen(y_TED), weights_TE).to(x_TD.dtype)

"""Head and loss of other libraries, where they are installed."""

import importlib

import torch.nn.functional as F
from torch import Tensor

from kernels.activation import widen


def linear_cross_entropy_torch(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int | None, ignore_index: int,
                               label_smoothing: float, z_loss: float, soft_cap: float | None) -> tuple[Tensor, Tensor]:
    """PyTorch's loss on all logits in fp32."""
    if z_loss or soft_cap is not None:
        raise NotImplementedError("F.cross_entropy has neither z-loss nor a cap of the logits")
    loss = F.cross_entropy(widen(F.linear(h_TD, weight_VD)), labels_T, ignore_index=ignore_index, reduction="sum",
                           label_smoothing=label_smoothing)
    return loss, (labels_T != ignore_index).sum()


def linear_cross_entropy_liger(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int | None, ignore_index: int,
                               label_smoothing: float, z_loss: float, soft_cap: float | None) -> tuple[Tensor, Tensor]:
    """Liger's fused loss, which chooses its own chunk."""
    liger = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    loss = liger.LigerFusedLinearCrossEntropyLoss(ignore_index=ignore_index, lse_square_scale=z_loss, label_smoothing=label_smoothing,
                                                  reduction="sum", softcap=soft_cap)
    return loss(weight_VD, h_TD, labels_T), (labels_T != ignore_index).sum()

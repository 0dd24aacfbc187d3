"""Cross-entropy of a vocabulary projection, a block of rows at a time, so that the logits [T, V] never exist.

The forward computes the gradients of h and of the weight along with the loss, while a block's logits are at hand, and the backward
scales them by the gradient of the loss: three products instead of the four that recomputing the logits would take.
"""

import importlib.util
from collections.abc import Callable

from torch import Tensor

from kernels.linear_cross_entropy.adapters import linear_cross_entropy_liger, linear_cross_entropy_torch
from kernels.linear_cross_entropy.cpu import linear_cross_entropy_chunked
from kernels.linear_cross_entropy.reference import linear_cross_entropy_reference

IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, int | None, int, float, float, float | None], tuple[Tensor, Tensor]]] = {
    "reference": linear_cross_entropy_reference, "chunked": linear_cross_entropy_chunked, "torch": linear_cross_entropy_torch,
    "liger": linear_cross_entropy_liger}
if importlib.util.find_spec("triton"):
    from kernels.linear_cross_entropy.triton import linear_cross_entropy_triton

    IMPLEMENTATIONS["triton"] = linear_cross_entropy_triton


def linear_cross_entropy(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *, chunk: int | None = None, ignore_index: int = -100,
                         label_smoothing: float = 0.0, z_loss: float = 0.0, soft_cap: float | None = None,
                         implementation: str = "auto") -> tuple[Tensor, Tensor]:
    """Sum over the labelled rows of the cross-entropy of logits h weightᵀ, and the number of such rows (int64).

    The sum is fp32 (fp64 for fp64 inputs), and so are softmax and loss inside.

    :param labels_T: int64, in [0, V) or ignore_index
    :param chunk: rows whose logits exist at a time; by default the implementation's choice
    :param label_smoothing: share of the target that is spread evenly over the vocabulary
    :param z_loss: weight of logsumexp(logits)²
    :param soft_cap: logits become soft_cap tanh(logits / soft_cap)
    :param implementation: auto | a key of IMPLEMENTATIONS
    """
    if implementation == "auto":
        served = h_TD.device.type == "cuda" and "triton" in IMPLEMENTATIONS
        implementation = "triton" if served else "chunked" if h_TD.device.type == "cpu" else "reference"
    return IMPLEMENTATIONS[implementation](h_TD, weight_VD, labels_T, chunk, ignore_index, label_smoothing, z_loss, soft_cap)

"""Expert parallelism: tokens travel to the ranks that hold their experts, and the results travel back.

All-gather dispatch: every rank sees the tokens of its group and computes the part that its own experts contribute; the parts are
summed on the way back. All shapes are static, nothing syncs with the host, and both directions are one collective.
"""

from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.collectives import all_gather_grad, all_gather_start, reduce_scatter_grad, wait


def dispatch(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, n_local: int, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens, expert numbers and router weights of all ranks of `group`, one rank after the other.

    Returned expert numbers count from this rank's first of `n_local` experts; those outside [0, n_local) are computed elsewhere.
    """
    x = all_gather_grad(x_TD.contiguous(), group)
    weights = all_gather_grad(weights_TK.contiguous(), group)
    ids = wait(all_gather_start(ids_TK.contiguous(), group))
    return x, ids - group.rank() * n_local, weights


def combine(y: Tensor, group: ProcessGroup) -> Tensor:
    """Sum of all ranks' contributions to this rank's own tokens."""
    return reduce_scatter_grad(y.contiguous(), group)

"""How to tell the compiler what it cannot see."""

from torch import Tensor


def stored(x: Tensor) -> Tensor:
    """x, computed once and written to memory in its own order. Takes no gradient: for use inside autograd functions.

    Inductor computes a pointwise x anew in every kernel that reads it, and in the order in which it is read: shifted or transposed
    reads then repeat the work, the transposed ones without vector instructions.
    """
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())

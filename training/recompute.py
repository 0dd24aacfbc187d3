"""Activation checkpointing: what a layer computed in forward is not kept but computed again when backward comes to it.

The wrapped function is compiled or run eagerly like any other. Compiled, the marks become part of its graph, whose partitioner keeps what
the policy wants kept; eagerly, PyTorch's checkpoint drops and computes again. Weights that are gathered for a layer's forward are inputs
here, so they go and come again by the same hooks as without this (parallel.gather.Use).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from parallel.names import kept_share

# A second choice could differ from the first where experts are nearly tied, and the gradient would belong to another function.
CHOICES = ("topk", "sort", "argsort")
# Operators that "selective" keeps: what travels between ranks, and kernels that take long for the size of their result. Experts are not
# among them: their backward needs none of their results, it computes the pre-activations itself (training.step.keeps_hidden).
COLLECTIVES = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
KERNELS = ("attention", "relative_attention", "ssd", "deepep", "hand_on")

Function = Callable[..., Any]


def kept(policy: str, operator: Any) -> bool:
    """Whether the results of an operator stay until backward."""
    namespace, _, name = operator.name().partition("::")
    name = name.partition(".")[0]
    if name in CHOICES:
        return True
    return policy != "full" and (namespace in COLLECTIVES or (namespace == "reedling" and name.startswith(KERNELS)))


def _decide(policy: str, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if kept(policy, operator):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE if kept_share(policy) is None else CheckpointPolicy.PREFER_SAVE


def within_budget(compiled: Function, share: float) -> Function:
    """A compiled function whose partitioner keeps that share of what it would keep beyond the inputs, and computes the rest again."""
    def run(*arguments: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=share):  # it compiles when it is called
            return compiled(*arguments)

    return run


@functools.cache
def recomputed(fn: Function, policy: str) -> Function:
    """`fn(weights, *inputs)`, of which backward computes again what the policy, selective, full or a number, does not keep."""
    contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(_decide, policy))

    def run(w: Any, *inputs: Any) -> Any:
        leaves, tree = pytree.tree_flatten(w)

        def whole(inputs: Sequence[Any], *leaves: Any) -> Any:
            return fn(pytree.tree_unflatten(leaves, tree), *inputs)

        return checkpoint(whole, inputs, *leaves, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    return run

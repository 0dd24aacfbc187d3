"""AdamW on local shards in torch.optim's functional form, the schedule, and the global gradient norm."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from configs.schema import OptimizerConfig
from kernels.activation import widen
from parallel.collectives import sum_over_ranks


def learning_rate(step: int, cfg: OptimizerConfig, steps: int) -> float:
    """Learning rate of the update number `step` (from 0) out of `steps`: linear warm-up, then a cosine down to `min_lr`.

    NeMo's CosineAnnealing: lr (step + 1) / (warmup + 1) while warming up, afterwards
    min_lr + (lr - min_lr) (1 + cos(pi (step - warmup) / (steps - warmup))) / 2, and min_lr beyond the end.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / (cfg.warmup_steps + 1)
    if step >= steps:
        return cfg.min_lr
    progress = (step - cfg.warmup_steps) / max(1, steps - cfg.warmup_steps)
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def global_norm(grads: Mapping[str, Tensor], copies: Mapping[str, int], zero: Tensor) -> Tensor:
    """Euclidean norm over all parameters and ranks, a scalar like `zero`, which stands for a rank without any.

    The squares of this rank's shards are summed over the world, whatever mesh each parameter lives on; a shard of which the world has
    several copies counts by its share, so that each element counts once.
    """
    names = [name for name, grad in grads.items() if grad.numel()]
    if not names:
        return sum_over_ranks(zero.clone()).sqrt()
    squares = torch._foreach_pow(torch._foreach_norm([grads[name] for name in names]), 2)
    torch._foreach_mul_(squares, [1 / copies[name] for name in names])  # numbers, which a device gets without waiting
    return sum_over_ranks(torch.stack(squares).sum().to(zero.device)).sqrt()


def clipping_divisor(norm: Tensor, limit: float) -> Tensor | None:
    """What gradients of this global norm are divided by so that it is at most `limit`; None where that is 0, which leaves them."""
    return ((norm + 1e-6) / limit).clamp(min=1.0) if limit > 0 else None


def divide(grads: list[Tensor], divisor: Tensor | None) -> None:
    """In place; None leaves them."""
    if divisor is not None and grads:
        torch._foreach_div_(grads, divisor.to(grads[0].device))


def update(params: Mapping[str, Tensor], grads: Mapping[str, Tensor], first: Mapping[str, Tensor], second: Mapping[str, Tensor],
           step: int | Tensor, lr: float | Tensor, cfg: OptimizerConfig, decayed: set[str], divisor: Tensor | None = None) -> None:
    """One AdamW update (Loshchilov & Hutter 2019) of the local shards, in place.

    `step` counts from 0; the names in `decayed` get weight decay. It computes in fp32, or wider, whatever the tensors are stored in.
    On a GPU `step` and `lr` may be fp32 scalars there.

    :param divisor: of the gradients, in fp32, for which they need no pass of their own
    """
    for names in _together(params, first, decayed):
        wide = [[widen(tensors[name]) for name in names] for tensors in (params, first, second)]
        steps = list((torch.zeros(len(names), device=params[names[0]].device) + step).unbind())
        aligned = [grads[n].contiguous() for n in names]  # the fused kernel walks through memory and ignores strides
        adamw(wide[0], aligned, wide[1], wide[2], [], steps, fused=True, amsgrad=False, beta1=cfg.betas[0], beta2=cfg.betas[1], lr=lr,
              weight_decay=cfg.weight_decay if names[0] in decayed else 0.0, eps=cfg.eps, maximize=False, grad_scale=divisor)
        for tensors, found in zip((params, first, second), wide, strict=True):
            for name, t in zip(names, found, strict=True):
                if t is not tensors[name]:
                    tensors[name].copy_(t)


def _together(params: Mapping[str, Tensor], first: Mapping[str, Tensor], decayed: set[str]) -> Iterator[list[str]]:
    """Names that are updated at once: those with and those without decay, and alone what is widened for the time."""
    for decay in (True, False):
        names = [n for n in params if (n in decayed) == decay and params[n].numel()]
        wide = [n for n in names if min(params[n].element_size(), first[n].element_size()) >= 4]
        yield from ([n] for n in names if n not in set(wide))
        if wide:
            yield wide

"""The scan chunk by chunk, in products that CPUs run fast."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import widen
from kernels.inductor import stored, sum_rows


def ssd_chunked(x_TNH: Tensor, dt_TN: Tensor, a_N: Tensor, b_TGS: Tensor, c_TGS: Tensor, d_N: Tensor, segments_T: Tensor,
                chunk: int) -> Tensor:
    """Tokens of one chunk interact directly, those of earlier chunks through the state that is carried into the chunk.

    Letters of this file: L chunks, Q tokens a chunk, R heads a group, X = R * H. Products run in x's dtype, one a chunk and group (or
    head); tensors of one number a token and head are kept with the tokens side by side.
    """
    groups, head_dim = b_TGS.shape[1], x_TNH.shape[2]
    x_LGRQH = _chunks(x_TNH, chunk).unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    dt_LGRQ = _chunks(dt_TN, chunk).transpose(1, 2).unflatten(1, (groups, -1)).contiguous()
    b_LGQS, c_LGQS = (_chunks(t, chunk).transpose(1, 2) for t in (b_TGS, c_TGS))
    segments_LQ = _chunks(segments_T, chunk)
    last_L = segments_LQ[:, -1]
    previous_L = torch.cat((last_L[:1], last_L[:-1]))  # document of the state that enters the chunk; the first is zero anyhow

    # log of the decay up to and including token q since its document or the chunk starts: other documents must not even enter its rounding
    sees_LQQ = (segments_LQ[:, :, None] == segments_LQ[:, None, :]).tril()
    log_LGRQ = dt_LGRQ * a_N.unflatten(0, (groups, -1))[..., None]
    cum_LGRQ = (log_LGRQ.flatten(1, 2) @ sees_LQQ.mT.to(log_LGRQ.dtype)).view_as(log_LGRQ)
    u_LGRQH = x_LGRQH * dt_LGRQ[..., None]
    y_LGRQH = _Within.apply(c_LGQS @ b_LGQS.mT, cum_LGRQ, u_LGRQH.to(x_TNH.dtype), sees_LQQ)

    to_end_LGRQ = _exp_where((segments_LQ == last_L[:, None])[:, None, None], cum_LGRQ[..., -1:] - cum_LGRQ)
    weighted_LGQX = (u_LGRQH * to_end_LGRQ[..., None]).to(x_TNH.dtype).transpose(2, 3).flatten(3)
    kept_LGR = _exp_where((last_L == previous_L)[:, None, None], cum_LGRQ[..., -1])
    state_LGSX = carry(b_LGQS.mT @ weighted_LGQX, kept_LGR.repeat_interleave(head_dim, 2))

    from_start_LGRQ = _exp_where((segments_LQ == previous_L[:, None])[:, None, None], cum_LGRQ)
    carried_LGRQH = (c_LGQS @ state_LGSX).unflatten(3, (-1, head_dim)).transpose(2, 3)
    y_LGRQH = y_LGRQH + carried_LGRQH * from_start_LGRQ[..., None]
    y_TNH = y_LGRQH.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)[: len(x_TNH)]
    return _Skip.apply(y_TNH, x_TNH, d_N)


def _chunks(t: Tensor, chunk: int) -> Tensor:
    """[T, ...] as [L, Q, ...]; zeros fill the last chunk, which changes nothing where dt is 0. Segments may end in zeros as well."""
    return F.pad(t, (0, 0) * (t.dim() - 1) + (0, -len(t) % chunk)).unflatten(0, (-1, chunk))


def _exp_where(mask: Tensor, x: Tensor) -> Tensor:
    """exp(x) where mask, else 0; masked before exp, which may overflow elsewhere."""
    return torch.where(mask, x, -torch.inf).exp()


class _Skip(torch.autograd.Function):
    """y + d x in x's dtype; the gradient of d is summed along rows first, as they lie in memory."""

    @staticmethod
    def forward(ctx: Any, y_TNH: Tensor, x_TNH: Tensor, d_N: Tensor) -> Tensor:
        ctx.save_for_backward(x_TNH, d_N)
        return (y_TNH + widen(x_TNH) * d_N[:, None]).to(x_TNH.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TNH: Tensor) -> Any:
        x_TNH, d_N = ctx.saved_tensors
        wide_TNH = widen(grad_TNH)
        dd_N = sum_rows((wide_TNH * x_TNH).flatten(1)).view(x_TNH.shape[1:]).sum(1)
        return wide_TNH, (wide_TNH * d_N[:, None]).to(x_TNH.dtype), dd_N


class _Within(torch.autograd.Function):
    """What each token gets from the tokens of its own chunk and document.

    Row and column sums of dmix * mix make the gradient of cum; automatic differentiation would store two more tensors of that size.
    """

    @staticmethod
    def forward(ctx: Any, scores_LGQQ: Tensor, cum_LGRQ: Tensor, u_LGRQH: Tensor, sees_LQQ: Tensor) -> Tensor:
        mix_LGRQQ = (scores_LGQQ[:, :, None] * _pair_decay(cum_LGRQ, sees_LQQ)).to(u_LGRQH.dtype)
        ctx.save_for_backward(mix_LGRQQ, cum_LGRQ, u_LGRQH, sees_LQQ)
        return mix_LGRQQ @ u_LGRQH

    @staticmethod
    def backward(ctx: Any, grad_LGRQH: Tensor) -> Any:
        mix_LGRQQ, cum_LGRQ, u_LGRQH, sees_LQQ = ctx.saved_tensors
        dmix_LGRQQ = grad_LGRQH @ stored(u_LGRQH).mT
        dscores_LGQQ = (dmix_LGRQQ * _pair_decay(cum_LGRQ, sees_LQQ)).sum(2)
        dlog_LGRQQ = widen(dmix_LGRQQ) * mix_LGRQQ
        dcum_LGRQ = dlog_LGRQQ.sum(-1) - dlog_LGRQQ.sum(-2)
        return dscores_LGQQ.to(u_LGRQH.dtype), dcum_LGRQ, mix_LGRQQ.mT @ grad_LGRQH, None


def _pair_decay(cum_LGRQ: Tensor, sees_LQQ: Tensor) -> Tensor:
    """Decay from token j to token i where i sees j, else 0. [L, G, R, Q, Q]

    The mask is added, as a tensor of 0 and -inf: reading booleans takes the compiled kernel longer than the exponential.
    """
    hidden_LQQ = stored(torch.where(sees_LQQ, 0.0, -torch.inf).to(cum_LGRQ.dtype))
    return (cum_LGRQ[..., :, None] - cum_LGRQ[..., None, :] + hidden_LQQ[:, None, None]).exp()


@torch.library.custom_op("reedling::ssd_carry", mutates_args=())
def carry(added_LGSX: Tensor, decay_LGX: Tensor) -> Tensor:
    """State before each chunk: zero, then state * decay + added of the chunk before it, accumulated in decay's dtype.

    An operator because the compiler would unroll the loop.
    """
    before_LGSX = torch.empty_like(added_LGSX, memory_format=torch.contiguous_format)
    state_GSX = torch.zeros_like(added_LGSX[0], dtype=decay_LGX.dtype)
    for before_GSX, added_GSX, decay_GX in zip(before_LGSX, added_LGSX, decay_LGX, strict=True):
        before_GSX.copy_(state_GSX)
        state_GSX.mul_(decay_GX[:, None]).add_(added_GSX)
    return before_LGSX


@torch.library.custom_op("reedling::ssd_carry_backward", mutates_args=())
def carry_backward(grad_LGSX: Tensor, before_LGSX: Tensor, decay_LGX: Tensor) -> tuple[Tensor, Tensor]:
    dadded_LGSX = torch.empty_like(before_LGSX)
    ddecay_LGX = torch.empty_like(decay_LGX, memory_format=torch.contiguous_format)
    dafter_GSX = torch.zeros_like(before_LGSX[0], dtype=decay_LGX.dtype)
    for chunk in reversed(range(len(decay_LGX))):
        dadded_LGSX[chunk].copy_(dafter_GSX)
        ddecay_LGX[chunk] = (dafter_GSX * before_LGSX[chunk]).sum(1)
        dafter_GSX.mul_(decay_LGX[chunk, :, None]).add_(grad_LGSX[chunk])
    return dadded_LGSX, ddecay_LGX


@carry.register_fake
def _(added_LGSX: Tensor, decay_LGX: Tensor) -> Tensor:
    return torch.empty_like(added_LGSX, memory_format=torch.contiguous_format)


@carry_backward.register_fake
def _(grad_LGSX: Tensor, before_LGSX: Tensor, decay_LGX: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(before_LGSX), torch.empty_like(decay_LGX, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output, inputs[1])


carry.register_autograd(lambda ctx, grad_LGSX: carry_backward(grad_LGSX, *ctx.saved_tensors), setup_context=_save)

"""Greedy decoding on packed rows with the training functions, several tokens ahead.

Each utterance's part of the row ends with free slots for its answer. Layers are causal, so one pass gives the best next token after every
slot. A token is settled when all tokens before it are settled; what the pass says beyond the first unsettled one is a draft, and each draft
that the next pass confirms is settled with it (Jacobi decoding, Santilli et al. 2023): the result is exactly the token-by-token one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from configs.schema import Config
from model import decoder, speech_lm
from parallel.collectives import every_rank
from parallel.mesh import Mesh
from training.engine import Engine, Pass
from training.step import Batch, make_context

AHEAD = 8  # tokens that a pass predicts for each utterance


def greedy(cfg: Config, mesh: Mesh, engine: Engine, leaves: dict[str, Tensor], batch: Batch, starts: Sequence[int], room: Sequence[int],
           eos_id: int) -> list[list[int]]:
    """The answer of each utterance of one packed row, without the end token.

    :param starts: first answer slot of each utterance; the slot before it is the last of its prompt.
    :param room: free slots of each utterance, at which its answer is cut.
    All ranks must call this together; they stop when the last of them has finished.
    """
    context = make_context(cfg, batch, mesh, training=False, split=False)
    x_AD = speech_lm.encode(Pass(engine, leaves, context), batch, context, {})
    unused = len(batch["cu_seqlens_U1"]) - 1 - len(starts)
    first_U = torch.tensor([*starts, *[1] * unused], device=mesh.device)
    room_U = torch.tensor([*room, *[0] * unused], device=mesh.device)
    tokens_T, settled_U, done_U = batch["tokens_T"].clone(), torch.zeros_like(room_U), room_U == 0
    while not every_rank(bool(done_U.all()), mesh.device):
        run = Pass(engine, leaves, context)
        offsets_UJ = settled_U[:, None] + torch.arange(AHEAD, device=mesh.device)
        free_UJ = (offsets_UJ < room_U[:, None]) & ~done_U[:, None]
        slots_UJ = torch.where(free_UJ, first_U[:, None] + offsets_UJ, 1)
        x_TD = speech_lm.decode(run, x_AD, batch | {"tokens_T": tokens_T}, context, {})
        logits = run(speech_lm.head_unit(cfg.model), decoder.logits, x_TD, slots_UJ.flatten() - 1)
        best_UJ = logits.detach().argmax(-1).view_as(slots_UJ)
        new_UJ = settled(best_UJ, tokens_T[slots_UJ]) & free_UJ
        tokens_T[slots_UJ[free_UJ]] = best_UJ[free_UJ]
        settled_U = settled_U + new_UJ.sum(1)
        done_U = done_U | ((best_UJ == eos_id) & new_UJ).any(1) | (settled_U >= room_U)
    ends = [start + int(n) for start, n in zip(starts, settled_U.tolist(), strict=False)]
    return [_until(tokens_T[start:end].tolist(), eos_id) for start, end in zip(starts, ends, strict=True)]


def settled(best_UJ: Tensor, draft_UJ: Tensor) -> Tensor:
    """Which predictions are final: the first, and each one all of whose predecessors' drafts were right. bool [U, J]"""
    right_UJ = (best_UJ == draft_UJ).int().cumprod(1).bool()
    return torch.cat([torch.ones_like(right_UJ[:, :1]), right_UJ[:, :-1]], 1)


def _until(ids: list[int], eos_id: int) -> list[int]:
    return ids[: ids.index(eos_id)] if eos_id in ids else ids

"""Greedy decoding on packed rows with the training functions: the encoder runs once, the decoder once a new token.

Each utterance's row part ends with free slots for its answer. Layers are causal, so that slots which are not written yet change nothing.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import Config
from model import decoder, speech_lm
from parallel.mesh import Mesh
from training.engine import Engine, Pass
from training.step import Batch, make_context


@torch.no_grad()
def greedy(cfg: Config, mesh: Mesh, engine: Engine, leaves: dict[str, Tensor], batch: Batch, starts: Sequence[int], room: Sequence[int],
           eos_id: int) -> list[list[int]]:
    """The answer of each utterance of one packed row, without the end token.

    :param starts: first answer slot of each utterance; the slot before it is the last of its prompt.
    :param room: free slots of each utterance, at which its answer is cut.
    All ranks must call this together; they stop when the last of them has finished.
    """
    context = make_context(cfg, batch, mesh, training=False)
    x_AD = speech_lm.encode(Pass(engine, leaves, context), batch, context, {})
    padding = len(batch["cu_seqlens_U1"]) - 1 - len(starts)
    first_U = torch.tensor([*starts, *[1] * padding], device=mesh.device)
    room_U = torch.tensor([*room, *[0] * padding], device=mesh.device)
    tokens_T, done_U = batch["tokens_T"].clone(), room_U == 0
    written = 0
    while not _all_ranks(bool(done_U.all()), mesh):
        run = Pass(engine, leaves, context)
        slots_U = (first_U + written).clamp(max=len(tokens_T) - 1)
        x_TD = speech_lm.decode(run, x_AD, batch | {"tokens_T": tokens_T}, context, {})
        best_U = run(speech_lm.head_unit(cfg.model), decoder.logits, x_TD, slots_U - 1).argmax(-1)
        tokens_T[slots_U[~done_U]] = best_U[~done_U]
        written += 1
        done_U = done_U | (best_U == eos_id) | (written >= room_U)
    return [_until(tokens_T[start : start + min(n, written)].tolist(), eos_id) for start, n in zip(starts, room, strict=True)]


def _until(ids: list[int], eos_id: int) -> list[int]:
    return ids[: ids.index(eos_id)] if eos_id in ids else ids


def _all_ranks(done: bool, mesh: Mesh) -> bool:
    flag = torch.tensor(int(done), device=mesh.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())

"""What every layer may need besides its weights and its input."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from configs.schema import DecoderConfig, EncoderConfig, ProjectorConfig


@dataclass(frozen=True)
class Context:
    """Boundaries of the packed row, sizes and dtypes; built once a micro-batch, the same for all layers.

    Token row: utterance u owns the slots cu_seqlens_U1[u] : cu_seqlens_U1[u + 1]; unused utterances are empty and the slots
    beyond the last boundary are padding (segment U, label -100).
    Audio row: utterance u owns encoder frames audio_starts_U[u] : + audio_lengths_U[u] (0: unused); at least one gap frame
    follows each. Its samples start at audio_starts_U[u] * 1280 in the flat sample row, zeros elsewhere.
    """

    encoder: EncoderConfig
    decoder: DecoderConfig
    cu_seqlens_U1: Tensor  # int32 [U + 1]
    segments_T: Tensor  # int32 [T], utterance of each slot, non-decreasing, U for padding
    positions_T: Tensor  # int64 [T], restart at 0 for each utterance
    audio_starts_U: Tensor  # int64 [U]
    audio_samples_U: Tensor  # int64 [U], samples of each utterance
    audio_lengths_U: Tensor  # int64 [U], valid encoder frames of each utterance
    audio_segments_A: Tensor  # int64 [A], utterance whose place in the row a frame is in (gaps included), U beyond the last
    audio_positions_A: Tensor  # int64 [A], frame number within that place
    utterance_frames: int  # static bound on audio_lengths_U
    dtype: torch.dtype = torch.float32  # compute dtype
    ep_group: ProcessGroup | None = None  # ranks over which the experts are split; None: all experts are here
    ep_dispatch: str = "allgather"  # how tokens reach the experts of other ranks, see parallel/expert.py
    keep_hidden: bool = True  # whether experts keep their pre-activations until backward, see kernels/experts
    cp_group: ProcessGroup | None = None  # ranks over which the token row is split; None: all slots are here
    cp_attention: str = "auto"  # how keys and values of other ranks come, see parallel/sequence.py
    cp_split: str = "row"  # what is cut into the parts of these ranks, see parallel/sequence.py
    tp_group: ProcessGroup | None = None  # ranks over which heads and hidden columns are split; None: all are here
    split_group: ProcessGroup | None = None  # the ranks of both, over which the audio of the row is split; None: all of it is here
    stage_group: ProcessGroup | None = None  # all ranks that run this layer, over whose rows losses and norms may be; None: this one
    draw: Tensor | None = None  # int64, number of this row among the rows of all steps: what random draws depend on
    training: bool = True
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)

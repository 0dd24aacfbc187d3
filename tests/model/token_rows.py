"""The Context of a packed token row without audio, for tests of the decoder's layers."""

from collections.abc import Sequence

import torch

from configs.schema import DecoderConfig, EncoderConfig
from model.context import Context


def token_row(cfg: DecoderConfig, lengths: Sequence[int], padding: int = 0) -> Context:
    """Documents of these lengths one after another, then `padding` slots."""
    counts = torch.tensor([*lengths, padding])
    ends = torch.cat((counts.new_zeros(1), counts[:-1].cumsum(0)))
    segments = torch.arange(len(counts)).repeat_interleave(counts)
    positions = torch.cat([torch.arange(n) for n in counts.tolist()])
    none = torch.zeros(0, dtype=torch.int64)
    return Context(
        encoder=EncoderConfig(), decoder=cfg, cu_seqlens_U1=ends.int(), segments_T=segments.int(), positions_T=positions,
        audio_starts_U=none, audio_samples_U=none, audio_lengths_U=none, audio_segments_A=none, audio_positions_A=none, utterance_frames=0)

"""CTC of utterances; scores are log-probabilities of each label at each frame."""

from typing import Any

import torch

from kernels.ctc_loss import IMPLEMENTATIONS, ctc_loss
from perf.cases import Case, Draw, Operation, Use, Work


def _case(name: str, use: Use, lengths: list[int], labels: list[int]) -> Case:
    utterances, frames, most = len(lengths), max(lengths), max(labels)

    def inputs(draw: Draw) -> dict[str, Any]:
        drawn = draw.normal(utterances, frames, most + 1).float().log_softmax(-1).to(draw.dtype)
        return {"label_scores_ULS": drawn[..., :most].clone(), "blank_scores_UL": drawn[..., most].clone(),
                "labels_US": draw.integers(3, utterances, most), "lengths_U": torch.tensor(lengths, device=draw.device),
                "label_lengths_U": torch.tensor(labels, device=draw.device)}

    size = 4.0 * utterances * frames * (most + 1)
    return Case(name, use, inputs, ("label_scores_ULS", "blank_scores_UL"), Work(0, size), Work(0, 3 * size))


CASES = [
    _case("odd lengths", "accuracy", [7, 12, 1, 9], [3, 5, 1, 0]),
    _case("CTC of a speech batch", "model", [150] * 64, [40] * 64),
]

OPERATION = Operation("ctc_loss", ctc_loss, IMPLEMENTATIONS, CASES)

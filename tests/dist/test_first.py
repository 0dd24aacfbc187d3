"""The whole training step on one process against two, experts split or not, with every layer kind and an auxiliary head."""

import math

import torch

from tests.dist.first import compare, gradient_error


def test_two_processes_equal_one() -> None:
    figures = compare(["compile.enabled=false", "model.encoder.n_layers=1", "model.decoder.pattern=M*E-"])
    assert figures["loss_error"] < 1e-5
    assert figures["gradient_error"] < 1e-4
    assert figures["start_bit_equal"] is True
    assert figures["gathered_layers_live_max"] == 2
    # 10 units: each is gathered once and reduced once; all but the embedding (whose backward reads no weight) and the head are gathered again
    assert figures["dense_collectives_per_layer"] == (10 + 8 + 10) / 10


def test_a_gradient_that_is_no_number_is_no_small_error() -> None:
    reference = {name: torch.ones(2) for name in "abc"}
    assert math.isnan(gradient_error(reference | {"b": torch.tensor([1.0, math.nan])}, reference))

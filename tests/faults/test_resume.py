"""A killed run continues as if nothing had happened, to the last bit of every tensor and of every logged loss."""

from tests.faults.resume import compare


def test_killed_and_resumed_equals_unbroken() -> None:
    figures = compare(["compile.enabled=false", "model.encoder.n_layers=1", "model.decoder.pattern=M*E-"])
    assert figures["bit_equal"] is True
    assert figures["steps_compared"] == 20
    assert figures["tensors"] > 150

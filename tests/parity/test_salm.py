"""A whole speech model that NeMo's SALM has saved: logits, loss, gradients, generated tokens and the way back."""

from pathlib import Path

import pytest

from tests.parity import salm


@pytest.fixture(scope="module")
def whole() -> salm.Whole:
    return salm.load_whole()


def test_logits_loss_and_gradients_are_those_of_salm(whole: salm.Whole) -> None:
    logits, loss, gradients = salm.errors(whole)
    assert logits <= 1e-5
    assert loss <= 1e-6
    assert gradients <= 1e-4


def test_generated_tokens_are_those_of_salm(whole: salm.Whole) -> None:
    answers = salm.generated(whole)
    assert answers == whole.golden["tokens"].tolist()
    assert len({token for answer in answers for token in answer}) > 4


@pytest.mark.parametrize("which", salm.LIKE)
def test_its_export_holds_the_same_numbers(whole: salm.Whole, which: str, tmp_path: Path) -> None:
    assert not salm.differing(whole, which, tmp_path)

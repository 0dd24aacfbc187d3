import pytest
import torch

from training.loop import Run, RunError
from training.state import State


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (1.0, float("inf"))])
def test_a_state_that_went_wrong_is_not_saved(loss: float, norm: float) -> None:
    run = Run.__new__(Run)
    run.state = State(7, {}, {}, {}, {})
    run.metrics = {"loss": torch.tensor(loss), "grad_norm": torch.tensor(norm)}
    with pytest.raises(RunError, match=r"the loss is .* and the gradient norm .* at step 7; lower optimizer.lr"):
        run.save()

import math

import pytest
import torch

from configs.schema import OptimizerConfig
from parallel.mesh import start_processes
from training import optimizer

# NeMo 3.0.0 CosineAnnealing measured with lr 1e-4, warm-up 1000, minimum 1e-6, 100,000 steps
GOLDEN = {0: 9.990e-8, 1: 1.998e-7, 2: 2.997e-7, 499: 4.995e-5, 500: 5.005e-5, 999: 9.990e-5, 1000: 1.0e-4, 1001: 9.9999999975e-5,
          50_000: 5.12854e-5, 99_999: 1.0000000249e-6, 100_000: 1e-6, 123_456: 1e-6}


@pytest.mark.parametrize("step", GOLDEN)
def test_schedule_is_that_of_nemo(step: int) -> None:
    lr = optimizer.learning_rate(step, OptimizerConfig(lr=1e-4, min_lr=1e-6, warmup_steps=1000), 100_000)
    assert lr == pytest.approx(GOLDEN[step], rel=3e-4 if step < 1000 else 1e-6)


def test_update_is_torch_adamw_with_decay_only_where_asked() -> None:
    cfg = OptimizerConfig(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    start = {name: torch.randn(3, 2) for name in ("matrix", "norm")} | {"empty": torch.zeros(0, 2)}
    mine = {name: t.clone() for name, t in start.items()}
    first, second = ({n: torch.zeros_like(t) for n, t in start.items()} for _ in range(2))
    theirs = {name: t.clone().requires_grad_() for name, t in start.items() if t.numel()}
    reference = torch.optim.AdamW([{"params": [theirs["matrix"]], "weight_decay": 0.1}, {"params": [theirs["norm"]], "weight_decay": 0.0}],
                                  betas=cfg.betas, eps=cfg.eps)
    for step in range(4):
        grads = {name: torch.randn_like(t) for name, t in start.items()}
        grads["matrix"] = torch.randn(2, 3).t()  # other strides than the parameter's
        optimizer.update(mine, grads, first, second, step, 0.01 * (step + 1), cfg, {"matrix"})
        for group in reference.param_groups:
            group["lr"] = 0.01 * (step + 1)
        for name, t in theirs.items():
            t.grad = grads[name]
        reference.step()
    for name in theirs:
        torch.testing.assert_close(mine[name], theirs[name].detach(), rtol=1e-6, atol=1e-7)


def test_narrow_tensors_are_updated_in_fp32_and_rounded() -> None:
    cfg, bf16 = OptimizerConfig(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1), torch.bfloat16
    start = {"matrix": torch.randn(3, 2), "other": torch.randn(4)}
    for stored, moments in ((bf16, torch.float32), (torch.float32, bf16), (bf16, bf16)):
        mine = {name: t.to(stored) for name, t in start.items()}
        first, second = ({name: torch.zeros_like(t, dtype=moments) for name, t in start.items()} for _ in range(2))
        wide = [{name: t.float().clone() for name, t in tensors.items()} for tensors in (mine, first, second)]
        for step in range(3):
            grads = {name: torch.randn_like(t) for name, t in start.items()}
            optimizer.update(mine, grads, first, second, step, 0.1, cfg, {"matrix"})
            optimizer.update(wide[0], grads, wide[1], wide[2], step, 0.1, cfg, {"matrix"})
            for narrow, tensors, dtype in zip((mine, first, second), wide, (stored, moments, moments), strict=True):
                for name, t in tensors.items():
                    assert narrow[name].dtype == dtype
                    assert torch.equal(narrow[name], t.to(dtype))
                    t.copy_(narrow[name])  # each step starts from what is stored


def test_norm_and_clipping() -> None:
    start_processes(torch.device("cpu"))
    grads = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]), torch.zeros(0)]
    named, zero = dict(zip("abc", grads, strict=True)), torch.zeros(())
    norm = optimizer.global_norm(named, {"a": 1, "b": 1, "c": 1}, zero)
    assert norm.item() == pytest.approx(5.0)
    assert optimizer.global_norm(named, {"a": 9, "b": 4, "c": 1}, zero).item() == pytest.approx(math.sqrt(1 + 4))  # shares of copies
    assert optimizer.global_norm({"c": grads[2]}, {"c": 1}, zero).item() == 0
    assert optimizer.global_norm({}, {}, zero).item() == 0
    assert optimizer.clipping_divisor(norm, 0.0) is None
    for limit in (10.0, 0.0):
        optimizer.divide(grads, optimizer.clipping_divisor(norm, limit))
        assert grads[0][0].item() == 3.0
    optimizer.divide(grads, optimizer.clipping_divisor(norm, 1.0))
    assert grads[0][0].item() == pytest.approx(0.6, rel=1e-5)
    assert grads[1].item() == pytest.approx(0.8, rel=1e-5)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_an_update_divides_gradients_as_a_pass_of_its_own_would(moments: torch.dtype) -> None:
    cfg = OptimizerConfig(clip_norm=0.5, weight_decay=0.1)
    start = {"matrix": torch.randn(33, 5), "norm": torch.randn(7)}  # beside whole vectors a rest
    grads = {name: torch.randn_like(t) for name, t in start.items()}
    grads["matrix"] = torch.randn(5, 33).t()
    divisor, found = torch.tensor(2.7), []
    for folded in (True, False):
        mine, given = ({name: t.clone() for name, t in tensors.items()} for tensors in (start, grads))
        first, second = ({name: torch.zeros_like(t, dtype=moments) for name, t in start.items()} for _ in range(2))
        for step in range(2):
            if not folded:
                optimizer.divide(list(given.values()), divisor)
            optimizer.update(mine, {name: t.clone() for name, t in given.items()}, first, second, step, 0.1, cfg, {"matrix"},
                             divisor if folded else None)
            given = {name: t.clone() for name, t in grads.items()}
        found.append([*mine.values(), *first.values(), *second.values()])
    assert all(map(torch.equal, *found))
    assert found[0][2].abs().max() > 0

"""Adapters on two processes, weights sharded, experts or matrices split: the gradients of one process, with the same inputs dropped."""

import torch

from tests.dist.launch import torchrun
from tests.dist.lora_worker import VARIANTS, gradients


def test_gradients_are_those_of_one_process() -> None:
    layouts = torchrun(2, "tests.dist.lora_worker", "parallel.ep=2", "parallel.tp=2")
    for name in VARIANTS:
        alone = gradients(name, [])
        assert all(found[name].keys() == alone.keys() for found in layouts.values())
        assert {path.rpartition(".")[2] for path in alone} == ({"a", "b"} if name == "experts" else {"a", "b", "magnitude"})
        for layout, found in layouts.items():
            for path, values in alone.items():
                expected = torch.tensor(values)
                assert expected.norm() > 0
                assert float((torch.tensor(found[name][path]) - expected).norm()) <= 1e-4 * float(expected.norm()), (layout, name, path)

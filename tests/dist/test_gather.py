"""Gathered layers against the unsharded model, on 1, 2 and 3 gloo processes with uneven and empty shards."""

import pytest

from tests.dist.gather_worker import LAYERS
from tests.dist.launch import torchrun


BY_GATHER = {"forward": ["gather", "shared", "wait", "experts", "scatter", "wait"],
             "backward": ["gather", "wait", "experts", "scatter", "shared", "wait"]}
ORDERS = {  # the shared expert runs while tokens travel to the routed ones, and while the gradients of tokens come back
    "allgather, none": BY_GATHER, "allgather, selective": BY_GATHER,
    "alltoall, none": {"forward": ["exchange", "wait", "exchange", "shared", "wait", "experts", "exchange", "wait"],  # the first: sizes
                       "backward": ["exchange", "wait", "experts", "exchange", "shared", "wait"]}}


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_gathered_equals_unsharded(processes: int) -> None:
    results = torchrun(processes, "tests.dist.gather_worker")
    for mode in ("reshard_fp32", "keep_fp32"):
        assert results[mode]["loss_error"] < 1e-6
        assert results[mode]["gradient_error"] < 1e-5
    assert results["step_scope"]["loss_error"] < 1e-6
    assert results["step_scope"]["gradient_error"] < 1e-5
    assert results["step_scope"]["graphs"] == 1
    assert results["frozen"]["loss_error"] < 1e-6
    assert results["frozen"]["gradient_error"] < 1e-5
    assert results["kept"] == 0
    assert results["gradient_sum_error"] == 0  # gradients of bf16 weights are added up in fp32
    assert results["narrow_sum_error"] == 0  # those of bf16 parameters too
    if processes == 2:
        assert results["rounded_sum_error"] == 2.0**-9  # with parallel.reduce_dtype=bf16 in that
        assert results["joined_errors"] == [0, 0]
        assert results["orders"] == ORDERS
        assert results["reductions"]["gradient_error"] < 1e-5
        assert results["reductions"]["left"] == 0
        # behind the backward of one more layer; the first layer's at once, because autograd adds them to what the last had
        assert results["reductions"]["events"] == ["layer", *["start", "layer", "wait"] * 4, "start", "wait"] * 2
        assert results["reductions"]["given"] == [4 * LAYERS, 0]  # gradients that autograd returns, of each row
    assert results["flags"] == {"any": True, "none": False, "every": True, "not_every": processes == 1, "objects": list(range(processes)),
                                "first": ["rank 0"] * processes}
    if processes == 1:
        assert results["reshard_fp32"]["counts"] == {}
        return
    # five layers of one flat buffer each; the last one is kept for backward, the others are gathered a second time
    assert results["reshard_fp32"]["counts"] == {"all_gather_into_tensor": 9, "reduce_scatter_tensor": 5}
    assert results["keep_fp32"]["counts"] == {"all_gather_into_tensor": 5, "reduce_scatter_tensor": 5}
    assert results["reshard_fp32"]["live_max"] == results["reshard_bf16"]["live_max"] == 2
    assert results["reshard_fp32"]["late"] == results["reshard_bf16"]["late"] == 0
    assert results["keep_fp32"]["live_max"] == 5
    assert results["frozen"]["counts"] == {"all_gather_into_tensor": 9, "reduce_scatter_tensor": 2}  # two trained layers
    assert results["frozen"]["live_max"] == 2

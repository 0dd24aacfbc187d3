"""Several processes load one folder, each its own part, and export it together."""

import pytest

from model import params, speech_lm
from tests.dist.launch import torchrun
from tests.model.hub.test_rows import model, written


@pytest.mark.parametrize("kind, processes, ep", [("qwen3_moe", 2, 2), ("nemotron_h", 3, 1)])
def test_shards_are_those_of_the_whole_and_go_back(kind, processes, ep, tmp_path):
    written(kind, tmp_path)
    result = torchrun(processes, "tests.model.hub.shards_worker", str(tmp_path), str(ep))
    assert result["different"] == []
    assert result["same_export"]
    spec = speech_lm.model_spec(model(kind))
    total = params.count(spec)
    assert total / processes <= result["numbers"] <= 1.1 * total / processes + params.count(spec, "buffer")  # rank 0 has the longer parts

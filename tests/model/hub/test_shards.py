"""Several processes load one folder, each its own part, and export it together."""

import pytest

from model import params, speech_lm
from tests.dist.launch import torchrun
from tests.model.hub.test_rows import model, written


@pytest.mark.parametrize("processes, ep, kinds", [(2, 2, ("qwen3_moe", "glm")), (3, 1, ("nemotron_h",))])
def test_shards_are_those_of_the_whole_and_go_back(processes, ep, kinds, tmp_path):
    for kind in kinds:
        written(kind, tmp_path / kind)
    results = torchrun(processes, "tests.model.hub.shards_worker", str(ep), *(str(tmp_path / kind) for kind in kinds))
    for kind, result in zip(kinds, results, strict=True):
        assert result["different"] == []
        assert result["same_export"]
        spec = speech_lm.model_spec(model(kind))
        total = params.count(spec)
        # rank 0 has the longer parts
        assert total / processes <= result["numbers"] <= 1.1 * total / processes + params.count(spec, "buffer")

"""Several processes load one folder, each its own part, and export it together."""

import pytest

from model import params, speech_lm
from tests.dist.launch import torchrun
from tests.model.hub.test_rows import model, written


@pytest.mark.parametrize("processes, layouts", [  # experts or heads, hidden columns and vocabulary split; uneven and empty parts
    (2, {"qwen3_moe": ("2", "1"), "glm": ("1", "2"), "nemotron_h": ("1", "2")}), (3, {"nemotron_h": ("1", "1")})])
def test_shards_are_those_of_the_whole_and_go_back(processes, layouts, tmp_path):
    for kind in layouts:
        written(kind, tmp_path / kind)
    arguments = [word for kind, layout in layouts.items() for word in (*layout, str(tmp_path / kind))]
    results = torchrun(processes, "tests.model.hub.shards_worker", *arguments)
    for kind, result in zip(layouts, results, strict=True):
        assert result["different"] == []
        assert result["same_export"]
        spec = speech_lm.model_spec(model(kind))
        total = params.count(spec)
        # rank 0 has the longer parts
        assert total / processes <= result["numbers"] <= 1.15 * total / processes + params.count(spec, "buffer")

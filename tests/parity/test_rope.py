"""Rotary positions of long contexts against transformers' own formulas, for heads and lengths of published sizes."""

import math

import pytest
import torch

from configs.schema import RopeScaling
from model.hub.keys import read_rope
from model.rope import rotate

pytestmark = pytest.mark.parity
CASES = [
    (dict(rope_type="linear", factor=3.0), RopeScaling("linear", 3.0)),
    (dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
     RopeScaling("llama3", 8.0, 8192)),
    (dict(rope_type="llama3", factor=32.0, low_freq_factor=2.0, high_freq_factor=6.0, original_max_position_embeddings=4096),
     RopeScaling("llama3", 32.0, 4096, 2.0, 6.0)),
    (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768), RopeScaling("yarn", 4.0, 32768)),
    (dict(rope_type="yarn", factor=2.5, original_max_position_embeddings=1024, beta_fast=16.0, beta_slow=4.0, attention_factor=1.3),
     RopeScaling("yarn", 2.5, 1024, beta_fast=16.0, beta_slow=4.0, attention_factor=1.3)),
    (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=131072), RopeScaling("yarn", 4.0, 131072)),  # past the last turn
    (dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=1.2, truncate=False), None),
    (dict(rope_type="yarn", factor=None, original_max_position_embeddings=4096, mscale=0.5), None),
]


@pytest.mark.parametrize("theirs, ours", CASES, ids=lambda case: "")
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_rotation_is_theirs(transformers, theirs, ours, theta):
    from transformers.models.llama import modeling_llama

    config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=2, head_dim=128, max_position_embeddings=131072,
                                      rope_parameters={**theirs, "rope_theta": theta})
    read = read_rope(config.to_dict(), 0.0)["rope_scaling"]
    assert ours in (None, read)
    q, positions = torch.randn(6, 2, 128), torch.tensor([0, 1, 17, 300, 2000, 4095])
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, positions[None])
    expected = modeling_llama.apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], cos, sin)[0][0].transpose(0, 1)
    # at position p the angles' rounding is p * 2^-24
    torch.testing.assert_close(rotate(q, positions, theta, 1.0, read), expected, rtol=0, atol=3e-3)
    torch.testing.assert_close(rotate(q[:3], positions[:3], theta, 1.0, read), expected[:3], rtol=0, atol=2e-5)


FACTORS = dict(short_factor=[1 + i / 100 for i in range(64)], long_factor=[1 + i / 4 for i in range(64)])


@pytest.mark.parametrize("theirs, ours, factor", [
    (dict(rope_type="dynamic", factor=4.0), RopeScaling("dynamic", 4.0, 1000), 1.0),
    (dict(rope_type="longrope", factor=8.0, original_max_position_embeddings=500, **FACTORS), None,
     math.sqrt(1 + math.log(8) / math.log(500))),
    (dict(rope_type="longrope", original_max_position_embeddings=500, attention_factor=1.2, **FACTORS), None, 1.2),
], ids=["dynamic", "longrope", "longrope of Phi-3"])
def test_frequencies_that_depend_on_the_length(transformers, theirs, ours, factor):
    """Documents of one row, each of its own length; the class of transformers takes one at a time."""
    from transformers.models.llama import modeling_llama

    config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=2, head_dim=128, max_position_embeddings=1000,
                                      rope_parameters={**theirs, "rope_theta": 1e4})
    read = read_rope(config.to_dict(), 0.0)["rope_scaling"]
    assert read == (ours or RopeScaling("longrope", theirs.get("factor", 2.0), 500, attention_factor=theirs.get("attention_factor"),
                                        short_factors=FACTORS["short_factor"], long_factors=FACTORS["long_factor"]))
    for length in (300, 500, 501, 1000, 1001, 3700):
        positions = torch.tensor([0, 1, 17, length - 1])
        q = torch.randn(4, 2, 128)
        theirs_of_length = modeling_llama.LlamaRotaryEmbedding(config)
        cos, sin = theirs_of_length(q, torch.arange(length)[None])
        expected = modeling_llama.apply_rotary_pos_emb(*[q.transpose(0, 1)[None]] * 2, cos[:, positions], sin[:, positions])[0][0]
        found = rotate(q, positions, 1e4, 1.0, read, torch.full((4,), length))
        torch.testing.assert_close(found[:3], expected.transpose(0, 1)[:3], rtol=0, atol=2e-5)
        torch.testing.assert_close(found[3], expected.transpose(0, 1)[3], rtol=0, atol=3e-3)
        assert (found[0] / q[0]).mean().item() == pytest.approx(factor)

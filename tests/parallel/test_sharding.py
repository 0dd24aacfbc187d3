import pytest
import torch

from configs.schema import ParallelConfig
from model import params
from model.params import P
from parallel import sharding
from parallel.mesh import make_mesh, start_processes


@pytest.mark.parametrize(("size", "parts"), [(10, 3), (3, 4), (1, 8), (7, 7), (64, 8), (5, 4)])
def test_chunks_are_those_of_torch(size: int, parts: int) -> None:
    whole = torch.arange(size)
    expected = [c.tolist() for c in whole.chunk(parts)] + [[]] * (parts - len(whole.chunk(parts)))
    got = [whole.narrow(0, *sharding.chunk_bounds(size, parts, i)).tolist() for i in range(parts)]
    assert got == expected


@pytest.mark.parametrize(("p", "dim"), [
    (P((5, 9), ("ffn", "embed")), 1),
    (P((9, 5), ("embed", "ffn")), 0),
    (P((4, 3, 7), ("experts", "ffn", "embed")), 2),
    (P((2, 8, 3), ("taps", "channels", "heads")), 1),  # no embed: the largest
    (P((6,), ("heads",)), 0),
])
def test_dimension_to_shard(p: P, dim: int) -> None:
    assert sharding.sharded_dim(p) == dim


def test_a_parameter_of_only_expert_axes_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves no dimension"):
        sharding.sharded_dim(P((4,), ("experts",)), 0)


def test_axes_must_match_the_shape() -> None:
    with pytest.raises(ValueError, match="names 1 axes"):
        P((2, 3), ("embed",))


def test_sharding_one_process_keeps_every_value() -> None:
    start_processes(torch.device("cpu"))
    mesh = make_mesh(ParallelConfig(), torch.device("cpu"))
    spec = {"a": P((3, 5), ("ffn", "embed")), "e": P((4, 2, 3), ("experts", "ffn", "embed")),
            "b": P((2,), ("embed",), "zeros", kind="buffer")}
    state = sharding.init_sharded(spec, 1, mesh)
    for name, p in params.named_leaves(spec):
        full = state[name] if p.kind == "buffer" else state[name].full_tensor()
        assert torch.equal(full, params.draw(name, p, 1))


def test_draws_depend_on_path_and_seed_alone() -> None:
    p = P((4, 4), ("ffn", "embed"))
    assert torch.equal(params.draw("x.y", p, 3), params.draw("x.y", p, 3))
    assert not torch.equal(params.draw("x.y", p, 3), params.draw("x.z", p, 3))
    assert not torch.equal(params.draw("x.y", p, 3), params.draw("x.y", p, 4))
    assert abs(params.draw("w", P((400, 400), ("ffn", "embed"), std=0.3), 0).std().item() - 0.3) < 0.003


def test_padding_changes_no_draw() -> None:
    p, padded = P((10, 3), ("vocab", "embed"), drawn=10), P((16, 3), ("vocab", "embed"), drawn=10)
    drawn = params.draw("table", padded, 3)
    assert torch.equal(drawn[:10], params.draw("table", p, 3))
    assert not drawn[10:].any()


def test_dt_bias_is_the_inverse_softplus_of_step_sizes_in_range() -> None:
    dt = torch.nn.functional.softplus(params.draw("dt", P((4096,), ("heads",), "dt_bias", low=0.001, high=0.1), 0).double())
    assert dt.min() > 0.00099
    assert dt.max() < 0.1001
    assert abs(dt.log().mean().item() - (torch.tensor(0.001).log() + torch.tensor(0.1).log()).item() / 2) < 0.1  # log-uniform


@pytest.mark.parametrize(("p", "decay"), [
    (P((4, 4), ("ffn", "embed")), True),
    (P((4,), ("embed",)), False),
    (P((4, 1), ("channels", "one")), False),
    (P((4, 4), ("ffn", "embed"), "ones"), False),
    (P((4, 4), ("ffn", "embed"), kind="buffer"), False),
])
def test_weight_decay_is_for_drawn_matrices(p: P, decay: bool) -> None:
    assert p.decay is decay

"""Which part of the model each stage of a pipeline has."""

import pytest

from configs.schema import Config
from model import params, speech_lm, stages
from training import config


def load(*overrides: str) -> Config:
    cfg, _ = config.load(["+experiment=digits", "model.decoder.pattern=M*E-M*E-", *overrides])
    return cfg


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("ranks", "chunks"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_the_ranks_have_all_parameters_once_but_a_tied_embedding(ranks: int, chunks: int, tied: bool) -> None:
    cfg = load(f"parallel.pp={ranks}", f"parallel.pp_chunks={chunks}", f"model.decoder.tie_embeddings={tied}", "train.ctc_weight=0.3")
    whole = dict(params.named_leaves(speech_lm.spec(cfg)))
    own = [dict(params.named_leaves(stages.own_spec(cfg, rank))) for rank in range(ranks)]
    assert {name: p for part in own for name, p in part.items()} == whole
    twice = [name for name in whole if sum(name in part for part in own) > 1]
    assert twice == list(stages.shared_leaves(cfg)) == (["decoder.embedding.weight"] if tied and ranks > 1 else [])


def test_units_keep_the_order_of_the_whole_model() -> None:
    cfg = load("parallel.pp=2", "parallel.pp_chunks=2", "train.ctc_weight=0.3")
    assert [unit for stage in stages.stages(cfg) for unit in speech_lm.units(cfg, stage)] == list(speech_lm.units(cfg))
    assert [stage.index for stage in stages.own_stages(cfg, 1)] == [1, 3]


def test_layers_are_cut_as_configured() -> None:
    found = stages.stages(load("parallel.pp=4", "parallel.pp_layers=[0,5,1,2]"))
    assert [stage.layers for stage in found] == [range(0, 0), range(0, 5), range(5, 6), range(6, 8)]
    assert [(stage.enters, stage.ends) for stage in found] == [(True, False), (False, False), (False, False), (False, True)]


def test_a_dear_encoder_leaves_its_stage_fewer_layers() -> None:
    pattern = "model.decoder.pattern=" + 8 * "-"
    small, large = (stages.stages(load("parallel.pp=2", pattern, f"model.encoder.n_layers={n}")) for n in (1, 200))
    assert len(large[0].layers) == 0 < len(small[0].layers)


def test_costs_are_multiplications_of_what_a_token_meets() -> None:
    cfg = load("model.decoder.activation=relu2", "model.decoder.shared_ffn=0", "model.decoder.d_model=32", "model.decoder.moe_ffn=24",
               "model.decoder.n_experts=8", "model.decoder.top_k=2", "model.decoder.vocab_size=60", "model.decoder.mlp_ffn=48")
    spec, tokens = speech_lm.spec(cfg), cfg.data.rows[-1].tokens
    assert stages.unit_cost(cfg, spec, ("decoder.layers.2",)) == tokens * (8 * 32 + 2 * 2 * 24 * 32)  # router, two experts
    assert stages.unit_cost(cfg, spec, ("decoder.layers.3",)) == tokens * 2 * 48 * 32
    assert stages.unit_cost(cfg, spec, ("decoder.head",)) == tokens * 60 * 32
    assert stages.unit_cost(cfg, spec, ("decoder.embedding",)) == 0


def test_a_gradient_is_wanted_where_something_before_learns() -> None:
    frozen = "model.freeze_params=[encoder,projector,decoder.embedding,'decoder.layers.[0-4]']"
    found = stages.stages(load("parallel.pp=4", "parallel.pp_layers=[2,2,2,2]", "train.ctc_weight=0", frozen))
    assert [stage.learns_before for stage in found] == [False, False, False, True]
    assert [stage.learns_before for stage in stages.stages(load("parallel.pp=2"))] == [False, True]


def test_few_rows_make_the_stages_wait() -> None:
    cfg = load("parallel.pp=2", "model.encoder.n_layers=0", "model.decoder.pattern=" + 40 * "-", "train.ctc_weight=0",
               "model.decoder.mlp_ffn=512")
    assert stages.waiting(cfg, 1) == pytest.approx(1 / 2, abs=0.02)
    assert stages.waiting(cfg, 7) == pytest.approx(1 / 8, abs=0.02)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "looped_bfs"])
def test_without_a_pipeline_a_row_goes_back_at_once(schedule: str) -> None:
    cfg = load(f"parallel.pp_schedule={schedule}")
    found = [(a.kind, a.row) for a in stages.actions_of_step(cfg, 0, 2)]
    assert found == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]


def test_halves_of_a_backward_are_for_ranks_whose_inputs_want_gradients() -> None:
    def found(schedule: str, chunks: int, *more: str) -> list[bool]:
        cfg = load("parallel.pp=2", f"parallel.pp_schedule={schedule}", f"parallel.pp_chunks={chunks}", *more)
        return [stages.halved(cfg, rank) for rank in range(2)]

    assert found("zero_bubble", 1) == [False, True]  # the first stage has no input
    assert found("zero_bubble", 2) == found("zbv", 2) == found("dualpipev", 2) == [True, True]
    assert found("1f1b", 1) == found("interleaved_1f1b", 2) == [False, False]
    frozen = "model.freeze_params=[encoder,projector,decoder.embedding,'decoder.layers.[0-3]']"
    assert found("zero_bubble", 1, "parallel.pp_layers=[4,4]", "train.ctc_weight=0", frozen) == [False, False]


def test_both_ends_of_a_v_are_on_the_first_rank() -> None:
    cfg = load("parallel.pp=2", "parallel.pp_chunks=2", "parallel.pp_schedule=zbv", "model.decoder.tie_embeddings=true")
    assert [[stage.index for stage in stages.own_stages(cfg, rank)] for rank in range(2)] == [[0, 3], [1, 2]]
    assert stages.shared_leaves(cfg) == ()  # one rank has the embedding, and uses it twice


def test_which_rank_is_done_with_a_row_right_after_its_forward() -> None:
    """The gathered head stays from forward to backward there, and must not stay for the rows that wait for their second half."""
    def found(schedule: str, chunks: int) -> list[bool]:
        cfg = load("parallel.pp=2", f"parallel.pp_schedule={schedule}", f"parallel.pp_chunks={chunks}")
        return [stages.turns(cfg, rank) for rank in range(2)]

    assert found("1f1b", 1) == found("interleaved_1f1b", 2) == [False, True]
    assert found("zbv", 2) == [True, False]
    assert found("gpipe", 1) == found("zero_bubble", 1) == found("dualpipev", 2) == [False, False]

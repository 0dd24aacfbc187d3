"""Which part of the model each stage of the pipeline has.

The encoder, the CTC head, the projector and the embedding are on the first, the head on the last, the decoder's layers are cut so that the
dearest stage is as cheap as can be.
"""

import math

from configs.schema import Config
from model import params, speech_lm
from model.params import P, Tree
from parallel.names import schedule
from parallel.pipeline import Action, Stage, cut, idle_share, with_transfers
from parallel.schedules import APART, orders, placement

MEL_FRAMES = 8  # of an encoder frame, at which rate the first convolutions run


def stages(cfg: Config) -> list[Stage]:
    """All stages in the order in which a row passes them; with one rank the whole model."""
    count = cfg.parallel.pp * cfg.parallel.pp_chunks
    if count == 1:
        return [speech_lm.whole(cfg.model)]
    spec, found, start, learns = speech_lm.spec(cfg), [], 0, False
    for index, end in enumerate(ends(cfg, spec)):
        stage = Stage(index, range(start, end), index == 0, index == count - 1, learns)
        found.append(stage)
        learns, start = learns or any(p.trained for p in leaves(cfg, spec, stage).values() if p.kind == "param"), end
    return found


def ends(cfg: Config, spec: Tree) -> list[int]:
    """Behind which layer each stage ends: as configured, or balanced."""
    count, given = cfg.parallel.pp * cfg.parallel.pp_chunks, cfg.parallel.pp_layers
    if given:
        return [sum(given[: i + 1]) for i in range(count)]
    costs = [unit_cost(cfg, spec, (f"decoder.layers.{i}",)) for i in range(len(cfg.model.decoder.pattern))]
    entry = sum(unit_cost(cfg, spec, unit) for unit in speech_lm.entry_units(cfg))
    return cut(costs, count, entry, unit_cost(cfg, spec, speech_lm.head_unit(cfg.model)))


def unit_cost(cfg: Config, spec: Tree, unit: tuple[str, ...]) -> float:
    """Multiplications of a unit's matrices with the largest row; what grows with the square of a document's length is not counted."""
    row, decoder = cfg.data.rows[-1], cfg.model.decoder
    frames = {"encoder": row.audio_frames, "ctc": row.audio_frames, "projector": row.audio_frames, "decoder": row.tokens}
    if unit == ("decoder.embedding",):
        return 0.0  # rows are looked up
    total = 0.0
    for path in unit:
        for name, p in params.named_leaves(params.subtree(spec, path)):
            share = decoder.top_k / decoder.n_experts if "experts" in p.axes else 1.0
            times = frames[path.partition(".")[0]] * (MEL_FRAMES if "subsampling.conv" in f"{path}.{name}" else 1)
            total += math.prod(p.shape) * share * times if len(p.shape) > 1 else 0.0
    return total


def leaves(cfg: Config, spec: Tree, stage: Stage) -> dict[str, P]:
    """A stage's parameters and buffers by dotted path, which is also a tree of them."""
    paths = [path for unit in speech_lm.units(cfg, stage) for path in unit]
    return {f"{path}.{name}": p for path in paths for name, p in params.named_leaves(params.subtree(spec, path))}


def own_stages(cfg: Config, pp_rank: int) -> list[Stage]:
    """Those of one rank of the pipeline."""
    return [stage for stage, rank in zip(stages(cfg), places(cfg), strict=True) if rank == pp_rank]


def places(cfg: Config) -> list[int]:
    """The rank of each stage."""
    return placement(schedule_of(cfg), cfg.parallel.pp, cfg.parallel.pp_chunks)


def own_spec(cfg: Config, pp_rank: int) -> Tree:
    """The parameters and buffers of one rank of the pipeline; all of them where it is the only one."""
    spec = speech_lm.spec(cfg)
    if cfg.parallel.pp == 1:
        return spec
    found: dict[str, P] = {}
    for stage in own_stages(cfg, pp_rank):
        found |= leaves(cfg, spec, stage)
    return found


def trained_paths(cfg: Config, stage: Stage) -> list[str]:
    """The parameters of a stage that are learned."""
    return [path for path, p in leaves(cfg, speech_lm.spec(cfg), stage).items() if p.kind == "param" and p.trained]


def shared_leaves(cfg: Config) -> tuple[str, ...]:
    """Parameters that two ranks of a pipeline have, its ends: the embedding that is the head's matrix too."""
    return ("decoder.embedding.weight",) if len({places(cfg)[0], places(cfg)[-1]}) > 1 and cfg.model.decoder.tie_embeddings else ()


def schedule_of(cfg: Config) -> str:
    """Our name of the schedule; without a pipeline each row goes backward right after its forward."""
    return schedule(cfg.parallel.pp_schedule) if cfg.parallel.pp > 1 else "1f1b"


def actions_of_step(cfg: Config, pp_rank: int, rows: int) -> list[Action]:
    """What a rank of the pipeline does in a step of that many rows."""
    p = cfg.parallel
    computed = orders(schedule_of(cfg), p.pp, p.pp_chunks, rows)
    return with_transfers(computed, places(cfg))[pp_rank]


def turns(cfg: Config, pp_rank: int) -> bool:
    """Whether that rank has the last stage, which is done with a row right after its forward."""
    return places(cfg)[-1] == pp_rank and schedule_of(cfg) in ("1f1b", "interleaved_1f1b", "zbv")


def halved(cfg: Config, pp_rank: int) -> bool:
    """Whether that rank computes gradients of inputs, where it has one of which a gradient is wanted, apart from those of weights."""
    return schedule_of(cfg) in APART and any(stage.learns_before for stage in own_stages(cfg, pp_rank))


def waiting(cfg: Config, rows: int) -> float:
    """Which share of a step of that many rows the ranks of the pipeline wait, by the estimated costs of the stages."""
    p, spec = cfg.parallel, speech_lm.spec(cfg)
    costs = [sum(unit_cost(cfg, spec, unit) for unit in speech_lm.units(cfg, stage)) for stage in stages(cfg)]
    return idle_share(orders(schedule_of(cfg), p.pp, p.pp_chunks, rows), len(costs), costs=costs)

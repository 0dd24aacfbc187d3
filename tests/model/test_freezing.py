"""Freezing: NeMo's meaning of the patterns."""

from model import params
from model.freezing import freeze, unmatched
from model.params import P

LEAF = P((2, 2), ("ffn", "embed"))
SPEC = {"linear": {"weight": LEAF, "bias": P((2,), ("ffn",))}, "llm": [{"linear": LEAF}, {"norm": LEAF}],
        "statistics": P((2,), ("ffn",), kind="buffer")}


def trained(patterns: list[str], exceptions: list[str]) -> set[str]:
    return {name for name, p in params.named_leaves(freeze(SPEC, patterns, exceptions)) if p.trained and p.kind == "param"}


def test_a_pattern_must_match_from_the_start_of_a_path_but_not_to_its_end() -> None:
    assert trained(["linear"], []) == {"llm.0.linear", "llm.1.norm"}
    assert trained([r"llm\.\d\.linear"], []) == {"linear.weight", "linear.bias", "llm.1.norm"}
    assert trained(["norm"], []) == {"linear.weight", "linear.bias", "llm.0.linear", "llm.1.norm"}


def test_exceptions_come_first() -> None:
    assert trained([r"linear\..+"], ["linear.bias"]) == {"linear.bias", "llm.0.linear", "llm.1.norm"}
    assert trained([".*"], [".*norm"]) == {"llm.1.norm"}


def test_what_was_frozen_before_stays_frozen() -> None:
    once = freeze(SPEC, ["linear"], [])
    again = freeze(once, [], ["linear"])
    assert not any(p.trained for name, p in params.named_leaves(again) if name.startswith("linear"))


def test_patterns_without_a_parameter_are_found() -> None:
    assert unmatched(["linear.bias", "llm.1.norm"], ["linear", "inear", "llm.1", "norm"]) == ["inear", "norm"]

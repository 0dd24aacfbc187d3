"""Cases of the benchmarks: what they list exists, CPU versions meet the bars of `python -m perf accuracy`, floors are floors."""

import json

import pytest
import torch

from perf import report, roofline
from perf.accuracy import WORST_BF16, WORST_FP32, case_records
from perf.calls import Call, error, unavailable
from perf.cases import Operation, Work, operations, speech_lengths
from perf.cpu import peak_bytes

OPERATIONS = operations()
CPU = torch.device("cpu")


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_cpu_versions_meet_the_bars(operation: Operation) -> None:
    names = [name for name in operation.implementations if name != "reference" and not unavailable(operation, name, CPU)]
    assert operation.having("accuracy")
    for name in names:
        for case in operation.having("accuracy"):
            for record in case_records(operation, name, case, CPU):
                good = record["error"] <= WORST_FP32 if record["over_torch"] is None else record["over_torch"] <= WORST_BF16
                assert good, " ".join(map(str, record.values()))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_call_repeats_itself(operation: Operation) -> None:
    """The same inputs every time, and gradients for those that the case names."""
    case = operation.having("accuracy")[0]
    first, second = (Call.drawn(operation, case, CPU, torch.float32) for _ in range(2))
    assert set(case.gradients) <= set(first.inputs)
    for name, value in first.inputs.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, second.inputs[name]), name
            assert value.requires_grad == (name in case.gradients and value.is_floating_point()), name
    got, again = first.results("reference"), second.results("reference")
    assert all(error(got[name], value) == 0 for name, value in again.items())


def test_names_and_work() -> None:
    assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS)
    for operation in OPERATIONS:
        for use in ("accuracy", "compile", "model"):
            names = [case.name for case in operation.having(use)]
            assert len(set(names)) == len(names), (operation.name, use)
        assert all(case.forward and case.backward for case in operation.having("model")), operation.name


def test_relative_error() -> None:
    exact = torch.tensor([3.0, 4.0, -torch.inf])
    assert error(torch.tensor([3.0, 4.5, -torch.inf]), exact) == pytest.approx(0.1)
    assert error(torch.zeros(2) + 0.5, torch.zeros(2)) == pytest.approx(0.5**0.5)
    for wrong in ([3.0, torch.nan, -torch.inf], [3.0, 4.0, torch.inf], [3.0, 4.0, 0.0], [3.0, 4.0]):
        assert error(torch.tensor(wrong), exact) == float("inf")


def test_floor_is_the_slower_of_arithmetic_and_memory() -> None:
    assert Work(2e12, 1e9).seconds(1e12, 1e9) == 2
    assert Work(1e12, 3e9).seconds(1e12, 1e9) == 3
    rows = roofline.estimates([operation for operation in OPERATIONS if operation.name == "linear_cross_entropy"])
    nano = {row["pass"]: row for row in rows if row["case"] == "Nemotron-3-Nano 8k"}
    assert nano["forward"]["floor ms"] + nano["backward"]["floor ms"] == pytest.approx(21.9, abs=0.05)  # three products
    assert {row["bound"] for row in nano.values()} == {"arithmetic"}


def test_peak_memory() -> None:
    def three_at_most() -> None:
        a, b = torch.empty(2**20), torch.empty(2**20)
        del a
        c, d = torch.empty(2**20), torch.empty(2**20)
        del b, c, d

    assert peak_bytes(three_at_most) == 3 * 4 * 2**20


def test_speech_lengths_fill_the_row() -> None:
    lengths = speech_lengths(8192)
    assert sum(lengths) == 8192
    assert all(30 <= n <= 600 for n in lengths[:-1])
    assert len(set(lengths)) > 20


def test_saved_tables_name_their_circumstances(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    folder = report.save("table", [{"a": 1, "b": 0.5}, {"a": 2, "b": 0.25}], "NVIDIA H200 (80 GB)")
    assert folder.name == "nvidia-h200--80-gb"
    assert (folder / "table.csv").read_text().split() == ["a,b", "1,0.5", "2,0.25"]
    saved = json.loads((folder / "table.json").read_text())
    assert saved["device"] == "NVIDIA H200 (80 GB)"
    assert {"device", "date", "torch", "triton", "cuda", "python"} <= set(saved)
    roofline.plot([{"operation": "a", "GFLOP": 1.0, "MB": 2.0, "floor ms": 0.1}], tmp_path / "plot.png", "title", 1e12, 1e11)
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_misspelt_operation_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from perf import __main__

    monkeypatch.setattr("sys.argv", ["perf", "compile", "--only", "attentoin"])
    assert __main__.main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --only names attentoin, which is no operation; choose among attention, ")
    assert err.count("\n") == 1

"""Fifty prompts at once, of every family, against the owner and against one by one: the same tokens, where no two are as good as equal."""

from pathlib import Path
from typing import Any

import pytest

from tests.parity.check import CASES
from tests.parity.generation import PROMPTS, compare

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("name", CASES)
def test_fifty_prompts_at_once(transformers: Any, name: str, tmp_path: Path) -> None:
    answered = compare(transformers, name, tmp_path, every=5)
    assert not answered.differing
    assert answered.clear >= PROMPTS - 4
    assert answered.distinct > PROMPTS // 5

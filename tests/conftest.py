"""Fixtures that several test files share."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def smollm():
    """The course's model in float32 (`make test` fetches its file first)."""
    from opsbyte import llm

    return llm.load()


@pytest.fixture(scope="session")
def smollm_golden():
    """Prompts with the ids, logits and greedy tokens of transformers."""
    return json.loads((GOLDEN / "smollm2.json").read_text())

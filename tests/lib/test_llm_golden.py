"""The real model against transformers (see tests/golden)."""
from __future__ import annotations

import pytest
import torch
from opsbyte import llm


@pytest.mark.parametrize("case", [0, 1])
def test_golden(smollm, smollm_golden, case):
    golden = smollm_golden[case]
    ids = smollm.tokenizer.encode(golden["prompt"])
    assert ids == golden["ids"]

    logits = smollm(torch.tensor([ids]))[0, -1]
    assert logits.topk(5).indices.tolist() == golden["top5_ids"]
    expected = torch.tensor(golden["top5_logits"])
    torch.testing.assert_close(logits.topk(5).values, expected, rtol=0, atol=1e-2)

    mean = llm.nll(smollm, golden["prompt"]).mean().item()
    assert mean == pytest.approx(golden["mean_nll"], abs=1e-3)

    generation = llm.generate(smollm, golden["prompt"], 24)
    assert generation.prompt_ids == golden["ids"]
    assert generation.ids == golden["greedy"]

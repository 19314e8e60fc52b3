"""Dense attention against golden data; properties follow below."""
from pathlib import Path

import numpy as np
import pytest
import torch

from opsbyte.attention import attention

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ("self", "decode", "chunked_prefill", "window", "window_sinks")


def golden(case):
    data = np.load(GOLDEN / "softmax_attention.npz")
    q, k, v, out = (torch.tensor(data[f"{case}.{x}"]) for x in ("q", "k", "v", "out"))
    options = {
        "window": int(data[f"{case}.window"]) or None,
        "sinks": int(data[f"{case}.sinks"]),
    }
    return q, k, v, out, options


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    q, k, v, out, options = golden(case)
    torch.testing.assert_close(attention(q, k, v, **options), out, rtol=1e-4, atol=1e-5)

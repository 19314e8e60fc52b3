"""Accelerators: what a machine can compute, move and hold."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Bits per stored element. mxfp4: 32 fp4 values share one 8-bit scale.
DTYPE_BITS = {
    "fp64": 64, "fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16,
    "fp8": 8, "int8": 8, "int4": 4, "fp4": 4, "mxfp4": 4.25,
}


def dtype_bytes(dtype: str) -> float:
    """Bytes per element of `dtype`. Raises ValueError on an unknown name."""
    raise NotImplementedError


@dataclass(frozen=True)
class Accelerator:
    """One device. FLOP/s are dense peaks; a multiply-add is 2 FLOPs."""

    name: str                      # "h100-sxm"
    label: str                     # "NVIDIA H100 SXM"
    flops: Mapping[str, float]     # dtype -> dense peak, FLOP/s
    bandwidth: float               # slow memory (HBM, DRAM), bytes/s
    memory: float                  # capacity of the slow memory, bytes
    link_bandwidth: float | None = None  # to a peer, per direction, bytes/s
    overhead: float = 0.0          # seconds per operator launched
    # dtype of the weights -> fraction of peak reached in practice (see TOML)
    efficiency: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    date: str = ""

    def peak(self, dtype: str) -> float:
        """Dense peak FLOP/s for `dtype`; KeyError-like ValueError lists known."""
        raise NotImplementedError

    def ops_per_byte(self, dtype: str) -> float:
        """The ridge: peak FLOP/s over bytes/s."""
        raise NotImplementedError

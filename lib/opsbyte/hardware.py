"""Accelerators: what a machine can compute, move and hold.

Every constant lives in `data/accelerators.toml`, with its source and the date
it was looked up. Peaks are dense (never the doubled "with sparsity" figure),
GB is 1e9 bytes, and a multiply-add is 2 FLOPs.
"""
from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

# Bits per stored element. mxfp4: 32 fp4 values share one 8-bit scale.
DTYPE_BITS = {
    "fp64": 64, "fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16,
    "fp8": 8, "int8": 8, "int4": 4, "fp4": 4, "mxfp4": 4.25,
    # Groups of 32, 64 or 128 weights that share a 16-bit scale and zero point
    # (gpt-fast, torchao, MLX); gf4 packs 8 weights and their scale in 32 bits.
    "int4-g32": 5, "int4-g64": 4.5, "int4-g128": 4.25, "gf4": 4,
}


def dtype_bytes(dtype: str) -> float:
    """Bytes per element of `dtype`. Raises ValueError on an unknown name."""
    if dtype not in DTYPE_BITS:
        raise ValueError(unknown("dtype", dtype, DTYPE_BITS))
    return DTYPE_BITS[dtype] / 8


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """An error text for a `name` that is not in `known`: near matches, or all."""
    known = list(known)
    asked = str(name).lower()
    near = [k for k in known if asked and k.startswith(asked)]
    near += difflib.get_close_matches(asked, known, n=4, cutoff=0.5)
    near = list(dict.fromkeys(near))[:6]
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}"
    return f"{what}: unknown name {name!r}; {hint}"


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
    notes: str = ""                # where sources disagree, and which one is used

    def __post_init__(self):
        for name in ("flops", "efficiency"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        for dtype in (*self.flops, *self.efficiency):
            dtype_bytes(dtype)
        positive = {"bandwidth": self.bandwidth, "memory": self.memory}
        positive |= {f"flops[{d!r}]": rate for d, rate in self.flops.items()}
        for name, value in positive.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be positive and finite, got {value!r}")

    def __hash__(self):            # a dict field has none of its own
        return hash((self.name, self.bandwidth, self.memory))

    def peak(self, dtype: str) -> float:
        """Dense peak FLOP/s for `dtype`. Raises ValueError, listing the known."""
        if dtype not in self.flops:
            raise ValueError(unknown(f"dtype on {self.name}", dtype, self.flops))
        return self.flops[dtype]

    def ops_per_byte(self, dtype: str) -> float:
        """The ridge: peak FLOP/s over bytes/s."""
        return self.peak(dtype) / self.bandwidth


@cache
def _catalogue() -> dict[str, Accelerator]:
    """The data file, read once. Its units (TFLOP/s, GB/s, GB, us) become SI."""
    text = resources.files(__package__).joinpath("data/accelerators.toml").read_text(
        encoding="utf-8")
    return {name: _from_table(name, row) for name, row in tomllib.loads(text).items()}


def _from_table(name: str, row: dict) -> Accelerator:
    link = row.get("link_gbs")
    return Accelerator(
        name=name,
        label=row["label"],
        flops={dtype: tera * 1e12 for dtype, tera in row["tflops"].items()},
        bandwidth=row["bandwidth_gbs"] * 1e9,
        memory=row["memory_gb"] * 1e9,
        link_bandwidth=None if link is None else link * 1e9,
        overhead=row.get("overhead_us", 0.0) * 1e-6,
        efficiency=row.get("efficiency", {}),
        source=row["source"],
        date=row["date"],
        notes=row.get("notes", ""),
    )


def accelerators() -> tuple[Accelerator, ...]:
    """All accelerators of the catalogue, in its order."""
    return tuple(_catalogue().values())


def accelerator(name: str) -> Accelerator:
    """The accelerator called `name`. Raises ValueError with near matches."""
    known = _catalogue()
    if name not in known:
        raise ValueError(unknown("accelerator", name, known))
    return known[name]

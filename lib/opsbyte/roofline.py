"""How long it takes: the roofline, operator by operator, and overhead.

An operator needs its FLOPs at the peak rate and its bytes at the bandwidth, at
the same time, so it takes the longer of the two (Williams, Waterman and
Patterson, 2009). A pass is a sequence of operators, so its time is the sum of
those, plus an overhead per launch: the gap between two kernels, in which
nothing streams.

    t = sum over operators of max(FLOPs / (e peak), bytes / (e bandwidth))
        + launches x overhead

e is the one efficiency that `data/accelerators.toml` states, with its reason,
for a device and the dtype of the weights: what is reached of the datasheet.
"""
from __future__ import annotations

from dataclasses import dataclass

from opsbyte.cost import Cost, Operator
from opsbyte.hardware import Accelerator, dtype_bytes
from opsbyte.models import ModelConfig

# Seconds that an all-reduce of nothing takes inside a node. NCCL's own model of
# its low-latency protocol: 3.6 us and 0.47 for each of 2 (n - 1) steps around a
# ring, or 4.4 and 0.52 for each of 2 log2(n) along a tree (src/graph/tuning.cc).
# That is 4.5 us for 2 devices and 7.5 for 8; we take 6 for any number.
COLLECTIVE_LATENCY = 6e-6


@dataclass(frozen=True)
class OperatorTime:
    """Seconds of one operator, all its launches together."""

    name: str
    compute: float                 # FLOPs over FLOP/s
    memory: float                  # bytes over bytes/s
    overhead: float                # launches times overhead
    link: float = 0.0              # all-reduces between devices

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory) + self.overhead + self.link

    @property
    def bound(self) -> str:
        """What takes most of the time: compute, memory, overhead or link."""
        resources = {"compute": self.compute, "memory": self.memory,
                     "overhead": self.overhead, "link": self.link}
        return max(resources, key=resources.get)


def ridge(accelerator: Accelerator, dtype: str = "bf16") -> float:
    """FLOPs per byte above which `accelerator` is compute bound."""
    return accelerator.ops_per_byte(dtype)


def attainable(intensity: float, accelerator: Accelerator,
               dtype: str = "bf16") -> float:
    """FLOP/s that an operator of this intensity can reach, at most."""
    if intensity < 0:
        raise ValueError(f"intensity must not be negative, got {intensity}")
    return min(accelerator.peak(dtype), intensity * accelerator.bandwidth)


def stated_efficiency(accelerator: Accelerator, weight_dtype: str) -> float:
    """The catalogue's efficiency for weights stored in `weight_dtype`: its own,
    that of its family ("int4" for "int4-g64"), bf16's, or 1 if it has none."""
    known = accelerator.efficiency
    for dtype in (weight_dtype, weight_dtype.split("-")[0], "bf16"):
        if dtype in known:
            return known[dtype]
    return 1.0


def breakdown(cost: Cost, accelerator: Accelerator, *, devices: int = 1,
              efficiency: float | None = None,
              overhead: float | None = None) -> tuple[OperatorTime, ...]:
    """The timing of every operator of `cost`.

    devices: tensor parallel. FLOPs and bytes are split evenly, and the
        products that end attention and the MLP are summed by a ring
        all-reduce: 2 (n - 1) / n of the tensor over each device's link, and
        COLLECTIVE_LATENCY.
    efficiency: fraction of both peaks; None takes `stated_efficiency`.
    overhead: seconds per launch; None takes the accelerator's.

    Raises ValueError if the accelerator has no such dtype, or no link.
    """
    if devices < 1:
        raise ValueError(f"devices must be at least 1, got {devices}")
    if devices > 1 and not accelerator.link_bandwidth:
        raise ValueError(f"devices: {accelerator.name} has no link_bandwidth in "
                         f"the catalogue, so it must be 1, got {devices}")
    if efficiency is None:
        efficiency = stated_efficiency(accelerator, cost.weight_dtype)
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency must be in (0, 1], got {efficiency}")
    if overhead is None:
        overhead = accelerator.overhead
    peak = efficiency * devices * accelerator.peak(cost.dtype)
    bandwidth = efficiency * devices * accelerator.bandwidth

    def link(o: Operator) -> float:
        if devices == 1 or not o.reduce_bytes:
            return 0.0
        moved = 2 * (devices - 1) / devices * o.reduce_bytes
        return o.count * COLLECTIVE_LATENCY + moved / accelerator.link_bandwidth

    return tuple(
        OperatorTime(o.name, o.flops / peak, o.bytes / bandwidth,
               o.count * overhead, link(o))
        for o in cost.operators)


def time(cost: Cost, accelerator: Accelerator, *, devices: int = 1,
         efficiency: float | None = None, overhead: float | None = None) -> float:
    """Seconds that `cost` takes; the options are those of `breakdown`.

    efficiency=1 and overhead=0 give the bare roofline of the datasheet.
    """
    return sum(t.seconds for t in breakdown(
        cost, accelerator, devices=devices, efficiency=efficiency,
        overhead=overhead))


def bound(what: Cost | Operator | float, accelerator: Accelerator,
          dtype: str | None = None, **options) -> str:
    """What limits it: "compute", "memory", or for a Cost also "overhead".

    An intensity (FLOPs per byte) or an Operator is compared with the ridge;
    at the ridge both resources are busy, and we say "compute". For a Cost it
    is the resource that its operators spend most time on, with the options of
    `breakdown` ("link" is possible with several devices). dtype: of the
    arithmetic; a Cost knows its own, and it is bf16 otherwise.
    """
    if not isinstance(what, Cost):
        intensity = what.intensity if isinstance(what, Operator) else what
        ops_per_byte = ridge(accelerator, dtype or "bf16")
        return "compute" if intensity >= ops_per_byte else "memory"
    if dtype not in (None, what.dtype):
        raise ValueError(f"dtype: this cost is in {what.dtype}, got {dtype}")
    spent = dict.fromkeys(("compute", "memory", "overhead", "link"), 0.0)
    for t in breakdown(what, accelerator, **options):
        spent["compute" if t.compute >= t.memory else "memory"] += max(
            t.compute, t.memory)
        spent["overhead"] += t.overhead
        spent["link"] += t.link
    return max(spent, key=spent.get)


def critical_batch(model: ModelConfig, accelerator: Accelerator,
                   dtype: str = "bf16", weight_dtype: str | None = None) -> float:
    """Tokens in a pass from which the weights' products are compute bound.

    A token needs 2 FLOPs for each weight it uses, and the pass reads each
    weight's w bytes once, so n* = ridge w/2 (parameters / active parameters).
    It does not depend on the size of a dense model. Attention over the cache
    has no such batch: each sequence reads its own.
    """
    rows = 0 if model.tied else model.vocab * model.d_model   # looked up, not read
    sparsity = ((model.parameters() - rows)
                / model.active_parameters(embedding=False))
    w = dtype_bytes(weight_dtype or dtype)
    return ridge(accelerator, dtype) * w / 2 * sparsity

"""The scans of opsbyte.ssm against lean loops and other people's torch code.

    pip install -r tests/benchmarks/requirements.txt
    python tests/benchmarks/bench_ssm.py

float32. Sides take turns in one process, figures are medians, and every side is
checked against the others first. "Limit" is the least time that the arithmetic or
the traffic needs at rates measured here. Exit status 1 if a target is missed.

SSD is to be 10 times as fast as the leanest loop. That loop keeps its state in cache
and does about the same arithmetic: three operators a step, large enough to hide most
of their launches. So the ratio is bounded by the chunked form's four products. They
are timed by themselves, and "ceiling" is the ratio if all the rest took no time.

glibc gives freed blocks above 32 MiB back to the system, unless it is told to keep
them. The outputs pass that size between L = 8k and 16k, which bends any curve there, so
the lengths are timed both ways.
"""
from __future__ import annotations

import argparse
import math
import platform
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import linear_regression, median
from time import perf_counter

import torch
import torch.nn.functional as F
from common import keep_freed_memory, largest_resident_set, rounds
from opsbyte.ssm import selective_scan, ssd

LOG2_E = math.log2(math.e)
SCAN = dict(L=4096, D=512, N=16)
SSD = dict(L=8192, H=8, P=64, N=64)
LENGTHS = [1024 * 2**i for i in range(6)]
# Least speed-up that we hold ourselves to, by (what, over what).
TARGETS = {
    ("scan", "loop"): 2, ("scan", "mambapy"): 3,
    ("ssd", "loop"): 10, ("ssd", "transformers"): 2,
}


# -- selective scan ---------------------------------------------------------------


def scan_inputs(L: int, D: int, N: int):
    """u, delta `(1, D, L)`, A `(D, N)`, B, C `(1, N, L)`."""
    torch.manual_seed(0)
    u, delta = torch.randn(1, D, L), 0.1 * torch.rand(1, D, L)
    A = -torch.arange(1.0, N + 1).repeat(D, 1)
    return u, delta, A, torch.randn(1, N, L), torch.randn(1, N, L)


def scan_loop(u, delta, A, B, C):
    """The leanest loop that holds one state: five operators a step, none allocates."""
    delta, B = delta[0].T.contiguous(), B[0].T.contiguous()[..., None]
    du, C = delta * u[0].T, C[0].T.contiguous()[:, None, None]
    A = A.T.contiguous() * LOG2_E
    h, decay, y = torch.zeros_like(A), torch.empty_like(A), torch.empty_like(delta)
    steps = (t.unbind() for t in (delta, du, B, C, y[:, None, None]))
    for dt, x, b, c, out in zip(*steps, strict=True):
        torch.mul(A, dt, out=decay)                     # (N, D)
        h.mul_(decay.exp2_()).addcmul_(b, x)
        torch.bmm(c, h[None], out=out)                  # several times as fast as mv
    return y.T[None]


def scan_hoisted_loop(u, delta, A, B, C):
    """One operator a step, at the price of all decays and states in memory."""
    delta, B = delta[0].T.contiguous(), B[0].T.contiguous()[..., None]
    du, C = delta * u[0].T, C[0].T.contiguous()[:, None]
    decay = (delta[:, None] * (A.T.contiguous() * LOG2_E)).exp2_()  # (L, N, D)
    states = du[:, None] * B
    h = torch.zeros_like(decay[0])
    for a, b in zip(decay.unbind(), states.unbind(), strict=True):
        h = b.addcmul_(a, h)
    return torch.bmm(C, states)[:, 0].T[None]


def scan_mambapy(u, delta, A, B, C):
    """mamba.py's scan, Blelloch's algorithm in plain torch."""
    from mambapy.mamba import MambaBlock

    no_skip = torch.zeros(u.shape[1])
    return MambaBlock.selective_scan(None, u.mT, delta.mT, A, B.mT, C.mT, no_skip).mT


SCANS = {
    "chunked": selective_scan,
    "loop": scan_loop,
    "hoisted loop": scan_hoisted_loop,
    "parallel": partial(selective_scan, form="parallel"),
    "sequential": partial(selective_scan, form="sequential"),
    "mambapy": scan_mambapy,
}


def bench_scan(count: int, rates: dict) -> dict:
    L, D, N = SCAN.values()
    inputs = scan_inputs(**SCAN)
    sides = {name: partial(f, *inputs) for name, f in SCANS.items()}
    seconds = take_turns(sides, count)
    print(f"\nSelective scan, batch 1, L={L}, D={D}, N={N}: {L * D * N / 1e6:.1f}"
          f" million exponentials, {4 * L * D * N / 1e6:.0f} MB of states")
    # Per state: decay and write one product each, update, read: 2 FLOPs each. One
    # operator after the other, nine numbers pass through the cache: delta A (1), its
    # exponential (2), the write (1), the recurrence (4), the read (1).
    least = limits(rates, exponentials=L * D * N, flops=6 * L * D * N,
                   bytes=4 * L * (3 * D + 2 * N), cached=9 * 4 * L * D * N)
    for name, s in seconds.items():
        print(f"  {name:13}{s * 1e3:8.1f} ms ({least / s:4.0%} of the limit),"
              f" {s / seconds['chunked']:5.2f} times the chunked form's time,"
              f" {peak_memory(name) / 1e6:4.0f} MB extra at peak")
    return {("scan", k): seconds[k] / seconds["chunked"] for k in ("loop", "mambapy")}


def peak_memory(name: str) -> int:
    """Peak extra resident bytes of one call, in a process of its own."""
    command = [sys.executable, __file__, "--memory", name]
    return int(subprocess.check_output(command, text=True).split()[-1])


def report_memory(name: str) -> None:
    """Print by how much one call raises the peak of resident memory (Linux)."""
    SCANS[name](*scan_inputs(64, 32, 4))  # load what is loaded late
    inputs = scan_inputs(**SCAN)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = largest_resident_set()
    SCANS[name](*inputs)
    print(largest_resident_set() - before)


# -- state space duality ------------------------------------------------------------


def ssd_inputs(L: int, H: int, P: int, N: int, G: int):
    """x `(1, L, H, P)`, dt `(1, L, H)`, A `(H,)`, B, C `(1, L, G, N)`."""
    torch.manual_seed(0)
    x, dt = torch.randn(1, L, H, P), 0.1 * torch.rand(1, L, H)
    A = -torch.linspace(1, 16, H)
    return x, dt, A, torch.randn(1, L, G, N), torch.randn(1, L, G, N)


def ssd_loop(x, dt, A, B, C):
    """The leanest recurrence: three operators a step, none allocates."""
    _, L, H, P = x.shape
    G, N = B.shape[2:]
    wide = (L, G, 1, H // G * P)                        # the heads of a group as one
    decay = torch.exp(dt * A)[0].repeat_interleave(P, 1).view(wide)
    value, y = (x * dt[..., None]).view(wide), x.new_empty(wide)
    S = x.new_zeros(G, N, wide[-1])
    steps = (decay, value, B[0, ..., None], C[0, :, :, None], y)
    for a, v, b, c, out in zip(*(t.unbind() for t in steps), strict=True):
        S.mul_(a).addcmul_(b, v)                        # (G, N, heads · P)
        torch.bmm(c, S, out=out)
    return y.view(1, L, H, P)


def ssd_products(L: int, H: int, P: int, N: int, G: int, *, Q: int, chunks: int):
    """A function that does the chunked form's four products and nothing else.

    All on the same operands, `chunks` chunks at a time, so that they stay in cache.
    """
    def operands(batch, rows, inner, columns):
        sizes = (rows, inner), (inner, columns), (rows, columns)
        return [torch.randn(chunks * batch, *size) for size in sizes]

    products = [operands(G, Q, N, Q), operands(H, Q, Q, P),
                operands(G, N, Q, H // G * P), operands(G, Q, N, H // G * P)]

    def run() -> None:
        for _ in range(L // (Q * chunks)):
            for a, b, out in products:
                torch.bmm(a, b, out=out)

    return run


def ssd_transformers(x, dt, A, B, C, *, chunk):
    """transformers' torch path for Mamba-2 and its descendants."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    return mamba2_chunk_scan(x, dt, A, B, C, chunk_size=chunk)


def bench_ssd(count: int, rates: dict, G: int) -> dict:
    L, H, P, N = SSD.values()
    inputs = ssd_inputs(**SSD, G=G)
    sides = {"chunked": partial(ssd, *inputs), "loop": partial(ssd_loop, *inputs)}
    sides["recurrent"] = partial(ssd, *inputs, form="recurrent")
    chunks = (32, 64, 128, 256)
    theirs = {Q: partial(ssd_transformers, *inputs, chunk=Q) for Q in chunks}
    best = min(tried := take_turns(theirs, 3), key=tried.get)
    sides["transformers"] = theirs[best]
    sides["its products"] = ssd_products(**SSD, G=G, Q=64, chunks=4)
    seconds = take_turns(sides, count)
    print(f"\nSSD, batch 1, L={L}, {H} heads of {P}, state {N}, {G} group(s);"
          f" transformers at its best chunk, {best}")
    Q = 64
    flops = 2 * L * (G * Q * N + H * Q * P + 2 * H * P * N)  # the four products
    least = limits(rates, exponentials=L * Q * H, flops=flops,
                   bytes=4 * L * (2 * H * P + H + 2 * G * N))
    for name, s in seconds.items():
        print(f"  {name:13}{s * 1e3:8.1f} ms ({least / s:4.0%} of the limit),"
              f" {s / seconds['chunked']:6.2f} times the chunked form's time")
    print("  ceiling: with nothing but its products the chunked form would be"
          f" {seconds['loop'] / seconds['its products']:.1f} times as fast as the loop")
    others = ("loop", "transformers")
    return {("ssd", k): seconds[k] / seconds["chunked"] for k in others}


# -- time over length -----------------------------------------------------------------


def bench_lengths(count: int) -> int:
    """Time against L; the number of slopes beyond 4k that are not 0.9 to 1.1."""
    print("\nTime over length, ms (8 heads of 64; the scan with D=512, N=16)")
    print(f"  {'L':17}" + "".join(f"{L:9}" for L in LENGTHS) + "    slope beyond 4k")
    linear = ("selective scan", "SSD")
    curves(linear, count, "fresh pages for large outputs")
    keep_freed_memory()
    slopes = curves((*linear, "causal attention"), count, "freed memory kept")
    return sum(not 0.9 <= slopes[name] <= 1.1 for name in linear)


def curves(names: tuple, count: int, label: str) -> dict:
    """Print a line for each name, and return the slopes."""
    print(f"  {label}:")
    times = {name: [] for name in names}
    for L in LENGTHS:
        q = torch.randn(1, 8, L, 64)
        sides = {
            "selective scan": partial(selective_scan, *scan_inputs(L, 512, 16)),
            "SSD": partial(ssd, *ssd_inputs(**{**SSD, "L": L}, G=1)),
            "causal attention": partial(
                F.scaled_dot_product_attention, q, q, q, is_causal=True
            ),
        }
        quick = {name: sides[name] for name in names if name != "causal attention"}
        slow = {name: sides[name] for name in names if name not in quick}
        faults = page_faults()
        seconds = take_turns(quick, count, same=False)
        faults = (page_faults() - faults) / (count + 1)
        seconds |= take_turns(slow, 3 if L <= 8192 else 1, same=False)
        for name, s in seconds.items():
            times[name].append(s)
    slopes = {}
    for name, seconds in times.items():
        far = [(math.log(L), math.log(s)) for L, s in zip(LENGTHS, seconds, strict=True)
               if L >= 4096]
        slopes[name] = linear_regression(*zip(*far, strict=True)).slope
        print(f"  {name:17}" + "".join(f"{s * 1e3:9.1f}" for s in seconds)
              + f"    {slopes[name]:.2f}")
    print(f"  ({faults:,.0f} page faults a round of scan and SSD at L={LENGTHS[-1]})")
    return slopes


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


# -- shared -----------------------------------------------------------------------


def take_turns(sides: dict, count: int, same: bool = True) -> dict:
    """Median seconds of each side, after a check that all results agree."""
    results = {name: side() for name, side in sides.items()}
    if same:
        first = next(iter(results.values()))
        scale = first.abs().max()
        for name, result in results.items():
            if result is None:
                continue
            error = (result - first).abs().max() / scale
            assert error < 1e-5, f"{name}: differs by {error:.1e} of the largest value"
    results.clear()
    return {name: median(t) for name, t in rounds(sides, count, warm=True).items()}


def measure_rates() -> dict:
    """What this machine reaches: FLOP/s in a product, exponentials/s, bytes/s.

    Bytes from memory in a sum, bytes in cache in the recurrence's own operator.
    """
    a, b = torch.randn(1024, 1024), torch.rand(2**18)  # b stays in cache
    big, out, small = torch.ones(2**26), torch.empty_like(a), torch.empty_like(b)
    b2, b3 = torch.rand_like(b), torch.rand_like(b)

    def best(f):
        end, least = perf_counter() + 0.5, math.inf
        while perf_counter() < end:
            start = perf_counter()
            f()
            least = min(least, perf_counter() - start)
        return least

    return {
        "flops": 2 * 1024**3 / best(lambda: torch.mm(a, a, out=out)),
        "exponentials": len(b) / best(lambda: torch.exp2(b, out=small)),
        "bytes": 4 * len(big) / best(big.sum),
        "cached": 16 * len(b) / best(lambda: torch.addcmul(b, b2, b3, out=small)),
    }


def limits(rates: dict, **needs: float) -> float:
    """Print each need over its rate; the longest of these times is the limit."""
    times = {what: need / rates[what] for what, need in needs.items()}
    for what, t in times.items():
        print(f"  limit by {what:13}{t * 1e3:6.1f} ms ({needs[what]:.3g} at"
              f" {rates[what]:.3g}/s)")
    return max(times.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=("scan", "ssd", "lengths"))
    parser.add_argument("--memory", choices=SCANS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        report_memory(options.memory)
        return 0
    rates, ratios, missed = measure_rates(), {}, 0
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__},"
          f" {torch.get_num_threads()} threads")
    with torch.inference_mode():
        if options.only in (None, "lengths"):
            missed = bench_lengths(options.rounds)
        keep_freed_memory()
        if options.only in (None, "scan"):
            ratios |= bench_scan(options.rounds, rates)
        if options.only in (None, "ssd"):
            ratios |= bench_ssd(options.rounds, rates, G=1)
            bench_ssd(options.rounds, rates, G=SSD["H"])
    print()
    for (what, over), ratio in ratios.items():
        target = TARGETS[what, over]
        missed += ratio < target
        print(f"{what} over {over}: {ratio:.2f} times (target {target})"
              + " MISSED" * (ratio < target))
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())

"""What this machine reaches: arithmetic, memory traffic, overhead.

Three numbers make the roofline of a machine, and each is what a simple kernel
reaches, not what a data sheet says:

- peak: the best rate of a square matrix product, over sizes;
- bandwidth: the rate of a stream that is read once from a working set far
  larger than the caches;
- overhead: the time of an operator that has next to nothing to do.

Other work on the machine can only slow a kernel down. So a time is a median,
which one interruption does not move, of the quietest of several short rounds;
a sweep goes over all its sizes once a round, so that a burst of other work
spoils one round of a few sizes and not a point. A peak is the best over sizes.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import torch

from opsbyte import _cache
from opsbyte.hardware import Accelerator

KIB, MIB = 2**10, 2**20

TORCH_DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32,
    "bf16": torch.bfloat16, "fp16": torch.float16,
}
GEMM_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
WORKING_SETS = tuple(16 * KIB * 2**i for i in range(16))  # 16 KiB to 512 MiB
BANDWIDTH_SET = WORKING_SETS[-1]  # beyond any cache of today
# Bytes counted per byte of working set. Each array is moved once: what the
# kernel asks for. A cache that fetches a line before writing to it moves more
# (write-allocate: 3/2 of the count for a copy, 4/3 for a triad), and whether it
# does is up to the library, so only "read" measures the memory itself.
KERNELS = ("read", "copy", "triad")

_ROUNDS = 3
_SAMPLE = 2e-4  # seconds; shorter calls are repeated within one sample
_VERSION = 1  # of the cached file


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median and the quartiles of `runs` samples."""

    median: float
    low: float
    high: float
    runs: int


@dataclass(frozen=True)
class Rate:
    """What a kernel reached at one size.

    size: rows of the matrices (`gemm`) or bytes of working set (`bandwidth`);
    rate: FLOP/s or bytes/s at the median time; timing: of one pass.
    """

    size: int
    rate: float
    timing: Timing


def synchronize() -> None:
    """Wait until the accelerator, if one is in use, has done all its work."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()


def timed(
    fn: Callable[[], object],
    *,
    budget: float = 0.2,
    min_runs: int = 5,
    rounds: int = 1,
    setup: Callable[[], object] | None = None,
    sync: Callable[[], object] = synchronize,
) -> Timing:
    """Time `fn()` for about `budget` seconds, warmed up by one call first.

    The budget is cut into `rounds`, each of at least `min_runs` samples, and
    the round with the smallest median is returned. A sample is one call, or as
    many as fill 0.2 ms when `fn` is shorter; with `setup`, which runs untimed
    before every sample, it is always one call. `sync` runs before each reading
    of the clock, so that work handed to a GPU is finished, not just queued.

    Raises ValueError if budget is negative or min_runs or rounds below 1.
    """
    if not budget >= 0:
        raise ValueError(f"budget must be at least 0 seconds, not {budget!r}")
    _positive("min_runs", min_runs)
    _positive("rounds", rounds)

    def sample(calls: int) -> float:
        if setup is not None:
            setup()
        sync()
        start = perf_counter()
        for _ in range(calls):
            fn()
        sync()
        return (perf_counter() - start) / calls

    sample(1)  # first touch of memory, kernels chosen or compiled
    calls = 1 if setup else max(1, int(_SAMPLE / max(sample(1), 1e-7)))
    best = None
    for _ in range(rounds):
        end = perf_counter() + budget / rounds
        samples: list[float] = []
        while len(samples) < min_runs or perf_counter() < end:
            samples.append(sample(calls))
        if best is None or median(samples) < median(best):
            best = samples
    low, middle, high = (
        quantiles(best, n=4, method="inclusive") if len(best) > 1 else best * 3
    )
    return Timing(middle, low, high, len(best))


def _once(fn: Callable[[], object]) -> float:
    synchronize()
    start = perf_counter()
    fn()
    synchronize()
    return perf_counter() - start


def device() -> torch.device:
    """The device measured by default: cuda, else mps, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def gemm(
    dtype: str = "fp32",
    sizes: Iterable[int] = GEMM_SIZES,
    *,
    budget: float = 0.2,
    on: torch.device | str | None = None,
) -> tuple[Rate, ...]:
    """FLOP/s of `(n, n) @ (n, n)`, 2 n^3 FLOPs, for each n of `sizes`.

    About `budget` seconds a size. From the second size on, one of which a
    product takes more than half of that is left out with all larger ones: a
    CPU without half-precision units may be a hundred times slower in fp16 than
    in fp32. The peak of the machine is the largest `rate`.

    Raises ValueError on an unknown dtype, one that the device does not have,
    or a size that is not a positive integer.
    """
    kind, place = _dtype(dtype), torch.device(on or device())
    sizes = sorted({_positive("sizes", n) for n in sizes})

    def one(n: int) -> Rate | None:
        a, b = (torch.randn(n, n, device=place).to(kind) for _ in "ab")
        out = torch.empty(n, n, dtype=kind, device=place)

        def product() -> None:
            torch.mm(a, b, out=out)

        seconds = min(_once(product), _once(product))
        if n > sizes[0] and seconds > budget / 2:
            return None
        timing = timed(product, budget=budget / _ROUNDS, min_runs=3)
        return Rate(n, 2 * n**3 / timing.median, timing)

    best: dict[int, Rate] = {}
    for _ in range(_ROUNDS):
        for n in sizes:
            try:
                rate = one(n)
            except (RuntimeError, TypeError) as error:
                raise ValueError(
                    f"dtype {dtype!r} does not work on {place}: {error}"
                ) from error
            if rate is None:
                break
            _keep(best, rate)
    return tuple(best.values())


def bandwidth(
    sizes: Iterable[int] = WORKING_SETS,
    *,
    kernel: str = "read",
    budget: float = 0.15,
    on: torch.device | str | None = None,
) -> tuple[Rate, ...]:
    """Bytes/s streamed through working sets of `sizes` bytes, in fp32.

    kernel, with the bytes counted, always the size of the working set:
    - "read": sum one array; all of it is read, nothing is written;
    - "copy": b = a, half is read and half is written;
    - "triad": a = b + s c, two thirds are read and a third is written.
    Lines fetched only to be overwritten (write-allocate) are not counted.

    A small working set is read many times in one call, each thread keeping to
    its own share, so that the call's overhead does not hide the caches. The
    copy and the triad make one pass a call.

    Raises ValueError on an unknown kernel or a size below 4 KiB.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, not {kernel!r}")
    place = torch.device(on or device())
    sizes = [_positive("sizes", n, least=4 * KIB) for n in sizes]

    def one(size: int) -> Rate:
        run, moved, passes = _stream(kernel, size, place)
        call = timed(run, budget=budget / _ROUNDS, min_runs=3)
        timing = Timing(
            call.median / passes, call.low / passes, call.high / passes, call.runs
        )
        return Rate(size, moved / timing.median, timing)

    best: dict[int, Rate] = {}
    for _ in range(_ROUNDS):
        for size in sizes:
            _keep(best, one(size))
    return tuple(best.values())


def _stream(
    kernel: str, size: int, place: torch.device
) -> tuple[Callable[[], object], int, int]:
    """A function that streams `size` bytes, bytes per pass, passes per call."""
    if kernel == "read":
        shares = torch.get_num_threads() if place.type == "cpu" else 64
        share = size // (4 * shares)
        passes = max(1, 16 * MIB // size)
        # A step of 0 along `passes`: the same bytes again and again.
        array = torch.ones(shares, 1, share, device=place)
        again = array.expand(shares, passes, share)
        out = torch.empty(shares, device=place)
        return (
            lambda: torch.sum(again, dim=(1, 2), out=out),
            4 * shares * share, passes,
        )
    count = 2 if kernel == "copy" else 3
    n = size // (4 * count)
    a, b, *more = (torch.ones(n, device=place) for _ in range(count))
    if kernel == "copy":
        return lambda: a.copy_(b), 8 * n, 1
    return lambda: torch.add(b, more[0], alpha=2.0, out=a), 12 * n, 1


def overhead(
    *, budget: float = 0.1, on: torch.device | str | None = None
) -> dict[str, Timing]:
    """Seconds per call of operators with next to nothing to compute.

    "add": two vectors of one element; "softmax": 64 elements; "linear": a
    token through a 64 x 64 layer, 16 KiB of weights. In inference mode, called
    from Python one after the other, about `budget` seconds each. On a GPU this
    is the time to launch, or to run when that is longer.
    """
    place = torch.device(on or device())
    one, row = torch.ones(1, device=place), torch.ones(1, 64, device=place)
    weight = torch.ones(64, 64, device=place)
    calls = {
        "add": lambda: torch.add(one, one),
        "softmax": lambda: torch.softmax(row, dim=-1),
        "linear": lambda: torch.nn.functional.linear(row, weight),
    }
    with torch.inference_mode():
        return {
            name: timed(call, budget=budget, rounds=_ROUNDS)
            for name, call in calls.items()
        }


def this_machine(
    dtype: str | Iterable[str] = "fp32", refresh: bool = False
) -> Accelerator:
    """This machine as an `Accelerator`, measured: peaks, bandwidth, overhead.

    `flops` holds the dtypes asked for and no other; `overhead` is the median
    over the operators of `overhead()`. The first call takes a few seconds a
    dtype. Values are kept in the course's cache directory, one file for each
    machine, device, number of threads and version of torch; `refresh=True`
    measures again. A file that cannot be read is replaced.

    Raises ValueError on an unknown dtype, or one that the device lacks.
    """
    dtypes = (dtype,) if isinstance(dtype, str) else tuple(dtype)
    for name in dtypes:
        _dtype(name)
    if not dtypes:
        raise ValueError(f"dtype must name at least one of {', '.join(TORCH_DTYPES)}")
    place = device()
    key = _identity(place)
    found = {} if refresh else _load(key)
    size = min(BANDWIDTH_SET, key["memory"] // 4)
    new = [name for name in dtypes if name not in found.get("flops", {})]
    first = not found
    if first:
        found = {"flops": {}, "date": date.today().isoformat()}
        found["bandwidth"] = bandwidth([size], budget=0.3, on=place)[0].rate
        found["overhead"] = median(t.median for t in overhead(on=place).values())
    for name in new:
        rates = gemm(name, GEMM_SIZES[1:], budget=0.15, on=place)
        found["flops"][name] = max(rate.rate for rate in rates)
    if first:  # memory is shared with other work: look again a few seconds later
        again = bandwidth([size], budget=0.3, on=place)[0].rate
        found["bandwidth"] = max(found["bandwidth"], again)
    if new:
        _store(key, found)
    return Accelerator(
        name="this-machine",
        label=key["label"],
        flops={name: found["flops"][name] for name in dtypes},
        bandwidth=found["bandwidth"],
        memory=key["memory"],
        overhead=found["overhead"],
        source="measured here by opsbyte.measure",
        date=found["date"],
    )


def _keep(best: dict[int, Rate], rate: Rate) -> None:
    """Record `rate` unless a quieter round has reached more at that size."""
    if rate.size not in best or rate.rate > best[rate.size].rate:
        best[rate.size] = rate


def _dtype(name: str) -> torch.dtype:
    if name not in TORCH_DTYPES:
        known = ", ".join(TORCH_DTYPES)
        raise ValueError(f"dtype must be one of {known} to be measured, not {name!r}")
    return TORCH_DTYPES[name]


def _positive(name: str, value: int, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be integers of at least {least}, not {value!r}")
    return value


def _identity(place: torch.device) -> dict[str, object]:
    """What the measured values depend on: the key of the cached file."""
    if place.type == "cuda":
        properties = torch.cuda.get_device_properties(place)
        label, memory = properties.name, properties.total_memory
    elif place.type == "mps":
        label, memory = _cpu_name() + " GPU", torch.mps.recommended_max_memory()
    else:
        threads = torch.get_num_threads()
        label = f"{_cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"
        memory = _ram()
    return {
        "version": _VERSION, "torch": torch.__version__, "device": place.type,
        "label": label, "memory": memory,
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.check_output(command, text=True).strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"


def _ram() -> int:
    """Bytes of main memory."""
    if sys.platform == "win32":
        import ctypes

        class Status(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong)] + [
                (name, ctypes.c_ulonglong) for name in ("total", *"abcdef")
            ]

        status = Status(length=ctypes.sizeof(Status))
        ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return status.total
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _path(key: Mapping[str, object]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return _cache.cache_dir() / f"machine-{digest[:16]}.json"


def _load(key: Mapping[str, object]) -> dict:
    """The values stored for `key`, or {} if there are none to be trusted."""
    try:
        stored = json.loads(_path(key).read_text())
        numbers = [stored["bandwidth"], stored["overhead"], *stored["flops"].values()]
        sound = all(math.isfinite(x) and x > 0 for x in numbers)
        if stored["key"] == key and sound and isinstance(stored["date"], str):
            return stored
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}


def _store(key: Mapping[str, object], found: Mapping[str, object]) -> None:
    """Write in one step, so that no reader sees half a file."""
    with contextlib.suppress(OSError):  # a cache is a convenience
        path = _path(key)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        with os.fdopen(handle, "w") as file:
            json.dump({**found, "key": dict(key)}, file, indent=1)
        os.replace(name, path)

"""What the benchmarks share: timing in turns, and the memory of a process."""
import ctypes
import gc
import re
import resource
from pathlib import Path
from time import perf_counter


def rounds(forms: dict, count: int, *, warm: bool = False) -> dict[str, list[float]]:
    """Seconds of each form in each round; taking turns, all meet the same noise.

    A first round warms up, unless they are `warm` already. Garbage collection is off,
    as in timeit: the tens of thousands of views that a loop makes would set it off.
    """
    seconds = {name: [] for name in forms}
    gc.collect()
    gc.disable()
    try:
        for n in range(warm, count + 1):
            for name, form in forms.items():
                start = perf_counter()
                form()
                if n:
                    seconds[name].append(perf_counter() - start)
    finally:
        gc.enable()
    return seconds


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed, for good. Other libraries are left alone.

    It gives large blocks back to the system, and each page of the next one faults:
    who comes after a form that freed much would pay for it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: give nothing back
        mallopt(-4, 0)          # M_MMAP_MAX: no blocks of their own


def largest_resident_set() -> int:
    """In bytes, of this process since it began."""
    status = Path("/proc/self/status")
    if status.exists():                   # Linux: ru_maxrss may be the parent's
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

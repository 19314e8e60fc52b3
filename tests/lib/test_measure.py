"""Measurement: the logic with a fake clock, the numbers with wide bounds."""
import json
import math
from pathlib import Path

import pytest
import torch
from opsbyte import measure
from opsbyte.hardware import Accelerator


class Clock:
    """A clock that moves only when the timed function says so."""

    def __init__(self, durations):
        self.now, self.durations, self.calls = 0.0, iter(durations), 0

    def __call__(self):
        return self.now

    def work(self):
        self.calls += 1
        self.now += next(self.durations)


@pytest.fixture
def clock(monkeypatch):
    def make(durations):
        fake = Clock(durations)
        monkeypatch.setattr(measure, "perf_counter", fake)
        return fake
    return make


def endless(value):
    while True:
        yield value


def test_median_and_quartiles(clock):
    # One warm-up and one calibrating call, then the five that count.
    fake = clock([9, 9, 1, 5, 2, 4, 3])
    timing = measure.timed(fake.work, budget=0, min_runs=5)
    assert timing == measure.Timing(median=3, low=2, high=4, runs=5)
    assert fake.calls == 7


def test_one_interruption_does_not_move_the_median(clock):
    fake = clock([1, 1, 1, 1, 1000, 1, 1])
    assert measure.timed(fake.work, budget=0, min_runs=5).median == 1


def test_one_run_has_no_spread(clock):
    timing = measure.timed(clock([7, 7, 3]).work, budget=0, min_runs=1)
    assert timing == measure.Timing(3, 3, 3, 1)


def test_the_quietest_round_counts(clock):
    fake = clock([5, 5] + [8, 8, 8] + [2, 3, 4] + [6, 6, 6])
    timing = measure.timed(fake.work, budget=0, min_runs=3, rounds=3)
    assert timing == measure.Timing(3, 2.5, 3.5, 3)


def test_the_budget_is_spent_and_shared_by_the_rounds(clock):
    fake = clock(endless(0.5))
    assert measure.timed(fake.work, budget=10, min_runs=3).runs == 20
    assert measure.timed(fake.work, budget=10, min_runs=3, rounds=4).runs == 5


def test_short_calls_share_a_sample(clock):
    fake = clock(endless(2**-16))  # 15 us: 13 calls in 0.2 ms
    timing = measure.timed(fake.work, budget=0, min_runs=3)
    assert timing == measure.Timing(2**-16, 2**-16, 2**-16, 3)
    assert fake.calls == 2 + 3 * 13


def test_setup_is_untimed_and_runs_before_every_call(clock):
    fake = clock(endless(1e-6))
    order = []

    def setup():
        order.append("setup")
        fake.now += 100

    def work():
        order.append("work")
        fake.work()

    timing = measure.timed(work, budget=0, min_runs=4, setup=setup)
    assert timing.median == pytest.approx(1e-6, rel=1e-6)
    assert order == ["setup", "work"] * 5


def test_queued_work_is_waited_for(clock):
    fake = clock(endless(0))
    queue = []

    def sync():
        while queue:
            fake.now += queue.pop()

    timing = measure.timed(
        lambda: queue.append(2.0), budget=0, min_runs=3, sync=sync)
    assert timing.median == pytest.approx(2.0)


@pytest.mark.parametrize("options", [
    {"budget": -1}, {"budget": math.nan}, {"min_runs": 0}, {"rounds": 0},
    {"min_runs": 2.5},
])
def test_timed_refuses(options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        measure.timed(lambda: None, **options)


@pytest.mark.parametrize("dtype", measure.TORCH_DTYPES)
def test_gemm_rates(dtype, monkeypatch):
    monkeypatch.setattr(measure, "_once", lambda fn: 0.0)  # however busy it is here
    rates = measure.gemm(dtype, (32, 8), budget=0.01, on="cpu")
    assert [rate.size for rate in rates] == [8, 32]
    for rate in rates:
        assert rate.rate == pytest.approx(2 * rate.size**3 / rate.timing.median)
        assert rate.timing.low <= rate.timing.median <= rate.timing.high


def test_gemm_leaves_out_what_would_take_too_long(clock, monkeypatch):
    fake = clock(endless(0))

    def mm(a, b, out):  # 1e6 FLOP/s
        fake.now += 2 * len(a) ** 3 / 1e6

    monkeypatch.setattr(measure.torch, "mm", mm)
    rates = measure.gemm("fp32", (8, 16, 32, 64, 128), budget=0.2, on="cpu")
    assert [rate.size for rate in rates] == [8, 16, 32]  # 64 would take 0.52 s
    assert all(rate.rate == pytest.approx(1e6) for rate in rates)
    # The smallest is measured however slow it is: there is always a peak.
    (only,) = measure.gemm("fp32", (128, 256), budget=0.2, on="cpu")
    assert only.size == 128 and only.rate == pytest.approx(1e6)


def test_gemm_keeps_the_quietest_round_of_each_size(monkeypatch):
    times = iter([0.04, 0.02, 0.03])
    monkeypatch.setattr(
        measure, "timed", lambda fn, **_: measure.Timing(next(times), 0, 9, 3))
    (rate,) = measure.gemm("fp32", (8,), on="cpu")
    assert rate.rate == 2 * 8**3 / 0.02


@pytest.mark.parametrize("kernel", measure.KERNELS)
@pytest.mark.parametrize("size", [4096, 3 * 4096 + 20, 2**20])
def test_streams_move_what_they_count(kernel, size):
    """The bytes counted are those of the arrays that the call touches."""
    run, moved, passes = measure._stream(kernel, size, torch.device("cpu"))
    assert 0.99 * size <= moved <= size and passes >= 1
    result = run()
    if kernel == "read":  # ones: the sum is the number of elements read
        assert result.sum().item() * 4 == moved * passes
    else:
        assert result.numel() * 4 * (2 if kernel == "copy" else 3) == moved
        assert torch.all(result == (1 if kernel == "copy" else 3))


def test_bandwidth_rates():
    rates = measure.bandwidth((8192, 65536), budget=0.01, on="cpu")
    assert [rate.size for rate in rates] == [8192, 65536]
    for rate in rates:  # thread shares may leave a few bytes out
        assert rate.rate == pytest.approx(rate.size / rate.timing.median, rel=0.01)


def test_overhead_names_its_operators():
    times = measure.overhead(budget=0.01, on="cpu")
    assert set(times) == {"add", "softmax", "linear"}
    assert all(1e-8 < t.median < 1 for t in times.values())


@pytest.mark.parametrize("bad", ["int8", "float32", "", None])
def test_unknown_dtype(bad):
    with pytest.raises(ValueError, match="dtype must be one of fp64, fp32, bf16"):
        measure.gemm(bad)
    with pytest.raises(ValueError, match="dtype"):
        measure.this_machine([bad])


def test_no_dtype_at_all():
    with pytest.raises(ValueError, match="at least one"):
        measure.this_machine([])


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "8"])
def test_sizes_must_be_positive_integers(size):
    with pytest.raises(ValueError, match="sizes"):
        measure.gemm("fp32", [size])
    with pytest.raises(ValueError, match="sizes"):
        measure.bandwidth([size])


def test_unknown_kernel():
    with pytest.raises(ValueError, match="read, copy, triad, not 'scale'"):
        measure.bandwidth((8192,), kernel="scale")


# What a first call measures, in this order: bandwidth before and after the rest.
FIRST = ["bandwidth", "overhead", "fp32", "bandwidth"]


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """this_machine() with its measurements replaced and counted."""
    monkeypatch.setenv("OPSBYTE_CACHE", str(tmp_path))
    timing = measure.Timing(1e-6, 1e-6, 1e-6, 3)
    calls = []

    def gemm(dtype, sizes=(), **_):
        calls.append(dtype)
        return tuple(measure.Rate(n, n * 1e9, timing) for n in (64, 512, 128))

    def bandwidth(sizes, **_):
        calls.append("bandwidth")
        return (measure.Rate(sizes[0], 20e9, timing),)

    def overhead(**_):
        calls.append("overhead")
        return dict.fromkeys(("a", "b", "c"), timing)

    for fake in (gemm, bandwidth, overhead):
        monkeypatch.setattr(measure, fake.__name__, fake)
    return calls


def stored() -> list[Path]:
    return sorted(measure._cache.cache_dir().iterdir())


def test_this_machine_is_an_accelerator(counted):
    here = measure.this_machine("bf16")
    assert isinstance(here, Accelerator) and here.name == "this-machine"
    assert dict(here.flops) == {"bf16": 512e9}
    assert here.bandwidth == 20e9 and here.overhead == 1e-6
    assert here.ops_per_byte("bf16") == pytest.approx(25.6)
    assert here.memory > 2**28 and here.label and here.date


def test_a_dtype_is_measured_once(counted):
    first = measure.this_machine("fp32")
    assert counted == FIRST
    assert measure.this_machine("fp32") == first
    assert set(measure.this_machine(("fp32", "bf16")).flops) == {"fp32", "bf16"}
    assert set(measure.this_machine("fp32").flops) == {"fp32"}
    assert counted == [*FIRST, "bf16"]
    assert len(stored()) == 1  # and no temporary file is left


def test_bandwidth_is_the_better_of_two_looks(counted, monkeypatch):
    timing, rates = measure.Timing(1, 1, 1, 1), iter([20e9, 25e9, 30e9, 12e9])
    monkeypatch.setattr(
        measure, "bandwidth",
        lambda sizes, **_: (measure.Rate(sizes[0], next(rates), timing),))
    assert measure.this_machine().bandwidth == 25e9
    assert measure.this_machine(refresh=True).bandwidth == 30e9


def test_refresh_measures_again(counted):
    measure.this_machine("fp32")
    counted.clear()
    measure.this_machine("fp32", refresh=True)
    assert counted == FIRST
    measure.this_machine("fp32")
    assert len(counted) == len(FIRST)


def test_threads_and_torch_version_are_part_of_the_key(counted, monkeypatch):
    measure.this_machine("fp32")
    monkeypatch.setattr(measure.torch, "__version__", "0.0")
    measure.this_machine("fp32")
    monkeypatch.setattr(measure.torch, "get_num_threads", lambda: 99)
    measure.this_machine("fp32")
    assert counted.count("fp32") == 3 and len(stored()) == 3


@pytest.mark.parametrize("damage", [
    lambda text: "", lambda text: text[: len(text) // 2], lambda text: "[]",
    lambda text: "null", lambda text: "\x00\xff",
    lambda text: text.replace("20000000000.0", "-1"),
    lambda text: text.replace("20000000000.0", "NaN"),
    lambda text: text.replace("20000000000.0", '"fast"'),
    lambda text: json.dumps({**json.loads(text), "flops": []}),
    lambda text: json.dumps({**json.loads(text), "key": {}}),
    lambda text: json.dumps({**json.loads(text), "date": 3}),
])
def test_a_damaged_file_is_replaced(counted, damage):
    good = measure.this_machine("fp32")
    (path,) = stored()
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text), encoding="latin-1")
    counted.clear()
    assert measure.this_machine("fp32") == good
    assert counted == FIRST
    assert json.loads(path.read_text()) == json.loads(text)


def test_a_cache_that_cannot_be_written_is_no_error(counted, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("read-only")

    monkeypatch.setattr(measure.tempfile, "mkstemp", refuse)
    assert measure.this_machine("fp32").bandwidth == 20e9


def test_this_machine_for_real(monkeypatch, tmp_path):
    """Bounds from a slow phone to a large GPU."""
    monkeypatch.setenv("OPSBYTE_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "GEMM_SIZES", (64, 256))
    monkeypatch.setattr(measure, "BANDWIDTH_SET", 2**26)
    here = measure.this_machine(("fp32", "bf16"))
    assert all(1e7 < rate < 1e16 for rate in here.flops.values())
    assert 1e7 < here.bandwidth < 1e14
    assert 1e-8 < here.overhead < 1
    assert measure.this_machine("bf16").flops["bf16"] == here.flops["bf16"]

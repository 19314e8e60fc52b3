"""The accelerator catalogue: published ridges, units, and refusals."""
import dataclasses
import itertools
import pickle
import re

import pytest
from opsbyte import hardware
from opsbyte.hardware import DTYPE_BITS, Accelerator, accelerator, accelerators

# Published dense peaks, 16 bit and fp8 (int8 where there is no fp8), TFLOP/s;
# bandwidth, TB/s; memory, GB; and the ridge that the same source prints. From
# Baseten (A10, A10G), llm-analysis (A100 40 GB), stas00/ml-engineering, the
# L4 datasheet, and scaling-book (TPUs).
PUBLISHED = {
    "a10": (125, None, 0.600, 24, 208.3),
    "a10g": (70, None, 0.600, 24, 116.7),
    "a100-40gb-sxm": (312, 624, 1.555, 40, 200.6),
    "a100-80gb-sxm": (312, 624, 2.039, 80, 153),
    "h100-sxm": (989, 1979, 3.35, 80, 295),
    "h100-pcie": (756, 1513, 2.0, 80, 378),
    "h200": (989, 1979, 4.8, 141, 206),
    "b200": (2250, 4500, 8.0, 180, 281),
    "gb200": (2500, 5000, 8.0, 186, 312),
    "mi300x": (1300, 2610, 5.3, 192, 245),
    "l40s": (362, 733, 0.86, 48, 421),
    "l4": (121, 242, 0.30, 24, 403),
    "tpu-v5e": (197, 394, 0.82, 16, 240),
    "tpu-v5p": (459, 918, 2.76, 95, 166),
}
# Those sources round: MI300X 1307.4 to 1300, L40S 864 GB/s to 0.86 TB/s.
ROUNDING = 0.006


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name):
    sixteen, eight, bandwidth, memory, ridge = PUBLISHED[name]
    chip = accelerator(name)
    assert chip.peak("bf16") == pytest.approx(sixteen * 1e12, rel=ROUNDING)
    if eight:
        dtype = "fp8" if "fp8" in chip.flops else "int8"
        assert chip.peak(dtype) == pytest.approx(eight * 1e12, rel=ROUNDING)
    assert chip.bandwidth == pytest.approx(bandwidth * 1e12, rel=ROUNDING)
    assert chip.memory == memory * 1e9
    assert chip.ops_per_byte("bf16") == pytest.approx(ridge, rel=ROUNDING)


def test_h100_ridge_is_the_dense_one():
    assert round(accelerator("h100-sxm").ops_per_byte("fp16")) == 295
    assert round(accelerator("h100-pcie").ops_per_byte("fp16")) == 378
    # "With sparsity" would double it.
    assert 2 * accelerator("h100-sxm").ops_per_byte("fp16") == pytest.approx(590, abs=1)


def test_links_per_direction():
    links = {"a100-80gb-sxm": 300, "h100-sxm": 450, "b200": 900,
             "tpu-v5e": 45, "tpu-v5p": 90}
    for name, gbs in links.items():
        assert accelerator(name).link_bandwidth == gbs * 1e9


def test_catalogue_is_large_and_every_entry_has_its_origin():
    chips = accelerators()
    assert len(chips) >= 16
    assert len({c.name for c in chips}) == len({c.label for c in chips}) == len(chips)
    for chip in chips:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", chip.name), chip.name
        assert re.fullmatch(r"20\d\d-\d\d", chip.date), chip.name
        assert "https://" in chip.source or chip.source.startswith("Derived"), chip.name
        if "derived" in chip.source.lower():
            assert chip.notes, f"{chip.name}: a derived constant needs its arithmetic"
        assert accelerator(chip.name) is chip
    assert {"laptop-cpu", "m4-pro", "rtx-4090"} <= {c.name for c in chips}


@pytest.mark.parametrize("chip", accelerators(), ids=lambda c: c.name)
def test_units_and_orders_of_magnitude(chip):
    assert 50e9 <= chip.bandwidth <= 10e12
    assert 15e9 <= chip.memory <= 300e9
    assert all(1e11 <= rate <= 2e16 for rate in chip.flops.values())
    assert chip.link_bandwidth is None or 10e9 <= chip.link_bandwidth <= 1e12
    assert 0 <= chip.overhead <= 1e-4
    assert all(0 < share <= 1 for share in chip.efficiency.values())


@pytest.mark.parametrize("chip", accelerators(), ids=lambda c: c.name)
def test_fewer_bits_are_never_slower(chip):
    for a, b in itertools.combinations(chip.flops, 2):
        wide, narrow = sorted((a, b), key=DTYPE_BITS.get, reverse=True)
        if DTYPE_BITS[wide] > DTYPE_BITS[narrow]:
            assert chip.flops[wide] <= chip.flops[narrow], (wide, narrow)
    if {"bf16", "fp16"} <= set(chip.flops):
        assert chip.flops["bf16"] == chip.flops["fp16"]
    if {"tf32", "bf16"} <= set(chip.flops):
        assert chip.flops["tf32"] <= 0.51 * chip.flops["bf16"]


def test_units_of_the_ridge_by_hand():
    chip = Accelerator("x", "X", flops={"fp32": 10.0, "int8": 40.0},
                       bandwidth=2.0, memory=1.0)
    assert chip.peak("fp32") == 10
    assert chip.ops_per_byte("fp32") == 5
    assert chip.ops_per_byte("int8") == 20


@pytest.mark.parametrize("name, near", [
    ("h100", "h100-sxm"), ("H100-SXM", "h100-sxm"), ("a100", "a100-80gb-sxm"),
    ("rtx4090", "rtx-4090"), ("tpuv5e", "tpu-v5e"),
])
def test_unknown_name_lists_near_matches(name, near):
    with pytest.raises(ValueError, match=f"{name}.*{near}"):
        accelerator(name)


def test_a_name_like_nothing_lists_all():
    with pytest.raises(ValueError, match="known: .*h100-sxm.*laptop-cpu"):
        accelerator("???")


def test_unknown_dtype():
    chip = accelerator("h100-sxm")
    for ask in (chip.peak, chip.ops_per_byte):
        with pytest.raises(ValueError, match="h100-sxm.*'float16'.*fp16"):
            ask("float16")
        with pytest.raises(ValueError, match="int4"):      # real, but not on it
            ask("int4")


def test_dtype_bytes():
    assert hardware.dtype_bytes("bf16") == 2
    assert hardware.dtype_bytes("int4") == 0.5
    # 32 values of 4 bits and one scale of 8.
    assert hardware.dtype_bytes("mxfp4") == (32 * 4 + 8) / 8 / 32
    with pytest.raises(ValueError, match="bf16"):
        hardware.dtype_bytes("bf61")


def test_record_is_frozen_and_portable():
    chip = accelerator("a10")
    with pytest.raises(dataclasses.FrozenInstanceError):
        chip.memory = 1.0
    assert pickle.loads(pickle.dumps(chip)) == chip
    assert {chip: 1}[accelerator("a10")] == 1
    assert dataclasses.asdict(chip)["flops"]["bf16"] == 125e12
    half = dataclasses.replace(chip, bandwidth=chip.bandwidth / 2)
    assert half.ops_per_byte("bf16") == 2 * chip.ops_per_byte("bf16")


@pytest.mark.parametrize("wrong, message", [
    ({"bandwidth": 0.0}, "bandwidth"), ({"memory": -1.0}, "memory"),
    ({"flops": {"fp32": float("nan")}}, "flops.*fp32"),
    ({"flops": {"float32": 1.0}}, "dtype.*float32"),
    ({"efficiency": {"float32": 1.0}}, "dtype.*float32"),
])
def test_bad_records_are_refused(wrong, message):
    good = {"name": "x", "label": "X", "flops": {"fp32": 1.0}, "bandwidth": 1.0,
            "memory": 1.0}
    with pytest.raises(ValueError, match=message):
        Accelerator(**good | wrong)

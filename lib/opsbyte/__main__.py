"""The command line: `opsbyte bound`, `opsbyte list`, `opsbyte measure`."""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from opsbyte import cost, hardware, models, roofline


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. Bad input is one line and a 2."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except ValueError as error:
        print(f"opsbyte: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:        # `opsbyte list | head`
        sys.stderr.close()
        return 0
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """One line, without the usage."""
        self.exit(2, f"{self.prog}: {message} (--help shows what there is)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="opsbyte", description="What limits a model on a machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    bound = commands.add_parser(
        "bound", help="predict a model's prefill and decode on an accelerator",
        description="FLOPs, bytes, time and bound of every operator.")
    add = bound.add_argument
    add("--model", required=True,
        help="a name from `opsbyte list`, or the path of a config.json")
    add("--accelerator", required=True, help="a name from `opsbyte list`")
    add("--batch", type=int, default=1, help="sequences at once (1)")
    add("--context", type=int, default=2048,
        help="tokens of prompt in prefill, in the cache in decode (2048)")
    add("--phase", choices=("prefill", "decode", "both"), default="both")
    add("--dtype", default="bf16", help="what is multiplied (bf16)")
    add("--weight-dtype", help="what weights are stored in (as --dtype)")
    add("--cache-dtype", help="what the cache is stored in (as --dtype)")
    add("--devices", type=int, default=1, help="tensor parallel over N (1)")
    add("--width", type=int, default=1,
        help="tokens per sequence in a decode step, to verify drafts (1)")
    add("--unfused", action="store_true", help="attention that writes its scores")
    add("--ideal", action="store_true",
        help="the datasheet: efficiency 1 and no overhead")
    add("--json", action="store_true", help="numbers in SI units, as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw the roofline (PNG, SVG, PDF)")
    bound.set_defaults(run=_bound)

    names = commands.add_parser("list", help="the accelerators and models known")
    names.add_argument("--json", action="store_true")
    names.set_defaults(run=_list)

    measure = commands.add_parser("measure", help="measure this machine")
    measure.add_argument("--dtype", default="fp32", help="fp32, bf16, ... (fp32)")
    measure.add_argument("--refresh", action="store_true",
                         help="measure again, do not use what is stored")
    measure.add_argument("--json", action="store_true")
    measure.set_defaults(run=_measure)
    return parser


# ---- bound -------------------------------------------------------------------

def _bound(a: argparse.Namespace) -> None:
    model, device = _model(a.model), hardware.accelerator(a.accelerator)
    dtypes = {"dtype": a.dtype, "weight_dtype": a.weight_dtype,
              "cache_dtype": a.cache_dtype}
    timing = {"devices": a.devices}
    if a.ideal:
        timing |= {"efficiency": 1.0, "overhead": 0.0}
    options = {**dtypes, "fused": not a.unfused}
    costs = {}
    if a.phase in ("prefill", "both"):
        costs["prefill"] = cost.prefill(model, a.context, a.batch, **options)
    if a.phase in ("decode", "both"):
        costs["decode"] = cost.decode(model, a.context, a.batch, width=a.width,
                                      **options)
    report = {
        "model": model.name, "accelerator": device.name, "devices": a.devices,
        "batch": a.batch, "context": a.context, "dtype": a.dtype,
        "weight_dtype": a.weight_dtype or a.dtype,
        "cache_dtype": a.cache_dtype or a.dtype,
        "efficiency": timing.get("efficiency", roofline.stated_efficiency(
            device, a.weight_dtype or a.dtype)),
        "overhead": timing.get("overhead", device.overhead),
        "ridge": roofline.ridge(device, a.dtype),
        "critical_batch": roofline.critical_batch(
            model, device, a.dtype, a.weight_dtype),
        "memory_needed": cost.memory(
            model, a.context + a.width, a.batch, **dtypes),
        "memory_available": device.memory * a.devices,
        "phases": {name: _phase(name, c, a, device, timing)
                   for name, c in costs.items()},
    }
    if a.plot:
        _plot(a.plot, device, costs)
    print(json.dumps(report, indent=2) if a.json else _text(report, model, device))


def _model(name: str) -> models.ModelConfig:
    """A model of the catalogue, or the one that a config.json describes."""
    path = Path(name)
    if path.suffix != ".json" and not path.is_file():
        return models.model(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"--model {name}: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--model {name}: not a JSON object")
    return models.ModelConfig.from_hf(config, name=path.parent.name or path.stem)


def _phase(name: str, c: cost.Cost, a: argparse.Namespace,
           device: hardware.Accelerator, timing: dict) -> dict:
    times = roofline.breakdown(c, device, **timing)
    seconds = sum(t.seconds for t in times)
    tokens = a.batch * (a.context if name == "prefill" else a.width)
    return {
        "operators": [
            {"name": o.name, "launches": o.count, "flops": o.flops,
             "weight_bytes": o.weight_bytes, "cache_bytes": o.cache_bytes,
             "activation_bytes": o.activation_bytes, "bytes": o.bytes,
             "intensity": o.intensity, "seconds": t.seconds, "bound": t.bound}
            for o, t in zip(c.operators, times, strict=True)],
        "launches": c.launches, "flops": c.flops, "weight_bytes": c.weight_bytes,
        "cache_bytes": c.cache_bytes, "activation_bytes": c.activation_bytes,
        "bytes": c.bytes, "intensity": c.intensity, "seconds": seconds,
        "tokens": tokens, "tokens_per_second": tokens / seconds,
        "bound": roofline.bound(c, device, **timing)}


def _text(r: dict, model: models.ModelConfig, device: hardware.Accelerator) -> str:
    many = f"{r['devices']} x " if r["devices"] > 1 else ""
    lines = [
        f"{model.label or model.name} on {many}{device.label}, batch {r['batch']}, "
        f"{r['context']:,} tokens of context",
        f"{r['dtype']} arithmetic, {r['weight_dtype']} weights, "
        f"{r['cache_dtype']} cache; efficiency {r['efficiency']:.2f}, "
        f"overhead {r['overhead'] * 1e6:.1f} us a launch"]
    for name, phase in r["phases"].items():
        large = phase["flops"] > 1e14
        flops, size = (1e12, 1e9) if large else (1e9, 1e6)
        columns = ("operator", "launches", "TFLOP" if large else "GFLOP",
                   "GB" if large else "MB", "FLOP/byte", "ms", "bound")
        rows = [_row(o, flops, size)
                for o in (*phase["operators"], {"name": "total", **phase})]
        lines += ["", f"{name}: {phase['seconds'] * 1e3:,.2f} ms, "
                      f"{phase['tokens_per_second']:,.1f} tokens/s, "
                      f"{phase['bound']} bound", *_table(columns, rows)]
    need, have = r["memory_needed"], r["memory_available"]
    lines += ["", f"ridge            {r['ridge']:,.0f} FLOP/byte",
              f"critical batch   {r['critical_batch']:,.0f} tokens a pass, for the "
              f"products with weights",
              f"memory needed    {need / 1e9:,.1f} GB (weights and cache) of "
              f"{have / 1e9:,.0f} GB"]
    if need > have:
        lines.append(f"WARNING: it does not fit: {need / have:.1f} times the memory. "
                     f"At least {-(-need // device.memory):.0f} devices, or a smaller "
                     f"batch, context or dtype.")
    return "\n".join(lines)


def _row(o: dict, flops: float, size: float) -> tuple[str, ...]:
    return (o["name"], f"{o['launches']:,}", f"{o['flops'] / flops:,.2f}",
            f"{o['bytes'] / size:,.1f}", f"{o['intensity']:,.1f}",
            f"{o['seconds'] * 1e3:,.3f}", o["bound"])


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they need: the first and last left, numbers right."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    last = len(widths) - 1
    return ["  ".join(cell.ljust(w) if i in (0, last) else cell.rjust(w)
                      for i, (cell, w) in enumerate(zip(row, widths, strict=True))
                      ).rstrip()
            for row in (headers, ["-" * w for w in widths], *rows)]


def _plot(path: Path, device: hardware.Accelerator, costs: dict) -> None:
    """The roofline with the operators that matter in each phase."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from opsbyte import plot
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib: {error}") from None
    points = [(f"{phase} {name}", intensity, None) for phase, c in costs.items()
              for name, intensity in _landmarks(c, device)]
    dtype = next(iter(costs.values())).dtype
    plot.use()
    axes = plot.roofline(device, dtype, points)
    try:
        axes.figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {path}: {error}") from None


def _landmarks(c: cost.Cost, device: hardware.Accelerator,
               most: int = 3) -> list[tuple[str, float]]:
    """The operators that take longest, one for all that lie close together."""
    times = roofline.breakdown(c, device, efficiency=1, overhead=0)
    slowest = sorted(zip(times, c.operators, strict=True),
                     key=lambda pair: -pair[0].seconds)
    chosen: list[tuple[str, float]] = []
    for _, o in slowest:
        near = any(0.5 < o.intensity / x < 2 for _, x in chosen)
        if o.flops and not near and len(chosen) < most:
            chosen.append((o.name, o.intensity))
    return chosen


# ---- list and measure ----------------------------------------------------------

def _list(a: argparse.Namespace) -> None:
    devices, known = hardware.accelerators(), models.models()
    if a.json:
        print(json.dumps({"accelerators": [d.name for d in devices],
                          "models": [m.name for m in known]}, indent=2))
        return
    print("\n".join(_table(
        ("accelerator", "bf16 TFLOP/s", "TB/s", "GB", "FLOP/byte", "label"),
        [(d.name, *_rates(d), d.label) for d in devices])))
    print()
    print("\n".join(_table(
        ("model", "parameters", "active", "cache KB/token", "label"),
        [(m.name, f"{m.parameters() / 1e9:,.2f} B",
          f"{m.active_parameters() / 1e9:,.2f} B", f"{_growth(m) / 1e3:,.1f}", m.label)
         for m in known])))


def _rates(d: hardware.Accelerator) -> tuple[str, ...]:
    """Numbers for 16-bit types; some devices only have wider ones."""
    half = next((x for x in ("bf16", "fp16") if x in d.flops), None)
    return (f"{d.peak(half) / 1e12:,.1f}" if half else "-",
            f"{d.bandwidth / 1e12:.2f}", f"{d.memory / 1e9:,.0f}",
            f"{d.ops_per_byte(half):,.0f}" if half else "-")


def _growth(m: models.ModelConfig) -> int:
    """Bytes of 16-bit cache that the first tokens add, before any window fills."""
    return m.cache_bytes(2) - m.cache_bytes(1)


def _measure(a: argparse.Namespace) -> None:
    try:
        from opsbyte import measure
    except ImportError as error:
        raise ValueError(f"measure needs torch: {error}; "
                         f"install it with `pip install 'opsbyte[all]'`") from None
    if not a.json:
        print(f"measuring {a.dtype}: a few seconds", file=sys.stderr)
    here = measure.this_machine(a.dtype, refresh=a.refresh)
    here = replace(here, flops={a.dtype: here.peak(a.dtype)})
    if a.json:
        print(json.dumps({
            "label": here.label, "dtype": a.dtype, "flops": here.peak(a.dtype),
            "bandwidth": here.bandwidth, "memory": here.memory,
            "overhead": here.overhead, "ridge": here.ops_per_byte(a.dtype)}, indent=2))
        return
    print(f"{here.label}\n"
          f"peak       {here.peak(a.dtype) / 1e12:.3f} TFLOP/s in {a.dtype}\n"
          f"bandwidth  {here.bandwidth / 1e9:.1f} GB/s\n"
          f"memory     {here.memory / 1e9:.1f} GB\n"
          f"overhead   {here.overhead * 1e6:.1f} us an operator\n"
          f"ridge      {here.ops_per_byte(a.dtype):.0f} FLOP/byte")


if __name__ == "__main__":
    sys.exit(main())

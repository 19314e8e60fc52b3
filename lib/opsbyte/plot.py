"""The course's figures and tables: one style, and colours with one meaning.

Predictions are lines, measurements are points. What a colour says, a marker, a
dash or a hatch says too. Figures are white: the book inverts them in dark mode.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from opsbyte.hardware import Accelerator

# After the palettes of Okabe and Ito and of Tol, darkened until a label in the
# colour reads on white. Those that share a figure (the resources; the phases;
# the operators) stay apart for the common colour-vision deficiencies.
COLORS = {
    "compute": "#C2470A", "memory": "#0065A8",
    "overhead": "#6B6B6B", "link": "#5C2D82",
    "prefill": "#861657", "decode": "#00826A",
    "attention": "#6A45B8", "linear": "#3A8226", "mlp": "#6B3F00",
    "cache": "#007C92",
    "neutral": "#555555", "text": "#222222", "faint": "#DDDDDD",
}
MARKERS = {
    "compute": "s", "memory": "o", "overhead": "^", "link": "D",
    "prefill": "P", "decode": "v",
    "attention": "h", "linear": "X", "mlp": "d", "cache": "p", "neutral": "o",
}
LINESTYLES = {
    "compute": "--", "memory": "-", "overhead": ":", "link": "-.",
    "prefill": "--", "decode": "-",
    "attention": "-", "linear": "--", "mlp": "-.", "cache": ":", "neutral": "-",
}
HATCHES = {
    "compute": "//", "memory": "", "overhead": "...", "link": "xx",
    "prefill": "//", "decode": "",
    "attention": "", "linear": "//", "mlp": "xx", "cache": "...", "neutral": "",
}
# Dashes for the first, second, ... of several roofs.
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


def use() -> None:
    """Apply the course's style, in a notebook or a script."""
    style = resources.files("opsbyte") / "data" / "opsbyte.mplstyle"
    with resources.as_file(style) as path:
        plt.style.use(path)


def si(value: float, unit: str = "", digits: int = 3) -> str:
    """`value` with an SI prefix: si(3.35e12, "B/s") is "3.35 TB/s".

    A ratio of two counts ("FLOP/byte") takes no prefix.
    """
    prefix, scale = "", 1.0
    if value and math.isfinite(value) and not unit.endswith("/byte"):
        # Rounded first, so that 999.9e9 becomes 1 T and not 1000 G.
        power = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))) / 3)
        power = max(-4, min(5, power))
        prefix, scale = "pnµm kMGTP"[power + 4].strip(), 1000.0**power
    scaled = value / scale
    if math.isfinite(scaled) and scaled:
        places = digits - 1 - math.floor(math.log10(abs(scaled)))
        scaled = round(scaled, places)
        number = f"{scaled:.{max(places, 0)}f}"
        number = number.rstrip("0").rstrip(".") if "." in number else number
    else:
        number = f"{scaled:g}"
    return f"{number} {prefix}{unit}".rstrip()


def roofline(
    accelerator: Accelerator | Sequence[Accelerator],
    dtype: str | Sequence[str] = "bf16",
    points: Iterable[tuple[str, float, float | None]] = (),
    *,
    ax: Axes | None = None,
    xlim: tuple[float, float] | None = None,
) -> Axes:
    """The roofline of an accelerator, or of several, or in several dtypes.

    points: (label, intensity in FLOP/byte, FLOP/s). A measured rate is drawn
        as a full marker, a circle left of the ridge and a square right of it;
        None puts an open marker on the first roof, where the prediction is.
    xlim: intensities shown; by default what the ridges and points need.

    Raises ValueError if a point is not positive, or a dtype not in the record.
    """
    devices = [accelerator] if isinstance(accelerator, Accelerator) else accelerator
    dtypes = [dtype] if isinstance(dtype, str) else dtype
    roofs = [(device, name) for device in devices for name in dtypes]
    if not roofs:
        raise ValueError("accelerator and dtype must name at least one roof")
    points = [_point(*point, *roofs[0]) for point in points]
    ridges = [device.ops_per_byte(name) for device, name in roofs]
    left, right = xlim or _decades([*ridges, *(x for _, x, _, _ in points)])
    ax = ax or plt.subplots()[1]
    ax.set(xscale="log", yscale="log", xlim=(left, right))
    lines, drops = [], []
    for i, (device, name) in enumerate(roofs):
        style = {"linestyle": _DASHES[i % len(_DASHES)], "zorder": 2}
        peak, slope, ridge = device.peak(name), device.bandwidth, ridges[i]
        low, high = min(left, ridge), max(right, ridge)
        ax.plot([low, ridge], [low * slope, peak], color=COLORS["memory"], **style)
        ax.plot([ridge, high], [peak, peak], color=COLORS["compute"], **style)
        lines += [((low, low * slope), (ridge, peak)), ((ridge, peak), (high, peak))]
    rates = [rate for _, _, rate, _ in points]
    bottom = min([left * device.bandwidth for device in devices] + rates) / 1.8
    top = 3 * max([device.peak(name) for device, name in roofs] + rates)
    ax.set(ylim=(bottom, top), ylabel="performance (FLOP/s)",
           xlabel="arithmetic intensity (FLOP/byte)")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: si(y)))
    for (device, name), ridge in zip(roofs, ridges, strict=True):
        drop = (ridge, bottom), (ridge, device.peak(name))
        ax.plot(*zip(*drop, strict=True), ":", linewidth=1, zorder=1,
                color=COLORS["neutral"])
        drops.append(drop)
    for _, x, rate, measured in points:
        kind = "compute" if x >= ridges[0] else "memory"
        ax.plot(x, rate, MARKERS[kind], color=COLORS[kind], zorder=4,
                markeredgewidth=1.5,
                markerfacecolor=COLORS[kind] if measured else "white")
    labels = _Labels(ax, lines, drops, [(x, rate) for _, x, rate, _ in points])
    _name_roofs(labels, roofs, left, right, bottom)
    for label, x, rate, _ in points:
        labels.put(label, (x, rate), _AROUND)
    return ax


def _point(label, x, y, device, dtype):
    """A point with its place: (label, x, y, whether y was measured)."""
    if not x > 0 or (y is not None and not y > 0):
        raise ValueError(f"points: {label!r} must be positive, got {(x, y)!r}")
    roof = min(device.peak(dtype), x * device.bandwidth)
    return label, x, roof if y is None else y, y is not None


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Whole decades around `values`, with room for labels."""
    low = 10.0 ** math.floor(math.log10(min(values) / 1.5))
    return min(low, 0.1), 10.0 ** math.ceil(math.log10(max(values) * 4))


class _Labels:
    """Puts texts next to places so that they hide no line, mark or other text."""

    def __init__(self, ax: Axes, lines, faint_lines, marks):
        self.ax, self.figure = ax, ax.figure
        self.figure.draw_without_rendering()  # settles the layout
        self.scale = self.figure.dpi / 72  # pixels per point
        to_pixels = ax.transData.transform
        self.taken = [self._box(to_pixels(mark), 4) for mark in marks]
        steps = np.linspace(0, 1, 200)[:, None]
        self.on_lines = [
            (weight, (1 - steps) * to_pixels(a) + steps * to_pixels(b))
            for weight, group in ((50, lines), (4, faint_lines)) for a, b in group
        ]

    def _box(self, center, half: float) -> Bbox:
        (x, y), half = center, half * self.scale
        return Bbox([[x - half, y - half], [x + half, y + half]])

    def put(self, text: str, xy, where, **style) -> None:
        """Annotate `xy` at the best of the offsets `where`, in points.

        Near is better than far, and a far label is tied to its place.
        """
        best = None
        for dx, dy in where:
            distance = math.hypot(dx, dy)
            if best and best[0] <= 20 * distance:
                continue
            note = self.ax.annotate(
                text, xy, (dx, dy), textcoords="offset points", zorder=5,
                ha="center" if dx == 0 else "left" if dx > 0 else "right",
                va="center" if dy == 0 else "bottom" if dy > 0 else "top", **style,
            )
            box = note.get_window_extent()
            cost = self._cost(box.padded(self.scale)) + 20 * distance
            note.remove()
            if best is None or cost < best[0]:
                best = cost, note, box, distance > 14
        _, note, box, far = best
        self.ax.add_artist(note)
        note.set_in_layout(False)
        self.taken.append(box)
        if far:
            self._tie(xy, box)

    def _tie(self, xy, box: Bbox) -> None:
        """A thin line from a place to the nearest point of a text's box."""
        x, y = self.ax.transData.transform(xy)
        end = min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)
        end = self.ax.transData.inverted().transform(end)
        self.ax.annotate(
            "", xy, end, arrowprops={
                "arrowstyle": "-", "color": COLORS["neutral"], "linewidth": 0.6,
                "shrinkA": 0, "shrinkB": 3,
            },
        ).set_in_layout(False)

    def along(self, text: str, start, end, **style) -> None:
        """Write `text` above the line from `start` to `end`, at its angle."""
        start, end = self.ax.transData.transform([start, end])
        angle = math.atan2(*(end - start)[::-1])
        up = 3 * np.array([-math.sin(angle), math.cos(angle)])
        best = None
        for part in (0.5, 0.4, 0.6, 0.3, 0.7, 0.2):
            xy = self.ax.transData.inverted().transform(start + part * (end - start))
            note = self.ax.annotate(
                text, xy, up, textcoords="offset points", ha="center", va="bottom",
                rotation=math.degrees(angle), rotation_mode="anchor", **style,
            )
            box = note.get_window_extent()
            # A slanted text fills the diagonal of its box, not all of it.
            steps = np.linspace(box.p0, box.p1, 12)[1:-1]
            boxes = [self._box(center, 6) for center in steps]
            cost = sum(map(self._hidden, boxes))
            if best is None or cost < best[0]:
                if best:
                    best[1].remove()
                best = cost, note, boxes
            else:
                note.remove()
        best[1].set_in_layout(False)
        self.taken += best[2]

    def _hidden(self, box: Bbox) -> float:
        """Square pixels that `box` has in common with what is taken."""
        both = (Bbox.intersection(box, other) for other in self.taken)
        return sum(shared.width * shared.height for shared in both if shared)

    def _cost(self, box: Bbox) -> float:
        """What is hidden or out of the axes when text fills `box`; 0 is good."""
        inside = Bbox.intersection(box, self.ax.bbox)
        outside = box.width * box.height
        outside -= inside.width * inside.height if inside else 0
        cost = 4 * (outside + self._hidden(box))
        for weight, line in self.on_lines:
            within = (line > box.p0) & (line < box.p1)
            cost += weight * int(within.all(axis=1).sum())
        return cost


# Offsets in points to try: right, left, above, below, corners; then further.
_AROUND = [
    (dx * far, dy * far)
    for far in (1, 1.5, 2, 3, 4, 6, 8)
    for dx, dy in (
        (6, 0), (5, -4), (-6, 0), (0, -7), (-5, 4), (0, 7), (5, 4), (-5, -4),
    )
]
_ABOVE = [(-2, 3), (-2, 8), (-2, -3), (-2, 16), (-2, -16)]
_BESIDE = [(dx, dy) for dy in (4, 18, 32, 46) for dx in (4, -4)]


def _name_roofs(labels: _Labels, roofs, left, right, bottom) -> None:
    """Names roofs, slopes and ridges: beside the lines, or if crowded in a key."""
    peaks = sorted(device.peak(name) for device, name in roofs)
    heights = labels.ax.transData.transform([(right, peak) for peak in peaks])[:, 1]
    devices = {device.name: device for device, _ in roofs}
    crowded = len(roofs) > 1 and np.diff(heights).min() < 19 * labels.scale
    if len(devices) > 1 or crowded:
        return _key(labels, roofs, several_devices=len(devices) > 1)
    (device,) = devices.values()
    ridges = [device.ops_per_byte(name) for _, name in roofs]
    labels.along(
        si(device.bandwidth, "B/s"), (left, left * device.bandwidth),
        (min(ridges), min(peaks)), color=COLORS["memory"],
    )
    for _, name in roofs:
        peak = device.peak(name)
        labels.put(f"{name} {si(peak, 'FLOP/s')}", (right, peak), _ABOVE,
                   color=COLORS["compute"])
    for ridge in ridges:
        unit = " FLOP/byte" if len(roofs) == 1 else ""
        labels.put(f"{ridge:.3g}{unit}", (ridge, bottom), _BESIDE,
                   color=COLORS["neutral"])


def _key(labels: _Labels, roofs, *, several_devices: bool) -> None:
    """A key of the roofs, highest first, in the empty corner under them."""
    several_dtypes = len({name for _, name in roofs}) > 1
    entries = []
    for i, (device, name) in enumerate(roofs):
        text = [device.label] * several_devices
        text += [name] * (several_dtypes or not several_devices)
        text = f"{' '.join(text)}: {device.ops_per_byte(name):.3g}"
        dash = _DASHES[i % len(_DASHES)]
        handle = Line2D([], [], linestyle=dash, color=COLORS["compute"])
        entries.append((device.peak(name), handle, text))
    entries.sort(key=lambda entry: -entry[0])
    _, handles, texts = zip(*entries, strict=True)
    legend = labels.ax.legend(
        handles, texts, loc="lower right", title="ridge, FLOP/byte",
        frameon=True, framealpha=1, edgecolor="white", alignment="left",
        handlelength=2.6, borderpad=0.2, labelspacing=0.3,
    )
    labels.taken.append(legend.get_window_extent())


def bars(
    rows: Mapping[str, Mapping[str, float]], *, unit: str = "s", ax: Axes | None = None
) -> Axes:
    """Horizontal bars, first row on top, each a stack of parts with its total.

    rows: label -> {kind: value}, the kinds named as in COLORS. A breakdown of
    operators by bound is {operator: {bound: seconds}}.

    Raises ValueError on a kind without a colour or a value below zero.
    """
    kinds = list(dict.fromkeys(kind for parts in rows.values() for kind in parts))
    for kind in kinds:
        if kind not in HATCHES:
            raise ValueError(f"rows: kind must be one of {', '.join(HATCHES)}, "
                             f"not {kind!r}")
    if any(not value >= 0 for parts in rows.values() for value in parts.values()):
        raise ValueError("rows: values must be at least 0")
    if ax is None:
        ax = plt.subplots(figsize=(5.6, 0.9 + 0.34 * len(rows)))[1]
    totals = [sum(parts.values()) for parts in rows.values()]
    places, starts = range(len(rows)), np.zeros(len(rows))
    for kind in kinds:
        values = np.array([parts.get(kind, 0.0) for parts in rows.values()])
        ax.barh(places, values, 0.7, starts, color=COLORS[kind], edgecolor="white",
                hatch=HATCHES[kind], linewidth=0.6)
        starts += values
    for place, total in zip(places, totals, strict=True):
        ax.annotate(si(total, unit), (total, place), (4, 0),
                    textcoords="offset points", va="center")
    ax.set_yticks(places, rows)
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.set_xlim(0, 1.18 * max(totals, default=1) or 1)
    ax.xaxis.set_major_locator(plt.MaxNLocator(4))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: si(x, unit) if x else "0"))
    patches = [
        Patch(facecolor=COLORS[kind], hatch=HATCHES[kind], edgecolor="white")
        for kind in kinds
    ]
    ax.legend(
        patches, kinds, loc="lower left", bbox_to_anchor=(0, 1), ncols=4,
        borderaxespad=0.2, handlelength=1.4, columnspacing=1.4,
    )
    return ax


def mask(
    matrix, *, queries: Sequence[str] | None = None, keys: Sequence[str] | None = None,
    title: str = "", color: str = "attention", ax: Axes | None = None,
) -> Axes:
    """A (queries, keys) matrix as a grid: what each query sees, or how much.

    matrix: boolean, full cells where it is true; or numbers of at least 0,
    darker where larger. queries, keys: names of rows and columns instead of
    their numbers. color: a name in COLORS.

    Raises ValueError if the matrix is not 2-D or the names do not fit it.
    """
    values = np.asarray(matrix)
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(f"matrix must be 2-D and not empty, got {values.shape}")
    rows, columns = values.shape
    for name, names, size in (("queries", queries, rows), ("keys", keys, columns)):
        if names is not None and len(names) != size:
            raise ValueError(f"{name} must have {size} names, got {len(names)}")
    ax = ax or plt.subplots(figsize=(3.6, 3.6))[1]
    shades = LinearSegmentedColormap.from_list(color, ["#F2F2F2", COLORS[color]])
    lines = 0.8 if max(rows, columns) <= 64 else 0
    ax.pcolormesh(values.astype(float), cmap=shades, vmin=0,
                  edgecolors="white", linewidth=lines)
    ax.set(aspect="equal", xlim=(0, columns), ylim=(rows, 0), title=title)
    for axis, names, size in ((ax.yaxis, queries, rows), (ax.xaxis, keys, columns)):
        step = 1 if names is not None else max(1, 2 ** math.ceil(math.log2(size / 8)))
        at = range(0, size, step)
        axis.set_ticks([i + 0.5 for i in at], names or [str(i) for i in at])
    if keys is not None:
        ax.tick_params(axis="x", labelrotation=90)
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.set(xlabel="key", ylabel="query")
    return ax


@dataclass(frozen=True)
class Table:
    """Headers, rows of text and one of "l", "c", "r" for each column."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str

    def _repr_markdown_(self) -> str:
        rule = [{"l": ":--", "c": ":-:", "r": "--:"}[side] for side in self.align]
        cells = [[_escape(cell) for cell in row] for row in (self.headers, *self.rows)]
        lines = [cells[0], rule, *cells[1:]]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def __repr__(self) -> str:
        table = [self.headers, *self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        sign = {"l": "<", "c": "^", "r": ">"}

        def line(row):
            cells = zip(row, self.align, widths, strict=True)
            return "  ".join(f"{c:{sign[a]}{w}}" for c, a, w in cells).rstrip()

        rule = "  ".join("-" * width for width in widths)
        return "\n".join([line(table[0]), rule, *map(line, table[1:])])


def table(
    headers: Sequence[str], rows: Iterable[Sequence], align: str | None = None
) -> Table:
    """A table that a notebook shows as Markdown and a terminal as text.

    Numbers come formatted. align: a letter a column, "l", "c" or "r"; by
    default the first column is left and the others right.

    Raises ValueError if a row or align does not have a cell for each header.
    """
    headers = tuple(str(header) for header in headers)
    rows = tuple(tuple(str(cell) for cell in row) for row in rows)
    align = "l" + "r" * (len(headers) - 1) if align is None else align
    if not headers:
        raise ValueError("headers must not be empty")
    if len(align) != len(headers) or set(align) - set("lcr"):
        raise ValueError(f"align must be {len(headers)} letters of l, c and r, "
                         f"not {align!r}")
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"rows: {row!r} has {len(row)} cells, not {len(headers)}")
    return Table(headers, rows, align)


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")

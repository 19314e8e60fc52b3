"""Figures and tables: what they show, and that it can be read."""
import base64
import io
import itertools
import warnings

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from opsbyte import plot
from opsbyte.hardware import Accelerator

H100 = Accelerator(
    "h100-sxm", "NVIDIA H100 SXM",
    {"fp8": 1979e12, "bf16": 989e12, "tf32": 494e12}, 3.35e12, 80e9,
)
CPU = Accelerator("cpu", "A CPU", {"fp32": 213e9, "bf16": 880e9}, 80e9, 32e9)


@pytest.fixture(autouse=True)
def style():
    with plt.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("error")
        plot.use()
        yield
    plt.close("all")


def channels(color: str) -> np.ndarray:
    return np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])


def dark(color: np.ndarray) -> np.ndarray:
    """What the book's dark theme does: invert(0.9), hue-rotate(180deg)."""
    rotate = np.array([
        [-0.574, 1.430, 0.144], [0.426, 0.430, 0.144], [0.426, 1.430, -0.856],
    ])
    return np.clip(rotate @ (0.9 - 0.8 * color), 0, 1)


def contrast(a: np.ndarray, b: np.ndarray) -> float:
    """WCAG 2.2 contrast ratio."""
    def luminance(color):
        linear = np.where(
            color <= 0.04045, color / 12.92, ((color + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_the_contrast_formula():
    assert contrast(np.zeros(3), np.ones(3)) == pytest.approx(21)
    assert contrast(channels("#777777"), np.ones(3)) == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("name", sorted(set(plot.COLORS) - {"faint"}))
def test_colours_read_as_text_in_both_themes(name):
    color, page = channels(plot.COLORS[name]), np.ones(3)
    assert contrast(color, page) >= 4.5
    assert contrast(dark(color), dark(page)) >= 4.5


@pytest.mark.parametrize("group", [
    ("compute", "memory", "overhead", "link"),
    ("prefill", "decode", "compute", "memory"),
    ("attention", "linear", "mlp", "cache", "overhead"),
])
def test_meanings_differ_without_colour(group):
    for a, b in itertools.combinations(group, 2):
        same_mark = plot.MARKERS[a] == plot.MARKERS[b]
        assert not same_mark and plot.COLORS[a] != plot.COLORS[b], (a, b)
    for a, b in (("compute", "memory"), ("prefill", "decode")):
        assert plot.LINESTYLES[a] != plot.LINESTYLES[b]
        assert plot.HATCHES[a] != plot.HATCHES[b]


def test_every_meaning_has_every_form():
    named = set(plot.COLORS) - {"text", "faint"}
    assert named == set(plot.MARKERS) == set(plot.LINESTYLES) == set(plot.HATCHES)


def png(figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def test_figures_are_small_white_and_the_same_twice():
    def image():
        return png(plot.roofline(H100, points=[("dot", 0.25, None)]).figure)

    data = image()
    assert data == image() and len(data) < 80_000
    pixels = plt.imread(io.BytesIO(data))
    assert (pixels[0, :, :] == 1).all() and (pixels[..., 3] == 1).all()
    assert plt.rcParams["font.family"] == ["DejaVu Sans"]


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_roofline_says_its_numbers():
    ax = plot.roofline(H100, "bf16", [("dot", 0.25, None), ("matmul", 1000, 7e14)])
    assert texts(ax) == ["3.35 TB/s", "bf16 989 TFLOP/s", "295 FLOP/byte",
                         "dot", "matmul"]
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert "FLOP/byte" in ax.get_xlabel() and "FLOP/s" in ax.get_ylabel()
    memory, compute, ridge, dot, matmul = (line.get_xydata() for line in ax.lines)
    x = 989 / 3.35
    assert memory[-1] == pytest.approx([x, 989e12])
    assert memory[0, 1] == pytest.approx(memory[0, 0] * 3.35e12)
    assert compute == pytest.approx(np.array([[x, 989e12], [compute[1, 0], 989e12]]))
    assert ridge[:, 0] == pytest.approx([x, x])
    assert dot == pytest.approx(np.array([[0.25, 0.25 * 3.35e12]]))  # on the roof
    assert matmul == pytest.approx(np.array([[1000, 7e14]]))  # where it was measured
    assert ax.lines[3].get_markerfacecolor() == "white"
    assert ax.lines[4].get_markerfacecolor() == plot.COLORS["compute"]


def test_roofline_names_several_roofs():
    assert texts(plot.roofline(CPU, ["fp32", "bf16"])) == [
        "80 GB/s", "fp32 213 GFLOP/s", "bf16 880 GFLOP/s", "2.66", "11"]
    crowded = plot.roofline(H100, ["bf16", "fp8", "tf32"]).get_legend()
    assert [text.get_text() for text in crowded.get_texts()] == [
        "fp8: 591", "bf16: 295", "tf32: 147"]
    devices = plot.roofline([CPU, H100], "bf16").get_legend()
    assert [text.get_text() for text in devices.get_texts()] == [
        "NVIDIA H100 SXM: 295", "A CPU: 11"]


@pytest.mark.parametrize("accelerator, dtype", [
    (H100, "bf16"), (CPU, "fp32"), (CPU, ["fp32", "bf16"]), ([CPU, H100], "bf16"),
    (H100, ["fp8", "bf16", "tf32"]),
])
def test_labels_do_not_hide_each_other(accelerator, dtype):
    places = [0.25, 0.5, 0.6, 1, 2, 30, 60, 1000]
    ax = plot.roofline(accelerator, dtype, [(f"point {x}", x, None) for x in places])
    ax.figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in ax.texts if not text.get_rotation()]
    for a, b in itertools.combinations(boxes, 2):
        assert not a.overlaps(b)
    for box in boxes:
        assert ax.bbox.padded(3).contains(box.x0, box.y0)
        assert ax.bbox.padded(3).contains(box.x1, box.y1)


def test_roofline_on_given_axes_and_limits():
    _, ax = plt.subplots()
    assert plot.roofline(CPU, "fp32", ax=ax, xlim=(1, 100)) is ax
    assert ax.get_xlim() == (1, 100)


@pytest.mark.parametrize("point", [("a", 0, None), ("a", 1, 0), ("a", -1, 1)])
def test_roofline_refuses_points_off_a_log_scale(point):
    with pytest.raises(ValueError, match="points: 'a' must be positive"):
        plot.roofline(CPU, "fp32", [point])


def test_roofline_refuses_unknown_or_no_roofs():
    with pytest.raises(ValueError, match="fp8"):
        plot.roofline(CPU, "fp8")
    with pytest.raises(ValueError, match="at least one"):
        plot.roofline([])


def test_bars_stack_and_total():
    ax = plot.bars({"attention": {"memory": 0.002, "overhead": 0.001},
                    "linear": {"compute": 0.004}})
    assert texts(ax) == ["3 ms", "4 ms"]
    parts = [[bar.get_x() for bar in bars] for bars in ax.containers]
    assert parts == [[0, 0], [0.002, 0], [0.003, 0]]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == [
        "memory", "overhead", "compute"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first row is on top


def test_bars_refuse():
    with pytest.raises(ValueError, match="kind must be one of compute"):
        plot.bars({"a": {"speed": 1}})
    with pytest.raises(ValueError, match="at least 0"):
        plot.bars({"a": {"memory": -1}})


def test_mask_shows_the_matrix_as_read():
    seen = np.tril(np.ones((2, 3), bool), 1)
    ax = plot.mask(seen, queries=["a", "b"], keys=["x", "y", "z"], title="causal")
    mesh = ax.collections[0].get_array()
    assert np.array_equal(mesh, seen.astype(float))
    assert ax.get_ylim() == (2, 0)  # the first query is on top
    assert [t.get_text() for t in ax.get_xticklabels()] == ["x", "y", "z"]
    assert ax.get_xlabel() == "key" and ax.get_ylabel() == "query"
    ax.figure.draw_without_rendering()


@pytest.mark.parametrize("shape", [(1, 1), (100, 300), (9, 2)])
def test_mask_of_any_size(shape):
    ax = plot.mask(np.zeros(shape))
    ax.figure.draw_without_rendering()
    assert len(ax.get_xticks()) <= 8 and len(ax.get_yticks()) <= 8


def test_mask_refuses():
    with pytest.raises(ValueError, match="2-D"):
        plot.mask(np.ones(3))
    with pytest.raises(ValueError, match="2-D and not empty"):
        plot.mask(np.ones((0, 3)))
    with pytest.raises(ValueError, match="keys must have 3 names, got 1"):
        plot.mask(np.ones((2, 3)), keys=["a"])


@pytest.mark.parametrize("value, unit, text", [
    (989e12, "FLOP/s", "989 TFLOP/s"), (3.35e12, "B/s", "3.35 TB/s"),
    (62.4, "FLOP/byte", "62.4 FLOP/byte"), (1365.3, "FLOP/byte", "1370 FLOP/byte"),
    (0.0025, "s", "2.5 ms"), (1e-6, "s", "1 µs"), (2.75e-5, "s", "27.5 µs"),
    (999.9e9, "B/s", "1 TB/s"), (999.4e9, "B/s", "999 GB/s"), (0, "s", "0 s"),
    (-3e9, "B", "-3 GB"), (100, "", "100"), (1.5, "s", "1.5 s"),
    (1e10, "", "10 G"), (float("inf"), "s", "inf s"),
])
def test_si(value, unit, text):
    assert plot.si(value, unit) == text


def test_table_as_markdown_and_as_text():
    table = plot.table(["name", "GB/s"], [["a|b", 3], ["line\nbreak", "10.5"]])
    assert table._repr_markdown_() == (
        "| name | GB/s |\n| :-- | --: |\n| a\\|b | 3 |\n| line break | 10.5 |")
    assert repr(plot.table(["name", "GB/s"], [["H100", "3350"], ["L4", "300"]])) == (
        "name  GB/s\n----  ----\nH100  3350\nL4     300")
    assert "| :-: | :-- |" in plot.table("ab", [], "cl")._repr_markdown_()


@pytest.mark.parametrize("arguments, message", [
    (((), ()), "headers"), ((["a"], [["b", "c"]]), "2 cells, not 1"),
    ((["a"], [], "x"), "align"), ((["a"], [], "ll"), "align"),
])
def test_table_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        plot.table(*arguments)


def test_the_style_holds_in_a_notebook():
    """A kernel's figure: of the style's size, and nothing on stderr."""
    cells = [
        "from opsbyte import hardware, plot\nplot.use()",
        "import matplotlib.pyplot as plt\n"
        "plot.roofline(hardware.accelerator('h100-sxm'))\nplt.show()",
    ]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    assert notebook.cells[0].outputs == []
    (figure,) = notebook.cells[1].outputs
    assert figure.data["text/plain"] == "<Figure size 896x560 with 1 Axes>"
    image = base64.b64decode(figure.data["image/png"])
    width = plt.imread(io.BytesIO(image)).shape[1]
    assert 840 < width < 950 and len(image) < 80_000

"""Lines over a common axis, drawn into a PNG file by matplotlib, if that is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from ggml_tern.atomic_file import AtomicFile
from ggml_tern.errors import TernError

#: Inches of a panel, and pixels of an inch.
PANEL_SIZE, DPI = (6.0, 4.2), 120


@dataclass(frozen=True)
class Panel:
    """One diagram.

    Attributes:
        title, x_label, y_label: its words.
        lines: points (x, y) by the name of their line.
        limits: horizontal lines, y by name.
        log_x: with the same distance for every doubling of x.
    """

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    limits: Mapping[str, float] = field(default_factory=dict)
    log_x: bool = False


def check_plot(path: Path) -> None:
    """Refuse, before any work is done, a plot that could not be written.

    Raises TernError without matplotlib, or for a path that cannot be a file."""
    if find_spec("matplotlib") is None:
        raise TernError(
            f"{path}: plots need matplotlib, which is not installed: pip install 'ggml-tern[plots]'"
        )
    if path.is_dir():
        raise TernError(f"{path}: is a directory; give the name of the PNG file to write")
    if not path.parent.is_dir():
        raise TernError(f"{path}: the directory {path.parent} does not exist; create it first")


def write_plot(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Draw the panels side by side; the file appears whole or not at all, in the place of an older one.

    Raises TernError."""
    check_plot(path)
    # Not pyplot: it looks for a display, and keeps state.
    from matplotlib.figure import Figure

    width, height = PANEL_SIZE
    figure = Figure(figsize=(width * len(panels), height), dpi=DPI, layout="constrained")
    figure.suptitle(title)
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), number)
        x_label = panel.x_label
        xs = {x for points in panel.lines.values() for x, _ in points}
        if len(xs) == 1:
            # A single point is no line: bars, side by side.
            x_label = f"{panel.x_label}: {xs.pop():,g}"
            for name, points in panel.lines.items():
                axes.bar_label(axes.bar([name], [points[0][1]]), fmt="{:,.4g}", padding=2)
            axes.margins(y=0.1)
            axes.set_axisbelow(True)
            axes.tick_params(axis="x", labelrotation=15 if len(panel.lines) > 1 else 0)
        else:
            for name, points in panel.lines.items():
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
        for name, y in panel.limits.items():
            axes.axhline(y, color="0.4", linestyle="--", linewidth=1, label=name)
        if panel.log_x and len(xs) > 1:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.set_ylim(bottom=0)
        axes.set(title=panel.title, xlabel=x_label, ylabel=panel.y_label)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    with AtomicFile(path) as file, file.explain():
        figure.savefig(file.temporary, format="png")
        file.publish()

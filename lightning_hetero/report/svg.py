"""Figures as SVG inside a page: text stays text, colors follow the page's theme, and marks say what they stand for."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup, escape

from lightning_hetero.report.figures import COLORS, RANKS, RANKS_DARK, Panel, new_figure

__all__ = ["color_rules", "drawn", "picture_bytes"]

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
NAMES = {shade: name for name, (shade, _) in COLORS.items()} | {shade: f"rank-{i}" for i, shade in enumerate(RANKS)}
HEX = re.compile("|".join(NAMES), re.I)
FAMILY = re.compile(r"font-family:[^;]*;?|(?<=px )'[^;]*?sans-serif")
SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lightning-hetero",
    "font.family": "DejaVu Sans",
    "path.simplify": True,
    "axes.formatter.useoffset": False,
    "axes.xmargin": 0.01,
    "figure.constrained_layout.h_pad": 0.06,
}


def color_rules(*, dark: bool) -> str:
    """Return the CSS variables of all colors."""
    rules = [f"--{name}: {shades[dark]};" for name, shades in COLORS.items()]
    rules += [f"--rank-{i}: {shade};" for i, shade in enumerate(RANKS_DARK if dark else RANKS)]
    return " ".join(rules)


def drawn(
    panels: Sequence[Panel], width: float, prefix: str, label: str, titles: Mapping[str, str], *, steps: bool = True
) -> Markup:
    """Draw panels below each other and return the SVG element.

    Args:
        panels: what to draw.
        width: in inches.
        prefix: of all identifiers, unique in the page.
        label: what the figure shows, for those who cannot see it.
        titles: text that the mark of each name shows under the pointer.
        steps: whether the panels share an axis of steps.
    """
    with matplotlib.rc_context(SETTINGS):
        figure = _filled(panels, width, steps=steps)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return Markup(_for_page(file.getvalue().decode(), prefix, label, titles))  # noqa: S704


def _filled(panels: Sequence[Panel], width: float, *, steps: bool) -> Any:
    figure, axes = new_figure(width, [panel.height for panel in panels], shared=steps)
    for panel, one in zip(panels, axes, strict=True):
        panel.draw(one)
    if steps:
        axes[-1].set_xlabel("step", fontsize=8, color=COLORS["ink"][0])
    figure.align_ylabels(axes)
    return figure


def picture_bytes(over_steps: Sequence[Panel], below: Sequence[Panel], title: str) -> bytes:
    """Return the main figure as PNG, on white paper: panels over steps, and others below them."""
    with matplotlib.rc_context(SETTINGS):
        panels = [*over_steps, *below]
        figure, axes = new_figure(8.6, [panel.height + 0.15 for panel in panels], shared=False)
        figure.set_facecolor("white")
        for panel, one in zip(panels, axes, strict=True):
            panel.draw(one)
        for one in axes[: len(over_steps)]:
            one.sharex(axes[0])
        if over_steps:
            axes[len(over_steps) - 1].set_xlabel("step", fontsize=8, color=COLORS["ink"][0])
        figure.suptitle(title, fontsize=10.5, x=0.01, ha="left", parse_math=False, color=COLORS["ink"][0])
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=130, metadata={"Software": None})
    return file.getvalue()


def _for_page(text: str, prefix: str, label: str, titles: Mapping[str, str]) -> str:
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(text)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        _adapt(element, prefix)
        title = titles.get(element.get("id", "").removeprefix(f"{prefix}-").removesuffix("-line"))
        if title is not None:
            element.append(ElementTree.fromstring(f'<title xmlns="{SVG}">{escape(title)}</title>'))
            element.set("class", "mark")
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", label)
    return ElementTree.tostring(root, encoding="unicode")


def _adapt(element: ElementTree.Element, prefix: str) -> None:
    """Make identifiers unique in the page, colors variables of its theme, and the font that of the page."""
    for name, value in list(element.attrib.items()):
        if name == "id":
            element.set(name, f"{prefix}-{value}")
        elif value.startswith("#") and name in ("href", f"{{{XLINK}}}href"):
            element.set(name, f"#{prefix}-{value[1:]}")
        elif "url(#" in value:
            element.set(name, value.replace("url(#", f"url(#{prefix}-"))
        elif name == "style":
            themed = HEX.sub(lambda match: f"var(--{NAMES[match[0].lower()]})", value)
            element.set(name, FAMILY.sub("inherit" if "font:" in themed else "", themed))

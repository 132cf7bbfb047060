"""Reads what a drawing says: the texts of an SVG, as one who looks at it finds them."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree


def texts(svg: Path) -> list[str]:
    """Every text in it, in the order of the file."""
    found = ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()).strip() for text in found]

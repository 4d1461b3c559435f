"""What a page is made of, and the page as HTML. No part of it knows what a run is."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcfed import __version__


@dataclass(frozen=True)
class Picture:
    """A PNG file, which the page takes in."""

    path: Path
    caption: str

    @property
    def data(self) -> str:
        """The file as a URL that holds all of it."""
        return "data:image/png;base64," + base64.b64encode(self.path.read_bytes()).decode()


@dataclass(frozen=True)
class Table:
    """Rows of cells under a heading, or, without one, names and values.

    Attributes
    ----------
    rows : the first cell of each is its name.
    columns : the heading.
    caption : what it shows.
    """

    rows: Sequence[Sequence[Any]]
    columns: Sequence[str] = ()
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page under a heading of its own.

    Attributes
    ----------
    title : the heading.
    notice : a sentence that must not be overlooked.
    pictures, tables : in this order.
    lists : sentences under a name each.
    text : of a file, as it stands.
    """

    title: str
    notice: str = ""
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    lists: Mapping[str, Sequence[str]] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True)
class Page:
    """All of it.

    Attributes
    ----------
    title, subtitle : what it is about, in a line each.
    highlights : the numbers that matter most, by name.
    sections : the rest.
    """

    title: str
    subtitle: str
    highlights: Mapping[str, Any]
    sections: Sequence[Section]


def render(page: Page) -> str:
    """The page as HTML that needs nothing else: no script, no style, no picture from elsewhere."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hpcfed.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = shown
    environment.tests["quantity"] = _is_quantity
    return environment.get_template("page.html").render(page=page, version=__version__)


def _is_quantity(value: Any) -> bool:
    """Whether a cell is aligned as numbers are: one, a lack of one, or one with its spread."""
    return value is None or type(value) in (int, float) or (isinstance(value, str) and "\u00a0±\u00a0" in value)


def shown(value: Any) -> str:
    """A cell as text: six digits of a number, thousands apart."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.6g}"
        case list() | tuple():
            return ", ".join(map(shown, value))
        case _:
            return str(value)

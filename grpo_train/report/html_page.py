"""Self-contained HTML: templates, data that cannot become markup, and frames for notebooks.

A frame is an iframe whose whole document is its `srcdoc`: it needs no kernel, no other file and no network, and its
sandbox gives it an origin of its own, so that nothing in it can reach the notebook.
"""

import base64
import hashlib
import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Frame:
    """A document that a notebook shows in a frame.

    `height` is in pixels, and the reader can change it. With `picture`, the (width, height) of a picture that shrinks
    with the page, the frame is never wider than the picture, and `height` is the space around it. `still` is a PNG of
    what it shows at first, and its metadata, for readers who have no frames, such as an export to PDF.
    """

    document: str
    title: str
    height: int
    note: str = ""
    picture: tuple[int, int] | None = None
    still: tuple[bytes, dict[str, str]] | None = None

    def _repr_png_(self) -> tuple[bytes, dict[str, str]] | None:
        return self.still

    def _repr_html_(self) -> str:
        # Single quotes outside: the document has far more double quotes, and each would take six characters.
        document = self.document.replace("&", "&amp;").replace("'", "&#39;")
        size = f"height:{self.height}px;resize:vertical"
        if self.picture:
            width, height = self.picture
            size = f"height:calc({self.height}px + {height / width:.4f} * min(100cqw, {width}px));max-width:{width}px"
        return (
            f"<div style='container-type:inline-size'><iframe title='{html.escape(self.title)}' "
            f"sandbox='allow-scripts' "
            f"style='box-sizing:border-box;width:100%;border:1px solid #8c959f;border-radius:6px;{size}' "
            f"srcdoc='{document}'></iframe></div>"
            + (f"<p style='font-size:85%'>{html.escape(self.note)}</p>" if self.note else "")
        )

    def __repr__(self) -> str:
        return f"{self.title} (shown by a notebook)"


def render(template: str, script: str, **values: Any) -> str:
    """A template of templates/, filled in; values that are not Markup are escaped.

    The page has templates/style.css and the one `script` of templates/ inside, and may run nothing else.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, code = (Markup((TEMPLATES / name).read_text(encoding="utf-8")) for name in ("style.css", script))
    # The source expression with which a Content-Security-Policy allows exactly this script.
    digest = "sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return environment.get_template(template).render(style=style, script=code, digest=digest, **values)


def data(value: Any) -> Markup:
    r"""JSON that cannot end the script element around it: "<" is written \u003c, which JSON reads as "<"."""
    escapes = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
    return Markup(json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(escapes))

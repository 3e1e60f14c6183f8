"""The server's web page, and the headers that confine it."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

_FILE = Path(__file__).parents[2] / "assets" / "chat_page.html"


class Page(NamedTuple):
    """A page with the headers that it is sent with."""

    content: str
    headers: dict[str, str]


@cache
def chat_page() -> Page:
    """Return the page for chats. A browser runs only the script that is in the file and takes only
    its style, each known by its hash; connects to no other server; and never makes HTML of a text,
    since no Trusted Types policy is allowed."""
    content = _FILE.read_text("utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hashes("script", content),
        "style-src": _hashes("style", content),
        "connect-src": "'self'",
        "img-src": "data:",  # the icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",  # another server may use the port later
    }
    return Page(content, headers)


def _hashes(tag: str, content: str) -> str:
    """Return the source expressions of all elements with a tag."""
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", content, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in texts]
    return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)

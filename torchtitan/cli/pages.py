"""Pages from the HTML templates of this package."""

from pathlib import Path

from torchtitan.tools.logging import presentable

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: object) -> str:
    """Return a template of this package with these values, which are escaped, and `presentable`;
    the template itself escapes (`| e`) the content of data, which must be `visible` already."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        keep_trailing_newline=True,
        finalize=_presentable,
    )
    return environment.get_template(template).render(values)


def _presentable(value: object) -> object:
    return presentable(value) if type(value) is str else value  # HTML is of another type

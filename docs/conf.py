"""The documentation site: `make docs` builds it into build/docs/html, without a warning and without the network."""

import json
import re
from contextlib import redirect_stderr, redirect_stdout
from fnmatch import fnmatch
from functools import cache
from io import StringIO
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective

import neurocoder
from neurocoder_lab import experiments, results, speed
from neurocoder_lab.cli import main

RESULTS = Path(__file__).parent.parent / "results"

project = "neurocoder"
author = "the authors of neurocoder"
release = version = neurocoder.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3
highlight_language = "text"
exclude_patterns = ["static"]

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # torch's own text on forward helps nobody here
python_maximum_signature_line_length = 90
python_display_short_literal_types = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False  # several names may share a line
napoleon_custom_sections = [("Attributes", "params_style"), ("Class attributes", "params_style"), "Shape"]
default_role = "py:obj"  # `name` in a docstring is code, and a link where the name is known
nitpick_ignore_regex = [(r"py:class", r".*"), (r"py:obj", r"(?!neurocoder|nc\.).*")]  # types, arguments, torch

html_theme = "furo"
html_title = f"neurocoder {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False


class LinkNames(SphinxPostTransform):
    """`nc.recode`, in a page or a docstring, links to the reference."""

    default_priority = 5  # before references are resolved

    def run(self, **_: object) -> None:
        for code in [*self.document.findall(nodes.literal)]:
            name = re.match(r"nc\.\w+(\.\w+)*", code.astext())
            if not name:
                continue
            target = f"neurocoder{name[0].removeprefix('nc')}"
            if isinstance(code.parent, pending_xref):
                code.parent["reftarget"] = target
            elif not isinstance(code.parent, nodes.reference):
                link = pending_xref("", refdomain="py", reftype="obj", reftarget=target, refdoc=self.env.docname)
                code.replace_self(link)
                link += code


@cache
def judged() -> list[dict]:
    """What `neurocoder claims --json` prints."""
    with redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()):
        status = main(["claims", "--json", "--results", str(RESULTS)])
    assert status == 0
    return json.loads(printed.getvalue())


class Claims(SphinxDirective):
    """A table of the claims whose names match a pattern, as they are judged now: no page can be out of date."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        claims = [claim for claim in judged() if fnmatch(claim["id"], (self.arguments or ["*"])[0])]
        lines = ["| claim | verdict | ours: mean ± std (n) | paper |", "|---|---|---|---|"]
        for claim in claims:
            if claim["verdict"] != "not-run":
                paper = (f"{name} {value}" for name, value in claim["paper"].items() if not isinstance(value, dict))
                cells = claim["statement"], f"**{claim['verdict']}**", claim["ours"], ", ".join(paper)
                lines.append(f"| {' | '.join(cells)} |")
        waiting = [f"- {claim['statement']}" for claim in claims if claim["verdict"] == "not-run"]
        lines += ["", "Not run yet:", "", *waiting] if waiting else []
        table, *rest = self.parse_text_to_nodes("\n".join(lines))
        table["classes"].append("claims")
        return [table, *rest]


class Speed(SphinxDirective):
    """The table of `neurocoder bench networks`, of what was measured last."""

    def run(self) -> list[nodes.Node]:
        _, header, rows = speed.tabulate(results.load(RESULTS, "speed"))
        lines = [header, ["---"] * len(header), *rows]
        return self.parse_text_to_nodes("\n".join(f"| {' | '.join(line)} |" for line in lines))


@cache
def drawn(name: str) -> list[tuple[str, str]]:
    """The figures of an experiment at the desk's budget, as the report has them: titles, and what was drawn."""
    with results.at(RESULTS):
        return experiments.get(name).figures(results.load(RESULTS, name).where(budget="desk"))


class Pictures(SphinxDirective):
    """The figures of an experiment; of those whose titles match a pattern, if one is given."""

    required_arguments, optional_arguments, final_argument_whitespace = 1, 1, True

    def run(self) -> list[nodes.Node]:
        name, pattern = [*self.arguments, "*"][:2]
        shown = [(title, svg) for title, svg in drawn(name) if fnmatch(title, pattern)]
        if not shown:
            raise self.error(f"no figure of {name} has a title like {pattern}")
        return [
            nodes.figure("", nodes.raw("", svg, format="html"), nodes.caption(title, title)) for title, svg in shown
        ]


def setup(app: Sphinx) -> None:
    app.add_directive("claims", Claims)
    app.add_directive("pictures", Pictures)
    app.add_directive("speed", Speed)
    app.add_post_transform(LinkNames)

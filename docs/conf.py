"""Sphinx configuration. ``./dev docs`` builds the site into ``docs/_build/html``; it needs no network and no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

import attn_ops  # noqa: E402

project = "attn_ops"
author = "attn_ops contributors"
version = release = attn_ops.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "generated",
    "icon_fonts",
    "own_host",
    "typography",
]
exclude_patterns = ["_build"]
smartquotes_action = "qe"  # quotes and ellipses; two hyphens begin an option of a command
templates_path = ["_templates"]

myst_enable_extensions = ["deflist", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "pytorch_sphinx_theme2"
html_title = f"attn_ops {release}"
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "attn_ops"},
    "display_version": True,
    "navbar_center": "navbar-nav",
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "pygment_dark_style": "github-dark",
    "header_links_before_dropdown": 7,
    "article_header_end": [],
    "article_footer_items": ["prev-next"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["sphinx-version"],
    "footer_end": ["theme-version"],
    "show_pytorch_org_link": False,
    "show_lf_footer": False,
    "use_edit_page_button": False,
    "show_prev_next": True,
    "llm_disabled": True,
}

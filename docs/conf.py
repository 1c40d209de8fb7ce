"""The documentation site: `make docs` builds it, offline, with warnings as errors.

Sphinx, because it reads docstrings and Markdown alike, checks every cross-reference and has a search that
works from a file; MyST for the Markdown; Furo for pages that one can read on a phone, on paper and at night.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import adambs

project = "adambs"
author = "the adambs developers"
copyright = "the adambs developers, Apache-2.0"
release = version = adambs.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.doctest",
    "matplotlib.sphinxext.plot_directive",  # figures/
    "sphinx_gallery.gen_gallery",  # tutorial/, executed
    "mathml",
    "recorded",
    "trainers",
    "attributes",
]
exclude_patterns = ["_build", "tutorial", "built/index.rst", "**/sg_execution_times.rst"]

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
default_role = "code"  # docstrings mark code by one backquote or two

html_theme = "furo"
html_title = "adambs"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}

plot_formats = [("svg", 100)]
plot_html_show_formats = False
plot_html_show_source_link = False

sphinx_gallery_conf = {
    "examples_dirs": "tutorial",
    "gallery_dirs": "built",
    "abort_on_example_error": True,
    "show_memory": False,
    "min_reported_time": 1e9,
    "write_computation_times": False,
    "nested_sections": False,
    "image_scrapers": ("matplotlib",),
}

doctest_global_setup = "import torch; from adambs import SumTree; torch.manual_seed(0)"

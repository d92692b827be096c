"""Sphinx configuration of the documentation site: `make docs`, or `sphinx-build -W -n docs docs/_build`, offline."""

import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path

# This must precede the import of numpy. More threads only slow down the small matrices of these pages.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]  # Our extensions, and the module that runs snippets.

project = "diffusion_lens"
author = "The diffusion_lens authors"
project_copyright = author
release = version = version_of("diffusion-lens")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "docstrings",
    "tables",
    "client_tables",
    "recall_tables",
    "one_layer_tables",
    "family_tables",
    "commands",
    "cost_tables",
    "make_pictures",
    "browser_pictures",
]
exclude_patterns = ["_build", "_made", "images"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
napoleon_attr_annotations = False
highlight_language = "none"
smartquotes_action = "D"  # Convert dashes only, because quoted text is often code.

html_theme = "furo"
html_title = f"diffusion_lens {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

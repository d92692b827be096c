"""Sphinx configuration of the documentation site: `make docs`, or `sphinx-build -W -n docs docs/_build`, offline."""

import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path

# This must precede the import of numpy. More threads only slow down the small matrices of these pages.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Notebooks and examples inherit these. A notebook calls `diffusion-lens` as in an activated environment.
os.environ |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

HERE = Path(__file__).parent
# A profile of its own keeps the user's settings of IPython out of the notebooks, and its notes out of the log.
profile = HERE / "_made" / "ipython" / "profile_default"
profile.mkdir(parents=True, exist_ok=True)
(profile / "ipython_kernel_config.py").write_text('c.IPKernelApp.log_level = "ERROR"\n', encoding="utf-8")
os.environ["IPYTHONDIR"] = str(profile.parent)
# Our extensions, modules that they share with the tests, and the packages beside the examples.
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent / "examples")]

project = "diffusion_lens"
author = "The diffusion_lens authors"
project_copyright = author
release = version = version_of("diffusion-lens")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.intersphinx",  # before "docstrings", which resolves what is left
    "sphinx_copybutton",
    "docstrings",
    "inherited_sources",
    "repository_files",
    "tables",
    "client_tables",
    "recall_tables",
    "one_layer_tables",
    "real_words_tables",
    "family_tables",
    "commands",
    "gallery",  # before "make_pictures": the examples run beside the pages
    "make_pictures",
    "browser_pictures",
]
exclude_patterns = ["_build", "_made", "images", "jupyter_execute"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Notebooks are stored without outputs and run at every build. A cell that fails or warns fails the build.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 120
nb_execution_show_tb = True
nb_output_stderr = "remove-warn"
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = False
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
napoleon_attr_annotations = False
highlight_language = "none"
smartquotes = False  # It would turn the two hyphens of an option such as --shard into a dash.

# The inventories are text files in this folder, so that a build fetches nothing. They list only names that we use.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "inventories/python.txt"),
    "torch": ("https://docs.pytorch.org/docs/stable", "inventories/torch.txt"),
    "numpy": ("https://numpy.org/doc/stable", "inventories/numpy.txt"),
    "transformer_lens": ("https://transformerlensorg.github.io/TransformerLens", "inventories/transformer_lens.txt"),
    "pandas": ("https://pandas.pydata.org/docs", "inventories/pandas.txt"),
}

# What a user types has a button, what is printed has none. In a session only the commands are copied.
copybutton_selector = ", ".join(
    f"div.highlight-{language} pre" for language in ("python", "ipython3", "sh", "console", "js", "json", "bibtex")
)
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"

html_theme = "furo"
html_title = f"diffusion_lens {release}"
html_favicon = "_static/favicon.svg"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]

"""Sphinx extension: an inherited method links to the source of the class that defines it.

viewcode looks for the method in the module of the inheriting class, and finds nothing there.
"""

from importlib import import_module

from docutils import nodes
from sphinx.addnodes import desc_signature
from sphinx.application import Sphinx

PACKAGES = ("diffusion_lens", "weight_conversion")


def point_at_definitions(app: Sphinx, doctree: nodes.document) -> None:
    """Replace module and name of each inherited member by those of its definition, before viewcode reads them."""
    for signature in doctree.findall(desc_signature):
        owner, _, member = signature.get("fullname", "").rpartition(".")
        if not owner or not str(signature.get("module")).startswith(PACKAGES):
            continue
        inheriting = getattr(import_module(signature["module"]), owner, object)
        for base in inheriting.__mro__[1:]:
            if member in vars(base) and member not in vars(inheriting) and base.__module__.startswith(PACKAGES):
                signature["module"], signature["fullname"] = base.__module__, f"{base.__qualname__}.{member}"
                break


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", point_at_definitions, priority=400)  # viewcode has priority 500
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Explorer pages: runs, lenses, attention and traces in one HTML file that needs no network.

A page is a manifest, which says what there is, and binary chunks with the numbers, one for each step of a view. The ES
modules below `explorer/` show them. `trajectory.explore(path)` writes such a page; this package knows no model, and
takes plain data.
"""

from diffusion_lens.pages.page import Page, PageRun, step_slider, write_page

__all__ = ["Page", "PageRun", "step_slider", "write_page"]

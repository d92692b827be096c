"""The explorer with a model: runs, lenses, attention and traces on demand, in a notebook or a browser.

`explore(model, prompt)` is the widget of a notebook, `explore(model, prompt, path)` writes a file, and the command
`diffusion-lens explore` serves a page on this machine. All three show the runs of a `Session`.
"""

from diffusion_lens.explorer.session import Session
from diffusion_lens.explorer.spec import Intervention, Spec
from diffusion_lens.explorer.widget import explore
from diffusion_lens.pages.page import CustomView

__all__ = ["CustomView", "Intervention", "Session", "Spec", "explore"]

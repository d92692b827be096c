"""The walks of CONTRIBUTING.md name every file that their calls pass, and no other."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import causal_trace
from diffusion_lens.data import site_facts

ROOT = Path(__file__).parents[1]
WALKS = (
    (ROOT / "CONTRIBUTING.md")
    .read_text(encoding="utf-8")
    .split("## Three walks")[1]
    .split("\n## ")[0]
    .split("\n**From")[1:]
)
# Named for other calls than the one that runs here.
ELSEWHERE = {"diffusion_lens/loading/hub.py", "diffusion_lens/model/time.py"}


@pytest.fixture(scope="module")
def jobs() -> list[Callable[[], object]]:
    model = HookedDiffusionTransformer.from_pretrained("site-mdm", device="cpu")
    fact = site_facts.load().facts("description", trained="p2d", asked="d2p")[0]
    query = fact.to_query(model, n_masks=4, first_tokens=1)
    return [
        lambda: HookedDiffusionTransformer.from_pretrained("site-mdm", device="cpu")(query.tokens[None]),
        lambda: model.denoise(fact.prompt, max_new_tokens=4, steps=6),
        lambda: causal_trace(model, query, noise=0.5, samples=2).plot(),
    ]


@pytest.mark.usefixtures("undrawn_figures")
@pytest.mark.parametrize("walk", range(3))
def test_a_walk_names_the_files_that_run(jobs: list[Callable[[], object]], walk: int) -> None:
    packages, passed = tuple(str(ROOT / name) for name in ("diffusion_lens", "weight_conversion")), set()

    def watch(frame: object, event: str, _: object) -> None:
        path = frame.f_code.co_filename  # type: ignore[attr-defined]
        if event == "call" and path.startswith(packages):
            passed.add(str(Path(path).relative_to(ROOT)))

    jobs[walk]()  # caches are filled
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        jobs[walk]()
    finally:
        sys.setprofile(before)
    paths = re.findall(r"`([\w/]+\.py)`", WALKS[walk])
    named = {path if path.startswith("weight_conversion/") else f"diffusion_lens/{path}" for path in paths}
    assert named - ELSEWHERE - {"diffusion_lens/tests/test_walks.py"} == passed

"""Explorer pages for the tests in the browser: of a bundled model, of a pair, of a large run, of hostile tokens."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

HOSTILE = (
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "{{step}}",
    "\u202e\n\t",
    "␣ a b",
)


@dataclass(frozen=True)
class Explored:
    """A run of a bundled model with the results that its page shows."""

    model: Any
    fact: Any
    trajectory: Any
    cache: Any
    lens: Any
    trace: Any


@cache
def explored(name: str = "site-mdm") -> Explored:
    """A person's description, completed by a model with a planted subject site."""
    from diffusion_lens import Fact, HookedDiffusionTransformer
    from diffusion_lens.analysis import logit_lens, trace_trajectory
    from diffusion_lens.data import site_facts

    model = HookedDiffusionTransformer.from_pretrained(name, device="cpu")
    person = site_facts.load().people[0]
    fact = Fact(f"{person.name} is the", subject=person.name, answer=f" {person.description}.")
    settings: dict[str, Any] = (
        dict(max_new_tokens=12) if model.cfg.is_autoregressive else dict(max_new_tokens=12, steps=6)
    )
    trajectory, activations = model.denoise_with_cache(
        fact.prompt,
        names_filter=lambda point: point.endswith("attn.hook_pattern") or point == "denoise.hook_logits",
        **settings,
    )
    trace = trace_trajectory(model, fact, trajectory=trajectory, window=2, samples=2, noise=0.5)
    return Explored(model, fact, trajectory, activations, logit_lens(model, trajectory), trace)


def page_of(run: Explored) -> Any:
    """The page of a run with all its views."""
    return run.trajectory.explore(
        lens=run.lens, trace=run.trace, attention=run.cache, predictions=run.trajectory.predictions(run.model)
    )


def pair_page() -> Any:
    """A masked diffusion model and its autoregressive (AR) baseline side by side."""
    pages = [page_of(explored(name)) for name in ("site-mdm", "site-ar")]
    models = [model for page in pages for model in page.models]
    runs = [
        replace(page.runs[0], entry={**page.runs[0].entry, "id": f"run{i}", "model": i}) for i, page in enumerate(pages)
    ]
    return replace(pages[0], title="A pair", models=models, runs=runs)


def large_page(
    n_pos: int = 52, n_steps: int = 32, n_layers: int = 20, words: tuple[str, ...] = (), different: int = 256
) -> Any:
    """A page of random numbers, which compress worse than those of a model, with every view at every step.

    With fewer `different` positions than there are, their numbers are repeated, so that a large page is a small file.
    """
    from diffusion_lens.pages import views
    from diffusion_lens.pages.page import Page, PageRun
    from diffusion_lens.pages.views import Stored, pack

    generator, k, n_heads, given = torch.Generator().manual_seed(0), 5, 12, 8
    places = torch.arange(n_pos) % different
    n_different = min(n_pos, different)
    texts = [*words, *(f" {word}{i}" for i in range(80) for word in ("word", "a", "mushrooms", "cartographer", "of"))]
    final = torch.randint(len(words) or len(texts), (n_pos,), generator=generator)
    revealed_at = torch.randint(n_steps, (n_pos,), generator=generator)
    revealed_at[:given] = -1
    canvases = torch.stack([torch.where(revealed_at < step, final, -1) for step in range(n_steps + 1)])

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    def top(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        p = (rand(*shape, k).sort(dim=-1, descending=True).values / k).nan_to_num()
        return torch.randint(len(texts), (*shape, k), generator=generator), p

    steps, layers, positions = list(range(n_steps)), list(range(n_layers + 1)), list(range(n_pos))
    lens = {}
    for step in steps:
        tokens, p = (table[:, places] for table in top(n_layers + 1, n_different))
        numbers = rand(n_layers + 1, n_different)[:, places]
        lens[f"lens/{step}"] = pack(
            {
                "top_tokens": Stored("u2", tokens.numpy()),
                "top_probabilities": Stored.shares(p),
                "entropy": Stored.numbers(6 * numbers),
                "rank": Stored.integers((len(texts) * numbers).long()),
                "probability": Stored.shares(rand(n_layers + 1, n_different)[:, places]),
            }
        )
    labels = [f"{layer}_pre" for layer in layers[:-1]] + ["final_post"]
    targets = final.tolist()
    lens_entry = dict(labels=labels, layers=layers, positions=positions, steps=steps, k=k, targets=targets, target="")
    predicted, position = (canvases[:-1] < 0).nonzero(as_tuple=True)
    tokens, p = top(len(predicted))
    predictions = {"step": Stored.integers(predicted), "position": Stored.integers(position)}
    predictions |= {"entropy": Stored.numbers(6 * rand(len(predicted)))}
    predictions |= {"top_tokens": Stored("u2", tokens.numpy()), "top_probabilities": Stored.shares(p)}
    predictions_entry = dict(k=k, steps=steps, committed=(revealed_at // 2).tolist(), chunk="predictions")
    scores = rand(n_steps, n_different, n_layers)[:, places]
    scores[:, -2:] = torch.nan
    trace = views.trace_entry("resid", "resid", (2, 4), positions, layers[:-1], steps, "the answer")
    patterns = {(10, step): rand(n_heads, n_different, n_pos).pow(12).softmax(dim=-1)[:, places] for step in steps[:8]}
    entry = {
        "id": "run",
        "model": 0,
        "label": "random numbers",
        "prompt": "",
        "text": "",
        "spec": None,
        "base": None,
        "words": texts,
        "n_steps": n_steps,
        "first_step": 0,
        "steps": list(range(n_steps + 1)),
        "times": [1 - step / n_steps for step in steps],
        "canvases": canvases.tolist(),
        "given": (revealed_at < 0).tolist(),
        "real": [True] * n_pos,
        "revealed_at": revealed_at.tolist(),
        "confidence": rand(n_pos).tolist(),
        "missing": {},
        "python": {"canvas": "run.canvases[{step}]", "lens": "lens.at_step({step}).entropy[{layer}, 0, {position}]"},
    }
    run = PageRun.of(
        entry,
        [views.trace_view(trace, scores, [0.9] * n_steps, [0.1] * n_steps)],
        predictions=views.View(predictions_entry, {"predictions": pack(predictions)}),
        lens=views.View({**lens_entry, "chunk": "lens/{step}"}, lens),
        attention=views.attention_view(patterns),
    )
    model = dict(name="random", n_layers=n_layers, n_heads=n_heads, grows=False, samplers=[], length=n_pos)
    return Page("Random numbers", [model], [run])


def write(page: Any, folder: Path, name: str) -> Path:
    """Write a page as a file."""
    from diffusion_lens.pages.page import write_page

    return write_page(page, folder / f"{name}.html")


@cache
def learned() -> dict[str, Any]:
    """What analyses have learned about the run of `explored`: a circuit against another run, and signatures."""
    from diffusion_lens.analysis import TaughtPair, edge_attribution, reversal_signatures
    from diffusion_lens.data import site_facts

    run = explored()
    model, n_pos = run.model, run.trajectory.tokens.shape[1]
    people = site_facts.load().people[:6]
    other = model.denoise(f"{people[1].name} is the", length=n_pos, steps=6)
    # The first word of the description, which differs.
    position = int((run.trajectory.tokens != other.tokens)[0, 3:].nonzero()[0]) + 3
    a, b = (int(each.tokens[0, position]) for each in (run.trajectory, other))
    circuit = edge_attribution(
        model, run.trajectory, other, lambda logits: logits[0, 0, a] - logits[0, 0, b], [0, 2], logits_at=[position]
    )
    pairs = [
        TaughtPair.of(
            model, (f"{x.name} is the {x.description}.", f"the {x.description} is {x.name}."), x.name, x.description
        )
        for x in people
    ]
    return {"circuit": circuit, "signatures": reversal_signatures(model, pairs)}


@dataclass(frozen=True)
class HandedOn:
    """A run of a small random model with experts whose steps hand their predictions on."""

    model: Any
    trajectory: Any
    cache: Any


@cache
def handed_on() -> HandedOn:
    """Two canvases of six positions, and the choices of the routers."""
    from small_networks import diffusion_gemma

    from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
    from weight_conversion.registry import recognise

    config = diffusion_gemma()
    architecture = recognise(config, {}, "the config").read_architecture(config, {})
    torch.manual_seed(0)
    model = HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"))
    trajectory, activations = model.denoise_with_cache(
        torch.tensor([[5, 6, 7]]),
        names_filter=lambda point: point.endswith(("hook_experts", "hook_router_weights")),
        max_new_tokens=12,
        steps=5,
    )
    return HandedOn(model, trajectory, activations)


@cache
def graphed(name: str = "site-mdm") -> tuple[Any, Any]:
    """A run of a bundled model that describes a person, and its graph against another person."""
    from diffusion_lens import HookedDiffusionTransformer
    from diffusion_lens.analysis import run_graph
    from diffusion_lens.data import site_facts

    told = [person for person in site_facts.load().people if person.trained == "p2d"]
    model = HookedDiffusionTransformer.from_pretrained(name, device="cpu")
    run = model.denoise(f"{told[4].name} is the", max_new_tokens=6, steps=6 if model.cfg.has_mask else None)
    return run, run_graph(model, run, 6, f"{told[5].name} is the", metric="margin")

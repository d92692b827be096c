"""The predicted memory of a job beside the weights is that of its tensors, within a tenth."""

from functools import partial

import pytest
import torch
from oracles.memory import peak_of_tensors
from small_networks import small_architecture

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer, Query, cost
from diffusion_lens.analysis import Corruption, Restoration, Selection, patch_grid, trace_query
from diffusion_lens.analysis.patching.patch_settings import PatchSettings
from diffusion_lens.analysis.patching.sites import resolve_sites
from diffusion_lens.analysis.rome import second_moment
from diffusion_lens.denoising import DenoiseSettings, denoise, lay_out

NOISE = Corruption("gaussian", 0.3, samples=4)


def build(kind):
    """Four layers of width 64 with random weights."""
    masked = kind != "grouped"
    words = dict(d_vocab=1000 + masked, d_vocab_out=1000, mask_token_id=1000 if masked else None)
    causal = {} if masked else {"attention_dir": "causal", "readout": "shifted", "n_key_value_heads": 2}
    sizes = dict(n_layers=4, d_model=64, n_heads=4, n_key_value_heads=4, d_head=16, d_mlp=192, n_ctx=64)
    architecture = small_architecture(**{**sizes, **words, **causal})
    return HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"))


def query_of(model):
    tokens, mask = torch.arange(16) + 3, model.cfg.mask_token_id
    if mask is None:
        return Query(tokens, (2, 5), (16,), (7,))
    tokens[-1] = mask
    return Query(tokens, (2, 5), (15,), (7,))


def forward(model):
    return partial(model, torch.ones(8, 16, dtype=torch.long)), cost.forward(model.cfg, 8, 16)


def trace(model, restoration):
    arguments = query_of(model), restoration, NOISE, Selection(range(2, 16, 2), [0, 2])
    return partial(trace_query, model, *arguments), cost.trace(model.cfg, *arguments)


def grid(model, site, method="exact"):
    clean, corrupted = torch.arange(16)[None] + 3, torch.arange(16)[None] + 40
    settings = PatchSettings(resolve_sites(site), None, [1, 3], None, method, 2)
    run = partial(patch_grid, model, clean, corrupted, lambda logits: logits[:, -1, 5].sum(), site)
    run = partial(run, layers=[1, 3], logits_at=[-1], method=method, check=2)
    return run, cost.patch_grid(model.cfg, clean[0], corrupted[0], settings, [-1])


def loop(model, **options):
    settings = DenoiseSettings(**({} if model.cfg.grows else {"steps": 3}), **options).fitted_to(model.cfg)
    canvas = lay_out(model, torch.full((4, 6), 9), 24)
    return partial(denoise, model, canvas, settings), cost.denoising(model.cfg, 24, 6, settings, rows=4)


def second_moment_of(model):
    texts = [torch.arange(20) + i for i in range(8)]
    return partial(second_moment, model, texts, 2, batch_size=4), cost.second_moment(model.cfg, [20] * 8, 2, 4)


JOBS = {
    "forward": forward,
    "trace": partial(trace, restoration=Restoration()),
    "trace of MLPs": partial(trace, restoration=Restoration("mlp", 2)),
    "grid": partial(grid, site="z"),
    "estimates": partial(grid, site="mlp_out", method="attribution"),
    "loop": loop,
    "second moment": second_moment_of,
    "guided loop": partial(loop, cfg_scale=1.0, temperature=1.0, seed=0),
}


@pytest.mark.parametrize(
    ("job", "kind"),
    [(job, "plain") for job in JOBS] + [(job, "grouped") for job in ("trace", "grid", "loop")],
)
@torch.no_grad()
def test_a_job_takes_the_predicted_memory(job, kind, annotations_unchecked):
    model = build(kind)
    run, predicted = JOBS[job](model)
    run()  # tables of rotations are made once
    assert predicted.peak_bytes - predicted.weight_bytes == pytest.approx(peak_of_tensors(run), rel=0.1)

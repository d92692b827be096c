"""Results on a trajectory record which network wrote its canvases, and which one reads them."""

import copy
import re
import warnings
from dataclasses import replace

import pytest
import torch

from diffusion_lens.analysis import (
    LoopSettings,
    TrajectoryTrace,
    answer_probability,
    average_trajectory_effect,
    patch_grid,
    temporal_effect,
    trace_trajectory,
)
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.interventions import named, swap, zero_ablate
from diffusion_lens.records.identity import ATTRIBUTES, describe_hooks, describe_modules, weights_sha256
from diffusion_lens.records.results import tokenizer_sha256

FACTS = toy_facts.load().facts("both", "p2d")
POINT = "blocks.0.hook_attn_out"
HOOKS = [(POINT, named("no attention", zero_ablate()))]
QUIET = dict(noise=0.0, samples=1, layers=[1], positions=[1])
ONCE = dict(QUIET, steps=[2])

guided_or_causal = pytest.mark.parametrize(("small", "cfg_scale"), [("mdm", 0.8), ("ar", 0.0)], indirect=["small"])
on_the_masked_model = pytest.mark.parametrize("small", ["mdm"], indirect=True)
on_the_causal_model = pytest.mark.parametrize("small", ["ar"], indirect=True)


def denoise(model, fact=FACTS[0], **settings):
    """Four steps on the masked diffusion model, and one for each of four tokens on the causal one."""
    length = 14 if model.cfg.has_mask else len(model.encode(fact.prompt)) + 4
    return model.denoise(fact.prompt, length=length, steps=4, **settings)


def query_of(model, run, fact=FACTS[0]):
    """The query whose answer is what a run writes, right or wrong."""
    prompt = model.to_tokens(fact.prompt)[0]
    query = fact.to_query(model, **({} if model.cfg.has_mask else dict(first_tokens=4)))
    answer = run.tokens[0, list(query.answer_positions)]
    tokens = torch.cat([prompt, answer[:-1]])
    if model.cfg.has_mask:
        tokens = torch.nn.functional.pad(prompt, (0, 14 - len(prompt)), value=model.cfg.mask_token_id)
    return replace(query, tokens=tokens, answer_tokens=tuple(answer.tolist()))


def network(model):
    """What records hold of a network, as it is now."""
    return {
        "model": model.cfg.model_name,
        "dtype": str(model.cfg.dtype).removeprefix("torch."),
        "weights_sha256": weights_sha256(model),
        "hooks": describe_hooks(model),
        "modules": describe_modules(model),
        "tokenizer_sha256": tokenizer_sha256(model.tokenizer, model.cfg.default_prepend_bos),
    }


def network_in(record):
    names = ("model", "dtype", "weights_sha256", "hooks", "modules", "tokenizer_sha256")
    return {name: record[name] for name in names}


def hook_now(model):
    model.add_hook(*HOOKS[0])
    return rf"hooks: {POINT} none there, \[forward: no attention\] here"


def edit_weights(model):
    model.blocks[0].mlp.down.weight.data.neg_()
    return f"weights_sha256: '[0-9a-f]+' there, '{weights_sha256(model)}' here"


def change_a_norm(model):
    model.ln_final.eps *= 2
    return f"modules.attributes: '#[0-9a-f]+' there, '{describe_modules(model)[ATTRIBUTES]}' here"


def put_in_a_module(model):
    class Halved(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs) / 2

    model.blocks[0].mlp = Halved(model.blocks[0].mlp)
    return r"modules\.blocks\.0\.mlp: None there, '\S*Halved' here"


CHANGES = [hook_now, edit_weights, change_a_norm, put_in_a_module]
# Which network wrote the canvases is decided before the model's variant matters: each change is tried on one model.
every_change = pytest.mark.parametrize(
    ("small", "change"), list(zip(["mdm", "ar"] * 2, CHANGES, strict=True)), indirect=["small"]
)


@every_change
def test_the_end_of_another_networks_run_is_not_compared_with_this_ones(small, change):
    model = copy.deepcopy(small)
    run = denoise(model)
    query, difference = query_of(model, run), change(model)
    for analysis in (temporal_effect, lambda *args, **more: trace_trajectory(*args, canvas="free", **more)):
        with pytest.raises(ValueError, match=difference) as refused:
            analysis(model, query, trajectory=run, **QUIET)
        assert re.search("denoise .* again under the same hooks.*trajectory=None", str(refused.value))


@guided_or_causal
def test_hooks_of_the_run_that_are_gone_are_named(small, cfg_scale):
    run = denoise(small, cfg_scale=cfg_scale, fwd_hooks=HOOKS)
    query = query_of(small, run)
    with pytest.raises(ValueError, match=rf"hooks: {POINT} \[forward: no attention\] there, none here"):
        temporal_effect(small, query, trajectory=run, **ONCE)
    with small.hooks(fwd_hooks=HOOKS):
        effect, present = temporal_effect(small, query, trajectory=run, **ONCE), network(small)
    assert effect.clean == effect.corrupted == 1
    assert effect.record["trajectory"] == network_in(effect.record) == present


@every_change
def test_a_trace_on_another_networks_canvases_warns_and_records_both(small, change):
    model = copy.deepcopy(small)
    run, wrote = denoise(model), network(model)
    query, difference = query_of(model, run), change(model)
    with pytest.warns(UserWarning, match=difference) as warned:
        trace = trace_trajectory(model, query, trajectory=run, **QUIET)
    assert len(warned) == 1
    assert re.search(
        r"`known`, `revealed_at` and the canvases come from the earlier.*denoise .* again under the same hooks",
        str(warned[0].message),
    )
    assert trace.record["trajectory"] == wrote
    assert network_in(trace.record) == network(model) != wrote


@every_change
def test_a_grid_on_another_networks_canvases_warns_and_records_both(small, change):
    model = copy.deepcopy(small)
    old, also_old, wrote = denoise(model), denoise(model, FACTS[1]), network(model)
    difference = change(model)
    new = denoise(model, FACTS[1])
    both = "the clean trajectory and the corrupted trajectory were"
    cases = [
        ((old, new), ["clean"], "the clean trajectory was"),
        ((new, old), ["corrupted"], "the corrupted trajectory was"),
        ((old, old), ["clean", "corrupted"], both),
        ((old, also_old), ["clean", "corrupted"], both),
    ]
    for runs, sides, words in cases if change is hook_now else cases[:1]:
        with pytest.warns(UserWarning, match=difference) as warned:
            grid = patch_grid(
                model, *runs, lambda logits: logits[0, -1, 3], "mlp_out", [0, 2], layers=[0], positions=[1]
            )
        assert len(warned) == 1
        assert str(warned[0].message).startswith(f"{words} written by another network")
        wrote_side = grid.record["trajectory"]
        assert wrote_side == {side: wrote if side in sides else network(model) for side in ("clean", "corrupted")}
        assert network_in(grid.record) == network(model)


@on_the_causal_model
def test_each_side_of_a_grid_is_compared_with_its_own_model(small):
    model = copy.deepcopy(small)
    edit_weights(model)
    runs = denoise(small), denoise(model, FACTS[1])
    settings = dict(metric=lambda logits: logits[0, -1, 3], sites="mlp_out", steps=[0], layers=[0], positions=[1])
    grid = patch_grid(model, *runs, source_model=small, **settings)
    assert grid.record["trajectory"] == {"clean": network(small), "corrupted": network(model)}
    with pytest.warns(UserWarning, match="weights_sha256") as warned:
        patch_grid(small, *runs, source_model=model, **settings)
    assert len(warned) == 2


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
@on_the_masked_model
def test_a_grid_without_steps_stands_on_no_trajectory(small):
    grid = patch_grid(small, FACTS[0].prompt, FACTS[0].prompt, lambda logits: logits[0, -1, 3], "mlp_out", layers=[0])
    assert grid.record["trajectory"] is None


def sibling(model, name="sibling"):
    """Another checkpoint of the same architecture and tokenizer, as the fine-tuned one of a base model is."""
    other = copy.deepcopy(model)
    other.cfg.model_name = name
    edit_weights(other)
    return other


@on_the_masked_model
def test_a_grid_patches_siblings_into_each_other_on_one_set_of_canvases(small):
    other, runs = sibling(small), (denoise(small), denoise(small, FACTS[1]))
    query = query_of(small, runs[1], FACTS[1])
    settings = dict(sites="mlp_out", steps=[0], layers=[0], positions=[1])
    for source, model in ((other, small), (small, other)):
        for metric in (lambda logits: logits[0, -1, 3], answer_probability(model, query)):
            with pytest.warns(UserWarning, match=r"model: 'small-\w+' there, 'sibling' here; weights_sha256") as warned:
                grid = patch_grid(model, *runs, metric, source_model=source, **settings)
            assert [str(warning.message).split()[1] for warning in warned] == [
                "clean" if source is other else "corrupted"
            ]
            assert grid.record["trajectory"] == {"clean": network(small), "corrupted": network(small)}
    canvases = [run.canvases[0].clamp(min=0) for run in runs]
    with torch.no_grad():
        patch = other.run_with_cache(canvases[0], names_filter="blocks.0.hook_mlp_out")[1]["blocks.0.hook_mlp_out"]
        put = ("blocks.0.hook_mlp_out", swap({"blocks.0.hook_mlp_out": patch}, 1))
        expected = small.run_with_hooks(canvases[1], fwd_hooks=[put])[0, -1, 3]
    with pytest.warns(UserWarning, match="sibling"):
        grid = patch_grid(small, *runs, lambda logits: logits[0, -1, 3], source_model=other, **settings)
    assert grid.scores.item() == pytest.approx(expected.item(), abs=1e-5)


@on_the_causal_model
def test_a_trace_reads_a_siblings_canvases_but_not_its_ending(small):
    other, run = sibling(small), denoise(small)
    query = query_of(small, run)
    with pytest.warns(UserWarning, match="model: 'small-.*' there, 'sibling' here"):
        trace_trajectory(other, query, trajectory=run, **QUIET)
    for analysis in (temporal_effect, lambda *args, **more: trace_trajectory(*args, canvas="free", **more)):
        with pytest.raises(ValueError, match=r"model: 'small-.*' there, 'sibling' here"):
            analysis(other, query, trajectory=run, **QUIET)


@on_the_masked_model
@pytest.mark.parametrize("side", ["clean", "corrupted"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: {"architecture": {**record["architecture"], "n_layers": 7}}, "whose architecture differs"),
        (lambda record: {"tokenizer_sha256": "0" * 64}, "another tokenizer.*other words"),
    ],
)
def test_a_grid_refuses_canvases_that_mean_something_else(small, side, change, message):
    run = denoise(small)
    other = replace(run, record={**run.record, **change(run.record)})
    runs = (other, run) if side == "clean" else (run, other)
    with pytest.raises(ValueError, match=message):
        patch_grid(small, *runs, lambda logits: logits[0, -1, 3], "mlp_out", [0], layers=[0], positions=[1])


@on_the_masked_model
def test_a_grid_takes_canvases_whose_tokenizer_is_unknown(small):
    run = denoise(small)
    other = replace(run, record={**run.record, "tokenizer_sha256": None})
    patch_grid(small, other, run, lambda logits: logits[0, -1, 3], "mlp_out", [0], layers=[0], positions=[1])


@on_the_causal_model
def test_a_replay_records_the_network_that_reads_and_the_one_that_wrote(small):
    model = copy.deepcopy(small)
    run, wrote = denoise(model), network(model)
    forced = run.replay(model, fwd_hooks=HOOKS)
    assert network_in(forced.record) == {**wrote, "hooks": {POINT: ["forward: no attention"]}}
    assert forced.record["trajectory"] == wrote
    edit_weights(model)
    for canvas in ("forced", "free"):
        again = forced.replay(model, canvas=canvas)
        assert network_in(again.record) == network(model)
        assert again.record["trajectory"] == wrote


@on_the_masked_model
def test_a_forced_replay_keeps_its_provenance(small):
    forced = denoise(small).from_step(2).replay(small, canvas="forced", fwd_hooks=HOOKS)
    effect = temporal_effect(small, query_of(small, forced), trajectory=forced, **ONCE)
    assert effect.record["trajectory"] == network(small)
    with small.hooks(fwd_hooks=HOOKS), pytest.raises(ValueError, match=POINT):
        temporal_effect(small, query_of(small, forced), trajectory=forced, **ONCE)


@on_the_causal_model
def test_a_free_replay_from_the_start_is_of_the_new_network_alone(small):
    free = denoise(small).replay(small, canvas="free", fwd_hooks=HOOKS)
    for first_step in (0, 2):  # all canvases of the branch were written by the replay, from whichever step it begins
        branch = free.from_step(first_step)
        with small.hooks(fwd_hooks=HOOKS):
            effect = temporal_effect(small, query_of(small, branch), trajectory=branch, **ONCE)
            assert effect.record["trajectory"] == network(small)
        assert effect.clean == effect.corrupted == 1


@on_the_masked_model
def test_a_free_replay_from_the_middle_is_of_two_networks(small, tmp_path):
    plain = network(small)
    run = denoise(small).from_step(2)
    same = run.replay(small, canvas="free")
    assert trace_trajectory(small, query_of(small, same), trajectory=same, **QUIET).record["trajectory"] == plain
    free = run.replay(small, canvas="free", fwd_hooks=HOOKS)
    free = Trajectory.load(free.save(tmp_path / "free.safetensors"))
    query = query_of(small, free)
    with pytest.raises(ValueError, match="was written by another network"):
        temporal_effect(small, query, trajectory=free, **ONCE)
    with pytest.warns(UserWarning, match=rf"than '\S+' is now: hooks: {POINT} \[.*there, none here; model|none here\."):
        trace_trajectory(small, query, trajectory=free, **QUIET)
    with small.hooks(fwd_hooks=HOOKS):
        both = {**network(small), "earlier": {**plain, "before_step": 2}}
        again = free.from_step(3).replay(small, canvas="forced")
        for written in (free, free.from_step(3), again):
            with pytest.warns(UserWarning, match=f"before step 2, hooks: {POINT} none there") as warned:
                trace = trace_trajectory(small, query, trajectory=written, **{**QUIET, "steps": [3]})
            assert len(warned) == 1
            assert trace.record["trajectory"] == both
        # New runs begin with the same canvas, so what another network wrote on it is no effect.
        with pytest.warns(UserWarning, match="before step 2"):
            effect = temporal_effect(small, query, trajectory=free, **ONCE)
        assert effect.clean == effect.corrupted == 1
        assert effect.record["trajectory"] == both


@on_the_causal_model
def test_another_dtype_is_named_before_the_hash_of_its_weights(small):
    run = denoise(small)
    model = copy.deepcopy(small).to(torch.bfloat16)
    with pytest.warns(UserWarning, match="now: dtype: 'float32' there, 'bfloat16' here; weights_sha256"):
        trace_trajectory(model, query_of(small, run), trajectory=run, **QUIET)


@on_the_masked_model
def test_a_warning_names_the_line_that_called(small):
    run = denoise(small)
    query = query_of(small, run)
    settings = dict(metric=lambda logits: logits[0, -1, 3], sites="mlp_out", steps=[0], layers=[0], positions=[1])
    with small.hooks(fwd_hooks=HOOKS):
        for analysis in (
            lambda: trace_trajectory(small, query, trajectory=run, **QUIET),
            lambda: patch_grid(small, run, run, **settings),
            lambda: small.denoise(FACTS[0].prompt, **({"length": 20} if small.cfg.trained_length else {})),
        ):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                analysis()
            assert {warning.filename for warning in warned} <= {__file__}
        assert len(warned) == (small.cfg.trained_length is not None)


@on_the_masked_model
def test_a_saved_run_is_compared_with_what_its_record_has(small, tmp_path):
    model = copy.deepcopy(small)
    run = denoise(model)
    query = query_of(model, run)
    old = replace(run, record={name: value for name, value in run.record.items() if name not in ("hooks", "modules")})
    paths = [saved.save(tmp_path / f"{name}.safetensors") for name, saved in {"run": run, "old": old}.items()]
    run, old = map(Trajectory.load, paths)
    temporal_effect(model, query, trajectory=run, **ONCE)
    with model.hooks(fwd_hooks=HOOKS):
        effect = temporal_effect(model, query, trajectory=old, **ONCE)
    assert effect.record["trajectory"] == {**network(model), "hooks": None, "modules": None}
    edit_weights(model)
    for loaded in (run, old):
        with pytest.raises(ValueError, match="weights_sha256"):
            temporal_effect(model, query, trajectory=loaded, **ONCE)


@on_the_causal_model
def test_an_average_over_steps_stands_on_its_own_networks_runs(small, tmp_path):
    with warnings.catch_warnings(), small.hooks(fwd_hooks=HOOKS):
        warnings.simplefilter("error")
        average_trajectory_effect(
            small,
            FACTS[:1],
            noise=0.0,
            samples=1,
            layers=[0],
            roles=["subject_last"],
            length=14,
            known="all",
            loop=LoopSettings(steps=4),
            out=tmp_path,
        )
        present = network(small)
    traces = [TrajectoryTrace.load(path) for path in tmp_path.rglob("*.safetensors")]
    assert len(traces) == 1
    assert traces[0].record["trajectory"] == network_in(traces[0].record) == present

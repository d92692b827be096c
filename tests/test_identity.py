"""The identity of a model: the weights' hash follows every edit, and the caller's hooks are in every record."""

import copy
import hashlib
import json
import pickle
import re
import shutil
import sys
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path

import cloudpickle
import pytest
import torch

from diffusion_lens.analysis import (
    CanvasLayout,
    EditSettings,
    average_indirect_effect,
    causal_trace,
    compute_key,
    edit_study,
    key_value_study,
    second_moment,
    temporal_effect,
)
from diffusion_lens.analysis.over_facts.folder import FactFolder
from diffusion_lens.analysis.rome import ValueSettings
from diffusion_lens.data import EditRequest, toy_facts
from diffusion_lens.evaluation import Recall, recall_by_steps
from diffusion_lens.interventions import (
    ablate_direction,
    add_direction,
    at_steps,
    by_step,
    freeze,
    mask_tokens,
    named,
    on_branch,
    steer,
    swap,
    while_masked,
    while_predicting,
    zero_ablate,
)
from diffusion_lens.model.hook_points import StepHookPoint
from diffusion_lens.records import identity
from diffusion_lens.records.identity import (
    UNNAMED,
    describe_hooks,
    describe_modules,
    fingerprint,
    name_of,
    weights_sha256,
)

FACTS = toy_facts.load().facts("both", "p2d")[3:23:10]
CELLS = dict(layers=[0], positions=[0])
SITE = "blocks.1.hook_attn_out"
STUDIES = {
    "recall": lambda model, folder: recall_by_steps(model, FACTS, (1, 2), length=14, cfg_scale=0.0, out=folder),
    "average": lambda model, folder: average_indirect_effect(
        model, FACTS, samples=1, layers=[0], first_tokens=1, length=14, out=folder
    ),
    "keys": lambda model, folder: key_value_study(
        model, FACTS, [0], search=ValueSettings(steps=1, lr=0.05), first_tokens=1, out=folder
    ),
    "edits": lambda model, folder: edit_study(
        model,
        [
            EditRequest(fact, replace(fact, answer=other.answer), (), ())
            for fact, other in zip(FACTS, FACTS[::-1], strict=True)
        ],
        EditSettings(0, ValueSettings(steps=1, lr=0.05, kl_factor=0.0), layout=CanvasLayout(14, first_tokens=1)),
        out=folder,
    ),
}

on_mdm = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
every_study = pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)


def half(activation, hook):
    """A hook that is felt."""
    return activation / 2


HALF = "half (unnamed)"
NAMED = named("half", half)


def swap_rows(weight):
    weight.copy_(weight.clone().roll(1, dims=0))


def swap_heads(weight):
    size = len(weight) // 2
    weight.copy_(torch.cat([weight[size:].clone(), weight[:size].clone()]))


def flip_odd_columns(weight):
    weight[:, 1::2].neg_()


def flip_two_signs(weight):
    weight[0, :2].neg_()


def rotate(weight):
    """Rank one, and every row keeps its norm: a reflection."""
    u = torch.nn.functional.normalize(torch.ones(weight.shape[1]), dim=0).to(weight)
    weight.sub_(2 * torch.outer(weight @ u, u))


def last_bit(weight):
    weight.view(torch.int16 if weight.element_size() == 2 else torch.int32)[-1, -1] ^= 1


EDITS = [torch.Tensor.neg_, swap_rows, swap_heads, flip_odd_columns, flip_two_signs, rotate, last_bit]


@pytest.mark.parametrize(("either", "behind"), [("mdm", "data"), ("ar", "numpy")], indirect=["either"])
def test_no_edit_leaves_the_hash(either, behind):
    model, other = copy.deepcopy(either.model), copy.deepcopy(either.model)
    weight, original = model.embed.weight, either.model.embed.weight.data
    hashes = [weights_sha256(model)]
    for edit in EDITS:
        weight.data.copy_(original)
        edit(weight.data if behind == "data" else torch.from_numpy(weight.detach().numpy()))
        hashes.append(weights_sha256(model))
        other.embed.weight.data.copy_(weight.data)
        assert weights_sha256(other) == hashes[-1], edit
    assert len(set(hashes)) == len(EDITS) + 1


def test_the_hash_is_what_its_docstring_says(several):
    lines = []
    for name, weight in several.model.named_parameters():
        digest = hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()
        lines.append(f"{name} {weight.dtype} {list(weight.shape)} {digest}\n")
    assert weights_sha256(several.model) == hashlib.sha256("".join(lines).encode()).hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(64, 512), (37, 451), (3, 5)])
def test_a_fingerprint_tells_bytes_apart(dtype, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    made = [weight]
    for edit in EDITS[:-1]:
        edit(changed := weight.clone())
        made.append(changed)
    made += [weight.flatten(), weight.T]
    seen = [fingerprint(each) for each in made]
    assert len(set(seen)) == len({(each.shape, each.contiguous().view(torch.uint8).numpy().tobytes()) for each in made})
    assert fingerprint(weight.clone()) == seen[0]
    assert fingerprint(weight.T.contiguous().T) == seen[0]


def test_sha256_is_computed_for_what_changed_only(either, monkeypatch):
    model, hashed = copy.deepcopy(either.model), []
    sha256 = identity._sha256
    weights_sha256(model)
    monkeypatch.setattr(identity, "_sha256", lambda weight: hashed.append(weight.shape) or sha256(weight))
    unchanged = weights_sha256(model)
    assert not hashed
    model.ln_final.weight.data.neg_()
    assert weights_sha256(model) != unchanged
    assert hashed == [model.ln_final.weight.shape]


def test_on_an_accelerator_only_what_changed_travels(either, monkeypatch):
    original = either.model
    model, travelled = copy.deepcopy(original), []
    monkeypatch.setattr(torch.Tensor, "is_cpu", False, raising=False)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: travelled.append(self.shape) or self)
    assert weights_sha256(model) == weights_sha256(original)
    travelled.clear()
    assert weights_sha256(model) == weights_sha256(original)
    assert original.embed.weight.shape not in travelled
    model.embed.weight.data.neg_()
    edited = weights_sha256(model)
    assert travelled.count(original.embed.weight.shape) == 1
    monkeypatch.undo()
    assert edited == weights_sha256(model) != weights_sha256(original)


@on_mdm
@every_study
def test_a_call_hashes_once(tiny, monkeypatch, study):
    calls = []
    monkeypatch.setattr(identity, "weights_sha256", lambda model: calls.append(model) or weights_sha256(model))
    study(tiny, None)
    assert calls == [tiny]


def test_hooks_are_identified_by_point_direction_and_name(tiny):
    model = copy.deepcopy(tiny)
    model.add_hook("hook_embed", half, is_permanent=True)
    model.blocks[0].register_forward_pre_hook(lambda module, given: None)
    hooks = [(SITE, half), (SITE, named("half of attention", half)), (lambda name: name.endswith("mlp_out"), half)]
    with model.hooks(fwd_hooks=hooks[:2], bwd_hooks=[(SITE, half)]):
        found = describe_hooks(model, hooks[2:])
    assert found.pop("blocks.0")[0].startswith("before: ")
    assert found == {
        "hook_embed": [f"forward: {HALF}"],
        SITE: [f"forward: {HALF}", "forward: half of attention", f"backward: {HALF}"],
        **{f"blocks.{i}.hook_mlp_out": [f"forward: {HALF}"] for i in range(model.cfg.n_layers)},
    }
    assert describe_hooks(tiny) == {}


class Scale(torch.nn.Module):
    """A module of a user's own."""

    def __init__(self, factor):
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor), persistent=False)

    def forward(self, x):
        return x * self.factor


def rename_child(block):
    block.renamed = block.__dict__["_modules"].pop("ln2")


MODULE_CHANGES = {
    "name of a child": rename_child,
    "training of a dropout": lambda block: block.dropout.train(),
    "eps of a norm": lambda block: setattr(block.ln1, "eps", 0.5),
    "function of a module": lambda block: setattr(block.mlp, "forward", half),
    "attribute that the root has too": lambda block: setattr(block, "positions", (1, 2)),
    "module of another class": lambda block: setattr(block, "hook_attn_out", Scale(1.0)),
    "buffer": lambda block: setattr(block, "hook_mlp_out", Scale(2.0)),
}


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
@pytest.mark.parametrize("change", MODULE_CHANGES.values(), ids=MODULE_CHANGES)
def test_a_change_of_a_module_changes_the_description(change, either):
    def described(*changes):
        model = copy.deepcopy(either.model)
        block = model.blocks[0]
        block.hook_mlp_out, block.dropout = Scale(3.0), torch.nn.Dropout(0.1).eval()
        for apply in changes:
            apply(block)
        model.setup()
        return describe_modules(model)

    assert described() == described()
    assert described()["blocks.0.hook_mlp_out"] == f"{__name__}.Scale"
    assert described(change) != described()


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
@on_mdm
def test_runs_hooks_caching_and_training_leave_the_modules_as_they_are(tiny):
    model = copy.deepcopy(tiny)
    modules = describe_modules(model)
    model.denoise(FACTS[0].prompt, length=14, steps=2, fwd_hooks=[(SITE, freeze())])
    model.run_with_cache(FACTS[0].prompt)
    model.train()
    model.add_hook("hook_embed", half, is_permanent=True)
    assert describe_modules(model) == modules


@on_mdm
def test_a_folder_does_not_hand_the_numbers_of_other_modules_on(tiny, tmp_path):
    model = copy.deepcopy(tiny)
    STUDIES["recall"](model, tmp_path)
    model.blocks[0].ln1.eps = 0.1
    with pytest.raises(ValueError, match=r"modules.attributes: '#\w+' there, '#\w+' here"):
        STUDIES["recall"](model, tmp_path)


@on_mdm
def test_modules_in_folders_of_earlier_versions_are_not_compared(tiny, tmp_path):
    run = tmp_path / "run.json"
    STUDIES["recall"](tiny, tmp_path)
    record = json.loads(run.read_text())
    record["modules"] = {"of this library and torch": "#12345678"}
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    run.write_text(json.dumps(record))
    STUDIES["recall"](tiny, tmp_path)


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_plain_forward_passes_identify_nothing(either, monkeypatch):
    monkeypatch.setattr(identity, "_identify", lambda *_: pytest.fail("the model was identified"))
    tokens = torch.tensor([[5, 6, 7]])
    either.model(tokens)
    either.model.run_with_cache(tokens)
    either.model.run_with_hooks(tokens, fwd_hooks=[(SITE, half)])


def test_hook_points_outside_a_model_have_clocks_of_their_own():
    first, second = StepHookPoint(), StepHookPoint()
    assert first.clock is first.clock
    assert first.clock is not second.clock


def test_ready_made_hooks_are_told_apart_by_their_settings():
    vector = torch.arange(3.0)
    other = {"hook_embed": torch.ones(1, 2, 3)}
    makers = [
        lambda: steer(vector, 1.0),
        lambda: steer(vector, 8.0),
        lambda: steer(vector.flip(0), 8.0),
        lambda: steer(vector.half(), 8.0),
        lambda: add_direction(vector, 8.0),
        lambda: add_direction(vector, half),
        lambda: add_direction(vector, named("fades", half)),
        lambda: ablate_direction(vector),
        lambda: zero_ablate([0]),
        lambda: zero_ablate([3]),
        lambda: zero_ablate([3], heads=[1]),
        lambda: zero_ablate(torch.tensor([3])),
        lambda: swap(other),
        lambda: swap({"hook_embed": torch.zeros(1, 2, 3)}),
        lambda: swap({0: other}),
        lambda: at_steps(zero_ablate([0]), 1),
        lambda: while_predicting(zero_ablate([0]), "shifted"),
        lambda: by_step({0: zero_ablate([0])}, 4),
        lambda: by_step({1: zero_ablate([0])}, 4),
        lambda: by_step({1: zero_ablate([0])}, 3),
    ]
    names = [name_of(make()) for make in makers]
    assert len(set(names)) == len(names)
    assert [name_of(make()) for make in makers] == names
    assert name_of(steer(direction=vector, strength=8)) == name_of(steer(vector, 8))


def test_a_freeze_that_has_served_is_the_same_hook(tiny):
    frozen = freeze()
    tiny.denoise(FACTS[0].prompt, length=14, steps=2, fwd_hooks=[(SITE, frozen)])
    assert name_of(frozen) == name_of(freeze()) == "freeze()"


@on_mdm
def test_names_of_hooks(tiny):
    assert name_of(half) == name_of(partial(half, hook=None)) == HALF
    assert name_of(zero_ablate()) == "zero_ablate()"
    assert name_of(zero_ablate([2], heads=slice(1, 2))) == "zero_ablate(positions=[2], heads=slice(1, 2, None))"
    assert re.fullmatch(r"steer\(direction=#[0-9a-f]{8}, strength=2.0\)", name_of(steer(torch.ones(3), 2.0)))
    assert re.fullmatch(r"mask_tokens\(#[0-9a-f]{8}, positions=\[1\]\)", name_of(mask_tokens(tiny, [1])))
    assert name_of(at_steps(NAMED, [3, 1])) == "half at steps [1, 3]"
    assert name_of(on_branch(half, "conditional")) == f"{HALF} on the conditional branch"
    assert name_of(named("mine", while_masked(half))) == "mine"
    assert name_of(while_masked(NAMED)) == "half while masked"
    assert name_of(by_step({2: NAMED, 1: half}, 4)) == f"by_step(1: {HALF}, 2: half, n_steps=4)"
    assert name_of(wraps(NAMED)(lambda activation, hook: activation)).endswith(UNNAMED)
    with pytest.raises(ValueError, match="the name of a hook must be a non-empty string; got ''"):
        named("", half)
    with pytest.raises(TypeError, match=r"a hook is a function fn\(activation, hook\); got Tensor"):
        named("half", torch.ones(1))
    with pytest.warns(DeprecationWarning, match=r"named\(name, hook\)"):
        assert name_of(named(half, "old order")) == "old order"


@on_mdm
def test_a_name_survives_wrappers_and_pickling(tiny):
    for wrapped in (
        NAMED,
        at_steps(NAMED, 0),
        while_masked(NAMED),
        on_branch(NAMED, "conditional"),
        at_steps(steer(torch.ones(1), 2.0), [1]),
    ):
        again = pickle.loads(cloudpickle.dumps(wrapped))
        assert name_of(again) == name_of(wrapped)
        assert UNNAMED not in name_of(again)
        runs = [
            tiny.denoise(FACTS[0].prompt, length=14, steps=2, fwd_hooks=[(SITE, hook)]) for hook in (wrapped, again)
        ]
        assert torch.equal(runs[0].confidence, runs[1].confidence)
        assert runs[0].record["hooks"] == runs[1].record["hooks"] == {SITE: [f"forward: {name_of(wrapped)}"]}


@on_mdm
@every_study
@pytest.mark.parametrize("unnamed", [half, at_steps(half, 0), partial(half), by_step({0: half}, 1)])
def test_a_study_that_keeps_files_refuses_a_hook_without_a_name(tiny, tmp_path, study, unnamed):
    refused = rf"{SITE}' has no name: forward: .*half \(unnamed\).*interventions\.named\(\"what it does\", fn\)"
    with tiny.hooks(fwd_hooks=[(SITE, unnamed)]), pytest.raises(ValueError, match=refused):
        study(tiny, tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


@on_mdm
def test_a_record_names_the_callers_hooks_and_no_others(tiny):
    def hooks(**settings):
        return tiny.denoise(FACTS[0].prompt, length=14, steps=2, **settings).record["hooks"]

    query = FACTS[0].to_query(tiny)
    late = [(SITE, at_steps(half, 1))]
    assert hooks() == {}
    assert hooks(fwd_hooks=late) == {SITE: [f"forward: {HALF} at steps [1]"]}
    run, _ = tiny.denoise_with_cache(FACTS[0].prompt, SITE, length=14, steps=2, fwd_hooks=late)
    assert run.record["hooks"] == {SITE: [f"forward: {HALF} at steps [1]"]}
    assert run.replay(tiny).record["hooks"] == {}
    assert causal_trace(tiny, query, noise=0.5, samples=1, **CELLS).record["hooks"] == {}
    with tiny.hooks(fwd_hooks=[(SITE, half)]):
        attached = {SITE: [f"forward: {HALF}"]}
        assert hooks() == attached
        assert causal_trace(tiny, query, noise=0.5, samples=1, **CELLS).record["hooks"] == attached
        assert compute_key(tiny, query, 0).record["hooks"] == attached
        run = tiny.denoise(FACTS[0].prompt, length=14, steps=2)
        effect = temporal_effect(tiny, FACTS[0], [0], trajectory=run, noise=0.5, samples=1, **CELLS)
        assert effect.record["hooks"] == attached


@pytest.fixture(scope="module", params=STUDIES)
def stored(request, tmp_path_factory):
    """A study, and the folder in which a call without hooks stored it. `tiny-mdm` has to be the model."""
    from diffusion_lens import HookedDiffusionTransformer

    folder = tmp_path_factory.mktemp(request.param)
    STUDIES[request.param](HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu"), folder)
    return STUDIES[request.param], folder


@pytest.fixture
def study_and_folder(stored, tmp_path):
    """The study, and a copy of its folder that a test may damage."""
    return stored[0], Path(shutil.copytree(stored[1], tmp_path / "stored"))


@on_mdm
@every_study
def test_a_folder_does_not_hand_hooked_numbers_to_an_unhooked_call(tiny, tmp_path, study):
    with tiny.hooks(fwd_hooks=[(SITE, NAMED)]):
        study(tiny, tmp_path)
    refused = rf"weights or hooks.*hooks: {SITE} \[forward: half\] there, none here"
    with pytest.raises(ValueError, match=refused):
        study(tiny, tmp_path)
    with tiny.hooks(fwd_hooks=[(SITE, NAMED)]):
        study(tiny, tmp_path)


@on_mdm
def test_a_folder_does_not_hand_unhooked_numbers_to_a_hooked_call(tiny, study_and_folder):
    study, folder = study_and_folder
    refused = rf"weights or hooks.*hooks: {SITE} none there, \[forward: half\] here"
    with tiny.hooks(fwd_hooks=[(SITE, NAMED)]), pytest.raises(ValueError, match=refused):
        study(tiny, folder)
    study(tiny, folder)


@on_mdm
def test_second_moments_under_hooks_are_kept_apart(tiny, tmp_path):
    corpus = [fact.prompt for fact in FACTS]
    plain = second_moment(tiny, corpus, 2, folder=tmp_path)
    with tiny.hooks(fwd_hooks=[(SITE, NAMED)]):
        hooked = second_moment(tiny, corpus, 2, folder=tmp_path)
        with tiny.hooks(fwd_hooks=[(SITE, named("again", half))]):
            second_moment(tiny, corpus, 2, folder=tmp_path)
    assert not torch.equal(plain.total, hooked.total)
    assert torch.equal(second_moment(tiny, corpus, 2, folder=tmp_path).total, plain.total)
    assert len(list(tmp_path.iterdir())) == 3


@on_mdm
def test_a_folder_does_not_hand_an_edited_model_the_old_numbers(tiny, study_and_folder):
    study, folder = study_and_folder
    model = copy.deepcopy(tiny)
    model.blocks[0].mlp.down.weight.data.neg_()
    with pytest.raises(ValueError, match=r"weights_sha256: '[0-9a-f]{64}' there, '[0-9a-f]{64}' here"):
        study(model, folder)


@on_mdm
def test_results_of_another_run_are_refused_when_its_note_is_gone(tiny, study_and_folder):
    study, folder = study_and_folder
    edited = copy.deepcopy(tiny)
    edited.blocks[0].mlp.down.weight.data.neg_()
    refused = r"\.safetensors belongs to another study or another fact.*Delete the file"
    for model, hooks in ((edited, []), (tiny, [(SITE, NAMED)])):
        (folder / "run.json").unlink()
        with model.hooks(fwd_hooks=hooks), pytest.raises(ValueError, match=refused):
            study(model, folder)


@on_mdm
def test_replies_of_other_steps_or_another_fact_are_refused(tiny, tmp_path):
    recall = partial(recall_by_steps, tiny, FACTS, length=14, cfg_scale=0.0, out=tmp_path)
    recall((1, 2))
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match="belongs to another study"):
        recall((1, 2, 4))
    (tmp_path / "run.json").unlink()
    recall((1, 2))
    one, other = sorted(tmp_path.glob("*.safetensors"))
    other.write_bytes(one.read_bytes())
    for asked in (lambda: recall((1, 2)), lambda: Recall.merge(tmp_path)):
        with pytest.raises(ValueError, match="another fact"):
            asked()


@on_mdm
def test_a_file_cut_off_is_named(tiny, study_and_folder):
    study, folder = study_and_folder
    cut = sorted(folder.glob("*.safetensors"))[0]
    cut.write_bytes(cut.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"not a complete safetensors file.*delete it") as refused:
        study(tiny, folder)
    assert str(cut) in str(refused.value)


@on_mdm
def test_a_bad_file_is_found_before_the_work(tiny, tmp_path, monkeypatch):
    ask = partial(recall_by_steps, tiny, FACTS, (1,), length=14, cfg_scale=0.0, batch_size=1, out=tmp_path)
    last = FactFolder.start(tmp_path, ask().record).file(sorted(fact.id for fact in FACTS)[-1])
    for file in set(tmp_path.glob("*.safetensors")) - {last}:
        file.unlink()
    last.write_bytes(b"")
    room = sys.modules[recall_by_steps.__module__]
    monkeypatch.setattr(room, "denoise", lambda *_: pytest.fail("the model wrote"))
    with pytest.raises(ValueError, match=r"not a complete safetensors file"):
        ask()


@on_mdm
def test_a_moment_that_is_cut_off_or_of_another_run_is_named(tiny, tmp_path):
    corpus = [fact.prompt for fact in FACTS]
    second_moment(tiny, corpus, 0, folder=tmp_path)
    (one,) = tmp_path.iterdir()
    second_moment(tiny, corpus, 1, folder=tmp_path)
    (other,) = set(tmp_path.iterdir()) - {one}
    other.write_bytes(one.read_bytes())
    with pytest.raises(ValueError, match="contains another moment than its name says"):
        second_moment(tiny, corpus, 1, folder=tmp_path)
    other.write_bytes(one.read_bytes()[:-5])
    with pytest.raises(ValueError, match="delete it"):
        second_moment(tiny, corpus, 1, folder=tmp_path)


@on_mdm
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"run\.json does not describe a study or a training run: it contains \[\] and not a mapping\. Delete"),
        ("{", r"run\.json is not valid JSON"),
        ("3", "and not a mapping"),
        ('{"facts": []}', "lists none"),
        ("{}", "lists none"),
        ("[" * 100_000, "run.json"),
    ],
)
def test_a_note_that_is_no_run_is_refused(tiny, tmp_path, text, message):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        STUDIES["recall"](tiny, tmp_path)
    with pytest.raises(ValueError, match=message):
        Recall.merge(tmp_path)

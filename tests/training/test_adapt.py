"""From a causal model to its masked twin: what is trained, saved, resumed, measured and refused."""

import json
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.cli import app
from diffusion_lens.loading.delta import Delta
from diffusion_lens.loading.tokenizers import mask_token_of
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.results import provenance, require_same_run
from diffusion_lens.settings.shared import AdaptSettings
from diffusion_lens.training import Adaptation, adapt
from diffusion_lens.training.adapt import _twin, rows_measured
from diffusion_lens.training.corpus import prompts_of, write_corpus
from diffusion_lens.training.distillation import TwinLoss, begin_mask_row
from diffusion_lens.training.trainer import RunFolder

SMALL = dict(n_texts=30, length=10, longest_prompt=7, top_k=6, steps=3, batch_size=8, warmup=1, rank=2, crop=2)
QUIET = dict(evaluate_every=2, checkpoint_every=1, progress=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The bundled causal model, as a Llama in a folder."""
    model = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # its rotary tables are not rounded as they were
        folder = model.export_hf(tmp_path_factory.mktemp("of_adapt") / "base")
    return HookedDiffusionTransformer.from_pretrained(folder, device="cpu")


@pytest.fixture(scope="module")
def facts(toy):
    """Facts from the name to the description, one of each person."""
    of_people = {fact.person: fact for fact in toy.facts(held_out=False) if fact.subject == fact.person}
    return list(of_people.values())[:16]


@pytest.fixture
def llama(new_model, tmp_path):
    """A causal Llama of one layer with random weights, as a folder gives it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        folder = new_model("ar").export_hf(tmp_path / "small")
    return HookedDiffusionTransformer.from_pretrained(folder, device="cpu")


def recording(function, record):
    def call(*args):
        record(*args)
        return function(*args)

    return call


def copies(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def same(left, right):
    left, right = copies(left), copies(right)
    return left.keys() == right.keys() and all(torch.equal(weight, right[name]) for name, weight in left.items())


def test_a_twin_learns_and_its_numbers_are_those_of_public_calls(base, facts, tmp_path):
    before = copies(base)
    held_out = facts[:2]
    settings = {**SMALL, "n_texts": 60, "length": 14, "steps": 12, "batch_size": 24, "lr": 1e-2, "rank": 8}
    result = adapt(base, facts=facts[2:8], held_out=held_out, out=tmp_path / "out", **settings, progress=False)
    assert result.losses[-3:].mean() < 0.7 * result.losses[:3].mean()
    assert all(torch.equal(weight, before[name]) for name, weight in base.named_parameters())
    twin = HookedDiffusionTransformer.from_pretrained(tmp_path / "out", device="cpu")
    assert same(twin, result.model)
    assert (twin.cfg.attention_dir, twin.cfg.readout, twin.cfg.trained_length) == ("bidirectional", "shifted", 14)
    for prefix, these in (("", facts[2:8]), ("held_out_", held_out)):
        counts = dict.fromkeys(("known", "one_mask", "many_masks", *(["by_loop"] if prefix else ())), 0)
        for fact in these:
            (prompt, (answer, *_)), length = fact.tokenize(base), 14
            counts["known"] += int(base.generate(torch.tensor([prompt]), 1).tokens[0, -1] == answer)
            for name, n_masks in (("one_mask", 1), ("many_masks", length - len(prompt))):
                tokens, rows = twin.canvas(fact.prompt, n_masks)
                counts[name] += int(twin(tokens)[0, rows[0]].argmax() == answer)
            if prefix:
                written = twin.denoise(fact.prompt, length=14, steps=8).tokens[0, len(prompt)]
                counts["by_loop"] += int(written == answer)
        assert counts["known"] == len(these)
        assert {name: round(result.numbers[prefix + name] * len(these)) for name in counts} == counts
    assert 0 < result.numbers["causal_nll"] < result.numbers["bound"]
    assert Delta.load(tmp_path / "out").about["numbers"] == result.numbers
    card = (tmp_path / "out" / "README.md").read_text()
    assert result.summary() in card
    assert "2 held-out facts: the causal model knows 1.000 (2); of these" in card
    assert result.record["unknown"] == []


def test_facts_that_the_causal_model_does_not_know_are_listed(base, facts):
    wrong = [replace(fact, answer=" the") for fact in facts[:2]]
    given = {**SMALL, "steps": 1, "n_texts": 8, "progress": False}
    result = adapt(base, facts=[*facts[2:4], wrong[0]], held_out=[wrong[1], facts[4]], **given)
    assert result.record["unknown"] == [fact.prompt + " the" for fact in reversed(wrong)]
    assert "2 held-out facts: the causal model knows 0.500 (1); of these" in result.summary()


def test_what_is_measured_is_what_a_dry_run_counts(base, facts):
    """Without distillation, all passes without a gradient are measurements."""
    texts = [fact.prompt + fact.answer for fact in facts]
    n_texts = sum(1 + len(row) for row in base.tokenizer(texts)["input_ids"]) // SMALL["length"]
    given = {**SMALL, "n_texts": n_texts, "steps": 3, "distil": 0.0}
    n_rows = 0

    def count(network, inputs):
        nonlocal n_rows
        if not torch.is_grad_enabled():
            n_rows += len(inputs[0])

    with torch.nn.modules.module.register_module_forward_pre_hook(
        lambda network, inputs: count(network, inputs) if isinstance(network, DiffusionTransformer) else None
    ):
        adapt(base, texts=texts, facts=facts[6:], held_out=facts[:6], **given, **{**QUIET, "evaluate_every": 2})
    at_most = rows_measured(AdaptSettings(**given, evaluate_every=2), len(facts) - 6, 6)
    assert 0.5 * at_most < n_rows <= at_most


def test_progress_is_shown_of_what_there_is(llama, facts, capsys):
    adapt(llama, prompts=["the"], **{**SMALL, **QUIET, "progress": True})
    alone = capsys.readouterr().err
    adapt(llama, facts=facts[4:], held_out=facts[:4], **{**SMALL, **QUIET, "progress": True})
    assert {bar for bar in ("texts", "facts", "likelihood") if f"{bar}: 100%" in alone} == {"texts", "likelihood"}
    assert "facts:   0%" in capsys.readouterr().err
    assert ": 0it" not in alone


def test_the_warm_up_is_a_part_of_a_short_training():
    assert [AdaptSettings(steps=steps).warmup for steps in (4, 60, 240, 1000)] == [0, 7, 30, 30]
    assert AdaptSettings(steps=60, warmup=40).warmup == 40


@pytest.mark.parametrize(
    "more",
    [
        dict(readout="in_place"),
        dict(block_size=5),
        dict(rank=0, lr=1e-3),
        dict(anneal=2, distil_share=1.0),
        dict(distil=0.0, alpha=8.0),
        dict(mask_token="[MASK]"),
        dict(causal_first=False),
    ],
    ids=lambda more: "-".join(more),
)
def test_each_kind_of_twin_is_trained_and_loads_as_it_was_returned(more, llama, facts, tmp_path):
    result = adapt(llama, facts=facts, out=tmp_path / "out", **{**SMALL, **more}, **QUIET)
    twin = HookedDiffusionTransformer.from_pretrained(tmp_path / "out", device="cpu")
    assert same(twin, result.model)
    assert twin.cfg.architecture == result.model.cfg.architecture
    require_same_run(*(provenance(model, model.cfg) for model in (twin, result.model)), "a study")
    assert (twin.cfg.readout, twin.cfg.causal_block) == (more.get("readout", "shifted"), more.get("block_size"))
    assert (result.delta is None) == (more.get("rank") == 0)
    assert twin.cfg.causal_first == ("block_size" not in more and more.get("causal_first", True))
    assert not torch.equal(twin.blocks[0].attn.q.weight, llama.blocks[0].attn.q.weight)
    loaded = Adaptation.load(tmp_path / "out" / "training" / "adaptation.safetensors")
    assert (loaded.numbers, loaded.samples, loaded.settings) == (result.numbers, result.samples, result.settings)
    again = adapt(llama, facts=facts, out=tmp_path / "out", **{**SMALL, **more}, **QUIET)
    assert same(again.model, twin)
    assert torch.equal(again.losses, result.losses)


def test_the_first_token_of_an_untrained_twin_is_that_of_its_causal_model(llama, facts):
    twin = _twin(llama, AdaptSettings(**SMALL), mask_token_of(llama.tokenizer, llama.cfg.d_vocab))
    tokens = torch.tensor([llama.encode(facts[0].prompt)])
    with torch.no_grad():
        causal, own = (model.run_with_cache(tokens, return_type=None)[1]["resid_post", 0] for model in (llama, twin))
        torch.testing.assert_close(own[:, 0], causal[:, 0], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(own[:, 1], causal[:, 1], atol=1e-4)


def test_a_new_row_beside_half_precision_weights_loads_as_it_was_measured(llama, facts, tmp_path):
    half = HookedDiffusionTransformer.from_pretrained(llama.source.name_or_path, device="cpu", dtype="bfloat16")
    stored = HookedDiffusionTransformer.from_pretrained(half.export_hf(tmp_path / "half"), device="cpu")
    result = adapt(stored, facts=facts, out=tmp_path / "out", mask_token="[MASK]", **SMALL, **QUIET)
    assert result.model.cfg.d_vocab == stored.cfg.d_vocab + 1
    assert same(HookedDiffusionTransformer.from_pretrained(tmp_path / "out", device="cpu"), result.model)


def test_an_interrupted_adaptation_goes_on_to_the_same_bits(llama, facts, tmp_path, monkeypatch):
    from diffusion_lens.training import corpus, trainer

    settings = dict(facts=facts, held_out=facts[:1], prompts=["the"], **SMALL, **QUIET)
    whole = adapt(llama, **settings)
    out, n_calls = tmp_path / "out", []

    def interrupted(original, *, at):
        def call(*args, **kwargs):
            n_calls.append(original)
            if len(n_calls) == at:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        return call

    for module, name, at in ((corpus, "_written", 2), (trainer._Run, "update", 3)):
        n_calls.clear()
        with monkeypatch.context() as patched:
            patched.setattr(module, name, interrupted(getattr(module, name), at=at))
            with pytest.raises(KeyboardInterrupt):
                adapt(llama, out=out, **settings)
    assert list((out / "training" / "corpus").glob("*.safetensors"))
    resumed = adapt(llama, out=out, **settings)
    assert [start["step"] for start in resumed.record["starts"]] == [0, 2]
    assert torch.equal(resumed.losses, whole.losses)
    assert same(resumed.model, whole.model)
    assert (resumed.numbers, resumed.samples) == (whole.numbers, whole.samples)
    assert {file.name for file in (out / "training").iterdir()} == {"adapt.json", "adaptation.safetensors", "run.json"}


def test_another_adaptation_in_the_folder_is_refused(llama, facts, tmp_path):
    out = tmp_path / "out"
    adapt(llama, facts=facts, out=out, **SMALL, **QUIET)
    with pytest.raises(ValueError, match=r"settings\.seed: 0 there, 1 here"):
        adapt(llama, facts=facts, out=out, **SMALL, seed=1, **QUIET)
    with pytest.raises(ValueError, match="given_sha256"):
        adapt(llama, facts=facts[1:], out=out, **SMALL, **QUIET)
    with pytest.raises(ValueError, match=r"contains model\.safetensors"):
        adapt(llama, facts=facts, out=tmp_path / "small", **SMALL, **QUIET)
    RunFolder(tmp_path / "other" / "training").start({}, write=True)
    with pytest.raises(ValueError, match="contains a training that is no adaptation"):
        adapt(llama, facts=facts, out=tmp_path / "other", **SMALL, **QUIET)
    assert [file.name for file in (tmp_path / "other").rglob("*.*")] == ["run.json"]


def test_an_adaptation_of_an_earlier_version_is_no_other_one(llama, facts, tmp_path):
    """Its record has no `causal_first`, and the first token of its twin sees the whole canvas."""
    settings, file = {"facts": facts, **SMALL, **QUIET}, tmp_path / "out" / "training" / "adapt.json"
    adapt(llama, out=tmp_path / "out", causal_first=False, **settings)
    record = json.loads(file.read_text())
    del record["settings"]["causal_first"]
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"settings\.causal_first: None there, True here"):
        adapt(llama, out=tmp_path / "out", **settings)


def test_how_often_an_adaptation_is_saved_may_change_and_it_is_tidied_after_its_end(
    llama, facts, tmp_path, monkeypatch
):
    settings, out = {"facts": facts, "out": tmp_path / "out", **SMALL, "progress": False}, tmp_path / "out" / "training"
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            adapt(llama, checkpoint_every=1, **settings)
    assert (out / "corpus").exists()
    again = adapt(llama, checkpoint_every=2, **settings)
    assert {file.name for file in out.iterdir()} == {"adapt.json", "adaptation.safetensors", "run.json"}
    assert len(again.losses) == SMALL["steps"]


def test_prompts_that_were_refused_leave_the_folder_free(llama, facts, tmp_path):
    given = {"out": tmp_path / "out", "mask_token": "<spare>", **SMALL, **QUIET}
    llama.tokenizer.add_special_tokens({"additional_special_tokens": ["<spare>"]})
    llama.source = replace(llama.source, name_or_path=llama.export_hf(tmp_path / "with_spare"))
    for more in (
        {"prompts": ["the <spare>"]},
        {"facts": [replace(facts[0], prompt=f"<spare> {facts[0].prompt}", subject_start=None)]},
        {"held_out": [replace(facts[0], answer=" <spare>")]},
    ):
        with pytest.raises(ValueError, match=r"<spare>.* contains the token that becomes \[MASK\]"):
            adapt(llama, **more, **given)
    adapt(llama, facts=facts, **given)


def test_an_adaptation_is_the_work_of_one_process(llama, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="adapt works in one process, and this is one of 2"):
        adapt(llama, **SMALL, **QUIET)


def test_adaptations_share_their_texts(llama, facts, tmp_path):
    first = adapt(llama, facts=facts, corpus=tmp_path / "texts", **SMALL, **QUIET)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "texts").glob("*.safetensors")}
    second = adapt(llama, facts=facts, corpus=tmp_path / "texts", out=tmp_path / "out", **SMALL, **QUIET)
    assert same(first.model, second.model)
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "texts").glob("*.safetensors")}
    with pytest.raises(ValueError, match=r"settings\.n_texts"):
        adapt(llama, facts=facts, corpus=tmp_path / "texts", **{**SMALL, "n_texts": 31}, **QUIET)


def test_texts_of_ones_own_are_a_file_or_a_list(llama, facts, tmp_path):
    texts = [fact.prompt + fact.answer for fact in facts]
    end = llama.tokenizer.eos_token
    (tmp_path / "texts.txt").write_text(f"{end} ".join(texts))
    from_list, from_file = (adapt(llama, texts=each, **SMALL, **QUIET) for each in (texts, tmp_path / "texts.txt"))
    assert same(from_list.model, from_file.model)
    with pytest.warns(UserWarning, match=r"have \d\d rows of 10 tokens, of which the first 4 are taken: pass n_texts="):
        adapt(llama, texts=texts, **{**SMALL, "n_texts": 4, "steps": 1}, **QUIET)
    with pytest.raises(ValueError, match="prompts= are continued by the model, and texts= are read instead"):
        adapt(llama, texts=texts, prompts=["the"], **SMALL, **QUIET)
    with pytest.raises(ValueError, match="texts= has no text"):
        adapt(llama, texts=[], **SMALL, **QUIET)
    with pytest.raises(FileNotFoundError, match=r"no text file at .*nowhere\.txt"):
        adapt(llama, texts=tmp_path / "nowhere.txt", **SMALL, **QUIET)
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        adapt(llama, texts=str(tmp_path / "latin.txt"), **SMALL, **QUIET)


def test_no_text_of_the_bound_is_trained_on(base, facts, monkeypatch):
    trained, measured = [], []
    monkeypatch.setattr(
        TwinLoss, "__init__", recording(TwinLoss.__init__, lambda rows, causal, corpus, _: trained.append(corpus))
    )
    nats = sys.modules["diffusion_lens.training.adapt"]._nats
    recorded = recording(nats, lambda _, texts, progress: measured.append(texts))
    monkeypatch.setattr(sys.modules["diffusion_lens.training.adapt"], "_nats", recorded)
    for n_texts, top_p in ((8, 0.0), (200, 0.1)):  # few texts, and many alike
        few = {**SMALL, "n_texts": n_texts, "top_p": top_p, "steps": 1}
        adapt(base, facts=facts, **few, **QUIET)
        kept = set(map(tuple, measured[-1].tolist()))
        assert kept
        assert not kept & set(map(tuple, trained[-1].tokens.tolist()))
    for alone in ({"n_texts": 1}, {"n_texts": 9, "top_p": 0.0, "prompts": ["the"]}):
        with pytest.raises(ValueError, match="are alike, or too few"):
            adapt(base, **{**SMALL, **alone}, **QUIET)


def test_the_training_ends_when_recall_no_longer_rises(base, facts):
    still = {**SMALL, "steps": 30, "patience": 2, "lr": 1e-12, "n_texts": 20}
    result = adapt(base, facts=facts[4:], held_out=facts[:4], **still, **{**QUIET, "evaluate_every": 1})
    assert len(result.evaluations) == len(result.losses) == 3
    assert "ended after 3 of 30 updates by the recall of these held-out facts" in result.summary()
    measured = result.evaluations[-1]
    assert (measured["one_mask"], measured["many_masks"]) == tuple(
        result.numbers[f"held_out_{name}"] for name in ("one_mask", "many_masks")
    )
    with pytest.raises(ValueError, match="patience= needs held_out= facts"):
        adapt(base, facts=facts, **still, **QUIET)


@pytest.mark.parametrize("more", [{"states": 0.5}, {"states": 0.0}, {"states": 0.5, "readout": "in_place"}], ids=str)
def test_the_distillation_is_the_distance_from_the_causal_model(more, base, facts):
    """A slow version, text by text: whole distributions, and every residual stream that the cache has."""
    settings = AdaptSettings(**{**SMALL, "crop": 0, "distil_share": 1.0, "one_mask": 0.25, **more})
    corpus = write_corpus(base, settings, prompts_of(facts), progress=False)
    corpus.starts[5] = 1  # as of a text without a prompt, which is cut anywhere
    rows = TwinLoss(base, corpus, settings)
    twin = adapt(base, facts=facts, **{**SMALL, "steps": 1, "lr": 1e-12, **more}, **QUIET).model
    mask, shifted = twin.cfg.mask_token_id, settings.readout == "shifted"
    rows.rows = torch.arange(8)
    with torch.no_grad():
        loss = rows(twin, corpus.tokens[:8], torch.Generator().manual_seed(5))
    total = 0.0
    _, cuts, ends = rows.canvases(rows.rows, 2, torch.Generator().manual_seed(5))
    assert torch.equal(cuts == corpus.starts[:8], torch.arange(8) != 5)
    assert (ends - cuts)[:2].tolist() == [1, 1]
    assert len(set((ends - cuts)[2:].tolist())) > 1
    assert bool((ends <= 10).all())
    for row, cut, end in zip(corpus.tokens[:8], cuts.tolist(), ends.tolist(), strict=True):
        canvas = torch.cat([row[:cut], torch.full((end - cut,), mask)])
        with torch.no_grad():
            logits, causal = base.run_with_cache(row[None, :cut])
            own_logits, own = twin.run_with_cache(canvas[None])
        p = logits[0, -1].index_fill(0, torch.tensor(mask), -torch.inf) if mask < logits.shape[-1] else logits[0, -1]
        p, q = p.log_softmax(dim=-1), own_logits[0, cut - shifted].log_softmax(dim=-1)
        some = p > -torch.inf
        total += float((p.exp() * (p - q[: len(p)]))[some].sum())
        if shifted:
            for i in range(base.cfg.n_layers - 1):
                of_twin, goal = (cache["resid_post", i][0, cut - 1] for cache in (own, causal))
                apart = float((of_twin - goal).norm() ** 2 / (of_twin @ of_twin + goal @ goal)) * 2
                total += settings.states * apart / (base.cfg.n_layers - 1)
    assert float(loss) == pytest.approx(settings.distil * total / 8, rel=1e-4)


def test_mask_begins_as_the_row_that_disturbs_the_causal_model_least(llama, facts):
    """The divergence of every beginning that is tried, and of the one that is chosen, computed anew."""
    settings = AdaptSettings(**SMALL, causal_first=False)
    rows = TwinLoss(llama, write_corpus(llama, settings, prompts_of(facts), progress=False), settings)
    mask, n_known = mask_token_of(llama.tokenizer, llama.cfg.d_vocab), llama.cfg.d_vocab
    twin = _twin(llama, settings, mask)
    canvases = rows.canvases(torch.arange(16), 8, torch.Generator().manual_seed(settings.seed))
    before = twin.W_E.detach().clone()
    chosen = begin_mask_row(twin, rows, n_known)
    row = twin.W_E[mask].detach().clone()
    mean = before[:n_known].mean(dim=0)
    special = [id_ for id_ in llama.tokenizer.all_special_ids if id_ != mask]
    tried = [before[mask], mean, *(before[id_] - k * mean for id_ in special for k in (0, 3))]
    assert any(torch.allclose(row, each, atol=1e-6) for each in tried)
    with torch.no_grad():
        at_best = float(rows.distances(twin, *canvases, rows.goal(*canvases[:2]))[0])
        for each in tried:
            twin.embed.weight[mask] = each
            assert at_best <= float(rows.distances(twin, *canvases, rows.goal(*canvases[:2]))[0]) + 1e-4
    others = torch.arange(len(before)) != mask
    assert torch.equal(twin.W_E[others], before[others])
    assert chosen


@pytest.mark.parametrize("more", [{}, {"readout": "in_place"}, {"block_size": 3}], ids=str)
def test_the_masked_loss_is_the_bound_after_the_first_token(more, base, facts):
    """A slow version: one text and one position at a time."""
    settings = AdaptSettings(**{**SMALL, "distil": 0.0, "crop": 0, **more})
    corpus = write_corpus(base, settings, prompts_of(facts), progress=False)
    twin = _twin(base, settings, mask_token_of(base.tokenizer, base.cfg.d_vocab))
    tokens = corpus.tokens[:6]
    total = 0.0
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        torch.randint(1, (), generator=generator)  # by how much the rows are cropped
        noisy, p = twin.hide(tokens, torch.ones_like(tokens), generator=generator)
        for row, clean, chance in zip(noisy, tokens, p, strict=True):
            row[0] = clean[0]
            clean_blocks = {} if settings.block_size is None else {"clean": clean[None]}
            logits = twin(row[None], logits_at=list(range(10)), **clean_blocks)[0].log_softmax(dim=-1)
            for position in (row == twin.cfg.mask_token_id).nonzero()[:, 0].tolist():
                at = position - (settings.readout == "shifted")
                total -= float(logits[at, clean[position]] / chance[position])
        rows = TwinLoss(base, corpus, settings)
        loss = rows(twin, tokens, torch.Generator().manual_seed(2))
    assert float(loss) == pytest.approx(total / (6 * 9), rel=1e-5)


def test_attention_begins_causal_and_opens_to_the_right(base, facts):
    settings = AdaptSettings(**SMALL, anneal=10)
    rows = TwinLoss(base, write_corpus(base, settings, prompts_of(facts), progress=False), settings)
    twin, tokens = (
        _twin(base, settings, mask_token_of(base.tokenizer, base.cfg.d_vocab)),
        rows.corpus.tokens[:3].clone(),
    )
    far = tokens.clone()
    far[:, 6] = twin.cfg.mask_token_id
    at = list(range(10))
    with torch.no_grad():
        with rows._attention(twin):
            assert torch.allclose(twin(tokens, logits_at=at), base(tokens), atol=1e-4)
        rows.step = 3  # three of ten updates: three of the ten positions to the right
        with rows._attention(twin):
            begin = twin(tokens, stop_at_layer=1)
            changed = (twin(far, stop_at_layer=1) != begin).any(dim=-1)
        assert changed[:, 3:].all()
        assert not changed[:, :3].any()
        rows.step = 10
        with rows._attention(twin):
            assert not torch.allclose(twin(tokens, stop_at_layer=1), begin)
    assert not twin.list_hooks()


def test_mask_is_a_spare_token_or_a_free_row_or_a_new_one(base):
    model = HookedDiffusionTransformer.from_pretrained(base.source.name_or_path, device="cpu")
    n = len(model.tokenizer)

    def chosen(given=None):
        return mask_token_of(model.tokenizer, model.cfg.d_vocab, given)

    assert chosen() == n == model.cfg.d_vocab  # a new row
    model.cfg.d_vocab = n + 9
    assert chosen() == n  # a free one
    model.tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|fim_a|>", "<|reserved_0|>"]})
    model.tokenizer.add_tokens(["<repo>", "<fim_b>", "3"])  # those of Qwen's are not special
    model.tokenizer.chat_template = "<|reserved_0|>{{ messages }}"
    for given in (None, "<|fim_a|>", n + 1):
        assert chosen(given) == n + 1
    model.tokenizer.chat_template = None
    assert chosen() == n + 2
    assert (chosen("3"), chosen("[MASK]"), chosen(n + 8)) == (
        n + 5,
        n + 6,
        n + 8,
    )
    model.tokenizer.pad_token = "<|reserved_0|>"
    for given, message in (
        ("<|c|>", r"is no token of the tokenizer: .* such as \['<\|fim_a\|>', '<fim_b>', '<repo>'\]"),
        (str(n + 1), "is no token of the tokenizer"),
        ("<eos>", "is a token that texts contain"),
        ("<|reserved_0|>", "is a token that texts contain"),
        (model.tokenizer.convert_ids_to_tokens(3), "is a token that texts contain"),
        (3, "is a token that texts contain"),
        (n + 10, f"is beyond the {n + 9} rows"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen(given)


def test_a_number_on_the_command_line_is_an_id(tmp_path):
    asked = ["adapt", "tiny-ar", "--rank", "0", "--mask-token", "3", "--out", str(tmp_path / "out")]
    refused = CliRunner(env={"COLUMNS": "400"}).invoke(app, asked)
    assert "--mask-token 3 is a token that texts contain" in refused.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (dict(longest_prompt=10), "leaves nothing to write of length=10"),
        (dict(crop=9), "leaves less than two"),
        (dict(anneal=2, block_size=2), "give one"),
        (dict(length=999), "do not fit into the context"),
        (dict(readout="beside"), "it must be one of shifted, in_place"),
        (dict(rank=-1), "it must be at least 0"),
        (dict(top_p=1.5), "it must be a share"),
        (dict(mask_token="<|no|>"), "is no token of the tokenizer"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_do_not_fit_are_refused(more, message, llama, facts, tmp_path):
    with pytest.raises(ValueError, match=message):
        adapt(llama, facts=facts, out=tmp_path / "out", **{**SMALL, **more}, **QUIET)
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_models_that_cannot_be_adapted_are_refused(llama, new_model, facts, tmp_path):
    with pytest.raises(ValueError, match="is no causal model"):
        adapt(new_model("mdm"), **SMALL, **QUIET)
    with pytest.raises(ValueError, match=r"of the family 'lit_gpt'.* llama, qwen2, qwen3: adapt it with rank=0"):
        adapt(new_model("ar"), **SMALL, **QUIET)
    half = HookedDiffusionTransformer.from_pretrained(llama.source.name_or_path, device="cpu", dtype="bfloat16")
    with pytest.raises(ValueError, match=r"load it with dtype=torch\.float32"):
        adapt(half, **SMALL, **QUIET)


def test_a_model_that_its_name_does_not_give_again_is_no_base_of_a_delta(base, facts, tmp_path, monkeypatch):
    folder = base.source.name_or_path
    monkeypatch.setattr("diffusion_lens.training.corpus._written", lambda *_: pytest.fail("it was begun"))

    def load(**given):
        return HookedDiffusionTransformer.from_pretrained(folder, device="cpu", **given)

    def changed():
        model = load()
        with torch.no_grad():
            model.blocks[0].mlp.up.weight[0, 0] += 1
        return model

    def of_another_tokenizer():
        model = load()
        model.tokenizer.add_tokens(["a token of its own"])
        return model

    def unnamed():
        model = load()
        model.source = None
        return model

    for make, reason in (
        (changed, "other weights than its files"),
        (lambda: load(fold_ln=True), "its norms are folded"),
        (lambda: load(tokenizer=folder), "loaded with tokenizer="),
        (lambda: load(config=folder / "config.json"), "loaded with config="),
        (lambda: load(revision="main"), "loaded with revision="),
        (of_another_tokenizer, "another tokenizer than its files"),
        (unnamed, "was not loaded from a file"),
    ):
        for out in (None, tmp_path / "out"):
            with pytest.raises(ValueError, match=rf"a delta names its base.*{reason}.*Save it.* or pass rank=0"):
                adapt(make(), facts=facts, out=out, **SMALL, **QUIET)
    assert not (tmp_path / "out").exists()


def test_a_held_out_fact_is_none_of_the_others_and_has_a_subject(base, facts):
    given = {**SMALL, "steps": 1}
    result = adapt(base, facts=facts[:6], held_out=facts[:2], **given, **QUIET)
    assert (result.numbers["facts"], result.numbers["held_out_facts"]) == (4, 2)
    with pytest.raises(ValueError, match="has no subject, which texts could leave out"):
        adapt(base, facts=facts[2:], held_out=[replace(facts[0], subject="")], **given, **QUIET)

"""Recall by steps: against a slow loop, against the curse, and beside the published numbers."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import binomtest

from diffusion_lens.analysis.over_facts.folder import fact_seed
from diffusion_lens.analysis.over_facts.intervals import share_interval
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.denoise import denoise
from diffusion_lens.denoising.samplers import smdm
from diffusion_lens.evaluation import Recall, recall_by_steps, word_bleu
from diffusion_lens.evaluation.recall import PUBLISHED, cell_meaning, cell_name, published_rows

ROOM = sys.modules[recall_by_steps.__module__]
LENGTH = toy_facts.SENTENCE_LENGTH
TOY = toy_facts.load()
HELD_OUT = [*TOY.facts("p2d"), *TOY.facts("d2p")]
FEW = HELD_OUT[::19]
FEWER = HELD_OUT[::43]
# Guidance and a canvas longer than any sentence of the training hurt the MDM: so some answers are wrong.
HARD = dict(steps=(1, 4), length=20, cfg_scale=3.0)

# Longer canvases than the model was trained on are meant.
pytestmark = pytest.mark.filterwarnings("ignore:the canvas has 20 positions")

on_mdm = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)


@pytest.fixture(scope="module")
def recall(tiny):
    """What each model recalls of a few questions a cell."""
    return recall_by_steps(tiny, FEW, steps=(1, 8), length=LENGTH, cfg_scale=0.0)


def count_rows(monkeypatch, denoise=denoise):
    """The number of rows of each call of `denoise`, or of what stands in for it, from here on."""
    rows = []

    def counted(model, canvas, settings):
        rows.append(len(canvas.tokens))
        return denoise(model, canvas, settings)

    monkeypatch.setattr(ROOM, "denoise", counted)
    return rows


def test_the_mdm_recalls_in_reverse_and_the_ar_baseline_does_not(tiny, recall):
    for (trained, queried), shares in recall.table().items():
        for share in shares.values():
            if trained == queried:
                assert share.mean >= 0.9
            elif tiny.cfg.has_mask:
                assert share.mean >= 0.8
            else:
                assert share.mean <= 0.1


@pytest.mark.parametrize(("tiny", "temperature"), [("tiny-mdm", 1.0), ("tiny-ar", 0.0)], indirect=["tiny"])
def test_it_is_what_one_prompt_at_a_time_gives(tiny, temperature):
    facts = FEWER[::2]
    recall = recall_by_steps(tiny, facts, temperature=temperature, seed=5, batch_size=3, **HARD)
    masked = tiny.cfg.has_mask
    right = torch.zeros(len(facts), len(recall.steps))
    for row, fact in enumerate(facts):
        for column, steps in enumerate(recall.steps):
            trajectory = tiny.denoise(
                fact.prompt,
                length=HARD["length"],
                steps=steps,
                cfg_scale=HARD["cfg_scale"] if masked else 0.0,
                temperature=temperature,
                seed=[fact_seed(5, fact.id)],
            )
            text = tiny.to_string(trajectory.tokens[0, len(tiny.to_tokens(fact.prompt)[0]) :])
            text = text.replace("<eos>", "") if masked else text.split("<eos>")[0]
            assert recall.written[row][column] == text
            right[row, column] = fact.answer.strip().lower() in text.lower()
    assert 0.1 < right.mean() < 0.9
    for (trained, queried), shares in recall.table().items():
        rows = [i for i, fact in enumerate(facts) if (fact.trained, fact.asked) == (trained, queried)]
        for column, steps in enumerate(recall.steps):
            assert shares[steps].mean == pytest.approx(right[rows, column].mean().item())
            assert shares[steps].questions == len(rows)


@on_mdm
def test_neither_order_nor_batches_matter(tiny):
    facts = FEWER[::2]
    one = recall_by_steps(tiny, facts, temperature=1.0, **HARD)
    other = recall_by_steps(tiny, facts[::-1], temperature=1.0, batch_size=3, **HARD)
    assert other.ids == one.ids[::-1]
    assert other.written == one.written[::-1]
    quick = dict(steps=[1], length=LENGTH, batch_size=2, shard=(0, 3))
    parts = [recall_by_steps(tiny, facts, **quick).ids for facts in (FEWER, FEWER[::-1])]
    assert parts[0] == parts[1][::-1]
    assert len(parts[0]) == 4


@on_mdm
def test_a_sampler_that_ranks_a_batch_as_one_gets_one_prompt(tiny, monkeypatch):
    by_row = recall_by_steps(tiny, FEW[:4], **HARD)
    rows = count_rows(monkeypatch)
    pooled = recall_by_steps(tiny, FEW[:4], sampler=smdm(), **HARD)
    assert set(rows) == {1}
    assert pooled.written == by_row.written
    assert pooled.record["batch_size"] == 1


def test_prompts_share_batches_and_left_to_right_is_queried_once(tiny, monkeypatch):
    rows = count_rows(
        monkeypatch, lambda model, canvas, settings: SimpleNamespace(completion=[""] * len(canvas.tokens))
    )
    recall = recall_by_steps(tiny, FEWER, batch_size=7, length=LENGTH)
    lengths = [len(tiny.to_tokens(fact.prompt)[0]) for fact in FEWER]
    if not tiny.cfg.has_mask:
        assert (recall.steps, recall.record["cfg_scale"]) == ([None], 0.0)
        assert rows == [lengths.count(length) for length in sorted(set(lengths))]
    else:
        assert (recall.steps, recall.record["cfg_scale"]) == ([1, 2, 4, 8, 16, 32], 0.0)
        assert rows == [7] * 6 + [len(FEWER) - 7] * 6
        leftmost = recall_by_steps(tiny, FEW[:3], sampler="left_to_right", length=LENGTH)
        assert leftmost.steps == [None]
        assert [len(texts) for texts in leftmost.written] == [1] * 3


def test_what_follows_the_end_counts_on_an_mdm_only(tiny, monkeypatch):
    """SMDM decodes the whole canvas of an MDM; its causal loop stops at the end token."""
    fact, end = FEW[0], tiny.tokenizer.eos_token_id
    prompt, answer = fact.tokenize(tiny)
    late = torch.tensor([[*prompt, end, *answer, *[end] * (LENGTH - len(prompt) - len(answer) - 1)]])

    def propose(ids, hook):
        return torch.where(hook.step.masked, late, ids)

    def write(model, canvas, settings):
        return denoise(model, canvas, settings, fwd_hooks=[("denoise.hook_candidates", propose)])

    monkeypatch.setattr(ROOM, "denoise", write)
    recall = recall_by_steps(tiny, [fact], steps=[2], length=LENGTH, cfg_scale=0.0)
    masked = tiny.cfg.has_mask
    assert recall.written == [[fact.answer.strip() if masked else ""]]
    assert recall.contained.item() is masked


def test_the_scores_of_a_text(recall):
    for fact, texts, exact, bleu in zip(recall.facts, recall.written, recall.exact, recall.character_bleu, strict=True):
        for i, text in enumerate(texts):
            assert exact[i].item() == (text.strip() == fact.answer.strip())
            assert (bleu[i].item() == 1) == (text.strip().lower() == fact.answer.strip().lower())
    words = recall.scores("word_bleu")
    assert words[3, -1].item() == word_bleu(recall.facts[3].answer, recall.written[3][-1])
    for cell, shares in recall.corpus_bleu().items():
        for steps, score in shares.items():
            assert (score == 1) == (recall.table("exact")[cell][steps].mean == 1)
    with pytest.raises(ValueError, match="no score 'bleu'; choose one of contained, exact"):
        recall.table("bleu")


def test_an_answer_must_be_whole_and_end(tiny):
    fact = TOY.facts("p2d", "p2d")[1]
    others = (" " + fact.answer.split(maxsplit=1)[1], fact.answer[:-1], fact.answer + " today")
    facts = [fact, *(replace(fact, id=str(i), answer=answer) for i, answer in enumerate(others))]
    exact = recall_by_steps(tiny, facts, [8], length=LENGTH, cfg_scale=0.0).exact
    assert exact.tolist() == [[True], [False], [False], [False]]


def test_it_leaves_the_global_random_numbers_alone(tiny):
    before = torch.get_rng_state()
    recall_by_steps(tiny, FEW[:2], [2], length=LENGTH, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)


def hits(facts, right):
    """A result in which only these rows are right."""
    contained = torch.tensor([[row in right] for row in range(len(facts))])
    record = {"facts": {fact.id: vars(replace(fact)) for fact in facts}, "seed": 3, "model": "a model"}
    for content in record["facts"].values():
        content.pop("id")
    written = [["" for _ in range(1)] for _ in facts]
    scores = contained.double()
    return Recall([fact.id for fact in facts], [4], written, contained, contained, scores, record)


def test_intervals_are_over_people():
    cell = [fact for fact in HELD_OUT if (fact.trained, fact.asked) == ("p2d", "d2p")]
    right = {row for row, fact in enumerate(cell) if fact.person in {cell[0].person, cell[50].person}}
    (share,) = hits(cell, right).table()["p2d", "d2p"].values()
    # All answers about two of twenty people are right, and all about the others wrong.
    wilson = binomtest(2, 20).proportion_ci(0.95, method="wilson")
    assert share[:3] == pytest.approx((0.1, wilson.low, wilson.high), abs=0.02)
    assert (share.questions, share.units) == (100, 20)

    nameless = [replace(fact, person="") for fact in cell]
    (of_questions,) = hits(nameless, right).table()["p2d", "d2p"].values()
    assert of_questions.units == 100
    assert of_questions.high - of_questions.low < 0.6 * (share.high - share.low)

    uneven = [*cell[:5], *cell[5:8], cell[10]]
    (share,) = hits(uneven, {0, 1, 5, 8}).table()["p2d", "d2p"].values()
    right = torch.tensor([float(row in {0, 1, 5, 8}) for row in range(9)], dtype=torch.float64)
    ends = share_interval(right, [fact.person for fact in uneven], 0.95)
    assert share == pytest.approx((4 / 9, *(end.item() for end in ends), 9, 3))
    (share,) = hits(uneven, set(range(5))).table()["p2d", "d2p"].values()
    assert share.mean == pytest.approx(5 / 9)
    assert 0 < share.low < share.high < 1
    (share,) = hits(cell, set(range(100))).table()["p2d", "d2p"].values()
    assert share[:3] == pytest.approx((1, *binomtest(20, 20).proportion_ci(0.95, method="wilson")))


def test_answers_that_do_not_fit_are_counted(tiny):
    recall = recall_by_steps(tiny, FEWER, steps=[2], length=11, cfg_scale=0.0)
    long = [fact.id for fact in FEWER if sum(map(len, fact.tokenize(tiny))) > 11]
    assert 0 < len(long) < len(FEWER)
    assert recall.record["too_long"] == sorted(long)
    assert f"{len(long)} of {len(FEWER)} answers do not fit" in recall.to_text()
    assert not recall.contained[[recall.ids.index(fact_id) for fact_id in long]].any()


def test_both_names_of_a_cell():
    # Berglund's files name what was trained, SMDM's columns the question.
    assert cell_name("p2d", "p2d") == "p2d same = NtD same"
    assert cell_name("p2d", "d2p") == "p2d reverse = DtN reverse"
    assert cell_name("d2p", "d2p") == "d2p same = DtN same"
    assert cell_name("d2p", "p2d") == "d2p reverse = NtD reverse"
    assert cell_name("both", "d2p") == "both d2p = DtN both"
    assert cell_name(None, "d2p") == "trained ?, queried d2p"
    assert cell_meaning("p2d", "d2p") == "trained name first, queried for the name"
    with pytest.raises(ValueError, match="no cell"):
        cell_name("p2d", "both")


def test_published_numbers():
    reverse = {label: row for label, row in published_rows(("p2d", "d2p"), "contained").items() if "SMDM" in label}
    assert {label: {steps: number.value for steps, number in row.items()} for label, row in reverse.items()} == {
        "SMDM-1028M (Rai 2025)": {1: 0.403, 2: 0.79, 4: 0.877, 8: 0.873, 16: 0.883, 32: 0.9},
        "SMDM-1028M (Nie 2024)": {32: 0.92},
    }
    of_descriptions = published_rows(("d2p", "p2d"), "contained")["SMDM-1028M (Rai 2025)"]
    assert [number.value for number in of_descriptions.values()] == [0, 0.007, 0.17, 0.273, 0.31, 0.297]
    bleu = published_rows(("d2p", "p2d"), "character_bleu")["SMDM-1028M (Nie 2024)"][32]
    assert (bleu.value, bleu.certainty) == (0.67, "second-hand")
    assert {number.certainty for number in PUBLISHED if number.source == "Rai 2025"} == {"verified"}
    assert {number.certainty for number in PUBLISHED} == {"verified", "second-hand"}


def test_the_text_shows_ours_beside_the_published(tiny, recall):
    text = recall.to_text()
    for cell in recall.cells:
        assert cell_name(*cell) in text
    reverse = text.split("p2d reverse = DtN reverse")[1].split("\n\n")[0]
    if not tiny.cfg.has_mask:
        assert "left to right" in reverse
        assert reverse.split("Llama-2 13B (Nie 2024)")[1].split()[0] == "0.0*"
        assert reverse.split("SMDM-1028M (Nie 2024)")[1].split("\n")[0].strip() == "92.0* at 32 steps"
        assert reverse.split("SMDM-1028M (Rai 2025)")[1].split("\n")[0].strip() == "90.0 at 32 steps"
    else:
        assert reverse.split("(Rai 2025)")[1].split()[:2] == ["40.3", "87.3"]
        assert "32" not in reverse
    assert f"{100 * recall.table()['p2d', 'd2p'][recall.steps[-1]].mean:.1f}" in reverse.splitlines()[2]
    assert "character_bleu (SMDM)" in recall.to_text("character_bleu")


def test_the_plot_draws_each_cell_and_the_published_dashed(tiny, recall):
    ax = recall.plot()
    drawn = [line for line in ax.get_lines() if len(line.get_xdata())]
    solid = [line.get_ydata().tolist() for line in drawn if line.get_linestyle() == "-"]
    table = recall.table()
    for shares in table.values():
        assert [share.mean for share in shares.values()] in [list(map(float, values)) for values in solid]
    dashed = [list(map(float, line.get_ydata())) for line in drawn if line.get_linestyle() == "--"]
    if tiny.cfg.has_mask:
        assert [0.403, 0.873] in dashed
    names = [entry.get_text() for entry in ax.get_legend().get_texts()]
    assert names[0].startswith(cell_name(*next(iter(table))))
    with pytest.raises(ValueError, match="queried for no fact"):
        recall_by_steps(tiny, FEW[:1], steps=[1], length=LENGTH, shard=(1, 2)).plot()


# Which facts and settings are refused does not depend on the model.
@on_mdm
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(facts=[]), "no facts were given"),
        (dict(facts=[FEW[0], FEW[0]]), "two facts are called"),
        (dict(facts=[replace(FEW[0], answer=" ")]), f"'{FEW[0].id}' has no answer"),
        (dict(length=4), r"length=4 counts the prompt too, and the prompt of the fact 'toy1-\S+' has \d tokens"),
        (dict(length=100), "100 positions do not fit"),
        (dict(cfg_scale=-1.0), "cfg_scale=-1.0"),
        (dict(temperature=-1.0), "temperature=-1.0"),
        (dict(batch_size=0), "batch_size=0"),
        (dict(shard="3"), "shard='3'"),
        (dict(sampler="greedy"), "unknown sampler 'greedy'"),
    ],
)
def test_bad_settings_leave_nothing_behind(tiny, tmp_path, change, message):
    settings = {"facts": FEW, "length": LENGTH, "steps": (1,), **change}
    with pytest.raises(ValueError, match=message):
        recall_by_steps(tiny, settings.pop("facts"), out=tmp_path / "run", **settings)
    assert not list(tmp_path.iterdir())


@on_mdm
def test_facts_that_cannot_be_queried_are_set_aside(tiny, tmp_path):
    mute, long = (
        replace(FEW[0], id="mute", answer=" "),
        replace(FEW[1], id="long", prompt=" ".join(9 * [FEW[1].prompt])),
    )
    settings = dict(steps=(1,), length=LENGTH, cfg_scale=0.0)
    recall = recall_by_steps(tiny, [mute, *FEWER[:3], long], out=tmp_path, **settings)
    alone = recall_by_steps(tiny, FEWER[:3], **settings)
    assert (recall.ids, recall.written) == (alone.ids, alone.written)
    assert set(recall.set_aside) == {"mute", "long"}
    assert "every text contains an empty one" in recall.set_aside["mute"]
    assert "no position is left for the answer" in recall.set_aside["long"]
    assert "2 facts are set aside, because the model cannot be queried for them; 'mute': " in recall.to_text()
    assert Recall.merge(tmp_path).set_aside == recall.set_aside


@on_mdm
def test_words_that_the_tokenizer_does_not_know_are_set_aside(tiny):
    strangers = {
        "prompted": (dict(prompt="The Eiffel Tower is the"), "does not know 'The', 'Eiffel', 'Tower'"),
        "answered": (dict(answer=" tower of Paris."), "does not know 'tower'"),
        "torn": (dict(answer=" \ud800"), "half of a surrogate pair"),
        "torn prompt": (dict(prompt="today \ud800 is the"), "half of a surrogate pair"),
    }
    facts = [*FEWER[:3], *(replace(FEW[0], id=name, **change) for name, (change, _) in strangers.items())]
    settings = dict(steps=(1,), length=LENGTH, cfg_scale=0.0)
    recall, alone = (recall_by_steps(tiny, queried, **settings) for queried in (facts, FEWER[:3]))
    assert (recall.ids, recall.written) == (alone.ids, alone.written)
    assert set(recall.set_aside) == set(strangers)
    for name, (_, reason) in strangers.items():
        assert reason in recall.set_aside[name]


@on_mdm
@pytest.mark.parametrize("steps", [(), (0, 1), (2, 2)])
def test_bad_steps(tiny, steps):
    with pytest.raises(ValueError, match=r"steps=\[.*\]; give one or more"):
        recall_by_steps(tiny, FEW, steps=steps, length=LENGTH)

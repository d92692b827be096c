"""The one-layer experiment: what each cell is trained on and asked, and laws that hold whatever is learnt."""

import math
from dataclasses import replace

import pytest
import torch

from diffusion_lens.analysis import reversal_signatures
from diffusion_lens.training import train
from one_layer import MEASURES, Cell, OneLayerStudy, architecture, one_layer_study, sentences
from one_layer.result import CellCurves
from one_layer.study import build, measured_at, recipe, train_cell
from one_layer.toy import MASK, measure, taught_pairs

KINDS = ("rotary", "standard", "none", "alibi")
# The columns of the text table, in the order of its heads: same, reverse, p, percentile, routes, cos V, cos U, cos Q.
IN_TEXT = ["same_accuracy", "reverse_accuracy", "reverse_probability", "percentile_reverse", "routes",
           "cosine_v", "cosine_u", "cosine_q"]  # fmt: skip
SMALL = dict(positions=["none"], data=["one-way"], depths=[1], seeds=2, steps=2)


@pytest.fixture(scope="module")
def study():
    return one_layer_study(**SMALL)


def taught(positions, variant, depth=1, steps=40, seed=0):
    model = build(Cell(positions, variant, "one-way", depth, seed))
    train(model, sentences("one-way"), recipe(steps, seed), progress=False)
    return model


@pytest.fixture(scope="module")
def mdms():
    """A diffusion model of each kind that has begun to answer."""
    return {kind: taught(kind, "mdm", steps=20) for kind in KINDS}


def test_sentences_are_those_of_their_name():
    one_way, both, mixed = map(sentences, ("one-way", "both-ways", "mixed"))
    assert [len(each) for each in (one_way, both, mixed)] == [64, 128, 96]
    assert torch.equal(both[64:], one_way.flip(1))
    assert torch.equal(mixed[:64], one_way)
    assert torch.equal(mixed[64:], one_way[:32].flip(1))
    assert one_way[:, [0, 2]].unique().numel() == 128
    assert (one_way[:, 1] == 0).all()
    told_both_ways = {int(row[2]) for row in mixed[64:]}
    for variant in ("mdm", "ar"):
        asked = {pair.reverse.answer_token for pair in taught_pairs(variant, "mixed")}
        assert len(asked) == 32
        assert not asked & told_both_ways
        assert len(taught_pairs(variant, "one-way")) == len(taught_pairs(variant, "both-ways")) == 64


def test_questions_hide_what_they_ask_for():
    facts = {int(row[0]): row.tolist() for row in sentences("one-way")}
    for pair in taught_pairs("mdm", "one-way"):
        a = pair.reverse.answer_token
        assert pair.forward.tokens.tolist() == [MASK, *facts[a][1:]]
        assert pair.reverse.tokens.tolist() == [facts[a][2], 0, MASK]
        assert pair.forward.answer_token == a
        assert [pair.forward.tokens[pair.forward.row], pair.reverse.tokens[pair.reverse.row]] == [MASK, MASK]
    for pair in taught_pairs("ar", "one-way"):
        row = facts[pair.reverse.answer_token]
        assert (pair.forward.tokens.tolist(), pair.forward.answer_token) == (row, row[2])
        assert pair.reverse.tokens.tolist() == row[::-1]
        assert pair.forward.row == pair.reverse.row == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_only_positions_differ_between_the_cells_of_a_seed(depth):
    models = [build(Cell(kind, variant, "one-way", depth, 5)) for kind in KINDS for variant in ("mdm", "ar")]
    for name, weight in models[0].state_dict().items():
        assert all(torch.equal(model.state_dict()[name], weight) for model in models)
    shapes = {replace(architecture(kind, "mdm", depth), positional_embedding_type="none") for kind in KINDS}
    assert len(shapes) == 1


def test_symmetric_positions_answer_in_reverse_as_they_were_taught(mdms):
    for kind, model in mdms.items():
        forward, reverse = (
            torch.stack([getattr(pair, name).tokens for pair in taught_pairs("mdm", "one-way")])
            for name in ("forward", "reverse")
        )
        differs = (model(forward)[:, 0] - model(reverse)[:, 2]).abs().max()
        assert (differs < 1e-4) == (kind in ("none", "alibi"))
        values = measure(model, "mdm", "one-way")
        if kind in ("none", "alibi"):
            assert values["routes"] == pytest.approx(1, abs=1e-4)
            assert all(values[f"cosine_{name}"] == pytest.approx(1, abs=1e-3) for name in "vouqk")
            assert values["reverse_probability"] == pytest.approx(values["same_probability"], abs=1e-5)


@torch.no_grad()
def test_measures_are_those_of_plain_passes(mdms):
    model, pairs = mdms["standard"], taught_pairs("mdm", "one-way")
    values = measure(model, "mdm", "one-way")
    assert list(values) == list(MEASURES)
    for name in ("same", "reverse"):
        right, probability = [], []
        for pair in pairs:
            canvas = pair.forward if name == "same" else pair.reverse
            p = model(canvas.tokens[None])[0, canvas.row].softmax(-1)
            right.append(int(p.argmax()) == canvas.answer_token)
            probability.append(float(p[canvas.answer_token]))
        assert values[f"{name}_accuracy"] == pytest.approx(sum(right) / 64)
        assert values[f"{name}_probability"] == pytest.approx(sum(probability) / 64, abs=1e-6)
    lost = []
    for pair in pairs:
        canvas = pair.reverse

        def cut(scores, hook, canvas=canvas):
            scores = scores.clone()
            scores[:, :, canvas.row, canvas.source] = float("-inf")
            return scores

        logits = model.run_with_hooks(canvas.tokens[None], fwd_hooks=[("blocks.0.attn.hook_attn_scores", cut)])
        with_edge, without = (
            each[0, canvas.row].log_softmax(-1)[canvas.answer_token] for each in (model(canvas.tokens[None]), logits)
        )
        lost.append(float(with_edge - without))
    assert values["cut_reverse"] == pytest.approx(sum(lost) / 64, abs=1e-4)


def test_first_order_prediction_holds_for_every_kind(mdms):
    for kind, model in mdms.items():
        values = measure(model, "mdm", "one-way")
        assert values["first_order_measured"] == pytest.approx(values["first_order_predicted"], rel=0.01), kind


def test_a_causal_reader_has_no_forward_edge_and_learns_one_way_only():
    values = measure(taught("none", "ar", steps=60), "ar", "one-way")
    assert values["same_accuracy"] == 1
    assert values["reverse_accuracy"] < 0.1
    assert math.isnan(values["routes"])
    assert math.isnan(values["cut_same"])
    assert abs(values["cosine_v"]) < 0.1
    assert not math.isnan(values["cut_reverse"])


@pytest.fixture(scope="module")
def deeper():
    """Networks of two layers: in the rotary one the first layer matters most, in the other the last."""
    return {kind: taught(kind, "mdm", depth=2, steps=12, seed=1) for kind in ("rotary", "standard")}


def test_a_deeper_network_is_measured_in_the_layer_that_matters(deeper):
    matter = set()
    for kind, model in deeper.items():
        found = reversal_signatures(model, taught_pairs("mdm", "one-way"), candidates=range(1, 65))
        layer = max(range(2), key=lambda i, cut=found.edge_cut[1]: float(cut[i]))
        matter.add(layer)
        values = measure(model, "mdm", "one-way")
        for name, tensor in {
            "percentile_same": found.evidence_percentile[0],
            "percentile_reverse": found.evidence_percentile[1],
            "reuse": found.evidence_reuse,
            "cut_same": found.edge_cut[0],
            "cut_reverse": found.edge_cut[1],
            "routes": found.route_correlation,
            "counterfactual": found.counterfactual_correlation,
        }.items():
            expected = math.nan if tensor is None else float(tensor[layer])
            assert math.isnan(expected) == (name == "counterfactual" and kind == "standard")
            assert values[name] == pytest.approx(expected, abs=1e-6, nan_ok=True), name
        cosines = found.gradient_cosine
        for name, matrix in {"v": "attn.v", "o": "attn.o", "down": "mlp.down", "q": "attn.q", "k": "attn.k"}.items():
            first, second = (cosines[f"blocks.{i}.{matrix}.weight"] for i in (0, 1))
            assert values[f"cosine_{name}"] == pytest.approx((first[0] + second[0]) / 2, abs=1e-6), name
            assert values[f"shuffled_{name}"] == pytest.approx((first[1] + second[1]) / 2, abs=1e-6), name
        assert (values["cosine_u"], values["shuffled_u"]) == pytest.approx(cosines["unembed.weight"], abs=1e-6)
        predicted, measured = found.first_order
        assert values["first_order_predicted"] == pytest.approx(predicted, rel=1e-6)
        assert values["first_order_measured"] == pytest.approx(measured, rel=1e-6)
        assert predicted != measured
    assert matter == {0, 1}


def test_the_final_loss_is_that_of_the_last_steps():
    cell = Cell("none", "mdm", "one-way", 1, 0)
    losses = train(build(cell), sentences("one-way"), recipe(24, 0), progress=False).losses
    assert train_cell(cell, 24).final_loss == pytest.approx(float(losses[-20:].mean()))
    assert float(losses[-20:].mean()) < float(losses[:20].mean())


def test_small_numbers_keep_their_digits_in_the_rows(study):
    values = torch.zeros_like(study.values)
    values[0], values[1] = 1.23456e-7, -1.23456e-7
    rows = replace(study, values=values).rows()
    assert rows[0]["first_order_measured"] == [0.0, -1.235e-07, 1.235e-07]
    assert replace(study, values=values).curve_rows()[0]["reuse"][0] == [1.235e-07] * 3


def test_networks_are_measured_at_halvings():
    assert measured_at(600) == [0, 19, 38, 75, 150, 300, 600]
    assert measured_at(4) == [0, 1, 2, 4]


def test_a_study_has_every_cell_and_measures_what_its_networks_do(study):
    assert study.values.shape == (4, 3, len(MEASURES))
    assert set(study.groups) == {("none", variant, "one-way", 1) for variant in ("mdm", "ar")}
    assert [cell.id for cell in study.cells] == study.ids
    cell = study.cells[3]
    alone = train_cell(cell, 2)
    assert study.by_fact()[cell.id].equals(alone)
    record = train(build(cell), sentences(cell.data), recipe(2, cell.seed), progress=False)
    assert alone.final_loss == pytest.approx(float(record.losses.mean()))
    untrained = measure(build(cell), cell.variant, cell.data)
    row = study.values[3, 0]
    assert row[study.record["measures"].index("same_probability")] == pytest.approx(untrained["same_probability"])
    means = study.table()[cell.positions, cell.variant, "one-way", 1]["same_probability"]
    curves = study.curves("same_probability", cell.positions, cell.variant)
    assert means == pytest.approx((float(curves[:, -1].mean()), float(curves[:, -1].min()), float(curves[:, -1].max())))
    assert len(set(curves[:, -1].tolist())) == 2, "seeds differ"


def test_the_text_has_the_measure_of_each_head(study):
    study = replace(study, values=torch.rand(study.values.shape, generator=torch.Generator().manual_seed(0)))
    text = study.to_text().splitlines()
    assert len(text) == 4
    for line, variant in zip(text[2:], ("mdm", "ar"), strict=True):
        row = study.table()["none", variant, "one-way", 1]
        reverse = row["reverse_accuracy"]
        means = [f"{round(row[name].mean, 2) + 0.0:.2f}" for name in IN_TEXT]
        shown = [*means[:2], f"{reverse.low:.2f}-{reverse.high:.2f}", *means[2:]]
        assert line.split() == ["none", variant.upper(), "one-way", "1", "2", *(x.replace("nan", "-") for x in shown)]


def test_an_interrupted_study_goes_on_and_shards_merge(tmp_path, monkeypatch):
    asked = {**SMALL, "seeds": 1}
    alone, saved, save = one_layer_study(**asked), [], CellCurves.save

    def save_one(curves, path):
        if saved:
            raise KeyboardInterrupt
        saved.append(save(curves, path))
        return saved[-1]

    with monkeypatch.context() as patch:
        patch.setattr(CellCurves, "save", save_one)
        with pytest.raises(KeyboardInterrupt):
            one_layer_study(**asked, out=tmp_path)
    partial = OneLayerStudy.load(tmp_path)
    assert partial.ids == alone.ids[:1]
    assert repr(partial) == "OneLayerStudy(1 of 2 trainings of 2 steps)"
    time = saved[0].stat().st_mtime_ns
    whole = one_layer_study(**asked, out=tmp_path)
    assert saved[0].stat().st_mtime_ns == time
    merged = OneLayerStudy.merge([one_layer_study(**asked, out=tmp_path, shard=(i, 2)) for i in (1, 0)])
    for other in (whole, merged, OneLayerStudy.load(alone.save(tmp_path / "study.safetensors"))):
        assert other.ids == alone.ids
        assert torch.equal(other.values.view(torch.int32), alone.values.view(torch.int32))
    with pytest.raises(ValueError, match=r"made with other settings.*recipe.steps: 2 there, 9 here"):
        one_layer_study(**{**asked, "steps": 9}, out=tmp_path)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (dict(positions=["sinus"]), "positions='sinus'; it must be one of rotary, standard, none, alibi"),
        (dict(positions="rotary"), "positions='rotary'; give a sequence of names"),
        (dict(data=["two-way"]), "data='two-way'; it must be one of one-way, both-ways, mixed"),
        (dict(data=[]), r"data=\[\]; give at least one"),
        (dict(depths=[1, 1]), r"depths=\[1, 1\]; give at least one, and each once"),
        (dict(depths=[0]), "depths"),
        (dict(seeds=0), "seeds"),
        (dict(steps=0), "steps"),
    ],
)
def test_arguments_that_cannot_be_are_refused(asked, said):
    with pytest.raises(ValueError, match=said):
        one_layer_study(**{**SMALL, **asked})


@pytest.mark.usefixtures("undrawn_figures")
def test_the_figure_has_a_row_for_each_variant(study):
    axes = study.plot()
    assert len(axes) == 12
    assert [line.get_label() for line in axes[0].lines[1:]] == ["none"]
    for panel, variant in ((0, "mdm"), (6, "ar")):
        curves = study.curves("same_probability", "none", variant)
        assert axes[panel].lines[1].get_ydata() == pytest.approx(curves.mean(dim=0).tolist())
        assert [label.get_text() for label in axes[panel].get_xticklabels()] == ["0", "1", "2"]
        (band,) = axes[panel].collections
        ends = {tuple(each) for each in band.get_paths()[0].vertices.round(5).tolist()}
        for step, values in enumerate(curves.T):
            assert {(step, round(float(end), 5)) for end in (values.min(), values.max())} <= ends
    assert [text.get_text() for text in axes[9].texts] == ["not defined"]
    with pytest.raises(ValueError, match="no training of mdm on mixed data with 1 layers"):
        study.plot("mixed")
    with pytest.raises(ValueError, match="measure='loss'; it must be one of same_accuracy"):
        study.curves("loss", "none", "mdm")
    with pytest.raises(ValueError, match="no training is alibi mdm one-way 1; there are none mdm one-way 1"):
        study.curves("reuse", "alibi", "mdm")


def test_threads_and_random_numbers_are_left_as_they_were(study):
    torch.set_num_threads(2)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    try:
        train_cell(Cell("alibi", "mdm", "mixed", 1, 0), 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert torch.equal(torch.random.get_rng_state(), before)

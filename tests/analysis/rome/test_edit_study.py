"""Edits of many requests: each as it is alone, means and intervals as one computes them by hand, in shards, resumed."""

from dataclasses import replace
from statistics import harmonic_mean, mean

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import (
    CanvasLayout,
    EditSettings,
    EditStudy,
    RankOneEdit,
    ValueSettings,
    compute_key,
    edit_study,
    edit_success,
    optimize_value,
    second_moment,
)
from diffusion_lens.analysis.over_facts.folder import FactFolder
from diffusion_lens.analysis.over_facts.intervals import share_interval
from diffusion_lens.analysis.rome import EditOutcome, query_with_prefixes
from diffusion_lens.data import EditRequest, site_facts, toy_facts
from diffusion_lens.data.site_edits import edit_requests
from diffusion_lens.facts.fact import Probe

PEOPLE = toy_facts.load()
ASKED = {fact.id: fact for fact in PEOPLE.facts("both")}
SEARCH = ValueSettings(
    steps=5, lr=0.1, weight_decay=0.1, kl_factor=0.0
)  # steps small enough that round-off stays small
SETTINGS = EditSettings(1, SEARCH, prefixes=["today "], layout=CanvasLayout(14, first_tokens=2), batch_size=2)
on_one_model = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)


def request_about(person, other, n_neighbours):
    """A request to write another person's description, with all kinds of questions."""
    true = ASKED[f"toy1-{person:03d}-p2d-held-out-0"]
    theirs = ASKED[f"toy1-{other:03d}-p2d-held-out-0"]
    again = [ASKED[f"toy1-{person:03d}-p2d-held-out-{k}"] for k in (1, 2)]
    reverse = ASKED[f"toy1-{other:03d}-d2p-held-out-0"]
    return EditRequest(
        true=true,
        new=replace(true, answer=theirs.answer, id=f"person-{person}"),
        paraphrases=tuple(replace(fact, answer=theirs.answer) for fact in again),
        neighbours=tuple(ASKED[f"toy1-{other + 1 + i:03d}-p2d-held-out-1"] for i in range(n_neighbours)),
        reverse=replace(reverse, answer=true.prompt.removesuffix(" is the").join((" ", "."))),
        reverse_true=reverse,
        reverse_old=ASKED[f"toy1-{person:03d}-d2p-held-out-0"],
        sharing_a_name=(ASKED[f"toy1-{person + 1:03d}-p2d-held-out-0"],),
        other_relations=(ASKED[f"toy1-{person:03d}-p2d-held-out-3"],),
    )


REQUESTS = [request_about(40 + 3 * i, 90 + 2 * i, n) for i, n in enumerate((1, 2, 0, 3, 1))]
GROUPS = ["efficacy", "paraphrase", "neighbourhood", "shared_name", "other_relations", "reverse", "reverse_old"]


@pytest.fixture(scope="module")
def moment(tiny):
    return second_moment(tiny, PEOPLE.sentences()[::60], 1)


@pytest.fixture(scope="module")
def whole(tiny, moment):
    return edit_study(tiny, REQUESTS, SETTINGS, covariance=moment)


def assert_same(study, other):
    assert (study.ids, study.groups) == (other.ids, other.groups)
    for name in ("wins", "probabilities", "owner", "searched"):
        assert torch.equal(getattr(study, name), getattr(other, name))


def test_every_request_is_edited_as_alone(tiny, whole, moment):
    """One request at a time, with the functions for one edit."""
    weights = {name: weight.clone() for name, weight in tiny.state_dict().items()}
    settings = dict(length=14, first_tokens=2)
    for row, request in enumerate(REQUESTS):
        queries = query_with_prefixes(tiny, request.new, ["today "], **settings)
        value = optimize_value(tiny, queries, 1, **vars(SEARCH))
        edit = RankOneEdit(tiny, 1, compute_key(tiny, queries, 1), value, moment)

        def lay_out(fact):
            return query_with_prefixes(tiny, fact, [], **settings)[0]

        alone = edit_success(tiny, edit, request.probes(tiny, lay_out))
        own = whole.owner == row
        assert [group for group, mine in zip(whole.groups, own.tolist(), strict=True) if mine] == alone.groups
        assert torch.equal(whole.wins[:, own], alone.wins)
        torch.testing.assert_close(whole.probabilities[:, own], alone.probabilities, rtol=1e-3, atol=1e-5)
        assert whole.searched[row].item() == pytest.approx(value.probability_after, rel=1e-3)
    assert (whole.probabilities[1] / whole.probabilities[0]).log().abs().max() > 0.5
    assert all(torch.equal(weight, weights[name]) for name, weight in tiny.state_dict().items())


@on_one_model
def test_the_table_by_hand(tiny, whole):
    table = whole.table(level=0.9)
    assert list(table) == GROUPS
    for group, score in table.items():
        shares = {"before": [], "after": []}
        odds = {"before": [], "after": []}
        count = 0
        for row in range(len(whole.ids)):
            probes = [i for i, own in enumerate(whole.groups) if own == group and whole.owner[i] == row]
            count += len(probes)
            for state, name in enumerate(shares):
                if probes:
                    shares[name].append(mean(whole.wins[state, i].item() for i in probes))
                    odds[name].append(mean(whole.probabilities[state, i].item() for i in probes))
        assert (score.requests, score.probes) == (len(shares["after"]), count)
        for name in shares:
            assert getattr(score, name) == pytest.approx(mean(shares[name]))
            assert getattr(score, f"probability_{name}") == pytest.approx(mean(odds[name]))
            low, high = getattr(score, f"{name}_interval")
            assert 0 <= low < high <= 1
            if set(shares[name]) <= {0, 1}:
                n = len(shares[name])
                expected = binomtest(int(sum(shares[name])), n).proportion_ci(0.9, method="wilson")
                assert (low, high) == pytest.approx(tuple(expected))
    assert table["neighbourhood"].requests == 4  # one request has no neighbours
    assert list(whole.by_request("neighbourhood")) == [REQUESTS[i].id for i in (0, 1, 3, 4)]


@on_one_model
def test_the_harmonic_score_by_hand(tiny, whole):
    rng = np.random.RandomState(0)
    wins = torch.from_numpy(rng.rand(*whole.wins.shape)).float()
    random = replace(whole, wins=wins)
    ids = list(random.by_request("neighbourhood"))
    by_group = [random.by_request(group) for group in ("efficacy", "paraphrase", "neighbourhood")]
    rows = {state: np.array([[wins[i][state].item() for wins in by_group] for i in ids]) for state in (0, 1)}
    score = random.score(level=0.8)
    assert score.requests == 4
    for state, name in enumerate(("before", "after")):
        assert getattr(score, name) == pytest.approx(harmonic_mean(rows[state].mean(axis=0)))
        groups = [torch.from_numpy(rows[state][:, i]) for i in range(3)]
        lows, highs = zip(*(share_interval(each, list("abcd"), 0.8) for each in groups), strict=True)
        assert getattr(score, f"{name}_interval") == pytest.approx(
            (harmonic_mean(map(float, lows)), harmonic_mean(map(float, highs)))
        )
    low, high = replace(whole, wins=torch.zeros_like(whole.wins)).score().after_interval
    assert low == 0
    assert high == pytest.approx(binomtest(0, 4).proportion_ci(0.95, method="wilson").high)
    with pytest.warns(DeprecationWarning, match="seed=1 is ignored"):
        whole.table(seed=1)
    lonely = replace(whole, groups=["efficacy"] * len(whole.groups))
    with pytest.raises(ValueError, match="no request has all three"):
        lonely.score()


@on_one_model
def test_a_study_that_was_stopped_goes_on(tiny, whole, moment, tmp_path):
    edit_study(tiny, REQUESTS, SETTINGS, covariance=moment, out=tmp_path, shard="0/2")
    assert EditStudy.load(tmp_path).ids == [*whole.ids[:2], *whole.ids[4:]]
    FactFolder.open(tmp_path).file(whole.ids[1]).unlink()  # its batch is then computed in full
    assert_same(edit_study(tiny, REQUESTS, SETTINGS, covariance=moment, out=tmp_path), whole)
    other_probes = [replace(REQUESTS[0], neighbours=REQUESTS[1].neighbours), *REQUESTS[1:]]
    for changed, name in (
        (dict(settings=replace(SETTINGS, prefixes=())), "prefixes"),
        (dict(covariance=None), "covariance"),
        (dict(covariance=moment.matrix), "covariance"),
        (dict(requests=other_probes), "facts: 1 differ"),
    ):
        given = dict(requests=REQUESTS, settings=SETTINGS, covariance=moment, out=tmp_path) | changed
        with pytest.raises(ValueError, match=f"was made with other settings.*{name}"):
            edit_study(tiny, **given)


@on_one_model
def test_shards_are_the_whole(tiny, whole, moment, tmp_path):
    for shard in ("0/2", "1/2"):
        edit_study(tiny, REQUESTS, SETTINGS, covariance=moment, out=tmp_path / shard[0], shard=shard)
    with pytest.raises(ValueError, match="2 of 5 requests are missing"):
        EditStudy.merge([tmp_path / "0"])
    assert_same(EditStudy.merge([tmp_path / "1", tmp_path / "0"]), whole)
    outcome = EditOutcome.load(FactFolder.open(tmp_path / "0").file(whole.ids[0]))
    FactFolder.open(tmp_path / "1").save(whole.ids[0], replace(outcome, searched=outcome.searched + 1e-3))
    with pytest.raises(ValueError, match="has another result in"):
        EditStudy.merge([tmp_path / "0", tmp_path / "1"])
    nothing = edit_study(tiny, REQUESTS, SETTINGS, covariance=moment, shard="90/100")
    assert (nothing.ids, nothing.wins.shape, nothing.table()) == ([], (2, 0), {})


@on_one_model
def test_requests_that_cannot_be_laid_out_are_set_aside(tiny, whole, moment, tmp_path):
    nobody = replace(REQUESTS[0], new=replace(REQUESTS[0].new, id="nobody", subject="Nobody"))
    long = replace(REQUESTS[1], neighbours=(replace(REQUESTS[1].true, answer=REQUESTS[1].true.answer * 3),))
    long = replace(long, new=replace(long.new, id="long"))
    study = edit_study(tiny, [nobody, *REQUESTS[:2], long], SETTINGS, covariance=moment, out=tmp_path)
    assert study.ids == whole.ids[:2]
    assert torch.equal(study.wins, whole.wins[:, whole.owner < 2])
    assert list(study.set_aside) == ["nobody", "long"]
    assert "'Nobody' is not in the prompt" in study.set_aside["nobody"]
    assert "length=14" in study.set_aside["long"]
    with pytest.raises(ValueError, match="can be queried for none of the 1 facts; 'nobody': the subject 'Nobody'"):
        edit_study(tiny, [nobody], SETTINGS)


@on_one_model
def test_saved_loaded_and_described(tiny, whole, moment, tmp_path):
    again = EditStudy.load(whole.save(tmp_path / "study.safetensors"))
    assert_same(again, whole)
    assert again.table() == whole.table()
    record = again.record
    assert (record["layer"], record["length"], record["first_tokens"], record["prefixes"]) == (1, 14, 2, ["today "])
    assert record["settings"] == vars(SEARCH)
    assert record["covariance"]["key"] == moment.record["key"]
    assert record["covariance"]["seed"] == 0
    assert (record["model"], record["hooks"]) == ("tiny-mdm", {})
    assert {"weights_sha256", "versions"} < set(record)
    assert record["facts"]["person-40"]["true"] == REQUESTS[0].true.answer
    assert edit_study(tiny, REQUESTS[:1], replace(SETTINGS, layer=-3)).record["covariance"] is None


@on_one_model
def test_the_picture(tiny, whole):
    ax = whole.plot()
    assert [label.get_text().replace("\n", "_") for label in ax.get_xticklabels()] == GROUPS
    table = whole.table()
    heights = [bar.get_height() for bar in ax.patches]
    assert heights == [score.before for score in table.values()] + [score.after for score in table.values()]
    alone = whole.ids[0]
    assert EditStudy.of({alone: whole.by_fact()[alone]}, whole.record).plot() is not None


@on_one_model
def test_bad_settings(tiny, moment):
    for wrong, message in (
        (dict(at="object"), "at='object' is unknown"),
        (dict(batch_size=0), "batch_size=0"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(SETTINGS, **wrong)
    with pytest.raises(ValueError, match="layer=4 is not one of the layers 0 to 3"):
        edit_study(tiny, REQUESTS, replace(SETTINGS, layer=4))
    with pytest.raises(ValueError, match="the covariance was taken at layer 1"):
        edit_study(tiny, REQUESTS, replace(SETTINGS, layer=2), covariance=moment)
    with pytest.raises(ValueError, match="two facts are called 'person-40'"):
        edit_study(tiny, REQUESTS[:1] * 2, SETTINGS)


def test_the_probes_without_rivals_ask_for_the_own_answer(tiny):
    probes = REQUESTS[1].probes(tiny)
    assert list(probes) == GROUPS
    own = {"shared_name": REQUESTS[1].sharing_a_name[0], "reverse_old": REQUESTS[1].reverse_old}
    for group, fact in own.items():
        (probe,) = probes[group]
        assert isinstance(probe, Probe)
        assert probe.rival is None
        assert probe.query.answer_tokens == fact.to_query(tiny).answer_tokens


@pytest.mark.parametrize("name", ["site-mdm", "site-ar"])
def test_the_bundled_pair_learns_new_attributes_and_keeps_those_of_others(name):
    """Also with C = I; the moment of the corpus spares more of the subject's other attributes."""
    model = HookedDiffusionTransformer.from_pretrained(name, device="cpu")
    world = site_facts.load()
    requests = edit_requests(world, world.facts("attribute")[7::1440])
    search = ValueSettings(steps=40, lr=0.2, stop_below=0.3, kl_factor=0.0)
    study = edit_study(model, requests, EditSettings(1, search, layout=CanvasLayout(16)))
    table = study.table()
    assert table["efficacy"].before == 0
    assert table["efficacy"].after >= 0.9
    assert table["paraphrase"].after >= 0.8
    assert table["neighbourhood"].after >= 0.9
    assert table["shared_name"].after >= 0.8
    assert study.score().after >= 0.85

"""What each example prints and writes: `tests/test_examples.py` checks it of some, the build of the site of all."""

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from figures import PNG
from safetensors.torch import load_file

from diffusion_lens.data import site_facts
from diffusion_lens.evaluation import Recall


def watches_a_fact(printed: str) -> None:
    verdicts = re.findall(r"^(\S+), (\w+): .*?probability [\d.]+: (\w+)$", printed, re.MULTILINE | re.DOTALL)
    assert {(model, way): verdict for model, way, verdict in verdicts} == {
        ("site-mdm", "forward"): "right",
        ("site-mdm", "reverse"): "right",
        ("site-ar", "forward"): "right",
        ("site-ar", "reverse"): "wrong",
    }
    assert all(float(p) > 0.85 for p in re.findall(r"probability ([\d.]+): right", printed))


def steers_at_chosen_steps(printed: str) -> None:
    for model, decisive, idle in (
        ("site-mdm", "from step 2 on", "the first 2 steps"),
        ("site-ar", "the first 2 steps", "from step 2 on"),
    ):
        table = printed[printed.index(f"{model}, guidance") :].split("wrote")[0]
        rows = re.findall(r"^  (.{22}) .*?(we know .*)$", table, re.MULTILINE)
        wrote = {label.strip(): text for label, text in rows}
        assert len(wrote) == 8
        assert "the mayor of" in wrote["never"]
        assert wrote[idle] == wrote["never"]
        assert "the clerk of" in wrote[decisive]
        assert wrote[decisive] == wrote["every step"]
        assert ("the clerk of" in wrote["replay of 2 last steps"]) is (model == "site-mdm")


def writes_in_another_order(printed: str) -> None:
    orders = {
        label: ([int(step) for step in steps.split()], float(along), float(chain))
        for label, steps, along, chain in re.findall(
            r"^([\w ]+): .*\n  revealed in step ([\d ]+)\n  probability ([\d.]+) in this order, ([\d.]+) from left",
            printed,
            re.MULTILINE,
        )
    }
    assert set(orders) == {"its own", "left to right", "right to left", "least confident first"}
    steps, along, chain = orders["left to right"]
    assert steps == list(range(7))
    assert along == pytest.approx(chain, abs=2e-4)
    assert orders["right to left"][0] == steps[::-1]
    assert len({tuple(steps) for steps, _, _ in orders.values()}) == 4
    assert all(0 < p < 1 for _, *both in orders.values() for p in both)


def caches_by_step(printed: str) -> None:
    moved = {
        model: [[float(x) for x in line.split()[2:]] for line in table.splitlines() if line.startswith("  block")]
        for model, table in re.findall(r"^(site-\w+): (.*?)(?=^site|^wrote)", printed, re.MULTILINE | re.DOTALL)
    }
    assert {model: (len(rows), len(rows[0])) for model, rows in moved.items()} == {
        "site-mdm": (6, 7),
        "site-ar": (6, 7),
    }
    assert max(map(max, moved["site-mdm"])) > 0.5
    assert max(map(max, moved["site-ar"])) == 0


def floats(text: str) -> list[float]:
    return [float(number) for number in text.split()]


def recalls_by_steps(printed: str) -> None:
    recalled, published = {}, {}
    for model, table in re.findall(r"^(site-\w+): answer contained (.*?)^Published", printed, re.MULTILINE | re.DOTALL):
        for cell, rows in re.findall(r"^(\w+ \w+ = \w+ \w+) .* n = 5\n((?:  .*\n)+)", table, re.M):
            by_label = dict(re.findall(r"^  (\S.*?)  +(.*)$", rows, re.MULTILINE))
            recalled[model, cell] = floats(by_label.pop(model))
            published |= {(model, cell, label): numbers for label, numbers in by_label.items()}
    as_trained = ["p2d same = NtD same", "d2p same = DtN same"]
    reverse = ["p2d reverse = DtN reverse", "d2p reverse = NtD reverse"]
    assert recalled == {
        **{("site-mdm", cell): [100.0] * 2 for cell in as_trained + reverse[:1]},
        ("site-mdm", reverse[1]): [80.0, 100.0],
        **{("site-ar", cell): [100.0] for cell in as_trained},
        **{("site-ar", cell): [0.0] for cell in reverse},
    }
    smdm = {cell: floats(published["site-mdm", cell, "SMDM-1028M (Rai 2025)"]) for cell in as_trained + reverse}
    assert [smdm[cell][column] for cell in (reverse[0], as_trained[0]) for column in (0, -1)] == [40.3, 90.0, 0.0, 43.0]
    assert published["site-ar", reverse[0], "GPT-3 175B (Nie 2024)"] == "0.0*"

    twin = Recall.merge("out/recall_by_steps/site-ar")
    wrong = [text.strip(". ") for [text], [hit] in zip(twin.written, twin.contained.tolist(), strict=True) if not hit]
    somebody = {words for person in site_facts.load().people for words in (person.name, person.description)}
    assert len(wrong) == 10
    assert sum(words in somebody for words in wrong) >= 8


def traces_both_ways(printed: str) -> None:
    effects: dict[tuple[str, str], dict[str, list[list[float]]]] = {}
    clean_and_corrupted = {}
    for way, traces in re.findall(
        r"^(attribute|forward|reverse): (.*?)(?=^forward|^reverse|\Z)", printed, re.MULTILINE | re.DOTALL
    ):
        for model, clean, corrupted, rows in re.findall(
            r"^  (site-\w+): p\(\w+\) is ([\d.]+), with noise on the subject ([\d.]+)\n((?:    .*\n)+)",
            traces,
            re.MULTILINE,
        ):
            clean_and_corrupted[model, way] = float(clean), float(corrupted)
            effects[model, way] = {
                kind: [floats(by_layer) for by_layer in (subject, read)]
                for kind, subject, read in re.findall(
                    r"(resid|mlp|attn) +\S+ ([-\d. ]+)read: \S+ ([-\d. ]+)$", rows, re.M
                )
            }
    for model, way in effects:
        clean, corrupted = clean_and_corrupted[model, way]
        if (model, way) == ("site-ar", "reverse"):
            assert clean < 0.05
            assert all(abs(effect) < 0.2 for kind in effects[model, way].values() for row in kind for effect in row)
            continue
        total, read_at = clean - corrupted, 3 if model == "site-mdm" else 2
        assert clean > 0.85 > 0.35 > corrupted
        (subject, read), (mlp, _), (_, attention) = effects[model, way].values()
        assert max(subject[:read_at]) > 0.5 * total
        assert max(read[:2]) < 0.3 * total
        assert min(read[read_at:]) > 0.5 * total > 0.3 * total > max(subject[4:])
        if way == "attribute":
            assert max(mlp[:3]) > 0.4 * total > 0.3 * total > max(mlp[3:])
        assert max(attention[:2]) < 0.3 * total < 0.6 * total < attention[read_at]


def averages_effects(printed: str) -> None:
    known = dict(re.findall(r"^(.*): knows (\d) of 4 facts", printed, re.MULTILINE))
    all_known = [(model, way) for model in ("site-mdm", "site-ar") for way in ("attribute", "forward")]
    assert {known[f"{model}, {way}"] for model, way in [*all_known, ("site-mdm", "reverse")]} == {"4"}
    assert int(known["site-ar, reverse"]) <= 2
    averages = {
        label: (
            floats(" ".join(numbers)),
            {role: floats(by_layer) for role, by_layer in re.findall(r"(\w+) +(.*)", rows)},
        )
        for label, *numbers, rows in re.findall(
            r"^(.*): knows 4 .*\n  average total effect (\S+), 95% interval (\S+) to (\S+)\n((?:  \w+ .*\n)+)",
            printed,
            re.MULTILINE,
        )
    }
    assert len(averages) == 5
    for label, ((mean, low, high), roles) in averages.items():
        assert 0.3 < mean < 1
        assert low < mean < high
        read, subject = roles["answer" if "mdm" in label else "prompt_last"], roles["subject_last"]
        assert read[-1] == pytest.approx(mean, abs=0.02)  # nothing runs after the last block
        assert max(subject[:3]) > 0.35 * mean > 0.2 * mean > max(subject[3:])
        assert max(read[:2]) < 0.3 * mean


def patches_forward_into_reverse(printed: str) -> None:
    scores = {
        (model, source, name): (float(unpatched), floats(by_layer))
        for model, rows in re.findall(r"^(site-\w+): .*\n((?:  .*\n)+)", printed, re.MULTILINE)
        for source, name, unpatched, by_layer in re.findall(
            r"A's (\w+) run: p\((\w+)\) +([\d.]+) becomes (.*)$", rows, re.MULTILINE
        )
    }
    assert len(scores) == 8
    for source in ("forward", "reverse"):
        unpatched, by_layer = scores["site-mdm", source, "Mondall"]
        assert unpatched > 0.95 > 0.15 > max(by_layer[:4])
        assert by_layer[-1] > 0.95
        for name in ("Plerrick", "Mondall"):
            assert max(scores["site-ar", source, name][1]) < 0.1
    assert max(scores["site-mdm", "forward", "Plerrick"][1]) < 0.15
    control = scores["site-mdm", "reverse", "Plerrick"][1]
    assert min(control[:4]) > 0.95 > 0.05 > max(control[4:])


def hooks_of_your_own(printed: str) -> None:
    stays, in_the_loop = {}, {}
    for label, single, loop in re.findall(
        r"^(site-\w+, \w+): .*\n.* none +0 +1 +2 +3 +4 +5 +all\n  p\(\w+\) +(.*)\n  in the loop (.*);$",
        printed,
        re.MULTILINE,
    ):
        stays[label] = floats(single)
        in_the_loop[label] = floats(" ".join(re.findall(r"\d\.\d+", loop)))
    assert len(stays) == 4
    for label, reader in {"site-mdm, forward": 3, "site-mdm, reverse": 3, "site-ar, forward": 2}.items():
        none, *one_block, every = stays[label]
        assert max(one_block.pop(reader), every) < 0.1
        assert min(none, *one_block) > 0.85
    assert max(stays["site-ar, reverse"]) < 0.05
    for way in ("forward", "reverse"):
        plain, without_early, without_late = in_the_loop[f"site-ar, {way}"]
        assert plain == without_late
        assert without_early < 0.1 < plain
    assert min(in_the_loop["site-mdm, forward"]) > 0.95
    plain, without_early, without_late = in_the_loop["site-mdm, reverse"]
    assert plain == without_late > 0.95 > 0.2 > without_early


def compares_keys_and_values(printed: str) -> None:
    studies = re.findall(
        r"^(site-\w+), \d+ people trained in (\w+) directions?, .*\n((?:  .*\n)+)", printed, re.MULTILINE
    )
    assert [(model, trained) for model, trained, _ in studies] == [
        (model, trained) for model in ("site-mdm", "site-ar") for trained in ("both", "one")
    ]
    for model, trained, rows in studies:
        after = {
            way: floats(f"{before} {with_value}")
            for way, before, with_value in re.findall(r"facts in (.*): p\(answer\) (\S+), with v\* (.*)", rows)
        }
        forward = "the trained direction"
        assert set(after) == ({forward} if trained == "both" else {forward, "reverse"})
        assert min(after[forward]) > 0.9
        if trained == "one":
            before, with_value = after["reverse"]
            assert with_value > 0.75
            assert before > 0.75 if model == "site-mdm" else before < 0.2
        cka = {
            what: (float(value), float(high))
            for what, value, high in re.findall(
                r"^  (\w[\w ]+?) +block 0: (\S+) \(.*\), chance +\S+ to (\S+), p", rows, re.MULTILINE
            )
        }
        assert set(cka) == {"keys of a person", "values of a person", "a name as key and value"}
        assert all(abs(value) < 0.2 for value, _ in cka.values())


def reads_every_layer_by_step(printed: str) -> None:
    lenses = re.findall(r"^(site-\w+, \w+): .*\n((?:  .*\n)+)", printed, re.MULTILINE)
    first = {label: " ".join(re.findall(r"^  step +\d+: (.*)$", rows, re.MULTILINE)).split() for label, rows in lenses}
    ways = ("attribute", "forward", "reverse")
    assert list(first) == [f"{model}, {way}" for model in ("site-mdm", "site-ar") for way in ways]
    for way in ways:
        assert set(first[f"site-mdm, {way}"]) <= set("456.")
    for way in ways[:2]:
        assert set(first[f"site-ar, {way}"]) <= set("123")
    assert first["site-ar, reverse"] == ["-", "-"]
    for _, rows in lenses:
        direct, tuned = (floats(kl) for kl in re.findall(r"KL from the last layer, \w+ +(.*)$", rows, re.MULTILINE))
        assert all(after <= before for before, after in zip(direct[:3], tuned, strict=False))
        assert direct[-1] == tuned[-1] == 0


def reproduces_the_study(printed: str) -> None:
    assert "Nothing that follows is evidence about SMDM" in printed
    assert "site-ar was not fine-tuned here" in printed
    assert printed.count("p2d reverse = DtN reverse (trained name first, queried for the name), n = 2") == 2
    assert "site-mdm recalls 100% as trained, and 100% in reverse" in printed
    assert "site-ar recalls 100% as trained, and 0% in reverse" in printed

    traces = re.findall(r"^(site-\w+), which wrote (\w+).*\n  step .*\n((?:  +\d.*\n)+)", printed, re.MULTILINE)
    assert [(model, wrote) for model, wrote, _ in traces] == [
        ("site-mdm", "this"),
        ("site-ar", "this"),
        ("site-mdm", "this"),
        ("site-ar", "something"),
    ]
    last_steps = [floats(rows.splitlines()[-1].split(" at ")[0])[1:] for _, _, rows in traces]
    (clean, given_the_place, *_), _, (clean_back, low_back, subject_back, _), nothing = last_steps
    assert min(clean, given_the_place, clean_back, subject_back) > 0.95 > 0.1 > low_back
    assert max(nothing) < 0.05

    known = re.findall(r"^(site-\w+), (p2d \w+) = \w+ \w+\n((?:  \w+ +knows .*\n){3})", printed, re.MULTILINE)
    assert [(model, way, set(re.findall(r"knows (\d) of 1", rows))) for model, way, rows in known] == [
        ("site-mdm", "p2d same", {"1"}),
        ("site-mdm", "p2d reverse", {"1"}),
        ("site-ar", "p2d same", {"1"}),
        ("site-ar", "p2d reverse", {"0"}),
    ]
    assert "there is nothing to restore" in known[-1][2]
    assert printed.count("by step: 1 of 1 facts, recalled in 8 steps\n") == 2  # both directions of the diffusion model
    assert "site-ar, p2d reverse = DtN reverse, by step: 0 of 1 facts, recalled\n" in printed
    last_of_steps = re.findall(r"^  step +0: 1 facts, total effect (\S+); at most", printed, re.MULTILINE)
    assert len(last_of_steps) == 3

    groups = re.findall(r"^(\d+) people trained (\w+) .*\n((?:  .*\n)+)", printed, re.MULTILINE)
    assert [(count, trained) for count, trained, _ in groups] == [
        ("12", "name"),
        ("12", "description"),
        ("12", "both"),
    ] * 2
    for *_, rows in groups:
        similarities = re.findall(r"CKA (\S+) \(.*\), chance \S+ to (\S+), p (\S+): (more|no more) similar", rows)
        assert len(similarities) == 3
        assert all(float(value) > float(high) for value, high, _, word in similarities if word == "more")
        assert all(float(p) > 0.01 for *_, p, word in similarities if word == "no more")
    reached = re.findall(r"^  (\w+ reverse) = .*: p\(answer\) (\S+), with v\* (\S+)$", printed, re.MULTILINE)
    (name, *mdm_name), (description, *mdm_description), *twin = reached
    assert (name, description) == ("p2d reverse", "d2p reverse")
    assert min(map(float, mdm_name + mdm_description)) > 0.7
    assert all(float(before) < 0.2 < 0.7 < float(after) for _, before, after in twin)


def probes_the_time(printed: str) -> None:
    tables = dict(re.findall(r"^(site-\w+): (.*?)wrote", printed, re.MULTILINE | re.DOTALL))
    r2 = {
        model: {
            label: [float(x) for x in row.split()]
            for label, row in re.findall(r"^ +(\D+?) +(-?\d\.\d\d.*)$", table, re.MULTILINE)
        }
        for model, table in tables.items()
    }
    mdm, ar = (r2[model] for model in ("site-mdm", "site-ar"))
    single, everywhere = "states that predict the next tokens", "states of all tokens"
    assert mdm[single][0] <= 0.01 < 0.7 < mdm[single][1]
    assert mdm[single][-1] < 0.4  # the position alone
    assert min(mdm["mean over the canvas"]) > 0.6
    assert ar[single][-1] > 0.95
    assert max(ar[everywhere][:-1]) < ar[everywhere][-1] + 0.1 < 0.5
    assert max(mdm["the first, times permuted"] + ar["the first, times permuted"]) < 0.2


def finds_attention_sinks(printed: str) -> None:
    assert re.findall(r"^(site-\w+): 6 runs, AttentionSinks\(8 steps", printed, re.MULTILINE) == ["site-mdm", "site-ar"]
    shares = [
        (float(a), float(b)) for a, b in re.findall(r"^  prompt +(\d+)% of the sinks, +(\d+)%", printed, re.MULTILINE)
    ]
    assert len(shares) == 2
    assert all(of_sinks > of_positions for of_sinks, of_positions in shares)
    layers = re.findall(r"^ +\d +(\d\.\d\d) ", printed, re.MULTILINE)
    assert len(layers) == 12
    assert sum(map(float, layers[:6])) > sum(map(float, layers[6:]))


def trains_one_layer(printed: str) -> None:
    """Without positions a diffusion model answers in reverse exactly as it was taught, an AR model nothing."""
    rows = {
        variant: {
            label.strip(): floats(values)
            for label, values in re.findall(r"^  (.{26}) mean .*?((?: +\S+){7})$", text, re.M)
        }
        for variant, text in re.findall(r"^none (\w+)\n((?:  .*\n)+)", printed, re.MULTILINE)
    }
    assert set(rows) == {"mdm", "ar"}
    assert rows["mdm"]["p, in reverse"] == rows["mdm"]["p, as trained"]
    assert rows["mdm"]["routes: correlation"] == rows["mdm"]["gradients: cosine in W_V"] == [1.0] * 7
    assert rows["mdm"]["evidence: percentile of A"][-1] > 0.9
    assert rows["ar"]["p, as trained"][-1] > 0.9
    assert max(rows["ar"]["p, in reverse"]) < 0.1
    assert max(map(abs, rows["ar"]["gradients: cosine in W_V"])) < 0.1


def compares_circuits(printed: str) -> None:
    """Circuits of 10% of the edges keep most of the difference, and those of 5% overlap far more than by chance."""
    kept = re.findall(r"^site-\w+, \w+: .*edges 0: -?0.00, .* 219: ([\d.]+), .*2188: 1.00$", printed, re.MULTILINE)
    assert len(kept) == 6
    assert all(float(share) > 0.8 for share in kept)
    table = printed[printed.index("by chance 0.03") :]
    overlap = [[float(x) for x in row.split()] for row in re.findall(r"^  site-\w+, \w+ +(.*)$", table, re.MULTILINE)]
    assert [row[i] for i, row in enumerate(overlap)] == [1.0] * 6
    assert min(min(row) for row in overlap) > 0.1
    assert overlap[0][1] > 0.35 > 0.25 > max(overlap[2][:2])  # attribute and forward, each with reverse: diffusion
    assert min(overlap[3][4:] + overlap[4][5:]) > 0.25
    layers = re.findall(r"^  share of the edges by layer: (.*)$", printed, re.MULTILINE)
    assert [sum(map(float, re.findall(r" (0\.\d+)", shares))) for shares in layers] == pytest.approx(
        [1.0] * 6, abs=0.03
    )


def measures_three_signatures(printed: str) -> None:
    """What the docstring says of each model holds in both directions of training."""
    studies = re.findall(
        r"^(site-\w+), 10 people trained (\w+): p.* (\S+) reverse\n((?:  .*\n)+)", printed, re.MULTILINE
    )
    assert [(model, trained) for model, trained, *_ in studies] == [
        (model, trained) for trained in ("p2d", "d2p") for model in ("site-mdm", "site-ar")
    ]
    for model, _, recalled, text in studies:
        rows = dict(re.findall(r"^  ([\w:, ]+(?: \(\w+\))?) {2,}(-?\d.*)$", text, re.MULTILINE))
        rows = {label.strip(): row for label, row in rows.items()}
        percentile, reuse, cut = (
            floats(rows[label])
            for label in ("evidence percentile, reverse", "evidence reuse", "edge cut, reverse (nats)")
        )
        cosines = {  # by layer, each with that of shuffled pairs
            label.removesuffix(" (shuffled)"): [
                (float(own), float(shuffled)) for own, shuffled in re.findall(r"(-?\d\.\d\d) \( ?(-?\d\.\d\d)\)", row)
            ]
            for label, row in rows.items()
            if label.startswith("cosine")
        }
        assert [*map(len, cosines.values())] == [6] * 5 + [1]
        storage = [pair for name in ("V", "O", "MLP down") for pair in cosines[f"cosine {name}"]]
        routing = [pair for name in ("Q", "K") for pair in cosines[f"cosine {name}"]]
        ((head, head_shuffled),) = cosines["cosine head"]
        ((predicted, measured),) = re.findall(r"loss by (\S+); measured: (\S+)$", text, re.MULTILINE)
        # A loss of a few nats has a last place of 2e-7 in float32, and the measured change is the difference of two.
        assert float(predicted) == pytest.approx(float(measured), rel=0.02, abs=1e-6)
        assert reuse[0] == 1
        if model == "site-mdm":
            assert percentile[3] > 0.96 > 0.9 > max(percentile[:3] + percentile[4:])
            assert cut[3] > 2.4 > 0.05 > max(map(abs, cut[:3] + cut[4:]))
            assert percentile[0] > 0.75  # where the cut costs nothing
            assert reuse[3] > 0.98
            measured_routes, moved = floats(rows["route"]), floats(rows["route, counterfactual"])
            assert measured_routes[3] > 0.94 > 0.5 > moved[3]
            assert max(measured_routes[:2]) < 0.2
            assert min(own for own, _ in storage) > 0.15
            assert min(own - shuffled for own, shuffled in storage) > 0.15
            assert max(shuffled for _, shuffled in storage) < 0.25
            assert all(0.04 < own < 0.55 and shuffled < 0.12 for own, shuffled in routing)
            assert min(own - shuffled for own, shuffled in routing) > 0.05
            means = [statistics.mean(own for own, _ in pairs) for pairs in (routing, storage)]
            assert means[0] < 0.6 * means[1]
            assert float(recalled) > 0.5
            assert head > 0.85 > 0.05 > abs(head_shuffled)
            assert float(predicted) < -3e-5
        else:
            assert all(0.3 < x < 0.75 for x in percentile)
            assert float(recalled) < 0.2
            assert max(map(abs, cut)) < 0.25
            assert max(abs(x) for pair in storage + routing for x in pair) < 0.1
            assert max(abs(head), abs(head_shuffled)) < 0.01
            assert float(predicted) > 0
            assert text.count("undefined: its reader sees no source") == 3


def finds_two_sites(printed: str) -> None:
    """What the docstring says holds for few facts, at both sites of both models."""
    traces: dict[tuple[str, str], dict[tuple[str, str], list[float]]] = {}
    totals = {}
    for model, question, total, rows in re.findall(
        r"^(site-\w+), (.+): knows 4 of 4, average total effect ([\d.]+) .*\n((?:    .*\n)+)", printed, re.MULTILINE
    ):
        totals[model, question] = float(total)
        traces[model, question] = {
            (label.strip(), site.strip()): floats(effects)
            for label, site, effects in re.findall(r"^    (.{30}) (.{20}) (.*)$", rows, re.MULTILINE)
        }
    assert set(traces) == {
        (model, question)
        for model in ("site-mdm", "site-ar")
        for question in ("attribute", "NAME is", "DESCRIPTION is")
    }
    subject, readout = "subject's last token", "read-out"
    for model, last_block in (("site-mdm", 2), ("site-ar", 1)):
        rows, total = traces[model, "attribute"], totals[model, "attribute"]
        assert rows["resid", subject][last_block] > 0.85 * total
        assert rows["resid", subject][last_block + 1] < 0.25 * total
        assert rows["resid", readout][last_block + 1] > 0.85 * total
        assert rows["resid", readout][last_block] < 0.15 * total
        assert rows["attn", readout].index(max(rows["attn", readout])) == last_block + 1
        assert max(rows["mlp", subject][:2]) > 0.4 * total > 0.2 > max(rows["mlp", subject][3:])
        assert rows["resid, later mlp severed", subject][0] < 0.75 * rows["resid", subject][0]
        assert max(traces[model, "DESCRIPTION is"]["mlp", readout][4:]) > 0.2


def edits_facts(printed: str) -> None:
    scores = {
        (model, kind): {
            group: (float(before), float(after))
            for group, before, after in re.findall(r"^  (\w+) +([\d.]+) -> ([\d.]+) \(", rows, re.MULTILINE)
        }
        for model, kind, rows in re.findall(r"^(site-\w+), (\w+): 4 edits.*\n((?:  .*\n)+)", printed, re.MULTILINE)
    }
    assert set(scores) == {(model, kind) for model in ("site-mdm", "site-ar") for kind in ("attribute", "description")}
    for (_, kind), groups in scores.items():
        assert groups["efficacy"] == (0, 1)
        assert groups["paraphrase"][1] > 0.9
        assert groups["shared_name"][1] > 0.95
        assert groups["other_relations"][0] > 0.95
        if kind == "attribute":
            assert groups["neighbourhood"][1] > 0.9
            assert 0.3 < groups["other_relations"][1] < 0.95
        else:
            assert groups["other_relations"][1] < 0.5
            assert groups["reverse"][0] == groups["reverse"][1]
            assert groups["reverse_old"] == (1, 1)


def trains_a_dictionary(printed: str) -> None:
    levels = re.findall(r"^  t from \S+ to \S+: loss recovered (\S+), variance explained (\S+)$", printed, re.MULTILINE)
    assert len(levels) == 4
    assert all(float(recovered) > 0.95 and float(explained) > 0.85 for recovered, explained in levels)
    masked, other = map(int, re.findall(r"active at (\d+)% of masked, (\d+)% of other positions", printed)[0])
    assert masked - other > 40
    ((clean, ablated),) = re.findall(r"is (\S+); ablated in step 0, 1, ...: \[(.*)\]$", printed, re.MULTILINE)
    clean, by_step = float(clean), floats(ablated.replace(",", " "))
    assert len(by_step) == 4
    assert max(abs(p - clean) for p in by_step[:-1]) < 0.05
    assert by_step[-1] < 0.65 * clean


def compares_kinds_of_diffusion(printed: str) -> None:
    """All three know the facts; in reverse the masked model does and the block model does not. Where a fact is read."""
    for part in re.split(r"^(?=tiny-)", printed, flags=re.MULTILINE)[1:]:
        name = part.split(":")[0]
        assert "Gustav Geisser is the brave drummer of Rolsen." in part
        recall = {way: list(map(float, re.findall(r"steps (\d\.\d+)", line))) for way, line in ways_of(part)}
        assert min(recall["forward"]) == 1
        assert {"tiny-mdm": min(recall["reverse"]) == 1, "tiny-block": max(recall["reverse"]) == 0}.get(name, True)
        subject, read = (
            list(map(float, re.findall(r"\d\.\d+", part.split(place)[1].splitlines()[0])))
            for place in ("last token of the subject", "where the answer is read")
        )
        early = {"tiny-mdm": subject[2] < 0.5 < read[2], "tiny-uniform": read[2] < 0.5 < subject[2]}
        assert early.get(name, True)
        assert read[3] > 0.9


def ways_of(part: str) -> list[tuple[str, str]]:
    """The lines of recall, all of one direction together."""
    lines = re.findall(r"trained \w+, (\w+): (.*)", part)
    return [(way, " ".join(line for other, line in lines if other == way)) for way in ("forward", "reverse")]


CHECKS: dict[str, Callable[[str], None]] = {
    "01_watch_a_fact": watches_a_fact,
    "02_cache_by_step": caches_by_step,
    "03_another_order": writes_in_another_order,
    "04_steer_at_chosen_steps": steers_at_chosen_steps,
    "05_your_own_hook": hooks_of_your_own,
    "06_recall_by_steps": recalls_by_steps,
    "07_trace_both_ways": traces_both_ways,
    "08_average_effect": averages_effects,
    "09_patch_forward_into_reverse": patches_forward_into_reverse,
    "10_keys_and_values": compares_keys_and_values,
    "11_logit_lens_by_step": reads_every_layer_by_step,
    "12_sparse_dictionary": trains_a_dictionary,
    "13_probe_of_time": probes_the_time,
    "14_attention_sinks": finds_attention_sinks,
    "15_circuits": compares_circuits,
    "16_three_signatures": measures_three_signatures,
    "17_one_layer": trains_one_layer,
    "18_two_sites": finds_two_sites,
    "19_edit_facts": edits_facts,
    "20_kinds_of_diffusion": compares_kinds_of_diffusion,
    "reproduce_blog": reproduces_the_study,
}
FILES = {
    "01_watch_a_fact": 8,
    "02_cache_by_step": 1,
    "03_another_order": 1,
    "04_steer_at_chosen_steps": 2,
    "05_your_own_hook": 1,
    "06_recall_by_steps": 2,
    "07_trace_both_ways": 9,
    "08_average_effect": 2,
    "09_patch_forward_into_reverse": 2,
    "10_keys_and_values": 2,
    "11_logit_lens_by_step": 8,
    "12_sparse_dictionary": 3,
    "13_probe_of_time": 3,
    "14_attention_sinks": 3,
    "15_circuits": 2,
    "16_three_signatures": 3,
    "17_one_layer": 2,
    "18_two_sites": 2,
    "19_edit_facts": 2,
    "20_kinds_of_diffusion": 2,
    "reproduce_blog": 17,
}
SAVED = {
    ("06_recall_by_steps", "recall_by_steps"): 40,
    ("07_trace_both_ways", "trace_attribute"): 7,
    ("07_trace_both_ways", "trace_forward"): 7,
    ("07_trace_both_ways", "trace_reverse"): 7,
    ("08_average_effect", "average_effect"): 30,
    ("09_patch_forward_into_reverse", "patch_forward_into_reverse"): 8,
    ("10_keys_and_values", "keys_and_values"): 204,
    ("12_sparse_dictionary", "dictionary"): 2,
    ("15_circuits", "circuits"): 12,
    ("16_three_signatures", "signatures"): 40,
    ("17_one_layer", "one_layer"): 2,
    ("18_two_sites", "two_sites"): 120,
    ("19_edit_facts", "edit_facts"): 16,
    ("reproduce_blog", "recall"): 16,
    ("reproduce_blog", "trace"): 4,
    ("reproduce_blog", "average"): 16,
    ("reproduce_blog", "keys_and_values"): 144,
}


def check(name: str, printed: str) -> None:
    """Checks what an example printed, and what it wrote to `out` in the current folder."""
    CHECKS[name](printed)
    written = [Path(path) for path in re.findall(r"wrote (out/\S+)$", printed, re.MULTILINE)]
    assert len(written) == FILES[name]
    assert set(written) == set(Path("out").iterdir())
    for path in written:
        if path.is_dir():
            saved = list(path.rglob("*.safetensors"))
            assert len(saved) == SAVED[name, path.name]
            assert all(map(load_file, saved))
        elif path.suffix == ".png":
            assert path.read_bytes().startswith(PNG)
        elif path.suffix == ".safetensors":
            assert load_file(path)
        elif path.suffix == ".json":
            assert json.loads(path.read_text(encoding="utf-8"))["weights_sha256"]
        else:
            assert re.search("Baupling|sailor", path.read_text(encoding="utf-8"))

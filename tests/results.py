"""One result of every type, of random numbers, with tokens that HTML and formulas would take for something else."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

POS, LAYERS, STEPS, HEADS = 24, 6, 4, 2
WORDS = {-1: "", 0: "▁the", 1: "<script>alert(1)</script>", 2: "<eos>", 3: "[MASK]", 4: "▁$x$", 5: "\n"}
TEXTS = [WORDS[pos % 5] for pos in range(POS)]
RECORD: dict[str, Any] = {"model": "toy", "weights_sha256": "0123456789abcdef", "kind": "resid", "samples": 10}
NAMES = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
FACT: dict[str, Any] = {"prompt": "A <b> is", "answer": " c", "subject": "A", "trained": "p2d", "asked": "p2d"}


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def every_result(folder: Path) -> Iterator[Any]:
    """A result of each type."""
    yield from _traces()
    yield from _circuits()
    yield from _by_step()
    yield from _beliefs()
    yield from _edits()
    yield from _studies()
    yield from _measures()
    yield from _runs()
    yield _store(folder)


def _traces() -> Iterator[Any]:
    from diffusion_lens.analysis import CausalTrace, PatchGrid, TemporalEffect, TrajectoryTrace

    record = {**RECORD, "answer": ["▁the", "<eos>"], "steps": list(range(STEPS))}
    axes = {"positions": list(range(POS)), "layers": list(range(LAYERS))}
    single = {"scores": rand(POS, LAYERS), "token_scores": rand(POS, LAYERS, 2)}
    whole = {"scores": rand(STEPS, POS, LAYERS), "token_scores": rand(STEPS, POS, LAYERS, 2)}
    whole["scores"][0, 3] = torch.nan
    yield CausalTrace(
        **single,
        clean_token_scores=rand(2),
        corrupted_token_scores=rand(2),
        clean=0.75,
        corrupted=0.1,
        known=True,
        str_tokens=TEXTS,
        subject=(1, 3),
        **axes,
        record=record,
    )
    yield TrajectoryTrace(
        **whole,
        chained=None,
        clean=rand(STEPS),
        corrupted=rand(STEPS),
        clean_token_scores=rand(STEPS, 2),
        corrupted_token_scores=rand(STEPS, 2),
        steps=list(range(STEPS)),
        revealed_at=[1, 3],
        known=True,
        str_canvases=[TEXTS] * STEPS,
        subject=(1, 3),
        **axes,
        record=record,
    )
    yield TemporalEffect(
        **whole,
        clean=1.0,
        corrupted=0.1,
        steps=list(range(STEPS)),
        str_tokens=TEXTS,
        subject=(1, 3),
        **axes,
        record=record,
    )
    yield PatchGrid(
        scores=rand(STEPS, LAYERS, POS, HEADS),
        axes=("step", "layer", "pos", "head"),
        site="z",
        clean=rand(STEPS),
        corrupted=rand(STEPS),
        coordinates={
            "step": list(range(STEPS)),
            "layer": list(range(LAYERS)),
            "pos": [[[pos, pos + 1]] for pos in range(POS)],
            "head": list(range(HEADS)),
        },
        labels=[TEXTS] * STEPS,
        error=None,
        record=RECORD,
    )


def _circuits() -> Iterator[Any]:
    from diffusion_lens.analysis import Circuit, EdgeScores, Faithfulness, NeuronScores, NodeScores
    from diffusion_lens.analysis.circuits.graph import Graph

    graph = Graph(LAYERS, HEADS, HEADS)
    record = {**RECORD, "steps": [0, 1], "clean_tokens": [[1], [2]], "corrupted_tokens": [[1], [2]]}
    ends = {"clean": torch.tensor([1.0, 1.0]), "corrupted": torch.tensor([0.0, 0.2])}
    yield Circuit(frozenset({("embed", "a0.h0<q>"), ("m1", "logits")}), graph)
    yield NodeScores(rand(2, len(graph.writers)), **ends, graph=graph, record=record)
    cells = torch.tensor([[0, 1, 2, 7], [1, 2, 5, 3]])
    words = [TEXTS, TEXTS]
    yield NeuronScores(rand(2), cells, rand(2), rand(2), **ends, words=words, record={**record, "layers": [1, 2]})
    yield EdgeScores(rand(2, len(graph.writers), len(graph.readers)), **ends, graph=graph, record=record)
    yield Faithfulness((0, 10, 100), rand(2, 3), **ends, record=record)


def _by_step() -> Iterator[Any]:
    from diffusion_lens.analysis import (
        AttentionRollout,
        AttentionSinks,
        CacheDrift,
        LayerCosines,
        LinearProbe,
        LogitLens,
        Projection,
        QKDecomposition,
        RetrievalHeads,
        StateDrift,
        SteeringVectors,
        Translators,
    )
    from diffusion_lens.analysis.engine.by_step import ReadCanvases

    shape = (STEPS, LAYERS, 1, POS)
    yield LogitLens(
        top_tokens=torch.ones(*shape, 2, dtype=torch.long),
        top_probabilities=rand(*shape, 2),
        entropy=rand(*shape),
        kl=rand(*shape),
        target_ranks=torch.zeros(*shape, 2, dtype=torch.long),
        target_probabilities=rand(*shape, 2),
        targets=torch.full((1, POS, 2), 2),
        tokens=torch.full((STEPS, 1, POS), 3),
        rows=torch.arange(POS).expand(STEPS, 1, POS),
        positions=list(range(POS)),
        layers=list(range(LAYERS)),
        labels=[f"{layer}_pre" for layer in range(LAYERS)],
        steps=list(range(STEPS)),
        words=WORDS,
        record={**RECORD, "blank": 3, "steps": list(range(STEPS))},
    )
    yield Translators(rand(2, 4, 4), rand(2, 4), [1, 2], rand(30, 2), RECORD)
    of_positions, no = (STEPS, 1, POS), torch.zeros(STEPS, 1, POS, dtype=torch.bool)
    yield AttentionSinks(
        received=rand(STEPS, LAYERS, HEADS, 1, POS),
        even=torch.ones(of_positions),
        n_queries=torch.full(of_positions, POS),
        canvases=(torch.arange(POS) % 5).expand(of_positions),
        masked=no,
        special=no,
        given=no[0],
        final=(torch.arange(POS) % 5)[None],
        threshold=0.5,
        words=WORDS,
        record={**RECORD, "steps": list(range(STEPS)), "n_steps": STEPS, "layers": list(range(LAYERS))},
    )
    held = {"steps": list(range(STEPS)), "approximate_cache": "dual"}
    yield CacheDrift(rand(STEPS, LAYERS), rand(STEPS, LAYERS), torch.full((STEPS,), POS), {**RECORD, **held})
    canvases = ReadCanvases(
        tokens=(torch.arange(POS) % 5).expand(of_positions),
        masked=(torch.arange(POS) % 5 == 3).expand(of_positions),
        present=~no,
        given=torch.arange(POS)[None] < 6,
        final=(torch.arange(POS) % 5)[None],
        words=WORDS,
    )
    by_step = {**RECORD, "steps": list(range(STEPS)), "n_steps": STEPS, "layers": list(range(LAYERS))}
    by_head = (STEPS, LAYERS, HEADS, 1, POS)
    yield QKDecomposition(*(rand(*by_head) + i for i in range(4)), 3.0, canvases, by_step)
    yield AttentionRollout(rand(STEPS, LAYERS, 1, 3, 3), ["prompt", "<b>", "$x$"], canvases, by_step)
    written = torch.arange(POS)[None] - 20
    yield RetrievalHeads(
        retrieved=rand(LAYERS, HEADS, 1, POS) > 0.5,
        attention=rand(LAYERS, HEADS, 1, POS),
        n_places=written.clamp(min=0, max=1),
        revealed_at=written.clamp(min=-1),
        source=torch.arange(POS)[None] < 6,
        tokens=(torch.arange(POS) % 5)[None],
        words=WORDS,
        record=by_step,
    )
    kinds = ("keys", "values", "attention", "mlp")
    drifts = ({kind: rand(STEPS - 1, LAYERS, 1, POS) for kind in kinds} for _ in range(2))
    yield StateDrift(*drifts, canvases, by_step)
    yield LayerCosines(rand(STEPS, LAYERS, 1, POS), canvases, by_step)
    vectors = {name: rand(STEPS, 8) + i for i, name in enumerate(NAMES)}
    settings = {"steps": list(range(STEPS)), "n_steps": STEPS, "names": NAMES, "positions": "masked", "rows": "canvas"}
    yield SteeringVectors(
        positive=vectors,
        negative={name: -vector for name, vector in vectors.items()},
        n_positive=torch.arange(STEPS),
        n_negative=torch.arange(STEPS),
        record={**RECORD, **settings},
    )
    one = {**RECORD, **settings, "names": NAMES[:1], "steps": None}
    yield SteeringVectors({NAMES[0]: rand(20)}, {NAMES[0]: -rand(20)}, torch.tensor(3), torch.tensor(4), record=one)
    weights = {name: rand(8) for name in NAMES}
    yield LinearProbe(weights, rand(2), rand(2), rand(2), rand(2), rand(2), torch.nan, {**RECORD, **settings})
    of_units = dict(n_tested=torch.arange(5), residual=rand(2, 5), residual_control=rand(2, 5))
    squares = dict(squares=rand(5) + 1, squares_control=rand(5) + 1)
    record = {**RECORD, **settings}
    yield LinearProbe(weights, rand(2), rand(2), rand(2), rand(2), rand(2), 0.5, record, **of_units, **squares)
    yield Projection(rand(STEPS, 2, 1, POS), rand(STEPS, 1, POS) > 0.5, rand(8), {**RECORD, **settings})


def _beliefs() -> Iterator[Any]:
    from diffusion_lens.analysis import Calibration, Commitment, RemaskEffect, RevealOrder

    written, step = (torch.arange(POS) % 5)[None], (torch.arange(POS) % STEPS)[None]
    settled = torch.arange(STEPS)[:, None] > 1
    yield Commitment(
        committed_at=step // 2,
        first_at=step // 2,
        revealed_at=step,
        flips=torch.zeros_like(step),
        stability=rand(1, POS),
        predicted=torch.ones(1, POS, dtype=torch.bool),
        written=written,
        settled=settled,
        answer_settled=settled,
        gap=rand(STEPS, 1),
        remaining_entropy=rand(STEPS, 1),
        n_steps=torch.tensor([STEPS]),
        steps=list(range(STEPS)),
        words=WORDS,
        record=RECORD,
    )
    names = ("mean", "low", "high", "p_random", "later_than_in_text", "later_low", "later_high")
    yield RevealOrder(
        rank=rand(1, POS),
        revealed_at=step,
        written=written,
        class_of=written % 2,
        left_to_right=rand(1),
        by_frequency=rand(1),
        **{name: rand(2) for name in names},
        classes=["<b>", "$x$"],
        words=WORDS,
        record=RECORD,
    )
    readings = ["0", "1", "first", "last", "mean", "slope", "variance"]
    n, counts = torch.full((7,), 9), torch.full((7, 3), 3)
    bins = {"bin_counts": counts, "bin_confidence": rand(7, 3), "bin_right": rand(7, 3)}
    record = {**RECORD, "examples": "rows"}
    of_examples = {"values": rand(3, 7, 9), "right": torch.arange(9) > 4, "rows": torch.arange(9)}
    yield Calibration(rand(3, 7), rand(7), n, n // 2, **bins, **of_examples, readings=readings, record=record)
    positions = list(range(POS))
    yield RemaskEffect(rand(3), rand(3, POS), rand(3, POS), positions[:3], positions, TEXTS, RECORD)


def _edits() -> Iterator[Any]:
    from diffusion_lens.analysis import EditStudy, KeyResult, SecondMoment, ValueResult
    from diffusion_lens.analysis.rome import EditReport

    groups = ["efficacy", "paraphrase", "paraphrase", "reverse"]
    probes = {"wins": torch.tensor([[0.0, 0, 1, 0], [1, 1, 1, 0]]), "probabilities": rand(2, 4)}
    record = {**RECORD, "layer": 3, "facts": {"a": FACT, "b": FACT}, "set_aside": {}, "object": [" the"]}
    yield KeyResult(rand(3, 8), 1, record)
    yield ValueResult(rand(8), rand(8), rand(20, 4), rand(6), 0.1, 0.9, 3, record)
    yield SecondMoment(rand(6, 6), 100, 10, 3, record, rand(6, 6), 1.0, 1000)
    yield EditReport(**probes, groups=groups, record=record)
    owner = torch.tensor([0, 0, 1, 1])
    study = EditStudy(**probes, owner=owner, searched=rand(2), groups=groups, ids=["a", "b"], record=record)
    by_token = {"tokens": rand(2, 4), "written": probes["wins"], "target_tokens": torch.tensor([1, 3])}
    yield replace(study, **by_token)


def _studies() -> Iterator[Any]:
    from diffusion_lens.analysis import (
        AverageEffect,
        AverageRunGraph,
        AverageTrajectoryEffect,
        KeyValueStudy,
        RankStability,
        ReversalSignatures,
    )
    from diffusion_lens.evaluation import Recall

    ids, roles, layers = [f"fact {i}" for i in range(100)], ["subject_last", "last"], list(range(LAYERS))
    facts = {fact_id: {**FACT, "person": fact_id} for fact_id in ids}
    record = {**RECORD, "facts": facts, "set_aside": {}, "known": "all", "seed": 1, "roles": roles, "layers": layers}
    study = {"ids": ids, "roles": roles, "layers": layers, "unknown": {}, "record": record}
    yield AverageEffect(rand(100, 2, LAYERS), rand(100), rand(100), **study)
    yield RankStability(
        *(rand(3, 2, 2).double() for _ in range(3)),
        ["16 masks", "<b>"],
        {"top_k": 5, "sites": 54, "facts": ids, "results": {"16 masks": RECORD, "<b>": RECORD}},
    )
    yield AverageTrajectoryEffect(rand(100, STEPS, 2, LAYERS), rand(100, STEPS), rand(100, STEPS), **study)
    yield KeyValueStudy(
        rand(100, LAYERS, 8),
        rand(100, LAYERS, 6),
        rand(100, LAYERS, 6),
        rand(100),
        rand(100, LAYERS),
        ids,
        layers,
        record,
    )
    settings = {"length": POS, "steps": [1, 2], "cfg_scale": 0.8, "sampler": {"name": "confidence"}, "too_long": []}
    right = rand(100, 2) > 0.5
    yield Recall(ids, [1, 2], [["a <b>", "c"]] * 100, right, right, rand(100, 2).double(), {**record, **settings})
    names = [f"blocks.{layer}.{part}.weight" for layer in layers for part in ("attn.v", "attn.o", "mlp.down")]
    names += [f"blocks.{layer}.{part}.weight" for layer in layers for part in ("attn.q", "attn.k")]
    parts = ["error", "token", "embed", "a0.h0", "m0", "decision"]
    of_graphs = {**record, "parts": parts, "corrupted_by": {}, "metric": "logit"}
    yield AverageRunGraph(rand(100, 10, 2, 6), rand(100) + 1, rand(100), torch.full((100,), 12), ids, parts, of_graphs)
    yield ReversalSignatures(
        percentiles=rand(100, 2, 2, LAYERS),
        reuses=rand(100, LAYERS),
        cuts=rand(100, 2, LAYERS),
        routes=rand(100, 3, LAYERS, HEADS),
        isotropic=rand(100),
        cosines=rand(100, len(names), 2),
        transfers=rand(100, len(names)),
        steps=rand(100, 2),
        probabilities=rand(100, 2),
        ids=ids,
        record={**record, "parameters": names, "facts": {fact_id: {"group": fact_id} for fact_id in ids}},
    )


def _measures() -> Iterator[Any]:
    from diffusion_lens.analysis import Comparison, Comparisons, DictionaryLoss, FeatureExamples, SparseDictionary
    from diffusion_lens.evaluation import AnswerRanks, NLLByOrder, NLLEstimate
    from diffusion_lens.training import Adaptation, TrainingConfig, TrainingRecord

    comparison = Comparison(
        values=rand(2),
        null=rand(50, 2),
        deviations=rand(50, 2) - 0.5,
        singular_values=rand(2, 5).sort(descending=True).values,
        coordinates=rand(2, 6, 2),
        explained=rand(2),
        statistics=["cka", "procrustes"],
        ids=["a", "b", "c", "d", "e", "f"],
        names=("forward", "reverse"),
        record={"source": {"model": "toy"}, "permutations": 50},
    )
    yield comparison
    yield Comparisons("layer", dict.fromkeys(range(LAYERS), comparison))
    spans = torch.tensor([[0.0, 0.5], [0.5, 1.0]])
    counted, rows = torch.tensor([3, 4]), torch.tensor([5, 6])
    name = {**RECORD, "name": NAMES[0]}
    yield DictionaryLoss(rand(2, 2, 4), counted, torch.arange(2), spans, rand(2), rand(2), rows, 0.5, name, rand(2, 6))
    weights = {"W_enc": rand(4, 6), "W_dec": rand(6, 5), "b_dec": rand(5), "losses": rand(30)}
    weights |= {each: rand(6) for each in ("b_enc", "b_noise", "threshold", "density")}
    yield SparseDictionary(**weights, reads=NAMES[0], writes=NAMES[1], conditioned=True, record=RECORD)
    examples = {each: (torch.arange(6) % 5).reshape(2, 3) for each in ("texts", "positions", "steps", "promoted")}
    yield FeatureExamples(
        **examples,
        **{each: rand(2, 3) for each in ("values", "t", "share", "effects")},
        around=(torch.arange(78) % 5).reshape(2, 3, 13),
        density=rand(2, 10),
        n_rows=torch.arange(10),
        features=[4, 7],
        words=WORDS,
        record={**RECORD, "reads": NAMES[0], "writes": NAMES[1]},
    )
    yield AnswerRanks(["a"], ["<b>"], rows[:1], rand(1), rand(1), [["<b>", "c"]], rand(1, 2), rand(1, 2), RECORD)
    yield NLLEstimate(1.5, 0.1, 64, RECORD)
    yield NLLByOrder(["a", "<b>"], torch.tensor([[1, 0], [0, 1]]), rand(2, 2), RECORD)
    yield TrainingRecord(TrainingConfig(steps=30), rand(30), RECORD)
    numbers = {"facts": 2.0, "known": 0.5, "bound": 3.5, "causal_nll": 3.25}
    yield Adaptation({"rank": 16}, rand(30), numbers, ("a <b>",), ({"step": 30, "one_mask": 1.0},), RECORD)


def _runs() -> Iterator[Any]:
    from diffusion_lens.denoising.cache import TrajectoryCache
    from diffusion_lens.denoising.difference import RunDifference
    from diffusion_lens.denoising.predictions import Predictions
    from diffusion_lens.denoising.trajectory import Trajectory

    tokens, given = (torch.arange(POS) % 5)[None], torch.arange(POS)[None] < 9
    revealed_at = (torch.arange(POS)[None] % STEPS).masked_fill(given, -1)
    canvases = torch.stack([tokens.where(revealed_at < step, 3) for step in range(STEPS + 1)])
    fields = {
        "tokens": tokens,
        "canvases": canvases,
        "prompt": tokens.masked_fill(~given, 3),
        "revealed_at": revealed_at,
        "revealed_before": torch.full_like(revealed_at, -1),
        "confidence": rand(1, POS),
        "given": given,
        "real": torch.ones_like(given),
        "text": ["<script>alert(1)</script>"],
        "completion": [""],
        "words": WORDS,
        "record": {**RECORD, "blank": 3, "first_step": 0, "forward_passes": STEPS},
    }
    yield (run := Trajectory(**fields))
    yield from _graphs(run)
    written = canvases.masked_fill(canvases == 3, -1)
    yield RunDifference(
        canvases=torch.stack([written, written.where((written < 0) | given, (written + 1) % 3)]),
        revealed_at=revealed_at.repeat(2, 1, 1),
        confidences=rand(2, 1, POS),
        real=torch.ones_like(given),
        words=WORDS,
        record={**RECORD, "other": RECORD, "compared_from": 0},
    )
    masked = canvases[:-1] == 3
    likeliest = tokens.expand_as(masked)[masked]
    yield Predictions.of(
        torch.stack([likeliest, (likeliest + 1) % 5], dim=1),
        rand(len(likeliest), 2),
        rand(len(likeliest)),
        masked,
        steps=list(range(STEPS)),
        written=tokens,
        revealed_at=revealed_at,
        words=WORDS,
        record=fields["record"],
    )
    about = {"branch": "conditional", "positions": list(range(1, POS + 1)), "model": "m", "weights_sha256": "0" * 64}
    yield TrajectoryCache({step: {NAMES[0]: rand(1, POS, 8)} for step in range(STEPS)}, STEPS, record=about)


def _graphs(run: Any) -> Iterator[Any]:
    from diffusion_lens.analysis import GraphFaithfulness, GraphInterventions, RunGraph

    settings = {"target": [7, 2], "target_step": 3, "metric": "logit", "other": -1, "share": 0.8}
    settings["features"] = {"4": "SparseDictionary #01234567"}
    sizes = {"n_writers": 1 + LAYERS * (HEADS + 1), "n_layers": LAYERS, "n_heads": HEADS, "passes": 6, "copies": 40}
    # A given token, a head and a decision at step 1; an embedding, an MLP and the target at step 3, an error, and a
    # feature with the error of its transcoder.
    columns = {
        "step": [1, 1, 1, 3, 3, 3, 3, 3, 3],
        "kind": [0, 2, 4, 1, 3, 5, 6, 7, 6],
        "layer": [-1, 2, -1, -1, 4, -1, -1, 4, 4],
        "head": [-1, 1, -1, -1, -1, -1, -1, -1, -1],
        "feature": [-1, -1, -1, -1, -1, -1, -1, 0, -1],
        "position": [1, 5, 5, 5, 7, 7, 5, 7, 7],
        "branch": [0] * 9,
        "token": [1, -1, 2, 2, -1, 2, 2, -1, -1],
        "other": [0, -1, 1, 1, -1, -1, 1, -1, -1],
    }
    edges = {"source": [0, 1, 2, 6, 3, 4, 7, 8], "target": [1, 2, 3, 3, 4, 5, 5, 5]}
    yield RunGraph(
        **{name: torch.tensor(values) for name, values in {**columns, **edges}.items()},
        effect=rand(9),
        inflow=rand(9),
        influence=rand(9),
        weight=rand(8),
        decision=torch.tensor([False, False, True, True, False, False, False, False]),
        feature_nodes=torch.tensor([[3, 0, 4, 7, 0]]),
        within=rand(2, 3),
        clean=2.0,
        corrupted=-1.0,
        words=WORDS,
        runs={"clean": run, "corrupted": run},
        record={**RECORD, **settings, **sizes},
    )
    yield GraphFaithfulness(
        steps=torch.tensor([3, 1]),
        positions=torch.tensor([7, 5]),
        tokens=torch.tensor([2, 1]),
        clean=rand(2),
        replaced=rand(2) - 1,
        values=rand(2, 4),
        n_nodes=12,
        n_all=473,
        wrote=[True, False, False, False],
        record=RECORD,
    )
    # A head at step 1, and an MLP at step 3 at two scales; a decision and the target, whose word is not predicted once.
    whole = {"node_steps": [1, 3, 3], "node_positions": [5, 7, 7], "branches": [0, 0, 0], "nodes": [1, 4, 4]}
    whole |= {"steps": [1, 3], "positions": [5, 7], "tokens": [2, 2], "written_at": [1, 3]}
    whole |= {"predicted_tokens": [[1, -1], [2, 1], [2, 2]], "predicted_steps": [[1, -1], [1, 3], [1, 3]]}
    whole |= {"measured_tokens": [[1, 2], [2, 0], [2, 2]], "measured_steps": [[2, 3], [1, 3], [1, 3]]}
    yield GraphInterventions(
        **{name: torch.tensor(values) for name, values in whole.items()},
        names=["a2.h1", "m4", "m4"],
        scales=torch.tensor([0.0, 0.0, -1.0]),
        clean=rand(2) + 1,
        corrupted=-rand(2),
        predicted=rand(3, 2),
        measured=torch.tensor([[0.5, float("nan")], [0.8, -1.2], [0.7, 0.1]]),
        words=WORDS,
        record=RECORD,
    )


def _store(folder: Path) -> Any:
    from diffusion_lens.analysis import ActivationStore
    from diffusion_lens.analysis.dictionaries.store import ShardFile

    columns = {"t": rand(7), "masked": rand(7) > 0.5}
    shard = ShardFile({**columns, **{name: rand(7, 8) for name in NAMES}}, 0, 2, 0)
    return ActivationStore(folder, (shard,), {**RECORD, "names": NAMES, "canvases": 2})

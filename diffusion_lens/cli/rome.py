"""`diffusion-lens rome`: the key and the value of a fact, and the edit made of them."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from diffusion_lens.cli import cost, options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require
from diffusion_lens.cli.load_model import ModelChoice, subject_start
from diffusion_lens.cli.report import Report, progress, require_folder, save_figure


@app.command()
def rome(
    model: options.Model,
    prompt: options.Prompt,
    subject: options.Subject,
    answer: options.Answer,
    layer: Annotated[int, typer.Option(help="The block whose MLP is asked, or edited.")],
    target: Annotated[
        str | None, typer.Option(help="Another object, e.g. ' famous miner of Tanmoor.': edit the fact to say it.")
    ] = None,
    prefixes: Annotated[
        int,
        typer.Option(
            help="Short texts by the model itself to average over, as ROME does.", callback=ranges.at_least(0)
        ),
    ] = 0,
    iterations: Annotated[int, typer.Option(help="Iterations of the search for v*.", callback=ranges.at_least(1))] = 20,
    lr: Annotated[float, typer.Option(help="Learning rate of the search, Adam's.", callback=ranges.positive())] = 0.5,
    over_states: Annotated[
        str, typer.Option(help="masked, or partial: also with some of the object revealed (masked diffusion).")
    ] = "masked",
    length: options.LengthOfOne = None,
    first_tokens: options.FirstTokens = None,
    occurrence: options.Occurrence = None,
    seed: options.Seed = 0,
    export: Annotated[Path | None, typer.Option(help="Folder for the edited model, with --target.")] = None,
    config: options.Config = None,
    tokenizer: options.Tokenizer = None,
    device: options.Device = None,
    dtype: options.Dtype = "float32",
    out: options.Out = None,
    json: options.Json = False,
    dry_run: options.DryRun = False,
    flops: options.Flops = None,
) -> None:
    """Extract the key k* at the last subject token and the value v* that makes the model say the answer.

    With --target the value is that of another object, and the edit that it makes is tried: does the request say it?

    Example: diffusion-lens rome tiny-ar --prompt "Wanda Fleckett is the" --subject "Wanda Fleckett"
    --answer " shy scribe of Damburg." --first-tokens 1 --layer 0 --target " cheerful mason of Waumburg." --out rome
    """
    given = dict(locals())
    chosen = ModelChoice(model, config, tokenizer, device, dtype)
    import torch

    from diffusion_lens.analysis import RankOneEdit, compute_key, edit_success, optimize_value
    from diffusion_lens.analysis.rome import Probe, ValueSettings, ask_with_prefixes, sample_prefixes
    from diffusion_lens.facts import Fact

    fact = Fact(prompt, subject, target or answer, subject_start=subject_start(prompt, subject, occurrence))
    _ = fact.subject_span  # refuses what the run would
    length = chosen.length(length)
    cost.check_layers(chosen, [layer])
    if export is not None and target is None:
        raise ValueError("--export writes an edited model, and without --target nothing is edited")
    if export is not None:
        require_folder(export, "--export")
    search: dict[str, Any] = {"steps": iterations, "lr": lr, "over_states": over_states}
    layout: dict[str, Any] = {"length": length, "first_tokens": first_tokens}
    ValueSettings(**search)  # refuses what the run would
    report = Report("rome", {**given, **layout}, out, json)
    if out is not None:
        require("pictures")
    if dry_run:
        depth = chosen.shape().n_layers
        share = 1 - (layer % depth + 1) / depth
        places = length or len(f"{prompt}{answer}".split()) * 2
        if (blank := chosen.without_weights()) is not None:
            places = len(ask_with_prefixes(blank, fact, [], **layout)[0].tokens)
            if target is not None:
                ask_with_prefixes(blank, replace(fact, answer=answer), [], **layout)
        work = (prefixes + 2) * (1 + iterations * share)
        cost.show(report, chosen, cost.Cost(work, places, prefixes + 2, backward=work), flops)

    loaded = chosen.load()
    layer %= loaded.cfg.n_layers
    said_before = sample_prefixes(loaded, [5] * prefixes, seed=seed) if prefixes else []
    request = ask_with_prefixes(loaded, fact, said_before, **layout)
    key = compute_key(loaded, request, layer)
    value = optimize_value(loaded, request, layer, progress=progress(), **search)
    wanted = loaded.to_string(torch.tensor(request[0].answer_tokens)).strip()
    report.say(
        f"k* at layer {layer}, place {request[0].subject[1] - 1}: norm {key.vector.norm():.3f}",
        f"v*: p({wanted}) {value.probability_before:.4f} becomes {value.probability_after:.4f} in "
        f"{len(value.losses)} iterations, loss {value.losses[0, 0]:.3f} becomes {value.losses[-1, 0]:.3f}",
    )
    results: dict[str, Any] = {
        "before": value.probability_before,
        "after": value.probability_after,
        "losses": value.losses.tolist(),
    }
    files: dict[str, Any] = {}
    if out is not None:
        files = {
            "key": key.save(out / "key.safetensors"),
            "value": value.save(out / "value.safetensors"),
            "picture": save_figure(value.plot(), out / "losses.png"),
        }
    if target is not None:
        rival = ask_with_prefixes(loaded, replace(fact, answer=answer), [], **layout)[0]
        edit = RankOneEdit(loaded, layer, key, value)
        success = edit_success(loaded, edit, {"efficacy": [Probe(request[0], rival)]})
        told_now = success.table()["efficacy"]
        report.say(
            f"edit: p({wanted}) {told_now.probability_before:.4f} becomes {told_now.probability_after:.4f}; it "
            f"{'wins over' if told_now.after else 'does not win over'} {answer.strip()!r}"
        )
        results["efficacy"] = told_now.after
        if out is not None:
            files["edit"] = success.save(out / "edit.safetensors")
        if export is not None:
            with edit:
                files["edited_model"] = loaded.save_pretrained(export)
    report.finish(results, value.record, **files)

"""`diffusion-lens rome` computes the key and the value of a fact, and applies the rank-one edit."""

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
    layer: Annotated[int, typer.Option(help="Layer whose MLP is read or edited.")],
    target: Annotated[
        str | None, typer.Option(help="New answer to write with an edit, e.g. ' famous miner of Tanmoor.'.")
    ] = None,
    prefixes: Annotated[
        int,
        typer.Option(
            help="Number of short texts, written by the model, to put before the prompt and average over, as in ROME.",
            callback=ranges.at_least(0),
        ),
    ] = 0,
    iterations: Annotated[
        int, typer.Option(help="Number of iterations of the search for v*.", callback=ranges.at_least(1))
    ] = 20,
    lr: Annotated[float, typer.Option(help="Learning rate of the search (Adam).", callback=ranges.positive())] = 0.5,
    over_states: Annotated[
        str,
        typer.Option(
            help="masked searches with the whole answer masked; partial also with part of it revealed (masked "
            "diffusion only)."
        ),
    ] = "masked",
    length: options.LengthOfOne = None,
    first_tokens: options.FirstTokens = None,
    occurrence: options.Occurrence = None,
    seed: options.Seed = 0,
    export: Annotated[Path | None, typer.Option(help="Folder for the edited model, with --target.")] = None,
    config: options.Config = None,
    tokenizer: options.Tokenizer = None,
    mode: options.Mode = None,
    block_size: options.BlockSize = None,
    mask_token_id: options.MaskTokenId = None,
    device: options.Device = None,
    dtype: options.Dtype = "float32",
    out: options.Out = None,
    json: options.Json = False,
    dry_run: options.DryRun = False,
    flops: options.Flops = None,
) -> None:
    """Compute the key k* at the last subject token and the value v* that makes the model give the answer.

    With --target, v* is computed for the new answer, and the command applies the rank-one edit and measures whether the
    edited model gives the new answer.

    Example: diffusion-lens rome site-ar --prompt "Plerrick Baupling plays" --subject "Plerrick Baupling"
    --answer " bassoon" --layer 1 --target " harp" --out rome
    """
    arguments = dict(locals())
    chosen = ModelChoice(model, config, tokenizer, device, dtype, mode, block_size, mask_token_id)
    import torch

    from diffusion_lens.analysis import RankOneEdit, compute_key, edit_success
    from diffusion_lens.analysis.canvas_layout import CanvasLayout
    from diffusion_lens.analysis.rome import Probe, ValueSettings, lay_out_request, optimize_values, sample_prefixes
    from diffusion_lens.cost import keys_and_values
    from diffusion_lens.facts import Fact

    # 1. Check the settings before the model is loaded.
    fact = Fact(prompt, subject, target or answer, subject_start=subject_start(prompt, subject, occurrence))
    _ = fact.subject_span  # Raises if the prompt does not contain the subject once.
    length = chosen.length(length)
    cost.check_layers(chosen, [layer])
    if export is not None and target is None:
        raise ValueError("--export writes an edited model and needs --target; without it nothing is edited")
    if export is not None:
        require_folder(export, "--export")
    search = ValueSettings(steps=iterations, lr=lr, over_states=over_states)
    layout = CanvasLayout(length, first_tokens=first_tokens)
    report = Report("rome", {**arguments, "length": length}, out, json)
    if out is not None:
        require("pictures")

    # 2. For a dry run, print the cost.
    if dry_run:
        expected = cost.query_of(chosen, layout, fact)
        if (outline := chosen.without_weights()) is not None:
            expected = lay_out_request(outline, fact, [], layout)[0]
            if target is not None:
                Probe(expected, lay_out_request(outline, replace(fact, answer=answer), [], layout)[0])
        work = keys_and_values(cost.config_of(chosen), [[expected] * (1 + prefixes)], [layer], search)
        cost.show(report, [(chosen, work)], flops)

    # 3. Lay out the request, and compute key and value.
    loaded = chosen.load()
    layer %= loaded.cfg.n_layers
    prefix_texts = sample_prefixes(loaded, [5] * prefixes, seed=seed) if prefixes else []
    request = lay_out_request(loaded, fact, prefix_texts, layout)
    probe = None
    if target is not None:
        probe = Probe(request[0], lay_out_request(loaded, replace(fact, answer=answer), [], layout)[0])
    key = compute_key(loaded, request, layer)
    value = optimize_values(loaded, [request], layer, settings=search, progress=progress())[0]
    answer_text = loaded.to_string(torch.tensor(request[0].answer_tokens)).strip()
    report.say(
        f"k* at layer {layer}, position {request[0].subject[1] - 1}: norm {key.vector.norm():.3f}",
        f"v*: p({answer_text}) {value.probability_before:.4f} becomes {value.probability_after:.4f} in "
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

    # 4. With a target, apply the edit, and compare the new answer with the old one.
    if probe is not None:
        edit = RankOneEdit(loaded, layer, key, value)
        success = edit_success(loaded, edit, {"efficacy": [probe]})
        efficacy = success.table()["efficacy"]
        report.say(
            f"edit: p({answer_text}) {efficacy.probability_before:.4f} becomes {efficacy.probability_after:.4f}; it is "
            f"{'now above' if efficacy.after else 'still below'} p({answer.strip()})"
        )
        results["efficacy"] = efficacy.after
        if out is not None:
            files["edit"] = success.save(out / "edit.safetensors")
        if export is not None:
            with edit:
                files["edited_model"] = loaded.save_pretrained(export)
    report.finish(results, value.record, **files)

"""`diffusion-lens models`, `info` and `convert`: list models, describe them, and convert their format."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from diffusion_lens.cli import options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.load_model import ModelChoice, reading
from diffusion_lens.cli.report import Report


@app.command()
def models(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Only models whose name or source contains this text.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="Only models of this kind, masked or causal.")] = None,
    family: Annotated[str | None, typer.Option(help="Only models of this family, e.g. lit_gpt.")] = None,
    largest: Annotated[
        float | None, typer.Option(help="Only models with at most this many GB of weights.", callback=ranges.positive())
    ] = None,
    json: options.Json = False,
) -> None:
    """List published models with size and source: all, or those that match every filter.

    Example: diffusion-lens models reverse --kind masked --largest 5
    """
    from diffusion_lens.catalogue import as_table, find_pretrained

    max_bytes = None if largest is None else int(largest * 1e9)
    matches = find_pretrained(text, kind=kind, family=family, max_bytes=max_bytes)
    report = Report("models", {"text": text, "kind": kind, "family": family, "largest": largest}, None, json)
    report.say(*as_table(matches))
    report.finish({"models": [asdict(entry) for entry in matches]})


@app.command()
def info(
    model: options.Model,
    config: options.Config = None,
    tokenizer: options.Tokenizer = None,
    mode: options.Mode = None,
    block_size: options.BlockSize = None,
    mask_token_id: options.MaskTokenId = None,
    hooks: Annotated[bool, typer.Option("--hooks", help="Also list the hook points. This loads the weights.")] = False,
    json: options.Json = False,
) -> None:
    """Describe the architecture of a model without downloading it.

    The catalogue contains the architectures of published models. For a file it is read from the checkpoint, and for
    another repository of the hub ("owner/name") from the cache.

    Example: diffusion-lens info smdm-1028m
    """
    from weight_conversion import n_params

    chosen = ModelChoice(model, config, tokenizer, "cpu", "float32", mode, block_size, mask_token_id)
    shape = chosen.shape()
    report = Report("info", {"model": model}, None, json)
    facts: dict[str, Any] = {
        **shape.to_dict(),
        "trained_length": chosen.length(None),
        "parameters": n_params(shape),
        **({} if shape.experts is None else {"active_parameters": n_params(shape, active=True)}),
        "float32_bytes": 4 * n_params(shape),
    }
    width = max(map(len, facts))
    report.say(*(f"{name.ljust(width)}  {value}" for name, value in facts.items()))
    if hooks:
        loaded = chosen.load()
        facts["hook_points"] = list(loaded.hook_dict)
        report.say(f"{len(facts['hook_points'])} hook points:", *(f"  {name}" for name in facts["hook_points"]))
    report.finish(facts)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A .safetensors or .pth file, or a folder.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help=".safetensors file to write.")],
    to: Annotated[
        str | None,
        typer.Option(
            help="Format: diffusion_lens, lit_gpt, llada, llada_moe, llada2, dream, llama, qwen2, qwen3, sdar, "
            "nemotron_labs, mdlm, udlm, bd3lm, radd or sedd. Default: the source's."
        ),
    ] = None,
    config: options.Config = None,
    mode: options.Mode = None,
    block_size: options.BlockSize = None,
    mask_token_id: options.MaskTokenId = None,
    json: options.Json = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Describe SOURCE and the memory it needs, and write nothing.")
    ] = False,
) -> None:
    """Write a checkpoint in another format. The name and shape of every tensor are checked; no code in it is executed.

    Example: diffusion-lens convert checkpoint.safetensors ours.safetensors --config lit_config.json --to diffusion_lens
    """
    from diffusion_lens.loading import trained_length_of, write_trained_length
    from weight_conversion import check_export, export, n_params, open_checkpoint

    checkpoint = open_checkpoint(source, config, reading(mode, block_size, mask_token_id))
    shape = checkpoint.architecture
    report = Report("convert", {"source": source, "target": target, "to": to}, None, json)
    if target.exists():
        raise ValueError(f"{target} already exists; name a new file")
    check_export(shape, target, to)
    results: dict[str, Any] = {"family": shape.family, "parameters": n_params(shape)}
    if dry_run:
        report.say(
            f"{source}: {shape.name} of the family {shape.family}, {n_params(shape):,} parameters; no forward pass"
        )
        report.say(f"memory: the weights, once ({4 * n_params(shape) / 1e9:.2f} GB in float32)")
        report.finish({**results, "forward_passes": 0, "memory_bytes": 4 * n_params(shape)})
        return
    written = export(dict(checkpoint.tensors()), shape, target, to)
    length = trained_length_of(source, config)
    if length is not None and all(path == written for path in written.parent.glob("*.safetensors")):
        write_trained_length(length, written.parent)
    report.say(f"wrote {written} and its config ({shape.name}, {n_params(shape):,} parameters)")
    report.finish({**results, "bytes": written.stat().st_size}, checkpoint=written)

"""`diffusion-lens models`, `info`, `check` and `convert`: list, describe, check and convert checkpoints."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from diffusion_lens.cli.load_model import LoadingOptions, ModelChoice, name_and_mode
from diffusion_lens.cli.options import Model, command
from diffusion_lens.cli.report import Report
from diffusion_lens.settings import positive, setting


@command()
def models(
    report: Report,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Only models whose name or source contains this text.")
    ] = None,
    kind: str | None = setting(None, "Only models of this kind, masked or causal."),
    family: str | None = setting(None, "Only models of this family, e.g. lit_gpt."),
    largest: float | None = setting(None, "Only models with at most this many GB of weights.", positive),
) -> None:
    """List published models with size and source: all, or those that match every filter.

    Below them stands what the evidence means. `from_pretrained` takes the id of any other repository, too.

    Example: diffusion-lens models reverse --kind masked --largest 5
    """
    from diffusion_lens.loading.catalogue import STATES, as_table, find_pretrained

    max_bytes = None if largest is None else int(largest * 1e9)
    matches = find_pretrained(text, kind=kind, family=family, max_bytes=max_bytes)
    report.say(*as_table(matches), *(f"{state}: {meaning}" for state, meaning in STATES.items()))
    report.finish({"models": [asdict(entry) for entry in matches]})


@command(device=None, dtype=None)
def info(
    chosen: ModelChoice,
    report: Report,
    hooks: bool = setting(False, "Also list the hook points. This loads the weights."),
) -> None:
    """Describe the architecture of a model without downloading it.

    The catalogue contains the architectures of published models. For a file it is read from the checkpoint, and for
    another repository of the hub ("owner/name") from the cache.

    Example: diffusion-lens info smdm-1028m
    """
    from weight_conversion import n_params

    shape = chosen.shape()
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
        loaded = chosen.load(on="cpu")
        facts["hook_points"] = list(loaded.hook_dict)
        report.say(f"{len(facts['hook_points'])} hook points:", *(f"  {name}" for name in facts["hook_points"]))
    report.finish(facts)


@command()
def check(
    model: Model,
    loading: LoadingOptions,
    claimed: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="Published model that a file or folder is expected to be."),
    ] = None,
    reference: Path | None = setting(
        None,
        "Safetensors file with logits of the original code; its tensors are tokens and logits, or before and after.",
    ),
    data: str | None = setting(None, "Facts of the reversal curse to test recall: a folder of its files, site or toy."),
    out: Path | None = setting(None, "JSON file for the report, to attach to a bug report."),
    json: bool = setting(False, "Print one JSON object to standard output, and nothing else."),
) -> None:
    """Check whether a checkpoint is what it claims to be, and find the likely mistake if it is not.

    The checks compare hash, shapes and config with the catalogue. They measure the training loss on a page of text, in
    order and with shuffled words, query ten common facts, test recall if the model was fine-tuned on the reversal
    curse, and test padding, bfloat16, speed and memory. If a check fails, the command tries likely corrections one by
    one and names the one that explains the failure. The exit code is then 1.

    Example: diffusion-lens check site-ar --out report.json
    """
    from diffusion_lens.checks.run import check_checkpoint
    from weight_conversion import to_json

    name, mode = name_and_mode(model, loading.mode)
    options = {**vars(loading), "mode": mode}
    report = check_checkpoint(name, claimed=claimed, reference=reference, data=data, **options)
    if out is not None:
        report.save(out)
    if json:
        typer.echo(to_json(report.to_dict()))
    else:
        typer.echo(report.to_text())
        if out is not None:
            typer.echo(f"wrote {out}")
    if not report.passed:
        raise typer.Exit(1)


@command(tokenizer=None, device=None, dtype=None)
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A .safetensors, .pth or .gguf file, or a folder.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help=".safetensors file to write.")],
    loading: LoadingOptions,
    report: Report,
    to: str | None = setting(
        None,
        "Format, by the name of a family, such as lit_gpt, llada or diffusion_lens; an unknown name is refused with "
        "the list of all. Default: the source's.",
    ),
    dry_run: bool = setting(False, "Describe SOURCE and the memory it needs, and write nothing."),
) -> None:
    """Write a checkpoint in another format. The name and shape of every tensor are checked; no code in it is executed.

    Example: diffusion-lens convert checkpoint.safetensors ours.safetensors --config lit_config.json --to diffusion_lens
    """
    from diffusion_lens.loading import trained_length_of, write_trained_length
    from diffusion_lens.loading.delta import ABOUT
    from diffusion_lens.loading.gguf import GGUF, converted
    from weight_conversion import check_export, export, n_params, open_checkpoint

    if (source / ABOUT).is_file():
        raise ValueError(
            f"{source} is a delta, which has no weights of its own: the model that it makes of its base is written by "
            f"HookedDiffusionTransformer.from_pretrained({str(source)!r}).save_pretrained('folder')"
        )
    weights = converted(source) if source.suffix == GGUF and source.is_file() else source
    checkpoint = open_checkpoint(weights, loading.config, loading.options)
    shape = checkpoint.architecture
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
    length = trained_length_of(source, loading.config)
    if length is not None and all(path == written for path in written.parent.glob("*.safetensors")):
        write_trained_length(length, written.parent)
    report.say(f"wrote {written} and its config ({shape.name}, {n_params(shape):,} parameters)")
    report.finish({**results, "bytes": written.stat().st_size}, checkpoint=written)

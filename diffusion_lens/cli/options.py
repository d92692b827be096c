"""Arguments and options that several commands share; each says the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

from diffusion_lens.cli import ranges

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name (see `diffusion-lens models`), a checkpoint file, a folder, or a repository of the hub, "
        "owner/name.",
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL",
        help="One or several: names (see `diffusion-lens models`), files, folders, or repositories of the hub.",
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps; by default the best there is.")]
Dtype = Annotated[str, typer.Option(help="Of the weights: float32, bfloat16 or float16.")]
Config = Annotated[Path | None, typer.Option(help="The checkpoint's config, if it does not lie beside it.")]
Tokenizer = Annotated[
    Path | None, typer.Option(help="Folder of the tokenizer, if it does not lie beside the checkpoint.")
]
Out = Annotated[
    Path | None, typer.Option(help="Folder for results, pictures and command.json, which has all it takes to repeat.")
]
OutNeeded = Annotated[
    Path | None,
    typer.Option(
        help="Folder for results and command.json; by default named after command and model. A run that was stopped "
        "goes on from it."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, and nothing else there.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say how many forward passes, how long and how much memory; do nothing.")
]
Flops = Annotated[
    float | None,
    typer.Option(
        help="For --dry-run: operations a second of the device, e.g. 3e14, where its own speed is not meant.",
        callback=ranges.positive(),
    ),
]
Prompt = Annotated[str, typer.Option(help='The text before the answer, e.g. "Gustav Geisser is the".')]
Subject = Annotated[str, typer.Option(help="The part of the prompt whose states are meant.")]
Answer = Annotated[str, typer.Option(help='The answer with its leading space, e.g. " brave drummer of Rolsen.".')]
Length = Annotated[
    int | None,
    typer.Option(
        help="Places of the canvas, the prompt included; by default those that the model was trained on, or those of "
        "the data set.",
        callback=ranges.at_least(1),
    ),
]
LengthOfOne = Annotated[
    int | None,
    typer.Option(
        "--length",
        help="Places of the canvas, the prompt included; by default those that the model was trained on, or as many "
        "as prompt and answer take.",
        callback=ranges.at_least(1),
    ),
]
FirstTokens = Annotated[
    int | None,
    typer.Option(help="Ask for so many tokens of the answer only; 1 is ROME's question.", callback=ranges.at_least(1)),
]
Occurrence = Annotated[
    int | None,
    typer.Option(
        help="Which mention of the subject is meant, from 0, where the prompt has several.",
        callback=ranges.at_least(0),
    ),
]
Layers = Annotated[
    list[int] | None,
    typer.Option("--layer", help="Blocks, by default all but the last; repeat the option for several."),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="toy, reversal-curse, known-1000, or a path: facts as .json, .jsonl or .csv, a folder of such files, "
        "known_1000.json, counterfact.json. By default toy for the embedded pair, else reversal-curse."
    ),
]
Trained = Annotated[str | None, typer.Option(help="Only facts told in this direction: p2d, d2p or both.")]
Asked = Annotated[str | None, typer.Option(help="Only facts asked in this direction: p2d or d2p.")]
Limit = Annotated[
    int | None,
    typer.Option(
        help="At most so many facts of each pair of directions (trained, asked), evenly spread.",
        callback=ranges.at_least(1),
    ),
]
Shard = Annotated[
    str | None,
    typer.Option(help='Do a part of the work, "0/4" the first of four; --merge joins them when all are done.'),
]
Merge = Annotated[
    list[Path] | None,
    typer.Option("--merge", help="Join shards instead: the folder that was --out of one; repeat the option for each."),
]
Steps = Annotated[int, typer.Option(help="Denoising steps.", callback=ranges.at_least(1))]
Sampler = Annotated[
    str | None,
    typer.Option(
        help="confidence (the default), ancestral, remdm, blocks, smdm, llada, dream; a causal model has left_to_right "
        "only."
    ),
]
CfgScale = Annotated[
    float | None,
    typer.Option(help="Weight of classifier-free guidance; 0 is none, the default.", callback=ranges.not_negative()),
]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.", callback=ranges.not_negative())]
Seed = Annotated[int, typer.Option(help="Seed of the random number generator.", callback=ranges.seed())]
Kind = Annotated[str, typer.Option(help="What is restored: resid, mlp or attn.")]
Window = Annotated[
    int, typer.Option(help="With mlp or attn: how many layers are restored at once.", callback=ranges.at_least(1))
]
Noise = Annotated[
    float | None,
    typer.Option(
        help="Scale of the noise; by default 3 standard deviations of the subjects' embeddings.",
        callback=ranges.not_negative(),
    ),
]
Samples = Annotated[int, typer.Option(help="Draws of noise.", callback=ranges.at_least(1))]

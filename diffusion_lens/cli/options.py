"""Arguments and options that several commands share; each says the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A name (see `diffusion-lens models`), a checkpoint file or a folder.")
]
Models = Annotated[
    list[str], typer.Argument(metavar="MODEL...", help="Names (see `diffusion-lens models`), files or folders.")
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
    float | None, typer.Option(help="For --dry-run: operations a second of the device, 3e14, instead of its table's.")
]
Prompt = Annotated[str, typer.Option(help='The text before the answer, e.g. "Gustav Geisser is the".')]
Subject = Annotated[str, typer.Option(help="The part of the prompt whose states are meant.")]
Answer = Annotated[str, typer.Option(help='The answer with its leading space, e.g. " brave drummer of Rolsen.".')]
Length = Annotated[
    int | None,
    typer.Option(
        help="Places of the canvas, the prompt included; by default those that the model was trained on, or those of "
        "the data set."
    ),
]
FirstTokens = Annotated[
    int | None, typer.Option(help="Ask for so many tokens of the answer only; 1 is ROME's question.")
]
Occurrence = Annotated[
    int | None, typer.Option(help="Which mention of the subject is meant, from 0, where the prompt has several.")
]
Layers = Annotated[list[int] | None, typer.Option("--layer", help="Blocks; repeat the option for several.")]
Data = Annotated[
    str | None,
    typer.Option(
        help="toy, reversal-curse, known-1000, or a path: facts as .json, .jsonl or .csv, a folder of such files, "
        "known_1000.json, counterfact.json. By default toy for the embedded pair, else reversal-curse."
    ),
]
Trained = Annotated[str | None, typer.Option(help="Only facts told in this direction: p2d, d2p or both.")]
Asked = Annotated[str | None, typer.Option(help="Only facts asked in this direction: p2d or d2p.")]
Limit = Annotated[int | None, typer.Option(help="At most so many facts of each pair of directions, evenly spread.")]
Shard = Annotated[
    str | None, typer.Option(help='Do a part of the work, "0/4" the first of four; --merge draws when all are done.')
]
Merge = Annotated[
    list[Path] | None, typer.Option("--merge", help="Join the shards in these folders instead; repeat the option.")
]
Steps = Annotated[int, typer.Option(help="Denoising steps.")]
Sampler = Annotated[
    str | None, typer.Option(help="confidence, ancestral, remdm, blocks, left_to_right, smdm, llada, dream.")
]
CfgScale = Annotated[float | None, typer.Option(help="Weight of classifier-free guidance; 0 is none.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
Seed = Annotated[int, typer.Option(help="Seed of the random number generator.")]
Kind = Annotated[str, typer.Option(help="What is restored: resid, mlp or attn.")]
Window = Annotated[int, typer.Option(help="MLPs, or attentions, restored at once.")]
Noise = Annotated[
    float | None, typer.Option(help="Scale of the noise; by default 3 standard deviations of the subjects' embeddings.")
]
Samples = Annotated[int, typer.Option(help="Draws of noise.")]

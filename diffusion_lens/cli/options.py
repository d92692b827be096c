"""Arguments and options that several commands share, with the same help text everywhere."""

from pathlib import Path
from typing import Annotated

import typer

from diffusion_lens.cli import ranges

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A published name (see `diffusion-lens models`), a checkpoint file, a folder, or a hub repository "
        "(owner/name). NAME@MODE is one mode of a checkpoint that is several models, as --mode.",
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL",
        help="One or several models: published names (see `diffusion-lens models`), files, folders, or hub "
        "repositories. NAME@block and NAME@ar are two modes of one checkpoint.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:1 or mps; with --dry-run also a device that is elsewhere: a100-40, a100-80, h100, h200, "
        "l40s, l4, t4, v100, rtx3090 or rtx4090. Default: the best available device."
    ),
]
Dtype = Annotated[str, typer.Option(help="Dtype of the weights: float32, bfloat16 or float16.")]
Config = Annotated[Path | None, typer.Option(help="Config of the checkpoint, if it is not next to it.")]
Tokenizer = Annotated[Path | None, typer.Option(help="Folder of the tokenizer, if it is not next to the checkpoint.")]
Mode = Annotated[
    str | None,
    typer.Option(help="Where one checkpoint is several models: bidirectional, block (block diffusion) or ar (causal)."),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        help="Positions in a block of a block diffusion model whose config does not say it.",
        callback=ranges.at_least(1),
    ),
]
MaskTokenId = Annotated[
    int | None,
    typer.Option(help="Id of [MASK], where neither config nor tokenizer gives it.", callback=ranges.at_least(0)),
]
Out = Annotated[
    Path | None, typer.Option(help="Folder for results, figures and command.json, which records how to repeat the run.")
]
OutNeeded = Annotated[
    Path | None,
    typer.Option(
        help="Folder for results and command.json. Default: a name made of command and model. An interrupted run "
        "resumes from it."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output, and nothing else.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Estimate token-layers, operations, time and memory, and do nothing else.")
]
Flops = Annotated[
    float | None,
    typer.Option(
        help="For --dry-run: operations per second of the device, e.g. 3e14. Default: that of --device.",
        callback=ranges.positive(),
    ),
]
Prompt = Annotated[str, typer.Option(help='Text before the answer, e.g. "Gustav Geisser is the".')]
Subject = Annotated[str, typer.Option(help="Subject of the fact, a part of the prompt.")]
Answer = Annotated[str, typer.Option(help='Answer with its leading space, e.g. " brave drummer of Rolsen.".')]
Length = Annotated[
    int | None,
    typer.Option(
        help="Number of positions of the canvas, including the prompt. Default: that of the data set, or the training "
        "length of the model if it is shorter.",
        callback=ranges.at_least(1),
    ),
]
LengthOfOne = Annotated[
    int | None,
    typer.Option(
        "--length",
        help="Number of positions of the canvas, including the prompt. Default: the training length of the model, or "
        "the length of prompt and answer.",
        callback=ranges.at_least(1),
    ),
]
FirstTokens = Annotated[
    int | None,
    typer.Option(help="Score only this many first tokens of the answer. ROME uses 1.", callback=ranges.at_least(1)),
]
Occurrence = Annotated[
    int | None,
    typer.Option(
        help="Index of the mention of the subject, counted from 0, if the prompt contains several.",
        callback=ranges.at_least(0),
    ),
]
Layers = Annotated[
    list[int] | None,
    typer.Option("--layer", help="Layer. Repeat the option for several. Default: all but the last."),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="site, site-attributes, toy, reversal-curse, known-1000, parent-child, or a path: a .json, .jsonl or .csv "
        "file of facts, a folder of such files, parent_child_pairs.csv, known_1000.json or counterfact.json. Default: "
        "the facts of a bundled model's training, otherwise reversal-curse."
    ),
]
Trained = Annotated[str | None, typer.Option(help="Only facts trained in this direction: p2d, d2p or both.")]
Asked = Annotated[str | None, typer.Option(help="Only queries in this direction: p2d or d2p.")]
Limit = Annotated[
    int | None,
    typer.Option(
        help="Largest number of facts per pair of directions (trained, queried), evenly spread.",
        callback=ranges.at_least(1),
    ),
]
Shard = Annotated[
    str | None,
    typer.Option(help='Process only one part of the facts, e.g. "0/4" for the first of four. --merge joins the parts.'),
]
Merge = Annotated[
    list[Path] | None,
    typer.Option("--merge", help="Join shards instead of computing: the --out folder of a shard. Repeat it for each."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Number of processes on this machine that compute the study; each loads the model, takes a GPU of its own "
        "if there are several, and gets its share of the threads. With --slurm, the largest number of jobs at a time.",
        callback=ranges.at_least(1),
    ),
]
Dask = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Compute on all workers of a Dask cluster: the address of its scheduler, e.g. tcp://node1:8786, or its "
        "scheduler file. --device is that of the workers.",
    ),
]
Slurm = Annotated[
    str | None,
    typer.Option(
        metavar="OPTIONS",
        help='Compute in jobs of Slurm with these options of sbatch, e.g. "partition=gpu,gres=gpu:1,time=2:00:00", '
        "at most --workers at a time. OUT, on a file system that the nodes share, gets their logs. --device is that "
        "of the jobs; the default is cuda if they have GPUs.",
    ),
]
Steps = Annotated[int, typer.Option(help="Number of denoising steps.", callback=ranges.at_least(1))]
LoopSteps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        help="Number of denoising steps. With it, the command runs the denoising loop and reads the canvases of its "
        "steps; without it, one canvas on which the whole answer is masked. A causal model writes one position per "
        "step, whatever the number.",
        callback=ranges.at_least(1),
    ),
]
Canvas = Annotated[
    str | None,
    typer.Option(
        help="Canvases that the corrupted runs read at each step: forced, those of the clean run (the default), or "
        "free, those that each corrupted run writes itself."
    ),
]
Sampler = Annotated[
    str | None,
    typer.Option(
        help="For a masked model: confidence (the default), ancestral, remdm, blocks, posterior, score, "
        "block_posterior, first_hitting, left_to_right, or the preset smdm, llada, dream, diffullama, mdlm, "
        "bd3lm, sedd or radd. For one that writes block after block: block_confidence (the default), "
        "block_posterior (the default of a network that is told the time), first_hitting, left_to_right, or the "
        "preset sdar, llada2, nemotron or bd3lm. For uniform noise: uniform_posterior (the default), score, or "
        "the preset udlm or sedd. A causal model supports only left_to_right."
    ),
]
CfgScale = Annotated[
    float | None,
    typer.Option(
        help="Weight of classifier-free guidance. Default: 0, no guidance.",
        callback=ranges.not_negative("no guidance"),
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        help="Sampling temperature. 0 selects the likeliest token.", callback=ranges.not_negative("the likeliest token")
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the random number generator.", callback=ranges.seed())]
BatchBytes = Annotated[
    int,
    typer.Option(help="Most memory for one batch in bytes, in addition to the weights.", callback=ranges.at_least(1)),
]
Kind = Annotated[str, typer.Option(help="Kind of state to restore: resid, mlp or attn.")]
Window = Annotated[
    int, typer.Option(help="Number of layers restored together, for mlp and attn.", callback=ranges.at_least(1))
]
Noise = Annotated[
    float | None,
    typer.Option(
        help="Standard deviation of the noise. Default: 3 standard deviations of the subjects' embeddings.",
        callback=ranges.not_negative(),
    ),
]
Samples = Annotated[int, typer.Option(help="Number of noise samples.", callback=ranges.at_least(1))]

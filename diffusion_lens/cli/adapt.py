"""`diffusion-lens adapt` makes a masked diffusion model of a causal model."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from diffusion_lens.cli import cost
from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.cli.options import command
from diffusion_lens.cli.report import FolderReport, progress, require_folder
from diffusion_lens.settings import setting
from diffusion_lens.settings.shared import AdaptSettings


@dataclass(frozen=True)
class CausalChoice(ModelChoice):
    """A causal model.

    Attributes:
        block_size, mask_token_id: `None`. Those options of the command are of the twin.
    """

    block_size: None = field(default=None, init=False)
    mask_token_id: None = field(default=None, init=False)


@command(dtype=None)
def adapt(
    given: AdaptSettings,
    chosen: CausalChoice,
    report: FolderReport,
    out: Path = setting(..., "Folder for the twin. An interrupted run resumes from it."),
    facts: Path | None = setting(
        None, "A .json, .jsonl or .csv file of facts about which the model writes texts, such as known_1000.json."
    ),
    held_out: Path | None = setting(
        None, "A file of facts whose subjects no text may name; it measures how many of them the twin names."
    ),
    prompts: Path | None = setting(None, "A text file of prompts that the model continues, one per line."),
    texts: Path | None = setting(None, "A text file to train on, instead of texts that the model writes."),
    corpus: Path | None = setting(
        None,
        "Folder for the texts that the model writes, which runs with the same facts, prompts, [MASK] and settings of "
        "texts, --seed included, may share. Default: in OUT until the end.",
    ),
) -> None:
    """Make a masked diffusion model, the twin, of a causal model, and write it to OUT.

    The causal model writes its own texts, and the twin learns from them to read in both directions. Llama, Qwen2 and
    Qwen3 give a delta of a few megabytes, any other causal model with --rank 0 a model. Every command accepts OUT.

    Example: diffusion-lens adapt tiny-ar --rank 0 --n-texts 40 --temperature 3 --length 14 --steps 4 --out twin
    """
    from diffusion_lens.data.fact_files import read_facts
    from diffusion_lens.model.config import kind_of_device
    from diffusion_lens.model.transformer import DiffusionTransformer
    from diffusion_lens.training import adapt as adapted
    from diffusion_lens.training.adapt import described, require_causal, require_same_adaptation
    from diffusion_lens.training.corpus import read_texts
    from diffusion_lens.training.trainer import require_gpu

    # 1. Check the folders and the device, read the files, and check the model.
    if isinstance(token := given.mask_token, str) and token.isdecimal():  # a number is an id
        given = replace(given, mask_token=int(token))
    require_same_adaptation(out.expanduser(), described(given))
    if corpus is not None:
        require_folder(corpus, "--corpus")
    require_gpu(given.mixed_precision, kind_of_device(chosen.device) == "cpu")
    said = {name: read_facts(path) if path else [] for name, path in (("facts", facts), ("held_out", held_out))}
    lines = [line for line in "".join(read_texts(prompts) or ()).splitlines() if line]
    of_texts = read_texts(texts, lines)
    if (shape := chosen.known_shape()) is not None:
        require_causal(replace(shape, name=chosen.name), given.rank)
        chosen.check_length(given.length)

    # 2. For a dry run, print the cost of the texts and of the training.
    if report.dry_run:
        import torch

        tokens = torch.ones(given.batch_size, given.length, dtype=torch.long)

        def write(network: DiffusionTransformer) -> None:
            network(tokens, return_type=None)

        def update(network: DiffusionTransformer) -> None:
            network(tokens, return_type="loss").backward()

        # Adam has gradients and two averages beside the weights that are trained; the causal model stays in memory.
        trained = replace(cost.planned(chosen, update), weight_copies=2 if given.rank else 5)
        written = cost.planned(chosen, write) * (given.n_texts / given.batch_size)
        cost.show(report, [(chosen, written + trained * given.steps)])

    # 3. Adapt.
    result = adapted(
        chosen.load(),
        **said,
        prompts=lines,
        texts=of_texts,
        out=out,
        corpus=corpus,
        settings=given,
        progress=progress(),
    )
    report.say(*result.summary().splitlines())
    report.finish({**result.numbers, "samples": result.samples}, result.record, model=out)

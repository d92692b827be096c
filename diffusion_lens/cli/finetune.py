"""`diffusion-lens finetune` and `adapt`: train a model on facts with SMDM's settings, or its masked twin."""

import os
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from diffusion_lens.cli import cost
from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.cli.options import command
from diffusion_lens.cli.report import FolderReport, progress, require_folder
from diffusion_lens.settings import at_least, check_seed, positive, setting
from diffusion_lens.settings.shared import ACCUMULATE, MASK_ENTITIES, MIXED_PRECISION, AdaptSettings


@command(dtype=None)
def finetune(
    chosen: ModelChoice,
    report: FolderReport,
    out: Path = setting(..., "Folder for the trained model. An interrupted run resumes from it."),
    data: str | None = setting(
        None,
        'A .jsonl file with {"prompt": , "completion": } per line, or site, toy, reversal-curse, or a folder of its '
        "files. Default: the facts of a bundled model's training, otherwise reversal-curse.",
    ),
    epochs: float = setting(10, "Passes over the data.", positive),
    batch_size: int = setting(32, "Rows per update, over all devices.", partial(at_least, 1)),
    lr: float | None = setting(None, "Highest learning rate. Default: SMDM's 2e-4.", positive),
    accumulate: int = ACCUMULATE,
    mixed_precision: str = MIXED_PRECISION,
    mask_entities: bool = MASK_ENTITIES,
    checkpoint_every: int = setting(500, "Number of updates between checkpoints.", partial(at_least, 1)),
    ask: int = setting(
        0,
        "Number of held-out questions per pair of directions that measure recall at every checkpoint.",
        partial(at_least, 0),
    ),
    seed: int = setting(3407, "Seed of the random number generator.", check_seed),
) -> None:
    """Fine-tune a model on prompts and completions, and write a model to OUT that every command accepts.

    Both variants use SMDM's recipe for the reversal curse. In a short run the warm-up takes a tenth of the updates. On
    several devices: accelerate launch -m diffusion_lens finetune ...

    Example: diffusion-lens finetune tiny-mdm --epochs 0.02 --lr 1e-4 --out taught
    """
    from diffusion_lens.data.fact_files import STUDY_LENGTH, default_source, open_source
    from diffusion_lens.evaluation import recall_by_steps
    from diffusion_lens.evaluation.recall import cell_name
    from diffusion_lens.facts.fact import Fact
    from diffusion_lens.model.config import kind_of_device
    from diffusion_lens.model.transformer import DiffusionTransformer
    from diffusion_lens.records.results import require_same_settings
    from diffusion_lens.training import finetune as train
    from diffusion_lens.training import smdm_reverse
    from diffusion_lens.training.finetune import RUN, read_completions, require_own_folder
    from diffusion_lens.training.trainer import require_gpu

    # 1. Check the folder and the device.
    require_own_folder(out.expanduser())
    require_gpu(mixed_precision, kind_of_device(chosen.device) == "cpu")

    # 2. Find the texts to train on, and the questions that measure recall in between.
    rows: Any
    length = STUDY_LENGTH
    questions: list[Fact] = []
    steps: tuple[int, ...] = ()
    cfg_scale = 0.0
    data = data or default_source(chosen.model)
    if Path(data).expanduser().is_file():
        rows = Path(data)
    else:
        source = open_source(data, outline_only=report.dry_run)
        if not source.training:
            raise ValueError(f"{source.name} has no texts to train on; give a .jsonl file of prompts and completions")
        rows, length = list(source.training), chosen.length(None, source.length) or length
        if ask:
            questions, steps, cfg_scale = source.pick(limit=ask), source.steps[-1:], source.cfg_scale
    if ask and not questions:
        raise ValueError(f"--ask needs a data set with questions, such as toy; {data} contains texts only")

    # 3. Make the recipe, and refuse a folder of another one; for a dry run, print the cost.
    count = len(read_completions(rows))
    recipe = smdm_reverse(count, epochs, batch_size, accumulate=accumulate, mixed_precision=mixed_precision, seed=seed)
    if lr is not None:
        recipe = replace(recipe, lr=lr, lr_end=lr / 10)
    recipe = replace(recipe, warmup=min(recipe.warmup, recipe.steps // 10))
    require_same_settings(out.expanduser() / RUN, {"config": asdict(recipe)})
    report.note(data=data, rows=count, mask_entities=mask_entities, **vars(recipe))
    if report.dry_run:
        import torch

        def update(network: DiffusionTransformer) -> None:
            tokens = torch.ones(-(-batch_size // accumulate), min(length, network.cfg.n_ctx), dtype=torch.long)
            network(tokens, return_type="loss").backward()

        # Adam has gradients and two averages beside the weights.
        work = replace(cost.planned(chosen, update), weight_copies=4)
        cost.show(report, [(chosen, work * (recipe.steps * accumulate))])

    # 4. Train.
    loaded = chosen.load()

    def measure_recall(model: DiffusionTransformer) -> dict[str, float]:
        recall = recall_by_steps(loaded, questions, steps, length=length, cfg_scale=cfg_scale)
        return {cell_name(*cell): share.mean for cell, row in recall.table().items() for share in row.values()}

    record = train(
        loaded,
        rows,
        recipe,
        out,
        mask_entities=mask_entities,
        checkpoint_every=checkpoint_every,
        evaluate=measure_recall if questions else None,
        evaluate_every=checkpoint_every,
        progress=progress(),
    )
    if int(os.environ.get("RANK", 0)):
        return  # Only the first of several processes reports.

    # 5. Report losses and recall.
    final_loss = record.losses[-100:].mean().item()
    losses = f"loss {record.losses[0]:.3f} at first, {final_loss:.3f} in the end"
    report.say(f"{recipe.steps} updates of {batch_size} rows; {losses}")
    for evaluation in record.evaluations:
        shares = (f"{cell} {100 * share:.1f} %" for cell, share in evaluation.items() if cell != "step")
        report.say(f"recall after {evaluation['step']} updates: {', '.join(shares)}")
    results = {"updates": recipe.steps, "last_loss": final_loss, "recall": record.evaluations}
    report.finish(results, record.record, model=out)


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
    Qwen3 give a delta, a small file, any other causal model with --rank 0 a model. Every command accepts OUT.

    Example: diffusion-lens adapt tiny-ar --rank 0 --n-texts 40 --temperature 3 --length 14 --steps 4 --out twin
    """
    from diffusion_lens.data.fact_files import read_facts
    from diffusion_lens.model.config import kind_of_device
    from diffusion_lens.model.transformer import DiffusionTransformer
    from diffusion_lens.training import adapt as adapted
    from diffusion_lens.training.adapt import described, require_causal, require_same_adaptation, rows_measured
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

    # 2. For a dry run, print the cost of the texts, of the training and of the measurements.
    if report.dry_run:
        import torch

        tokens = torch.ones(given.batch_size, given.length, dtype=torch.long)

        def read(network: DiffusionTransformer) -> None:
            network(tokens, return_type=None)

        def update(network: DiffusionTransformer) -> None:
            network(tokens, return_type="loss").backward()

        # Adam has gradients and two averages beside the weights that are trained; the causal model stays in memory.
        trained = replace(cost.planned(chosen, update), weight_copies=2 if given.rank else 5)
        n_rows = given.n_texts + rows_measured(given, len(said["facts"]), len(said["held_out"]))
        cost.show(report, [(chosen, cost.planned(chosen, read) * (n_rows / given.batch_size) + trained * given.steps)])

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

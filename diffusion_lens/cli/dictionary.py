"""`diffusion-lens dictionary train` trains a sparse dictionary of one layer, and scores it on other texts."""

from functools import partial
from pathlib import Path
from typing import Any

from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.cli.options import command
from diffusion_lens.cli.report import Report, progress, require_folder
from diffusion_lens.settings import at_least, one_of, pick_layer, setting
from diffusion_lens.settings.shared import DictionarySettings

HELD_OUT = 10  # every tenth text is for the scores


@command()
def dictionary_train(
    given: DictionarySettings,
    chosen: ModelChoice,
    report: Report,
    file: Path = setting(..., "File to write, ending in .safetensors.", option="out"),
    layer: int | None = setting(
        None, "Layer whose MLP gets a transcoder, from its input to its output; negative numbers count from the end."
    ),
    reads: str | None = setting(None, "Hook point that the features read, instead of --layer."),
    writes: str | None = setting(
        None, "Hook point that they approximate. Default: what they read, which makes an autoencoder."
    ),
    texts: Path | None = setting(
        None, "Text file with one text per line. Default: documents about the people that site-mdm and site-ar know."
    ),
    n_texts: int = setting(
        4000, "Number of texts at most; every tenth is for the scores.", partial(at_least, HELD_OUT)
    ),
    mask: str = setting("all", "Positions to train on: masked, unmasked or all.", one_of("masked", "unmasked", "all")),
) -> None:
    """Train a transcoder of an MLP or a sparse autoencoder, and write it to the file OUT.

    On a bundled model it takes about a minute. diffusion_lens.load(OUT) opens the file.

    Example: diffusion-lens dictionary train site-mdm --layer 1 --n-texts 200 --updates 50 --out features.safetensors
    """
    from diffusion_lens.analysis import dictionary_loss, train_dictionary
    from diffusion_lens.data import site_facts
    from diffusion_lens.data.fact_files import default_source
    from diffusion_lens.data.site_documents import Documents

    # 1. Check the settings, and read the texts.
    if (layer is None) == (reads is None) or (writes is not None and reads is None):
        raise ValueError("give --layer, or else --reads, with --writes for a transcoder")
    if file.suffix != ".safetensors":
        raise ValueError(f"--out {file}; the name of the file must end in .safetensors")
    require_folder(file.parent, "--out")
    if texts is not None:
        lines = [line for line in texts.expanduser().read_text(encoding="utf-8").splitlines() if line][:n_texts]
    elif default_source(chosen.model) == "site":
        documents = Documents(site_facts.load(), description=0.4, tag=0.1, second_person=0.6).sample(2 * n_texts)
        lines = [f"{one}<eos> {other}<eos>" for one, other in zip(documents[::2], documents[1::2], strict=True)]
    else:
        raise ValueError(f"for {chosen.model!r} there are no texts by default; give a file with --texts")
    if len(lines) < HELD_OUT:
        raise ValueError(
            f"{len(lines)} texts are too few to train on some and score on others; give {HELD_OUT} or more"
        )

    # 2. Train.
    model = chosen.load()
    if layer is not None:
        block = f"blocks.{pick_layer(layer, model.cfg.n_layers)}"
        reads, writes = f"{block}.ln2.hook_normalized", f"{block}.hook_mlp_out"
    assert reads is not None
    kept = [line for i, line in enumerate(lines) if i % HELD_OUT]
    trained = train_dictionary(model, kept, reads, writes, settings=given, mask=mask, progress=progress())
    trained.save(file)

    # 3. Score it on the other texts.
    report.say(repr(trained))
    results: dict[str, Any] = {"features": len(trained.b_enc)}
    if model.cfg.causal_block is None:
        scores = dictionary_loss(model, lines[::HELD_OUT], trained.writes, trained, mask=mask, progress=progress())
        results |= {
            "recovered": scores.recovered().value,
            "variance_explained": scores.overall_variance_explained,
            "l0": scores.l0.tolist(),
            "dead": scores.dead,
        }
        report.say(repr(scores))
        for index, (low, high) in enumerate(scores.spans.tolist()):
            report.say(
                f"  t from {low:.2f} to {high:.2f}: loss recovered {scores.recovered(level=index).value:.3f}, variance "
                f"explained {scores.variance_explained[index]:.3f}, L0 {scores.l0[index]:.1f}"
            )
    report.say(f"wrote {file}")
    report.finish(results, trained.record, dictionary=file)

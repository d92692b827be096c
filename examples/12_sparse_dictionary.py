"""Train a sparse autoencoder on a masked diffusion model, and ablate its features at chosen steps.

The BatchTopK autoencoder (Bussmann et al. 2024, arXiv 2412.06410) learns from texts masked at random noise levels. The
loss on other texts shows what reconstructions lose. One feature is active mostly at masked positions. Those with the
largest gradient times activity contribute to the tokens that a run writes last; to ablate them matters there only.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from diffusion_lens import HookedDiffusionTransformer, plots
from diffusion_lens.analysis import activations, dictionary_loss, splice, train_dictionary
from diffusion_lens.data import site_facts
from diffusion_lens.data.site_documents import Documents
from diffusion_lens.interventions import at_steps


def main(argv: Sequence[str] | None = None) -> None:
    world = site_facts.load()
    parser = argparse.ArgumentParser(epilog="For a published model: --model smdm-1028m --texts FILE --prompt TEXT")
    parser.add_argument("--model", default="site-mdm", help="name or path of a masked diffusion model")
    parser.add_argument("--texts", type=Path, help="file with one text per line (default: documents)")
    parser.add_argument("--limit", type=int, default=600, help="texts; every sixth is for evaluation (default 600)")
    parser.add_argument("--prompt", default=world.facts("description", "p2d", "d2p")[0].prompt)
    parser.add_argument("--updates", type=int, default=400, help="updates of 256 activations each (default 400)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results (default: out)")
    args = parser.parse_args(argv)
    model, name = HookedDiffusionTransformer.from_pretrained(args.model, device="cpu"), "blocks.1.hook_resid_post"
    documents = Documents(world, description=0.4, tag=0.1, second_person=0.6).sample(2 * args.limit)
    texts = [f"{one}<eos> {other}<eos>" for one, other in zip(documents[::2], documents[1::2], strict=True)]
    given = args.texts and args.texts.read_text(encoding="utf-8").splitlines()[: args.limit]
    tokens, real = model.tokenize(given or texts)
    test = torch.arange(len(tokens)) % 6 == 0
    store = activations(model, tokens[~test], name, attention_mask=real[~test], out=args.out / "dictionary")
    n_features = 4 * model.cfg.d_model
    sae = train_dictionary(model, store, name, n_features=n_features, updates=args.updates, batch_size=256)
    sae.save(args.out / "dictionary.safetensors")
    everything = store.rows(name, torch.arange(len(store)))
    result = dictionary_loss(model, tokens[test], name, sae, attention_mask=real[test])
    print(f"{store}\n{result}")
    for level, (low, high) in enumerate(result.spans.tolist()):
        shares = f"{result.recovered(level=level).value:.3f}, variance explained {result.variance_explained[level]:.3f}"
        print(f"  t from {low:.2f} to {high:.2f}: loss recovered {shares}")
    masked, other = ((sae.encode(everything[store.masked == x]) > 0).float().mean(dim=0) for x in (True, False))
    specific = int((masked - other).argmax())
    print(f"feature {specific}: active at {masked[specific]:.0%} of masked, {other[specific]:.0%} of other positions")
    run, cache = model.denoise_with_cache(args.prompt, name, max_new_tokens=4, steps=4)
    last, kept = run.revealed_at.max(), []
    written = (run.revealed_at[0] == last).nonzero()[:, 0]
    keep = splice(sae, edit=lambda features, hook: kept.append(features) or features.retain_grad())
    rows = model.run_with_hooks(run.canvases[last], fwd_hooks=[(name, keep)])[0, model.readout.rows(written)]
    rows.log_softmax(dim=-1)[range(len(written)), run.tokens[0, written]].sum().backward()
    largest = (kept[0] * kept[0].grad).sum(dim=(0, 1)).topk(5).indices
    ablated = splice(sae, edit=lambda features, hook: features.index_fill(-1, largest, 0.0))
    p = [run.replay(model, fwd_hooks=[(name, at_steps(ablated, step))]).confidence.prod().item() for step in range(4)]
    print(f"p({run.text[0]!r}) is {run.confidence.prod():.2f}; ablated in step 0, 1, ...: {[round(x, 2) for x in p]}")
    figure, (left, middle, right) = plots.panels(1, 3, width=14.0, height=3.6, width_ratios=[3, 2, 2])
    result.plot(ax=left)
    middle.imshow(sae.encode(cache.stack(name)).detach()[:, 0, :, specific].numpy().T, aspect="auto", cmap="Purples")
    middle.set_yticks(range(run.tokens.shape[1]), model.to_str_tokens(run.tokens[0]))
    middle.set(xticks=range(4), xlabel="step", title=f"activity of feature {specific}")
    right.bar(range(len(p)), p, color="C1")
    right.set(xticks=range(4), xlabel="step in which five features are ablated", ylabel="p(text)")
    figure.savefig(args.out / "dictionary.png", dpi=90)
    result.save(args.out / "dictionary" / "loss" / "loss.safetensors")
    for name in ("dictionary", "dictionary.safetensors", "dictionary.png"):
        print(f"wrote {args.out / name}")


if __name__ == "__main__":
    main()

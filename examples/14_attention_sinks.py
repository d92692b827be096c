"""Find attention sinks at every denoising step of both variants, and measure how long they stay.

A sink is a position that receives far more attention than the others: the sum over all queries exceeds the mean of the
other positions by a threshold, in multiples of equal attention. For each layer the example prints how many positions of
a head are sinks on average, how similar the sinks of consecutive steps are (Jaccard index: 1 if all stay), and for how
many steps in a row a sink stays. Then it prints on which positions the sinks are, next to the share of such positions.
Rulli et al. 2025 (arXiv 2510.15731) find that sinks of LLaDA and Dream move from step to step, and are often on [MASK]
and punctuation. The bundled models have most of their sinks on the words of the prompt, above all "today" and "the",
and on the diffusion model they stay for half of the run. Their threshold is 3; the default here is 2, because these
texts have 13 tokens only.
OUT contains a figure for one run, and the sinks of all runs.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from diffusion_lens import HookedDiffusionTransformer, plots
from diffusion_lens.analysis import attention_sinks
from diffusion_lens.data import site_facts


def main(argv: Sequence[str] | None = None) -> None:
    facts = site_facts.load().facts("description", "both", "p2d")[1:200:5]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. For published models, use --model smdm-1028m "
        "ar-1028m --threshold 3 with --prompts of your own.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument("--prompts", nargs="+", default=[fact.prompt for fact in facts], help="one run each")
    parser.add_argument("--positions", type=int, default=8, help="masked positions, and steps (default 8)")
    parser.add_argument("--threshold", type=float, default=2.0, help="by how much a sink exceeds others (default 2)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the results (default: out)")
    args = parser.parse_args(argv)

    args.out.mkdir(parents=True, exist_ok=True)
    figure, axes = plots.panels(2, len(args.model), width=5.5 * len(args.model), height=7.0)
    for column, model_name in enumerate(args.model):
        model = HookedDiffusionTransformer.from_pretrained(model_name)
        run = model.denoise(args.prompts, max_new_tokens=args.positions, steps=args.positions)
        sinks = attention_sinks(model, run, threshold=args.threshold)
        print(f"{model_name}: {len(run)} runs, {sinks}")
        print("  layer   sinks of a head   overlap of steps   steps in a row, of", run.n_steps)
        spans, by_head = sinks.spans(), sinks.is_sink.sum(dim=-1).float()
        for layer in sinks.layers:
            lifetimes = [span.n_steps for span in spans if span.layer == layer]
            stays = f"{mean(lifetimes):.1f}" if lifetimes else "-"
            overlap = sinks.overlap[:, layer].nanmean().item()
            print(f"  {layer:5d} {by_head[:, layer].mean().item():17.2f} {overlap:18.2f} {stays:>17}")
        for kind, (of_sinks, of_positions) in sinks.kinds().items():
            print(f"  {kind:8} {of_sinks:5.0%} of the sinks, {of_positions:4.0%} of the positions")
        print("  most often:", ", ".join(f"{word.strip()} {share:.0%}" for word, share in sinks.tokens(4)))
        for row, layer in enumerate((sinks.layers[0], sinks.layers[-1])):
            ax = axes[row * len(args.model) + column]
            sinks.plot(layer, row=0, ax=ax, title=f"{model_name}: received in layer {layer}")
        path = args.out / f"attention_sinks_{Path(model_name).name}.safetensors"
        print(f"  wrote {sinks.save(path)}")
    figure.savefig(args.out / "attention_sinks.png", dpi=100)
    print(f"dots mark sinks of at least one head\nwrote {args.out / 'attention_sinks.png'}")


if __name__ == "__main__":
    main()

"""Read the denoising time from single states with a linear probe, at each layer of both variants.

Nobody tells these models the time t, which falls from 1 to 0 while a text is written. A ridge regression predicts t
from one state of the residual stream. It is fitted to some runs and tested on others, and R² says how much of t it
explains there. Two controls are printed: R² of a probe of permuted times, and R² of the position alone, with no state.
In the diffusion model the probe reads masked positions. Before the first block they all have the same embedding, which
contains no time (R² is 0); after one block it explains nine tenths of t: attention has brought it there. The mean over
all positions of a canvas is the trivial predictor: its embeddings contain the share of [MASK], so R² is high already
before the first block, and says nothing about the model.
In the autoregressive (AR) baseline the position of the last token determines t, so a high R² is no evidence of a
clock; over all tokens, R² is as low as that of the position alone, because no token sees what comes after it.
OUT contains a figure, and for each model the first probe.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from diffusion_lens import HookedDiffusionTransformer, plots
from diffusion_lens.analysis import probe_time
from diffusion_lens.data import site_facts


def main(argv: Sequence[str] | None = None) -> None:
    facts = site_facts.load().facts("description", "both", "p2d")[1::5]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. For published models, use --model smdm-1028m "
        "ar-1028m with many --prompts of your own.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument("--prompts", nargs="+", default=[fact.prompt for fact in facts], help="one run each")
    parser.add_argument("--positions", type=int, default=8, help="masked positions, and steps (default 8)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the results (default: out)")
    args = parser.parse_args(argv)

    args.out.mkdir(parents=True, exist_ok=True)
    figure, axes = plots.panels(1, len(args.model), width=6.5 * len(args.model), height=3.4)
    for model_name, ax in zip(args.model, axes, strict=True):
        model = HookedDiffusionTransformer.from_pretrained(model_name)
        run = model.denoise(args.prompts, max_new_tokens=args.positions, steps=args.positions)
        probes = {
            "states that predict the next tokens": probe_time(model, run, positions="predicting"),
            "states of all tokens": probe_time(model, run, positions="all"),
            "mean over the canvas": probe_time(model, run, positions="all", rows="canvas"),
        }
        first = next(iter(probes.values()))
        print(f"{model_name}: {len(run)} runs of {run.n_steps} steps; R² on held-out runs by layer")
        print(f"  {'':36}", "before", *(f"{layer:6d}" for layer in range(model.cfg.n_layers)), " position alone")
        for label, probe in probes.items():
            alone = "" if probe.record["rows"] == "canvas" else f"{probe.score_position:15.2f}"
            print(f"  {label:36}", *(f"{r2:6.2f}" for r2 in probe.score.tolist()), alone)
        print(f"  {'  the first, times permuted':36}", *(f"{r2:6.2f}" for r2 in first.score_control.tolist()))
        first.plot(ax=ax, title=f"{model_name}: time from one state that predicts a token")
        ax.set_ylim(-0.1, 1.05)
        path = args.out / f"probe_of_time_{Path(model_name).name}.safetensors"
        print(f"  wrote {first.save(path)}")
    figure.savefig(args.out / "probe_of_time.png", dpi=110)
    print(f"wrote {args.out / 'probe_of_time.png'}")


if __name__ == "__main__":
    main()

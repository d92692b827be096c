"""The command line of the training."""

import argparse
from collections.abc import Sequence

import torch

from diffusion_lens.data import site_facts
from diffusion_lens.site_pair import ABLATIONS, PHASES, SHIPPED_SEED, make_pair


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and write the pair."""
    parser = argparse.ArgumentParser(
        prog="python -m diffusion_lens.site_pair",
        description="Train the pair with a planted subject site, site-mdm and site-ar.",
    )
    parser.add_argument("--out", default="site", help="Folder to write to (default: %(default)s).")
    parser.add_argument("--seed", type=int, default=SHIPPED_SEED, help="Seed of weights, documents and noise.")
    parser.add_argument("--world", type=int, default=site_facts.SHIPPED_SEED, help="Seed of the world.")
    parser.add_argument("--recipe", choices=["pair", *ABLATIONS], default="pair", help="Another recipe of the MDM.")
    parser.add_argument("--quiet", action="store_true", help="Show no progress bars.")
    options = parser.parse_args(arguments)
    # With one thread sums have one order, so the same seed gives the same weights on any number of cores.
    torch.set_num_threads(1)
    phases = {"pair": PHASES, **ABLATIONS}[options.recipe]
    make_pair(options.out, options.seed, options.world, phases=phases, progress=not options.quiet)


if __name__ == "__main__":
    main()

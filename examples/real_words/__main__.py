"""`python -m real_words`, in `examples/`: the study on real facts, of a causal model and of its diffusion twin."""

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from diffusion_lens import HookedDiffusionTransformer
from real_words.study import Settings, real_words_study

SMALL = Settings(n_facts=3, n_steps=2, n_vectors=2, n_edits=2, n_pairs=2, n_texts=8, samples=1, every=15, iterations=2)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study; a second call with the same options continues."""
    parser = argparse.ArgumentParser(prog="python -m real_words", description=__doc__.split(": ")[1])
    parser.add_argument("--causal", default="smollm2-135m-instruct", help="name or path (default: %(default)s)")
    parser.add_argument("--twin", default="smollm2-135m-mdm", help="its twin, name or path (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="a few facts and layers, to see that it runs")
    for field in fields(Settings):
        many = {"nargs": "+", "type": int} if field.name == "steps" else {"type": type(field.default)}
        parser.add_argument(f"--{field.name.replace('_', '-')}", **many, help=f"default: {field.default}")
    parser.add_argument("--out", type=Path, default=Path("real-words"), help="folder (default: %(default)s)")
    given = vars(parser.parse_args(argv))
    out, causal, twin, small = (given.pop(name) for name in ("out", "causal", "twin", "small"))
    chosen = {name: value for name, value in given.items() if value is not None}
    if "steps" in chosen:
        chosen["steps"] = tuple(chosen["steps"])
    settings = replace(SMALL if small else Settings(), **chosen)
    try:
        models = [HookedDiffusionTransformer.from_pretrained(name) for name in (causal, twin)]
        real_words_study(*models, settings, out, progress=True)
    except (ValueError, FileNotFoundError, ImportError) as error:
        parser.error(str(error))
    print(f"wrote {out / 'real_words.json'}")


if __name__ == "__main__":
    main()

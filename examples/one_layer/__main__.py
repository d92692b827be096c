"""`python -m one_layer`, in `examples/`: train the networks, print the table, write figures and `command.json`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from one_layer.objectives import OBJECTIVES
from one_layer.study import DEPTHS, POSITIONS, SEEDS, STEPS, one_layer_study
from one_layer.toy import DATA, VARIANTS
from weight_conversion import write_json


def main(argv: Sequence[str] | None = None) -> None:
    """Train and measure; a second call with the same options continues."""
    parser = argparse.ArgumentParser(
        prog="python -m one_layer",
        description="Train small masked diffusion models and AR baselines with different positions, and measure their "
        "signatures. Only the positions differ; data, steps and initial weights are the same.",
    )
    parser.add_argument("--positions", nargs="+", default=list(POSITIONS), help="kinds of positions (default: all)")
    parser.add_argument("--data", nargs="+", default=list(DATA), help="one-way, both-ways, mixed (default: all)")
    parser.add_argument("--depths", nargs="+", type=int, default=list(DEPTHS), help="numbers of layers")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="number of training steps (default: %(default)s)")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), help=f"also {', '.join(OBJECTIVES)}")
    parser.add_argument("--out", type=Path, default=Path("one-layer"), help="folder (default: %(default)s)")
    parser.add_argument("--shard", default="0/1", help='only a part of the trainings, such as "0/4"')
    settings = vars(parser.parse_args(argv))
    out, shard = settings.pop("out"), settings.pop("shard")
    try:
        study = one_layer_study(**settings, out=out / "trainings", shard=shard, progress=True)
    except ValueError as error:
        parser.error(str(error))
    if shard != "0/1":
        print(f"shard {shard}: {len(study.ids)} trainings done in {out / 'trainings'}; OneLayerStudy.merge joins them")
        return
    print(study.to_text())
    study.save(out / "one_layer.safetensors")
    for data in settings["data"]:
        for depth in settings["depths"]:
            figure = study.plot(data, depth)[0].get_figure()
            figure.savefig(out / f"{data}_{depth}_layer{'s' * (depth > 1)}.png", dpi=130)
    record = {name: value for name, value in study.record.items() if name != "facts"}
    results = {"steps": study.steps, "table": study.rows(), "curves": study.curve_rows()}
    write_json({"settings": settings, "results": results, "record": record}, out / "command.json")
    print(f"wrote {out / 'command.json'}")


if __name__ == "__main__":
    main()

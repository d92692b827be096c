"""Which cells of TransformerLens's demo notebooks run on the bundled models.

The script runs six notebooks from a checkout of TransformerLens cell by cell, offline, once with the masked diffusion
model and once with its AR baseline. Three things are changed in a cell, and `NOTEBOOKS` lists every change:

- "model": the line that loads a model, without the arguments that centre or refactor weights: RMSNorm does not subtract
  the mean, and the rotation of queries and keys forbids refactoring.
- "prompts": the words, and what depends on the vocabulary and the context of the bundled models: the range and number
  of random tokens, and `prepend_bos`, because the bundled tokenizer has no token for the beginning of a text. The
  notebooks read the last row, and therefore the prompts of the diffusion model end with [MASK].
- "layers": numbers of layers and heads, because the bundled models have four layers with four heads.

    pip install -e '.[clients,plot]'
    python benchmarks/transformer_lens_notebooks.py --checkout ~/TransformerLens [--out table.json]

The checkout has to be of the installed version of TransformerLens: its git repository, or its source archive on PyPI.
Without `--checkout` the script prints the totals of the table in the documentation.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

# tests/oracles holds what tests and benchmarks share.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from oracles.notebooks import RESULTS, Changes, code_cells, run_notebook

TABLE = Path(__file__).parents[1] / "docs" / "transformer_lens_notebooks.json"
MODELS = ("tiny-mdm", "tiny-ar")
LOAD = "HookedDiffusionTransformer.from_pretrained(MODEL)"
MODEL_LINE = {
    r"TransformerBridge\.(?:boot_transformers|boot_tl_legacy)\([^)]*\)": LOAD,
    r"(?:center_unembed|center_writing_weights|refactor_factored_attn_matrices)=True,": "",
}
# People of the bundled models' training data, by the last word of their descriptions. <mask> is [MASK] for the
# diffusion model, and nothing for the AR baseline.
PEOPLE = {
    " Kinmoor": "Yara Plasser was the clever gardener",
    " Ravik": "Zeno Lindall was the kind drummer",
    " Nosport": "Paul Tirrick was the jolly smith",
    " Famburg": "Jonas Skeckett was the gentle smith",
    " Heimburg": "Milo Baupling became the kind cartographer",
    " Hurgate": "Lydia Brorsh became the merry potter",
    " Brolsen": "Ada Lorrick is the brave miner",
    " Heisport": "Nora Tauckett is the stubborn judge",
}
CLEAN, CORRUPTED = (f"{PEOPLE[place]} of<mask>" for place in (" Kinmoor", " Ravik"))
SENTENCE = "today Yara Plasser was the clever gardener of Kinmoor."
# The names that the notebooks ask for, in the order of `PEOPLE`.
NAMES = ("Mary", "John", "Tom", "James", "Dan", "Sid", "Martin", "Amy")
PAIRS = dict(
    zip(
        (
            "When John and Mary went to the shops, John gave the bag to",
            "When John and Mary went to the shops, Mary gave the bag to",
            "When Tom and James went to the park, James gave the ball to",
            "When Tom and James went to the park, Tom gave the ball to",
            "When Dan and Sid went to the shops, Sid gave an apple to",
            "When Dan and Sid went to the shops, Dan gave an apple to",
            "After Martin and Amy went to the park, Amy gave a drink to",
            "After Martin and Amy went to the park, Martin gave a drink to",
        ),
        (f"{start} of<mask>" for start in PEOPLE.values()),
        strict=True,
    )
)


def answers(names: tuple[str, ...], quote: str = '"') -> dict[str, str]:
    """Replacements of quoted names by places."""
    return {f"{quote} {old}{quote}": f"{quote}{new}{quote}" for old, new in zip(names, PEOPLE, strict=False)}


# Both models: what a cell that runs means here.
NO_BIAS = "`b_U` is zero: these models have no biases"
# The diffusion model only.
DIFFUSION_LOSS = "the loss of the diffusion model at positions masked at random, the same in every call"
EARLIER_ONLY = "looks only at attention to earlier positions; a diffusion model attends in both directions"
UNMASKED_ROWS = (
    "no [MASK] in the tokens: the rows that the metric reads predict the tokens themselves, not the next ones"
)
REASONS = {
    "has no BOS token": "the bundled tokenizer has no BOS token",
    "needs the masked tokens behind the logits": "`loss_fn` of a diffusion model also needs the masked canvas",
    "no padding token that is not also text": "texts of different lengths: the tokens alone do not show the padding",
    "ldim==rdim": "not square, because [MASK] has an embedding and cannot be predicted; use `W_E[:d_vocab_out]`",
    "previous_tokens_in_word": "expects tokens with their leading space, which this tokenizer does not show",
    "detection_pattern=detection_pattern": "needs `detection_pattern` of cell 17",
    'error_measure="abs"': "the notebook asserts that no position attends to a later one",
}
NOTEBOOKS: dict[str, dict[str, Any]] = {
    "Main_Demo": {
        "prompts": {
            "loss = model(model_description_text": f'loss = model("{SENTENCE}"',
            "model.to_tokens(gpt2_text)": f'model.to_tokens(gpt2_text := "{SENTENCE}")',
            "After John and Mary went to the store, Mary gave a bottle of milk to": CLEAN,
            "After John and Mary went to the store, John gave a bottle of milk to": CORRUPTED,
            **answers(("John", "Mary")),
            "seq_len = 50": "seq_len = 30",
            "randint(1000, 10000": "randint(5, 430",
            "The quick brown fox jumped over the lazy dog": SENTENCE,
            "model.to_str_tokens(example_text)": f'model.to_str_tokens(example_text := "{SENTENCE}")',
            '"The cat sat on the mat."': f'"{CLEAN}"',
            '"The cat sat on the mat really hard."': f'"today {CLEAN}"',
            '"The cat sat on the mat"': f'"{SENTENCE}"',
            '"The cat sat on the mat. The mat sat on the cat."': '"the clever pilot and the clever smith"',
            '" The"': '" Kinmoor"',
            '" cat"': '" clever"',
            "2342+2017=21445": "Ada,Ben.Clara",
            "1000+1000000=999999": "Ada,,Ben",
            "Hello World": "Ada Lorrick",
            "Claire and Mary went to the shops, then Mary gave a bottle of milk to": CLEAN,
            "Claire": "Kinmoor",
            "(CNN) President Barack Obama caught in embarrassing new scandal\\n": "today Yara Plasser was the",
        },
        "layers": {
            "head_index_to_ablate = 8": "head_index_to_ablate = 2",
            "induction_head_layer = 5": "induction_head_layer = 1",
            "induction_head_index = 5": "induction_head_index = 1",
            "range(12) for head in range(12)": "range(4) for head in range(4)",
        },
        "left_out": {
            "get_checkpoint_labels": "lists checkpoints of TransformerLens's own models on the hub",
            "checkpoint_index=index": "loads checkpoints of TransformerLens's own models from the hub",
            "tokens_trained_on,": "plots what cell 59 would have loaded",
        },
        "checks": {
            'print(f"Corrupted logit difference': "clean_logit_diff > 5 and corrupted_logit_diff < -5",
            "ioi_patching_result[layer": "abs(ioi_patching_result.max() - 1) < 0.2",
            "cat_probs[0, -1": "cat_probs[0, -1, capital_the_token_index] > 0.9",
        },
        "both": {
            "unembed_bias = ": NO_BIAS,
            "john_bias = ": NO_BIAS,
            "bias_values[i]": NO_BIAS,
            "model.generate(": 'returns a `Trajectory`; a string with `return_type="str"`',
        },
        "tiny-mdm": {
            "model_description_text": DIFFUSION_LOSS,
            "ablated_loss = ": DIFFUSION_LOSS,
            "induction_score_hook": EARLIER_ONLY,
        },
    },
    "Exploratory_Analysis_Demo": {
        "prompts": {
            "After John and Mary went to the store, John gave a bottle of milk to": f"today {CLEAN}",
            'example_answer = " Mary"': 'example_answer = " Kinmoor"',
            "When John and Mary went to the shops,{} gave the bag to": "today {} of<mask>",
            "When Tom and James went to the park,{} gave the ball to": "surely {} of<mask>",
            "When Dan and Sid went to the shops,{} gave an apple to": "today {} of<mask>",
            "After Martin and Amy went to the park,{} gave a drink to": "surely {} of<mask>",
            '(" Mary", " John")': '(" Kinmoor", " Ravik")',
            '(" Tom", " James")': '(" Nosport", " Famburg")',
            '(" Dan", " Sid")': '(" Heimburg", " Hurgate")',
            '(" Martin", " Amy")': '(" Brolsen", " Heisport")',
            ".format(answers[-1][1])": ".format(PEOPLE[answers[-1][0]])",
            "prepend_bos=True": "prepend_bos=False",
            "example_repeated_text = ": f'example_text = "{SENTENCE} "; example_repeated_text = ',
            "seq_len = 100": "seq_len = 30",
            "100, 20000, size": "5, 430, size",
        },
        "layers": {
            "(5, 8)": "(1, 2)",
            "range(7, model.cfg.n_layers - 1)": "range(2, model.cfg.n_layers - 1)",
            "range(5, 8)": "range(1, 2)",
            "range(8, model.cfg.n_layers)": "range(2, model.cfg.n_layers)",
            "first_mid_layer = 7": "first_mid_layer = 1",
            "first_late_layer = 9": "first_late_layer = 3",
            "[81, 65]": "[5, 6]",
        },
        "checks": {
            "original_average_logit_diff = ": "original_average_logit_diff > 5",
            "average_logit_diff = einsum": "abs(average_logit_diff - original_average_logit_diff) < 1e-3",
            "per_layer_logit_diffs = ": "abs(per_layer_logit_diffs.sum() - original_average_logit_diff) < 1e-3",
            "patched_residual_stream_diff[layer": "abs(patched_residual_stream_diff.max() - 1) < 0.2",
        },
        "both": {"final_residual_stream = ": "equals the logits because cell 5 has folded the norms"},
        "tiny-mdm": {
            "prev_token_scores[layer] = ": "counts attention to earlier positions only; a loss also masks tokens, and "
            "the patterns are those of the masked canvas",
        },
    },
    "Activation_Patching_in_TL_Demo": {
        "prompts": {
            **PAIRS,
            **answers(NAMES, "'"),
            "randint(100, 10000": "randint(5, 430",
            "tokenizer.bos_token_id": "tokenizer.eos_token_id",
        },
        "checks": {"clean_logit_diff = ": "clean_logit_diff > 5 and corrupted_logit_diff < -5"},
        "tiny-mdm": {
            "def induction_loss": UNMASKED_ROWS,
            "clean_cache_induction, induction_loss": UNMASKED_ROWS,
        },
    },
    "Attribution_Patching_Demo": {
        "prompts": {
            **PAIRS,
            **answers(NAMES),
            "The Eiffel Tower is located in the city of": CLEAN,
            "The Colosseum is located in the city of": CORRUPTED,
            '" Paris"': '" Kinmoor"',
            '" Rome"': '" Ravik"',
        },
        "layers": {
            "5 * model.cfg.n_heads + 5": "1 * model.cfg.n_heads + 1",
            "8 * model.cfg.n_heads + 6": "2 * model.cfg.n_heads + 2",
            "9 * model.cfg.n_heads + 9": "3 * model.cfg.n_heads + 3",
            "[:22]": "[:8]",
            '["pattern", 5][:, 5]': '["pattern", 1][:, 1]',
            '["pattern", 10][:, 7]': '["pattern", 2][:, 2]',
            '["pattern", 11][:, 10]': '["pattern", 3][:, 3]',
        },
        "checks": {"clean_logit_diff = ": "clean_logit_diff > 5 and corrupted_logit_diff < -5"},
    },
    "Head_Detector_Demo": {
        "prompts": {
            "The head detector feature for TransformerLens allows users to check for various common heads "
            "automatically, reducing the cost of discovery.": SENTENCE,
            "The following lexical sequence has been optimised for the maximisation of loquaciously multitoken letter "
            "combinations.": SENTENCE,
            "This is the first the test prompt.": SENTENCE,
            "This is another test prompt, being just a sequence of tokens.": (
                "today Ada Lorrick was the brave miner of Brolsen."
            ),
            "If you're interested in mechanistic interpretability, this is how the sausage REALLY is made.": (
                "surely the kind drummer of Ravik became Zeno Lindall."
            ),
            "one two three one two three one two three": "Ada Ben Clara Ada Ben Clara Ada Ben Clara",
            "1 2 3 4 5 1 2 3 4 1 2 3 1 2 3 4 5 6 7": "Ada Ben Clara Dora Ada Ben Clara Ada Ben",
            "green ideas sleep furiously; green ideas don't sleep furiously": "brave Ada, brave Ben, brave Clara.",
        },
        "layers": {"from_cache(cache, 4)": "from_cache(cache, 1)", "from_cache(cache, 5)": "from_cache(cache, 3)"},
        "tiny-mdm": {
            "ones_head_scores = ": "the share of attention to earlier positions; 1 for every head of a causal model",
            "head_scores = detect_head(": EARLIER_ONLY,
        },
    },
    "Direct_Logit_Attribution_Demo": {
        "prompts": {
            "When John and Mary went to the shops, John gave the bag to": CLEAN,
            **answers(("Mary", "John", "the")),
        },
        "checks": {
            "naive = ": "(naive.sum() - (x := model(tokens)[0, -1])[mary_id] + x[john_id]).abs() < 1e-3",
        },
    },
}


def changes_for(notebook: str, model: str) -> Changes:
    """The changes of a notebook for a model."""
    table = NOTEBOOKS[notebook]
    mask = " [MASK]" if model == "tiny-mdm" else ""
    prompts = {old: new.replace("<mask>", mask) for old, new in table["prompts"].items()}
    return Changes(
        replaced={"prompts": prompts, "layers": table.get("layers", {})},
        patterns={"model": MODEL_LINE},
        left_out=table.get("left_out", {}),
        checks=table.get("checks", {}),
        reasons=REASONS,
        notes={**table.get("both", {}), **table.get(model, {})},
    )


def run(checkout: Path, notebook: str, model: str) -> list[dict[str, Any]]:
    """The rows of one notebook for one model. IPython, torch and plotly keep settings, so each run has a process."""
    from diffusion_lens import HookedDiffusionTransformer

    names = {"HookedDiffusionTransformer": HookedDiffusionTransformer, "MODEL": model, "PEOPLE": PEOPLE}
    return run_notebook(code_cells(_path(checkout, notebook)), changes_for(notebook, model), names)


def run_apart(checkout: Path, notebook: str, model: str) -> list[dict[str, Any]]:
    """`run` in a new process."""
    command = [sys.executable, __file__, "--checkout", str(checkout), "--only", notebook, model]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=offline, check=True, stdout=subprocess.PIPE, text=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def table_of(checkout: Path) -> dict[str, Any]:
    """All notebooks on all models, with versions and the date."""
    notebooks = []
    for name in NOTEBOOKS:
        by_model = {model: run_apart(checkout, name, model) for model in MODELS}
        cells = []
        for rows in zip(*by_model.values(), strict=True):
            outcome = {
                model: {key: row[key] for key in ("result", "checked", "reason", "note") if row[key]}
                for model, row in zip(by_model, rows, strict=True)
            }
            cells.append({key: rows[0][key] for key in ("cell", "section", "changed")} | outcome)
        notebooks.append({"name": name, "cells": cells})
    return {
        "transformer_lens": _version(checkout),
        "diffusion_lens": version("diffusion-lens"),
        "date": datetime.date.today().isoformat(),
        "models": list(MODELS),
        "notebooks": notebooks,
    }


def text_of(table: dict[str, Any]) -> str:
    """The table as JSON with a line for each cell, so that two versions can be compared."""
    head = {key: value for key, value in table.items() if key != "notebooks"}
    notebooks = []
    for notebook in table["notebooks"]:
        cells = ",\n".join(json.dumps(cell, ensure_ascii=False) for cell in notebook["cells"])
        notebooks.append(f'{{"name": {json.dumps(notebook["name"])}, "cells": [\n{cells}\n]}}')
    lines = ",\n".join(notebooks)
    return f'{json.dumps(head)[:-1]}, "notebooks": [\n{lines}\n]}}\n'


def totals(table: dict[str, Any]) -> list[str]:
    """One line for each notebook and model."""
    lines = []
    for notebook in table["notebooks"]:
        for model in table["models"]:
            counts = Counter(cell[model]["result"] for cell in notebook["cells"])
            found = ", ".join(f"{counts[result]} {result}" for result in RESULTS if counts[result])
            lines.append(f"{notebook['name']:32} {model:9} {len(notebook['cells']):3} cells: {found}")
    return lines


def _path(checkout: Path, notebook: str) -> Path:
    path = checkout / "demos" / f"{notebook}.ipynb"
    if not path.is_file():
        raise SystemExit(f"{path} does not exist; --checkout is the folder of TransformerLens that contains demos/")
    return path


def _version(checkout: Path) -> str:
    """The version of a checkout, which has to be the installed one, and its commit if it is a git repository."""
    found = re.search(
        r'^\s*version ?= ?"([^"]+)"', (checkout / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    installed = version("transformer-lens")
    archive = checkout / "PKG-INFO"
    number = found[1] if found else "unknown"
    if number != installed and not archive.is_file():
        # A git repository does not state its version, only its tags do.
        described = subprocess.run(
            ["git", "-C", str(checkout), "describe", "--tags", "--always"], capture_output=True, text=True, check=False
        ).stdout.strip()
        number = described or number
    if number.removeprefix("v") != installed:
        print(f"note: the checkout is {number}, and TransformerLens {installed} is installed", file=sys.stderr)
    return number.removeprefix("v")


def main() -> None:
    """Run the notebooks and write the table, or print the totals of the table in the documentation."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, help="folder of TransformerLens that contains demos/")
    parser.add_argument(
        "--out", type=Path, help="JSON file for the table; docs/transformer_lens_notebooks.json is the page's"
    )
    parser.add_argument("--only", nargs=2, metavar=("NOTEBOOK", "MODEL"), help="print the rows of one run as JSON")
    arguments = parser.parse_args()
    if arguments.checkout is None:
        table = json.loads(TABLE.read_text(encoding="utf-8"))
    elif arguments.only:
        rows = run(arguments.checkout, *arguments.only)
        print(json.dumps(rows))
        return
    else:
        table = table_of(arguments.checkout)
        if arguments.out:
            arguments.out.write_text(text_of(table), encoding="utf-8")
    print(f"TransformerLens {table['transformer_lens']}, diffusion_lens {table['diffusion_lens']}, {table['date']}")
    print("\n".join(totals(table)))


if __name__ == "__main__":
    main()

"""The house plan, read from the imports: rooms in order, no cycles, no family outside its room."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("weight_conversion", "diffusion_lens")

# In order: a file imports from its own room and from rooms listed before it. A room is a file, or a folder with all
# that is in it unless a longer name in the list says otherwise.
ROOMS = (
    "weight_conversion.architecture",
    "weight_conversion.key_map",
    "weight_conversion.files",
    "weight_conversion.families",
    "weight_conversion.registry",
    "weight_conversion.convert",
    "weight_conversion",
    "diffusion_lens.model.shapes",
    "diffusion_lens.settings",
    "diffusion_lens.settings.shared",
    "diffusion_lens.hooks",
    "diffusion_lens.model.config",
    "diffusion_lens.model.readout",
    "diffusion_lens.model.noise",
    "diffusion_lens.model",
    "diffusion_lens.model.loss",
    "diffusion_lens.records.identity",
    "diffusion_lens.interventions",
    "diffusion_lens.pages",
    "diffusion_lens.plots",
    "diffusion_lens.records",
    "diffusion_lens.loading.catalogue",
    "diffusion_lens.loading",
    "diffusion_lens.facts",
    "diffusion_lens.data",
    "diffusion_lens.denoising",
    "diffusion_lens.training",
    "diffusion_lens.hooked_diffusion_transformer",
    "diffusion_lens.loading.pairs",
    "diffusion_lens.analysis",
    "diffusion_lens.evaluation",
    "diffusion_lens.explorer",
    "diffusion_lens.checks",
    "diffusion_lens.cli",
    "diffusion_lens.__main__",
    "diffusion_lens",
)
# The only import from a room listed later, inside a function: `Trajectory.explore` asks the explorer for its page.
UPWARD = ("diffusion_lens.denoising.trajectory", "diffusion_lens.explorer.page_of_run")
FACES = ("weight_conversion", "diffusion_lens")  # the packages' own __init__.py, and nothing else

# Where families are known by name: their tables, the tables of published checkpoints, recipes and numbers.
FAMILIES_KNOWN = (
    "weight_conversion.families",
    "weight_conversion.registry",
    "diffusion_lens.loading.catalogue",
    "diffusion_lens.loading",
    "diffusion_lens.loading.pairs",
    "diffusion_lens.training.trainer",
    "diffusion_lens.evaluation.recall",
)
# Where an architecture's family is passed on, chosen by the user, left out of a comparison, or that of our own format.
FAMILY_CARRIED = (
    "weight_conversion",
    "diffusion_lens.model.config",
    "diffusion_lens.checks.weights",
    "diffusion_lens.cli",
    "diffusion_lens.explorer.server",  # the address family of a socket
)
# Help texts that list what a user can choose, and descriptions that cite whose metric it is.
FAMILIES_IN_PROSE = ("diffusion_lens.cli", "diffusion_lens.settings.shared", "diffusion_lens.evaluation.recall")
IMPORTED = re.compile(r"(?:^\s*(?:from|import) |import_module\(\s*[\"'])([\w.]+)", re.MULTILINE)
BENCHMARKS = re.compile(r"[\"'](?:[^\"'\n]*/)?benchmarks(?:/[^\"'\n]*)?[\"']")  # a string, as opposed to prose
RECIPES = {"smdm_reverse"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(encoding="utf-8"), str(FILES[name]))


@cache
def nodes_of(name: str) -> list[ast.AST]:
    return list(ast.walk(tree_of(name)))


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def room_of(name: str) -> str:
    known = [room for room in ROOMS if (name == room if room in FACES else within(name, room))]
    assert known, f"{name} is in no room: give it a line in ROOMS of tests/test_house.py"
    return max(known, key=len)


@cache
def imports(name: str) -> set[str]:
    """Modules that a file imports, wherever in it; `from package import module` counts as the module."""
    targets: set[str] = set()
    for node in nodes_of(name):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            full_names = {f"{node.module}.{alias.name}" for alias in node.names}
            targets |= {target if target in FILES else node.module for target in full_names}
    return targets - {UPWARD[1]} if name == UPWARD[0] else targets


def test_the_plan_names_only_rooms_that_exist() -> None:
    assert [room for room in ROOMS if not any(within(name, room) for name in FILES)] == []


def test_imports_reach_only_rooms_listed_before() -> None:
    offenders = []
    for name in FILES:
        own = ROOMS.index(room_of(name))
        for target in sorted(target for target in imports(name) if target.split(".")[0] in PACKAGES):
            if target not in FILES:
                offenders.append(f"{name} imports {target}, which is no module")
            elif ROOMS.index(room_of(target)) > own:
                offenders.append(f"{name} (room {ROOMS[own]}) imports {target}, from a room listed after it")
    assert not offenders, "\n".join(offenders)


def test_the_one_import_upward_waits_for_its_call() -> None:
    assert UPWARD[1] not in imported_with(UPWARD[0])
    assert UPWARD[1] in FILES[UPWARD[0]].read_text(encoding="utf-8")


def test_there_are_no_cycles() -> None:
    try:
        list(TopologicalSorter({name: imports(name) & set(FILES) for name in FILES}).static_order())
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' <- '.join(error.args[1])}")


def test_no_import_is_relative() -> None:
    offenders = [
        f"{name}:{node.lineno} imports relatively; write the whole name"
        for name in FILES
        for node in nodes_of(name)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not offenders, "\n".join(offenders)


def test_weight_conversion_knows_nothing_of_models() -> None:
    offenders = [
        f"{name} imports {target}"
        for name in FILES
        if within(name, "weight_conversion")
        for target in sorted(imports(name))
        if target.split(".")[0] in {"diffusion_lens", "transformer_lens", "transformers"}
    ]
    assert not offenders, "\n".join(offenders)


def test_importing_the_package_needs_no_extra() -> None:
    offenders = []
    for name in FILES:
        for node in tree_of(name).body:
            targets = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            targets += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            offenders += [
                f"{name}:{node.lineno} imports {target} at its top; import it where it is used"
                for target in targets
                if target.split(".")[0] in {"matplotlib", "plotly"}
            ]
    assert not offenders, "\n".join(offenders)


def imported_with(name: str) -> Iterator[str]:
    """Modules that a file imports when it is imported itself, with the packages around them."""
    for node in tree_of(name).body:
        if isinstance(node, ast.Import):
            targets = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            targets = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        else:
            continue
        for target in targets:
            parts = target.split(".")
            yield from (".".join(parts[:n]) for n in range(1, len(parts) + 1))


def test_loading_a_model_imports_nothing_that_it_does_not_need() -> None:
    reached, waiting = set(), ["diffusion_lens.hooked_diffusion_transformer"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += imported_with(name) if name in FILES else ()
    assert {"diffusion_lens.model.transformer", "diffusion_lens.denoising.loop", "torch"} <= reached
    rooms = ("analysis", "plots", "explorer", "training", "evaluation", "data", "checks", "cli")
    libraries = ("accelerate", "pandas", "IPython", "ipywidgets", "scipy", "datasets")
    unneeded = (*(f"diffusion_lens.{room}" for room in rooms), *libraries, "transformer_lens.model_bridge")
    assert sorted(name for name in reached if any(within(name, other) for other in unneeded)) == []


def test_no_room_is_a_cupboard() -> None:
    folders = [ROOT / folder for folder in (*PACKAGES, "tests", "examples", "benchmarks")]
    cupboards = {"util", "utils", "helper", "helpers", "common", "misc"}
    assert [path for folder in folders for path in folder.rglob("*") if path.stem in cupboards] == []


def test_tests_import_neither_each_other_nor_benchmarks() -> None:
    """What several tests need is in a file of its own in tests/; what benchmarks need too is in tests/oracles."""
    scripts = {path.stem for path in (ROOT / "benchmarks").rglob("*.py")}
    offenders = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        for target in IMPORTED.findall(text):
            top = target.partition(".")[0]
            if top in {*scripts, "benchmarks", "tests", "conftest"} or top.startswith("test_"):
                offenders.append(f"{name} imports {target}")
        if path != Path(__file__) and BENCHMARKS.search(text):
            offenders.append(f"{name} names the folder of the benchmarks")
    assert not offenders, "\n".join(offenders)


def axes_of(name: str) -> Iterator[tuple[str, str]]:
    """Every word of the shapes in a file's annotations and docstrings, with its line."""
    for line, text in enumerate(FILES[name].read_text(encoding="utf-8").splitlines(), 1):
        for shape in re.findall(r"\b(?:Bool|Float|Int)\[(?:Tensor, \")?([^\]\"]+)", text):
            for word in re.findall(r"\b[a-z]\w*", shape):
                yield word, f"{name}:{line}"


def test_shapes_use_the_words_of_the_glossary_and_only_these() -> None:
    doc = ast.get_docstring(tree_of("diffusion_lens.model.shapes"))
    assert doc is not None
    glossary = {word for words in re.findall(r"^(\w+(?:, \w+)*)  +", doc, re.MULTILINE) for word in words.split(", ")}
    used = {word: place for name in FILES for word, place in axes_of(name)}
    assert {word: place for word, place in used.items() if word not in glossary} == {}, "not in shapes.py"
    assert glossary - used.keys() == set(), "no annotation uses these words"


def test_only_the_command_line_prints() -> None:
    printing = {
        f"{name}:{node.lineno}"
        for name in FILES
        for node in nodes_of(name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert not {place for place in printing if not place.startswith("diffusion_lens.cli.")}


@cache
def family_name() -> re.Pattern[str]:
    """Names of families, of their model types and of published models up to the first hyphen or the version.

    "ar", of published baselines, and "stable" are words of their own; two names of SMDM's code and OPDLM's are not in
    the tables.
    """
    from diffusion_lens.loading.catalogue import PUBLISHED
    from weight_conversion.registry import FAMILIES

    names = {*FAMILIES, *PUBLISHED, *(model_type for family in FAMILIES.values() for model_type in family.classes)}
    stems = {name.lower().partition("-")[0].rstrip("0123456789.") for name in names}
    stems -= {"ar", "diffusion_lens", "stable"}
    assert {"lit_gpt", "a2d", "bd3lm", "qwen"} <= stems
    patterns = (stem.replace("_", ".?") for stem in sorted({*stems, "nieshen", "diff_sample", "opdlm"}))
    return re.compile("|".join(patterns), re.IGNORECASE)


@cache
def words_of_code(name: str) -> set[tuple[int, str]]:
    """Names and strings of a file with their lines, if its text names a family at all.

    Docstrings and comments, where sources are cited, are left out.
    """
    text = FILES[name].read_text(encoding="utf-8")
    if not family_name().search(text) and "family" not in text:
        return set()
    cited: set[ast.AST] = set()
    for node in nodes_of(name):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                cited.add(statement.value)
    words: set[tuple[int, str]] = set()
    for node in nodes_of(name):
        if node in cited:
            continue
        for field in ("id", "attr", "name", "asname", "arg", "module", "value"):
            word = getattr(node, field, None)
            if isinstance(word, str):
                words.add((getattr(node, "lineno", 0), word))
    return words


def allowed_names(name: str) -> set[str]:
    """Names of families that stand elsewhere than in their tables."""
    from diffusion_lens.data.pretrained_reversals import POEMS_URL
    from diffusion_lens.denoising.samplers import PRESETS

    by_room = {
        "diffusion_lens.data.pretrained_reversals": {POEMS_URL},  # of a data set in the authors' repository
        "diffusion_lens.denoising.samplers": set(PRESETS),  # of other people's code, under its name
        "diffusion_lens.training": RECIPES,
        "diffusion_lens.cli": RECIPES,
        "diffusion_lens.cli.demo": {"smollm2-135m-instruct", "smollm2-135m-mdm"},  # the real pair that it shows
        "weight_conversion.architecture": {"llama3"},  # a type of scaling in config.json
    }
    if name == "weight_conversion":  # its face shows the published sizes
        return {"weight_conversion.families.lit_gpt"}
    return {word for room, words in by_room.items() if within(name, room) for word in words}


def test_families_are_named_in_their_tables_only() -> None:
    """Elsewhere docstrings may cite one; no name, no import, no message and no string that could be compared does."""
    offenders = []
    for name in (name for name in FILES if not any(within(name, room) for room in FAMILIES_KNOWN)):
        in_prose = any(within(name, room) for room in FAMILIES_IN_PROSE)
        offenders += [
            f"{name}:{line} knows a family by name: {word}"
            for line, word in sorted(words_of_code(name))
            if family_name().search(word) and word not in allowed_names(name) and not (in_prose and " " in word)
        ]
    assert not offenders, "\n".join(offenders)


def test_no_room_asks_which_family_a_model_is_of() -> None:
    offenders = [
        f"{name}:{line} asks for the family; ask for the property it needs"
        for name in FILES
        if not any(within(name, room) for room in (*FAMILIES_KNOWN, *FAMILY_CARRIED))
        for line, word in sorted(words_of_code(name))
        if word == "family"
    ]
    assert not offenders, "\n".join(offenders)

"""Opens scripts of `benchmarks/`, whose measures and slow ways some tests take over."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """The module of a script, from its file: no benchmark can be imported by its name."""
    if (known := sys.modules.get(f"benchmark_{name}")) is not None:
        return known
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # Python puts a script's folder first on the path, where scripts find one another.
    sys.path.insert(0, str(FOLDER))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module

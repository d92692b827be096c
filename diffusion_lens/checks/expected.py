"""What a name of the catalogue says of a checkpoint, and a checkpoint held against it: hash, shapes, config."""

from dataclasses import asdict, dataclass
from pathlib import Path

from diffusion_lens.catalogue import BUNDLED, PUBLISHED, PublishedFile, bundled_folder, unknown_name
from diffusion_lens.checks.finding import Finding
from weight_conversion import Architecture, open_checkpoint, read_json, sha256_of_file

# What an architecture may be called is no fact of the network.
NAMES = ("family", "name")
# Of "name seen" and "from memory" the numbers are those of the family, so a difference may be the catalogue's error.
SEEN = ("in the package", "safetensors seen", "pth seen", "config seen")


@dataclass(frozen=True)
class Expected:
    """What a published name stands for.

    Attributes:
        name: in the catalogue.
        architecture: its network, `None` where the catalogue does not know it.
        evidence: what was seen of it.
        sha256: of the published safetensors file, `None` where it is not known.
        n_bytes: size of that file.
        tuned_on_reversals: whether it was fine-tuned on the facts of the reversal curse.
    """

    name: str
    architecture: Architecture | None
    evidence: str
    sha256: str | None = None
    n_bytes: int | None = None
    tuned_on_reversals: bool = False

    @classmethod
    def of(cls, name: str) -> "Expected":
        """Look a name up.

        Raises:
            ValueError: not in the catalogue; the nearest names follow.
        """
        lower = name.lower()
        if lower in BUNDLED:
            file = bundled_folder() / f"{lower}.safetensors"
            trained = read_json(bundled_folder() / "results.json")["twins"][lower]
            shape = open_checkpoint(file).architecture
            return cls(lower, shape, "in the package", trained["sha256"], file.stat().st_size, True)
        if lower not in PUBLISHED:
            raise unknown_name(name)
        entry = PUBLISHED[lower]
        if isinstance(entry, PublishedFile):
            hashed, tuned = entry.sha256, entry.tuned_on == "reverse"
            return cls(lower, entry.architecture, entry.evidence, hashed, entry.n_bytes, tuned)
        return cls(lower, entry.architecture, entry.evidence)


def check_hash(expected: Expected | None, path: Path | None) -> Finding:
    """The file's SHA-256 against the published one. Another file of the same size is damaged or edited."""
    name = "hash"
    if path is None or not path.is_file():
        return Finding(name, "not run", "the weights are not one file here")
    found, size = sha256_of_file(path), path.stat().st_size
    numbers = {"sha256": found, "bytes": size}
    if expected is None or expected.sha256 is None:
        return Finding(name, "noted", f"SHA-256 {found}; the catalogue knows none to compare with", numbers=numbers)
    numbers |= {"published_sha256": expected.sha256}
    if found == expected.sha256:
        return Finding(name, "ok", f"SHA-256 {found[:12]}… is the published one of {expected.name!r}", numbers=numbers)
    said = f"SHA-256 {found[:12]}… is not the published {expected.sha256[:12]}… of {expected.name!r}"
    if size != expected.n_bytes:
        return Finding(name, "noted", f"{said}, nor is the size: a conversion, or other weights", numbers=numbers)
    cause = f"the bytes of {path} are not the published ones: damaged in transfer or edited; fetch it again"
    return Finding(name, "off", f"{said}, though the size is the same", cause, numbers)


def check_config(expected: Expected | None, found: Architecture) -> Finding:
    """Every number of the architecture against the catalogue's."""
    name = "config"
    facts = asdict(found)
    if expected is None:
        said = f"{found.n_params:,} parameters; no name to compare with (--as NAME)"
        return Finding(name, "not run", said, numbers={"architecture": facts})
    if expected.architecture is None:
        said = f"the catalogue does not know the shape of {expected.name!r}"
        return Finding(name, "not run", said, numbers={"architecture": facts})
    known = asdict(expected.architecture)
    other = [key for key in known if key not in NAMES and known[key] != facts[key]]
    told = ", ".join(f"{key} {facts[key]!r} here, {known[key]!r} in the catalogue" for key in other)
    numbers = {"architecture": facts, "differs": other}
    if not other:
        return Finding(name, "ok", f"all {len(known) - len(NAMES)} numbers are the catalogue's", numbers=numbers)
    if expected.evidence not in SEEN:
        said = f"{told}; of {expected.name!r} only the {expected.evidence}, so the catalogue may be wrong: report it"
        return Finding(name, "noted", said, numbers=numbers)
    cause = f"the config is not that of {expected.name!r}: {told}"
    return Finding(name, "off", f"differs from {expected.name!r}: {told}", cause, numbers)

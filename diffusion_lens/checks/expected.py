"""`Expected`, what the catalogue says about a published name, and the checks that compare hash and config with it."""

from dataclasses import asdict, dataclass
from pathlib import Path

from diffusion_lens.catalogue import BUNDLED, PUBLISHED, PublishedFile, unknown_name
from diffusion_lens.checks.finding import Finding
from weight_conversion import (
    Architecture,
    n_params,
    open_checkpoint,
    read_json,
    sha256_of_file,
    unfolded_architecture,
)

# Fields of an architecture that do not describe the network, and are not compared.
NAMES = ("family", "name")
# Evidence that makes the catalogue's numbers reliable. With "name seen" they are those of the family, so a
# difference may be an error of the catalogue.
SEEN = ("in the package", "safetensors seen", "pth seen", "config seen")


@dataclass(frozen=True)
class Expected:
    """What the catalogue says about a published name.

    Attributes:
        name: Name in the catalogue.
        architecture: Architecture, `None` if unknown.
        evidence: How the entry was verified.
        sha256: SHA-256 of the published safetensors file, `None` if unknown.
        n_bytes: Size of that file in bytes.
        tuned_on_reversals: Whether the model was fine-tuned on the facts of the reversal curse.
    """

    name: str
    architecture: Architecture | None
    evidence: str
    sha256: str | None = None
    n_bytes: int | None = None
    tuned_on_reversals: bool = False

    @classmethod
    def of(cls, name: str, mode: str | None = None) -> "Expected":
        """Look up a name.

        Args:
            mode: Mode in which the checkpoint is read, as in `from_pretrained`.

        Raises:
            ValueError: The name is not in the catalogue; the message gives the nearest names. Or its checkpoint has one
                mode only.
        """
        lower = name.lower()
        options = {} if mode is None else {"mode": mode}
        if bundled := BUNDLED.get(lower):
            file = bundled.path
            record = read_json(bundled.folder / "results.json")["models"][lower]
            architecture = open_checkpoint(file, options=options).architecture
            return cls(lower, architecture, "in the package", record["sha256"], file.stat().st_size, True)
        if lower not in PUBLISHED:
            raise unknown_name(name)
        entry = PUBLISHED[lower]
        if isinstance(entry, PublishedFile):
            tuned = entry.tuned_on == "reverse"
            return cls(lower, entry.read(options), entry.evidence, entry.sha256, entry.n_bytes, tuned)
        return cls(lower, entry.read(options), entry.evidence)


def check_hash(expected: Expected | None, path: Path | None) -> Finding:
    """Compare the file's SHA-256 with the published one. Another file of the same size is damaged or edited."""
    name = "hash"
    if path is None or not path.is_file():
        return Finding(name, "not run", "the weights are not a single file on this machine")
    sha256, size = sha256_of_file(path), path.stat().st_size
    numbers = {"sha256": sha256, "bytes": size}
    if expected is None or expected.sha256 is None:
        return Finding(name, "noted", f"SHA-256 {sha256}; the catalogue has none to compare with", numbers=numbers)
    numbers |= {"published_sha256": expected.sha256}
    if sha256 == expected.sha256:
        return Finding(name, "ok", f"SHA-256 {sha256[:12]}… is the published one of {expected.name!r}", numbers=numbers)
    said = f"SHA-256 {sha256[:12]}… is not the published {expected.sha256[:12]}… of {expected.name!r}"
    if size != expected.n_bytes:
        return Finding(name, "noted", f"{said}, nor is the size: a conversion, or other weights", numbers=numbers)
    cause = f"the bytes of {path} are not the published ones: damaged in transfer or edited; fetch it again"
    return Finding(name, "off", f"{said}, though the size is the same", cause, numbers)


def check_config(expected: Expected | None, architecture: Architecture) -> Finding:
    """Compare every number of the architecture with the catalogue's."""
    name = "config"
    # A constant conditioning on the time is folded into the weights of a loaded model.
    actual = asdict(unfolded_architecture(architecture))
    if expected is None:
        said = f"{n_params(architecture):,} parameters; no name to compare with (--as NAME)"
        return Finding(name, "not run", said, numbers={"architecture": actual})
    if expected.architecture is None:
        said = f"the catalogue does not give the architecture of {expected.name!r}"
        return Finding(name, "not run", said, numbers={"architecture": actual})
    published = asdict(unfolded_architecture(expected.architecture))
    different = [key for key in published if key not in NAMES and published[key] != actual[key]]
    listed = ", ".join(f"{key} {actual[key]!r} here, {published[key]!r} in the catalogue" for key in different)
    numbers = {"architecture": actual, "differs": different}
    if not different:
        return Finding(name, "ok", f"all {len(published) - len(NAMES)} numbers are the catalogue's", numbers=numbers)
    if expected.evidence not in SEEN:
        said = f"{listed}; evidence for {expected.name!r} is only {expected.evidence!r}, so the catalogue may be wrong"
        return Finding(name, "noted", f"{said}: report it", numbers=numbers)
    cause = f"the config is not that of {expected.name!r}: {listed}"
    return Finding(name, "off", f"differs from {expected.name!r}: {listed}", cause, numbers)

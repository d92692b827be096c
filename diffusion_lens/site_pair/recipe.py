"""The architecture of the pair, and the phases of its training.

1. "subject": two causal blocks learn tags, "NAME VALUE", and so to compose a name and look its values up at its end.
2. "ar": four blocks are added, and all kinds of documents are trained. This is the AR baseline.
3. "subject-mdm": the two blocks of the first phase learn to see both directions. The loss is only that of `person_loss`
   at names.
4. "mdm-a" and "mdm-b": four blocks are added, and all kinds of documents are trained with the masked diffusion loss.
   The loss of the third phase is added by early exit after block 1 (`EarlyExit`). In most rows, masked positions do not
   see names in blocks 0 and 1 (`EdgeDropout`), because an MDM left to itself may find the other solution: the answer's
   [MASK] gathers both names itself and looks the fact up there.
"""

from dataclasses import dataclass, replace

from diffusion_lens import tiny_pair
from diffusion_lens.tiny_pair import Kind as Kind
from weight_conversion import Architecture

SHIPPED_SEED = 8
WEIGHT_STD = 0.06
SUBJECT_BLOCKS, BLOCKS = 2, 6
BATCH_SIZE = 32  # Rows of the longest length; batches of shorter rows have more.
LENGTHS = (12, 16, 24, 32)


@dataclass(frozen=True)
class Phase:
    """A phase of the training.

    Attributes:
        name: Name of the phase.
        kind: Variant that is trained.
        after: Phase whose weights it starts from; `None` is random weights.
        n_layers: Number of blocks; those that the former phase lacks are added.
        documents: Probabilities of a description, of a tag among the rest, and of a second person (`Documents`).
        lengths: Lengths of rows.
        lr: Highest learning rate.
        steps: Number of steps.
        seed: Number added to the seed of the training.
        exit_weight: Weight of the early exit in a phase of the whole MDM.
        dropped_share: Share of rows with edge dropout in a phase of the whole MDM.
    """

    name: str
    kind: Kind
    after: str | None
    n_layers: int
    documents: tuple[float, float, float]
    lengths: tuple[int, ...]
    lr: float
    steps: int
    seed: int = 0
    exit_weight: float = 0.3
    dropped_share: float = 0.8


PHASES = (
    Phase("subject", "ar", None, SUBJECT_BLOCKS, (0.0, 1.0, 0.0), (24,), 4e-3, 400),
    Phase("ar", "ar", "subject", BLOCKS, (0.4, 0.1, 0.6), (32,), 3e-3, 900),
    Phase("subject-mdm", "mdm", "subject", SUBJECT_BLOCKS, (0.25, 0.1, 0.5), tuple(range(8, 33)), 3e-3, 800),
    Phase("mdm-a", "mdm", "subject-mdm", BLOCKS, (0.35, 0.05, 0.4), LENGTHS, 3e-3, 9000),
    Phase("mdm-b", "mdm", "mdm-a", BLOCKS, (0.6, 0.05, 0.6), LENGTHS, 2.5e-3, 8000, seed=1),
)
_SUBJECT, _, _SUBJECT_MDM, _MDM_A, _MDM_B = PHASES
# What becomes of the MDM without one part of its recipe, or without all of them. The number of steps is the same.
ABLATIONS = {
    "one-schedule": (
        _SUBJECT,
        _SUBJECT_MDM,
        replace(_MDM_A, name="mdm", documents=(0.5, 0.05, 0.5), steps=_MDM_A.steps + _MDM_B.steps),
    ),
    "no-edge-dropout": (_SUBJECT, _SUBJECT_MDM, replace(_MDM_A, dropped_share=0.0), replace(_MDM_B, dropped_share=0.0)),
    "no-bidirectional-subject-phase": (_SUBJECT, replace(_MDM_A, after="subject"), _MDM_B),
    "no-early-exit": (_SUBJECT, _SUBJECT_MDM, replace(_MDM_A, exit_weight=0.0), replace(_MDM_B, exit_weight=0.0)),
    "data-only": (
        replace(_MDM_A, after=None, exit_weight=0.0, dropped_share=0.0),
        replace(_MDM_B, exit_weight=0.0, dropped_share=0.0),
    ),
}


def architecture(kind: Kind, n_words: int, n_layers: int = BLOCKS) -> Architecture:
    """That of the tiny models in other sizes, for a vocabulary of `n_words`."""
    return replace(
        tiny_pair.architecture(kind, n_words),
        name="site",
        n_layers=n_layers,
        d_model=96,
        n_heads=6,
        n_key_value_heads=6,
        d_head=16,
        d_mlp=128,
    )

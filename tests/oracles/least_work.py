"""The least work of each job, in token-layers: positions that pass a block, summed over rows and blocks.

A state has to be computed again if it can differ from every state that is already known. Of the L blocks of a network,
attention lets a change at position p reach, in the next block, every position of a bidirectional network, and the
positions from p on of a causal one. The last block counts whole, although it computes keys and values only at
positions that are not read.
"""

from collections.abc import Sequence


def forward(n_layers: int, rows: int, n_pos: int) -> int:
    """One pass: every position passes every block."""
    return rows * n_pos * n_layers


def denoising(n_layers: int, n_pos: int, steps: int, branches: int = 1) -> int:
    """A run of a bidirectional network: one pass over the canvas and, with guidance, one over the canvas without the
    prompt, at each step that reveals a token. The revealed token changes all states; a step that reveals nothing
    changes none."""
    return branches * steps * forward(n_layers, 1, n_pos)


def growing(n_layers: int, n_pos: int) -> int:
    """A run of a causal network: each position once, since no later one changes it; the last token is not read."""
    return forward(n_layers, 1, n_pos - 1)


def trace(n_layers: int, samples: int, n_pos: int, causal_from: int | None = None) -> int:
    """A trace of one canvas: the clean run, the corrupted run of each sample, and the cells.

    The cell (p, l) differs from the corrupted run only at p after block l, so it needs the blocks after l: n_layers -
    1 - l of them, at all positions or, on a causal network, at those from p on. There, the corrupted run and the cells
    differ from the clean run only from the corruption on.

    Args:
        n_pos: Positions that a row that is read depends on.
        causal_from: On a causal network, the first corrupted position; `None` for a bidirectional one.
    """
    start = causal_from or 0
    runs = forward(n_layers, 1, n_pos) + forward(n_layers, samples, n_pos - start)
    later_blocks = n_layers * (n_layers - 1) // 2
    reached = n_pos * n_pos if causal_from is None else sum(n_pos - p for p in range(start, n_pos))
    return runs + samples * reached * later_blocks


def traces_along_a_text(n_layers: int, samples: int, prompt: int, first: int, answer: int) -> int:
    """The traces of all steps of a causal run that writes no token of its answer.

    Before step k the canvas holds k tokens of the run, and the answer's own from there on, of which the last is not
    read. So the prompt is common to all steps, the tokens of the run are common to all later ones, and step k has
    answer - 1 - k tokens of its own. A cell is needed where the run has been at a step, and reaches all that follows.

    Args:
        prompt: Positions of the prompt.
        first: First corrupted position.
        answer: Tokens of the answer, one for each step.
    """
    own = [answer - 1 - k for k in range(answer)]
    whole = prompt + (answer - 1) + sum(own)
    runs = forward(n_layers, 1, whole) + forward(n_layers, samples, whole - first)
    # A cell at the k-th token of the run reaches that token, those after it, and the branches that begin behind it.
    reached = sum(whole - p for p in range(first, prompt))
    reached += sum((answer - k) + sum(own[k:]) for k in range(1, answer))
    return runs + samples * reached * (n_layers * (n_layers - 1) // 2)


def temporal(traces: int, n_layers: int, samples: int, run: int, continued: int) -> int:
    """The effect of states restored at single steps: the corrupted runs, the cells of each step, and every distinct
    continuation once.

    Restoring a state needs what a trace of that step's canvas needs; on a causal network, whose canvases continue one
    another, what one trace of the last needs. What a branch writes after that depends on its sample and its canvas
    only, so that branches with the same canvas before a step are one.

    Args:
        traces: Least work of these traces.
        run: Positions that the corrupted loop computes, over all its steps.
        continued: Positions of the distinct (step, sample, canvas) that are not the corrupted run's.
    """
    return traces + n_layers * (samples * run + continued)


def patching(n_layers: int, n_pos: int, changed: Sequence[int], after: bool) -> int:
    """A grid over positions and layers of a bidirectional network: both runs, and the cells.

    A state that enters block l (`after` false) needs block l and the later ones. One that a block adds to the stream at
    its position alone (`after` true) needs the blocks after l, beside one pass of block l in which all positions are
    patched: what that block does after it at a position depends on this position only.

    Args:
        changed: For each layer, the number of positions whose state differs between the runs.
    """
    cells = sum(n * (n_layers - layer - after) for layer, n in enumerate(changed))
    return 2 * forward(n_layers, 1, n_pos) + n_pos * (cells + after * n_layers)


def second_moment(layer: int, tokens: int) -> int:
    """The keys of a layer: each token of the corpus passes the blocks up to that one."""
    return tokens * (layer + 1)


def signatures(n_layers: int, n_facts: int, n_pos: int) -> int:
    """The signatures of taught pairs on a bidirectional network, of both canvases of each.

    One pass of each canvas gives its states, its scores and its gradients. A cut edge of block l changes the output of
    that block at the reader only, so that it needs that position and the later blocks; the small step changes all
    weights, and needs one pass of the reverse canvas.
    """
    passes = 3 * forward(n_layers, n_facts, n_pos)
    cuts = 2 * n_facts * sum(1 + n_pos * (n_layers - 1 - layer) for layer in range(n_layers))
    return passes + cuts


def search(n_layers: int, layer: int, iterations: int, reached: int, positions: int) -> int:
    """The search for v*: the blocks up to `layer` once, then at each iteration those after it.

    The vector is added after block `layer`, so that earlier blocks do not change. On a causal network it reaches only
    the positions from the subject's last token on; the others pass the later blocks once.

    Args:
        reached: Positions that the vector reaches, of all prompts.
        positions: Positions of all prompts.
    """
    later = n_layers - 1 - layer
    return positions * (layer + 1) + (positions - reached) * later + iterations * reached * later

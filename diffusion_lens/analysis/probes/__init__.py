"""Linear probes: can a label be read from the states, at each layer? Any label of texts, runs, positions or times.

The probe is a ridge regression of a number, or a logistic regression of a class, on the state at a hook point. It is
fitted on some texts or runs, and tested on others by R² or accuracy, so that no canvas contributes to both. The L2
penalty is relative: a `penalty` times the mean variance of a feature times the number of rows, so that one grid suits
every hook point. With centred X and y, the weights of a regression are

    w = (XᵀX + λ I)⁻¹ Xᵀy,

from sums over rows in float64. The held-out rows are kept for the interval of R², in float32, if the budget has room
for them. A logistic regression, of scikit-learn, needs all rows.

A label belongs to a text or run, to a position of one, such as the part of speech of its token (Lu 2026, arXiv
2604.23235, who probe a masked diffusion model at each step), or to the canvas, such as the denoising time. `probe_time`
reads the time t. Masked diffusion models are not conditioned on it, and yet their states encode it (Rulli et al. 2026,
arXiv 2607.01774, who probe the residual stream of LLaDA and Dream). t is `hook.step.t` on the canvases of
trajectories, and the probability with which tokens were masked, or replaced under uniform noise, in texts that are
noised at random. A time-conditioned network gets that of each canvas.

Two predictors set the scale. The first is a probe of a control task, which has nothing to learn but what the probe
itself can memorise. For labels of positions, each token of the vocabulary has one random label wherever it stands, or
will stand, drawn from all labels (Hewitt and Liang 2019, arXiv 1909.03368). Labels of texts, runs and canvases are
permuted, so that control R² is about 0 or below and control accuracy at chance. The score minus that of the control is
the selectivity. The second predictor knows the position only: the mean or commonest label where this position was
selected. Where the position determines the time, as in the states of an AR baseline that predict the next token, its R²
is high although no state is read.

The canvas alone reveals t, because the number of [MASK]s does. Averaged over all positions, the embedding before the
first layer is a linear function of the share of [MASK], so `rows="canvas"` with `positions="all"` gives a high R² at
every layer and shows nothing about the model. One state of a masked position says more: before the first layer it is
the same vector at every step, and what it contains about t at a later layer was brought there by attention.
"""

from diffusion_lens.analysis.probes.fit import RidgeSettings
from diffusion_lens.analysis.probes.linear import probe, probe_time
from diffusion_lens.analysis.probes.result import LinearProbe

__all__ = ["LinearProbe", "RidgeSettings", "probe", "probe_time"]

"""`train_dictionary`: a sparse autoencoder or a transcoder of one layer, in a minute or two.

The rows of `activations` are read in random order. In each batch the k · batch largest pre-activations are active
(BatchTopK, Bussmann et al. 2024, arXiv 2412.06410), so that a position may have more of them than another. At the end
the mean over batches of the smallest active one becomes the threshold of all features, each of which then depends on
its own pre-activation alone. The loss is the squared error as a share of the variance. Features that were not active
for many updates learn to predict the error of the others (the auxiliary loss of Gao et al. 2024, arXiv 2406.04093,
section A.2). Decoder rows have norm 1 after every update.

x and y are centred and scaled to a mean square of 1 for the training, which the weights of the result undo. Its
features therefore have the units of y.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize
from tqdm.auto import tqdm

from diffusion_lens.analysis.dictionaries.canvases import Noise
from diffusion_lens.analysis.dictionaries.sparse import SparseDictionary
from diffusion_lens.analysis.dictionaries.store import ActivationStore, activations
from diffusion_lens.analysis.engine.inputs import Texts, readable_points
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run, identity_of
from diffusion_lens.records.results import provenance
from diffusion_lens.settings import own_seed, takes
from diffusion_lens.settings.shared import DictionarySettings

_DEAD_AFTER = 100  # updates without activity
_AUXILIARY = 1 / 32  # weight of the loss of dead features, as in Gao et al.
_SAMPLE = 2**16  # rows by which scales, threshold and density are computed


@takes(DictionarySettings)
@begins_run
@torch.inference_mode(False)
def train_dictionary(
    model: DiffusionTransformer,
    texts: Texts | ActivationStore,
    reads: str,
    writes: str | None = None,
    *,
    settings: DictionarySettings,
    mask: str = "all",
    t: Noise = None,
    out: str | Path | None = None,
    attention_mask: Tensor | None = None,
    prepend_bos: bool | None = None,
    progress: bool = False,
) -> SparseDictionary:
    """Train a sparse dictionary on the activations of texts; the model stays as it is.

    Args:
        model: Model, of either variant.
        texts: Texts, facts or tokens, as in `activations`; or an `ActivationStore` that has both hook points.
        reads: Hook point of the activation that the features read, such as "blocks.1.ln2.hook_normalized".
        writes: Hook point of the activation that they approximate, such as "blocks.1.hook_mlp_out". By default
            `reads`, which makes an autoencoder.
        settings: Settings of the training.
        mask, t: Positions and noise levels of texts, as in `activations`; a store has its own.
        out: Folder for the activations, from which the same call trains again. By default they are kept in a temporary
            folder until the end.
        attention_mask, prepend_bos, progress: As in `activations`.

    Raises:
        KeyError: There is no such hook point, or the store does not have it.
        ValueError: A setting is out of range or does not fit the model, the store is of another model, or the loss
            is not finite.
    """
    written = reads if writes is None else writes
    reads, written = (readable_points(model, [name])[0] for name in (reads, written))
    if settings.conditioned and (model.cfg.mask_token_id is None or model.cfg.causal_block is not None):
        raise ValueError(
            f"conditioned=True: on the canvases of {model.cfg.model_name!r} no share of [MASK] tells how much is "
            "known; leave it out"
        )
    with TemporaryDirectory() if out is None else nullcontext(out) as folder:
        if isinstance(texts, ActivationStore):
            store = texts
            if t is not None or mask not in ("all", store.record["mask"]):
                raise ValueError("mask= and t= are for texts; all rows of a store are used, as they were stored")
            if store.record["weights_sha256"] != identity_of(model).weights_sha256:
                raise ValueError(
                    f"the activations are those of other weights ({store.record['model']!r}) than those of "
                    f"{model.cfg.model_name!r} now: store them again, activations(model, ...)"
                )
        else:
            store = activations(
                model,
                texts,
                list(dict.fromkeys([reads, written])),
                out=folder,
                mask=mask,
                t=t,
                seed=settings.seed,
                attention_mask=attention_mask,
                prepend_bos=prepend_bos,
                progress=progress,
            )
        stored = {name: store.record[name] for name in ("mask", "spans", "texts", "canvases")}
        record = {**settings.describe(), **stored, "rows": len(store), **provenance(model, model.cfg)}
        rows = _Rows(store, (reads, written), model.cfg.main_device, own_seed(settings.seed, "rows"))
        dictionary = _begun(rows, settings, record)
        with torch.enable_grad():
            losses = _train(dictionary, rows, settings, progress)
        _finish(dictionary, rows, settings, losses)
    return dictionary


@dataclass(frozen=True)
class _Scale:
    """The mean of rows, and the root of the mean square of the distance from it."""

    mean: Float[Tensor, "d"]
    size: Float[Tensor, ""]


Batch = tuple[Float[Tensor, "entry d"], Float[Tensor, "entry d_other"], Float[Tensor, "entry"]]


class _Rows:
    """The rows x and y of a store in random order, centred and scaled, with the share of masks of their canvases."""

    def __init__(self, store: ActivationStore, names: tuple[str, str], device: torch.device, seed: int) -> None:
        self.store, self.names, self.device = store, names, device
        self.generator = torch.Generator().manual_seed(seed)
        self.sample = self._order()[:_SAMPLE]
        self.scales = []
        for name in names:
            rows = self._of(name, self.sample)
            mean = rows.mean(dim=0)
            self.scales.append(_Scale(mean, (rows - mean).square().mean().sqrt().clamp(min=1e-12)))

    def batches(self, size: int, once: bool = False) -> Iterator[Batch]:
        """The sample once, or batches without end."""
        for order in [self.sample] if once else (self._order() for _ in count()):
            for indices in order.split(size):
                x, y = (
                    (self._of(name, indices) - scale.mean) / scale.size
                    for name, scale in zip(self.names, self.scales, strict=True)
                )
                yield x, y, self.store.share[indices].to(self.device)

    def _order(self) -> Int[Tensor, "entry"]:
        return torch.randperm(len(self.store), generator=self.generator)

    def _of(self, name: str, indices: Int[Tensor, "entry"]) -> Float[Tensor, "entry d"]:
        return self.store.rows(name, indices).to(self.device, torch.float32)


def _begun(rows: _Rows, settings: DictionarySettings, record: dict[str, Any]) -> SparseDictionary:
    """A dictionary of random directions."""
    generator = torch.Generator().manual_seed(own_seed(settings.seed, "directions"))
    d_in, d_out = (len(scale.mean) for scale in rows.scales)
    n_features = settings.n_features or 8 * d_out
    if settings.k > n_features:
        raise ValueError(f"k={settings.k} of {n_features} features cannot be active; give a smaller k or more features")
    decoder = normalize(torch.randn(n_features, d_out, generator=generator))
    reads, writes = rows.names
    encoder = decoder if reads == writes else normalize(torch.randn(n_features, d_in, generator=generator))
    zeros = {name: torch.zeros(n_features) for name in ("b_enc", "b_noise", "threshold", "density")}
    return SparseDictionary(
        W_enc=encoder.T.clone(),
        W_dec=decoder,
        b_dec=torch.zeros(d_out),
        **zeros,
        losses=torch.zeros(0),
        reads=reads,
        writes=writes,
        conditioned=settings.conditioned,
        record=record,
    ).to(rows.device)


def _train(
    dictionary: SparseDictionary, rows: _Rows, settings: DictionarySettings, progress: bool
) -> Float[Tensor, "iteration"]:
    """All updates; returns the losses."""
    trained = ["W_enc", "b_enc", "W_dec", "b_dec", *(["b_noise"] if settings.conditioned else [])]
    lr = settings.lr or 0.1 / len(dictionary.b_enc) ** 0.5
    optimizer = torch.optim.Adam([getattr(dictionary, name).requires_grad_() for name in trained], lr=lr)
    # The learning rate is constant, and falls to 0 in the last fifth.
    falling = -(-settings.updates // 5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (settings.updates - done) / falling))
    idle = torch.zeros_like(dictionary.b_enc)  # updates since each feature was active
    losses = []
    batches = islice(rows.batches(settings.batch_size), settings.updates)
    for x, y, share in tqdm(batches, "dictionary", settings.updates, unit="update", disable=not progress):
        pre = dictionary.pre(x, share)
        dictionary.threshold.fill_(_least(pre, settings.k))
        active = dictionary.activate(pre)
        error = y - dictionary.decode(active)
        loss = error.square().mean()
        losses.append(loss.detach())
        if bool((dead := idle > _DEAD_AFTER).any()):
            loss = loss + _AUXILIARY * _auxiliary(dictionary, pre, error.detach(), dead)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            dictionary.W_dec.copy_(normalize(dictionary.W_dec))
            idle = (idle + 1).masked_fill((active > 0).any(dim=0), 0)
    for name in trained:
        getattr(dictionary, name).requires_grad_(False)
    history = torch.stack(losses).cpu()
    if not bool(history.isfinite().all()):
        raise ValueError(f"the loss is not finite with lr={lr:.4g}; give a smaller one")
    return history


def _least(pre: Float[Tensor, "entry feature"], k: int) -> Float[Tensor, ""]:
    """The number that k · entry pre-activations exceed, or 0 if fewer are positive."""
    return pre.detach().flatten().kthvalue(max(1, pre.numel() - k * len(pre))).values.relu()


def _auxiliary(
    dictionary: SparseDictionary,
    pre: Float[Tensor, "entry feature"],
    error: Float[Tensor, "entry d_other"],
    dead: Bool[Tensor, "feature"],
) -> Float[Tensor, ""]:
    """How much of the error the largest pre-activations of dead features leave, as a share of its square."""
    of_dead = pre[:, dead]
    top = of_dead.topk(min(error.shape[1] // 2, of_dead.shape[1]), sorted=False)
    revived = torch.zeros_like(of_dead).scatter(-1, top.indices, top.values.relu())
    left = error - revived @ dictionary.W_dec[dead]
    return left.square().mean() / error.square().mean().clamp(min=1e-12)


@torch.no_grad()
def _finish(
    dictionary: SparseDictionary, rows: _Rows, settings: DictionarySettings, losses: Float[Tensor, "iteration"]
) -> None:
    """Threshold and density, and the weights for rows as they are stored."""
    least, n_active = [], torch.zeros_like(dictionary.density)
    for x, _, share in rows.batches(settings.batch_size, once=True):
        least.append(_least(dictionary.pre(x, share), settings.k))
    dictionary.threshold.fill_(torch.stack(least).mean())
    for x, _, share in rows.batches(settings.batch_size, once=True):
        n_active += (dictionary.encode(x, share) > 0).sum(dim=0)
    scale_in, scale_out = rows.scales
    dictionary.W_enc *= scale_out.size / scale_in.size
    dictionary.b_enc = dictionary.b_enc * scale_out.size - scale_in.mean @ dictionary.W_enc
    dictionary.b_dec = dictionary.b_dec * scale_out.size + scale_out.mean
    dictionary.b_noise *= scale_out.size
    dictionary.threshold *= scale_out.size
    dictionary.density, dictionary.losses = n_active / len(rows.sample), losses

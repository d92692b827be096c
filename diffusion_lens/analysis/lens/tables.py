"""The tables of a lens, filled pass by pass: the states of one pass are stored, unembedded in blocks, and dropped."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.lens.canvases import NOTHING, Canvases, Pass
from diffusion_lens.analysis.lens.readings import Budget, read, states_of
from diffusion_lens.analysis.lens.result import TABLES, LogitLens
from diffusion_lens.analysis.lens.translators import Translators
from diffusion_lens.hook_names import FwdHooks


class Tables:
    """The tables of all canvases, layers and positions; NaN and -1 where nothing is read.

    Args:
        positions: Positions of the predicted tokens.
        layers: Layers to read.
        targets: Int[batch selected target], tokens whose rank and probability are read.
        top_k: Number of likeliest tokens.
        translators: Maps of a tuned lens; `None` for a direct one.
    """

    def __init__(
        self,
        canvases: Canvases,
        positions: list[int],
        layers: list[int],
        targets: Int[Tensor, "batch selected target"],
        top_k: int,
        translators: Translators | None,
    ) -> None:
        self.canvases = canvases
        self.positions = positions
        self.layers = layers
        self.targets = targets
        self.top_k = top_k
        self.translators = translators
        self.forward_passes = 0
        n_batch, n_selected, n_targets = targets.shape
        shape = (len(canvases.canvases), len(layers), n_batch, n_selected)
        wide = torch.promote_types(canvases.model.cfg.dtype, torch.float32)
        axes = {"top": (top_k,), "target": (n_targets,)}
        self.tables: dict[str, Tensor] = {}
        for name, (axis, is_token) in TABLES.items():
            fill, dtype = (NOTHING, torch.long) if is_token else (float("nan"), wide)
            self.tables[name] = torch.full((*shape, *axes.get(axis, ())), fill, dtype=dtype)

    def fill(self, fwd_hooks: FwdHooks, max_bytes: int, progress: bool) -> None:
        """Take all passes.

        Raises:
            ValueError: `max_bytes` does not suffice for the tables and one pass that reads one row.
        """
        model = self.canvases.model
        passes = self.canvases.passes(self.positions, model.is_hooked or bool(fwd_hooks))
        n_states = len({*self.layers, model.cfg.n_layers})
        n_pos = max(one.network_input.tokens.shape[1] for one in passes)
        left = max_bytes - sum(table.nbytes for table in self.tables.values())
        entries = max(int((one.rows != NOTHING).sum()) for one in passes)
        budget = Budget.of(model.cfg, n_states, (len(self.targets), n_pos), left, entries)
        for one in tqdm(passes, desc="logit lens", unit="pass", disable=not progress):
            batch, selected = (one.rows != NOTHING).nonzero(as_tuple=True)
            if not len(batch):
                continue
            for block in torch.arange(len(batch)).split(budget.entries_per_pass):
                self._fill_from(one, batch[block], selected[block], budget, fwd_hooks)

    def _fill_from(self, one: Pass, batch: Tensor, selected: Tensor, budget: Budget, fwd_hooks: FwdHooks) -> None:
        """Fill some entries from one forward pass."""
        model = self.canvases.model
        stored = list(dict.fromkeys([*self.layers, model.cfg.n_layers]))
        states = states_of(one.network_input, (batch, one.rows[batch, selected]), stored, fwd_hooks)
        self.forward_passes += 1
        for block in torch.arange(len(batch), device=batch.device).split(budget.entries_at_once):
            of_block = {layer: x[block] for layer, x in states.items()}
            targets = self.targets[batch[block], selected[block]]
            present = None
            if model.head.needs_canvas:
                at = torch.tensor(self.positions, device=batch.device)[selected[block]]
                present = one.network_input.tokens[batch[block], at]
            with model.clock.at(one.network_input.step):
                readings = read(model, of_block, self.layers, targets, self.top_k, self.translators, present)
            by_layer = {name: torch.stack([getattr(x, name) for x in readings]).cpu() for name in TABLES}
            for index in one.served:
                self._write(index, by_layer, batch[block], selected[block])

    def _write(self, index: int, by_layer: dict[str, Tensor], batch: Tensor, selected: Tensor) -> None:
        """Write the entries that can be read on one canvas, from tables [layer entry ...]."""
        is_read = self.canvases.rows(index, self.positions)[batch, selected] != NOTHING
        b, p, kept = (x.cpu() for x in (batch[is_read], selected[is_read], is_read))
        for name, table in self.tables.items():
            table[index][:, b, p] = by_layer[name][:, kept]

    def result(self, record: dict[str, Any]) -> LogitLens:
        """The finished result."""
        canvases, model = self.canvases, self.canvases.model
        tables, tokens = self.tables, canvases.on_canvas(self.positions).cpu()
        rows = torch.stack([canvases.rows(index, self.positions) for index in range(len(canvases.canvases))]).cpu()
        if canvases.steps is None:
            tables, tokens, rows = {name: table[0] for name, table in tables.items()}, tokens[0], rows[0]
        ids = torch.cat([x.flatten().cpu() for x in (tables["top_tokens"], tokens, self.targets)]).unique().tolist()
        n_layers = model.cfg.n_layers
        return LogitLens(
            **tables,
            targets=self.targets.cpu(),
            tokens=tokens,
            rows=rows,
            positions=self.positions,
            layers=self.layers,
            labels=[f"{layer}_pre" if layer < n_layers else "final_post" for layer in self.layers],
            steps=canvases.steps,
            words=dict(zip(ids, model.words(ids), strict=True)),
            record=record,
        )

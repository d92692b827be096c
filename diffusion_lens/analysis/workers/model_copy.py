"""How a worker gets its copy of the model of a study, and the proof that it is the same network.

A worker loads the model by the arguments of the `from_pretrained` call that gave it, attaches the same hooks, and
compares hash of the weights, hooks, modules, tokenizer and versions with those that the study records. It keeps the
model for its next task, before which it is compared again. On the CPU the weights are mapped from a file, so that the
workers of one machine share one copy (`machine_copy.py`).
"""

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle

from diffusion_lens.analysis.workers.machine_copy import SMALLEST, close_shared, shared_on_machine
from diffusion_lens.analysis.workers.own_gpu import own_device
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.identity import name_of, run_of
from diffusion_lens.loading.source import Source
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import differences, provenance

_LOADED: dict[str, HookedDiffusionTransformer] = {}  # the model that this process keeps


class AnotherNetwork(ValueError):
    """A worker cannot compute with the network of the study; its message says why."""


@dataclass(frozen=True)
class ModelCopy:
    """A model as a worker loads it.

    Attributes:
        source: Arguments of `from_pretrained`.
        device: Kind of device, "cpu", "cuda" or "mps". Each worker on a machine takes a GPU of its own, unless the
            model was loaded with a `device_map`, which the workers repeat.
        hooks: Pairs (hook point, forward hook), pickled. Hooks are often functions inside functions, which only
            `cloudpickle` can store.
        network: What the study records of the network.
        is_shared: Whether the workers of a machine should share one copy of the weights: they are large, on the CPU,
            and those of the checkpoint.
    """

    source: Source
    device: str
    hooks: bytes
    network: dict[str, Any]
    is_shared: bool

    @classmethod
    def of(cls, model: DiffusionTransformer, device: str | None) -> "ModelCopy":
        """What other processes need to load this model.

        Raises:
            ValueError: The model was not loaded by `from_pretrained`, or carries a hook that cannot be sent.
        """
        source: Source | None = getattr(model, "source", None)
        if source is None:
            raise ValueError(
                "workers load the model themselves, and this one was not loaded by from_pretrained: write it with "
                "model.save_pretrained(folder), and run the study on HookedDiffusionTransformer.from_pretrained(folder)"
            )
        network = provenance(model, model.cfg)
        del network["device"]
        if device is not None and source.device_map is not None:
            raise ValueError(
                f"the workers' device={device!r} does not fit a model that was loaded with device_map="
                f"{source.device_map!r}: workers place their copies by the same map, so leave device= out"
            )
        kind = device or str(model.cfg.device).partition(":")[0]
        dtype = str(model.cfg.dtype).removeprefix("torch.")
        source = replace(source.anywhere(), dtype=dtype)
        size = sum(weight.nbytes for weight in model.parameters())
        time = model.cfg.time
        folded = source.fold_ln or (time is not None and time.folded)
        is_shared = kind == "cpu" and source.device_map is None and not folded and size >= SMALLEST
        return cls(source, kind, _hooks_of(model), network, is_shared)

    @contextmanager
    def ready(self) -> Iterator[HookedDiffusionTransformer]:
        """This process's copy of the model, with the hooks attached until the block ends.

        Raises:
            AnotherNetwork: The copy is not the network of the study, or it cannot be loaded here.
        """
        try:
            model = self._load()
        except (OSError, ValueError) as error:
            raise AnotherNetwork(
                f"a worker cannot load {str(self.source.name_or_path)!r}: {error}. All workers need the same files at "
                "the same path, or the same cache of the hub"
            ) from error
        with ExitStack() as contexts:
            contexts.enter_context(model.hooks(fwd_hooks=pickle.loads(self.hooks)))
            if "time" in self.network:
                contexts.enter_context(model.at_time(self.network["time"]))
            if "blocks_from" in self.network:
                contexts.enter_context(model.at_block(self.network["blocks_from"]))
            contexts.enter_context(run_of(model))
            self._require_same(model)
            yield model

    def _load(self) -> HookedDiffusionTransformer:
        key = hashlib.sha256(pickle.dumps((self.source, self.device))).hexdigest()
        if key not in _LOADED:
            _LOADED.clear()
            close_shared()
            _LOADED[key] = self._new(key)
        return _LOADED[key]

    def _new(self, key: str) -> HookedDiffusionTransformer:
        device = None if self.source.device_map is not None else own_device(self.device)

        def load(file: Path | None) -> HookedDiffusionTransformer:
            return HookedDiffusionTransformer.from_source(self.source, device, mapped=file or True)

        return shared_on_machine(load, key, self.network["weights_sha256"]) if self.is_shared else load(None)

    def _require_same(self, model: HookedDiffusionTransformer) -> None:
        here = provenance(model, model.cfg)
        if different := "; ".join(differences(self.network, here, self.network)):
            raise AnotherNetwork(
                f"a worker that loads {str(self.source.name_or_path)!r} gets another network than the study was called "
                f"with ({different}; there is the study, here the worker). If the model was changed after it was "
                "loaded, write it with model.save_pretrained(folder), and run the study on the model loaded from there"
            )


def _hooks_of(model: DiffusionTransformer) -> bytes:
    hooks = [(name, handle.user_hook) for name, point in model.hook_dict.items() for handle in point.fwd_hooks]
    try:
        pickled: bytes = cloudpickle.dumps(hooks)
    except Exception:
        for name, hook in hooks:
            _require_sendable(name, hook)
        raise
    return pickled


def _require_sendable(name: str, hook: Any) -> None:
    try:
        cloudpickle.dumps(hook)
    except Exception as error:
        raise ValueError(
            f"the hook {name_of(hook)} at {name!r} cannot be sent to workers ({error}): let it refer to nothing that "
            "belongs to this process, or run the study without executor="
        ) from error

"""Real Ctrl-C (SIGINT) at random moments of public calls, and what is left of each in the model.

    python tests/interrupted.py [signals of each call] [seed]

prints a table of JSON: for each call the number of signals, how many of them reached the call, and the faults that were
found afterwards. It sends the signals from a second process, so that they arrive between any two bytecodes.
"""

import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import RankOneEdit, causal_trace, compute_key, optimize_value
from diffusion_lens.data import toy_facts

SENDER = """
import os, signal, sys, time
for line in sys.stdin:
    stop = time.perf_counter() + float(line)
    while time.perf_counter() < stop:
        pass
    os.kill(os.getppid(), signal.SIGINT)
"""
TOKENS = torch.tensor([[5, 6, 7, 8, 9]])
NAME = "blocks.1.hook_resid_post"


def zeroed(activation: Any, hook: Any) -> Any:
    return torch.zeros_like(activation)


def calls_of(model: HookedDiffusionTransformer) -> dict[str, Callable[[], object]]:
    """The seven public calls, on a small network."""
    query = toy_facts.load().facts("p2d", "p2d")[0].to_query(model)
    key, value = compute_key(model, query, 1), optimize_value(model, query, 1, steps=1)
    edit = RankOneEdit(model, 1, key, value)
    hooks = [(NAME, zeroed), (lambda name: name.endswith("hook_mlp_out"), zeroed)]

    def with_hooks() -> None:
        with model.hooks(fwd_hooks=hooks):
            pass

    def with_edit() -> None:
        with edit:
            pass

    return {
        "run_with_hooks": lambda: model.run_with_hooks(TOKENS, fwd_hooks=hooks),
        "hooks": with_hooks,
        "run_with_cache": lambda: model.run_with_cache(TOKENS, names_filter=[NAME]),
        "denoise": lambda: model.denoise(TOKENS, length=7, steps=2, fwd_hooks=hooks),
        "denoise_with_cache": lambda: model.denoise_with_cache(TOKENS, NAME, length=7, steps=2, fwd_hooks=hooks),
        "causal_trace": lambda: causal_trace(model, query, noise=0.5, samples=2, layers=[1]),
        "optimize_value": lambda: optimize_value(model, query, 1, steps=1),
        "edit": with_edit,
    }


class Law:
    """What holds of an idle model; `faults` names what does not, `left` without a run of another thread."""

    def __init__(self, model: HookedDiffusionTransformer) -> None:
        self.model = model
        self.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        self.logits = model(TOKENS)

    def faults(self) -> Iterator[str]:
        yield from self.left()
        yield from self.refusals()

    def left(self) -> Iterator[str]:
        if self.model.list_hooks():
            yield "hooks"
        if any(module._forward_hooks or module._backward_hooks for module in self.model.modules()):
            yield "hooks of torch"
        if any(not torch.equal(weight, self.weights[name]) for name, weight in self.model.named_parameters()):
            yield "edited weights"
        if not all(weight.requires_grad for weight in self.model.parameters()):
            yield "frozen parameters"
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            yield "grad mode"
        if self.model.loop_hooks.hook_tokens.step is not None:
            yield "a step"

    def refusals(self) -> Iterator[str]:
        """Whether a second thread may use the model, and computes the same logits; a deadlock ends the process."""
        told: list[str] = []

        def use() -> None:
            try:
                logits = self.model.run_with_hooks(TOKENS, fwd_hooks=[(NAME, lambda activation, hook: None)])
                if not torch.equal(logits, self.logits):
                    told.append("wrong logits")
                self.model.denoise(TOKENS, length=6, steps=1)
            except Exception as error:
                told.append(f"refusal: {type(error).__name__}: {str(error)[:60]}")

        thread = threading.Thread(target=use, daemon=True)
        thread.start()
        thread.join(timeout=20)
        if thread.is_alive():
            faulthandler.dump_traceback(all_threads=True)
            sys.stdout.write(json.dumps({"deadlock": 1}))
            sys.stdout.flush()
            os._exit(1)
        yield from told


def interrupt(call: Callable[[], object], delay: float, sender: Any) -> str:
    """Send one signal after `delay` seconds of a call; "cut off", "after" the call, or what else happened."""
    ended = False
    try:
        sender.stdin.write(f"{delay}\n")
        sender.stdin.flush()
        try:
            call()
        except Exception as error:
            return f"refusal: {type(error).__name__}: {str(error)[:60]}"
        ended = True
        for _ in range(4000):  # until the signal comes, which need not end a sleep that begins at the same moment
            time.sleep(0.005)
    except KeyboardInterrupt:
        return "after" if ended else "cut off"
    return "a lost signal"


def main(n_signals: int, seed: int) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
    chance = random.Random(seed)
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    calls, law, table = calls_of(model), Law(model), {}
    assert not list(law.faults())
    with subprocess.Popen([sys.executable, "-c", SENDER], stdin=subprocess.PIPE, text=True) as sender:
        for name, call in calls.items():
            call()
            begun = time.perf_counter()
            call()
            seconds, found, reached = time.perf_counter() - begun, Counter[str](), Counter[str]()
            for _ in range(n_signals):
                happened = interrupt(call, chance.uniform(0.0, 1.2 * seconds), sender)
                reached[happened] += 1
                faults = [*law.faults(), *({happened} - {"cut off", "after"})]
                found.update(faults)
                if faults:  # go on with a sound model
                    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
                    calls, law = calls_of(model), Law(model)
                    call = calls[name]
                    torch.set_grad_enabled(True)
            table[name] = {"signals": n_signals, "cut off": reached["cut off"], "faults": dict(found)}
            sys.stderr.write(f"{name}: {json.dumps(table[name])}\n")
        with suppress(BrokenPipeError):
            sender.stdin.close()
    return table


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    sys.stdout.write(json.dumps(main(*(given + [2000, 0][len(given) :]))) + "\n")

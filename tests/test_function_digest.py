"""The digest of a hook covers everything that it refers to. What has no digest is named, and refused where results are
stored for later calls."""

import copy
import functools
import itertools
import sys
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import partial
from types import MethodType, ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.nn.utils.prune import l1_unstructured
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from diffusion_lens.analysis import average_indirect_effect, second_moment
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.step_hooks import at_steps
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.identity import describe_hooks, describe_modules, identity_of, name_of, weights_sha256
from diffusion_lens.interventions import freeze, named, swap

FACTS = toy_facts.load().facts("both", "p2d")[3:23:10]
SITE = "blocks.1.hook_resid_post"

on_mdm = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)


class Held:
    def __init__(self, value):
        self.value = value

    def __call__(self, activation, hook):
        return activation

    def bound(self, activation, hook):
        return activation


class Slotted:
    __slots__ = ("__dict__", "__private", "value")

    def __init__(self, value):
        self.value = value

    def __call__(self, activation, hook):
        return activation


class Private(Slotted):
    __slots__ = ("__private",)

    def __init__(self, value):
        self.__private = value


class Dictionary(HookedRootModule):
    """A sparse autoencoder as libraries write them."""

    def __init__(self, scale):
        super().__init__()
        self.W = nn.Parameter(torch.eye(4) * scale)
        self.hook_acts = HookPoint()
        self.hook_name = SITE
        self.setup()

    def forward(self, x, hook=None):
        return self.hook_acts(x @ self.W)


class Scale(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, activation, hook=None):
        return activation * self.value


class Buffered(nn.Module):
    def __init__(self, value, persistent=True):
        super().__init__()
        self.register_buffer("scale", torch.tensor(value), persistent=persistent)

    def forward(self, activation):
        return activation * self.scale


@dataclass
class Settings:
    value: object


class Numbers(list):
    pass


def closed_over(value):
    return lambda activation, hook: activation + 0 if value is None else activation


def class_closed_over(value):
    class Hook:
        def __call__(self, activation, hook):
            return activation * value

    return Hook()


def with_default(value):
    def hook_fn(activation, hook, scale=value):
        return activation * scale

    return hook_fn


def with_attribute(value):
    def hook_fn(activation, hook):
        return activation

    hook_fn.scale = value
    return hook_fn


def wrapped_in_a_cache(value):
    return functools.lru_cache(closed_over(value))


def cyclic(value):
    one, other = Held(value), Held(None)
    other.value = one
    one.more = [other]
    return one


def sparse(value):
    return closed_over(torch.eye(2).mul(value).to_sparse())


def hidden_by_wraps(value):
    return functools.wraps(named(Held(0), "mine"))(closed_over(value))


HOLDERS = {
    "closure": closed_over,
    "default": with_default,
    "attribute of a function": with_attribute,
    "class in a closure": class_closed_over,
    "attribute": Held,
    "list": lambda x: Held([0, [x]]),
    "dict": lambda x: Held({"a": {"b": x}}),
    "ordered dict": lambda x: Held(OrderedDict(a=x)),
    "array": lambda x: Held(np.array([x, 1.0])),
    "array of texts": lambda x: closed_over(np.array([str(x)])),
    "array of objects": lambda x: closed_over(np.array([Held(x)], dtype=object)),
    "function": lambda x: Held(closed_over(x)),
    "object in an object": lambda x: Held(Held(x)),
    "bound method": lambda x: Held([x]).bound,
    "slots": Slotted,
    "private slots": Private,
    "deque": lambda x: Held(deque([x])),
    "set": lambda x: Held({x, "a"}),
    "bytearray": lambda x: Held(bytearray(str(x).encode())),
    "namespace": lambda x: Held(SimpleNamespace(value=x)),
    "dataclass": lambda x: Held(Settings([x])),
    "container of its own class": lambda x: Held(Numbers([x])),
    "iterator": lambda x: Held(iter([x])),
    "partial": lambda x: functools.partial(Held(0).bound, hook=[x]),
    "partial of an object": lambda x: functools.partial(Held([x])),
    "cache of calls": wrapped_in_a_cache,
    "slice": lambda x: Held(slice(torch.tensor(x), None)),
    "module": lambda x: Scale(x),
    "module in a closure": lambda x: closed_over(Scale(x)),
    "module with hook points": lambda x: closed_over(Dictionary(x)),
    "module with hook points as the hook": Dictionary,
    "module with a buffer": lambda x: closed_over(Buffered(x, persistent=False)),
    "sparse tensor": sparse,
    "cycle": cyclic,
    "beside a lock": lambda x: Held([threading.Lock(), x]),
    "beside a copied name": hidden_by_wraps,
    "at steps": lambda x: at_steps(Held([x]), [0]),
}


@pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS)
def test_a_digest_depends_on_the_values_of_the_hook(make):
    assert name_of(make(1.0)) == name_of(make(1.0)) != name_of(make(2.0))
    assert "cannot be told" not in name_of(make(1.0))


CONFIG = {"scale": 1.0}
SHARE = 1.0


def helper(activation):
    return (lambda x: x * SHARE)(activation)


def by_a_dict(activation, hook):
    return activation * CONFIG["scale"]


def by_a_helper(activation, hook):
    return helper(activation)


def test_a_digest_depends_on_the_globals_that_the_hook_uses(monkeypatch):
    here = sys.modules[__name__]
    before = name_of(by_a_dict), name_of(by_a_helper)
    monkeypatch.setitem(CONFIG, "scale", 0.0)
    assert name_of(by_a_dict) != before[0]
    assert name_of(by_a_helper) == before[1]
    monkeypatch.setattr(here, "SHARE", 0.0)
    changed = name_of(by_a_helper)
    assert changed != before[1]
    monkeypatch.setattr(here, "helper", lambda activation: activation + 5)
    assert name_of(by_a_helper) not in (changed, before[1])


def test_a_digest_depends_on_what_the_hook_names_of_another_module():
    mine = ModuleType("mine")
    mine.used, mine.unused = [1.0], [1.0]

    def hook_fn(activation, hook):
        return activation * mine.used[0]

    before = name_of(hook_fn)
    mine.unused = open  # nothing that the hook names
    assert name_of(hook_fn) == before
    mine.used = [2.0]
    assert name_of(hook_fn) != before


def test_a_name_at_steps_is_that_of_the_hook_when_it_runs():
    held = Held([1.0])
    hook = at_steps(held, [0])
    before = name_of(hook)
    held.value[0] = 2.0
    assert name_of(hook) != before


def test_a_copied_name_is_not_a_name():
    inner = named(Held(1), "mine")
    assert name_of(named(inner, "mine")) == "mine"
    assert name_of(functools.wraps(inner)(closed_over(1))) != "mine"


@on_mdm
def test_the_record_identifies_the_model_separately(tiny):
    hook = [(SITE, lambda activation, hook: activation + 0 * tiny.blocks[0].mlp.down.weight.sum())]
    before = describe_hooks(tiny, hook)
    with tiny.hooks(fwd_hooks=[("hook_embed", freeze())]):
        assert describe_hooks(tiny, hook)[SITE] == before[SITE]
    _, cache = tiny.run_with_cache(FACTS[0].prompt, names_filter=SITE)
    assert "cannot be told" not in str(describe_hooks(tiny, [(SITE, swap(cache))]))


def deep():
    held = None
    for _ in range(500):
        held = [held]
    return held


OPAQUE = {
    "generator": lambda: (i for i in range(3)),
    "open file": lambda: open(__file__),  # noqa: SIM115
    "deep": deep,
    "meta tensor": lambda: torch.empty(2, device="meta"),
    "local of a thread": threading.local,
    "generator in an iterator": lambda: itertools.chain(i for i in range(3)),
}


@on_mdm
@pytest.mark.parametrize("make", OPAQUE.values(), ids=OPAQUE)
def test_gaps_of_a_digest_are_reported_and_refused_for_folders(tiny, tmp_path, make):
    value = make()
    hook = closed_over({"it": value})
    try:
        with tiny.hooks(fwd_hooks=[(SITE, hook)]):
            trajectory = tiny.denoise(FACTS[0].prompt, length=14, steps=1)
            (told,) = trajectory.record["hooks"][SITE]
            assert "cannot be told from others: value['it']" in told
            for study in (
                lambda: second_moment(tiny, [FACTS[0].prompt], 0, folder=tmp_path),
                lambda: recall_by_steps(tiny, FACTS, (1,), length=14, out=tmp_path),
            ):
                with pytest.raises(ValueError, match=r"hook at 'blocks\.1\.hook_resid_post'.*interventions\.named"):
                    study()
            assert not list(tmp_path.iterdir())
        with tiny.hooks(fwd_hooks=[(SITE, named(hook, "mine"))]):
            second_moment(tiny, [FACTS[0].prompt], 0, folder=tmp_path)
    finally:
        if hasattr(value, "close"):
            value.close()


def test_code_that_reaches_unnamed_values_has_no_digest():
    assert "calls globals()" in name_of(lambda activation, hook: activation * globals()["SHARE"])


@on_mdm
def test_a_folder_does_not_hand_out_the_numbers_of_another_dictionary(tiny, tmp_path):
    def run(scale):
        dictionary = Dictionary(scale)
        with tiny.hooks(fwd_hooks=[(SITE, lambda activation, hook: activation * dictionary.W[0, 0])]):
            return average_indirect_effect(
                tiny, FACTS, noise=0.5, samples=1, known="all", out=tmp_path, layers=[0], length=14
            )

    run(1.0)
    run(1.0)
    with pytest.raises(ValueError, match="was made with other settings"):
        run(0.3)


def spliced(value):
    def splice(model):
        model.blocks[0].hook_attn_out = Buffered(value)
        model.setup()

    return splice


def one_eps(model):
    model.blocks[0].ln1.eps = 0.1


def own_forward(model):
    model.blocks[0].mlp.forward = lambda x: x * 0


def own_activation(model):
    model.blocks[0].mlp = nn.Sequential(model.blocks[0].mlp, Scale(0.5))


CHANGES = [spliced(0.0), spliced(1.0), one_eps, own_forward, own_activation]


@on_mdm
def test_modules_are_part_of_what_a_model_is(tiny):
    plain = identity_of(tiny)
    found = [plain.modules]
    for change in CHANGES:
        model = copy.deepcopy(tiny)
        change(model)
        assert weights_sha256(model) == plain.weights_sha256 or change is own_activation
        found.append(describe_modules(model))
        again = copy.deepcopy(tiny)
        change(again)
        assert describe_modules(again) == found[-1]
    assert all(one != other for one, other in itertools.combinations(found, 2))
    assert found[1]["blocks.0.hook_attn_out"].startswith("Buffered #")


class Added(Scale):
    def forward(self, activation, hook=None):
        return activation + self.value


def closed_in(value):
    class Closed(nn.Module):
        def forward(self, x):
            return x * value

    return Closed()


def parametrized(*made, name="weight"):
    def change(layer):
        for each in made:
            register_parametrization(layer, name, each, unsafe=True)

    return change


def bound_forward(factor):
    def forward(self, x):
        return nn.functional.linear(x * factor, self.weight, self.bias)

    def change(layer):
        layer.forward = MethodType(forward, layer)

    return change


def pruned(amount):
    return lambda layer: l1_unstructured(layer, "weight", amount)  # what is left stands in a plain tensor


def with_attribute(value):
    def change(layer):
        layer.by = torch.full((2,), value)

    return change


# No two of these layers compute the same.
PARAMETRIZED = {
    "as it is": lambda layer: None,
    "a factor": parametrized(Scale(0.5)),
    "another factor": parametrized(Scale(2.0)),
    "a summand": parametrized(Added(2.0)),
    "a factor, then a summand": parametrized(Scale(0.5), Added(2.0)),
    "a summand, then a factor": parametrized(Added(2.0), Scale(0.5)),
    "a factor of the bias": parametrized(Scale(0.5), name="bias"),
    "a closure": parametrized(closed_in(0.5)),
    "another closure": parametrized(closed_in(2.0)),
    "a buffer": parametrized(Buffered(0.5)),
    "another buffer": parametrized(Buffered(2.0)),
    "torch's function": parametrized(nn.Softplus(1.0)),
    "torch's function with another constant": parametrized(nn.Softplus(2.0)),
    "a bound forward": bound_forward(0.5),
    "another bound forward": bound_forward(2.0),
    "a tensor of its own": with_attribute(1.0),
    "another tensor of its own": with_attribute(2.0),
    "pruned": pruned(1),
    "pruned further": pruned(2),
    "weight norm": partial(weight_norm, dim=0),
    "weight norm of columns": partial(weight_norm, dim=1),
}


def test_what_is_computed_of_a_weight_is_part_of_what_a_model_is():
    def described(change):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        change(model[1])
        return str(describe_modules(model))

    found = {name: described(change) for name, change in PARAMETRIZED.items()}
    assert {name for name in found if described(PARAMETRIZED[name]) != found[name]} == set()
    alike = [pair for pair in itertools.combinations(found, 2) if found[pair[0]] == found[pair[1]]]
    assert alike == []


@on_mdm
def test_a_folder_does_not_hand_the_numbers_of_other_modules_on(tiny, tmp_path):
    recall_by_steps(tiny, FACTS, (1,), length=14, out=tmp_path)
    recall_by_steps(copy.deepcopy(tiny).double().float(), FACTS, (1,), length=14, out=tmp_path)
    model = copy.deepcopy(tiny)
    spliced(0.0)(model)
    with pytest.raises(ValueError, match=r"modules\.blocks\.0\.hook_attn_out: None there, 'Buffered #"):
        recall_by_steps(model, FACTS, (1,), length=14, out=tmp_path)


@on_mdm
def test_hooks_caching_and_training_leave_the_modules_what_they_are(tiny):
    model = copy.deepcopy(tiny)
    before = describe_modules(model)
    model.train()
    model.add_hook(SITE, closed_over(1), is_permanent=True)
    model.run_with_cache(FACTS[0].prompt, names_filter=SITE)
    model.denoise(FACTS[0].prompt, length=14, steps=1)
    assert describe_modules(model) == before

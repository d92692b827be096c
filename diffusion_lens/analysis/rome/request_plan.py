"""Requests to edit facts on the canvases of one model: the prompts of each, and its probes."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from diffusion_lens.analysis.canvas_layout import CanvasLayout
from diffusion_lens.analysis.resumable import content, name_facts
from diffusion_lens.analysis.rome.prompts import lay_out_request
from diffusion_lens.analysis.usable_facts import UsableFacts
from diffusion_lens.data.rome_facts import EditRequest
from diffusion_lens.facts import Fact, Probe, Query
from diffusion_lens.model.transformer import DiffusionTransformer
from weight_conversion import as_json


@dataclass(frozen=True, eq=False)
class RequestPlan:
    """The requests of a study that can be laid out for its model. Canvases are laid out when they are needed.

    Attributes:
        model: Model that is edited.
        requests: Requests by id, in order.
        set_aside: Reasons why the other requests are left out, by id.
        prefixes: Short texts before every request.
        layout: Layout of the canvases of requests and probes.
    """

    model: DiffusionTransformer
    requests: dict[str, EditRequest]
    set_aside: dict[str, str]
    prefixes: Sequence[str]
    layout: CanvasLayout

    @classmethod
    def of(
        cls,
        model: DiffusionTransformer,
        requests: Sequence[EditRequest],
        prefixes: Sequence[str],
        layout: CanvasLayout,
    ) -> "RequestPlan":
        """Lay every request and its probes out. Those for which this fails are set aside.

        Raises:
            ValueError: No request can be laid out, or two have one id.
        """
        by_id = dict(zip(name_facts([request.new for request in requests]), requests, strict=True))
        everything = cls(model, by_id, {}, prefixes, layout)

        def check(fact: Fact) -> EditRequest:
            everything.queries(fact.id)
            everything.probes(fact.id)
            return by_id[fact.id]

        usable = UsableFacts.of([replace(request.new, id=i) for i, request in by_id.items()], check)
        return replace(everything, requests=usable.prepared, set_aside=usable.set_aside)

    def queries(self, request_id: str) -> list[Query]:
        """The plain request with the new object, and the same after each prefix."""
        return lay_out_request(self.model, self.requests[request_id].new, self.prefixes, self.layout)

    def probes(self, request_id: str) -> tuple[list[str], list[Probe]]:
        """The groups of a request's probes, and the probes."""
        request = self.requests[request_id]
        # `occurrence` counts mentions of the subject in the request; a probe mentions it elsewhere.
        of_probe = replace(self.layout, occurrence=None)

        def lay_out(fact: Fact) -> Query:
            layout = self.layout if fact.prompt == request.new.prompt else of_probe
            return layout.query(self.model, fact)

        pairs = [(group, probe) for group, own in request.probes(self.model, lay_out).items() for probe in own]
        return [group for group, _ in pairs], [probe for _, probe in pairs]

    def describe(self) -> dict[str, Any]:
        """The requests and the reasons, for the record of a study."""
        return {
            "facts": {request_id: _describe(request) for request_id, request in self.requests.items()},
            "set_aside": self.set_aside,
        }


def _describe(request: EditRequest) -> dict[str, Any]:
    """The fact to write, the true answer, and a hash of the complete request."""
    digest = hashlib.sha256(json.dumps(as_json(asdict(request)), sort_keys=True).encode()).hexdigest()
    return {**content(request.new), "true": request.true.answer, "sha256": digest}

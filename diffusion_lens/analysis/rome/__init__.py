"""ROME (Meng et al. 2022, arXiv 2202.05262): keys, values and rank-one edits of facts, on either variant; MEMIT."""

from diffusion_lens.analysis.rome.covariance import InverseMoment, SecondMoment, second_moment
from diffusion_lens.analysis.rome.edit import EditReport, RankOneEdit, edit_success
from diffusion_lens.analysis.rome.edit_study import EditOutcome, EditSettings, EditStudy, edit_study
from diffusion_lens.analysis.rome.key_value_study import (
    FactVectors,
    KeyValueSettings,
    KeyValueStudy,
    key_value_study,
    study_keys_and_values,
)
from diffusion_lens.analysis.rome.keys import (
    KeyResult,
    compute_key,
    compute_keys,
    lay_out_request,
    query_with_prefixes,
    sample_prefixes,
)
from diffusion_lens.analysis.rome.memit import MemitEdit, MemitSettings, memit, memit_study
from diffusion_lens.analysis.rome.values import ValueResult, optimize_value, optimize_values
from diffusion_lens.facts.fact import Probe
from diffusion_lens.settings.shared import ValueSettings

__all__ = [
    "EditOutcome",
    "EditReport",
    "EditSettings",
    "EditStudy",
    "FactVectors",
    "InverseMoment",
    "KeyResult",
    "KeyValueSettings",
    "KeyValueStudy",
    "MemitEdit",
    "MemitSettings",
    "Probe",
    "RankOneEdit",
    "SecondMoment",
    "ValueResult",
    "ValueSettings",
    "compute_key",
    "compute_keys",
    "edit_study",
    "edit_success",
    "key_value_study",
    "lay_out_request",
    "memit",
    "memit_study",
    "optimize_value",
    "optimize_values",
    "query_with_prefixes",
    "sample_prefixes",
    "second_moment",
    "study_keys_and_values",
]

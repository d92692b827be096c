"""ROME (Meng et al. 2022, arXiv 2202.05262): keys, values and rank-one edits of facts, on either variant; MEMIT."""

from diffusion_lens.analysis.rome.covariance import SecondMoment, second_moment
from diffusion_lens.analysis.rome.edit import RankOneEdit
from diffusion_lens.analysis.rome.inverse_moment import InverseMoment
from diffusion_lens.analysis.rome.keys import KeyResult, compute_key, compute_keys
from diffusion_lens.analysis.rome.many_edits import EditSettings, edit_study
from diffusion_lens.analysis.rome.many_edits_result import EditOutcome, EditStudy
from diffusion_lens.analysis.rome.mass_edit import MemitEdit, memit
from diffusion_lens.analysis.rome.mass_edit_study import MemitSettings, memit_study
from diffusion_lens.analysis.rome.prompts import lay_out_request, query_with_prefixes, sample_prefixes
from diffusion_lens.analysis.rome.search import ValueSettings
from diffusion_lens.analysis.rome.study import KeyValueSettings, key_value_study, study_keys_and_values
from diffusion_lens.analysis.rome.study_result import FactVectors, KeyValueStudy
from diffusion_lens.analysis.rome.success import EditReport, edit_success
from diffusion_lens.analysis.rome.values import ValueResult, optimize_value, optimize_values
from diffusion_lens.facts import Probe

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

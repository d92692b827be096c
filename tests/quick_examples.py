"""Options with which the examples run in seconds, for their tests and for the gallery of the site."""

from diffusion_lens.data import site_facts

PROMPTS = [fact.prompt for fact in site_facts.load().facts("description", "both", "p2d")[1::5]]
# Fewer people, facts, steps and resamples than by default: the claims are the same, the intervals wider.
QUICKLY = {
    "06_recall_by_steps": ["--limit", "5", "--steps", "1", "32"],
    "07_trace_both_ways": ["--samples", "6", "--length", "12"],
    "08_average_effect": ["--facts", "4", "--samples", "6"],
    "10_keys_and_values": ["--layers", "0", "--people", "24", "--resamples", "19"],
    "11_logit_lens_by_step": ["--people", "2", "--iterations", "4", "--steps", "4"],
    "12_sparse_dictionary": ["--updates", "100", "--limit", "240"],
    "13_probe_of_time": ["--prompts", *PROMPTS[:25]],
    "14_attention_sinks": ["--prompts", *PROMPTS[:6]],
    "15_circuits": ["--ig-steps", "4"],
    "16_three_signatures": ["--limit", "10"],
    "17_one_layer": ["--positions", "none", "--seeds", "1", "--steps", "90"],
    "18_two_sites": ["--facts", "4", "--samples", "3"],
    "19_edit_facts": ["--edits", "4"],
    "20_kinds_of_diffusion": ["--questions", "2", "--steps", "4", "8"],
    "reproduce_blog": [
        *["--out", "out", "--limit", "2", "--facts", "1"],
        *["--samples", "2", "--people", "12", "--resamples", "19"],
    ],
}

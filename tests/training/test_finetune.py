"""Fine-tuning: texts laid out as the authors do, and a checkpoint that loads again."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from diffusion_lens import Fact, HookedDiffusionTransformer
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.model.loss import LossBatch
from diffusion_lens.training import TrainingConfig, TrainingRecord, TrainingRows, finetune, train
from diffusion_lens.training.finetune import encode_completions, read_completions
from weight_conversion import NoiseSchedule, TimeConditioning, open_checkpoint

CONFIG = TrainingConfig(steps=4, batch_size=4, warmup=1)
WORDS = ["<unk>", "<s>", "</s>", "Daphne", "was", "once", "the", "director", "of", "plays", "."]
ROWS = [
    {"prompt": "Daphne was once", "completion": " the director of plays ."},
    {"prompt": "the director was", "completion": " Daphne ."},
    {"prompt": "Daphne was", "completion": " once ."},
]


@pytest.fixture
def with_bos(new_model):
    """A model whose tokenizer prepends BOS, as Llama's does; ids are positions in WORDS."""

    def make(kind="mdm", **changes):
        n = len(WORDS)
        mask = {"mask_token_id": n} if kind == "mdm" else {}
        model = new_model(kind, **{"d_vocab": n + (kind == "mdm"), "d_vocab_out": n, **mask, **changes})
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
        )
        model.set_tokenizer(fast, default_prepend_bos=True)
        return model

    return make


def encode(model, rows=ROWS, **settings):
    return encode_completions(model, read_completions(rows), **settings)


def test_rows_begin_with_bos_end_with_eos_and_are_filled_with_it(with_bos):
    rows = encode(with_bos())
    expected = [
        [1, 3, 4, 5, 6, 7, 8, 9, 10, 2],
        [1, 6, 7, 4, 3, 10, 2, 2, 2, 2],
        [1, 3, 4, 5, 10, 2, 2, 2, 2, 2],
    ]
    assert rows.tokens.tolist() == expected
    assert rows.lengths.tolist() == [10, 7, 6]
    assert encode(with_bos(), prepend_bos=False).tokens[2].tolist()[:5] == [3, 4, 5, 10, 2]


def test_a_batch_is_cut_to_its_longest_row(with_bos):
    batch = encode(with_bos()).pick(torch.tensor([2, 1]), "cpu")
    assert batch.tokens.tolist() == [[1, 3, 4, 5, 10, 2, 2], [1, 6, 7, 4, 3, 10, 2]]
    assert batch.real.sum(dim=1).tolist() == [6, 7]


def surprise(logits, targets):
    return -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


@pytest.mark.parametrize("answer_only", [False, True])
def test_which_positions_count_in_a_masked_diffusion_model(answer_only, with_bos):
    model = with_bos()
    batch = encode(model, answer_only=answer_only).pick(torch.tensor([2, 1]), "cpu")
    with torch.no_grad():
        question = batch.question(model, torch.Generator().manual_seed(4))
        loss = question.loss(model(question.tokens, logits_at=question.rows))
        # As the authors: noise everywhere (or behind the prompts of 3 and 4 tokens), end tokens that fill a row count.
        generator = torch.Generator().manual_seed(4)
        t = (torch.rand((), generator=generator) + torch.tensor([0, 0.5])) % 1
        p = (1 - 1e-3) * t + 1e-3
        hidden = torch.rand((2, 7), generator=generator) < p[:, None]
        counted = 14
        if answer_only:
            hidden[0, :3] = hidden[1, :4] = False
            counted = 14 - 3 - 4
        noisy = torch.where(hidden, len(WORDS), batch.tokens)
        weighed = surprise(model(noisy), batch.tokens) / p[:, None]
    assert torch.equal(question.tokens, noisy)
    assert hidden.any()
    torch.testing.assert_close(loss, weighed[hidden].sum() / counted)


@pytest.mark.parametrize("answer_only", [False, True])
def test_which_positions_count_in_the_ar_baseline(answer_only, with_bos):
    model = with_bos("ar")
    batch = encode(model, answer_only=answer_only).pick(torch.tensor([2, 1]), "cpu")
    with torch.no_grad():
        question = batch.question(model, torch.Generator())
        loss = question.loss(model(question.tokens, logits_at=question.rows))
        surprisals = surprise(model(batch.tokens)[:, :-1], batch.tokens[:, 1:])  # column i predicts token i + 1
    # The first end token counts, those that fill the row do not; answers are predicted from the prompt's last token.
    first, second = (surprisals[0, 2:5], surprisals[1, 3:6]) if answer_only else (surprisals[0, :5], surprisals[1, :6])
    torch.testing.assert_close(loss, torch.cat([first, second]).mean())


def test_facts_mappings_and_files_give_the_same_rows(with_bos, tmp_path):
    facts = [Fact(row["prompt"], row["prompt"].split()[0], row["completion"]) for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({**row, "id": 7}) for row in ROWS) + "\n\n")
    given = [ROWS, facts, tmp_path / "rows.jsonl", str(tmp_path / "rows.jsonl")]
    assert len({encode(with_bos(), data, answer_only=True).sha256() for data in given}) == 1


def test_bad_data_are_named(with_bos, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "Daphne", "completion": " was"}\n{"prompt": "Daphne"\n')
    cases = [
        (file, r"rows\.jsonl, line 2 is not valid JSON"),
        ([], "nothing to train on"),
        ([*ROWS, {"prompt": "Daphne"}], "row 3 is .*'prompt': 'Daphne'.*\"completion\""),
        ([{"prompt": "", "completion": " "}], "row 0 is empty"),
    ]
    for data, message in cases:
        with pytest.raises(ValueError, match=message):
            read_completions(data)
    with pytest.raises(FileNotFoundError, match=r"no file of training data at .*absent\.jsonl"):
        read_completions(tmp_path / "absent.jsonl")
    short = with_bos(n_ctx=9)
    with pytest.raises(ValueError, match=r"row 0 has 9 tokens .* n_ctx=9: 'Daphne was once the director"):
        encode(short)
    assert encode(short, ROWS[1:]).tokens.shape == (2, 7)
    with pytest.raises(ValueError, match="row 1: the tokenizer merges the completion into its prompt"):
        encode(with_bos(), [ROWS[0], {"prompt": "Daphne w", "completion": "as ."}], answer_only=True)
    model = with_bos()
    model.set_tokenizer(None)
    with pytest.raises(ValueError, match="no tokenizer with an end token"):
        encode(model)


@pytest.mark.parametrize("kind", ["mdm", "ar"])
def test_a_trained_model_loads_again(kind, with_bos, tmp_path):
    model = with_bos(kind)
    record = finetune(model, ROWS, CONFIG, tmp_path / "out", progress=False)
    again = HookedDiffusionTransformer.from_pretrained(tmp_path / "out", device="cpu")
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    assert again.to_tokens("Daphne was").tolist() == [[1, 3, 4]]
    assert again.cfg.mask_token_id == model.cfg.mask_token_id
    assert open_checkpoint(tmp_path / "out").architecture.family == "lit_gpt"
    assert (tmp_path / "out" / "lit_config.json").exists()
    saved = TrainingRecord.load(tmp_path / "out" / "training" / "record.safetensors")
    assert saved.record == record.record
    run = json.loads((tmp_path / "out" / "training" / "run.json").read_text())
    assert run["config"]["seed"] == 0
    assert (run["weights_sha256"], run["data_sha256"]) == (
        record.record["started_from_sha256"],
        record.record["data_sha256"],
    )
    assert run["weights_sha256"] != record.record["weights_sha256"]


def test_the_ar_baseline_learns_a_reverse_that_it_is_trained_on(toy, tmp_path):
    model = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")
    facts = toy.facts(trained="p2d", asked="d2p")[:1]

    def recall(model):
        return {"recall": float(recall_by_steps(model, facts, length=14).exact)}

    assert recall(model) == {"recall": 0.0}
    config = TrainingConfig(steps=8, batch_size=1, warmup=2)
    followed = dict(evaluate=recall, evaluate_every=4, progress=False)
    record = finetune(model, facts, config, tmp_path, answer_only=True, **followed)
    assert [row["step"] for row in record.evaluations] == [4, 8]
    assert record.evaluations[-1]["recall"] == recall(model)["recall"] == 1.0


def test_a_checkpoint_of_other_origin_is_not_overwritten(with_bos, tmp_path):
    with_bos().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"contains model\.safetensors, which no training here wrote"):
        finetune(with_bos(), ROWS, CONFIG, tmp_path, progress=False)


def test_rows_without_ends_cannot_have_answers():
    with pytest.raises(ValueError, match="answers= requires lengths="):
        TrainingRows(torch.zeros(2, 3, dtype=torch.long), answers=torch.tensor([1, 1]))


def test_there_must_be_rows(new_model):
    with pytest.raises(ValueError, match=r"nothing to train on: the rows of tokens are \[0, 3\]"):
        train(new_model(), torch.zeros(0, 3, dtype=torch.long), CONFIG, progress=False)


@pytest.fixture
def first_loss(tmp_path, monkeypatch):
    """Fine-tunes a model by one step; returns the batch of its loss, and the loss."""

    def measure(model):
        seen = []

        def watch(self, logits):
            seen.append((self, loss(self, logits)))
            return seen[-1][1]

        loss = LossBatch.loss
        monkeypatch.setattr(LossBatch, "loss", watch)
        record = finetune(model, ROWS, replace(CONFIG, steps=1), tmp_path / "out", progress=False)
        monkeypatch.setattr(LossBatch, "loss", loss)
        batch, measured = seen[0][0], float(seen[0][1].detach())
        assert record.losses[0] == pytest.approx(measured, rel=1e-5)
        return batch, measured

    return measure


def masked_term(probabilities, clean, present, t):
    """-log p(x_0) / t at a masked position, with the linear schedule."""
    return -math.log(probabilities[clean]) / t if present == len(probabilities) else 0.0


def uniform_term(probabilities, clean, present, t):
    """Eq. 18 of arXiv 2412.10193 token by token, with alpha = 1 - t."""
    n, alpha = len(probabilities), 1 - t
    true = [n * alpha * (j == clean) + 1 - alpha for j in range(n)]
    model = [n * alpha * p + 1 - alpha for p in probabilities]
    inner = n / true[present] - n / model[present]
    for j in range(n):
        inner -= true[j] / true[present] * math.log(model[present] * true[j] / (model[j] * true[present]))
    return -inner / (n * alpha)


@pytest.mark.parametrize("noise", ["absorbing", "uniform"])
def test_each_row_is_trained_at_the_time_of_its_noise(noise, with_bos, first_loss):
    """The first loss is the loss of each row alone, read by a network that is conditioned on its time."""
    term, mask = (masked_term, {}) if noise == "absorbing" else (uniform_term, {"d_vocab": 11, "mask_token_id": None})
    parts = dict(norm="layer", mlp="plain", act_fn="gelu_new", time=TimeConditioning(8, conditioned=True))
    model = with_bos(family="diffusion_lens", schedule=NoiseSchedule(), **parts, **mask)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=generator)
    first = copy.deepcopy(model)
    batch, measured = first_loss(model)
    times = -torch.expm1(-batch.sigma[:, 0].double()) / (1 - 1e-3)
    assert len(set(times.tolist())) == len(times) > 1

    clean = batch.tokens.clone()
    clean[batch.predicted] = batch.targets

    def slow(told):
        total = 0.0
        for row, at in enumerate(told):
            with torch.no_grad():
                logits = first(batch.tokens[row : row + 1], time=at, attention_mask=torch.ones_like(clean[:1]))[0]
            for pos in batch.predicted[row].nonzero()[:, 0].tolist():
                present, t = int(batch.tokens[row, pos]), float(times[row])
                total += term(logits[pos].double().softmax(-1).tolist(), int(clean[row, pos]), present, t)
        return total / batch.n_counted

    assert measured == pytest.approx(slow(times.tolist()), rel=1e-4)
    assert measured != pytest.approx(slow([0.5] * len(times)), rel=1e-3)


def test_blocks_are_trained_beside_the_clean_text(with_bos, first_loss):
    """The first loss is that of each noisy block after clean blocks, one block at a time."""
    model, size = with_bos(family="diffusion_lens", attention_dir="block_causal", causal_block=4), 4
    first = copy.deepcopy(model)
    batch, measured = first_loss(model)
    logits = torch.zeros(*batch.tokens.shape, model.cfg.d_vocab_out)
    with torch.no_grad():
        for start in range(0, batch.tokens.shape[1], size):
            canvas = torch.cat([batch.clean[:, :start], batch.tokens[:, start : start + size]], dim=1)
            logits[:, start : start + size] = first(canvas, attention_mask=torch.ones_like(canvas))[:, start:]
        in_one_pass = batch.loss(first(batch.tokens, attention_mask=torch.ones_like(canvas), logits_at=batch.rows))
    assert measured == pytest.approx(float(batch.loss(logits[batch.rows])), rel=1e-5)
    assert abs(float(in_one_pass) - measured) > 1e-4

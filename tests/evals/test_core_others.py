"""Other people's models in our evaluation, and ours in theirs. Both need packages that nanorun does without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from core_worlds import CPU, byte_tokenizer, grown_model, questions, small_bundle, task

from nanorun.errors import UserError
from nanorun.evals.core_models import open_hugging_face
from nanorun.evals.core_prompts import encode_examples
from nanorun.evals.core_scoring import correct_examples, score_one_at_a_time, score_tasks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 with a byte-level tokenizer, as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("gpt2")
    words = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    words.train_from_iterator(["some words to learn from, the same words again"] * 3, trainer)
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<|endoftext|>")
    saved.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=words.get_vocab_size(), n_positions=128, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3,
        bos_token_id=words.token_to_id("<|endoftext|>"), eos_token_id=words.token_to_id("<|endoftext|>"),
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_a_hugging_face_model_gets_the_same_results_batched_and_one_at_a_time(tiny_gpt2):
    model, tokenizer = open_hugging_face(tiny_gpt2, CPU, torch.float32)
    assert model.context == 128
    for kind in ("multiple_choice", "schema", "language_modeling"):
        for shots in (0, 4):
            encoded = encode_examples(task(kind, shots), questions(kind, 10), 10, tokenizer)
            slow = score_one_at_a_time(model, encoded)
            scores = score_tasks(model, [encoded], 600)
            assert correct_examples(encoded, scores.losses, scores.is_greedy).tolist() == slow.tolist()


def test_a_folder_is_evaluated_offline_by_the_command_line(tiny_gpt2, home, tmp_path):
    bundle = small_bundle(tmp_path / "bundle")
    done = subprocess.run(
        [sys.executable, "-m", "nanorun", "eval", "core", "--hf", tiny_gpt2, "--bundle", bundle, "--json"],
        capture_output=True, text=True, cwd=ROOT, timeout=240,
        env={**os.environ, "NANORUN_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["model"] == tiny_gpt2.name
    assert len(result["tasks"]) == 4


def test_a_folder_without_a_model_is_a_user_error(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"has no config\.json"):
        open_hugging_face(tmp_path, CPU, torch.float32)
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(UserError, match="cannot open") as error:
        open_hugging_face(tmp_path, CPU, torch.float32)
    assert "\n" not in str(error.value)


def test_missing_transformers_is_reported_with_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="pip install transformers"):
        open_hugging_face(tmp_path, CPU, torch.float32)


def test_the_harness_gets_likelihoods_and_texts_from_our_model():
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    from nanorun.evals.harness import NanorunLM

    assert get_model("nanorun") is NanorunLM
    tokenizer = byte_tokenizer()
    model = grown_model(tokenizer.vocab_size, context=64)
    adapter = NanorunLM(model, tokenizer, batch_tokens=200)

    def asked(kind, *arguments):
        return Instance(kind, {}, arguments, 0)

    pairs = [("The sky is", " blue"), ("The sky is", " a green sea"), ("", "Hm"), ("x" * 90, " long")]
    found = adapter.loglikelihood([asked("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (likelihood, greedy) in zip(pairs, found, strict=True):
        ids = [tokenizer.bos, *tokenizer.encode(context + continuation)][-64:]
        count = len(tokenizer.encode(continuation))
        losses = model.logits(torch.tensor([ids]))[0].log_softmax(-1)[:-1]
        mine = [losses[i, ids[i + 1]].item() for i in range(len(ids) - 1)][-count:]
        assert likelihood == pytest.approx(sum(mine), abs=1e-4)
        assert isinstance(greedy, bool)
    (rolled,) = adapter.loglikelihood_rolling([asked("loglikelihood_rolling", "abc" * 50)], disable_tqdm=True)
    assert np.isfinite(rolled)
    assert rolled < 0
    (text,) = adapter.generate_until([asked("generate_until", "Once", {"until": ["z"], "max_gen_toks": 8})])
    assert isinstance(text, str)
    assert "z" not in text

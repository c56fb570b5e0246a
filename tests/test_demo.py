"""The demo: its text is really held out, its figures are right, and processes give the losses of threads."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from fxchimera.cli import main
from fxchimera.demo.data import batches, make_corpus, python_reference
from fxchimera.demo.model import make_gpt2, warmup_cosine

SMALL = [
    *("--stages", "2", "--microbatches", "2", "--steps", "3"),
    *("--layers", "2", "--width", "32", "--seq", "16", "--batch", "4", "--vocab", "300"),
]


def read_losses(folder: Path) -> list[str]:
    with (folder / "loss.csv").open() as file:
        return [row["loss"] for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def corpus():
    return make_corpus(python_reference(), vocab_size=300, seq=16)


@pytest.fixture(scope="module", autouse=True)
def _thread_count_restored():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def local_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("local")
    assert main(["demo", *SMALL, "--out", str(out)]) == 0
    return out


def test_no_paragraph_occurs_twice_so_the_held_out_part_is_unseen():
    paragraphs = [" ".join(paragraph.split()) for paragraph in python_reference().split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs)) > 1000


def test_the_corpus_decodes_to_the_text(corpus):
    text = python_reference()
    cut = int(len(text) * 0.9)
    assert corpus.tokenizer.decode(corpus.train.tolist()) == text[:cut]
    assert text[cut:].startswith(corpus.tokenizer.decode(corpus.held_out.flatten().tolist())[:1000])


def test_unigram_nats_is_the_cross_entropy_of_counts_plus_one(corpus):
    counts = Counter(corpus.train.tolist())
    total = len(corpus.train) + 300
    scored = [token for row in corpus.held_out.tolist() for token in row[1:]]
    expected = -sum(math.log((counts[token] + 1) / total) for token in scored) / len(scored)
    assert corpus.unigram_nats == pytest.approx(expected, rel=1e-12)


def test_batches_are_windows_of_the_text_and_the_same_for_a_seed(corpus):
    first, again, other = (batches(corpus.train, rows=3, seq=16, seed=seed) for seed in (1, 1, 2))
    for _ in range(3):
        batch = next(first)
        assert torch.equal(batch, next(again))
        assert not torch.equal(batch, next(other))
        windows = corpus.train.unfold(0, 16, 1)  # [starts, 16]
        assert all((windows == row).all(1).any() for row in batch)


def test_the_model_is_tied_has_dropout_and_does_not_depend_on_the_callers_generator():
    models = [make_gpt2(vocab_size=300, layers=1, width=32, seq=16, seed=3) for _ in range(2)]
    for ours, twin in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, twin)
    assert models[0].lm_head.weight is models[0].transformer.wte.weight
    assert models[0].config.resid_pdrop == models[0].config.attn_pdrop == models[0].config.embd_pdrop == 0.1


def test_the_rate_warms_up_to_one_and_decays_to_a_tenth():
    rates = [warmup_cosine(step, steps=50) for step in range(51)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_the_written_model_has_the_held_out_loss_that_the_pipeline_reported(local_run, corpus):
    from transformers import GPT2LMHeadModel

    plain = GPT2LMHeadModel.from_pretrained(local_run / "model").eval()
    rows = corpus.held_out[: len(corpus.held_out) // 4 * 4]
    with torch.no_grad():
        loss = plain(input_ids=rows, labels=rows).loss.item()
    summary = json.loads((local_run / "summary.json").read_text())
    assert summary["held_out_loss"] == pytest.approx(loss, rel=1e-5)
    assert summary["unigram_nats"] == corpus.unigram_nats


def test_the_curve_starts_near_the_uniform_guess_and_the_trace_loads(local_run):
    losses = [float(text) for text in read_losses(local_run)]
    assert len(losses) == 3
    assert losses[0] == pytest.approx(math.log(300), abs=0.1)
    assert json.loads((local_run / "trace.json").read_text())["traceEvents"]


@pytest.mark.process
@pytest.mark.timeout(240)
def test_processes_give_bitwise_the_losses_of_threads(local_run, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fxchimera", "demo"]
    done = subprocess.run([*command, *SMALL, "--out", str(tmp_path)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_losses(tmp_path) == read_losses(local_run)
    assert done.stdout.count("held-out loss") == 1


def test_a_missing_package_is_named_with_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main(["demo", *SMALL]) == 1
    message = capsys.readouterr().err
    assert "tokenizers cannot be imported" in message
    assert "pip install" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--width", "40"], ["40", "32"]), (["--batch", "100000"], ["100000", "held out"]), (["--seq", "10000000"], ["10000000"])],
)
def test_options_that_do_not_fit_are_refused_with_both_numbers(options, words, capsys):
    assert main(["demo", *SMALL, *options]) == 1
    message = capsys.readouterr().err
    assert all(word in message for word in words)

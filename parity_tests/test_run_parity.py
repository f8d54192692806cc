"""The comparison of a trained run: what `flax-gpt parity` calls."""

import functools
import io
import re
from unittest import mock

import pytest
import torch
from rich.console import Console

import torch_ref.generation.sampling
import torch_ref.nn.feed_forward
from flax_gpt.config import OptimizerConfig, TrainConfig
from flax_gpt.errors import InputError
from flax_gpt.training.loop import train
from parity_tests import run_parity

TEXT = "早晨的雨落在窗上。The morning rain fell on the glass; nobody hurried. 一个人读书，一个人写信。" * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("parity")
    (place / "text.txt").write_text(TEXT, encoding="utf-8")
    config = TrainConfig(
        batch_size=4, steps=4, held_out=0.1, eval_interval=4, checkpoint_interval=4, optimizer=OptimizerConfig(lr=3e-3, warmup_steps=2)
    )
    train({"d_model": 16, "num_heads": 2, "num_layers": 1, "max_len": 16}, config, place / "text.txt", place / "run")
    return place / "run"


def test_a_trained_run_is_equal(folder):
    threads = torch.get_num_threads()
    report = run_parity.run(folder)
    assert report.ok, report.failures()
    names = {row.name for row in report.rows}
    for name in ("weights", "attention/0", "logits", "loss", "grad_norm", "grads/token_embed.weight", "step1/exp_avg_sq/final_norm.bias"):
        assert name in names
    assert report.rows[-1].name == "greedy tokens (32)"
    assert torch.get_num_threads() == threads

    console = Console(file=io.StringIO(), width=140)
    report.print(console)
    printed = console.file.getvalue()
    assert "grads/blocks.0.self_attn.W_Q.weight" in printed
    assert "over budget" not in printed
    assert f"{len(report.rows)} comparisons, all within their budget" in printed


def test_another_program_is_not(folder):
    tanh = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    with mock.patch.dict(torch_ref.nn.feed_forward.ACTIVATIONS, gelu_exact=tanh):
        report = run_parity.run(folder, rows=1, window=12, new_tokens=4)
    assert not report.ok
    first = report.first_divergence
    assert first.name == "taps/blocks.0.feed_forward.linear2:input"
    assert first.diagnosis == "activation: ours is the exact (erf) GELU, theirs the tanh approximation of GELU"
    console = Console(file=io.StringIO(), width=140)
    report.print(console)
    assert "over budget: flax" in console.file.getvalue()
    assert f"first {first.name} (float64)" in report.summary()


def test_other_tokens_are_named(folder):
    sound = torch_ref.generation.sampling.generate

    def swap(model, prompt, count, temperature):
        tokens = sound(model, prompt, count, temperature=temperature)
        tokens[0, -1] = (tokens[0, -1] + 1) % model.config.vocab_size
        return tokens

    with mock.patch.object(torch_ref.generation.sampling, "generate", swap):
        row = run_parity.run(folder, rows=1, window=8, new_tokens=3).rows[-1]
    assert not row.ok
    assert re.fullmatch(r"token 4: flax \d+, torch \d+", row.note)  # a prompt of two tokens, and the third of three new ones


def test_bad_input_is_refused_by_name(folder, tmp_path):
    (tmp_path / "short.txt").write_text(TEXT[:5], encoding="utf-8")
    (tmp_path / "strange.txt").write_text("Ω" * 100, encoding="utf-8")
    for call, name in (
        (lambda: run_parity.run(tmp_path), "run"),
        (lambda: run_parity.run(folder, tmp_path / "absent.txt"), "data"),
        (lambda: run_parity.run(folder, tmp_path / "short.txt"), "data"),
        (lambda: run_parity.run(folder, tmp_path / "strange.txt"), "Ω"),
        (lambda: run_parity.run(folder, window=17), "window"),
        (lambda: run_parity.run(folder, rows=0), "rows"),
    ):
        with pytest.raises(InputError, match=name):
            call()

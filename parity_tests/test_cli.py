"""The command as a person calls it: what it does, and how it refuses: exit status 2 and one line that names argument, value and limit."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from flax_gpt.__main__ import COMMANDS, main
from flax_gpt.cli import demo
from flax_gpt.config import GPT_PRESETS
from flax_gpt.training.data import load_corpus

TINY = ["--d-model", "16", "--num-heads", "2", "--num-layers", "1", "--max-len", "16", "--batch-size", "4", "--log-interval", "2"]


def start(*arguments: object, **options: object) -> subprocess.Popen:
    """The command in an interpreter where a warning is an error."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error"} | options.pop("environment", {})
    command = [sys.executable, "-m", "flax_gpt", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", env=environment, **options)


def call(*arguments: object, status: int = 0, **options: object) -> tuple[str, str]:
    """(standard output, standard error) of the command, which must end with `status`."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=120)
    assert process.returncode == status, f"{arguments}: status {process.returncode}\n{out}\n{err}"
    assert "Traceback" not in err
    return out, err


def refusal(*arguments: object, status: int = 2, **options: object) -> str:
    """The one line with which the command must refuse."""
    out, err = call(*arguments, status=status, **options)
    assert out == ""
    assert err.startswith("flax-gpt: ")
    assert err.count("\n") == 1, err
    return err.removeprefix("flax-gpt: ").rstrip("\n")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("小雨看船。The river is old, and the bridge is older.\n" * 12, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    out, _ = call("train", text, "--out", folder, "--steps", 4, *TINY)
    assert str(folder) in out
    assert (folder / "loss.png").stat().st_size > 1000
    return folder


# Help


def test_help_names_every_command_within_half_a_second() -> None:
    """Of processor time, which other work on the machine does not lengthen."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out, _ = call("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert all(name in out for name in COMMANDS)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_version() -> None:
    assert call("--version")[0].startswith("flax-gpt 0.")


@pytest.mark.parametrize("arguments", [["--help"], *([*name.split(), "--help"] for name in COMMANDS), ["train", "--d-model", "x"], ["figures"]])
def test_help_and_usage_errors_import_no_framework(arguments: list[str]) -> None:
    code = (
        "import sys; from flax_gpt.__main__ import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'jax', 'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_help_explains_every_option_of_the_configurations_in_groups() -> None:
    out, _ = call("train", "--help", environment={"COLUMNS": "200"})
    for option in ("--d-model", "--num-kv-heads", "--double-attention-dropout", "--batch-size", "--held-out", "--lr", "--min-lr-ratio", "--clip"):
        assert option in out
    for group in ("model options", "training options", "optimizer options"):
        assert group in out
    assert "Width of the residual stream" in out
    assert "--vocab-size" not in out


def test_a_preset_gives_the_defaults() -> None:
    def default(option: str, *arguments: str) -> str:
        out = " ".join(call("train", *arguments, "--help", environment={"COLUMNS": "100"})[0].replace("│", " ").split())
        return re.search(rf" {option} .*?\(default: (.*?)\)", out).group(1)

    assert default("--d-model", "--preset", "original") == "64"
    assert default("--epochs", "--preset", "original") == "80"
    assert default("--lr", "--preset=original") == "0.003"
    assert default("--epochs", "--preset", "original", "--steps=7") == "None"
    assert default("--positions", "--preset", "llama") == "rope_half"


# Refusals before any work


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("trian", "COMMAND = 'trian': must be one of train, "),
        ("figures", "COMMAND = 'figures': must be one of figures attention"),
        ("train", "--out: is required"),
        ("generate", "RUN: is required"),
        ("train --out", "--out: needs a value"),
        ("train --out x --colour red", "--colour, red: is not an option of this command"),
        ("train --out x --vocab-size 9", "--vocab-size, 9: is not an option of this command"),
        ("train --out x --d-model wide", "--d-model = 'wide': must be a whole number"),
        ("train --out x --num-kv-heads few", "--num-kv-heads = 'few': must be a whole number or None"),
        ("train --out x --lr high", "--lr = 'high': must be a number"),
        ("train --out x --clip no", "--clip = 'no': must be a number or None"),
        ("train --out x --init zeros", "--init = 'zeros': must be one of 'scaled', 'torch'"),
        ("train --out x --preset huge", "preset = 'huge': must be one of minigpt, original, demo"),
        ("train --out x --d-model 30", "d_model = 30: must be divisible by num_heads = 4"),
        ("train --out x --d-model 15 --num-heads 3", "d_model = 15: must be even"),
        ("train --out x --num-heads 0", "num_heads = 0: must be at least 1"),
        ("train --out x --num-kv-heads 3", "num_kv_heads = 3: must divide num_heads = 4"),
        ("train --out x --dropout 1", "dropout = 1.0: must lie in [0, 1)"),
        ("train --out x --lr nan", "lr = nan: must be a finite number"),
        ("train --out x --steps 5 --epochs 5", "epochs = 5: cannot be given beside steps = 5"),
        ("generate x --prompt a --temperature -1", "temperature = -1.0: must be 0 (greedy) or at least 1e-6"),
        ("generate x --prompt a --top-p 0", "top_p = 0.0: must lie in (0, 1]"),
        ("generate x --prompt a --top-p 1.5", "top_p = 1.5: must lie in (0, 1]"),
        ("generate x --prompt a --top-k -2", "top_k = -2: must be at least 0"),
        ("generate x --prompt a --seed -1", "seed = -1: must lie in [0, 2**64)"),
        ("generate x --prompt a --samples 0", "samples = 0: must be at least 1"),
        ("generate x --prompt a --max-new-tokens 0", "max_new_tokens = 0: must be at least 1"),
        ("generate x --prompt a --beams 8", "beams = 8: belongs to an encoder-decoder's --source"),
        ("generate x --source a --temperature 0.5", "temperature = 0.5: belongs to a GPT's --prompt"),
        ("generate x --source a --samples 2", "samples = 2: belongs to a GPT's --prompt"),
        ("convert weights.pt weights.bin", "OUT = 'weights.bin': must end in .safetensors"),
    ],
)
def test_bad_usage_is_one_line(arguments: str, line: str, tmp_path: Path) -> None:
    found = refusal(*arguments.split(), cwd=tmp_path)
    assert found.startswith(line)
    assert not list(tmp_path.iterdir())


# Refusals of what lies on disk


def test_bad_texts_are_one_line(text: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"hello \xff world")
    (tmp_path / "wide.txt").write_bytes("hello world".encode("utf-16-le"))
    (tmp_path / "folder").mkdir()
    for data, options, line in [
        ("missing.txt", [], "data = 'missing.txt': is neither a file nor a folder"),
        ("short.txt", ["--held-out", "0"], "data = '3 tokens to train on': must hold more than window = 16 tokens"),
        ("empty.txt", [], "data = 'empty.txt': holds no text"),
        ("latin.txt", [], "data = 'latin.txt': is not UTF-8: byte 0xff at offset 6"),
        ("wide.txt", [], "data = 'wide.txt': is not UTF-8: byte 0x00 at offset 1, a NUL, as UTF-16 has"),
        ("folder", [], "data = 'folder': holds no file that matches glob = '*.txt'"),
        (text, ["--window", "17"], "window = 17: must be at most max_len = 16"),
    ]:
        assert refusal("train", data, "--out", "out", *TINY, *options, cwd=tmp_path).startswith(line)
        assert not (tmp_path / "out").exists()


def test_folders_that_are_no_run_are_one_line(run: Path, text: Path, tmp_path: Path) -> None:
    assert refusal("generate", tmp_path, "--prompt", "a").startswith(f"run = '{tmp_path}': is no run folder")
    assert refusal("evaluate", text).startswith(f"run = '{text}': is no run folder")
    assert refusal("train", text, "--out", run, *TINY) == f"out = '{run}': already holds a run; --resume goes on with it"
    (tmp_path / "letter.txt").write_text("mine")
    assert refusal("train", text, "--out", tmp_path, *TINY).startswith(f"out = '{tmp_path}': holds files that are no run's: letter.txt")


def test_bad_requests_of_a_run_are_one_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("The quick fox")
    for arguments, line in [
        (["generate", run, "--prompt", "héron"], "prompt = 'é': character 2 is not among the "),
        (["generate", run, "--prompt="], "prompt = '': must hold at least one character"),
        (["generate", run, "--prompt", "The", "--overflow", "error"], "max_new_tokens = 200: must be at most 13 after 3 tokens: max_len = 16"),
        (["figures", "attention", run, "--text", "The river is old."], "text = '17 tokens': must be at most max_len = 16 tokens long"),
        (["evaluate", run, tmp_path / "other.txt"], f"data = '{tmp_path / 'other.txt'}': holds 'q', which is not among the "),
        (["train", "--out", run, "--resume", "--d-model", "32"], "d_model = 32: is 16 in the run that would be resumed"),
    ]:
        assert refusal(*arguments).startswith(line)


def test_a_damaged_checkpoint_is_one_line(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", run, copy], check=True)
    for path in (copy / "checkpoints").rglob("*"):
        if path.is_file() and path.stat().st_size > 0:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    found = refusal("generate", copy, "--prompt", "The", environment={"PYTHONWARNINGS": "ignore"})
    assert f"= '{copy}': holds no whole checkpoint" in found


# Commands


def test_generate_streams_the_same_text_for_a_seed(run: Path) -> None:
    arguments = ["generate", run, "--prompt", "小雨", "--max-new-tokens", 20, "--seed", 3]
    once, err = call(*arguments)
    assert err == ""
    assert once.startswith("小雨")
    assert len(once) == len("小雨") + 20 + 1
    several, _ = call(*arguments, "--samples", 2)
    assert several.startswith(f"--- sample 1 of 2 ---\n{once}--- sample 2 of 2 ---\n小雨")
    # libtpu, which the suite installs, does not look for a TPU where there is none.
    other, err = call(*arguments[:-1], 4, environment={"JAX_PLATFORMS": ""})
    assert err == ""
    assert other != once


def test_evaluate_prints_loss_and_perplexity(run: Path, text: Path) -> None:
    words = call("evaluate", run, text)[0].split()
    values = dict(zip(words[::2], map(float, words[1::2]), strict=True))
    assert list(values) == ["loss", "perplexity", "tokens"]
    assert values["tokens"] == len(text.read_text(encoding="utf-8")) - 1
    assert f"{np.exp(values['loss']):.2f}" == f"{values['perplexity']:.2f}"


def test_figures_writes_its_pictures(run: Path, tmp_path: Path) -> None:
    out, _ = call("figures", "attention", run, "--text", "The river", "--layer", 1, "--head", 2, "--out", tmp_path / "pictures")
    assert out == f"{tmp_path / 'pictures' / 'attention-layer-1-head-2.png'}\n"
    assert Path(out.rstrip()).read_bytes().startswith(b"\x89PNG")


def test_parity_prints_a_table_and_agrees(run: Path) -> None:
    out, _ = call("parity", run)
    assert "comparisons, all within their budget" in out
    assert "token_embed.weight" in out.replace("\n", "")


def test_resume_takes_the_runs_own_options(run: Path) -> None:
    out, _ = call("train", "--out", run, "--resume")
    assert "after 4 steps" in out


def test_convert_keeps_every_tensor(tmp_path: Path) -> None:
    tied = torch.randn(3, 4)
    state = {"token_embed.weight": tied, "lm_head.weight": tied, "turned": torch.randn(5, 2).T, "mask": torch.ones(2, 2).bool()}
    torch.save(state, tmp_path / "in.pt")
    call("convert", tmp_path / "in.pt", tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert set(found) == set(state)
    for name, tensor in state.items():
        np.testing.assert_array_equal(found[name], tensor.numpy())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "out.safetensors"]


def test_convert_refuses_code_and_says_what_it_needs(tmp_path: Path) -> None:
    torch.save({"weights": os.getcwd}, tmp_path / "code.pt")
    assert refusal("convert", tmp_path / "code.pt", tmp_path / "out.safetensors").startswith(f"source = '{tmp_path / 'code.pt'}': is not a .pt file")
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')")
    found = refusal("convert", "code.pt", "out.safetensors", environment={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert found == "COMMAND = 'convert': needs PyTorch: pip install '.[torch]' in the clone"
    assert not (tmp_path / "out.safetensors").exists()


# The demo


def test_the_demos_texts_fit_its_model() -> None:
    tokenizer = load_corpus().tokenizer
    for text in [*demo.PROMPTS.values(), *demo.SENTENCES.values()]:
        assert 0 < len(tokenizer.encode(text)) <= GPT_PRESETS["demo"]["max_len"]


def test_the_demo_never_touches_what_lies_there(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "letter.txt").write_text("mine")
    (tmp_path / "2").write_text("mine")
    assert demo.new_folder(tmp_path) == tmp_path / "3"
    assert demo.new_folder(tmp_path) == tmp_path / "4"
    assert (tmp_path / "1" / "letter.txt").read_text() == "mine"
    assert demo.new_folder(tmp_path / "new" / "place") == tmp_path / "new" / "place" / "1"
    assert refusal("demo", "--out", tmp_path / "2") == f"{tmp_path / '2'}: File exists"


# The process


def test_a_reader_that_goes_away_ends_the_command(run: Path) -> None:
    process = start("generate", run, "--prompt", "The", "--max-new-tokens", 400)
    assert process.stdout.read(1) == "T"
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(timeout=120) == 141


def test_an_interrupt_saves_and_says_how_to_go_on(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start("train", text, "--out", folder, "--steps", 100000, *TINY)
    while not (folder / "metrics.jsonl").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "stopped by SIGINT after step" in err
    assert "resume" in err.splitlines()[-1]
    assert list((folder / "checkpoints").iterdir())


# A shell leaves SIGINT ignored in what it starts in the background.
INTERRUPTIBLE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from flax_gpt import __main__ as command
"""

LOSING = """
class Callback:
    def __del__(self):  # what is raised here is lost
        os.kill(os.getpid(), signal.SIGINT)
command.call = lambda arguments: Callback() and None
"""


def test_an_interrupt_ends_a_command_at_once(run: Path) -> None:
    """While jax compiles, on a slow machine while it is imported."""
    code = INTERRUPTIBLE + "sys.exit(command.main())"
    arguments = ["generate", str(run), "--prompt", "The", "--max-new-tokens", "500000"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "flax-gpt: interrupted\n"), out


def test_an_interrupt_is_not_lost_in_a_callback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTIBLE + LOSING + "sys.exit(command.main(['generate']))"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "flax-gpt: interrupted\n")


def test_the_callers_interrupt_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert main(["--version"]) == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_a_terminal_without_the_characters_gets_escapes(run: Path) -> None:
    out, _ = call("generate", run, "--prompt", "小", "--max-new-tokens", 2, environment={"PYTHONIOENCODING": "ascii"})
    assert out.startswith("\\u5c0f")

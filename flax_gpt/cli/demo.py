"""The whole in one command: trains, writes, draws, holds the result against PyTorch, and times both."""

import contextlib
import itertools
import json
import sys
import time
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.table import Table

from flax_gpt.config import GPT_PRESETS, SampleConfig, TrainConfig
from flax_gpt.errors import RunError
from flax_gpt.figures import attention
from flax_gpt.generation.sampling import stream
from flax_gpt.random import key_from_seed
from flax_gpt.training.data import load_corpus
from flax_gpt.training.loop import Run, train

PROMPTS = {"chinese": "春天，", "english": "In the morning "}
SENTENCES = {"chinese": "村子在河的东边，河从北边的山里来。", "english": "The river tells me the time."}
NEW_TOKENS = 160
SAMPLING = SampleConfig(temperature=0.6, top_k=20)


def demo(out: Path, run_parity: ModuleType, trained: ModuleType) -> None:
    """Leaves everything in a new numbered folder of `out`; nothing that lies there is touched. Raises RunError when the frameworks differ.

    run_parity, trained: the modules of `parity_tests` and `benchmarks`, which are beyond the wall.
    """
    console = Console(highlight=False, soft_wrap=True)
    began = time.monotonic()
    folder = new_folder(out)

    console.rule("1 of 5: train a GPT on the Chinese and English text that the package ships")
    run = train(GPT_PRESETS["demo"], TrainConfig.preset("demo"), None, folder / "run")

    console.rule("2 of 5: let it write")
    (folder / "text.txt").write_text("".join(write(run, prompt) for prompt in PROMPTS.values()), encoding="utf-8")

    console.rule("3 of 5: draw what it attends to")
    pictures = {name: attention.draw(run, sentence, folder / f"attention-{name}") for name, sentence in SENTENCES.items()}

    console.rule("4 of 5: compare it with PyTorch, tensor by tensor")
    report = run_parity.run(run.folder)
    with open(folder / "parity.txt", "w", encoding="utf-8") as file:
        report.print(Console(file=file, width=140))
    console.print(report.summary())

    console.rule("5 of 5: time it beside PyTorch")
    corpus = load_corpus(tokenizer=run.tokenizer)
    document = trained.measure(run.model, run.train_config.batch_size, corpus.tokens, folder / "speed")
    for line in trained.sentences(document):
        console.print(line)
    console.print("torch ran eagerly: its compiler alone takes half a minute; flax-gpt bench has it")
    differing = trained.differing(document)

    table = Table(title=f"{folder}: done in {time.monotonic() - began:.0f} seconds", title_justify="left", show_header=False)
    for what, path in {
        f"the run: {run.step} steps, {losses(run)}": run.folder,
        "its loss curve": run.folder / "loss.png",
        "what it wrote": folder / "text.txt",
        **{f"what it attends to, {name}": paths[0].parent for name, paths in pictures.items()},
        "equal to PyTorch" if report.ok else "[red]differs from PyTorch[/red]": folder / "parity.txt",
        "timed beside PyTorch": folder / "speed" / "speed.png",
    }.items():
        table.add_row(what, str(path.relative_to(folder)))
    console.print(table)
    command = sys.argv[0] if Path(sys.argv[0]).name == "flax-gpt" else "flax-gpt"
    console.print(f"Go on with: {command} generate {run.folder} --prompt '{PROMPTS['english']}'")
    if not report.ok:
        raise RunError(report.summary())
    if differing:
        raise RunError(differing[0])


def new_folder(out: Path) -> Path:
    """Makes out/1, or the first number that is free."""
    out.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            (out / str(number)).mkdir()
            return out / str(number)
    raise AssertionError("numbers have no end")


def write(run: Run, prompt: str) -> str:
    """Prints a continuation as it comes, and returns it with its prompt."""
    print(prompt, end="", flush=True)
    text = prompt
    for (piece,) in stream(run.model, run.tokenizer, prompt, NEW_TOKENS, key=key_from_seed(0), **SAMPLING.to_dict()):
        print(piece, end="", flush=True)
        text += piece
    print("\n")
    return f"{text}\n\n"


def losses(run: Run) -> str:
    """The last of each loss in metrics.jsonl."""
    last: dict[str, float] = {}
    for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        last |= json.loads(line)
    return f"loss {last['train_loss']:.2f}, held out {last['held_out_loss']:.2f}"

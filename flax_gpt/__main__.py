"""The command line: a table command → function. Start reading here.

`flax-gpt COMMAND --help` shows a command's options; they are the arguments of its function and the fields of the configurations in `config.py`.
Exit status: 0 done, 1 the check or the run failed, 2 bad usage or bad input, 130 interrupted, 141 the reader of the output went away.
"""

import contextlib
import dataclasses
import glob
import importlib
import importlib.metadata
import importlib.util
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from flax_gpt import __version__, figures
from flax_gpt.cli.options import ModelOptions, train_defaults
from flax_gpt.cli.usage import Command, UsageError, bind
from flax_gpt.config import PRESETS, BeamConfig, SampleConfig, TrainConfig
from flax_gpt.errors import InputError, RunError, require

Run = Annotated[Positional[Path], arg(metavar="RUN")]
Data = Annotated[Positional[Path | None], arg(metavar="[DATA]")]
Step = Annotated[str, arg(metavar="{last,best,STEP}")]
OnBadFile = Literal["error", "skip"]
PRESET_NAMES = ",".join(name for presets in PRESETS.values() for name in presets)


def train(
    data: Data = None,
    /,
    *,
    out: Path,
    kind: Annotated[str, arg(name="model", metavar=f"{{{','.join(PRESETS)}}}")] = "gpt",
    preset: Annotated[str, arg(metavar=f"{{{PRESET_NAMES}}}")] = "",
    glob: str = "*.txt",
    on_bad_file: OnBadFile = "error",
    resume: bool = False,
    devices: int = 1,
    model: ModelOptions = ModelOptions(),  # noqa: B008 (frozen, as below)
    training: TrainConfig = TrainConfig(),  # noqa: B008
) -> None:
    """Trains a GPT on a text, a translator on pairs or a classifier on labelled texts, all of characters, and leaves a run folder.

    Args:
        data: A UTF-8 file or a folder; for the other kinds a file of lines SOURCE TAB TARGET, or TEXT TAB LABEL, or shipped:NAME for a file that the
            package ships: dates.tsv, majority.tsv, majority_lengths.tsv. Left out: the Chinese and English text that it ships, or the first or second
            of these.
        out: Folder of the run.
        kind: What to train; the help shows the options of the one that stands beside --help.
        preset: Where the defaults below come from; left out: minigpt, dates or majority, by the kind. The help shows those of the preset that
            stands beside --help.
        glob: Names of the files to read in a folder, at any depth.
        on_bad_file: What to do with a file that is not UTF-8 or cannot be read.
        resume: Go on with the run in --out, bitwise as if it had never stopped; its options stay as they are, its length among them.
        devices: How many of the devices that jax sees share each batch; must divide its rows, or those of each of its parts. --resume may change it.
    """
    from flax_gpt.training.loop import train

    source = None if data is None else str(data)
    run = train(model.to_dict(), training, source, out, kind=kind, glob=glob, on_bad_file=on_bad_file, resume=resume, devices=devices)
    use = {"gpt": f"generate {run.folder} --prompt …", "encoder-decoder": f"generate {run.folder} --source …", "classifier": f"evaluate {run.folder}"}
    print(f"{run.folder} holds the run after {run.step} steps: flax-gpt {use[run.kind]}")


def evaluate(
    run: Run,
    data: Data = None,
    /,
    *,
    step: Step = "last",
    glob: str = "*.txt",
    on_bad_file: OnBadFile = "error",
) -> None:
    """Prints how well a run's model does on data: the loss in nats, and the perplexity, the share of exact translations, or the accuracy.

    Args:
        run: Folder of a run.
        data: As for train; left out: what the run held out of its own data.
        step: Whose weights: the last checkpoint's, those with the best held-out loss, or those of a step that the run keeps.
        glob: Names of the files to read in a folder, at any depth.
        on_bad_file: What to do with a file that is not UTF-8 or cannot be read.
    """
    from flax_gpt.training.loop import evaluate, load_run

    found = evaluate(load_run(run, step), None if data is None else str(data), glob=glob, on_bad_file=on_bad_file)
    print("  ".join(f"{name} {value:.6f}".removesuffix(".000000") for name, value in found.items()))


def generate(
    run: Run,
    /,
    *,
    prompt: str | None = None,
    source: str | None = None,
    max_new_tokens: int | None = None,
    samples: int = 1,
    seed: int = 0,
    step: Step = "last",
    overflow: Literal["slide", "error"] = "slide",
    sampling: SampleConfig = SampleConfig(),  # noqa: B008 (frozen)
    search: BeamConfig = BeamConfig(),  # noqa: B008
) -> None:
    """Continues a prompt with a run's GPT, as it is written, or translates a source with a run's encoder-decoder.

    Args:
        run: Folder of a run.
        prompt: For a GPT: the text to continue, in characters of the run's vocabulary.
        source: For an encoder-decoder: the text to translate; beam search finds the translation.
        max_new_tokens: Tokens to write at most; left out: 200, or for a translation as many as the model's max_len allows.
        samples: Continuations drawn at once; the first appears as it is written, the others when all are done.
        seed: Of the draws; the same seed writes the same text.
        step: Whose weights, as for evaluate.
        overflow: Beyond the model's max_len, 'slide' moves the window on, recomputing it for each token; 'error' refuses.
    """
    require(0 <= seed < 2**64, "seed", seed, "must lie in [0, 2**64)")
    require(max_new_tokens is None or max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "must be at least 1")
    require((prompt is None) != (source is None), "--prompt", prompt, "is required for a GPT, --source for an encoder-decoder, one of the two")
    require(samples >= 1, "samples", samples, "must be at least 1")
    if source is not None:
        require_left_out(sampling, "belongs to a GPT's --prompt")
        require(samples == 1, "samples", samples, "belongs to a GPT's --prompt; a search gives several with n-best")
        from flax_gpt.generation.translate import translate

        for translation in translate(load(run, "encoder-decoder", step), [source], max_new_tokens, **search.to_dict())[0]:
            print(f"{translation.score:.4f}  {translation.text}" if search.n_best > 1 else translation.text)
        return
    assert prompt is not None
    require_left_out(search, "belongs to an encoder-decoder's --source")
    from flax_gpt.generation.sampling import stream
    from flax_gpt.random import key_from_seed

    loaded = load(run, "gpt", step)
    max_new_tokens = 200 if max_new_tokens is None else max_new_tokens
    loaded.tokenizer.encode(prompt, "prompt")
    options = {"samples": samples, "key": key_from_seed(seed), "overflow": overflow, **sampling.to_dict()}
    texts = [prompt] * samples
    for number, pieces in enumerate(stream(loaded.model, loaded.tokenizer, prompt, max_new_tokens, **options)):
        if number == 0:  # from here on nothing is refused
            print(f"{heading(1, samples)}{prompt}", end="")
        print(pieces[0], end="", flush=True)
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    print()
    for number, text in enumerate(texts[1:], start=2):
        print(f"{heading(number, samples)}{text}")


def require_left_out(config: Any, belongs: str) -> None:
    """Raises InputError when an option of `config` was given a value of its own, which the command would not heed."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        require(value == field.default, field.name, value, belongs)


def load(run: Path, kind: str, step: str = "last") -> Any:
    """The run, which must be of the kind. Raises InputError for another."""
    from flax_gpt.training.loop import load_run

    loaded = load_run(run, step)
    require(loaded.kind == kind, "RUN", str(run), f"holds a model of the kind {loaded.kind!r}; this takes {kind!r}")
    return loaded


def heading(number: int, samples: int) -> str:
    return f"--- sample {number} of {samples} ---\n" if samples > 1 else ""


def parity(
    run: Annotated[Positional[Path | None], arg(metavar="[RUN]")] = None,
    data: Data = None,
    /,
    *,
    dtype: str = "float32",
    device: str = "",
    precision: Literal["highest", "default"] = "highest",
    html: Path | None = None,
    json: Path | None = None,
) -> None:
    """Loads a run into PyTorch and compares maps, logits, gradients, an optimizer step and generated tokens on its text; fails when they differ.

    Args:
        run: Folder of a run; left out: a new model of the preset demo.
        data: A UTF-8 file or a folder to compare on; left out: the text that the run was trained on.
        dtype: Some of float32, bfloat16 and float16, separated by commas; float64, the judge, always comes first.
        device: Where JAX computes: some of cpu, gpu and tpu, separated by commas; left out: JAX's own choice. PyTorch computes on the processor.
        precision: Of JAX's float32 products: highest, or default, which is TF32 on GPUs that have it and bfloat16 on TPUs.
        html: Write the report as one page to this file, with the values inside both models and their attention maps.
        json: Write the report to this file; docs/parity.md describes its fields.
    """
    for name, file in (("--html", html), ("--json", json)):
        require(file is None or (file.parent.is_dir() and not file.is_dir()), name, str(file), "must be a file in a folder that exists")
    require(html is None or html != json, "--json", str(json), "must be another file than --html")
    split = lambda names: tuple(filter(None, names.split(",")))
    options = dict(devices=split(device), precision=precision, dtypes=split(dtype), tapped=True if html else None)
    report = beside_torch("parity_tests.run_parity", "parity").run(run, data, **options)
    if json is not None:
        report.save(json)
    if html is not None:
        beside_torch("parity_tests.page", "parity").save(report, html)
    report.print()
    if not report.ok:
        raise RunError(report.summary())


def figures_attention(run: Run, /, *, text: str, layer: int | None = None, head: int | None = None, out: Path | None = None) -> None:
    """Draws what a run's GPT, classifier or encoder attends to in a text: all layers and the last one's heads, or the layer and head asked for.

    Args:
        run: Folder of a run.
        text: What the model reads; at most max_len tokens of its vocabulary.
        layer: Draw this layer alone, counted from 1; left out: every layer's mean over its heads, and every head of the last layer.
        head: Draw this head of the layer alone, counted from 1; left out: all of them.
        out: Folder of the pictures; RUN/figures when left out.
    """
    from flax_gpt.figures import attention
    from flax_gpt.training.loop import load_run

    for path in attention.draw(load_run(run), text, run / "figures" if out is None else out, layer=layer, head=head):
        print(path)


def figures_cross_attention(
    run: Run,
    /,
    *,
    source: str,
    target: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    out: Path | None = None,
) -> None:
    """Draws what a run's encoder-decoder looks at in a source as it writes each character of the target.

    Args:
        run: Folder of a run.
        source: What the model translates.
        target: What it is made to write; left out: its own greedy translation.
        layer: Draw this layer alone, counted from 1; left out: every layer's mean over its heads, and every head of the last layer.
        head: Draw this head of the layer alone, counted from 1; left out: all of them.
        out: Folder of the pictures; RUN/figures when left out.
    """
    from flax_gpt.figures import cross_attention

    folder = run / "figures" if out is None else out
    for path in cross_attention.draw(load(run, "encoder-decoder"), source, folder, target=target, layer=layer, head=head):
        print(path)


def figures_of(name: str) -> Command:
    """The command that runs one of the experiments of figures.EXPERIMENTS and draws it."""

    def command(*, out: Path = Path("figures"), seed: int = 0) -> None:
        for path in figures.draw(name, out, seed):
            print(path)

    command.__doc__ = f"""{figures.EXPERIMENTS[name]}

    Args:
        out: Folder of the picture and of the JSON file with its numbers.
        seed: Of the draws and of the initial weights; the same seed gives the same numbers.
    """
    return command


def convert(
    file: Annotated[Positional[Path], arg(metavar="FILE.pt")],
    out: Annotated[Positional[Path], arg(metavar="OUT.safetensors")],
    /,
) -> None:
    """Rewrites the weights of a PyTorch file as .safetensors, names and values unchanged. Needs torch, which reads it without running code from it.

    Args:
        file: A .pt file that holds a state dict.
        out: The file to write.
    """
    require(out.suffix == ".safetensors", "OUT", str(out), "must end in .safetensors")
    beside_torch("torch_ref.weights.convert", "convert").convert(file, out)
    print(out)


def beside_torch(module: str, command: str) -> ModuleType:
    """A module on the other side of the wall. Raises InputError where PyTorch is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        require(error.name != "torch", "COMMAND", command, "needs PyTorch: pip install '.[torch]' in the clone")
        raise


def demo(*, out: Path = Path("demo")) -> None:
    """Trains on the shipped text, writes, draws, compares the result with PyTorch and times both; a few minutes on two cores.

    Args:
        out: Where a new numbered folder is made; nothing that lies there is touched.
    """
    run_parity, trained = beside_torch("parity_tests.run_parity", "demo"), beside_torch("benchmarks.trained", "demo")
    from flax_gpt.cli.demo import demo

    demo(out, run_parity, trained)


def bench(
    *,
    quick: bool = False,
    full: bool = False,
    cases: str | None = None,
    out: Path = Path("bench"),
    resume: bool = False,
    keep_memory: bool = False,
) -> None:
    """Times attention, training and generation beside PyTorch, outputs compared first; half an hour on two cores. Fails when a case has no ratio.

    Args:
        quick: A few cases in two minutes.
        full: The whole grid, for a night.
        cases: Names to run, with * and ?, separated by commas; left out: all of the level.
        out: Folder of the results; new or empty, unless --resume goes on with what it holds.
        resume: Measure what the folder does not hold yet.
        keep_memory: Let both sides keep freed memory on the processor, as train does, where malloc by default returns it to the system.
    """
    require(not (quick and full), "--full", full, "cannot be given beside --quick")
    level = "quick" if quick else "full" if full else "standard"
    beside_torch("benchmarks.command", "bench").bench(level, cases, out, resume, keep_memory)


def bench_compare(
    old: Annotated[Positional[Path], arg(metavar="OLD.json")],
    new: Annotated[Positional[Path], arg(metavar="NEW.json")],
    /,
) -> None:
    """Compares two results of bench by the intervals of their ratios; fails when a case became slower.

    Args:
        old: A results.json.
        new: A later one, of a machine of the same kind.
    """
    beside_torch("benchmarks.command", "bench compare").compare(old, new)


COMMANDS: dict[str, Command] = {
    "train": train,
    "generate": generate,
    "evaluate": evaluate,
    "parity": parity,
    "figures attention": figures_attention,
    "figures cross-attention": figures_cross_attention,
    **{f"figures {name}": figures_of(name) for name in figures.EXPERIMENTS},
    "convert": convert,
    "bench compare": bench_compare,  # before bench, of which it is no option
    "bench": bench,
    "demo": demo,
}


def overview(names: Iterable[str]) -> str:
    rows = [f"  {name:<24}{(COMMANDS[name].__doc__ or '').splitlines()[0]}" for name in names]
    return "\n".join(["usage: flax-gpt COMMAND [OPTIONS]", "", *rows, "", "flax-gpt COMMAND --help explains a command's options."])


def call(arguments: list[str]) -> None:
    """Runs the command that `arguments` begin with."""
    if arguments == ["--version"]:
        print(f"flax-gpt {__version__}")
        return
    for name, command in COMMANDS.items():
        words = name.split()
        if arguments[: len(words)] == words:
            rest = arguments[len(words) :]
            bind(command, name, rest, train_defaults(rest) if command is train else {})()
            return
    family = [name for name in COMMANDS if name.split()[0] in arguments[:1]]
    if not arguments or "-h" in arguments or "--help" in arguments:
        print(overview(family or COMMANDS))
        return
    raise UsageError(f"COMMAND = {' '.join(arguments[: 2 if family else 1])!r}: must be one of {', '.join(family or COMMANDS)}")


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit status; whatever goes wrong is one line on standard error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without the characters gets escapes, not a traceback
    spare_the_search_for_a_tpu()
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        with leaving_when_interrupted(arguments):
            call(arguments)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        return 141
    except KeyboardInterrupt:
        return refuse("interrupted", 130)
    except (UsageError, InputError) as error:
        return refuse(error, 2)
    except OSError as error:
        bad_path = isinstance(error, FileNotFoundError | FileExistsError | NotADirectoryError | IsADirectoryError | PermissionError)
        return refuse(f"{error.filename}: {error.strerror}" if error.filename else error, 2 if bad_path else 1)
    except RunError as error:
        return refuse(error, 1)
    except MemoryError as error:
        return refuse(f"out of memory: {error}", 1)
    except RuntimeError as error:  # jax's own kind, which must not be imported for this
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return refuse(f"out of memory: {str(error).splitlines()[0]}", 1)


@contextlib.contextmanager
def leaving_when_interrupted(arguments: list[str]) -> Iterator[None]:
    """Within it Ctrl-C ends the process at once: as an exception it may be swallowed by a callback of jax, and an interpreter that ends while XLA
    compiles may crash. train has handlers of its own once it trains; bench and demo get the exception, since they have processes to end.
    """

    def leave(number: int, frame: Any) -> None:
        os.write(2, b"flax-gpt: interrupted\n")
        os._exit(130)

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours or arguments[:1] in (["bench"], ["demo"]):
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def spare_the_search_for_a_tpu() -> None:
    """Says that there is the processor alone where libtpu is installed, as the suite's compiler, and neither a TPU nor another accelerator's plugin.

    libtpu would ask the network for a TPU and report at length that it found none. JAX_PLATFORMS, when set, comes first.
    """
    devices = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/*")
    plugins = importlib.metadata.entry_points(group="jax_plugins") or importlib.util.find_spec("jax_plugins")
    if not (os.environ.get("JAX_PLATFORMS") or devices or plugins) and importlib.util.find_spec("libtpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"


def refuse(reason: object, status: int) -> int:
    print("flax-gpt:", " ".join(str(reason).split()), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())

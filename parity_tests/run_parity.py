"""Whether a trained run computes the same in torch: the backend of `flax-gpt parity RUN`."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

import torch_ref.generation.beam
import torch_ref.generation.sampling
from flax_gpt.config import GPT_PRESETS, GPTConfig, TrainConfig
from flax_gpt.errors import require
from flax_gpt.generation.beam import beam_search
from flax_gpt.generation.sampling import generate
from flax_gpt.models.gpt import MiniGPT
from flax_gpt.training.data import load_corpus
from flax_gpt.training.labels import encode_labelled
from flax_gpt.training.loop import Run, load_run
from flax_gpt.training.pairs import encode_pairs
from flax_gpt.training.tasks import TASKS
from parity_tests import arithmetic, compare, oracle, ports, tolerances, translation_oracle
from parity_tests.report import Report, Row


@dataclasses.dataclass(frozen=True)
class Request:
    """What of a run is compared, and how."""

    data: str | os.PathLike[str] | None = None
    rows: int = 2
    window: int | None = None
    new_tokens: int = 32
    dtypes: Sequence[str] = ("float32",)
    tapped: bool | None = None


def run(
    folder: str | os.PathLike[str] | None,
    data: str | os.PathLike[str] | None = None,
    *,
    devices: Sequence[str] = (),
    precision: str = "highest",
    **options: Any,
) -> Report:
    """Compares a run's model with torch_ref holding the same weights: maps, logits, loss, each gradient, an optimizer step and generated tokens.

    folder: a run folder; None compares a new model of the preset "demo". data: a UTF-8 text or a folder of texts; None reads the run's own again. For
    an encoder-decoder or a classifier data is a tab-separated file, None the rows that the run held out, of which the first `rows` are compared.
    devices: where JAX computes, some of arithmetic.DEVICES; JAX's own choice when empty. precision: one of arithmetic.PRECISIONS.

    Options:
      rows: how many windows are compared, spread over the text.
      window: tokens of each; None: the model's max_len.
      new_tokens: how many tokens are generated greedily.
      dtypes: some of "float32", "bfloat16" and "float16"; float64 is always compared. Optimizer steps and tokens are compared in float32 alone.
      tapped: with the values inside, forward and backward; None: where something differs.

    Raises InputError for a folder that holds no run, for a text that cannot be read or is shorter than a window, and for a device that is absent.
    """
    request = Request(data, **options)
    require(request.rows >= 1, "rows", request.rows, "must be at least 1")
    known = ports.DTYPES
    wrong = next((dtype for dtype in request.dtypes if dtype not in known), None)
    require(wrong is None, "dtype", wrong, f"must be one of {', '.join(known)}")
    require(bool(request.dtypes) and len(set(request.dtypes)) == len(request.dtypes), "dtype", ",".join(request.dtypes), "must name each dtype once")
    require(len(set(devices)) == len(devices), "device", ",".join(devices), "must name each device once")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thousands of small operations: a second thread would mostly wait for them
    try:
        chosen = [arithmetic.device_of(name) for name in devices or (None,)]
        return _merged([_on(device, folder, request, precision) for device in chosen])
    finally:
        torch.set_num_threads(threads)


def _on(device: Any, folder: str | os.PathLike[str] | None, request: Request, precision: str) -> Report:
    with arithmetic.using(device, precision):
        trained = _new() if folder is None else load_run(folder)
        nnx.update(trained.model, jax.device_put(nnx.state(trained.model), device))
        report = _compare(trained, request)
    name = arithmetic.title_of(device)
    report.rows = [dataclasses.replace(row, device=name) for row in report.rows]
    report.environment |= {"dtypes compared": ", ".join(["float64", *request.dtypes]), "JAX computed on": f"{name}, {device.device_kind}"}
    return report


def _merged(parts: Sequence[Report]) -> Report:
    """One report of those of several devices."""
    report = parts[0]
    for part in parts[1:]:
        report.rows += part.rows
        report.environment["JAX computed on"] += f"; {part.environment['JAX computed on']}"
        name = part.rows[0].device
        report.maps |= {f"{key} on {name}": value for key, value in part.maps.items()}
        report.axes |= {f"{key} on {name}": value for key, value in part.axes.items()}
    return report


def _new() -> Run:
    """A model of the preset "demo" as training begins with, and the text that the package ships."""
    corpus = load_corpus(None)
    config = GPTConfig(**GPT_PRESETS["demo"] | {"vocab_size": corpus.tokenizer.vocab_size})
    model = MiniGPT(config, rngs=nnx.Rngs(0))
    model.eval()
    data = {"source": None, "glob": "*.txt", "on_bad_file": "error"}
    return Run(model, corpus.tokenizer, config, TrainConfig.preset("demo"), 0, pathlib.Path("a new model"), data=data)


def _compare(trained: Run, request: Request) -> Report:
    report = Report(f"{trained.folder}, step {trained.step}: flax_gpt against torch_ref")
    if trained.kind == "encoder-decoder":
        return _translation(trained, request, report)
    if trained.kind == "classifier":
        batch = _labelled(trained, request)
    else:
        batch = _batch(trained, request)
    theirs = oracle.torch_model(trained.config, oracle.flax_weights(trained.model))
    compare.check(trained.model, theirs, batch, report=report, dtypes=request.dtypes, tapped=request.tapped)
    narrow = "float32" in request.dtypes
    compare.check_steps(trained.model, theirs, batch, trained.train_config.optimizer, (1,), narrow=narrow, report=report)
    if trained.kind == "gpt" and narrow:
        report.rows.append(_greedy(trained, theirs, batch["tokens"][:1, : max(1, batch["tokens"].shape[1] // 4)], request.new_tokens))
    characters = trained.tokenizer if trained.kind == "gpt" else trained.tokenizer.text
    tokens = _labels(batch["tokens"], batch.get("lengths"), characters.characters)
    report.axes = dict.fromkeys(report.maps, (tokens, tokens))
    return report


def _labels(ids: np.ndarray, lengths: np.ndarray | None, characters: str, first: Sequence[str] = ()) -> list[list[str]]:
    """The tokens (B, T) as text, of which `first` have the lowest ids and `characters` the next; padding as ∅."""
    known = [*first, *characters]
    lengths = np.full(len(ids), ids.shape[1]) if lengths is None else lengths
    return [[known[i] if place < length else "∅" for place, i in enumerate(row)] for row, length in zip(ids, lengths, strict=True)]


def _labelled(trained: Run, request: Request) -> dict[str, np.ndarray]:
    table = TASKS[trained.kind].evaluated(trained, request.data)
    table = table.select(range(min(request.rows, len(table))))
    batch = encode_labelled(table, trained.tokenizer, trained.config.max_len).batch(range(len(table)), len(table), trained.config.max_len)
    return {"tokens": batch.tokens, "targets": batch.labels, "lengths": batch.lengths}


def _translation(trained: Run, request: Request, report: Report) -> Report:
    """Pairs that the run held out, and their translations in float64, where rounding decides nothing."""
    table = TASKS[trained.kind].evaluated(trained, request.data)
    table = table.select(range(min(request.rows, len(table))))
    batch = encode_pairs(table, trained.tokenizer, trained.config.max_len).batch(range(len(table)), len(table), trained.config.max_len)
    weights = oracle.flax_weights(trained.model)
    case = translation_oracle.Case(trained.config, weights, batch, trained.train_config.label_smoothing, optimizer=trained.train_config.optimizer)
    report.environment |= ports.environment()
    translation_oracle.check(case, report, dtypes=request.dtypes, tapped=request.tapped)
    special = ("␀", "⊢", "⊣")  # pad, bos, eos
    source = _labels(batch.source, batch.source_lengths, trained.tokenizer.source.characters, special)
    target = _labels(batch.target, batch.target_lengths, trained.tokenizer.target.characters, special)
    asking_asked = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
    report.axes = {name: asking_asked[name.split("/")[0]] for name in report.maps}
    beams = dict(lengths=batch.source_lengths, beams=4, n_best=2)
    with jax.enable_x64(True):
        ours = beam_search(translation_oracle.flax_model(case, "float64"), batch.source, **beams)
    theirs = torch_ref.generation.beam.beam_search(translation_oracle.torch_model(case, "float64"), batch.source, **beams)
    same = np.array_equal(ours.tokens, theirs.tokens.numpy()) and np.array_equal(ours.lengths, theirs.lengths.numpy())
    report.rows.append(Row("translations (4 beams, 2 best)", "exact", {}, {}, {}, 0.0, note="" if same else "the tokens differ", kind="tokens"))
    return report


def _batch(trained: Run, request: Request) -> dict[str, np.ndarray]:
    window = trained.config.max_len if request.window is None else request.window
    require(1 <= window <= trained.config.max_len, "window", window, f"must lie in [1, {trained.config.max_len}], the model's max_len")
    known, data = trained.data, request.data
    corpus = load_corpus(
        known["source"] if data is None else pathlib.Path(data), glob=known["glob"], on_bad_file=known["on_bad_file"], tokenizer=trained.tokenizer
    )
    size = len(corpus.tokens)
    require(size > window, "data", corpus.source, f"has {size} characters; a window needs {window + 1}")
    starts = np.linspace(0, size - window - 1, request.rows).astype(int)
    windows = np.stack([corpus.tokens[start : start + window + 1] for start in starts]).astype(np.int32)
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


def _greedy(trained: Run, theirs: torch.nn.Module, prompt: np.ndarray, new_tokens: int) -> Row:
    """Equal tokens, or tokens that part where the two logits are closer than rounding can tell."""
    ours = np.asarray(generate(trained.model, prompt, new_tokens, temperature=0.0))[0]
    other = torch_ref.generation.sampling.generate(theirs, prompt, new_tokens, temperature=0.0)[0].numpy()
    different = np.flatnonzero(ours != other)
    note = ""
    if different.size:
        place = int(different[0])
        tie = grade_of_the_gap(theirs, ours[:place][-trained.config.max_len :], int(ours[place]), int(other[place]))
        note = "" if tie <= tolerances.reference_limit() else f"token {place}: flax {ours[place]}, torch {other[place]}"
    return Row(f"greedy tokens ({new_tokens})", "exact", {}, {}, {}, 0.0, note=note, kind="tokens")


def grade_of_the_gap(theirs: torch.nn.Module, text: np.ndarray, one: int, other: int) -> float:
    """How far apart the logits of two tokens after `text` (T,) are, in units of what rounding explains: a small grade is a tie."""
    wide = oracle.in_float64(theirs)

    def gap() -> dict[str, np.ndarray]:
        logits = wide(torch.from_numpy(text[None].astype(np.int64)))[0][0, -1].detach()
        return {"gap": (logits[one] - logits[other]).numpy()}

    return tolerances.grade(gap()["gap"], tolerances.scatter(gap)["gap"], "float32")

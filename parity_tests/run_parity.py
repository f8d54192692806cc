"""Whether a trained run computes the same in torch: the backend of `flax-gpt parity RUN`."""

import json
import os
import pathlib

import jax
import numpy as np
import torch

import torch_ref.generation.beam
import torch_ref.generation.sampling
from flax_gpt.errors import require
from flax_gpt.generation.beam import beam_search
from flax_gpt.generation.sampling import generate
from flax_gpt.training.data import load_corpus
from flax_gpt.training.labels import encode_labelled
from flax_gpt.training.loop import Run, load_run
from flax_gpt.training.pairs import encode_pairs
from flax_gpt.training.tasks import TASKS
from parity_tests import compare, oracle, tolerances, translation_oracle
from parity_tests.report import Report, Row


def run(
    folder: str | os.PathLike[str], data: str | os.PathLike[str] | None = None, *, rows: int = 2, window: int | None = None, new_tokens: int = 32
) -> Report:
    """Compares a run's model with torch_ref holding the same weights: maps, logits, loss, each gradient, an optimizer step and generated tokens.

    folder: a run folder. data: a UTF-8 text or a folder of texts; None reads the run's own again. rows: how many windows of `window` tokens (None:
    the model's max_len) are compared, spread over the text. new_tokens: how many tokens are generated greedily. For an encoder-decoder or a
    classifier data is a tab-separated file, None the rows that the run held out, of which the first `rows` are compared.

    Raises InputError for a folder that holds no run, and for a text that cannot be read or is shorter than a window.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thousands of small operations: a second thread would mostly wait for them
    try:
        return _compare(load_run(folder), data, rows, window, new_tokens)
    finally:
        torch.set_num_threads(threads)


def _compare(trained: Run, data: str | os.PathLike[str] | None, rows: int, window: int | None, new_tokens: int) -> Report:
    report = Report(f"{trained.folder}, step {trained.step}: flax_gpt against torch_ref")
    require(rows >= 1, "rows", rows, "must be at least 1")
    if trained.kind == "encoder-decoder":
        return _translation(trained, data, rows, report)
    if trained.kind == "classifier":
        batch = _labelled(trained, data, rows)
    else:
        batch = _batch(trained, data, rows, trained.config.max_len if window is None else window)
    theirs = oracle.torch_model(trained.config, oracle.flax_weights(trained.model))
    compare.check(trained.model, theirs, batch, report=report)
    compare.check_steps(trained.model, theirs, batch, trained.train_config.optimizer, (1,), report=report)
    if trained.kind == "gpt":
        report.rows.append(_greedy(trained, theirs, batch["tokens"][:1, : max(1, batch["tokens"].shape[1] // 4)], new_tokens))
    return report


def _labelled(trained: Run, data: str | os.PathLike[str] | None, rows: int) -> dict[str, np.ndarray]:
    table = TASKS[trained.kind].evaluated(trained, data)
    table = table.select(range(min(rows, len(table))))
    batch = encode_labelled(table, trained.tokenizer, trained.config.max_len).batch(range(len(table)), len(table), trained.config.max_len)
    return {"tokens": batch.tokens, "targets": batch.labels, "lengths": batch.lengths}


def _translation(trained: Run, data: str | os.PathLike[str] | None, rows: int, report: Report) -> Report:
    """Pairs that the run held out, and their translations in float64, where rounding decides nothing."""
    table = TASKS[trained.kind].evaluated(trained, data)
    table = table.select(range(min(rows, len(table))))
    batch = encode_pairs(table, trained.tokenizer, trained.config.max_len).batch(range(len(table)), len(table), trained.config.max_len)
    weights = oracle.flax_weights(trained.model)
    case = translation_oracle.Case(trained.config, weights, batch, trained.train_config.label_smoothing, optimizer=trained.train_config.optimizer)
    translation_oracle.check(case, report)
    request = dict(lengths=batch.source_lengths, beams=4, n_best=2)
    with jax.enable_x64(True):
        ours = beam_search(translation_oracle.flax_model(case, "float64"), batch.source, **request)
    theirs = torch_ref.generation.beam.beam_search(translation_oracle.torch_model(case, "float64"), batch.source, **request)
    same = np.array_equal(ours.tokens, theirs.tokens.numpy()) and np.array_equal(ours.lengths, theirs.lengths.numpy())
    report.rows.append(Row("translations (4 beams, 2 best)", "exact", {}, {}, {}, 0.0, note="" if same else "the tokens differ", kind="tokens"))
    return report


def _batch(trained: Run, data: str | os.PathLike[str] | None, rows: int, window: int) -> dict[str, np.ndarray]:
    require(1 <= window <= trained.config.max_len, "window", window, f"must lie in [1, {trained.config.max_len}], the model's max_len")
    known = json.loads((trained.folder / "run.json").read_text(encoding="utf-8"))["data"]
    corpus = load_corpus(
        known["source"] if data is None else pathlib.Path(data), glob=known["glob"], on_bad_file=known["on_bad_file"], tokenizer=trained.tokenizer
    )
    size = len(corpus.tokens)
    require(size > window, "data", corpus.source, f"has {size} characters; a window needs {window + 1}")
    starts = np.linspace(0, size - window - 1, rows).astype(int)
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

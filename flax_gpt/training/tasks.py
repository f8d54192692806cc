"""What a run can learn. A task says what its data are, what a batch costs and how the result is measured; `loop` does the rest for all of them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from flax_gpt.config import EncoderConfig, EncoderDecoderConfig, GPTConfig, TrainConfig, TransformerConfig
from flax_gpt.errors import InputError, require
from flax_gpt.generation.beam import beam_search
from flax_gpt.training.data import Corpus, Windows, evaluation_batches, load_corpus, split
from flax_gpt.training.labels import Labelled, LabelTokenizer, encode_labelled, label_loss, label_totals
from flax_gpt.training.pairs import PairTokenizer, encode_pairs, pair_loss, pair_totals
from flax_gpt.training.state import Totals, language_loss, language_totals
from flax_gpt.training.table import SHIPPED, Shuffled, Table, in_order, pad_rows, read_table, split_rows
from flax_gpt.training.tokenizer import CharTokenizer

Batches = Callable[[], Iterator[Any]]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a run trains on, and what it is evaluated on as it goes."""

    batches: Any
    """batches[step] is the batch of that step, with `weights`; batches.steps_per_epoch."""
    held_out: Batches | None
    """Every held-out item once; None when nothing is held out."""


class Task(Protocol):
    """The parts of a run that differ between kinds of model."""

    kind: str
    """As run.json has it."""
    config: type[TransformerConfig]
    options: tuple[str, ...]
    """Keyword arguments of `read` beside the data, which run.json keeps."""
    loss: Callable[..., jax.Array]
    """(model, batch, label_smoothing) → the mean over the batch's weights."""
    totals: Totals
    """Sums over a batch; each divided by that of "count" is a measure, and "loss" is among them."""

    def read(self, data: Any, **options: Any) -> Any:
        """The data with a tokenizer of their own; None: what the package ships. Data that were read already are passed on."""

    def sizes(self, data: Any) -> dict[str, tuple[int, str]]:
        """{field of the configuration: (what the data make it, what that number is)}."""

    def describe(self, data: Any) -> dict[str, Any]:
        """What run.json says of the data: source, digest and the options."""

    def prepare(self, data: Any, config: Any, train_config: TrainConfig) -> Prepared:
        """Raises InputError for data that do not fit the configurations."""

    def load_tokenizer(self, path: Path) -> Any:
        """Raises InputError for a file that holds none of this kind."""

    def measure(self, run: Any, data: Any, mean: Callable[[Iterator[Any]], tuple[dict[str, float], int]], **options: Any) -> dict[str, float]:
        """What `evaluate` returns; `mean` gives the measures of batches and their count."""


class LanguageTask:
    """A GPT on the characters of a text."""

    kind, config, options = "gpt", GPTConfig, ("glob", "on_bad_file")
    loss, totals = staticmethod(language_loss), staticmethod(language_totals)

    def read(self, data: Any, **options: Any) -> Corpus:
        if not isinstance(data, Corpus):
            return load_corpus(data, **options)
        size = data.tokenizer.vocab_size
        require(len(data.tokens) > 0, "data", data.source, "holds no tokens")
        require(int(data.tokens.max()) < size, "data", int(data.tokens.max()), f"is a token id outside [0, {size}), the vocabulary")
        return data

    def sizes(self, corpus: Corpus) -> dict[str, tuple[int, str]]:
        return {"vocab_size": (corpus.tokenizer.vocab_size, "the number of distinct characters in the text")}

    def describe(self, corpus: Corpus) -> dict[str, Any]:
        return {
            "source": corpus.source,
            "glob": corpus.glob,
            "on_bad_file": corpus.on_bad_file,
            "digest": corpus.digest,
            "characters": len(corpus.tokens),
            "files": corpus.files,
            "skipped": len(corpus.skipped),
        }

    def prepare(self, corpus: Corpus, config: GPTConfig, train_config: TrainConfig) -> Prepared:
        tokens, held_out = split(corpus.tokens, train_config.held_out)
        if train_config.held_out > 0:
            require(
                len(held_out) >= 2, "held_out", train_config.held_out, f"leaves {len(held_out)} of {len(corpus.tokens)} tokens, and needs 2; or 0"
            )
        window, size = window_of(config, train_config), train_config.batch_size
        windows = Windows(tokens, window=window, batch_size=size, seed=train_config.seed, stride=train_config.stride or 1)
        return Prepared(windows, (lambda: evaluation_batches(held_out, window=window, batch_size=size)) if len(held_out) else None)

    def load_tokenizer(self, path: Path) -> CharTokenizer:
        return CharTokenizer.load(path)

    def measure(self, run: Any, data: Any, mean: Any, **options: Any) -> dict[str, float]:
        """{"loss": nats a token, "perplexity": its exponential, "tokens": how many were predicted}.

        The text, or for None the end of its own that the run held out, is cut into non-overlapping windows of the length that the run trained on;
        every token but the first is predicted once.
        """
        if data is None:
            corpus = load_corpus(run.data["source"], tokenizer=run.tokenizer, **{name: run.data[name] for name in self.options})
            tokens = split(corpus.tokens, _own_share(run, corpus))[1]
        else:
            corpus = data if isinstance(data, Corpus) else load_corpus(data, tokenizer=run.tokenizer, **options)
            require(corpus.tokenizer == run.tokenizer, "data", corpus.source, "must be read with the run's tokenizer")
            tokens = corpus.tokens
        window, size = window_of(run.config, run.train_config), run.train_config.batch_size
        found, count = mean(evaluation_batches(tokens, window=window, batch_size=size))
        return {"loss": found["loss"], "perplexity": float(np.exp(found["loss"])), "tokens": count}


@dataclasses.dataclass(frozen=True)
class TableData:
    """A table and the tokenizer of its columns."""

    table: Table
    tokenizer: Any

    @property
    def source(self) -> str:
        return self.table.source

    @property
    def digest(self) -> str:
        return self.table.digest

    skipped = ()


class _TableTask:
    """What tasks on tab-separated files share."""

    options: tuple[str, ...] = ()
    columns: tuple[str, str]
    shipped: str
    shared: tuple[int, ...]
    """Columns whose texts must not stand on both sides of the held-out split."""

    def tokenizer_of(self, table: Table) -> Any:
        raise NotImplementedError

    def encode(self, table: Table, tokenizer: Any, max_len: int) -> Any:
        raise NotImplementedError

    def read(self, data: Any) -> TableData:
        if isinstance(data, TableData):
            return data
        table = read_table(SHIPPED + self.shipped if data is None else data, names=self.columns)
        return TableData(table, self.tokenizer_of(table))

    def describe(self, data: TableData) -> dict[str, Any]:
        return {"source": data.source, "digest": data.digest, "rows": len(data.table)}

    def prepare(self, data: TableData, config: Any, train_config: TrainConfig) -> Prepared:
        for name in ("window", "stride"):
            require(getattr(train_config, name) is None, name, getattr(train_config, name), "is for language models alone")
        size, max_len = train_config.batch_size, config.max_len
        train, held_out = (self.encode(t, data.tokenizer, max_len) for t in split_rows(data.table, train_config.held_out, shared=self.shared))
        batches = Shuffled(len(train), lambda rows: train.batch(rows, size, max_len), batch_size=size, seed=train_config.seed)
        return Prepared(batches, (lambda: _batches(held_out, size, max_len)) if len(held_out) else None)

    def evaluated(self, run: Any, data: Any) -> Table:
        """The table to evaluate a run on; for None the rows that it held out."""
        if isinstance(data, TableData):
            return data.table
        if data is not None:
            return read_table(data, names=self.columns)
        table = read_table(run.data["source"], names=self.columns)
        return split_rows(table, _own_share(run, table), shared=self.shared)[1]


def _batches(items: Any, size: int, max_len: int) -> Iterator[Any]:
    return (items.batch(rows, size, max_len) for rows in in_order(len(items), size))


class TranslationTask(_TableTask):
    """An EncoderDecoder on pairs of texts."""

    kind, config = "encoder-decoder", EncoderDecoderConfig
    columns, shipped, shared = ("source", "target"), "dates.tsv", (0, 1)
    loss, totals = staticmethod(pair_loss), staticmethod(pair_totals)
    encode = staticmethod(encode_pairs)

    def tokenizer_of(self, table: Table) -> PairTokenizer:
        return PairTokenizer(*(CharTokenizer.from_text("".join(column)) for column in zip(*table.rows, strict=True)))

    def sizes(self, data: TableData) -> dict[str, tuple[int, str]]:
        what = "the number of distinct characters in the {}s, and 3 for pad, bos and eos"
        sizes = {"source_vocab_size": (data.tokenizer.source_vocab_size, what.format("source"))}
        sizes |= {"vocab_size": (data.tokenizer.vocab_size, what.format("target"))}
        return sizes | {name: (getattr(EncoderDecoderConfig, name), "the tokenizer's") for name in ("bos", "eos", "pad")}

    def load_tokenizer(self, path: Path) -> PairTokenizer:
        return _load(PairTokenizer, path)

    def measure(self, run: Any, data: Any, mean: Any) -> dict[str, float]:
        """{"loss": nats a label, "exact_match": share of the sources whose greedy translation is the target, "pairs": how many there are}."""
        table = self.evaluated(run, data)
        max_len, size = run.config.max_len, run.train_config.batch_size
        pairs = encode_pairs(table, run.tokenizer, max_len)
        found, _ = mean(_batches(pairs, size, max_len))
        longest = max(map(len, pairs.targets)) + 1
        right = 0
        for rows in in_order(len(pairs), size):
            tokens, lengths = pad_rows([pairs.sources[i] for i in rows], size, max_len)
            # What is filled up holds one token, so that every batch has the same shape.
            best = beam_search(run.model, tokens, longest, lengths=np.maximum(lengths, 1), beams=1)
            new = (ids[:count] for ids, count in zip(best.tokens[:, 0], best.lengths[:, 0], strict=True))
            right += sum(
                run.tokenizer.decode_target(ids) == table.rows[i][1] and ids[-1] == run.config.eos for ids, i in zip(new, rows, strict=False)
            )
        return {"loss": found["loss"], "exact_match": right / len(pairs), "pairs": len(pairs)}


class ClassifierTask(_TableTask):
    """A TinyTransformer on labelled texts."""

    kind, config = "classifier", EncoderConfig
    columns, shipped, shared = ("text", "label"), "majority.tsv", (0,)
    loss, totals = staticmethod(label_loss), staticmethod(label_totals)
    encode = staticmethod(encode_labelled)

    def tokenizer_of(self, table: Table) -> LabelTokenizer:
        texts, labels = zip(*table.rows, strict=True)
        return LabelTokenizer(CharTokenizer.from_text("".join(texts)), sorted(set(labels)))

    def sizes(self, data: TableData) -> dict[str, tuple[int, str]]:
        tokenizer = data.tokenizer
        return {
            "vocab_size": (tokenizer.vocab_size, "the number of distinct characters in the texts"),
            "num_classes": (len(tokenizer.labels), "the number of distinct labels"),
        }

    def load_tokenizer(self, path: Path) -> LabelTokenizer:
        return _load(LabelTokenizer, path)

    def measure(self, run: Any, data: Any, mean: Any) -> dict[str, float]:
        """{"loss": nats a text, "accuracy": share of the texts that get their label, "texts": how many there are}."""
        labelled: Labelled = encode_labelled(self.evaluated(run, data), run.tokenizer, run.config.max_len)
        found, count = mean(_batches(labelled, run.train_config.batch_size, run.config.max_len))
        return {"loss": found["loss"], "accuracy": found["accuracy"], "texts": count}


TASKS: Mapping[str, Any] = {task.kind: task for task in (LanguageTask(), TranslationTask(), ClassifierTask())}


def task_of(config: Any) -> Task | None:
    """The task of a configuration; None for anything else, such as a mapping."""
    return next((task for task in TASKS.values() if isinstance(config, task.config)), None)


def window_of(config: GPTConfig, train_config: TrainConfig) -> int:
    """Tokens a training window. Raises InputError for one beyond max_len."""
    window = config.max_len if train_config.window is None else train_config.window
    require(window <= config.max_len, "window", window, f"must be at most max_len = {config.max_len}")
    return window


def mean_totals(evaluation: Callable[[Any], dict[str, jax.Array]], batches: Iterator[Any]) -> tuple[dict[str, float], int]:
    """The mean of every total over the batches, added up in float64, and the count."""
    sums: dict[str, float] = {}
    # Read one batch late, so that the device never waits for the host.
    pending: dict[str, jax.Array] = {}
    for totals in itertools.chain(map(evaluation, batches), [{}]):
        for name, value in pending.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        pending = totals
    count = sums.pop("count")
    return {"loss": sums.pop("loss") / count} | {name: value / count for name, value in sums.items()}, int(count)


def _own_share(run: Any, data: Any) -> float:
    """Of data that were read anew, the share that the run held out. Raises InputError when they have changed, and for none."""
    require(data.digest == run.data["digest"], "data", data.source, "is not what the run was trained on")
    require(run.train_config.held_out > 0, "data", None, "must be given: the run held nothing out")
    return run.train_config.held_out


def _load(kind: Any, path: Path) -> Any:
    try:
        return kind.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError("tokenizer", str(path), f"cannot be read as a tokenizer: {error}") from error

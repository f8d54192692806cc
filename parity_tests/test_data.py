"""Text in, token arrays and windows out."""

import os
import subprocess
import sys
import sysconfig
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_gpt.errors import InputError
from flax_gpt.training import data
from flax_gpt.training.data import Windows, evaluation_batches, load_corpus, split
from flax_gpt.training.tokenizer import CharTokenizer, smallest_unsigned

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@given(TEXT.filter(len), TEXT)
def test_characters_come_back_and_unknown_ones_are_named(text: str, other: str) -> None:
    tokenizer = CharTokenizer.from_text(text)
    ids = tokenizer.encode(text)
    assert ids.dtype == smallest_unsigned(tokenizer.vocab_size)
    assert tokenizer.decode(ids) == text
    assert tokenizer.characters == "".join(sorted(set(text)))
    unknown = [c for c in other if c not in text]
    if unknown:
        with pytest.raises(InputError) as caught:
            tokenizer.encode(other, "prompt")
        assert (caught.value.argument, caught.value.value) == ("prompt", unknown[0])
    else:
        assert tokenizer.decode(tokenizer.encode(other)) == other


def test_ids_outside_the_vocabulary_are_refused() -> None:
    tokenizer = CharTokenizer.from_text("abc")
    for ids in ([0, 3], [-1], [2**40]):
        with pytest.raises(InputError, match=r"must lie in \[0, 3\)"):
            tokenizer.decode(ids)
    with pytest.raises(InputError, match="integers"):
        tokenizer.decode([0.5])
    assert tokenizer.decode([]) == ""
    assert tokenizer.encode("").shape == (0,)


def test_a_tokenizer_is_stored_and_anything_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = CharTokenizer.from_text('中文 "quoted"\r\n\t\\ \u2028 \U0001f600 \x00')
    tokenizer.save(path)
    assert CharTokenizer.load(path) == tokenizer
    for content in (b"", b"{}", b"[1]", b"\xff", path.read_bytes().replace(b'"format": 1', b'"format": 2'), path.read_bytes()[:-9]):
        path.write_bytes(content)
        with pytest.raises(InputError, match="tokenizer"):
            CharTokenizer.load(path)
    with pytest.raises(InputError, match="tokenizer"):
        CharTokenizer.load(tmp_path / "none.json")


def test_the_standard_library_is_read_in_little_memory() -> None:
    """1,790 files, 31 MB, 4 of them not UTF-8 and 28 empty on Python 3.11; other versions have other numbers, so they are counted here."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    contents, bad = [], []
    names = [path.relative_to(stdlib) for path in stdlib.rglob("*.py")]
    for name in sorted(n for n in names if not {*data.EXCLUDED} & {*n.parts} and not any(part.startswith(".") for part in n.parts)):
        path = stdlib / name
        try:
            contents.append(path.read_bytes().decode("utf-8").removeprefix("\ufeff"))
        except UnicodeDecodeError:
            bad.append(path)
    tracemalloc.start()
    corpus = load_corpus(stdlib, glob="*.py", on_bad_file="skip")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert corpus.files == len(contents)
    assert len(corpus.skipped) == len(bad) > 0
    assert corpus.tokenizer.decode(corpus.tokens) == "".join(contents)
    assert corpus.tokens.dtype == np.uint16
    assert peak < 2 * corpus.tokens.nbytes  # the array, and its narrower form while it grew
    with pytest.raises(InputError, match="is not UTF-8: byte 0x") as caught:
        load_corpus(stdlib, glob="*.py")
    assert caught.value.value in map(str, bad)


@pytest.mark.parametrize("place", [0, 1, data._CHUNK - 2, data._CHUNK - 1, data._CHUNK, 2 * data._CHUNK + 5])
def test_the_offset_of_a_bad_byte_is_exact(tmp_path: Path, place: int) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"a" * place + b"\xe9\x28" + b"b" * 10)
    with pytest.raises(InputError, match=f"byte 0xe9 at offset {place};"):
        load_corpus(path)
    path.write_bytes(b"a" * place + "é".encode()[:1])
    with pytest.raises(InputError, match=f"byte 0xc3 at offset {place};"):
        load_corpus(path)


def test_characters_that_straddle_pieces_survive(tmp_path: Path) -> None:
    text = "x" + "漢字🙂é" * (data._CHUNK // 4)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    corpus = load_corpus(tmp_path / "a.txt")
    assert corpus.tokenizer.decode(corpus.tokens) == text


def test_a_skipped_file_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc", encoding="utf-8")
    (tmp_path / "b.txt").write_bytes("漢".encode() * data._CHUNK + b"\xff")
    (tmp_path / "c.txt").write_text("cab漢", encoding="utf-8")
    (tmp_path / "d.txt").touch()
    corpus = load_corpus(tmp_path, on_bad_file="skip")
    assert corpus.tokenizer.characters == "abc漢"
    assert corpus.tokenizer.decode(corpus.tokens) == "abccab漢"
    assert corpus.files == 3
    assert len(corpus.skipped) == 1
    assert "b.txt" in corpus.skipped[0]
    assert f"offset {3 * data._CHUNK}" in corpus.skipped[0]
    (tmp_path / "b.txt").unlink()
    assert load_corpus(tmp_path).digest == corpus.digest


def test_the_digest_tells_contents_and_their_borders_apart(tmp_path: Path) -> None:
    digests = set()
    for i, pieces in enumerate((["ab", "c"], ["a", "bc"], ["abc", ""], ["abc"], ["abd"])):
        for j, piece in enumerate(pieces):
            (tmp_path / str(i)).mkdir(exist_ok=True)
            (tmp_path / str(i) / f"{j}.txt").write_text(piece)
        digests.add(load_corpus(tmp_path / str(i)).digest)
    assert len(digests) == 5


def test_files_are_taken_by_name_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a/y.txt", "site-packages/x.py", ".hidden/x.py", "a/__pycache__/x.py", "a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>", encoding="utf-8")
    corpus = load_corpus(tmp_path, glob="*.py")
    assert corpus.tokenizer.decode(corpus.tokens) == "<a/z.py><a.py><b.py>"
    corpus = load_corpus(tmp_path, glob="a/*")
    assert corpus.tokenizer.decode(corpus.tokens) == "<a/y.txt><a/z.py>"


def test_a_byte_order_mark_is_dropped_and_line_ends_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\nc\r")
    corpus = load_corpus(tmp_path / "a.txt")
    assert corpus.tokenizer.decode(corpus.tokens) == "a\r\nb\nc\r"


@pytest.mark.parametrize(("count", "dtype"), [(2, np.uint8), (256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)])
def test_tokens_take_the_smallest_dtype(tmp_path: Path, count: int, dtype: type) -> None:
    characters = [chr(i) for i in range(1, 70_000) if not 0xD800 <= i < 0xE000 and i != 0xFEFF][:count]
    text = "".join(reversed(characters))
    (tmp_path / "a.txt").write_bytes(text.encode())
    corpus = load_corpus(tmp_path / "a.txt")
    assert corpus.tokens.dtype == dtype
    assert corpus.tokenizer.decode(corpus.tokens) == text


def test_input_without_text_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bad.log").write_bytes(b"\xff")
    for path, options, message in (
        (tmp_path / "none", {}, "neither a file nor a folder"),
        (tmp_path / "empty.txt", {}, "holds no text"),
        (tmp_path, {}, "holds no text"),
        (tmp_path, {"glob": "*.md"}, "holds no file that matches"),
        (tmp_path / "bad.log", {"on_bad_file": "skip"}, "holds no text: 1 of its files"),
        (tmp_path / "empty.txt", {"on_bad_file": "ignore"}, "must be 'error' or 'skip'"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            load_corpus(path, **options)
        assert "\n" not in str(caught.value)


def test_a_text_in_unknown_characters_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abxc", encoding="utf-8")
    with pytest.raises(InputError, match="holds 'x', which is not among the 3 characters"):
        load_corpus(tmp_path / "a.txt", tokenizer=CharTokenizer("abc"))
    corpus = load_corpus(tmp_path / "a.txt", tokenizer=CharTokenizer("abcxyz"))
    assert corpus.tokens.tolist() == [0, 1, 3, 2]


def test_the_shipped_corpus_has_its_size() -> None:
    corpus = load_corpus()
    length = len(corpus.tokenizer.decode(corpus.tokens).encode())
    assert 30_000 <= length <= 60_000
    assert {"中", "t"} <= set(corpus.tokenizer.characters)


# Windows


def test_the_original_recipe_has_418_windows_in_27_steps() -> None:
    tokens = np.arange(448, dtype=np.uint16)
    windows = Windows(tokens, window=30, batch_size=16, seed=0)
    assert (windows.count, windows.steps_per_epoch) == (418, 27)
    for epoch in range(3):
        batches = [windows[27 * epoch + i] for i in range(27)]
        real = np.concatenate([b.tokens[b.weights[:, 0] == 1] for b in batches])
        assert sorted(real[:, 0].tolist()) == list(range(418))
        assert all(b.tokens.shape == b.targets.shape == b.weights.shape == (16, 30) for b in batches)
        assert [int(b.weights.sum()) for b in batches] == [480] * 26 + [60]
        for b in batches:
            rows = b.weights[:, 0] == 1
            assert (b.tokens[rows] == b.tokens[rows][:, :1] + np.arange(30)).all()
            assert (b.targets[rows] == b.tokens[rows] + 1).all()
            assert not b.tokens[~rows].any()
            assert not b.targets[~rows].any()
            assert not b.weights[~rows].any()


@given(size=st.integers(2, 60), window=st.integers(1, 12), stride=st.integers(1, 9), batch_size=st.integers(1, 7), seed=st.integers(0, 2**63 - 1))
def test_an_epoch_holds_every_window_once(size: int, window: int, stride: int, batch_size: int, seed: int) -> None:
    tokens = np.arange(size, dtype=np.uint8)
    if size <= window:
        with pytest.raises(InputError, match=rf"{size} tokens to train on.*window = {window}"):
            Windows(tokens, window=window, batch_size=batch_size, seed=seed, stride=stride)
        return
    windows = Windows(tokens, window=window, batch_size=batch_size, seed=seed, stride=stride)
    batches = [windows[i] for i in range(windows.steps_per_epoch)]
    starts = [int(row[0]) for b in batches for row, weight in zip(b.tokens, b.weights, strict=True) if weight[0]]
    assert sorted(starts) == [s for s in range(0, size, stride) if s + window < size]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def starts(seed: int, epoch: int) -> tuple[int, ...]:
        windows = Windows(np.arange(500), window=4, batch_size=16, seed=seed)
        return tuple(int(t) for i in range(31) for t in windows[31 * epoch + i].tokens[:, 0])

    orders = {starts(seed, epoch) for seed in (0, 1, 2**32, 2**62) for epoch in (0, 1, 2)}
    assert len(orders) == 12


def test_windows_depend_on_seed_and_step_alone(tmp_path: Path) -> None:
    """Another process, another hash seed, the C locale with UTF-8 mode off, steps asked for in another order: the same batches."""
    path = tmp_path / "a.txt"
    path.write_text("Wörter, 文字 und 🙂. " * 20, encoding="utf-8")
    program = (
        "import sys, hashlib\n"
        "from flax_gpt.training.data import Windows, load_corpus\n"
        "w = Windows(load_corpus(sys.argv[1]).tokens, window=7, batch_size=4, seed=5)\n"
        "found = {i: hashlib.sha256(b''.join(x.tobytes() for x in w[i])).hexdigest() for i in eval(sys.argv[2])}\n"
        "print(sorted(found.items()))\n"
    )
    outputs = set()
    for order, seed in (("range(200)", "1"), ("reversed(range(200))", "2")):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
        done = subprocess.run([sys.executable, "-c", program, str(path), order], env=environment, capture_output=True, text=True, check=True)
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_batches_share_no_memory() -> None:
    windows = Windows(np.arange(40), window=4, batch_size=2, seed=0)
    first = windows[0]
    copies = [x.copy() for x in first]
    for x in (*windows[0], *windows[1]):
        x[...] = 7
    assert all((a == b).all() for a, b in zip(first, copies, strict=True))
    assert not any(np.shares_memory(a, windows.tokens) for a in first)


@given(size=st.integers(2, 90), window=st.integers(1, 12), batch_size=st.integers(1, 5))
def test_evaluation_predicts_each_token_once(size: int, window: int, batch_size: int) -> None:
    tokens = np.arange(1, size + 1, dtype=np.uint8)
    batches = list(evaluation_batches(tokens, window=window, batch_size=batch_size))
    assert all(b.tokens.shape == (batch_size, window) for b in batches)
    real = [(int(t), int(n)) for b in batches for t, n, w in zip(b.tokens.flat, b.targets.flat, b.weights.flat, strict=True) if w]
    assert real == [(i, i + 1) for i in range(1, size)]


def test_one_token_cannot_be_evaluated() -> None:
    with pytest.raises(InputError, match="at least 2 tokens"):
        list(evaluation_batches(np.zeros(1, np.uint8), window=4, batch_size=2))


def test_the_held_out_part_is_the_end() -> None:
    tokens = np.arange(105)
    training, held_out = split(tokens, 0.1)
    assert (len(training), len(held_out)) == (95, 10)
    assert np.concatenate([training, held_out]).tolist() == tokens.tolist()
    assert len(split(tokens, 0.0)[1]) == 0

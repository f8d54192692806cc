"""The benchmark's method: statistics on samples made up for the purpose, what a run keeps and refuses, and small real cases through both workers."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import agreement, cases, charts, command, inputs, report, results, runner, timing, worker
from benchmarks.cases import Attention, Data, Generate, Matmul, Train
from flax_gpt.errors import InputError, RunError

TINY = Attention(length=8, batch=1, heads=2, kv_heads=2, width=8, backward=True)
FAST = runner.Settings("quick", 2, 0.01, 120)


# Statistics


def test_ratio_is_that_of_medians_and_its_interval_holds_it() -> None:
    ours, theirs = [1.0, 1.1, 0.9, 1.05, 5.0], [2.0, 2.2, 1.9, 2.1, 2.05]
    ratio, low, high = timing.ratio_interval(ours, theirs)
    assert ratio == 2.05 / 1.05
    assert low is not None
    assert high is not None
    assert low < ratio < high
    assert low < 1, "a slow process in five must show in the interval"
    assert timing.ratio_interval([2.0], [3.0, 3.0]) == (1.5, None, None), "one process says nothing of the next"
    assert timing.ratio_interval(theirs, ours)[0] == pytest.approx(1 / ratio)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Medians of seven normal processes: the percentile bootstrap of so few is a little too narrow, never by half."""
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        ours, theirs = rng.normal(1.0, 0.05, 7), rng.normal(1.3, 0.05, 7)
        _, low, high = timing.ratio_interval(list(ours), list(theirs), draws=400, seed=trial)
        assert low is not None
        assert high is not None
        hits += low <= 1.3 <= high
    assert 170 <= hits <= 199


def test_others_are_told_from_oneself() -> None:
    assert not timing.disturbed(machine=0.20, own=0.20, wall=0.1, cpus=2)
    assert not timing.disturbed(machine=0.21, own=0.20, wall=0.1, cpus=2), "one tick is nobody's"
    assert timing.disturbed(machine=0.20, own=0.10, wall=0.1, cpus=2)
    assert not timing.disturbed(machine=None, own=0.1, wall=0.1, cpus=2)


def test_samples_that_others_disturbed_are_counted_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**6))
    monkeypatch.setattr(timing, "disturbed", lambda *_: next(calls) % 2 == 0)
    found = timing.sample(lambda: time.sleep(0.001), lambda _: None, seconds=0.3)
    assert len(found["samples_ms"]) >= 1
    assert abs(found["rejected"] - len(found["samples_ms"])) <= 1
    monkeypatch.setattr(timing, "disturbed", lambda *_: True)
    found = timing.sample(lambda: time.sleep(0.001), lambda _: None, seconds=0.05)
    assert not found["samples_ms"]
    assert found["rejected"] >= timing.MIN_SAMPLES


def test_a_sample_waits_for_each_result_or_for_the_last_of_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "disturbed", lambda *_: False)
    for chained in (False, True):
        runs, waits = [], []
        found = timing.sample(lambda runs=runs: runs.append(1), waits.append, seconds=0.0, chained=chained)
        samples = timing.MIN_SAMPLES
        assert len(runs) == 1 + samples * found["repeats"]
        assert len(waits) == (1 + samples if chained else 2 + samples * (found["repeats"] + 1))
    runs = []
    found = timing.sample(lambda: runs.append(1), lambda _: None, seconds=0.0, once=True)
    assert len(runs) == 1 == len(found["samples_ms"])


def test_peak_memory_is_that_of_the_case_alone() -> None:
    big = np.ones(1 << 24)
    del big
    timing.forget_peak()
    before = timing.resident_bytes()
    assert before is not None
    np.ones(1 << 23).sum()
    peak = timing.resident_bytes("VmHWM")
    assert peak is not None
    assert 60 << 20 < peak - before < 120 << 20


# Cases


def test_every_case_is_named_once_and_travels_through_json() -> None:
    for level in cases.LEVELS:
        grid = cases.grid(level)
        assert len({case.name for case in grid}) == len(grid)
        assert [cases.read(json.loads(json.dumps(case.to_dict()))) for case in grid] == grid
        assert all(case.kind in agreement.JUDGES for case in grid)
    assert {case.name for case in cases.grid("standard")} >= {case.name for case in cases.grid("quick")}


def test_flops_are_those_of_the_definition() -> None:
    T = 4
    whole = Attention(length=T, batch=1, heads=1, kv_heads=1, width=8, causal=False)
    assert whole.flops == 2 * (2 * T * T * 8)
    assert dataclasses.replace(whole, causal=True).flops == 2 * (2 * (1 + 2 + 3 + 4) * 8)
    assert dataclasses.replace(whole, backward=True).flops == 3 * whole.flops
    assert Matmul(size=3).flops == 2 * 27
    assert cases.parameters(cases.SIZES["124M"].config) == 124_439_808
    config = cases.SIZES["S"].config
    assert sum(array.size for array in inputs.weights(config).values()) == cases.parameters(config)
    assert Train(size="L").flops == pytest.approx(6 * cases.parameters(cases.SIZES["L"].config) * 16 * 256, rel=0.1)


def test_selection_names_what_matches_nothing() -> None:
    assert [case.name for case in cases.select("quick", "train-S*,copy*")] == ["copy-256MiB", "train-S-dropout0.1", "train-S-dropout0"]
    with pytest.raises(InputError, match="cases = 'nothing'"):
        cases.select("standard", "train*,nothing")


# Comparison before timing


def test_attention_that_is_wrong_in_one_head_is_found() -> None:
    q, k, v, d_out = (x.transpose(0, 2, 1, 3).astype(np.float64) for x in inputs.attention(TINY))
    scores = np.where(np.tril(np.ones((8, 8), bool)), q @ k.swapaxes(-1, -2) / np.sqrt(8), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = d_out @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(8)
    right = dict(out=p @ v, dq=ds @ k, dk=ds.swapaxes(-1, -2) @ q, dv=p.swapaxes(-1, -2) @ d_out)
    right = {name: x.transpose(0, 2, 1, 3).astype(np.float32) for name, x in right.items()}
    assert agreement.decide(TINY, {"jax jit": right, "torch eager": right}).ok
    for name in right:
        wrong = right | {name: right[name].copy()}
        wrong[name][0, 5, 1, 3] += 1e-4
        for outputs in ({"jax jit": wrong, "torch eager": right}, {"jax jit": right, "torch eager": wrong}):
            verdict = agreement.decide(TINY, outputs)
            assert not verdict.ok
            assert name in verdict.summary
    assert not agreement.decide(TINY, {"jax jit": right | {"out": right["out"] * np.nan}, "torch eager": right}).ok
    assert agreement.decide(TINY, {"jax jit": right}).summary == "no output of torch to compare"


def test_a_token_that_the_model_would_not_choose_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Generate(prompt=4, new=3, max_len=16)
    tokens = inputs.prompts(case).astype(np.int64)
    model = agreement.double(case.config, case)
    import torch

    for _ in range(3):
        with torch.no_grad():
            tokens = np.concatenate([tokens, model(torch.from_numpy(tokens))[0][:, -1:].argmax(-1).numpy()], axis=1)
    wrong = tokens.copy()
    wrong[0, 5] = (wrong[0, 5] + 1) % case.config.vocab_size
    assert agreement.decide(case, {"jax jit": {"tokens": tokens}, "torch eager": {"tokens": tokens}}).ok
    verdict = agreement.decide(case, {"jax jit": {"tokens": tokens}, "torch eager": {"tokens": wrong}})
    assert "torch eager, row 0: token 5" in verdict.summary


def test_windows_that_skip_or_garble_are_found() -> None:
    case = Data(tokens=200)
    length = cases.SIZES["M"].length
    rows = np.arange(200 - length)[:, None] + np.arange(length)
    good = worker.epoch([(rows, rows + 1)])
    assert agreement.decide(case, {"jax jit": good, "torch eager": good}).ok
    assert not agreement.decide(case, {"jax jit": good, "torch eager": worker.epoch([(rows[1:], rows[1:] + 1)])}).ok
    assert not agreement.decide(case, {"jax jit": good, "torch eager": worker.epoch([(rows, rows)])}).ok


# Runs


def test_small_cases_through_both_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real run: attention and windows, and a case that neither side can compute."""
    out, settings = tmp_path / "out", dataclasses.replace(FAST, processes=1)
    broken = Attention(length=8, batch=1, heads=3, kv_heads=2, width=8)
    selected = [TINY, Data(tokens=1000), broken]
    runner.prepare(selected, settings, out)
    runner.run(selected, settings, out)
    document = report.write(out)
    assert set(document["setup"]) == {"jax", "torch"}
    rows = {row["name"]: row for row in document["rows"]}
    for case in (TINY, Data()):
        row = rows[case.name]
        assert row["agreement"]["ok"], row["agreement"]["summary"]
        for side in ("jax", "torch"):
            (found,) = row[side].values()
            assert found["samples"] + found["rejected"] >= timing.MIN_SAMPLES
    assert rows[TINY.name]["jax"]["jit"]["facts"] == {"kernel": "dense"}
    assert rows[TINY.name]["torch"]["eager"]["facts"]["kernel"].startswith("sdpa ")
    assert rows[broken.name]["ratio"] is None
    assert "jax jit: InputError" in rows[broken.name]["error"]

    page = (out / "results.html").read_text(encoding="utf-8")
    assert "http" not in page
    assert (out / "results.md").read_text(encoding="utf-8").count("\n| ") == 1 + len(selected)

    monkeypatch.setattr(runner, "_lines", lambda *_: pytest.fail("a worker was started"))
    with pytest.raises(InputError, match="--resume goes on"):
        runner.prepare(selected, settings, out)
    runner.prepare(selected, settings, out, resume=True)
    runner.run(selected, settings, out)
    with pytest.raises(InputError, match="the level and the cases"):
        runner.prepare(selected[:1], settings, out, resume=True)


# A worker that is no framework: what the runner does when processes die

STAND_IN = """
import json, os, sys, time
from pathlib import Path
from benchmarks import worker
from benchmarks.worker import Program, Side
def build(case, variant):
    if case.size == 13: os.kill(os.getpid(), 9)
    if case.size == 14: time.sleep(60)
    return Program(lambda: None, lambda: {}, facts={"keeps": kept})
side, kept = sys.argv[1], []
worker.main(Side(side, {"matmul": build}, lambda threads: {}, lambda: None, lambda case, variant: 0.0, lambda: kept.append("memory")), sys.argv[2:])
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workers without a framework in place of the real ones, and a comparison that finds all equal."""
    (tmp_path / "stand_in_jax.py").write_text(STAND_IN.replace("sys.argv[1]", "'jax'").replace("sys.argv[2:]", "sys.argv[1:]"), encoding="utf-8")
    (tmp_path / "stand_in_torch.py").write_text(STAND_IN.replace("sys.argv[1]", "'torch'").replace("sys.argv[2:]", "sys.argv[1:]"), encoding="utf-8")
    monkeypatch.setattr(runner, "MODULES", {"jax": "stand_in_jax", "torch": "stand_in_torch"})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))

    def equal(out: Path, selected: list[Any], *_: Any) -> None:
        (out / "agreement").mkdir(exist_ok=True)
        for case in selected:
            worker.write_json(out / "agreement" / f"{case.name}.json", {"ok": True, "summary": ""})

    monkeypatch.setattr(runner, "_compare", equal)
    return tmp_path / "out"


@pytest.mark.parametrize("keep", [False, True])
def test_both_sides_keep_memory_when_asked(stand_in: Path, keep: bool) -> None:
    selected, settings = [Matmul(size=12)], dataclasses.replace(FAST, processes=1, keep_memory=keep)
    runner.prepare(selected, settings, stand_in)
    runner.run(selected, settings, stand_in)
    document = results.collect(stand_in)
    found = [facts["facts"]["keeps"] for side in results.SIDES for facts in document["rows"][0][side].values()]
    assert found == [["memory"] * keep] * 2
    assert any("keep what they freed" in line for line in report.headline(document | {"setup": {}})) == keep


def test_a_process_that_dies_costs_one_case(stand_in: Path) -> None:
    selected = [Matmul(size=size) for size in (4, 13, 5)]
    settings = dataclasses.replace(FAST, processes=1)
    runner.prepare(selected, settings, stand_in)
    runner.run(selected, settings, stand_in)
    rows = {row["case"]["size"]: row for row in results.collect(stand_in)["rows"]}
    assert "SIGKILL: out of memory?" in rows[13]["error"]
    assert all(rows[size]["jax"]["jit"]["samples"] + rows[size]["jax"]["jit"]["rejected"] for size in (4, 5))


def test_a_case_that_hangs_costs_one_case(stand_in: Path) -> None:
    selected = [Matmul(size=14), Matmul(size=4)]
    settings = dataclasses.replace(FAST, processes=1, limit=4)
    runner.prepare(selected, settings, stand_in)
    runner.run(selected, settings, stand_in)
    rows = results.collect(stand_in)["rows"]
    assert "gave no result within 4 s" in rows[0]["error"]
    assert "error" not in rows[1]["jax"]["jit"]


def test_variants_that_were_measured_before_a_case_hung_are_kept(stand_in: Path) -> None:
    selected = [Matmul(size=14)]
    settings = dataclasses.replace(FAST, processes=1, limit=1)
    runner.prepare(selected, settings, stand_in)
    measured = stand_in / "passes" / "0-torch" / f"{selected[0].name}.json"
    measured.parent.mkdir()
    worker.write_json(worker.unfinished(measured), {"eager": {"samples_ms": [1.0]}})
    runner.run(selected, settings, stand_in)
    assert json.loads(measured.read_text(encoding="utf-8")) == {"eager": {"samples_ms": [1.0]}}
    assert not worker.unfinished(measured).exists()
    assert "gave no result" in json.loads((stand_in / "passes" / "0-jax" / measured.name).read_text(encoding="utf-8"))["jit"]["error"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_ended_goes_on_where_it_was(stand_in: Path, how: signal.Signals) -> None:
    """A signal to the process that leads the run, after its first case."""
    selected = [Matmul(size=size) for size in range(20, 25)]
    plan = json.dumps([case.to_dict() for case in selected])
    settings = dataclasses.replace(FAST, seconds=0.05)
    code = f"""
import json, signal
from pathlib import Path
from benchmarks import cases, runner
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell leaves ignored in what it starts in the background
runner.MODULES = {{"jax": "stand_in_jax", "torch": "stand_in_torch"}}
runner._compare = lambda *_: None
selected = [cases.read(values) for values in json.loads('{plan}')]
settings = runner.Settings(**{dataclasses.asdict(settings)})
runner.prepare(selected, settings, Path({str(stand_in)!r}))
runner.run(selected, settings, Path({str(stand_in)!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    first = stand_in / "passes" / "0-jax" / f"{selected[0].name}.json"
    for _ in range(600):
        if first.exists():
            break
        time.sleep(0.05)
    process.send_signal(how)
    process.wait()
    assert first.exists()
    before = first.read_bytes()
    assert not (stand_in / "passes" / "1-jax").exists()
    runner.prepare(selected, settings, stand_in, resume=True)
    runner.run(selected, settings, stand_in)
    assert first.read_bytes() == before
    assert all(len(list(place.glob("matmul*.json"))) == 5 for place in (stand_in / "passes").iterdir())


def test_outputs_that_differ_are_not_timed_further(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    selected = [Matmul(size=4), Matmul(size=5)]

    def differs(out: Path, *_: Any) -> None:
        (out / "agreement").mkdir()
        for case, ok in zip(selected, (False, True), strict=True):
            worker.write_json(out / "agreement" / f"{case.name}.json", {"ok": ok, "summary": "first product (float32)"})

    monkeypatch.setattr(runner, "_compare", differs)
    runner.prepare(selected, FAST, stand_in)
    runner.run(selected, FAST, stand_in)
    wrong, _ = results.collect(stand_in)["rows"]
    assert wrong["error"] == "outputs differ: first product (float32)"
    assert wrong["ratio"] is None
    assert not (stand_in / "passes" / "1-jax" / f"{selected[0].name}.json").exists()
    assert (stand_in / "passes" / "1-jax" / f"{selected[1].name}.json").exists()


# Documents


def made_up(**ratios: tuple[float, float | None, float | None] | None) -> dict[str, Any]:
    """A document with these ratios and their intervals."""
    rows = []
    for name, numbers in ratios.items():
        ratio, low, high = numbers or (None, None, None)
        rows.append({"name": name, "ratio": ratio, "low": low, "high": high, "error": None if numbers else "it broke"})
    machine = {"commit": "a0b1c2", "date": "2026-01-01", "cpu": "a processor", "cpus": 2}
    return {"format": 1, "rows": rows, "machine": machine, "settings": {}, "setup": {"jax": {"versions": {"jax": "1"}}}}


def test_a_run_that_still_meets_memory_for_the_first_time_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "disturbed", lambda *_: False)
    naps = iter([0.6, *[0.12] * 50])
    found = timing.sample(lambda: time.sleep(next(naps)), lambda _: None, seconds=0.5)
    assert found["repeats"] == 1
    assert max(found["samples_ms"]) < 600


def test_compare_flags_what_the_intervals_do_not_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = made_up(a=(1.0, 0.9, 1.1), b=(1.0, 0.9, 1.1), c=(1.0, 0.9, 1.1), d=(1.0, 0.9, 1.1), e=None, f=(1.0, 0.9, 1.1), gone=(1, 1, 1))
    new = made_up(a=(0.95, 0.85, 1.05), b=(0.8, 0.75, 0.89), c=(1.3, 1.2, 1.4), d=None, e=(1, 1, 1), f=(0.5, None, None), fresh=(1, 1, 1))
    verdicts = {change["name"]: change["verdict"] for change in results.changes(old, new)}
    assert verdicts == {"a": "same", "b": "slower", "c": "faster", "d": "failed", "e": "mended", "f": "open"}
    for name, document in (("old", old), ("new", new)):
        worker.write_json(tmp_path / f"{name}.json", document)
    with pytest.raises(RunError, match="2 of 6 cases became slower: b, d"):
        command.compare(tmp_path / "old.json", tmp_path / "new.json")
    command.compare(tmp_path / "old.json", tmp_path / "old.json")
    shown = capsys.readouterr().out
    assert "0.80 (0.75 – 0.89)" in shown
    assert "0.50 (one process)" in shown
    assert "Not of one kind" not in shown
    old["settings"]["keep_memory"] = True
    assert report.compared(old, new)[-1] == "Not of one kind: they differ in use of memory, and ratios with that."
    (tmp_path / "other.json").write_text("[]", encoding="utf-8")
    with pytest.raises(InputError, match="is no result of flax-gpt bench"):
        command.compare(tmp_path / "old.json", tmp_path / "other.json")


def test_pictures_of_made_up_figures(tmp_path: Path) -> None:
    """Every panel, from figures that no machine took."""
    rows = []
    shown = [case for case in cases.grid("standard") if case.kind in ("matmul", "attention", "train", "generate") and case.dtype == "float32"]
    shown += [Train(size="M", dropout=0.0, devices=devices) for devices in (2, 4)]
    for number, case in enumerate(shown):
        one = lambda ms: {"ms": ms, "processes": [ms * 0.95, ms, ms * 1.05], "rejected": 0}
        ms = (case.flops or 1e8) / 1e8 * (1 + number % 3 / 10)
        unit, amount = case.unit
        rows.append({
            "name": case.name, "case": case.to_dict(), "flops": case.flops, "bytes": case.bytes, "unit": unit, "amount": amount, "error": None,
            "jax": {"jit": one(ms)}, "torch": {"eager": one(1.2 * ms)}, "best": {"jax": "jit", "torch": "eager"}, "share": {},
            "ratio": 1.2, "low": 1.1, "high": 1.3,
        })  # fmt: skip
    rows[-1] |= {"low": None, "high": None}
    document = {"rows": rows, "ceilings": {"flops": {"float32": 2e11, "bfloat16": 4e11}, "bytes": 2e10}}
    drawn = charts.draw(document, tmp_path)
    assert [path.name for path in drawn] == ["ratios.png", "roofline.png", "scaling.png"]
    assert all(path.stat().st_size > 20_000 for path in drawn)
    panels = {axes.get_title(): axes for axes in charts.scaling(rows, document).axes}
    lines = panels["training step on several devices"].lines
    assert [list(line.get_xdata()) for line in lines] == [[1, 2, 4]] * 2
    assert all(len(line.get_xdata()) == 3 for line in panels["training step"].lines)

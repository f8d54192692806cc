"""The forms in which a report leaves the process: the page, the JSON's documentation, JUnit, and the command's files and exit statuses."""

import importlib.metadata
import json
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest

from flax_gpt.__main__ import main
from flax_gpt.errors import InputError
from parity_tests import arithmetic, browser, page, run_parity
from parity_tests.report import Report, Row

HOSTILE = "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">'&"
RNG = np.random.default_rng(0)


def row(name, grade=1.0, kind="tap", dtype="float32", **fields):
    return Row(name, dtype, {"flax": grade * 1e-7}, {"flax": grade}, {"flax": 3.0}, 1e-7, kind=kind, device="cpu", **fields)


def report_of(*rows):
    report = Report(HOSTILE, {"jax": HOSTILE})
    report.rows = list(rows)
    maps = RNG.dirichlet(np.ones(5), (2, 3, 5)).astype(np.float32)
    report.maps = {HOSTILE: {"flax": maps, "torch": maps + np.float32(1e-6)}}
    report.axes = {HOSTILE: ([[HOSTILE, "雨", " ", "\n", "e"]] * 2, [list("abcde")] * 2)}
    return report


FAILED = report_of(row("taps/a", component=HOSTILE), row("taps/b", 9.0, diagnosis=HOSTILE), row("taps/c", 8.0), row("logits", 7.0, "output"))


def test_a_page_escapes_what_it_names_and_asks_nobody():
    text = page.render(FAILED)
    assert "<img" not in text
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    assert not re.search(r"https?:|<link|<iframe|<[^>]+ (src|href)=|@import|url\(|fetch\(|XMLHttp", re.sub(r'id="maps">.*?</script>', "", text))
    held = json.loads(re.search(r'id="maps">(.*?)</script>', text)[1])
    assert held[0]["rows"][0][0] == HOSTILE
    assert held[0]["shape"] == [2, 3, 5, 5]


def test_the_chain_marks_the_first_divergence_and_what_is_clean():
    text = page.render(FAILED)
    chain = text[text.index('class="chain"') : text.index("</details>")]
    assert [name in chain for name in ("✓ clean", "▶ first divergence", "taps/c")] == [True] * 3
    assert chain.index("✓ clean") < chain.index("▶ first divergence") < chain.index("taps/c")
    assert chain.count("✓ clean") == 1
    assert chain.count("▶ first divergence") == 1


def test_a_map_that_is_too_large_keeps_the_largest_difference():
    maps = np.zeros((3, 1, 200, 300), np.float32)
    other = maps.copy()
    other[1, 0, 190, 20] = 1
    report = Report()
    report.maps = {"map": {"flax": maps, "torch": other}}
    (held,) = page._maps(report)
    assert held["shape"] == [3, 1, 128, 128]
    assert held["kept"] == "queries 72 to 199 of 200, keys 0 to 127 of 300"
    assert held["rows"][0][0] == "72"


def test_every_field_of_the_json_is_documented():
    text = (Path(__file__).parents[1] / "docs" / "parity.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    fields = json.loads(FAILED.to_json())
    assert set(told) == set(fields) | set(fields["rows"][0])
    assert Report.from_json(FAILED.to_json()).rows == FAILED.rows


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="folder that exists"):
        page.save(FAILED, tmp_path / "absent" / "page.html")
    (tmp_path / "page.html").write_text("before")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        page.save(FAILED, tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "before"


@pytest.mark.parametrize(("report", "status"), [(FAILED, 1), (report_of(row("taps/a")), 0)])
def test_the_command_writes_its_files_and_tells_by_its_status(report, status, tmp_path, monkeypatch, capsys):
    asked = {}
    monkeypatch.setattr(run_parity, "run", lambda *arguments, **options: asked.update(options) or report)
    files = ["--html", str(tmp_path / "page.html"), "--json", str(tmp_path / "report.json")]
    assert main(["parity", "--dtype", "float32,bfloat16", "--device", "cpu", "--precision", "default", *files]) == status
    assert asked == dict(devices=("cpu",), precision="default", dtypes=("float32", "bfloat16"), tapped=True)
    assert Report.from_json((tmp_path / "report.json").read_text(encoding="utf-8")).ok == (status == 0)
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--dtype", "float8"], "dtype = 'float8'"),
        (["--dtype", "float32,float32"], "dtype"),
        (["--device", "abacus"], "device = 'abacus'"),
        (["--html", "absent/page.html"], "--html"),
        (["--html", "x", "--json", "x"], "--json"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(arguments, name, capsys):
    assert main(["parity", *arguments]) == 2
    assert name in capsys.readouterr().err


def test_precision_reaches_the_programs_and_float64_is_spared():
    with arithmetic.using(arithmetic.device_of("cpu"), "default"):
        assert [arithmetic.precision(dtype) for dtype in ("float32", "bfloat16", "float64")] == ["default", "default", "highest"]
    assert arithmetic.precision() == "highest"


def test_junit_carries_the_rows(tmp_path):
    (tmp_path / "test_port.py").write_text(
        "import jax.numpy as jnp, numpy as np, torch\nfrom parity_tests import Function\n\n"
        "def test_port(parity):\n"
        "    linear = torch.nn.Linear(3, 2)\n"
        "    ours = Function(lambda p, x: x @ p['w'], {'w': jnp.asarray(linear.weight.detach().numpy().T)})\n"
        "    linear.bias = None\n"
        "    parity(ours, linear, np.ones((1, 3), np.float32), names={'w': 'weight.T'})\n"
    )
    installed = any(point.value == "parity_tests.pytest_plugin" for point in importlib.metadata.entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "parity_tests.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, "--junitxml", "junit.xml", "test_port.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    found = xml.etree.ElementTree.parse(tmp_path / "junit.xml").iter("property")
    properties = {one.get("name"): one.get("value") for one in found}
    assert "within their budget" in properties["parity"]
    assert json.loads(properties["parity/float32/grads/w"])["ok"] is True
    assert set(json.loads(properties["parity/float32/output"])["errors"]) == {"flax", "torch"}


@pytest.mark.slow
def test_a_click_enlarges_a_map(tmp_path):
    program = browser.chromium()
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    page.save(FAILED, tmp_path / "page.html")
    with browser.Browser(program, tmp_path / "profile") as window:
        window.open((tmp_path / "page.html").as_uri())
        assert window.value("document.querySelectorAll('#panels canvas').length") == 3
        assert window.value("document.getElementById('zoom').open") is False
        window.click("#panels figure:nth-child(3) canvas")
        assert window.value("document.getElementById('zoom').open") is True
        assert window.value("document.getElementById('zoomtitle').textContent") == "difference"
        wide = [window.value(f"document.querySelector('{s}').width") for s in ("#panels canvas", "#zoomed")]
        assert wide[1] > wide[0]
        window.click("#close")
        assert window.value("document.getElementById('zoom').open") is False
        assert window.value("document.title") == HOSTILE
        asked = [m["params"]["request"]["url"] for m in window.messages if m.get("method") == "Network.requestWillBeSent"]
        assert [url for url in asked if not url.startswith("file:")] == []
        assert not [m for m in window.messages if m.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")]

"""Other people's models: what is found by itself, what is refused, and each known fault found, named and explained."""

import copy
import functools
import math
import re

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from flax_gpt.errors import InputError
from parity_tests import Function, Inputs, Linen, adapters, check, diagnosis, mark, ports, taps
from parity_tests import names as naming
from parity_tests.report import Report

TOKENS = np.random.default_rng(0).integers(0, 11, (2, 6))
D, H = 8, 2


class Turned(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.T, self.bias)


class Theirs(nn.Module):
    """A decoder layer in plain torch, whose details can be got wrong."""

    def __init__(self, **wrong):
        super().__init__()
        self.tokens = nn.Embedding(11, D)
        self.places = nn.Parameter(torch.randn(6, D))
        self.first = nn.LayerNorm(D, eps=wrong.get("eps", 1e-5))
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        if wrong.get("transposed"):
            self.o.__class__ = Turned
        self.inner, self.outer = nn.Linear(D, D), nn.Linear(D, D)
        self.head = nn.Linear(D, 11, bias=False)
        self.wrong = wrong
        if wrong.get("tied"):
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        wrong = self.wrong
        x = self.tokens(tokens) * wrong.get("embedding_scale", 1.0)
        x = x if wrong.get("no_places") else x + self.places
        h = self.first(x)
        split = lambda y: y.unflatten(-1, (H, D // H)) if not wrong.get("split") else y.unflatten(-1, (D // H, H)).transpose(-1, -2)
        q, k, v = (split(f(h)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q = mark(wrong["turn"](q) if "turn" in wrong else q, "turned")
        scores = q @ k.transpose(-1, -2) * wrong.get("scale", 1 / math.sqrt(D // H))
        seen = wrong.get("seen", torch.ones(6, 6, dtype=torch.bool).tril())
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), wrong.get("axis", -1))
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        x = self.o(mixed) if wrong.get("no_residual") else x + self.o(mixed)
        hidden = wrong.get("activation", nn.functional.gelu)(self.inner(x))
        if wrong.get("narrow"):
            hidden = torch.from_numpy(hidden.detach().numpy().astype(np.float32).astype(np.float64)) + (hidden - hidden.detach())
        return {"logits": self.head(x + self.outer(hidden)), "map": weights}


class Ours(nnx.Module):
    """Its port, with other names and another order of definition."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, D, rngs=rngs)
        self.position_table = nnx.Param(jnp.zeros((1, 6, D)))
        self.norm = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.query, self.key, self.value, self.out = (nnx.Linear(D, D, rngs=rngs) for _ in range(4))
        self.linear1, self.linear2 = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
        self.unembed = nnx.Linear(D, 11, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position_table[...]
        h = self.norm(x)
        q, k, v = (f(h).reshape(*h.shape[:2], H, D // H) for f in (self.query, self.key, self.value))
        q = mark(q.transpose(0, 2, 1, 3), "turned")
        scores = jnp.einsum("bhtd,bshd->bhts", q, k) / math.sqrt(D // H)
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((6, 6), bool)), scores, -jnp.inf))
        x = x + self.out(jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape))
        return {"logits": self.unembed(x + self.linear2(jax.nn.gelu(self.linear1(x), approximate=False))), "map": weights}


def theirs_of(**wrong):
    torch.manual_seed(0)
    return Theirs(**wrong)


class Compiled(ports.Case):
    """A case whose JAX side runs once: the faults are theirs."""

    our_results = functools.cache(ports.Case.our_results)
    our_taps = functools.cache(ports.Case.our_taps)


@functools.cache
def sound():
    mine, other, inputs = adapters.NNX(Ours()), adapters.Torch(theirs_of()), Inputs(TOKENS)
    sources = naming.match(mine.leaves, other.leaves, other.aliases, None, mine.values(), other.values())
    case = Compiled(mine, other, sources, inputs, inputs)
    values = other.values()
    case.values.update({name: source.of(values) for name, source in sources.items()})
    return case


def report_on(theirs):
    case, report = copy.copy(sound()), Report()
    case.theirs = adapters.Torch(theirs)
    case.our_results, case.our_taps = sound().our_results, sound().our_taps
    ports.compare(report, case, ("float32",), nonfinite=(), logits=("*logits*",), tapped=None)
    return report


def test_names_are_found_by_kind_shape_and_order():
    found = {name: str(source) for name, source in sound().sources.items()}
    assert found["embed.embedding"] == "tokens.weight"
    assert found["position_table"] == "places"
    assert found["unembed.kernel"] == "head.weight with axes [1, 0]"
    pairs = {"norm": "first", "query": "q", "key": "k", "value": "v", "out": "o", "linear1": "inner", "linear2": "outer"}
    assert all(found[f"{ours}.bias"] == f"{theirs}.bias" for ours, theirs in pairs.items())
    modules = ports.modules_of(sound())
    assert pairs.items() <= modules.items()


def test_a_sound_port_passes_and_its_taps_are_paired():
    case, report = sound(), Report()
    ports.compare(report, case, ("float32",), nonfinite=(), logits=("*logits*",), tapped=True)
    assert report.ok, report.failures()
    names = [row.name for row in report.rows if row.dtype == "float64"]
    chain = ["taps/embed", "taps/norm", "taps/query", "taps/:turned", "taps/:scores", "taps/:map", "taps/out", "taps/linear1", "taps/:activation"]
    assert [name for name in names if name in chain] == chain
    assert [name for name in names if name.startswith("cotangents/")][:3] == ["cotangents/unembed", "cotangents/linear2", "cotangents/:activation"]
    logits = next(row for row in report.rows if (row.name, row.dtype) == ("outputs/logits", "float32"))
    assert logits.top_k["flax"] == 1
    assert not any(row.top_k for row in report.rows if row.name == "outputs/map")


def tanh(x):
    return nn.functional.gelu(x, approximate="tanh")


def turned(x, pairs):
    """Rotary positions of either layout, in torch."""
    angle = torch.arange(6, dtype=x.dtype)[:, None] / 100.0 ** torch.arange(D // H // 2, dtype=x.dtype)
    cos, sin = torch.cos(angle), torch.sin(angle)
    one, two = (x[..., 0::2], x[..., 1::2]) if pairs else x.chunk(2, -1)
    parts = [one * cos - two * sin, two * cos + one * sin]
    return torch.stack(parts, -1).flatten(-2) if pairs else torch.cat(parts, -1)


LATER = torch.ones(6, 6, dtype=torch.bool).triu(1)
FAULTS = {
    "scale of the embedding": (
        dict(embedding_scale=math.sqrt(D)),
        "taps/norm:input",
        "scale: embed enters theirs 2.82843 (√8) times as large as ours",
    ),
    "scale of the scores": (dict(scale=1.0), "taps/:scores", "scale: ours is 0.5 (1/√4) times theirs"),
    "epsilon": (dict(eps=1e-3), "taps/norm", "epsilon: ours is a layer norm with epsilon 1e-05, theirs is a layer norm with epsilon 0.001"),
    "activation": (
        dict(activation=tanh),
        "taps/:activation",
        "activation: ours is the exact (erf) GELU, theirs the tanh approximation of GELU",
    ),
    "ReLU": (dict(activation=torch.relu), "taps/linear2:input", "activation: ours is the exact (erf) GELU, theirs ReLU"),
    "mask polarity": (dict(seen=LATER), "taps/:scores", "mask polarity: ours attends to exactly what theirs hides"),
    "no mask": (dict(seen=torch.ones(6, 6, dtype=torch.bool)), "taps/:scores", "mask: theirs hides nothing"),
    "mask off by one": (dict(seen=torch.ones(6, 6, dtype=torch.bool).tril(1)), "taps/:scores", "mask off by one: theirs sees one position more"),
    "transposed kernel": (dict(transposed=True), "taps/out", "transposed kernel: theirs multiplies by the transpose"),
    "no residual": (dict(no_residual=True), "taps/linear1:input", "addition: ours adds norm:input and theirs does not"),
    "no positions": (dict(no_places=True), "taps/norm:input", "addition: ours adds position_table and theirs does not"),
    "heads split": (
        dict(split=True),
        "taps/:turned",
        "reordered: the same numbers in another order, as after a reshape that should have been a transpose",
    ),
    "narrow": (dict(narrow=True), "taps/linear2:input", "narrow arithmetic: theirs is rounded to float32 here, though all is asked in float64"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_explained(fault):
    wrong, first, told = FAULTS[fault]
    report = report_on(theirs_of(**wrong))
    assert report.first_divergence.name == first, report.failures()
    assert report.first_divergence.dtype == "float64"
    assert report.first_divergence.diagnosis == told, report.explanation()
    assert report.first_divergence.note or "the programs differ, not the rounding" in report.first_divergence.reason
    assert {row.dtype for row in report.rows} == {"exact", "float64"}
    chain = [row for row in report.rows if row.kind == "tap"]
    assert all(row.ok for row in chain[: chain.index(report.first_divergence)])


def test_dropout_that_is_active_is_named():
    class Dropping(Theirs):
        def forward(self, tokens):
            torch.manual_seed(3)
            return super().forward(tokens)

    torch.manual_seed(0)
    report = report_on(Dropping(activation=lambda x: nn.functional.dropout(nn.functional.gelu(x), 0.25)))
    first = report.first_divergence
    assert first.name == "taps/linear2:input"
    assert re.fullmatch(r"dropout active in theirs: \d+% of the elements are 0, the others divided by 0.75", first.diagnosis)


def test_layouts_of_rotary_positions_are_told_apart():
    """Both sides turn: ours in halves, theirs in neighbours."""
    look = lambda ours, theirs, value: type("Look", (), dict(ours={"query": value, ":turned": ours}, truth={":turned": theirs}))
    value = torch.randn(2, 2, 6, 4, dtype=torch.float64)
    halves, pairs = turned(value, False).numpy(), turned(value, True).numpy()
    assert diagnosis._rotary(look(halves, pairs, value.numpy()), ":turned") == "RoPE layout: ours turns halves, theirs neighbours"
    assert diagnosis._rotary(look(pairs, pairs, value.numpy()), ":turned") == "RoPE angles: both turn the same pairs, by different angles"
    assert diagnosis._rotary(look(halves, 2 * pairs, value.numpy()), ":turned") == ""


def test_tied_weights_that_are_two_of_ours():
    theirs = theirs_of(tied=True)
    names = {"unembed": "head"}
    report = check(Ours(), theirs, TOKENS, names=names, weights="copy")
    assert report.first_divergence.name == "grads/embed.embedding"
    assert report.first_divergence.diagnosis == (
        "untied weights: embed.embedding and unembed.kernel are one parameter of theirs, tokens.weight; their gradients add up to its gradient"
    )


def test_weights_are_compared_before_anything_runs():
    theirs, ours = theirs_of(), Ours()
    report = check(ours, theirs, TOKENS)
    assert [row.note for row in report.rows] == ["none agrees: fill ours from theirs, or pass weights='copy' to compare the programs alone"]
    values = adapters.Torch(theirs).values()
    flat = dict(nnx.to_flat_state(nnx.state(ours, nnx.Param)))
    for name, source in sound().sources.items():
        flat[tuple(name.split("."))][...] = jnp.asarray(source.of(values))
    ours.out.kernel[...] = ours.out.kernel[...].T
    ours.key.bias[...] = ours.key.bias[...].at[0].add(1.0)
    ours.query.bias[...] = ours.query.bias[...].astype(jnp.bfloat16).astype(jnp.float32)
    names = {"query": "q", "key": "k", "value": "v", "out": "o"}
    report = check(ours, theirs, TOKENS, names=names)
    assert {row.name: row.diagnosis for row in report.rows} == {
        "weights/query.bias": "rounded: ours went through bfloat16",
        "weights/key.bias": "",
        "weights/out.kernel": "transposed kernel: ours holds the transpose",
    }


def test_all_that_is_wrong_with_names_is_told_at_once():
    class Short(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.embed, self.norm = nnx.Embed(11, D, rngs=rngs), nnx.LayerNorm(D, rngs=rngs)
            self.one, self.two, self.wide = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, 7, rngs=rngs)
            self.head = nnx.Linear(D, 10, rngs=rngs)

    ours, theirs = Short(), theirs_of()
    with pytest.raises(InputError) as error:
        check(ours, theirs, TOKENS, names={"absent.*": "q.*", "norm": "second"})
    told = str(error.value)
    for part in (
        "names = {'absent.*': 'q.*', 'norm': 'second'}: ",
        "'absent.*' of the table matches nothing of ours",
        "norm.scale is to be second.weight, which they do not have",
        "wide.kernel [8, 7] is unfilled",
        "one.kernel [8, 8] is ambiguous: q.weight, k.weight, v.weight, o.weight, inner.weight, outer.weight",
        "places [6, 8] of theirs is left over",
        "head.kernel [8, 10] does not fit head.weight [11, 8] of theirs",
    ):
        assert part in told, told


@pytest.mark.parametrize(
    ("key", "value", "name", "expected"),
    [
        ("blocks.*.fc", "h.*.mlp", "blocks.3.fc.kernel", ("h.3.mlp.weight",)),
        ("**.kernel", "**.weight.T", "a.b.kernel", ("a.b.weight.T",)),
        ("blocks.*.q", "h.*.qkv[0/3]", "blocks.2.q.bias", ("h.2.qkv.bias[0/3]",)),
        (re.compile(r"b(\d)\.(q|k)\.kernel"), r"l\1.\2.weight", "b4.k.kernel", ("l4.k.weight",)),
        ("qkv", ("q", "k", "v"), "qkv.kernel", ("q.weight", "k.weight", "v.weight")),
        ("blocks.*", "h.*", "other.kernel", None),
    ],
)
def test_patterns(key, value, name, expected):
    leaf = adapters.Leaf((2, 2), "linear", "weight" if name.endswith("kernel") else "bias")
    assert naming._translated(name, leaf, key, value) == expected


def test_fused_projections_in_either_direction():
    """Ours joined from three of theirs, and three of ours from parts of one of theirs."""
    three = {name: nn.Linear(2, 4) for name in "qkv"}
    values = {f"{name}.weight": module.weight.detach().numpy() for name, module in three.items()}
    theirs = {name: adapters.Leaf((4, 2), "linear", "weight") for name in values}
    ours = {"qkv.kernel": adapters.Leaf((2, 12), "linear", "weight")}
    found = naming.match(ours, theirs, {}, {"qkv": ("q", "k", "v")}, {"qkv.kernel": np.zeros((2, 12))}, values)
    assert np.array_equal(found["qkv.kernel"].of(values), np.concatenate(list(values.values())).T)
    back = {f"{name}.kernel": adapters.Leaf((2, 2, 2), "linear", "weight") for name in "qkv"}
    fused = {"qkv.weight": np.concatenate(list(values.values()))}
    table = {f"{name}": f"qkv[{i}/3]" for i, name in enumerate("qkv")}
    leaf = {"qkv.weight": adapters.Leaf((12, 2), "linear", "weight")}
    found = naming.match(back, leaf, {}, table, {name: np.zeros((2, 2, 2)) for name in back}, fused)
    assert all(np.array_equal(found[f"{name}.kernel"].of(fused), values[f"{name}.weight"].T.reshape(2, 2, 2)) for name in "qkv")
    two = {name: back[name] for name in ("q.kernel", "k.kernel")}
    zeros = {name: np.zeros((2, 2, 2)) for name in two}
    with pytest.raises(InputError, match="used in 2 of 3 parts"):
        naming.match(two, leaf, {}, {"q": "qkv[0/3]", "k": "qkv[1/3]"}, zeros, fused)


def test_linen_modules_and_plain_functions():
    class Net(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x, train):
            x = flax.linen.Dense(6, name="one", dtype=jnp.float32)(x)
            x = flax.linen.LayerNorm(epsilon=1e-5, name="norm")(jax.nn.relu(x))
            return flax.linen.Dense(4, name="two")(flax.linen.Dropout(0.5, deterministic=not train)(x))

    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 4))
    x = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    net = Net()
    variables = net.init(jax.random.key(0), x, train=False)
    ours = Linen(net, variables, train=False)
    report = check(ours, theirs, x, weights="copy", tapped=True)
    assert report.ok, report.failures()
    names = [row.name for row in report.rows if row.dtype == "float64"]
    chain = ["taps/one:input", "taps/one", "taps/:activation", "taps/norm", "taps/two"]
    assert [name for name in names if name in chain] == chain
    assert {"grads/one.kernel", "grads/norm.scale", "grads/inputs.0"} <= set(names)

    weight = adapters.Torch(theirs).values()
    params = [jnp.asarray(weight["0.weight"].T), jnp.asarray(weight["0.bias"])]
    function = Function(lambda params, x, power: (x @ params[0] + params[1]) ** power, params, power=1)
    report = check(function, theirs[0], (x,), names={"0": "weight", "1": "bias"})
    assert report.ok, report.failures()
    wrong = Function(function.f, params, power=2)
    assert not check(wrong, theirs[0], (x,), names={"0": "weight", "1": "bias"}).ok


def test_what_else_is_refused():
    theirs = nn.Linear(2, 2)
    ours = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    x = np.ones((1, 2), np.float32)
    for call, name in (
        (lambda: check(object(), theirs, x), "ours"),
        (lambda: check(ours, object(), x), "theirs"),
        (lambda: check(ours, theirs, x, weights="load"), "weights"),
        (lambda: check(ours, theirs, x, dtypes=("float8",)), "dtypes"),
        (lambda: check(ours, theirs, x, dtypes=()), "dtypes"),
    ):
        with pytest.raises(InputError, match=name):
            call()


def test_numbers_that_are_not_finite_must_be_expected():
    class Ratio(nnx.Module):
        def __call__(self, x):
            return jnp.log(x)

    class TheirRatio(nn.Module):
        def forward(self, x):
            return torch.log(x)

    x = np.array([1.0, 0.0, 2.0], np.float32)
    loss = (lambda out: jnp.sum(jnp.where(jnp.isfinite(out), 0.0, 0.0)), lambda out: torch.where(out.isfinite(), 0.0, 0.0).sum())
    report = check(Ratio(), TheirRatio(), x, loss=loss)
    assert report.first_divergence.name == "output"
    assert "where the case expects a number" in report.first_divergence.note
    report = check(Ratio(), TheirRatio(), x, loss=loss, nonfinite=("output",))
    assert report.ok, report.failures()
    assert report.rows[2].nonfinite == 1


def test_scores_are_hidden_however_they_are():
    scores = np.array([[1.0, -1e9, -np.inf, np.finfo(np.float32).min, 0.0]])
    assert np.array_equal(taps.hidden(scores), [[1.0, -np.inf, -np.inf, -np.inf, 0.0]])


def test_layouts_of_values():
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5))
    axes, shape = taps.in_layout(x, (2, 4, 5, 3), True)
    assert np.array_equal(x.transpose(axes).reshape(shape), x.transpose(0, 2, 3, 1))
    axes, shape = taps.in_layout(x, (2, 3, 20), False)
    assert np.array_equal(x.transpose(axes).reshape(shape), x.reshape(2, 3, 20))
    sequence_first = x.reshape(6, 4, 5)
    axes, shape = taps.in_layout(sequence_first, (4, 6, 5), False, sequence_first.transpose(1, 0, 2))
    assert np.array_equal(sequence_first.transpose(axes), sequence_first.transpose(1, 0, 2))
    assert taps.in_layout(x, (2, 3, 4), False) is None


@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2)])
def test_where_two_layouts_fit_our_values_decide(axes):
    x = np.random.default_rng(0).standard_normal((2, 2, 3))
    reference = x.transpose(axes).reshape(4, 3)
    found, shape = taps.in_layout(x, (4, 3), False, reference)
    assert np.array_equal(x.transpose(found).reshape(shape), reference)


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 3, 1)])
def test_as_many_channels_as_rows_and_columns(axes):
    x = np.random.default_rng(0).standard_normal((2, 3, 3, 3))
    found, shape = taps.in_layout(x, (2, 3, 3, 3), True, x.transpose(axes))
    assert np.array_equal(x.transpose(found).reshape(shape), x.transpose(axes))


def test_square_matrices_turn_by_the_kind_of_their_module():
    leaf = lambda kind: adapters.Leaf((2, 2), kind, "weight")
    assert naming.layouts(leaf("linear"), leaf("linear"), (2, 2)) == [(1, 0)]
    assert naming.layouts(leaf("linear"), leaf("in_out"), (2, 2)) == [(0, 1)]
    assert naming.layouts(leaf("embed"), leaf("embed"), (2, 2)) == [(0, 1)]
    assert naming.layouts(leaf("raw"), leaf("raw"), (2, 2)) == [(0, 1), (1, 0)]


def test_convolutions_and_running_statistics():
    """Images of two layouts; buffers that are compared and have no gradient; a map that is flattened in two orders."""

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.conv = nnx.Conv(3, 4, (3, 3), padding="SAME", rngs=rngs)
            self.norm = nnx.BatchNorm(4, epsilon=1e-5, rngs=rngs)
            self.groups = nnx.GroupNorm(4, num_groups=2, epsilon=1e-5, rngs=rngs)
            self.head = nnx.Linear(16, 3, rngs=rngs)

        def __call__(self, images):
            x = self.groups(jax.nn.relu(self.norm(self.conv(images))))
            x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
            return self.head(x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1))

    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    theirs = nn.Sequential(*parts)
    images = np.random.default_rng(2).standard_normal((2, 4, 4, 3)).astype(np.float32)
    for _ in range(3):  # statistics of its own
        theirs(torch.from_numpy(images.transpose(0, 3, 1, 2)))
    report = check(Net(), theirs, (images,), their_inputs=(images.transpose(0, 3, 1, 2),), weights="copy", tapped=True)
    assert report.ok, report.failures()
    names = [row.name for row in report.rows if row.dtype == "float64"]
    chain = ["taps/conv", "taps/norm", "taps/:activation", "taps/groups", "taps/head"]
    assert [name for name in names if name in chain] == chain
    assert "grads/inputs.0" in names
    assert not any("mean" in name for name in names)

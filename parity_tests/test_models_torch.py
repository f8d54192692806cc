"""torch_ref against torch's own modules, so that a mistake that both packages share would show; flax_gpt's parts against the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flax_gpt.nn.norm
import flax_gpt.training.loss
import torch_ref.nn.attention
import torch_ref.nn.block
import torch_ref.nn.norm
import torch_ref.training.loss
from flax_gpt.config import EncoderConfig, GPTConfig
from flax_gpt.kernels.api import attend
from parity_tests import compare
from torch_ref.kernels.api import attend as torch_attend

GPT = GPTConfig(vocab_size=5, d_model=24, num_heads=3, num_layers=2, d_ff=40, max_len=9, init="torch")
ENCODER = EncoderConfig(vocab_size=5, d_model=24, num_heads=3, num_layers=1, d_ff=40, max_len=9, init="torch")


def numbers(*shape, seed=0, scale=1.0, shift=0.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale + shift).astype(np.float32)


def cast(values, dtype):
    return [torch.from_numpy(value).to(getattr(torch, dtype)) for value in values]


def results(model, x, *more):
    """out, the gradient of a fixed weighted sum of it with respect to x, and to every parameter."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = model(x, *more)
    (out * torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).cos()).sum().backward()
    found = {"out": out, "grad": x.grad} | {f"grads/{name}": p.grad for name, p in sorted(model.named_parameters())}
    return {name: value.detach().numpy().copy() for name, value in found.items()}


def assert_same_programs(ours, theirs):
    report = compare.check_programs(ours, theirs)
    assert report.ok, report.failures()


def rename(values, table):
    for ours, theirs in table.items():
        values = {name.replace(ours, theirs): value for name, value in values.items()}
    return values


def joined(values, prefix, place=""):
    """q, k and v of separate layers stacked as torch's in_proj holds them."""
    found = dict(values)
    for kind in ("weight", "bias"):
        parts = [found.pop(f"{prefix}{place}{name}.{kind}") for name in ("query", "key", "value")]
        found[f"{prefix}{place}in_proj_{kind}"] = np.concatenate(parts)
    return found


@pytest.mark.parametrize("masked", [False, True])
def test_multi_head_attention(masked):
    ours = torch_ref.nn.attention.MultiHeadAttention(ENCODER, "place")
    for parameter in ours.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    theirs = nn.MultiheadAttention(24, 3, batch_first=True)
    state = {name: value.numpy() for name, value in ours.state_dict().items()}
    theirs.load_state_dict({k: torch.from_numpy(v) for k, v in rename(joined(state, ""), {"output": "out_proj"}).items()})
    x, lengths = numbers(2, 9, 24), torch.tensor([9, 4])
    hidden = (torch.arange(9) >= lengths[:, None]) if masked else None

    def run(model, dtype, call):
        model = model.to(getattr(torch, dtype))
        for layer in (m for m in model.modules() if hasattr(m, "compute_dtype")):
            layer.compute_dtype = getattr(torch, dtype)
        return results(Wrapped(model, call), *cast([x], dtype))

    assert_same_programs(
        lambda dtype: rename(
            joined(run(ours, dtype, lambda m, x: m(x, lengths=lengths if masked else None)[0]), "grads/model."), {"output": "out_proj"}
        ),
        lambda dtype: run(theirs, dtype, lambda m, x: m(x, x, x, key_padding_mask=hidden)[0]),
    )


class Wrapped(nn.Module):
    def __init__(self, model, call):
        super().__init__()
        self.model, self.call = model, call

    def forward(self, x):
        return self.call(self.model, x)


LAYER = {"attention.": "self_attn.", "self_attn.output": "self_attn.out_proj", "feed_forward.": ""}


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_blocks_are_transformer_encoder_layers(kind):
    """Pre-LN with GELU and a causal mask, post-LN with ReLU; with the biases that MiniGPT leaves out set to zero and their gradients ignored."""
    torch.manual_seed(0)
    if kind == "pre":
        ours, activation = torch_ref.nn.block.Block(GPT, "place", causal=True).eval(), F.gelu
    else:
        ours, activation = torch_ref.nn.block.Block(ENCODER, "place", causal=False).eval(), F.relu
    theirs = nn.TransformerEncoderLayer(24, 3, 40, dropout=0.0, activation=activation, batch_first=True, norm_first=kind == "pre")
    for name, parameter in ours.named_parameters():
        nn.init.normal_(parameter, std=0.3, mean=1.0 if "norm" in name and "weight" in name else 0.0)
    absent = [f"attention.{name}.bias" for name in ("query", "key", "value", "output")] if kind == "pre" else []
    state = {name: value.numpy() for name, value in ours.state_dict().items()} | {name: np.zeros(24, np.float32) for name in absent}
    theirs.load_state_dict({k: torch.from_numpy(v) for k, v in rename(joined(state, "", "attention."), LAYER).items()})
    causal = torch.triu(torch.ones(9, 9, dtype=torch.bool), 1) if kind == "pre" else None

    def run(model, dtype, call):
        model = model.to(getattr(torch, dtype))
        for layer in (m for m in model.modules() if hasattr(m, "compute_dtype")):
            layer.compute_dtype = getattr(torch, dtype)
        return results(Wrapped(model, call), *cast([numbers(2, 9, 24)], dtype))

    def our_results(dtype):
        found = run(ours, dtype, lambda m, x: m(x)[0])
        if absent:
            found |= {f"grads/model.{name}": np.zeros(24, np.float32) for name in absent}
        return without_absent(rename(joined(found, "grads/model.", "attention."), LAYER))

    def without_absent(values):
        return {name: value for name, value in values.items() if not (absent and name.endswith(("in_proj_bias", "out_proj.bias")))}

    assert_same_programs(our_results, lambda dtype: without_absent(run(theirs, dtype, lambda m, x: m(x, src_mask=causal))))


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e-3, 0.0), (1.0, 30.0), (1e4, 0.0)])
def test_layer_norm(scale, shift):
    """Where eps counts, and where it does not."""
    x, weight, bias = numbers(4, 64, scale=scale, shift=shift), numbers(64, seed=1), numbers(64, seed=2)
    config = GPTConfig(vocab_size=2, d_model=64)

    def ours(dtype):
        norm = torch_ref.nn.norm.norm(GPTConfig(vocab_size=2, d_model=64, dtype=dtype, param_dtype=dtype))
        norm.load_state_dict(dict(zip(("weight", "bias"), cast([weight, bias], dtype), strict=True)))
        return results(norm, *cast([x], dtype))

    def theirs(dtype):
        norm = nn.LayerNorm(64, dtype=getattr(torch, dtype))
        norm.load_state_dict(dict(zip(("weight", "bias"), cast([weight, bias], dtype), strict=True)))
        return results(norm, *cast([x], dtype))

    assert config.norm_eps == nn.LayerNorm(64).eps
    assert_same_programs(ours, theirs)
    assert_same_programs(lambda dtype: flax_layer_norm(x, weight, bias, dtype), theirs)


def flax_layer_norm(x, weight, bias, dtype, **options):
    with jax.enable_x64(dtype == "float64"):
        config = GPTConfig(vocab_size=2, d_model=64, dtype=dtype, param_dtype=dtype)
        norm = flax_gpt.nn.norm.norm(config, rngs=nnx.Rngs(0))
        for name, value in options.items():
            setattr(norm, name, value)
        graph, state = nnx.split(norm)
        cotangent = np.cos(np.arange(x.size)).reshape(x.shape)

        def forward(values):
            filled = nnx.merge(graph, state, copy=True)
            filled.scale[...], filled.bias[...] = values["grads/weight"], values["grads/bias"]
            return filled(values["grad"])

        values = {name: jnp.asarray(value, dtype) for name, value in (("grad", x), ("grads/weight", weight), ("grads/bias", bias))}
        out, grads = forward(values), jax.grad(lambda v: (forward(v) * jnp.asarray(cotangent, dtype)).sum())(values)
        return {"out": np.asarray(out)} | {name: np.asarray(grad) for name, grad in grads.items()}


@pytest.mark.parametrize("one_pass", [False, True])
def test_layer_norm_far_from_zero(one_pass):
    """Mean 300, deviation 0.1: E[x²] - E[x]², NNX's default, is right in float64 and wrong in float32; two passes are right in both.

    torch's forward pass is too, but its gradient adds multiples of x that cancel, 17 times worse than the formula, which is the reference here.
    """
    x, weight, bias = numbers(4, 64, scale=0.1, shift=300.0), numbers(64, seed=1), numbers(64, seed=2)

    def formula(dtype):
        norm = nn.LayerNorm(64, dtype=getattr(torch, dtype))
        norm.load_state_dict(dict(zip(("weight", "bias"), cast([weight, bias], dtype), strict=True)))

        def forward(x):
            centred = x - x.mean(-1, keepdim=True)
            return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + norm.eps) * norm.weight + norm.bias

        norm.forward = forward
        return results(norm, *cast([x], dtype))

    report = compare.check_programs(lambda dtype: flax_layer_norm(x, weight, bias, dtype, use_fast_variance=one_pass), formula)
    assert ("float32" in {row.dtype for row in report.rows if not row.ok}) == one_pass, report.summary()


@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(weighted):
    logits, targets = numbers(3, 7, 50, scale=5.0), np.random.default_rng(1).integers(0, 50, (3, 7)).astype(np.int32)
    counted = np.arange(7) < np.array([7, 2, 0])[:, None] if weighted else np.ones((3, 7), bool)
    weights = counted.astype(np.float32) if weighted else None

    def theirs(dtype):
        x = cast([logits], dtype)[0].requires_grad_()
        labels = torch.where(torch.from_numpy(counted), torch.from_numpy(targets).long(), -100)
        loss = F.cross_entropy(x.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        return {"loss": loss.detach().numpy(), "grad": x.grad.numpy()}

    def ours(dtype):
        x = cast([logits], dtype)[0].requires_grad_()
        loss = torch_ref.training.loss.cross_entropy(x, torch.from_numpy(targets), None if weights is None else torch.from_numpy(weights))
        loss.backward()
        return {"loss": loss.detach().numpy(), "grad": x.grad.numpy()}

    def in_flax(dtype):
        with jax.enable_x64(dtype == "float64"):
            function = jax.value_and_grad(lambda x: flax_gpt.training.loss.cross_entropy(x, targets, weights))
            loss, grad = function(jnp.asarray(logits, dtype))
            return {"loss": np.asarray(loss), "grad": np.asarray(grad)}

    assert_same_programs(ours, theirs)
    assert_same_programs(in_flax, theirs)


@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "grouped"])
def test_scaled_dot_product_attention(kind):
    K = 2 if kind == "grouped" else 4
    q, k, v = numbers(2, 6, 4, 8), numbers(2, 6, K, 8, seed=1), numbers(2, 6, K, 8, seed=2)
    mask = np.random.default_rng(3).random((2, 1, 6, 6)) < 0.7
    mask[..., 0] = True
    options = {"causal": kind == "causal"}
    cotangent = numbers(2, 6, 4, 8, seed=4)

    def theirs(dtype):
        inputs = [x.requires_grad_() for x in cast([q, k, v], dtype)]
        heads_first = [x.transpose(1, 2) for x in inputs]
        visible = torch.from_numpy(mask) if kind == "mask" else None
        with sdpa_kernel(SDPBackend.MATH):  # the fused backward cancels terms that this form, whose rounding is simulated, never makes
            out = F.scaled_dot_product_attention(*heads_first, attn_mask=visible, is_causal=kind == "causal", enable_gqa=kind == "grouped")
        out = out.transpose(1, 2)
        return named(out, torch.autograd.grad((out * cast([cotangent], dtype)[0]).sum(), inputs))

    def ours(dtype):
        inputs = [x.requires_grad_() for x in cast([q, k, v], dtype)]
        out = torch_attend(*inputs, mask=torch.from_numpy(mask) if kind == "mask" else None, **options)
        return named(out, torch.autograd.grad((out * cast([cotangent], dtype)[0]).sum(), inputs))

    def in_flax(dtype):
        with jax.enable_x64(dtype == "float64"):
            forward = lambda *inputs: attend(*inputs, mask=jnp.asarray(mask) if kind == "mask" else None, **options)
            inputs = [jnp.asarray(x, dtype) for x in (q, k, v)]
            grads = jax.grad(lambda *inputs: (forward(*inputs) * jnp.asarray(cotangent, dtype)).sum(), argnums=(0, 1, 2))(*inputs)
            return named(forward(*inputs), grads)

    def named(out, grads):
        read = lambda x: x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
        return {"out": read(out)} | {f"d{name}": read(grad) for name, grad in zip("qkv", grads, strict=True)}

    assert_same_programs(ours, theirs)
    assert_same_programs(in_flax, theirs)

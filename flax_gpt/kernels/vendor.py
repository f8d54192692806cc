"""Attention that others wrote, behind the same door: cuDNN's through `jax.nn` on NVIDIA GPUs, JAX's splash kernel on TPUs.

Both know nothing of rows that see nothing, nor of NaN beside them. What a row sees is an interval of keys here, since masks and biases are refused:
counting the keys, and the bad ones, within it puts both right outside the kernel, at a cost linear in T + S.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from flax_gpt.kernels.case import Case, Inputs

LANES = 128


def _refuse_features(case: Case) -> str | None:
    features = (
        ("a mask", case.mask),
        ("a bias", case.bias),
        ("dropout", case.dropout_rate),
        ("lse", case.return_lse),
        ("weights", case.return_weights),
    )
    for feature, present in features:
        if present:
            return f"this door to it has no {feature.removeprefix('a ')}"
    if case.empty_rows != "zero":
        return f"empty_rows = {case.empty_rows!r} exists in the dense implementation alone"
    if case.width != case.value_width:
        return "values must be as wide as keys"
    return None


def _refuse_cudnn(case: Case) -> str | None:
    if case.platform != "gpu":
        return "it needs an NVIDIA GPU"
    if case.dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {case.dtype}"
    if case.width % 8 or case.width > 128:
        return "the width of a head must be a multiple of 8, at most 128"
    if case.window is not None:
        return "its windows look back only"
    if case.causal and (case.queries != case.keys or case.offset != 0):
        return "its causal limit starts at the first key"
    return _refuse_features(case)


def _cudnn(case: Case, q: Array, k: Array, v: Array, given: Inputs) -> tuple[Array, None, None]:
    """q (B, T, H, Dh), k and v (B, S, K, Dh) → out (B, T, H, Dh)."""
    lengths = None
    if given.kv_lengths is not None:
        # A row without keys is put right afterwards; one key keeps the kernel from dividing by nothing.
        lengths = jnp.clip(given.kv_lengths, 1, case.keys).astype(jnp.int32)
    out = jax.nn.dot_product_attention(
        *(_finite(x) for x in (q, k, v)), scale=case.scale, is_causal=case.causal, key_value_seq_lengths=lengths, implementation="cudnn"
    )
    return _put_right(case, given, q, k, v, out), None, None


def _refuse_splash(case: Case) -> str | None:
    if case.platform != "tpu":
        return "it needs a TPU"
    if case.dtype not in ("bfloat16", "float32"):
        return f"the matrix unit has no {case.dtype}"
    if case.queries % LANES or case.keys % LANES:
        return f"T and S must be multiples of {LANES}"
    if case.offset is None and (case.causal or case.window is not None):
        return "query_offset must be known before tracing"
    return _refuse_features(case)


def _splash(case: Case, q: Array, k: Array, v: Array, given: Inputs) -> tuple[Array, None, None]:
    """q (B, T, H, Dh), k and v (B, S, K, Dh) → out (B, T, H, Dh); heads are padded to whole lanes."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape, offset = (case.queries, case.keys), case.offset or 0
    mask: Any = masks.FullMask(shape)
    if case.window is not None:
        mask = masks.LocalMask(shape, case.window, offset)
    if case.causal:
        causal = masks.CausalMask(shape, offset)
        mask = causal if case.window is None else masks.LogicalAnd(mask, causal)
    run = kernel.make_splash_mha(masks.MultiHeadMask([mask] * case.heads), head_shards=1, q_seq_shards=1)
    segments = None
    if given.kv_lengths is not None:
        hidden = jnp.arange(case.keys)[None, :] >= given.kv_lengths[:, None]
        segments = kernel.SegmentIds(jnp.zeros((case.batch, case.queries), jnp.int32), hidden.astype(jnp.int32))
    scaled = (_finite(q).astype(jnp.float32) * case.scale).astype(q.dtype)
    heads = lambda x: jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, 0), (0, -case.width % LANES)))
    out = jax.vmap(run)(heads(scaled), heads(_finite(k)), heads(_finite(v)), segments)
    return _put_right(case, given, q, k, v, out[..., : case.width].transpose(0, 2, 1, 3)), None, None


def _put_right(case: Case, given: Inputs, q: Array, k: Array, v: Array, out: Array) -> Array:
    """0 in the rows that see nothing, NaN in those that see a key or value that is not finite."""
    rows = jnp.arange(case.queries)[None, :] + given.query_offset.reshape(-1, 1)
    first, behind = jnp.zeros_like(rows), jnp.full_like(rows, case.keys)
    left, right = case.window or (None, None)
    if case.causal:
        right = 0
    if left is not None:
        first = jnp.maximum(first, rows - left)
    if right is not None:
        behind = jnp.minimum(behind, rows + right + 1)
    if given.kv_lengths is not None:
        behind = jnp.minimum(behind, given.kv_lengths.astype(behind.dtype)[:, None])
    first, behind = (jnp.broadcast_to(jnp.clip(x, 0, case.keys), (case.batch, case.queries)) for x in (first, behind))
    bad_key = ~(jnp.all(jnp.isfinite(k), axis=-1) & jnp.all(jnp.isfinite(v), axis=-1))
    counted = jnp.pad(jnp.cumsum(bad_key, axis=1, dtype=jnp.int32), ((0, 0), (1, 0), (0, 0)))
    bad = jnp.take_along_axis(counted, behind[:, :, None], axis=1) > jnp.take_along_axis(counted, first[:, :, None], axis=1)
    bad = jnp.repeat(bad, case.group, axis=2) | ~jnp.all(jnp.isfinite(q), axis=-1)
    out = jnp.where(bad[..., None], jnp.nan, out)
    return jnp.where((behind > first)[:, :, None, None], out, 0.0)


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


cudnn = SimpleNamespace(refusal=_refuse_cudnn, attend=_cudnn)
splash = SimpleNamespace(refusal=_refuse_splash, attend=_splash)

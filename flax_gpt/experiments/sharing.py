"""What Q, K and V lose when they share projections: four decoders trained on one copying task with equal budgets."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_gpt.config import GPTConfig, OptimizerConfig
from flax_gpt.errors import require
from flax_gpt.experiments.result import Result, check_seed
from flax_gpt.experiments.training import fit, smoothed
from flax_gpt.models.gpt import MiniGPT
from flax_gpt.nn.sharing import SHARING, scores, share, symmetry
from flax_gpt.training.data import Batch
from flax_gpt.training.loss import cross_entropy


@dataclasses.dataclass(frozen=True)
class Variant:
    """What one way of sharing reached."""

    parameters: int
    """Of the whole model."""
    attention_parameters: int
    """Of the attention of all blocks."""
    train: dict[str, list[Any]]
    """{"step", "loss"}: mean training loss of each stretch of steps, nats a copied letter."""
    loss: float
    """After training, on fresh strings."""
    accuracy: float
    """Share of letters copied right, on the same strings."""
    symmetry: float
    """Of the first block's scores before the mask: 1 where Q = K, near ½ where they have nothing to do with each other."""
    scores: list[list[float]]
    """(T, T): those of the first head on the first string."""


@dataclasses.dataclass(frozen=True)
class Sharing(Result):
    """The task: a string of random letters, a separator, the same string; the loss counts the second string alone."""

    letters: int
    """Size of the alphabet; guessing gives a loss of ln(letters)."""
    length: int
    """Letters in a string."""
    steps: int
    batch_size: int
    d_model: int
    num_layers: int
    num_heads: int
    variants: dict[str, Variant]
    """By the names of nn.sharing.SHARING."""


OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=30)


def run(
    seed: int = 0, *, letters: int = 6, length: int = 6, steps: int = 400, batch_size: int = 32, d_model: int = 32, heads: int = 2, layers: int = 1
) -> Sharing:
    """Every variant starts from weights of the same seed and sees the same batches. Raises InputError for what the sizes cannot be."""
    check_seed(seed)
    for name, value in (("letters", letters), ("length", length), ("steps", steps), ("batch_size", batch_size)):
        require(value >= 1, name, value, "must be at least 1")
    batches, fresh = draw(seed, letters, length, (steps, batch_size)), draw(seed + 1, letters, length, (1, 512))
    config = model_config(letters, length, d_model, heads, layers)
    variants = {}
    for name in SHARING:
        model = make_model(config, name, seed)
        losses = fit(model, batches, OPTIMIZER)
        found = {key: np.asarray(value) for key, value in measure(model, *(jnp.asarray(part[0]) for part in fresh)).items()}
        variants[name] = Variant(
            parameters=_count(model),
            attention_parameters=sum(_count(block.attention) for block in model.blocks),
            train=smoothed(losses),
            loss=float(found["loss"]),
            accuracy=float(found["accuracy"]),
            symmetry=float(found["symmetry"]),
            scores=found["scores"][0, 0].tolist(),
        )
    return Sharing(seed, letters, length, steps, batch_size, d_model, layers, heads, variants)


def model_config(letters: int, length: int, d_model: int, heads: int, layers: int) -> GPTConfig:
    return GPTConfig(vocab_size=letters + 1, d_model=d_model, num_heads=heads, num_layers=layers, d_ff=2 * d_model, max_len=2 * length, dropout=0.0)


def make_model(config: GPTConfig, sharing: str, seed: int) -> MiniGPT:
    """A MiniGPT in eval mode whose blocks share as `sharing` says."""
    model = MiniGPT(config, rngs=nnx.Rngs(seed))
    share(model, sharing, rngs=nnx.Rngs(seed))
    model.eval()
    return model


def draw(seed: int, letters: int, length: int, shape: tuple[int, int]) -> Batch:
    """Batches with arrays (*shape, 2 · length): ids 0 … letters - 1 are the letters, `letters` is the separator."""
    strings = np.random.default_rng(seed).integers(0, letters, (*shape, length))
    rows = np.concatenate([strings, np.full((*shape, 1), letters), strings], axis=-1).astype(np.int32)
    weights = np.zeros((*shape, 2 * length), np.float32)
    weights[..., length:] = 1
    return Batch(rows[..., :-1].copy(), rows[..., 1:].copy(), weights)


def measure(model: MiniGPT, tokens: jax.Array, targets: jax.Array, weights: jax.Array) -> dict[str, jax.Array]:
    """loss, accuracy, and, of the first block, scores (B, H, T, T) before the mask and their symmetry; all of the arguments (B, T)."""
    logits, _ = model(tokens)
    hits = (jnp.argmax(logits, axis=-1) == targets) * weights
    block: Any = model.blocks[0]
    before_mask = scores(block.attention, block.norm1(model.embed(tokens)))
    return {
        "loss": cross_entropy(logits, targets, weights),
        "accuracy": jnp.sum(hits) / jnp.sum(weights),
        "scores": before_mask,
        "symmetry": symmetry(before_mask),
    }


def _count(module: nnx.Module) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))

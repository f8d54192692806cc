"""What the causal mask is for: one decoder trained with it and without it on the same text.

Without the mask every position sees the token that it has to predict. The training loss then falls to almost nothing, because the model copies its
answer from the input, and so does a held-out loss that is taken in the same way. Where nothing follows yet, as in generation, nothing can be copied:
the honest loss, of each token predicted from a prefix that ends before it, shows what was learned. For a causal model the two losses are one.
"""

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
from flax_gpt.training.data import Batch, load_corpus, split
from flax_gpt.training.loss import cross_entropy
from flax_gpt.training.tokenizer import CharTokenizer


@dataclasses.dataclass(frozen=True)
class Decoder:
    """What one of the two reached. Losses in nats a character."""

    train: dict[str, list[Any]]
    """{"step", "loss"}: mean training loss of each stretch of steps."""
    held_out_loss: float
    """Of held-out windows, each read whole as in training."""
    held_out_accuracy: float
    """Share of characters predicted right, likewise."""
    honest_loss: float
    """Of the same characters, each predicted from what stands before it alone."""
    honest_accuracy: float
    continuation: str
    """Greedy, of the prompt."""


@dataclasses.dataclass(frozen=True)
class Leak(Result):
    """Both start from the same weights and see the same batches."""

    characters: int
    """Size of the vocabulary; guessing gives a loss of ln(characters)."""
    window: int
    """Tokens a window, and max_len."""
    steps: int
    batch_size: int
    d_model: int
    num_layers: int
    num_heads: int
    prompt: str
    """Begins a held-out window."""
    causal: Decoder
    bidirectional: Decoder


OPTIMIZER = OptimizerConfig(lr=5e-3, warmup_steps=30)


def run(
    seed: int = 0,
    *,
    window: int = 32,
    steps: int = 300,
    batch_size: int = 32,
    d_model: int = 64,
    heads: int = 2,
    layers: int = 2,
    held_out_windows: int = 32,
) -> Leak:
    """Trains both on the English paragraphs of the shipped text; its last tenth is held out. Raises InputError for what the sizes cannot be."""
    check_seed(seed)
    require(window >= 4, "window", window, "must be at least 4")
    for name, value in (("steps", steps), ("batch_size", batch_size), ("held_out_windows", held_out_windows)):
        require(value >= 1, name, value, "must be at least 1")
    tokenizer, (training, held_out) = english()
    limit = min(len(training), len(held_out)) - 1
    require(window < limit, "window", window, f"must be below {limit}, the length of the held-out text")
    batches = draw(training, seed, window, (steps, batch_size))
    fresh = Batch(*(part[0] for part in draw(held_out, seed + 1, window, (1, held_out_windows))))
    config = model_config(tokenizer.vocab_size, window, d_model, heads, layers)
    prompt = fresh.tokens[:1, : window // 3]
    found = {}
    for name in ("causal", "bidirectional"):
        model = MiniGPT(config, rngs=nnx.Rngs(seed), causal=name == "causal")
        losses = fit(model, batches, OPTIMIZER)
        numbers = {key: float(value) for key, value in nnx.jit(measure)(model, jnp.asarray(fresh.tokens), jnp.asarray(fresh.targets)).items()}
        ids = continue_greedily(model, jnp.asarray(prompt), window - prompt.shape[1])
        found[name] = Decoder(smoothed(losses), continuation=tokenizer.decode(np.asarray(ids[0, prompt.shape[1] :])), **numbers)
    return Leak(seed, tokenizer.vocab_size, window, steps, batch_size, d_model, layers, heads, tokenizer.decode(prompt[0]), **found)


def model_config(vocab_size: int, window: int, d_model: int, heads: int, layers: int) -> GPTConfig:
    """RoPE, because "the next position" is then the same rotation everywhere, and a few hundred steps are enough to find it."""
    return GPTConfig(vocab_size=vocab_size, d_model=d_model, num_heads=heads, num_layers=layers, max_len=window, dropout=0.0, positions="rope_half")


def english() -> tuple[CharTokenizer, tuple[np.ndarray, np.ndarray]]:
    """The paragraphs of the shipped text that are plain ASCII, as ids: a tokenizer, and a part to train on before one to hold out."""
    corpus = load_corpus()
    paragraphs = corpus.tokenizer.decode(corpus.tokens).split("\n")
    text = "\n".join(paragraph for paragraph in paragraphs if paragraph.strip() and paragraph.isascii())
    tokenizer = CharTokenizer.from_text(text)
    return tokenizer, split(tokenizer.encode(text), 0.1)


def draw(tokens: np.ndarray, seed: int, window: int, shape: tuple[int, int]) -> Batch:
    """Windows at random starts: arrays (*shape, window)."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - window, shape)
    rows = np.asarray(tokens, np.int32)[starts[..., None] + np.arange(window + 1)]
    return Batch(rows[..., :-1].copy(), rows[..., 1:].copy(), np.ones((*shape, window), np.float32))


def measure(model: MiniGPT, tokens: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
    """held_out_loss, held_out_accuracy, honest_loss and honest_accuracy on windows (B, T), each a scalar."""
    logits, _ = model(tokens)
    honest = prefix_logits(model, tokens)
    return {
        "held_out_loss": cross_entropy(logits, targets),
        "held_out_accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == targets, dtype=logits.dtype),
        "honest_loss": cross_entropy(honest, targets),
        "honest_accuracy": jnp.mean(jnp.argmax(honest, axis=-1) == targets, dtype=logits.dtype),
    }


def prefix_logits(model: MiniGPT, tokens: jax.Array) -> jax.Array:
    """Logits (B, T, V) of tokens (B, T), those at position t from a pass in which tokens 0 … t are all there is."""

    def ending_at(t: jax.Array) -> jax.Array:
        logits, _ = model(tokens, lengths=jnp.full(tokens.shape[:1], t + 1))
        return logits[:, t]

    return jnp.moveaxis(jax.lax.map(ending_at, jnp.arange(tokens.shape[1], dtype=jnp.int32)), 0, 1)


def continue_greedily(model: MiniGPT, tokens: jax.Array, count: int) -> jax.Array:
    """tokens (B, T) and `count` more, each the likeliest after a whole pass over what is there: (B, T + count), at most max_len.

    For a causal model the same as generation with a cache, which a bidirectional one cannot have: every new token changes all that was computed.
    """
    B, T = tokens.shape
    graph, state = nnx.split(model)
    buffer = jnp.concatenate([tokens, jnp.zeros((B, count), tokens.dtype)], axis=1)

    @jax.jit
    def fill(state: nnx.State, buffer: jax.Array) -> jax.Array:
        def one(length: jax.Array, buffer: jax.Array) -> jax.Array:
            logits, _ = nnx.merge(graph, state, copy=True)(buffer, lengths=jnp.full((B,), length))
            return buffer.at[:, length].set(jnp.argmax(logits[:, length - 1], axis=-1).astype(buffer.dtype))

        return jax.lax.fori_loop(T, T + count, one, buffer)

    return fill(state, buffer)

"""A probe: trains a small network to measure how much of some targets the given inputs explain."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

MOST_INPUTS = 2048  # more are reduced to so many random projections
WIDTH = 128  # inputs are padded to a multiple of it
HIDDEN, STEPS, CHECKS, BATCH = 64, 600, 12, 256


class _Probe(nn.Module):
  outputs: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    for _ in range(2):
      x = nn.silu(nn.LayerNorm()(nn.Dense(HIDDEN)(x)))
    return nn.Dense(self.outputs)(x)


def explained(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
  """Share of each target's variance that a network predicts from the inputs, on held-out steps.

  The network is trained on the first half of the steps and tested on the second.

  Args:
    inputs: [S, F] float32, F numbers at each of S steps, S at least 512.
    targets: [S, D] float32, D numbers to predict at each step.

  Returns:
    [D] float32 in [0, 1], the best share of each target during training; 0 if a target is constant.
  """
  # Sizes in large steps, so that programs are compiled once.
  half = len(targets) // (2 * BATCH) * BATCH
  mean, scale = targets[:half].mean(0), targets[:half].std(0)
  targets = (targets - mean) / np.maximum(scale, 1e-6)
  inputs = _standardised(_projected(np.asarray(inputs, np.float32)), half)
  inputs = np.pad(inputs, ((0, 0), (0, -inputs.shape[1] % WIDTH)))
  other = slice(half, 2 * half)
  return np.asarray(_fit(inputs[:half], targets[:half], inputs[other], targets[other]))


def _projected(inputs: np.ndarray) -> np.ndarray:
  width = inputs.shape[1]
  if width <= MOST_INPUTS:
    return inputs
  random = np.random.default_rng(0).normal(size=(width, MOST_INPUTS)) / np.sqrt(width)
  return inputs @ random.astype(np.float32)


def _standardised(inputs: np.ndarray, half: int) -> np.ndarray:
  inputs = np.sign(inputs) * np.log1p(np.abs(inputs))
  mean, scale = inputs[:half].mean(0), inputs[:half].std(0)
  return np.clip((inputs - mean) / np.maximum(scale, 0.1), -5.0, 5.0)


@jax.jit
def _fit(inputs, targets, other_inputs, other_targets) -> jax.Array:
  """Trains a probe; returns [D], the largest share of the variance of `other_targets` that it explained."""
  probe = _Probe(targets.shape[-1])
  init_key, key = jax.random.split(jax.random.key(0))
  params = probe.init(init_key, inputs[:1])
  optimizer = optax.adamw(3e-3, weight_decay=1e-2)

  def loss(params, x, y):
    return jnp.mean(jnp.square(probe.apply(params, x) - y))

  def step(carry, key):
    params, state = carry
    at = jax.random.randint(key, (BATCH,), 0, len(inputs))
    grads = jax.grad(loss)(params, inputs[at], targets[at])
    updates, state = optimizer.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  def part(carry, keys):
    carry, _ = jax.lax.scan(step, carry, keys)
    error = jnp.square(probe.apply(carry[0], other_inputs) - other_targets)
    variance = jnp.square(other_targets - other_targets.mean(0))
    share = 1 - error.sum(0) / jnp.maximum(variance.sum(0), 1e-6)
    return carry, jnp.where(variance.sum(0) > 1e-6, share, 0.0)

  keys = jax.random.split(key, STEPS).reshape(CHECKS, -1)
  _, shares = jax.lax.scan(part, (params, optimizer.init(params)), keys)
  return jnp.maximum(jnp.max(shares, axis=0), 0.0)

"""Context modules: summaries of earlier steps, which actor and critic read with the features.

`NoContext` is empty, without memory or parameters. `workspace.Workspace` gives a context that the actor
reads in place of the features. `Salience` pools the features f of the last W steps of the episode by
attention with learned scores:

    score_i = MLP([f_i, log(1 + novelty_i)])      w = softmax(score)      context = sum_i w_i f_i
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from hephaestus.agents import networks
from hephaestus.agents.dreamer import modules as modules_lib

Features = modules_lib.Features
Tree = Any


class Context(Protocol):
  """Interface of context modules; all methods are pure functions.

  A context is a vector [C] that summarises the steps up to one step. A memory is the state between steps
  that acting and imagination carry along. A history is what contexts of R known steps are computed from
  at once, inside a gradient: their memories, or the steps themselves. Both are trees of arrays.

  Attributes:
    size: C, width of a context.
  """

  @property
  def size(self) -> int: ...

  def modules(self) -> dict[str, tuple[networks.MLP, int]]:
    """Networks by name, each with the width of its input; empty if nothing is learned."""

  def initial(self, batch: int) -> Tree:
    """The memory before any step, for `batch` streams."""

  def advance(
    self, params: Tree, memory: Tree, features: Features, novelty: Any, begins: jax.Array
  ) -> tuple[Tree, jax.Array]:
    """Advances the memory by one step of B streams.

    Args:
      params: parameters of the actor-critic, by network.
      memory: memory of the steps before.
      features: [B, ...], features of the step.
      novelty: [B] float32, novelty of the transition to the step; for a workspace, `workspace.Terms`.
      begins: [B] bool, steps without a previous step of their episode, which clear the memory.

    Returns:
      The next memory, and the context of the step, [B, C].
    """

  def replayed(self, features: Features, novelty: Any, begins: jax.Array) -> Tree:
    """The history of replayed steps, whose step 0 counts as the beginning of an episode.

    Args:
      features: [T, B, ...].
      novelty: [T, B] float32, or as in `advance`.
      begins: [T, B] bool, FIRST steps.
    """

  def memory_at(self, history: Tree, step: jax.Array, stream: jax.Array) -> Tree:
    """The memories before S steps of a history of replayed steps.

    Args:
      history: from `replayed`.
      step: [S] int32, time index of each step.
      stream: [S] int32, batch index of each step.
    """

  def imagined(self, memory: Tree, features: Features, novelty: Any, begins: jax.Array) -> Tree:
    """The history of starts and the steps imagined after them.

    Args:
      memory: memory of the steps before the starts.
      features: [H, B, ...], features of the starts and the steps after them.
      novelty: [H, B] float32, or as in `advance`.
      begins: [B] bool, starts without a previous step of their episode.
    """

  def cut(self, history: Tree, first: jax.Array | int, count: int) -> Tree:
    """The history of the `count` steps from step `first` on, with the earlier steps that they pool."""

  def pool(self, params: Tree, history: Tree, features: Features) -> jax.Array:
    """The contexts [R, B, C] of the R steps of a history, whose features are [R, B, ...]."""

  def weights(self, params: Tree, history: Tree, num_steps: int) -> jax.Array:
    """Weights of the last W steps in the contexts, [R, B, W] float32, oldest first; they sum to 1.

    Args:
      params: parameters of the actor-critic, by network.
      history: history of R steps.
      num_steps: R.
    """


@dataclasses.dataclass(frozen=True)
class NoContext:
  """The empty context: actor and critic read only the features of the step."""

  size: int = 0

  def modules(self) -> dict[str, tuple[networks.MLP, int]]:
    return {}

  def initial(self, batch: int) -> Tree:
    return ()

  def advance(
    self, params: Tree, memory: Tree, features: Features, novelty: jax.Array, begins: jax.Array
  ) -> tuple[Tree, jax.Array]:
    return (), features.state[..., :0]

  def replayed(self, features: Features, novelty: jax.Array, begins: jax.Array) -> Tree:
    return ()

  def memory_at(self, history: Tree, step: jax.Array, stream: jax.Array) -> Tree:
    return ()

  def imagined(
    self, memory: Tree, features: Features, novelty: jax.Array, begins: jax.Array
  ) -> Tree:
    return ()

  def cut(self, history: Tree, first: jax.Array | int, count: int) -> Tree:
    return ()

  def pool(self, params: Tree, history: Tree, features: Features) -> jax.Array:
    return features.state[..., :0]

  def weights(self, params: Tree, history: Tree, num_steps: int) -> jax.Array:
    return jnp.ones((num_steps, 1, 1), jnp.float32)


class Window(NamedTuple):
  """S consecutive steps, oldest first: S = W - 1 as a memory, W - 1 + R as a history of R steps.

  Attributes:
    features: [S, B, F] in the compute dtype, all features of a step, concatenated.
    novelty: [S, B] float32.
    episode: [S, B] int32, number of the episode; a step pools only steps of its own episode.
  """

  features: jax.Array
  novelty: jax.Array
  episode: jax.Array


@dataclasses.dataclass(frozen=True)
class Salience:
  """Pools the features of the last W steps by attention; see the equations of this module.

  Attributes:
    window: W, at least 2.
    feature_size: F, width of the features and of the context.
    hidden_size: width of the hidden layer of the scores' MLP.
    dtype: dtype of the computation.
  """

  window: int
  feature_size: int
  hidden_size: int
  dtype: Any

  @property
  def size(self) -> int:
    return self.feature_size

  def modules(self) -> dict[str, tuple[networks.MLP, int]]:
    module = networks.MLP(self.hidden_size, 1, 1, 0.1, dtype=self.dtype)
    return {'salience': (module, self.feature_size + 1)}

  def initial(self, batch: int) -> Window:
    """Empty steps of episode -1, which no step pools, since an actor's first step is FIRST."""
    before = self.window - 1
    return Window(
      features=jnp.zeros((before, batch, self.feature_size), self.dtype),
      novelty=jnp.zeros((before, batch), jnp.float32),
      episode=jnp.full((before, batch), -1, jnp.int32),
    )

  def advance(
    self, params: Tree, memory: Window, features: Features, novelty: jax.Array, begins: jax.Array
  ) -> tuple[Window, jax.Array]:
    features, novelty = jax.tree.map(lambda x: x[None], (features, novelty))
    window = self.imagined(memory, features, novelty, begins)
    context = self.pool(params, window, features)[0]
    return jax.tree.map(lambda x: x[1:], window), context

  def replayed(self, features: Features, novelty: jax.Array, begins: jax.Array) -> Window:
    """See `Context.replayed`; steps before the sequence are of episode -1, which no step pools."""

    def before(x: jax.Array, fill: int) -> jax.Array:
      padding = ((self.window - 1, 0), *[(0, 0)] * (x.ndim - 1))
      return jnp.pad(x, padding, constant_values=fill)

    episode = jnp.cumsum(begins.at[0].set(True), axis=0, dtype=jnp.int32) - 1
    return Window(before(_joined(features), 0), before(novelty, 0), before(episode, -1))

  def memory_at(self, history: Window, step: jax.Array, stream: jax.Array) -> Window:
    index = step + jnp.arange(self.window - 1)[:, None]  # into a history that begins W - 1 earlier
    return jax.tree.map(lambda x: x[index, stream], history)

  def imagined(
    self, memory: Window, features: Features, novelty: jax.Array, begins: jax.Array
  ) -> Window:
    episode = jnp.broadcast_to(memory.episode[-1] + begins, novelty.shape)
    window: Window = jax.tree.map(
      lambda before, after: jnp.concatenate([before, after]),
      memory,
      Window(_joined(features), novelty, episode),
    )
    return window

  def cut(self, history: Window, first: jax.Array | int, count: int) -> Window:
    size = self.window - 1 + count
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, size), history)

  def pool(self, params: Tree, history: Window, features: Features) -> jax.Array:
    """See `Context.pool`; one matrix product for each stream."""
    del features
    weights = self._weights(self.scores(params, history), history)
    return jnp.einsum('rwb,wbf->rbf', weights.astype(history.features.dtype), history.features)

  def scores(self, params: Tree, history: Window) -> jax.Array:
    """Attention logits of the W - 1 + R steps of a history of R steps, [W - 1 + R, B] float32."""
    novelty = jnp.log1p(history.novelty)[..., None].astype(history.features.dtype)
    module, _ = self.modules()['salience']
    scores = networks.apply(module, params['salience'], history.features, novelty)
    return scores[..., 0].astype(jnp.float32)

  def _weights(self, scores: jax.Array, history: Window) -> jax.Array:
    """Attention weights, [R, W - 1 + R, B] float32; 0 outside a step's window and in other episodes."""
    before, total = self.window - 1, len(history.episode)
    age = jnp.arange(before, total)[:, None] - jnp.arange(total)
    same = history.episode == history.episode[before:, None]
    counts = same & ((age >= 0) & (age <= before))[..., None]
    return jax.nn.softmax(jnp.where(counts, scores, -jnp.inf), axis=1)

  def weights(self, params: Tree, history: Window, num_steps: int) -> jax.Array:
    weights = self._weights(self.scores(params, history), history)
    step = jnp.arange(num_steps)[:, None]
    return jnp.swapaxes(weights[step, step + jnp.arange(self.window)], 1, 2)


def _joined(features: Features) -> jax.Array:
  """All features of a step, concatenated, [..., F]."""
  parts = [features.state, features.recalled, features.numbers, features.transition]
  return jnp.concatenate(parts, axis=-1)


def make_context(sizes: modules_lib.Networks) -> Context:
  """The context module of a config: `Salience` over `window` steps, `NoContext` for a window of 1."""
  config = sizes.config
  if config.window == 1:
    return NoContext()
  feature_size = sum(x.shape[-1] for x in sizes.empty_features(1))
  return Salience(config.window, feature_size, config.hidden_size, config.dtype)

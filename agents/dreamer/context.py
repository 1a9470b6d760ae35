"""Context modules: summaries of earlier steps, which actor and critic read beside the features.

`NoContext` is empty, without memory or parameters. `workspace.Workspace` is in place of the features
for the actor. `Salience` pools the features of the last W
steps of the episode by learned weights:

    score_i = MLP([f_i, log(1 + novelty_i)])      w = softmax(score)      context = sum_i w_i f_i
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from hephaestus.agents import networks
from hephaestus.agents.dreamer import config as dreamer_config

Tree = Any


class Context(Protocol):
  """A module beside actor and critic; its methods are pure functions of their parameters.

  A history holds the steps that contexts are pooled from; a memory, the part of it before a step.

  Attributes:
    size: C, of a context.
  """

  @property
  def size(self) -> int: ...

  def modules(self) -> dict[str, tuple[networks.MLP, int]]:
    """Networks by name, with the number of their inputs."""

  def initial(self, batch: int) -> Tree:
    """The memory before any step."""

  def advance(
    self, params: Tree, memory: Tree, features: jax.Array, novelty: Any, begins: jax.Array
  ) -> tuple[Tree, jax.Array]:
    """One step: the next memory, and the context [B, C] of the step.

    Args:
      params: by name.
      memory: of the steps before.
      features: [B, F].
      novelty: [B] float32; of a workspace, `workspace.Terms`.
      begins: [B] bool, steps without a previous step of their episode.
    """

  def replayed(self, features: jax.Array, novelty: Any, begins: jax.Array) -> Tree:
    """The history of [T, B, ...] replayed steps; step 0 counts as the begin of an episode."""

  def memory_at(self, history: Tree, step: jax.Array, stream: jax.Array) -> Tree:
    """Memories of S steps, before step [S] of stream [S] of a history of replayed steps."""

  def imagined(self, memory: Tree, features: jax.Array, novelty: Any, begins: jax.Array) -> Tree:
    """The history of a start and the steps imagined after it.

    Args:
      memory: of the steps before the start.
      features: [H, B, F].
      novelty: [H, B] float32, or as in `advance`.
      begins: [B] bool, of the starts.
    """

  def cut(self, history: Tree, first: jax.Array | int, count: int) -> Tree:
    """The part of a history for `count` steps from step `first` on."""

  def pool(self, params: Tree, history: Tree, features: jax.Array) -> jax.Array:
    """The contexts [R, B, C] of the steps of a history, with features [R, B, F]."""

  def weights(self, params: Tree, history: Tree, num_steps: int) -> jax.Array:
    """[R, B, W] float32, weights of the last W steps, oldest first; they sum to 1."""


@dataclasses.dataclass(frozen=True)
class NoContext:
  """Actor and critic read a step alone."""

  size: int = 0

  def modules(self) -> dict[str, tuple[networks.MLP, int]]:
    return {}

  def initial(self, batch: int) -> Tree:
    return ()

  def advance(
    self, params: Tree, memory: Tree, features: jax.Array, novelty: jax.Array, begins: jax.Array
  ) -> tuple[Tree, jax.Array]:
    return (), features[..., :0]

  def replayed(self, features: jax.Array, novelty: jax.Array, begins: jax.Array) -> Tree:
    return ()

  def memory_at(self, history: Tree, step: jax.Array, stream: jax.Array) -> Tree:
    return ()

  def imagined(
    self, memory: Tree, features: jax.Array, novelty: jax.Array, begins: jax.Array
  ) -> Tree:
    return ()

  def cut(self, history: Tree, first: jax.Array | int, count: int) -> Tree:
    return ()

  def pool(self, params: Tree, history: Tree, features: jax.Array) -> jax.Array:
    return features[..., :0]

  def weights(self, params: Tree, history: Tree, num_steps: int) -> jax.Array:
    return jnp.ones((num_steps, 1, 1), jnp.float32)


class Window(NamedTuple):
  """Consecutive steps, oldest first: W - 1 as a memory, W - 1 + R as a history of R steps.

  Attributes:
    features: [W, B, F] in the compute dtype.
    novelty: [W, B] float32.
    episode: [W, B] int32, a count of episodes; a step reads only steps of its own episode.
  """

  features: jax.Array
  novelty: jax.Array
  episode: jax.Array


@dataclasses.dataclass(frozen=True)
class Salience:
  """Pools a window of steps by salience.

  Attributes:
    window: W, at least 2.
    feature_size: F.
    hidden_size: of the scores' network.
    dtype: of the computation.
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
    """Steps of episode -1, which no step reads, since an actor's first step is FIRST."""
    before = self.window - 1
    return Window(
      features=jnp.zeros((before, batch, self.feature_size), self.dtype),
      novelty=jnp.zeros((before, batch), jnp.float32),
      episode=jnp.full((before, batch), -1, jnp.int32),
    )

  def advance(
    self, params: Tree, memory: Window, features: jax.Array, novelty: jax.Array, begins: jax.Array
  ) -> tuple[Window, jax.Array]:
    window = self.imagined(memory, features[None], novelty[None], begins)
    context = self.pool(params, window, features[None])[0]
    return jax.tree.map(lambda x: x[1:], window), context

  def replayed(self, features: jax.Array, novelty: jax.Array, begins: jax.Array) -> Window:
    """Steps before the sequence belong to episode -1, which no step reads."""

    def before(x: jax.Array, fill: int) -> jax.Array:
      padding = ((self.window - 1, 0), *[(0, 0)] * (x.ndim - 1))
      return jnp.pad(x, padding, constant_values=fill)

    episode = jnp.cumsum(begins.at[0].set(True), axis=0, dtype=jnp.int32) - 1
    return Window(before(features, 0), before(novelty, 0), before(episode, -1))

  def memory_at(self, history: Window, step: jax.Array, stream: jax.Array) -> Window:
    index = step + jnp.arange(self.window - 1)[:, None]  # into a history that begins W - 1 earlier
    return jax.tree.map(lambda x: x[index, stream], history)

  def imagined(
    self, memory: Window, features: jax.Array, novelty: jax.Array, begins: jax.Array
  ) -> Window:
    episode = jnp.broadcast_to(memory.episode[-1] + begins, novelty.shape)
    window: Window = jax.tree.map(
      lambda before, after: jnp.concatenate([before, after]),
      memory,
      Window(features, novelty, episode),
    )
    return window

  def cut(self, history: Window, first: jax.Array | int, count: int) -> Window:
    size = self.window - 1 + count
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, size), history)

  def pool(self, params: Tree, history: Window, features: jax.Array) -> jax.Array:
    """One matrix product for each stream."""
    del features
    weights = self._weights(self.scores(params, history), history)
    return jnp.einsum('rwb,wbf->rbf', weights.astype(history.features.dtype), history.features)

  def scores(self, params: Tree, history: Window) -> jax.Array:
    """[W - 1 + R, B] float32 salience of the steps of a history."""
    novelty = jnp.log1p(history.novelty)[..., None].astype(history.features.dtype)
    module, _ = self.modules()['salience']
    scores = networks.apply(module, params['salience'], history.features, novelty)
    return scores[..., 0].astype(jnp.float32)

  def _weights(self, scores: jax.Array, history: Window) -> jax.Array:
    """[R, W - 1 + R, B] float32; 0 outside the window of a step and in other episodes."""
    before, total = self.window - 1, len(history.episode)
    age = jnp.arange(before, total)[:, None] - jnp.arange(total)
    same = history.episode == history.episode[before:, None]
    counts = same & ((age >= 0) & (age <= before))[..., None]
    return jax.nn.softmax(jnp.where(counts, scores, -jnp.inf), axis=1)

  def weights(self, params: Tree, history: Window, num_steps: int) -> jax.Array:
    weights = self._weights(self.scores(params, history), history)
    step = jnp.arange(num_steps)[:, None]
    return jnp.swapaxes(weights[step, step + jnp.arange(self.window)], 1, 2)


def make_context(config: dreamer_config.DreamerConfig, feature_size: int) -> Context:
  """Salience over `config.window` steps; no context for a window of one step."""
  if config.window == 1:
    return NoContext()
  return Salience(config.window, feature_size, config.hidden_size, config.dtype)

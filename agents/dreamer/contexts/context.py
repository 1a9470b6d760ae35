"""Interface of context modules: summaries of earlier steps, which actor and critic read with the features."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hephaestus.agents import networks as networks_lib
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import modules, rssm

Tree = Any
Features = modules.Features
Towers = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]
"""Both inputs of a `networks.TwoTowers`."""


@dataclasses.dataclass(frozen=True)
class Context:
  """A context module; this one is empty, and actor and critic read only the features of the step.

  A context is a vector [C] that summarises the steps up to one step. A memory is the state between steps
  that acting and imagination carry along. A history is what contexts of R known steps are computed from
  at once, inside a gradient: their memories, or the steps themselves. Both are trees of arrays.

  A module is a subclass, an entry of `registry.CONTEXTS`, and a field of the config that `is_on` reads; all
  methods are pure functions, and by default the context is empty.

  Attributes:
    networks: the networks of the world model, with the config and the specs of the environment.
  """

  networks: modules.Networks

  @classmethod
  def is_on(cls, config: dreamer_config.DreamerConfig) -> bool:
    """Whether a config switches the module on."""
    raise NotImplementedError

  @property
  def size(self) -> int:
    """C, width of a context."""
    return 0

  @property
  def of_critic(self) -> 'Context':
    """The context module of the critics, by default the same."""
    return self

  def modules(self) -> dict[str, tuple[networks_lib.MLP, int]]:
    """Networks by name, each with the width of its input; empty if nothing is learned."""
    return {}

  def towers(self, features: Features, context: jax.Array) -> Towers:
    """Both inputs of a network that reads features [..., ...] with contexts [..., C]."""
    state = jnp.concatenate([features.state, features.recalled], axis=-1)
    return (state, context), (features.numbers,)

  def inputs(self, params: Tree, step: rssm.Step, novelty: jax.Array) -> Tree:
    """Reads of a step all that the module needs besides the features; by default the novelty.

    A module that reads something else is no module of the critics, since their loss of the world model's
    features has no inputs but a novelty of 0: see `ActorCritic.latent_loss`.

    Args:
      params: parameters of the actor-critic, by network.
      step: a step [..., ...].
      novelty: [...] float32, its novelty.

    Returns:
      A tree of [..., ...] arrays.
    """
    return novelty

  def initial(self, batch: int) -> Tree:
    """The memory before any step, for `batch` streams."""
    return ()

  def advance(
    self, params: Tree, memory: Tree, features: Features, inputs: Tree, begins: jax.Array
  ) -> tuple[Tree, jax.Array]:
    """Advances the memory by one step of B streams.

    Args:
      params: parameters of the actor-critic, by network.
      memory: memory of the steps before.
      features: [B, ...], features of the step.
      inputs: [B, ...], the step's `inputs`.
      begins: [B] bool, steps without a previous step of their episode, which clear the memory.

    Returns:
      The next memory, and the context of the step, [B, C].
    """
    return (), features.state[..., :0]

  def replayed(self, features: Features, inputs: Tree, begins: jax.Array) -> Tree:
    """The history of replayed steps, whose step 0 counts as the beginning of an episode.

    Args:
      features: [T, B, ...].
      inputs: [T, B, ...], the steps' `inputs`.
      begins: [T, B] bool, FIRST steps.
    """
    return ()

  def memory_at(self, history: Tree, step: jax.Array, stream: jax.Array) -> Tree:
    """The memories before S steps of a history of replayed steps.

    Args:
      history: from `replayed`.
      step: [S] int32, time index of each step.
      stream: [S] int32, batch index of each step.
    """
    return ()

  def imagined(self, memory: Tree, features: Features, inputs: Tree, begins: jax.Array) -> Tree:
    """The history of starts and the steps imagined after them.

    Args:
      memory: memory of the steps before the starts.
      features: [H, B, ...], features of the starts and the steps after them.
      inputs: [H, B, ...], the steps' `inputs`.
      begins: [B] bool, starts without a previous step of their episode.
    """
    return ()

  def cut(self, history: Tree, first: jax.Array | int, count: int) -> Tree:
    """The history of the `count` steps from step `first` on, with the earlier steps that they pool."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, count), history)

  def pool(self, params: Tree, history: Tree, features: Features) -> jax.Array:
    """The contexts [R, B, C] of the R steps of a history, whose features are [R, B, ...]."""
    return features.state[..., :0]

  def weights(self, params: Tree, history: Tree, num_steps: int) -> jax.Array:
    """Weights of the last W steps in the contexts, [R, B, W] float32, oldest first; they sum to 1.

    By default W = 1, and the weight of the step itself is 1: [R, 1, 1] for all streams.

    Args:
      params: parameters of the actor-critic, by network.
      history: history of R steps.
      num_steps: R.
    """
    return jnp.ones((num_steps, 1, 1), jnp.float32)

  def loss(
    self, params: Tree, features: Features, action: jax.Array, error: jax.Array
  ) -> jax.Array | None:
    """Loss of the module's own at replayed steps, [...] float32; by default None: only the actor trains it.

    Args:
      params: parameters of the actor-critic, by network.
      features: [..., ...], features of the steps.
      action: [..., A] float32, encoded actions that were taken there.
      error: [...] float32, errors of the critic that followed, see `ActorCritic.context_loss`.
    """
    return None

  def explain(self, context: jax.Array) -> Tree:
    """Extras of `Agent.explain` from [N, C] contexts, by name."""
    return {}

  def metrics(
    self,
    params: Tree,
    history: Tree,
    features: Features,
    mean: Callable[[jax.Array], jax.Array],
  ) -> dict[str, jax.Array]:
    """Metrics [] of replayed steps, by their full names; `mean` is over the batch of all devices."""
    return {}

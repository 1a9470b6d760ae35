"""Workspace: parts of the state compete for it, and the actor reads only those that are open.

    score_i   query(h) key(x_i) / sqrt(32) + N_i + 0.6 dN_i + 0.4 sqrt(ln t / n_i) + 1.5 D_i
    open_i    score_i is among the k largest, and above `workspace_cost`
    read      actor([open_1 x_1, ..., open_1, ...])      critic(everything)

over candidates i: leaves x_i of the observation, and what the episodic memory recalls. N is a
candidate's novelty, dN its change since the step before, t the steps of the episode so far and n how
often the candidate was open in them, both from 1; D is the lack of the leaf's vitals. Contents stay in
their places, and are 0 where closed.

A gate is 0 or 1, and its gradient is that of sigmoid(score - rival): "straight-through", as in Bengio
et al. (2013), "Estimating or propagating gradients through stochastic neurons". The rival is the score
that would have to be passed. Candidates that compete by keys and a query are those of Goyal et al.
(2021), "Coordination among neural modules through a shared global workspace".
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.agents import networks
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import intrinsic, modules
from hephaestus.agents.dreamer import numbers as numbers_lib

Tree = Any

KEY_SIZE = 32
NOVELTY, CHANGE, VISITS, VITALS = 1.0, 0.6, 0.4, 1.5
"""Weights of the terms of a score that are not learned."""
RECALL = 'recall'
"""The candidate that the episodic memory gives; it has no novelty."""


class Terms(NamedTuple):
  """Terms of the scores at some steps that do not depend on the steps before.

  Attributes:
    learned: [..., N] float32.
    novelty: [..., N] float32.
    lack: [..., N] float32, of vitals.
  """

  learned: jax.Array
  novelty: jax.Array
  lack: jax.Array


class Past(NamedTuple):
  """The past of an episode, as far as scores depend on it; the memory of the module.

  Attributes:
    novelty: [..., N] float32, of the step before.
    opened: [..., N] float32, 1 and how often each candidate was open.
    steps: [...] float32, 1 and the number of steps.
  """

  novelty: jax.Array
  opened: jax.Array
  steps: jax.Array


class History(NamedTuple):
  """A history of R steps.

  Attributes:
    before: [R, B, ...] of each step.
    bonus: [R, B, N] float32, the scores without the learned term.
  """

  before: Past
  bonus: jax.Array


@dataclasses.dataclass(frozen=True)
class Workspace:
  """The workspace of one environment, a context module: see `context.Context`.

  Attributes:
    networks: of the world model.
  """

  networks: modules.Networks

  def __post_init__(self):
    """Raises ValueError for an observation without candidates, or with fewer than may be open."""
    networks, spec = self.networks, self.networks.observation_spec
    given, remedy = f'agent.workspace_size={networks.config.workspace_size}', 'workspace_size=0'
    if not isinstance(spec, dict):
      raise ValueError(
        f'{given}: the leaves of an observation compete for the workspace, and this one is a single array; '
        f'give the environment a dictionary, or set agent.{remedy}'
      )
    if networks.codec.image_specs:
      raise ValueError(
        f'{given}: this observation has an image, which imagination does not decode; '
        f'agent.image_channels=0 reads it as numbers, else set agent.{remedy}'
      )
    if networks.config.workspace_size > len(self.names):
      raise ValueError(
        f'{given}: there are only {len(self.names)} candidates ({", ".join(self.names)}); set at most '
        f'agent.workspace_size={len(self.names)}'
      )

  @functools.cached_property
  def names(self) -> tuple[str, ...]:
    """Candidates: leaves in the order of the observation, then what is recalled."""
    leaves = jax.tree_util.tree_leaves_with_path(
      observation_lib.without_mask(self.networks.observation_spec)
    )
    names = ['_'.join(str(getattr(at, 'key', at)) for at in path) for path, _ in leaves]
    return (*names, *([RECALL] if self.networks.recalled_size else []))

  @functools.cached_property
  def _owner(self) -> np.ndarray:
    """[I] int, the candidate of each number of `_contents`."""
    recalled = np.full(self.networks.recalled_size, len(self.names) - 1)
    return np.concatenate([recalled, self.networks.numbers.leaves])

  @functools.cached_property
  def _places(self) -> tuple[np.ndarray, np.ndarray]:
    """[N, M] int, places in `_contents` of each candidate's numbers, and [N, M] bool, which are there."""
    owned = self._owner == np.arange(len(self.names))[:, None]
    width = max(owned.sum(axis=1))
    places = np.argsort(~owned, axis=1, kind='stable')[:, :width]
    return places, np.take_along_axis(owned, places, axis=1)

  @property
  def size(self) -> int:
    return len(self._owner) + len(self.names)

  def modules(self) -> dict[str, tuple[Any, int]]:
    config, count = self.networks.config, len(self.names)
    if config.workspace_score != 'learned':
      return {}
    mlp = lambda scale: networks.MLP(config.hidden_size, 1, KEY_SIZE, scale, raw=True)
    width = self._places[0].shape[1] + count
    return {'query': (mlp(1.0), config.deterministic_size), 'key': (mlp(0.1), width)}

  # Scores and gates.

  def terms(
    self, params: Tree, features: jax.Array, numbers: jax.Array, change: numbers_lib.Change
  ) -> Terms:
    """Terms of the scores at some steps.

    Args:
      params: by name.
      features: [..., F].
      numbers: [..., F'] float32 of the world model's state.
      change: of the numbers, as its members predict it, [K, ..., C].
    """
    means, variances = self.networks.numbers.changes_of_inputs(change)
    kind = self.networks.config.novelty
    gain = intrinsic.novelty_of(kind, ((means[..., None], variances[..., None]),))
    leaves = self.networks.numbers.leaves[: gain.shape[-1]]
    share = (leaves[:, None] == np.arange(len(self.names))).astype(np.float32)
    share /= np.maximum(share.sum(axis=0), 1)
    novelty = jnp.matmul(gain, share, precision=jax.lax.Precision.HIGHEST)
    return Terms(self._learned(params, features), novelty, self._lack(numbers))

  def _lack(self, numbers: jax.Array) -> jax.Array:
    """[..., F'] numbers to D, [..., N] float32: 0 of a candidate without vitals."""
    spec = self.networks.codec.flat_spec
    lacks = [jnp.zeros(numbers.shape[:-1])] * len(self.names)
    begin = 0
    for i, leaf in enumerate(jax.tree.leaves(observation_lib.without_mask(spec))):
      found = observation_lib.vitals(leaf)
      if found is not None:
        vitals = self.networks.numbers.pick(numbers, begin + found.indices)
        lacks[i] = intrinsic.lack(vitals, found.set_points)
      begin += int(np.prod(leaf.shape))
    return jnp.stack(lacks, axis=-1)

  def _learned(self, params: Tree, features: jax.Array) -> jax.Array:
    """The learned term of [..., F] features, [..., N] float32."""
    shape = (*features.shape[:-1], len(self.names))
    if not self.modules():
      return jnp.zeros(shape)
    places, there = self._places
    contents = self._contents(features).astype(jnp.float32)
    contents = jnp.where(there, contents[..., places], 0.0)
    identity = jnp.broadcast_to(np.eye(len(self.names), dtype=np.float32), (*shape, shape[-1]))
    belief = features[..., : self.networks.config.deterministic_size].astype(jnp.float32)
    # Bounded, so that what is learned does not soon outweigh the other terms at every step.
    read = lambda name, *inputs: jnp.tanh(
      networks.apply(self.modules()[name][0], params[name], *inputs)
    )
    product = jnp.sum(
      read('query', belief)[..., None, :] * read('key', contents, identity), axis=-1
    )
    return product / np.float32(np.sqrt(KEY_SIZE))

  def _contents(self, features: jax.Array) -> jax.Array:
    """[..., F] features to those of all candidates: what is recalled, and inputs of the numbers."""
    sizes = self.networks
    begin = sizes.memory_size - sizes.recalled_size
    return features[..., begin : sizes.memory_size + sizes.numbers.input_size]

  def _bonus(self, before: Past, terms: Terms) -> jax.Array:
    """Scores without the learned term, [..., N] float32."""
    config, shape = self.networks.config, terms.novelty.shape
    if config.workspace_score == 'random':
      draw = lambda step: jax.random.uniform(
        jax.random.fold_in(jax.random.key(0), step), shape[-1:]
      )
      steps = before.steps.astype(jnp.int32)
      return config.workspace_cost + jax.vmap(draw)(steps.reshape(-1)).reshape(shape)
    if config.workspace_score == 'fixed':
      order = 1.0 - jnp.arange(shape[-1]) / shape[-1]
      return config.workspace_cost + jnp.broadcast_to(order, shape)
    visits = jnp.sqrt(jnp.log(before.steps)[..., None] / before.opened)
    change = terms.novelty - before.novelty
    bonus = NOVELTY * terms.novelty + CHANGE * change + VISITS * visits + VITALS * terms.lack
    return jax.lax.stop_gradient(bonus)

  def gate(self, scores: jax.Array) -> jax.Array:
    """[..., N] float32 scores to 1 where open, else 0; of equals the first are open."""
    config, place = self.networks.config, np.arange(scores.shape[-1])
    one, other = scores[..., :, None], scores[..., None, :]
    passed_by = (other > one) | ((other == one) & (place < place[:, None]))
    best = jnp.sum(passed_by, axis=-1) < config.workspace_size
    least = jnp.min(jnp.where(best, scores, jnp.inf), axis=-1, keepdims=True)
    next_ = jnp.max(jnp.where(best, -jnp.inf, scores), axis=-1, keepdims=True)
    rival = jnp.maximum(jnp.where(best, next_, least), config.workspace_cost)
    soft = jax.nn.sigmoid(scores - rival)
    is_open = (best & (scores > config.workspace_cost)).astype(jnp.float32)
    return is_open + (soft - jax.lax.stop_gradient(soft))

  def _read(self, features: jax.Array, gate: jax.Array) -> jax.Array:
    """The context [..., C] of [..., F] features with [..., N] gates."""
    gate = gate.astype(features.dtype)
    return jnp.concatenate([gate[..., self._owner] * self._contents(features), gate], axis=-1)

  def opened(self, context: jax.Array) -> dict[str, jax.Array]:
    """[..., C] contexts to the gate of each candidate, [...] by its name."""
    gates = context[..., len(self._owner) :]
    return {name: gates[..., i] for i, name in enumerate(self.names)}

  # As a context module.

  def initial(self, batch: int) -> Past:
    candidates = (batch, len(self.names))
    return Past(jnp.zeros(candidates), jnp.ones(candidates), jnp.ones(batch))

  def _step(self, memory: Past, terms: Terms, begins: jax.Array) -> tuple[Past, History, jax.Array]:
    """One step [B, ...]: the next memory, its history without an axis of steps, and its gates."""
    initial = self.initial(len(begins))._replace(novelty=terms.novelty)
    clear = lambda new, old: jnp.where(begins.reshape(-1, *[1] * (old.ndim - 1)), new, old)
    memory = jax.tree.map(clear, initial, memory)
    bonus = self._bonus(memory, terms)
    gate = jax.lax.stop_gradient(self.gate(terms.learned + bonus))
    after = Past(terms.novelty, memory.opened + gate, memory.steps + 1)
    return after, History(memory, bonus), gate

  def advance(
    self, params: Tree, memory: Past, features: jax.Array, terms: Terms, begins: jax.Array
  ) -> tuple[Past, jax.Array]:
    memory, _, gate = self._step(memory, terms, begins)
    return memory, self._read(features, gate)

  def replayed(self, features: jax.Array, terms: Terms, begins: jax.Array) -> History:
    return self._follow(self.initial(begins.shape[1]), terms, begins.at[0].set(True))

  def memory_at(self, history: History, step: jax.Array, stream: jax.Array) -> Past:
    memory: Past = jax.tree.map(lambda x: x[step, stream], history.before)
    return memory

  def imagined(self, memory: Past, features: jax.Array, terms: Terms, begins: jax.Array) -> History:
    all_begins = jnp.zeros(terms.novelty.shape[:2], bool).at[0].set(begins)
    return self._follow(memory, terms, all_begins)

  def _follow(self, memory: Past, terms: Terms, begins: jax.Array) -> History:
    step = lambda memory, inputs: self._step(memory, *inputs)[:2]
    _, history = jax.lax.scan(step, memory, (terms, begins))
    return history

  def cut(self, history: History, first: jax.Array | int, count: int) -> History:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, count), history)

  def pool(self, params: Tree, history: History, features: jax.Array) -> jax.Array:
    return self._read(features, self.gates(params, history, features))

  def gates(self, params: Tree, history: History, features: jax.Array) -> jax.Array:
    """[R, B, N] float32, the gates of the steps of a history, with features [R, B, F]."""
    return self.gate(self._learned(params, features) + history.bonus)

  def weights(self, params: Tree, history: History, num_steps: int) -> jax.Array:
    """No step but the last counts."""
    return jnp.ones((num_steps, 1, 1), jnp.float32)

  def metrics(self, share: jax.Array) -> dict[str, jax.Array]:
    """Metrics of [N] shares of steps at which each candidate is open: how many, and their entropy."""
    total = jnp.sum(share)
    entropy = jnp.sum(jax.scipy.special.entr(share / jnp.maximum(total, 1e-8)))
    shares = {f'share_{name}': share[i] for i, name in enumerate(self.names)}
    return {'open': total, 'entropy': entropy} | shares


def make_workspace(networks: modules.Networks) -> Workspace | None:
  """None where `workspace_size` is 0."""
  return Workspace(networks) if networks.config.workspace_size else None

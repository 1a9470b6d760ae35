"""Workspace: a bottleneck in front of the actor, which reads only the k candidates of best score.

    score_i   query(h) key(x_i) / sqrt(32) + N_i + 0.6 dN_i + 0.4 sqrt(ln t / n_i) + 1.5 D_i
    open_i    score_i is among the k = `workspace_size` largest, and above 0
    read      actor([open_1 x_1, ..., open_1, ...])      critic(everything)

over candidates i: parts x_i of the observation (its leaves, or groups of the numbers of a single array, see
`observation.parts`), the slots of its image, and what the episodic memory recalls. h is the GRU's
state. N is a candidate's novelty, dN its change since the step before, t the steps of the episode so far
and n how often the candidate was open in them, both from 1; D is the lack of the part's vitals, see
`survival.lack`. Contents keep their positions in the actor's input, and are 0 where closed.

With `workspace_score=gain` the first term is ln(N w_i), for N candidates, and queries and keys learn by another loss
than the actor's: a head predicts from each candidate by itself, and the action a, how far the critic's value proves
wrong, delta = r + gamma V' - V:

    loss      -ln sum_i w_i N(delta; q(x_i, a), 1) - 0.001 / N sum_i ln w_i
    w         softmax_i( query(h) key(x_i) / sqrt(32) )

over replayed steps, in units of `return_floor`: a mixture of experts (Jacobs et al., 1991), whose weights
turn to the candidate from which the critic gains most. The return itself would not do: where a policy has not yet
learned what to do about a candidate, its value does not depend on it. The last term keeps weights even where
there is nothing to gain: the optimizer, which normalises gradients, would turn them to one candidate all the same.

A gate is 0 or 1, and its gradient is the gradient of sigmoid(score - rival): "straight-through", as in Bengio
et al. (2013), "Estimating or propagating gradients through stochastic neurons". The rival is the score
at which the gate would switch. Competition of candidates by keys and a query is as in Goyal et al.
(2021), "Coordination among neural modules through a shared global workspace".
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.agents import networks
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.cognition import survival
from hephaestus.agents.dreamer import modules, rssm, sockets
from hephaestus.agents.dreamer import novelty as novelty_lib
from hephaestus.agents.dreamer import numbers as numbers_lib

Features = modules.Features
Tree = sockets.Tree

NAME = 'workspace'
KEY_SIZE = 32
NOVELTY, CHANGE, VISITS, VITALS = 1.0, 0.6, 0.4, 1.5
"""Weights of the terms N, dN, the visits term and D of a score, which are not learned."""
GAIN = 'gain'
"""Name of the head q, and of the score that it trains."""
EVENNESS = 0.001
"""Weight of the loss that keeps the weights w even."""
RECALL = 'recall'
"""Name of the candidate that the episodic memory gives; its novelty is 0, as the novelty of slots."""


class Terms(NamedTuple):
  """Terms of the scores of N candidates that do not depend on earlier steps.

  Attributes:
    learned: [..., N] float32, query times key.
    novelty: [..., N] float32, novelty of each candidate.
    lack: [..., N] float32, lack D of each candidate's vitals; 0 without vitals.
  """

  learned: jax.Array
  novelty: jax.Array
  lack: jax.Array


class Past(NamedTuple):
  """The module's memory: what scores need of the episode's earlier steps.

  Attributes:
    novelty: [..., N] float32, novelty of each candidate at the step before.
    opened: [..., N] float32, n: 1 plus how often each candidate was open.
    steps: [...] float32, t: 1 plus the number of earlier steps.
  """

  novelty: jax.Array
  opened: jax.Array
  steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Workspace(sockets.Context):
  """The workspace as a context module, for the specs of one environment; only actors read its context.

  Raises:
    ValueError: the observation has an image for a CNN, or fewer candidates than `workspace_size`.
  """

  replaces_features = True

  def __post_init__(self):
    networks = self.networks
    given = f'agent.workspace_size={networks.config.workspace_size}'
    if networks.cnn_specs:
      raise ValueError(
        f'{given}: this observation has an image, which imagination does not decode; agent.slots=8 reads it '
        'by slots and agent.image_channels=0 as numbers, both of which are candidates, else set '
        'agent.workspace_size=0'
      )
    if networks.config.workspace_size > len(self.names):
      raise ValueError(
        f'{given}: there are only {len(self.names)} candidates ({", ".join(self.names)}); set at most '
        f'agent.workspace_size={len(self.names)}'
      )

  @functools.cached_property
  def names(self) -> tuple[str, ...]:
    """Names of the candidates: parts in the order of the observation, its slots, and RECALL with a memory."""
    names = observation_lib.parts(self.networks.codec.flat_spec).names
    slots = (f'slot_{i}' for i in range(self.networks.config.slots))
    return (*names, *slots, *([RECALL] if self.networks.recalled_size else []))

  @functools.cached_property
  def _owner(self) -> np.ndarray:
    """[I] int, index of the candidate to which each number of `_contents` belongs."""
    config, parts = self.networks.config, parts_of_inputs(self.networks.numbers)
    recalled = np.full(self.networks.recalled_size, len(self.names) - 1)
    first = len(observation_lib.parts(self.networks.codec.flat_spec).names)
    slots = np.repeat(first + np.arange(config.slots), config.slot_size)
    return np.concatenate([recalled, parts, slots])

  @functools.cached_property
  def _places(self) -> tuple[np.ndarray, np.ndarray]:
    """Positions in `_contents` of each candidate's numbers, [N, M] int, padded; [N, M] bool, no padding."""
    owned = self._owner == np.arange(len(self.names))[:, None]
    width = max(owned.sum(axis=1))
    places = np.argsort(~owned, axis=1, kind='stable')[:, :width]
    return places, np.take_along_axis(owned, places, axis=1)

  @property
  def size(self) -> int:
    return len(self._owner) + len(self.names)

  def modules(self) -> dict[str, tuple[networks.MLP, int]]:
    config, count = self.networks.config, len(self.names)
    mlp = lambda scale: networks.MLP(config.hidden_size, 1, KEY_SIZE, scale, raw=True)
    width = self._places[0].shape[1] + count
    scores = {'query': (mlp(1.0), config.deterministic_size), 'key': (mlp(0.1), width)}
    if config.workspace_score != GAIN:
      return scores
    head = networks.MLP(config.hidden_size, 1, 1, 0.1, raw=True)
    return scores | {GAIN: (head, width + self.networks.actions.size)}

  # Scores and gates.

  def inputs(self, params: Tree, step: rssm.Step, novelty: jax.Array) -> Terms:
    """Terms of the scores at a step, from the members' predicted changes of each of its numbers."""
    means, variances = changes_of_inputs(self.networks.numbers, step.priors.change)
    kind = self.networks.config.novelty
    gain = novelty_lib.novelty_of(kind, ((means[..., None], variances[..., None], 0.0),))
    parts = parts_of_inputs(self.networks.numbers)[: gain.shape[-1]]
    share = (parts[:, None] == np.arange(len(self.names))).astype(np.float32)
    share /= np.maximum(share.sum(axis=0), 1)
    novelty = jnp.matmul(gain, share, precision=jax.lax.Precision.HIGHEST)
    return Terms(self._learned(params, step.features), novelty, self._lack(step.latent.numbers))

  def _lack(self, numbers: jax.Array) -> jax.Array:
    """The lack D of each candidate, [..., N] float32, from numbers [..., F']; 0 without vitals."""
    spec = self.networks.codec.flat_spec
    lacks = [jnp.zeros(numbers.shape[:-1])] * len(self.names)
    found = observation_lib.vitals(spec)
    if found is not None:
      owner = observation_lib.parts(spec).owner[found.indices]
      for i in np.unique(owner):
        own = owner == i
        vitals = self.networks.numbers.pick(numbers, found.indices[own])
        lacks[i] = survival.lack(vitals, found.set_points[own])
    return jnp.stack(lacks, axis=-1)

  def _learned(self, params: Tree, features: Features) -> jax.Array:
    """The learned term at features [..., ...], [..., N] float32."""
    candidates = self._candidates(features)
    belief = features.state.astype(jnp.float32)
    # Bounded, so that what is learned does not soon outweigh the other terms at every step.
    read = lambda name, *inputs: jnp.tanh(
      networks.apply(self.modules()[name][0], params[name], *inputs)
    )
    product = jnp.sum(read('query', belief)[..., None, :] * read('key', *candidates), axis=-1)
    product /= np.float32(np.sqrt(KEY_SIZE))
    if self.networks.config.workspace_score != GAIN:
      return product
    # Its loss has the differences only, so what all have in common could close them all.
    return jax.nn.log_softmax(product) + np.float32(np.log(len(self.names)))

  def _candidates(self, features: Features) -> tuple[jax.Array, jax.Array]:
    """Contents of each candidate, padded, [..., N, M] float32, and its index, one-hot, [..., N, N]."""
    places, there = self._places
    contents = self._contents(features).astype(jnp.float32)
    contents = jnp.where(there, contents[..., places], 0.0)
    identity = np.eye(len(self.names), dtype=np.float32)
    return contents, jnp.broadcast_to(identity, (*contents.shape[:-1], len(self.names)))

  def loss(
    self, params: Tree, read: sockets.PolicyInputs, action: jax.Array, error: jax.Array
  ) -> jax.Array | None:
    """See `Context.loss`: the negative likelihood of the mixture, see the module's docstring."""
    if self.networks.config.workspace_score != GAIN:
      return None
    candidates = self._candidates(read.features)
    actions = jnp.broadcast_to(action[..., None, :], (*candidates[0].shape[:-1], action.shape[-1]))
    head, _ = self.modules()[GAIN]
    expected = networks.apply(head, params[GAIN], *candidates, actions)[..., 0]
    weight = self._learned(params, read.features) - np.float32(np.log(len(self.names)))
    mixture = jax.nn.logsumexp(weight - jnp.square(error[..., None] - expected) / 2, axis=-1)
    return -mixture - EVENNESS * weight.mean(axis=-1)

  def _contents(self, features: Features) -> jax.Array:
    """The features that are candidates: the recall, the inputs of the numbers, and the slots, [..., I]."""
    return jnp.concatenate([features.recalled, features.numbers], axis=-1)

  def _bonus(self, before: Past, terms: Terms) -> jax.Array:
    """Scores without the learned term, [..., N] float32."""
    # Both are 0 at steps that no dream has reached.
    steps, opened = jnp.maximum(before.steps, 1.0), jnp.maximum(before.opened, 1.0)
    visits = jnp.sqrt(jnp.log(steps)[..., None] / opened)
    change = jnp.where(before.steps[..., None] > 1, terms.novelty - before.novelty, 0.0)
    bonus = NOVELTY * terms.novelty + CHANGE * change + VISITS * visits + VITALS * terms.lack
    return jax.lax.stop_gradient(bonus)

  def gate(self, scores: jax.Array) -> jax.Array:
    """Gates [..., N] float32 from scores [..., N]: 1 for the k best above 0, else 0.

    Among equal scores the first are open. The gradient is straight-through, see the module's docstring.
    """
    place = np.arange(scores.shape[-1])
    one, other = scores[..., :, None], scores[..., None, :]
    passed_by = (other > one) | ((other == one) & (place < place[:, None]))
    best = jnp.sum(passed_by, axis=-1) < self.networks.config.workspace_size
    least = jnp.min(jnp.where(best, scores, jnp.inf), axis=-1, keepdims=True)
    next_ = jnp.max(jnp.where(best, -jnp.inf, scores), axis=-1, keepdims=True)
    rival = jnp.maximum(jnp.where(best, next_, least), 0.0)
    soft = jax.nn.sigmoid(scores - rival)
    is_open = (best & (scores > 0)).astype(jnp.float32)
    return is_open + (soft - jax.lax.stop_gradient(soft))

  def _read(self, features: Features, gate: jax.Array) -> jax.Array:
    """The context [..., C] of features [..., ...] with [..., N] gates."""
    contents = self._contents(features)
    gate = gate.astype(contents.dtype)
    return jnp.concatenate([gate[..., self._owner] * contents, gate], axis=-1)

  # As a context module.

  def initial(self, batch: int) -> Past:
    candidates = (batch, len(self.names))
    return Past(jnp.zeros(candidates), jnp.ones(candidates), jnp.ones(batch))

  def advance(self, read: sockets.PolicyInputs) -> Past:
    before, terms = read.memory, read.own
    gate = jax.lax.stop_gradient(self.gate(terms.learned + self._bonus(before, terms)))
    return Past(terms.novelty, before.opened + gate, before.steps + 1)

  def pool(self, params: Tree, read: sockets.PolicyInputs) -> jax.Array:
    return self._read(read.features, self.gates(params, read))

  def gates(self, params: Tree, read: sockets.PolicyInputs) -> jax.Array:
    """Gates of steps, [..., N] float32, with their gradient."""
    learned = self._learned(params, read.features)
    if self.networks.config.workspace_score == GAIN:
      learned = jax.lax.stop_gradient(learned)
    return self.gate(learned + self._bonus(read.memory, read.own))

  def shown(self, params: Tree, read: sockets.PolicyInputs) -> Tree:
    """The gates, `open`: [...] float32 for each candidate by its name."""
    gates = self.gates(params, read)
    return {'open': {name: gates[..., i] for i, name in enumerate(self.names)}}

  def metrics(
    self, params: Tree, read: sockets.PolicyInputs, mean: sockets.Mean
  ) -> sockets.Metrics:
    """Metrics of the share of steps at which each candidate is open.

    Returns:
      By name after `workspace/`, [] float32: `open`, mean number of open candidates; `entropy` of the shares
      scaled to sum 1, nats; and each candidate's share as `share_` and its name.
    """
    share = mean(self.gates(params, read).mean(axis=(0, 1)))
    total = jnp.sum(share)
    entropy = jnp.sum(jax.scipy.special.entr(share / jnp.maximum(total, 1e-8)))
    shares = {f'share_{name}': share[i] for i, name in enumerate(self.names)}
    found = {'open': total, 'entropy': entropy} | shares
    return {f'{NAME}/{name}': x for name, x in found.items()}


def parts_of_inputs(numbers: numbers_lib.Numbers) -> np.ndarray:
  """[input_size] int, index of the observation's part, see `observation.parts`, of each of the inputs."""
  found = observation_lib.parts(numbers.spec)
  of_inputs = [np.zeros(0, int)]
  for kind in numbers.kinds:
    own = found.owner[kind.sources]
    of_inputs += [own, np.repeat(own, kind.num_levels)]
  leaves = jax.tree.leaves(observation_lib.without_mask(numbers.spec))
  shown = [observation_lib.view_size(leaf) for leaf in leaves]
  return np.concatenate([*of_inputs, np.repeat(found.of_views, shown)])


def changes_of_inputs(
  numbers: numbers_lib.Numbers, change: numbers_lib.Change
) -> tuple[jax.Array, jax.Array]:
  """Estimates the change of each of the I inputs other than views from changes along random directions.

  Returns:
    Means and variances, [..., I] float32, in the (squared) units of `change`, [..., C].
  """
  back = numbers.directions.T / numbers.num_changes  # the directions are nearly orthogonal
  product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
  return product(change.mean, back), product(change.variance, np.square(back))

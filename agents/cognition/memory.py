"""Episodic memory: entries of observation, action and return, read by similarity of observations.

    key      k = unit(P x)                               P fixed, so that keys never drift
    read     w_i = exp(50 (k_i q - 1))
             n_a = min(1, sum_i w_i [a_i = a])           q_a = sum_i w_i [a_i = a] G_i / sum_i w_i [a_i = a]
    write    the most surprising replayed steps, by |G - G_hat|, over the least recently read entries

with x the observation, P a fixed random projection, q the key of the current observation, a_i, G_i the
action and return of entry i, and G_hat the return expected at a step: see `EpisodicMemory.expected`. All entries
are read, not a few neighbours: the weight of others is next to 0, and on a CPU a read of 1,024 entries at
512 steps took 0.7 ms, and 3 ms with the 8 largest.

Pritzel et al. (2017), "Neural episodic control"; keys by a random projection as in Blundell et al.
(2016), "Model-free episodic control". The entries, called the ring, are among the agent's statistics: no
optimizer changes them, and they are saved and published with the policy that reads them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import dm_env
import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.agents import distributions, networks, returns
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import modules, rssm, sockets
from hephaestus.agents.dreamer import numbers as numbers_lib

Tree = Any
LAST = int(dm_env.StepType.LAST)

KEY_SIZE = 32
SHARPNESS = 50.0
"""Sharpness of the weights: an entry of similarity 0.95 has a weight of 0.08."""
POOLED = 8
"""Height and width to which a key pools images."""
MOST_WRITTEN = 8
"""Most entries that one update writes."""
LEAST_SURPRISE = 0.1
"""Surprise, in units of returns, above which a step is written."""
LEAST_WEIGHT = 0.1
"""Weight in a read above which the read renews an entry."""
LEAST_EVIDENCE = 0.5
"""Evidence n_a above which G_hat is the memory's value q_a, not the critic's."""
SAME = 0.99
"""Weight in a read above which the observation is the entry's own, so that its latent is renewed."""
MOST_RENEWED = 32
"""Most latents that one update renews."""
TTL = 5000
"""Updates after which an entry that no replayed step reads is cleared."""
NEAREST = 3
"""Number of most similar entries that `nearest` returns, for display."""
ACTED = ('key', 'action', 'return_', 'written')
"""Arrays of the ring that acting reads; the others are not published."""


class Recall(NamedTuple):
  """The result of a read of the memory at some steps.

  Attributes:
    evidence: [..., A] float32, n_a; for continuous actions [..., 1], over all actions.
    value: [..., A] or [..., 1] float32, q_a, estimated return; 0 without evidence.
    similarity: [...] float32, similarity k q of the most similar entry; 0 if there is no entry.
    action: [..., A] float32, mean continuous action, weighted by w; for discrete ones 1 where n_a > 0.
    weight: [..., C] float32, weight w of each entry; 0 where there is none.
  """

  evidence: jax.Array
  value: jax.Array
  similarity: jax.Array
  action: jax.Array
  weight: jax.Array


class Offer(NamedTuple):
  """N replayed steps that are candidates for new entries.

  Attributes:
    key: [N, KEY_SIZE] float32, see `EpisodicMemory.key`.
    action: [N, A] float32, encoded action.
    return_: [N] float32, return G.
    surprise: [N] float32, |G - G_hat|; 0 for a step that must not be written.
    start: [N, ...] float32 by name, what a dream that begins at the step needs; see `EpisodicMemory`.
  """

  key: jax.Array
  action: jax.Array
  return_: jax.Array
  surprise: jax.Array
  start: dict[str, jax.Array]


def make_memory(network: modules.Networks) -> 'EpisodicMemory':
  """The episodic memory of an environment, of the size in the config."""
  config = network.config
  starts = {
    'deterministic': config.deterministic_size,
    'stochastic': network.latent_size,
    'numbers': network.numbers.size,
    'previous': network.previous_size,
  } | ({'percept': network.percept_width} if network.perception else {})
  return EpisodicMemory(
    config.memory_size,
    network.actions,
    network.numbers,
    network.codec,
    config,
    starts if config.memory_dream_share else {},
  )


@dataclasses.dataclass(frozen=True)
class EpisodicMemory:
  """The memory of one environment, see `sockets.Memory`; every method is a pure function of the ring.

  The ring is a dict of arrays: `key` [C, KEY_SIZE], `action` [C, A] and `return_` [C] float32;
  `written` [C] int32, the update from which on an entry may be read, 0 where there is none; `used`
  [C] int32, the update in which it was written or last read. Acting reads all but the last. If dreams
  begin at entries, there are also `start`, a dict of [C, ...] float32 arrays (the step's latent, and
  `previous` of `rssm.Step`), and `stored` [C] int32, the update in which it was inferred.

  Attributes:
    size: C, number of entries.
    actions: actions of the environment.
    numbers: numbers of its observations.
    codec: encoding of its observations, with their images.
    config: sizes and constants of the agent.
    starts: names and widths of the arrays of `start`; empty if no dream begins at entries.
  """

  size: int
  actions: distributions.Actions
  numbers: numbers_lib.Numbers
  codec: observation_lib.Codec
  config: Any
  starts: dict[str, int] = dataclasses.field(default_factory=dict)

  acted: ClassVar[tuple[str, ...]] = ACTED

  @property
  def width(self) -> int:
    """R, the width of `recalled`."""
    return 2 * self.actions.size + 1 if self.actions.discrete else self.actions.size + 3

  def init(self) -> Tree:
    """An empty ring."""
    zeros = lambda *shape, dtype=jnp.float32: jnp.zeros((self.size, *shape), dtype)
    starts = {name: zeros(size) for name, size in self.starts.items()}
    return ({'start': starts, 'stored': zeros(dtype=jnp.int32)} if starts else {}) | {
      'key': zeros(KEY_SIZE),
      'action': zeros(self.actions.size),
      'return_': zeros(),
      'written': zeros(dtype=jnp.int32),
      'used': zeros(dtype=jnp.int32),
    }

  @functools.cached_property
  def _projection(self) -> np.ndarray:
    """P, [inputs, KEY_SIZE]; NumPy keeps this generator's numbers between versions."""
    pixels = POOLED * POOLED * sum(spec.shape[-1] for spec in self.codec.image_specs)
    shape = self.numbers.size + pixels, KEY_SIZE
    return np.random.RandomState(0).standard_normal(shape).astype(np.float32)

  def key(self, observation: Tree) -> jax.Array:
    """Keys of observations, [..., KEY_SIZE] float32 of length 1.

    Numbers in [0, 1] count as 2 x - 1, so that a 0 says as much as a 1; others by their symlog.
    """
    parts = [self.numbers.centred(self.numbers.read(observation))]
    if self.codec.image_specs:
      _, *images = self.codec.encode(observation)
      for spec, image in zip(self.codec.image_specs, images, strict=True):
        pooled = _pool(image)
        if observation_lib.is_bounded(spec, 0, 255):
          pooled = 2 * pooled
        elif observation_lib.is_bounded(spec, 0, 1):
          pooled = 2 * pooled - 1
        parts.append(pooled)
    projected = _product(jnp.concatenate(parts, axis=-1), self._projection)
    length = jnp.linalg.norm(projected, axis=-1, keepdims=True)
    return projected / jnp.maximum(length, 1e-6)

  def read(self, ring: Tree, key: jax.Array, version: jax.Array | None = None) -> Recall:
    """Reads the memory at some steps, by the similarity of their keys.

    Args:
      ring: see the class; only its arrays ACTED are read.
      key: [..., KEY_SIZE] float32, keys of the observations of the steps.
      version: [...] int32, version of the parameters that acted; entries that were written later are
        left out. None: all entries are read.
    """
    visible = ring['written'] > 0
    if version is not None:
      visible &= ring['written'] <= version[..., None]
    similarity = jnp.where(visible, _product(key, ring['key'].T), -jnp.inf)
    weight = jnp.exp(SHARPNESS * (similarity - 1))  # 0 where there is no entry
    nearest = jnp.max(similarity, axis=-1)
    action = ring['action']
    of_action = action if self.actions.discrete else jnp.ones_like(action[:, :1])
    # One product, since a CPU would compute the weights again for each.
    summed = jnp.concatenate([of_action, of_action * ring['return_'][:, None], action], axis=-1)
    size = of_action.shape[-1]
    evidence, value, actions = jnp.split(_product(weight, summed), [size, 2 * size], axis=-1)
    return Recall(
      evidence=jnp.minimum(evidence, 1.0),
      value=value / jnp.maximum(evidence, 1e-8),
      similarity=jnp.where(jnp.isfinite(nearest), nearest, 0.0),
      action=actions / jnp.maximum(evidence, 1e-8),
      weight=weight,
    )

  def recall(
    self, held: Tree, observation: Tree, version: jax.Array | None = None
  ) -> tuple[jax.Array, Recall]:
    """See `sockets.Memory.recall`."""
    found = self.read(held, self.key(observation), version)
    return self.recalled(found), found

  def explain(self, held: Tree, recall: Recall) -> dict[str, jax.Array]:
    """Value and evidence of what was recalled; and of the NEAREST entries, by weight, [..., NEAREST] each."""
    weight, index = jax.lax.top_k(recall.weight, min(NEAREST, self.size))
    return {
      'recalled_value': recall.value,
      'recalled_evidence': recall.evidence,
      'nearest_weight': weight,  # 0 where there is no entry
      'nearest_similarity': 1 + jnp.log(jnp.maximum(weight, 1e-30)) / SHARPNESS,
      'nearest_action': held['action'][index],  # encoded, [..., NEAREST, A]
      'nearest_return': held['return_'][index],
    }

  def recalled(self, recall: Recall) -> jax.Array:
    """Inputs of networks, [..., R] float32, from what was read.

    For each choice the symlog of its value and its evidence; then the similarity of the nearest entry;
    for continuous actions also the mean action.
    """
    parts = [networks.symlog(recall.value), recall.evidence, recall.similarity[..., None]]
    return jnp.concatenate(parts if self.actions.discrete else [*parts, recall.action], axis=-1)

  def expected(self, recall: Recall, action: jax.Array, value: jax.Array) -> jax.Array:
    """G_hat, [...] float32: the memory's value of [..., A] encoded actions, else the critic's `value`.

    The memory's value counts where its evidence exceeds LEAST_EVIDENCE. With several choices at once,
    value and evidence are means over the choices.
    """
    chosen = action if self.actions.discrete else jnp.ones_like(recall.value)
    count = len(self.actions.num_choices) or 1
    known = jnp.sum(chosen * recall.evidence, axis=-1) > count * LEAST_EVIDENCE
    return jnp.where(known, jnp.sum(chosen * recall.value, axis=-1) / count, value)

  def updated(
    self,
    held: Tree,
    recall: Recall,
    replayed: sockets.Replayed,
    update: jax.Array,
    batch: sockets.Batch,
  ) -> tuple[Tree, sockets.Metrics]:
    """See `sockets.Memory.updated`: writes the most surprising steps of the batch."""
    sequence, config = replayed.sequence, self.config
    last = sequence.step_type == LAST
    return_ = returns.lambda_returns(
      sequence.reward, sequence.discount, replayed.value,
      gamma=config.gamma, lambda_=config.lambda_, bootstrap_t=last,
    )  # fmt: skip
    # By all that is remembered by now, so that nothing is written each time that it is replayed.
    _, known = self.recall(held, sequence.observation)
    action = self.actions.encode(sequence.action)
    error = jnp.abs(return_ - self.expected(known, action, replayed.value)[:-1])
    kept = replayed.step.latent._asdict() | {'previous': replayed.step.previous}
    start = {name: kept[name] for name in self.starts}
    begin = {name: x[:-1] for name, x in start.items()}
    surprise = jnp.where(last[:-1], 0.0, error)
    steps = Offer(self.key(sequence.observation)[:-1], action[:-1], return_, surprise, begin)
    offer = jax.tree.map(_by_sequence, steps)
    gathered = jax.tree.map(batch.gather, most_surprising(offer))
    everyone = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), gathered)
    renewed = batch.largest(self.renewed(recall).astype(jnp.int32)) > 0
    if self.starts:
      held = self.renew_starts(held, recall, start, last, update, batch.gather)
    held = self.write(held, everyone, renewed, update)
    return held, self.metrics(held, recall, update)

  def renewed(self, recall: Recall) -> jax.Array:
    """[C] bool, entries that some step has read with a weight above LEAST_WEIGHT."""
    return jnp.any(recall.weight.reshape(-1, self.size) > LEAST_WEIGHT, axis=0)

  def write(self, ring: Tree, offer: Offer, renewed: jax.Array, update: jax.Array) -> Tree:
    """The ring after an update, with the most surprising offers in place of the least recently used.

    An entry that no step has read for more than TTL updates has expired, and is empty.

    Args:
      ring: the entries before the update.
      offer: candidates of all devices.
      renewed: [C] bool, entries that were read on any device, see the method `renewed`.
      update: [] int32, number of the update; parameters of version `update` + 1 and later read what it
        writes.
    """
    now = update + 1
    used = jnp.where(renewed, now, ring['used'])
    fresh = now - used <= TTL
    written, used = (jnp.where(fresh, x, 0) for x in (ring['written'], used))
    best = most_surprising(offer)
    # The most surprising first, so those that are not worth it come last.
    worth = best.surprise > LEAST_SURPRISE
    slots = jnp.argsort(used, stable=True)[: len(worth)]
    slots = jnp.where(worth, slots, self.size)  # beyond the ring: not written
    put = lambda old, new: old.at[slots].set(new, mode='drop')
    if self.starts:
      starts = jax.tree.map(put, ring['start'], best.start)
      ring = ring | {'start': starts, 'stored': put(ring['stored'], now)}
    return ring | {
      'key': put(ring['key'], best.key),
      'action': put(ring['action'], best.action),
      'return_': put(ring['return_'], best.return_),
      'written': put(written, now),
      'used': put(used, now),
    }

  def renew_starts(
    self,
    ring: Tree,
    recall: Recall,
    start: dict[str, jax.Array],
    last: jax.Array,
    update: jax.Array,
    gather: Callable[[jax.Array], jax.Array],
  ) -> Tree:
    """The ring with new latents for the MOST_RENEWED oldest of those whose observation was replayed.

    Latents are of the world model that inferred them, which changes with each update.

    Args:
      ring: the entries before the update.
      recall: the result of a read of the memory at the steps of this device, [T, B, ...].
      start: [T, B, ...] by name, see `Offer`, of these steps.
      last: [T, B] bool, steps that end an episode, at which no dream begins.
      update: [] int32, number of the update.
      gather: array [...] of one part of the batch -> the arrays of all P parts, [P, ...].
    """
    same = _by_sequence((recall.weight > SAME) & ~last[..., None])
    found, step = jnp.any(same, axis=0), jnp.argmax(same, axis=0)
    age = jnp.where(jnp.any(gather(found), axis=0), update + 1 - ring['stored'], -1)
    age, entry = jax.lax.top_k(age, min(MOST_RENEWED, self.size))
    # The first such step of the whole batch, on however many devices.
    part, place = jnp.argmax(gather(found[entry]), axis=0), jnp.arange(len(entry))
    slots = jnp.where(age >= 0, entry, self.size)  # beyond the ring: not renewed

    def put(old: jax.Array, steps: jax.Array) -> jax.Array:
      new = gather(_by_sequence(steps)[step[entry]].astype(old.dtype))
      return old.at[slots].set(new[part, place], mode='drop')

    stored = ring['stored'].at[slots].set(update + 1, mode='drop')
    return ring | {'start': jax.tree.map(put, ring['start'], start), 'stored': stored}

  def seeds(self, ring: Tree, random: jax.Array, update: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws entries at which dreams begin, all equally often that have a latent at most TTL updates old.

    Args:
      ring: the entries.
      random: [N] float32, uniform in [0, 1).
      update: [] int32, number of the update.

    Returns:
      Index of an entry, [N] int32, and whether there is any, [] bool.
    """
    fresh = (ring['written'] > 0) & (update + 1 - ring['stored'] <= TTL)
    count = jnp.sum(fresh)
    first = jnp.argsort(~fresh, stable=True)
    index = jnp.minimum((random * count).astype(jnp.int32), jnp.maximum(count - 1, 0))
    return first[index], count > 0

  @property
  def can_begin(self) -> bool:
    return bool(self.starts)

  def begin(
    self, held: Tree, keys: jax.Array, update: jax.Array
  ) -> tuple[jax.Array, rssm.Latent, jax.Array]:
    """See `sockets.Memory.begin`: a share of `memory_dream_share` of the dreams, at entries of `seeds`.

    Their latents are of the replayed steps that wrote or last renewed the entries; what memory recalls there
    is read anew, as acting would.
    """
    share, which = jax.vmap(lambda key: jax.random.uniform(key, (2,)), out_axes=1)(keys)
    entry, is_any = self.seeds(held, which, update)
    kept = {name: x[entry] for name, x in held['start'].items()}
    cast = {name: x.astype(self.config.dtype) for name, x in kept.items() if name != 'numbers'}
    latent = rssm.Latent(
      deterministic=cast['deterministic'],
      stochastic=cast['stochastic'],
      numbers=kept['numbers'],
      recalled=self.recalled(self.read(held, held['key'][entry])),
      percept=cast.get('percept'),
    )
    return is_any & (share < self.config.memory_dream_share), latent, cast['previous']

  def metrics(self, ring: Tree, recall: Recall, update: jax.Array) -> dict[str, jax.Array]:
    """Metrics of a ring after an update, and of the reads at this device's steps.

    Returns:
      By name, [] float32: `filled`, the share of entries in use; `written`, entries that the update wrote;
      means over the reads of `evidence`, a read's weights summed over actions, at most 1, and of
      `similarity`, to the nearest entry; `age`, the mean age of entries in updates; and where dreams begin
      at entries `latent_age`, the mean age of their latents.
    """
    now = update + 1
    filled = ring['written'] > 0
    age = jnp.sum(jnp.where(filled, now - ring['written'], 0))
    of_starts = {}
    if self.starts:
      latent_age = jnp.sum(jnp.where(filled, now - ring['stored'], 0))
      of_starts['latent_age'] = latent_age / jnp.maximum(jnp.sum(filled), 1)
    return of_starts | {
      'filled': jnp.mean(filled),
      'written': jnp.sum(ring['written'] == now).astype(jnp.float32),
      'evidence': jnp.mean(jnp.minimum(recall.weight.sum(axis=-1), 1.0)),
      'similarity': jnp.mean(recall.similarity),
      'age': age / jnp.maximum(jnp.sum(filled), 1),
    }


def most_surprising(offer: Offer) -> Offer:
  """The MOST_WRITTEN most surprising of N candidates, by falling surprise; of equals the first come first."""
  _, index = jax.lax.top_k(offer.surprise, min(MOST_WRITTEN, len(offer.surprise)))
  return jax.tree.map(lambda x: x[index], offer)


def _by_sequence(x: jax.Array) -> jax.Array:
  """[T, B, ...] arrays as [B T, ...], one sequence after another."""
  return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])


def _product(x: jax.Array, y: Any) -> jax.Array:
  """The matrix product x y, in full float32 on accelerators too: keys of equal observations are equal."""
  return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def _pool(image: jax.Array) -> jax.Array:
  """Average-pools images [..., H, W, C] to POOLED x POOLED, flat: [..., POOLED * POOLED * C]."""

  def shares(length: int) -> np.ndarray:
    edges = np.arange(POOLED + 1) * length / POOLED
    low, high = edges[:-1, None], edges[1:, None]
    pixel = np.arange(length)
    covered = np.clip(np.minimum(high, pixel + 1) - np.maximum(low, pixel), 0, None)
    return (covered / covered.sum(axis=1, keepdims=True)).astype(np.float32)

  *leading, height, width, _ = image.shape
  pooled = jnp.einsum('ih,jw,...hwc->...ijc', shares(height), shares(width), image)
  return pooled.reshape(*leading, -1)

"""Model error of imagination: imagined rollouts compared with real steps after the same states."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import dm_env
import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.agents import experience
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import dream, rssm

Tree = Any
LAST = int(dm_env.StepType.LAST)

MOST_WRONG = 0.1
"""Share of dreams with a wrong number, see `Row.wrong`, up to which dreams can be trusted."""
MOST_ERROR = 0.5
"""Error of real-valued numbers, see `Row.error`, up to which dreams can be trusted, in standard deviations."""


class Tally(NamedTuple):
  """A sum over states and their number; total / number is the mean. Tallies of batches add up.

  Attributes:
    total: [...] float32, the sum.
    number: [...] float32, how many states were added, or the sum of their weights.
  """

  total: jax.Array
  number: jax.Array

  @classmethod
  def of(cls, values: jax.Array, counted: jax.Array) -> 'Tally':
    """Sums [..., T, B] values over the last two axes, where `counted` (bool, [..., T, B]) is True."""
    counted = jnp.broadcast_to(counted, values.shape)
    return cls(
      jnp.sum(jnp.where(counted, values, 0.0), axis=(-2, -1)),
      jnp.sum(counted.astype(jnp.float32), axis=(-2, -1)),
    )


class Fidelity(NamedTuple):
  """Errors of imagined rollouts, compared with the environment.

  Each field is a Tally, of which the mean is described: over starts, for `end` and `paid` over all steps.
  Index k is the step k + 1 steps after the start; in a sum, it is the last one.
  `imagined` and `real` follow the policy from the same states, in the model and in the environment.
  `wrong` to `missed` are open-loop predictions, with the actions that were taken. `end` and `paid` are
  predicted from the posterior of the step itself, without imagination.

  Attributes:
    imagined: [K] sums of imagined rewards, each weighted by the probability that the episode lasts.
    real: [K] sums of rewards, until the episode terminates; where a time limit ends it, neither this
      nor `imagined` is counted beyond.
    wrong: [K] whether any binary or discrete number of the observation is predicted wrongly.
    error: [K] mean absolute error of real numbers, in standard deviations.
    continues: [K] predicted discount at real terminations; 0 is right.
    lasts: [K] predicted discount at other steps; 1 is right.
    reward: [K] predicted rewards, each times the sign of the real one, relative to the sum of absolute
      real rewards; 1 is right.
    missed: [K] absolute predicted reward where the real one is 0.
    end: [] as `continues`, from the posterior.
    paid: [] as `reward`, from the posterior.
    value: [] the critic's values of the starts.
  """

  imagined: Tally
  real: Tally
  wrong: Tally
  error: Tally
  continues: Tally
  lasts: Tally
  reward: Tally
  missed: Tally
  end: Tally
  paid: Tally
  value: Tally


def measure(
  dreamer: dreamer_agent.Dreamer,
  params: Tree,
  key: chex.PRNGKey,
  sequence: experience.Sequence,
  num_steps: int,
) -> Fidelity:
  """Tallies of dreams compared with reality, from all steps that have `num_steps` steps after them.

  Args:
    dreamer: the agent.
    params: parameters of all parts of the agent.
    key: PRNG key of latents, dreams and actions.
    sequence: [T, B, ...] made by the agent's own policy, T > `num_steps`.
    num_steps: K, imagined steps, at most `config.horizon_max`.
  """
  total, batch = sequence.reward.shape
  model = dreamer.model
  infer_key, start_key, member_key, noise_key = jax.random.split(key, 4)
  replayed = model.replay(params, jax.random.split(infer_key, batch), sequence)
  last = sequence.step_type == LAST
  novelty = model.novelty(replayed)
  read = dreamer.actor_critic.along(params['actor_critic'], replayed, novelty)
  start_keys = jax.random.split(start_key, batch)
  start = dream.starts(read, replayed.latent, last, novelty, start_keys, num_steps=None)
  # States with K steps after them, of which none is the end of an episode.
  begins = ~last & (jnp.arange(total) < total - num_steps)[:, None]
  # [K, T, B]: of the same episode; and without a time limit, which the model does not know.
  alive = begins & ~_met(last, num_steps)
  whole = begins & ~_met(last & (sequence.discount > 0), num_steps)
  after = lambda x: jnp.stack([_shifted(x, k + 1) for k in range(num_steps)])
  reward, discount = after(sequence.reward), after(sequence.discount)

  shaped = lambda x: x.reshape(*x.shape[:-1], total, batch)
  imagined, value = map(shaped, _imagine(dreamer, params, start, num_steps))
  real = jnp.cumsum(jnp.where(alive, reward, 0.0), axis=0)
  foreseen = _foresee(dreamer, params, start, sequence, member_key, noise_key, num_steps)
  foreseen = jax.tree.map(lambda x: x.reshape(num_steps, total, batch, *x.shape[2:]), foreseen)
  ends = alive & (discount == 0)
  wrong, error = model.networks.numbers.differences(
    foreseen.numbers, after(replayed.latent.numbers), params['world_model']['statistics']
  )
  now = model.reward(params['world_model'], replayed.features).mean()
  return Fidelity(
    imagined=Tally.of(imagined, whole),
    real=Tally.of(real, whole),
    wrong=Tally.of(wrong.astype(jnp.float32), alive),
    error=Tally.of(error, alive),
    continues=Tally.of(foreseen.discount, ends),
    lasts=Tally.of(foreseen.discount, alive & ~ends),
    reward=_share(foreseen.reward, jnp.where(alive, reward, 0.0)),
    missed=Tally.of(jnp.abs(foreseen.reward), alive & (reward == 0)),
    end=Tally.of(model.discount(params['world_model'], replayed.features), sequence.discount == 0),
    paid=_share(now, jnp.where(replayed.first, 0.0, sequence.reward)),
    value=Tally.of(value, begins),
  )


def _met(event: jax.Array, num_steps: int) -> jax.Array:
  """Whether a [T, B] bool event occurs at a step or within k steps after it, [K, T, B] bool."""
  later = jnp.stack([_shifted(event, k) for k in range(num_steps)])
  return jnp.cumsum(later, axis=0).astype(bool)


def _imagine(
  dreamer: dreamer_agent.Dreamer, params: Tree, start: dream.Start, num_steps: int
) -> tuple[jax.Array, jax.Array]:
  """Sums of the rewards that the policy imagines, [K, T B], and values of the starts, [T B]."""
  slow_critic = dreamer.actor_critic.critics(
    params['actor_critic']
  )  # in place of the copy, whose values are not read
  steps = jnp.asarray(num_steps, jnp.int32)
  dreamt = dream.rollout(dreamer.model, dreamer.actor_critic, params, slow_critic, start, steps)
  lasts = jnp.cumprod(dreamt.discount.at[0].set(1.0)[:num_steps], axis=0)
  imagined = jnp.cumsum(lasts * dreamt.reward[1 : num_steps + 1], axis=0)
  return imagined, dreamt.values['task'][0]


def _share(predicted: jax.Array, real: jax.Array) -> Tally:
  """Tally [...] whose mean is sum(predicted sign(real)) / sum |real|, both over T and B."""
  sum_ = lambda x: jnp.sum(x, axis=(-2, -1))
  return Tally(sum_(predicted * jnp.sign(real)), sum_(jnp.abs(real)))


class _Foreseen(NamedTuple):
  """Predictions of K imagined steps from each of T x B starts, [K, T B, ...]."""

  numbers: jax.Array
  reward: jax.Array
  discount: jax.Array


def _foresee(
  dreamer: dreamer_agent.Dreamer,
  params: Tree,
  start: dream.Start,
  sequence: experience.Sequence,
  member_key: chex.PRNGKey,
  noise_key: chex.PRNGKey,
  num_steps: int,
) -> _Foreseen:
  """Imagines K steps from each start with the actions that were taken: open-loop predictions."""
  model, world = dreamer.model, params['world_model']
  action = model.networks.actions.encode(sequence.action)
  count = len(start.weight)
  member = jax.random.randint(member_key, (count,), 0, dreamer.config.ensemble_size)
  matrices = model.rssm.matrices(world)

  def step(latent: rssm.Latent, inputs):
    action, key = inputs
    noise = jax.vmap(model.rssm.imagined_noise)(jax.random.split(key, count))
    imagined = model.imagine(world, matrices, rssm.Recurrent(latent, action), member, noise)
    reward = model.reward(world, imagined.features).mean()
    return imagined.latent, _Foreseen(imagined.latent.numbers, reward, imagined.discount)

  actions = jnp.stack([_shifted(action, k) for k in range(num_steps)])
  actions = actions.reshape(num_steps, count, *action.shape[2:])
  _, foreseen = jax.lax.scan(step, start.latent, (actions, jax.random.split(noise_key, num_steps)))
  return foreseen


def _shifted(x: jax.Array, steps: int) -> jax.Array:
  """Shifts [T, ...] so that index t holds step t + `steps`; beyond the end, values are never counted."""
  return jnp.roll(x, -steps, axis=0)


class Row(NamedTuple):
  """Means over dreams after a number of steps, see `Fidelity`; None where nothing was counted.

  Attributes:
    steps: number of imagined steps.
    imagined: mean sum of the imagined rewards until then.
    real: mean sum of the environment's rewards, of the same policy from the same states.
    wrong: share of dreams in which a binary or discrete number of the observation is wrong.
    error: mean absolute error of real-valued numbers, in standard deviations.
    continues: predicted probability that the episode continues, at real terminations; 0 is right.
    lasts: the same probability at other steps; 1 is right.
    reward: predicted reward as a share of the real one, at steps with a reward; 1 is right.
    missed: absolute predicted reward at steps without a reward; 0 is right.
  """

  steps: int
  imagined: float | None
  real: float | None
  wrong: float | None
  error: float | None
  continues: float | None
  lasts: float | None
  reward: float | None
  missed: float | None


class Summary(NamedTuple):
  """Means over all dreams.

  Attributes:
    value: mean value, by the critic, of the states where dreams begin; None if unknown.
    end: as `Row.continues`, but read from the posterior of the step, without imagination.
    paid: as `Row.reward`, but read from the posterior of the step, without imagination.
    rows: results after 1, 2, 4, ... imagined steps.
  """

  value: float | None
  end: float | None
  paid: float | None
  rows: Sequence[Row]


def summary(total: Fidelity, num_steps: int) -> Summary:
  """Summarises tallies, host arrays, of dreams of `num_steps` steps."""
  means = {name: _mean(tally) for name, tally in total._asdict().items()}
  steps = [2**power for power in range(num_steps.bit_length())]
  names = [name for name in Row._fields if name != 'steps']
  rows = [Row(step, **{name: _number(means[name][step - 1]) for name in names}) for step in steps]
  return Summary(**{name: _number(means[name]) for name in ('value', 'end', 'paid')}, rows=rows)


def trusted(found: Summary) -> tuple[Row | None, Row | None]:
  """The `Row` of the most steps for which dreams can be trusted, and the one after it.

  The former is None if they cannot be trusted for one step, the latter if no more steps were measured.
  """
  before = None
  for row in found.rows:
    if row.wrong is None or row.error is None:
      break
    if row.wrong > MOST_WRONG or row.error > MOST_ERROR:
      return before, row
    before = row
  return before, None


def _mean(tally: Tally) -> np.ndarray:
  number = np.asarray(tally.number)
  return np.where(number > 0, tally.total / np.where(number > 0, number, 1.0), np.nan)


def _number(value: Any) -> float | None:
  return None if np.isnan(value) else float(value)

"""Dreams compared with reality: along an episode, over many starts, part by part, and step by step.

`foresee` imagines a real episode from its actions, `measure` compares many dreams with what came, `examine`
asks each part about real steps, and `Steering` advances a dream and the reality beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import chex
import dm_env
import jax
import jax.numpy as jnp

from hephaestus.agents import agent as agent_lib
from hephaestus.agents import experience
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import actor_critic as actor_critic_lib
from hephaestus.agents.dreamer import dream, modules, rssm, world_model

if TYPE_CHECKING:
  from hephaestus.agents.dreamer import agent as dreamer_agent

Tree = Any
LAST = int(dm_env.StepType.LAST)

MOST_WRONG = 0.1
"""Share of dreams with a wrong number, see `Fidelity.wrong`, up to which dreams can be trusted."""
MOST_ERROR = 0.5
"""Error of real-valued numbers, see `Fidelity.error`, up to which dreams can be trusted, in standard deviations."""


def foresee(
  model: world_model.WorldModel,
  actor_critic: actor_critic_lib.ActorCritic,
  params: Tree,
  key: chex.PRNGKey,
  observation: Tree,
  action: jax.Array,
  context: jax.Array,
) -> agent_lib.Foresight:
  """Reconstructs the first `context` steps of an episode and imagines the rest; see `Agent.foresee`.

  Imagination samples the prior of one member, as dreams do, with the actions of the episode.
  Salience is computed from the posteriors of the whole episode, as in acting.

  Args:
    model: the world model.
    actor_critic: actor-critic, whose context module gives the salience.
    params: parameters of all parts of the agent.
    key: PRNG key of the member and of its samples.
    observation: tree of [T, ...] arrays, one episode, which begins at step 0.
    action: [T, ...], the actions of the episode.
    context: [] int32, number of observed steps.
  """
  model_params, policy_params = modules.world(params), params['actor_critic']
  num_steps = len(action)
  member_key, noise_key = jax.random.split(key)
  member = jax.random.randint(member_key, (1,), 0, model.config.ensemble_size)
  noise = jax.vmap(model.rssm.imagined_noise)(jax.random.split(noise_key, num_steps))
  is_first = jnp.arange(num_steps) == 0
  is_observed = jnp.arange(num_steps) < context
  inputs = (observation, is_first, is_observed, model.networks.actions.encode(action), noise)
  matrices = model.rssm.matrices(model_params)

  def step(carry, inputs):
    closed, open_, memory = carry
    observation, first, observed, action, noise = jax.tree.map(lambda x: x[None], inputs)
    seen, _ = model.observe(params, closed, observation, first, None)
    imagined = model.rssm.imagine(model_params, matrices, open_, member, noise)
    state = lambda step: (step.latent._replace(recalled=None), step.previous)
    latent, previous = jax.tree.map(
      lambda x, y: jnp.where(observed[0], x, y), state(seen), state(imagined)
    )
    predicted = model.decode(model_params, latent, previous, open_.latent.numbers, first)
    read = actor_critic.read(policy_params, memory, seen, model.novelty(seen), first)
    memory = actor_critic.context.advance(read)
    carry = rssm.Recurrent(state(seen)[0], action), rssm.Recurrent(latent, action), memory
    salience = actor_critic.context.shown(policy_params, read).get('salience', jnp.ones((1, 1)))
    masks = None if latent.percept is None else model.rssm.paint(model_params, latent)[1][0]
    return carry, (jax.tree.map(lambda x: x[0], predicted), masks, salience[0])

  initial = model.rssm.initial(1)
  carry = initial, initial, actor_critic.context.initial(1)
  _, (predicted, masks, salience) = jax.lax.scan(step, carry, inputs)
  return agent_lib.Foresight(predicted, salience, masks)


class Tally(NamedTuple):
  """A sum over states and their number; total / number is the mean. Tallies of batches add up.

  Attributes:
    total: [...] float32, the sum.
    number: [...] float32, how many states were added, or the sum of their weights.
  """

  total: jax.Array
  number: jax.Array

  @classmethod
  def of(cls, values: jax.Array, counted: jax.Array) -> Tally:
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
  replayed, novelty = _replay(dreamer, params, infer_key, sequence)
  last = sequence.step_type == LAST
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

  # In place of the slow copy of the critics, whose values are not read.
  critics = dreamer.actor_critic.critics(params['actor_critic'])
  steps = jnp.asarray(num_steps, jnp.int32)
  dreamt = dream.rollout(model, dreamer.actor_critic, params, critics, start, steps)
  survives = jnp.cumprod(dreamt.discount.at[0].set(1.0)[:num_steps], axis=0)
  imagined = jnp.cumsum(survives * dreamt.reward[1 : num_steps + 1], axis=0)
  real = jnp.cumsum(jnp.where(alive, reward, 0.0), axis=0)
  keys = member_key, noise_key
  numbers, predicted, lasts = _foresee(dreamer, params, start, sequence, keys, num_steps)
  ends = alive & (discount == 0)
  wrong, error = model.networks.numbers.differences(
    numbers, after(replayed.latent.numbers), modules.world(params)[modules.NUMBERS]
  )
  now = model.reward(modules.world(params), replayed.features).mean()
  return Fidelity(
    imagined=Tally.of(imagined.reshape(num_steps, total, batch), whole),
    real=Tally.of(real, whole),
    wrong=Tally.of(wrong.astype(jnp.float32), alive),
    error=Tally.of(error, alive),
    continues=Tally.of(lasts, ends),
    lasts=Tally.of(lasts, alive & ~ends),
    reward=_share(predicted, jnp.where(alive, reward, 0.0)),
    missed=Tally.of(jnp.abs(predicted), alive & (reward == 0)),
    end=Tally.of(model.discount(modules.world(params), replayed.features), sequence.discount == 0),
    paid=_share(now, jnp.where(replayed.first, 0.0, sequence.reward)),
    value=Tally.of(dreamt.values['task'][0].reshape(total, batch), begins),
  )


def _met(event: jax.Array, num_steps: int) -> jax.Array:
  """Whether a [T, B] bool event occurs at a step or within k steps after it, [K, T, B] bool."""
  later = jnp.stack([_shifted(event, k) for k in range(num_steps)])
  return jnp.cumsum(later, axis=0).astype(bool)


def _share(predicted: jax.Array, real: jax.Array) -> Tally:
  """Tally [...] whose mean is sum(predicted sign(real)) / sum |real|, both over T and B."""
  sum_ = lambda x: jnp.sum(x, axis=(-2, -1))
  return Tally(sum_(predicted * jnp.sign(real)), sum_(jnp.abs(real)))


def _foresee(
  dreamer: dreamer_agent.Dreamer,
  params: Tree,
  start: dream.Start,
  sequence: experience.Sequence,
  keys: tuple[chex.PRNGKey, chex.PRNGKey],
  num_steps: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Numbers, rewards and discounts of K steps imagined from each start with the actions that were taken.

  They are open-loop predictions, [K, T, B, ...].
  """
  model, world = dreamer.model, modules.world(params)
  action = model.networks.actions.encode(sequence.action)
  count = len(start.weight)
  member = jax.random.randint(keys[0], (count,), 0, dreamer.config.ensemble_size)
  matrices = model.rssm.matrices(world)

  def step(latent: rssm.Latent, inputs):
    action, key = inputs
    noise = jax.vmap(model.rssm.imagined_noise)(jax.random.split(key, count))
    imagined = model.imagine(world, matrices, rssm.Recurrent(latent, action), member, noise)
    reward = model.reward(world, imagined.features).mean()
    return imagined.latent, (imagined.latent.numbers, reward, imagined.discount)

  actions = jnp.stack([_shifted(action, k) for k in range(num_steps)])
  actions = actions.reshape(num_steps, count, *action.shape[2:])
  _, foreseen = jax.lax.scan(step, start.latent, (actions, jax.random.split(keys[1], num_steps)))
  shape = (num_steps, *sequence.reward.shape)
  return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[2:]), foreseen)


def _shifted(x: jax.Array, steps: int) -> jax.Array:
  """Shifts [T, ...] so that index t holds step t + `steps`; beyond the end, values are never counted."""
  return jnp.roll(x, -steps, axis=0)


class Row(NamedTuple):
  """Means of the fields of `Fidelity` after a number of imagined `steps`; None where nothing was counted."""

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
  """Means of the fields of `Fidelity` over all dreams, and `rows` after 1, 2, 4, ... imagined steps."""

  value: float | None
  end: float | None
  paid: float | None
  rows: Sequence[Row]


def summary(total: Fidelity, num_steps: int) -> Summary:
  """Summarises tallies, host arrays, of dreams of `num_steps` steps."""

  def mean(name: str, *at: int) -> float | None:
    tally = getattr(total, name)
    number = float(tally.number[at])
    return float(tally.total[at]) / number if number > 0 else None

  steps = [2**power for power in range(num_steps.bit_length())]
  rows = [Row(step, *(mean(name, step - 1) for name in Row._fields[1:])) for step in steps]
  return Summary(mean('value'), mean('end'), mean('paid'), rows)


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


class Examination(NamedTuple):
  """Predictions of [T, B] steps, float32 each.

  Attributes:
    reward: predicted reward that arrived at the step, given its observation.
    discount: predicted probability that the episode continues, given its observation.
    value: the critic's value of the task.
    novelty: novelty of the transition to the step.
    scrambled: as `novelty`, with each number of the observations permuted over the sequences by
      itself, which gives observations that never occurred.
    surprise: negative log-likelihood, nats, of the numbers and the reward of the step, predicted by one
      imagined step from the step before with the action that was taken; 0 at step 0.
    surprise_of_other: as `surprise`, with the action of another sequence at the same step.
  """

  reward: jax.Array
  discount: jax.Array
  value: jax.Array
  novelty: jax.Array
  scrambled: jax.Array
  surprise: jax.Array
  surprise_of_other: jax.Array


def examine(
  dreamer: dreamer_agent.Dreamer, params: Tree, key: chex.PRNGKey, sequence: experience.Sequence
) -> Examination:
  """Examines a model and a critic on sequences [T, B, ...] of the agent's own policy, B at least 2."""
  model, policy, world = dreamer.model, dreamer.actor_critic, modules.world(params)
  infer_key, scramble_key, imagine_key = jax.random.split(key, 3)
  replayed, novelty = _replay(dreamer, params, infer_key, sequence)
  scrambled = sequence._replace(observation=_scrambled(scramble_key, sequence.observation))
  # Both of a comparison have the same noise, and so the same key.
  others = jnp.roll(sequence.action, 1, axis=1)
  surprise, of_other = (
    _surprise(dreamer, params, imagine_key, sequence._replace(action=action), replayed)
    for action in (sequence.action, others)
  )
  own, features = params['actor_critic'], replayed.features
  context = policy.context.pool(own, policy.along(own, replayed, novelty))
  values = policy.values(own, features, context)
  return Examination(
    reward=model.reward(world, features).mean(),
    discount=model.discount(world, features),
    value=values[actor_critic_lib.TASK].mean(),
    novelty=novelty,
    scrambled=_replay(dreamer, params, infer_key, scrambled)[1],
    surprise=surprise,
    surprise_of_other=of_other,
  )


def _replay(
  dreamer: dreamer_agent.Dreamer, params: Tree, key: chex.PRNGKey, sequence: experience.Sequence
) -> tuple[rssm.Step, jax.Array]:
  """The [T, B] steps of a sequence, and their novelty."""
  keys = jax.random.split(key, sequence.reward.shape[1])
  replayed = dreamer.model.replay(params, keys, sequence)
  return replayed, dreamer.model.novelty(replayed)


def _scrambled(key: chex.PRNGKey, observation: Tree) -> Tree:
  """Permutes each number of [T, B, ...] observations over the batch, by itself; masks stay as they are."""

  def permute(key, x):
    flat = x.reshape(*x.shape[:2], -1)
    one = lambda key, column: jax.random.permutation(key, column, axis=1)
    columns = jax.random.split(key, flat.shape[-1])
    return jax.vmap(one, in_axes=(0, 2), out_axes=2)(columns, flat).reshape(x.shape)

  leaves, tree = jax.tree.flatten(observation_lib.without_mask(observation))
  scrambled = jax.tree.unflatten(tree, map(permute, jax.random.split(key, len(leaves)), leaves))
  mask = observation_lib.action_mask(observation)
  return scrambled if mask is None else scrambled | {observation_lib.ACTION_MASK: mask}


def _surprise(
  dreamer: dreamer_agent.Dreamer,
  params: Tree,
  key: chex.PRNGKey,
  sequence: experience.Sequence,
  replayed: rssm.Step,
) -> jax.Array:
  """See `Examination.surprise`, [T, B]."""
  model, world = dreamer.model, modules.world(params)
  total, batch = sequence.reward.shape
  merged = lambda tree: jax.tree.map(lambda x: x[:-1].reshape(-1, *x.shape[2:]), tree)
  before = merged(replayed.latent)
  count = (total - 1) * batch
  member_key, noise_key = jax.random.split(key)
  imagined = model.rssm.imagine(
    world,
    model.rssm.matrices(world),
    rssm.Recurrent(before, merged(model.networks.actions.encode(sequence.action))),
    jax.random.randint(member_key, (count,), 0, dreamer.config.ensemble_size),
    jax.vmap(model.rssm.imagined_noise)(jax.random.split(noise_key, count)),
  )
  after = lambda x: x[1:].reshape(-1, *x.shape[2:])
  surprise = -model.reward(world, imagined.features).log_prob(after(sequence.reward))
  numbers, statistics = model.networks.numbers, world[modules.NUMBERS]
  if numbers.size:
    outputs, _ = model.rssm.decoder(world, imagined.latent, imagined.previous)
    follows = jnp.ones(count, bool)
    predicted = numbers.predict(outputs, before.numbers, follows, statistics)
    surprise += numbers.loss(predicted, after(replayed.latent.numbers), statistics)[0]
  return jnp.pad(surprise.reshape(total - 1, batch), ((1, 0), (0, 0)))


class Belief(NamedTuple):
  """The state that the agent carries from one step to the next, [1, ...] arrays.

  Attributes:
    latent: the model's latent at the step.
    memory: memory of the context module, which has read the step.
  """

  latent: rssm.Latent
  memory: Tree


class Prediction(NamedTuple):
  """All predictions of the agent at one step, without a batch axis.

  A tree of observations is float32 and has no action mask.

  Attributes:
    observation: the observation that the model's state holds: its numbers (the observed ones at an observed
      step, else imagined), and images as the decoder reads them from the latent.
    reward: [] float32, reward that arrives at the step; it means nothing at FIRST.
    discount: [] float32, probability that the episode continues.
    values: [] float32, mean value of each head of the critics, by its name.
    mask: [A] bool, actions predicted to be legal; all without a mask.
    action: action that the policy takes at the step, as in the action spec.
    chances: [A] float32, probabilities of all choices; None for continuous actions.
    novelty: [] float32, novelty of the transition to the step.
    members: tree of [K, *shape], observation of the step as each member of the ensemble predicts it.
    disagreement: tree of [*shape], standard deviation of the members' predictions, before any is rounded to
      a value that occurs.
    recalled: value and evidence, [A] float32 each, of `memory.Recall` at an observed step; None at an imagined
      one, or without an episodic memory.
    masks: [S, H, W] float32, share of each slot of the model's state in each pixel of the image, of sum 1 over
      slots; None without slots.
  """

  observation: Tree
  reward: jax.Array
  discount: jax.Array
  values: dict[str, jax.Array]
  mask: jax.Array
  action: jax.Array
  chances: jax.Array | None
  novelty: jax.Array
  members: Tree
  disagreement: Tree
  recalled: tuple[jax.Array, jax.Array] | None
  masks: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Steering:
  """The steps of one agent; it holds no arrays, and its methods are pure.

  Attributes:
    dreamer: the agent.
    greedy: whether the policy takes the most likely action; else it is sampled.
  """

  dreamer: dreamer_agent.Dreamer
  greedy: bool

  def initial(self) -> Belief:
    """The belief before a FIRST step."""
    return Belief(
      self.dreamer.model.rssm.initial(1).latent, self.dreamer.actor_critic.context.initial(1)
    )

  def observe(
    self,
    params: Tree,
    key: chex.PRNGKey,
    before: Belief,
    action: jax.Array,
    observation: Tree,
    first: jax.Array,
  ) -> tuple[Belief, Prediction]:
    """Advances by an observed step, to the most likely latent of the posterior.

    Args:
      params: parameters of all parts of the agent.
      key: PRNG key of the policy's action.
      before: belief at the step before.
      action: the action that led to the step, as in the action spec; unread at FIRST.
      observation: observation of the step, with its action mask if there is one.
      first: [] bool, whether the step is FIRST.
    """
    model = self.dreamer.model
    # Recalled anew by each observed step, so that a belief may also be the start of a dream.
    recurrent = self._recurrent(
      before._replace(latent=before.latent._replace(recalled=None)), action
    )
    observation, first = jax.tree.map(lambda x: jnp.asarray(x)[None], (observation, first))
    step, recall = model.observe(params, recurrent, observation, first, None)
    mask = observation_lib.action_mask(observation)
    return self._predict(params, key, before, step, self._held(params, step), mask, recall)

  def imagine(
    self,
    params: Tree,
    key: chex.PRNGKey,
    before: Belief,
    action: jax.Array,
    member: jax.Array | None,
    *,
    sampled: bool,
  ) -> tuple[Belief, Prediction]:
    """Advances by an imagined step.

    Args:
      params: parameters of all parts of the agent.
      key: PRNG key of the sample and of the policy's action.
      before: belief at the step before, observed or imagined.
      action: the action that is taken there, as in the action spec.
      member: [] int32, the member of the ensemble that predicts; None for the mean of all, see
        `RSSM.imagine`.
      sampled: whether the step is sampled; else it is the most likely one.
    """
    model, world = self.dreamer.model, modules.world(params)
    noise_key, action_key = jax.random.split(key)
    noise = jax.tree.map(lambda x: x[None], model.rssm.imagined_noise(noise_key))
    recurrent = self._recurrent(before, action)
    step = model.imagine(
      world,
      model.rssm.matrices(world),
      recurrent,
      None if member is None else member[None],
      noise if sampled else None,
    )
    mask = model.action_mask(world, step.features) if model.networks.has_mask else None
    held = self._held(params, step)
    return self._predict(params, action_key, before, step, held, mask)

  def _held(self, params: Tree, step: rssm.Step) -> Tree:
    """The observation [1, ...] that the model's state holds: its numbers, and images by the decoder."""
    networks = self.dreamer.model.networks
    _, images = self.dreamer.model.rssm.decoder(modules.world(params), step.latent, step.previous)
    return networks.codec.assemble(networks.numbers.to_flat(step.latent.numbers), images)

  def _recurrent(self, before: Belief, action: jax.Array) -> rssm.Recurrent:
    encoded = self.dreamer.model.networks.actions.encode(jnp.asarray(action)[None])
    return rssm.Recurrent(before.latent, encoded)

  def _predict(
    self,
    params: Tree,
    key: chex.PRNGKey,
    before: Belief,
    step: rssm.Step,
    observation: Tree,
    mask: jax.Array | None,
    recall: Any = None,
  ) -> tuple[Belief, Prediction]:
    """The belief and the predictions at a step [1, ...], where `observation` is shown and `mask` is legal."""
    model, policy = self.dreamer.model, self.dreamer.actor_critic
    world, own = modules.world(params), params['actor_critic']
    novelty = model.novelty(step)
    read = policy.read(own, before.memory, step, novelty, step.first)
    context = policy.context.pool(own, read)
    distribution = policy.policy(own, step.features, context, mask)
    noise = policy.noise(key)[None]
    action, _ = policy.sample(distribution, jnp.zeros_like(noise) if self.greedy else noise)
    values = policy.values(own, step.features, context)
    members, unrounded = self._members(world, step, before.latent)
    prediction = Prediction(
      observation=observation,
      reward=model.reward(world, step.features).mean(),
      discount=model.discount(world, step.features),
      values={name: value.mean() for name, value in values.items()},
      mask=model.action_mask(world, step.features),
      action=action,
      chances=jnp.exp(distribution.log_probs) if policy.discrete else None,
      novelty=novelty,
      members=jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), members),
      disagreement=jax.tree.map(lambda x: jnp.std(x, axis=0), unrounded),
      recalled=None if recall is None else (recall.value, recall.evidence),
      masks=None if step.latent.percept is None else model.rssm.paint(world, step.latent)[1],
    )
    after = Belief(step.latent, policy.context.advance(read))
    return after, jax.tree.map(lambda x: x[0], prediction)

  def _members(self, world: Tree, step: rssm.Step, before: rssm.Latent) -> tuple[Tree, Tree]:
    """The observations [K, 1, ...] by each member's most likely latent: as they occur, and unrounded."""
    # As if numbers between the values that occur had been observed, to which predictions are rounded.
    statistics = {
      name: jnp.ones_like(x) if name in ('between', 'off_level') else x
      for name, x in world[modules.NUMBERS].items()
    }

    def decode(world: Tree, stochastic: jax.Array) -> Tree:
      latent, model = step.latent._replace(stochastic=stochastic), self.dreamer.model
      percept = model.rssm.follow(world, before.percept, latent, step.previous)
      if percept is not None and latent.percept is not None:
        latent = latent._replace(percept=jnp.where(step.first[:, None], latent.percept, percept))
      return model.decode(world, latent, step.previous, before.numbers, step.first)

    latents = step.priors.belief.mode().astype(step.latent.stochastic.dtype)
    each = jax.vmap(decode, in_axes=(None, 0))
    return each(world, latents), each(world | {modules.NUMBERS: statistics}, latents)

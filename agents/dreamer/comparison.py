"""Dreams compared with reality: along an episode, over many starts, part by part, and step by step.

`foresee` imagines a real episode from its actions, `measure` compares many dreams with what came, `examine`
asks each part about real steps, and `Steering` advances a dream and the reality beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
  keys = jax.random.split(noise_key, num_steps)
  is_first = jnp.arange(num_steps) == 0
  is_observed = jnp.arange(num_steps) < context
  inputs = (observation, is_first, is_observed, model.networks.actions.encode(action))

  def step(carry, inputs):
    (closed, open_, memory), (key, inputs) = carry, inputs
    observation, first, observed, action = jax.tree.map(lambda x: x[None], inputs)
    seen, _ = model.observe(params, closed, observation, first, None)
    imagined = _imagine(model, model_params, open_, member, key)
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
  _, (predicted, masks, salience) = jax.lax.scan(step, carry, (keys, inputs))
  return agent_lib.Foresight(predicted, salience, masks)


def _imagine(
  model: world_model.WorldModel,
  world: Tree,
  recurrent: rssm.Recurrent,
  member: jax.Array,
  key: chex.PRNGKey,
) -> rssm.Step:
  """A step sampled from the priors of members, [B'] int32, after the states [B', ...]; without a discount."""
  noise = jax.vmap(model.rssm.imagined_noise)(jax.random.split(key, len(member)))
  return model.rssm.imagine(world, model.rssm.matrices(world), recurrent, member, noise)


class Tally(NamedTuple):
  """A sum over states and their number; total / number is the mean. Tallies of batches add up.

  Attributes:
    total: [...] float32, the sum.
    number: [...] float32, how many states were added, or the sum of their weights.
  """

  total: jax.Array
  number: jax.Array


def _tally(values: jax.Array, counted: jax.Array) -> Tally:
  """Sums [..., T, B] values over the last two axes, where `counted` (bool, [..., T, B]) is True."""
  counted = jnp.broadcast_to(counted, values.shape)
  total = jnp.sum(jnp.where(counted, values, 0.0), axis=(-2, -1))
  return Tally(total, jnp.sum(counted.astype(jnp.float32), axis=(-2, -1)))


def measure(
  dreamer: dreamer_agent.Dreamer,
  params: Tree,
  key: chex.PRNGKey,
  sequence: experience.Sequence,
  num_steps: int,
) -> dict[str, Tally]:
  """Compares dreams with reality, from all steps that have `num_steps` steps after them.

  Args:
    dreamer: the agent.
    params: parameters of all parts of the agent.
    key: PRNG key of latents, dreams and actions.
    sequence: [T, B, ...] made by the agent's own policy, T > `num_steps`.
    num_steps: K, imagined steps, at most `config.horizon_max`.

  Returns:
    Tallies of the fields of `Summary`, and [K] of those of `Row`, where index k is k + 1 steps after the
    start.
  """
  total, batch = sequence.reward.shape
  model = dreamer.model
  infer_key, start_key, member_key, noise_key = jax.random.split(key, 4)
  replayed = model.replay(params, jax.random.split(infer_key, batch), sequence)
  last = sequence.step_type == LAST
  novelty = model.novelty(replayed)
  read = dreamer.actor_critic.along(params['actor_critic'], replayed, novelty)
  start_keys = jax.random.split(start_key, batch)
  mask = observation_lib.action_mask(sequence.observation)
  start = dream.starts(read, replayed.latent, last, novelty, start_keys, mask, num_steps=None)
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

  # The same number of steps with the actions that were taken.
  member = jax.random.randint(member_key, (total * batch,), 0, dreamer.config.ensemble_size)

  def step(latent: rssm.Latent, inputs):
    action, key, k = inputs
    action = action.reshape(total * batch, *action.shape[2:])
    recurrent = rssm.Recurrent(latent, action)
    world = modules.world(params)
    imagined = _imagine(model, world, recurrent, member, key)
    flat = lambda x: jnp.roll(x, -k - 1, axis=0).reshape(total * batch, *x.shape[2:])
    observed = jax.tree.map(flat, replayed.features)._replace(state=imagined.features.state)
    rewards = (model.reward(world, read).mean() for read in (imagined.features, observed))
    found = imagined.latent.numbers, *rewards, model.discount(world, imagined.features)
    return imagined.latent, jax.tree.map(lambda x: x.reshape(total, batch, *x.shape[1:]), found)

  action = model.networks.actions.encode(sequence.action)
  actions = jnp.stack([_shifted(action, k) for k in range(num_steps)])
  noise_keys = jax.random.split(noise_key, num_steps)
  inputs = actions, noise_keys, jnp.arange(num_steps)
  _, (numbers, predicted, on_observed, lasts) = jax.lax.scan(step, start.latent, inputs)
  ends = alive & (discount == 0)
  wrong, error = model.networks.numbers.differences(
    numbers, after(replayed.latent.numbers), modules.world(params)[modules.NUMBERS]
  )
  now = model.reward(modules.world(params), replayed.features).mean()
  paid = _share(now, jnp.where(replayed.first, 0.0, sequence.reward))
  unpaid = jnp.where(replayed.first | (sequence.reward != 0), 0.0, jnp.abs(now))
  return {
    'imagined': _tally(imagined.reshape(num_steps, total, batch), whole),
    'real': _tally(real, whole),
    'wrong': _tally(wrong.astype(jnp.float32), alive),
    'error': _tally(error, alive),
    'continues': _tally(lasts, ends),
    'lasts': _tally(lasts, alive & ~ends),
    'reward': _share(predicted, jnp.where(alive, reward, 0.0)),
    'missed': _tally(jnp.abs(predicted), alive & (reward == 0)),
    'observed': _share(on_observed, jnp.where(alive, reward, 0.0)),
    'end': _tally(model.discount(modules.world(params), replayed.features), sequence.discount == 0),
    'paid': paid,
    'unpaid': paid._replace(total=jnp.sum(unpaid)),
    'value': _tally(dreamt.values['task'][0].reshape(total, batch), begins),
  }


def _met(event: jax.Array, num_steps: int) -> jax.Array:
  """Whether a [T, B] bool event occurs at a step or within k steps after it, [K, T, B] bool."""
  later = jnp.stack([_shifted(event, k) for k in range(num_steps)])
  return jnp.cumsum(later, axis=0).astype(bool)


def _share(predicted: jax.Array, real: jax.Array) -> Tally:
  """Tally [...] whose mean is sum(predicted sign(real)) / sum |real|, both over T and B."""
  sum_ = lambda x: jnp.sum(x, axis=(-2, -1))
  return Tally(sum_(predicted * jnp.sign(real)), sum_(jnp.abs(real)))


def _shifted(x: jax.Array, steps: int) -> jax.Array:
  """Shifts [T, ...] so that index t holds step t + `steps`; beyond the end, values are never counted."""
  return jnp.roll(x, -steps, axis=0)


class Row(NamedTuple):
  """Errors of dreams after a number of imagined steps, means over starts; None where nothing was counted.

  `imagined` and `real` follow the policy from the same states, in the model and in the environment; all
  others are of open-loop predictions, with the actions that were taken.

  Attributes:
    steps: number of imagined steps.
    imagined: sum of imagined rewards, each weighted by the probability that the episode lasts.
    real: sum of rewards, until the episode terminates; where a time limit ends it, neither this
      nor `imagined` is counted beyond.
    wrong: whether any binary or discrete number of the observation is predicted wrongly.
    error: mean absolute error of real numbers, in standard deviations.
    continues: predicted discount at real terminations; 0 is right.
    lasts: predicted discount at other steps; 1 is right.
    reward: predicted rewards, each times the sign of the real one, relative to the sum of absolute
      real rewards; 1 is right.
    missed: absolute predicted reward where the real one is 0.
    observed: as `reward`, but from the real observation, with only the state h imagined: a control,
      by which errors of the reward head are told from errors of imagined observations.
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
  observed: float | None


class Summary(NamedTuple):
  """Errors of dreams, and what is predicted from the posterior, without imagination; None without any.

  Attributes:
    value: mean of the critic's values of the starts.
    end: as `Row.continues`, from the posterior.
    paid: as `Row.reward`, from the posterior.
    unpaid: sum of absolute rewards predicted from the posterior where the real one is 0, relative to
      the sum of absolute real rewards; 0 is right.
    rows: errors after 1, 2, 4, ... imagined steps.
  """

  value: float | None
  end: float | None
  paid: float | None
  unpaid: float | None
  rows: Sequence[Row]


def summary(tallies: dict[str, Tally], num_steps: int) -> Summary:
  """Summarises tallies of `measure`, host arrays, of dreams of `num_steps` steps."""

  def mean(name: str, *at: int) -> float | None:
    total, number = (float(x[at]) for x in tallies[name])
    return total / number if number > 0 else None

  steps = [2**power for power in range(num_steps.bit_length())]
  rows = [Row(step, *(mean(name, step - 1) for name in Row._fields[1:])) for step in steps]
  return Summary(mean('value'), mean('end'), mean('paid'), mean('unpaid'), rows)


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
  total, batch = sequence.reward.shape
  infer_key, scramble_key, member_key, noise_key = jax.random.split(key, 4)
  infer_keys = jax.random.split(infer_key, batch)
  replayed = model.replay(params, infer_keys, sequence)
  novelty = model.novelty(replayed)
  scrambled = sequence._replace(observation=_scrambled(scramble_key, sequence.observation))
  before, after = (
    lambda tree, steps=steps: jax.tree.map(lambda x: x[steps].reshape(-1, *x.shape[2:]), tree)
    for steps in (slice(-1), slice(1, None))
  )
  member = jax.random.randint(member_key, ((total - 1) * batch,), 0, model.config.ensemble_size)

  def surprise(action: jax.Array) -> jax.Array:
    """See `Examination.surprise`; the same noise for all actions."""
    recurrent = before(rssm.Recurrent(replayed.latent, model.networks.actions.encode(action)))
    imagined = _imagine(model, world, recurrent, member, noise_key)
    found = -model.reward(world, imagined.features).log_prob(after(sequence.reward))
    numbers, statistics = model.networks.numbers, world[modules.NUMBERS]
    if numbers.size:
      earlier = model.rssm.inputs(world, recurrent.latent)
      own = imagined.latent, imagined.previous
      outputs, _ = model.rssm.decoder(world, *own, earlier)
      if earlier.cells:
        changed = after(replayed.features).changed
        beside = model.rssm.beside_grids(world, *own, earlier, changed)
        outputs = jnp.concatenate([outputs, beside], axis=-1)
      follows = jnp.ones(len(member), bool)
      predicted = numbers.predict(outputs, recurrent.latent.numbers, follows, statistics)
      found += numbers.loss(predicted, after(replayed.latent.numbers), statistics)[0]
    return jnp.pad(found.reshape(total - 1, batch), ((1, 0), (0, 0)))

  own, features = params['actor_critic'], replayed.features
  context = policy.context.pool(own, policy.along(own, replayed, novelty))
  values = policy.values(own, features, context)
  return Examination(
    reward=model.reward(world, features).mean(),
    discount=model.discount(world, features),
    value=values[actor_critic_lib.TASK].mean(),
    novelty=novelty,
    scrambled=model.novelty(model.replay(params, infer_keys, scrambled)),
    surprise=surprise(sequence.action),
    surprise_of_other=surprise(jnp.roll(sequence.action, 1, axis=1)),
  )


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
      action: the action that led to the step, unread at FIRST.
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
    return self._predict(params, key, before, step, mask, recall)

  def imagine(
    self,
    params: Tree,
    key: chex.PRNGKey,
    before: Belief,
    action: jax.Array,
    member: jax.Array,
    sampled: jax.Array,
  ) -> tuple[Belief, Prediction]:
    """Advances by an imagined step; one program for all members and ways.

    Args:
      params: parameters of all parts of the agent.
      key: PRNG key of the sample and of the policy's action.
      before: belief at the step before, observed or imagined.
      action: the action that is taken there, as in the action spec.
      member: [] int32, the member of the ensemble that predicts; -1 for the mean of all, see
        `RSSM.imagine`.
      sampled: [] bool, whether the step is sampled; else it is the most likely one.
    """
    model, world = self.dreamer.model, modules.world(params)
    noise_key, action_key = jax.random.split(key)
    noise = jax.tree.map(lambda x: x[None], model.rssm.imagined_noise(noise_key))
    matrices, recurrent = model.rssm.matrices(world), self._recurrent(before, action)
    ways = [
      functools.partial(model.imagine, world, matrices, recurrent, *way)
      for way in itertools.product((None, member[None]), (None, noise))
    ]
    step = jax.lax.switch(2 * (member >= 0) + sampled, ways)
    mask = model.action_mask(world, step.features) if model.networks.has_mask else None
    return self._predict(params, action_key, before, step, mask)

  def _recurrent(self, before: Belief, action: jax.Array) -> rssm.Recurrent:
    encoded = self.dreamer.model.networks.actions.encode(jnp.asarray(action)[None])
    return rssm.Recurrent(before.latent, encoded)

  def _predict(
    self,
    params: Tree,
    key: chex.PRNGKey,
    before: Belief,
    step: rssm.Step,
    mask: jax.Array | None,
    recall: Any = None,
  ) -> tuple[Belief, Prediction]:
    """The belief and the predictions at a step [1, ...], where the actions of `mask` are legal."""
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
    _, images = model.rssm.decoder(world, step.latent, step.previous)
    numbers = model.networks.numbers.to_flat(step.latent.numbers)
    prediction = Prediction(
      observation=model.networks.codec.assemble(numbers, images),
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
    """The observations [K, 1, ...] by each member's most likely latent: as they occur, and unrounded.

    Unrounded, what is beside a grid is predicted from the unrounded grid.
    """
    # As if numbers between the values that occur had been observed, to which predictions are rounded.
    statistics = {
      name: jnp.ones_like(x) if name.startswith(('between', 'off_level')) else x
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

"""Trains actor and critic of the dreamer anew, with the true environment in place of the world model.

    .venv/bin/python tests/bench/true_environment.py runs/NAME --updates 1000

Where they fail here, the world model is not to blame. What they read of an observation is computed by the networks of
the run that is given, which are not trained; it has discrete actions, and no cognition. 8 environments act, one step an
update, and each of `--dreams` dreams begins at one of the last `--last` states; there is no explorer, and the critic has
no loss on replayed steps.

For every `--every` updates, evaluated with sampled actions for at most `--steps` steps: return, mean reward of the
dreams, and by eighths of these steps the values that the critic gives and the discounted returns that followed, 0 after
the end of an episode.
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hephaestus.actors.environments import wrappers
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import agent as agent_lib
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import dream, rssm, sockets, targets
from hephaestus.launch.interface import policy as policy_lib
from hephaestus.learner import config as learner_config
from hephaestus.learner import dreamer_update

ACTING, EVALUATED = 8, 64  # environments
ONE = sockets.Batch(mean=lambda x: x, largest=lambda x: x, gather=lambda x: x)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('run', help='folder of a run, or name of a shipped agent')
  for name, default in (
    ('updates', 1000), ('every', 100), ('dreams', 64), ('last', 16_000), ('steps', 256), ('seed', 0)
  ):  # fmt: skip
    parser.add_argument(f'--{name}', type=int, default=default)
  parser.add_argument(
    '--checkpoint', help='learner step of a checkpoint of the run; default: the newest'
  )
  flags = parser.parse_args()

  loaded = policy_lib.load(flags.run, flags.checkpoint)
  environment, learner = loaded.environment, loaded.config.learner
  config = dataclasses.replace(loaded.config.agent, novelty_scale=0.0)
  dreamer = agent_lib.make_dreamer(config, environment.observation_spec, environment.action_spec)
  model, policy, given = dreamer.model, dreamer.actor_critic, loaded.params
  optimizer = dreamer_update.make_optimizer(
    learner.policy_learning_rate, learner_config.POLICY_MAX_GRADIENT, learner
  )
  horizon, step_all = config.horizon_max, jax.vmap(environment.step)
  acting = wrappers.AutoReset(environment)

  def reset(environment: Any, key: Any, number: int) -> Any:
    """State and timestep of `number` environments, [number, ...]."""
    return jax.tree.map(jnp.asarray, jax.vmap(environment.reset)(jax.random.split(key, number)))

  def decide(params: Any, key: Any, before: rssm.Recurrent, timestep: Any) -> tuple[Any, ...]:
    """State of the model after the next action, the action, and what `dream.steps` has of a step: [N, ...]."""
    number = len(timestep.step_type)
    first = timestep.step_type == rssm.FIRST
    draw = lambda make, key: jax.vmap(make)(jax.random.split(key, number))
    latent_key, action_key = jax.random.split(key)
    noise = draw(model.rssm.noise, latent_key)
    step, _ = model.observe(given, before, timestep.observation, first, noise)
    read = policy.read(params, (), step, jnp.zeros(number), first)
    mask = observation_lib.action_mask(timestep.observation)
    mask = jnp.ones((number, environment.action_spec.num_values), bool) if mask is None else mask
    distribution = policy.policy(params, read.features, jnp.zeros((number, 0)), mask)
    action, choice = policy.sample(distribution, draw(policy.noise, action_key))
    after = rssm.Recurrent(
      step.latent._replace(recalled=None), model.networks.actions.encode(action)
    )
    return after, action, (read, choice, distribution.log_prob(choice), mask)

  def values(params: Any, read: sockets.PolicyInputs) -> Any:
    context = jnp.zeros((*read.features.state.shape[:-1], 0))
    return {name: x.mean() for name, x in policy.values(params, read.features, context).items()}

  def imagine(params: Any, slow: Any, key: Any, start: Any) -> dream.Dream:
    def step(carry: Any, key: Any) -> tuple[Any, ...]:
      state, timestep, before = carry
      keys = jax.random.split(key, 1 + flags.dreams)
      before, action, decided = decide(params, keys[0], before, timestep)
      read = decided[0]
      state, following = step_all(keys[1:], state, action)
      judged = jax.tree.map(jnp.minimum, values(params, read), values(slow, read))
      arrived = following.reward, following.discount
      return (state, following, before), (decided, arrived, judged)

    keys = jax.random.split(key, horizon + 1)
    _, (decided, arrived, judged) = jax.lax.scan(step, start, keys)
    cut = lambda tree: jax.tree.map(lambda x: x[:horizon], tree)
    read, choice, log_prob, mask = cut(decided)
    none = jnp.zeros((1, flags.dreams))
    reward, discount = (jnp.concatenate([none, x]) for x in cut(arrived))
    ended = jnp.cumsum(jnp.concatenate([none, arrived[1][:horizon] == 0]), axis=0) > 0
    first = jax.tree.map(lambda x: x[0], read)
    weight = (start[1].step_type != ac.LAST).astype(jnp.float32)
    return dream.Dream(
      dream.Start(None, first, none[0], weight, None), read, jnp.zeros_like(reward), choice,
      log_prob, mask, reward,
      jnp.where(ended, 0.0, discount), judged, jnp.int32(horizon), {},
    )  # fmt: skip

  def update(carry: Any, key: Any) -> tuple[Any, jax.Array]:
    (params, slow, optimizer_state, scales), now, seen, number = carry
    keys = jax.random.split(key, 4)
    state, timestep, before = now
    after, action, _ = decide(params, keys[0], before, timestep)
    at = (number * ACTING) % flags.last
    put = lambda all_, x: jax.lax.dynamic_update_slice_in_dim(all_, x, at, 0)
    seen = jax.tree.map(put, seen, (state.env_state, timestep, before))
    now = (*jax.vmap(acting.step)(jax.random.split(keys[1], ACTING), state, action), after)

    count = jnp.minimum((number + 1) * ACTING, flags.last)
    chosen = jax.random.randint(keys[2], (flags.dreams,), 0, count)
    dreamt = imagine(params, slow, keys[3], jax.tree.map(lambda x: x[chosen], seen))
    nothing = {name: jnp.zeros(()) for name in policy.heads}
    scales, aims, _ = targets.imagined(policy, {}, scales, dreamt, nothing, ONE)
    params = params | policy.in_units(policy.critics(params), scales.units)
    slow = policy.in_units(slow, scales.units)
    gradient = jax.grad(policy.loss, has_aux=True)
    (params, optimizer_state), _ = dreamer_update.improved(
      policy,
      optimizer,
      (params, optimizer_state),
      gradient,
      dream.steps(dreamt),
      aims,
      flags.dreams,
    )
    slow = optax.incremental_update(policy.critics(params), slow, dreamer_config.SLOW_CRITIC_RATE)
    reward = jnp.sum(aims.weight * dreamt.reward[1:])
    return ((params, slow, optimizer_state, scales), now, seen, number + 1), reward

  @jax.jit
  def evaluate(params: Any, key: Any) -> tuple[jax.Array, ...]:
    def step(carry: Any, key: Any) -> tuple[Any, ...]:
      state, timestep, before, goes_on = carry
      keys = jax.random.split(key, 1 + EVALUATED)
      before, action, (read, *_) = decide(params, keys[0], before, timestep)
      state, following = step_all(keys[1:], state, action)
      found = following.reward * goes_on, values(params, read)[ac.TASK] * goes_on
      goes_on *= following.step_type != ac.LAST
      return (state, following, before, goes_on), found

    reset_key, key = jax.random.split(key)
    start = (
      *reset(environment, reset_key, EVALUATED),
      model.rssm.initial(EVALUATED),
      jnp.ones(EVALUATED),
    )
    _, (reward, value) = jax.lax.scan(step, start, jax.random.split(key, flags.steps))
    add = lambda after, x: (x + config.gamma * after,) * 2
    _, discounted = jax.lax.scan(add, jnp.zeros(EVALUATED), reward, reverse=True)
    eighths = lambda x: jnp.stack([part.mean() for part in jnp.array_split(x, 8)])
    return reward.sum(0).mean(), eighths(value), eighths(discounted)

  keys = jax.random.split(jax.random.key(flags.seed), 3)
  params = policy.init(keys[0])
  state, timestep = reset(acting, keys[1], ACTING)
  # Of the structure that `decide` returns, which holds more than `initial`; FIRST steps clear it.
  shapes = jax.eval_shape(lambda: decide(params, keys[0], model.rssm.initial(ACTING), timestep)[0])
  before = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  now = state, timestep, before
  hold = lambda x: jnp.zeros((flags.last, *x.shape[1:]), x.dtype)
  seen = jax.tree.map(hold, (state.env_state, timestep, before))
  train = params, policy.critics(params), optimizer.init(params), ac.initial_scales(policy.heads)
  carry: Any = train, now, seen, jnp.int32(0)
  many = jax.jit(lambda carry, key: jax.lax.scan(update, carry, jax.random.split(key, flags.every)))
  for number in range(flags.every, flags.updates + 1, flags.every):
    train_key, key = jax.random.split(jax.random.fold_in(keys[2], number))
    carry, rewards = many(carry, train_key)
    found, value, discounted = evaluate(carry[0][0], key)
    show = lambda x: ' '.join(f'{each:.1f}' for each in np.asarray(x))
    print(
      f'{number:,} updates, {number * ACTING:,} steps: return {found:.2f}, dreams {rewards[-50:].mean():.4f} a step; '
      f'values {show(value)}; returns {show(discounted)}', flush=True,
    )  # fmt: skip


if __name__ == '__main__':
  main()

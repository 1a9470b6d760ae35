"""Trains actor and critic of the dreamer anew, with the true environment in place of the world model.

    .venv/bin/python tests/bench/true_environment.py runs/NAME --updates 1000

Where they fail here, the world model is not to blame. What they read of an observation is computed by the networks of
the run or agent that is given; these are not trained. 8 environments act, one step an update, and each of `--dreams`
dreams begins at one of the last `--last` states; there is no explorer, and the critic has no loss on replayed steps.

For every `--every` updates, evaluated with sampled actions: return, mean reward of the dreams, and by eighths of the
time the values that the critic gives and the discounted returns that followed.
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import agent as agent_lib
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import dream, rssm, sockets, targets
from hephaestus.launch.interface import policy as policy_lib
from hephaestus.learner import config as learner_config
from hephaestus.learner import dreamer_update

ACTING, EVALUATED = 8, 64  # environments
FIRST, LAST = 0, 2
ONE = sockets.Batch(mean=lambda x: x, largest=lambda x: x, gather=lambda x: x)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument(
    'run', help='folder of a run, or name of a shipped agent, with discrete actions'
  )
  for name, default in (
    ('updates', 1000), ('every', 100), ('dreams', 64), ('last', 16_000), ('steps', 256), ('seed', 0)
  ):  # fmt: skip
    parser.add_argument(f'--{name}', type=int, default=default)
  flags = parser.parse_args()

  loaded = policy_lib.load(flags.run)
  environment, learner = loaded.environment, loaded.config.learner
  config = dataclasses.replace(loaded.config.agent, novelty_scale=0.0)
  dreamer = agent_lib.make_dreamer(config, environment.observation_spec, environment.action_spec)
  model, policy, given = dreamer.model, dreamer.actor_critic, loaded.params
  optimizer = dreamer_update.make_optimizer(
    learner.policy_learning_rate, learner_config.POLICY_MAX_GRADIENT, learner
  )
  horizon, step_all = config.horizon_max, jax.vmap(environment.step)
  legal = jnp.ones((horizon, flags.dreams, environment.action_spec.num_values), bool)

  def reset(key: Any, number: int) -> Any:
    return jax.tree.map(jnp.asarray, jax.vmap(environment.reset)(jax.random.split(key, number)))

  def decide(params: Any, key: Any, before: rssm.Recurrent, timestep: Any) -> tuple[Any, ...]:
    """State of the model after the next action, the action, its choice, what was read, and the policy."""
    number = len(timestep.step_type)
    first = timestep.step_type == FIRST
    draw = lambda make, key: jax.vmap(make)(jax.random.split(key, number))
    latent_key, action_key = jax.random.split(key)
    noise = draw(model.rssm.noise, latent_key)
    step, _ = model.observe(given, before, timestep.observation, first, noise)
    read = policy.read(params, (), step, jnp.zeros(number), first)
    distribution = policy.policy(params, read.features, jnp.zeros((number, 0)), None)
    action, choice = policy.sample(distribution, draw(policy.noise, action_key))
    after = rssm.Recurrent(
      step.latent._replace(recalled=None), model.networks.actions.encode(action)
    )
    return after, action, choice, read

  def values(params: Any, read: sockets.PolicyInputs) -> Any:
    context = jnp.zeros((*read.features.state.shape[:-1], 0))
    return {name: x.mean() for name, x in policy.values(params, read.features, context).items()}

  def imagine(params: Any, slow: Any, key: Any, start: Any) -> dream.Dream:
    def step(carry: Any, key: Any) -> tuple[Any, ...]:
      state, timestep, before = carry
      keys = jax.random.split(key, 1 + flags.dreams)
      before, action, choice, read = decide(params, keys[0], before, timestep)
      state, following = step_all(keys[1:], state, action)
      judged = values(params, read), values(slow, read)
      arrived = following.reward, following.discount
      return (state, following, before), (read, choice, arrived, judged)

    keys = jax.random.split(key, horizon + 1)
    _, (read, choice, arrived, judged) = jax.lax.scan(step, start, keys)
    cut = lambda tree: jax.tree.map(lambda x: x[:horizon], tree)
    none = jnp.zeros((1, flags.dreams))
    reward, discount = (jnp.concatenate([none, x]) for x in cut(arrived))
    ended = jnp.cumsum(jnp.concatenate([none, arrived[1][:horizon] == 0]), axis=0) > 0
    first = jax.tree.map(lambda x: x[0], read)
    weight = (start[1].step_type != LAST).astype(jnp.float32)
    return dream.Dream(
      dream.Start(None, first, none[0], weight, None), cut(read), jnp.zeros_like(reward),
      cut(choice), legal, reward,
      jnp.where(ended, 0.0, discount), *judged, jnp.int32(horizon), {},
    )  # fmt: skip

  def update(carry: Any, key: Any) -> tuple[Any, jax.Array]:
    (params, slow, optimizer_state, scales), now, seen, number = carry
    keys = jax.random.split(key, 5)
    state, timestep, before = now
    after, action, *_ = decide(params, keys[0], before, timestep)
    at = (number * ACTING) % flags.last
    put = lambda all_, x: jax.lax.dynamic_update_slice_in_dim(all_, x, at, 0)
    seen = jax.tree.map(put, seen, now)
    stepped = step_all(jax.random.split(keys[1], ACTING), state, action)
    again = timestep.step_type == LAST
    pick = lambda x, y: jnp.where(again.reshape(-1, *[1] * (x.ndim - 1)), x, y)
    now = (*jax.tree.map(pick, reset(keys[2], ACTING), stepped), after)

    count = jnp.minimum((number + 1) * ACTING, flags.last)
    chosen = jax.random.randint(keys[3], (flags.dreams,), 0, count)
    dreamt = imagine(params, slow, keys[4], jax.tree.map(lambda x: x[chosen], seen))
    scales, aims, _ = targets.imagined(policy, {}, scales, dreamt, ONE)
    steps = ac.ImaginedSteps(dreamt.read, dreamt.choice, legal)
    grads = jax.grad(lambda own: policy.loss(own, steps, aims)[0])(params)
    change, optimizer_state = optimizer.update(grads, optimizer_state)
    faster = jax.tree.map(lambda x: dreamer_config.CRITIC_RATE * x, policy.critics(change))
    params = optax.apply_updates(params, change | faster)
    slow = optax.incremental_update(policy.critics(params), slow, dreamer_config.SLOW_CRITIC_RATE)
    reward = jnp.sum(aims.weight * dreamt.reward[1:])
    return ((params, slow, optimizer_state, scales), now, seen, number + 1), reward

  @jax.jit
  def evaluate(params: Any, key: Any) -> tuple[jax.Array, ...]:
    def step(carry: Any, key: Any) -> tuple[Any, ...]:
      state, timestep, before, goes_on = carry
      keys = jax.random.split(key, 1 + EVALUATED)
      before, action, _, read = decide(params, keys[0], before, timestep)
      state, following = step_all(keys[1:], state, action)
      found = following.reward * goes_on, values(params, read)[ac.TASK] * goes_on
      goes_on *= following.step_type != LAST
      return (state, following, before, goes_on), found

    start = (*reset(key, EVALUATED), model.rssm.initial(EVALUATED), jnp.ones(EVALUATED))
    _, (reward, value) = jax.lax.scan(step, start, jax.random.split(key, flags.steps))
    add = lambda after, x: (x + config.gamma * after,) * 2
    _, discounted = jax.lax.scan(add, jnp.zeros(EVALUATED), reward, reverse=True)
    eighths = lambda x: x.reshape(8, -1).mean(-1)
    return reward.sum(0).mean(), eighths(value), eighths(discounted)

  keys = jax.random.split(jax.random.key(flags.seed), 3)
  params = policy.init(keys[0])
  now = (*reset(keys[1], ACTING), model.rssm.initial(ACTING))
  shapes = jax.eval_shape(lambda: decide(params, keys[0], now[2], now[1])[0])
  now = (*now[:2], jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
  seen = jax.tree.map(lambda x: jnp.zeros((flags.last, *x.shape[1:]), x.dtype), now)
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

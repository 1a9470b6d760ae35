"""A policy as an actor of Acme, which `acme.EnvironmentLoop` plays."""

from typing import Any

import acme
import dm_env
import jax


class Actor(acme.Actor):
  """Acts by a policy in one environment; it observes nothing for training, and `update` does nothing.

  Args:
    policy: the `Policy`, whose module imports this one.
    seed: seed of the sampled actions.
    greedy: whether to take the most probable action; else it is sampled.
  """

  def __init__(self, policy: Any, *, seed: int, greedy: bool):
    self._policy = policy
    self._key = jax.random.key(seed)
    self._greedy = greedy
    self._state = policy.initial_state()

  def observe_first(self, timestep: dm_env.TimeStep) -> None:
    self._state = self._policy.reset(self._state, True)

  def select_action(self, observation: Any) -> Any:
    action, self._state = self._policy.act(
      observation, self._state, key=self._key, greedy=self._greedy
    )
    return action

  def observe(self, action: Any, next_timestep: dm_env.TimeStep) -> None:
    pass

  def update(self, wait: bool = False) -> None:
    pass

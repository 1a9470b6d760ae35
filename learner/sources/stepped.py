"""Unrolls on the host, between compiled updates: one process, and an environment that is not in JAX.

Replay, credits and updates are as in `unrolled`. The instances of the environments are no part of a
checkpoint, so a run that resumes begins new episodes.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.learner import devices as devices_lib
from hephaestus.learner import loop
from hephaestus.learner.sources import unrolled

Tree = Any


class HostProgram(unrolled.FusedProgram):
  """As `unrolled.FusedProgram`, but `collect` unrolls, and the compiled program only samples and updates.

  Its `unroll` is of all environments of the run, whose sequences the devices share. Its functions return None
  if the run was asked to stop meanwhile.
  """

  def __init__(self, *arguments: Any, **options: Any):
    super().__init__(*arguments, **options)
    self._insert = devices_lib.mapped(self._store, self.devices)
    self._split_key = jax.jit(lambda key: jax.random.split(jax.random.wrap_key_data(key[0])))
    self._env_state: Any = None
    self._played = dict.fromkeys(self.sums, 0.0)  # until the next update, or report

  def _init_envs(self, key: jax.Array) -> Tree:
    del key
    return ()

  def _replay_shapes(self) -> Any:
    if self.replay is not None:
      return super()._replay_shapes()
    shared = len(self.devices), self.num_envs // len(self.devices)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*shared, *x.shape), x.dtype), self._schema)

  def _iterate(self, state: unrolled.FusedState) -> tuple[unrolled.FusedState, loop.Metrics]:
    """One update from what `collect` has added, on one device."""
    batch = state.replay
    if self.replay is not None:
      state, batch = self._draw(state)
    train, metrics = self.update.update(state.train, batch)
    return state._replace(train=train), metrics

  def collect(self, state: unrolled.FusedState) -> unrolled.FusedState | None:
    """Adds one unroll to a state on the devices, which is donated; None if asked to stop meanwhile.

    The first call resets the environments.
    """
    key, unroll_key = self._split_key(state.key)
    if self._env_state is None:
      self._env_state = self.unroll.init(jax.random.fold_in(unroll_key, 0))
    if self._env_state is None:
      return None
    version = unrolled.part_of(state.train.step, 0)
    result = self.unroll.unroll(self.acting(state), unroll_key, self._env_state, version, 0)
    if result is None:
      return None
    self._env_state, sequence, episodes = result
    for name, total in unrolled.counted(episodes).items():
      self._played[name] += float(total)
    shared = devices_lib.split(jax.tree.map(np.asarray, sequence), self.devices)
    if self.replay is not None:
      shared = self._insert(state.replay, shared)
    keys = np.tile(jax.random.key_data(key), (len(self.devices), 1))
    return state._replace(key=devices_lib.put(keys, self.devices), replay=shared)

  def updates_allowed(self, state: unrolled.FusedState) -> int:
    """Number of updates that the replay ratio allows before the next unroll; 1 for an on-policy agent."""
    if self.replay is None:
      return 1
    return int(unrolled.part_of(state.replay.credit, 0)) // self.replay.rate.denominator

  def iterate(
    self, state: unrolled.FusedState, count: int
  ) -> tuple[unrolled.FusedState, loop.Metrics]:
    """As `unrolled.FusedProgram.iterate`, for at most as many updates as are allowed."""
    state, metrics = super().iterate(state, count)
    played = {
      name: jnp.full(len(self.devices), total, jnp.float32)
      for name, total in self.take_played().items()
    }
    return state, metrics | devices_lib.put(played, self.devices)

  def take_played(self) -> dict[str, float]:
    """Sums over the episodes that ended since the last call of this or of `iterate`."""
    played, self._played = self._played, dict.fromkeys(self.sums, 0.0)
    return played

  def close(self) -> None:
    """Closes the environments; the next `collect` makes and resets new ones."""
    self._env_state = None
    self.unroll.close()


class Stepped(unrolled.Unrolled):
  """As `unrolled.Unrolled`, for a `HostProgram`: unrolls in `collect`, and then updates while allowed."""

  phase = 'updating'
  _program: HostProgram
  _allowed = 0  # updates before the next unroll

  def place(self, whole: unrolled.FusedState, step: int) -> unrolled.FusedState:
    state = super().place(whole, step)
    if self._program.replay is not None:
      self._allowed = self._program.updates_allowed(state)
    return state

  def collect(self, state: unrolled.FusedState) -> unrolled.FusedState:
    if self._allowed:
      return state
    after = self._program.collect(state)
    if after is None:
      return state
    self._allowed = self._program.updates_allowed(after)
    if self._program.replay is not None:
      self._environment_step = self._program.environment_step(after)
      self._keep_versions(after)  # those kept before were donated; no update may follow
    return after

  def ready(self, timeout_seconds: float) -> bool:
    del timeout_seconds
    return self._allowed > 0

  def update(
    self, state: unrolled.FusedState, step: int, most: int
  ) -> tuple[unrolled.FusedState, loop.Done]:
    state, done = super().update(state, step, min(most, self._allowed))
    self._allowed -= done.updates
    return state, done

  def report(self, span: loop.Interval, totals: Mapping[str, float]) -> dict[str, Any]:
    """As `Unrolled.report`, with the episodes that ended since the last update."""
    played = self._program.take_played()
    return super().report(
      span, {name: total + played.get(name, 0.0) for name, total in totals.items()}
    )

  def close(self) -> None:
    self._program.close()

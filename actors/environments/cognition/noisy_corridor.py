"""NoisyCorridor: a line of cells without rewards, some of them noisy, to test intrinsic rewards."""

import dataclasses
from typing import ClassVar

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.actors.environments import environment

CELL_PIXELS = 16


class State(flax.struct.PyTreeNode):
  """State of one corridor."""

  place: jax.Array  # [] int32, the agent's cell, counted from the left
  pixels: jax.Array  # [num_pixels] float32, observed in that cell at this step
  step_count: jax.Array  # [] int32, steps since the reset


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisyCorridor(environment.DiscreteEnvironment):
  """The noisy television: in some cells the pixels are random at each step, elsewhere they are 0.

  Burda et al. (2018), "Large-scale study of curiosity-driven learning", section 4.2. In a noisy cell
  the prediction error of the pixels never falls.

  Actions are left, stay, right. The agent begins in a random open cell, so a random policy is in each
  of them equally often at every step. All rewards are 0; the episode is truncated after `max_steps`.
  The observation is [length + num_pixels] float32: the agent's place, one-hot, and the pixels, each 0
  or 1, or standard normal. With normal pixels the spec has no bounds, so agents read all numbers,
  also of the place, as unbounded. The metric `at_noise` of an episode is its share of steps in noisy cells.
  """

  length: int = 20  # number of cells
  first_noisy: int = 8  # the leftmost noisy cell
  num_noisy: int = 4  # number of adjacent noisy cells
  num_pixels: int = 8  # number of pixels, each random in a noisy cell
  pixels: str = 'binary'  # distribution of the noise: 'binary', 1 with probability 1/2, or 'normal'
  # number of cells, counted from the left, that the agent can enter; None for all
  open_cells: int | None = None
  max_steps: int = 64  # time limit

  metrics: ClassVar[dict[str, str]] = {'at_noise': 'mean'}
  action_names: ClassVar[tuple[str, ...]] = ('left', 'stay', 'right')

  def __post_init__(self):
    def check(fine: bool, name: str, remedy: str):
      if not fine:
        raise ValueError(f'environment.{name}={getattr(self, name)}: {remedy}')

    check(self.pixels in ('binary', 'normal'), 'pixels', "choose 'binary' or 'normal'")
    self._check_least(length=2, num_noisy=1, num_pixels=1, max_steps=1)
    self._check_size(self.length + self.num_pixels, 'length', 'num_pixels')
    most = self.length - self.num_noisy
    remedy = f'from 0 to {most}, so that {self.num_noisy} noisy cells end within the corridor'
    check(0 <= self.first_noisy <= most, 'first_noisy', remedy)
    check(1 <= self._num_open <= self.length, 'open_cells', f'from 1 to {self.length}, or null')

  @property
  def _num_open(self) -> int:
    return self.length if self.open_cells is None else self.open_cells

  @property
  def observation_spec(self) -> specs.Array:
    shape = (self.length + self.num_pixels,)
    if self.pixels == 'normal':
      return specs.Array(shape, np.float32, 'place_and_pixels')
    return specs.BoundedArray(shape, np.float32, 0.0, 1.0, 'place_and_pixels')

  def reset(self, key: chex.PRNGKey) -> tuple[State, environment.TimeStep]:
    place_key, pixels_key = jax.random.split(key)
    place = jax.random.randint(place_key, (), 0, self._num_open)
    state = State(place, self._pixels(pixels_key, place), jnp.zeros((), jnp.int32))
    return state, environment.restart(self.observe(state), {'at_noise': 0.0})

  def step(
    self, key: chex.PRNGKey, state: State, action: jax.Array
  ) -> tuple[State, environment.TimeStep]:
    place = jnp.clip(state.place + action - 1, 0, self._num_open - 1)
    state = State(place, self._pixels(key, place), state.step_count + 1)
    timestep = jax.lax.cond(
      state.step_count == self.max_steps,
      environment.truncation,
      environment.transition,
      0.0,
      self.observe(state),
      {'at_noise': self._is_noisy(place)},
    )
    return state, timestep

  def draw(self, observation: environment.Observation) -> np.ndarray:
    """Draws the agent in white on a black line of cells, above the pixels."""
    corridor, pixels = np.split(np.asarray(observation), [self.length])
    shown = np.zeros((2, max(self.length, self.num_pixels)))
    shown[0, : self.length], shown[1, : self.num_pixels] = corridor, np.clip(pixels, 0.0, 1.0)
    frame = np.kron(shown, np.full((CELL_PIXELS, CELL_PIXELS), 255)).astype(np.uint8)
    return np.stack([frame] * 3, axis=-1)

  def _pixels(self, key: chex.PRNGKey, place: jax.Array) -> jax.Array:
    """[num_pixels] float32, random in a noisy cell and 0 in any other."""
    if self.pixels == 'normal':
      noise = jax.random.normal(key, (self.num_pixels,))
    else:
      noise = jax.random.bernoulli(key, 0.5, (self.num_pixels,)).astype(jnp.float32)
    return jnp.where(self._is_noisy(place), noise, 0.0)

  def _is_noisy(self, place: jax.Array) -> jax.Array:
    return (place >= self.first_noisy) & (place < self.first_noisy + self.num_noisy)

  def observe(self, state: State) -> jax.Array:
    return jnp.concatenate([jax.nn.one_hot(state.place, self.length), state.pixels])

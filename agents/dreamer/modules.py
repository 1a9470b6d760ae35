"""Networks of the world model: their inputs, sizes and initial parameters."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from dm_env import specs

from hephaestus.agents import agent as agent_lib
from hephaestus.agents import distributions, networks
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import novelty, sockets
from hephaestus.agents.dreamer import numbers as numbers_lib

Tree = Any

CHANGE = 'change'
"""Name of the members' networks of changes of numbers."""

NUMBERS, AVERAGE_CHANGE, OF_REWARDS = 'numbers', 'average_change', 'of_rewards'
"""Names of the model's statistics: those of numbers, the moving average of the networks CHANGE, which
`RSSM.prior` reads, and those of intrinsic rewards, by reward, see `Reward.statistics`."""

MEMBERS = ('prior', CHANGE)
"""Networks of which each member of the ensemble has its own."""

CELLS, POOL, CHANGED, CELL_DECODER = 'cells', 'pool', 'changed', 'cell_decoder'
"""Names of the networks of each grid, which its number follows: see `Networks.of_grids`."""

READ = CELLS, POOL, CHANGED
"""Those of them that acting reads."""

BESIDE_GRIDS = 'beside_grids'
"""Name of the decoder of the numbers that are in no grid, where there are both."""

REWARD, CONTINUE, MASK = 'reward', 'continue', 'mask'
"""Names of the heads: of the reward, of the episode's continuation, and of the legal actions."""


class Features(NamedTuple):
  """Inputs of the heads at a step, in the compute dtype; each head reads some of them.

  The model's heads do not read `recalled`, since the reward at a step is due to the action before, and
  imagination recalls nothing after its start. Actor and critic do not read `transition`, `changed` and
  `difference`, since the transition to a step does not matter to what follows. Of a grid at the step the heads of
  reward and continuation read only `changed`, which does not tell where something is, so what is learned in one
  place is known in all. Which actions are legal depends on the step alone: the head of the mask reads the grid as
  actors do.

  Attributes:
    state: [..., S], the GRU's state h, and the stochastic state z if there are images.
    numbers: [..., I + P], inputs of the observation's numbers, see `Numbers.inputs`, and any percept.
    transition: [..., C + R], action and embedded numbers of the step before, and what was recalled there.
    recalled: [..., R], what a memory recalls at the step, see `sockets.Memory`.
    cells: [..., V], a vector of each grid, see `networks.Pool`.
    changed: [..., V], the same of its cells before and after the transition, of those that it changed.
    places: [..., P'], where what a grid holds is, see `numbers.places`, and what is around it, see
      `numbers.surroundings`; of heads, only actor, critic and that of the mask read it.
    difference: [..., D'], what the transition changed of the inputs that are not of a grid; of width 0 without grids.
  """

  state: jax.Array
  numbers: jax.Array
  transition: jax.Array
  recalled: jax.Array
  cells: jax.Array
  changed: jax.Array
  places: jax.Array
  difference: jax.Array


class Inputs(NamedTuple):
  """What networks read of the numbers of an observation, in the compute dtype; see `RSSM.inputs`.

  Attributes:
    numbers: [..., I + P], as of `Features`.
    vectors: [..., V], `cells` of `Features`.
    cells: for each grid [..., M, D], its M cells as `networks.Cells` gives them.
    places: [..., P'], as of `Features`; BESIDE_GRIDS reads those of the step before.
  """

  numbers: jax.Array
  vectors: jax.Array
  cells: tuple[jax.Array, ...]
  places: jax.Array


def world(params: Tree) -> Tree:
  """What functions of the world model read of all parameters of the agent: its networks and its statistics."""
  own: Tree = params['world_model'] | params[agent_lib.STATISTICS]['world_model']
  return own


@dataclasses.dataclass(frozen=True)
class Networks:
  """The networks of one environment's world model.

  Attributes:
    config: sizes and constants, a `DreamerConfig` with options of the guests.
    observation_spec: tree of `dm_env.specs.Array`.
    action_spec: see `distributions.Actions`.
    guests: what is plugged in; it decides what is part of a state.
  """

  config: Any
  observation_spec: Any
  action_spec: specs.BoundedArray
  guests: sockets.Guests = sockets.NO_GUESTS

  @functools.cached_property
  def actions(self) -> distributions.Actions:
    return distributions.Actions(self.action_spec)

  @functools.cached_property
  def codec(self) -> observation_lib.Codec:
    if self.guests.perception:
      return observation_lib.Codec(observation_lib.as_images(self.observation_spec), cnn=True)
    return observation_lib.Codec(self.observation_spec, cnn=self.config.image_channels > 0)

  @functools.cached_property
  def numbers(self) -> numbers_lib.Numbers:
    """Reader and predictor of the F numbers of an observation, which are part of the model's state."""
    return numbers_lib.Numbers(self.codec.flat_spec)

  @functools.cached_property
  def perception(self) -> sockets.Perception | None:
    """The perception of the observation's image; ValueError where its specs do not fit."""
    return self.guests.perception(self) if self.guests.perception else None

  @property
  def cnn_specs(self) -> list[specs.Array]:
    """Specs of the images that CNNs encode and decode; none with a perception."""
    return [] if self.guests.perception else self.codec.image_specs

  @functools.cached_property
  def memory(self) -> sockets.Memory | None:
    return self.guests.memory(self) if self.guests.memory else None

  @functools.cached_property
  def context(self) -> sockets.Context:
    """The context module; ValueError where the environment's specs do not fit it."""
    return (self.guests.context or sockets.Context)(self)

  @functools.cached_property
  def rewards(self) -> dict[str, type[sockets.Reward]]:
    """The classes of the intrinsic rewards that are on, by name, in the order of the critic's heads."""
    kinds: dict[str, type[sockets.Reward]] = {novelty.NAME: novelty.Novelty, **self.guests.rewards}
    return {name: kind for name, kind in kinds.items() if kind.weight(self.config) > 0}

  @property
  def recalled_size(self) -> int:
    """R, width of what a memory recalls at a step; 0 without a memory."""
    return self.memory.width if self.memory else 0

  def warnings(self) -> list[str]:
    """A line for each limit of `observation`, such as MAX_CELLS, that an observation exceeds."""
    flat = observation_lib.MAX_CELLS
    return self.numbers.warnings() + [
      f'an image of {math.prod(spec.shape):,} numbers, more than {flat:,}: read by a CNN, and no part of '
      'the state'
      for spec in self.cnn_specs
      if observation_lib.is_bounded(spec, 0, 1) or observation_lib.is_picture(spec)
    ]

  @property
  def has_mask(self) -> bool:
    return observation_lib.action_mask(self.observation_spec) is not None

  @property
  def latent_type(self) -> Any:
    return distributions.LATENTS[self.config.latent]

  @property
  def latent_size(self) -> int:
    """Z, width of a sample of the stochastic state."""
    return self.latent_type.size(self.config.stochastic_size, self.config.classes)

  @property
  def belief_outputs(self) -> int:
    """Number of network outputs that parametrise a distribution of the stochastic state."""
    return self.latent_type.num_outputs(self.config.stochastic_size, self.config.classes)

  @property
  def embedding_size(self) -> int:
    """E, width of the embedding of an observation's numbers and percept; 0 if it has only images for CNNs."""
    return self.config.hidden_size if self.numbers.size or self.guests.perception else 0

  @property
  def cell_size(self) -> int:
    """D, features of a cell of a grid: 32 with the laptop's layers of 128."""
    return max(1, self.config.hidden_size // 4)

  @property
  def pool_size(self) -> int:
    """Width of the vector of one grid; even."""
    return 2 * max(1, self.config.hidden_size // 2)

  @property
  def vector_size(self) -> int:
    """V, width of the vectors of all grids."""
    return self.pool_size * len(self.numbers.grids)

  @property
  def places_size(self) -> int:
    """P', width of `Features.places`."""
    return sum((3 + self.cell_size) * kind.cell_inputs for kind in self.numbers.grids)

  @property
  def difference_size(self) -> int:
    """D', width of `Features.difference`."""
    if not self.numbers.grids:
      return 0
    return self.numbers.input_size - self.numbers.placed_size + self.percept_width

  @property
  def encoded_size(self) -> int:
    """Width of an encoded observation: its embedded numbers and percept, and the features of CNNs."""
    return self.embedding_size + self.config.hidden_size * len(self.cnn_specs)

  @property
  def previous_size(self) -> int:
    """C, width of the inputs of a transition: the previous action, and embedded numbers and percept."""
    return self.actions.size + self.embedding_size

  @property
  def inferred_size(self) -> int:
    """Z if there are images for CNNs, since only then recurrence and heads read z; else 0."""
    return self.latent_size if self.cnn_specs else 0

  @property
  def draws_without_latent(self) -> bool:
    """Whether dreams draw numbers without z: where there are neither images, nor real numbers, nor grids.

    What is drawn of them is decided by a uniform number, while real ones are means, given z.
    """
    others = self.cnn_specs or self.percept_width or self.numbers.num_reals or self.numbers.grids
    return self.numbers.size > 0 and not others

  @property
  def percept_width(self) -> int:
    """P, width of the percept in a state, 0 without a perception."""
    return self.perception.width if self.perception else 0

  def empty_features(self, *axes: int) -> Features:
    """Features of zeros with the given leading axes."""
    zeros = lambda size: jnp.zeros((*axes, size), self.config.dtype)
    return Features(
      state=zeros(self.config.deterministic_size + self.inferred_size),
      numbers=zeros(self.numbers.input_size + self.percept_width),
      transition=zeros(self.previous_size + self.recalled_size),
      recalled=zeros(self.recalled_size),
      cells=zeros(self.vector_size),
      changed=zeros(self.vector_size),
      places=zeros(self.places_size),
      difference=zeros(self.difference_size),
    )

  @functools.cached_property
  def modules(self) -> dict[str, nn.Module]:
    """Networks by name, except 'recurrence' and 'posterior', which `rssm` writes out."""
    config = self.config
    mlp = functools.partial(networks.MLP, config.hidden_size, dtype=config.dtype)
    head = functools.partial(networks.Towers, config.hidden_size, 1, dtype=config.dtype)
    modules: dict[str, nn.Module] = {
      'prior': mlp(1, self.belief_outputs),
      REWARD: head(config.num_bins, 0.0),
      CONTINUE: head(1, 1.0),
    }
    if self.embedding_size:
      modules['encoder'] = mlp(config.encoder_layers, raw=True)
    if self.numbers.size:
      of_grids = self.numbers.grid_outputs
      beside = self.numbers.num_outputs - of_grids
      modules['decoder'] = mlp(config.encoder_layers, of_grids or beside)
      modules[CHANGE] = mlp(1, 2 * self.numbers.num_changes)
      if of_grids and beside:
        towers = functools.partial(networks.Towers, config.hidden_size, dtype=config.dtype)
        modules[BESIDE_GRIDS] = towers(1 + config.encoder_layers, beside, 1.0)
    if self.cnn_specs:
      shapes = tuple(spec.shape for spec in self.cnn_specs)
      channels = config.image_channels
      modules['image_encoder'] = networks.Encoder(mlp(1), channels)
      modules['image_decoder'] = networks.Decoder(mlp(1, 0), channels, shapes)
    if self.has_mask:
      modules[MASK] = head(self.actions.size, 1.0)
    pool = functools.partial(networks.Pool, self.pool_size, dtype=config.dtype)
    for number, kind in enumerate(self.numbers.grids):
      outputs = sum(kind.cell_outputs)
      assert kind.grid
      own = {
        CELLS: networks.Cells(self.cell_size, dtype=config.dtype),
        POOL: pool(kind.cell_inputs, kind.grid[:2]),
        CHANGED: pool(kind.cell_inputs),
        CELL_DECODER: networks.CellDecoder(
          self.cell_size,
          kind.grid[:2],
          kind.cell_inputs,
          outputs,
          kind.grid[-1],
          dtype=config.dtype,
        ),
      }
      modules |= {f'{name}_{number}': module for name, module in own.items()}
    return modules

  def of_grids(self, name: str) -> list[str]:
    """The names in `modules` of all grids' networks `name`, one for each."""
    return [f'{name}_{number}' for number in range(len(self.numbers.grids))]

  def _inputs(self, name: str) -> Any:
    """Example inputs of a module, a batch of one."""
    zeros = lambda *shape: jnp.zeros((1, *shape))
    state = self.config.deterministic_size
    belief = zeros(state + self.latent_size + self.previous_size)
    features = self.empty_features(1)
    inputs = {
      'encoder': (features.numbers, features.cells),
      'image_encoder': (zeros(0), *(zeros(*spec.shape) for spec in self.cnn_specs)),
      'prior': (zeros(state + self.previous_size),),
      CHANGE: (zeros(state + self.previous_size),),
      'decoder': (belief,),
      BESIDE_GRIDS: self.beside_inputs(belief, features.numbers, features.changed, features.places),
      'image_decoder': (belief,),
    }
    for number, kind in enumerate(self.numbers.grids):
      assert kind.grid
      height, width, _ = kind.grid
      cells = zeros(height * width, self.cell_size + kind.cell_inputs)
      inputs |= {
        f'{CELLS}_{number}': (zeros(height, width, kind.cell_inputs),),
        f'{POOL}_{number}': (cells, zeros(3 * kind.cell_inputs)),
        f'{CHANGED}_{number}': (cells, cells),
        f'{CELL_DECODER}_{number}': (
          cells,
          belief,
          zeros(self.actions.size),
          self.beside_grids(features.numbers),
        ),
      }
    return inputs.get(name, self._head_inputs(name, features))

  def apart(self, numbers: jax.Array) -> jax.Array:
    """Those of inputs of numbers [..., I + P] that are of no grid."""
    return numbers[..., self.numbers.placed_size :]

  def beside_inputs(
    self, belief: jax.Array, numbers: jax.Array, changed: jax.Array, places: jax.Array
  ) -> tuple[tuple[jax.Array, ...], ...]:
    """The inputs of BESIDE_GRIDS, a `networks.Towers`, at a step, each [..., ...].

    They are its belief, `changed` of its `Features`, and of `Inputs` of the step before `places` and `numbers`, of
    these those of no grid, without a percept.
    """
    return (belief,), (self.beside_grids(numbers),), (changed,), (places,)

  def beside_grids(self, numbers: jax.Array) -> jax.Array:
    """Those of inputs of numbers [..., I + P] that are of no grid, without a percept."""
    return numbers[..., self.numbers.placed_size : self.numbers.input_size]

  def _head_inputs(self, name: str, features: Features) -> tuple[tuple[jax.Array, ...], ...]:
    """The inputs of a head, a `networks.Towers`."""
    known = features.state, features.transition
    if name == MASK:
      return known, (features.numbers,), (features.cells,), (features.places,)
    return known, (self.apart(features.numbers),), (features.changed,), (features.difference,)

  def of_observation(self, features: Features) -> Features:
    """The same features [..., ...] with zeros for h and for the transition: what a step's observation tells.

    Of grids also what the observation of the step before tells.
    """
    memory = jnp.arange(features.state.shape[-1]) < self.config.deterministic_size
    return features._replace(
      state=jnp.where(memory, 0, features.state), transition=jnp.zeros_like(features.transition)
    )

  def head(self, params: Tree, name: str, features: Features) -> jax.Array:
    """Outputs of the head `name`, [..., outputs] in the compute dtype, at features [..., ...]."""
    return self.apply(params, name, *self._head_inputs(name, features))

  def init(self, key: chex.PRNGKey, others: Mapping[str, tuple[nn.Module, Any]]) -> Tree:
    """Initial parameters by network, float32; parameters of MEMBERS, the ensemble, have a leading axis K.

    Args:
      key: PRNG key.
      others: modules of intrinsic rewards by name, each with its example inputs.
    """
    modules = {name: (module, self._inputs(name)) for name, module in self.modules.items()}
    modules |= others
    perception = self.perception
    names = ('recurrence', 'posterior', *modules, *([perception.name] if perception else []))
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
    params = self._initial_cell(keys['recurrence'], keys['posterior'])
    for name, (module, inputs) in modules.items():
      init = lambda key, module=module, inputs=inputs: module.init(key, *inputs)['params']
      if name in MEMBERS:  # a key for each
        params[name] = jax.vmap(init)(jax.random.split(keys[name], self.config.ensemble_size))
      else:
        params[name] = init(keys[name])
    if perception:
      params[perception.name] = perception.init(keys[perception.name])
    return params

  def _initial_cell(self, recurrence_key: chex.PRNGKey, posterior_key: chex.PRNGKey) -> Tree:
    """Parameters of the recurrence and of the posterior.

    recurrence: kernel [Z' + A + H + E, 3 H] on [z', a, h, e(x)], and a layer norm [3 H]; z' is z where
      there are images
    posterior: kernel [H + encoded, hidden] on [h, encoded observation], and a layer norm; then
      output [hidden, outputs] and bias [outputs]
    """
    config = self.config
    state, hidden = config.deterministic_size, config.hidden_size
    kernel = nn.initializers.lecun_normal()
    norm = lambda size: {'scale': jnp.ones(size), 'bias': jnp.zeros(size)}
    hidden_key, output_key = jax.random.split(posterior_key)
    inputs = self.inferred_size + self.actions.size + state + self.embedding_size
    output = nn.initializers.variance_scaling(1.0, 'fan_in', 'truncated_normal')
    return {
      'recurrence': {
        'kernel': kernel(recurrence_key, (inputs, 3 * state)),
        'norm': norm(3 * state),
      },
      'posterior': {
        'kernel': kernel(hidden_key, (state + self.encoded_size, hidden)),
        'norm': norm(hidden),
        'output': output(output_key, (hidden, self.belief_outputs)),
        'bias': jnp.zeros(self.belief_outputs),
      },
    }

  def apply(self, params: Tree, name: str, *inputs: Any) -> jax.Array:
    """The output of the network `name` on [..., F] inputs, with its parameters in `params`."""
    return networks.apply(self.modules[name], params[name], *inputs)

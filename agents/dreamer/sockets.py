"""The sockets of the agent: what plugs into it, and what a plug has to offer.

    intrinsic reward    r(step, next step), for a critic and an actor: `Reward`
    context             what actors read besides the features of a step: `Context`
    memory              what the model reads besides the observation of a step: `Memory`
    perception          an image as a vector that the model's state holds: `Perception`

The agent has none of them by default, but for its own reward, novelty. `Guests` says which are plugged in.
Rewards and contexts are subclasses, since most of their methods have a default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import jax

if TYPE_CHECKING:
  import flax.linen as nn

  from hephaestus.agents import experience
  from hephaestus.agents import networks as networks_lib
  from hephaestus.agents.dreamer import config as dreamer_config
  from hephaestus.agents.dreamer import modules
  from hephaestus.agents.dreamer import rssm as rssm_lib

Tree = Any
Metrics = dict[str, jax.Array]
Mean = Callable[[jax.Array], jax.Array]
"""Array of one part of the batch, which may be spread over devices -> its mean over all parts."""


class Guests(NamedTuple):
  """What is plugged into the agent; making it raises ValueError where an environment's specs do not fit.

  Attributes:
    rewards: the classes of the intrinsic rewards that are on, by name, in the order of the critic's heads.
    context: networks of the world model -> the context module; by default the empty one.
    memory: networks of the world model -> the memory; None for none.
    perception: networks of the world model -> the perception of the observation's image; None for none.
  """

  rewards: Mapping[str, type[Reward]] = {}
  context: Callable[[modules.Networks], Context] | None = None
  memory: Callable[[modules.Networks], Memory] | None = None
  perception: Callable[[modules.Networks], Perception] | None = None


NO_GUESTS = Guests()


@dataclasses.dataclass(frozen=True)
class Reward:
  """An intrinsic reward r(before, after) of a step and the step after it; holds no arrays.

  Values of its returns have a head of the critic, by its name. Its advantages are divided by the range of
  its returns or by their own root mean square, and weighted by `weight`.

  Attributes:
    rssm: the world model's RSSM.
    name: of the reward, its head of the critic, and its metrics.
    explores: whether it trains the explorer, not the task's actor; see `actor_critic`.
    is_centred: whether the mean reward of the steps is subtracted. Then ending an episode forgoes nothing on
      average: an agent that is rewarded at every step learns not to finish. A reward that is a cost at
      every step has to keep its mean.
    shown: names of the networks that `explain` reads, so that actors fetch them.
  """

  rssm: rssm_lib.RSSM

  name: ClassVar[str]
  explores: ClassVar[bool] = False
  is_centred: ClassVar[bool] = False
  shown: ClassVar[tuple[str, ...]] = ()

  @classmethod
  def weight(cls, config: dreamer_config.DreamerConfig) -> float:
    """Weight of its scaled advantage, relative to the task's, which is 1; 0 where it is off."""
    return getattr(config, f'{cls.name}_scale')

  def modules(self) -> Mapping[str, tuple[nn.Module, Any]]:
    """Networks by name, each with its example inputs, a batch of one; trained by `loss`."""
    return {}

  def statistics(self) -> dict[str, jax.Array]:
    """Initial running statistics by name, float32, which no optimizer changes; empty if it has none."""
    return {}

  def updated(
    self, statistics: dict[str, jax.Array], replayed: rssm_lib.Step, novelty: jax.Array, mean: Mean
  ) -> dict[str, jax.Array]:
    """The running statistics after an update, whose own rewards have been read before.

    Args:
      statistics: the statistics before.
      replayed: [T, B] steps.
      novelty: [T, B] float32, novelty of the transitions to the steps.
      mean: over the batch of all devices.
    """
    return statistics

  def loss(
    self,
    params: Tree,
    keys: jax.Array,
    replayed: rssm_lib.Step,
    sequence: experience.Sequence,
    expected: jax.Array,
  ) -> tuple[jax.Array | float, Metrics]:
    """Loss of its networks on replayed steps, a part of the world model's loss.

    Args:
      params: parameters of the world model, with its own networks and statistics, as below.
      keys: [B] PRNG keys, one for each sequence.
      replayed: [T, B] steps.
      sequence: [T, B, ...], the same steps.
      expected: [T, B, F] float32, the numbers of the observation that the model decodes at each step; with
        grids they mean nothing at FIRST.

    Returns:
      The loss [], and metrics by their full names, such as `intrinsic/...`.
    """
    return 0.0, {}

  def reward(self, params: Tree, before: rssm_lib.Step, after: rssm_lib.Step) -> jax.Array:
    """The reward that arrives at a step, [...] float32.

    Args:
      params: parameters of the world model.
      before: the step before, [...], replayed or imagined; only its latent and features are known.
      after: the step, [...].
    """
    raise NotImplementedError

  def metrics(self, params: Tree, replayed: rssm_lib.Step, rewards: jax.Array) -> Metrics:
    """Metrics [] of [T, B] replayed steps and their rewards, by name after the prefix `intrinsic/`."""
    return {self.name: rewards.mean()}

  def explain(self, params: Tree, step: rssm_lib.Step) -> dict[str, jax.Array]:
    """Numbers [N] float32 by name that `hephaestus watch` shows at a step of N environments."""
    return {}


class PolicyInputs(NamedTuple):
  """What actors and critics read at steps, [..., ...].

  Attributes:
    features: features of the steps.
    memory: the context module's memory of the episode's earlier steps.
    own: what else the context module reads of the steps, see `Context.inputs`.
  """

  features: modules.Features
  memory: Tree
  own: Tree


@dataclasses.dataclass(frozen=True)
class Context:
  """What actors read of a step besides its features; this one is empty.

  A context is a vector [C] that may summarise the earlier steps of the episode: these are in a memory, which
  acting and imagination carry from step to step. Methods are pure functions, for any leading axes.

  Attributes:
    networks: the networks of the world model, with the config and the specs of the environment.
    size: C, width of a context.
    replaces_features: whether actors read only the context, and critics only the features; else both read
      both.
  """

  networks: modules.Networks
  replaces_features: ClassVar[bool] = False

  @property
  def size(self) -> int:
    return 0

  def modules(self) -> dict[str, tuple[networks_lib.MLP, int]]:
    """Networks by name, each with the width of its input; below, `params` has their parameters."""
    return {}

  def inputs(self, params: Tree, step: rssm_lib.Step, novelty: jax.Array) -> Tree:
    """What the module reads of a step [..., ...] besides features, from the step and its novelty [...]."""
    return ()

  def initial(self, batch: int) -> Tree:
    """The memory at the first step of an episode, [batch, ...]."""
    return ()

  def advance(self, read: PolicyInputs) -> Tree:
    """The memory at the next step of the episode."""
    return ()

  def pool(self, params: Tree, read: PolicyInputs) -> jax.Array:
    """The contexts of steps, [..., C]; finite also where all is 0, as at steps that no dream has reached."""
    return read.features.state[..., :0]

  def loss(
    self, params: Tree, read: PolicyInputs, action: jax.Array, error: jax.Array
  ) -> jax.Array | None:
    """Loss of the module's own at replayed steps, [...] float32; None where only actors train it.

    Args:
      params: parameters of the actor-critic.
      read: the steps [..., ...].
      action: [..., A] float32, encoded actions that were taken there.
      error: [...] float32, errors of the critic that followed, see `ActorCritic.context_loss`.
    """
    return None

  def shown(self, params: Tree, read: PolicyInputs) -> Tree:
    """What `hephaestus watch` and its dreams show of steps, arrays [..., ...] by name; see `Agent.explain`."""
    return {}

  def metrics(self, params: Tree, read: PolicyInputs, mean: Mean) -> Metrics:
    """Metrics [] of [T, B] replayed steps, by their full names."""
    return {}


class Memory(Protocol):
  """A memory of steps of all episodes, in arrays that no optimizer changes: they are called `held`.

  Attributes:
    width: R, width of what is recalled at a step.
    acted: names of the arrays that acting reads.
    can_begin: whether some dreams begin at remembered steps, see `begin`.
  """

  @property
  def width(self) -> int: ...

  @property
  def acted(self) -> tuple[str, ...]: ...

  @property
  def can_begin(self) -> bool: ...

  def init(self) -> Tree:
    """The arrays before anything is remembered."""

  def recall(
    self, held: Tree, observation: Tree, version: jax.Array | None = None
  ) -> tuple[jax.Array, Any]:
    """What is recalled at observations [..., *shape], from those arrays that are `acted`.

    That is the inputs of networks, [..., R] float32, and whatever `updated` and `explain` need of it. If given,
    only what was written up to `version` ([...] int32, of the parameters that acted) is known.
    """

  def updated(
    self, held: Tree, recall: Any, replayed: Replayed, update: jax.Array, batch: Batch
  ) -> tuple[Tree, Metrics]:
    """The arrays after an update by the steps of one part of a batch, and metrics [] by name.

    `recall` is the second result of the method at these steps. What is written in update number `update`
    ([] int32) is known from version `update` + 1 on.
    """

  def begin(
    self, held: Tree, keys: jax.Array, update: jax.Array
  ) -> tuple[jax.Array, rssm_lib.Latent, jax.Array]:
    """Which of N dreams begin at a remembered step, [N] bool, by [N] PRNG keys of the dreams.

    And for each dream a latent [N, ...] with what is recalled there, and the inputs of the transition to it,
    [N, C].
    """

  def explain(self, held: Tree, recall: Any) -> dict[str, jax.Array]:
    """What `hephaestus watch` shows of what was recalled, by name."""


class Replayed(NamedTuple):
  """Replayed steps that a memory may keep.

  Attributes:
    sequence: [T, B, ...].
    step: the same as the model represents them.
    value: [T, B] float32, the critic's values of the task.
  """

  sequence: experience.Sequence
  step: rssm_lib.Step
  value: jax.Array


class Batch(NamedTuple):
  """Reductions over a whole batch, which may be spread over devices; the learner knows how.

  Attributes:
    mean: array [...] of one part of the batch -> its mean over all parts, [...].
    largest: array [...] of one part -> its maximum over all parts, [...].
    gather: array [...] of one part -> the arrays of all P parts, [P, ...].
  """

  mean: Mean
  largest: Callable[[jax.Array], jax.Array]
  gather: Callable[[jax.Array], jax.Array]


class Perception(Protocol):
  """Makes a vector of an image, which the state of the model holds; images are then predicted, too.

  Attributes:
    name: name of its parameters and prefix of its metrics.
    width: P, width of the vector, called a percept.
  """

  @property
  def name(self) -> str: ...

  @property
  def width(self) -> int: ...

  def init(self, key: jax.Array) -> Tree:
    """Initial parameters, float32."""

  def observe(
    self, params: Tree, images: jax.Array, before: jax.Array, first: jax.Array
  ) -> tuple[jax.Array, Any]:
    """Percepts [T, B, P] of images [T, B, H, W, C] as a codec encodes them, and what may be shown of it.

    `before` [B, P] are percepts of the step before; at `first` [T, B] bool an episode begins.
    """

  def imagine(self, params: Tree, before: jax.Array, context: jax.Array) -> jax.Array:
    """Percepts [..., P] one step after percepts [..., P]; `context` [..., F] are inputs of a decoder."""

  def paint(self, params: Tree, percept: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decodes percepts [..., P]: images [..., H, W, C], and masks of their parts, [..., S, H, W]; float32."""

  def loss(self, params: Tree, keys: jax.Array, steps: Percepts) -> tuple[jax.Array, Metrics]:
    """Loss [] of its percepts of replayed steps, by [B] PRNG keys of the sequences; metrics [] by name."""


class Percepts(NamedTuple):
  """Percepts of [T, B] replayed steps, and what their loss reads.

  Attributes:
    percept: [T, B, P], from `Perception.observe`.
    images: [T, B, H, W, C], of which they are.
    before: [T, B, P], percepts of the step before.
    context: [T, B, F], inputs of a decoder, see `Perception.imagine`.
    follows: [T, B] bool, steps to which a transition leads.
    image_loss: (painted images, encoded images) [..., H, W, C] -> the loss of each, [...].
  """

  percept: jax.Array
  images: jax.Array
  before: jax.Array
  context: jax.Array
  follows: jax.Array
  image_loss: Callable[[jax.Array, jax.Array], jax.Array | float]

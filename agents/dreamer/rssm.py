"""RSSM with an ensemble of priors: its state, its equations, and its steps.

    encoder          e_t, images_t = encoder(x_t, images)
    sequence model   h_t = GRU(h_{t-1}, [z_{t-1}, a_{t-1}, e_{t-1}])
    posterior        z_t ~ q(z | h_t, e_t, images_t)
    prior            z_t ~ p_k(z | h_t, a_{t-1}, e_{t-1}),  k = 1 .. K
    decoder          x_t ~ p(x | h_t, z_t, a_{t-1}, e_{t-1}, x_{t-1}), of grids first, then of what is beside them

Hafner et al. (2019), "Learning latent dynamics for planning from pixels", with K priors in place of
one. All members read one state and predict in one latent space, so their disagreement is comparable;
as in Sekar et al. (2020), "Planning to explore via self-supervised world models".

The state also holds x_t, the numbers of the observation: along real sequences the observed ones, in
imagination samples of the decoder, which may copy a number from the step before: see `numbers.Numbers`.
So latents need not carry what stays as it is, and heads read observations as a model-free agent does.
Prior and decoder both read the previous action and numbers, which h_t takes in only by parts, as units
with long time constants change slowly: what follows from them for certain is then certain to the prior,
too, and latents carry the rest.

CNNs encode and decode images, which are not part of the state: see `networks.Encoder`. Only then do
sequence model and heads read z. Else x_t is the whole observation, and z_t would only add noise, which
makes an observation of long ago harder to remember. With a perception an image is part of the state, too:
as a percept, which is to it as x_t to the numbers, observed or imagined. See `sockets.Perception`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import dm_env
import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.agents import experience, kernels, networks
from hephaestus.agents.dreamer import modules, novelty
from hephaestus.agents.dreamer import numbers as numbers_lib

Tree = Any
FIRST = int(dm_env.StepType.FIRST)

UNROLL = 2
"""Steps unrolled in the scan: on a CPU a gradient took 0.6 of the time without unrolling."""


class Latent(NamedTuple):
  """The model's belief about the environment at one step, and the numbers observed at that step.

  Attributes:
    deterministic: [..., H] h_t, the GRU's state, in the compute dtype.
    stochastic: [..., Z] z_t, a sample of the latent state, in the compute dtype.
    numbers: [..., F] float32 x_t, observed or imagined; see `numbers.Numbers`.
    recalled: [..., R] float32, what a memory recalls at the step, in imagination at the start of the
      rollout; None without a memory, and in a stored state.
    percept: [..., P] in the compute dtype, what a perception makes of the image, observed or imagined; None
      without a perception.
    inputs: what networks read of the numbers, in dreams, whose next step then need not compute it again, at
      their start by the parameters before an update; else, and where there are no grids, None.
  """

  deterministic: jax.Array
  stochastic: jax.Array
  numbers: jax.Array
  recalled: jax.Array | None = None
  percept: jax.Array | None = None
  inputs: modules.Inputs | None = None


class Recurrent(NamedTuple):
  """The model's state between steps: its belief, and the action chosen from it.

  Attributes:
    latent: latent [..., H] and so on of the previous step.
    action: [..., A] float32, the encoded action of the previous step.
  """

  latent: Latent
  action: jax.Array


class Prior(NamedTuple):
  """The predictions of a step by all K members of the ensemble.

  Attributes:
    belief: distributions of the stochastic state, [K, ..., Z].
    change: predicted changes of the numbers, [K, ..., num_changes], in root mean squares of observed ones;
      input of novelty.
  """

  belief: Any
  change: numbers_lib.Change

  def moments(self) -> novelty.Moments:
    """Moments of latents, and of changes of numbers if any; input of novelty.

    A usual change, 1, counts as noise: in units of the noise that they predict, members disagree most
    where nothing moves, and a learner of novelty would stay there. Predicted noise is at most as large,
    since it grows without bounds where nothing was observed.
    """
    latent = (*self.belief.moments(), 0.0)
    if not self.change.mean.shape[-1]:
      return (latent,)
    return latent, (self.change.mean, jnp.minimum(self.change.variance, 1.0), 1.0)


class Step(NamedTuple):
  """A step as the model represents it, acted, replayed or imagined alike, with any leading axes.

  Attributes:
    latent: the state at the step, [..., ...].
    features: inputs of the heads, [..., ...].
    previous: [..., C], inputs of the transition to the step; 0 at FIRST.
    belief: distribution of which `latent.stochastic` is a sample, [..., Z]: at an observed step the
      posterior, at an imagined one the prior of one member.
    priors: predictions of the step by all members, [K, ..., ...]; of imagined steps only some, see
      `RSSM.imagine`.
    first: [...] bool, steps that begin an episode.
    discount: [...] float32 that arrived at a replayed step, at an imagined one the predicted probability
      that the episode continues; None while acting, where nothing reads it.
    earlier: at replayed steps with grids [..., ...], what networks read of the numbers of the step before, 0 at
      FIRST; else None.
  """

  latent: Latent
  features: modules.Features
  previous: jax.Array
  belief: Any
  priors: Prior
  first: jax.Array
  discount: Any = None
  earlier: modules.Inputs | None = None


class Noise(NamedTuple):
  """Noise of one imagined step.

  Attributes:
    latent: [..., stochastic_size] float32 for the latent, see `RSSM.noise`.
    numbers: [...] float32 for the numbers, with grids for these only, see `Numbers.sample`.
    beside_grids: [...] float32 for what is beside grids. The same number would do only for what does not depend on
      what is drawn in them: once that is known, the number no longer is uniform.
  """

  latent: jax.Array
  numbers: jax.Array
  beside_grids: jax.Array


@dataclasses.dataclass(frozen=True)
class RSSM:
  """The recurrent state-space model; it holds no arrays, and its methods are pure.

  Attributes:
    networks: the networks of the world model. Below, E is their `embedding_size`, C their `previous_size`.
  """

  networks: modules.Networks

  @property
  def dtype(self):
    return self.networks.config.dtype

  # The five equations.

  def perceive(
    self, params: Tree, observation: Tree, before: jax.Array | None, first: jax.Array
  ) -> jax.Array | None:
    """The percepts of observed steps [T, B, ...], [T, B, P], after [B, P]; None without a perception."""
    perception = self.networks.perception
    if perception is None or before is None:
      return None
    _, image = self.networks.codec.encode(observation)
    return perception.observe(params[perception.name], image, before, first)[0]

  def encoder(
    self, params: Tree, observation: Tree, percept: jax.Array | None = None
  ) -> tuple[jax.Array, modules.Inputs, jax.Array]:
    """The numbers x_t of observations, [..., F], their inputs, and [e_t, image features], [..., encoded].

    Args:
      params: parameters of the world model.
      observation: tree of [..., *shape] arrays.
      percept: [..., P], from `perceive`.
    """
    numbers = self.networks.numbers.read(observation)
    inputs = self.read(params, numbers, percept)
    parts = [self.embed(params, inputs)]
    if self.networks.cnn_specs:
      _, *images = self.networks.codec.encode(observation)
      parts.append(self.networks.apply(params, 'image_encoder', numbers[..., :0], *images))
    return numbers, inputs, jnp.concatenate(parts, axis=-1)

  def sequence_model(
    self, params: Tree, matrices: Tree, recurrent: Recurrent, embedding: Any
  ) -> jax.Array:
    """h_t = GRU(h_{t-1}, [z_{t-1}, a_{t-1}, e_{t-1}]), with a layer norm of all gates.

    Args:
      params: parameters of the world model.
      matrices: its `matrices` in the compute dtype.
      recurrent: [B, ...], latent and encoded action of the step before.
      embedding: [B, E], e_{t-1}, 0 at FIRST; or its `kernels.Term`.

    Returns:
      [B, H].
    """
    latent, action = recurrent
    inputs = [*self._inferred(latent), action.astype(self.dtype), latent.deterministic, embedding]
    gates = kernels.product(inputs, matrices['recurrence'])
    gates = kernels.normalise(gates, **params['recurrence']['norm'], centred=True)
    memory_steps = self.networks.config.memory_steps
    return networks.gru(gates.astype(self.dtype), latent.deterministic, memory_steps)

  def posterior(self, params: Tree, matrices: Tree, deterministic: jax.Array, encoded: Any) -> Any:
    """q(z | h_t, e_t, images_t), an MLP with one hidden layer.

    Args:
      params: parameters of the world model.
      matrices: its `matrices` in the compute dtype.
      deterministic: [B, H], h_t.
      encoded: [B, encoded], from `encoder`; or its `kernels.Term`.

    Returns:
      The belief over z, [B, Z].
    """
    posterior = params['posterior']
    hidden = kernels.product([deterministic, encoded], matrices['posterior'])
    hidden = kernels.silu(kernels.normalise(hidden, **posterior['norm']).astype(self.dtype))
    output = kernels.product([hidden], matrices['belief'])
    return self._belief(output + posterior['bias'].astype(self.dtype))

  def prior(
    self, params: Tree, deterministic: jax.Array, previous: jax.Array, first: jax.Array
  ) -> Prior:
    """p_k(z | h_t, a_{t-1}, e_{t-1}) of all members, and the changes of the numbers that they predict.

    Changes have no gradient into the state: they serve only novelty. They are predicted by a moving average
    of the networks, since the last batches move each member by itself, which looks new.

    Args:
      params: parameters of the world model.
      deterministic: [..., H], h_t.
      previous: [..., previous_size], inputs of the transition to the step.
      first: [...] bool, FIRST steps, whose predicted changes are 0.
    """
    known = jnp.concatenate([deterministic, previous], axis=-1)
    priors = self._prior(params, self._member_outputs('prior', params['prior'], known), known)
    mean = jnp.where(first[..., None], 0.0, priors.change.mean)
    return priors._replace(change=priors.change._replace(mean=mean))

  def change(
    self, params: Tree, deterministic: jax.Array, previous: jax.Array
  ) -> numbers_lib.Change:
    """As `prior`'s changes, by the networks that are trained, [K, ..., num_changes]."""
    known = jnp.concatenate([deterministic, previous], axis=-1)
    return self._change(params[modules.CHANGE], known)

  def decoder(
    self,
    params: Tree,
    latent: Latent,
    previous: jax.Array,
    earlier: modules.Inputs | None = None,
  ) -> tuple[jax.Array, list[jax.Array]]:
    """Outputs for `Numbers.predict`, [..., outputs], with grids of these only, and images, [..., H, W, C]; float32.

    The image of a percept is painted from it. `earlier` is what networks read of the step before, of which only what
    its grids hold, and what is beside them, counts.
    """
    inputs = self.decoder_inputs(latent, previous)
    outputs, images = jnp.zeros((*inputs.shape[:-1], 0)), []
    if self.networks.numbers.size:
      outputs = self.networks.apply(params, 'decoder', inputs).astype(jnp.float32)
    if earlier and earlier.cells:
      outputs += self.decoded_cells(params, inputs, previous, earlier)
    if latent.percept is not None:
      images = [self.paint(params, latent)[0]]
    elif self.networks.cnn_specs:
      pixels = self.networks.apply(params, 'image_decoder', inputs).astype(jnp.float32)
      shapes = [spec.shape for spec in self.networks.codec.image_specs]
      parts = jnp.split(pixels, np.cumsum([np.prod(shape) for shape in shapes])[:-1], axis=-1)
      images = [x.reshape(*x.shape[:-1], *shape) for x, shape in zip(parts, shapes, strict=True)]
    return outputs, images

  def decoded_cells(
    self, params: Tree, belief: jax.Array, previous: jax.Array, earlier: modules.Inputs
  ) -> jax.Array:
    """The part of `decoder`'s outputs that is from each cell of the step before, [..., outputs] float32.

    Of several beliefs [N, ..., F] it is [N, ..., outputs].
    """
    action = previous[..., : self.networks.actions.size]
    names = self.networks.of_grids(modules.CELL_DECODER)
    others = self.networks.beside_grids(earlier.numbers)
    each = zip(names, earlier.cells, strict=True)
    found = [self.networks.apply(params, name, x, belief, action, others) for name, x in each]
    return self.networks.numbers.of_cells(found)

  def beside_grids(
    self,
    params: Tree,
    latent: Latent,
    previous: jax.Array,
    earlier: modules.Inputs,
    changed: jax.Array,
  ) -> jax.Array:
    """Outputs for `Numbers.predict` of what is in no grid, [..., outputs] float32, from what the step changed in grids.

    So that both agree: a wound and who is near, an item and who took it. `earlier` is of the step before, and
    `changed` of `Features`, [..., V].
    """
    if modules.BESIDE_GRIDS not in params:
      return jnp.zeros((*previous.shape[:-1], 0))
    belief = self.decoder_inputs(latent, previous)
    read = self.networks.beside_inputs(belief, earlier.numbers, changed, earlier.places)
    return self.networks.apply(params, modules.BESIDE_GRIDS, *read).astype(jnp.float32)

  def paint(self, params: Tree, latent: Latent) -> tuple[jax.Array, jax.Array]:
    """The image and the masks of the latent's percept, which there must be; see `Perception.paint`."""
    perception = self.networks.perception
    assert perception is not None and latent.percept is not None
    return perception.paint(params[perception.name], latent.percept)

  def follow(
    self, params: Tree, before: jax.Array | None, latent: Latent, previous: jax.Array
  ) -> jax.Array | None:
    """The percept of a step as predicted, [..., P], whatever its latent has; None without a perception.

    Args:
      params: parameters of the world model.
      before: [..., P], percept of the step before.
      latent: [..., H] and [..., Z] of the step.
      previous: [..., C], inputs of the transition to the step.
    """
    perception = self.networks.perception
    if perception is None or before is None:
      return None
    context = self.decoder_inputs(latent, previous)
    return perception.imagine(params[perception.name], before, context)

  # Inputs of the equations.

  def initial(self, batch: int) -> Recurrent:
    """The state before a FIRST step: zeros, [batch, ...]."""
    sizes = self.networks
    latent = Latent(
      deterministic=jnp.zeros((batch, sizes.config.deterministic_size), self.dtype),
      stochastic=jnp.zeros((batch, sizes.latent_size), self.dtype),
      numbers=jnp.zeros((batch, sizes.numbers.size), jnp.float32),
      percept=jnp.zeros((batch, sizes.percept_width), self.dtype) if sizes.perception else None,
    )
    return Recurrent(latent, jnp.zeros((batch, sizes.actions.size), jnp.float32))

  def noise(self, key: chex.PRNGKey) -> jax.Array:
    """Noise for one sample of a latent, [stochastic_size] float32; see `noise` of `distributions.LATENTS`."""
    config = self.networks.config
    return self.networks.latent_type.noise(key, config.stochastic_size, config.classes)

  def imagined_noise(self, key: chex.PRNGKey) -> Noise:
    """Noise for one imagined step of one rollout."""
    latent_key, numbers_key = jax.random.split(key)
    beside_key = jax.random.fold_in(key, 2)  # the split is what folding in 0 and 1 gives
    return Noise(
      self.noise(latent_key), jax.random.uniform(numbers_key), jax.random.uniform(beside_key)
    )

  def matrices(self, params: Tree) -> Tree:
    """Matrices of a step, float32, from parameters; to be made once, before a loop of `imagine`.

    Returns:
      By name: `recurrence` [Z' + A + H + E, 3 H], kernel of the gates, centred since a layer norm
      follows, where Z' is Z where there are images, else 0; `posterior` [H + encoded, hidden] and
      `belief` [hidden, outputs], kernels of both layers of the posterior.
    """
    posterior = params['posterior']
    return {
      'recurrence': kernels.centre(params['recurrence']['kernel']),
      'posterior': posterior['kernel'],
      'belief': posterior['output'],
    }

  def embed(self, params: Tree, inputs: modules.Inputs) -> jax.Array:
    """The embedding e, [..., E], of what networks read of an observation."""
    if not self.networks.embedding_size:
      return inputs.numbers[..., :0]
    return self.networks.apply(params, 'encoder', inputs.numbers, inputs.vectors)

  def read(
    self, params: Tree, numbers: jax.Array, percept: jax.Array | None = None
  ) -> modules.Inputs:
    """What networks read of [..., F] numbers and a [..., P] percept."""
    sizes, statistics = self.networks, jax.lax.stop_gradient(params[modules.NUMBERS])
    flat = sizes.numbers.inputs(numbers, statistics).astype(self.dtype)
    if percept is not None:
      flat = jnp.concatenate([flat, percept], axis=-1)
    grids = sizes.numbers.cells(numbers, statistics)
    names = sizes.of_grids(modules.CELLS)
    cells = tuple(sizes.apply(params, *each) for each in zip(names, grids, strict=True))
    where = tuple(numbers_lib.places(grid, flat.dtype) for grid in grids)
    vectors = self._pooled(params, modules.POOL, flat, cells, where)
    around = map(numbers_lib.surroundings, grids, cells)
    places = jnp.concatenate([flat[..., :0], *where, *around], axis=-1)
    return modules.Inputs(flat, vectors, cells, places)

  def inputs(self, params: Tree, latent: Latent) -> modules.Inputs:
    """What networks read of the numbers of a latent, computed where it does not hold it."""
    return latent.inputs or self.read(params, latent.numbers, latent.percept)

  def _pooled(
    self, params: Tree, name: str, like: jax.Array, *cells: tuple[jax.Array, ...]
  ) -> jax.Array:
    """The vectors of all grids, [..., V], by their networks `name`; `like` [..., F] has the leading axes."""
    names = self.networks.of_grids(name)
    each = zip(names, *cells, strict=True)
    pooled = [self.networks.apply(params, own, *parts) for own, *parts in each]
    return jnp.concatenate([like[..., :0], *pooled], axis=-1)

  def features(
    self,
    params: Tree,
    latent: Latent,
    previous: jax.Array,
    before: jax.Array | None = None,
    earlier: modules.Inputs | None = None,
  ) -> modules.Features:
    """The inputs of all heads, [..., ...].

    Args:
      params: parameters of the world model.
      latent: the latent, [..., H], [..., Z] and [..., F].
      previous: [..., C], inputs of the transition that led to the step.
      before: [..., R], `recalled` of the step before; None where only actor and critic read features.
      earlier: what networks read of the numbers of the step before, 0 at FIRST; None without grids.
    """
    inputs = self.inputs(params, latent)
    cells: tuple[jax.Array, ...] = ()
    difference = inputs.numbers[..., :0]
    if earlier is not None:
      cells = earlier.cells
      difference = self.networks.apart(inputs.numbers) - self.networks.apart(earlier.numbers)
    recalled = latent.recalled
    if recalled is None:
      recalled = jnp.zeros((*previous.shape[:-1], 0))
    before = jnp.zeros_like(recalled) if before is None else before
    return modules.Features(
      state=jnp.concatenate([latent.deterministic, *self._inferred(latent)], axis=-1),
      numbers=inputs.numbers,
      cells=inputs.vectors,
      places=inputs.places,
      changed=self._pooled(params, modules.CHANGED, inputs.numbers, cells, inputs.cells),
      transition=jnp.concatenate([previous, before.astype(self.dtype)], axis=-1),
      recalled=recalled.astype(self.dtype),
      difference=difference,
    )

  # Steps.

  def observe(
    self,
    params: Tree,
    recurrent: Recurrent,
    observation: Tree,
    first: jax.Array,
    noise: jax.Array | None,
    recalled: jax.Array | None = None,
  ) -> Step:
    """Advances the state by one observed step, [B, ...].

    Args:
      params: parameters of the world model.
      recurrent: state after the previous step, [B, ...].
      observation: tree of [B, ...] arrays.
      first: [B] bool, whether the step is FIRST, which clears the state.
      noise: [B, ...] from `noise`, or None for the mode.
      recalled: [B, R] float32, from a memory; None without one.
    """
    matrices = self.cast(self.matrices(params))
    latent, action = recurrent = _cleared(recurrent, first)
    before = self.inputs(params, latent)
    previous = self._previous(action, self.embed(params, before), first)
    one_step = jax.tree.map(lambda x: x[None], (observation, first))
    percept = self.perceive(params, one_step[0], latent.percept, one_step[1])
    percept = None if percept is None else percept[0]
    numbers, inputs, encoded = self.encoder(params, observation, percept)
    deterministic = self.sequence_model(params, matrices, recurrent, self._embedding(previous))
    belief = self.posterior(params, matrices, deterministic, encoded)
    stochastic = self._sample(belief, noise)
    priors = self.prior(params, deterministic, previous, first)
    latent = Latent(deterministic, stochastic, numbers, recalled, percept, inputs)
    features = self.features(params, latent, previous, earlier=following(before, first))
    return Step(latent._replace(inputs=None), features, previous, belief, priors, first)

  def imagine(
    self,
    params: Tree,
    matrices: Tree,
    recurrent: Recurrent,
    member: jax.Array | None,
    noise: Noise | None,
    novel: slice = slice(None),
  ) -> Step:
    """Advances the state of B' rollouts by one imagined step, [B', ...].

    Args:
      params: parameters of the world model.
      matrices: `matrices(params)`.
      recurrent: state after the previous step, [B', ...].
      member: [B'] int32, the member of the ensemble whose prior each rollout samples; None for the prior
        of the members' mean outputs.
      noise: [B', ...] from `imagined_noise`, or None for the most likely latent and numbers.
      novel: the B'' rollouts of which the step has the priors of all members, [K, B'', ...].
    """
    before, read = recurrent.latent.numbers, self.inputs(params, recurrent.latent)
    embedding = self.embed(params, read)
    previous = jnp.concatenate([recurrent.action.astype(self.dtype), embedding], axis=-1)
    deterministic = self.sequence_model(params, self.cast(matrices), recurrent, embedding)
    known = jnp.concatenate([deterministic, previous], axis=-1)
    outputs = self._member_outputs('prior', params['prior'], known)
    batch = len(recurrent.action)
    followed = self._belief(
      outputs.mean(axis=0) if member is None else outputs[member, jnp.arange(batch)]
    )
    stochastic = self._sample(followed, None if noise is None else noise.latent)
    latent = Latent(deterministic, stochastic, before, recurrent.latent.recalled)
    earlier = read if read.cells else None
    told = latent
    if self.networks.draws_without_latent:
      told = latent._replace(stochastic=jnp.zeros_like(latent.stochastic))
    imagined = self.imagined_numbers(params, told, previous, earlier, noise)
    percept = self.follow(params, recurrent.latent.percept, latent, previous)
    latent = latent._replace(numbers=imagined, percept=percept)
    latent = latent._replace(inputs=self.read(params, imagined, percept))
    features = self.features(params, latent, previous, recurrent.latent.recalled, earlier)
    if recurrent.latent.inputs is None:
      latent = latent._replace(inputs=None)
    priors = self._prior(params, outputs[:, novel], known[novel])
    return Step(latent, features, previous, followed, priors, jnp.zeros(batch, bool))

  def infer(
    self,
    params: Tree,
    keys: jax.Array,
    sequence: experience.Sequence,
    recalled: jax.Array | None = None,
  ) -> Step:
    """Runs the model along real sequences, step by step as in acting; returns their steps, [T, B, ...].

    Args:
      params: parameters of the world model.
      keys: [B] PRNG keys, one for each sequence, so that the result does not depend on the batching.
      sequence: [T, B, ...], `initial_state` being a `Recurrent`.
      recalled: [T, B, R] float32, from a memory; None without one.
    """
    num_steps, batch = sequence.reward.shape
    first = sequence.step_type == FIRST
    noise = jax.vmap(
      lambda key: jax.vmap(self.noise)(jax.random.split(key, num_steps)), out_axes=1
    )(keys)
    like = self.initial(batch)
    initial = jax.tree.map(lambda x, like: x.astype(like.dtype), sequence.initial_state, like)

    percept = self.perceive(params, sequence.observation, initial.latent.percept, first)
    numbers, inputs, encoded = self.encoder(params, sequence.observation, percept)
    embedding = encoded[..., : self.networks.embedding_size]
    action = self.networks.actions.encode(sequence.action)
    shifted = lambda before, x: jnp.concatenate([before[None], x[:-1]])
    before = self.inputs(params, initial.latent)
    previous = self._previous(
      shifted(initial.action, action), shifted(self.embed(params, before), embedding), first
    )
    earlier = following(jax.tree.map(shifted, before, inputs), first)
    known = {'recurrence': self._embedding(previous), 'posterior': encoded}

    def step(matrices, known, params, recurrent, inputs):
      action, numbers, first, noise = inputs
      recurrent = _cleared(recurrent, first)
      deterministic = self.sequence_model(params, matrices, recurrent, known['recurrence'])
      belief = self.posterior(params, matrices, deterministic, known['posterior'])
      latent = Latent(deterministic, self._sample(belief, noise), numbers)
      return Recurrent(latent, action), (latent, belief)

    # The percepts have been observed before the loop.
    initial = initial._replace(latent=initial.latent._replace(percept=None))
    _, (latent, belief) = kernels.scan(
      step,
      min(UNROLL, num_steps),
      self.dtype,
      self.matrices(params),
      known,
      _vectors(params),
      initial,
      (action, numbers, first, noise),
    )
    latent = latent._replace(recalled=recalled, percept=percept, inputs=inputs)
    was_recalled = _recalled_before(recalled, first)
    features = self.features(params, latent, previous, was_recalled, earlier)
    if earlier is None:
      latent = latent._replace(inputs=None)
    return Step(
      latent=latent,
      features=features,
      previous=previous,
      belief=belief,
      priors=self.prior(params, latent.deterministic, previous, first),  # outside of the loop
      first=first,
      discount=sequence.discount,
      earlier=earlier,
    )

  def _previous(self, action: jax.Array, embedding: jax.Array, first: jax.Array) -> jax.Array:
    """[..., C], inputs of the transition to a step; zeros at FIRST."""
    previous = jnp.concatenate([action.astype(self.dtype), embedding], axis=-1)
    return jnp.where(first[..., None], 0, previous).astype(self.dtype)

  def decoder_inputs(self, latent: Latent, previous: jax.Array) -> jax.Array:
    """Inputs of whatever predicts an observation from the model's belief, [..., H + Z + C]."""
    return jnp.concatenate([latent.deterministic, latent.stochastic, previous], axis=-1)

  def _embedding(self, previous: jax.Array) -> jax.Array:
    """e_{t-1}, [..., E], of the inputs of a transition, [..., C]."""
    return previous[..., self.networks.actions.size :]

  def _inferred(self, latent: Latent) -> list[jax.Array]:
    """A list of z, [..., Z], where there are images; else an empty list."""
    return [latent.stochastic] if self.networks.inferred_size else []

  def cast(self, matrices: Tree) -> Tree:
    """Casts `matrices` to the compute dtype."""
    return {name: matrix.astype(self.dtype) for name, matrix in matrices.items()}

  def _sample(self, belief: Any, noise: jax.Array | None) -> jax.Array:
    """A sample of z, [..., Z]; the mode without noise."""
    return (belief.mode() if noise is None else belief.sample(noise)).astype(self.dtype)

  def _belief(self, outputs: jax.Array) -> Any:
    """The distribution of the stochastic state, from a network's [..., outputs]."""
    latent, config = self.networks.latent_type, self.networks.config
    return latent.from_outputs(outputs, config.classes, config.unimix)

  def _member_outputs(self, name: str, params: Tree, inputs: jax.Array) -> jax.Array:
    """Outputs of each member's network `name`, with its `params`, on the same [..., F], [K, ..., outputs]."""
    return jax.vmap(lambda own: networks.apply(self.networks.modules[name], own, inputs))(params)

  def _prior(self, params: Tree, outputs: jax.Array, known: jax.Array) -> Prior:
    """Predictions of all members.

    Args:
      params: parameters of the world model.
      outputs: [K, ..., outputs] of the networks 'prior'.
      known: [..., H + C], their inputs: h_t and the inputs of the transition to the step.
    """
    if not self.networks.numbers.num_changes:
      nothing = jnp.zeros((*outputs.shape[:-1], 0))
      return Prior(self._belief(outputs), numbers_lib.Change(nothing, nothing))
    return Prior(self._belief(outputs), self._change(params[modules.AVERAGE_CHANGE], known))

  def _change(self, params: Tree, known: jax.Array) -> numbers_lib.Change:
    """Changes of the numbers, [K, ..., num_changes], predicted by the members' networks from `known`."""
    outputs = self._member_outputs(modules.CHANGE, params, jax.lax.stop_gradient(known))
    return numbers_lib.Change.from_outputs(outputs)

  def decoded_numbers(
    self,
    params: Tree,
    latent: Latent,
    previous: jax.Array,
    earlier: modules.Inputs | None,
    choose: Callable[[jax.Array, bool], jax.Array],
  ) -> tuple[jax.Array, list[jax.Array]]:
    """Numbers of a step, [..., F], and images: what is beside grids after what is in them.

    Args:
      params: parameters of the world model.
      latent: of the step.
      previous: [..., C], inputs of the transition to the step.
      earlier: what networks read of the step before; None without grids.
      choose: numbers from outputs for `Numbers.predict`, and whether only those beside grids count.
    """
    outputs, images = self.decoder(params, latent, previous, earlier)
    sizes = self.networks.numbers
    unknown = jnp.zeros((*outputs.shape[:-1], sizes.num_outputs - outputs.shape[-1]))
    numbers = choose(jnp.concatenate([outputs, unknown], axis=-1), False)
    if earlier and modules.BESIDE_GRIDS in params:
      inputs = self.read(params, numbers)  # of which only the cells count
      changed = self._pooled(params, modules.CHANGED, previous, earlier.cells, inputs.cells)
      beside = self.beside_grids(params, latent, previous, earlier, changed)
      rest = choose(jnp.concatenate([outputs, beside], axis=-1), True)
      of_grids = sum(kind.size for kind in sizes.grids)
      numbers = jnp.concatenate([numbers[..., :of_grids], rest[..., of_grids:]], axis=-1)
    return numbers, images

  def imagined_numbers(
    self,
    params: Tree,
    latent: Latent,
    previous: jax.Array,
    earlier: modules.Inputs | None,
    noise: Noise | None,
  ) -> jax.Array:
    """Numbers of an imagined step, [..., F], sampled by `noise` [...], or without it the most likely ones.

    `latent` still holds the numbers of the step before; `earlier` is what networks read of them, None without grids.
    """
    numbers, before = self.networks.numbers, latent.numbers
    if not numbers.size:
      return before
    follows = jnp.ones(before.shape[:-1], bool)
    statistics = params[modules.NUMBERS]

    def choose(outputs: jax.Array, of_beside: bool) -> jax.Array:
      predicted = numbers.predict(outputs, before, follows, statistics, max_copy=1.0)
      if noise is None:
        return numbers.expected(predicted, before, statistics)
      uniform = noise.beside_grids if of_beside else noise.numbers
      return numbers.sample(predicted, before, statistics, uniform)

    # Unused, images are not computed.
    return self.decoded_numbers(params, latent, previous, earlier, choose)[0]


def following(before: modules.Inputs, first: jax.Array) -> modules.Inputs | None:
  """What networks read of the step before, 0 where there is none: at FIRST, [...] bool; None without grids."""
  if not before.cells:
    return None
  expand = lambda x: first.reshape(*first.shape, *[1] * (x.ndim - first.ndim))
  return jax.tree.map(lambda x: jnp.where(expand(x), 0, x).astype(x.dtype), before)


def _cleared(recurrent: Recurrent, first: jax.Array) -> Recurrent:
  """The state [B, ...] before a step, 0 at FIRST: nothing passes from one episode to the next."""
  clear = lambda x: jnp.where(first[:, None], 0, x).astype(x.dtype)
  return jax.tree.map(clear, recurrent)


def _recalled_before(recalled: jax.Array | None, first: jax.Array) -> jax.Array | None:
  """Shifts [T, B, R], recalled at each step, to the step after; zeros at FIRST and at step 0."""
  if recalled is None:
    return None
  shifted = jnp.concatenate([jnp.zeros_like(recalled[:1]), recalled[:-1]])
  return jnp.where(first[..., None], 0.0, shifted)


def _vectors(params: Tree) -> Tree:
  """Parameters of a step other than its matrices."""
  return {
    'recurrence': {'norm': params['recurrence']['norm']},
    'posterior': {name: params['posterior'][name] for name in ('norm', 'bias')},
  }

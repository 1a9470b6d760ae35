"""Grids: networks that all cells share, what heads read of them, and dreams in which nothing is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dm_env import specs

from hephaestus.actors.environments import environment
from hephaestus.agents import networks
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import dream, modules, rssm
from hephaestus.agents.dreamer import numbers as numbers_lib

MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])


def grid(*shape, dtype=bool, high=1):
  return specs.BoundedArray(shape, dtype, 0, high)


@pytest.mark.parametrize(
  ('spec', 'grids'),
  [
    (grid(3, 5, 1), [(3, 5, 1)]),
    (grid(16, 16, 2, dtype=np.int32, high=4), [(16, 16, 2)]),
    ({'near': grid(3, 3, 2), 'far': grid(4, 4, 2), 'flat': grid(6)}, [(4, 4, 2), (3, 3, 2)]),
    (grid(2, 9, 4), []),  # too narrow for a neighbourhood
    (grid(17, 16, 1), []),  # more than 256 cells
    (grid(8, 8), []),  # a matrix
    (specs.Array((5, 5, 2), np.float32), []),  # real numbers
    (environment.BoardSpec((4 + 3 * 4 * 2,), np.float32, (3, 4, 2)), [(3, 4, 2)]),
    (environment.BoardSpec((2 * 9 * 4,), np.float32, (2, 9, 4)), []),
  ],
)
def test_leaf_of_few_cells_with_features_is_a_grid(spec, grids):
  numbers = numbers_lib.Numbers(spec)
  assert [kind.grid for kind in numbers.grids] == grids
  names = list(numbers.initial_statistics())
  assert len(names) == len(set(names))
  if grids:
    placed = sum((1 + kind.num_levels) * np.prod(kind.grid) for kind in numbers.grids)
    assert numbers.placed_size == placed
    assert sum('by cell' in str(ways) for ways in numbers.descriptions().values()) == len(grids)


def test_board_after_other_numbers_is_read_by_cells_one_of_which_has_the_player():
  spec = environment.BoardSpec((3 + 3 * 4 * 2,), np.float32, (3, 4, 2), player=(2, 0))
  numbers = numbers_lib.Numbers({'a': grid(2), 'b': spec})
  board = np.zeros((3, 4, 2), np.float32)
  board[1, 2, 1], board[0, 3, 0] = 1, 0.5
  column, row = 3 / 3, 1 / 2
  values = {
    'a': np.zeros(2, bool),
    'b': np.array([column, 0.25, row, *board.reshape(-1)], np.float32),
  }
  read = numbers.read(values)
  (cells,) = numbers.cells(read, numbers.initial_statistics())
  some_is_at_least_half = np.where(board > 0, (1 + board) / 2, 0)
  np.testing.assert_allclose(cells[..., :-1], some_is_at_least_half)
  player = np.zeros((3, 4))
  player[1, 3] = 1
  np.testing.assert_array_equal(cells[..., -1], player)
  (kind,) = numbers.grids
  assert kind.grid == (3, 4, 3) and numbers.size == len(read) == 2 + 1 + 3 * 4 * 3
  assert cells.shape[-1] == kind.cell_inputs
  assert sorted(set(kind.sources)) == [*range(4, 2 + 27)]  # the row's number stands for both
  again = observation_lib.to_observation(numbers.to_flat(read), [], numbers.spec)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), again, values)


NUMBERS = numbers_lib.Numbers(
  {'bits': grid(3, 4, 2), 'colours': grid(4, 3, 1, dtype=np.int32, high=3), 'flag': grid(1)}
)


@pytest.mark.parametrize(('which', 'cell'), [(0, 0), (0, 7), (1, 11)])
def test_outputs_of_a_cell_predict_the_numbers_of_that_cell_only(which, cell):
  statistics = NUMBERS.initial_statistics()
  before = np.zeros(NUMBERS.size, np.float32)

  @jax.jit
  def expected(cells):
    outputs = jnp.pad(NUMBERS.of_cells(cells), (0, NUMBERS.num_outputs - NUMBERS.grid_outputs))
    predicted = NUMBERS.predict(outputs, before, np.array(False), statistics)
    return NUMBERS.to_flat(NUMBERS.expected(predicted, before, statistics))

  expect = lambda cells: jax.device_get(expected(cells))  # before they are changed in place

  cells = [
    np.zeros((np.prod(kind.grid[:2]), sum(kind.cell_outputs)), np.float32) for kind in NUMBERS.grids
  ]
  plain = expect(cells)
  cells[which][cell] = 3.0 + np.arange(cells[which].shape[1])
  observation = {'bits': np.zeros((12, 2)), 'colours': np.zeros((12, 1)), 'flag': np.zeros(1)}
  observation[list(observation)[which]][cell] = 1
  touched = np.concatenate([x.reshape(-1) for x in observation.values()])
  np.testing.assert_array_equal(expect(cells) != plain, touched > 0)


def test_features_of_a_cell_are_of_its_surroundings_wherever_it_is():
  module = networks.Cells(8)
  world = np.random.default_rng(0).uniform(size=(9, 9, 3)).astype(np.float32)
  params = module.init(jax.random.key(0), world)
  of = jax.jit(lambda x: module.apply(params, x).reshape(9, 9, 8 + 3))
  found, shifted = of(world), of(np.roll(world, (1, 2), (0, 1)))
  inside = slice(2, -4)  # 5 x 5 cells are seen
  np.testing.assert_allclose(found[inside, inside], shifted[3:-3, 4:-2], rtol=1e-4, atol=1e-5)
  assert np.abs(found[0] - found[4])[:, :8].max() > 0.01
  np.testing.assert_array_equal(found[..., 8:], world)


def test_vector_of_a_transition_is_of_the_cells_that_it_changed():
  rng = np.random.default_rng(0)
  changed = rng.normal(size=(2, 3, 6)).astype(np.float32)  # before and after
  stays = np.tile(rng.normal(size=(40, 6)).astype(np.float32), (2, 1, 1))
  stays[1, :, :4] += 1  # features of what is around
  pool = networks.Pool(10, contents=2)
  params = pool.init(jax.random.key(0), *changed)
  of = lambda stays: np.asarray(pool.apply(params, *np.concatenate([changed, stays], axis=1)))
  np.testing.assert_allclose(of(stays[:, :2]), of(stays), rtol=1e-5)
  nothing = np.asarray(pool.apply(params, *stays))
  np.testing.assert_array_equal(nothing[:5], 0)
  assert np.ptp(nothing[5:]) == 0


def test_vector_of_a_step_is_of_the_cells_that_hold_something():
  cells = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
  cells[5:, 4:] = 0
  pool = networks.Pool(10, contents=2)
  params = pool.init(jax.random.key(0), cells)
  of = lambda cells: np.asarray(pool.apply(params, cells))
  np.testing.assert_allclose(of(cells), of(cells[:5]), rtol=1e-5)
  assert np.abs(of(cells[:5]) - of(cells[:4])).max() > 0.01


def test_a_move_is_predicted_where_it_was_never_seen():
  """All cells share the networks: moves on the left half of a grid teach those on the right half."""
  size, cells, decoder = 8, networks.Cells(16), networks.CellDecoder(16, (8, 8), 1, 1, num_gates=0)
  places = np.array([(r, c) for r in range(1, 7) for c in range(1, 7)])
  agent, action = np.repeat(places, 4, axis=0), np.tile(np.arange(4), len(places))
  scene = lambda at: (np.arange(size * size) == at[:, :1] * size + at[:, 1:]).astype(np.float32)
  before = scene(agent).reshape(-1, size, size, 1)
  after = scene(agent + MOVES[action])
  actions = np.eye(4, dtype=np.float32)[action]
  is_left = agent[:, 1] <= 3

  def logits(params):
    features = cells.apply({'params': params['cells']}, before)
    outputs = decoder.apply(
      {'params': params['decoder']}, features, actions, actions, actions[:, :0]
    )
    return outputs[..., 0]

  def loss(params):
    return jnp.sum(optax.sigmoid_binary_cross_entropy(logits(params), after)[is_left])

  keys = jax.random.split(jax.random.key(0))
  features = np.zeros((1, 64, 16 + 1), np.float32)
  params = {
    'cells': cells.init(keys[0], before[:1])['params'],
    'decoder': decoder.init(keys[1], features, *[actions[:1]] * 2, actions[:1, :0])['params'],
  }
  optimizer = optax.adam(0.01)

  @jax.jit
  def train(params):
    def step(carry, _):
      params, state = carry
      updates, state = optimizer.update(jax.grad(loss)(params), state)
      return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), None, length=150)
    return logits(params)

  right = np.argmax(after, axis=1) == np.argmax(train(params), axis=1)
  assert right[is_left].mean() > 0.97 and right[~is_left].mean() > 0.9


def test_what_appears_depends_on_what_is_beside_the_grid():
  """A plant is placed where the agent is, by one of two actions, if there is a sapling: no belief says so."""
  size, draw = 5, np.random.default_rng(0)
  place = draw.integers(0, 2, 256)
  saplings = np.where(draw.integers(0, 2, 256), draw.integers(1, 9, 256) / 9, 0).astype(np.float32)
  agent = np.eye(size * size, dtype=np.float32)[draw.integers(0, size * size, 256)]
  appears = agent * ((place == 1) & (saplings > 0))[:, None]
  action, others = np.eye(2, dtype=np.float32)[place], saplings[:, None]
  cells, decoder = networks.Cells(16), networks.CellDecoder(16, (size, size), 1, 1, num_gates=0)
  before, nothing = agent.reshape(-1, size, size, 1), np.zeros((256, 3), np.float32)
  keys = jax.random.split(jax.random.key(0))
  own = cells.init(keys[0], before)
  features = cells.apply(own, before)
  params = decoder.init(keys[1], features, nothing, action, others)
  logits = lambda params: decoder.apply(params, features, nothing, action, others)[..., 0]
  loss = lambda params: jnp.sum(optax.sigmoid_binary_cross_entropy(logits(params), appears)) / 256
  optimizer = optax.adam(0.01)

  @jax.jit
  def train(params):
    def step(carry, _):
      params, state = carry
      updates, state = optimizer.update(jax.grad(loss)(params), state)
      return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), None, length=300)
    return logits(params)

  found = np.asarray(jax.nn.sigmoid(train(params)) > 0.5)
  assert (found == (appears > 0)).all(axis=-1).mean() > 0.95


def test_scrolling_view_is_learned_in_few_updates():
  """A view of 24 kinds of cells moves by one: what comes from the cells beside is one of too many for their features."""
  kinds, side, hidden = 24, 5, 16
  cells = networks.Cells(hidden)
  decoder = networks.CellDecoder(hidden, (side, side), kinds, kinds, num_gates=0)

  def views(key):
    """Views before and after moves, and the actions, of 32 worlds."""
    world, action = jax.random.split(key)
    world = jax.random.randint(world, (32, side + 2, side + 2), 0, kinds)
    action = jax.random.randint(action, (32,), 0, 4)
    corner = 1 + jnp.asarray(MOVES)[action]
    look = jax.vmap(lambda world, at: jax.lax.dynamic_slice(world, at, (side, side)))
    before, after = look(world, jnp.ones_like(corner)), look(world, corner)
    return jax.nn.one_hot(before, kinds), after.reshape(32, -1), jax.nn.one_hot(action, 4)

  def loss(params, key):
    before, after, action = views(key)
    features = cells.apply({'params': params['cells']}, before)
    logits = decoder.apply({'params': params['decoder']}, features, action, action, action[:, :0])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, after)
    inner = np.pad(np.ones((side - 2, side - 2), bool), 1).reshape(-1)
    return nats.sum(axis=-1).mean(), (jnp.argmax(logits, axis=-1) == after)[:, inner].mean()

  keys = jax.random.split(jax.random.key(0), 3)
  before, _, action = views(keys[0])
  own = cells.init(keys[1], before)
  features = cells.apply(own, before)
  params = {
    'cells': own['params'],
    'decoder': decoder.init(keys[2], features, action, action, action[:, :0])['params'],
  }
  optimizer = optax.adam(0.003)

  @jax.jit
  def train(params):
    def step(carry, key):
      params, state = carry
      updates, state = optimizer.update(jax.grad(loss, has_aux=True)(params, key)[0], state)
      return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(1), 120)
    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), keys)
    return loss(params, jax.random.key(2))[1]

  assert train(params) > 0.95


# Where things are.


def test_places_are_mean_rows_and_columns_of_what_each_feature_marks():
  marks = np.zeros((1, 3, 5, 3), np.float32)
  marks[0, 0, 4, 0] = 1  # one in a corner
  marks[0, 1:, 1, 1] = 1  # two, one above the other; nothing of the third
  rows, columns, present = np.split(numbers_lib.places(marks, np.float32)[0], 3)
  np.testing.assert_allclose(rows, [-1, 0.5, 0], atol=1e-6)
  np.testing.assert_allclose(columns, [1, -0.5, 0], atol=1e-6)
  np.testing.assert_array_equal(present, [1, 1, 0])
  little = numbers_lib.places(0.3 * marks, np.float32)[0]
  np.testing.assert_allclose(little, [*rows, *columns, 1, 1, 0], atol=1e-6)
  levels = observation_lib.by_level(np.float32([[[0, 2 / 3]]]), 4)
  found = numbers_lib.places(levels, np.float32)[0]
  np.testing.assert_allclose(found, [-1, 0, -1, 0, -1, 0, 1, 0, 1, 0, 1, 0], atol=1e-6)


def test_surroundings_are_the_mean_features_of_the_cells_that_have_something():
  rng = np.random.default_rng(0)
  marks, features = np.zeros((1, 3, 4, 3), np.float32), rng.normal(size=(1, 12, 5)).astype('f')
  marks[0, 1, 2, 0] = 0.5  # one
  marks[0, (0, 2), (3, 1), 1] = 1  # two, and nothing of the third
  cells = np.concatenate([features, marks.reshape(1, 12, 3)], axis=-1)
  found = numbers_lib.surroundings(marks, cells).reshape(3, 5)
  expected = [features[0, 6], features[0, [3, 9]].mean(axis=0), np.zeros(5)]
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_vector_of_a_step_is_of_offsets_between_things_wherever_both_are():
  """What a cell adds is the same where the whole scene is moved, and another at another distance."""
  pool = networks.Pool(16, contents=3, shape=(6, 6))

  def added(one, other, params=None):
    """What is added in the cell of `other`, [8]."""
    scene = np.zeros((1, 36, 3), np.float32)
    scene[0, [one, other], [0, 1]] = 1  # nothing of the third
    inputs = scene, numbers_lib.places(scene.reshape(1, 6, 6, 3), np.float32)
    if params is None:
      return pool.init(jax.random.key(0), *inputs)
    _, found = pool.apply(params, *inputs, capture_intermediates=lambda _, name: name == '_offsets')
    return np.asarray(found['intermediates']['_offsets'][0])[0, other]

  params = added(7, 16)
  here, moved, nearer = (added(*pair, params) for pair in ((7, 16), (12, 21), (7, 15)))
  np.testing.assert_allclose(here, moved, atol=1e-5)
  assert np.abs(here - nearer).max() > 0.01


@pytest.mark.parametrize(('reads_places', 'least', 'most'), [(True, 0.9, 1.0), (False, 0.0, 0.85)])
def test_what_is_left_of_what_is_known_for_pairs_of_cells_never_seen(reads_places, least, most):
  """Two things on 6 x 6 cells: 60 of their 1,080 pairs of cells are seen, others are asked."""
  rng, side = np.random.default_rng(0), 6
  pairs = np.array([(a, b) for a in range(side**2) for b in range(side**2) if a % side != b % side])
  rng.shuffle(pairs)
  grids = np.eye(side**2, dtype=np.float32)[pairs].transpose(0, 2, 1).reshape(-1, side, side, 2)
  is_left = (pairs[:, 0] % side < pairs[:, 1] % side).astype(np.float32)
  flat = jnp.asarray(grids.reshape(len(pairs), -1))
  places = numbers_lib.places(jnp.asarray(grids), flat.dtype)
  inputs = (), (flat,), (), (places,) if reads_places else ()
  towers = networks.Towers(32, 2, 1, 0.0)
  seen, asked = np.split(np.arange(len(pairs)), [60])
  optimizer = optax.adam(3e-3)
  pick = lambda at: jax.tree.map(lambda x: x[at], inputs)

  def loss(params):
    logits = networks.apply(towers, params, *pick(seen))[:, 0]
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, is_left[seen]))

  @jax.jit
  def trained(params):
    def step(_, carry):
      params, state = carry
      updates, state = optimizer.update(jax.grad(loss)(params), state)
      return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(0, 300, step, (params, optimizer.init(params)))[0]

  params = trained(towers.init(jax.random.key(0), *pick(seen[:1]))['params'])
  found = networks.apply(towers, params, *pick(asked))[:, 0] > 0
  assert least <= np.mean(found == is_left[asked]) <= most


# Features that are always in as many cells.


def test_feature_that_always_was_in_as_many_cells_is_drawn_in_as_many():
  """The first and the last feature always were in one cell, the second in two, the third in any number."""
  kind = numbers_lib.Binary(np.arange(80), grid=(4, 5, 4))
  statistics = kind.initial_statistics()
  seen = np.zeros((8, 6, 20, 4), np.float32)
  rng = np.random.default_rng(0)
  for t, stream in np.ndindex(8, 6):
    one, *two = rng.permutation(20)[:3]
    cells = seen[t, stream]
    cells[one, [0, 3]] = cells[two, 1] = cells[: rng.integers(4), 2] = 1
  moments = kind.moments(jnp.asarray(seen.reshape(8, 6, 80)), statistics)
  assert {name: x.shape for name, x in moments.items()} == {
    name: x.shape for name, x in statistics.items()
  }
  before, likely = np.zeros((20, 4), np.float32), np.full((20, 4), 1e-4, np.float32)
  before[3] = before[4, 1] = 1
  likely[[13, 17, 19], 0] = 0.45, 0.1, 0.05  # leaves cell 3 with its probability too small in all
  likely[3, 1], likely[4, 1], likely[10:16, 1] = 1.0, 0.2, 0.15  # too large in all
  likely[3, 2] = 0.2
  likely[:, 3], likely[3, 3] = 0.008, 0.45  # leaves cell 3 for any other, each of which is unlikely
  unknown = statistics | {'between_0': moments['between_0']}
  noise = np.linspace(0.001, 0.999, 400, dtype=np.float32)[:, None]
  repeat = lambda x: np.repeat(x.reshape(1, 80), 400, axis=0)
  one = repeat(likely)
  draw = jax.jit(lambda statistics: kind.sample((1 - one, one), repeat(before), statistics, noise))
  drawn, free = (np.asarray(draw(each)).reshape(400, 20, 4) for each in (moments, unknown))
  np.testing.assert_array_equal(drawn[..., [0, 3]].sum(axis=1), 1)
  np.testing.assert_array_equal(drawn[..., 1].sum(axis=1), 2)
  assert drawn[:, 3, 1].all()
  np.testing.assert_allclose(drawn[:, 3, 3].mean(), 0.45, atol=0.02)
  np.testing.assert_allclose(drawn[:, [13, 17, 19], 0].mean(axis=0), [0.75, 0.17, 0.08], atol=0.02)
  np.testing.assert_allclose(drawn[:, 4, 1].mean(), 0.2 / 1.1, atol=0.02)
  np.testing.assert_array_equal(drawn[..., 2], free[..., 2])
  assert 0 in free[..., 0].sum(axis=1)  # as without the statistics


def test_as_many_events_occur_as_are_known_to_where_all_are_rare():
  probability = np.tile(np.float32([1e-4, 3e-4, 0, 0.995]), (400, 1))
  noise = np.linspace(0.001, 0.999, 400, dtype=np.float32)[:, None]
  draw = jax.jit(lambda number: numbers_lib.occurs(probability, noise, number)[0])
  two, one = (np.asarray(draw(np.float32([[number]]))) for number in (2, 1))
  np.testing.assert_array_equal(two.sum(axis=1), 2)
  np.testing.assert_allclose(two.mean(axis=0), [0.25, 0.75, 0, 1], atol=0.01)
  np.testing.assert_array_equal(one, [[False, False, False, True]] * 400)


# Features with amounts.


def test_sampled_amount_is_none_or_one_that_was_predicted():
  """A board of 12 cells with health, 1/3 to 1: it stays, falls, ends, and may appear."""
  spec = environment.BoardSpec((3 * 4 * 2,), np.float32, (3, 4, 2))
  numbers = numbers_lib.Numbers(spec)
  (kind,) = numbers.kinds
  assert isinstance(kind, numbers_lib.Amounts) and kind.num_outputs == numbers.num_outputs == 72
  seen = np.zeros((2, 5, 12, 2), np.float32)
  seen[:, ::2, 0] = 1 / 3, 1
  statistics = kind.moments(jnp.asarray(seen.reshape(2, 5, 24)), {})
  before = np.zeros((12, 2), np.float32)
  before[:4, 0], before[0, 1] = (1 / 3, 2 / 3, 1, 2 / 3), 1
  gate, logit, amount = (np.full((12, 2), x, np.float32) for x in (9.0, 0.0, 0.0))
  gate[[1, 2, 7, 8], 0] = -20
  logit[[1, 2], 0], amount[1, 0] = (20, -20), np.log(0.5)  # falls from 2 / 3 to 1 / 3; ends
  logit[[7, 8], 0], amount[[7, 8], 0] = (np.log(0.6 / 0.4), -20), 20  # appears in 0.6
  gate[5, 1], logit[5, 1], amount[5, 1] = -20, 20, -20  # an amount that always was 1
  outputs = np.concatenate([x.reshape(-1) for x in (gate, logit, amount)])[None]
  follows = np.ones(1, bool)
  predicted = numbers.predict(outputs, before.reshape(1, 24), follows, statistics, max_copy=1.0)
  draw = jax.jit(
    jax.vmap(functools.partial(numbers.sample, predicted, before.reshape(1, 24), statistics))
  )
  noise = np.linspace(0.001, 0.999, 200, dtype=np.float32)[:, None]
  drawn = np.asarray(draw(noise)).reshape(200, 12, 2)
  health, appeared = drawn[..., 0], drawn[:, 7, 0] > 0
  np.testing.assert_allclose(health[:, [0, 1, 2, 3]], [[1 / 3, 1 / 3, 0, 2 / 3]] * 200, atol=1e-4)
  np.testing.assert_allclose(np.mean(appeared), 0.6, atol=0.01)
  np.testing.assert_allclose(drawn[appeared, 7, 0], 1, atol=1e-4)
  assert not drawn[~appeared, 7].any() and not health[:, [4, 5, 6, 8, 9, 10, 11]].any()
  np.testing.assert_array_equal(np.flatnonzero(drawn[0, :, 1]), [0, 5])
  assert drawn[0, 5, 1] == 1

  loss = lambda of: float(numbers.loss(predicted, of.reshape(1, 24), statistics)[0][0])
  likely = before.copy()
  likely[1:3, 0], likely[5, 1] = (1 / 3, 0), 1
  np.testing.assert_allclose(loss(likely), -np.log(0.4), atol=0.01)
  for cell, value, least in ((7, 1, -0.41), (7, 0.5, 2), (0, 0.5, 2), (2, 1, 9)):
    other = likely.copy()
    other[cell, 0] = value
    assert loss(other) > loss(likely) + least


@pytest.mark.parametrize('chances', [(0.3, 0.4, 0.3), (0.004, 0.992, 0.004), (0.6, 0.0, 0.4)])
def test_amount_ends_stays_or_changes_as_often_as_predicted(chances):
  """Three of 12 cells are uncertain: two whose amount of 1/2 ends, stays or becomes 0.9, and one where 0.9 appears."""
  (kind,) = numbers_lib.Numbers(environment.BoardSpec((12,), np.float32, (3, 4, 1))).kinds
  none, stays, some = np.ones(12, 'f'), np.zeros(12, 'f'), np.zeros(12, 'f')
  for parts, chance in zip((none, stays, some), chances, strict=True):
    parts[[2, 4]] = chance
  none[7], some[7] = 0.7, 0.3
  before = np.float32([0, 0, 0.5, 0, 0.5, 0, 0, 0, 0, 0, 0, 0])
  amount = np.full(12, 0.9, np.float32)
  predicted = numbers_lib.Amount(none, stays, some, before, amount)
  draw = jax.jit(
    jax.vmap(lambda noise: kind.sample(predicted, before, kind.initial_statistics(), noise))
  )
  drawn = np.asarray(draw((np.arange(2000, dtype=np.float32)[:, None] + 0.5) / 2000))
  shares = lambda cell: [np.mean(np.isclose(drawn[:, cell], x)) for x in (0, 0.5, 0.9)]
  for cell in (2, 4):
    np.testing.assert_allclose(shares(cell), chances, atol=2e-3)
  np.testing.assert_allclose(shares(7), (0.7, 0, 0.3), atol=2e-3)
  assert not drawn[:, [0, 1, 3, 5, 6, 8, 9, 10, 11]].any()


# The world model.


@pytest.fixture(scope='module')
def dreamer(make_dreamer):
  return make_dreamer('grids')


@pytest.fixture(scope='module')
def params(dreamer, make_params):
  return make_params(dreamer)


def test_heads_do_not_read_where_something_is(dreamer, params):
  """Of the features, only those of grids that tell a place are not read by the reward's head."""
  networks_ = dreamer.model.networks
  reward = lambda features: jnp.sum(
    dreamer.model.reward(modules.world(params), features).logits[:, 0]
  )
  features = jax.tree.map(jnp.ones_like, networks_.empty_features(2))
  grads = jax.jit(jax.grad(reward))(features)
  placed = np.arange(networks_.numbers.placed_size)
  assert not np.any(grads.numbers[:, placed])
  assert not np.any(grads.cells) and not np.any(grads.places)
  others = np.delete(np.asarray(grads.numbers), placed, axis=1)
  assert others.any() and np.any(grads.changed)


def test_head_of_legal_actions_reads_the_grid_as_it_is(dreamer, params):
  """Also where a step changed nothing of it, and without what was before."""
  networks_ = dreamer.model.networks
  logits = lambda features: jnp.sum(
    networks_.head(modules.world(params), modules.MASK, networks_.of_observation(features))
  )
  features = jax.tree.map(jnp.ones_like, networks_.empty_features(2))
  grads = jax.jit(jax.grad(logits))(features)
  assert np.any(grads.cells) and np.any(grads.places) and not np.any(grads.changed)


def test_heads_read_what_a_step_changed_of_numbers_beside_a_grid(dreamer, params, make_sequence):
  model, sequence = dreamer.model, make_sequence(dreamer)
  sizes = model.networks
  keys = jax.random.split(jax.random.key(0), sequence.reward.shape[1])
  steps = jax.jit(model.replay)(params, keys, sequence)
  apart = np.asarray(sizes.apart(steps.features.numbers))
  difference = np.asarray(steps.features.difference)
  assert difference.shape[-1] == sizes.difference_size > 0
  for stream in range(apart.shape[1]):
    for step in range(1, len(apart)):
      before = 0 if steps.first[step, stream] else apart[step - 1, stream]
      np.testing.assert_allclose(
        difference[step, stream], apart[step, stream] - before, rtol=1e-3, atol=1e-5
      )
  reward = lambda features: jnp.sum(
    model.reward(modules.world(params), sizes.of_observation(features)).logits[:, 0]
  )
  assert np.any(jax.grad(reward)(jax.tree.map(lambda x: x[0], steps.features)).difference)


def test_new_scene_hardly_counts_in_what_the_decoder_learns(dreamer, params, make_sequence):
  """The gradient of a step whose whole grid is new is less than that of one in which some cells are."""
  model, sequence = dreamer.model, make_sequence(dreamer)
  keys = jax.random.split(jax.random.key(0), 3)
  posterior = jax.jit(model.replay)(params, keys, sequence)

  @jax.jit
  def gradient(own, factor):
    """Norm of the gradient in the outputs' kernel, of which `factor` is a multiple."""

    def loss(own):
      scaled = own | {'cell_decoder_0': jax.tree.map(lambda x: factor * x, own['cell_decoder_0'])}
      world = modules.world(params | {'world_model': scaled})
      return jnp.sum(model._reconstruction_loss(world, keys, posterior, sequence)[0])

    nats, grads = jax.value_and_grad(loss)(own)
    return nats, optax.global_norm(grads['cell_decoder_0']) / factor

  (few, usual), (many, large) = (gradient(params['world_model'], x) for x in (1.0, 60.0))
  assert many > few and large < usual / 2


def test_dream_goes_on_from_what_it_saw(dreamer, params, make_sequence):
  """An imagined step is the same with the inputs of the step before as where they are computed anew."""
  model, world, sequence = dreamer.model, modules.world(params), make_sequence(dreamer)

  @jax.jit
  def imagine(world, sequence):
    steps = model.replay(params, jax.random.split(jax.random.key(0), 3), sequence)
    latent = jax.tree.map(lambda x: x[1], steps.latent)
    action = model.networks.actions.encode(sequence.action[1])
    noise = jax.vmap(model.rssm.imagined_noise)(jax.random.split(jax.random.key(1), 3))
    return [
      model.imagine(world, model.rssm.matrices(world), rssm.Recurrent(each, action), None, noise)
      for each in (latent, latent._replace(inputs=None))
    ]

  seen, anew = imagine(world, sequence)
  assert seen.latent.inputs is not None and anew.latent.inputs is None
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  jax.tree.map(close, seen._replace(latent=seen.latent._replace(inputs=None)), anew)


def test_at_first_what_is_in_a_cell_is_predicted_to_stay(dreamer, make_sequence):
  model, sequence = dreamer.model, make_sequence(dreamer)
  numbers, params = model.networks.numbers, dreamer.agent.init_params(jax.random.key(0))
  world, statistics = modules.world(params), numbers.initial_statistics()

  @jax.jit
  def lost(world, sequence):
    """Nats that each number of a still grid costs."""
    steps = model.replay(params, jax.random.split(jax.random.key(0), 3), sequence)
    latent, action = steps.latent, model.networks.actions.encode(sequence.action)
    previous = jnp.concatenate([action, model.rssm.embed(world, latent.inputs)], axis=-1)
    outputs, _ = model.rssm.decoder(world, latent, previous, latent.inputs)
    changed = steps.features.changed
    beside = model.rssm.beside_grids(world, latent, previous, latent.inputs, changed)
    outputs = jnp.concatenate([outputs, beside], axis=-1)
    follows = jnp.ones(sequence.reward.shape, bool)
    predicted = numbers.predict(outputs, latent.numbers, follows, statistics)
    loss, _ = numbers.loss(predicted, latent.numbers, statistics, of_grids=True)
    return loss / sum(kind.size for kind in numbers.grids)

  assert lost(world, sequence).max() < 0.1  # 0.29 where a bit might as well be new


def test_numbers_beside_grids_are_drawn_for_what_was_drawn_in_grids(dreamer, params, make_sequence):
  """By a number of their own: given what is in a grid, the number that it was drawn by is not uniform."""
  rssm_, sequence, world = dreamer.model.rssm, make_sequence(dreamer), modules.world(params)
  numbers, statistics = dreamer.model.networks.numbers, world[modules.NUMBERS]
  seen = {name: 0 * x if name.startswith('between') else x for name, x in statistics.items()}
  statistics, world = seen, world | {modules.NUMBERS: seen}  # bits have only been 0 or 1
  of_grids = sum(kind.size for kind in numbers.grids)

  @jax.jit
  def draw(of_grid, of_beside):
    steps = dreamer.model.replay(params, jax.random.split(jax.random.key(0), 3), sequence)
    before, own = steps.latent.numbers, (steps.latent, steps.previous)
    uniform = lambda seed: jax.random.uniform(jax.random.key(seed), sequence.reward.shape)
    noise = rssm.Noise(jnp.zeros(()), uniform(of_grid), uniform(of_beside))
    drawn = rssm_.imagined_numbers(world, *own, steps.earlier, noise)
    inputs = rssm_.read(world, drawn)
    changed = rssm_.features(
      world, steps.latent._replace(inputs=inputs), steps.previous, earlier=steps.earlier
    ).changed
    outputs, _ = rssm_.decoder(world, *own, steps.earlier)
    beside = rssm_.beside_grids(world, *own, steps.earlier, changed)
    outputs = jnp.concatenate([outputs, beside], axis=-1)
    predicted = numbers.predict(outputs, before, jnp.ones(before.shape[:-1], bool), statistics, 1.0)
    return drawn, numbers.sample(predicted, before, statistics, noise.beside_grids), beside

  drawn, expected, beside = draw(1, 2)
  other_grid, _, other_beside = draw(3, 2)
  np.testing.assert_allclose(drawn[..., of_grids:], expected[..., of_grids:], atol=1e-5)
  same_grid, *_ = draw(1, 4)
  np.testing.assert_array_equal(same_grid[..., :of_grids], drawn[..., :of_grids])
  assert np.any(same_grid[..., of_grids:] != drawn[..., of_grids:])
  assert np.any(other_grid[..., :of_grids] != drawn[..., :of_grids])
  assert np.any(np.abs(beside - other_beside) > 0.01)


def test_heads_learn_from_imagined_steps_which_train_nothing_else(dreamer, params, make_sequence):
  model, sequence = dreamer.model, make_sequence(dreamer)
  keys = jax.random.split(jax.random.key(0), sequence.reward.shape[1])

  @jax.jit
  def grads(own):
    def total(own):
      world = modules.world(params | {'world_model': own})
      steps = model.rssm.infer(world, keys, sequence)
      imagined, chosen = model._imagined(world, keys, steps, sequence)
      return sum(jnp.sum(jnp.square(x)) for x in imagined), (imagined, chosen, steps.features)

    return jax.grad(total, has_aux=True)(own)

  found, (imagined, chosen, real) = jax.device_get(grads(params['world_model']))
  trained = {name for name, x in found.items() if any(map(np.any, jax.tree.leaves(x)))}
  assert trained == {'changed_0', 'changed_1'}
  assert chosen.reward.shape == (1, 3)  # one step of each sequence
  for stream, reward in enumerate(chosen.reward[0]):
    (step,) = np.flatnonzero(sequence.reward[:, stream] == reward)[:1]
    np.testing.assert_array_equal(imagined.transition[0, stream], real.transition[step, stream])
    assert np.any(imagined.numbers[0, stream] != real.numbers[step, stream])


def test_all_guests_take_a_grid(make_dreamer, param_shapes, make_sequence):
  """They are traced only: what they compute does not depend on the kind of numbers."""
  keys = jax.random.split(jax.random.key(0), 1)
  guests = {
    'memory_size': 8,
    'memory_dream_share': 0.5,
    'empowerment_scale': 0.5,
    'novelty_scale': 0.1,
  }
  for own in ({'window': 3}, {'workspace_size': 2}):
    dreamer = make_dreamer('grids', **guests | own)
    model, policy, sequence = dreamer.model, dreamer.actor_critic, make_sequence(dreamer)

    def update(params, sequence, model=model, policy=policy):
      keys = jax.random.split(jax.random.key(0), sequence.reward.shape[1])
      recalled, _ = model.recall(params, sequence.observation)
      loss, (steps, *_) = model.loss(modules.world(params), keys, sequence, recalled=recalled)
      last, novelty = sequence.step_type == 2, model.novelty(steps)
      read = policy.along(params['actor_critic'], steps, novelty)
      mask = observation_lib.action_mask(sequence.observation)
      start = dream.starts(read, steps.latent, last, novelty, keys, mask, num_steps=2, even=True)
      start = dream.remembered(model, policy, params, start, np.int32(3))
      critics = policy.critics(params['actor_critic'])
      horizon = jnp.asarray(2)
      return loss, dream.rollout(model, policy, params, critics, start, horizon, explore=True)

    loss, dreamt = jax.eval_shape(update, param_shapes(dreamer), sequence)
    assert loss.shape == () and loss.dtype == dreamt.reward.dtype == jnp.float32
    stream = jax.tree.map(lambda x: x[:, 0], (sequence.observation, sequence.action))
    jax.eval_shape(dreamer.agent.foresee, param_shapes(dreamer), keys[0], *stream, np.int32(2))


def test_slots_go_with_a_grid_and_numbers_beside_it(make_dreamer, param_shapes, make_sequence):
  dreamer = make_dreamer('scene', slots=3, slot_size=4)
  params, sequence = param_shapes(dreamer), make_sequence(dreamer)
  stream = jax.tree.map(lambda x: x[:, 0], (sequence.observation, sequence.action))
  key = jax.random.key(0)
  foreseen = jax.eval_shape(dreamer.agent.foresee, params, key, *stream, np.int32(2))
  assert any(leaf.shape[-3:] == (5, 5, 2) for leaf in jax.tree.leaves(foreseen))


def test_a_new_scene_trains_nothing_that_predicts(dreamer, params, make_sequence):
  """No transition leads to FIRST, whose scene would cost more than all that follows it."""
  model, sequence = dreamer.model, make_sequence(dreamer)

  @jax.jit
  def reconstruction(sequence):
    keys = jax.random.split(jax.random.key(0), 3)
    steps = model.replay(params, keys, sequence)
    return model._reconstruction_loss(modules.world(params), keys, steps, sequence)[:2]

  loss, _ = reconstruction(sequence)
  np.testing.assert_array_equal(loss == 0, sequence.step_type == rssm.FIRST)
  only_first = sequence._replace(step_type=np.full_like(sequence.step_type, rssm.FIRST))
  _, moments = reconstruction(only_first)
  was = modules.world(params)[modules.NUMBERS]['error']
  np.testing.assert_allclose(moments['error'], np.minimum(was, 1), rtol=1e-5)  # does not move

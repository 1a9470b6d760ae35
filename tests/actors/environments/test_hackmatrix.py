"""Options, distributions and displays of HackMatrix; its rules are in `test_hackmatrix_reference.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.actors import environments
from hephaestus.actors.environments import hackmatrix
from hephaestus.actors.environments.hackmatrix import environment as game_lib
from hephaestus.actors.environments.hackmatrix import observation, rewards, stages
from hephaestus.actors.environments.hackmatrix import state as state_lib
from hephaestus.actors.environments.hackmatrix.state import (
  DATA,
  DOWN,
  LEFT,
  PROGRAM,
  RIGHT,
  SIPHON,
  UP,
  Program,
)
from hephaestus.agents import masked_ppo
from hephaestus.agents.dreamer import config as dreamer_config

GAME = hackmatrix.HackMatrix()
POTENTIAL = hackmatrix.HackMatrix(shaping='potential')
KEY = jax.random.key(0)
PLAY = jax.jit(GAME.play)
PLAY_POTENTIAL = jax.jit(POTENTIAL.play)
OBSERVE = jax.jit(GAME.observe)
VIRUS, DAEMON, GLITCH, CRYPTOG = range(4)
WAIT = Program.WAIT.action


def game(position=(0, 0), *, enemies=(), transmissions=(), blocks=(), owned=(), **fields):
  """A state of the first stage.

  Args:
    position: of the player.
    enemies: (kind, row, col), or with a dict of other fields as the fourth entry.
    transmissions: (row, col, turns), or with such a dict.
    blocks: (row, col, type), or with a dict of points, program, spawn and siphoned.
    owned: programs, or 'all'.
    **fields: of the state; for a grid, a dict from cells to values.
  """
  state = jax.tree.map(np.array, hackmatrix.initial())
  state = state.replace(row=position[0], col=position[1])
  for i, (kind, row, col, *rest) in enumerate(enemies):
    values = dict(kind=kind, row=row, col=col, hp=state_lib.FULL_HP[kind], active=True)
    for name, value in (values | dict(*rest)).items():
      getattr(state.enemies, name)[i] = value
  for i, (row, col, turns, *rest) in enumerate(transmissions):
    for name, value in (dict(row=row, col=col, turns=turns, active=True) | dict(*rest)).items():
      getattr(state.transmissions, name)[i] = value
  for row, col, kind, *rest in blocks:
    for name, value in (dict(type=kind) | dict(*rest)).items():
      getattr(state, f'block_{name}')[row, col] = value
  for name, value in fields.items():
    if isinstance(value, dict):
      for cell, content in value.items():
        getattr(state, name)[cell] = content
      fields[name] = getattr(state, name)
  programs = range(23) if owned == 'all' else owned
  state.owned[list(programs)] = True
  return state.replace(**fields)


def test_first_observation_matches_the_initial_state():
  state, timestep = GAME.reset(KEY)
  jax.tree.map(np.testing.assert_array_equal, timestep.observation, OBSERVE(state))


NUM_STAGES = 4096


KEYS = jax.random.split(jax.random.key(5), NUM_STAGES)


@jax.jit
def compiled_outcomes(state, action):
  return jax.vmap(lambda key: GAME.play(key, state, action)[0])(KEYS)


def outcomes(state, action):
  """[N] random states after an action."""
  return jax.device_get(compiled_outcomes(state_lib.narrow(state), np.int32(action)))


@pytest.fixture(scope='module')
def arrivals():
  """[N] states at the beginning of the fourth stage."""
  return outcomes(game((5, 4), stage=3), RIGHT)


def assert_uniform(counts):
  """Whether counts are within five standard deviations of a uniform distribution."""
  counts = np.asarray(counts)
  mean = counts.sum() / counts.size
  assert np.abs(counts - mean).max() < 5 * np.sqrt(mean), counts


def test_random_stages_have_the_distribution_of_the_rules(arrivals):
  inner = np.ones((6, 6), bool)
  inner[::5, ::5] = False
  blocks = arrivals.block_type != 0
  assert_uniform(np.bincount(blocks.sum((1, 2)), minlength=12)[5:])
  assert_uniform(blocks.sum(0)[inner])
  assert_uniform([(arrivals.block_type == kind).sum() for kind in (DATA, PROGRAM)])
  assert_uniform(np.bincount(arrivals.block_points[arrivals.block_type == DATA])[1:])
  assert_uniform(np.bincount(arrivals.block_program[arrivals.block_type == PROGRAM], minlength=23))
  amounts = np.bincount((arrivals.cell_credits + arrivals.cell_energy)[~blocks & inner])
  np.testing.assert_allclose(amounts / amounts.sum(), [0, 0.45, 0.45, 0.1], atol=0.01)
  assert_uniform([(arrivals.cell_credits > 0).sum(), (arrivals.cell_energy > 0).sum()])
  exits = 2 * (arrivals.exit_row == 5) + (arrivals.exit_col == 5)
  assert_uniform(np.bincount(exits, minlength=4)[:3])
  slots = arrivals.transmissions
  assert (slots.active == (np.arange(20) < 4)).all()
  cell = 6 * slots.row + slots.col
  for slot in range(4):
    assert_uniform(np.bincount(cell[:, slot], minlength=36).reshape(6, 6)[inner])
    assert_uniform(np.bincount(slots.kind[:, slot], minlength=4))


def test_poly_warp_siphon_and_tasks_sample_uniformly():
  state = game((2, 2), enemies=[(kind, 4, kind) for kind in range(4)], transmissions=[(0, 5, 3)])
  kinds = outcomes(state, Program.POLY.action).enemies.kind
  for kind in range(4):
    counts = np.bincount(kinds[:, kind], minlength=4)
    assert counts[kind] == 0
    assert_uniform(np.delete(counts, kind))
  warped = outcomes(state, Program.WARP.action)
  assert_uniform(np.unique(6 * warped.row + warped.col, return_counts=True)[1])
  blocks = [(1, 0, DATA, {'points': 3, 'spawn': 3})]
  siphoned = outcomes(game(data_siphons=1, blocks=blocks), SIPHON)
  for slot in range(3):
    assert_uniform(np.bincount(siphoned.transmissions.kind[:, slot], minlength=4))
  scheduled = outcomes(game(turn=11, blocks=blocks), WAIT).transmissions
  cells = np.bincount(6 * scheduled.row[:, 0] + scheduled.col[:, 0], minlength=36)
  assert cells[0] == cells[6] == 0
  assert_uniform(np.delete(cells, [0, 6]))


@pytest.mark.parametrize('num_siphons', [0, 3])
def test_start_has_the_chosen_resources_and_their_observation(num_siphons):
  chosen = hackmatrix.HackMatrix(
    starting_siphons=num_siphons, starting_credits=3, starting_energy=60
  )
  state, timestep = chosen.reset(KEY)
  assert (state.data_siphons, state.credits, state.energy) == (num_siphons, 3, 60)
  for name, x in OBSERVE(state).items():
    np.testing.assert_allclose(timestep.observation[name], x, rtol=1e-6)


def test_fraction_of_starting_siphons_is_the_probability_of_one_more():
  chosen = hackmatrix.HackMatrix(starting_siphons=0.25)
  state, timestep = jax.device_get(jax.vmap(chosen.reset)(KEYS))
  assert set(state.data_siphons) == {0, 1}
  assert state.data_siphons.mean() == pytest.approx(0.25, abs=0.04)  # six standard deviations
  seen = timestep.observation
  assert (seen['action_mask'][:, SIPHON] == state.data_siphons).all()
  np.testing.assert_allclose(
    seen['features'][:, observation.PLAYER_DATA_SIPHONS], state.data_siphons / 10, rtol=1e-6
  )


@pytest.mark.parametrize(
  'scale, numbers',
  [
    (0.0, [0, 0, 0, 0, 0, 0, 0, 0]),
    (0.375, [1, 1, 2, 2, 2, 3, 3, 3]),
    (0.625, [1, 2, 2, 3, 4, 4, 5, 5]),
  ],
)
def test_new_stages_have_the_scaled_number_of_transmissions(scale, numbers):
  bits, cells = np.zeros(8, np.uint32), np.arange(8, dtype=np.int32)
  for stage, number in zip(range(1, 9), numbers, strict=True):
    slots = stages._transmissions(state_lib.widen(game(stage=stage)), cells, bits, scale)
    assert slots.active.sum() == number


def test_options_scale_parts_of_the_reward():
  chosen = hackmatrix.HackMatrix(
    siphon_death_penalty=2.0, distance_shaping=0.025, data_siphon_reward=2.0
  )
  ends = np.array(True)
  earn = lambda before, after, action: rewards.earn(
    state_lib.widen(before), jnp.int32(action), state_lib.widen(after),
    died=ends, completed=~ends, won=~ends, chosen=chosen,
  )  # fmt: skip
  dead = game(stage=4, hp=0, enemies=[(VIRUS, 1, 0, {'from_siphon': True})])
  assert earn(dead, dead, WAIT).siphon_death_penalty == -2
  parts = earn(game(), game((1, 0), data_siphons=1), UP)
  assert parts.data_siphon == 2
  assert parts.distance_shaping == np.float32(0.025)


@pytest.mark.parametrize(
  'option, value, message',
  [
    ('starting_siphons', -1, 'from 0 to 1000'),
    ('starting_siphons', float('nan'), 'from 0 to 1000'),
    ('starting_credits', 1.5, 'a whole number'),
    ('starting_energy', 1001, 'from 0 to 1000'),
    ('transmission_scale', 1.5, 'from 0 to 1'),
    ('siphon_death_penalty', -10.0, 'at least 0'),
    ('distance_shaping', float('inf'), 'a finite number'),
    ('data_siphon_reward', 'two', 'a number'),
    ('shaping', 'potentials', 'choose from original, potential'),
    ('gamma', 1.1, 'from 0 to 1'),
  ],
)
def test_invalid_option_is_refused(option, value, message):
  with pytest.raises(ValueError, match=rf'^environment\.{option}=.*{message}'):
    environments.make('hackmatrix', **{option: value})


def test_default_of_gamma_equals_gamma_of_both_agents():
  assert GAME.gamma == masked_ppo.PPOConfig().gamma == dreamer_config.DreamerConfig().gamma


def round_trips(step, num):
  """The sum of the reward over steps away from the exit and back."""
  state, total = state_lib.narrow(game((3, 3))), 0.0
  for action in [LEFT, RIGHT] * num:
    state, reward, _ = step(KEY, state, jnp.int32(action))
    total += float(reward.total())
  return total


def test_original_shaping_pays_for_round_trips_and_a_potential_does_not():
  assert round_trips(PLAY, 5) == pytest.approx(5 * (-0.01 + 0.04))
  assert round_trips(PLAY_POTENTIAL, 5) < 0


@pytest.mark.parametrize(
  'state, action, distances',
  [
    pytest.param(game((2, 2)), UP, (6, 5), id='towards the exit'),
    pytest.param(game((2, 2)), DOWN, (6, 7), id='away from it'),
    pytest.param(game((5, 4), stage=8), RIGHT, (1, 0), id='victory'),
    pytest.param(game((2, 2), hp=1, enemies=[(DAEMON, 3, 2)]), DOWN, (6, 0), id='death'),
    pytest.param(
      game((0, 1), blocks=[(0, 1, DATA, {'siphoned': True}), (1, 0, DATA)]),
      LEFT,
      (9, 10),
      id='no path to the exit',
    ),
  ],
)
def test_potential_is_the_distance_to_the_exit(state, action, distances):
  _, parts, _ = PLAY_POTENTIAL(KEY, state_lib.narrow(state), jnp.int32(action))
  expected = 0.05 * (distances[0] - 0.99 * distances[1])
  assert parts.distance_shaping == pytest.approx(expected, abs=1e-6)


def test_metrics_of_a_step_are_parts_of_its_reward_and_say_what_was_done():
  before, after = game(stage=2, data_siphons=1), game(stage=3)
  reward = rewards.Reward(*np.arange(15.0))
  outcome = game_lib._Outcome(after, reward, done=False, codes=None, mask=None)
  found = game_lib._metrics(before, np.int32(SIPHON), outcome)
  assert found.keys() == GAME.metrics.keys()
  assert [found[f'reward_{part}'] for part in reward._fields] == list(range(15))
  assert [found[name] for name in ('moves', 'siphons', 'programs', 'siphon_legal')] == [0, 1, 0, 1]
  assert (found['highest_stage'], found['stages_completed']) == (3, 1)


def test_state_built_by_hand_may_have_any_integer_dtype():
  state = hackmatrix.initial().replace(row=2, credits=np.int64(3), hp=jnp.int8(1))
  next_state, timestep = jax.eval_shape(GAME.step, KEY, state, UP)
  assert jax.tree.map(lambda x: x.dtype, next_state) == jax.tree.map(np.dtype, state_lib.DTYPES)
  assert timestep.reward.dtype == np.float32
  narrowed = jax.tree.map(np.asarray, state_lib.narrow(state))
  assert (narrowed.row, narrowed.credits, narrowed.hp) == (2, 3, 1)


def test_frame_shows_the_board():
  state = game((1, 1), enemies=[(VIRUS, 4, 4)], transmissions=[(3, 3, 2)], blocks=[(2, 2, DATA)])
  frame, empty = GAME.render(state), GAME.render(game((1, 1)))
  assert frame.shape == (240, 336, 3) and frame.dtype == np.uint8
  cells = (frame != empty)[:, :240].any(-1).reshape(6, 40, 6, 40).any((1, 3))[::-1]
  assert {(4, 4), (3, 3), (2, 2)} == set(zip(*np.nonzero(cells), strict=True))

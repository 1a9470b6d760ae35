"""The rules of HackMatrix, by worked examples on states built by hand."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.actors import environments, rollout
from hephaestus.actors.environments import environment, hackmatrix, wrappers
from hephaestus.actors.environments.hackmatrix import board, observation, rewards
from hephaestus.actors.environments.hackmatrix import state as state_lib
from hephaestus.actors.environments.hackmatrix.state import (
  DATA,
  DOWN,
  LEFT,
  PROGRAM,
  QUESTION,
  RIGHT,
  SIPHON,
  UP,
  Program,
)
from hephaestus.agents import masked_ppo
from hephaestus.agents import observation as observation_lib
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


def play(state, *actions, key=KEY):
  """The last state, the sum and the parts of its reward, and whether the episode ended."""
  for action in actions:
    state, reward, done = PLAY(key, state_lib.narrow(state), jnp.int32(action))
  return jax.device_get(state), float(reward.total()), reward, bool(done)


def mask(state):
  return np.asarray(OBSERVE(state_lib.narrow(state))['action_mask'])


def channels(state):
  features = np.asarray(OBSERVE(state_lib.narrow(state))['features'])
  return features[33:].reshape(6, 6, 42)


def enemies_of(state):
  slots = state.enemies
  return [
    (int(slots.kind[i]), int(slots.row[i]), int(slots.col[i])) for i in np.flatnonzero(slots.active)
  ]


def transmissions_of(state):
  slots = state.transmissions
  return [
    (int(slots.row[i]), int(slots.col[i]), int(slots.turns[i]))
    for i in np.flatnonzero(slots.active)
  ]


def test_walking_away_costs_only_the_step_penalty():
  assert play(game((3, 3)), LEFT)[1] == pytest.approx(-0.01)


def test_walking_towards_the_exit_is_rewarded():
  assert play(game(), UP)[1] == pytest.approx(0.04)


def test_attack_on_a_distant_enemy_does_not_move_the_player():
  state, reward, *_ = play(game((0, 3), enemies=[(VIRUS, 5, 3, {'hp': 1})]), UP)
  assert (state.row, state.col, enemies_of(state)) == (0, 3, [])
  assert reward == pytest.approx(0.29)


def test_nearest_cell_in_the_line_is_attacked():
  state, *_ = play(game((3, 3), transmissions=[(4, 3, 3)], enemies=[(DAEMON, 5, 3)]), UP)
  assert transmissions_of(state) == []
  assert enemies_of(state) == [(DAEMON, 4, 3)]
  assert state.hp == 2


def test_enemy_is_attacked_before_a_transmission_in_its_cell():
  state, *_ = play(game((2, 3), transmissions=[(5, 3, 3)], enemies=[(DAEMON, 5, 3)]), UP)
  assert state.enemies.hp[0] == 2
  assert transmissions_of(state) == [(5, 3, 2)]


def test_blocks_stop_moves_but_not_attacks():
  block = (3, 3, DATA)
  attacked = game((2, 3), blocks=[block], enemies=[(DAEMON, 5, 3)])
  assert mask(attacked)[UP]
  assert play(attacked, UP)[0].enemies.hp[0] == 2
  assert not mask(game((2, 3), blocks=[block]))[UP]


def test_enemy_that_survives_an_attack_attacks():
  state, reward, *_ = play(game((3, 3), enemies=[(VIRUS, 4, 3)]), UP)
  assert (state.enemies.hp[0], state.hp) == (1, 2)
  assert reward == pytest.approx(-1.01)


def test_stun_lasts_one_enemy_turn():
  state = game((3, 3), enemies=[(VIRUS, 4, 3, {'stunned': True})])
  state, *_ = play(state, WAIT)
  assert (state.hp, state.enemies.stunned[0]) == (3, False)
  assert play(state, WAIT)[0].hp == 2


@pytest.mark.parametrize(
  'position, enemy, blocks, moved',
  [
    pytest.param((0, 0), (VIRUS, 1, 0), [], (1, 0), id='a virus next to the player stays'),
    pytest.param((0, 0), (VIRUS, 3, 3), [], (2, 2), id='rows come first when distances are equal'),
    pytest.param((0, 0), (DAEMON, 3, 0), [(2, 0)], (2, 0), id='straight on it walks into a block'),
    pytest.param((0, 0), (DAEMON, 3, 2), [(2, 2)], (2, 1), id='it shifts around a block'),
    pytest.param((0, 0), (DAEMON, 3, 2), [(2, 2), (2, 1)], (2, 1), id='it shifts into a block'),
    pytest.param((0, 0), (DAEMON, 2, 3), [(2, 2)], (1, 2), id='by columns it shifts a row'),
    pytest.param((0, 0), (GLITCH, 3, 2), [(2, 2)], (2, 2), id='a glitch walks through blocks'),
    pytest.param((2, 2), (DAEMON, 3, 3), [(2, 3)], (2, 2), id='it may shift onto the player'),
  ],
)
def test_enemies_approach_greedily(position, enemy, blocks, moved):
  state = game(position, enemies=[enemy], blocks=[(*cell, DATA) for cell in blocks])
  state, *_ = play(state, WAIT)
  assert enemies_of(state) == [(enemy[0], *moved)]
  assert state.hp == (2 if abs(moved[0] - position[0]) + abs(moved[1] - position[1]) == 1 else 3)


def test_enemy_on_the_players_cell_attacks_after_the_player_leaves():
  state, *_ = play(game((2, 2), enemies=[(DAEMON, 3, 3)], blocks=[(2, 3, DATA)]), WAIT)
  state, *_ = play(state, DOWN)
  assert (state.row, state.hp) == (1, 2)


def test_pull_moves_an_enemy_onto_the_player_where_it_cannot_attack():
  state, *_ = play(game((3, 3), enemies=[(DAEMON, 4, 3)], energy=3), Program.PULL.action)
  assert enemies_of(state) == [(DAEMON, 3, 3)]
  assert play(state, WAIT)[0].hp == 3
  state, *_ = play(state, UP)
  assert (state.row, state.hp) == (4, 2)


def test_push_moves_enemies_away_up_to_the_edge():
  cells = [(4, 4), (5, 3), (1, 5), (3, 3)]
  state = game((3, 3), enemies=[(DAEMON, *cell) for cell in cells], blocks=[(5, 5, DATA)])
  state, *_ = play(state, Program.PUSH.action)
  assert [enemy[1:] for enemy in enemies_of(state)] == [(5, 5), (5, 3), (0, 5), (3, 3)]


def test_siphon_releases_transmissions_and_delays_the_task():
  block = (1, 0, PROGRAM, {'spawn': 2, 'program': 4})
  state, *_ = play(game(data_siphons=1, blocks=[block]), SIPHON)
  assert transmissions_of(state) == [(1, 0, 2)] * 2
  assert (state.next_task_turn, state.data_siphons) == (17, 0)
  assert state.owned[4] and state.block_siphoned[1, 0] and state.siphon_center[0, 0]
  state, *_ = play(state, WAIT)
  assert transmissions_of(state) == [(1, 0, 1)] * 2
  state, *_ = play(state, WAIT)
  assert [enemy[1:] for enemy in enemies_of(state)] == [(1, 0)] * 2
  assert state.hp == 1
  assert state.enemies.from_siphon[:2].all()


def test_siphon_breaks_ties_by_direction():
  blocks = [(2, 3, DATA, {'points': 5}), (3, 4, DATA, {'points': 5})]
  state, *_ = play(game((3, 3), data_siphons=1, blocks=blocks), SIPHON)
  assert state.block_siphoned[2, 3] and not state.block_siphoned[3, 4]


def test_siphon_prefers_programs_to_points():
  blocks = [(2, 3, DATA, {'points': 9}), (3, 4, PROGRAM, {'spawn': 1})]
  state, *_ = play(game((3, 3), data_siphons=1, blocks=blocks), SIPHON)
  assert state.block_siphoned[3, 4] and not state.block_siphoned[2, 3]


def test_siphon_releases_at_most_nine_transmissions():
  blocks = [(1, 0, DATA, {'points': 10, 'spawn': 10})]
  state, reward, *_ = play(game(data_siphons=1, blocks=blocks), SIPHON)
  assert state.score == 10
  assert len(transmissions_of(state)) == 9
  assert reward == pytest.approx(4.99)


def test_block_without_points_is_not_siphoned():
  blocks = [(1, 0, DATA), (0, 1, QUESTION)]
  state, *_ = play(game(data_siphons=1, blocks=blocks), SIPHON)
  assert state.data_siphons == 0
  assert not state.block_siphoned.any() and not state.siphon_center.any()
  assert state.next_task_turn == 12


def test_new_enemy_cancels_a_kill():
  state = game((0, 3), enemies=[(VIRUS, 5, 3, {'hp': 1})], transmissions=[(5, 0, 1)])
  state, reward, parts, _ = play(state, UP)
  assert len(enemies_of(state)) == 1
  assert parts.kills == 0
  assert reward == pytest.approx(-0.01)


def shaping(state, distance_before):
  """Distance reward at the end of a stage: 0 unless the new exit is unreachable."""
  place = lambda row, col: board.of_cell(row.astype(jnp.int32), col.astype(jnp.int32))

  @jax.jit
  def distance(state):
    here, exit_ = place(state.row, state.col), place(state.exit_row, state.exit_col)
    return board.walking_distance(board.of_cells(state.block_type != 0), here, exit_)

  return 0.05 * distance_before * (int(distance(state)) == 0)


def test_enemies_left_behind_count_as_kills():
  enemies = [(DAEMON, 0, 0), (DAEMON, 0, 1)]
  state, reward, *_ = play(game((5, 4), stage=2, enemies=enemies), RIGHT)
  assert (state.stage, enemies_of(state)) == (3, [])
  assert reward == pytest.approx(2.0 + 0.6 - 0.01 + shaping(state, 1))


def test_death_at_the_exit_still_completes_the_stage():
  state = game((5, 4), stage=2, hp=1, enemies=[(DAEMON, 4, 5)])
  state, reward, parts, done = play(state, RIGHT)
  assert done and (state.hp, state.stage) == (1, 3)
  assert parts.damage_penalty == parts.hp_recovery == 0
  assert reward == pytest.approx(2.0 + 0.3 - 1.5 - 0.01 + shaping(state, 1))


def test_completed_stage_has_all_parts_of_the_reward():
  state = game((5, 4), hp=2, credits=4, energy=6, cell_credits={(5, 5): 2}, cell_energy={(5, 5): 1})
  state, reward, _, done = play(state, RIGHT)
  assert not done and state.hp == 3
  assert reward == pytest.approx(1 - 0.01 + 1 + 0.15 + 0.13 + shaping(state, 1))


def test_completing_the_last_stage_wins():
  state, reward, parts, done = play(game((5, 4), stage=8, score=10), RIGHT)
  assert done and state.stage == 9
  assert parts.victory == 1500
  assert reward == pytest.approx(100 + 1500 - 0.01 + shaping(state, 1))


def test_death_by_siphoned_enemy_has_an_extra_penalty():
  state = game(stage=4, hp=1, energy=1, enemies=[(VIRUS, 1, 0, {'from_siphon': True})])
  _, reward, _, done = play(state, WAIT)
  assert done and reward == pytest.approx(-14.56)


@pytest.mark.parametrize('hp, expected', [(2, 0.49), (1, 1.79)])
def test_reset_program_is_penalised_at_two_hp(hp, expected):
  assert play(game(hp=hp, energy=4), Program.RESET.action)[1] == pytest.approx(expected)


def test_siphon_is_penalised_if_a_better_cell_existed():
  state = game(
    (2, 1),
    data_siphons=1,
    blocks=[(2, 2, DATA, {'points': 5, 'spawn': 5})],
    cell_credits={(2, 4): 10},
    cell_energy={(2, 4): 3},
  )
  assert play(state, SIPHON)[1] == pytest.approx(2.5 - 0.325 - 0.01)


def test_missed_credits_and_energy_may_be_of_two_cells():
  state = game(data_siphons=1, cell_credits={(2, 4): 3}, cell_energy={(4, 2): 2})
  assert play(state, SIPHON)[2].siphon_quality == pytest.approx(-0.125)


def test_entering_a_sealed_pocket_gives_the_distance_reward():
  blocks = [(0, 1, DATA, {'siphoned': True}), (1, 0, DATA)]
  _, _, parts, _ = play(game((0, 1), blocks=blocks), LEFT)
  assert parts.distance_shaping == pytest.approx(0.45)


def test_scheduled_task_sends_a_transmission_that_hatches_next_turn():
  state, *_ = play(game(turn=11), WAIT)
  assert (state.turn, state.next_task_turn) == (12, 24)
  ((row, col, turns),) = transmissions_of(state)
  assert turns == 1 and (row, col) != (0, 0)
  state, *_ = play(state, WAIT)
  assert transmissions_of(state) == [] and len(enemies_of(state)) == 1
  assert state.enemies.from_scheduled[0]


def test_undo_refunds_only_its_cost():
  state = game(credits=5, owned='all')
  assert not mask(state)[Program.UNDO.action]
  state, *_ = play(state, UP)
  assert mask(state)[Program.UNDO.action]
  state, reward, *_ = play(state, Program.UNDO.action)
  assert (state.credits, state.row, state.turn) == (5, 1, 1)
  assert reward == pytest.approx(-0.01)
  assert not mask(state)[Program.UNDO.action]
  assert mask(play(state, Program.SIPH_PLUS.action, UP)[0].replace(credits=1))[Program.UNDO.action]


def test_d_bom_damages_enemies_around_the_nearest_daemon():
  enemies = [
    (DAEMON, 5, 3),
    (DAEMON, 3, 5),
    (DAEMON, 5, 4),
    (VIRUS, 5, 3),
    (VIRUS, 4, 3, {'hp': 1}),
    (VIRUS, 4, 4),
  ]
  state, _, parts, _ = play(game((3, 3), enemies=enemies), Program.D_BOM.action)
  slots = state.enemies
  assert slots.active[:6].tolist() == [False, True, True, True, False, True]
  assert slots.hp[[1, 2, 3, 5]].tolist() == [3, 2, 2, 1]
  assert slots.stunned[[1, 2, 3, 5]].tolist() == [False, True, False, True]
  assert parts.kills == pytest.approx(0.6)


def test_mask_of_an_empty_board_with_all_programs_affordable():
  state = game((2, 2), hp=2, data_siphons=1, credits=50, energy=50, owned='all')
  names = ('WAIT', 'STEP', 'SIPH_PLUS', 'EXCH', 'SHOW', 'RESET', 'CALM', 'SCORE', 'ATK_PLUS')
  legal = {0, 1, 2, 3, 4, *(Program[name].action for name in names)}
  assert set(np.flatnonzero(mask(state))) == legal


def test_copied_spec_keeps_the_board_shape():
  spec = GAME.observation_spec['features']
  observation = OBSERVE(state_lib.narrow(game(enemies=[(DAEMON, 2, 4)])))
  for copy in (spec, pickle.loads(pickle.dumps(spec)), spec.replace(name='other')):
    (board,) = observation_lib.boards(observation, {'features': copy})
    assert np.flatnonzero(board[:, DAEMON]).tolist() == [6 * 2 + 4]


def test_board_larger_than_its_vector_is_rejected():
  with pytest.raises(ValueError, match=r'board_shape=\(2, 3, 4\)'):
    environment.BoardSpec((23,), np.float32, (2, 3, 4))


def test_observed_countdown_is_clipped_at_four_turns():
  state, *_ = play(game(transmissions=[(4, 4, 2)]), Program.DELAY.action)
  assert transmissions_of(state) == [(4, 4, 5)]
  assert channels(state)[4, 4, observation.TRANSMISSION_TURNS] == 1.0


def test_step_program_stops_moves_but_not_attacks_or_transmissions():
  state = game((3, 3), enemies=[(DAEMON, 4, 3), (DAEMON, 5, 5)], transmissions=[(0, 0, 3)])
  state, *_ = play(state, Program.STEP.action)
  assert state.step_active
  state, *_ = play(state, WAIT)
  assert enemies_of(state) == [(DAEMON, 4, 3), (DAEMON, 5, 5)]
  assert (state.hp, bool(state.step_active)) == (2, False)
  assert transmissions_of(state) == [(0, 0, 2)]


def test_mask_may_be_all_false():
  assert not mask(game(blocks=[(1, 0, DATA), (0, 1, DATA)])).any()


def test_first_observation_matches_the_initial_state():
  state, timestep = GAME.reset(KEY)
  jax.tree.map(np.testing.assert_array_equal, timestep.observation, OBSERVE(state))


def test_layout_of_the_observation():
  state = game(
    (1, 2),
    hp=2,
    attack=3,
    credits=25,
    energy=100,
    data_siphons=20,
    stage=8,
    show_active=False,
    tasks_disabled=True,
    owned=[Program.HACK],
    enemies=[
      (DAEMON, 4, 4, {'hp': 1, 'stunned': True}),
      (VIRUS, 4, 4, {'hp': 2, 'from_siphon': True}),
      (CRYPTOG, 0, 0),
      (CRYPTOG, 1, 5),
    ],
    transmissions=[(3, 0, 1), (3, 0, 2)],
    blocks=[
      (2, 3, DATA, {'points': 18, 'spawn': 9, 'siphoned': True}),
      (2, 4, PROGRAM, {'program': 22, 'spawn': 2}),
    ],
    cell_credits={(5, 0): 3},
    cell_energy={(5, 1): 6},
    cell_data_siphon={(0, 5): True},
    siphon_center={(1, 3): True},
  )
  features = np.asarray(OBSERVE(state_lib.narrow(state))['features'])
  expected = np.zeros(1545)
  expected[:10] = 0.2, 0.4, 2 / 3, 0.5, 1, 1, 2, 1, 0, 1
  expected[10 + 22] = 1
  at = lambda row, col, channel: 33 + (6 * row + col) * 42 + channel
  for row, col, channel, value in (
    (4, 4, 0, 1),
    (4, 4, 1, 1),
    (4, 4, 4, 2 / 3),
    (4, 4, 6, 1),
    (1, 5, 3, 1),
    (1, 5, 4, 2 / 3),
    (2, 3, 7, 1),
    (2, 3, 10, 2),
    (2, 3, 11, 1),
    (2, 3, 35, 1),
    (2, 4, 8, 1),
    (2, 4, 12 + 22, 1),
    (2, 4, 35, 2 / 9),
    (3, 0, 36, 0.5),
    (5, 0, 37, 1),
    (5, 1, 38, 2),
    (0, 5, 39, 1),
    (5, 5, 40, 1),
    (1, 3, 41, 1),
  ):
    expected[at(row, col, channel)] = value
  np.testing.assert_allclose(features, expected, rtol=1e-6)


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


def check_invariants(before, action, state, timestep):
  """Checks invariants of [T, N] states, actions, and the states and time steps after them."""
  in_range = lambda x, low, high: ((x >= low) & (x <= high)).all()
  for name, low, high in (
    ('row', 0, 5),
    ('col', 0, 5),
    ('hp', 0, 3),
    ('attack', 1, 3),
    ('stage', 1, 9),
    ('attack_upgrades', 0, 2),
    ('score', 0, np.inf),
    ('block_type', 0, 2),
    ('block_points', 0, 9),
    ('block_program', 0, 22),
    ('block_spawn', 0, 9),
    ('cell_credits', 0, 3),
    ('cell_energy', 0, 3),
  ):
    assert in_range(getattr(state, name), low, high), name
  # Without a legal action, an illegal one may lead to negative credits or energy.
  was_legal = np.take_along_axis(mask_of(before), action[..., None], -1)[..., 0]
  for name in ('credits', 'energy', 'data_siphons'):
    spent = was_legal & (getattr(before, name) >= 0)
    assert (getattr(state, name)[spent] >= 0).all(), name
  for slots in (state.enemies, state.transmissions):
    assert in_range(slots.row[slots.active], 0, 5) and in_range(slots.col[slots.active], 0, 5)
    assert in_range(slots.kind[slots.active], 0, 3)
  alive = state.enemies.active
  assert in_range(state.enemies.hp[alive], 1, 3)
  assert (state.enemies.disabled_turns[alive] == 0).all()
  assert (state.transmissions.turns[state.transmissions.active] >= 1).all()
  assert (np.isin(state.exit_row, (0, 5)) & np.isin(state.exit_col, (0, 5))).all()
  assert not (state.block_siphoned & (state.block_type == 0)).any()
  assert np.isfinite(timestep.reward).all()
  assert np.isfinite(timestep.observation['features']).all()
  assert (mask_of(state) == timestep.observation['action_mask']).all()
  ended = timestep.last()
  assert ((timestep.discount == 0) == ended).all()
  assert (ended | (state.hp > 0)).all()


MASKS = jax.jit(jax.vmap(jax.vmap(GAME.action_mask)))


def mask_of(states):
  return np.asarray(MASKS(states))


def random_play(num_envs, num_steps, seed):
  """[T, N] states, actions, and the states and time steps after them, over many episodes."""
  env = wrappers.AutoReset(GAME)

  @jax.jit
  def run(key):
    key, reset_key = jax.random.split(key)
    state, timestep = jax.vmap(env.reset)(jax.random.split(reset_key, num_envs))

    def step(carry, key):
      state, seen = carry
      action_key, step_key = jax.random.split(key)
      choose = lambda key, seen: wrappers.random_action(key, env.action_spec, seen)
      action = jax.vmap(choose)(jax.random.split(action_key, num_envs), seen)
      keys = jax.random.split(step_key, num_envs)
      next_state, timestep = jax.vmap(env.step)(keys, state, action)
      row = state.env_state, action, next_state.env_state, timestep
      return (next_state, timestep.observation), row

    keys = jax.random.split(key, num_steps)
    return jax.lax.scan(step, (state, timestep.observation), keys)[1]

  return jax.device_get(run(jax.random.key(seed)))


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
  chosen = hackmatrix.HackMatrix(transmission_scale=scale)
  start = game((5, 4))
  leave = lambda stage: chosen.play(KEY, state_lib.narrow(start.replace(stage=stage)), RIGHT)[0]
  after = jax.jit(jax.vmap(leave))(np.arange(1, 9))
  assert after.stage.tolist() == list(range(2, 10))
  assert after.transmissions.active.sum(1).tolist() == numbers


def test_options_scale_parts_of_the_reward():
  chosen = hackmatrix.HackMatrix(
    siphon_death_penalty=2.0, distance_shaping=0.025, data_siphon_reward=2.0
  )
  step = jax.jit(chosen.play)
  state = game(stage=4, hp=1, energy=1, enemies=[(VIRUS, 1, 0, {'from_siphon': True})])
  assert step(KEY, state_lib.narrow(state), WAIT)[1].siphon_death_penalty == -2
  parts = step(KEY, state_lib.narrow(game(cell_data_siphon={(1, 0): True})), UP)[1]
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


def round_trips(chosen, num):
  """The sum of the reward, and of the part for the distance, over steps away from the exit and back."""
  step, state, total, shaped = jax.jit(chosen.play), state_lib.narrow(game((3, 3))), 0.0, 0.0
  for action in [LEFT, RIGHT] * num:
    state, reward, _ = step(KEY, state, jnp.int32(action))
    total, shaped = total + float(reward.total()), shaped + float(reward.distance_shaping)
  return total, shaped


def test_original_shaping_pays_for_round_trips_and_a_potential_does_not():
  assert round_trips(GAME, 5)[0] == pytest.approx(5 * (-0.01 + 0.04))
  assert round_trips(POTENTIAL, 5)[0] < 0
  undiscounted = hackmatrix.HackMatrix(shaping='potential', gamma=1.0)
  assert round_trips(undiscounted, 5) == pytest.approx((-0.1, 0.0), abs=1e-6)


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


def test_discounted_potentials_of_an_episode_sum_to_the_one_of_its_start():
  start = state_lib.narrow(game((4, 5), stage=6, owned='all', credits=20, energy=20))

  @jax.jit
  def episode(key):
    def step(carry, key):
      state, is_over = carry
      action_key, step_key = jax.random.split(key)
      seen = {'action_mask': POTENTIAL.action_mask(state)}
      action = wrappers.random_action(action_key, POTENTIAL.action_spec, seen)
      state, parts, ended = POTENTIAL.play(step_key, state, action)
      shaped = jnp.where(is_over, 0.0, parts.distance_shaping)
      return (state, is_over | ended), (shaped, state.stage, is_over)

    keys = jax.random.split(key, 512)
    (_, is_over), (shaped, stage, was_over) = jax.lax.scan(step, (start, False), keys)
    return shaped @ 0.99 ** np.arange(512), is_over, jnp.where(was_over, 0, stage).max()

  total, is_over, stage = jax.device_get(jax.vmap(episode)(KEYS[:64]))
  assert is_over.sum() > 32 and (stage[is_over] > 6).sum() > 32
  np.testing.assert_allclose(total[is_over], 0.05, atol=1e-5)


def test_random_policy_keeps_the_invariants():
  before, action, state, timestep = random_play(64, 128, seed=0)
  check_invariants(before, action, state, timestep)
  assert timestep.last().sum() > 10
  assert state.stage.max() >= 2


def test_metrics_of_an_episode_are_parts_of_its_return_and_shares_of_its_steps():
  game = hackmatrix.make(max_steps=60)
  agent = rollout.random_agent(game.action_spec)
  unroll = rollout.make_unroll(game, agent, num_envs=16, sequence_length=129)
  _, sequence, played = unroll.unroll((), KEY, unroll.init(KEY), 0, 0)
  ended = np.asarray(played.ended)
  found = {
    name.removeprefix(rollout.METRICS): np.asarray(values)[ended]
    for name, values in played.metrics.items()
  }
  assert ended.sum() > 16 and len(found) == 21
  parts = [found[f'reward_{part}'] for part in rewards.Reward._fields]
  np.testing.assert_allclose(sum(parts), np.asarray(played.episode_return)[ended], atol=1e-3)
  np.testing.assert_allclose(found['moves'] + found['siphons'] + found['programs'], 1, atol=1e-5)
  np.testing.assert_array_equal(found['highest_stage'], 1 + found['stages_completed'])
  assert found['highest_stage'].max() > 1
  # In the first sequence of each environment, up to the end of its first episode.
  steps = np.argmax(ended, axis=0) + 1
  legal = np.asarray(sequence.observation['action_mask'])[..., state_lib.SIPHON]
  shares = np.asarray(played.metrics['environment/siphon_legal'])
  for n, length in enumerate(steps):
    assert shares[length - 1, n] == pytest.approx(legal[n, :length].mean(), abs=1e-5)


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


def test_score_counts_completed_stages():
  reference = wrappers.reference_returns(hackmatrix.make(), num_episodes=64)
  # Returns of both policies are below -1.5. The script completes the empty first stage, and few more.
  assert 0 <= reference.random < 0.3
  assert 1 <= reference.scripted < 1.3

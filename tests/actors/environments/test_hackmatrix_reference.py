"""HackMatrix against a slow reference implementation in plain Python, on random states.

The reference takes random outcomes from the game's own next state, after it has checked that the
rules allow them.
"""

import copy
import itertools
import types

import jax
import numpy as np
import pytest

from hephaestus.actors.environments import hackmatrix
from hephaestus.actors.environments.hackmatrix import rewards
from hephaestus.actors.environments.hackmatrix import state as state_lib

# fmt: off
COSTS = [
  (0, 2), (0, 2), (3, 2), (2, 2), (1, 1), (0, 1), (3, 0), (3, 1), (3, 1), (1, 0), (0, 3), (5, 0),
  (4, 0), (2, 0), (0, 4), (2, 4), (3, 0), (1, 2), (3, 0), (0, 5), (2, 1), (4, 4), (2, 2),
]
# fmt: on
STEPS = [(1, 0), (-1, 0), (0, -1), (0, 1)]
FULL_HP = [2, 3, 2, 2]
STAGES = [1, 2, 4, 8, 16, 32, 64, 100]
CELLS = list(itertools.product(range(6), range(6)))
CORNERS = [(0, 0), (0, 5), (5, 0), (5, 5)]
VIRUS, DAEMON, GLITCH, CRYPTOG = range(4)
DATA, PROGRAM, QUESTION = 1, 2, 3


def sign(x):
  return (x > 0) - (x < 0)


def inside(cell):
  return 0 <= cell[0] <= 5 and 0 <= cell[1] <= 5


def manhattan(a, b):
  return abs(a[0] - b[0]) + abs(a[1] - b[1])


def around(a, b):
  return max(abs(a[0] - b[0]), abs(a[1] - b[1])) == 1


def cell_of(thing):
  return thing.row, thing.col


def lists(tree):
  """The fields of a record of [N, ...] arrays, as nested lists."""
  return {
    name: np.asarray(x).tolist() if isinstance(x, np.ndarray) else lists(x)
    for name, x in vars(tree).items()
  }


def plain_games(states):
  """Each of [N] states as plain numbers; slots are lists of None or of their contents."""
  fields = lists(states)
  for n in range(len(fields['row'])):
    game = types.SimpleNamespace()
    for name, value in fields.items():
      if name in ('enemies', 'transmissions'):
        one = {field: x[n] for field, x in value.items()}
        active = one.pop('active')
        slots = [
          types.SimpleNamespace(**{field: x[i] for field, x in one.items()}) if active[i] else None
          for i in range(20)
        ]
        setattr(game, name, slots)
      else:
        setattr(game, name, value[n])
    yield game


def listed(slots):
  return [thing for thing in slots if thing is not None]


def put(slots, thing):
  if None in slots:
    slots[slots.index(None)] = thing


def is_obstacle(game, cell):
  r, c = cell
  return game.block_type[r][c] != 0 and not game.block_siphoned[r][c]


def target_in_line(game, direction):
  """The list and the slot of the target of an attack in a direction."""
  cell = (game.row, game.col)
  while True:
    cell = cell[0] + STEPS[direction][0], cell[1] + STEPS[direction][1]
    if not inside(cell):
      return None
    for slots in (game.enemies, game.transmissions):
      for i, thing in enumerate(slots):
        if thing and cell_of(thing) == cell:
          return slots, i


def hurt(game, i, amount, stun=False):
  enemy = game.enemies[i]
  enemy.hp = max(enemy.hp - amount, 0)
  if enemy.hp == 0:
    game.enemies[i] = None
  elif stun:
    enemy.stunned = True


def mask(game):
  enemies, eggs, here = listed(game.enemies), listed(game.transmissions), (game.row, game.col)
  block = lambda cell: game.block_type[cell[0]][cell[1]] != 0
  applicable = [True] * 23
  applicable[0] = applicable[1] = applicable[4] = bool(enemies)
  applicable[2] = any(around(cell, here) and block(cell) for cell in CELLS) or any(
    around(cell_of(thing), here) for thing in enemies + eggs
  )
  applicable[3] = bool(enemies + eggs)
  applicable[6] = any(block(cell_of(enemy)) for enemy in enemies)
  applicable[7] = any(enemy.row == game.row for enemy in enemies)
  applicable[8] = any(enemy.col == game.col for enemy in enemies)
  applicable[9] = game.history_valid
  applicable[13] = not game.show_active
  applicable[14] = game.hp < 3
  applicable[15] = not game.tasks_disabled
  applicable[16] = any(enemy.kind == DAEMON for enemy in enemies)
  applicable[17] = bool(eggs)
  applicable[18] = any(enemy.kind == VIRUS for enemy in enemies)
  applicable[19] = game.stage < 8
  applicable[20] = any(is_obstacle(game, (r, c)) and game.block_spawn[r][c] > 0 for r, c in CELLS)
  applicable[21] = game.attack_upgrades < 2 and game.attack < 3
  applicable[22] = any(map(any, game.block_siphoned))
  legal = []
  for direction, (dr, dc) in enumerate(STEPS):
    cell = game.row + dr, game.col + dc
    legal.append(
      inside(cell) and (not is_obstacle(game, cell) or target_in_line(game, direction) is not None)
    )
  legal.append(game.data_siphons > 0)
  for p, (credits, energy) in enumerate(COSTS):
    affordable = game.credits >= credits and game.energy >= energy
    legal.append(game.owned[p] and affordable and applicable[p])
  return legal


def move(game, action):
  target = target_in_line(game, action)
  if target:
    slots, i = target
    if slots is game.enemies:
      hurt(game, i, game.attack)
    else:
      slots[i] = None
    return
  r, c = game.row + STEPS[action][0], game.col + STEPS[action][1]
  if inside((r, c)):
    game.row, game.col = r, c
    game.data_siphons += game.cell_data_siphon[r][c]
    game.credits += game.cell_credits[r][c]
    game.energy += game.cell_energy[r][c]
    game.cell_data_siphon[r][c], game.cell_credits[r][c], game.cell_energy[r][c] = False, 0, 0


def siphon(game, hint):
  best, chosen = 0, None
  for dr, dc in STEPS:
    cell = r, c = game.row + dr, game.col + dc
    if inside(cell) and is_obstacle(game, cell):
      value = 100 if game.block_type[r][c] == PROGRAM else game.block_points[r][c]
      if value > best:
        best, chosen = value, cell
  game.data_siphons -= 1
  if chosen is None:
    return
  r, c = chosen
  game.block_siphoned[r][c] = True
  game.siphon_center[game.row][game.col] = True
  if game.block_type[r][c] == DATA:
    game.score += game.block_points[r][c]
  if game.block_type[r][c] == PROGRAM:
    game.owned[game.block_program[r][c]] = True
  game.next_task_turn += 5
  for _ in range(min(game.block_spawn[r][c], 9)):
    if None in game.transmissions:
      kind = hint.transmissions[game.transmissions.index(None)].kind
      put(
        game.transmissions,
        types.SimpleNamespace(
          kind=kind, row=r, col=c, turns=3, from_siphon=True, from_scheduled=False
        ),
      )


def execute(game, p, hint):
  credits, energy = COSTS[p]
  game.credits -= credits
  game.energy -= energy
  active = [i for i, enemy in enumerate(game.enemies) if enemy]
  here = game.row, game.col
  if p in (0, 1):
    for i in active:
      enemy, towards = game.enemies[i], 1 if p == 0 else -1
      enemy.row = min(max(enemy.row + towards * sign(enemy.row - here[0]), 0), 5)
      enemy.col = min(max(enemy.col + towards * sign(enemy.col - here[1]), 0), 5)
  elif p == 2:
    for i in active:
      hurt(game, i, 1)
  elif p == 3:
    lost = [
      (slots, i)
      for slots, now in (
        (game.enemies, hint.enemies),
        (game.transmissions, hint.transmissions),
      )
      for i in range(20)
      if slots[i] and not now[i]
    ]
    if not listed(game.enemies) + listed(game.transmissions):
      game.row = game.col = 0
    elif hint.stage != game.stage:
      game.row, game.col = game.exit_row, game.exit_col
    else:
      ((slots, i),) = lost
      game.row, game.col = cell_of(slots[i])
      slots[i] = None
  elif p == 4:
    for i in active:
      kind = hint.enemies[i].kind
      assert kind != game.enemies[i].kind
      game.enemies[i].kind, game.enemies[i].hp = kind, FULL_HP[kind]
  elif p == 6:
    for i in active:
      if game.block_type[game.enemies[i].row][game.enemies[i].col] != 0:
        hurt(game, i, 1, stun=True)
  elif p == 7:
    for i in active:
      if game.enemies[i].row == here[0]:
        hurt(game, i, 1)
  elif p == 8:
    for i in active:
      if game.enemies[i].col == here[1]:
        hurt(game, i, 1)
  elif p == 10:
    game.step_active = True
  elif p == 11:
    game.data_siphons += 1
  elif p == 12:
    game.energy += 4
  elif p == 13:
    game.show_active = True
  elif p == 14:
    game.hp = 3
  elif p == 15:
    game.tasks_disabled = True
  elif p == 16:
    daemons = [i for i in active if game.enemies[i].kind == DAEMON]
    if daemons:
      bomb = min(daemons, key=lambda i: (manhattan(cell_of(game.enemies[i]), here), i))
      cell = cell_of(game.enemies[bomb])
      game.enemies[bomb] = None
      for i in active:
        if i != bomb and around(cell_of(game.enemies[i]), cell):
          hurt(game, i, 1, stun=True)
  elif p == 17:
    for egg in listed(game.transmissions):
      egg.turns += 3
  elif p == 18:
    for i in active:
      if game.enemies[i].kind == VIRUS:
        hurt(game, i, 1, stun=True)
  elif p == 19:
    game.score += 8 - game.stage
  elif p == 20:
    for r, c in CELLS:
      if is_obstacle(game, (r, c)):
        game.block_spawn[r][c] = max(game.block_spawn[r][c] - 1, 0)
  elif p == 21:
    if game.attack_upgrades < 2:
      game.attack, game.attack_upgrades = min(game.attack + 1, 3), game.attack_upgrades + 1
  elif p == 22:
    for i in active:
      if game.block_siphoned[game.enemies[i].row][game.enemies[i].col]:
        hurt(game, i, 2)


def enemy_turn(game, hint):
  for i, egg in enumerate(game.transmissions):
    if egg:
      egg.turns -= 1
      if egg.turns <= 0:
        game.transmissions[i] = None
        hatched = types.SimpleNamespace(**vars(egg), hp=FULL_HP[egg.kind], stunned=False)
        hatched.disabled_turns = 0
        del hatched.turns
        put(game.enemies, hatched)
  here = game.row, game.col
  for enemy in listed(game.enemies):
    if game.step_active or enemy.stunned or enemy.disabled_turns > 0:
      continue
    for _ in range(2 if enemy.kind == VIRUS else 1):
      dr, dc = here[0] - enemy.row, here[1] - enemy.col
      by_row = abs(dr) >= abs(dc)
      cell = (enemy.row + sign(dr), enemy.col) if by_row else (enemy.row, enemy.col + sign(dc))
      if cell == here:
        cell = cell_of(enemy)
      if enemy.kind != GLITCH and is_obstacle(game, cell):
        cell = (cell[0], cell[1] + sign(dc)) if by_row else (cell[0] + sign(dr), cell[1])
      enemy.row, enemy.col = (min(max(x, 0), 5) for x in cell)
  for enemy in listed(game.enemies):
    if not enemy.stunned and manhattan(cell_of(enemy), here) == 1:
      game.hp = max(game.hp - 1, 0)
  if not game.tasks_disabled and game.task_interval > 0 and game.turn >= game.next_task_turn:
    game.next_task_turn = game.turn + 12
    taken = {cell_of(thing) for thing in listed(game.enemies) + listed(game.transmissions)}
    free = [cell for cell in CELLS if cell not in taken | {here} and not is_obstacle(game, cell)]
    if None in game.transmissions and hint.stage == game.stage:
      egg = hint.transmissions[game.transmissions.index(None)]
      assert cell_of(egg) in (free or [(0, 0)])
      sent = types.SimpleNamespace(row=egg.row, col=egg.col, kind=egg.kind, turns=1)
      sent.from_siphon, sent.from_scheduled = False, True
      put(game.transmissions, sent)
  for enemy in listed(game.enemies):
    enemy.stunned, enemy.disabled_turns = False, max(enemy.disabled_turns - 1, 0)
  game.step_active = False


def check_stage(game):
  """Checks that the rules allow a new stage."""
  inner = [cell for cell in CELLS if cell not in CORNERS]
  here, exit_ = (game.row, game.col), (game.exit_row, game.exit_col)
  blocks = [(r, c) for r, c in inner if game.block_type[r][c] != 0]
  assert exit_ in CORNERS and exit_ != here
  assert 5 <= len(blocks) <= 11
  for r, c in CELLS:
    kind, points = game.block_type[r][c], game.block_points[r][c]
    assert kind in (0, DATA, PROGRAM)
    assert (1 <= points <= 9) if kind == DATA else points == 0
    assert game.block_spawn[r][c] == {0: 0, DATA: points, PROGRAM: 2}[kind]
    assert 0 <= game.block_program[r][c] < (23 if kind == PROGRAM else 1)
    assert not game.block_siphoned[r][c] and not game.siphon_center[r][c]
    credits, energy = game.cell_credits[r][c], game.cell_energy[r][c]
    assert credits == 0 or energy == 0
    assert (1 <= credits + energy <= 3) == ((r, c) in inner and kind == 0)
    assert credits + energy <= 3
    assert game.cell_data_siphon[r][c] == ((r, c) in CORNERS and (r, c) not in (here, exit_))
  assert not listed(game.enemies)
  num = min(game.stage, 8)
  assert all(game.transmissions[:num]) and not any(game.transmissions[num:])
  cells = [cell_of(egg) for egg in game.transmissions[:num]]
  assert len(set(cells)) == num and set(cells) <= set(inner) - set(blocks) - {here}
  for egg in game.transmissions[:num]:
    assert (egg.turns, egg.from_siphon, egg.from_scheduled) == (1, False, False)


def distance(game):
  """Distance to the exit around all blocks, by breadth-first search."""
  here, exit_ = (game.row, game.col), (game.exit_row, game.exit_col)
  reached, frontier, steps = {here}, [here], 0
  while frontier:
    if exit_ in frontier:
      return steps
    adjacent = {(r + dr, c + dc) for r, c in frontier for dr, dc in STEPS}
    frontier = [
      cell
      for cell in adjacent - reached
      if inside(cell) and (cell == exit_ or game.block_type[cell[0]][cell[1]] == 0)
    ]
    reached |= set(frontier)
    steps += 1
  return 0


def reach(game, cell):
  """Credits, energy, points and programs that a siphon from a cell reaches."""
  credits, energy, points, programs = 0, 0, [], set()
  if game.block_type[cell[0]][cell[1]] != 0:
    return credits, energy, points, programs
  for dr, dc in [(0, 0), *STEPS]:
    r, c = cell[0] + dr, cell[1] + dc
    if not inside((r, c)) or game.block_siphoned[r][c]:
      continue
    kind = game.block_type[r][c]
    if kind == 0:
      credits += game.cell_credits[r][c]
      energy += game.cell_energy[r][c]
    elif kind == DATA and game.block_points[r][c] != 0:
      points.append(game.block_points[r][c])
    elif kind == PROGRAM and not game.owned[game.block_program[r][c]]:
      programs.add(game.block_program[r][c])
  return credits, energy, sorted(points), programs


def missed(game):
  if game.data_siphons <= 0:
    return 0, 0
  credits, energy, *rest = reach(game, (game.row, game.col))
  better = [(0, 0)]
  for cell in CELLS:
    there = reach(game, cell)
    more = there[0] - credits, there[1] - energy
    if list(there[2:]) == rest and min(more) >= 0 and max(more) > 0:
      better.append(more)
  return tuple(map(max, zip(*better, strict=True)))


def step(before, action, hint):
  """The next state, the parts of the reward, and whether the episode is over."""
  game = copy.deepcopy(before)
  game.history_valid = True
  if action < 4:
    move(game, action)
  elif action == 4:
    siphon(game, hint)
  elif action == 14:
    game.history_valid = False
  else:
    execute(game, action - 5, hint)
  if action <= 4 or action == 10:
    game.turn += 1
    enemy_turn(game, hint)
  died = game.hp <= 0
  at_exit = (game.row, game.col) == (game.exit_row, game.exit_col)
  completed = at_exit and game.stage <= 8 and action in (0, 1, 2, 3, 8)
  if completed:
    position = game.row, game.col
    kept = {
      name: getattr(game, name)
      for name in (
        *('credits', 'energy', 'data_siphons', 'attack', 'score', 'owned', 'turn'),
        *('next_task_turn', 'task_interval', 'tasks_disabled', 'history_valid'),
      )
    }
    stage, hp = game.stage + 1, min(game.hp + 1, 3)
    game = copy.deepcopy(hint)
    game.row, game.col = position
    for name, value in kept.items():
      setattr(game, name, value)
    game.stage, game.hp, game.attack_upgrades = stage, hp, 0
    game.show_active = game.step_active = False
    check_stage(game)
  won = game.stage > 8
  credits, energy = missed(before) if action == 4 else (0, 0)
  healed, here = game.hp - before.hp, (game.row, game.col)
  betrayed = any(
    enemy.from_siphon and manhattan(cell_of(enemy), here) == 1 for enemy in listed(game.enemies)
  )
  parts = {
    'step_penalty': -0.01,
    'stage_completion': STAGES[before.stage - 1] if completed else 0,
    'score_gain': 0.5 * (game.score - before.score),
    'kills': 0.3 * max(0, len(listed(before.enemies)) - len(listed(game.enemies))),
    'data_siphon': max(0, game.data_siphons - before.data_siphons),
    'distance_shaping': 0.05 * max(0, distance(before) - distance(game)),
    'damage_penalty': min(0, healed),
    'hp_recovery': max(0, healed),
    'victory': 500 + 100 * game.score if won else 0,
    'death_penalty': -0.5 * sum(STAGES[: game.stage - 1]) if died else 0,
    'siphon_death_penalty': -10 if died and betrayed else 0,
    'resource_gain': 0.05 * (game.credits + game.energy - before.credits - before.energy),
    'resource_holding': 0.01 * (game.credits + game.energy) if completed else 0,
    'program_waste': -0.3 if action == 19 and before.hp == 2 else 0,
    'siphon_quality': -0.5 * 0.05 * (credits + energy),
  }
  return game, parts, died or won


def observe(game):
  """The observation, [1545], written channel by channel."""
  player = [
    *(game.row / 5, game.col / 5, game.hp / 3),
    *(min(game.credits / 50, 1), min(game.energy / 50, 1)),
    *((game.stage - 1) / 7, game.data_siphons / 10, (game.attack - 1) / 2),
    *(game.show_active, game.tasks_disabled),
  ]
  grid = np.zeros((6, 6, 42))
  for enemy in listed(game.enemies):
    in_line = enemy.row == game.row or enemy.col == game.col
    if enemy.kind != CRYPTOG or game.show_active or in_line:
      channels = grid[enemy.row, enemy.col]
      channels[enemy.kind] = 1
      channels[4:7] = enemy.hp / 3, enemy.stunned, enemy.from_siphon
  for r, c in CELLS:
    kind, channels = game.block_type[r][c], grid[r, c]
    if kind:
      channels[6 + kind] = 1
    if kind >= PROGRAM:
      channels[12 + game.block_program[r][c]] = 1
    channels[10] = game.block_points[r][c] / 9
    channels[11] = game.block_siphoned[r][c]
    channels[35] = game.block_spawn[r][c] / 9
    channels[37] = game.cell_credits[r][c] / 3
    channels[38] = game.cell_energy[r][c] / 3
    channels[39] = game.cell_data_siphon[r][c]
    channels[40] = (r, c) == (game.exit_row, game.exit_col)
    channels[41] = game.siphon_center[r][c]
  for egg in listed(game.transmissions):
    grid[egg.row, egg.col, 36] = min(egg.turns / 4, 1)
  return np.concatenate([player, game.owned, grid.ravel()])


def draw_states(seed, num):
  """[num] varied states; in most, few cells around the player are crowded, and many end a stage."""
  rng = np.random.default_rng(seed)
  chance = lambda p, *shape: rng.random((num, *shape)) < p
  row, col = rng.integers(0, 6, (2, num))
  near = chance(0.4)
  exit_row = np.clip(np.where(near, row + rng.integers(-1, 2, num), rng.integers(0, 6, num)), 0, 5)
  exit_col = np.where(near, col, rng.integers(0, 6, num))
  spread = rng.integers(1, 6, (num, 1))
  density = rng.choice([0.0, 0.1, 0.4, 0.95], (num, 1, 1))
  full = rng.choice([0.0, 0.1, 0.3, 0.9, 1.0], (2, num, 1))

  def place(centre):
    return np.clip(centre[:, None] + rng.integers(-5, 6, (num, 20)) % (spread + 1) * 1, 0, 5)

  kind = rng.integers(0, 4, (num, 20))
  enemies = state_lib.Enemies(
    active=chance(1, 20) & (rng.random((num, 20)) < full[0]),
    kind=kind,
    row=place(row - spread[:, 0] // 2),
    col=place(col - spread[:, 0] // 2),
    hp=rng.integers(1, np.array(FULL_HP)[kind] + 1),
    disabled_turns=rng.integers(0, 3, (num, 20)) * chance(0.1, 20),
    stunned=chance(0.2, 20),
    from_siphon=chance(0.4, 20),
    from_scheduled=chance(0.3, 20),
  )
  transmissions = state_lib.Transmissions(
    active=chance(1, 20) & (rng.random((num, 20)) < full[1]),
    kind=rng.integers(0, 4, (num, 20)),
    row=place(row - spread[:, 0] // 2),
    col=place(col - spread[:, 0] // 2),
    turns=rng.integers(1, 6, (num, 20)),
    from_siphon=chance(0.4, 20),
    from_scheduled=chance(0.3, 20),
  )
  is_block = rng.random((num, 6, 6)) < density
  block_type = is_block * rng.choice([1, 1, 1, 2, 2, 3], (num, 6, 6))
  turn = rng.integers(0, 40, num)
  return state_lib.State(
    row=row,
    col=col,
    hp=rng.integers(1, 4, num),
    attack=rng.integers(1, 4, num),
    credits=rng.integers(0, 8, num) * rng.choice([1, 1, 10], num),
    energy=rng.integers(0, 8, num) * rng.choice([1, 1, 10], num),
    data_siphons=rng.integers(0, 3, num),
    score=rng.integers(0, 30, num),
    exit_row=exit_row,
    exit_col=exit_col,
    block_type=block_type,
    block_points=(block_type == DATA) * rng.integers(0, 4, (num, 6, 6)) * rng.choice([1, 4]),
    block_program=(block_type == PROGRAM) * rng.integers(0, 23, (num, 6, 6)),
    block_spawn=is_block * rng.integers(0, 13, (num, 6, 6)),
    block_siphoned=chance(0.25, 6, 6) & (is_block | chance(0.05, 6, 6)),
    siphon_center=chance(0.05, 6, 6),
    cell_credits=rng.integers(0, 4, (num, 6, 6)) * chance(0.3, 6, 6),
    cell_energy=rng.integers(0, 4, (num, 6, 6)) * chance(0.3, 6, 6),
    cell_data_siphon=chance(0.1, 6, 6),
    enemies=enemies,
    transmissions=transmissions,
    owned=chance(0.5, 23),
    stage=rng.integers(1, 9, num),
    turn=turn,
    show_active=chance(0.3),
    tasks_disabled=chance(0.3),
    step_active=chance(0.2),
    attack_upgrades=rng.integers(0, 3, num),
    next_task_turn=turn + rng.integers(-2, 8, num),
    task_interval=12 * chance(0.9),
    history_valid=chance(0.5),
  )


GAME = hackmatrix.HackMatrix()
NUM_STATES = 1024  # several blocks of environments


@pytest.fixture(scope='module')
def functions():
  def play(keys, states, actions):
    timesteps = jax.vmap(GAME.step)(keys, states, actions)[1]
    return *jax.vmap(GAME.play)(keys, states, actions), timesteps, jax.vmap(GAME.observe)(states)

  return jax.jit(play)


def assert_close(found, expected, rtol, atol, where):
  """Compares [N, ...] numbers; `where` [N] names the first that differs."""
  is_close = np.isclose(found, expected, rtol, atol).reshape(NUM_STATES, -1).all(1)
  assert is_close.all(), where[np.argmin(is_close)]


@pytest.mark.parametrize('seed', range(4))
def test_game_matches_the_reference_implementation(functions, seed):
  states = state_lib.narrow(draw_states(seed, NUM_STATES))
  rng = np.random.default_rng(100 + seed)
  actions = rng.choice(28, NUM_STATES, p=[0.08] * 4 + [0.15] + [0.53 / 23] * 23)
  keys = jax.random.split(jax.random.key(seed), NUM_STATES)
  results = functions(keys, states, actions.astype(np.int32))
  states, (nexts, reward, done, timesteps, seen) = jax.device_get((states, results))
  where = [f'seed {seed}, state {n}, action {actions[n]}' for n in range(NUM_STATES)]
  expected = []
  for n, (before, hint) in enumerate(zip(plain_games(states), plain_games(nexts), strict=True)):
    after, parts, over = step(before, int(actions[n]), hint)
    for name, value in vars(after).items():
      assert getattr(hint, name) == value, f'{where[n]}: {name}'
    expected.append((mask(before), observe(before), mask(after), observe(after), parts, over))
  masks, features, next_masks, next_features, parts, over = zip(*expected, strict=True)
  last = timesteps.observation
  for found, wanted in ((seen['action_mask'], masks), (last['action_mask'], next_masks)):
    assert_close(found, wanted, 0, 0, where)
  for found, wanted in ((seen['features'], features), (last['features'], next_features)):
    assert_close(found, wanted, 1e-6, 0, where)
  for found in (done, timesteps.last()):
    assert_close(found, over, 0, 0, where)
  assert parts[0].keys() == set(rewards.Reward._fields)
  for name, found in reward._asdict().items():
    wanted = [each[name] for each in parts]
    assert_close(found, wanted, 1e-5, 1e-6, [f'{each}: {name}' for each in where])
  assert_close(timesteps.reward, [sum(each.values()) for each in parts], 1e-5, 1e-5, where)

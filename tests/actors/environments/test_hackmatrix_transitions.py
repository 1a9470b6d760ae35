"""HackMatrix against recorded transitions, so that a change of a rule is noticed.

  python tests/actors/environments/test_hackmatrix_transitions.py    records them anew, with today's rules

The recording is random legal play from states with programs, credits and siphons, in all stages. It
has the states before and after each action exactly, the action, the mask and the parts of the reward
after it, and a checksum of the observation. Actions come from raw numbers of numpy's PCG64. The rules
sample with `jax.random.key(n)` in transition n, whose threefry numbers are equal in all supported
versions of JAX. If a change samples otherwise and keeps the distributions, record anew.
"""

import pathlib
import zlib

import jax
import numpy as np
import pytest

from hephaestus.actors.environments import hackmatrix
from hephaestus.actors.environments.hackmatrix import rewards
from hephaestus.actors.environments.hackmatrix import state as state_lib

FILE = pathlib.Path(__file__).with_name('hackmatrix_transitions.npz')
NUM_GAMES, NUM_STEPS = 64, 64
NUM_TRANSITIONS = NUM_GAMES * NUM_STEPS
# All numbers of an observation are integers divided by a divisor of this one.
DENOMINATOR = 6300
GAME = hackmatrix.HackMatrix()


@jax.jit
def step(states, actions, seeds):
  """Takes a step in each of [N] states; returns the states, parts of rewards and time steps after it."""
  keys = jax.vmap(jax.random.key)(seeds)
  timesteps = jax.vmap(GAME.step)(keys, states, actions)[1]
  states, parts, _ = jax.vmap(GAME.play)(keys, states, actions)
  return states, parts, timesteps


def outcomes(states, actions, seeds):
  """The results of [N] transitions, as they are recorded."""
  states, parts, timesteps = jax.device_get(step(states, actions, seeds))
  codes = np.rint(DENOMINATOR * timesteps.observation['features'].astype(np.float64))
  return tidy(states), {
    'mask': np.packbits(timesteps.observation['action_mask'], axis=1),
    'observation': np.array([zlib.crc32(code.tobytes()) for code in codes.astype('<i4')]),
    'is_last': timesteps.last(),
    **parts._asdict(),
  }


def tidy(states):
  """States with zeros in the fields of inactive slots, which mean nothing."""

  def clear(slots):
    return jax.tree.map(lambda x: np.where(slots.active, x, np.zeros_like(x)), slots)

  return states.replace(enemies=clear(states.enemies), transmissions=clear(states.transmissions))


def named(states):
  """The fields of states by name."""
  leaves = jax.tree_util.tree_leaves_with_path(states)
  return {f'state{jax.tree_util.keystr(path)}': np.asarray(x) for path, x in leaves}


def load():
  """The recorded [N] states, actions, states after them, and the rest of `outcomes`."""
  with np.load(FILE) as file:
    recorded = dict(file)
  # States are stored as differences from one to the next, most of which are zero.
  pairs = {name: recorded.pop(name) for name in named(state_lib.DTYPES)}
  dtypes, tree = jax.tree.flatten(state_lib.DTYPES)
  both = [
    np.cumsum(x, axis=0, dtype=x.dtype).astype(dtype)
    for x, dtype in zip(pairs.values(), dtypes, strict=True)
  ]
  before, after = (jax.tree.unflatten(tree, [x[i::2] for x in both]) for i in range(2))
  return before, recorded.pop('action'), after, recorded


def record():
  """Plays and writes the file."""
  raw = np.random.PCG64(0)

  def integers(low, high, *shape):
    """Uniform up to a bias of less than 1e-17."""
    numbers = raw.random_raw(int(np.prod(shape)))
    return (low + (numbers % np.uint64(high - low)).astype(np.int64)).reshape(shape)

  def starts():
    """States with the player below the exit, of which most have enough for many programs."""
    num = NUM_GAMES
    turn = integers(0, 40, num)
    states = jax.tree.map(lambda x: np.stack([x] * num), jax.device_get(hackmatrix.initial()))
    return states.replace(
      row=np.full(num, 4),
      col=np.full(num, 5),
      hp=integers(1, 4, num),
      attack=integers(1, 4, num),
      credits=integers(0, 60, num),
      energy=integers(0, 60, num),
      data_siphons=integers(0, 6, num),
      score=integers(0, 30, num),
      owned=integers(0, 4, num, 23) > 0,
      stage=np.arange(num) % state_lib.LAST_STAGE + 1,
      turn=turn,
      next_task_turn=turn + integers(0, 13, num),
      tasks_disabled=integers(0, 4, num) == 0,
      show_active=integers(0, 2, num) == 0,
    )

  counts = np.zeros(state_lib.NUM_ACTIONS, np.int64)

  def choose(mask):
    """A random legal action, half the time the one that was chosen least so far."""
    legal = np.flatnonzero(mask)
    index = integers(0, len(legal), 1)[0] if integers(0, 2, 1)[0] else np.argmin(counts[legal])
    counts[legal[index]] += 1
    return legal[index]

  def pick(is_new, new, old):
    return jax.tree.map(
      lambda x, y: np.where(is_new.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, old
    )

  narrow = lambda states: tidy(jax.device_get(state_lib.narrow(states)))
  masks = jax.jit(jax.vmap(GAME.action_mask))
  states, rows = narrow(starts()), []
  for t in range(NUM_STEPS):
    is_stuck = ~np.asarray(masks(states)).any(1)
    states = pick(is_stuck, narrow(starts()), states)
    actions = np.array([choose(mask) for mask in np.asarray(masks(states))], np.int8)
    seeds = NUM_STEPS * np.arange(NUM_GAMES) + t
    after, rest = outcomes(states, actions, seeds)
    rows.append((states, actions, after, rest))
    begins = rest['is_last'] | (integers(0, 32, NUM_GAMES) == 0)
    states = pick(begins, narrow(starts()), after)
  # [G, T, ...] merged, so that the transitions of a game are in order.
  before, actions, after, rest = jax.tree.map(
    lambda *x: np.stack(x, axis=1).reshape(NUM_TRANSITIONS, *x[0].shape[1:]), *rows
  )
  both = jax.tree.map(lambda x, y: np.stack([x, y], 1).reshape(-1, *x.shape[1:]), before, after)
  as_integers = {
    name: x.astype(np.int8) if x.dtype == bool else x for name, x in named(both).items()
  }
  differences = {
    name: np.diff(x, axis=0, prepend=np.zeros_like(x[:1])) for name, x in as_integers.items()
  }
  np.savez_compressed(FILE, **differences, action=actions, **rest)


@pytest.fixture(scope='module')
def recorded():
  return load()


def test_transitions_are_as_recorded(recorded):
  before, actions, after, rest = recorded
  found_after, found = outcomes(before, actions, np.arange(NUM_TRANSITIONS))
  found, expected = named(found_after) | found, named(after) | rest
  assert found.keys() == expected.keys()
  for name, x in expected.items():
    differs = (found[name] != x).reshape(NUM_TRANSITIONS, -1).any(1)
    n = int(differs.argmax())
    assert not differs.any(), f'{name} of {differs.sum()} transitions, first {n}: {actions[n]=}'


def test_recording_has_every_action_stage_and_part_of_the_reward(recorded):
  before, actions, after, rest = recorded
  assert np.bincount(actions, minlength=28).min() >= 15
  assert np.bincount(before.stage, minlength=9)[1:].min() >= 100
  assert (after.stage == 9).sum() >= 10 and (rest['is_last'] & (after.stage < 9)).sum() >= 50
  for name in rewards.Reward._fields:
    assert (rest[name] != 0).sum() >= 5, name
  for slots in (before.enemies, before.transmissions):
    assert slots.active.sum(1).max() >= 8
    for name in ('from_siphon', 'from_scheduled'):
      assert getattr(slots, name).any()


if __name__ == '__main__':
  record()

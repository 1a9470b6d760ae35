"""Makes pictures of docs/cognition.md from runs.

  python docs/site/cognition.py empowerment RUN     of `ice`, trained with empowerment
  python docs/site/cognition.py gates RUN           of any environment, trained with a workspace; a dot
                                                    is the errand that is due

Each is a PNG in docs/images.
"""

import argparse
import itertools
import pathlib

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

matplotlib.use('Agg')

from matplotlib import pyplot as plt

from hephaestus.actors import episodes
from hephaestus.actors.environments import environment as environment_lib
from hephaestus.actors.environments.cognition import errands, ice
from hephaestus.launch.interface import policy as policy_lib

FOLDER = pathlib.Path(__file__).resolve().parents[1] / 'images'
LAYOUTS = 3  # of ice


def maps(policy: policy_lib.Policy, seed: int) -> tuple[np.ndarray, np.ndarray]:
  """Exact and learned empowerment of the agent in each cell of one layout of ice, [9, 9] nats each."""
  env, count = policy.environment, ice.SIZE**2
  state, _ = env.reset(jax.random.key(seed))
  places = jnp.broadcast_to(state.places, (count, *state.places.shape))
  states = ice.State(
    places=places.at[:, ice.AGENT].set(ice.CELLS.reshape(-1, 2)),
    side=jnp.broadcast_to(state.side, count),
    step_count=jnp.zeros(count, jnp.int32),
  )
  timestep = jax.vmap(lambda state: environment_lib.restart(env.observe(state)))(states)
  assert policy.agent.explain is not None
  _, decision = policy.agent.explain(
    policy.params,
    jax.random.key(0),
    policy.agent.initial_policy_state(count),
    timestep,
    greedy=True,
  )
  learned = np.asarray(decision.extras['intrinsic']['empowerment']).reshape(ice.SIZE, ice.SIZE)
  return np.asarray(env.empowerment(state)), learned


def draw_empowerment(policy: policy_lib.Policy) -> plt.Figure:
  figure, axes = plt.subplots(2, LAYOUTS, figsize=(7.2, 4.9), layout='constrained')
  errors = []
  for seed, column in enumerate(axes.T):
    exact, learned = maps(policy, seed)
    errors.append(np.abs(exact - learned))
    for axis, values in zip(column, (exact, learned), strict=True):
      image = axis.imshow(values, cmap='cividis', vmin=0, vmax=np.log(5))
      axis.set_xticks([])
      axis.set_yticks([])
  axes[0, 0].set_ylabel('exact')
  axes[1, 0].set_ylabel('learned')
  figure.colorbar(image, ax=axes, label='empowerment, nats', shrink=0.8)
  print(f'mean absolute error {np.mean(errors):.3f} nats, largest {np.max(errors):.3f}')
  return figure


def draw_gates(policy: policy_lib.Policy) -> plt.Figure:
  """Which candidates were open at the first steps of an episode."""
  play = episodes.Play(policy.environment, policy.agent, 1)
  played = itertools.islice(play.steps(policy.params, jax.random.key(0)), 50)
  acted = [step for step in played if step.gates is not None]
  gates = [step.gates or {} for step in acted]
  names = list(gates[0])
  grid = np.array([[step[name] for step in gates] for name in names], np.float32)
  figure, axis = plt.subplots(figsize=(7.2, 0.3 * len(names) + 0.9), layout='constrained')
  axis.imshow(grid, cmap='Greys', aspect='auto', vmin=0, vmax=1.4, interpolation='nearest')
  axis.set_yticks(range(len(names)), names)
  axis.set_xlabel('step of an episode')
  if isinstance(policy.environment, errands.Errands):
    due = np.array([[step.observation[name][0] == 0 for step in acted] for name in names])
    axis.scatter(*np.argwhere(due.T).T, marker='.', color='tab:red', label='due')
    axis.legend(loc='upper right', framealpha=1)
    print(f'share of steps at which the errand that is due is open: {grid[due].mean():.2f}')
  print('open shares', dict(zip(names, grid.mean(axis=1).round(2).tolist(), strict=True)))
  return figure


DRAWN = {'empowerment': draw_empowerment, 'gates': draw_gates}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('picture', choices=DRAWN)
  parser.add_argument('run', help='folder of a run')
  arguments = parser.parse_args()
  path = FOLDER / f'{arguments.picture}.png'
  DRAWN[arguments.picture](policy_lib.load(arguments.run)).savefig(path, dpi=110)
  print(f'{path}: {path.stat().st_size / 1000:.0f} kB')


if __name__ == '__main__':
  main()

"""Makes the agents that come with the package; for its maintainers.

  python -m hephaestus.launch.interface.shipping [--runs DIR] [NAME ...]

Trains each of AGENTS in a folder below DIR (or resumes it, if it has begun), and writes its best
checkpoint into `shipped/`, with all parameters, so that its model can dream, and large arrays at float16.
Run it when the network of the dreamer has changed, so that `tests/launch/interface/test_shipped.py` fails.
Needs the extra `envs`.
"""

import argparse
import pathlib
import shutil
import sys

from hephaestus.launch.interface import exported as exported_lib
from hephaestus.launch.interface import places, policy, training

# Environment steps, config values and agent by name of the environment, which is also the name of the
# shipped agent.
AGENTS = {
  'catch': (8_000, {}, 'dreamer'),
  'gymnax/CartPole-v1': (15_000, {}, 'dreamer'),
  'grid_world': (12_000, {'environment.size': 8, 'environment.num_resources': 8}, 'dreamer'),
  'hackmatrix': (2_000_000, {'evaluator.period_steps': 98_304}, 'ppo'),
}
# Evaluations and checkpoints are timed by steps, so that the best one does not depend on a clock.
OVERRIDES = {
  'evaluator.period_steps': 992,
  'evaluator.video_period': 100_000,
  'learner.checkpoint_period': 100_000,
  'learner.checkpoint_updates': 64,
  'tensorboard': False,
}


def ship(name: str, runs: pathlib.Path) -> pathlib.Path:
  """Trains an agent of AGENTS in a folder below `runs`, and ships its best checkpoint; returns its folder."""
  steps, overrides, agent = AGENTS[name]
  run = training.train(
    name, steps=steps, seed=0, run=runs / name.replace('/', '-'), agent=agent, preset='laptop',
    set=OVERRIDES | overrides, fused=True,
  )  # fmt: skip
  loaded, out = policy.load(run, 'best'), places.SHIPPED / name
  exported = loaded.exported(loaded.all_params)
  shutil.rmtree(out, ignore_errors=True)
  exported_lib.write(exported._replace(arrays=exported_lib.halved(exported.arrays)), out)
  return out


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('names', nargs='*', metavar='NAME', default=[*AGENTS], help='default: all')
  parser.add_argument('--runs', type=pathlib.Path, default=pathlib.Path('runs/shipped'))
  arguments = parser.parse_args()
  for name in arguments.names:
    if name not in AGENTS:
      parser.error(f'{name}: is not one of {", ".join(AGENTS)}')
    out = ship(name, arguments.runs)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f'{out}: {policy.load(out)}, {size / 1e3:.0f} kB')
  return 0


if __name__ == '__main__':
  sys.exit(main())

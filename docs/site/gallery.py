"""Makes the moving pictures of docs/gallery.md: episodes of each environment's scripted policy.

  python docs/site/gallery.py [NAME ...]    all environments of this project, or those named

Each is a GIF in docs/images/gallery.
"""

import argparse
import pathlib
from collections.abc import Iterator

import jax
import numpy as np
from PIL import Image

from hephaestus.actors import environments, videos
from hephaestus.actors.environments import wrappers

FOLDER = pathlib.Path(__file__).resolve().parents[1] / 'images' / 'gallery'
FRAMES = 80
FRAMES_PER_SECOND = 6.0
SIDE = 360  # pixels of the longer side of a frame, at most
OPTIONS = {
  'ice': {'max_steps': 20},  # so that several layouts are shown
  'rooms': {'num_rooms': 6},  # so that rooms are entered again
}


def frames(name: str, seed: int = 0) -> Iterator[np.ndarray]:
  """Renders time steps of one stream; without a scripted policy, actions are random."""
  environment = wrappers.AutoReset(environments.make(name, **OPTIONS.get(name, {})))

  @jax.jit
  def step(key, state, observation):
    action_key, step_key = jax.random.split(key)
    action = environment.scripted_action(state)
    if action is None:
      action = wrappers.random_action(action_key, environment.action_spec, observation)
    return environment.step(step_key, state, action)

  key = jax.random.key(seed)
  state, timestep = jax.jit(environment.reset)(key)
  for number in range(FRAMES):
    frame = environment.render(jax.device_get(state))
    assert frame is not None, name
    yield small(frame)
    state, timestep = step(jax.random.fold_in(key, number), state, timestep.observation)


def small(frame: np.ndarray) -> np.ndarray:
  """Scales a frame by an integer to at most SIDE pixels, or down to that."""
  longer = max(frame.shape[:2])
  if longer <= SIDE:
    return np.kron(frame, np.ones((SIDE // longer, SIDE // longer, 1), np.uint8))
  size = [round(length * SIDE / longer) for length in frame.shape[1::-1]]
  return np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('names', nargs='*', default=list(environments.ENVIRONMENTS))
  for name in parser.parse_args().names:
    path = FOLDER / f'{name}.gif'
    videos.write(list(frames(name)), path, FRAMES_PER_SECOND)
    print(f'{path}: {path.stat().st_size / 1000:.0f} kB')


if __name__ == '__main__':
  main()

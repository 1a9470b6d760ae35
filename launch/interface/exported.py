"""An exported policy: acting parameters as safetensors, with its specs and config as JSON.

Some come with the package, in SHIPPED, made by `shipping.py`.
"""

import json
import os
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
from dm_env import specs
from safetensors import numpy as safetensors

from hephaestus.actors.environments import environment as environment_lib
from hephaestus.launch import config as launch_config

POLICY, PARAMS = 'policy.json', 'params.safetensors'
FORMAT = 1  # of policy.json; another number is refused
SHIPPED = pathlib.Path(__file__).parent / 'shipped'  # a folder for each, by its name
SPECS = {
  kind.__name__: kind
  for kind in (specs.Array, specs.BoundedArray, specs.DiscreteArray, environment_lib.BoardSpec)
}


class Exported(NamedTuple):
  """The content of a folder.

  Attributes:
    config: of the run.
    learner_step: at which the parameters were saved.
    action_names: of the choices; empty without names.
    observation_spec: None where JSON cannot hold it, as that of a `ViewSpec`, which has a function;
      the environment of the config has it.
    action_spec: of an action.
    arrays: acting parameters by name, host arrays.
  """

  config: launch_config.ExperimentConfig
  learner_step: int
  action_names: tuple[str, ...]
  observation_spec: Any
  action_spec: specs.BoundedArray
  arrays: dict[str, np.ndarray]


def shipped() -> list[str]:
  """The names of the agents that come with the package."""
  return sorted(file.parent.relative_to(SHIPPED).as_posix() for file in SHIPPED.rglob(POLICY))


def find(path: str | os.PathLike[str]) -> pathlib.Path:
  """The folder of a run, of an exported policy, or of a shipped agent by its name.

  A folder of the working directory goes before a shipped agent of the same name.

  Raises:
    ValueError: there is neither; names the shipped agents.
  """
  folder = pathlib.Path(path)
  if folder.exists():
    return folder
  if folder.as_posix() not in shipped():
    raise ValueError(
      f'{folder}: is not the folder of a run or of an exported policy, nor an agent that comes with '
      f'the package; those are {", ".join(shipped())}'
    )
  return SHIPPED / folder


def halved(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The arrays with large ones at float16, of which `read` makes float32 again."""
  is_large = lambda array: array.dtype == np.float32 and array.size > 1000
  is_within = lambda array: np.abs(array).max() <= np.finfo(np.float16).max
  return {
    key: array.astype(np.float16) if is_large(array) and is_within(array) else array
    for key, array in arrays.items()
  }


def named(tree: Any) -> dict[str, Any]:
  """The leaves of a tree by their path, such as 'world_model/encoder/0/w'."""
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in flat}


def rebuild(arrays: dict[str, np.ndarray], like: Any, name: str) -> Any:
  """The tree of acting parameters.

  Args:
    arrays: by name, as of `named`.
    like: their tree of shapes and dtypes.
    name: of the folder, for the error.

  Raises:
    ValueError: an array is missing, left over, or of another shape; names it.
  """
  needed = {key: (leaf.shape, leaf.dtype) for key, leaf in named(like).items()}
  found = {key: (array.shape, array.dtype) for key, array in arrays.items()}
  for key in sorted(needed.keys() | found.keys()):
    if needed.get(key) != found.get(key):
      show = lambda kind: 'nothing' if kind is None else f'{kind[1]}{list(kind[0])}'
      raise ValueError(
        f'{name}: {key} should be {show(needed.get(key))} and is {show(found.get(key))}; export it '
        'again, with this version'
      )
  return jax.tree.unflatten(jax.tree.structure(like), [arrays[key] for key in needed])


def write(exported: Exported, out: pathlib.Path) -> None:
  """Writes a folder; ValueError where it holds something already, or cannot be written to."""
  content = {
    'format': FORMAT,
    'learner_step': exported.learner_step,
    'action_names': list(exported.action_names),
    'observation_spec': _spec_to_json(exported.observation_spec),
    'action_spec': _spec_to_json(exported.action_spec),
    'config': launch_config.to_tree(exported.config),
  }
  try:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
      raise ValueError(f'--out {out}: is not an empty folder; give another one')
    out.mkdir(parents=True, exist_ok=True)
    arrays = {key: np.array(array, order='C') for key, array in exported.arrays.items()}
    (out / PARAMS).write_bytes(safetensors.save(arrays))  # `save_file` lets only its owner read it
    (out / POLICY).write_text(json.dumps(content, indent=2, allow_nan=False) + '\n')
  except OSError as error:
    raise ValueError(f'--out {out}: cannot be written to ({error.strerror})') from None


def read(folder: pathlib.Path) -> Exported:
  """Reads a folder that `write` has made; ValueError for another, with its name."""
  file = folder / POLICY
  try:
    content = json.loads(file.read_text())
    if content['format'] != FORMAT:
      raise ValueError(f'its format is {content["format"]}, that of this version is {FORMAT}')
    config = launch_config.from_yaml(json.dumps(content['config']), str(file))
    return Exported(
      config=config,
      learner_step=content['learner_step'],
      action_names=tuple(content['action_names']),
      observation_spec=_spec_from_json(content['observation_spec']),
      action_spec=_spec_from_json(content['action_spec']),
      arrays={
        key: array.astype(np.float32) if array.dtype == np.float16 else array
        for key, array in safetensors.load_file(folder / PARAMS).items()
      },
    )
  except Exception as error:  # a broken file may raise any error
    first_line = str(error).split('\n')[0]
    raise ValueError(
      f'{folder}: is not an exported policy of this version ({first_line}); make one with '
      '`hephaestus export RUN --out DIR`'
    ) from None


def _spec_to_json(spec: Any) -> Any:
  """A tree of specs as JSON; None where it has another kind of spec or of tree."""
  if isinstance(spec, dict):
    entries = {key: _spec_to_json(entry) for key, entry in spec.items()}
    return None if None in entries.values() else {'dict': entries}
  if type(spec) is tuple:
    parts = [_spec_to_json(entry) for entry in spec]
    return None if None in parts else {'tuple': parts}
  if SPECS.get(type(spec).__name__) is not type(spec):
    return None
  result = {'kind': type(spec).__name__, 'shape': list(spec.shape), 'dtype': spec.dtype.name}
  if isinstance(spec, specs.DiscreteArray):
    return result | {'num_values': int(spec.num_values)}
  if isinstance(spec, specs.BoundedArray):
    bounds = {'minimum': spec.minimum, 'maximum': spec.maximum}
    return result | {name: _bound_to_json(bound) for name, bound in bounds.items()}
  if isinstance(spec, environment_lib.BoardSpec):
    return result | {'board_shape': list(spec.board_shape)}
  return result


def _bound_to_json(bound: np.ndarray) -> dict[str, Any]:
  """Shape and values, as text where they are infinite, which JSON lacks."""
  values = [str(x) if np.isinf(x) else x for x in np.asarray(bound).reshape(-1).tolist()]
  return {'shape': list(np.shape(bound)), 'values': values}


def _spec_from_json(content: Any) -> Any:
  if content is None:
    return None
  if 'dict' in content:
    return {key: _spec_from_json(entry) for key, entry in content['dict'].items()}
  if 'tuple' in content:
    return tuple(map(_spec_from_json, content['tuple']))
  values = dict(content)
  kind = SPECS[values.pop('kind')]
  dtype = np.dtype(values['dtype'])
  for name in ('minimum', 'maximum'):
    if name in values:
      entries = [float(x) if isinstance(x, str) else x for x in values[name]['values']]
      values[name] = np.array(entries, dtype).reshape(values[name]['shape'])
  if kind is specs.DiscreteArray:
    del values['shape']
  for name in ('shape', 'board_shape'):
    if name in values:
      values[name] = tuple(values[name])
  return kind(**values)

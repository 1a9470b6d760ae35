"""Reads and writes exported policies: parameters as safetensors, specs and config as JSON."""

import json
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
from dm_env import specs
from safetensors import numpy as safetensors

from hephaestus.actors.environments import environment as environment_lib
from hephaestus.actors.environments import names
from hephaestus.launch import config as launch_config
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.interface import places

PARAMS = 'params.safetensors'
FORMAT = 2  # version of policy.json; `read` rejects any other
FIELDS = {  # kinds of specs, and what they have in addition to shape and dtype
  specs.Array: (),
  specs.BoundedArray: ('minimum', 'maximum'),
  specs.DiscreteArray: ('num_values',),
  environment_lib.BoardSpec: ('board_shape', 'player'),
  environment_lib.ChoiceSpec: ('num_values', 'start'),
  environment_lib.ChoicesSpec: ('minimum', 'maximum', 'start'),
}


class Exported(NamedTuple):
  """The content of an exported policy's folder."""

  config: launch_config.ExperimentConfig  # of the run that trained the policy
  learner_step: int  # number of updates after which the parameters were saved
  action_names: tuple[str, ...]  # of the discrete actions, in order; empty if there are none
  # Tree of specs of one observation. None where JSON cannot represent it, such as a `ViewSpec`, which
  # contains a function; then the environment of `config` provides it.
  observation_spec: Any
  action_spec: specs.BoundedArray
  # Acting parameters, of a shipped agent all of them; host arrays by name, see `named`.
  arrays: dict[str, np.ndarray]


def halved(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Converts float32 arrays of more than 1,000 numbers, all within range, to float16; `read` converts back."""

  def fits(array: np.ndarray) -> bool:
    is_large = array.dtype == np.float32 and array.size > 1000
    return is_large and np.abs(array).max() <= np.finfo(np.float16).max

  return {key: x.astype(np.float16) if fits(x) else x for key, x in arrays.items()}


def named(tree: Any) -> dict[str, Any]:
  """Flattens a tree into a dict from path, such as 'world_model/encoder/0/w', to leaf."""
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in flat}


def rebuild(arrays: dict[str, np.ndarray], like: Any, name: str) -> Any:
  """Rebuilds a tree of the shapes and dtypes of `like`, the inverse of `named`.

  ValueError, with the `name` of the file, if an array is missing, unexpected, or of another shape or dtype.
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
  """Writes an exported policy as two files, PARAMS and places.POLICY; ValueError if the folder is not empty."""
  content = {
    'format': FORMAT,
    'learner_step': exported.learner_step,
    'action_names': list(exported.action_names),
    'observation_spec': _spec_to_json(exported.observation_spec),
    'action_spec': _spec_to_json(exported.action_spec),
    'config': launch_config.to_tree(exported.config),
  }
  text = json.dumps(content, indent=2, allow_nan=False) + '\n'
  try:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
      raise ValueError(f'--out {out}: is not an empty folder; give another one')
    out.mkdir(parents=True, exist_ok=True)
    arrays = {key: np.array(array, order='C') for key, array in exported.arrays.items()}
    (out / PARAMS).write_bytes(safetensors.save(arrays))  # `save_file` lets only its owner read it
    (out / places.POLICY).write_text(text)
  except OSError as error:
    raise ValueError(f'--out {out}: cannot be written to ({error.strerror})') from None


def read(folder: pathlib.Path) -> Exported:
  """Reads a folder that `write` has made, float16 as float32; ValueError if it is broken or of another version."""
  if not folder.is_relative_to(places.SHIPPED):  # an installer may have made links there
    folder_lib.check_entries(folder)
  file = folder / places.POLICY
  try:
    content = json.loads(file.read_text())
    if content['format'] != FORMAT:
      raise ValueError(f'its format is {content["format"]}, this version reads {FORMAT}')
    config = launch_config.from_yaml(json.dumps(content['config'], ensure_ascii=False), str(file))
    learner_step = content['learner_step']
    if type(learner_step) is not int:
      raise ValueError(f'learner_step={learner_step!r} is no whole number'[:200])
    if not all(map(str.isprintable, content['action_names'])):
      raise ValueError('action_names: has a control character, or is no list of texts')
    return Exported(
      config=config,
      learner_step=learner_step,
      action_names=tuple(content['action_names']),
      observation_spec=_spec_from_json(content['observation_spec']),
      action_spec=_spec_from_json(content['action_spec']),
      arrays={
        key: array.astype(np.float32) if array.dtype == np.float16 else array
        for key, array in safetensors.load_file(folder / PARAMS).items()
      },
    )
  except names.UntrustedError:
    raise
  except Exception as error:  # a broken file may raise any error
    raise refusal(folder, error) from None


def refusal(folder: pathlib.Path, error: Exception) -> ValueError:
  """The error for a folder whose content made a reader, or an agent that was made of it, raise any other."""
  first_line = str(error).split('\n')[0]
  return ValueError(
    f'{folder}: is not an exported policy of this version ({first_line}); make one with '
    '`hephaestus export RUN --out DIR`'
  )


def _spec_to_json(spec: Any) -> Any:
  """Converts a tree of specs to JSON values; None if a spec or a container is not supported."""
  if isinstance(spec, dict):
    entries = {key: _spec_to_json(entry) for key, entry in spec.items()}
    return None if None in entries.values() else {'dict': entries}
  if type(spec) is tuple:
    parts = [_spec_to_json(entry) for entry in spec]
    return None if None in parts else {'tuple': parts}
  if type(spec) not in FIELDS:
    return None
  values = {name: _value_to_json(getattr(spec, name)) for name in FIELDS[type(spec)]}
  kind = {'kind': type(spec).__name__, 'shape': list(spec.shape), 'dtype': spec.dtype.name}
  return kind | values


def _value_to_json(value: Any) -> Any:
  """Converts a whole number, a shape, None, or an array, of which infinite values are text: JSON lacks them."""
  if value is None:
    return None
  if not isinstance(value, np.ndarray):
    return list(value) if isinstance(value, tuple) else int(value)
  values = [str(x) if np.isinf(x) else x for x in value.reshape(-1).tolist()]
  return {'shape': list(value.shape), 'values': values}


def _spec_from_json(content: Any) -> Any:
  if content is None:
    return None
  if 'dict' in content:
    return {key: _spec_from_json(entry) for key, entry in content['dict'].items()}
  if 'tuple' in content:
    return tuple(map(_spec_from_json, content['tuple']))
  kind = {each.__name__: each for each in FIELDS}[content['kind']]
  values: dict[str, Any] = {'dtype': np.dtype(content['dtype'])}
  for name in ('shape', *FIELDS[kind]):
    value = values[name] = content[name]
    if isinstance(value, list):
      values[name] = tuple(value)
    elif isinstance(value, dict):  # where numbers may be text
      numbers = [float(x) if isinstance(x, str) else x for x in value['values']]
      values[name] = np.array(numbers, values['dtype']).reshape(value['shape'])
  if issubclass(kind, specs.DiscreteArray):
    del values['shape']
  return kind(**values)

"""Begins a new run with parameters and optimizer of an older one: `hephaestus train --from`."""

import contextlib
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from hephaestus.agents.dreamer import world_model
from hephaestus.launch import config as launch_config
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.run import parts as parts_lib
from hephaestus.launch.run import request as request_lib
from hephaestus.learner import checkpoint
from hephaestus.learner.sources import on_policy

# Fields of a train state that are copied; the others are reset.
COPIED = (
  'params', 'statistics', 'slow_critic', 'opt_state', 'model_opt_state', 'policy_opt_state',
  'return_square',
)  # fmt: skip


class Origin(NamedTuple):
  """Checkpoint of an older run with whose parameters and optimizer a new run begins.

  Attributes:
    text: RUN[@best|@STEP], as given to --from.
    exact: RUN@STEP for the same checkpoint, with the absolute path of the run.
    step: learner step of the checkpoint.
    fields: name -> value of the fields to copy: each of `COPIED` that the train state has.
  """

  text: str
  exact: str
  step: int
  fields: dict[str, Any]


def load(text: str, config: launch_config.ExperimentConfig) -> Origin:
  """Restores what is copied of RUN[@best|@STEP]; ValueError if there is none, or it does not fit the config's."""
  folder, which = request_lib.parse_origin(text)
  try:
    shapes = parts_lib.saved_shapes(folder_lib.load_config(folder))
    step, train = parts_lib.find_train(folder, shapes, which)
  except ValueError as error:
    raise ValueError(f'--from {text}: {str(error).removeprefix("--checkpoint ")}') from None
  fields = {name: getattr(train, name) for name in COPIED if hasattr(train, name)}
  like = parts_lib.train_part(parts_lib.saved_shapes(config))
  for name, value in fields.items():
    try:
      checkpoint.transplanted(value, getattr(like, name))
    except ValueError as error:
      raise ValueError(
        f'--from {text}: the parameter {name}{error} in environment '
        f'{config.environment["name"]!r}; give an environment with the same observations and actions, '
        'and leave the sizes of the agent as they are'
      ) from None
  return Origin(text, f'{folder.resolve()}@{step}', step, fields)


def begin(
  origin: Origin, config: launch_config.ExperimentConfig, folder: pathlib.Path, program: Any
) -> None:
  """Writes the first checkpoint of a new run: step 0, with what is copied of its origin; and the file `folder.ORIGIN`.

  Args:
    program: the `unrolled.FusedProgram` of a fused run; None for a run with actors.
  """
  key = jax.random.key(config.seed)

  def copy(train: Any) -> Any:
    fields = {
      name: checkpoint.transplanted(value, getattr(train, name))
      for name, value in origin.fields.items()
    }
    own = fields.get('statistics')
    if isinstance(own, dict) and world_model.MEMORY in own:
      # The older one dates its entries by updates, which begin at 0 again.
      held = train.statistics[world_model.MEMORY]
      fields['statistics'] = own | {world_model.MEMORY: held}
    return train._replace(**fields)

  state: Any
  if program is not None:
    state = program.init(key)
    state = state._replace(train=copy(state.train))
  else:
    parts = parts_lib.make_parts(config)
    state = copy(jax.jit(config.record.make_update(config, parts.trained, num_devices=1).init)(key))
    if config.record.on_policy:
      state = on_policy.State(state, np.zeros((), np.int64))
  with contextlib.closing(parts_lib.checkpointer(folder, config.learner.keep)) as saver:
    saver.save(0, state)
    saver.wait()
  (folder / folder_lib.ORIGIN).write_text(f'{origin.exact}\n')
  print(
    f'begins with parameters and optimizer of {origin.text}, update {origin.step:,}', flush=True
  )

"""TrainRequest, a run that a user asks for: its flags, and the config that follows from it."""

import argparse
import dataclasses
import functools
import math
import pathlib
from typing import TYPE_CHECKING, Any

from hephaestus.launch import comments, records
from hephaestus.launch.run import validation
from hephaestus.learner import profile as profile_lib

if TYPE_CHECKING:
  from hephaestus.launch import config as launch_config

# Fields that make a config on any machine or host, and those that make one on this machine.
SHARED = ('preset', 'cognition', 'env', 'agent', 'run', 'steps', 'seed', 'set', 'trust')
CONFIG = (*SHARED, 'config', 'fused')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRequest:
  """A run that a user asks for, by flags of `hephaestus train` or arguments of `hephaestus.train`.

  Each field is the flag of its name, with the text below as help; `origin` is --from.

  Attributes:
    preset: sizes: laptop, gpu or tpu-v4-8 (default: by the hardware found; a new run on several hosts
      needs one).
    cognition: switch on all parts of docs/cognition.md that suit the environment and are not set
      otherwise: slots, episodic memory, workspace, survival, empowerment and learning progress.
    env: an environment of `hephaestus environments`, or package.module:Class (default: catch).
    agent: dreamer, plain, ppo, or package.module:Class (default: dreamer); plain is the dreamer
      with one transition model, no novelty and 15 imagined steps.
    run: folder of the run (default: a new one).
    steps: environment steps to collect in total.
    seed: random seed of the whole run (default: 0).
    set: override the config.
    trust: import agent, environment and logger that a folder or file names by an import path.
    config: configuration file, such as config.yaml of a run; keys that it lacks are as without it,
      and flags override it.
    fused: one process: environments, replay and update in one program, or threads for environments
      that are not in JAX (default for ppo).
    origin: begin a new run with parameters and optimizer of a checkpoint of another, and with its config.
    expose: let other machines reach replay's port, which asks for no password.
    profile: trace these updates of the learner, and an actor meanwhile; such as 100:110.
  """

  preset: str | None = None
  cognition: bool = False
  env: str | None = None
  agent: str | None = None
  run: pathlib.Path | None = None
  steps: int | None = None
  seed: int | None = None
  set: tuple[str, ...] = dataclasses.field(default=(), metadata={'metavar': 'KEY=VALUE'})
  trust: bool = False
  config: pathlib.Path | None = dataclasses.field(default=None, metadata={'metavar': 'FILE'})
  fused: bool | None = None
  origin: str | None = dataclasses.field(
    default=None, metadata={'name': 'from', 'metavar': 'RUN[@best|@STEP]'}
  )
  expose: bool = False
  profile: str | None = dataclasses.field(default=None, metadata={'metavar': 'START:STOP'})

  def __post_init__(self):
    object.__setattr__(self, 'set', tuple(self.set))
    for name in ('env', 'agent'):
      value = getattr(self, name)
      if value is not None and not (isinstance(value, str) and value):
        raise ValueError(f'--{name} {value!r}: a name is needed; leave it out for the default')
    for name in ('run', 'config'):
      path = getattr(self, name)
      object.__setattr__(self, name, None if path is None else pathlib.Path(path))
    _ = self.span  # refuses a `profile` that is no span

  @functools.cached_property
  def file(self) -> 'launch_config.ConfigFile':
    """The content of the file `config`; an empty one if there is no file."""
    from hephaestus.launch import config as launch_config

    file = self.config
    return launch_config.ConfigFile() if file is None else launch_config.read_partial(file)

  @functools.cached_property
  def span(self) -> profile_lib.Span | None:
    """The learner updates to trace; None for none."""
    return None if self.profile is None else profile_lib.parse(self.profile)

  @property
  def says_fused(self) -> bool:
    """Whether the request says if the run is fused."""
    return self.fused is not None or self.sets('learner.fused')

  def sets(self, key: str) -> bool:
    """Whether `set` or the file gives a value for a config key, by path."""
    return any(each.startswith(f'{key}=') for each in self.set) or key in self.file.values

  def words(self, *names: str) -> list[str]:
    """Lists words of a command line that ask for the same; of fields with these names, or of all."""
    words: list[str] = []
    for field in _fields(names):
      value, flag = getattr(self, field.name), _flag(field)
      if value == field.default:
        continue
      if isinstance(value, bool):
        words.append(flag if value else flag.replace('--', '--no-'))
      else:
        words += [flag, *(value if isinstance(value, tuple) else [str(value)])]
    return words


def whole_number(text: str) -> int:
  """Parses a whole number, also as 1e5 or 100_000; `argparse.ArgumentTypeError` for other text."""
  try:
    return int(text)
  except ValueError:
    pass
  try:
    number = float(text)
  except ValueError:
    number = math.nan
  if not number.is_integer():
    raise argparse.ArgumentTypeError(f'{text!r}: write a whole number, such as 100000 or 1e5')
  return int(number)


_OPTIONS: dict[Any, dict[str, Any]] = {  # of argparse, by the type of a field
  str | None: {},
  int | None: {'type': whole_number},
  pathlib.Path | None: {'type': pathlib.Path},
  bool: {'action': 'store_true'},
  bool | None: {'action': argparse.BooleanOptionalAction},
  tuple[str, ...]: {'nargs': '+', 'action': 'extend', 'default': []},
}


def _fields(names: tuple[str, ...]) -> list[dataclasses.Field]:
  return [field for field in dataclasses.fields(TrainRequest) if not names or field.name in names]


def _flag(field: dataclasses.Field) -> str:
  return '--' + field.metadata.get('name', field.name).replace('_', '-')


def add(parser: argparse.ArgumentParser, *names: str) -> None:
  """Adds the flags of the fields with these names, or of all; fields that are not given are None."""
  texts = comments.attributes(TrainRequest.__doc__ or '')
  for field in _fields(names):
    metavar = {name: field.metadata[name] for name in ('metavar',) if name in field.metadata}
    options = _OPTIONS[field.type] | metavar
    parser.add_argument(_flag(field), dest=field.name, help=texts[field.name], **options)


def of(arguments: argparse.Namespace, **given: Any) -> TrainRequest:
  """Makes the request of parsed flags; `given` are values of fields for which the command has no flag."""
  values = {name: value for name, value in vars(arguments).items() if name in NAMES}
  return TrainRequest(**values | given)


NAMES = tuple(field.name for field in _fields(()))
SINGLE = tuple(name for name in NAMES if name not in CONFIG)  # fields of one run, not of several


def make_config(request: TrainRequest) -> Any:
  """Makes the `ExperimentConfig` that a request asks for, and validates it.

  It begins with the config of the run folder to resume, of the run of --from, or of a preset, to which
  --cognition adds its parts. Values of --config replace some of it, then --set, --fused, --steps and --seed do.
  Where the packages that several processes need are not installed, a new run becomes a fused one, if its agent
  can train so, and nothing in the request asks for several processes.

  Raises:
    ValueError: a flag or key is invalid; names it.
  """
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.files import folder as folder_lib
  from hephaestus.launch.run import cognition

  records.given_names(request.agent, request.env)
  file = request.file
  names = ('preset', 'agent', 'env')
  request = dataclasses.replace(
    request, **{name: getattr(request, name) or getattr(file, name) for name in names}
  )
  is_new = request.origin is not None or not folder_lib.resumes(request.run)
  config = _config_of_preset(request) if is_new else _config_to_resume(request)
  overrides = list(request.set)
  if config.record.can_fuse and request.fused is not None:
    overrides.append(f'learner.fused={request.fused}')
    if request.fused and not config.fused:  # presets are of runs with actors, which may be several
      overrides.insert(0, 'actor.num_actors=1')
  if request.steps is not None:
    overrides.append(f'max_environment_steps={request.steps}')
  if request.seed is not None:
    overrides.append(f'seed={request.seed}')
  values = file.values
  if file.env not in (None, config.environment['name']):
    values = {key: value for key, value in values.items() if not key.startswith('environment.')}
  if request.cognition:
    overrides = [*cognition.assignments(request.sets, config, overrides, values), *overrides]
  config = launch_config.override(config, overrides, values)
  may_fuse = is_new and config.record.can_fuse and not (config.fused or request.says_fused)
  is_asked = bool(validation.asked_for_several(request, config))
  if may_fuse and not is_asked and not validation.has_distributed():
    print(f'one process, as with --fused: several need {validation.DISTRIBUTED}', flush=True)
    config = launch_config.override(config, FUSED)
  validation.validate(request, config)
  return config


FUSED = ('actor.num_actors=1', 'learner.fused=True')


def _config_to_resume(request: TrainRequest) -> Any:
  """The config of the run in the folder of --run; ValueError if --agent or --env differs from it.

  With --preset it is the config of that preset, but with environment, seed and limits of the folder's
  run, and fused if that is.
  """
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.files import folder as folder_lib

  assert request.run is not None
  config = folder_lib.load_config(request.run)
  agent, env = config.agent_name, config.environment['name']
  # Names of an agent may be several: `plain` is the dreamer, with other sizes.
  given_agent = request.agent and records.find_record(request.agent).name
  for name, known, found in (('agent', agent, given_agent), ('env', env, request.env)):
    if found not in (None, known):
      raise ValueError(
        f'--run {request.run}: was made with another configuration. --{name}: the folder has {known}, '
        f'you gave {getattr(request, name)}. Leave out --{name} or give another folder'
      )
  if request.preset is None:
    return config
  sized = launch_config.of_preset(request.agent or agent, request.preset, env)
  kept = ('environment', 'seed', 'max_environment_steps', 'max_minutes')
  sized = dataclasses.replace(sized, **{name: getattr(config, name) for name in kept})
  if config.fused:
    return launch_config.override(sized, FUSED)
  return launch_config.override(sized, ['learner.fused=False']) if sized.fused else sized


def _config_of_preset(request: TrainRequest) -> Any:
  """The config with which a new run begins: of its preset, or of the run of --from; ValueError names a flag."""
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.agents import presets
  from hephaestus.launch.files import folder as folder_lib

  if request.origin is None:
    return launch_config.of_preset(
      request.agent or records.DREAMER,
      request.preset or presets.default_preset(),
      request.env or 'catch',
    )
  if folder_lib.resumes(request.run):
    raise ValueError(
      f'--from {request.origin}: begins a new run, and --run {request.run} is one already; give a '
      'new folder, or leave out --from to resume'
    )
  for name in ('preset', 'agent', 'cognition'):
    if words := request.words(name):
      raise ValueError(
        f'{" ".join(words)}: a run --from another has its agent and sizes; leave it out, and change the '
        'rest with --set'
      )
  config = folder_lib.load_config(parse_origin(request.origin)[0])
  if request.env is not None and request.env != config.environment['name']:
    config = dataclasses.replace(config, environment={'name': request.env})
  return config


def parse_origin(text: str) -> tuple[pathlib.Path, str | None]:
  """Splits RUN[@best|@STEP] into the run's folder and 'best' or STEP, None for the newest checkpoint."""
  folder, separator, which = text.rpartition('@')
  if not separator or pathlib.Path(text).is_dir():
    return pathlib.Path(text), None
  return pathlib.Path(folder), which

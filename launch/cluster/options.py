"""Options of `hephaestus manifests`; imports little, since every command line makes their flags."""

import dataclasses
import functools
import re

ROLES = ('replay', 'learner', 'actors', 'evaluator')
KINDS = ('cpu', 'memory', 'storage')
_LABEL = r'[a-z]([a-z0-9-]*[a-z0-9])?'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Options of the manifests in addition to hosts and config.

  Each field is the flag of its name, with the text below as help.

  Attributes:
    name: name of the run in the cluster, with which the name of each object begins (default:
      hephaestus).
    namespace: Kubernetes namespace of all objects (default: kubectl's).
    image: container image, built from the Dockerfile (default: hephaestus:VERSION).
    gpus: number of GPUs (nvidia.com/gpu) of each learner pod.
    tpu: TPU of the learner, as GKE names its type, such as tpu-v4-podslice.
    topology: topology of that TPU, such as 2x2x4.
    storage_class: storage class of all volumes (default: the cluster's own).
    resources: resources of each pod, such as learner.cpu=8 actors.memory=4Gi replay.storage=200Gi.
    launch_id: above 0, another at each launch (default: the steps of the run).
  """

  name: str = 'hephaestus'
  namespace: str | None = None
  image: str | None = None
  gpus: int = 0
  tpu: str | None = dataclasses.field(default=None, metadata={'metavar': 'TYPE'})
  topology: str | None = dataclasses.field(default=None, metadata={'metavar': 'AxBxC'})
  storage_class: str | None = dataclasses.field(default=None, metadata={'metavar': 'NAME'})
  resources: tuple[str, ...] = dataclasses.field(
    default=(), metadata={'metavar': 'ROLE.KIND=QUANTITY'}
  )
  launch_id: int | None = None

  def __post_init__(self):
    if len(self.name) > 40 or not re.fullmatch(_LABEL, self.name):  # with suffixes a DNS label, too
      raise ValueError(
        f'--name {self.name}: must begin with a letter and continue with small letters, digits and '
        'dashes, 40 at most'
      )
    if self.gpus and self.tpu:
      raise ValueError(f'--gpus {self.gpus}: goes with no --tpu; leave one of them out')
    if (self.tpu is None) != (self.topology is None):
      raise ValueError(
        '--tpu, --topology: go together, as in --tpu tpu-v4-podslice --topology 2x2x1'
      )
    if self.topology and not re.fullmatch(r'[1-9]\d*(x[1-9]\d*){1,2}', self.topology, re.ASCII):
      raise ValueError(f'--topology {self.topology}: write it as 2x4 or 2x2x4')
    self.quantities  # noqa: B018, which raises an error for invalid resources

  @functools.cached_property
  def quantities(self) -> dict[tuple[str, str], str]:
    """(One of ROLES, one of KINDS) -> quantity for each pod, in place of the estimate."""
    quantities = {}
    for assignment in self.resources:
      path, _, quantity = assignment.partition('=')
      role, _, kind = path.partition('.')
      if role not in ROLES or kind not in KINDS or path == 'actors.storage':  # actors keep nothing
        raise ValueError(
          f'--resources {assignment}: write it as ROLE.KIND=QUANTITY, with a role of '
          f'{", ".join(ROLES)} and a kind of {", ".join(KINDS)}; actors have no storage'
        )
      quantities[role, kind] = quantity
    return quantities

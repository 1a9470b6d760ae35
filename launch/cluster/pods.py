"""Options of Kubernetes manifests, and their checks."""

import dataclasses
import importlib.metadata
import math
import re
from collections.abc import Mapping, Sequence

REPLAY, LEARNER, ACTORS, EVALUATOR = 'replay', 'learner', 'actors', 'evaluator'
ROLES = (REPLAY, LEARNER, ACTORS, EVALUATOR)
KINDS = ('cpu', 'memory', 'storage')
_LABEL = re.compile(r'[a-z]([a-z0-9-]*[a-z0-9])?')
_LONGEST_NAME = 40  # with a suffix it must fit a DNS label as well
_IMAGE = re.compile(
  r'([a-z0-9.-]+(:\d+)?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*'
  r'(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?',
  re.ASCII,
)
_QUANTITY = re.compile(r'\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Options of the manifests besides hosts and config.

  Attributes:
    name: name of the run; every object's name begins with it.
    namespace: Kubernetes namespace of all objects; None for kubectl's default.
    image: name of the container image, which is built from the Dockerfile.
    gpus: number of GPUs (nvidia.com/gpu) of each learner pod.
    tpu: GKE's name for the type of the learner's TPUs, such as tpu-v4-podslice; None for no TPU.
    topology: topology of their slice, such as 2x2x4; None for no TPU.
    storage_class: storage class of all volumes; None for the cluster's default.
    resources: (one of ROLES, one of KINDS) -> quantity for each pod, in place of the estimate.
    launch_id: value of --launch-id for `hephaestus node`; None for its default.

  Raises:
    ValueError: no cluster would accept a value; names the flag.
  """

  name: str = 'hephaestus'
  namespace: str | None = None
  image: str = f'hephaestus:{importlib.metadata.version("hephaestus")}'
  gpus: int = 0
  tpu: str | None = None
  topology: str | None = None
  storage_class: str | None = None
  resources: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)
  launch_id: int | None = None

  def __post_init__(self):
    for flag, value, longest in (
      ('--name', self.name, _LONGEST_NAME),
      ('--namespace', self.namespace, 63),
      ('--tpu', self.tpu, 63),
      ('--storage-class', self.storage_class, 253),
    ):
      labels = [] if value is None else value.split('.') if longest > 63 else [value]
      if not all(map(_LABEL.fullmatch, labels)) or len(value or '') > longest:
        raise ValueError(
          f'{flag} {value}: must begin with a letter and continue with small letters, digits and dashes, '
          f'{longest} at most'
        )
    if not _IMAGE.fullmatch(self.image):
      raise ValueError(f'--image {self.image}: write it as registry.example.com/name:tag')
    if self.gpus < 0:
      raise ValueError(f'--gpus {self.gpus}: must be at least 0')
    if self.gpus and self.tpu:
      raise ValueError(f'--gpus {self.gpus}: goes with no --tpu; leave one of them out')
    if (self.tpu is None) != (self.topology is None):
      raise ValueError(
        '--tpu, --topology: go together, as in --tpu tpu-v4-podslice --topology 2x2x1'
      )
    if self.topology and not re.fullmatch(r'[1-9]\d*(x[1-9]\d*){1,2}', self.topology, re.ASCII):
      raise ValueError(f'--topology {self.topology}: write it as 2x4 or 2x2x4')

  def accelerators(self, num_learners: int) -> tuple[str, int] | None:
    """Returns the accelerators of each learner pod.

    Args:
      num_learners: number of learner pods.

    Returns:
      Resource name, such as 'nvidia.com/gpu', and count; None for no accelerators.

    Raises:
      ValueError: the chips of the TPU's topology do not divide over the pods.
    """
    if self.gpus:
      return 'nvidia.com/gpu', self.gpus
    if self.topology is None:
      return None
    chips = math.prod(map(int, self.topology.split('x')))
    if chips % num_learners:
      raise ValueError(
        f'--topology {self.topology}: its {chips} chips do not divide over {num_learners} learner hosts'
      )
    return 'google.com/tpu', chips // num_learners


def parse_resources(assignments: Sequence[str]) -> dict[tuple[str, str], str]:
  """Parses words such as 'learner.memory=32Gi' to `Options.resources`; ValueError for others."""
  resources = {}
  for assignment in assignments:
    path, _, quantity = assignment.partition('=')
    role, _, kind = path.partition('.')
    if role not in ROLES or kind not in KINDS:
      raise ValueError(
        f'--resources {assignment}: write it as ROLE.KIND=QUANTITY, with a role of '
        f'{", ".join(ROLES)} and a kind of {", ".join(KINDS)}'
      )
    if (role, kind) == (ACTORS, 'storage'):
      raise ValueError(f'--resources {assignment}: actors keep nothing; leave it out')
    if not _QUANTITY.fullmatch(quantity) or not float(re.sub('[^0-9.]', '', quantity)):
      raise ValueError(f'--resources {assignment}: give a quantity such as 2, 500m or 4Gi')
    resources[role, kind] = quantity
  return resources

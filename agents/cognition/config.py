"""CognitionConfig: the dreamer's config with the options of its guests; imports no JAX."""

import dataclasses

from hephaestus.agents.dreamer import config as dreamer_config

SCORES = ('learned', 'gain')  # of a workspace


@dataclasses.dataclass(frozen=True, kw_only=True)
class CognitionConfig(dreamer_config.DreamerConfig):
  """Config of a dreamer with parts of cognition, each off by default: see docs/cognition.md.

  Raises:
    ValueError: an invalid value, named with its field.
  """

  # Intrinsic rewards, in addition to novelty: weights of their advantages; 0: none.
  competence_scale: float = 0.0  # of learning progress by region
  survival_scale: float = 0.0  # of survival, the reduction of the lack of vitals
  empowerment_scale: float = 0.0  # of empowerment

  # Episodic memory.
  memory_size: int = 0  # entries of the episodic memory; 0: no memory
  memory_dream_share: float = 0.0  # share of the rollouts that begin at latents of its entries

  # Slots.
  slots: int = 0  # slots that hold the image of an observation; 0: none
  slot_size: int = 32  # numbers of a slot

  # Contexts.
  window: int = 1  # last steps that actor and critic pool by salience; 1: none
  workspace_size: int = 0  # most candidates that the actor reads; 0: no workspace, it reads all
  workspace_score: str = 'learned'  # how candidates are scored, by the actor's loss; or 'gain'

  def __post_init__(self):
    super().__post_init__()
    check = self._check
    for name in ('competence_scale', 'survival_scale', 'empowerment_scale', 'workspace_size'):
      check(getattr(self, name) >= 0, name, 'must be at least 0')
    several = self.ensemble_size > 1 or self.competence_scale == 0
    check(several, 'competence_scale', 'is of novelty, which one member has not; set it to 0')
    check(
      self.memory_size == 0 or 8 <= self.memory_size <= 2**24,
      'memory_size',
      f'must be 0 for no memory, or from the 8 entries that an update writes to {2**24:,}',
    )
    check(0 <= self.memory_dream_share <= 1, 'memory_dream_share', 'must lie in [0, 1]')
    check(
      self.memory_size > 0 or self.memory_dream_share == 0,
      'memory_dream_share',
      'needs a memory; set agent.memory_size, or agent.memory_dream_share=0',
    )
    check(
      self.slots == 0 or 2 <= self.slots <= 64,
      'slots',
      'must be 0 for none, or from 2 to 64 (8 suit a few objects)',
    )
    check(self.slot_size >= 4, 'slot_size', 'must be at least 4')
    check(self.window >= 1, 'window', 'must be at least 1')
    salient = self.workspace_size and self.window > 1
    check(not salient, 'workspace_size', 'is not for salience; set agent.window=1')
    check(self.workspace_score in SCORES, 'workspace_score', f'choose one of {list(SCORES)}')

  @property
  def _explores(self) -> bool:
    scale = max(self.novelty_scale, self.competence_scale)
    return self.ensemble_size > 1 and scale > 0

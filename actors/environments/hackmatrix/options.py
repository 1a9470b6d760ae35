"""Options of HackMatrix; the defaults are the full game."""

import dataclasses
import math

MOST_AT_START = 1000  # siphons, credits and energy, far from the limits of int32
SHAPINGS = ('original', 'potential')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Options of the game, to make it easier and to change its reward."""

  # data siphons at the start of an episode. The fractional part is the probability of one more, so
  # that a curriculum can lower their number gradually.
  starting_siphons: float = 0.0
  starting_credits: int = 0  # credits at the start of an episode
  starting_energy: int = 0  # energy at the start of an episode
  # scale of the number of transmissions of a new stage, from 0 to 1; the product is rounded, a
  # half to even
  transmission_scale: float = 1.0
  # subtracted from the reward for death next to an enemy that a siphon released
  siphon_death_penalty: float = 10.0
  # weight of the walking distance to the exit in the reward, for each cell
  distance_shaping: float = 0.05
  data_siphon_reward: float = 1.0  # reward for each data siphon collected
  # 'original' rewards each step towards the exit and does not penalise steps away from it, so
  # going back and forth is profitable. 'potential' is the difference of a potential, which leaves
  # the order of policies unchanged; see `rewards.shape`.
  shaping: str = 'original'
  gamma: float = 0.99  # discount factor of the potential; give it the value of the agent's `gamma`

  def __post_init__(self):
    highest = {
      'starting_siphons': MOST_AT_START,
      'starting_credits': MOST_AT_START,
      'starting_energy': MOST_AT_START,
      'transmission_scale': 1,
      'gamma': 1,
    }
    for field in dataclasses.fields(Options):
      value = getattr(self, field.name)
      if field.name == 'shaping':
        if value not in SHAPINGS:
          raise ValueError(f'environment.shaping={value!r}: choose from {", ".join(SHAPINGS)}')
      elif not 0 <= value <= highest.get(field.name, math.inf) or math.isinf(value):
        most = highest.get(field.name)
        needed = 'a finite number of at least 0' if most is None else f'a number from 0 to {most}'
        raise ValueError(f'environment.{field.name}={value}: {needed} is needed')

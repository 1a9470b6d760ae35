"""Invalid configs are refused with the name of the field."""

import pytest

from hephaestus.agents import distributions
from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.dreamer import config as dreamer_config


@pytest.mark.parametrize(
  ('name', 'value'),
  [
    ('latent', 'laplace'),
    ('novelty', 'none'),
    ('compute_dtype', 'float16'),
    ('ensemble_size', 0),
    ('window', 0),
    ('image_channels', -1),
    ('memory_steps', 1),
    ('memory_size', 4),
    ('memory_size', -1),
    ('memory_size', 2**25),
    ('memory_dream_share', 0.5),  # without a memory
    ('memory_dream_share', 1.5),
    ('workspace_size', -1),
    ('workspace_score', 'self'),
    ('num_bins', 40),
    ('num_bins', 1),
    ('gamma', 1.5),
    ('lambda_', -0.1),
    ('unimix', 1.0),
    ('horizon_min', 65),
    ('starts_per_sequence', 0),
  ],
)
def test_invalid_value_is_refused_with_its_field(name, value):
  # A horizon_min above horizon_max is an error of horizon_max.
  refused = 'horizon_max' if name == 'horizon_min' else name
  with pytest.raises(ValueError, match=rf'agent\.{refused}='):
    cognition_config.CognitionConfig(**{name: value})


def test_workspace_together_with_salience_is_refused():
  with pytest.raises(ValueError, match=r'agent\.workspace_size=1: .* set agent\.window=1'):
    cognition_config.CognitionConfig(workspace_size=1, window=2)


def test_each_latent_has_a_distribution():
  assert set(dreamer_config.LATENTS) == set(distributions.LATENTS)

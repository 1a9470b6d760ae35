"""Policies of initial parameters."""

import pathlib

import jax

from hephaestus.launch import config as launch_config
from hephaestus.launch.interface import exported
from hephaestus.launch.interface import policy as policy_lib


def policy(agent, environment, *options):
  """A policy of the laptop's preset, with all parameters."""
  preset = launch_config.of_preset(agent, 'laptop', environment)
  config = launch_config.override(preset, options)
  made = config.make_environment()
  specs = made.observation_spec, made.action_spec
  agent = config.record.make(config.agent, *specs).agent
  params = jax.device_get(agent.init_params(jax.random.key(0)))
  described = exported.Exported(config, 0, tuple(made.action_names), *specs, arrays={})
  return policy_lib.Policy(
    pathlib.Path('untrained'), described, agent, agent.acting_params(params),
    all_params=params, environment=made,
  )  # fmt: skip

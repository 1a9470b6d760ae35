"""Writes one step of a policy as an ONNX file, which needs neither Python nor JAX."""

import dataclasses
import json
import logging
import math
import pathlib
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from hephaestus.agents import kernels
from hephaestus.launch.interface import exported as exported_lib
from hephaestus.launch.interface import policy as policy_lib

OPSET = 18  # version of ONNX's operators, which runtimes since 2023 have
# Primitives that only call another jaxpr.
CALLS = {'jit', 'pjit', 'closed_call', 'core_call', 'custom_jvp_call', 'custom_vjp_call'}


def check_packages() -> None:
  """Raises ValueError if the extra `onnx` is not installed."""
  try:
    import jax2onnx  # noqa: F401
  except ImportError as error:
    raise ValueError(
      f'--format onnx: needs the extra `onnx`, pip install "hephaestus[onnx]", on Python 3.11 or newer; '
      f'this is Python {sys.version_info.major}.{sys.version_info.minor} ({error})'
    ) from None


def write(policy: policy_lib.Policy, out: pathlib.Path) -> None:
  """Writes one step of a policy, for one environment, computed in float32 whatever its run computed in.

  Inputs, by name: `observation`, or `observation/ENTRY` for each entry; `first`, [] bool, whether the
  step begins an episode, which clears the state; `state/...`, the recurrent state; `noise/...`, random
  numbers, see `Agent.noise`. Outputs: `action`, and `next_state/...`, the state for the next step. The file's
  metadata has `environment`, `learner_step`, and `action_names`, a JSON list.

  Raises:
    ValueError: the agent takes no noise; an operation of the policy has no equivalent in ONNX; or the
      file exists, or cannot be written.
  """
  import jax2onnx

  if out.exists():
    raise ValueError(f'--out {out}: exists; give another name')
  config = policy.config.agent
  if hasattr(config, 'compute_dtype'):  # few runtimes compute in bfloat16
    config = dataclasses.replace(config, compute_dtype='float32')
  agent = policy.config.record.make(config, policy.observation_spec, policy.action_spec).agent
  make_noise = agent.noise
  if make_noise is None:
    raise ValueError(
      f'{policy.path}: its agent has no `noise`, so its random numbers cannot be an input'
    )
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
  arguments = {
    'observation': jax.tree.map(shape, policy.observation_spec),
    'first': jax.ShapeDtypeStruct((), bool),
    'state': jax.eval_shape(lambda: agent.initial_policy_state(1)),
    'noise': jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], make_noise(jax.random.key(0), 1))),
  }
  inputs = exported_lib.named(arguments)
  outputs = ['action', *exported_lib.named({'next_state': arguments['state']})]

  def act(*leaves: jax.Array) -> list[jax.Array]:
    given = jax.tree.unflatten(jax.tree.structure(arguments), leaves)
    state = policy_lib.State(given['state'], given['first'], jnp.zeros((), jnp.int32))
    noise = jax.tree.map(lambda x: x[None], given['noise'])
    specs = policy.observation_spec, policy.action_spec
    action, state = policy_lib.step(
      agent, specs, policy.params, noise, state, given['observation'], greedy=False
    )
    return [action, *jax.tree.leaves(state.memory)]

  with kernels.compiled_for('onnx'):
    traced = jax.make_jaxpr(act)(*inputs.values())
  logging.getLogger('onnx_ir').setLevel(logging.ERROR)  # it warns of what it infers
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')
      model = jax2onnx.to_onnx(
        lambda *leaves: _inlined(traced.jaxpr, traced.consts, leaves),
        list(inputs.values()),
        model_name='policy',
        opset=OPSET,
        input_names=list(inputs),
        output_names=outputs,
      )
    _check(model, jax.jit(act), make_noise, policy.observation_spec, arguments)
  except Exception as error:  # it may raise any error
    line = str(error).split('\n')[0]
    raise ValueError(f'{policy.path}: its policy cannot be written as ONNX ({line})') from None
  metadata = {
    'environment': policy.config.environment['name'],
    'learner_step': str(policy.learner_step),
    'action_names': json.dumps(policy.action_names),
  }
  for name, value in metadata.items():
    model.metadata_props.add(key=name, value=value)
  try:
    out.write_bytes(model.SerializeToString())
  except OSError as error:
    raise ValueError(f'--out {out}: cannot be written to ({error.strerror})') from None


def _check(model: Any, act: Any, make_noise: Any, spec: Any, like: Any) -> None:
  """Raises ValueError if some steps of an ONNX model differ from `act`; its converter has errors."""
  import onnxruntime

  options = onnxruntime.SessionOptions()
  options.log_severity_level = 4  # errors are raised, too
  session = onnxruntime.InferenceSession(model.SerializeToString(), options)
  state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like['state'])
  for step in range(3):
    noise = jax.tree.map(lambda x: x[0], make_noise(jax.random.key(step), 1))
    observation = jax.tree.map(lambda x: x.generate_value(), spec)
    given = {'observation': observation, 'first': step == 0, 'state': state, 'noise': noise}
    given = jax.tree.map(lambda x, like: np.asarray(x, like.dtype), given, like)
    expected = act(*jax.tree.leaves(given))
    found = session.run(None, exported_lib.named(given))
    for output, one, other in zip(session.get_outputs(), found, expected, strict=True):
      if not np.allclose(one, other, rtol=1e-4, atol=1e-4):
        raise ValueError(f'{output.name} of step {step} differs from the policy')
    state = jax.tree.unflatten(jax.tree.structure(state), found[1:])


def _inlined(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
  """Evaluates a jaxpr with only such primitives as jax2onnx converts: calls are inlined, loops unrolled."""
  values = dict(zip(jaxpr.constvars, consts, strict=True))
  values |= dict(zip(jaxpr.invars, arguments, strict=True))
  read = lambda x: x.val if isinstance(x, core.Literal) else values[x]
  for equation in jaxpr.eqns:
    primitive, params = equation.primitive, equation.params
    inputs = [read(x) for x in equation.invars]
    if primitive.name in CALLS:
      called = params['jaxpr' if 'jaxpr' in params else 'call_jaxpr']
      results = _inlined(called.jaxpr, called.consts, inputs)
    elif primitive.name == 'scan':
      results = _unrolled(equation, inputs)
    elif primitive.name == 'gather':
      results = [_gathered(params, *inputs)]
    elif primitive.name == 'optimization_barrier':
      results = inputs
    else:
      found = primitive.bind(*inputs, **params)
      results = found if primitive.multiple_results else [found]
    values |= dict(zip(equation.outvars, results, strict=True))
  return [read(x) for x in jaxpr.outvars]


def _unrolled(equation: Any, inputs: list[Any]) -> list[Any]:
  """The results of `jax.lax.scan` with all its steps one after another."""
  params, body = equation.params, equation.params['jaxpr'].jaxpr
  # Versions of JAX name the numbers of arrays differently: only arrays of all steps have one axis more.
  lacks_axis = lambda one, other: one.aval.shape != other.aval.shape
  carried = len(body.outvars) - sum(map(lacks_axis, body.outvars, equation.outvars))
  first_stacked = len(inputs) - sum(map(lacks_axis, body.invars, equation.invars))
  known, stacked = inputs[: first_stacked - carried], inputs[first_stacked:]
  carry = inputs[first_stacked - carried : first_stacked]
  outputs = []
  steps = range(params['length'])
  for index in reversed(steps) if params['reverse'] else steps:
    each = [*known, *carry, *(x[index] for x in stacked)]
    results = _inlined(body, params['jaxpr'].consts, each)
    carry = results[:carried]
    outputs.append(results[carried:])
  if params['reverse']:
    outputs.reverse()
  return [*carry, *(jnp.stack(each) for each in zip(*outputs, strict=True))]


def _gathered(params: dict[str, Any], operand: jax.Array, indices: jax.Array) -> jax.Array:
  """The result of `jax.lax.gather`, by indices into the flat operand: jax2onnx confuses axes of batches."""
  axes, sizes = params['dimension_numbers'], params['slice_sizes']
  strides = [math.prod(operand.shape[axis + 1 :]) for axis in range(operand.ndim)]
  begins, is_inside = jnp.zeros(indices.shape[:-1], jnp.int32), jnp.ones(indices.shape[:-1], bool)
  for at, axis in enumerate(axes.start_index_map):
    begin, last = indices[..., at].astype(jnp.int32), operand.shape[axis] - sizes[axis]
    is_inside &= (begin >= 0) & (begin <= last)
    begins += jnp.clip(begin, 0, last) * strides[axis]
  pairs = zip(axes.operand_batching_dims, axes.start_indices_batching_dims, strict=True)
  for axis, batch in pairs:
    begins += jax.lax.broadcasted_iota(jnp.int32, begins.shape, batch) * strides[axis]
  dropped = {*axes.collapsed_slice_dims, *axes.operand_batching_dims}
  window = [axis for axis in range(operand.ndim) if axis not in dropped]
  grid = np.indices([sizes[axis] for axis in window], np.int32)
  offsets = sum(
    (each * strides[axis] for each, axis in zip(grid, window, strict=True)), np.int32(0)
  )
  expanded = lambda x: x.reshape(*x.shape, *[1] * len(window))
  found = operand.reshape(-1)[expanded(begins) + offsets]
  if params['mode'] == jax.lax.GatherScatterMode.FILL_OR_DROP:
    is_real = jnp.issubdtype(operand.dtype, jnp.inexact)
    missing = jnp.nan if is_real else jnp.iinfo(operand.dtype).min
    fill = missing if params['fill_value'] is None else params['fill_value']
    found = jnp.where(expanded(is_inside), found, jnp.asarray(fill, operand.dtype))
  return jnp.moveaxis(found, range(begins.ndim, found.ndim), axes.offset_dims)

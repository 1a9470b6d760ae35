"""Exports the policy of a run, as safetensors and JSON or as ONNX."""

import os
import pathlib

from hephaestus.launch.interface import exported as exported_lib
from hephaestus.launch.interface import onnx_file
from hephaestus.launch.interface import policy as policy_lib


def export(
  path: str | os.PathLike[str],
  out: str | os.PathLike[str],
  checkpoint: str | int | None = None,
  *,
  format: str = 'safetensors',
  trust: bool = False,
) -> policy_lib.Policy:
  """Exports the policy of a run to a folder that `policy.load` can read, or to an ONNX file.

  Args:
    path: folder of the run.
    out: new or empty folder, for `params.safetensors` and `policy.json`; or path of a new ONNX file, see
      `onnx_file.write`.
    checkpoint: learner step of a checkpoint, or 'best'; None for the newest.
    format: 'safetensors' or 'onnx'.
    trust: as of `policy.load`.

  Raises:
    ValueError: as `policy.load`; or `out` is not empty, or cannot be written to; or the policy cannot be
      written in this format.
  """
  if format not in ('safetensors', 'onnx'):
    raise ValueError(f'format={format!r}: choose safetensors or onnx')
  if format == 'onnx':
    onnx_file.check_packages()  # loading takes seconds
  policy = policy_lib.load(path, checkpoint, trust=trust)
  if format == 'onnx':
    onnx_file.write(policy, pathlib.Path(out))
    return policy
  exported_lib.write(policy.exported(policy.params), pathlib.Path(out))
  return policy

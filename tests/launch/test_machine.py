"""The preset of a machine and what its JAX lacks, by drivers that are faked."""

import importlib.util
import pathlib
import subprocess
from importlib import metadata

import pytest

from hephaestus.launch import config, main
from hephaestus.launch.agents import machine, presets
from hephaestus.launch.run import request, validation

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def fake(monkeypatch, tmp_path):
  """Makes the drivers of a machine, and chooses what JAX has."""

  def make(*drivers, plugins=(), libtpu=False, chips=0):
    (tmp_path / 'dev').mkdir()
    for driver in drivers:
      (tmp_path / 'dev' / driver).touch()
    monkeypatch.setattr(machine, '_tpu_chips', lambda: chips)
    monkeypatch.setattr(metadata, 'entry_points', lambda group: list(plugins))
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: libtpu or None)
    monkeypatch.delenv('JAX_PLATFORMS', raising=False)
    return machine.find(tmp_path)

  return make


@pytest.mark.parametrize(
  ('drivers', 'has', 'preset', 'extra'),
  [
    ((), {}, 'laptop', None),
    (('nvidiactl',), {'plugins': ['xla_cuda12']}, 'gpu', None),
    (('nvidiactl',), {}, 'laptop', 'train EXTRAS=cuda'),
    (('accel0',), {'libtpu': True}, 'tpu-v4-8', None),
    (('accel3',), {}, 'laptop', 'train EXTRAS=tpu'),
    ((), {'chips': 4, 'libtpu': True}, 'tpu-v4-8', None),
    ((), {'plugins': ['rocm']}, 'laptop', None),
    (('nvidiactl',), {'chips': 4, 'libtpu': True}, 'tpu-v4-8', None),
  ],
)
def test_preset_is_of_what_the_installed_jax_can_use(fake, drivers, has, preset, extra):
  found = fake(*drivers, **has)
  assert found.preset == preset
  assert (found.lack is None) if extra is None else (extra in found.lack)


def test_chips_are_looked_for_as_jax_does(monkeypatch, tmp_path):
  from jax._src import hardware_utils

  (tmp_path / '0000:00:05.0').mkdir()
  (tmp_path / '0000:00:05.0' / 'vendor').write_text('0x1ae0\n')
  monkeypatch.setattr(machine, 'PCI', tmp_path)
  monkeypatch.setattr(hardware_utils, 'num_available_tpu_chips_and_device_id', lambda: (4, 'v5e'))
  assert machine._tpu_chips() == 4
  monkeypatch.delattr(hardware_utils, 'num_available_tpu_chips_and_device_id')
  assert machine._tpu_chips() == 0


def test_full_model_is_refused_on_a_cpu_with_the_remedies(fake, monkeypatch):
  found = fake('nvidiactl')
  large, small = presets.gpu('catch'), presets.laptop('catch')
  with pytest.raises(
    ValueError,
    match=r'accelerator=true: .* NVIDIA GPU, .*`cuda`.*accelerator=false.*--preset laptop',
  ):
    machine.check(large, found)
  with pytest.raises(ValueError, match='has no accelerator that is known; or train on the CPU'):
    machine.check(large, machine.Machine(None, is_usable=False))
  machine.check(small, found)
  machine.check(config.override(large, ['accelerator=false']), found)
  machine.check(large, machine.Machine('gpu', is_usable=True))
  machine.check(large, machine.Machine(None, is_usable=True))  # an accelerator of another maker
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  machine.check(large, found)


def test_train_with_a_gpu_that_jax_cannot_use_says_what_to_install(
  fake, monkeypatch, capsys, tmp_path
):
  found = fake('nvidiactl')
  monkeypatch.setattr(machine, 'find', lambda: found)
  call = lambda *words: main.run(main.parse(['hephaestus', 'train', *words]))
  assert call('--preset', 'gpu', '--run', str(tmp_path / 'run')) == 2
  assert 'accelerator=true: this machine has an NVIDIA GPU' in capsys.readouterr().err
  assert not (tmp_path / 'run').exists()
  # Without a preset it is the laptop's, on the CPU.
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: True)
  wanted = request.TrainRequest(fused=True)
  lack, _ = validation.validate_here(wanted, request.make_config(wanted))
  assert 'EXTRAS=cuda' in lack and 'on the CPU' in lack


@pytest.mark.parametrize(
  ('device', 'extra'), [('nvidiactl', 'cuda'), ('accel0', 'tpu'), ('null', None)]
)
def test_make_train_installs_the_extra_of_the_accelerator(tmp_path, device, extra):
  (tmp_path / device).touch()
  command = ['make', '--no-print-directory', '-n', 'train', f'DEVICES={tmp_path}', 'EXTRAS=envs']
  command += [f'VENV={tmp_path}/none', 'ARGS=--help']
  printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
  assert '--extra envs' in printed
  assert [name for name in ('cuda', 'tpu') if f'--extra {name}' in printed] == (
    [extra] if extra else []
  )

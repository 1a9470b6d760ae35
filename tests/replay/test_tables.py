import dataclasses

import jax
import numpy as np
import pytest

from hephaestus.replay import tables

Stratum, ReplayConfig = tables.Stratum, tables.ReplayConfig
FRONTIER = Stratum(name='frontier', max_size=100, share=0.5)
EPISODIC = Stratum(name='episodic', max_size=1000, share=0.5)


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'strata': ()}, 'replay.strata'),
    ({'strata': (FRONTIER, FRONTIER)}, "replay.strata=\\['frontier', 'frontier'\\].*own"),
    ({'strata': (dataclasses.replace(FRONTIER, name='params'), EPISODIC)}, 'params'),
    ({'strata': (dataclasses.replace(FRONTIER, share=0.0), EPISODIC)}, 'frontier.share=0.0'),
    ({'strata': (FRONTIER,)}, 'sum to 1, not 0.5'),
    ({'strata': (dataclasses.replace(FRONTIER, max_size=0), EPISODIC)}, 'frontier.max_size=0'),
    ({'strata': (dataclasses.replace(EPISODIC, read_once=True), FRONTIER)}, 'the only one'),
    (
      {'strata': (Stratum(name='on_policy', max_size=99, share=1.0, read_once=True),)},
      'replay_ratio=32.0: use 1',
    ),
    ({'replay_ratio': float('nan')}, 'replay.replay_ratio=nan'),
    ({'replay_ratio': 0.01}, 'replay.replay_ratio=0.01: use at least 0.1'),
    ({'warm_up': 0}, 'replay.warm_up=0'),
    ({'warm_up': 513}, 'replay.warm_up=513: use at most 512'),
    ({'max_in_flight': 0}, 'replay.max_in_flight=0'),
    ({'timeout_seconds': 0.1}, 'replay.timeout_seconds=0.1'),
    ({'port': 65535, 'num_shards': 2}, 'replay.port=65535: use 1 to 65534'),
    ({'num_shards': 0}, 'replay.num_shards=0: use at least 1'),
    ({'num_shards': 64}, 'replay.warm_up=32: use at least num_shards=64'),
    ({'num_shards': 600}, "replay.num_shards=600: use at most 512: 'frontier'"),
    (
      {
        'strata': (Stratum(name='on_policy', max_size=99, share=1.0, read_once=True),),
        'replay_ratio': 1.0,
        'num_shards': 2,
      },
      'replay.num_shards=2: use 1 with a stratum that is read once',
    ),
  ],
)
def test_invalid_config_is_rejected_by_field(changes, words):
  with pytest.raises(ValueError, match=words):
    ReplayConfig(**changes)


def test_batch_too_small_for_every_stratum_is_rejected():
  tables.check(ReplayConfig(), batch_size=2, insert_size=1)
  with pytest.raises(ValueError, match=r'episodic.*batch of 1'):
    tables.check(ReplayConfig(), batch_size=1, insert_size=1)
  with pytest.raises(ValueError, match='insert_size=0'):
    tables.check(ReplayConfig(), batch_size=2, insert_size=0)


def test_batches_are_split_by_largest_remainder():
  assert tables.batch_counts((FRONTIER, EPISODIC), 256) == {'frontier': 128, 'episodic': 128}
  assert tables.batch_counts((FRONTIER, EPISODIC), 5) == {'frontier': 3, 'episodic': 2}
  thirds = tuple(
    Stratum(name=n, max_size=9, share=s) for n, s in (('a', 0.6), ('b', 0.3), ('c', 0.1))
  )
  assert tables.batch_counts(thirds, 8) == {'a': 5, 'b': 2, 'c': 1}


def test_contiguous_slices_hold_the_mixture_too():
  share = 0.25
  strata = (
    dataclasses.replace(FRONTIER, share=share),
    dataclasses.replace(EPISODIC, share=1 - share),
  )
  slices = np.reshape(tables.batch_strata(strata, 32), (8, 4))
  np.testing.assert_array_equal((slices == 0).sum(1), np.full(8, 4 * share))


def test_only_the_largest_stratum_has_the_ratio_limiter(schema):
  config = ReplayConfig(strata=(EPISODIC, FRONTIER), replay_ratio=8.0)
  made = tables.make_tables(config, schema, batch_size=5, insert_size=16)
  infos = {table.name: table.info for table in made}
  assert list(infos) == ['episodic', 'frontier', 'params']
  limiter = infos['episodic'].rate_limiter_info
  assert limiter.samples_per_insert == pytest.approx(
    8.0 * 3 / 5
  )  # by the number of sequences, not by the share
  assert limiter.max_diff - limiter.min_diff >= 2 * (4.8 * 16 + 3 + config.max_in_flight) - 1e-9
  assert infos['frontier'].rate_limiter_info.max_diff > 1e300
  assert infos['params'].max_size == 1


def test_changed_setting_is_logged_after_a_restore(serve, tmp_path, unlimited):
  config = unlimited()
  server, _ = serve(config, directory=str(tmp_path))
  server.localhost_client().checkpoint()
  server.stop()
  changed = dataclasses.replace(config, warm_up=7)
  schema = {'value': jax.ShapeDtypeStruct((), np.float32)}
  made = tables.make_tables(changed, schema, batch_size=16, insert_size=4)
  wanted = {table.name: table.info for table in made}
  restored = tables.make_server(made, directory=str(tmp_path))
  changes = tables.changed_settings(wanted, restored.localhost_client().server_info())
  restored.stop()
  assert ('episodic', 'min_size_to_sample=1, not 7') in changes


def test_shards_divide_sizes_and_limits_of_one_server(schema):
  one = ReplayConfig(strata=(FRONTIER, EPISODIC), warm_up=30)
  made = {}
  for count in (1, 4):
    config = dataclasses.replace(one, num_shards=count)
    made[count] = {
      table.name: table.info
      for table in tables.make_tables(config, schema, batch_size=16, insert_size=8)
    }
  for name in ('frontier', 'episodic'):
    whole, part = made[1][name], made[4][name]
    assert 4 * part.max_size == whole.max_size
    assert 4 * (part.rate_limiter_info.min_size_to_sample - 1) < 30
    assert 4 * part.rate_limiter_info.min_size_to_sample >= 30
    assert part.rate_limiter_info.samples_per_insert == whole.rate_limiter_info.samples_per_insert

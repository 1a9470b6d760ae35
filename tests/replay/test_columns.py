import pickle

import jax
import ml_dtypes
import numpy as np
import pytest

from hephaestus.replay import columns

SCHEMA = {'b': jax.ShapeDtypeStruct((3,), ml_dtypes.bfloat16), 'a': jax.ShapeDtypeStruct((), bool)}


def test_tree_round_trips_and_bfloat16_is_stored_as_bits():
  layout = columns.Columns(SCHEMA)
  assert layout.paths == ('a', 'b')
  tree = {'a': np.array(True), 'b': np.array([1.5, -0.0, np.nan], ml_dtypes.bfloat16)}
  flat = layout.flatten(tree, batched=False)
  assert [array.dtype for array in flat] == [np.bool_, np.uint16]
  back = layout.unflatten(flat)
  assert back['b'].dtype == ml_dtypes.bfloat16 and back['b'].tobytes() == tree['b'].tobytes()


@pytest.mark.parametrize(
  'tree, words',
  [
    ({'a': np.zeros((2,), bool)}, 'schema'),
    ({'a': np.zeros((2,), bool), 'b': np.zeros((2, 3), np.float32)}, r'b is float32\[2, 3\]'),
    (
      {'a': np.zeros((2,), bool), 'b': np.zeros((1, 3), ml_dtypes.bfloat16)},
      r'b is bfloat16\[1, 3',
    ),
    ({'a': np.zeros((), bool), 'b': np.zeros((3,), ml_dtypes.bfloat16)}, 'a is a scalar'),
  ],
)
def test_mismatched_tree_is_rejected_by_path(tree, words):
  with pytest.raises(ValueError, match=words):
    columns.Columns(SCHEMA).flatten(tree, batched=True)


def test_digest_depends_on_paths_shapes_and_dtypes():
  leaf = jax.ShapeDtypeStruct((2,), np.float32)
  schemas = [
    {'a': leaf},
    {'b': leaf},
    {'a': jax.ShapeDtypeStruct((3,), np.float32)},
    {'a': jax.ShapeDtypeStruct((2,), np.int32)},
  ]
  assert len({columns.Columns(schema).digest.tobytes() for schema in schemas}) == 4


def test_typed_key_is_rejected_with_a_remedy():
  with pytest.raises(ValueError, match='key_data'):
    columns.Columns({'key': jax.eval_shape(lambda: jax.random.key(0))})


def test_only_counters_must_not_be_negative():
  names = ('version', 'actor_id', 'initial_state')
  layout = columns.Columns(dict.fromkeys(names, jax.ShapeDtypeStruct((), np.int32)))
  values = np.array([[0, -1, 3, 3], [0, 3, -1, 3], [-1, 3, 3, 3]], np.int32)
  flat = layout.flatten(dict(zip(names, values, strict=True)), batched=True)
  assert layout.out_of_range(flat) == {
    1: 'version is -1, out of the range of a counter',
    2: 'actor_id is -1, out of the range of a counter',
  }


def test_pickled_schema_has_the_same_columns():
  schema = {'x': jax.ShapeDtypeStruct((2,), np.float32)}
  pickled = pickle.loads(pickle.dumps(schema))
  assert columns.Columns(pickled).wire_dtypes == columns.Columns(schema).wire_dtypes

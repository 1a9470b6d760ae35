"""The example of docs/agents.md learns catch."""

import pathlib
import re
import types

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'agents.md'


def test_example_agent_learns_catch():
  (code,) = re.findall(r'```python\n(.*?)```', PAGE.read_text(), re.DOTALL)
  assert len(code.splitlines()) <= 60
  example = types.ModuleType('example')
  exec(compile(code, str(PAGE), 'exec'), example.__dict__)
  result = example.train()
  assert result.episode_length == 9
  assert result.episode_return > 0.95  # of a random policy it is negative

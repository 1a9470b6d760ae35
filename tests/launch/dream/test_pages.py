"""The page of a steered dream: its command, access control, a session over HTTP, and the page in a browser."""

import base64
import io
import re
import socket

import gymnasium
import jax
import numpy as np
import polling
import pytest
from PIL import Image

from hephaestus.actors import environments, videos
from hephaestus.agents.dreamer import modules
from hephaestus.launch import config, main
from hephaestus.launch.agents import presets
from hephaestus.launch.dream import pages
from hephaestus.launch.files import folder as folder_lib

SIDES = 'real', 'dream'


class Board(gymnasium.Env):
  """Environment of a user without a drawing: 3 x 4 numbers, one negative, and one that moves to the right."""

  observation_space = gymnasium.spaces.Box(-4.0, 4.0, (3, 4), np.float32)
  action_space = gymnasium.spaces.Discrete(2)

  def _board(self):
    board = np.zeros((3, 4), np.float32)
    board[0, 3], board[1, self.column] = -2, 4
    return board

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self.column = 0
    return self._board(), {}

  def step(self, action):
    self.column += int(action)
    return self._board(), 0.0, self.column == 3, False, {}


def board():
  return gymnasium.wrappers.TimeLimit(Board(), 20)


def run(*arguments):
  return main.run(main.parse(['hephaestus', 'dream', *map(str, arguments)]))


def test_bad_input_is_one_line(tmp_path, capsys):
  folder_lib.open_run(tmp_path / 'run', config.override(presets.ppo_laptop('catch'), []))
  for words in ((tmp_path / 'run',), (tmp_path / 'none',), ('catch', '--seed', -1)):
    assert run(*words) == 2
  printed = capsys.readouterr()
  ppo, unknown, seed = printed.err.splitlines()
  assert f'{tmp_path}/run: its agent, ppo, has no world model that dreams' in ppo
  assert 'is not the folder of a run or of an exported policy' in unknown
  assert '--seed -1' in seed and not printed.out


def test_requests_of_others_are_refused(serve):
  served = serve()
  own = f'127.0.0.1:{served.port}'
  assert served.ask('')[0] == 200
  for path, content in (('', None), ('dream.js', None), ('api/sessions', {})):
    status, text, _ = served.ask(path, content, token='wrong')
    assert status == 403 and b'open the address that hephaestus dream printed' in text
    assert served.ask(path, content, Host='evil.example')[0] == 403
    for origin in ('http://evil.example', 'null', f'https://{own}'):
      assert served.ask(path, content, Origin=origin)[0] == 403
  assert served.ask('api/sessions', {}, Origin=f'http://{own}')[0] == 200
  for method in ('PUT', 'DELETE', 'PATCH', 'OPTIONS'):
    assert served.ask('api/sessions', method=method)[0] == 405
  assert served.ask('api/sessions')[0] == 405  # a GET begins nothing


def test_page_needs_nothing_but_its_own_server(serve):
  served = serve()
  _, html, headers = served.ask('')
  assert "default-src 'none'" in headers['Content-Security-Policy']
  assert '//' not in html.decode() and 'style=' not in html.decode()
  for name in re.findall(r'(?:src|href)="([^"]+)"', html.decode()):
    assert served.ask(name)[0] == 200, name


def test_session_over_http(serve):
  served = serve()
  begun = served.json('api/sessions', {})
  place = f'api/sessions/{begun["session"]}'
  assert begun['about']['actions'] == {'parts': [['left', 'stay', 'right']], 'single': True}
  assert [step['index'] for step in begun['steps']] == [0]
  first = served.json(f'{place}/act', {'at': 0, 'action': 2, 'member': 1})['step']
  branch = served.json(f'{place}/act', {'at': 0, 'action': 0, 'member': None, 'sampled': False})
  assert branch['step']['branch'] == 1 and branch['repeats']
  anew = served.json(f'{place}/begin_dream', {'at': first['index']})['step']
  known = served.json(place)
  assert known['steps'] == [begun['steps'][0], first, branch['step'], anew]
  assert served.json('api/sessions', {})['steps'] == begun['steps']  # of another tab
  episode = served.json(f'{place}/begin_episode', {})['step']
  assert served.json(place)['steps'] == [episode]


@pytest.mark.parametrize(
  ('path', 'content', 'status', 'text'),
  [
    ('act', {'at': 0, 'action': 9}, 400, 'action=9'),
    ('act', {'at': 0, 'wish': 1}, 400, 'wish'),
    ('act', b'{', 400, 'not JSON'),
    ('act', b'{"a":' * 10_000, 400, 'not JSON'),
    ('act', b'{"at": 0, "action": 1' + b'0' * 400 + b'}', 400, 'a whole number from'),
    ('act', [0], 400, 'no JSON object'),
    ('act', b' ' * 70_000, 413, '65,536 bytes'),
    ('begin_dream', {'at': 5}, 400, 'at=5'),
    ('fly', {}, 404, 'Not Found'),
  ],
)  # fmt: skip
def test_wrong_request_is_answered_by_one_line(serve, path, content, status, text):
  served = serve()
  name = served.json('api/sessions', {})['session']
  found, answer, _ = served.ask(f'api/sessions/{name}/{path}', content)
  assert found == status and text in answer.decode() and b'\n' not in answer
  assert len(served.json(f'api/sessions/{name}')['steps']) == 1


def test_request_that_is_broken_off_raises_nothing(serve, capfd):
  served = serve()
  name = served.json('api/sessions', {})['session']
  head = (
    f'POST /secret/api/sessions/{name}/act HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n'
  )
  for _ in range(3):
    with socket.create_connection(('127.0.0.1', served.port)) as peer:
      peer.sendall(head.encode() + b'{')
  polling.until(lambda: served.ask('')[0] == 200, 'an answer')
  assert capfd.readouterr().err == ''


def test_session_that_was_used_longest_ago_is_closed_for_another(serve, monkeypatch):
  monkeypatch.setattr(pages, 'MOST_SESSIONS', 2)
  served = serve()
  one, other = (served.json('api/sessions', {})['session'] for _ in range(2))
  served.json(f'api/sessions/{one}')
  served.json('api/sessions', {})
  assert served.ask(f'api/sessions/{one}')[0] == 200
  status, text, _ = served.ask(f'api/sessions/{other}/act', {'at': 0})
  assert status == 404 and text == b'this session was closed; load the page again'


class Shown:
  """The page in a browser."""

  def __init__(self, browser, served):
    self.page = browser.new_page(viewport={'width': 1280, 'height': 900})
    self.page.set_default_timeout(1000 * polling.PATIENCE)
    self.complaints = []
    self.page.on('console', lambda message: self.complaints.append(message.text))
    self.page.on('pageerror', lambda error: self.complaints.append(str(error)))
    self.page.goto(f'http://127.0.0.1:{served.port}/secret/')
    self.page.wait_for_selector('main:not([hidden])')

  def at(self):
    return int(self.page.evaluate('document.body.dataset.at'))

  def pixels(self, name):
    """The pixels of a canvas by its ID, [H, W, 4] uint8."""
    canvas = self.page.evaluate('(name) => document.getElementById(name).toDataURL()', name)
    with io.BytesIO(base64.b64decode(canvas.partition(',')[2])) as file:
      return np.asarray(Image.open(file).convert('RGBA'))

  def press(self, key, at):
    """Presses a key, after which the page shows a step."""
    self.page.keyboard.press(key)
    polling.until(lambda: self.at() == at, f'step {at} after {key}, not {self.at()}')


def test_keys_steer_both_sides(serve, browser):
  served = serve()
  shown = Shown(browser, served)
  page = shown.page
  assert page.inner_text('h1') == 'Dream of catch'
  keys = 'ArrowLeft', '3', 'Backspace', 'ArrowLeft', 'b', 'Enter'
  for key, at in zip(keys, (1, 2, 1, 3, 4, 5), strict=True):
    shown.press(key, at)
  (session,) = served.sessions._open.values()
  steps = [node.shown for node in session.nodes]
  assert [step['action'] for step in steps[:5]] == [None, 0, 2, 0, 0]
  assert [step['parent'] for step in steps] == [None, 0, 1, 1, 1, 4]
  assert page.locator('#branches .branch').count() == 3
  assert page.locator('#strip li').count() == 4 and 'the episode ends here' in page.inner_text(
    '.real'
  )
  assert '1 imagined step' in page.inner_text('.dream')
  page.click('#branches .branch:first-child button:last-of-type')
  assert shown.at() == 2
  page.reload()  # the session and the step stay
  page.wait_for_selector('main:not([hidden])')
  assert shown.at() == 2 and page.locator('#branches .branch').count() == 3
  shown.press('n', 0)
  assert page.locator('#strip li').count() == 1 and shown.complaints == []
  assert not page.is_visible('.slots')
  page.close()


def test_keys_pressed_while_the_server_works_are_kept_in_order(serve, browser):
  served = serve()
  shown = Shown(browser, served)
  (session,) = served.sessions._open.values()
  with session._lock:
    for key in ('ArrowLeft', '2', 'Backspace', 'ArrowRight'):
      shown.page.keyboard.press(key)
    shown.page.wait_for_selector('text=working', state='visible')
    assert shown.at() == 0
  polling.until(lambda: shown.at() == 3, 'the last of the steps')
  assert [node.shown['action'] for node in session.nodes] == [None, 0, 1, 2]
  assert [node.shown['parent'] for node in session.nodes] == [None, 0, 1, 1]
  polling.until(lambda: not shown.page.is_visible('text=working'), 'the end of the work')
  assert shown.complaints == []
  shown.page.close()


def test_map_of_a_flat_board_has_its_proportions(serve, browser):
  shown = Shown(browser, serve())
  columns = '([leaf, image]) => columnsOf(leaf, image)'
  board = {'shape': [50], 'size': 50}
  assert shown.page.evaluate(columns, [board, {'width': 80, 'height': 160}]) == 5
  assert (
    shown.page.evaluate(columns, [{'shape': [74], 'size': 74}, {'width': 8, 'height': 8}]) == 13
  )
  assert shown.page.evaluate(columns, [board, None]) == 10
  shown.page.close()


def test_masks_of_the_slots_of_each_step_tint_both_pictures(serve, browser):
  served = serve('sprites')
  shown = Shown(browser, served)
  for at, key in enumerate(('ArrowRight', 'ArrowDown'), 1):
    shown.press(key, at)
  for name in ('difference', 'heat'):
    shown.page.uncheck(f'#show-{name}')
  (session,) = served.sessions._open.values()
  model, world = session._programs._steering.dreamer.model, modules.world(session._programs.params)
  paint = jax.jit(lambda latent: model.rssm.paint(world, latent)[1][0])
  start, touching, beyond = session.nodes
  assert touching.real.timestep.last()  # the last real picture stays
  masks = []
  for node, real in ((beyond, touching), (touching, touching), (start, start)):
    if node is not beyond:
      shown.press(',', node.shown['index'])
    masks.append([np.asarray(paint(belief.latent)) for belief in (real.belief, node.dream)])
    for side, each in zip(SIDES, masks[-1], strict=True):
      frame, found = (shown.pixels(f'{side}-{name}')[..., :3] for name in ('picture', 'slots'))
      np.testing.assert_allclose(found, videos.with_masks(frame, each), atol=1)
  change = np.abs(np.diff(masks, axis=0)).max(axis=(2, 3, 4))
  assert (change[1] > 0.05).all() and change[0, 1] > 0.05  # another step has other masks
  assert shown.complaints == []
  shown.page.close()


def test_page_says_how_long_dreams_can_be_trusted(serve, browser, monkeypatch):
  monkeypatch.setattr(pages, 'MEASURED_STEPS', 1)
  served = serve()
  shown = Shown(browser, served)
  text = lambda: shown.page.inner_text('#trust')
  polling.until(lambda: text().startswith('Dreams can'), 'the sentence')
  assert served.json('api/trust') == {'trust': text()}
  assert re.search(r'after 1 step, \d+% of them have a wrong number', text())
  assert shown.complaints == []
  shown.page.close()


def test_policy_plays_until_the_episode_ends(serve, browser):
  shown = Shown(browser, serve())
  shown.page.select_option('#speed', '30')
  shown.page.keyboard.press(' ')
  polling.until(lambda: shown.at() == 3, 'the end of the episode')
  polling.until(lambda: shown.page.inner_text('#play') == 'Play policy', 'the pause')
  assert shown.at() == 3 and shown.complaints == []
  shown.page.close()


def test_actions_of_numbers_have_sliders(serve, browser):
  shown = Shown(browser, serve('gymnasium/Pendulum-v1'))
  shown.page.fill('.slider input', '1.5')
  shown.page.click('#send')
  polling.until(lambda: shown.at() == 1, 'the step')
  (text,) = [
    cells for cells in shown.page.locator('#heads tr').all_inner_texts() if 'reward' in cells
  ]
  assert re.search(r'reward\s+-\d', text)
  assert shown.page.locator('#numbers tr').count() == 4 and shown.complaints == []
  assert all(shown.pixels(f'{side}-picture').shape[1] == 600 for side in SIDES)  # bars
  shown.page.close()


def test_numbers_of_two_axes_are_a_heat_map_on_both_sides(serve, browser):
  served = serve(environments.register(board))
  shown = Shown(browser, served)
  shown.press('2', 1)
  (session,) = served.sessions._open.values()
  start, moved = [node.shown for node in session.nodes]
  cells = lambda values: np.reshape(values, (3, 4)) / most
  most = max(np.abs(step[side]['numbers']).max() for step in (start, moved) for side in SIDES)
  centre = lambda side: shown.pixels(f'{side}-picture')[20::40, 20::40]
  alpha = lambda shares: 255 * np.minimum(1, np.abs(shares))
  for name in ('heat', 'difference'):
    shown.page.uncheck(f'#show-{name}')
  for step in (moved, start):
    if step is start:
      shown.press(',', 0)
    for side in SIDES:
      shares, colours = cells(step[side]['numbers']), centre(side)
      assert colours.shape == (3, 4, 4)
      np.testing.assert_allclose(colours[..., 3], alpha(shares), atol=2)
      is_blue, is_clear = colours[..., :3].argmax(-1) == 2, np.abs(shares) > 0.1
      np.testing.assert_array_equal(is_blue[is_clear], shares[is_clear] < 0)
  shown.press('.', 1)
  shown.page.check('#show-difference')
  differs = np.abs(cells(moved['dream']['numbers']) - cells(moved['real']['numbers'])) > 48 / 255
  assert differs.any() and not differs.all()
  for side in SIDES:
    lines = shown.pixels(f'{side}-picture')[::40, ::40]
    np.testing.assert_array_equal((lines[..., :3] == [230, 60, 110]).all(-1), differs)
  assert shown.page.locator('#strip canvas').count() == 4 and shown.complaints == []
  shown.page.close()

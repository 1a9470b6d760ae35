"""Makes docs/images/dream.png and docs/images/steered.gif: the page of `hephaestus dream` with a session.

  python docs/site/steered.py

Steers agents of the package in a browser. Needs the extra `browser` and Debian's package chromium.
"""

import contextlib
import io
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from PIL import Image
from playwright import sync_api

IMAGES = pathlib.Path(__file__).resolve().parents[1] / 'images'
HEPHAESTUS = pathlib.Path(sys.executable).parent / 'hephaestus'
WIDTH, HEIGHT = 1280, 1270
# By agent of the package: the policy acts, the user goes back and acts otherwise, and the dream begins again.
POLICY, BACK = ['Enter'], [',']
KEYS = [
  *7 * POLICY, *3 * BACK, 'ArrowUp', 'ArrowUp', *3 * POLICY, 'b', *4 * POLICY,
]  # fmt: skip
PATIENCE = 120.0  # seconds
COLOURS = 48  # of the GIF


@contextlib.contextmanager
def page_of(agent: str) -> Iterator[Any]:
  """The page of a new session on an agent of the package."""
  command = [str(HEPHAESTUS), 'dream', agent]
  with (
    subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served,
    sync_api.sync_playwright() as playwright,
  ):
    try:
      assert served.stdout is not None
      found = re.match(r'http://\S+', served.stdout.readline())
      assert found is not None
      browser = playwright.chromium.launch(
        executable_path='/usr/bin/chromium', args=['--no-sandbox']
      )
      page = browser.new_page(viewport={'width': WIDTH, 'height': HEIGHT})
      page.set_default_timeout(1000 * PATIENCE)
      page.goto(found.group())
      page.wait_for_selector('main:not([hidden])')
      yield page
      browser.close()
    finally:
      served.send_signal(signal.SIGINT)


def press(page: Any, key: str) -> None:
  """Presses a key, and waits until the page shows another step."""
  before = page.evaluate('document.body.dataset.at')
  page.keyboard.press(key)
  deadline = time.monotonic() + PATIENCE
  while page.evaluate('document.body.dataset.at') == before and time.monotonic() < deadline:
    time.sleep(0.02)


def main() -> None:
  frames = []
  with page_of('grid_world') as page:
    for index in range(len(KEYS) + 1):
      if index:
        press(page, KEYS[index - 1])
      with io.BytesIO(page.screenshot()) as file:
        shown = Image.open(file).convert('RGB')
      if KEYS[index : index + 1] == ['b']:  # where the branch differs most from reality
        picture = shown.quantize(256, dither=Image.Dither.NONE)
        picture.save(IMAGES / 'dream.png', optimize=True)
      small = shown.resize((WIDTH // 2, HEIGHT // 2), Image.Resampling.LANCZOS)
      frames.append(small.quantize(COLOURS, dither=Image.Dither.NONE))
  frames[0].save(
    IMAGES / 'steered.gif', save_all=True, append_images=frames[1:], duration=700, loop=0
  )
  for name in ('dream.png', 'steered.gif'):
    print(f'{IMAGES / name}: {(IMAGES / name).stat().st_size / 1e3:.0f} kB')


if __name__ == '__main__':
  main()

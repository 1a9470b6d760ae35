"""Frames of a game: the board, the player's numbers, and the programs."""

import jax
import numpy as np

from hephaestus.actors.environments.hackmatrix import state as state_lib
from hephaestus.actors.environments.hackmatrix.state import SIZE, State

CELL = 40  # pixels
PANEL = 96  # pixels right of the board
BACKGROUND, LINE, INK = (250, 250, 247), (214, 214, 208), (30, 30, 34)
FAINT = (232, 232, 226)
KIND_COLOURS = ((213, 94, 0), (170, 40, 90), (0, 114, 178), (120, 90, 160))
BLOCK_COLOURS = (BACKGROUND, (86, 180, 233), (240, 200, 66), (150, 150, 150))
EXIT_COLOUR, CREDIT_COLOUR, ENERGY_COLOUR = (0, 158, 115), (190, 150, 0), (0, 130, 160)
# fmt: off
DIGITS = (  # three bits a row, five rows
  (7, 5, 5, 5, 7), (2, 6, 2, 2, 7), (7, 1, 7, 4, 7), (7, 1, 3, 1, 7), (5, 5, 7, 1, 1),
  (7, 4, 7, 1, 7), (7, 4, 7, 5, 7), (7, 1, 2, 2, 2), (7, 5, 7, 5, 7), (7, 5, 7, 1, 7),
)
# fmt: on


def frame(state: State) -> np.ndarray:
  """Draws one game, [240, 336, 3] uint8, with row 0 at the bottom.

  Blocks are tiles with their points or the program's number, dimmed when siphoned. Discs are
  enemies, by kind, with their HP; rings are transmissions with their countdown. The player is a
  dark diamond, the exit a green frame. The panel on the right has, from the top, stage, HP, score,
  credits, energy and data siphons, then the 28 actions as tiles; programs are dark when owned.
  """
  state = jax.tree.map(np.asarray, state)
  pixels = np.full((SIZE * CELL, SIZE * CELL + PANEL, 3), BACKGROUND, np.uint8)
  for row in range(SIZE):
    for col in range(SIZE):
      _draw_cell(_cell(pixels, row, col), state, row, col)
  for i in np.flatnonzero(state.transmissions.active):
    transmissions = state.transmissions
    cell = _cell(pixels, transmissions.row[i], transmissions.col[i])
    distance = _distance()
    cell[(distance > 13) & (distance < 16)] = INK
    _write(cell, 4, 4, int(transmissions.turns[i]), INK)
  for i in np.flatnonzero(state.enemies.active):
    slots = state.enemies
    cell = _cell(pixels, slots.row[i], slots.col[i])
    cell[_distance() < 11] = KIND_COLOURS[slots.kind[i]]
    _write(cell, 15, 17, int(slots.hp[i]), BACKGROUND)
  cell = _cell(pixels, state.row, state.col)
  down, right = np.indices((CELL, CELL)) - (CELL - 1) / 2
  cell[np.abs(down) + np.abs(right) < 8] = INK
  _draw_panel(pixels[:, SIZE * CELL :], state)
  return pixels


def _cell(pixels: np.ndarray, row: int, col: int) -> np.ndarray:
  top = (SIZE - 1 - int(row)) * CELL
  return pixels[top : top + CELL, int(col) * CELL : (int(col) + 1) * CELL]


def _distance() -> np.ndarray:
  """Distance of each pixel from the centre of a cell, [CELL, CELL]."""
  return np.hypot(*(np.indices((CELL, CELL)) - (CELL - 1) / 2))


def _draw_cell(cell: np.ndarray, state: State, row: int, col: int) -> None:
  cell[0], cell[:, 0] = LINE, LINE
  kind = state.block_type[row, col]
  if kind != state_lib.NO_BLOCK:
    colour = np.array(BLOCK_COLOURS[kind])
    if state.block_siphoned[row, col]:
      colour = (colour + 3 * np.array(BACKGROUND)) // 4
    cell[3:-2, 3:-2] = colour
    grid = state.block_points if kind == state_lib.DATA else state.block_program
    _write(cell, 28, 6, int(grid[row, col]), INK)
  if state.siphon_center[row, col]:
    cell[-5:-2, 3:-2] = INK
  if state.cell_data_siphon[row, col]:
    cell[14:26, 14:26] = EXIT_COLOUR
  _write(cell, 28, 6, int(state.cell_credits[row, col]) or None, CREDIT_COLOUR)
  _write(cell, 28, 26, int(state.cell_energy[row, col]) or None, ENERGY_COLOUR)
  if (row, col) == (state.exit_row, state.exit_col):
    frame = np.ones((CELL, CELL), bool)
    frame[4:-3, 4:-3] = False
    cell[frame] = EXIT_COLOUR


def _draw_panel(panel: np.ndarray, state: State) -> None:
  numbers = (
    (state.stage, INK),
    (state.hp, KIND_COLOURS[0]),
    (state.score, INK),
    (state.credits, CREDIT_COLOUR),
    (state.energy, ENERGY_COLOUR),
    (state.data_siphons, EXIT_COLOUR),
  )
  for i, (number, colour) in enumerate(numbers):
    _write(panel, 8 + 18 * (i // 2), 10 + 44 * (i % 2), int(number), colour)
  for action in range(state_lib.NUM_ACTIONS):
    top, left = 66 + 24 * (action // 4), 6 + 22 * (action % 4)
    program = action - state_lib.FIRST_PROGRAM
    has_action = program < 0 or bool(state.owned[program])
    panel[top : top + 14, left : left + 18] = INK if has_action else FAINT
    _write(panel, top + 2, left + 2, action, BACKGROUND if has_action else LINE)


def _write(
  pixels: np.ndarray, top: int, left: int, number: int | None, colour: tuple[int, int, int]
) -> None:
  """Writes a number in digits of 6 by 10 pixels; digits beyond the edge are left out."""
  if number is None:
    return
  for i, digit in enumerate(str(abs(number))):
    rows = np.array(DIGITS[int(digit)])[:, None] >> np.array([2, 1, 0]) & 1 == 1
    shape = np.kron(rows, np.ones((2, 2), bool))
    place = pixels[top : top + 10, left + 8 * i : left + 8 * i + 6]
    if place.shape[:2] == shape.shape:
      place[shape] = colour

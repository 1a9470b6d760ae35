// Steers one session of the page's server: fetches its steps once each, and draws them.
'use strict';

const SPEEDS = [1, 2, 4, 8, 15, 30];
const PAUSE = 3000;  // milliseconds
const LEAST_EVIDENCE = .01;  // of the episodic memory, from which on what it recalled is shown
const FEW = 24;  // numbers that are shown as a table; more are shown as maps
const ARROWS = {up: 'ArrowUp', down: 'ArrowDown', left: 'ArrowLeft', right: 'ArrowRight'};
const SIGNS = {ArrowUp: '↑', ArrowDown: '↓', ArrowLeft: '←', ArrowRight: '→'};
const SIDES = ['real', 'dream'];
const DIFFERENT = 48 / 255;  // least difference of a share that is marked, as of a colour in a picture
const RGB = {real: [60, 160, 120], dream: [184, 88, 143], difference: [230, 60, 110], heat: [150, 60, 255], negative: [86, 180, 233]};
const steps = [];  // by index, as the server sent them
let session = null;
let about = null;
let at = 0;  // index of the step that is shown
let path = [0];  // indices of the steps of its branch
let moves = Promise.resolve();  // of the moves that were asked for
let waiting = 0;  // how many of them are not done yet
let measuring = null;  // timer
let playing = false;
let largest = [];  // of the numbers of an observation so far, by position

function number(value) {
  if (value === null || value === undefined) return '–';
  const size = Math.abs(value);
  if (size >= 1e5) return value.toExponential(1);
  if (size < 5e-4) return '0';
  return String(+value.toPrecision(3));
}

function say(text) {
  find('message').textContent = text;
  find('message').hidden = !text;
  find('message').className = '';
}

// Requests

async function ask(place, content) {
  let answer;
  try {
    const options = content === undefined ? {} : {method: 'POST', body: JSON.stringify(content)};
    answer = await fetch(`api/${place}`, options);
  } catch {
    throw new Error('The server does not answer; is its command still running?');
  }
  if (!answer.ok) throw new Error(answer.status === 500 ? 'The environment or the model failed; see the terminal.' : await answer.text());
  return answer.json();
}

// Makes moves one after another, in the order of keys and clicks; after 0.3 s the page says that it waits.
function inTurn(task) {
  waiting += 1;
  clearTimeout(measuring);
  document.body.classList.add('busy');
  moves = moves.then(task).finally(() => {
    waiting -= 1;
    measureLater();
    document.body.classList.toggle('busy', waiting > 0);
  });
  return moves;
}

// How long dreams can be trusted: in a pause, since it occupies the server for some seconds.
function measureLater() {
  clearTimeout(measuring);
  if (!find('trust').dataset.known) measuring = setTimeout(() => {
    find('trust').dataset.known = 'soon';
    ask('trust').then(({trust}) => { find('trust').textContent = trust; }).catch(() => {});
  }, PAUSE);
}

// What the user asks for ends the play.
function order(task) {
  pause();
  return inTurn(task);
}

async function move(what, content) {
  try {
    const {step, repeats} = await ask(`sessions/${session}/${what}`, content);
    if (what === 'begin_episode') { steps.length = 0; path = []; largest = []; }
    keep(step);
    await bitmaps(step);
    say(repeats ? '' : 'This environment does not repeat itself after the same seed and actions: since you went back, reality is another episode.');
    go(step.index);
    return true;
  } catch (error) {
    say(error.message);
    pause();
    return false;
  }
}

function act(action) {
  const member = find('member').value;
  return move('act', {
    at, action, reads: find('reads').value, member: member === '' ? null : +member, sampled: find('sampled').value !== '',
  });
}

function keep(step) {
  steps[step.index] = step;
  for (const side of SIDES) {
    step[side]?.numbers.forEach((value, place) => { largest[place] = Math.max(largest[place] || 1e-6, Math.abs(value)); });
  }
}

async function play() {
  playing = true;
  find('play').textContent = 'Pause';
  find('play').setAttribute('aria-pressed', 'true');
  while (playing) {
    const began = performance.now();
    if (steps[at].last || steps[at].real === null || !(await inTurn(() => act(null))) || !playing) break;
    await new Promise((resolve) => { setTimeout(resolve, Math.max(0, 1000 / +find('speed').value - performance.now() + began)); });
  }
  pause();
}

function pause() {
  playing = false;
  find('play').textContent = 'Play policy';
  find('play').setAttribute('aria-pressed', 'false');
}

// Steps and branches

function pathTo(index) {
  const found = [];
  for (let place = index; place !== null; place = steps[place].parent) found.push(place);
  return found.reverse();
}

function tip(branch) {
  return steps.findLast((step) => step.branch === branch).index;
}

function go(index) {
  at = index;
  if (!path.includes(index)) path = pathTo(tip(steps[index].branch));
  sessionStorage.setItem('at', String(index));
  draw();
}

function along(distance) {
  const place = path.indexOf(at) + distance;
  if (place >= 0 && place < path.length) go(path[place]);
}

// Pictures

async function bitmap(text) {
  if (!text) return null;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return createImageBitmap(new Blob([bytes], {type: 'image/png'}));
}

async function bitmaps(step) {
  if (step.drawn) return step.drawn;
  const [real, dream, heat, difference, ...slots] = await Promise.all(
    [step.real?.frame, step.dream.frame, step.dream.heat, step.difference, step.real?.slots, step.dream.slots].map(bitmap));
  step.drawn = {real, dream, heat, difference, slots};
  return step.drawn;
}

function paint(canvas, image, ...over) {
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.classList.toggle('wide', image.width > 1.25 * image.height);
  const context = canvas.getContext('2d');
  [image, ...over].forEach((layer) => layer && context.drawImage(layer, 0, 0));
}

// Numbers of a leaf of both sides, as shares of the largest one so far.
function sharesOf(leaf, {real, dream}) {
  const part = (values) => values.slice(leaf.begin, leaf.begin + leaf.size);
  const most = Math.max(1e-6, ...part(largest));
  const shares = (values) => part(values).map((value) => value / most);
  return {
    real: real && shares(real.numbers), dream: shares(dream.numbers),
    difference: real && shares(dream.numbers.map((value, place) => value - real.numbers[place])),
    heat: shares(dream.disagreement).map((share) => 2 * share),
  };
}

// The layers of both pictures: of the server, or heat maps of the first leaf with two axes; none for bars.
function layersOf(step) {
  const leaf = about.leaves.find(({shape}) => shape.length === 2 && Math.min(...shape) > 1);
  if (step.drawn.dream || !leaf) return step.drawn;
  const shares = sharesOf(leaf, step);
  const cell = Math.max(4, Math.round(160 / Math.max(...leaf.shape)));
  const map = (kind) => shares[kind] && heatMap(shares[kind], leaf.shape[1], RGB[kind], cell);
  return {
    ...step.drawn, real: step.drawn.real || map('real'), dream: map('dream'), heat: map('heat'),
    difference: step.drawn.real ? null : shares.difference && outlines(shares.difference, leaf.shape, cell),
  };
}

// Lines around the cells of shares that differ from 0, with cells of so many pixels a side.
function outlines(shares, [rows, columns], cell) {
  const canvas = make('canvas', {width: cell * columns, height: cell * rows});
  const context = canvas.getContext('2d');
  const width = Math.round(cell / 8) || 1;
  context.strokeStyle = colour('mark');
  context.lineWidth = width;
  shares.forEach((share, place) => {
    if (Math.abs(share) <= DIFFERENT) return;
    context.strokeRect(cell * (place % columns) + width / 2, cell * Math.floor(place / columns) + width / 2, cell - width, cell - width);
  });
  return canvas;
}

// Bars from 0 to each number, with lines of one standard deviation of the members to both sides.
function paintNumbers(canvas, side, numbers, disagreement) {
  const count = Math.min(numbers.length, FEW);
  canvas.width = 600;
  canvas.height = Math.max(160, 30 * count);
  canvas.classList.add('wide');
  const context = canvas.getContext('2d');
  const height = canvas.height / Math.max(1, count);
  context.font = '15px system-ui, sans-serif';
  context.textBaseline = 'middle';
  const middle = 330;
  const scale = 190;
  for (let row = 0; row < count; row += 1) {
    const y = height * row;
    const share = numbers[row] / (largest[row] || 1);
    context.fillStyle = colour('faint');
    context.fillText(nameOf(row), 4, y + height / 2);
    context.fillRect(middle, y, 1, height);
    context.fillStyle = colour(side);
    context.fillRect(middle, y + height * .22, share * scale, height * .56);
    if (disagreement) {
      const width = Math.min(scale, disagreement[row] / (largest[row] || 1) * scale);
      context.fillStyle = colour('heat');
      context.fillRect(middle + share * scale - width, y + height / 2 - 2, 2 * width, 4);
    }
    context.fillStyle = colour('text');
    context.textAlign = 'right';
    context.fillText(number(numbers[row]), 596, y + height / 2);
    context.textAlign = 'left';
  }
}

function nameOf(position) {
  const {name, size, begin} = about.leaves.find((leaf) => position < leaf.begin + leaf.size);
  return size === 1 ? name : `${name} ${position - begin}`;
}

function drawSides(step) {
  const {dream, heat, difference} = layersOf(step);
  const marks = find('show-difference').checked ? difference : null;
  const hot = find('show-heat').checked ? heat : null;
  const over = step.real === null;
  document.querySelector('.side.real').classList.toggle('over', over);
  // Beyond the end the last real picture stays.
  const shown = over ? steps[path.filter((index) => steps[index].real && steps[index].step <= step.step).at(-1)] : step;
  const {real} = layersOf(shown);
  if (real) paint(find('real-picture'), real, over ? null : marks);
  else paintNumbers(find('real-picture'), 'real', shown.real.numbers);
  if (dream) paint(find('dream-picture'), dream, hot, marks);
  else paintNumbers(find('dream-picture'), 'dream', step.dream.numbers, find('show-heat').checked ? step.dream.disagreement : null);
  SIDES.forEach((side, which) => {
    const masks = (side === 'real' ? shown : step).drawn.slots[which];
    document.querySelector(`.side.${side} .slots`).hidden = !masks;
    if (masks) paint(find(`${side}-slots`), masks);
  });
  const imagined = step.step - step.begins;
  find('real-state').textContent = over ? 'the episode has ended' : step.last ? 'the episode ends here' : `step ${step.step}`;
  find('dream-state').textContent = imagined ? `${imagined} imagined step${imagined > 1 ? 's' : ''}` : 'begins here: reconstruction of the posterior';
}

// The panel

function labelOf(action) {
  if (action === null) return '';
  const parts = about.actions.parts;
  if (!parts) return action.map((value) => number(value)).join(' ');
  return [action].flat().map((choice, part) => parts[part][choice]).join(' ');
}

function keyOf(choice) {
  const word = about.actions.parts[0][choice].toLowerCase().split(/[^a-z]+/).at(-1);
  return ARROWS[word] || (choice < 9 ? String(choice + 1) : '');
}

function makeActions() {
  const {parts, low, high, single} = about.actions;
  const rows = [];
  if (parts) {
    let position = 0;
    parts.forEach((names, part) => names.forEach((name, choice) => {
      const key = single ? keyOf(choice) : '';
      const button = make('button', {'data-part': String(part), 'data-choice': String(choice)}, name, make('kbd', {}, SIGNS[key] || key));
      button.addEventListener('click', () => (single ? order(() => act(choice)) : choose(part, choice)));
      const bars = make('div', {class: 'bars'});
      for (const side of SIDES) bars.append(make('b', {class: side}), make('span'));
      bars.append(make('em'));
      rows.push(make('div', {class: 'action', 'data-position': String(position)}, button, bars));
      position += 1;
    }));
  } else {
    low.forEach((least, index) => {
      const slider = make('input', {type: 'range', min: String(least), max: String(high[index]), step: String((high[index] - least) / 200), value: String((least + high[index]) / 2), 'aria-label': `action ${index}`});
      const value = make('output', {}, number(+slider.value));
      slider.addEventListener('input', () => { value.textContent = number(+slider.value); });
      rows.push(make('label', {class: 'slider'}, String(index), slider, value));
    });
  }
  if (!single) {
    const button = make('button', {class: 'main', id: 'send', title: 'key a'}, 'Act');
    button.addEventListener('click', sendAction);
    rows.push(button);
  }
  find('actions').replaceChildren(...rows);
}

const chosen = new Map();  // of several choices at once, by part

function choose(part, choice) {
  chosen.set(part, choice);
  draw();
}

function sendAction() {
  if (about.actions.single) return;
  const sliders = [...document.querySelectorAll('.slider input')];
  const action = about.actions.parts ? about.actions.parts.map((_, part) => chosen.get(part) || 0) : sliders.map((slider) => +slider.value);
  order(() => act(action));
}

function drawActions(step) {
  const mask = step.real ? step.real.mask : step.dream.mask;
  const next = path[path.indexOf(at) + 1];
  const taken = next === undefined ? null : steps[next].action;
  for (const row of document.querySelectorAll('.action')) {
    const position = +row.dataset.position;
    const button = row.querySelector('button');
    const {part, choice} = button.dataset;
    button.disabled = mask !== null && !mask[position];
    const picked = about.actions.single ? taken : chosen.get(+part);
    row.classList.toggle('taken', picked === +choice);
    const [realBar, realText, dreamBar, dreamText, memory] = row.querySelector('.bars').children;
    const recalled = step.real?.recalled;
    memory.textContent = recalled?.evidence[position] >= LEAST_EVIDENCE ? `recalled ${number(recalled.value[position])}, evidence ${number(recalled.evidence[position])}` : '';
    for (const [bar, text, side] of [[realBar, realText, step.real], [dreamBar, dreamText, step.dream]]) {
      const share = side ? side.policy[position] : 0;
      bar.style.width = `${100 * share}%`;
      text.textContent = side ? share.toFixed(2) : '';
    }
  }
}

function drawHeads(step) {
  const rows = [
    ['reward', 'reward'], ['return', 'return'], ['P(continue)', 'continues'],
    ...Object.keys(step.dream.values).map((name) => [`value of ${name}`, name]), ['novelty', 'novelty'],
  ];
  const value = (side, key, label) => (side === null ? null : label.startsWith('value of ') ? side.values[key] : side[key]);
  if (!about.actions.parts) rows.push(['policy’s action', 'policy']);
  if (!about.actions.parts && steps[0].real.recalled) rows.push(['recalled value', 'recalled']);
  const shown = (side, key, label) => {
    let found = value(side, key, label);
    if (key === 'recalled') found = found?.evidence[0] >= LEAST_EVIDENCE ? found.value : null;
    return Array.isArray(found) ? found.map(number).join(' ') : number(found);
  };
  find('heads').replaceChildren(
    make('tr', {}, make('th'), make('th', {}, 'reality'), make('th', {}, 'dream')),
    ...rows.map(([label, key]) => make('tr', {}, make('td', {}, label), ...SIDES.map((side) => make('td', {}, shown(step[side], key, label))))));
}

// Bars of the vitals on both sides, with a line at each set-point.
function drawVitals(step) {
  find('vitals').replaceChildren(...about.vitals.map(({name, position, set_point: point, most}) => make('div', {class: 'action'}, make('span', {}, name), make('div', {class: 'bars'}, ...SIDES.flatMap((side) => {
    const found = step[side] ? step[side].numbers[position] : null;
    const bar = make('b', {class: side});
    bar.style.width = `${Math.max(0, Math.min(100, 100 * (found || 0) / most))}%`;
    return [bar, make('span', {}, number(found))];
  }), make('i', {title: `set-point ${number(point)}`})))));
  about.vitals.forEach(({set_point: point, most}, index) => {
    find('vitals').children[index].querySelector('i').style.left = `calc((100% - 36px) * ${Math.min(1, point / most)})`;
  });
}

// Below

function thumbnail(image) {
  const canvas = make('canvas');
  if (!image) { canvas.width = canvas.height = 1; return canvas; }
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.getContext('2d').drawImage(image, 0, 0);
  return canvas;
}

function drawStrip() {
  const known = new Map([...find('strip').children].map((item) => [item.dataset.index, item]));
  const items = path.map((index) => {
    const step = steps[index];
    const old = known.get(String(index));
    if (old && old.step === step) return old;
    const button = make('button', {}, make('span', {}, labelOf(step.action) || 'start'));
    const {real, dream} = layersOf(step);
    if (dream || real) button.append(thumbnail(real), thumbnail(dream));
    button.append(make('span', {}, String(step.step)));
    button.className = `${step.begins === step.step ? 'begins' : ''} ${step.last ? 'last' : ''}`;
    button.addEventListener('click', () => order(() => go(index)));
    const item = make('li', {'data-index': String(index)}, button);
    item.step = step;
    return item;
  });
  find('strip').replaceChildren(...items);
  items.forEach((item, place) => {
    const here = path[place] === at;
    item.firstChild.toggleAttribute('aria-current', here);
    const frame = find('strip').parentElement;
    if (here && (item.offsetLeft < frame.scrollLeft + 60 || item.offsetLeft + item.offsetWidth > frame.scrollLeft + frame.clientWidth)) {
      frame.scrollLeft = item.offsetLeft - frame.clientWidth / 2;
    }
  });
}

function drawBranches() {
  const count = Math.max(...steps.map((step) => step.branch)) + 1;
  find('branches-section').hidden = count < 2;
  if (count < 2) return;
  const rows = [];
  for (let branch = 0; branch < count; branch += 1) {
    const own = steps.filter((step) => step.branch === branch);
    const begin = own[0];
    const row = make('div', {class: 'branch'});
    row.classList.toggle('chosen', own.some((step) => step.index === path.at(-1)));
    row.append(make('span', {}, begin.parent === null ? 'first branch' : begin.begins === begin.step ? `dream from step ${begin.step}` : `${labelOf(begin.action)} at step ${begin.step - 1}`));
    const dots = own.map((step) => {
      const dot = make('button', {title: `step ${step.step} ${labelOf(step.action)}`});
      dot.classList.toggle('on', path.includes(step.index));
      dot.classList.toggle('begins', step.begins === step.step);
      dot.toggleAttribute('aria-current', step.index === at);
      dot.addEventListener('click', () => order(() => { path = pathTo(tip(branch)); go(step.index); }));
      return dot;
    });
    dots[0].style.marginLeft = `${16 * begin.step}px`;
    const last = own.at(-1);
    row.append(...dots, make('em', {}, `return ${number(last.real?.return ?? null)}, dreamt ${number(last.dream.return)}`));
    rows.push(row);
  }
  find('branches').replaceChildren(...rows);
}

const CHARTS = [
  ['return', (side) => side.return], ['reward', (side) => side.reward], ['value', (side) => side.values.task],
  ['P(continue)', (side) => side.continues], ['novelty', (side) => side.novelty],
];

function drawCharts() {
  if (!find('charts').children.length) {
    find('charts').append(...CHARTS.map(([title]) => make('figure', {class: 'card'}, make('figcaption', {}, make('b', {}, title), make('span')), make('canvas'))));
  }
  CHARTS.forEach(([, read], index) => {
    const figure = find('charts').children[index];
    const canvas = figure.querySelector('canvas');
    const ratio = devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = canvas.clientHeight * ratio;
    const context = canvas.getContext('2d');
    context.scale(ratio, ratio);
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const curves = SIDES.map((side) => path.map((place) => (steps[place][side] ? read(steps[place][side]) : null)));
    const known = curves.flat().filter((value) => value !== null);
    const [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 0];
    const begin = 58;  // right of the labels
    const x = (place) => begin + 6 + (width - begin - 12) * place / Math.max(8, path.length - 1);
    const y = (value) => height / 2 - (height - 16) * (high - low > 1e-3 ? (value - low) / (high - low) - .5 : 0);
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    context.font = '11px system-ui, sans-serif';
    for (const mark of high - low > 1e-3 ? [low, high] : [low]) {
      context.fillStyle = colour('faint');
      context.fillText(number(mark), begin - 6, y(mark));
      context.fillStyle = colour('line');
      context.fillRect(begin, y(mark), width - begin, 1);
    }
    context.fillRect(x(path.indexOf(at)), 0, 1, height);
    curves.forEach((values, which) => {
      context.strokeStyle = context.fillStyle = colour(SIDES[which]);
      context.lineWidth = which ? 1.5 : 4;  // the dream lies over reality
      context.globalAlpha = which ? 1 : .6;
      context.beginPath();
      values.forEach((value, place) => value !== null && context.lineTo(x(place), y(value)));
      context.stroke();
      values.forEach((value, place) => { if (value !== null && values.length < 60) { context.beginPath(); context.arc(x(place), y(value), which ? 2 : 4, 0, 7); context.fill(); } });
    });
    context.globalAlpha = 1;
    const here = path.indexOf(at);
    figure.querySelector('span').replaceChildren(
      make('span', {class: 'of-real'}, number(curves[0][here])), ' ', make('span', {class: 'of-dream'}, number(curves[1][here])));
  });
}

// Columns of a leaf: those of its shape; of a flat board, those of its picture.
function columnsOf({shape, size}, image) {
  if (shape.length === 2) return shape[1];
  const columns = image ? Math.round(Math.sqrt(size * image.width / image.height)) : 0;
  return size % columns === 0 ? columns : Math.ceil(Math.sqrt(2 * size));
}

// A cell for each share, by its sign and magnitude.
function heatMap(values, columns, rgb, cell = 1) {
  const rows = Math.ceil(values.length / columns);
  const canvas = make('canvas');
  canvas.width = cell * columns;
  canvas.height = cell * rows;
  canvas.classList.toggle('tall', rows > columns);
  const context = canvas.getContext('2d');
  values.forEach((share, place) => {
    context.fillStyle = `rgb(${share < 0 ? RGB.negative : rgb})`;
    context.globalAlpha = Math.min(1, Math.abs(share));
    context.fillRect(cell * (place % columns), cell * Math.floor(place / columns), cell, cell);
  });
  return canvas;
}

function drawNumbers(step) {
  const total = step.dream.numbers.length;
  find('numbers-section').hidden = !total;
  const real = step.real?.numbers;
  const {numbers: dream, disagreement} = step.dream;
  if (total <= FEW) {
    const rows = dream.map((value, place) => [nameOf(place), number(real?.[place]), number(value), real ? number(value - real[place]) : '–', number(disagreement[place])]);
    const table = make('table', {}, make('tr', {}, ...['number', 'reality', 'dream', 'dream − reality', 'disagreement of the members'].map((text) => make('th', {}, text))),
      ...rows.map((cells) => make('tr', {}, ...cells.map((cell) => make('td', {}, cell)))));
    find('numbers').replaceChildren(make('div', {class: 'card scroll'}, table));
    return;
  }
  const titles = {real: 'reality', dream: 'dream', difference: 'dream − reality', heat: 'disagreement of the members'};
  find('numbers').replaceChildren(...about.leaves.map((leaf) => {
    const shares = sharesOf(leaf, step);
    const figures = Object.keys(titles).filter((kind) => shares[kind]).map((kind) =>
      make('figure', {}, make('figcaption', {}, titles[kind]), heatMap(shares[kind], columnsOf(leaf, step.drawn.dream), RGB[kind])));
    return make('div', {class: 'card'}, make('h3', {}, leaf.name, make('small', {}, ` ${leaf.shape.join(' × ')}`)), make('div', {class: 'maps'}, ...figures));
  }));
}

function draw() {
  const step = steps[at];
  drawSides(step);
  drawActions(step);
  drawVitals(step);
  drawHeads(step);
  drawStrip();
  drawBranches();
  drawCharts();
  drawNumbers(step);
  const place = path.indexOf(at);
  find('place').textContent = `step ${step.step} of ${path.length - 1}`;
  find('first').disabled = find('back').disabled = place === 0;
  find('forward').disabled = find('end').disabled = place === path.length - 1;
  find('dream').disabled = step.real === null || step.begins === step.step;
  document.body.dataset.at = String(at);
}

// Begin

function fillTools() {
  find('environment').textContent = about.environment;
  find('agent').textContent = `${about.path}, update ${about.learner_step.toLocaleString('en')}, ${about.greedy ? 'greedy' : 'sampled'} actions`;
  document.title = `Dream of ${about.environment}`;
  find('speed').append(...SPEEDS.map((speed) => make('option', {selected: speed === 8}, String(speed))));
  for (let member = 0; member < about.members; member += 1) find('member').append(make('option', {value: String(member)}, `member ${member + 1}`));
  if (about.members > 1) find('member').append(make('option', {value: ''}, `the mean of all ${about.members}`));
  const keys = about.actions.single ? 'arrows, numbers: act' : 'a: act';
  find('keys').textContent = `${keys} · Enter: policy acts · Space: play · Backspace: back · b: begin the dream · n: new episode`;
}

const clicks = {
  episode: () => order(() => move('begin_episode', {})), dream: () => order(() => move('begin_dream', {at})),
  first: () => order(() => go(path[0])), end: () => order(() => go(path.at(-1))),
  back: () => order(() => along(-1)), forward: () => order(() => along(1)),
  once: () => order(() => act(null)), play: () => (playing ? pause() : play()),
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches('select, input[type=range]')) return;
  const keys = {
    ' ': clicks.play, a: sendAction, b: clicks.dream, n: clicks.episode, Enter: clicks.once, Home: clicks.first, End: clicks.end,
    Backspace: clicks.back, ',': clicks.back, '.': clicks.forward,
  };
  const button = [...document.querySelectorAll('.action button')].find((each) => about.actions.single && (keyOf(+each.dataset.choice) === event.key || String(+each.dataset.choice + 1) === event.key));
  if (!button && !keys[event.key]) return;
  event.preventDefault();
  if (event.repeat && waiting) return;  // a key that is held does not run ahead
  if (button) button.click(); else keys[event.key]();
}

async function begin() {
  let found = null;
  session = sessionStorage.getItem('session');
  try {
    if (session) found = await ask(`sessions/${session}`).catch(() => null);
    const known = found !== null;
    found = found || await ask('sessions', {});
    session = found.session;
    about = found.about;
    let begin = 0;
    for (const leaf of about.leaves) {
      leaf.begin = begin;  // of its numbers among all
      leaf.size = leaf.shape.reduce((one, other) => one * other, 1);
      begin += leaf.size;
    }
    sessionStorage.setItem('session', session);
    found.steps.forEach(keep);
    await Promise.all(steps.map(bitmaps));
    const last = +sessionStorage.getItem('at');
    find('message').hidden = true;
    document.querySelector('main').hidden = false;
    fillTools();
    makeActions();
    path = [];
    go(known && last < steps.length ? last : 0);
  } catch (error) {
    say(error.message);
    return;
  }
  measureLater();
  for (const [id, click] of Object.entries(clicks)) find(id).addEventListener('click', click);
  for (const id of ['show-difference', 'show-heat']) find(id).addEventListener('change', draw);
  document.addEventListener('keydown', onKey);
  addEventListener('resize', draw);
}

begin();

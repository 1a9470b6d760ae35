// Draws the numbers of runs: a report has them inside, the dashboard's page gets them by GET requests.
'use strict';

const PERIOD = 5000;  // milliseconds between two requests; each costs the run about 50 ms of a core
const COLOURS = 7;
const stored = JSON.parse(find('stored').textContent);  // of a report; else null
const axis = find('axis');
const environment = find('environment');
const hidden = new Set();  // groups that the legend switches off
const charts = new Map();  // by key
let runs = null;  // the newest answers
let curves = null;

function faded(hex, share) {
  return hex + Math.round(255 * share).toString(16).padStart(2, '0');
}

function number(value) {
  if (value === null || value === undefined) return '–';
  const size = Math.abs(value);
  if (size >= 1e5 || (Number.isInteger(value) && size >= 1e3)) return Math.round(value).toLocaleString('en');
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(+value.toPrecision(3));
}

function short(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
    if (size >= unit) return `${+(value / unit).toPrecision(4)}${letter}`;
  }
  return String(+value.toPrecision(4));
}

// Labels of the ticks of an axis, all in one form: 0.0015, 0.001 and 0.0005, but 7.5e-5, 5e-5 and 2.5e-5.
function marked(marks) {
  const tiny = Math.max(...marks.map(Math.abs)) < 1e-3;
  return marks.map((mark) => (tiny && mark !== 0 ? mark.toExponential(2).replace(/\.?0*e/, 'e') : short(mark)));
}

const moment = (seconds) => new Date(1000 * seconds).toLocaleString('sv');

function ago(seconds) {
  if (seconds === null) return '–';
  if (stored) return moment(seconds);
  const since = Math.max(0, Date.now() / 1000 - seconds);
  if (since < 90) return `${Math.round(since)} s ago`;
  if (since < 5400) return `${Math.round(since / 60)} min ago`;
  if (since < 172800) return `${Math.round(since / 3600)} h ago`;
  return `${Math.round(since / 86400)} days ago`;
}

function table(element, headings, rows, left = 1) {
  const side = (index) => (index < left ? 'left' : '');
  const head = make('thead', {}, make('tr', {}, ...headings.map((text, index) => make('th', {class: side(index)}, text))));
  const body = make('tbody', {}, ...rows.map((cells) => make('tr', {}, ...cells.map((cell, index) =>
    make('td', {class: side(index), 'data-name': headings[index]}, cell)))));
  element.replaceChildren(head, body);
}

// Curves

// '' is the choice of all environments.
const isChosen = (group) => !environment.value || group.world === environment.value;
const nameOf = (group) => (environment.value || environment.parentElement.hidden ? group.label : `${group.world} ${group.label}`);

function drawn(key) {
  return (curves.groups || []).map((group, index) => [index, group[key]]).filter(([index, curve]) =>
    curve && !hidden.has(index) && isChosen(runs.groups[index]));
}

function parts(curve) {
  return [[curve.x, curve.mean], [curve.x, curve.low], [curve.x, curve.high], ...curve.seeds.map((seed) => [seed.x, seed.mean])];
}

function aligned(found) {
  // uPlot needs one axis for all curves; a curve is null where it has no value.
  const all = found.flatMap(([, curve]) => parts(curve));
  const places = [...new Set(all.flatMap(([x]) => x))].sort((a, b) => a - b);
  const at = new Map(places.map((place, index) => [place, index]));
  return [places, ...all.map(([x, values]) => {
    const column = new Array(places.length).fill(null);
    x.forEach((place, index) => { column[at.get(place)] = values[index]; });
    return column;
  })];
}

function options(width, height, series, bands, onCursor) {
  const line = {stroke: colour('grid'), width: 1};
  const values = (plot, marks) => marked(marks);
  const common = {stroke: colour('faint'), grid: line, ticks: {...line, size: 4}, font: '12px system-ui, sans-serif'};
  return {
    width, height, series, bands,
    legend: {show: false},
    scales: {x: {time: false}},
    cursor: {y: false, drag: {x: true, y: false}, points: {size: 7}, sync: {key: 'steps', setSeries: false}},
    axes: [
      {...common, size: 26, space: 48, values, label: runs.x_axes[axis.value], labelFont: common.font, labelSize: 16},
      {...common, size: (plot, texts) => 14 + 7 * Math.max(4, ...(texts || []).map((text) => text.length)), space: 34, gap: 4, values},
    ],
    padding: [8, 20, 0, 0],
    hooks: {setCursor: [onCursor]},
  };
}

function before(column, index) {
  const isCursor = index !== null && index !== undefined;
  if (isCursor && column.slice(index).every((value) => value === null)) return null;  // the line has ended before
  let place = isCursor ? index : column.length - 1;
  while (place >= 0 && column[place] === null) place -= 1;
  return place < 0 ? null : column[place];
}

class Chart {
  constructor(title, height) {
    this.values = make('span', {class: 'values'});
    this.place = make('div');
    this.element = make('figure', {class: 'card'}, make('figcaption', {}, make('b', {}, title), this.values), this.place);
    this.height = height;
    this.shape = '';
    this.lines = [];
    this.plot = null;
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.place);
  }

  // lines: [{colour index, name, number of seeds}], data: x, then mean, low, high and the seeds of each.
  draw(lines, data) {
    this.lines = lines;
    this.data = data;
    const shape = JSON.stringify([lines, data[0].length < 2, axis.value]);
    if (this.plot && shape === this.shape) {
      this.plot.setData(data);
    } else {
      this.shape = shape;
      this.remake();
    }
    this.tell(null);
  }

  remake() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    const width = this.place.clientWidth;
    if (!width || !this.data) return;
    const few = this.data[0].length < 2;
    const series = [{}];
    this.means = [];
    const bands = [];
    for (const line of this.lines) {
      const stroke = colour(`c${line.colour % COLOURS}`);
      const hiddenLine = {stroke: 'transparent', width: 0, spanGaps: true, points: {show: false}};
      this.means.push(series.length);
      series.push({stroke, width: 2, spanGaps: true, points: {show: few, size: 7, fill: stroke}, dash: line.colour < COLOURS ? [] : [6, 4]});
      series.push(hiddenLine, {...hiddenLine});
      bands.push({series: [series.length - 1, series.length - 2], fill: faded(stroke, 0.16)});
      for (let seed = 0; seed < line.seeds; seed += 1) {
        series.push({stroke: faded(stroke, 0.45), width: 1, spanGaps: true, points: {show: few, size: 5, fill: stroke}});
      }
    }
    const onCursor = (plot) => this.tell(plot.cursor.idx);
    this.plot = new uPlot(options(width, this.height, series, bands, onCursor), this.data, this.place);
    this.tell(null);
  }

  resize() {
    const width = this.place.clientWidth;
    if (!this.plot) this.remake();
    else if (width && width !== this.plot.width) this.plot.setSize({width, height: this.height});
  }

  tell(index) {
    if (!this.plot) return;
    const at = index === null || index === undefined ? [] : [make('i', {}, `at ${number(this.data[0][index])}`)];
    const shown = this.lines.length > 4 && !at.length ? [] : this.lines;
    this.values.replaceChildren(...at, ...shown.map((line, place) =>
      make('span', {class: `g${line.colour % COLOURS}`, title: line.name}, number(before(this.data[this.means[place]], index)))));
  }
}

function drawCurves() {
  const sections = new Map();
  const isShown = (key) => curves.groups.some((group, index) => group[key] && isChosen(runs.groups[index]));
  for (const chart of curves.charts.filter(({key}) => isShown(key))) {
    const found = drawn(chart.key);
    if (!charts.has(chart.key)) {
      charts.set(chart.key, new Chart(chart.title, chart.section === 'Learning' ? 256 : 186));
      charts.get(chart.key).element.dataset.key = chart.key;
    }
    const made = charts.get(chart.key);
    const data = aligned(found);
    made.element.dataset.points = String(data[0].length);
    made.draw(found.map(([index, curve]) => ({colour: index, name: nameOf(runs.groups[index]), seeds: curve.seeds.length})), data);
    if (!sections.has(chart.section)) sections.set(chart.section, {elements: [], zeros: []});
    const section = sections.get(chart.section);
    // A metric that is always 0 is listed and not drawn.
    const zero = found.length && found.every(([, curve]) => curve.low.every((value) => value === 0) && curve.high.every((value) => value === 0));
    if (zero) section.zeros.push(chart.title); else section.elements.push(made.element);
  }
  for (const section of document.querySelectorAll('#first section, #sections section')) section.hidden = true;
  for (const [name, {elements, zeros}] of sections) {
    const id = `section-${name.toLowerCase().replace(/ /g, '-')}`;
    let section = find(id);
    if (!section) {
      const grid = make('div', {class: name === 'Learning' ? 'grid wide' : 'grid'});
      section = make('section', {id}, make('h2', {}, name), grid, make('p', {class: 'zeros'}));
      find(name === 'Learning' ? 'first' : 'sections').append(section);
    }
    section.hidden = false;
    section.lastChild.textContent = zeros.length ? `0 throughout: ${zeros.join(', ')}` : '';
    const grid = section.children[1];
    if (grid.children.length !== elements.length || elements.some((each, index) => grid.children[index] !== each)) {
      grid.replaceChildren(...elements);
    }
  }
  drawLinks();
}

function drawLinks() {
  const shown = [...document.querySelectorAll('main section:not([hidden])')];
  if (shown.length === find('links').children.length) return;  // keeps the focus
  find('links').replaceChildren(...shown.map((section) => make('a', {href: `#${section.id}`}, section.querySelector('h2').textContent)));
}

function drawLegend() {
  const shown = runs.groups.map((group, index) => [group, index]).filter(([group]) => isChosen(group));
  find('legend').replaceChildren(...(shown.length > 1 ? shown : []).map(([group, index]) => {
    const button = make('button', {type: 'button', 'aria-pressed': String(!hidden.has(index))},
      make('span', {class: `dot g${index % COLOURS}`}), `${nameOf(group)}${group.seeds > 1 ? ` · ${group.seeds} seeds` : ''}`);
    button.addEventListener('click', () => {
      if (hidden.has(index)) hidden.delete(index); else hidden.add(index);
      drawLegend();
      if (curves) drawCurves();
    });
    return button;
  }));
}

// Runs, nodes, videos and configs

function drawRuns() {
  const rows = runs.runs.map((run) => [
    make('span', {}, make('span', {class: `dot g${run.group % COLOURS}`}), ` ${run.name}`),
    run.world.replace('/', '/\u200b'), run.agent, String(run.seed),
    make('span', {class: `state ${run.state.split(' ')[0]}`}, run.state),
    number(run.environment_step), number(run.max_environment_steps), number(run.learner_step),
    number(run.score === null ? run.episode_return : run.score), ago(run.written),
  ]);
  find('runs').hidden = !rows.length;
  const element = document.querySelector('#runs table');
  const headings = ['run', 'environment', 'agent', 'seed', 'state', 'steps', 'of', 'updates', 'score or return', 'last metrics'];
  table(element, headings, rows, 5);
  runs.runs.forEach((run, index) => {
    for (const text of run.messages) {
      const row = make('tr', {}, make('td', {class: 'message left', colspan: String(headings.length)}, `${run.name}: ${text}`));
      element.tBodies[0].append(row);
    }
  });
}

function drawNodes() {
  const shown = runs.runs.filter((run) => run.nodes.length || run.events.length);
  find('nodes').hidden = !shown.length;
  find('node-cards').replaceChildren(...shown.map((run) => {
    const list = make('table');
    table(list, ['node', 'state', 'restarts', 'last metrics'], run.nodes.map((node) => [
      node.name,
      make('span', {class: node.style}, node.state),
      make('span', {class: node.restarts ? 'waits' : ''}, number(node.restarts)), ago(node.wrote),
    ]), 2);
    const events = run.events.slice().reverse().map((event) => make('li', {},
      make('time', {}, moment(event.time)), event.text));
    return make('div', {class: 'card scroll'}, make('h3', {}, run.name), ...(run.nodes.length ? [list] : []), ...(events.length ? [make('ul', {}, ...events)] : []));
  }));
}

// Room below the picture, so that the controls do not cover its lower end with the weights of a dream.
function makeRoom(video) {
  const width = video.videoWidth;
  const height = video.videoHeight + Math.max(0.25 * video.videoHeight, 0.26 * width);
  video.style.aspectRatio = `${width} / ${height}`;
  video.style.width = `min(100%, ${Math.round(400 * width / height)}px)`;
}

function picture(video, still) {
  if (video.reason) return make('p', {class: 'note'}, video.reason);
  if (video.name.endsWith('.gif')) return make('img', {src: video.source, alt: video.name});
  return make('video', {src: video.source, controls: true, muted: true, loop: true, autoplay: !still, playsinline: '', preload: 'auto'});
}

let videosShown = '';
function drawVideos() {
  const videos = runs.runs.flatMap((run) => run.videos.map((video) => ({run, video})));
  const names = JSON.stringify(videos.map(({video}) => video));
  if (names === videosShown) return;
  videosShown = names;
  const still = matchMedia('(prefers-reduced-motion: reduce)').matches;
  const dreams = videos.some(({video}) => video.dream);
  find('videos-note').hidden = !dreams;
  find('videos').hidden = stored && !videos.length;
  const cards = videos.map(({run, video}) => make('figure', {class: 'card'},
    make('h3', {}, run.name, ' ', make('small', {}, (video.update === null ? video.name : `update ${number(video.update)}`) + (video.dream ? ', with its dream' : ''))),
    picture(video, still),
  ));
  for (const video of cards.flatMap((card) => [...card.querySelectorAll('video')])) {
    video.addEventListener('loadedmetadata', () => makeRoom(video));
  }
  find('video-cards').replaceChildren(...(cards.length ? cards : [make('p', {class: 'card note'},
    'No video yet. A run writes one every evaluator.video_period seconds and at its end; hephaestus watch RUN --output FILE writes more.')]));
}

function drawConfigs() {
  const keys = Object.keys(runs.differences);
  find('configs').hidden = runs.runs.length < 2;
  const show = (value) => (typeof value === 'string' ? value : JSON.stringify(value));
  const element = document.querySelector('#configs table');
  const values = (key) => runs.differences[key].map((value) => show(value ?? null));
  if (keys.length > runs.runs.length) {  // a page has more room for rows than for columns
    table(element, ['', ...runs.runs.map((run) => run.name)], keys.map((key) => [key, ...values(key)]));
    return;
  }
  const rows = runs.runs.map((run, index) => [
    make('span', {}, make('span', {class: `dot g${run.group % COLOURS}`}), ` ${run.name}`),
    ...keys.map((key) => values(key)[index]),
  ]);
  table(element, ['run', ...keys], rows);
}

// Requests

function say(text) {
  find('message').hidden = !text;
  find('message').textContent = text;
}

async function ask(path) {
  const answer = await fetch(path);
  if (answer.status === 204) return null;
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
const seen = () => new Promise((done) => {
  if (!document.hidden) done();
  else document.addEventListener('visibilitychange', () => done(), {once: true});
});

async function repeat(step) {
  for (;;) {
    await seen();
    let pause = PERIOD;
    try {
      pause = (await step()) ?? PERIOD;
    } catch (error) {
      say(error instanceof TypeError ? 'The dashboard does not answer: is its command still running? Retrying.' : error.message);
    }
    await wait(pause);
  }
}

function begin() {
  axis.replaceChildren(...Object.entries(runs.x_axes).map(([value, name]) => make('option', {value}, name)));
  axis.disabled = axis.options.length < 2;
  const environments = [...new Set(runs.groups.map((group) => group.world))];
  document.title = `${(stored ? environments : runs.runs.map((run) => run.name)).join(', ')} · Hephaestus`;
  environment.replaceChildren(make('option', {value: ''}, 'all'), ...environments.map((value) => make('option', {value}, value)));
  environment.parentElement.hidden = environments.length < 2;
  drawLegend();
  drawConfigs();
}

function drawAllRuns() {
  drawRuns();
  drawNodes();
  drawVideos();
  drawLinks();
}

async function stepRuns() {
  const first = runs === null;
  runs = await ask('api/runs');
  if (first) begin();
  drawAllRuns();
  if (!reading) say('');
}

let reading = false;
async function stepCurves() {
  if (!runs) return 50;
  const known = curves && curves.axis === axis.value ? curves.version : '';
  const answer = await ask(`api/curves?x=${encodeURIComponent(axis.value)}&known=${known}`);
  if (!answer) return PERIOD;
  reading = answer.groups === null;
  if (reading) {
    say(`Reading: ${number(answer.unread / 1e6)} MB left`);
    return 20;
  }
  say('');
  curves = {...answer, axis: axis.value};
  drawCurves();
  return PERIOD;
}

axis.addEventListener('change', stepCurves);
environment.addEventListener('change', () => {
  drawLegend();
  if (curves) drawCurves();
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  for (const chart of charts.values()) chart.remake();
});
if (stored) {
  runs = stored;
  curves = stored.curves;
  find('made').textContent = stored.made;
  begin();
  drawAllRuns();
  drawCurves();
} else {
  repeat(stepRuns);
  repeat(stepCurves);
}

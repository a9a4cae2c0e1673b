// The viewer's page: list of slides, panes side by side, layers and regions of the active pane, keyboard.
import {byId, css, element, formatArea, formatLength, formatNumber, request, slideUrl} from "./page.js";
import {Annotations} from "./drawing.js";
import {Pane} from "./pane.js";

const POWERS = [2.5, 5, 10, 20, 40, null]; // null: one slide pixel per screen pixel
const MAX_PANES = 4, MAX_LISTED = 400;
const panes = [];
let slides = [], active = null, region = -1, origins = null, following = false;
const annotations = new Annotations(key => active.show(key));

// Panes.
function addPane(key, view = null) {
  if (panes.length >= MAX_PANES) return;
  const pane = new Pane(slides, {active: activate, moved, shown, pointed});
  pane.closer.onclick = () => closePane(pane);
  panes.push(pane);
  byId("panes").append(pane.holder);
  arrange();
  const ready = pane.show(key, view);
  activate(pane);
  return ready;
}

function closePane(pane) {
  if (panes.length < 2) return;
  panes.splice(panes.indexOf(pane), 1);
  // What it still waits for is ignored when it arrives.
  pane.requests++;
  if (active === pane) activate(panes[0]);
  pane.clear();
  pane.holder.remove();
  arrange();
}

function arrange() {
  byId("panes").style.setProperty("--across", panes.length > 2 ? 2 : panes.length);
  byId("panes").classList.toggle("several", panes.length > 1);
  // Leaflet does not notice that its element has another size.
  for (const pane of panes) pane.map?.invalidateSize({animate: false});
  byId("beside").disabled = panes.length >= MAX_PANES || !slides.length;
  link();
  updateAddress();
}

function activate(pane) {
  if (active === pane) return;
  active = pane;
  for (const other of panes) other.holder.classList.toggle("active", other === pane);
  showActive();
}

function shown(pane) {
  const known = slides.find(slide => slide.key === pane.key);
  if (known && !pane.about && !known.reason) {
    known.reason = pane.problem.textContent;
    listSlides();
  }
  link();
  if (pane === active) showActive();
  updateAddress();
}

// Linked panes have the same micrometres per screen pixel and keep the offset that they had when they were linked. If
// the pixel size of a slide is unknown, they keep the ratio of their zooms instead.
function link() {
  origins = byId("linked").checked ? new Map(panes.filter(pane => pane.map).map(pane => [pane, state(pane)])) : null;
}
const state = pane => ({x: pane.view.x * pane.unit, y: pane.view.y * pane.unit, per: pane.perPixel});

function moved(pane) {
  if (pane === active) showMagnification();
  // A move that this function made itself, of a linked pane.
  if (following) return;
  updateAddress();
  // Offsets are from where the panes were linked, not from the last move: rounding does not add up.
  const from = origins?.get(pane);
  if (!from || origins.size < 2) return;
  const now = state(pane);
  following = true;
  for (const [other, at] of origins) {
    if (other === pane || !other.map) continue;
    const zoom = other.zoomFor(pane.about.mpp && other.about.mpp ? now.per : at.per * now.per / from.per);
    other.map.setView([(at.y + now.y - from.y) / other.unit, (at.x + now.x - from.x) / other.unit], zoom, {animate: false});
  }
  following = false;
}

let addressTimer = 0;
function updateAddress() {
  clearTimeout(addressTimer);
  // After the last of many moves: browsers limit how often a page may change its address.
  addressTimer = setTimeout(() => {
    const query = new URLSearchParams();
    const [first, ...others] = panes.filter(pane => pane.map);
    if (!first) return;
    query.set("slide", first.key);
    for (const [name, value] of Object.entries(first.view)) query.set(name, value.toFixed(name === "zoom" ? 3 : 0));
    for (const pane of others) query.append("beside", pane.key);
    // Replaced, not pushed: the button for the page before leaves the viewer instead of undoing moves.
    history.replaceState(null, "", `?${query}`);
  }, 250);
}

function showMagnification() {
  const pane = active, ready = !!pane?.map;
  for (const [k, button] of [...byId("powers").children].entries()) {
    button.disabled = !ready || (POWERS[k] !== null && !pane.about.mpp);
    const here = ready && Math.abs(pane.perPixel / (POWERS[k] === null ? pane.unit : 10 / POWERS[k]) - 1) < 0.005;
    button.setAttribute("aria-pressed", String(here && !button.disabled));
  }
  byId("now").textContent = !ready ? "" : pane.about.mpp ? `${formatNumber(pane.power)}×, ${formatNumber(pane.perPixel)} µm per pixel` : `${formatNumber(pane.perPixel)} slide pixels per pixel`;
}

function pointed(pane, at) {
  const inside = pane.bounds.contains(at), {mpp} = pane.about;
  const lengths = mpp ? `${formatLength(at.lng * mpp[1])}, ${formatLength(at.lat * mpp[0])} · ` : "";
  pane.place.textContent = inside ? `${lengths}x ${Math.floor(at.lng)}, y ${Math.floor(at.lat)} px` : "";
}

// The list of slides.
function listSlides() {
  const text = byId("search").value.trim().toLowerCase();
  const found = slides.filter(one => !text || `${one.key}\n${one.prediction}`.toLowerCase().includes(text));
  const left = found.length - MAX_LISTED;
  byId("slides").replaceChildren(...found.slice(0, MAX_LISTED).map(one => {
    const words = element("span", {}, element("b", {textContent: one.key}));
    if (one.prediction) words.append(element("span", {className: "soft", textContent: one.prediction}));
    if (one.reason) words.append(element("span", {className: "reason", textContent: one.reason}));
    // Lazy: of hundreds of slides, only the pictures in view are made.
    const picture = one.reason ? [] : [element("img", {src: slideUrl(one.key, "tile/0/0/0.jpg"), alt: "", loading: "lazy"})];
    const button = element("button", {className: one.reason ? "failed" : ""}, ...picture, words);
    button.onclick = () => active.show(one.key);
    if (active?.key === one.key) button.setAttribute("aria-current", "true");
    return element("li", {}, button);
  }), ...(left > 0 ? [element("li", {className: "soft", textContent: `and ${left} more; type part of a name`})] : []));
}

function step(offset) {
  const usable = slides.filter(one => !one.reason);
  // From the slide that was asked for: it may still be loading when the key is pressed again.
  const at = usable.findIndex(one => one.key === active.wanted);
  const next = usable[at + offset];
  if (next) active.show(next.key);
}

// The active slide: properties, layers, regions, annotations.
function showActive() {
  region = -1;
  listSlides();
  const {about} = active;
  byId("name").textContent = active.key || "";
  document.title = active.key ? `${active.key} – Slides` : "Slides";
  const size = about ? [["Size", `${about.width_px} × ${about.height_px} px`]] : [];
  const class_ = about?.prediction ? [["Prediction", about.prediction]] : [];
  byId("facts").replaceChildren(...[...class_, ...size, ...(about?.facts || [])].flatMap(([name, words]) => [element("dt", {textContent: name}), element("dd", {textContent: words})]));
  listLayers();
  listRegions();
  byId("annotations-part").hidden = !about;
  showMagnification();
  annotations.show(active);
}

function listLayers() {
  const pane = active, rows = [];
  let kind = "";
  for (const layer of pane.about ? pane.known() : []) {
    if (layer.kind !== kind && layer.kind !== "tissue") rows.push(element("p", {className: "kind", textContent: {score: "Score of each position", contribution: "Contribution to the output", attention: "Weight of each tile in the output", drop: "Drop of the output when a block is covered", gradient: "The same, estimated by gradients"}[layer.kind]}));
    kind = layer.kind;
    rows.push(layerRow(pane, layer));
  }
  for (const {name, layer, setting} of pane.groups || []) {
    const box = element("input", {type: "checkbox", checked: setting.on});
    box.onchange = () => { setting.on = box.checked; if (box.checked) layer.addTo(pane.map); else layer.remove(); };
    rows.push(element("div", {className: "layer"}, box, element("label", {textContent: name})));
  }
  if (pane.about?.layers.length) {
    const box = element("input", {type: "checkbox", checked: pane.known().every(one => pane.setting(one).smooth), id: "smooth"});
    box.onchange = () => { for (const one of pane.known()) { pane.setting(one).smooth = box.checked; pane.put(one); } };
    rows.push(element("label", {className: "kind"}, box, "interpolate between the heatmap's squares"));
  }
  if (pane.note && pane.about) rows.push(element("p", {className: "bad", textContent: pane.note}));
  byId("layers").replaceChildren(...rows);
  byId("layers-part").hidden = !rows.length;
}

function layerRow(pane, layer) {
  const setting = pane.setting(layer), words = {tissue: "Tissue outline", attention: "attention"}[layer.kind] || layer.class_name;
  const box = element("input", {type: "checkbox", checked: setting.on, "data-layer": layer.name});
  const slider = element("input", {type: "range", min: 0, max: 1, step: 0.05, value: setting.opacity, title: "Opacity", "aria-label": `Opacity of ${words}`});
  const row = element("div", {className: setting.on ? "layer on" : "layer"}, box, element("label", {}, words), slider);
  const change = () => { row.classList.toggle("on", setting.on); pane.put(layer); };
  box.onchange = () => { setting.on = box.checked; change(); };
  slider.oninput = () => { setting.opacity = Number(slider.value); pane.layers.get(layer.id)?.setOpacity(setting.opacity); };
  if (layer.kind !== "tissue") row.append(legend(layer));
  return row;
}

function legend(layer) {
  const bar = element("i"), color = css(layer.color), most = formatNumber(layer.strongest);
  const signed = ["contribution", "drop", "gradient"].includes(layer.kind);
  bar.style.background = signed ? `linear-gradient(90deg, rgb(64, 68, 78), #fff, ${color})` : `linear-gradient(90deg, #fff, ${color})`;
  return element("div", {className: "legend"}, signed ? `−${most}` : "0", bar, signed ? `+${most}` : most);
}

function toggle(wanted) {
  const pane = active;
  if (!pane?.map) return;
  const layers = pane.known().filter(wanted);
  const on = layers.some(one => pane.setting(one).on);
  // Of several classes, the predicted one: their colours would hide each other.
  const first = layers.find(one => one.class_name === pane.about.prediction) || layers[0];
  for (const one of layers) {
    pane.setting(one).on = on ? false : one === first;
    pane.put(one);
  }
  listLayers();
}

function changeOpacity(change) {
  for (const one of active.map ? active.known().filter(one => one.kind !== "tissue" && active.setting(one).on) : []) {
    const setting = active.setting(one);
    setting.opacity = Math.min(1, Math.max(0, Math.round((setting.opacity + change) * 20) / 20));
    active.layers.get(one.id)?.setOpacity(setting.opacity);
  }
  listLayers();
}

function listRegions() {
  const found = active.regions || [];
  byId("regions-part").hidden = !found.length;
  byId("regions").replaceChildren(...found.map((one, k) => {
    const {name, classification, measurements} = one.properties;
    const mark = element("span", {className: "swatch"});
    mark.style.background = css(classification.color);
    const size = element("span", {className: "soft", textContent: `${measurements["mean score"].toFixed(2)}, ${formatArea(measurements["area um^2"])}`});
    const button = element("button", {title: "Mean score and area; click to go there"}, mark, element("span", {textContent: name}), size);
    button.onclick = () => goTo(k);
    if (k === region) button.setAttribute("aria-current", "true");
    return button;
  }));
}

function goTo(k) {
  if (!active.regions?.length) return;
  region = (k + active.regions.length) % active.regions.length;
  active.flyTo(active.regions[region]);
  listRegions();
}

// Keyboard.
const beside = () => { if (!byId("beside").disabled) addPane((slides.filter(one => !one.reason)[slides.filter(one => !one.reason).findIndex(one => one.key === active.key) + 1] || slides.find(one => !one.reason)).key); };
const KEYS = {
  0: () => active.fit(), j: () => step(1), k: () => step(-1), n: () => goTo(region + 1), p: () => goTo(region < 0 ? -1 : region - 1),
  t: () => toggle(one => one.kind === "tissue"), h: () => toggle(one => one.kind === active.mainKind()), "[": () => changeOpacity(-0.1), "]": () => changeOpacity(0.1),
  s: beside, x: () => closePane(active), l: () => byId("linked").click(), "?": () => byId("keys").showModal(),
  d: () => annotations.draw("polygon"), r: () => annotations.draw("rectangle"), f: () => annotations.draw("freehand"), m: () => annotations.draw("point"),
  Enter: () => annotations.close(), Backspace: () => annotations.removeLastCorner(), Escape: () => { annotations.stop(); annotations.select(null); },
  Delete: () => annotations.drop(annotations.selected),
};
POWERS.forEach((power, k) => { KEYS[k + 1] = () => { if (!byId("powers").children[k].disabled) active.setPower(power); }; });

addEventListener("keydown", event => {
  // Letters belong to the field in which they are typed; shortcuts with Ctrl or Alt, to the browser.
  const typing = event.target.closest("input:not([type=checkbox]):not([type=range]), select, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !active || !(event.key in KEYS)) return;
  const needs = !["s", "x", "l", "?", "j", "k"].includes(event.key);
  if (needs && !active.map) return;
  if (event.key === "Enter" && !annotations.drawing) return; // Enter presses the focused button
  event.preventDefault();
  KEYS[event.key]();
});

async function start() {
  for (const [k, power] of POWERS.entries()) {
    const button = element("button", {textContent: power === null ? "1 : 1" : `${power}×`, disabled: true});
    button.title = `${power === null ? "One slide pixel per screen pixel" : `${10 / power} µm per pixel`} (${k + 1})`;
    button.onclick = () => active.setPower(power);
    byId("powers").append(button);
  }
  byId("fit").onclick = () => active?.map && active.fit();
  byId("beside").onclick = beside;
  byId("linked").onchange = link;
  byId("help").onclick = () => byId("keys").showModal();
  byId("search").oninput = listSlides;
  const found = await (await request("slides.json")).json();
  slides = found.slides;
  byId("tables").hidden = !found.tables.length;
  const query = new URLSearchParams(location.search);
  const first = slides.find(one => one.key === query.get("slide")) || slides.find(one => !one.reason) || slides[0];
  const numbers = Object.fromEntries(["x", "y", "zoom"].map(name => [name, query.has(name) ? Number(query.get(name)) : NaN]));
  await addPane(first.key, Object.values(numbers).every(Number.isFinite) ? numbers : null);
  for (const key of query.getAll("beside")) if (slides.some(one => one.key === key)) await addPane(key);
}

window.viewer = {panes, annotations, get active() { return active; }, get slides() { return slides; }};
start().catch(error => byId("panes").append(element("p", {className: "bad", textContent: error.message})));

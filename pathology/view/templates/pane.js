// A pane shows one slide: a Leaflet map with its layers and a scale bar.
import {css, element, formatLength, request, slideUrl, toLatLng} from "./page.js";

export const UM_AT_1X = 10; // micrometres per screen pixel at 1×, by convention: 0.25 µm at 40×
const COARSEST_UM = 4; // 2.5×, allowed for small slides, too
const EXTRA_ZOOMS = 4; // additional zooms beyond the slide's full resolution
const WIDEST_SCALE_PX = 170;

export class Pane {
  constructor(choices, callbacks) {
    this.callbacks = callbacks; // {active, moved, shown, pointed}
    this.map = this.about = null;
    this.requests = 0;
    this.settings = new Map(); // by name of the layer; kept when the slide changes
    this.select = element("select", {title: "Slide of this pane"});
    for (const slide of choices) this.select.append(element("option", {value: slide.key, textContent: slide.key}));
    this.closer = element("button", {textContent: "×", title: "Close this pane (x)"});
    this.mapHolder = element("div", {className: "map"});
    this.problem = element("div", {className: "problem", hidden: true});
    this.holder = element("div", {className: "pane"}, this.mapHolder, this.problem,
      element("div", {className: "head"}, this.select, this.closer));
    this.select.addEventListener("change", () => this.show(this.select.value));
    // In the capture phase: Leaflet's controls stop touches, which would not come back up here.
    this.holder.addEventListener("pointerdown", () => callbacks.active(this), true);
  }

  async show(key, view = null) {
    const number = ++this.requests;
    this.select.value = this.wanted = key;
    let about, regions = {features: []}, problem = "";
    try {
      about = await (await request(slideUrl(key, "about.json"))).json();
      if (about.regions) regions = await (await request(slideUrl(key, "regions.json"))).json();
    } catch (error) {
      problem = error.message;
    }
    if (number !== this.requests) return; // another slide was requested meanwhile
    this.clear();
    this.problem.hidden = !!about;
    this.problem.textContent = about ? "" : `${key}: ${problem}`;
    this.about = about || null;
    this.key = key;
    this.note = about ? problem || about.layers_note : problem;
    if (about) this.build(about, regions.features, view);
    this.callbacks.shown(this);
  }

  build(about, features, view) {
    // The map's coordinates are shown pixels: at `finest_zoom`, one of them is one pixel of the screen. The
    // factor of y is positive, where L.CRS.Simple has −1: rows count downwards.
    const unit = 2 ** -about.finest_zoom;
    const crs = L.extend({}, L.CRS.Simple, {transformation: new L.Transformation(unit, 0, unit, 0)});
    this.bounds = L.latLngBounds([0, 0], [about.height_px, about.width_px]);
    // zoomSnap 0: linked panes have equal micrometres per pixel, at any fraction of a zoom. preferCanvas: thousands
    // of outlines are drawn on one canvas, instead of an element of the page for each.
    this.map = L.map(this.mapHolder, {
      crs, zoomSnap: 0, zoomDelta: 1, wheelPxPerZoomLevel: 100, zoomControl: false, attributionControl: false,
      preferCanvas: true, maxZoom: about.finest_zoom + EXTRA_ZOOMS, minZoom: -8, keyboardPanDelta: 160, fadeAnimation: false,
    });
    this.controls();
    if (view && Number.isFinite(view.zoom)) this.map.setView([view.y, view.x], view.zoom, {animate: false});
    else this.map.fitBounds(this.bounds, {animate: false});
    // The least zoom depends on the map's size; until here −8 allows any.
    const whole = this.map.getBoundsZoom(this.bounds);
    this.map.setMinZoom(Math.min(whole - 1, about.finest_zoom, about.mpp ? this.zoomFor(COARSEST_UM) : whole));
    this.map.setMaxBounds(this.bounds.pad(0.6));
    // Lossless where the slide's own pixels are seen; coarser tiles are means already.
    this.tiles((z, y, x) => slideUrl(about.key, "tile", z, y, `${x}.${z >= about.finest_zoom ? "png" : "jpg"}`), {className: "slide"}).addTo(this.map);
    this.layers = new Map();
    for (const layer of this.known()) if (this.setting(layer).on) this.put(layer);
    this.vectors(features);
    this.map.on("move zoom", () => { this.drawScale(); this.callbacks.moved(this); });
    this.map.on("mousemove", event => this.callbacks.pointed(this, event.latlng));
    this.drawScale();
  }

  clear() {
    if (this.map) this.map.remove();
    this.map = null;
    this.layers = new Map();
    this.groups = [];
    this.regions = [];
  }

  tiles(url, options = {}) {
    const {about} = this;
    const layer = L.tileLayer("", {
      tileSize: about.tile_px, minNativeZoom: 0, maxNativeZoom: about.finest_zoom, minZoom: -8, maxZoom: about.finest_zoom + EXTRA_ZOOMS,
      noWrap: true, bounds: this.bounds, updateWhenZooming: false, keepBuffer: 2, ...options,
    });
    // Not a template: keys of slides must be encoded, and the ending depends on the zoom.
    layer.getTileUrl = at => url(at.z, at.y, at.x);
    return layer;
  }

  // All layers over the slide: the tissue outline and the channels of the heatmap.
  known() {
    const maps = this.about.layers.map(layer => ({...layer, name: `${layer.kind} ${layer.class_name}`.trim()}));
    return [...(this.about.tissue ? [{id: "tissue", kind: "tissue", name: "tissue"}] : []), ...maps];
  }

  // The kind of layer that is shown at first: scores, or the evidence of blocks of a model that has none.
  mainKind() {
    const kinds = (this.about?.layers || []).map(one => one.kind);
    return ["score", "drop", "gradient"].find(kind => kinds.includes(kind)) || "score";
  }

  setting(layer) {
    if (!this.settings.has(layer.name)) {
      // Layers are off at first, apart from the score of what was predicted.
      const first = layer.kind === this.mainKind() && layer.class_name === this.about.prediction;
      this.settings.set(layer.name, {on: first, opacity: layer.kind === "tissue" ? 1 : 0.6, smooth: true});
    }
    return this.settings.get(layer.name);
  }

  put(layer) {
    this.layers.get(layer.id)?.remove();
    this.layers.delete(layer.id);
    const {on, opacity, smooth} = this.setting(layer);
    if (!on) return;
    const {key} = this.about;
    const end = smooth && layer.kind !== "tissue" ? "?smooth=1" : "";
    const tiles = this.tiles((z, y, x) => slideUrl(key, "layer", layer.id, z, y, `${x}.png${end}`), {opacity, zIndex: layer.kind === "tissue" ? 20 : 10});
    this.layers.set(layer.id, tiles.addTo(this.map));
  }

  // Regions and density contours, as lines.
  vectors(features) {
    const measured = (feature, name) => feature.properties?.measurements?.[name];
    this.regions = features.filter(one => measured(one, "mean score") !== undefined);
    const named = new Map();
    for (const one of features.filter(one => measured(one, "density") !== undefined)) {
      const name = one.properties.classification.name;
      named.set(name, [...(named.get(name) || []), one]);
    }
    this.groups = [];
    if (this.regions.length) this.group("Outlines of the regions", this.regions, true, {weight: 2.5});
    for (const [name, some] of named) this.group(name, some, false, {weight: 1.5, dashArray: "5 4"});
  }

  group(name, features, on, style) {
    const setting = this.settings.get(name) || {on};
    this.settings.set(name, setting);
    const layer = L.geoJSON(features, {
      coordsToLatLng: toLatLng, interactive: false,
      style: one => ({color: css(one.properties.classification.color), fill: false, ...style}),
    });
    this.groups.push({name, layer, setting});
    if (setting.on) layer.addTo(this.map);
  }

  flyTo(feature) {
    const box = L.geoJSON(feature, {coordsToLatLng: toLatLng}).getBounds();
    this.map.flyToBounds(box.pad(0.6), {duration: 0.6, maxZoom: this.about.finest_zoom});
  }

  // `unit` is micrometres per slide pixel, or 1 if unknown; `perPixel` is units per screen pixel.
  get unit() { return this.about.mpp ? this.about.mpp[1] : 1; }
  get perPixel() { return this.unit * 2 ** (this.about.finest_zoom - this.map.getZoom()); }
  get power() { return this.about.mpp ? UM_AT_1X / this.perPixel : null; }
  zoomFor(perPixel) { return this.about.finest_zoom - Math.log2(perPixel / this.unit); }

  setPower(power) {
    const perPixel = power === null ? this.unit : UM_AT_1X / power;
    this.after(map => map.setZoom(Math.max(map.getMinZoom(), Math.min(this.zoomFor(perPixel), map.getMaxZoom())), {animate: false}));
  }

  fit() { this.after(map => map.fitBounds(this.bounds, {animate: false})); }

  // Leaflet finishes a running zoom animation at its target and ignores changes until then, so they are made after it.
  after(change) {
    const {map} = this;
    map.stop();
    if (map._animatingZoom) map.once("zoomend", () => setTimeout(() => { if (map === this.map) change(map); }));
    else change(map);
  }

  get view() {
    const at = this.map.getCenter();
    return {x: at.lng, y: at.lat, zoom: this.map.getZoom()};
  }

  controls() {
    const control = (position, holder) => {
      const corner = L.control({position});
      corner.onAdd = () => holder;
      corner.addTo(this.map);
    };
    this.scale = element("div", {className: "scale"});
    this.place = element("div", {className: "place"});
    control("bottomleft", this.scale);
    control("bottomright", this.place);
  }

  drawScale() {
    const widest = WIDEST_SCALE_PX * this.perPixel, ten = 10 ** Math.floor(Math.log10(widest));
    const length = [5, 2, 1].map(n => n * ten).find(n => n <= widest);
    const bar = element("i");
    bar.style.width = `${length / this.perPixel}px`;
    this.scale.replaceChildren(this.about.mpp ? formatLength(length) : `${length} px`, bar);
    const zoom = this.map.getZoom();
    this.mapHolder.classList.toggle("crisp", zoom > this.about.finest_zoom);
    this.mapHolder.classList.toggle("between", Math.abs(zoom - Math.round(zoom)) > 1e-6);
  }
}

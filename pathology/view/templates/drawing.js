// Annotations of the active slide: drawing, naming, editing. Those that are not saved yet are kept, also of other slides.
import {byId, css, element, formatArea, formatLength, request, slideUrl, toLatLng, toPosition} from "./page.js";
import {SlideAnnotations} from "./slide_annotations.js";

const MAX_EDITABLE_CORNERS = 200;
const FREEHAND_STEP_PX = 3;
const COLORS = [[200, 0, 0], [150, 200, 150], [90, 60, 190], [230, 150, 20], [0, 140, 160], [120, 120, 120]];

const feature = (type, coordinates, name, color) => ({
  type: "Feature", id: crypto.randomUUID(), geometry: {type, coordinates},
  properties: {objectType: "annotation", classification: {name, color}},
});

// Coordinates of any depth, from shown pixels to level 0; `affine` maps (row, column, 1) to (y, x).
const mapped = (coordinates, affine) => coordinates.every(Array.isArray)
  ? coordinates.map(one => mapped(one, affine))
  : affine.map(([down, right, from]) => Math.round((down * coordinates[1] + right * coordinates[0] + from) * 100) / 100).reverse();

export class Annotations {
  // `open` shows a slide by its key.
  constructor(open) {
    this.open = open;
    this.pane = this.slide = this.selected = this.drawing = null;
    this.shapes = new Map();
    this.corners = [];
    this.colors = new Map();
    this.requests = 0;
    this.kept = new Map();  // by key, the slides whose annotations are not saved yet
    for (const button of byId("tools").children) button.addEventListener("click", () => this.draw(button.dataset.tool));
    byId("download").addEventListener("click", () => this.download());
    addEventListener("beforeunload", event => { if (this.unsaved) event.preventDefault(); });
  }

  get key() { return this.slide?.key; }
  get collection() { return this.slide?.collection; }

  // Whether leaving the page would lose changes.
  get unsaved() { return this.kept.size > 0; }

  // Show the annotations of a pane's slide.
  async show(pane) {
    this.stop();
    this.remove();
    this.pane = pane;
    this.slide = null;
    this.list();
    this.say("");
    if (!pane?.about) return;
    const {key} = pane, number = ++this.requests;
    try {
      // What is not saved yet is newer than the file.
      const found = this.kept.get(key) || await this.load(key, pane.about.annotations);
      // Another slide may have been chosen, or the pane closed, while the file was loaded.
      if (number !== this.requests || this.pane !== pane || pane.key !== key || !pane.map) return;
      this.slide = found;
      for (const one of found.collection.features) this.put(one);
      this.tell(found);
      // At once, not after the delay of a failed attempt.
      if (found.problem) found.save();
    } catch (error) {
      if (number === this.requests) this.say(error.message, true);
    }
    this.list();
  }

  async load(key, target) {
    const response = await request(slideUrl(key, "annotations.json"));
    const version = (response.headers.get("ETag") || "").replaceAll('"', "");
    return new SlideAnnotations(key, target, await response.json(), version, slide => this.told(slide));
  }

  told(slide) {
    if (slide.unsaved) this.kept.set(slide.key, slide);
    else this.kept.delete(slide.key);
    this.tell(slide);
  }

  // Say whether the slide's annotations are saved, and of which other slides they are not.
  tell(slide) {
    if (slide === this.slide) {
      const {problem, unsaved, hopeless, changes, path} = slide;
      const help = !unsaved ? "" : hopeless ? "; Download keeps them" : "; tried again, and kept until the page is left";
      if (problem) this.say(`Not saved: ${problem}${help}`, unsaved);
      else this.say(unsaved ? "Saving …" : changes ? `Saved in ${path}` : "");
    }
    const others = [...this.kept.values()].filter(one => one !== this.slide && one.problem);
    byId("unsaved").replaceChildren(...others.length ? ["Not saved, too:"] : [], ...others.map(one =>
      element("button", {textContent: one.key, title: one.problem, onclick: () => this.open(one.key)})));
  }

  remove() {
    for (const shape of this.shapes.values()) shape.remove();
    this.shapes.clear();
    this.select(null);
  }

  colorOf(name) {
    const known = this.collection?.features.map(one => one.properties?.classification).find(one => one?.name === name && one.color)?.color
      || this.pane?.about?.layers.find(one => one.class_name === name)?.color;
    if (!known && !this.colors.has(name)) this.colors.set(name, COLORS[this.colors.size % COLORS.length]);
    return known || this.colors.get(name);
  }

  put(one) {
    this.shapes.get(one)?.remove();
    const color = css(one.properties?.classification?.color || [30, 30, 30]);
    const chosen = one === this.selected;
    const shape = L.geoJSON(one, {
      coordsToLatLng: toLatLng,
      style: {color, weight: chosen ? 4 : 2.5, fillOpacity: chosen ? 0.14 : 0.06},
      pointToLayer: (_, at) => L.circleMarker(at, {radius: chosen ? 9 : 6, color, weight: chosen ? 4 : 2.5, fillOpacity: 0.3}),
    });
    // While something is drawn, a click is its next corner, also where another annotation lies.
    shape.on("click", event => { if (!this.drawing) { L.DomEvent.stop(event); this.select(one); } });
    this.shapes.set(one, shape.addTo(this.pane.map));
  }

  // Select an annotation, so that its corners can be moved.
  select(one) {
    const before = this.selected;
    this.selected = one;
    for (const corner of this.corners) corner.remove();
    this.corners = [];
    // Drawn again, both: lines show which one is selected.
    for (const some of [before, one]) if (some && this.shapes.has(some)) this.put(some);
    if (one) this.handles(one);
    if (this.collection) this.list();
  }

  handles(one) {
    const {type, coordinates} = one.geometry;
    const lines = {Polygon: coordinates, LineString: [coordinates], Point: [[coordinates]]}[type] || [];
    // Each corner is an element of the page: thousands would make it slow.
    if (lines.flat().length > MAX_EDITABLE_CORNERS) return;
    for (const line of lines) {
      const closed = type === "Polygon";
      for (let k = 0; k < line.length - (closed ? 1 : 0); k++) {
        const corner = L.marker(toLatLng(line[k]), {draggable: true, icon: L.divIcon({className: "corner"}), keyboard: false});
        corner.on("drag", () => {
          line[k] = toPosition(corner.getLatLng());
          // GeoJSON repeats the first position of a ring at its end.
          if (closed && k === 0) line[line.length - 1] = line[0];
          if (type === "Point") one.geometry.coordinates = line[0];
          this.put(one);
        });
        corner.on("dragend", () => this.changed());
        this.corners.push(corner.addTo(this.pane.map));
      }
    }
  }

  // Drawing.
  draw(tool) {
    const same = this.drawing?.tool === tool;
    this.stop();
    if (same || !this.collection || !this.pane.map) return;
    this.select(null);
    const {map, mapHolder} = this.pane, places = [];
    const line = L.polyline([], {color: css(this.colorOf(this.className)), weight: 2.5, dashArray: "4 4", interactive: false}).addTo(map);
    this.drawing = {tool, places, line, handlers: {}};
    mapHolder.classList.add("drawing");
    byId("tools").querySelector(`[data-tool=${tool}]`).setAttribute("aria-pressed", "true");
    // A double click ends a polygon; rectangles and freehand areas are drawn by dragging.
    map.doubleClickZoom.disable();
    if (tool !== "polygon") map.dragging.disable();
    Object.assign(this.drawing.handlers, this[tool](map, places, line));
    map.on(this.drawing.handlers);
  }

  stop() {
    if (!this.drawing) return;
    const {line, handlers} = this.drawing, {map, mapHolder} = this.pane;
    this.drawing = null;
    for (const button of byId("tools").children) button.removeAttribute("aria-pressed");
    mapHolder.classList.remove("drawing");
    if (!map) return;
    line.remove();
    map.off(handlers);
    map.dragging.enable();
    map.doubleClickZoom.enable();
  }

  polygon(map, places, line) {
    return {
      click: event => { places.push(event.latlng); line.setLatLngs(places); },
      mousemove: event => { if (places.length) line.setLatLngs([...places, event.latlng]); },
      dblclick: () => this.close(),
    };
  }

  rectangle(map, places, line) {
    const corners = at => [[places[0].lat, places[0].lng], [places[0].lat, at.lng], [at.lat, at.lng], [at.lat, places[0].lng]].map(one => L.latLng(one));
    return {
      mousedown: event => { places.splice(0, places.length, event.latlng); },
      mousemove: event => { if (places.length) line.setLatLngs([...corners(event.latlng), places[0]]); },
      mouseup: event => { if (places.length) { places.splice(0, places.length, ...corners(event.latlng)); this.close(); } },
    };
  }

  freehand(map, places, line) {
    let down = false, last = null;
    return {
      mousedown: event => { down = true; last = event.containerPoint; places.push(event.latlng); },
      mousemove: event => {
        if (!down || event.containerPoint.distanceTo(last) < FREEHAND_STEP_PX) return;
        last = event.containerPoint;
        places.push(event.latlng);
        line.setLatLngs(places);
      },
      mouseup: () => { if (down) this.close(); },
    };
  }

  point() {
    return {click: event => this.add(feature("Point", toPosition(event.latlng), this.className, this.colorOf(this.className)))};
  }

  removeLastCorner() {
    if (this.drawing?.tool !== "polygon") return;
    this.drawing.places.pop();
    this.drawing.line.setLatLngs(this.drawing.places);
  }

  close() {
    // Remove repeated corners: a double click adds two.
    const ring = (this.drawing?.places || []).map(toPosition).filter((one, k, all) => !k || one[0] !== all[k - 1][0] || one[1] !== all[k - 1][1]);
    // Corners in one row or column enclose no area.
    if (ring.length < 3 || new Set(ring.map(one => one[0])).size < 2 || new Set(ring.map(one => one[1])).size < 2) return this.stop();
    this.add(feature("Polygon", [[...ring, ring[0]]], this.className, this.colorOf(this.className)));
  }

  get className() { return byId("class").value.trim() || "Unnamed"; }

  add(one) {
    this.stop();
    this.collection.features.push(one);
    this.put(one);
    this.select(one);
    this.changed();
  }

  drop(one) {
    if (!one) return;
    this.select(null);
    this.shapes.get(one)?.remove();
    this.shapes.delete(one);
    this.collection.features = this.collection.features.filter(other => other !== one);
    this.changed();
  }

  rename(one) {
    const {className} = this;
    one.properties = {...one.properties, classification: {name: className, color: this.colorOf(className)}};
    this.put(one);
    this.changed();
  }

  changed() {
    this.slide.changed();
    this.list();
  }

  // Download the annotations for QuPath; also possible if they cannot be saved, or hyfi view has ended.
  download() {
    if (!this.collection) return;
    const {slide_id, to_level0} = this.pane.about;
    const features = this.collection.features.map(one => ({...one, geometry: {...one.geometry, coordinates: mapped(one.geometry.coordinates, to_level0)}}));
    const blob = new Blob([JSON.stringify({...this.collection, features}, null, 1), "\n"], {type: "application/geo+json"});
    const link = element("a", {href: URL.createObjectURL(blob), download: `${slide_id}.geojson`});
    link.click();
    // Not at once: the browser reads the address after the click has returned.
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  say(text, bad = false) {
    byId("saving").textContent = text;
    byId("saving").classList.toggle("bad", bad);
  }

  list() {
    const features = this.collection?.features || [];
    byId("annotations").replaceChildren(...features.map(one => {
      const {name = "", classification} = one.properties || {};
      const mark = element("span", {className: "swatch"});
      mark.style.background = css(classification?.color || [30, 30, 30]);
      const pick = element("button", {className: "pick", title: "Show this annotation; double-click to set its class"}, mark,
        element("span", {textContent: [classification?.name, name].filter(Boolean).join(" · ") || one.geometry.type}),
        element("span", {className: "soft", textContent: this.size(one)}));
      pick.onclick = () => { this.select(one); this.pane.flyTo(one); };
      pick.ondblclick = () => this.rename(one);
      const row = element("li", {}, pick, element("button", {textContent: "×", title: "Remove", onclick: () => this.drop(one)}));
      if (one === this.selected) row.setAttribute("aria-current", "true");
      return row;
    }));
    byId("download").hidden = !features.length;
    for (const button of byId("tools").children) button.disabled = !this.collection;
    const names = [...this.pane?.about?.layers.map(one => one.class_name) || [], "Tumor", "Stroma", "Necrosis", "Other",
      ...features.map(one => one.properties?.classification?.name).filter(Boolean)];
    byId("classes").replaceChildren(...[...new Set(names)].map(value => element("option", {value})));
  }

  size(one) {
    const {type, coordinates} = one.geometry, unit = this.pane.about.mpp;
    // The shoelace formula; holes are taken off the outer ring.
    const area = ring => Math.abs(ring.slice(1).reduce((sum, at, k) => sum + ring[k][0] * at[1] - at[0] * ring[k][1], 0)) / 2;
    if (type === "Polygon" && unit) return formatArea((area(coordinates[0]) - coordinates.slice(1).reduce((sum, hole) => sum + area(hole), 0)) * unit[0] * unit[1]);
    if (type === "LineString" && unit) return formatLength(coordinates.slice(1).reduce((sum, at, k) => sum + Math.hypot((at[0] - coordinates[k][0]) * unit[1], (at[1] - coordinates[k][1]) * unit[0]), 0));
    return "";
  }
}

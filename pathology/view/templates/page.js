// What all parts of the page share: elements, requests, numbers as words.
export const by = id => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

export const addressOf = (key, ...rest) => ["slide", encodeURIComponent(key), ...rest].join("/");

export async function ask(address, options = {}) {
  let answer;
  try {
    answer = await fetch(address, options);
  } catch {
    throw new Error("hyfi view does not answer; is it still running?");
  }
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw Object.assign(new Error(said.error || `${answer.status} ${answer.statusText}`), {status: answer.status});
  }
  return answer;
}

export const css = color => `rgb(${color.join(", ")})`;
export const short = value => String(Number(value.toPrecision(3)));

export function lengthWords(um) {
  return um >= 1000 ? `${short(um / 1000)} mm` : um >= 1 ? `${short(um)} µm` : `${short(um * 1000)} nm`;
}

export function areaWords(um2) {
  return um2 >= 1e4 ? `${short(um2 / 1e6)} mm²` : `${short(um2)} µm²`;
}

// Positions in GeoJSON are (x, y); Leaflet's are (lat, lng), here (y, x).
export const toPoint = place => L.latLng(place[1], place[0]);
export const toPlace = point => [Math.round(point.lng * 1000) / 1000, Math.round(point.lat * 1000) / 1000];

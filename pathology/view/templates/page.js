// Helpers of all modules: elements, requests, numbers and lengths as text.
export const byId = id => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const created = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    // aria-… and data-… are attributes, which have no property of this name.
    if (name.includes("-")) created.setAttribute(name, value);
    else created[name] = value;
  }
  created.append(...children);
  return created;
}

export const slideUrl = (key, ...rest) => ["slide", encodeURIComponent(key), ...rest].join("/");

export async function request(url, options = {}) {
  let response;
  try {
    response = await fetch(url, options);
  } catch {
    throw new Error("hyfi view does not respond; is it still running?");
  }
  if (!response.ok) {
    // The viewer's own errors are JSON; those of a proxy between it and the browser need not be.
    const body = await response.json().catch(() => ({}));
    throw Object.assign(new Error(body.error || `${response.status} ${response.statusText}`), {status: response.status});
  }
  return response;
}

export const css = color => `rgb(${color.join(", ")})`;
export const formatNumber = value => String(Number(value.toPrecision(3)));

export function formatLength(um) {
  return um >= 1000 ? `${formatNumber(um / 1000)} mm` : um >= 1 ? `${formatNumber(um)} µm` : `${formatNumber(um * 1000)} nm`;
}

export function formatArea(um2) {
  return um2 >= 1e4 ? `${formatNumber(um2 / 1e6)} mm²` : `${formatNumber(um2)} µm²`;
}

// GeoJSON positions are (x, y); in Leaflet, lat is y and lng is x.
export const toLatLng = place => L.latLng(place[1], place[0]);
// Thousandths of a pixel are finer than any hand, and keep files short.
export const toPosition = point => [Math.round(point.lng * 1000) / 1000, Math.round(point.lat * 1000) / 1000];

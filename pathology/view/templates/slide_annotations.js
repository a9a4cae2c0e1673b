// Annotations of one slide, and their saving: changes are sent after a short delay, and again until they are saved.
import {request, slideUrl} from "./page.js";

const SAVE_AFTER_MS = 400;
const RETRY_AFTER_MS = 5000;

export class SlideAnnotations {
  // `told` is called whenever something is changed, saved or refused.
  constructor(key, target, collection, version, told) {
    Object.assign(this, {key, path: target.path, collection, version, told});
    this.problem = target.saved ? "" : target.reason;  // why they are not saved
    this.hopeless = !target.saved;  // trying again would not help
    this.changes = this.stored = 0;  // since they were loaded, and how many of these are in the file
    this.pending = null;  // what was sent, if it is not known whether it arrived
    this.timer = 0;
    this.writing = false;
  }

  get unsaved() { return this.stored < this.changes; }

  changed() {
    this.changes++;
    // Once for many changes: each save writes the whole file.
    this.saveIn(SAVE_AFTER_MS);
    this.told(this);
  }

  saveIn(delay) {
    // Writes run one after the other: each states the version that the one before it returned.
    if (this.hopeless || this.writing) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.save(), delay);
  }

  async save() {
    clearTimeout(this.timer);
    this.timer = 0;
    if (this.hopeless || this.writing || !this.unsaved) return;
    this.writing = true;
    try {
      // First the same again, if no answer came: the server accepts what it has already, and says which version that is.
      this.pending ||= {changes: this.changes, body: JSON.stringify(this.collection)};
      const {changes, body} = this.pending;
      this.version = await this.write(body);
      this.stored = changes;
      this.problem = "";
      this.pending = null;
    } catch (error) {
      this.problem = error.message;
      // Refused: not written, so that later changes can go along the next time. After anything else, it may have been.
      if (error.status >= 400 && error.status < 500) this.pending = null;
      // Precondition Failed: the file has another version than this page has loaded.
      this.hopeless = error.status === 412;
    }
    this.writing = false;
    if (this.unsaved) this.saveIn(this.problem ? RETRY_AFTER_MS : 0);
    this.told(this);
  }

  // Returns the new version of the file.
  async write(body) {
    const response = await request(slideUrl(this.key, "annotations.json"), {method: "PUT", body, headers: {"If-Match": `"${this.version}"`}});
    const version = response.headers.get("ETag");
    if (!version) throw new Error("the answer does not say what was saved; is there a proxy before hyfi view?");
    return version.replaceAll('"', "");
  }
}

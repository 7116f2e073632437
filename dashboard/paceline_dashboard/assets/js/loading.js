// Loads Plotly when a page needs it: the list of runs does not need its 4.5 MB.
import { ApiError } from "./api.js";
import { make } from "./dom.js";

/** @type {Promise<void> | null} */
let coming = null;

/**
 * Where the page finds Plotly is in its head. After a failure the next call tries again.
 * @returns {Promise<void>}
 */
export function plotly() {
  if (window.Plotly) return Promise.resolve();
  const source = /** @type {HTMLMetaElement} */ (document.querySelector("meta[name=plotly]")).content;
  coming ??= new Promise((resolve, reject) => {
    const script = make("script", { src: source });
    script.onload = () => resolve();
    script.onerror = () => {
      script.remove();
      coming = null;
      reject(new ApiError(0, `Cannot load ${source}.`));
    };
    document.head.append(script);
  });
  return coming;
}

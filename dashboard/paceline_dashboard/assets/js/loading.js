// Loads Plotly when a page needs it: the list of runs does not need its 4.5 MB.
import { ApiError } from "./api.js";
import { make } from "./dom.js";

/**
 * @param {string} source
 * @returns {Promise<void>}
 */
export function plotly(source) {
  if (window.Plotly) return Promise.resolve();
  return new Promise((resolve, reject) => {
    const script = make("script", { src: source });
    script.onload = () => resolve();
    script.onerror = () => {
      script.remove();
      reject(new ApiError(0, `Cannot load ${source}.`));
    };
    document.head.append(script);
  });
}

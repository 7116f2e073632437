// Draws all new data at once, one drawing at a time, never faster than the browser can paint.
const SHORTEST_MS = 200; // five drawings a second; in the demonstration, training shares the machine

export class Painter {
  /** @param {() => void} draw */
  constructor(draw) {
    this.draw = draw;
    this.wanted = false;
    this.busy = false;
    this.closed = false;
  }

  /** Draws at the next frame, or after the current drawing. A hidden page has no frames. */
  request() {
    this.wanted = true;
    if (!this.busy && !this.closed) this.#next();
  }

  close() {
    this.closed = true;
  }

  #next() {
    this.busy = true;
    requestAnimationFrame(() => {
      if (this.closed) return;
      this.wanted = false;
      const began = performance.now();
      try {
        this.draw();
      } finally {
        // The frame after the next shows that this frame was painted.
        requestAnimationFrame(() => {
          const took = performance.now() - began;
          setTimeout(() => this.#done(), Math.max(SHORTEST_MS - took, took));
        });
      }
    });
  }

  #done() {
    this.busy = false;
    if (this.wanted && !this.closed) this.#next();
  }
}

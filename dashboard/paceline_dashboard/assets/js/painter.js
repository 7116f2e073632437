// One drawing at a time, of all that has arrived since the last; never faster than the browser can paint.
const SHORTEST_MS = 200; // training shares the machine in the demonstration: five drawings a second suffice

export class Painter {
  /** @param {() => void} draw */
  constructor(draw) {
    this.draw = draw;
    this.wanted = false;
    this.busy = false;
    this.closed = false;
  }

  /** Draws at the next frame (a hidden page has none), or after the drawing that is under way. */
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
        // The frame after the next proves that this one was painted.
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

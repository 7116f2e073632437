// What switches of policies changed, as the server says it.

export class Effects {
  constructor() {
    /** @type {Map<number, any>} */
    this.known = new Map(); // version → effect of `GET effects`
  }

  /**
   * Takes an answer of `GET effects`.
   * @param {any[]} answer
   */
  update(answer) {
    this.known = new Map(answer.map((effect) => [effect.version, effect]));
  }

  /**
   * The effect of a switch; undefined before the server knows of it.
   * @param {Switch} change
   */
  of(change) {
    return this.known.get(change.version);
  }

  /**
   * "Steps take 56 % less time for the same load (53 to 58 %).", and what metrics were before and after; or "".
   * @param {Switch} change
   */
  words(change) {
    const effect = this.of(change);
    return [effect?.words, effect?.metrics_words].filter(Boolean).join(" ");
  }
}

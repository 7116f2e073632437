import assert from "node:assert/strict";
import { describe, test } from "node:test";

import * as format from "../../../dashboard/paceline_dashboard/assets/js/format.js";

const { bytes, device, factor, integer, mean, median, moment, number, percent, plural, quantile, ratio, seconds } = format;

/** One test for each [argument, expected result]. */
function cases(format, expected) {
  for (const [value, words] of expected) test(`${format.name}(${value}) is ${words}`, () => assert.equal(format(value), words));
}

describe("a value that is missing", () => {
  for (const show of [number, integer, seconds, ratio, percent, factor, bytes, moment]) {
    test(`${show.name} shows an en dash`, () => {
      for (const value of [null, undefined, NaN, Infinity, -Infinity]) assert.equal(show(value), "–");
    });
  }
});

describe("numbers", () => {
  cases(number, [[0, "0"], [1234.5, "1,235"], [45.67, "45.7"], [4.567, "4.57"], [0.04567, "0.046"], [-45.67, "-45.7"]]);
  cases(integer, [[0, "0"], [1234567.4, "1,234,567"], [-2.6, "-3"]]);
  cases(ratio, [[0, "0.00"], [1.005, "1.00"], [12.345, "12.35"]]);
  cases(percent, [[0, "0.0 %"], [0.0512, "5.1 %"], [0.512, "51 %"], [-0.0512, "-5.1 %"], [-0.0004, "0.0 %"]]);
  cases(factor, [[2, "2.00×"]]);
  cases(bytes, [[0, "0 B"], [1023, "1023 B"], [1024, "1.0 KiB"], [20 * 2 ** 20, "20 MiB"], [2 ** 50, "1024 TiB"]]);
});

describe("devices", () => {
  const cpu = { kind: "cpu", name: "Xeon", cores: 8, threads: 0, memory_bytes: 2 ** 34, flops: null, emulated: false };
  for (const [value, words] of [
    [null, "–"], [undefined, "–"], [cpu, "CPU, 8 cores"], [{ ...cpu, threads: 2 }, "CPU, 2 of 8 cores"], [{ ...cpu, threads: 16 }, "CPU, 8 cores"],
    [{ ...cpu, cores: 1 }, "CPU, 1 core"], [{ ...cpu, kind: "cuda", name: "Tesla T4", emulated: true }, "Tesla T4 (emulated)"],
  ]) test(words, () => assert.equal(device(value), words));
});

describe("durations", () => {
  cases(seconds, [
    [0, "0 µs"], [0.0005, "500 µs"], [0.0123, "12.3 ms"], [0.123, "123 ms"], [1.234, "1.23 s"], [12.34, "12.3 s"],
    [119.9, "119.9 s"], [120, "2.0 min"], [7200, "2.0 h"], [-0.0123, "-12.3 ms"],
  ]);
});

describe("moments", () => {
  test("of today is its time alone", () => {
    const now = new Date();
    assert.equal(moment(now.getTime() / 1000), now.toLocaleTimeString("en-GB"));
  });
  test("of another day has its date, and no seconds", () => {
    assert.match(moment(new Date(2001, 1, 3, 4, 5, 6).getTime() / 1000), /^2001-02-03 04:05$/);
  });
});

describe("counts with a noun", () => {
  test("one has no s", () => assert.equal(plural(1, "run"), "1 run"));
  test("others have", () => assert.deepEqual([plural(0, "run"), plural(1200, "run")], ["0 runs", "1,200 runs"]));
});

describe("means and quantiles", () => {
  test("mean leaves out what is missing", () => assert.equal(mean([1, null, 3, NaN, undefined]), 2));
  test("of nothing there is none", () => {
    assert.equal(mean([null]), null);
    assert.equal(median([]), null);
  });
  test("median of an even number of values is between the middle two", () => assert.equal(median([4, 1, 3, 2]), 2.5));
  test("quantile interpolates", () => assert.equal(quantile([0, 10], 0.25), 2.5));
  test("quantiles 0 and 1 are the extremes", () => {
    assert.deepEqual([quantile([3, 1, 2], 0), quantile([3, 1, 2], 1)], [1, 3]);
  });
  test("quantile takes typed arrays and leaves them as they are", () => {
    const values = new Float32Array([3, NaN, 1]);
    assert.equal(quantile(values, 0.5), 2);
    assert.deepEqual([...values], [3, NaN, 1]);
  });
});

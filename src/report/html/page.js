// Floors for another GPU. The page is complete without this.
"use strict";
const choice = document.getElementById("gpu");

function time(seconds) {
  const [value, unit] = seconds >= 1 ? [seconds, "s"] : seconds >= 1e-3 ? [seconds * 1e3, "ms"] : [seconds * 1e6, "µs"];
  return value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2) + " " + unit;
}

choice.addEventListener("change", () => {
  const { w: bandwidth, c: compute } = choice.selectedOptions[0].dataset;
  const floor = (e) => Math.max(e.dataset.b / bandwidth, e.dataset.f / compute);
  const sums = {};
  for (const strip of document.querySelectorAll(".strip")) {
    let whole = 0;
    for (const run of strip.children) {
      let sum = 0;
      for (const launch of run.firstChild.children) {
        const seconds = floor(launch);
        launch.style.flexGrow = seconds * 1e9;
        sum += seconds;
      }
      run.style.flexGrow = sum * 1e9;
      whole += sum;
    }
    sums[strip.id] = whole;
  }
  for (const e of document.querySelectorAll(".fl, .floor")) e.textContent = time(floor(e));
  for (const e of document.querySelectorAll(".sum")) e.textContent = time(sums[e.dataset.of]);
  for (const e of document.querySelectorAll(".rate")) e.textContent = (1 / sums[e.dataset.of]).toFixed(0);
  for (const e of document.querySelectorAll(".share")) {
    const share = (100 * floor(e) * e.dataset.n) / sums[e.dataset.of];
    e.firstChild.style.width = share + "%";
    e.lastChild.textContent = share.toFixed(1) + " %";
  }
});

// Lines over time, of what this tab has seen.

import { html, useEffect, useRef } from "/web/vendor/preact.js";
import uPlot from "/web/vendor/uplot.js";

const HEIGHT = 150;
const LEAST_SHOWN_S = 60;

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString(undefined, { hour12: false });

function options(lines, format, width) {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: of("--quiet"), grid: { stroke: of("--line"), width: 1 }, ticks: { show: false } };
  const value = (_, raw) => (raw === null || raw === undefined ? "" : format(raw));
  return {
    width,
    height: HEIGHT,
    cursor: { drag: { x: false, y: false } },
    legend: { live: false },
    scales: {
      x: { range: (_, low, high) => [Math.min(low, high - LEAST_SHOWN_S), high] },
      y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1) * 1.1] },
    },
    axes: [
      { ...axis, space: 90, values: (_, ticks) => ticks.map(clock) },
      { ...axis, size: 70, values: (_, ticks) => ticks.map(format) },
    ],
    series: [
      { label: "at" },
      ...lines.map((line, index) => ({ label: line.name, stroke: of(`--series-${index + 1}`), width: 2, value })),
    ],
  };
}

/**
 * @param {{title: string, at: number[], lines: {name: string, values: number[]}[], format: (value: number) => string}} of
 */
export function Chart({ title, at, lines, format }) {
  const place = useRef(null);
  const plot = useRef(null);
  const data = [at, ...lines.map((line) => line.values)];
  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(lines, format, place.current.clientWidth), data, place.current);
    };
    draw();
    const size = new ResizeObserver(() => plot.current.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    size.observe(place.current);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", draw);
    return () => {
      size.disconnect();
      scheme.removeEventListener("change", draw);
      plot.current.destroy();
    };
  }, []);
  useEffect(() => plot.current?.setData(data), [at]);
  const last = lines.map((line) => `${line.name} ${format(line.values.at(-1) ?? 0)}`).join(", ");
  return html`<figure class="chart">
    <figcaption>${title}</figcaption>
    <div ref=${place} role="img" aria-label=${`${title}: ${last}`}></div>
  </figure>`;
}

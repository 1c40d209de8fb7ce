// Draws the plots of the report from the numbers in #report-data, and keeps them in step.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const methods = new Map(data.methods.map((m) => [m.name, m]));
  const state = { axis: "seconds", metric: "train_loss" };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("screen and (max-width: 44rem)");
  let printing = false;
  const plots = [];

  // Plotly reads a little HTML in names: say them literally.
  const literal = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (text) => (text.length > 30 ? text.slice(0, 29) + "…" : text);
  const isDark = () => dark.matches && !printing;
  const color = (method) => methods.get(method)[isDark() ? "dark" : "light"];
  const ink = () => (isDark()
    ? { text: "#b7bfca", grid: "#262d36", bg: "#101317", panel: "#181c22", one: "#7d8896" }
    : { text: "#4b535d", grid: "#e8ebef", bg: "#ffffff", panel: "#ffffff", one: "#8a939e" });
  const faded = (hex, alpha) => {
    const part = (i) => parseInt(hex.slice(i, i + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${alpha})`;
  };

  const xTitles = { seconds: "training time (seconds)", step: "steps", epoch: "epochs" };
  const yTitles = { train_loss: "training loss", train_error: "training error", test_error: "test error" };

  function band(curve, visible) {
    return {
      x: curve.x.concat(curve.x.slice().reverse()), y: curve.high.concat(curve.low.slice().reverse()),
      type: "scatter", mode: "lines", fill: "toself", fillcolor: faded(color(curve.method), isDark() ? 0.2 : 0.13),
      line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: curve.method, visible,
      meta: curve.method,
    };
  }

  function line(curve, visible, format) {
    const method = methods.get(curve.method);
    return {
      x: curve.x, y: curve.mean, type: "scatter", mode: "lines", name: literal(short(method.title)),
      line: { color: color(curve.method), width: 2.25, dash: method.dash }, legendgroup: curve.method, visible,
      meta: curve.method, hovertemplate: `%{y:${format}}`,
    };
  }

  // The largest value after the first twentieth: an untrained model's error would flatten all the rest.
  const afterStart = (curves) => Math.max(0.01, ...curves.flatMap((c) => c.high.filter((_, i) => c.x[i] >= c.x.at(-1) / 20)));

  function curveTraces(curves, plot, format) {
    const bands = curves.filter((c) => c.seeds > 1).map((c) => band(c, plot.visible(c.method)));
    return bands.concat(curves.map((c) => line(c, plot.visible(c.method), format)));
  }

  // On paper a plot has a size of its own, in pixels: nobody resizes it there.
  const paper = (element) => (element.classList.contains("small")
    ? { autosize: false, width: 325, height: 230 } : { autosize: false, width: 660, height: 340 });

  function layout(x, y, extra) {
    const c = ink();
    const axis = {
      gridcolor: c.grid, zeroline: false, linecolor: c.grid, ticks: "", automargin: true, fixedrange: narrow.matches,
    };
    const size = narrow.matches ? 11 : 12.5;
    return {
      font: { family: getComputedStyle(document.body).fontFamily, size, color: c.text },
      paper_bgcolor: c.bg, plot_bgcolor: c.bg, margin: { l: 48, r: 24, t: 14, b: 44 }, hovermode: "x unified",
      hoverlabel: { bgcolor: c.panel, bordercolor: c.grid, font: { color: isDark() ? "#eceff3" : "#16191d", size } },
      dragmode: narrow.matches ? false : "zoom", showlegend: false, transition: { duration: 0 },
      ...extra, xaxis: { ...axis, ...x }, yaxis: { ...axis, ...y },
    };
  }

  const one = () => ({ // The line of what is uniform.
    type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, layer: "below", line: { color: ink().one, width: 1, dash: "dot" },
  });

  const builders = {
    curves(run, plot) {
      const { axis, metric } = state;
      const loss = metric === "train_loss";
      const y = loss
        ? { type: "log", dtick: "D2", title: { text: yTitles[metric] }, tickformat: "~r", hoverformat: ".4~r" }
        : { tickformat: "~%", title: { text: yTitles[metric] }, range: [0, 1.05 * afterStart(run.curves[metric][axis])] };
      const x = { title: { text: xTitles[axis] }, hoverformat: axis === "step" ? ",d" : ".3~r" };
      const legend = { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, itemclick: "toggle" };
      return [
        curveTraces(run.curves[metric][axis], plot, loss ? ".4~r" : ".2%"),
        layout(x, y, { uirevision: axis + metric, showlegend: !narrow.matches, legend }),
      ];
    },
    ess(run, plot) {
      const y = { tickformat: "~%", range: [0, 1.05] };
      return [curveTraces(run.sampling.ess, plot, ".1%"), layout({ title: { text: "steps" } }, y, { shapes: [one()] })];
    },
    variance_reduction(run, plot) {
      const y = { ticksuffix: "×", rangemode: "normal" };
      return [
        curveTraces(run.sampling.variance_reduction, plot, ".3~r"),
        layout({ title: { text: "steps" } }, y, { shapes: [one()] }),
      ];
    },
    distribution(run, plot) {
      const traces = run.distributions.flatMap((d) => d.times.map((time, k) => {
        const part = (k + 1) / d.times.length;
        return {
          x: time.ratios.map((_, i) => i / (time.ratios.length - 1)), y: time.ratios, type: "scatter", mode: "lines",
          name: `${literal(short(methods.get(d.method).title))}, step ${time.step.toLocaleString("en")}`,
          line: { color: color(d.method), width: 1 + 1.25 * part, dash: methods.get(d.method).dash },
          opacity: 0.25 + 0.75 * part, visible: plot.visible(d.method), meta: d.method, legendgroup: d.method,
          hoverinfo: part === 1 ? "all" : "skip", hovertemplate: part === 1 ? "%{y:.3~r}×" : undefined,
        };
      }));
      const x = { tickformat: "~%", range: [0, 1], dtick: narrow.matches ? 0.5 : 0.2, title: { text: "examples, from the least to the most likely" } };
      const y = { type: "log", dtick: "D2", tickformat: "~r", title: { text: "n p" } };
      return [traces, layout(x, y, { shapes: [one()] })];
    },
  };

  class Plot {
    constructor(element, run) {
      this.element = element;
      this.run = run;
      this.hidden = new Set();
      this.build = builders[element.dataset.plot];
    }
    visible(method) { return this.hidden.has(method) ? "legendonly" : true; }
    show(method, shown) { if (shown) this.hidden.delete(method); else this.hidden.add(method); }
    async draw() {
      const [traces, design] = this.build(this.run, this);
      const bar = this.element.dataset.plot === "curves" && !narrow.matches && !printing;
      const config = {
        responsive: true, displaylogo: false, displayModeBar: bar, modeBarButtons: [["toImage", "resetScale2d"]],
      };
      const first = !this.element.classList.contains("js-plotly-plot");
      const drawn = Plotly.react(this.element, traces, design, config);
      // At once, and not when the first is done: the browser prints as soon as its event has been handled.
      if (printing) Plotly.relayout(this.element, paper(this.element));
      else if (this.printed) Plotly.relayout(this.element, { autosize: true, width: null, height: null });
      this.printed = printing;
      await drawn;
      if (first) {
        this.element.on("plotly_legendclick", (event) => {
          const method = event.data[event.curveNumber].meta;
          this.show(method, this.hidden.has(method));
          this.draw();
          return false;
        });
        this.element.on("plotly_legenddoubleclick", (event) => {
          const method = event.data[event.curveNumber].meta;
          const alone = methods.size - this.hidden.size === 1 && !this.hidden.has(method);
          for (const name of methods.keys()) this.show(name, alone || name === method);
          this.draw();
          return false;
        });
      }
    }
  }

  const drawAll = () => Promise.all(plots.map((plot) => plot.draw()));

  function wire() {
    for (const chip of document.querySelectorAll(".chip")) {
      chip.addEventListener("click", () => {
        const shown = chip.getAttribute("aria-pressed") !== "true";
        chip.setAttribute("aria-pressed", String(shown));
        for (const plot of plots) plot.show(chip.dataset.method, shown);
        drawAll();
      });
    }
    for (const input of document.querySelectorAll(".switch input")) {
      if (input.checked) state[input.name] = input.value;
      input.addEventListener("change", () => {
        state[input.name] = input.value;
        for (const plot of plots) if (plot.element.dataset.plot === "curves") plot.draw();
      });
    }
    for (const button of document.querySelectorAll(".command button")) {
      button.addEventListener("click", async () => {
        const pre = button.parentElement.querySelector("pre");
        getSelection().selectAllChildren(pre);
        try { await navigator.clipboard.writeText(pre.textContent); button.textContent = "Copied"; }
        catch { button.textContent = "Selected"; }
        setTimeout(() => { button.textContent = "Copy"; }, 2000);
      });
    }
    dark.addEventListener("change", drawAll);
    narrow.addEventListener("change", drawAll);
    addEventListener("beforeprint", () => { printing = true; drawAll(); });
    addEventListener("afterprint", () => { printing = false; drawAll(); });
  }

  async function start() {
    wire();
    for (const element of document.querySelectorAll("[data-plot]")) {
      plots.push(new Plot(element, data.runs[Number(element.dataset.run)]));
    }
    for (const plot of plots) { // One at a time: the page stays alive while they come.
      await plot.draw();
      await new Promise((resolve) => setTimeout(resolve));
    }
    document.documentElement.dataset.drawn = String(plots.length);
  }
  start();
})();

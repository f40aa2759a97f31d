"""The script of a report page: draws the charts from the embedded data and switches their axes.

What is shown is kept in the address after `#` (`x`, `logx`, `log`, `hide`),
  so a view can be linked to. Once all charts
stand, the root element carries `data-drawn` (their number) and each plot says what it shows
(`data-x`, `data-traces`, `data-end`, `data-xtype`, `data-ytype`).
"""

from __future__ import annotations

SCRIPT = r"""
"use strict";
(() => {
  const root = document.documentElement;
  const fail = (message) => {
    root.dataset.error = message;
    const place = document.getElementById("failure");
    place.textContent = "A chart could not be drawn: " + message;
    place.hidden = false;
  };
  window.addEventListener("error", (event) => fail(event.message));
  window.addEventListener("unhandledrejection", (event) => fail(String(event.reason)));

  const { runs, figures, positions, numColours } = JSON.parse(document.getElementById("data").textContent);
  const form = document.querySelector(".controls form");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 640px)");
  const touch = matchMedia("(pointer: coarse)");
  const dashes = ["solid", "6px,3px", "2px,2px", "9px,3px,2px,3px"];
  const isAlone = runs.length === 1;
  const plot = (figure) => document.getElementById("plot-" + figure.name);
  const logBox = (figure) => document.getElementById("log-" + figure.name);

  // What is shown, from the address and back.
  const state = { x: "steps", logx: false, hidden: new Set() };
  const read = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    state.x = ["steps", "tokens", "flops", "seconds"].includes(given.get("x")) ? given.get("x") : "steps";
    state.logx = given.get("logx") === "1";
    state.hidden = new Set((given.get("hide") ?? "").split(",").filter(Boolean).map(Number));
    const logs = given.get("log")?.split(",");
    for (const figure of figures) logBox(figure).checked = logs ? logs.includes(figure.name) : figure.is_log;
    form.elements.x.value = state.x;
    form.elements.logx.checked = state.logx;
    for (const box of form.querySelectorAll("[name=run]")) box.checked = !state.hidden.has(Number(box.value));
  };
  const write = () => {
    const shown = new URLSearchParams();
    if (state.x !== "steps") shown.set("x", state.x);
    if (state.logx) shown.set("logx", "1");
    if (figures.some((figure) => logBox(figure).checked !== figure.is_log))
      shown.set("log", figures.filter((figure) => logBox(figure).checked).map((figure) => figure.name).join(","));
    if (state.hidden.size) shown.set("hide", [...state.hidden].join(","));
    history.replaceState(null, "", "#" + shown);
  };

  // Times are told in the largest unit that keeps the longest run above two of it.
  const bounds = (values) => values.reduce(
    ([low, high], value) => (value === null ? [low, high] : [Math.min(low, value), Math.max(high, value)]),
    [Infinity, -Infinity],
  );
  const longest = bounds(positions.map((place) => bounds(place.seconds)[1]))[1];
  const timeUnits = [["d", 86400], ["h", 3600], ["min", 60]];
  const [timeUnit, timeScale] = timeUnits.find(([, length]) => longest > 2 * length) ?? ["s", 1];
  const axisTitles = {
    steps: "step", tokens: "tokens", flops: "training FLOPs", seconds: "training time (" + timeUnit + ")",
  };
  const along = (trace) => {
    const values = positions[trace.x][state.x];
    return state.x === "seconds" ? values.map((value) => (value === null ? null : value / timeScale)) : values;
  };

  // All charts share their horizontal ends, so that they can be read down the page.
  const ends = () => {
    const places = positions.map((place) => place[state.x]);
    const values = places.flatMap((place) => [place.find((value) => value > 0) ?? null, place.at(-1)]);
    const scale = state.x === "seconds" ? timeScale : 1;
    return bounds(values).map((value) => (Number.isFinite(value) && value > 0 ? value / scale : 1));
  };

  // Plotly reads markup and %{...} in texts; a name from a file must stay a name.
  const literal = (text) => text.replace(/[&<>%{}]/g, (sign) => "&#" + sign.charCodeAt(0) + ";");

  const look = (trace, ink) => {
    const place = isAlone ? trace.part : trace.run;
    const colour = ink("--run-" + (place % numColours));
    const dash = isAlone ? "solid" : dashes[(Math.floor(trace.run / numColours) + trace.part) % dashes.length];
    switch (trace.kind) {
      case "raw": return { mode: "lines", opacity: isAlone ? 0.3 : 0.18, line: { color: colour, width: 1 } };
      case "heldout": {
        const other = isAlone ? ink("--run-1") : colour;
        const marker = { color: ink("--card"), size: 7, symbol: "circle", line: { color: other, width: 2 } };
        return { mode: "lines+markers", line: { color: other, width: 1, dash: "dot" }, marker };
      }
      case "clipped": {
        if (isAlone) return { mode: "markers", marker: { color: ink("--run-1"), size: trace.y.length > 100 ? 4 : 6 } };
        return { mode: "markers", marker: { size: 5, symbol: "x-thin", line: { color: colour, width: 1.2 } } };
      }
      default: return { mode: "lines", line: { color: colour, width: trace.kind === "mean" ? 2 : 1.5, dash } };
    }
  };

  // With more than a hundred marks they are a band: smaller, and without the line through them.
  const lighten = (style, size) => {
    if (size > 100 && style.mode === "lines+markers")
      return { ...style, mode: "markers", marker: { ...style.marker, size: 4 } };
    return style;
  };

  const traceOf = (trace, figure, ink) => {
    const name = literal(isAlone ? trace.label : runs[trace.run] + ", " + trace.label);
    const style = lighten(look(trace, ink), trace.y.length);
    const quiet = trace.kind === "clipped" || (trace.kind === "raw" && !isAlone);
    return {
      type: "scatter", x: along(trace), y: trace.y, name, connectgaps: false, showlegend: false,
      cliponaxis: trace.kind !== "heldout",
      hoverinfo: quiet ? "skip" : undefined,
      hovertemplate: quiet ? undefined : "%{y:" + figure.format + "}  " + name + "<extra></extra>",
      ...style,
    };
  };

  const layoutOf = (figure, ink, traces) => {
    const font = { family: ink("--sans"), size: 12, color: ink("--muted") };
    const axis = {
      gridcolor: ink("--grid"), linecolor: ink("--rule"), zeroline: false, ticks: "", automargin: true, tickfont: font,
    };
    const isLog = logBox(figure).checked;
    const yaxis = {
      ...axis, type: isLog ? "log" : "linear", fixedrange: true, nticks: 7, hoverformat: figure.format,
      exponentformat: "power", minexponent: 5, separatethousands: true,
    };
    const values = traces.flatMap((trace) => trace.y);
    const isCut = Boolean(figure.top) && !isLog && !state.logx;
    if (isLog) {
      const [low, high] = bounds(values.filter((value) => value > 0));
      if (low <= high) Object.assign(yaxis, logTicks(low, high, 0.03));
    } else {
      if (figure.format.includes("%")) yaxis.tickformat = "~%";
      if (!["bits_per_byte", "loss", "gradient_norm"].includes(figure.name)) yaxis.rangemode = "tozero";
    }
    if (isCut) {
      const low = bounds(values)[0];
      const pad = 0.06 * (figure.top - low);
      yaxis.range = [low - pad, figure.top + pad];
    }
    for (const note of plot(figure).parentNode.querySelectorAll(".above")) note.hidden = !isCut;
    const xaxis = {
      ...axis, type: state.logx ? "log" : "linear", showgrid: false, showline: true, fixedrange: touch.matches,
      nticks: narrow.matches ? 5 : figure.is_wide ? 11 : 7, exponentformat: state.x === "flops" ? "power" : "B",
      hoverformat: { steps: ",.0f", tokens: ",.0f", flops: ".3~e", seconds: ".2~f" }[state.x],
      title: { text: axisTitles[state.x], font, standoff: 8 },
      showspikes: !touch.matches, spikemode: "across", spikethickness: 1, spikedash: "solid", spikecolor: ink("--rule"),
      spikesnap: "cursor",
    };
    const [first, last] = ends();
    if (state.logx) Object.assign(xaxis, logTicks(first, last, 0));
    else xaxis.range = [0, last];
    const clear = "rgba(0,0,0,0)";
    return {
      autosize: true, margin: { l: 44, r: 14, t: 12, b: 40 }, paper_bgcolor: clear, plot_bgcolor: clear, font,
      xaxis, yaxis, hovermode: "x unified", hoverdistance: 30, dragmode: touch.matches ? false : "zoom",
      hoverlabel: {
        bgcolor: ink("--card"), bordercolor: ink("--rule"), font: { ...font, color: ink("--ink") }, namelength: -1,
      },
      modebar: { color: ink("--muted"), activecolor: ink("--ink"), bgcolor: clear },
      uirevision: [state.x, state.logx, isLog].join(),
    };
  };

  // Log axes get round numbers as ticks: 1, 2, 5 over few decades, powers of ten over many.
  const logTicks = (low, high, share) => {
    const pad = Math.max(share * Math.log10(high / low), 0.01);
    const range = [Math.log10(low) - pad, Math.log10(high) + pad];
    const span = range[1] - range[0];
    const steps = span > 3 ? [1] : span > 1.3 ? [1, 2, 5] : span > 0.6 ? [1, 1.5, 2, 3, 4, 6, 8] : null;
    if (steps === null) return { range };
    const tickvals = [];
    for (let power = Math.floor(range[0]); power <= range[1]; power++)
      for (const step of steps) {
        const value = Number((step * 10 ** power).toPrecision(3));
        if (Math.log10(value) >= range[0] && Math.log10(value) <= range[1]) tickvals.push(value);
      }
    if (tickvals.length > 9) return { range };
    const written = (value) => {
      const power = Math.floor(Math.log10(value) + 1e-9);
      const factor = Number((value / 10 ** power).toPrecision(3));
      if (power >= -3 && power <= 4) return value.toLocaleString("en");
      return (factor === 1 ? "" : factor + "×") + "10<sup>" + String(power).replace("-", "−") + "</sup>";
    };
    return { range, tickvals, ticktext: tickvals.map(written) };
  };

  const config = {
    displaylogo: false, responsive: true, scrollZoom: false, doubleClick: "reset", showSendToCloud: false,
    displayModeBar: touch.matches ? false : "hover", toImageButtonOptions: { format: "svg" },
    modeBarButtons: [["toImage", "resetScale2d"]],
  };

  const drawOne = (figure) => {
    const style = getComputedStyle(root);
    const ink = (name) => style.getPropertyValue(name).trim();
    const shown = figure.traces.filter((trace) => !state.hidden.has(trace.run));
    // The faint lines first, the marks last, whatever run they belong to.
    const order = ["raw", "line", "mean", "clipped", "heldout"];
    shown.sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind));
    const traces = shown.map((trace) => traceOf(trace, figure, ink));
    const node = plot(figure);
    return Plotly.react(node, traces, layoutOf(figure, ink, shown), config).then(() => {
      const end = bounds(traces.flatMap((trace) => trace.x))[1];
      const { xaxis, yaxis } = node.layout;
      Object.assign(node.dataset, { x: state.x, traces: traces.length, end, xtype: xaxis.type, ytype: yaxis.type });
      if (!node.dataset.linked) { node.dataset.linked = "1"; link(node); }
    });
  };
  const drawAll = () => Promise.all(figures.map(drawOne)).then(() => { root.dataset.drawn = figures.length; });

  // Zooming one chart zooms them all: they share their horizontal axis.
  let isFollowing = false;
  const link = (node) => node.on("plotly_relayout", (change) => {
    if (isFollowing) return;
    const [low, high] = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    const resets = change["xaxis.autorange"] === true;
    if (low === undefined && !resets) return;
    isFollowing = true;
    const wanted = resets ? { "xaxis.autorange": true } : { "xaxis.range": [low, high], "xaxis.autorange": false };
    const others = figures.map(plot).filter((other) => other !== node);
    Promise.all(others.map((other) => Plotly.relayout(other, wanted))).finally(() => { isFollowing = false; });
  });

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", () => {
    state.x = form.elements.x.value;
    state.logx = form.elements.logx.checked;
    state.hidden = new Set([...form.querySelectorAll("[name=run]:not(:checked)")].map((box) => Number(box.value)));
    write();
    drawAll();
  });
  for (const figure of figures) logBox(figure).addEventListener("change", () => { write(); drawOne(figure); });
  window.addEventListener("hashchange", () => { read(); drawAll(); });
  for (const query of [dark, narrow, touch]) query.addEventListener("change", drawAll);
  read();
  drawAll();
})();
"""

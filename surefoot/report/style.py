"""The style sheet of a report page. Colours live here alone: the script reads them from the custom properties."""

from __future__ import annotations

NUM_RUN_COLOURS = 8  # beyond it the colours come again, with dashed lines

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f3; --card: #ffffff; --ink: #1c2024; --muted: #5f6670; --rule: #dfdfd9; --grid: #ebebe6;
  --accent: #2454c6; --alert: #b42318; --mark: #e8eefc;
  --run-0: #2454c6; --run-1: #c9500a; --run-2: #0a7f64; --run-3: #9a2f94;
  --run-4: #85680a; --run-5: #0a789e; --run-6: #bd2350; --run-7: #566373;
  --sans: "Inter", "Source Sans 3", system-ui, -apple-system, "Segoe UI", "Helvetica Neue", "Liberation Sans",
  sans-serif;
  --mono: ui-monospace, "SF Mono", "JetBrains Mono", "Cascadia Mono", Menlo, Consolas, "Liberation Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121417; --card: #1a1d21; --ink: #e8e9ea; --muted: #9aa2ad; --rule: #30353b; --grid: #272b31;
    --accent: #85aaff; --alert: #ff8a7a; --mark: #232c40;
    --run-0: #85aaff; --run-1: #ff9d5c; --run-2: #4fcfa7; --run-3: #e48fe0;
    --run-4: #dcbd4a; --run-5: #5ec7ec; --run-6: #ff82a6; --run-7: #aab6c4;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-padding-top: 4rem; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 var(--sans); }
main, header.top, footer { max-width: 1240px; margin: 0 auto; padding: 0 24px; }
h1, h2, h3 { line-height: 1.2; margin: 0; font-weight: 650; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h1 { font-size: 30px; letter-spacing: -0.02em; }
h2 { font-size: 20px; margin: 48px 0 14px; }
h3 { font-size: 15px; }
main > h3 { margin: 22px 0 8px; }
p { margin: 0; }
a { color: var(--accent); }
code, pre, td.mono { font-family: var(--mono); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; border-radius: 3px; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.none { color: var(--muted); }

header.top { padding-top: 40px; padding-bottom: 28px; }
.over { color: var(--muted); font-size: 13px; margin-bottom: 6px; }
.verdict { font-size: 17px; margin-top: 10px; color: var(--muted); max-width: 75ch; text-wrap: pretty; }
.verdict b { color: var(--ink); white-space: nowrap; font-weight: 600; font-variant-numeric: tabular-nums; }
.notes { margin: 14px 0 0; padding: 10px 14px 10px 30px; border-left: 3px solid var(--alert);
  background: var(--card); }
.failure { margin-top: 14px; color: var(--alert); }
dl.tiles { display: grid; grid-template-columns: repeat(5, 1fr); gap: 1px; margin: 26px 0 0;
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px; overflow: hidden; }
dl.tiles div { box-shadow: 0 0 0 1px var(--rule); padding: 12px 16px 13px; }
dl.tiles dt { font-size: 12.5px; color: var(--muted); }
dl.tiles dd { margin: 2px 0 0; font-size: 21px; font-weight: 600; letter-spacing: -0.01em;
  font-variant-numeric: tabular-nums; }
dl.tiles dd small { font-size: 12.5px; font-weight: 400; letter-spacing: 0; color: var(--muted); }

.controls { position: sticky; top: 0; z-index: 5; background: var(--page); border-bottom: 1px solid var(--rule); }
.controls form { max-width: 1240px; margin: 0 auto; padding: 8px 24px; display: flex; flex-wrap: wrap; gap: 8px 22px;
  align-items: center; font-size: 13.5px; }
.controls fieldset { border: 0; margin: 0; padding: 0; min-width: 0; display: flex; align-items: center;
  flex-wrap: wrap; }
.controls legend { float: left; padding: 0 10px 0 0; color: var(--muted); }
.choice label { position: relative; cursor: pointer; border: 1px solid var(--rule); background: var(--card);
  padding: 4px 12px; margin-left: -1px; }
.choice label:first-of-type { border-radius: 7px 0 0 7px; }
.choice label:last-of-type { border-radius: 0 7px 7px 0; }
.choice input { position: absolute; inset: 0; opacity: 0; margin: 0; cursor: pointer; }
.choice label:has(input:checked) { background: var(--ink); border-color: var(--ink); color: var(--page); z-index: 1; }
.choice label:has(input:focus-visible) { outline: 2px solid var(--accent); outline-offset: 2px; }
.tick { cursor: pointer; display: inline-flex; gap: 6px; align-items: center; color: var(--muted); }
.tick input, .runs input { margin: 0; accent-color: var(--accent); width: 15px; height: 15px; flex: none; }
.runs { gap: 4px 16px; }
.runs label { cursor: pointer; display: inline-flex; gap: 6px; align-items: center; max-width: 100%;
  overflow-wrap: anywhere; }
.swatch { width: 16px; height: 0; border-top: 3px solid currentColor; flex: none; display: inline-block;
  vertical-align: middle; }
.swatch.dashed { border-top-style: dashed; }

.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 18px;
  margin-top: 22px; }
.chart { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 14px 16px 6px;
  min-width: 0; margin: 0;
  display: flex; flex-direction: column; }
.chart.wide { grid-column: 1 / -1; }
.chart > div.title { display: flex; gap: 4px 10px; align-items: baseline; flex-wrap: wrap; }
.chart > div.title .unit { color: var(--muted); font-size: 13px; }
.chart > div.title .tick { margin-left: auto; font-size: 13px; align-self: center; }
.chart .key { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; padding: 0; margin: 6px 0 0;
  font-size: 13px; color: var(--muted); min-height: 20px; }
.chart .key svg { width: 26px; height: 10px; vertical-align: middle; margin-right: 6px; overflow: visible; }
.chart [hidden] { display: none; }
.chart .note { font-size: 13px; color: var(--muted); }
.plot { flex: 1 0 270px; width: 100%; overflow: hidden; }
.wide .plot { flex-basis: 380px; }
.plot .modebar { opacity: 0; }
.plot:hover .modebar { opacity: 0.8; }

.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
table { border-collapse: collapse; font-size: 14px; }
.numbers, .plain { width: 100%; }
.numbers th, .numbers td, .plain th, .plain td { padding: 8px 14px; text-align: left; vertical-align: top;
  border-top: 1px solid var(--grid); }
.numbers thead th, .plain thead th { border-top: 0; color: var(--muted); font-weight: 500; font-size: 13px;
  vertical-align: bottom; }
.numbers th, .numbers td { padding-left: 10px; padding-right: 12px; }
.numbers th { white-space: nowrap; }
.numbers td { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.numbers thead th:not(:first-child) { text-align: right; }
tbody th { font-weight: 600; }
.plain tbody th { font-weight: 500; font-family: var(--mono); font-size: 13px; }
.plain td { font-family: var(--mono); font-size: 13px; min-width: 10em; overflow-wrap: anywhere; }
.plain thead th { min-width: 10em; }
.best { font-weight: 700; }
.nested th, .nested td { padding: 3px 0; vertical-align: top; text-align: left; }
.nested > tbody > tr > th { font-weight: 400; color: var(--muted); padding-right: 22px; min-width: 9em; }
.nested td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.nested .nested th { min-width: 10em; }
.nested > tbody > tr > td > .nested { margin: -3px 0 4px; }
.facts > .nested { width: 100%; }
.facts > .nested > tbody > tr > th { font-weight: 600; color: var(--ink); width: 11em; }
.facts > .nested > tbody > tr + tr > * { border-top: 1px solid var(--grid); }
.facts > .nested > tbody > tr > * { padding-top: 8px; padding-bottom: 8px; }
ol.items { margin: 0; padding-left: 22px; }
ol.items > li + li { margin-top: 6px; }

details { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; margin-top: 8px; }
summary { cursor: pointer; padding: 10px 16px; font-weight: 600; overflow-wrap: anywhere; }
summary small { font-weight: 400; color: var(--muted); }
details > .inside { padding: 2px 16px 14px; border-top: 1px solid var(--grid); }
details .scroll { border: 0; border-top: 1px solid var(--grid); border-radius: 0 0 10px 10px; }
pre { margin: 12px 0 0; font-size: 13px; line-height: 1.5; white-space: pre-wrap; overflow-wrap: anywhere;
  unicode-bidi: isolate; tab-size: 4; }
pre + pre { border-top: 1px solid var(--grid); padding-top: 12px; }
pre mark { background: var(--mark); color: inherit; padding: 1px 0; border-radius: 2px; }
.hint { color: var(--muted); font-size: 14px; margin-bottom: 8px; }
footer { padding-top: 44px; padding-bottom: 48px; color: var(--muted); font-size: 13px; }
@media (max-width: 900px) { dl.tiles { grid-template-columns: repeat(3, 1fr); } }
@media (max-width: 640px) {
  main, header.top, footer { padding-left: 14px; padding-right: 14px; }
  header.top { padding-top: 24px; padding-bottom: 20px; }
  h1 { font-size: 24px; }
  .verdict { font-size: 15.5px; }
  h2 { margin-top: 36px; }
  dl.tiles { grid-template-columns: 1fr 1fr; }
  dl.tiles div:last-child:nth-child(odd) { grid-column: 1 / -1; }
  dl.tiles dd { font-size: 18px; }
  .controls form { padding: 6px 14px; gap: 6px 14px; }
  .choice legend { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .choice label { padding: 4px 9px; }
  .chart { padding: 12px 10px 4px; }
  .plot { flex-basis: 230px; }
  .wide .plot { flex-basis: 300px; }
  .facts .nested, .facts .nested > tbody, .facts .nested tr, .facts .nested th, .facts .nested td { display: block; }
  .facts .nested .nested tr { display: flex; gap: 12px; }
  .facts .nested .nested th { flex: 0 0 9.5em; min-width: 0; padding-right: 0; overflow-wrap: anywhere; }
  .facts .nested .nested td { flex: 1; min-width: 0; }
  .facts .nested .nested tr:has(.nested) { display: block; }
  .facts .nested .nested .nested { padding-left: 10px; border-left: 2px solid var(--grid); }
  .facts > .nested > tbody > tr > th { width: auto; padding-bottom: 0; }
  .facts > .nested > tbody > tr > td { border-top: 0; padding-top: 2px; }
  .facts > .nested > tbody > tr + tr > td { border-top: 0; }
}
@media print { .controls { display: none; } .chart, details, .scroll { break-inside: avoid;
  } body { background: #fff; } }
"""

// pithtrain report: one page about one or several runs, that opens without a network.
#include <nlohmann/json.hpp>
#include "apps/commands.h"
#include "engine/config.h"
#include "engine/file_io.h"
#include "engine/schedule.h"

namespace pith {
namespace {
using nlohmann::json;

struct Options {
  vector<string> runs;
  string out;
};

// The page around the runs' data. One chart a number that any run has, heat maps a run.
constexpr const char* kHead = R"html(<!doctype html><meta charset="utf-8"><title>Report</title>
<style>
body { font: 14px system-ui, sans-serif; margin: 1.5em; color: #222 }
figure { display: inline-block; margin: 0 1em 1em 0; vertical-align: top; max-width: 100%;
  overflow-x: auto }
.chart text { font-size: 11px } .chart { width: 440px; max-width: 100% }
figcaption { font-weight: 600 } pre { overflow: auto; font-size: 12px }
canvas { width: 900px; max-width: 100%; image-rendering: pixelated; border: 1px solid #ccc }
figure p { margin: 0; min-height: 1.3em; font-size: 12px }
</style><h1>Training report</h1><p id="legend"></p><div id="charts"></div>
<script>
const runs = )html";

constexpr const char* kPage = R"html(;
const color = i => ["#1f6fb4", "#d1495b", "#2e8b57", "#b8860b", "#7b4fa3", "#555"][i % 6];
const format = v => v && (Math.abs(v) >= 1e4 || Math.abs(v) < 1e-3) ? v.toExponential(2)
  : +v.toPrecision(4);
const add = (parent, tag, properties) =>
  parent.appendChild(Object.assign(document.createElement(tag), properties));
function figure(parent, textContent, innerHTML) {  // -> what it shows, a line below for words
  const box = add(parent, "figure");
  add(box, "figcaption", {textContent});
  return [add(box, "div", {innerHTML}).firstChild, add(box, "p")];
}
function chart(key) {
  const lines = runs.map((run, i) => ({color: color(i), name: run.name,
    points: run.steps.filter(s => Number.isFinite(s[key])).map(s => [s.step, s[key]])}))
    .filter(line => line.points.length);
  if (!lines.length) return;
  const range = axis => {
    const values = lines.flatMap(line => line.points.map(p => p[axis])).sort((a, b) => a - b);
    const low = values[0], high = values.at(-1), room = low < high ? 0 : Math.abs(low) / 10 || 1;
    return [low - room, high + room];
  };
  const [x0, x1] = range(0), [y0, y1] = range(1), left = 62, right = 432, top = 8, bottom = 190;
  const X = x => left + (x - x0) / (x1 - x0) * (right - left);
  const Y = y => bottom - (y - y0) / (y1 - y0) * (bottom - top);
  let shapes = "";
  for (let i = 0; i < 5; ++i) {
    const x = Math.round(x0 + (x1 - x0) * i / 4), y = y0 + (y1 - y0) * i / 4;
    shapes += `<path d="M${left} ${Y(y)}H${right}" stroke="#ddd"/>
      <text x="57" y="${Y(y) + 4}" text-anchor="end">${format(y)}</text>
      <text x="${X(x)}" y="215" text-anchor="${i == 4 ? "end" : "middle"}">${x}</text>`;
  }
  for (const {color, points} of lines)
    shapes += `<polyline fill="none" stroke="${color}" stroke-width="1.4" points="${points.map(
      p => X(p[0]).toFixed(1) + "," + Y(p[1]).toFixed(1)).join(" ")}"/>`;
  const [svg, note] = figure(document.getElementById("charts"), key,
    `<svg class="chart" viewBox="0 0 440 220">${shapes}<path stroke="#999"/></svg>`);
  svg.onmousemove = event => {
    const x = event.offsetX / svg.clientWidth * 440;
    const nearest = lines.map(line => [line.name, line.points.reduce((a, b) =>
      Math.abs(X(b[0]) - x) < Math.abs(X(a[0]) - x) ? b : a)]);
    svg.lastChild.setAttribute("d", `M${X(nearest[0][1][0])} ${top}V${bottom}`);
    note.textContent = nearest.map(([name, p]) => `${name} step ${p[0]}: ${p[1]}`).join("; ");
  };
}
function heat(parent, caption, table) {  // of numbers around 1: blue below, white, red above
  const [canvas, note] = figure(parent, caption, "<canvas></canvas>"), width = table[0].length;
  Object.assign(canvas, {width, height: table.length});
  canvas.style.height = Math.min(16 * table.length, 320) + "px";
  const context = canvas.getContext("2d");
  table.forEach((row, y) => row.forEach((v, x) => {
    const t = Math.max(-1, Math.min(1, Math.log2(Math.max(v, 1e-3)) / 2));
    const f = 255 * (1 - Math.abs(t));
    context.fillStyle = t > 0 ? `rgb(255,${f},${f})` : `rgb(${f},${f},255)`;
    context.fillRect(x, y, 1, 1);
  }));
  canvas.onmousemove = event => {
    const x = Math.floor(event.offsetX / canvas.clientWidth * width);
    const y = Math.floor(event.offsetY / canvas.clientHeight * table.length);
    if (table[y]) note.textContent = `MoE layer ${y}, column ${x}: ${format(table[y][x])}`;
  };
}
const unseen = ["step", "total_steps", "time", "tokens", "trained_tokens", "tokens_seen"];
for (const key of new Set(["loss", ...runs.flatMap(run => run.steps.flatMap(Object.keys))]))
  if (!unseen.includes(key)) chart(key);
runs.forEach((run, i) => {
  add(document.getElementById("legend"), "span",
    {style: "color:" + color(i), textContent: `\u25a0 ${run.name} `});
  const part = add(document.body, "section");
  add(part, "h2", {textContent: run.name});
  const loads = run.steps.filter(s => Array.isArray(s.expert_load?.max_over_mean))
   .map(s => ({step: s.step, ...s.expert_load}));
  const last = loads.filter(load => Array.isArray(load.counts)).pop();
  if (last) heat(part, `Load over mean, step ${last.step}: layers down, experts across`,
    last.counts.map(row => row.map(n => n * row.length / row.reduce((a, b) => a + b, 1e-9))));
  if (loads.length) heat(part, "Busiest expert over the mean: layers down, steps across",
    loads[0].max_over_mean.map((_, layer) => loads.map(load => load.max_over_mean[layer])));
  if (run.schedule) figure(part, "Schedule", run.schedule);
  for (const [title, textContent] of [["Events", run.events],
    ["Kernels of rank 0 (profile)", run.profile], ["Configuration", run.config]]) {
    if (!textContent) continue;
    const details = add(part, "details", {open: title === "Events"});
    add(details, "summary", {textContent: title});
    add(details, "pre", {textContent});
  }
});
</script>
)html";

// What the page needs of one run folder.
json run_data(const fs::path& run) {
  PITH_CHECK(fs::is_regular_file(run / "metrics.jsonl"),
    "{} is no run folder: it holds no metrics.jsonl", run);
  ifstream lines(run / "metrics.jsonl");
  json data = {{"name", run.string()}, {"steps", json::array()}, {"events", ""}};
  for (string text; getline(lines, text);) {
    json line = json::parse( // half a line: killed
      text, [](int depth, auto, auto&) { return depth < 8; }, /*allow_exceptions=*/false);
    if (!line.is_object()) continue;
    if (line["step"].is_number()) data["steps"].push_back(line);
    if (line["event"].is_string() && line["text"].is_string())
      data["events"].get_ref<string&>() +=
        fmt::format("after step {:>6}  {}: {}\n", line["after_step"].dump(),
          line["event"].get_ref<string&>(), line["text"].get_ref<string&>());
  }
  PITH_CHECK(!data["steps"].empty(), "{}: no step is in metrics.jsonl", run);
  const auto text_of = [&](const char* name) {
    return fs::exists(run / name) ? read_file(run / name) : "";
  };
  data["config"] = text_of("config.toml");
  data["profile"] = text_of("profile-rank0.txt");
  (void)problem_of([&] { // of an older version's configuration: no schedule
    const auto config = parse_run_config(text_of("config.toml"), "config.toml", {});
    if (const int64_t pp = config.parallel.pp; pp > 1 && pp <= 64)
      data["schedule"] = draw_svg(simulate(pp, 4 * pp, true, vector<StageCosts>(index(2 * pp))));
  });
  return data;
}

void report(const Options& options) {
  json runs = json::array();
  for (const string& run: options.runs) runs.push_back(run_data(run));
  string data = runs.dump(-1, ' ', true, json::error_handler_t::replace);
  data = std::regex_replace(data, regex("<"), "\\u003c"); // no </script>, no <!-- ends it
  const fs::path out =
    options.out.empty() ? fs::path(options.runs[0]) / "report.html" : fs::path(options.out);
  PITH_CHECK(!fs::exists(out) || read_file(out).starts_with("<!doctype html>"),
    "{} exists and is no report", out);
  const string part = out.filename().string() + ".part";
  const WrittenFile file = write_file(out.parent_path(), part, kHead + data + kPage);
  fs::rename(out.parent_path() / part, out);
  fmt::print("{}: {} runs, {}\n", out, runs.size(), human_bytes(file.bytes));
}
}

void add_report_command(CLI::App& app) {
  const auto [sub, o] = add_command<Options>(app, "report",
    "Write a page of curves, expert loads, schedule and kernels of runs, to open offline", report);
  sub->add_option("runs", o->runs, "Run folders; several are drawn together")->required();
  sub->add_option("--out", o->out, "File to write (default: report.html in the first run)");
  sub->footer("Example: pithtrain report runs/demo runs/other --out compare.html");
}
}

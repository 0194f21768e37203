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
  std::vector<std::string> runs;
  std::string out;
};

// The page; `runs` precedes it. One chart a number that any run has, one heat map a run.
constexpr const char* kPage = R"html(
const colors = ["#1f6fb4", "#d1495b", "#2e8b57", "#b8860b", "#7b4fa3", "#555"];
const ns = "http://www.w3.org/2000/svg";
const format = v => v === 0 ? "0" : Math.abs(v) >= 1e4 || Math.abs(v) < 1e-3 ? v.toExponential(2)
  : +v.toPrecision(4) + "";
function add(parent, tag, attributes = {}, text = "", space) {
  const e = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  if (text !== "") e.textContent = text;
  return parent.appendChild(e);
}
function chart(key) {
  const lines = runs.map((run, i) => ({color: colors[i % colors.length], name: run.name,
    points: run.steps.filter(s => Number.isFinite(s[key])).map(s => [s.step, s[key]])}))
    .filter(line => line.points.length);
  const all = lines.flatMap(line => line.points);
  if (!all.length) return;
  const box = add(document.getElementById("charts"), "figure");
  add(box, "figcaption", {}, key);
  const W = 440, H = 220, left = 62, bottom = 22;
  const svg = add(box, "svg", {viewBox: `0 0 ${W} ${H}`}, "", ns);
  const xs = all.map(p => p[0]), sorted = all.map(p => p[1]).sort((a, b) => a - b);
  const extreme = (list, f) => list.reduce((a, b) => f(a, b));
  const x0 = extreme(xs, Math.min), x1 = Math.max(extreme(xs, Math.max), x0 + 1);
  let y0 = sorted[0], y1 = sorted[sorted.length - 1];
  if (y0 === y1) { y0 -= Math.abs(y0) / 10 || 1; y1 += Math.abs(y1) / 10 || 1; }
  const X = x => left + (x - x0) / (x1 - x0) * (W - left - 14);
  const Y = y => 8 + (y1 - y) / (y1 - y0) * (H - bottom - 16);
  for (let i = 0; i < 5; ++i) {
    const step = n => Math.round(x0 + (x1 - x0) * n / 4), x = step(i), y = y0 + (y1 - y0) * i / 4;
    add(svg, "line", {x1: left, x2: W - 8, y1: Y(y), y2: Y(y), stroke: "#ddd"}, "", ns);
    add(svg, "text", {x: left - 5, y: Y(y) + 4, "text-anchor": "end"}, format(y), ns);
    if (!i || x !== step(i - 1))
      add(svg, "text", {x: X(x), y: H - 5, "text-anchor": "middle"}, x, ns);
  }
  for (const {color, points} of lines)
    add(svg, "polyline", {fill: "none", stroke: color, "stroke-linecap": "round",
      "stroke-width": points.length > 1 ? 1.4 : 5, points: [...points, points.at(-1)]  // or a dot
        .map(p => X(p[0]).toFixed(1) + "," + Y(p[1]).toFixed(1)).join(" ")}, "", ns);
  const rule = add(svg, "line", {x1: -9, x2: -9, y1: 8, y2: H - 30, stroke: "#999"}, "", ns);
  const note = add(box, "p");
  svg.onmousemove = event => {
    const step = x0 + ((event.offsetX / svg.clientWidth * W) - left) / (W - left - 14) * (x1 - x0);
    const nearest = lines.map(line => [line, line.points.reduce((a, b) =>
      Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a)]);
    rule.setAttribute("x1", X(nearest[0][1][0]));
    rule.setAttribute("x2", X(nearest[0][1][0]));
    note.textContent = nearest.map(([line, p]) => `${line.name} step ${p[0]}: ${p[1]}`).join("; ");
  };
}
// rows x columns of numbers around 1: blue below, white, red above.
function heat(parent, caption, table) {
  const box = add(parent, "figure");
  add(box, "figcaption", {}, caption);
  const canvas = add(box, "canvas", {width: table[0].length, height: table.length});
  const context = canvas.getContext("2d");
  const note = add(box, "p");
  canvas.style.height = Math.min(16, 320 / table.length) * table.length + "px";
  table.forEach((row, y) => row.forEach((v, x) => {
    const t = Math.max(-1, Math.min(1, Math.log2(Math.max(v, 1e-3)) / 2));
    const f = 255 * (1 - Math.abs(t));
    context.fillStyle = t > 0 ? `rgb(255,${f},${f})` : `rgb(${f},${f},255)`;
    context.fillRect(x, y, 1, 1);
  }));
  canvas.onmousemove = event => {
    const x = Math.floor(event.offsetX / canvas.clientWidth * table[0].length);
    const y = Math.floor(event.offsetY / canvas.clientHeight * table.length);
    if (table[y]) note.textContent = `MoE layer ${y}, column ${x}: ${format(table[y][x])}`;
  };
}
const legend = document.getElementById("legend");
runs.forEach((run, i) => add(legend, "span", {style: `color:${colors[i % colors.length]}`},
  "\u25a0 " + run.name + " "));
const keys = new Set(["loss", ...runs.flatMap(run => run.steps.flatMap(Object.keys))]);
const skipped = ["step", "total_steps", "time", "tokens", "trained_tokens", "tokens_seen"];
for (const key of keys) if (!skipped.includes(key)) chart(key);
for (const run of runs) {
  const part = add(document.body, "section");
  add(part, "h2", {}, run.name);
  const loads = run.steps.filter(s => s.expert_load);
  const counts = loads.filter(s => s.expert_load.counts).pop();
  const even = row => row.reduce((a, b) => a + b, 1e-9) / row.length;
  if (counts) heat(part, `Load over mean, step ${counts.step}: layers down, experts across`,
    counts.expert_load.counts.map(row => row.map(n => n / even(row))));
  const most = s => s.expert_load.max_over_mean;
  if (loads.length) heat(part, "Busiest expert over the mean: layers down, steps across",
    most(loads[0]).map((_, i) => loads.map(s => most(s)[i])));
  if (run.schedule)
    add(part, "figure").innerHTML = "<figcaption>Schedule</figcaption>" + run.schedule;
  for (const [title, text] of [["Events", run.events], ["Kernels of rank 0 (profile)", run.profile],
    ["Configuration", run.config]]) {
    if (!text) continue;
    const details = add(part, "details", title === "Events" ? {open: ""} : {});
    add(details, "summary", {}, title);
    add(details, "pre", {}, text);
  }
}
)html";

constexpr const char* kHead = R"html(<!doctype html><meta charset="utf-8"><title>Report</title>
<style>
body { font: 14px system-ui, sans-serif; margin: 1.5em; color: #222 }
figure { display: inline-block; margin: 0 1em 1em 0; vertical-align: top; max-width: 100%;
  overflow-x: auto }
#charts text { font-size: 11px } #charts svg { width: 440px; max-width: 100% }
figcaption { font-weight: 600 } figure > canvas { border: 1px solid #ccc }
canvas { width: 900px; max-width: 100%; image-rendering: pixelated }
figure p { margin: 0; min-height: 1.3em; font-size: 12px } pre { overflow: auto; font-size: 12px }
</style><h1>Training report</h1><p id="legend"></p><div id="charts"></div>
<script>
const runs = )html";

// What the page needs of one run folder.
json run_data(const fs::path& run) {
  std::ifstream lines(run / "metrics.jsonl");
  PITH_CHECK(lines, "{} is no run folder: it holds no metrics.jsonl", run.string());
  json data = {{"name", run.string()}, {"steps", json::array()}, {"events", ""}};
  for (std::string text; std::getline(lines, text);) {
    json line = json::parse(text, nullptr, /*allow_exceptions=*/false);  // half a line: killed
    if (!line.is_object()) continue;
    if (line["step"].is_number()) data["steps"].push_back(line);
    if (line["event"].is_string() && line["text"].is_string())
      data["events"].get_ref<std::string&>() +=
          fmt::format("after step {:>6}  {}: {}\n", line["after_step"].dump(),
              line["event"].get_ref<std::string&>(), line["text"].get_ref<std::string&>());
  }
  PITH_CHECK(!data["steps"].empty(), "{}: no step is in metrics.jsonl", run.string());
  const auto text_of = [&](const char* name) {
    return fs::exists(run / name) ? read_file(run / name) : "";
  };
  data["config"] = text_of("config.toml");
  data["profile"] = text_of("profile-rank0.txt");
  (void)problem_of([&] {  // of an older version's configuration: no schedule
    const auto config = parse_run_config(text_of("config.toml"), "config.toml", {});
    if (const int64_t pp = config.parallel.pp; pp > 1)
      data["schedule"] =
          draw_svg(simulate(pp, 4 * pp, true, std::vector<StageCosts>(index(2 * pp))));
  });
  return data;
}

void report(const Options& options) {
  json runs = json::array();
  for (const std::string& run : options.runs) runs.push_back(run_data(run));
  std::string data = runs.dump(-1, ' ', true, json::error_handler_t::replace);
  data = std::regex_replace(data, std::regex("<"), "\\u003c");  // no </script>, no <!-- ends it
  const fs::path out =
      options.out.empty() ? fs::path(options.runs[0]) / "report.html" : fs::path(options.out);
  const WrittenFile file = write_file(
      out.parent_path(), out.filename().string(), kHead + data + ";" + kPage + "</script>\n");
  fmt::print("{}: {} runs, {}\n", out.string(), runs.size(), human_bytes(file.bytes));
}

}  // namespace

void add_report_command(CLI::App& app) {
  const auto [sub, o] = add_command<Options>(app, "report",
      "Write a page of curves, expert loads, schedule and kernels of runs, to open offline",
      report);
  sub->add_option("runs", o->runs, "Run folders; several are drawn together")->required();
  sub->add_option("--out", o->out, "File to write (default: report.html in the first run)");
  sub->footer("Example: pithtrain report runs/demo runs/other --out compare.html");
}

}  // namespace pith

// The table of configuration keys and all that is made from it: reading, checks, TOML, help.
#include "engine/config.h"

#define TOML_ENABLE_FORMATTERS 0
#define TOML_ASSERT(condition) static_cast<void>(0) // it asserts what it has not checked ("[#")
#include <toml++/toml.h>
#include "engine/file_io.h"

namespace pith {
namespace {
using Field = std::variant<string*, int64_t*, uint64_t*, double*, bool*, vector<int64_t>*,
  vector<DataSource>*, vector<TensorGroup>*>;

template <auto section, auto member> Field field_of(RunConfig& config) {
  return &(config.*section.*member);
}

struct Key {
  string_view full; // "training.lr"
  Field (*field)(RunConfig&);
  const char* limits; // numbers: an interval; text: the allowed words, or "path" or empty
  const char* description;

  string_view section() const { return full.substr(0, full.find('.')); }
  string_view name() const { return full.substr(full.find('.') + 1); }
};

#define KEY(section, name) \
  #section "." #name, field_of<&RunConfig::section, &decltype(RunConfig::section)::name>

const Key kKeys[] = {
  {KEY(run, folder), "path", "where metrics, checkpoints, this configuration go"},
  {KEY(run, device), "auto|cpu|cuda", "auto takes a GPU where there is one"},
  {KEY(run, threads), "[0, 4096]", "CPU threads; 0 = all"},
  {KEY(model, config), "path", "config.json or its folder; empty = that of model.init"},
  {KEY(model, init), "path", "Hugging Face folder or checkpoint; empty = random"},
  {KEY(model, dtype), "bfloat16|float32", "of computing; masters are float32"},
  {KEY(model, num_layers), "[0, 1e5]", "cut to the first N layers; 0 = all"},
  {KEY(parallel, pp), "[1, 1024]", "pipeline stages"},
  {KEY(parallel, cp), "[1, 1024]", "ranks that share a sequence"},
  {KEY(parallel, ep), "[1, 1024]", "ranks that share experts"},
  {KEY(parallel, sharding), "fsdp|hsdp", "over all ranks of a stage, or in replicated blocks"},
  {KEY(parallel, hsdp_size), "[0, 1e6]", "hsdp: ranks of a block, a multiple of ep"},
  {KEY(parallel, weights), "keep|reshard", "hold weights whole, or gather for each use"},
  {KEY(parallel, chunks), "", "layers of each of 2 pp chunks, as \"2,2,4,0\"; empty = by cost"},
  {KEY(parallel, head_share), "[0, 1)", "share of the tokens whose head stage 1 computes"},
  {KEY(parallel, recompute), "", "none, layer (keep only inputs of layers), or a list by stage"},
  {KEY(data, train), "path", "corpus without .bin, or a blend of several"},
  {KEY(data, validation), "path", "held-out corpus or corpora; empty = none"},
  {KEY(data, sequence_length), "[1, 1e8]", "tokens a sequence"},
  {KEY(data, document_mask), "", "attention and positions stop at document borders"},
  {KEY(data, seed), "[0, inf)", "order of documents"},
  {KEY(data, packing), "concat|best_fit", "cut documents at row ends, or pad rows instead"},
  {KEY(data, exhausted), "repeat|stop", "at the end of a corpus: next epoch, or end"},
  {KEY(training, steps), "[1, 1e9]", "optimizer steps of the run"},
  {KEY(training, global_batch), "[1, 1e8]", "sequences a step"},
  {KEY(training, micro_batch), "[1, 1e8]", "sequences a micro-batch; divides global_batch"},
  {KEY(training, lr), "(0, 1000]", "peak learning rate"},
  {KEY(training, schedule), "constant|cosine|wsd", "of lr after warm-up"},
  {KEY(training, warmup_steps), "[0, 1e9]", "steps of linear warm-up"},
  {KEY(training, decay_steps), "[0, 1e9]", "wsd: steps of the decay at the end"},
  {KEY(training, decay_shape), "linear|1-sqrt", "wsd: how the decay falls"},
  {KEY(training, min_lr_ratio), "[0, 1]", "floor of the decay, as a share of lr"},
  {KEY(training, weight_decay), "[0, 1000]", "of matrices, experts and embeddings"},
  {KEY(training, weight_decay_other), "[0, 1000]", "of norms, biases and the router"},
  {KEY(training, optimizer), "adamw|muon", "muon: of matrices, AdamW of the rest"},
  {KEY(training, groups), "", "rules by tensor name; see docs/configuration.md"},
  {KEY(training, moments), "float32|bfloat16", "how moments are kept"},
  {KEY(training, beta1), "[0, 1)", "AdamW: first moment"},
  {KEY(training, beta2), "[0, 1)", "AdamW: second moment"},
  {KEY(training, epsilon), "(0, 1]", "AdamW: added to the root of the second moment"},
  {KEY(training, muon_momentum), "[0, 1)", "Muon: Nesterov momentum"},
  {KEY(training, clip_norm), "[0, inf)", "clip gradients to this norm; 0 = off"},
  {KEY(training, ema_decay), "[0, 1)", "keep an average of the weights too; 0 = off"},
  {KEY(training, skip_non_finite), "[0, 1e9]", "steps in a row skipped for NaN; 0 = stop at it"},
  {KEY(training, balance_loss), "[0, inf)", "coefficient of the load-balance loss"},
  {KEY(training, balance_kind), "sequence|micro_batch|global_batch", "whose loads it balances"},
  {KEY(training, z_loss), "[0, inf)", "coefficient of the router's z-loss"},
  {KEY(training, router_bias_rate), "[0, 1]", "step of balancing by bias (1e-3); 0 = off"},
  {KEY(training, force_balance), "", "route evenly whatever the router says: to measure speed"},
  {KEY(training, deterministic), "", "bit-identical when repeated or resumed"},
  {KEY(training, seed), "[0, inf)", "initialisation of the weights"},
  {KEY(training, init_std), "[0, 100]", "deviation of initial weights"},
  {KEY(validation, interval), "[0, 1e9]", "every so many steps; 0 = never"},
  {KEY(validation, tokens), "[1, inf)", "tokens a validation reads of each corpus"},
  {KEY(checkpoint, interval), "[0, 1e9]", "every so many steps; 0 = at the end"},
  {KEY(checkpoint, keep_last), "[0, 1e6]", "newest to keep; 0 = all"},
  {KEY(checkpoint, resume), "", "go on from the newest complete checkpoint in run.folder"},
  {KEY(checkpoint, save), "", "false: never write one"},
  {KEY(checkpoint, allow_schedule_change), "", "resume with another schedule of lr than saved"},
  {KEY(log, tensorboard), "", "write TensorBoard event files too"},
  {KEY(log, check_finite), "", "stop at the first NaN or Inf and name the tensor"},
  {KEY(log, expert_counts), "[0, 1e9]", "record every expert's tokens every so many steps"},
  {KEY(profile, steps), "[1, 1e9]", "first and last to trace, into run.folder; [] = none"},
  {KEY(profile, tool), "trace|capture", "capture: ranges for nsys or ncu instead of a trace"},
  {KEY(profile, memory), "", "also a snapshot of all allocations"},
};
#undef KEY

const Key* find_key(string_view full) {
  const auto* key = ranges::find(kKeys, full, &Key::full);
  return key == std::end(kKeys) ? nullptr : key;
}

// The interval of a number: "[0, 1)", "(0, inf)".
bool within(double value, string_view interval) { // false for NaN
  double low = 0, high = 0;
  const size_t comma = interval.find(", ");
  from_chars(interval.data() + 1, interval.data() + comma, low);
  from_chars(interval.data() + comma + 2, interval.data() + interval.size() - 1, high);
  return (interval.front() == '(' ? value > low : value >= low) &&
    (interval.back() == ')' ? value < high : value <= high);
}

vector<string> split(const string& text, char separator) {
  vector<string> words;
  std::istringstream stream(text);
  for (string word; getline(stream, word, separator);) words.push_back(word);
  return words;
}

string quote(string_view text) {
  string quoted;
  for (const char c: text) {
    const bool control = (c >= 0 && c < 0x20) || c == 0x7f;
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += control ? fmt::format("\\u{:04X}", int(c)) : string(1, c);
  }
  return '"' + quoted + '"';
}

// A value as TOML that reads back to the same bits.
string toml_of(double number) {
  const string text = fmt::format("{}", number);
  return text.find_first_of(".e") == string::npos ? text + ".0" : text;
}
string toml_of(const string& text) { return quote(text); }
string toml_of(const auto& value) { return fmt::format("{}", value); }
string toml_of(const vector<DataSource>& sources);
string toml_of(const vector<TensorGroup>& groups);
string toml_of(const Field& field) {
  return std::visit([](const auto* value) { return toml_of(*value); }, field);
}

// The tables of an array: what is written in each, of which the first has to be.
struct Member {
  string_view name;
  Field to;
  const char* limits = "";
};
string_view format_as(const Member& member) { return member.name; }
vector<Member> members_of(DataSource& source) {
  return {{"path", &source.path}, {"weight", &source.weight, "(0, inf)"}, {"name", &source.name}};
}
vector<Member> members_of(TensorGroup& group) {
  return {{"pattern", &group.pattern}, {"optimizer", &group.optimizer, "adamw|muon"},
    {"lr_scale", &group.lr_scale, "[0, 1000]"}, {"weight_decay", &group.weight_decay, "[0, 1000]"}};
}

template <class T> string toml_of_tables(vector<T> list) {
  vector<string> tables;
  for (T& element: list) {
    T plain;
    const vector<Member> members = members_of(element), defaults = members_of(plain);
    vector<string> parts;
    for (size_t i = 0; i < members.size(); ++i)
      if (const string value = toml_of(members[i].to); value != toml_of(defaults[i].to))
        parts.push_back(fmt::format("{} = {}", members[i].name, value));
    tables.push_back(fmt::format("{{{}}}", fmt::join(parts, ", ")));
  }
  return fmt::format("[{}]", fmt::join(tables, ", "));
}
string toml_of(const vector<DataSource>& sources) {
  if (sources.empty()) return quote("");
  const bool path = sources.size() == 1 && sources[0].name.empty();
  return path ? quote(sources[0].path) : toml_of_tables(sources);
}
string toml_of(const vector<TensorGroup>& groups) { return toml_of_tables(groups); }

string describe_value(const toml::node& node) {
  if (const auto* text = node.as_string()) return "the text " + quote(**text);
  if (const auto* integer = node.as_integer()) return fmt::format("the integer {}", **integer);
  if (const auto* number = node.as_floating_point()) return fmt::format("the float {}", **number);
  if (const auto* on = node.as_boolean()) return fmt::format("{}", **on);
  return node.is_array() ? "an array" : node.is_table() ? "a table" : "a date or time";
}

string text_of(const toml::node& node) {
  const string& text = **node.as_string();
  PITH_CHECK(text.find('\0') == string::npos, "holds a NUL character");
  return text;
}

// Stores the value; an Error says what is wrong with it.
void assign(const string& limits, const toml::node& node, const Field& field);

template <class T>
vector<T> read_tables(const toml::node& node, const char* expected, const char* what) {
  PITH_CHECK(node.is_array(), "must be {}, not {}", expected, describe_value(node));
  vector<T> list;
  for (const toml::node& element: *node.as_array()) {
    const vector<Member> members = members_of(list.emplace_back());
    const auto place = fmt::format("{} {}", what, list.size());
    const auto names = fmt::format("{}", fmt::join(members, ", "));
    PITH_CHECK(element.is_table(), "{} must be a table of {}, not {}", place, names,
      describe_value(element));
    for (const auto& [key, value]: *element.as_table()) {
      const auto member = ranges::find(members, key.str(), &Member::name);
      PITH_CHECK(member != members.end(), "{}: {} is not one of {}", place, key.str(), names);
      const string problem =
        problem_of([&, &its = value] { assign(member->limits, its, member->to); });
      PITH_CHECK(problem.empty(), "{}: {}: {}", place, member->name, problem);
    }
    PITH_CHECK(!std::get<string*>(members[0].to)->empty(), "{} has no {}", place, members[0].name);
  }
  return list;
}

vector<DataSource> sources_of(const toml::node& node) {
  vector<DataSource> sources;
  if (!node.is_string())
    sources = read_tables<DataSource>(node, "a path or an array of {path, weight}", "source");
  else if (!node.as_string()->get().empty()) sources.push_back({text_of(node)});
  for (const auto& [path, weight, name]: sources)
    PITH_CHECK(!path.ends_with(".bin") && !path.ends_with(".idx") && !path.ends_with('/'),
      "{} must name a corpus by its path without extension", quote(path));
  return sources;
}

}

regex name_pattern(const string& text) {
  PITH_CHECK(text.size() <= 1000, "longer than 1000 bytes"); // nested, it would end the stack
  return regex(text, regex::ECMAScript | std::regex_constants::__polynomial);
}

namespace {
vector<TensorGroup> groups_of(const toml::node& node) {
  auto groups = read_tables<TensorGroup>(node, "an array of tables", "group");
  for (const TensorGroup& group: groups) {
    const auto problem = problem_of([&] { name_pattern(group.pattern); });
    PITH_CHECK(problem.empty(), "{} is no ECMAScript pattern: {}", quote(group.pattern), problem);
  }
  return groups;
}

void assign(const string& limits, const toml::node& node, const Field& field) {
  const auto expect = [&](bool right, string_view what, const string& advice = "") {
    PITH_CHECK(right, "must be {}, not {}{}{}", what, describe_value(node),
      node.is_string() ? "; numbers (0.1, not .1), true and false take no quotes" : "", advice);
  };
  const auto store = [&](auto value, auto* target) {
    PITH_CHECK(within(double(value), limits), "{} is outside {}", value, limits);
    *target = static_cast<std::remove_pointer_t<decltype(target)>>(value);
  };
  const auto assign_to = [&]<class T>(T* target) {
    if constexpr (std::is_same_v<T, string>) {
      expect(node.is_string(), "text");
      *target = text_of(node);
      const auto allowed = split(limits, '|');
      PITH_CHECK(allowed.size() < 2 || ranges::count(allowed, *target) > 0, "{} is not one of {}",
        quote(*target), limits);
    } else if constexpr (std::is_same_v<T, bool>) {
      expect(node.is_boolean(), "true or false");
      *target = **node.as_boolean();
    } else if constexpr (std::is_same_v<T, double>) {
      expect(node.is_number(), "a number");
      store(*node.value<double>(), target);
    } else if constexpr (std::is_same_v<T, vector<int64_t>>) {
      expect(node.is_array(), "an array of integers");
      target->clear();
      for (const toml::node& element: *node.as_array())
        assign(limits, element, &target->emplace_back());
    } else if constexpr (std::is_same_v<T, vector<DataSource>>) {
      *target = sources_of(node);
    } else if constexpr (std::is_same_v<T, vector<TensorGroup>>) {
      *target = groups_of(node);
    } else {
      const double written = node.value_exact<double>().value_or(0.5);
      const bool whole = std::trunc(written) == written && std::abs(written) < 1e18;
      expect(node.is_integer(), "an integer", whole ? fmt::format("; write {:.0f}", written) : "");
      store(**node.as_integer(), target);
    }
  };
  std::visit(assign_to, field);
}

// Letters to insert, delete or replace that make one word of the other (Levenshtein).
size_t edit_distance(string_view word, string_view other) {
  vector<size_t> row(other.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (const char c: word) {
    size_t before = row[0]++; // of one letter less of both
    for (size_t j = 1; j <= other.size(); ++j)
      before =
        exchange(row[j], min({row[j] + 1, row[j - 1] + 1, before + (c == other[j - 1] ? 0 : 1)}));
  }
  return row.back();
}

// The key that was probably meant: one of this section, or one called nearly so in another.
string nearest_key(string_view full) {
  const size_t dot = full.find('.');
  const auto section = full.substr(0, dot == full.npos ? 0 : dot);
  const auto name = full.substr(dot == full.npos ? 0 : dot + 1);
  string_view nearest;
  size_t smallest = numeric_limits<size_t>::max();
  for (const Key& key: kKeys) {
    size_t distance = edit_distance(name, key.name());
    if (!section.empty() && section != key.section()) distance += distance <= 1 ? 2 : 100;
    if (distance < smallest) smallest = distance, nearest = key.full;
  }
  return string(nearest);
}

// Reads tables into the configuration and remembers every mistake, with its place.
class Reader {
 public:
  void read_file(string_view text, const string& source) {
    source_ = source;
    toml::table table;
    try {
      table = toml::parse(text);
    } catch (const toml::parse_error& error) {
      const auto at = error.source().begin;
      PITH_FAIL_HINT("text needs quotes; a number begins with a digit, as in 0.1",
        "{}:{}: column {}: {}", source, at.line, at.column, error.description());
    }
    std::set<string_view> sections;
    for (const Key& key: kKeys) sections.insert(key.section());
    for (const auto& [key, node]: table) {
      const string name(key.str());
      const auto* section = node.as_table();
      const bool known = sections.contains(name);
      if (known && section)
        for (const auto& [inner, value]: *section)
          set(fmt::format("{}.{}", name, inner.str()), value, place_of(inner));
      else if (known) mistake(place_of(key), name, fmt::format("is a section: write [{}]", name));
      else if (section)
        mistake(place_of(key), "[" + name + "]",
          fmt::format("unknown section; there are {}", fmt::join(sections, ", ")));
      else
        mistake(
          place_of(key), name, "unknown key outside any section; nearest is " + nearest_key(name));
    }
  }

  void read_override(const string& text) {
    const string place = "--set";
    const size_t equals = text.find('=');
    if (equals == string::npos || text.find('.') > equals)
      return mistake(place, text, "not of the form section.key=value");
    string name = text.substr(0, equals), value = text.substr(equals + 1);
    std::erase(name, ' ');
    value.erase(0, value.find_first_not_of(' '));
    value.erase(value.find_last_not_of(' ') + 1);
    const Key* key = find_key(name);
    const Field field = key ? key->field(config_) : Field(static_cast<bool*>(nullptr));
    const bool sources = std::holds_alternative<vector<DataSource>*>(field);
    const bool wants_text = sources || std::holds_alternative<string*>(field);
    // Text comes without quotes here, and may look like anything.
    for (const string& toml: {value, quote(value)}) {
      try {
        const toml::table table = toml::parse("value = " + toml);
        const toml::node* node = table.size() == 1 ? table.get("value") : nullptr;
        if (node && (!wants_text || node->is_string() || (sources && node->is_array())))
          return set(name, *node, place);
      } catch (const toml::parse_error&) { // the second time, what is not even text
      }
    }
    mistake(place, name, "not valid UTF-8");
  }

  // Rules between keys, each of which is right by itself.
  void check_together() {
    const auto rule = [&]<class... Values>(bool holds, const char* key,
                        fmt::format_string<Values&...> problem, Values... values) {
      if (!holds) mistake(source_, key, fmt::format(problem, values...));
    };
    const auto& [run, model, parallel, data, t, validation, checkpoint, log, profile] = config_;
    rule(!run.folder.empty(), "run.folder", "must not be empty");
    rule(!model.config.empty() || !model.init.empty(), "model.config",
      "one of model.config and model.init must be given");
    rule(!data.train.empty(), "data.train", "must be given");
    std::set<string> labels;
    for (const DataSource& source: data.validation)
      rule(labels.insert(source.label()).second, "data.validation",
        "two corpora are called {}; give them a name = ...", quote(source.label()));
    rule(data.packing == "concat" || data.document_mask, "data.packing",
      "best_fit needs data.document_mask");
    rule(t.global_batch % t.micro_batch == 0, "training.micro_batch",
      "{} does not divide training.global_batch = {}", t.micro_batch, t.global_batch);
    const int64_t left = t.steps - t.warmup_steps;
    rule(left >= 0, "training.warmup_steps", "{} is more than training.steps = {}", t.warmup_steps,
      t.steps);
    const bool wsd = t.schedule == "wsd";
    rule(!wsd || t.decay_steps > 0, "training.decay_steps",
      "the schedule wsd needs a decay of at least 1 step");
    rule(!wsd || t.decay_steps <= max<int64_t>(left, 0), "training.decay_steps",
      "{} is more than the {} steps after warm-up", t.decay_steps, left);
    rule(wsd || t.decay_steps == 0, "training.decay_steps",
      "only the schedule wsd has a decay of its own; this one is {}", t.schedule);
    rule(wsd || t.decay_shape == "linear", "training.decay_shape",
      "is of the schedule wsd; this one is {}", t.schedule);
    rule(
      profile.steps.empty() || (profile.steps.size() == 2 && profile.steps[0] <= profile.steps[1]),
      "profile.steps", "must be [] or [first, last]");
    rule(validation.interval == 0 || !data.validation.empty(), "validation.interval",
      "needs a corpus in data.validation");
    rule(validation.interval == 0 || validation.tokens >= data.sequence_length, "validation.tokens",
      "{} is less than one sequence of {} tokens", validation.tokens, data.sequence_length);
  }

  RunConfig result() {
    if (mistakes_.empty()) check_together();
    if (!mistakes_.empty())
      PITH_FAIL_HINT("pithtrain pretrain --help lists all keys", "{}", fmt::join(mistakes_, "\n"));
    if (config_.model.config.empty()) config_.model.config = config_.model.init;
    return config_;
  }
 private:
  string place_of(const toml::key& key) const {
    return fmt::format("{}:{}", source_, key.source().begin.line);
  }

  void mistake(const string& place, const string& key, const string& problem) {
    mistakes_.push_back(fmt::format("{}: {}: {}", place, key, problem));
  }

  void set(const string& full, const toml::node& node, const string& place) {
    const Key* key = find_key(full);
    if (!key) return mistake(place, full, "unknown key; nearest is " + nearest_key(full));
    const auto problem = problem_of([&] { assign(key->limits, node, key->field(config_)); });
    if (!problem.empty()) mistake(place, full, problem);
  }

  RunConfig config_;
  string source_; // of the file, in messages
  vector<string> mistakes_;
};

// "[section]" and a line for each of its keys.
template <class Line> string by_section(const Line& line) {
  string text;
  string_view section;
  for (const Key& key: kKeys) {
    if (section != key.section())
      text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", key.section());
    section = key.section();
    text += line(key) + "\n";
  }
  return text;
}
}

RunConfig parse_run_config(
  string_view text, const string& source, const vector<string>& overrides) {
  Reader reader;
  reader.read_file(text, source);
  for (const string& one: overrides) reader.read_override(one);
  return reader.result();
}

string to_toml(const RunConfig& config) {
  RunConfig copy = config;
  return by_section(
    [&](const Key& key) { return fmt::format("{} = {}", key.name(), toml_of(key.field(copy))); });
}

string describe_config_keys() {
  RunConfig defaults;
  return by_section([&](const Key& key) {
    const Field field = key.field(defaults);
    const char* const types[] = {
      "text", "integer", "integer", "float", "bool", "integers", "corpora", "groups"};
    return fmt::format("  {:<22}{:<9}{:<12}{:<20} {}", key.name(), types[field.index()],
      toml_of(field), key.limits, key.description);
  });
}
}

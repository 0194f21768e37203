// Provides the table of configuration keys and all that is made from it: reading, checks, TOML,
// docs.
#include "engine/config.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <utility>
#include <variant>

#define TOML_ENABLE_FORMATTERS 0
#include <toml++/toml.h>

#include "core/error.h"

namespace pith {
namespace {

using Field =
    std::variant<std::string*, int64_t*, uint64_t*, double*, bool*, std::vector<DataSource>*>;

template <auto section, auto member>
Field field_of(RunConfig& config) {
  return &(config.*section.*member);
}

struct Key {
  const char *section, *name;
  Field (*field)(RunConfig&);
  const char* limits;  // numbers: an interval; text: the allowed words, or "path" or empty
  const char* description;
  const char* synonyms = "";  // what other programs call it: only to suggest the right name
};

// clang-format off
#define KEY(section, name) \
  #section, #name, field_of<&RunConfig::section, &decltype(RunConfig::section)::name>
// clang-format on

const Key kKeys[] = {
    {KEY(run, folder), "path", "where metrics, checkpoints and this configuration go",
     "output_dir"},
    {KEY(run, device), "auto|cpu|cuda", "auto takes a GPU where there is one"},
    {KEY(run, threads), "[0, 4096]", "CPU threads; 0 = all", "num_threads"},
    {KEY(model, config), "path", "config.json or its folder; empty = that of model.init",
     "path name model_path"},
    {KEY(model, init), "path", "weights: Hugging Face folder or checkpoint; empty = random",
     "checkpoint pretrained weights"},
    {KEY(model, dtype), "bfloat16|float32", "compute dtype; master weights are always float32",
     "precision"},
    {KEY(model, num_layers), "[0, 100000]", "cut to the first N layers; 0 = all",
     "num_hidden_layers layers"},
    {KEY(parallel, pp), "[1, 1024]", "pipeline stages", "pipeline_parallel_size pipeline pp_size"},
    {KEY(parallel, cp), "[1, 1024]", "ranks that share a sequence",
     "context_parallel_size context cp_size"},
    {KEY(parallel, ep), "[1, 1024]", "ranks that divide the experts among them",
     "expert_parallel_size expert_model_parallel_size ep_size"},
    {KEY(parallel, sharding), "fsdp|hsdp", "over all ranks of a stage, or in replicated blocks",
     "strategy"},
    {KEY(parallel, hsdp_size), "[0, 1000000]", "hsdp: ranks of a block, a multiple of ep"},
    {KEY(parallel, weights), "keep|reshard", "hold a stage's weights whole, or gather for each use",
     "reshard_after_forward"},
    {KEY(parallel, chunks), "", "layers of each of 2 pp chunks, as \"2,2,4,0\"; empty = by cost"},
    {KEY(data, train), "path", "corpus, as a path without .bin or .idx, or a blend of several",
     "path dataset blend"},
    {KEY(data, validation), "path", "held-out corpus or corpora; empty = none", "valid eval"},
    {KEY(data, sequence_length), "[1, 100000000]", "tokens a sequence",
     "seq_len seq_length max_length context_length block_size"},
    {KEY(data, document_mask), "", "attention and positions stop at document borders",
     "reset_attention_mask"},
    {KEY(data, seed), "[0, inf)", "order of documents", "shuffle_seed"},
    {KEY(data, packing), "concat|best_fit", "cut documents at row ends, or pad rows instead"},
    {KEY(data, exhausted), "repeat|stop",
     "what the end of a corpus does: next epoch, or end of run", "epochs num_epochs"},
    {KEY(training, steps), "[1, 1000000000]", "optimizer steps of the whole run",
     "max_steps train_iters num_steps iterations"},
    {KEY(training, global_batch), "[1, 100000000]", "sequences a step",
     "batch_size global_batch_size train_batch_size"},
    {KEY(training, micro_batch), "[1, 100000000]", "sequences a micro-batch; divides global_batch",
     "micro_batch_size per_device_train_batch_size"},
    {KEY(training, lr), "(0, 1000]", "peak learning rate", "learning_rate max_lr"},
    {KEY(training, schedule), "constant|cosine|wsd", "of the learning rate, after warm-up",
     "lr_schedule lr_scheduler lr_scheduler_type lr_decay_style"},
    {KEY(training, warmup_steps), "[0, 1000000000]", "steps of linear warm-up",
     "warmup lr_warmup_iters"},
    {KEY(training, decay_steps), "[0, 1000000000]", "wsd: steps of the decay at the end",
     "lr_decay_iters"},
    {KEY(training, min_lr_ratio), "[0, 1]", "floor of the decay, as a share of lr",
     "min_lr min_learning_rate"},
    {KEY(training, weight_decay), "[0, 1000]", "of matrices, experts and embeddings", "wd"},
    {KEY(training, weight_decay_other), "[0, 1000]", "of norms, biases and the router"},
    {KEY(training, beta1), "[0, 1)", "AdamW: first moment", "adam_beta1"},
    {KEY(training, beta2), "[0, 1)", "AdamW: second moment", "adam_beta2"},
    {KEY(training, epsilon), "(0, 1]", "AdamW: added to the root of the second moment",
     "eps adam_eps adam_epsilon"},
    {KEY(training, clip_norm), "[0, inf)", "clip gradients to this global norm; 0 = off",
     "clip_grad grad_clip max_norm max_grad_norm gradient_clipping"},
    {KEY(training, balance_loss), "[0, inf)", "coefficient of the load-balance loss",
     "aux_loss aux_loss_coef router_aux_loss_coef moe_aux_loss_coeff"},
    {KEY(training, force_balance), "", "route evenly whatever the router says: to measure speed"},
    {KEY(training, deterministic), "", "bit-identical when repeated or resumed"},
    {KEY(training, seed), "[0, inf)", "initialisation of the weights", "random_seed"},
    {KEY(training, init_std), "[0, 100]", "standard deviation of the initial weights",
     "initializer_range init_method_std"},
    {KEY(validation, interval), "[0, 1000000000]", "validate every so many steps; 0 = never",
     "eval_interval eval_steps"},
    {KEY(validation, tokens), "[1, inf)", "tokens a validation reads of each corpus", "eval_iters"},
    {KEY(checkpoint, interval), "[0, 1000000000]", "save every so many steps; 0 = at the end only",
     "save_interval save_steps"},
    {KEY(checkpoint, keep_last), "[0, 1000000]", "newest checkpoints to keep; 0 = all",
     "save_total_limit"},
    {KEY(checkpoint, resume), "", "go on from the newest complete checkpoint in run.folder"},
    {KEY(checkpoint, save), "", "false: never write one"},
    {KEY(checkpoint, allow_schedule_change), "",
     "resume with another learning-rate schedule than saved"},
    {KEY(log, tensorboard), "", "write TensorBoard event files too"},
    {KEY(log, check_finite), "", "stop at the first NaN or Inf and name the tensor"},
};
#undef KEY

template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};

std::string full_name(const Key& key) { return fmt::format("{}.{}", key.section, key.name); }

// The interval of a number: "[0, 1)", "(0, inf)".
struct Interval {
  double low = 0, high = 0;
  bool open_low, open_high;
  explicit Interval(std::string_view text)
      : open_low(text.front() == '('), open_high(text.back() == ')') {
    const size_t comma = text.find(", ");
    std::from_chars(text.data() + 1, text.data() + comma, low);
    std::from_chars(text.data() + comma + 2, text.data() + text.size() - 1, high);
  }
  bool holds(double value) const {  // false for NaN
    return (open_low ? value > low : value >= low) && (open_high ? value < high : value <= high);
  }
};

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> words;
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    words.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return words;
}

std::string quote(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      quoted += fmt::format("\\u{:04X}", static_cast<int>(c));
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

std::string toml_of_number(double number) {
  const std::string text = fmt::format("{}", number);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

std::string toml_of_sources(const std::vector<DataSource>& sources) {
  if (sources.empty()) return quote("");
  if (sources.size() == 1 && sources[0].name.empty()) return quote(sources[0].path);
  std::string text;
  for (const DataSource& source : sources) {
    text += fmt::format("{}{{path = {}, weight = {}", text.empty() ? "" : ", ", quote(source.path),
                        toml_of_number(source.weight));
    text += source.name.empty() ? "}" : fmt::format(", name = {}}}", quote(source.name));
  }
  return fmt::format("[{}]", text);
}

// The value of a field as TOML that reads back to the same bits.
std::string toml_of(const Field& field) {
  return std::visit(
      Overloaded{[](const std::string* text) { return quote(*text); },
                 [](const bool* on) { return std::string(*on ? "true" : "false"); },
                 [](const double* number) { return toml_of_number(*number); },
                 [](const std::vector<DataSource>* sources) { return toml_of_sources(*sources); },
                 [](const auto* integer) { return fmt::format("{}", *integer); }},
      field);
}

std::string describe_value(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::string:
      return "the text " + quote(**node.as_string());
    case toml::node_type::integer:
      return fmt::format("the integer {}", **node.as_integer());
    case toml::node_type::floating_point:
      return fmt::format("the float {}", **node.as_floating_point());
    case toml::node_type::boolean:
      return **node.as_boolean() ? "true" : "false";
    case toml::node_type::array:
      return "an array";
    case toml::node_type::table:
      return "a table";
    default:
      return "a date or time";
  }
}

// Reads a path, or an array of {path, weight, name}; returns what is wrong, or nothing.
std::string assign_sources(const toml::node& node, std::vector<DataSource>& sources) {
  std::vector<DataSource> read;
  if (node.is_string()) {
    if (!(**node.as_string()).empty()) read.push_back({**node.as_string()});
  } else if (!node.is_array()) {
    return fmt::format("must be a path or an array of {{path, weight}}, not {}",
                       describe_value(node));
  } else {
    for (const toml::node& element : *node.as_array()) {
      const toml::table* table = element.as_table();
      if (!table)
        return fmt::format("source {} must be {{path = \"...\", weight = 0.5}}, not {}",
                           read.size() + 1, describe_value(element));
      DataSource source;
      for (const auto& [key, value] : *table) {
        const std::string_view name = key.str();
        if (name == "weight" && value.is_number()) {
          source.weight = *value.value<double>();
        } else if ((name == "path" || name == "name") && value.is_string()) {
          (name == "path" ? source.path : source.name) = **value.as_string();
        } else {
          return fmt::format(
              "source {}: {} = {} is not one of path (text), weight (a number), "
              "name (text)",
              read.size() + 1, name, describe_value(value));
        }
      }
      if (source.path.empty()) return fmt::format("source {} has no path", read.size() + 1);
      if (!(source.weight > 0) || std::isinf(source.weight))
        return fmt::format("source {}: weight {} is outside (0, inf)", read.size() + 1,
                           source.weight);
      read.push_back(std::move(source));
    }
  }
  for (const DataSource& source : read)
    if ((source.path + source.name).find('\0') != std::string::npos) return "holds a NUL character";
  sources = std::move(read);
  return "";
}

// Stores the value; returns what is wrong with it, or nothing.
std::string assign(const Key& key, const toml::node& node, const Field& field) {
  const auto bounded = [&](auto value, auto* target) -> std::string {
    if (!Interval(key.limits).holds(static_cast<double>(value))) {
      return fmt::format("{} is outside {}", value, key.limits);
    }
    *target = static_cast<std::remove_pointer_t<decltype(target)>>(value);
    return "";
  };
  const auto expected = [&](std::string_view what) {
    const bool quoted = node.is_string() && what != "text";
    return fmt::format("must be {}, not {}{}", what, describe_value(node),
                       quoted ? "; numbers and true or false take no quotes" : "");
  };
  return std::visit(
      Overloaded{[&](std::string* target) -> std::string {
                   if (!node.is_string()) return expected("text");
                   const std::string& value = **node.as_string();
                   const auto allowed = split(key.limits, '|');
                   if (allowed.size() > 1 && std::ranges::find(allowed, value) == allowed.end()) {
                     return fmt::format("{} is not one of {}; nearest is {}", quote(value),
                                        key.limits, nearest_word(value, allowed));
                   }
                   if (value.find('\0') != std::string::npos) return "holds a NUL character";
                   *target = value;
                   return "";
                 },
                 [&](std::vector<DataSource>* target) { return assign_sources(node, *target); },
                 [&](bool* target) -> std::string {
                   if (!node.is_boolean()) return expected("true or false");
                   *target = **node.as_boolean();
                   return "";
                 },
                 [&](double* target) -> std::string {
                   if (node.is_integer())
                     return bounded(static_cast<double>(**node.as_integer()), target);
                   return node.is_floating_point() ? bounded(**node.as_floating_point(), target)
                                                   : expected("a number");
                 },
                 [&](auto* target) -> std::string {
                   if (node.is_integer()) return bounded(**node.as_integer(), target);
                   std::string problem = expected("an integer");
                   if (const auto* number = node.as_floating_point();
                       number && std::trunc(**number) == **number && std::abs(**number) < 1e18) {
                     problem += fmt::format("; write {:.0f}", **number);
                   }
                   return problem;
                 }},
      field);
}

// Edits that make one word of the other: insert, delete, replace, swap of neighbours (optimal
// string alignment), one row of the table at a time.
size_t edit_distance(std::string_view word, std::string_view other) {
  std::vector<size_t> before, last, row(other.size() + 1);
  for (size_t j = 0; j < row.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= word.size(); ++i) {
    before = std::exchange(last, row);
    row[0] = i;
    for (size_t j = 1; j <= other.size(); ++j) {
      const bool same = word[i - 1] == other[j - 1];
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (same ? 0 : 1)});
      if (i > 1 && j > 1 && word[i - 1] == other[j - 2] && word[i - 2] == other[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
  }
  return row.back();
}

// The key that was probably meant, by its name or what other programs call it: one of this section,
// or one that is called nearly so in another.
std::string nearest_key(std::string_view section, std::string_view name) {
  std::string nearest;
  size_t smallest = std::numeric_limits<size_t>::max();
  for (const Key& key : kKeys) {
    std::vector<std::string> names = split(key.synonyms, ' ');
    names.emplace_back(key.name);
    for (const std::string& candidate : names) {
      size_t distance = edit_distance(name, candidate);
      if (!section.empty() && section != key.section) {
        if (distance > 1) continue;
        distance += 2;
      }
      if (distance < smallest) smallest = distance, nearest = full_name(key);
    }
  }
  return nearest.empty() ? nearest_key("", name) : nearest;
}

std::vector<std::string> section_names() {
  std::vector<std::string> names;
  for (const Key& key : kKeys) {
    if (names.empty() || names.back() != key.section) names.emplace_back(key.section);
  }
  return names;
}

// Reads tables into the configuration and remembers every mistake, with its place.
class Reader {
 public:
  void read_file(std::string_view text, const std::string& source);
  void read_override(const std::string& text);
  void check_together();
  RunConfig result() const;

 private:
  struct Place {
    int64_t order = 0;  // line; overrides come after all lines
    std::string text;   // "run.toml:12" or "--set"
  };
  void set(std::string_view section, std::string_view name, const toml::node& node,
           const Place& place);
  void mistake(const Place& place, std::string_view key, std::string_view problem) {
    mistakes_.emplace(place.order, fmt::format("{}: {}: {}", place.text, key, problem));
  }

  RunConfig config_;
  std::string source_;
  std::map<std::string, Place> places_;  // of keys that were given
  std::vector<std::string> wrong_;       // keys whose value was refused
  std::multimap<int64_t, std::string> mistakes_;
  int64_t overrides_ = 0;
};

void Reader::set(std::string_view section, std::string_view name, const toml::node& node,
                 const Place& place) {
  const auto key = std::ranges::find_if(
      kKeys, [&](const Key& k) { return section == k.section && name == k.name; });
  const std::string full = fmt::format("{}.{}", section, name);
  if (key == std::end(kKeys)) {
    mistake(place, full, fmt::format("unknown key; nearest is {}", nearest_key(section, name)));
    return;
  }
  places_[full] = place;
  std::erase(wrong_, full);
  const std::string problem = assign(*key, node, key->field(config_));
  if (problem.empty()) return;
  mistake(place, full, problem);
  wrong_.push_back(full);
}

// Advice for the two slips that make a line no TOML at all: .5 for 0.5, and text without quotes.
std::string syntax_advice(std::string_view text, int64_t line) {
  for (; line > 1; --line) text.remove_prefix(std::min(text.find('\n') + 1, text.size()));
  text = text.substr(0, text.find('\n'));
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos) return "";
  text.remove_prefix(equals + 1);
  text.remove_prefix(std::min(text.find_first_not_of(" \t+-"), text.size()));
  if (text.starts_with('.')) return "; a number begins with a digit: 0.00001 or 1e-5";
  const auto letter = [](char c) { return (c | 32) >= 'a' && (c | 32) <= 'z'; };
  if (!text.empty() && (letter(text[0]) || text[0] == '/')) return "; text needs quotes";
  return "";
}

void Reader::read_file(std::string_view text, const std::string& source) {
  source_ = source;
  toml::table table;
  try {
    table = toml::parse(text);
  } catch (const toml::parse_error& error) {
    const auto at = error.source().begin;
    PITH_FAIL("{}:{}: column {}: {}{}", source, at.line, at.column, error.description(),
              syntax_advice(text, at.line));
  }
  const auto place_of = [&](int64_t line) {
    return Place{line, fmt::format("{}:{}", source, line)};
  };
  const auto sections = section_names();
  for (const auto& [name, node] : table) {
    const Place place = place_of(name.source().begin.line);
    const auto* section = node.as_table();
    const bool known = std::ranges::find(sections, name.str()) != sections.end();
    if (known && section) {
      for (const auto& [key, value] : *section) {
        set(name.str(), key.str(), value, place_of(key.source().begin.line));
      }
    } else if (known) {
      mistake(place, name.str(), fmt::format("is a section: write [{}]", name.str()));
    } else if (section) {
      mistake(place, fmt::format("[{}]", name.str()),
              fmt::format("unknown section; nearest is [{}]", nearest_word(name.str(), sections)));
    } else {
      mistake(place, name.str(),
              fmt::format("unknown key outside any section; nearest is {}",
                          nearest_key("", name.str())));
    }
  }
}

void Reader::read_override(const std::string& text) {
  const Place place{std::numeric_limits<int64_t>::max() / 2 + overrides_++, "--set"};
  const size_t equals = text.find('=');
  const size_t dot = text.find('.');
  if (equals == std::string::npos || dot > equals) {
    return mistake(place, text, "not of the form section.key=value");
  }
  const auto parse_value = [](std::string_view value) -> std::optional<toml::table> {
    try {
      toml::table parsed = toml::parse(fmt::format("value = {}", value));
      if (parsed.size() == 1 && parsed.contains("value")) return parsed;
    } catch (const toml::parse_error&) {
    }
    return std::nullopt;
  };
  const auto trimmed = [&](size_t begin, size_t end) {
    while (begin < end && text[begin] == ' ') ++begin;
    while (begin < end && text[end - 1] == ' ') --end;
    return text.substr(begin, end - begin);
  };
  const std::string section = trimmed(0, dot), name = trimmed(dot + 1, equals);
  const std::string value = trimmed(equals + 1, text.size());
  const auto key = std::ranges::find_if(
      kKeys, [&](const Key& k) { return section == k.section && name == k.name; });
  const Field field = key == std::end(kKeys) ? Field() : key->field(config_);
  const bool wants_sources = std::holds_alternative<std::vector<DataSource>*>(field);
  const bool wants_text =
      wants_sources || (key != std::end(kKeys) && std::holds_alternative<std::string*>(field));
  auto parsed = parse_value(value);
  const bool is_wanted = parsed && (parsed->begin()->second.is_string() ||
                                    (wants_sources && parsed->begin()->second.is_array()));
  if (wants_text && !is_wanted) parsed = parse_value(quote(value));
  if (parsed) return set(section, name, parsed->begin()->second, place);
  // What is no TOML is text, which set() refuses for this key; only invalid UTF-8 isn't even that.
  if (parsed = parse_value(quote(value)); parsed) {
    mistake(place, section + "." + name,
            fmt::format("{} is no number{}", quote(value), syntax_advice("=" + value, 1)));
  } else {
    mistake(place, section + "." + name, "not valid UTF-8");
  }
}

// Rules between keys. A rule is skipped where one of its keys was refused already.
void Reader::check_together() {
  const auto rule = [&](bool holds, std::initializer_list<const char*> keys, std::string problem) {
    if (holds) return;
    Place place{0, source_};  // no key of the rule was given: the file as a whole lacks something
    for (const char* key : keys) {
      if (std::ranges::find(wrong_, key) != wrong_.end()) return;
      if (auto given = places_.find(key); given != places_.end() && place.order == 0) {
        place = given->second;
      }
    }
    mistake(place, *keys.begin(), problem);
  };
  const auto& t = config_.training;
  rule(!config_.run.folder.empty(), {"run.folder"}, "must not be empty");
  rule(!config_.model.config.empty() || !config_.model.init.empty(), {"model.config", "model.init"},
       "one of model.config and model.init must be given");
  rule(!config_.data.train.empty(), {"data.train"}, "must be given");
  for (const auto& [name, sources] : {std::pair{"data.train", &config_.data.train},
                                      std::pair{"data.validation", &config_.data.validation}}) {
    for (const DataSource& source : *sources) {
      const std::string& path = source.path;
      const bool extension = path.ends_with(".bin") || path.ends_with(".idx");
      rule(!extension && !path.ends_with('/'), {name},
           fmt::format("{} must name a corpus by its path without extension", quote(path)));
    }
  }
  std::set<std::string> labels;
  for (const DataSource& source : config_.data.validation)
    rule(labels.insert(source.label()).second, {"data.validation"},
         fmt::format("two corpora are called {}; give them a name = ...", quote(source.label())));
  rule(config_.data.packing == "concat" || config_.data.document_mask,
       {"data.packing", "data.document_mask"}, "best_fit needs data.document_mask");
  rule(t.global_batch % t.micro_batch == 0, {"training.micro_batch", "training.global_batch"},
       fmt::format("{} does not divide training.global_batch = {}", t.micro_batch, t.global_batch));
  rule(t.warmup_steps <= t.steps, {"training.warmup_steps", "training.steps"},
       fmt::format("{} is more than training.steps = {}", t.warmup_steps, t.steps));
  if (t.schedule == "wsd") {
    rule(t.decay_steps > 0, {"training.decay_steps", "training.schedule"},
         "the schedule wsd needs a decay of at least 1 step");
    rule(t.warmup_steps > t.steps || t.decay_steps <= t.steps - t.warmup_steps,
         {"training.decay_steps", "training.steps", "training.warmup_steps"},
         fmt::format("{} is more than the {} steps after warm-up", t.decay_steps,
                     t.steps - t.warmup_steps));
  } else {
    rule(t.decay_steps == 0, {"training.decay_steps", "training.schedule"},
         fmt::format("only the schedule wsd has a decay of its own; this one is {}", t.schedule));
  }
  rule(config_.validation.interval == 0 || !config_.data.validation.empty(),
       {"validation.interval", "data.validation"}, "needs a corpus in data.validation");
  rule(
      config_.validation.interval == 0 || config_.validation.tokens >= config_.data.sequence_length,
      {"validation.tokens", "data.sequence_length"},
      fmt::format("{} is less than one sequence of {} tokens", config_.validation.tokens,
                  config_.data.sequence_length));
}

RunConfig Reader::result() const {
  if (mistakes_.empty()) {
    RunConfig config = config_;
    if (config.model.config.empty()) config.model.config = config.model.init;
    return config;
  }
  std::string text;
  for (const auto& [order, mistake] : mistakes_) text += (text.empty() ? "" : "\n") + mistake;
  PITH_FAIL_HINT("pithtrain pretrain --help lists all keys", "{}", text);
}

}  // namespace

RunConfig load_run_config(const std::filesystem::path& file,
                          const std::vector<std::string>& overrides) {
  PITH_CHECK(!std::filesystem::is_directory(file), "{}: is a folder, not a TOML file",
             file.string());
  std::ifstream stream(file, std::ios::binary);
  PITH_CHECK(stream.good(), "{}: cannot be opened: {}", file.string(), std::strerror(errno));
  std::ostringstream text;
  text << stream.rdbuf();
  PITH_CHECK(!stream.bad(), "{}: cannot be read", file.string());
  return parse_run_config(text.view(), file.string(), overrides);
}

RunConfig parse_run_config(std::string_view text, const std::string& source,
                           const std::vector<std::string>& overrides) {
  Reader reader;
  reader.read_file(text, source);
  for (const std::string& text_of_one : overrides) reader.read_override(text_of_one);
  reader.check_together();
  return reader.result();
}

std::string to_toml(const RunConfig& config) {
  RunConfig copy = config;
  std::string text, section;
  for (const Key& key : kKeys) {
    if (section != key.section)
      text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", key.section);
    section = key.section;
    text += fmt::format("{} = {}\n", key.name, toml_of(key.field(copy)));
  }
  return text;
}

std::string describe_config_keys() {
  RunConfig defaults;
  std::string text, section;
  for (const Key& key : kKeys) {
    if (section != key.section)
      text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", key.section);
    section = key.section;
    const Field field = key.field(defaults);
    const char* const types[] = {"text", "integer", "integer", "float", "bool", "corpora"};
    text += fmt::format("  {:<22}{:<9}{:<12}{:<21}{}\n", key.name, types[field.index()],
                        toml_of(field), key.limits, key.description);
  }
  return text;
}

std::string config_reference() {
  std::string text = R"(# Configuration

A run is described by one TOML file, read by `pithtrain pretrain RUN.toml`. `--set
section.key=value` changes a key for one run and may be repeated; text needs no quotes there:

    pithtrain pretrain examples/demo.toml --set training.lr=1e-4 --set run.folder=runs/second

All keys, with type, default value, and the interval or the words that are allowed:

```text
)";
  text += describe_config_keys();
  return text + R"(```

Rules between keys:

- `data.train` must be given, and `model.config` or `model.init`.
- `training.micro_batch` divides `training.global_batch`.
- `training.warmup_steps` is at most `training.steps`; the schedule `wsd` needs
  `training.decay_steps`, at most what warm-up leaves of the steps; no other schedule has it.
- `validation.interval` needs `data.validation`, and `validation.tokens` at least one sequence.
- `data.packing = "best_fit"` needs `data.document_mask`.

`data.train` and `data.validation` take a path or an array: `train = [{path = "a", weight = 0.7},
{path = "b", weight = 0.3}]`. A weight is a share of the rows read in training; weights need not add
up to 1. A corpus may have a `name`, which metrics use (`validation/NAME/loss`); else it is the last
part of its path. `exhausted = "stop"` ends the run before a corpus would begin its second epoch.

A resumed run refuses other `[data]` settings, corpora or weights than those of its checkpoint, and
another learning-rate schedule (`training.steps` among it, where the schedule depends on it) unless
`checkpoint.allow_schedule_change` is on.

Relative paths start at the working directory. An integer is written as one (`1000`, `1_000`, not
`1e3`), a number begins with a digit (`0.1`, not `.1`). All mistakes of a file are reported at
once, each with its line. A run writes its resolved configuration into its folder, as a file that
can be given to `pretrain` again.

This file is the output of `pithtrain --config-reference`; a test compares the two.
)";
}

std::string nearest_word(std::string_view word, const std::vector<std::string>& candidates) {
  std::string nearest;
  size_t smallest = std::numeric_limits<size_t>::max();
  for (const std::string& candidate : candidates) {
    const size_t distance = edit_distance(word, candidate);
    if (distance < smallest) smallest = distance, nearest = candidate;
  }
  return nearest;
}

}  // namespace pith

#include "engine/config.h"
#include <gtest/gtest.h>
#include <fstream>
#include "core/error.h"

namespace pith {
namespace {
namespace fs = std::filesystem;

const std::string kMinimal = "model.config = 'model'\ndata.train = 'corpus'\n"; // two lines

RunConfig parse(const std::string& text, const std::vector<std::string>& overrides = {}) {
  return parse_run_config(kMinimal + text, "run.toml", overrides);
}

// The message of the error that these settings give; empty when they are accepted.
std::string refusal(const std::string& text, const std::vector<std::string>& overrides = {}) {
  try {
    parse(text, overrides);
    return "";
  } catch (const Error& error) { return error.message(); }
}

std::string read(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

TEST(Config, DefaultsAreThoseOfTheStruct) {
  RunConfig wanted;
  wanted.model.config = "model";
  wanted.data.train = {{"corpus"}};
  EXPECT_EQ(to_toml(parse("")), to_toml(wanted));
}

TEST(Config, LearningRateInEverySpelling) {
  for (const char* text: {"1e-5", "1E-5", "1.0e-05", "0.00001", "+1e-5", "1_0e-6"}) {
    EXPECT_EQ(parse(fmt::format("training.lr = {}", text)).training.lr, 1e-5) << text;
    EXPECT_EQ(parse("", {fmt::format("training.lr={}", text)}).training.lr, 1e-5) << text;
  }
  EXPECT_EQ(parse("training.lr = 1").training.lr, 1.0);
  const std::string no_digit = refusal("training.lr = .00001");
  EXPECT_TRUE(no_digit.starts_with("run.toml:3: column ")) << no_digit;
  EXPECT_EQ(refusal("", {"training.lr=.00001"}),
    "--set: training.lr: must be a number, not the text \".00001\"; numbers (0.1, not .1), "
    "true and false take no quotes");
}

struct Refusal {
  const char *line, *message;
};

TEST(Config, RefusesWithLineKeyAndReason) {
  const Refusal cases[] = {
    {"training.stesp = 5", "run.toml:3: training.stesp: unknown key; nearest is training.steps"},
    {"training.sequence_length = 5",
      "run.toml:3: training.sequence_length: unknown key; nearest is data.sequence_length"},
    {"lr = 1e-4", "run.toml:3: lr: unknown key outside any section; nearest is training.lr"},
    {"[trainning]\nlr = 1e-4\nsteps = 2",
      "run.toml:3: [trainning]: unknown section; there are checkpoint, data, log, model, "
      "parallel, profile, run, training, validation"},
    {"[training.schedul]\nlr = 1",
      "run.toml:3: training.schedul: unknown key; nearest is training.schedule"},
    {"log.finite = true", "run.toml:3: log.finite: unknown key; nearest is log.check_finite"},
    {"log = true", "run.toml:3: log: is a section: write [log]"},
    {"[[log]]\ntensorboard = true", "run.toml:3: log: is a section: write [log]"},
    {"training.steps = 1e6",
      "run.toml:3: training.steps: must be an integer, not the float 1000000; write 1000000"},
    {"training.steps = 1.5", "run.toml:3: training.steps: must be an integer, not the float 1.5"},
    {"training.steps = -3", "run.toml:3: training.steps: -3 is outside [1, 1e9]"},
    {"training.steps = true", "run.toml:3: training.steps: must be an integer, not true"},
    {"training.steps = 1979-05-27",
      "run.toml:3: training.steps: must be an integer, not a date or time"},
    {"training.lr = '1e-5'",
      "run.toml:3: training.lr: must be a number, not the text \"1e-5\"; numbers (0.1, not "
      ".1), true and false take no quotes"},
    {"training.lr = 0", "run.toml:3: training.lr: 0 is outside (0, 1000]"},
    {"training.lr = nan", "run.toml:3: training.lr: nan is outside (0, 1000]"},
    {"training.lr = inf", "run.toml:3: training.lr: inf is outside (0, 1000]"},
    {"training.clip_norm = inf", "run.toml:3: training.clip_norm: inf is outside [0, inf)"},
    {"training.beta2 = 1", "run.toml:3: training.beta2: 1 is outside [0, 1)"},
    {"data.seed = -1", "run.toml:3: data.seed: -1 is outside [0, inf)"},
    {"data.document_mask = 1",
      "run.toml:3: data.document_mask: must be true or false, not the integer 1"},
    {"run.folder = 3", "run.toml:3: run.folder: must be text, not the integer 3"},
    {"run.folder = ''", "run.toml: run.folder: must not be empty"},
    {"run.folder = ['a']", "run.toml:3: run.folder: must be text, not an array"},
    {"run.folder = \"a\\u0000b\"", "run.toml:3: run.folder: holds a NUL character"},
    {"run.device = 'gpu'", "run.toml:3: run.device: \"gpu\" is not one of auto|cpu|cuda"},
    {"training.schedule = 'cosin'",
      "run.toml:3: training.schedule: \"cosin\" is not one of constant|cosine|wsd"},
    {"training.micro_batch = 3",
      "run.toml: training.micro_batch: 3 does not divide training.global_batch = 32"},
    {"training.warmup_steps = 1001",
      "run.toml: training.warmup_steps: 1001 is more than training.steps = 1000"},
    {"training.schedule = 'wsd'",
      "run.toml: training.decay_steps: the schedule wsd needs a decay of at least 1 step"},
    {"[training]\nschedule = 'wsd'\nwarmup_steps = 10\ndecay_steps = 991",
      "run.toml: training.decay_steps: 991 is more than the 990 steps after warm-up"},
    {"training.decay_steps = 10",
      "run.toml: training.decay_steps: only the schedule wsd has a decay of its own; this "
      "one "
      "is cosine"},
    {"training.decay_shape = '1-sqrt'",
      "run.toml: training.decay_shape: is of the schedule wsd; this one is cosine"},
    {"training.optimizer = 'lion'",
      "run.toml:3: training.optimizer: \"lion\" is not one of adamw|muon"},
    {"training.moments = 'fp8'",
      "run.toml:3: training.moments: \"fp8\" is not one of float32|bfloat16"},
    {"training.skip_non_finite = -1",
      "run.toml:3: training.skip_non_finite: -1 is outside [0, 1e9]"},
    {"training.ema_decay = 1", "run.toml:3: training.ema_decay: 1 is outside [0, 1)"},
    {"training.muon_momentum = 1", "run.toml:3: training.muon_momentum: 1 is outside [0, 1)"},
    {"training.groups = 'norm'",
      "run.toml:3: training.groups: must be an array of tables, not the text \"norm\""},
    {"[[training.groups]]\npattern = 'a'\n[[training.groups]]\nlr_scale = 0.5",
      "run.toml:3: training.groups: group 2 has no pattern"},
    {"training.groups = [{pattern = 'a(b'}]",
      "run.toml:3: training.groups: \"a(b\" is no ECMAScript pattern: Mismatched '(' and "
      "')' in regular expression"},
    {"training.groups = [{pattern = 'a', optimizer = 'sgd'}]",
      "run.toml:3: training.groups: group 1: optimizer: \"sgd\" is not one of adamw|muon"},
    {"training.groups = [{pattern = 'a', lr_scale = -1}]",
      "run.toml:3: training.groups: group 1: lr_scale: -1 is outside [0, 1000]"},
    {"training.groups = [{pattern = 'a', weight_decay = nan}]",
      "run.toml:3: training.groups: group 1: weight_decay: nan is outside [0, 1000]"},
    {"training.groups = [{pattern = 'a', lr = 1}]",
      "run.toml:3: training.groups: group 1: lr is not one of pattern, optimizer, lr_scale, "
      "weight_decay"},
    {"checkpoint.keep_last = -1", "run.toml:3: checkpoint.keep_last: -1 is outside [0, 1e6]"},
    {"validation.interval = 5", "run.toml: validation.interval: needs a corpus in data.validation"},
    {"data.validation = 'a.bin'",
      "run.toml:3: data.validation: \"a.bin\" must name a corpus by its path without "
      "extension"},
    {"data.validation = 'a/'",
      "run.toml:3: data.validation: \"a/\" must name a corpus by its path without extension"},
    {"data.validation = 3",
      "run.toml:3: data.validation: must be a path or an array of {path, weight}, not the "
      "integer "
      "3"},
    {"data.validation = ['a']",
      "run.toml:3: data.validation: source 1 must be a table of path, weight, name, not the "
      "text \"a\""},
    {"data.validation = [{path = 'a'}, {weight = 2}]",
      "run.toml:3: data.validation: source 2 has no path"},
    {"data.validation = [{path = 'a', weight = 0}]",
      "run.toml:3: data.validation: source 1: weight: 0 is outside (0, inf)"},
    {"data.validation = [{path = 'a', weight = nan}]",
      "run.toml:3: data.validation: source 1: weight: nan is outside (0, inf)"},
    {"data.validation = [{path = 'a', wieght = 2}]",
      "run.toml:3: data.validation: source 1: wieght is not one of path, weight, name"},
    {"data.validation = [{path = 'a/x'}, {path = 'b/x'}]",
      "run.toml: data.validation: two corpora are called \"x\"; give them a name = ..."},
    {"data.validation = [{path = 'a'}, {path = 'b.idx'}]",
      "run.toml:3: data.validation: \"b.idx\" must name a corpus by its path without "
      "extension"},
    {"data.packing = 'best_fit'\ndata.document_mask = false",
      "run.toml: data.packing: best_fit needs data.document_mask"},
  };
  for (const Refusal& c: cases) EXPECT_EQ(refusal(c.line), c.message) << c.line;
}

TEST(Config, EveryMistakeAtOnce) {
  EXPECT_EQ(refusal("[training]\nsteps = 1e6\nlr = 'x'\nglobal_batch = 7\n[log]\nfinite = 1\n",
              {"training.stpes=1", "training.micro_batch=5", "nonsense"}),
    "run.toml:8: log.finite: unknown key; nearest is log.check_finite\n"
    "run.toml:5: training.lr: must be a number, not the text \"x\"; numbers (0.1, not "
    ".1), true and false take no quotes\n"
    "run.toml:4: training.steps: must be an integer, not the float 1000000; write 1000000\n"
    "--set: training.stpes: unknown key; nearest is training.steps\n"
    "--set: nonsense: not of the form section.key=value");
  // Then, once each is right by itself, what does not fit together.
  EXPECT_EQ(refusal("[training]\nglobal_batch = 7\nsteps = 3",
              {"training.micro_batch=5", "training.warmup_steps=4"}),
    "run.toml: training.micro_batch: 5 does not divide training.global_batch = 7\n"
    "run.toml: training.warmup_steps: 4 is more than training.steps = 3");
}

TEST(Config, MissingEssentialsNameTheFile) {
  try {
    parse_run_config("", "empty.toml", {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.message(),
      "empty.toml: model.config: one of model.config and model.init must be given\n"
      "empty.toml: data.train: must be given");
  }
  EXPECT_EQ(parse_run_config("model.init='m'\ndata.train='c'", "x", {}).model.config, "m");
}

TEST(Config, SyntaxErrorsGiveLineAndColumn) {
  const std::string bare = refusal("training.schedule = cosine");
  EXPECT_TRUE(bare.starts_with("run.toml:3: column ")) << bare;
  EXPECT_TRUE(refusal("training.lr = 1\ntraining.lr = 2").starts_with("run.toml:4: column "));
  EXPECT_TRUE(refusal("run.folder = '\xff'").starts_with("run.toml:3: column "));
  EXPECT_TRUE(refusal(std::string(5000, '[')).starts_with("run.toml:3: column "));
  EXPECT_NE(refusal("training.steps = 99999999999999999999"), "");
}

TEST(Config, OverridesWin) {
  const RunConfig config = parse("training.steps = 5\nrun.folder = 'a'",
    {"training.steps=7", "run.folder=/tmp/b c", "data.document_mask=false", "training.lr = 2",
      "training.steps=8", "data.seed=9223372036854775807"});
  EXPECT_EQ(config.training.steps, 8);
  EXPECT_EQ(config.run.folder, "/tmp/b c");
  EXPECT_FALSE(config.data.document_mask);
  EXPECT_EQ(config.training.lr, 2);
  EXPECT_EQ(config.data.seed, 9223372036854775807u);
  // What is wrong in the file stays wrong, whatever is set afterwards.
  EXPECT_NE(refusal("training.steps = 1.5", {"training.steps=2"}), "");
  EXPECT_EQ(refusal("", {"training.stpes=1"}),
    "--set: training.stpes: unknown key; nearest is training.steps");
  EXPECT_EQ(refusal("", {"training.steps=2\nx = 3"}),
    "--set: training.steps: must be an integer, not the text \"2\\u000Ax = 3\"; numbers "
    "(0.1, not .1), true and false take no quotes");
  EXPECT_EQ(refusal("", {"training.steps"}),
    "--set: training.steps: not of the form "
    "section.key=value");
  EXPECT_EQ(refusal("", {"run.folder=\xff"}), "--set: run.folder: not valid UTF-8");
}

TEST(Config, PathsSurviveTheRoundTrip) {
  for (const std::string path: {"/tmp/ü b'$HOME/", "a\"b\\c", "tab\there", "# not a comment",
         "true", "2024", "~/x/", "模型", "'quoted", "a=b=c", "{}", "\x7f"}) {
    const RunConfig config = parse("", {"run.folder=" + path});
    EXPECT_EQ(config.run.folder, path);
    EXPECT_EQ(parse_run_config(to_toml(config), "again", {}).run.folder, path);
  }
  EXPECT_EQ(parse("", {"run.folder=\"in quotes\""}).run.folder, "in quotes");
  EXPECT_EQ(parse("", {"model.init="}).model.init, "");
}

TEST(Config, TomlRoundTripIsExact) {
  RunConfig config = parse("",
    {"training.lr=0.1", "training.epsilon=1e-300", "training.beta2=0.1",
      "training.weight_decay=123.456e-7", "training.clip_norm=1e300",
      "data.seed=123456789012345678", "log.tensorboard=false"});
  config.training.lr = 0.1 + 0.2;
  const RunConfig again = parse_run_config(to_toml(config), "again", {});
  EXPECT_EQ(to_toml(again), to_toml(config));
  EXPECT_EQ(again.training.lr, config.training.lr);
  EXPECT_EQ(again.training.epsilon, 1e-300);
  EXPECT_EQ(again.data.seed, 123456789012345678u);
  EXPECT_EQ(
    parse_run_config("\xEF\xBB\xBF" + to_toml(config), "bom", {}).training.clip_norm, 1e300);
}

TEST(Config, BlendsInEverySpelling) {
  const std::string two =
    "[{path = \"a\", weight = 0.7}, {path = 'd/ü b', weight = 3, name = 'n'}]";
  const std::string tables =
    "[[data.validation]]\npath = \"a\"\nweight = 0.7\n"
    "[[data.validation]]\npath = 'd/ü b'\nweight = 3\nname = 'n'";
  for (const RunConfig& config:
    {parse("data.validation = " + two), parse("", {"data.validation=" + two}), parse(tables)}) {
    for (const RunConfig& same: {config, parse_run_config(to_toml(config), "again", {})}) {
      const auto& sources = same.data.validation;
      ASSERT_EQ(sources.size(), 2u);
      EXPECT_EQ(sources[0].path, "a");
      EXPECT_EQ(sources[0].weight, 0.7);
      EXPECT_EQ(sources[0].label(), "a");
      EXPECT_EQ(sources[1].path, "d/ü b");
      EXPECT_EQ(sources[1].weight, 3);
      EXPECT_EQ(sources[1].label(), "n");
    }
  }
  EXPECT_EQ(parse("", {"data.train=/x/y z"}).data.train.at(0).path, "/x/y z");
  EXPECT_EQ(parse("", {"data.train=/x/y z"}).data.train[0].label(), "y z");
  EXPECT_TRUE(parse("data.validation = ''").data.validation.empty());
}

TEST(Config, GroupsInEverySpelling) {
  const std::string two =
    "[{pattern = '\\.norm', weight_decay = 0}, {pattern = \"a\\\\.b\", optimizer = 'muon', "
    "lr_scale = 0.5}]";
  const std::string tables =
    "[[training.groups]]\npattern = '\\.norm'\nweight_decay = 0.0\n"
    "[[training.groups]]\npattern = 'a\\.b'\noptimizer = 'muon'\nlr_scale = 0.5";
  for (const RunConfig& config:
    {parse("training.groups = " + two), parse("", {"training.groups=" + two}), parse(tables)}) {
    for (const RunConfig& same: {config, parse_run_config(to_toml(config), "again", {})}) {
      const auto& groups = same.training.groups;
      ASSERT_EQ(groups.size(), 2u);
      EXPECT_EQ(groups[0].pattern, "\\.norm");
      EXPECT_EQ(groups[0].optimizer, "");
      EXPECT_EQ(groups[0].lr_scale, 1);
      EXPECT_EQ(groups[0].weight_decay, 0.0);
      EXPECT_EQ(groups[1].pattern, "a\\.b");
      EXPECT_EQ(groups[1].optimizer, "muon");
      EXPECT_EQ(groups[1].lr_scale, 0.5);
      EXPECT_LT(groups[1].weight_decay, 0);
    }
  }
}

TEST(Config, DocumentationIsCurrent) {
  const std::string text = read(fs::path(PITH_SOURCE_DIR) / "docs/configuration.md");
  EXPECT_NE(text.find("```text\n" + describe_config_keys() + "```\n"), std::string::npos)
    << "put between its ``` lines the keys of pithtrain pretrain --help:\n"
    << describe_config_keys();
}

TEST(Config, ExamplesLoad) {
  int examples = 0;
  for (const auto& entry: fs::directory_iterator(fs::path(PITH_SOURCE_DIR) / "examples")) {
    if (entry.path().extension() != ".toml") continue;
    EXPECT_NO_THROW(parse_run_config(read(entry.path()), entry.path(), {}));
    ++examples;
  }
  EXPECT_GE(examples, 2);
}

} // namespace
} // namespace pith

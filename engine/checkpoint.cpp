#include "engine/checkpoint.h"

#include <fcntl.h>
#include <stdio.h>  // renameat2

#include <charconv>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>

namespace pith {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kManifest = "manifest.json";
constexpr const char* kFormat = "pithtrain checkpoint";
// Folders being made or removed; a killed process may leave them, the next save removes them.
constexpr std::string_view kSaving = ".saving-", kDeleting = ".deleting-";

std::string step_name(int64_t step) { return fmt::format("step-{:08}", step); }

// Step of a folder name "step-00000020", or -1.
int64_t step_of(const std::string& name) {
  int64_t step = -1;
  if (name.starts_with("step-")) std::from_chars(&name[5], name.data() + name.size(), step);
  return step_name(step) == name ? step : -1;
}

std::vector<std::string> entries(const fs::path& folder) {
  std::vector<std::string> names;
  if (fs::is_directory(folder))
    for (const auto& entry : fs::directory_iterator(folder))
      names.push_back(entry.path().filename().string());
  return names;
}

// Steps with a folder under root, newest first.
std::vector<int64_t> steps_under(const fs::path& root) {
  std::vector<int64_t> steps;
  for (const std::string& name : entries(root))
    if (const int64_t step = step_of(name); step >= 0) steps.push_back(step);
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

std::string state_key(
    const std::string& kind, const std::string& tensor, int64_t offset, int64_t total) {
  return fmt::format("{}/{}@{}/{}", kind, tensor, offset, total);
}

std::string shard_name(size_t shard, size_t shards) {
  return fmt::format("shard-{:05}-of-{:05}.safetensors", shard, shards);
}

std::string manifest_text(int64_t step, const std::vector<WrittenFile>& files) {
  json list = json::object();
  for (const WrittenFile& file : files) {
    json entry = {{"bytes", file.bytes}, {"xxh3", hex(file.xxh3)}};
    for (const auto& [tensor, sum] : file.tensors) entry["tensors"][tensor] = hex(sum);
    PITH_CHECK(list.emplace(file.name, entry).second, "a checkpoint has two files {}", file.name);
  }
  const json manifest = {{"format", kFormat}, {"version", 1}, {"step", step}, {"files", list}};
  return seal_json(manifest.dump(1));
}

// The complete folder `from` takes the name `to`; a folder already there changes places with it, so
// that at every moment a complete one has the name.
void take_name(const fs::path& from, const fs::path& to) {
  const bool exchange = fs::exists(to);
  const unsigned flags = exchange ? RENAME_EXCHANGE : 0;
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0) return;
  if (errno == EINVAL && exchange)  // a file system without: a short moment without the name
    fs::rename(to, from.parent_path() / (std::string(kDeleting) + to.filename().string()));
  fs::rename(from, to);
}

void remove_leftovers(const fs::path& root) {
  for (const std::string& name : entries(root))
    if (name.rfind(kSaving, 0) == 0 || name.rfind(kDeleting, 0) == 0) fs::remove_all(root / name);
}

// Empty when the checkpoint is complete, else the reason. Reads the manifest, not the data.
std::string incomplete(const fs::path& checkpoint) {
  try {
    for (const auto& [name, file] : read_manifest(checkpoint).files) {
      const uint64_t bytes = fs::file_size(checkpoint / name);
      PITH_CHECK(bytes == file.bytes, "{} has {} bytes instead of {}", (checkpoint / name).string(),
          bytes, file.bytes);
    }
    return "";
  } catch (const Error& error) {
    return error.message();
  } catch (const fs::filesystem_error& error) {
    return error.what();
  }
}

void delete_older(const fs::path& root, int64_t step, int64_t keep_last) {
  int64_t kept = 1;  // the new one
  for (const int64_t older : steps_under(root)) {
    const fs::path folder = root / step_name(older);
    if (older >= step || !incomplete(folder).empty() || ++kept <= keep_last) continue;
    // Renamed first: a half-deleted folder must not look like a checkpoint.
    const fs::path doomed = root / (std::string(kDeleting) + step_name(older));
    fs::rename(folder, doomed);
    fs::remove_all(doomed);
  }
}

// One save by this rank, one of those that write the checkpoint together.
struct Save {
  fs::path root;
  CheckpointContent content;
  int64_t keep_last, rank, ranks;
  std::string name = step_name(content.step);
  fs::path temporary = root / (std::string(kSaving) + name);
  size_t first_weights = 0, weights = 0, shard = 0, shards = 0;  // files: of earlier ranks, of all

  void prepare(const Comm& world);
  void run() const;

 private:
  template <class Part>
  void guard(const Part& part) const;
  std::vector<WrittenFile> write_own_files() const;
  void collect_done(std::vector<WrittenFile>& written) const;
  void write_files() const;
  fs::path done_file(int64_t of_rank) const {
    return temporary / fmt::format(".done-{:05}", of_rank);
  }
};

// What `part` throws becomes an Error that names the checkpoint; rank 0 removes the temporary
// folder.
template <class Part>
void Save::guard(const Part& part) const {
  try {
    part();
  } catch (const std::exception& error) {
    std::error_code ignored;  // the first error is the one to tell
    if (rank == 0) fs::remove_all(temporary, ignored);
    const auto* known = dynamic_cast<const Error*>(&error);
    PITH_FAIL("cannot save checkpoint {}: {}", (root / name).string(),
        known ? known->message() : error.what());
  }
}

// Rank 0 makes the temporary folder, then all agree on who writes what. Collective.
void Save::prepare(const Comm& world) {
  guard([&] {
    if (rank == 0) {
      if (fs::create_directories(root)) sync_folder(fs::absolute(root).parent_path());
      remove_leftovers(root);
      fs::create_directory(temporary);
    }
    const auto files = world.all_gather_strings(
        fmt::format("{} {:d}", split_weights(content.weights).size(), !content.optimizer.empty()));
    for (int64_t r = 0; r < ranks; ++r) {
      if (r == rank) first_weights = weights, shard = shards;
      std::istringstream text(files[static_cast<size_t>(r)]);
      size_t its_weights = 0, its_shards = 0;
      text >> its_weights >> its_shards;
      weights += its_weights, shards += its_shards;
    }
  });
}

std::vector<WrittenFile> Save::write_own_files() const {
  std::vector<WrittenFile> written =
      write_weight_files(temporary, split_weights(content.weights), first_weights, weights);
  if (content.optimizer.empty()) return written;
  std::vector<NamedTensor> slices;
  for (const auto& [kind, tensor, offset, total, data] : content.optimizer) {
    PITH_CHECK(data.dim() == 1 && offset >= 0 && data.numel() <= total - offset,
        "{} of {}: {} elements from {} do not lie within {}", kind, tensor, data.numel(), offset,
        total);
    check_dtype(data, tensor, at::kFloat);
    slices.emplace_back(state_key(kind, tensor, offset, total), data);
  }
  const std::string file = shard_name(shard, shards);
  fs::create_directory(temporary / "optimizer");
  written.push_back(write_safetensors(temporary / "optimizer" / file, slices));
  written.back().name = "optimizer/" + file;
  sync_folder(temporary / "optimizer");
  return written;
}

// Rank 0: waits for all other ranks' reports and appends their files.
void Save::collect_done(std::vector<WrittenFile>& written) const {
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::minutes(10);
  std::vector<std::string> problems;
  for (int64_t r = 1; r < ranks; ++r) {
    const fs::path file = done_file(r);
    while (!fs::exists(file) && std::chrono::steady_clock::now() < give_up)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    const std::string text = fs::exists(file) ? read_file(file) : "nothing heard for 10 minutes";
    if (!text.starts_with('{')) {
      problems.push_back(fmt::format("rank {}: {}", r, text));
      continue;
    }
    for (const auto& [its_name, its] : parse_manifest(text, file.string()).files)
      written.push_back(its);
    fs::remove(file);
  }
  PITH_CHECK(problems.empty(), "{}", fmt::join(problems, "; "));
}

void Save::write_files() const {
  std::vector<WrittenFile> written;
  std::exception_ptr failure;
  std::string done;
  try {
    written = write_own_files();
    done = manifest_text(content.step, written);
  } catch (const std::exception& error) {
    failure = std::current_exception();
    done = fmt::format("error: {}", error.what());
  }
  if (rank > 0) {  // tells rank 0 what was written, as a manifest, or why it could not be
    const std::string file = done_file(rank).filename().string();
    write_file(temporary, file + ".part", done);
    fs::rename(temporary / (file + ".part"), temporary / file);
  } else {
    collect_done(written);  // so that nobody writes any more
  }
  if (failure) std::rethrow_exception(failure);
  if (rank > 0) return;
  written.push_back(write_weight_index(temporary, written));
  for (const auto& [file, bytes] : content.files)
    written.push_back(write_file(temporary, file, bytes));
  written.push_back(write_file(temporary, "training_state.json", content.training_state));
  write_file(temporary, kManifest, manifest_text(content.step, written));
  sync_folder(temporary);
}

void Save::run() const {
  guard([&] {
    write_files();
    if (rank > 0) return;
    take_name(temporary, root / name);
    sync_folder(root);
  });
  if (rank > 0) return;
  try {
    remove_leftovers(root);  // what take_name replaced
    if (keep_last > 0) delete_older(root, content.step, keep_last);
  } catch (const fs::filesystem_error& error) {
    PITH_FAIL("checkpoint {} is saved, but an older one could not be deleted: {}",
        (root / name).string(), error.what());
  }
}

// The problems of one file of a manifest.
std::vector<std::string> verify_file(const fs::path& path, const WrittenFile& expected) {
  const std::string name = path.string();
  try {
    const MappedFile file = map_file(path);
    if (file.size != expected.bytes)
      return {fmt::format("{} has {} bytes instead of {}", name, file.size, expected.bytes)};
    if (xxh3(file.bytes()) == expected.xxh3) return {};
    if (expected.tensors.empty())
      return {fmt::format("{} is damaged: its bytes do not match the manifest's sum", name)};
    std::vector<std::string> problems;
    const SafetensorsFile tensors(path);
    for (const auto& [tensor, sum] : expected.tensors) {
      if (!tensors.header().tensors.count(tensor)) {
        problems.push_back(fmt::format("{} is damaged: tensor {} is gone", name, tensor));
      } else if (xxh3(tensors.bytes(tensor)) != sum) {
        problems.push_back(fmt::format("{} is damaged in tensor {}", name, tensor));
      }
    }
    if (problems.empty()) problems.push_back(name + " is damaged in its header");
    return problems;
  } catch (const Error& error) {
    return {error.message()};
  }
}

uint64_t parse_hex(const std::string& text, const std::string& source) {
  uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value, 16);
  PITH_CHECK(hex(value) == text, "{}: {} is no sum of 16 hexadecimal digits", source, text);
  return value;
}

}  // namespace

CheckpointWriter::~CheckpointWriter() {
  try {
    finish();
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
  }
}

void CheckpointWriter::start(
    fs::path root, CheckpointContent content, int64_t keep_last, const Comm& world) {
  finish();
  Save save{std::move(root), std::move(content), keep_last, world.rank(), world.size()};
  save.prepare(world);
  thread_ = std::thread([this, save = std::move(save)] {
    try {
      save.run();
    } catch (...) {
      error_ = std::current_exception();
    }
  });
}

void CheckpointWriter::finish() {
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

Manifest parse_manifest(std::string_view text, const std::string& source) {
  check_seal(text, source);
  const json document = parse_json(text, source);
  try {
    Manifest manifest;
    PITH_CHECK(document.at("format") == kFormat && document.at("version") == 1,
        "{}: not the manifest of a checkpoint this program reads", source);
    manifest.step = document.at("step").get<int64_t>();
    for (const auto& [name, entry] : document.at("files").items()) {
      const fs::path path(name);
      PITH_CHECK(path.is_relative() && path.lexically_normal() == path && *path.begin() != "..",
          "{}: {} is not a path inside the checkpoint", source, name);
      WrittenFile file{name, entry.at("bytes"), parse_hex(entry.at("xxh3"), source), {}};
      if (entry.contains("tensors"))
        for (const auto& [tensor, sum] : entry["tensors"].items())
          file.tensors.emplace_back(tensor, parse_hex(sum, source));
      manifest.files.emplace(name, std::move(file));
    }
    return manifest;
  } catch (const json::exception& error) {
    PITH_FAIL("{}: {}", source, error.what());
  }
}

Manifest read_manifest(const fs::path& checkpoint) {
  const fs::path path = checkpoint / kManifest;
  return parse_manifest(map_file(path).bytes(), path.string());
}

std::optional<fs::path> newest_checkpoint(const fs::path& root, std::vector<std::string>* skipped) {
  for (const int64_t step : steps_under(root)) {
    const std::string reason = incomplete(root / step_name(step));
    if (reason.empty()) return root / step_name(step);
    if (skipped) skipped->push_back(fmt::format("{} is not complete: {}", step_name(step), reason));
  }
  return std::nullopt;
}

std::vector<std::string> verify_checkpoint(const fs::path& folder) {
  Manifest manifest;
  try {
    manifest = read_manifest(folder);
  } catch (const Error& error) {
    return {error.message()};
  }
  std::vector<const WrittenFile*> files;
  for (const auto& [name, file] : manifest.files) files.push_back(&file);
  std::vector<std::vector<std::string>> found(files.size());
  at::parallel_for(0, std::ssize(files), 1, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i)
      found[i] = verify_file(folder / files[i]->name, *files[i]);
  });
  std::vector<std::string> problems;
  for (const auto& list : found) problems.insert(problems.end(), list.begin(), list.end());
  return problems;
}

void check_checkpoint(const fs::path& folder) {
  const std::vector<std::string> problems = verify_checkpoint(folder);
  if (!problems.empty())
    PITH_FAIL_HINT("move this checkpoint away to continue from the one before",
        "checkpoint {} can't be used:\n  - {}", folder.string(), fmt::join(problems, "\n  - "));
}

OptimizerReader::OptimizerReader(const fs::path& folder) : folder_(folder / "optimizer") {
  std::vector<std::string> names = entries(folder_);
  std::sort(names.begin(), names.end());
  if (names.empty())
    PITH_FAIL_HINT("use the folder as [model] init to start with a new optimizer",
        "{} holds no optimizer state", folder.string());
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string expected = shard_name(i, names.size());
    PITH_CHECK(names[i] == expected, "{}: {} is there where {} is expected", folder_.string(),
        names[i], expected);
    files_.emplace_back(folder_ / names[i]);
    for (const auto& [key, entry] : files_[i].header().tensors) {
      const size_t slash = std::min(key.find('/'), key.size());
      const size_t at = std::min(key.rfind('@'), key.size());
      const std::string kind = key.substr(0, slash);
      const std::string tensor = at > slash ? key.substr(slash + 1, at - slash - 1) : "";
      Piece piece{i, key, -1, entry.shape.size() == 1 ? entry.shape[0] : -1, -1};
      const char *end = key.data() + key.size(), *text = std::min(&key[at] + 1, end);
      text = std::from_chars(text, end, piece.offset).ptr;
      std::from_chars(std::min(text + 1, end), end, piece.total);
      PITH_CHECK(piece.offset >= 0 && piece.count >= 0 && entry.dtype == at::kFloat &&
                     key == state_key(kind, tensor, piece.offset, piece.total),
          "{}: {} is not a flat float32 slice KIND/TENSOR@OFFSET/TOTAL", files_[i].path().string(),
          key);
      pieces_[{kind, tensor}].push_back(piece);
    }
  }
  for (auto& [name, pieces] : pieces_) {
    std::ranges::sort(
        pieces, {}, [](const Piece& piece) { return std::pair(piece.offset, piece.count); });
    int64_t end = 0;
    for (const Piece& piece : pieces) {
      PITH_CHECK(piece.offset == end && piece.total == pieces[0].total,
          "{}: {} of {}: a slice starts at {} of {}, where {} of {} is expected",
          files_[piece.file].path().string(), name.first, name.second, piece.offset, piece.total,
          end, pieces[0].total);
      end += piece.count;
    }
    PITH_CHECK(end == pieces[0].total, "{}: {} of {} ends at element {} of {}", folder_.string(),
        name.first, name.second, end, pieces[0].total);
  }
}

void OptimizerReader::read(
    const std::string& kind, const HfTensor& tensor, Tensor out, int64_t first) const {
  const auto found = pieces_.find({kind, tensor.name});
  PITH_CHECK(
      found != pieces_.end(), "{}: there is no {} of {}", folder_.string(), kind, tensor.name);
  const int64_t total = found->second[0].total;
  const int64_t last = first + out.numel();
  PITH_CHECK(total == tensor.numel() && out.dim() == 1 && first >= 0 && last <= total,
      "{}: {} of {} has {} elements, the model's tensor {}, its target {} from {}",
      folder_.string(), kind, tensor.name, total, tensor.numel(), out.numel(), first);
  at::NoGradGuard no_grad;
  for (const Piece& piece : found->second) {
    const int64_t begin = std::max(first, piece.offset);
    const int64_t end = std::min(last, piece.offset + piece.count);
    if (begin >= end) continue;
    const Tensor stored = files_[piece.file].tensor(piece.key);
    out.narrow(0, begin - first, end - begin)
        .copy_(stored.narrow(0, begin - piece.offset, end - begin));
  }
}

}  // namespace pith

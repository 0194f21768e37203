#include "text/corpus_encoder.h"

#include <xxhash.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace pith {
namespace {

using Kind = EncodedDocument::Kind;

void encode(
    const Tokenizer& tokenizer, const EncodeSettings& settings, Chunk& chunk, EncodedChunk& out) {
  static_cast<ChunkPlace&>(out) = chunk;
  // A text that spells <|endoftext|> does not end there.
  const EncodeOptions options{.add_special_tokens = false, .parse_special = false};
  std::vector<Document> documents = read_documents(chunk, settings.read);
  chunk.bytes = {};
  for (Document& document : documents) {
    EncodedDocument& encoded = out.documents.emplace_back();
    static_cast<Document&>(encoded) = std::move(document);
    const std::string text = std::exchange(encoded.text, {});
    encoded.bytes = text.size();
    encoded.kind = !encoded.problem.empty()            ? Kind::kBad
                   : !encoded.is_text                  ? Kind::kNotText
                   : text.empty()                      ? Kind::kEmpty
                   : text.size() < settings.min_length ? Kind::kShort
                   : text.size() > settings.max_length ? Kind::kLong
                                                       : Kind::kGood;
    if (encoded.kind != Kind::kGood) continue;
    encoded.hash = XXH3_64bits(text.data(), text.size());
    const XXH128_hash_t sum = XXH3_128bits(text.data(), text.size());
    encoded.fingerprint = {sum.high64, sum.low64};
    Encoding encoding = tokenizer.encode(text, options);
    out.dropped_characters += encoding.dropped_characters;
    encoded.ids = std::move(encoding.ids);
    if (settings.end_id) encoded.ids.push_back(*settings.end_id);
  }
}

}  // namespace

struct CorpusEncoder::State {
  // From the reader to next(): workers fill `encoded` and set `ready`.
  struct Slot {
    Chunk chunk;
    EncodedChunk encoded;
    std::exception_ptr error;
    uint64_t bytes = 0;
    bool ready = false;
  };

  InputReader reader;
  Tokenizer tokenizer;
  EncodeSettings settings;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Slot>> slots;  // in the order of the files
  size_t taken = 0;                         // how many of them workers have begun
  uint64_t in_flight = 0;
  bool ended = false, stopped = false;
  std::vector<std::jthread> threads;

  State(std::vector<InputFile> files, Tokenizer tokens, EncodeSettings how, InputPosition start)
      : reader(std::move(files), how.read, start),
        tokenizer(std::move(tokens)),
        settings(std::move(how)) {}

  void read() {
    for (bool more = true; more;) {
      auto slot = std::make_shared<Slot>();
      try {
        more = reader.next(slot->chunk);
        if (!more) break;
      } catch (...) {
        slot->error = std::current_exception();
        more = false;
      }
      slot->bytes = slot->chunk.bytes.size();
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] {
        return stopped || slots.empty() ||
               (in_flight + slot->bytes <= settings.bytes_in_flight &&
                   slots.size() < 8 * static_cast<size_t>(settings.workers));
      });
      if (stopped) break;
      in_flight += slot->bytes;
      slots.push_back(std::move(slot));
      changed.notify_all();
    }
    const std::lock_guard lock(mutex);
    ended = true;
    changed.notify_all();
  }

  void work() {
    while (true) {
      std::shared_ptr<Slot> slot;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return stopped || ended || taken < slots.size(); });
        if (stopped || taken == slots.size()) return;
        slot = slots[taken++];
      }
      try {
        if (!slot->error) encode(tokenizer, settings, slot->chunk, slot->encoded);
      } catch (...) {
        slot->error = std::current_exception();
      }
      const std::lock_guard lock(mutex);
      slot->ready = true;
      changed.notify_all();
    }
  }
};

CorpusEncoder::CorpusEncoder(
    std::vector<InputFile> files, Tokenizer tokenizer, EncodeSettings settings, InputPosition start)
    : state_(std::make_unique<State>(
          std::move(files), std::move(tokenizer), std::move(settings), start)) {
  state_->threads.emplace_back([this] { state_->read(); });
  for (int i = 0; i < state_->settings.workers; ++i)
    state_->threads.emplace_back([this] { state_->work(); });
}

CorpusEncoder::~CorpusEncoder() {
  const std::lock_guard lock(state_->mutex);
  state_->stopped = true;
  state_->changed.notify_all();
}

bool CorpusEncoder::next(EncodedChunk& chunk) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.changed.wait(
      lock, [&] { return state.slots.empty() ? state.ended : state.slots.front()->ready; });
  if (state.slots.empty()) return false;
  const auto slot = state.slots.front();
  state.slots.pop_front();
  --state.taken;
  state.in_flight -= slot->bytes;
  state.changed.notify_all();
  if (slot->error) std::rethrow_exception(slot->error);
  chunk = std::move(slot->encoded);
  return true;
}

}  // namespace pith

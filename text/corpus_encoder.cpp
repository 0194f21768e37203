#include "text/corpus_encoder.h"

#include <xxhash.h>

#include <utility>

namespace pith {

CorpusEncoder::CorpusEncoder(
    std::vector<InputFile> files, Tokenizer tokenizer, EncodeSettings settings, InputPosition start)
    : reader_(std::move(files), settings.read, start),
      tokenizer_(std::move(tokenizer)),
      settings_(std::move(settings)) {
  for (int i = 0; i < settings_.workers; ++i) threads_.emplace_back([this] { work(); });
}

CorpusEncoder::~CorpusEncoder() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

void CorpusEncoder::work() {
  while (true) {
    std::unique_lock turn(reading_);
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] {
        return ended_ || slots_.empty() ||
               (in_flight_ < settings_.bytes_in_flight &&
                   std::ssize(slots_) < 8 * settings_.workers);
      });
      if (ended_) return;
    }
    Chunk chunk;
    std::exception_ptr error;
    bool found = true;
    try {
      found = reader_.next(chunk);
    } catch (...) { error = std::current_exception(); }
    std::packaged_task<EncodedChunk()> task([&] {
      if (error) std::rethrow_exception(error);
      return encode(std::move(chunk));
    });
    {
      const std::lock_guard lock(mutex_);
      ended_ = ended_ || !found || error;
      if (found) slots_.push_back({task.get_future(), chunk.bytes.size()});
      in_flight_ += chunk.bytes.size();
      changed_.notify_all();
    }
    turn.unlock();
    if (found) task();
  }
}

bool CorpusEncoder::next(EncodedChunk& chunk) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ended_ || !slots_.empty(); });
  if (slots_.empty()) return false;
  const Slot& first = slots_.front();  // in line, where it counts, until it is done
  lock.unlock();
  first.encoded.wait();
  lock.lock();
  std::future<EncodedChunk> encoded = std::move(slots_.front().encoded);
  in_flight_ -= first.bytes;
  slots_.pop_front();
  changed_.notify_all();
  chunk = encoded.get();
  return true;
}

EncodedChunk CorpusEncoder::encode(Chunk chunk) const {
  using Kind = EncodedDocument::Kind;
  EncodedChunk out;
  static_cast<ChunkPlace&>(out) = chunk;
  std::vector<Document> documents = read_documents(chunk, settings_.read);
  chunk = {};  // its bytes
  for (Document& document : documents) {
    EncodedDocument& encoded = out.documents.emplace_back();
    static_cast<Document&>(encoded) = std::move(document);
    const std::string text = std::exchange(encoded.text, {});
    encoded.bytes = text.size();
    encoded.kind = !encoded.problem.empty()             ? Kind::kBad
                   : !encoded.is_text                   ? Kind::kNotText
                   : text.empty()                       ? Kind::kEmpty
                   : text.size() < settings_.min_length ? Kind::kShort
                   : text.size() > settings_.max_length ? Kind::kLong
                                                        : Kind::kGood;
    if (encoded.kind != Kind::kGood) continue;
    encoded.hash = XXH3_64bits(text.data(), text.size());
    const XXH128_hash_t sum = XXH3_128bits(text.data(), text.size());
    encoded.fingerprint = {sum.high64, sum.low64};
    // A text that spells <|endoftext|> does not end there.
    Encoding made = tokenizer_.encode(text, {.add_special_tokens = false, .parse_special = false});
    out.dropped_characters += made.dropped_characters;
    encoded.ids = std::move(made.ids);
    if (settings_.end_id) encoded.ids.push_back(*settings_.end_id);
  }
  return out;
}

}  // namespace pith

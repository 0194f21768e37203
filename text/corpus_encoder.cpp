#include "text/corpus_encoder.h"

#include <xxhash.h>

#include <utility>

namespace pith {

CorpusEncoder::CorpusEncoder(
    std::vector<InputFile> files, Tokenizer tokenizer, EncodeSettings settings, InputPosition start)
    : reader_(std::move(files), settings.read, start),
      tokenizer_(std::move(tokenizer)),
      settings_(std::move(settings)) {
  threads_.emplace_back([this] { read(); });
  for (int i = 0; i < settings_.workers; ++i) threads_.emplace_back([this] { work(); });
}

CorpusEncoder::~CorpusEncoder() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

void CorpusEncoder::read() {
  for (bool more = true; more;) {
    auto slot = std::make_shared<Slot>();
    try {
      more = reader_.next(slot->chunk);
      if (!more) break;
    } catch (...) {
      slot->error = std::current_exception();
      more = false;
    }
    slot->bytes = slot->chunk.bytes.size();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      return stopped_ || slots_.empty() ||
             (in_flight_ + slot->bytes <= settings_.bytes_in_flight &&
                 std::ssize(slots_) < 8 * settings_.workers);
    });
    if (stopped_) break;
    in_flight_ += slot->bytes;
    slots_.push_back(std::move(slot));
    changed_.notify_all();
  }
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

void CorpusEncoder::work() {
  for (std::unique_lock lock(mutex_);;) {
    changed_.wait(lock, [&] { return stopped_ || ended_ || taken_ < slots_.size(); });
    if (stopped_ || taken_ == slots_.size()) return;
    const auto slot = slots_[taken_++];
    lock.unlock();
    try {
      if (!slot->error) encode(std::exchange(slot->chunk, {}), slot->encoded);
    } catch (...) { slot->error = std::current_exception(); }
    lock.lock();
    slot->ready = true;
    changed_.notify_all();
  }
}

bool CorpusEncoder::next(EncodedChunk& chunk) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return slots_.empty() ? ended_ : slots_.front()->ready; });
  if (slots_.empty()) return false;
  const auto slot = slots_.front();
  slots_.pop_front();
  --taken_;
  in_flight_ -= slot->bytes;
  changed_.notify_all();
  if (slot->error) std::rethrow_exception(slot->error);
  chunk = std::move(slot->encoded);
  return true;
}

void CorpusEncoder::encode(Chunk chunk, EncodedChunk& out) const {
  using Kind = EncodedDocument::Kind;
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
    Encoding encoding =
        tokenizer_.encode(text, {.add_special_tokens = false, .parse_special = false});
    out.dropped_characters += encoding.dropped_characters;
    encoded.ids = std::move(encoding.ids);
    if (settings_.end_id) encoded.ids.push_back(*settings_.end_id);
  }
}

}  // namespace pith

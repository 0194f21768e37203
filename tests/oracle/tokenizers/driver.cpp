// Encodes framed texts for compare.py and speed.py.
// stdin: (uint32 size, bytes)*; stdout: per text (uint32 n, int32 id[n], uint32 offset[n][2],
// uint32 size, decoded bytes). With --time N it reports seconds instead, N threads over all texts.
// With --train SIZE THREADS it trains on the texts and saves to the folder that is named first.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>
#include "core/error.h"
#include "text/tokenizer_state.h"

namespace {
std::vector<std::string> read_texts() {
  std::vector<std::string> texts;
  uint32_t size;
  while (std::fread(&size, 4, 1, stdin) == 1) {
    std::string text(size, '\0');
    PITH_CHECK(std::fread(text.data(), 1, size, stdin) == size, "stdin ends inside a text");
    texts.push_back(std::move(text));
  }
  return texts;
}

void write_words(const void* data, size_t bytes) { std::fwrite(data, 1, bytes, stdout); }
void write_size(size_t size) {
  const auto word = static_cast<uint32_t>(size);
  write_words(&word, 4);
}

double seconds() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

} // namespace

int main(int argc, char** argv) try {
  PITH_CHECK(argc >= 2, "usage: driver tokenizer [--time threads | --train size threads]");
  const double start = seconds();
  if (argc == 5 && !std::strcmp(argv[2], "--train")) {
    pith::BpeTrainerOptions train;
    train.vocab_size = std::atoi(argv[3]);
    train.threads = std::atoi(argv[4]);
    pith::BpeTrainer trainer(train);
    trainer.add(read_texts());
    const double counted = seconds();
    trainer.train().save(argv[1]);
    std::printf("counted %.2f s, merged %.2f s\n", counted - start, seconds() - counted);
    return 0;
  }
  const pith::Tokenizer tokenizer = pith::Tokenizer::load(argv[1]);
  const std::vector<std::string> texts = read_texts();
  if (argc == 4 && !std::strcmp(argv[2], "--time")) {
    const double loaded = seconds();
    std::atomic<size_t> tokens = 0;
    pith::on_threads(std::atoi(argv[3]), texts.size(),
      [&](int, size_t i) { tokens += tokenizer.encode(texts[i]).ids.size(); });
    std::printf("%.4f %zu %.4f\n", seconds() - loaded, tokens.load(), loaded - start);
    return 0;
  }
  pith::EncodeOptions options;
  options.offsets = true;
  for (const std::string& text: texts) {
    const pith::Encoding encoding = tokenizer.encode(text, options);
    const std::string decoded = tokenizer.decode(encoding.ids);
    write_size(encoding.ids.size());
    write_words(encoding.ids.data(), encoding.ids.size() * 4);
    write_words(encoding.offsets.data(), encoding.offsets.size() * 8);
    write_size(decoded.size());
    write_words(decoded.data(), decoded.size());
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

// Lines of JSON as a chunk of a file; the first byte chooses a short line limit.
#include "tests/fuzz/fuzz.h"
#include "text/corpus_reader.h"

PITH_FUZZ(input) {
  if (input.empty()) return;
  pith::ReadOptions options{.text_field = "a.text", .id_field = "id"};
  if (input[0] % 2 == 1) options.max_line = 100;
  pith::Chunk chunk;
  chunk.lines = input.substr(1);
  pith::read_lines(chunk, options);
  for (const pith::Document& document: chunk.documents)
    if (!document.problem.empty() && !document.text.empty()) __builtin_trap();
}

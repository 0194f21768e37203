// Normalisation forms and lower case, with places kept. The same tables and the same places as
// Hugging Face `tokenizers`, whose normaliser knows Unicode 12.
#pragma once
#include "text/tokenizer_text.h"

namespace pith {

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

// Writes only what has to change; leaves `out` unchanged() when the text is in the form already.
void normalize(const Text& text, NormalForm form, Rewriter& out);
void lowercase(const Text& text, Rewriter& out);

}  // namespace pith

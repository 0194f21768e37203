#!/usr/bin/env bash
# Builds the fuzzers of this folder into build-fuzz/ and runs each for a short while.
#   tests/fuzz/run.sh [NAME...]     e.g. safetensors; SECONDS_EACH=600 for a long run
# Inputs that a run finds useful stay in build-fuzz/NAME.corpus; findings in build-fuzz/NAME.crash-*.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

seconds=${SECONDS_EACH:-10}
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(safetensors config_json manifest idx toml)
folder=build-fuzz
torch=$(echo .deps/lib/python3.*/site-packages/torch)
clang=clang++-14
command -v $clang >/dev/null || clang=clang++
linker=$(command -v mold >/dev/null && echo -fuse-ld=mold || true)
flags=(-std=c++20 -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined,fuzzer-no-link
       -fno-sanitize=vptr,function -fno-sanitize-recover=undefined -DFMT_HEADER_ONLY=1 -DPITH_CUDA=0
       -I. -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include")
mkdir -p $folder

# What the parsers stand on, compiled once with the sanitizers and the fuzzer's counters.
sources=(core/error core/tensor core/random core/parameter engine/file_io engine/safetensors
         engine/hf_folder engine/checkpoint engine/corpus engine/config models/qwen3_moe)
objects=()
header=$folder/pch.h.pch
stale() { [ ! -e "$1" ] || [ -n "$(find core engine models operators -newer "$1" "${@:2}")" ]; }
compile() {  # compile SOURCE OBJECT: with the headers of LibTorch read once
  if stale $header -name pch.h; then $clang "${flags[@]}" -x c++-header core/pch.h -o $header; fi
  $clang "${flags[@]}" -include-pch $header -c "$1" -o "$2"
}
for source in "${sources[@]}"; do
  object=$folder/${source//\//_}.o
  objects+=("$object")
  if stale "$object" \( -name '*.h' -o -path "$source.cpp" \); then compile "$source.cpp" "$object"; fi
done

for name in "${names[@]}"; do
  # Symbols of code that no parser calls (operators, autograd) stay unresolved: nothing runs them.
  compile "tests/fuzz/${name}_fuzz.cpp" "$folder/${name}_fuzz.o"
  $clang -fsanitize=fuzzer,address,undefined $linker -o "$folder/fuzz_$name" "$folder/${name}_fuzz.o" \
    "${objects[@]}" -lxxhash "$torch/lib/libc10.so" "$torch/lib/libtorch_cpu.so" \
    -Wl,--allow-shlib-undefined -Wl,--unresolved-symbols=ignore-all \
    "-Wl,-rpath,$PWD/$torch/lib:$PWD/${torch%torch}nvidia/cu13/lib"
done

for name in "${names[@]}"; do
  mkdir -p "$folder/$name.corpus"
  echo "fuzz: $name for $seconds s"
  # One allocation may be at most 16 MB for inputs of at most 64 kB: sizes written in a file are not believed.
  if ! ASAN_OPTIONS=detect_container_overflow=0 "$folder/fuzz_$name" "$folder/$name.corpus" \
      "tests/fuzz/seeds/$name" -max_total_time="$seconds" -max_len=65536 -timeout=5 -rss_limit_mb=2048 \
      -malloc_limit_mb=16 -artifact_prefix="$folder/$name." -print_final_stats=1 \
      >"$folder/$name.log" 2>&1; then
    tail -n 40 "$folder/$name.log"
    echo "fuzz: FAIL $name; the input is the newest file $folder/$name.*"
    exit 1
  fi
  grep -E 'number_of_executed_units|peak_rss' "$folder/$name.log" | sed 's/^/  /'
done
echo "fuzz: PASS"

#!/usr/bin/env bash
# Builds the fuzzers of this folder into build-fuzz/ and runs each for a short while.
#   tests/fuzz/run.sh [NAME...]     e.g. safetensors; SECONDS_EACH=600 for a long run
# Inputs that a run finds useful stay in build-fuzz/NAME.corpus; findings in build-fuzz/NAME.crash-*.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

seconds=${SECONDS_EACH:-10}
names=("$@")
[ ${#names[@]} -gt 0 ] || mapfile -t names < <(cd tests/fuzz && ls ./*_fuzz.cpp | sed 's#\./##; s/_fuzz.cpp//')
export folder=build-fuzz clang=clang++-14
torch=$(echo .deps/lib/python3.*/site-packages/torch)
command -v $clang >/dev/null || clang=clang++
linker=$(command -v mold >/dev/null && echo -fuse-ld=mold || true)
export flags="-std=c++20 -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined,fuzzer-no-link
  -fno-sanitize=vptr,function -fno-sanitize-recover=undefined -DPITH_CUDA=0
  -I. -isystem $torch/include -isystem $torch/include/torch/csrc/api/include"

# toml++ 3.3 calls unreachable what letters beyond ASCII reach; it goes on to its ordinary error in a release build,
# and here.
flags+=" -fno-sanitize=unreachable"

# Objects are compiled again when their source or any header is newer.
stale() {
  [ ! -e "$1" ] || [ -n "$(find core operators models engine text tests/fuzz -newer "$1" \
    \( -name '*.h' -o -name '*.inc' -o -path "$2" \))" ]
}
object_of() { printf '%s\n' "$folder/${1//\//_}.o"; }
compile() {
  if stale "$(object_of "$1")" "$1.cpp"; then
    $clang $flags -include-pch $folder/pch.h.pch -c "$1.cpp" -o "$(object_of "$1")"
  fi
}
export -f stale object_of compile

# What a target stands on, with the sanitizers and the fuzzer's counters.
sources_of() {
  printf '%s\n' core/error core/fmt "tests/fuzz/$1_fuzz"
  case "$1" in
    toml) echo engine/config ;;
    tokenizer | jsonl) ls text/*.cpp | sed 's/\.cpp$//' ;;
    *) printf '%s\n' core/{tensor,random,parameter} models/{common,qwen3_moe,deepseek_v2,gpt_oss,qwen3_5_moe} \
         engine/{file_io,safetensors,hf_folder,checkpoint,corpus} ;;
  esac
}
mkdir -p $folder
if [ ! -e $folder/pch.h.pch ] || [ -n "$(find core/{pch,std,error}.h -newer $folder/pch.h.pch)" ]; then
  cp core/pch.h $folder/pch.h
  $clang $flags -x c++-header $folder/pch.h -o $folder/pch.h.pch
  rm -f $folder/*.o
fi
for name in "${names[@]}"; do sources_of "$name"; done | sort -u |
  xargs -P "$(nproc)" -I{} bash -c 'compile {} || exit 255'

for name in "${names[@]}"; do
  # Symbols of code that no parser calls (operators, autograd) stay unresolved: nothing runs them.
  $clang -fsanitize=fuzzer,address,undefined $linker -o "$folder/fuzz_$name" \
    $(sources_of "$name" | while read -r source; do object_of "$source"; done) \
    "$torch/lib/libc10.so" "$torch/lib/libtorch_cpu.so" -lxxhash -lpcre2-8 -lutf8proc -lsimdjson -lzstd -lz \
    -Wl,--allow-shlib-undefined -Wl,--unresolved-symbols=ignore-all \
    "-Wl,-rpath,$PWD/$torch/lib:$PWD/${torch%torch}nvidia/cu13/lib"
done

for name in "${names[@]}"; do
  mkdir -p "$folder/$name.corpus"
  echo "fuzz: $name for $seconds s"
  # Inputs have at most 64 kB and one allocation 16 MB: sizes written in a file are not believed.
  if ! ASAN_OPTIONS=detect_container_overflow=0 "$folder/fuzz_$name" "$folder/$name.corpus" \
      "tests/fuzz/seeds/$name" -max_total_time="$seconds" -max_len=65536 -timeout=10 -rss_limit_mb=2048 \
      -malloc_limit_mb=16 -artifact_prefix="$folder/$name." -print_final_stats=1 \
      >"$folder/$name.log" 2>&1; then
    tail -n 40 "$folder/$name.log"
    echo "fuzz: FAIL $name; the input is the newest file $folder/$name.*"
    exit 1
  fi
  grep -E 'number_of_executed_units|peak_rss' "$folder/$name.log" | sed 's/^/  /'
done
echo "fuzz: PASS"

#!/usr/bin/env bash
# ./pith test --oracle [SUITE...]: ids, offsets, decoded text, training and speed beside Hugging Face's `tokenizers`,
# whose wheel goes into a virtual environment of its own. SUITE: points, random, files, train, speed (default: all;
# half an hour on two cores). Reads the tokenizers that stand in $PITH_TOKENIZERS as NAME/tokenizer.json[.zst]
# beside the small ones it trains on the spot; texts are this tree, LibTorch's headers and Debian's manual pages in
# twenty languages. Fails when anything differs, or when encoding is not four times as fast.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
here=tests/oracle/tokenizers
out=${PITH_BUILD_DIR:-build}/oracle
suites=" ${*:-points random files train speed} "
say() { printf '%s\n' "oracle: $*" >&2; }
mkdir -p "$out/tokenizers"

python=.deps/oracle/bin/python
if ! sha256sum --status -c .deps/oracle.installed 2>/dev/null; then
  say "installing the wheel of tokenizers into .deps/oracle"
  .deps/bin/python -m venv .deps/oracle
  $python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --only-binary=:all: \
    --require-hashes -r requirements/oracle.txt
  sha256sum requirements/oracle.txt >.deps/oracle.installed
fi

# Packages are unpacked, not installed: some machines leave manual pages out of what they install.
languages=(cs da de el es fi fr hu id it nb nl pl pt-br ro ru sr sv uk ja zh)
if [ ! -e "$out/man/complete" ]; then
  say "fetching Debian's manual pages in ${#languages[@]} languages"
  rm -rf "$out/man" && mkdir -p "$out/man/packages"
  (cd "$out/man/packages" && apt-get download -qq "${languages[@]/#/manpages-}" 2>/dev/null) ||
    { say "apt-get could not fetch manual pages (apt-get update?)"; exit 1; }
  for package in "$out"/man/packages/*.deb; do
    name=$(basename "$package") && name=${name#manpages-}
    mkdir -p "$out/man/${name%%_*}"
    dpkg-deb --fsys-tarfile "$package" | tar -x -C "$out/man/${name%%_*}" ./usr/share/man
  done
  touch "$out/man/complete"
fi
rm -rf "$out/source" && mkdir -p "$out/source"
git ls-files -- '*.cpp' '*.h' '*.cu' '*.md' | xargs cp --parents -t "$out/source"
folders=("$out/source" .deps/lib/python3*/site-packages/torch/include/c10)
for language in "${languages[@]}"; do folders+=("$out/man/$language"); done

if [ ! -e "$out/tokenizers/complete" ]; then
  say "training small tokenizers of every kind"
  $python $here/make_zoo.py "$out/tokenizers" "${folders[@]}"
  touch "$out/tokenizers/complete"
fi
for file in "${PITH_TOKENIZERS:-/nonexistent}"/*/tokenizer.json{,.zst}; do
  [ -e "$file" ] || continue
  name=$(basename "$(dirname "$file")")
  mkdir -p "$out/tokenizers/$name"
  case $file in
    *.zst) zstd -qdf "$file" -o "$out/tokenizers/$name/tokenizer.json" ;;
    *) cp "$file" "$out/tokenizers/$name/" ;;
  esac
done
mapfile -t tokenizers < <(find "$out/tokenizers" -name '*.json' -size +1k | sort)
say "${#tokenizers[@]} tokenizers"

files=("${folders[@]/#/--files=}")
status=0
for suite in points random files; do
  [[ $suites == *" $suite "* ]] || continue
  printf '%s\n' "${tokenizers[@]}" |
    xargs -P "${PITH_JOBS:-$(nproc)}" -n 1 $python $here/compare.py --driver "$out/../oracle_driver" --suite $suite "${files[@]}" ||
    status=1
done
if [[ $suites == *" train "* ]]; then
  $python $here/train.py --driver "$out/../oracle_driver" "${files[@]}" || status=1
fi
if [[ $suites == *" speed "* ]]; then
  $python $here/speed.py --driver "$out/../oracle_driver" --at-least 4 --limit 6000000 "${files[0]}" "${files[1]}" \
    "--files=$out/man/de" "--files=$out/man/ja" "${tokenizers[@]}" || status=1
fi
[ $status -eq 0 ] && echo "oracle: PASS" || echo "oracle: FAIL"
exit $status

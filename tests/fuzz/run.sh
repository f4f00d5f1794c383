#!/usr/bin/env bash
# Fuzzes what reads and translates GGUF headers with libFuzzer: tests/fuzz/run.sh [SECONDS, default 600]
# Needs clang with its runtime (Debian: apt-get install clang libclang-rt-14-dev). New inputs stay in a temporary folder; a crash
# is left beside it and ends with an error.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/tern-fuzz.XXXXXX")
clang++ -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -I"$here/../../csrc" \
    "$here/fuzz_translation.cpp" "$here"/../../csrc/format/{gguf_header,hadamard,ternary_types}.cpp "$here"/../../csrc/model/*.cpp \
    -o "$work/fuzz"
mkdir "$work/found"
cd "$work"
./fuzz "$work/found" "$here/corpus" -max_total_time="${1:-600}" -max_len=4096 -malloc_limit_mb=64 -rss_limit_mb=1024 -dict="$here/gguf.dict" -print_final_stats=1
echo "inputs found: $work/found (merge the interesting ones: ./fuzz -merge=1 $here/corpus $work/found)"

#!/usr/bin/env bash
# What a llama.cpp built for a GPU makes of ternary models, as one dated table to send in: see gpu_check.py.
#
#     tools/gpu_check.sh ~/llama.cpp/build/bin [MODEL.gguf]...
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$here/../.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" "$here/gpu_check.py" "$@"
